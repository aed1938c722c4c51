"""Writing an exit bundle: all files into a folder beside the target, then one rename."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core.bundle import (
    BACKBONE_FILE,
    MANIFEST_FILE,
    PROBE_FILE,
    PROFILE_FILE,
    RAMPS_FILE,
    RECORDS_FILE,
    SCHEMA_VERSION,
    TASK_SCHEMA_VERSION,
    TOKENIZER_FILE,
    Manifest,
    PrecisionSpec,
    Profile,
    RampSpec,
    backbone_digest,
    profile_arrays,
    ramp_set_digest,
    side_model_file,
)
from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.prepare.source.data import FloatArray, InputArray
from offramp_worker.prepare.source.preprocessing import StepsBefore
from offramp_worker.prepare.source.sources import Backbone


@dataclass(frozen=True, slots=True)
class BundleContents:
    """Everything a bundle holds.

    ``ramps`` are in the order of records. ``graphs`` maps file names to the graphs of other precisions and of side
    models. ``parameters`` maps the id of a ramp with weights of its own to its tensors, ``quantiles`` the id of each
    column of records to its table; ``records`` are the per-row arrays of a records file; ``probe`` is (x, logits);
    ``data`` goes into the manifest as it is; ``steps`` are those before the model.
    """

    name: str
    source: str
    backbone: Backbone
    ramps: tuple[RampSpec, ...]
    precisions: tuple[PrecisionSpec, ...]
    graphs: Mapping[str, onnx.ModelProto]
    parameters: Mapping[str, Mapping[str, FloatArray]]
    quantiles: Mapping[str, npt.NDArray[np.float64]]
    profile: Profile
    records: Mapping[str, npt.NDArray[Any]]
    probe: tuple[InputArray, FloatArray]
    data: Mapping[str, Any]
    steps: StepsBefore | None = None


def check_target(out: Path) -> None:
    """Refuse a target that is neither free nor an earlier bundle.

    Raises
    ------
    InvalidArgumentError
        ``out`` is a file, or a folder with something else in it.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST_FILE).is_file():
        raise InvalidArgumentError(f"out {out} is a folder that holds no bundle; give a new folder")
    if out.exists() and not out.is_dir():
        raise InvalidArgumentError(f"out {out} is a file; give a new folder")
    if any(parent.exists() and not parent.is_dir() for parent in out.absolute().parents):
        raise InvalidArgumentError(f"out {out} lies inside a file; give a new folder")


def write_bundle(out: Path, contents: BundleContents) -> Manifest:
    """Write a bundle so that ``out`` is complete or untouched at every moment; an earlier bundle there is replaced."""
    with _assembled(out) as work:
        return _write_files(work, contents)


def write_refreshed(
    bundle: Path,
    out: Path,
    manifest: Manifest,
    *,
    tensors: Mapping[str, npt.NDArray[Any]],
    records: Mapping[str, npt.NDArray[Any]],
    data: Mapping[str, Any],
) -> Manifest:
    """Write the bundle in folder ``bundle`` again with other heads and records; everything else is copied.

    Parameters
    ----------
    manifest : Manifest
        That of the bundle, which has been verified.
    tensors : mapping
        What ``ramps.safetensors`` shall hold; ``records`` are all arrays of the records file.
    data : mapping
        Goes into the manifest as it is.
    """
    from safetensors.numpy import save_file

    with _assembled(out) as work:
        save_file(dict(tensors), work / RAMPS_FILE)
        _save_arrays(work / RECORDS_FILE, records)
        files = _with_the_rest(work, bundle, manifest)
        digest = ramp_set_digest(manifest.ramps, files, manifest.precisions, manifest.task)
        refreshed = replace(manifest, ramp_set_digest=digest, files=files, data=dict(data))
        _write_json(work / MANIFEST_FILE, _document(refreshed))
    return refreshed


def write_remeasured(
    bundle: Path, out: Path, manifest: Manifest, *, profile: Profile, records: Mapping[str, npt.NDArray[Any]]
) -> Manifest:
    """Write the bundle in folder ``bundle`` again with another profile, and ``records`` that have its costs; everything
    else is copied, and both digests stay. ``manifest`` is that of the bundle, which has been verified."""
    with _assembled(out) as work:
        _write_json(work / PROFILE_FILE, asdict(profile))
        _save_arrays(work / RECORDS_FILE, records)
        remeasured = replace(manifest, files=_with_the_rest(work, bundle, manifest))
        _write_json(work / MANIFEST_FILE, _document(remeasured))
    return remeasured


