"""Load an exit bundle and trust none of it: hashes, digests, shapes. Nothing is unpickled; errors name the file."""

from __future__ import annotations

import errno
import hashlib
import io
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import safetensors.numpy

from offramp_core.bundle import (
    BACKBONE_FILE,
    MANIFEST_FILE,
    MAX_RAMP_ID,
    PROBE_FILE,
    PROFILE_FILE,
    RAMP_ID,
    RAMPS_FILE,
    RECORDS_FILE,
    SCHEMA_VERSION,
    TASK_SCHEMA_VERSION,
    TOKENIZER_FILE,
    Manifest,
    Profile,
    RampSpec,
    TensorSpec,
    backbone_digest,
    ramp_set_digest,
    side_model_file,
)
from offramp_core.columns import chain
from offramp_core.errors import InvalidArgumentError, InvalidBundleError, InvalidRecordsError
from offramp_core.npz import read_npz
from offramp_core.precision import EXACT, MOST_PRECISIONS, Precision, check_precision
from offramp_core.protocol import RampInfo
from offramp_core.records import records_from_arrays
from offramp_core.task import Task
from offramp_core.uncertainty import TABLE_SIZE
from offramp_worker.bundle.graph import feature_shapes, feature_size, input_name, output_name
from offramp_worker.bundle.heads import KINDS, HeadNodes, head_nodes, parameter_shapes
from offramp_worker.bundle.profile import parse_profile
from offramp_worker.bundle.tensors import external_tensors
from offramp_worker.devices import DEVICES, Device
from offramp_worker.documents import parse_document
from offramp_worker.preprocess.encoded import Encoded, load_encoded

