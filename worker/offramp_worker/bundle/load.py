"""Load an exit bundle and trust none of it: hashes, digests, shapes. Nothing is unpickled; errors name the file."""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import safetensors.numpy

from offramp_core.bundle import (
    BACKBONE_FILE,
    MANIFEST_FILE,
    PROBE_FILE,
    PROFILE_FILE,
    RAMPS_FILE,
    RECORDS_FILE,
    SCHEMA_VERSION,
    Manifest,
    Profile,
    RampSpec,
    ramp_set_digest,
)
from offramp_core.errors import InvalidBundleError, InvalidRecordsError
from offramp_core.records import records_from_arrays
from offramp_core.uncertainty import TABLE_SIZE
from offramp_worker.bundle.graph import feature_shapes, input_name, output_name
from offramp_worker.bundle.heads import HeadNodes, head_nodes, parameter_shapes

Array = npt.NDArray[Any]
MEMBERS = (BACKBONE_FILE, RAMPS_FILE, RECORDS_FILE, PROFILE_FILE, PROBE_FILE)
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "FP16": np.dtype("<f2"), "BOOL": np.dtype("?"),
    "INT8": np.dtype("<i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle.

    ``heads`` and ``quantiles`` [R, TABLE_SIZE] follow ``manifest.ramps``, which are in network order. ``shapes`` has the shape
    without batch axis of every tensor a ramp reads.
    """

    path: Path
    manifest: Manifest
    backbone: onnx.ModelProto
    heads: tuple[HeadNodes, ...]
    quantiles: npt.NDArray[np.float64]
    shapes: dict[str, tuple[int, ...]]
    profile: Profile
    probe_x: Array
    probe_logits: Array

    @property
    def ramps(self) -> tuple[RampSpec, ...]:
        return self.manifest.ramps

    @property
    def input_dtype(self) -> np.dtype[Any]:
        return NUMPY_TYPES[self.manifest.inputs[0].datatype]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.manifest.inputs[0].shape


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
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: backbone_digest is {manifest.backbone_digest}; this worker must serve {expected_digest}"
        )
    content = {name: _read_member(path, name, manifest) for name in MEMBERS}
    _check_digests(manifest)
    backbone = _parse_backbone(content[BACKBONE_FILE], manifest)
    probe_x, probe_logits = _parse_probe(content[PROBE_FILE], manifest)
    tensors = _parse_ramp_tensors(content[RAMPS_FILE], manifest)
    shapes = _feature_shapes(backbone, manifest, probe_x)
    _check_records(content[RECORDS_FILE], manifest)
    return Bundle(
        path=path,
        manifest=manifest,
        backbone=backbone,
        heads=tuple(_head(ramp, tensors, shapes) for ramp in manifest.ramps),
        quantiles=np.array([_quantiles(ramp, tensors) for ramp in manifest.ramps]).reshape(-1, TABLE_SIZE),
        shapes=shapes,
        profile=_parse_profile(content[PROFILE_FILE], manifest),
        probe_x=probe_x,
        probe_logits=probe_logits,
    )


def _read_manifest(file: Path) -> Manifest:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: cannot be read ({error.strerror}); is {file.parent} a bundle?"
        ) from error
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.DecodeError as error:
        raise InvalidBundleError(f"{MANIFEST_FILE}: {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: schema_version is {manifest.schema_version}; this worker reads {SCHEMA_VERSION}"
        )
    _check_manifest(manifest)
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    if len(manifest.inputs) != 1 or manifest.inputs[0].datatype not in NUMPY_TYPES:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: inputs is {manifest.inputs}; one tensor of a numeric type is supported"
        )
    if not manifest.name or "/" in manifest.name or manifest.n_classes < 2:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: name {manifest.name!r} (no slash) or n_classes {manifest.n_classes} (>= 2) is out of range"
        )
    order = [(ramp.position, ramp.head) for ramp in manifest.ramps]
    ids = [ramp.id for ramp in manifest.ramps]
    if order != sorted(order) or len(set(ids)) != len(ids):
        raise InvalidBundleError(f"{MANIFEST_FILE}: ramps {ids} must be unique and sorted by position and head")
    for ramp in manifest.ramps:
        if ramp.channels < 1 or (ramp.head == "grid-mlp" and ramp.hidden < 1) or not 0 <= ramp.depth <= 1:
            raise InvalidBundleError(f"{MANIFEST_FILE}: ramp {ramp.id!r} has channels, hidden or depth out of range")


def _read_member(path: Path, name: str, manifest: Manifest) -> bytes:
    try:
        raw = (path / name).read_bytes()
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
    if manifest.backbone_digest != "sha256:" + manifest.files[BACKBONE_FILE]:
        raise InvalidBundleError(f"{MANIFEST_FILE}: backbone_digest is not the digest of {BACKBONE_FILE}")
    if manifest.ramp_set_digest != ramp_set_digest(manifest.ramps, manifest.files, manifest.precisions):
        raise InvalidBundleError(f"{MANIFEST_FILE}: ramp_set_digest is not the digest of its ramps and {RAMPS_FILE}")


def _parse_backbone(raw: bytes, manifest: Manifest) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(raw)
    except Exception as error:  # protobuf's own type, which has no stubs
        raise InvalidBundleError(f"{BACKBONE_FILE}: is no ONNX model ({error})") from error
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        # An external location is a path of the author's choice, outside of what the manifest hashes.
        raise InvalidBundleError(f"{BACKBONE_FILE}: keeps weights in other files; export it with the weights inside")
    if input_name(model) != manifest.inputs[0].name:
        raise InvalidBundleError(
            f"{BACKBONE_FILE}: input is {input_name(model)!r}; {MANIFEST_FILE} says {manifest.inputs[0].name!r}"
        )
    output_name(model)
    return model


def _load_npz(raw: bytes, name: str) -> dict[str, Array]:
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError) as error:
        raise InvalidBundleError(f"{name}: is no npz archive of plain arrays ({error})") from error


def _parse_probe(raw: bytes, manifest: Manifest) -> tuple[Array, Array]:
    arrays = _load_npz(raw, PROBE_FILE)
    if {"x", "logits"} - set(arrays):
        raise InvalidBundleError(f"{PROBE_FILE}: has {sorted(arrays)}; it needs x and logits")
    x, logits = arrays["x"], arrays["logits"]
    spec = manifest.inputs[0]
    if len(x) == 0 or x.shape[1:] != spec.shape or x.dtype != NUMPY_TYPES[spec.datatype]:
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
        f"{ramp.id}/quantiles": ((TABLE_SIZE,), np.float64) for ramp in manifest.ramps
    }
    for ramp in manifest.ramps:
        for name, shape in parameter_shapes(ramp, n_classes=manifest.n_classes).items():
            expected[f"{ramp.id}/{name}"] = (shape, np.float32)
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


def _quantiles(ramp: RampSpec, tensors: dict[str, Array]) -> npt.NDArray[np.float64]:
    table: npt.NDArray[np.float64] = tensors[f"{ramp.id}/quantiles"]
    if (np.diff(table) < 0).any():
        raise InvalidBundleError(f"{RAMPS_FILE}: {ramp.id}/quantiles decreases; a quantile table never does")
    return table


def _feature_shapes(model: onnx.ModelProto, manifest: Manifest, probe_x: Array) -> dict[str, tuple[int, ...]]:
    try:
        shapes = feature_shapes(model, (ramp.tensor for ramp in manifest.ramps), probe_x[:1])
    except InvalidBundleError:
        raise
    except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
        raise InvalidBundleError(f"{BACKBONE_FILE}: does not run: {_first_line(error)}") from error
    for ramp in manifest.ramps:
        shape = shapes[ramp.tensor]
        if len(shape) != 3 or shape[0] != ramp.channels:
            raise InvalidBundleError(
                f"{MANIFEST_FILE}: ramp {ramp.id!r} expects {ramp.channels} channels; tensor {ramp.tensor!r} is {shape}"
            )
    return shapes


def _head(ramp: RampSpec, tensors: dict[str, Array], shapes: dict[str, tuple[int, ...]]) -> HeadNodes:
    own = {name.rpartition("/")[2]: value for name, value in tensors.items() if name.rpartition("/")[0] == ramp.id}
    _, height, width = shapes[ramp.tensor]
    try:
        return head_nodes(ramp, own, height=height, width=width)
    except ValueError as error:
        raise InvalidBundleError(f"{RAMPS_FILE}: {error}") from error


def _check_records(raw: bytes, manifest: Manifest) -> None:
    try:
        records = records_from_arrays(_load_npz(raw, RECORDS_FILE))
    except InvalidRecordsError as error:
        raise InvalidBundleError(f"{RECORDS_FILE}: {error}") from error
    if records.n_ramps != len(manifest.ramps):
        raise InvalidBundleError(
            f"{RECORDS_FILE}: has {records.n_ramps} ramps; {MANIFEST_FILE} has {len(manifest.ramps)}"
        )


def _parse_profile(raw: bytes, manifest: Manifest) -> Profile:
    try:
        profile = msgspec.json.decode(raw, type=Profile)
    except msgspec.DecodeError as error:
        raise InvalidBundleError(f"{PROFILE_FILE}: {error}") from error
    sizes = [batch.batch_size for batch in profile.batches]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise InvalidBundleError(f"{PROFILE_FILE}: batch sizes are {sizes}; they must rise, the first at least 1")
    n = len(manifest.ramps)
    for batch in profile.batches:
        seconds = (batch.exact_seconds, batch.regroup_seconds, *batch.segment_seconds, *batch.ramp_seconds)
        if len(batch.segment_seconds) != n + 1 or len(batch.ramp_seconds) != n:
            raise InvalidBundleError(f"{PROFILE_FILE}: batch size {batch.batch_size} does not price {n} ramps")
        if batch.exact_seconds <= 0 or not all(math.isfinite(s) and s >= 0 for s in seconds):
            raise InvalidBundleError(
                f"{PROFILE_FILE}: batch size {batch.batch_size} has seconds that are not finite and >= 0"
            )
    return profile


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
