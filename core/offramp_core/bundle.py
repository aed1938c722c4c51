"""The exit bundle: what ``offramp prepare`` writes and a worker loads. No member is ever unpickled.

    manifest.json       this module's :class:`Manifest`, with a SHA-256 of every other file
    backbone.onnx       the model as the user gave it (the reference); its tensors are named
    ramps.safetensors   per ramp ``<id>/<parameter>`` tensors, and ``<id>/quantiles`` (see :mod:`offramp_core.uncertainty`)
    records.npz         bootstrap records (a records file, see :mod:`offramp_core.records`) of inputs that trained no head
    profile.json        this module's :class:`Profile`: seconds per segment, ramp and regrouping, by batch size
    probe.npz           ``x`` [P, ...] and ``logits`` [P, C]: inputs with the reference's outputs; a worker checks itself on them

Two digests name the content. ``backbone_digest`` is the SHA-256 of ``backbone.onnx``: changing it is a model
rollout. ``ramp_set_digest`` is the SHA-256 of the canonical JSON of the ramp specs and the digest of
``ramps.safetensors``: changing it is a canary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from offramp_core.plan import canonical_json

SCHEMA_VERSION = 1
BACKBONE_FILE = "backbone.onnx"
RAMPS_FILE = "ramps.safetensors"
RECORDS_FILE = "records.npz"
PROFILE_FILE = "profile.json"
PROBE_FILE = "probe.npz"
MANIFEST_FILE = "manifest.json"

HeadKind = Literal["pooled-linear", "grid-mlp"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One model input or output, batch axis left out. ``datatype`` is Open Inference Protocol's (FP32, ...)."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RampSpec:
    """One candidate exit.

    ``tensor`` is the backbone's cut tensor that feeds it, ``position`` the index of its place in network order
    (several ramps may share a place), ``depth`` the share of the backbone's time up to it, in [0, 1].
    ``head`` is pooled-linear (global average pooling and one linear layer) or grid-mlp (4x4 average and
    maximum pooling and an MLP with one hidden layer).
    """

    id: str
    tensor: str
    position: int
    depth: float
    head: HeadKind
    channels: int
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle says about itself. ``files`` maps every other file to its SHA-256 (hex)."""

    schema_version: int
    name: str
    backbone_digest: str
    ramp_set_digest: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    n_classes: int
    ramps: tuple[RampSpec, ...]
    files: dict[str, str]
    source: str = ""
    data: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Measured seconds at one batch size, in the units of a records file.

    ``segment_seconds`` has one entry more than there are ramps: entry j is the backbone between ramp j-1 and
    ramp j (0 where they share a place), the last one runs to the output. ``exact_seconds`` is the whole
    backbone in one piece, which is what exits-off runs.
    """

    batch_size: int
    exact_seconds: float
    segment_seconds: tuple[float, ...]
    ramp_seconds: tuple[float, ...]
    regroup_seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Profiles by rising batch size, and the executor they were measured with."""

    executor: str
    threads: int
    batches: tuple[BatchProfile, ...]

    def at(self, batch_size: int) -> BatchProfile:
        """The profile of the smallest measured size that holds ``batch_size``, else of the largest."""
        for batch in self.batches:
            if batch.batch_size >= batch_size:
                return batch
        return self.batches[-1]


def ramp_set_digest(ramps: tuple[RampSpec, ...], ramps_file_sha256: str) -> str:
    """Digest of a ramp set: specs and weights. ``sha256:`` and 64 hex digits."""
    specs = [
        {
            "id": r.id,
            "tensor": r.tensor,
            "position": r.position,
            "head": r.head,
            "channels": r.channels,
            "hidden": r.hidden,
        }
        for r in ramps
    ]
    return "sha256:" + hashlib.sha256(canonical_json([specs, ramps_file_sha256])).hexdigest()


def profile_arrays(profile: Profile) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """The per-batch cost arrays of a records file: ``batch_size`` [B], ``segment_seconds`` [B, R+1], ..."""
    return {
        "batch_size": np.array([b.batch_size for b in profile.batches], dtype=np.float64),
        "segment_seconds": np.array([b.segment_seconds for b in profile.batches], dtype=np.float64),
        "ramp_seconds": np.array([b.ramp_seconds for b in profile.batches], dtype=np.float64),
        "regroup_seconds": np.array([b.regroup_seconds for b in profile.batches], dtype=np.float64),
    }