Array = npt.NDArray[Any]
MEMBERS = (BACKBONE_FILE, RAMPS_FILE, RECORDS_FILE, PROFILE_FILE, PROBE_FILE)
MAX_MANIFEST_BYTES = 16 * 1024 * 1024  # thousands of times a usual one; it is parsed before anything of it is known
MAX_CAUSE = 500  # characters of what a library says; names out of a model stand in it
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "FP16": np.dtype("<f2"),
    "BOOL": np.dtype("?"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle.

    ``columns`` are the ramps and the final columns of other precisions, as records have them; ``heads`` and
    ``quantiles`` [C, TABLE_SIZE] follow them. A column without a head is a model at the input, in ``side_models`` by
    column, or a final column. ``backbones`` has the graph of every precision, ``shapes`` the shape without batch axis
    of every tensor a head reads.
    """

    path: Path
    manifest: Manifest
    columns: tuple[RampInfo, ...]
    backbones: dict[Precision, onnx.ModelProto]
    side_models: dict[int, onnx.ModelProto]
    heads: tuple[HeadNodes | None, ...]
    quantiles: npt.NDArray[np.float64]
    shapes: dict[str, tuple[int, ...]]
    profile: Profile
    probe_x: Array
    probe_logits: Array
    task: Task
    encoded: Encoded | None = None

    @property
    def asks_for(self) -> TensorSpec:
        """The one input as clients send it; ``encoded`` makes the model's of it where they differ."""
        return self.manifest.asks_for[0]

    @property
    def backbone(self) -> onnx.ModelProto:
        """The model as the user gave it."""
        return self.backbones[EXACT]

    @property
    def ramps(self) -> tuple[RampSpec, ...]:
        return self.manifest.ramps

    @property
    def device(self) -> Device:
        """Where its profile was measured, and where it is served."""
        return next(device for device in DEVICES.values() if device.executor == self.profile.executor)

    @property
    def input_dtype(self) -> np.dtype[Any]:
        return NUMPY_TYPES[self.manifest.inputs[0].datatype]


def row_bytes(spec: TensorSpec) -> int:
    """Bytes of one row of an input, the longest one where they differ."""
    sizes = [size if size > 0 else spec.longest for size in spec.shape]
    return max(1, math.prod(sizes) * NUMPY_TYPES[spec.datatype].itemsize)


def load_bundle(path: Path, *, expected_digest: str | None = None) -> Bundle:
    """Read and check the bundle in folder ``path``.

    Parameters
    ----------
    expected_digest : str, optional
        The backbone digest it must have.

    Raises
    ------
    InvalidBundleError
        A file is missing, has another hash than the manifest says, or does not fit the others; the message names it.
    """
    manifest = _read_manifest(path / MANIFEST_FILE)
    if expected_digest is not None and manifest.backbone_digest != expected_digest:
        raise InvalidBundleError.foreign(
            f"{MANIFEST_FILE}: backbone_digest is {manifest.backbone_digest}, and this worker must serve "
            f"{expected_digest}"
        )
    files: dict[Precision, str] = {spec.name: spec.file for spec in manifest.backbones}
    columns = manifest.columns
    side_files = {j: side_model_file(column.id) for j, column in enumerate(columns) if column.head == "model"}
    texts = (TOKENIZER_FILE,) if manifest.preprocess is not None and manifest.preprocess.text is not None else ()
    named = (*MEMBERS, *files.values(), *side_files.values(), *texts)
    content = {name: _read_member(path, name, manifest) for name in named}
    _check_digests(manifest)
    backbones = {precision: _parse_model(content[file], manifest, file) for precision, file in files.items()}
    probe_x, probe_logits = _parse_probe(content[PROBE_FILE], manifest)
    shapes = _feature_shapes(backbones, manifest, probe_x)
    _check_records(content[RECORDS_FILE], manifest)
    heads, quantiles = _parse_heads(content[RAMPS_FILE], manifest, shapes)
    return Bundle(
        path=path,
        manifest=manifest,
        columns=columns,
        backbones=backbones,
        side_models={j: _parse_model(content[file], manifest, file) for j, file in side_files.items()},
        heads=heads,
        quantiles=quantiles,
        shapes=shapes,
        profile=_parse_profile(content[PROFILE_FILE], manifest),
        probe_x=probe_x,
        probe_logits=probe_logits,
        task=manifest.does,
        encoded=_encoded(manifest, content.get(TOKENIZER_FILE, b"")),
    )


def _encoded(manifest: Manifest, tokenizer: bytes) -> Encoded | None:
    if manifest.preprocess is None:
        return None
    spec = manifest.inputs[0]
    return load_encoded(manifest.preprocess, spec, NUMPY_TYPES[spec.datatype], tokenizer=tokenizer)


def check_files(path: Path) -> Manifest:
    """The manifest of the bundle in folder ``path``, once every file it lists has the hash it says. Nothing of them is
    parsed.

    Raises
    ------
    InvalidBundleError
        A file is missing or has another hash; the message names it.
    """
    manifest = _read_manifest(path / MANIFEST_FILE)
    if missing := sorted(set(MEMBERS) - set(manifest.files)):
        raise InvalidBundleError(f"{MANIFEST_FILE}: files does not list {', '.join(missing)}")
    for name, digest in manifest.files.items():
        if "/" in name or name in (".", ".."):
            raise InvalidBundleError(f"{MANIFEST_FILE}: files names {name!r}; a bundle is one flat folder")
        try:
            with plain_file(path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidBundleError(f"{name}: cannot be read ({error.strerror})") from error
        if found != digest:
            raise InvalidBundleError(f"{name}: sha256 is {found}; {MANIFEST_FILE} says {digest}")
    _check_digests(manifest)
    return manifest


def with_heads(bundle: Bundle, raw: bytes) -> Bundle:
    """The same model with the heads and quantile tables of another ``ramps.safetensors``, checked like the bundle's
    own.

    Places, kinds of heads and what they cost stay, so columns and profile hold for both; the digest is the new set's.

    Raises
    ------
    InvalidBundleError
        The content is no set of heads for this model.
    """
    files = {**bundle.manifest.files, RAMPS_FILE: hashlib.sha256(raw).hexdigest()}
    digest = ramp_set_digest(bundle.manifest.ramps, files, bundle.manifest.precisions, bundle.manifest.task)
    manifest = replace(bundle.manifest, ramp_set_digest=digest, files=files)
    heads, quantiles = _parse_heads(raw, manifest, bundle.shapes)
    return replace(bundle, manifest=manifest, heads=heads, quantiles=quantiles)


def _parse_heads(
    raw: bytes, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[HeadNodes | None, ...], npt.NDArray[np.float64]]:
    """Head and quantile table [C, TABLE_SIZE] of every column."""
    task, tensors = manifest.does, _parse_ramp_tensors(raw, manifest)
    ramps = {ramp.id: ramp for ramp in manifest.ramps if ramp.head != "model"}
    heads = tuple(_head(ramps[c.id], tensors, shapes, task=task) if c.id in ramps else None for c in manifest.columns)
    return heads, np.array([_quantiles(c.id, tensors) for c in manifest.columns]).reshape(-1, TABLE_SIZE)


def _read_manifest(file: Path) -> Manifest:
    try:
        if (size := file.stat().st_size) > MAX_MANIFEST_BYTES:
            raise InvalidBundleError(f"{MANIFEST_FILE}: has {size} bytes; at most {MAX_MANIFEST_BYTES} are read")
        raw = plain_file(file).read_bytes()
    except OSError as error:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: cannot be read ({error.strerror}); is {file.parent} a bundle?"
        ) from error
    try:
        manifest = parse_document(raw, Manifest)
    except ValueError as error:
        raise InvalidBundleError(f"{MANIFEST_FILE}: {error}") from error
    wanted = SCHEMA_VERSION if manifest.task is None else TASK_SCHEMA_VERSION
    if manifest.schema_version != wanted:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: schema_version is {manifest.schema_version}; this worker reads {wanted} of such a bundle"
        )
    _check_manifest(manifest)
    return manifest


