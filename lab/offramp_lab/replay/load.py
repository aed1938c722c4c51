"""Read records files."""

from __future__ import annotations

from pathlib import Path

from offramp_cli.npz import read_npz
from offramp_core.plan import PRECISIONS
from offramp_core.records import Records, records_from_arrays

ARRAYS = frozenset(
    {"uncertainty", "prediction", "final", "reference", "segment_seconds", "ramp_seconds", "slice", "time", "stream"}
    | {"batch_size", "regroup_seconds", "ramp_id", "ramp_precision"}
    | {f"{p}_{name}" for p in PRECISIONS for name in ("segment_seconds", "ramp_seconds")}
)


def load_records(path: Path, *, batch_size: int | None = None) -> Records:
    """Read a records file; nothing in it is unpickled.

    ``batch_size`` is the measured size that prices the exits, by default the smallest.

    Raises
    ------
    InvalidRecordsError
        It cannot be read, is no npz, or breaks the contract of records.
    """
    return records_from_arrays(read_npz(path, only=ARRAYS), batch_size=batch_size)
