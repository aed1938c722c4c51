"""The ramp-set store: folders with other heads for a bundle's model, named by their digest. Nothing is unpickled.

    <store>/<64 hex digits of the ramp set's digest>/
        ramps.safetensors   heads and quantile tables, as in a bundle (:mod:`offramp_core.bundle`)
        trained-on.npy      uint64 [n]: :func:`input_digest` of every input that had a part in the training
        set.json            :class:`RampSetInfo`: what it was made from, and the SHA-256 of ``trained-on.npy``

A ramp set has the places, kinds of heads and other graphs of the bundle it was made for: the digest is computed from
these and from ``ramps.safetensors``, so a set that was made for another bundle never has the digest that it is asked
for by.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import RAMPS_FILE, TensorSpec
from offramp_core.errors import InvalidBundleError
from offramp_core.npz import read_npy
from offramp_worker.bundle.lengths import used_length
from offramp_worker.bundle.load import Bundle, with_heads
from offramp_worker.documents import parse_document

TRAINED_ON_FILE = "trained-on.npy"
SET_FILE = "set.json"
MAX_RAMPS_BYTES = 1024 * 1024 * 1024
MAX_SMALL_BYTES = 64 * 1024 * 1024
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class StoreUnreadableError(InvalidBundleError):
    """The store gives no file: it has none, or does not show it yet, or cannot be reached. What is read and wrong is no
    such error."""


@dataclass(frozen=True, slots=True)
class RampSetInfo:
    """What a ramp set says about itself; only ``trained_on_sha256`` decides anything, the rest is for people."""

    backbone_digest: str
    ramp_set_digest: str
    made_from: str
    rows: int
    trained_on_sha256: str


@dataclass(frozen=True, slots=True)
class RampSet:
    """A verified ramp set: the bundle with its heads, and the digests, rising, of the inputs that trained them."""

    bundle: Bundle
    trained_on: npt.NDArray[np.uint64]

    @property
    def digest(self) -> str:
        return self.bundle.manifest.ramp_set_digest

    def has_seen(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which inputs (n,) had a part in the training."""
        if not len(self.trained_on):
            return np.zeros(len(digests), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self.trained_on, digests), len(self.trained_on) - 1)
        found: npt.NDArray[np.bool_] = self.trained_on[at] == digests
        return found


def own_set(bundle: Bundle) -> RampSet:
    """The ramp set that came with the bundle. What trained it was no traffic of this service."""
    return RampSet(bundle, np.empty(0, dtype=np.uint64))


def load_ramp_set(store: Path, digest: str, bundle: Bundle) -> RampSet:
    """Read and check a ramp set for the model of ``bundle``.

    Raises
    ------
    StoreUnreadableError
        The store has no such set, or not yet; the message names the file.
    InvalidBundleError
        Its content has another digest; the message names folder or file.
    """
    folder = set_folder(store, digest)
    raw = _read(folder / RAMPS_FILE, limit=MAX_RAMPS_BYTES)
    refreshed = with_heads(bundle, raw)
    if refreshed.manifest.ramp_set_digest != digest:
        raise InvalidBundleError(
            f"{folder / RAMPS_FILE}: with this bundle it is ramp set {refreshed.manifest.ramp_set_digest}; it is "
            "damaged, or made for another bundle"
        )
    try:
        info = parse_document(_read(folder / SET_FILE, limit=MAX_SMALL_BYTES), RampSetInfo)
    except ValueError as error:
        raise InvalidBundleError(f"{folder / SET_FILE}: {error}") from error
    return RampSet(refreshed, _read_trained_on(folder / TRAINED_ON_FILE, info))


def write_ramp_set(store: Path, content: bytes, trained_on: npt.NDArray[np.uint64], *, bundle: Bundle) -> RampSet:
    """Put a ramp set for the model of ``bundle`` into the store, complete or not at all; the same set twice is one.

    Parameters
    ----------
    content : bytes
        ``ramps.safetensors``.
    trained_on : (n,) uint64
        Digests of all inputs that had a part in the training.
    """
    refreshed = with_heads(bundle, content)
    digest = refreshed.manifest.ramp_set_digest
    trained_on = np.unique(trained_on)
    table = io.BytesIO()
    np.save(table, trained_on, allow_pickle=False)
    info = RampSetInfo(
        bundle.manifest.backbone_digest,
        digest,
        bundle.manifest.ramp_set_digest,
        len(trained_on),
        hashlib.sha256(table.getvalue()).hexdigest(),
    )
    files = {
        RAMPS_FILE: content,
        TRAINED_ON_FILE: table.getvalue(),
        SET_FILE: json.dumps(asdict(info), indent=1, sort_keys=True).encode() + b"\n",
    }
    _write(set_folder(store, digest), files)
    return RampSet(refreshed, trained_on)


def set_folder(store: Path, digest: str) -> Path:
    """Where the store keeps a ramp set.

    Raises
    ------
    InvalidBundleError
        ``digest`` is none, so that it must not become a path.
    """
    match = DIGEST.fullmatch(digest)
    if match is None:
        raise InvalidBundleError(f"ramp set {digest[:80]!r}: a digest is sha256: and 64 hex digits")
    return store / match[1]


def input_digest(row: npt.NDArray[Any], spec: TensorSpec) -> int:
    """64 bits of the BLAKE2b of one input (no batch axis); padding at the end of an input of varying length does not
    count."""
    if spec.varies and spec.pad is not None:
        row = row[: used_length(row[None], pad=spec.pad)]
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8).digest(), "little")


def _read(file: Path, *, limit: int) -> bytes:
    try:
        if (size := file.stat().st_size) > limit:
            raise InvalidBundleError(f"{file}: has {size} bytes; at most {limit} are read")
        return file.read_bytes()
    except OSError as error:
        raise StoreUnreadableError(
            f"{file}: cannot be read ({error.strerror}); the ramp-set store has no such set, or it is not mounted"
        ) from error


def _read_trained_on(file: Path, info: RampSetInfo) -> npt.NDArray[np.uint64]:
    raw = _read(file, limit=MAX_SMALL_BYTES)
    if hashlib.sha256(raw).hexdigest() != info.trained_on_sha256:
        raise InvalidBundleError(f"{file}: its SHA-256 is not the one in {SET_FILE}; the ramp set is damaged")
    try:
        table = read_npy(raw)
    except ValueError as error:
        raise InvalidBundleError(f"{file}: is no array ({error})") from error
    if table.dtype != np.uint64 or table.ndim != 1 or (np.diff(table) == 0).any():
        raise InvalidBundleError(f"{file}: must be distinct uint64 digests [n]")
    return np.sort(table)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """All files in a folder beside the target, then one rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name[:12]}.", dir=folder.parent))
    try:
        for name, content in files.items():
            (work / name).write_bytes(content)
        work.chmod(0o755)  # mkdtemp's 0700 would keep a worker with another user out
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