def plain_file(file: Path) -> Path:
    """The file, once it is sure that it ends: a device, or a pipe that nobody writes to, would be read for ever."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def _check_manifest(manifest: Manifest) -> None:
    if len(manifest.inputs) != 1 or manifest.inputs[0].datatype not in NUMPY_TYPES:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: inputs is {manifest.inputs}; one tensor of a numeric type is supported"
        )
    if not manifest.name or "/" in manifest.name or manifest.n_classes < (2 if manifest.task is None else 1):
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: name {manifest.name!r} (no slash) or n_classes {manifest.n_classes} (>= 2) is out of "
            "range"
        )
    _check_task(manifest)
    if manifest.scale is not None and not 0 < manifest.scale.total < math.inf:
        raise InvalidBundleError(f"{MANIFEST_FILE}: scale.total is {manifest.scale.total}; it must be a number above 0")
    _check_precisions(manifest)
    for ramp in manifest.ramps:
        _check_place(ramp, manifest)
    columns, ids = manifest.columns, [ramp.id for ramp in manifest.ramps]
    place = ("", *(spec.name for spec in manifest.backbones)).index
    order = [(place(manifest.precision_of(ramp)), ramp.position, ramp.head) for ramp in manifest.ramps]
    if order != sorted(order):
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: ramps {ids} must be sorted: those at the input, then of "
            f"{[spec.name for spec in manifest.backbones]}; of each by position and head"
        )
    if len({c.id for c in columns}) != len(columns):
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: ramps {ids} must be unique, and none may be called like a final column"
        )
    for ramp in manifest.ramps:
        if ramp.head not in (*KINDS, "model"):
            known = f"{', '.join(KINDS)} and model"
            raise InvalidBundleError(
                f"{MANIFEST_FILE}: ramp {ramp.id!r} has head {ramp.head!r}; this worker knows {known}"
            )
        if (
            ramp.channels < 1
            or (ramp.head in KINDS and KINDS[ramp.head].needs_hidden and ramp.hidden < 1)
            or not 0 <= ramp.depth <= 1
        ):
            raise InvalidBundleError(f"{MANIFEST_FILE}: ramp {ramp.id!r} has channels, hidden or depth out of range")


def _check_task(manifest: Manifest) -> None:
    try:
        task = manifest.does
    except InvalidArgumentError as error:
        raise InvalidBundleError(f"{MANIFEST_FILE}: task: {error}") from error
    whole = [p.name for p in manifest.precisions] + [r.id for r in manifest.ramps if r.head in ("model", "own")]
    if manifest.task is not None and (whole or len(manifest.outputs) != 1):
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: a bundle that answers with {task.title} has one output and trained heads alone; it has "
            f"{len(manifest.outputs)} and {whole}"
        )


def _check_precisions(manifest: Manifest) -> None:
    names = [p.name for p in manifest.precisions]
    for name in names:
        try:
            check_precision(name)
        except InvalidArgumentError as error:
            raise InvalidBundleError(f"{MANIFEST_FILE}: precisions: {error}") from error
    if EXACT in names or len(set(names)) != len(names) or len(names) >= MOST_PRECISIONS:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: precisions {names} must differ from each other and from {EXACT}, and be fewer than "
            f"{MOST_PRECISIONS}"
        )
    files = [p.file for p in manifest.precisions]
    if len({*files, *MEMBERS}) != len(files) + len(MEMBERS) or any(Path(f).name != f or not f for f in files):
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: precisions have the files {files}; each needs one of its own in the bundle"
        )


def _check_place(ramp: RampSpec, manifest: Manifest) -> None:
    """A ramp's name, and the graph it belongs to."""
    if not RAMP_ID.match(ramp.id) or len(ramp.id) > MAX_RAMP_ID:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: ramp id {ramp.id!r} must be lower-case letters, digits, '-' and '.', like r04-grid or "
            "int8/r04-grid"
        )
    at_input = ramp.tensor == manifest.inputs[0].name
    if ramp.precision not in ("", *(spec.name for spec in manifest.backbones)) or (at_input and ramp.precision):
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: ramp {ramp.id!r} is of precision {ramp.precision!r}; it must be in the bundle, and "
            "empty at the input"
        )
    if ramp.head == "model" and (not at_input or "/" in ramp.id):
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: ramp {ramp.id!r} is a model; it must read the input, and its id have no slash"
        )