def _save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """What ``np.savez`` writes, of arrays with any name: its arguments have some."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _with_the_rest(work: Path, bundle: Path, manifest: Manifest) -> dict[str, str]:
    """Copy what ``work`` has not yet of a bundle. Returns the SHA-256 of all files."""
    models = [side_model_file(ramp.id) for ramp in manifest.ramps if ramp.head == "model"]
    texts = (TOKENIZER_FILE,) if TOKENIZER_FILE in manifest.files else ()
    usual = (BACKBONE_FILE, RAMPS_FILE, PROFILE_FILE, PROBE_FILE)
    every = (*usual, *(p.file for p in manifest.precisions), *models, *texts)
    same = [name for name in every if not (work / name).exists()]
    for name in same:
        shutil.copyfile(bundle / name, work / name)
    files = {path.name: _sha256(path) for path in sorted(work.iterdir())}
    odd = [name for name in same if files[name] != manifest.files.get(name)]
    if odd:
        raise InvalidBundleError(f"{odd[0]}: its SHA-256 is not the one in {MANIFEST_FILE}; the bundle is damaged")
    return files


@contextmanager
def _assembled(out: Path) -> Iterator[Path]:
    """A folder to write a bundle into, which takes the place of ``out`` at the end if nothing was raised."""
    out = out.absolute()
    check_target(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InvalidArgumentError(f"out {out} cannot be made: {error.strerror}") from error
    try:
        yield work
        work.chmod(0o755)  # mkdtemp's 0700 would keep a worker with another user out
        swap(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_files(folder: Path, contents: BundleContents) -> Manifest:
    from safetensors.numpy import save_file

    (folder / BACKBONE_FILE).write_bytes(contents.backbone.model.SerializeToString(deterministic=True))
    for name, graph in contents.graphs.items():
        (folder / name).write_bytes(graph.SerializeToString(deterministic=True))
    tensors: dict[str, npt.NDArray[Any]] = {}
    for ramp, parameters in contents.parameters.items():
        tensors |= {f"{ramp}/{name}": value for name, value in parameters.items()}
    tensors |= {f"{column}/quantiles": table for column, table in contents.quantiles.items()}
    save_file(tensors, folder / RAMPS_FILE)
    records: dict[str, Any] = {**contents.records, **profile_arrays(contents.profile)}
    np.savez(folder / RECORDS_FILE, **records)
    np.savez(folder / PROBE_FILE, x=contents.probe[0], logits=contents.probe[1])
    _write_json(folder / PROFILE_FILE, asdict(contents.profile))
    preprocess = None if contents.steps is None else contents.steps.declared(contents.backbone.input)
    if contents.steps is not None and contents.steps.tokenizer:
        (folder / TOKENIZER_FILE).write_bytes(contents.steps.tokenizer)
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION if contents.backbone.declared is None else TASK_SCHEMA_VERSION,
        name=contents.name,
        backbone_digest=backbone_digest(files, preprocess),
        ramp_set_digest=ramp_set_digest(contents.ramps, files, contents.precisions, contents.backbone.declared),
        inputs=(contents.backbone.input,),
        outputs=(contents.backbone.output,),
        n_classes=contents.backbone.n_classes,
        ramps=contents.ramps,
        files=files,
        source=contents.source,
        data=dict(contents.data),
        precisions=contents.precisions,
        scale=contents.backbone.scale,
        task=contents.backbone.declared,
        preprocess=preprocess,
    )
    _write_json(folder / MANIFEST_FILE, _document(manifest))
    return manifest


def _document(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON; that of a top label has no task, as before there were several, and that of a model whose
    input clients send has no steps before it."""
    document = asdict(manifest)
    for name in ("task", "preprocess"):
        if document[name] is None:
            del document[name]
    return document


def ramp_order(ramps: Sequence[RampSpec]) -> tuple[RampSpec, ...]:
    """The order every array of a bundle follows: position, then head, then width."""
    return tuple(sorted(ramps, key=lambda spec: (spec.position, spec.head, spec.hidden)))


def swap(work: Path, out: Path) -> None:
    """Put ``work`` in the place of ``out``. A folder cannot be renamed over a full one, so the old one steps aside."""
    if not out.exists():
        work.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent)) / "bundle"
    out.rename(aside)
    try:
        work.rename(out)
    except OSError:
        aside.rename(out)
        raise
    finally:
        shutil.rmtree(aside.parent, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