def _read_member(path: Path, name: str, manifest: Manifest) -> bytes:
    try:
        raw = plain_file(path / name).read_bytes()
    except OSError as error:
        raise InvalidBundleError(
            f"{name}: cannot be read ({error.strerror}); the bundle in {path} is incomplete"
        ) from error
    expected = manifest.files.get(name)
    if hashlib.sha256(raw).hexdigest() != expected:
        raise InvalidBundleError(
            f"{name}: its SHA-256 is not the one in {MANIFEST_FILE}; the bundle is damaged or tampered with"
        )
    return raw


def _check_digests(manifest: Manifest) -> None:
    try:
        digest = backbone_digest(manifest.files, manifest.preprocess)
    except KeyError as error:
        raise InvalidBundleError(f"{MANIFEST_FILE}: files does not list {error}, which its texts need") from error
    if manifest.backbone_digest != digest:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: backbone_digest is not the digest of {BACKBONE_FILE} and of the steps before it"
        )
    try:
        digest = ramp_set_digest(manifest.ramps, manifest.files, manifest.precisions, manifest.task)
    except KeyError as error:
        raise InvalidBundleError(f"{MANIFEST_FILE}: files does not list {error}, which its ramps need") from error
    if manifest.ramp_set_digest != digest:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: ramp_set_digest is not the digest of its ramps, {RAMPS_FILE} and the other graphs"
        )


def _parse_model(raw: bytes, manifest: Manifest, file: str) -> onnx.ModelProto:
    """A graph of the bundle; all of them take the same input."""
    try:
        model = onnx.load_model_from_string(raw)
    except Exception as error:  # protobuf's own type, which has no stubs
        raise InvalidBundleError(f"{file}: is no ONNX model ({error})") from error
    for place, _ in external_tensors(model):
        # An external location is a path of the author's choice, outside of what the manifest hashes.
        raise InvalidBundleError(f"{file}: keeps weights in other files ({place}); export it with the weights inside")
    if input_name(model, file) != manifest.inputs[0].name:
        raise InvalidBundleError(
            f"{file}: input is {input_name(model, file)!r}; {MANIFEST_FILE} says {manifest.inputs[0].name!r}"
        )
    output_name(model, file)
    return model


def _load_npz(raw: bytes, name: str) -> dict[str, Array]:
    try:
        return read_npz(io.BytesIO(raw))
    except (ValueError, OSError) as error:
        raise InvalidBundleError(f"{name}: is no npz archive of plain arrays ({error})") from error


def _parse_probe(raw: bytes, manifest: Manifest) -> tuple[Array, Array]:
    arrays = _load_npz(raw, PROBE_FILE)
    if {"x", "logits"} - set(arrays):
        raise InvalidBundleError(f"{PROBE_FILE}: has {sorted(arrays)}; it needs x and logits")
    x, logits = arrays["x"], arrays["logits"]
    spec = manifest.inputs[0]
    if len(x) == 0 or not spec.fits(x.shape[1:]) or x.dtype != NUMPY_TYPES[spec.datatype]:
        raise InvalidBundleError(
            f"{PROBE_FILE}: x is {x.dtype} {x.shape}; the input is {spec.datatype} [n, {spec.shape}], n >= 1"
        )
    if logits.shape != (len(x), manifest.n_classes) or not np.isfinite(logits).all():
        raise InvalidBundleError(
            f"{PROBE_FILE}: logits has shape {logits.shape}; it needs {(len(x), manifest.n_classes)}, all finite"
        )
    return x, logits


def _parse_ramp_tensors(raw: bytes, manifest: Manifest) -> dict[str, Array]:
    try:
        tensors = safetensors.numpy.load(raw)
    except Exception as error:  # safetensors raises a type of its own per failure; all mean the same here
        raise InvalidBundleError(f"{RAMPS_FILE}: is no safetensors file ({error})") from error
    expected: dict[str, tuple[tuple[int, ...], type[np.floating[Any]]]] = {
        f"{column.id}/quantiles": ((TABLE_SIZE,), np.float64) for column in manifest.columns
    }
    for ramp in manifest.ramps:
        if ramp.head != "model":
            for name, shape in parameter_shapes(ramp, n_classes=manifest.does.head_width).items():
                expected[_tensor_name(ramp.id, name, tensors)] = (shape, np.float32)
    if set(tensors) != set(expected):
        odd = sorted(set(tensors) ^ set(expected))[0]
        raise InvalidBundleError(f"{RAMPS_FILE}: tensor {odd!r} is {'unknown' if odd in tensors else 'missing'}")
    for name, (shape, dtype) in expected.items():
        value = tensors[name]
        if value.shape != shape or value.dtype != dtype or not np.isfinite(value).all():
            raise InvalidBundleError(
                f"{RAMPS_FILE}: {name} is {value.dtype} {value.shape}; it must be finite {np.dtype(dtype)} {shape}"
            )
    return dict(tensors)


def _tensor_name(ramp_id: str, parameter: str, tensors: Mapping[str, Array]) -> str:
    """Where a parameter stands: a head of another precision may use the weights of its namesake at fp32."""
    own, _, shared = f"{ramp_id}/{parameter}", *ramp_id.partition("/")[1:]
    return f"{shared}/{parameter}" if shared and own not in tensors else own


def _quantiles(column_id: str, tensors: dict[str, Array]) -> npt.NDArray[np.float64]:
    table: npt.NDArray[np.float64] = tensors[f"{column_id}/quantiles"]
    if (np.diff(table) < 0).any():
        raise InvalidBundleError(f"{RAMPS_FILE}: {column_id}/quantiles decreases; a quantile table never does")
    return table


def _feature_shapes(
    models: Mapping[Precision, onnx.ModelProto], manifest: Manifest, probe_x: Array
) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that heads read; a tensor that two graphs have must have one shape."""
    shapes: dict[str, tuple[int, ...]] = {manifest.inputs[0].name: probe_x.shape[1:]}
    for precision, model in models.items():
        file = manifest.file_of(precision)
        read = [ramp.tensor for ramp in manifest.ramps if manifest.precision_of(ramp) == precision]
        try:
            found = feature_shapes(model, read, probe_x[:1], file)
        except InvalidBundleError:
            raise
        except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
            raise InvalidBundleError(f"{file}: does not run: {_first_line(error)}") from error
        for name, shape in found.items():
            if shapes.setdefault(name, shape) != shape:
                raise InvalidBundleError(f"{file}: tensor {name!r} is {shape}; in another graph it is {shapes[name]}")
    for ramp in manifest.ramps:
        if ramp.head == "model":
            continue
        shape = shapes[ramp.tensor]
        if not 1 <= len(shape) <= 3 or feature_size(shape)[0] != ramp.channels:
            raise InvalidBundleError(
                f"{MANIFEST_FILE}: ramp {ramp.id!r} expects {ramp.channels} channels; tensor {ramp.tensor!r} is {shape}"
            )
    return shapes


def _head(
    ramp: RampSpec, tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], *, task: Task
) -> HeadNodes:
    names = parameter_shapes(ramp, n_classes=task.head_width)
    own = {name: tensors[_tensor_name(ramp.id, name, tensors)] for name in names}
    _, height, width = feature_size(shapes[ramp.tensor])
    try:
        return head_nodes(ramp, own, height=height, width=width, task=task)
    except ValueError as error:
        raise InvalidBundleError(f"{RAMPS_FILE}: {error}") from error


def _check_records(raw: bytes, manifest: Manifest) -> None:
    try:
        records = records_from_arrays(_load_npz(raw, RECORDS_FILE))
    except InvalidRecordsError as error:
        raise InvalidBundleError(f"{RECORDS_FILE}: {error}") from error
    of_columns = [column.precision for column in manifest.columns]
    for precision in (spec.name for spec in manifest.backbones):
        recorded = records.at(precision) if precision in (EXACT, *records.others) else None
        ids = tuple(manifest.columns[j].id for j in chain(of_columns, precision))
        if recorded is None or recorded.n_ramps != len(ids) or recorded.ramp_ids not in ((), ids):
            raise InvalidBundleError(
                f"{RECORDS_FILE}: does not have the {precision} ramps of {MANIFEST_FILE}, which are {list(ids)}"
            )


def _parse_profile(raw: bytes, manifest: Manifest) -> Profile:
    profile = parse_profile(raw, name=PROFILE_FILE)
    if profile.executor not in {device.executor for device in DEVICES.values()}:
        raise InvalidBundleError(
            f"{PROFILE_FILE}: executor is {profile.executor!r}; it must be one of "
            f"{', '.join(d.executor for d in DEVICES.values())}"
        )
    names = {p.name for p in manifest.precisions}
    if any(set(batch.precisions) != names for batch in profile.batches):
        raise InvalidBundleError(f"{PROFILE_FILE}: does not price the precisions {sorted(names)} at every batch size")
    of_columns = [column.precision for column in manifest.columns]
    for precision in (EXACT, *names):
        n_ramps = len(chain(of_columns, precision))
        for batch in profile.of(precision).batches:
            if len(batch.segment_seconds) != n_ramps + 1 or len(batch.ramp_seconds) != n_ramps:
                raise InvalidBundleError(
                    f"{PROFILE_FILE}: batch size {batch.batch_size} does not price {n_ramps} ramps"
                )
    return profile


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:MAX_CAUSE]
