"""Read records files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from offramp_cli.npz import read_npz
from offramp_core.columns import other_precisions
from offramp_core.records import Records, records_from_arrays

ARRAYS = frozenset(
    {"uncertainty", "prediction", "final", "reference", "segment_seconds", "ramp_seconds", "slice", "time", "stream"}
    | {"batch_size", "regroup_seconds", "ramp_id", "ramp_precision"}
)


def load_records(path: Path, *, batch_size: int | None = None) -> Records:
    """Read a records file; nothing in it is unpickled.

    ``batch_size`` is the measured size that prices the exits, by default the smallest.

    Raises
    ------
    InvalidRecordsError
        It cannot be read, is no npz, or breaks the contract of records.
    """
    of_columns = read_npz(path, only=frozenset({"ramp_precision"})).get("ramp_precision", np.empty(0, np.str_))
    others = other_precisions([str(name) for name in of_columns.ravel()])
    priced = {f"{precision}_{name}" for precision in others for name in ("segment_seconds", "ramp_seconds")}
    return records_from_arrays(read_npz(path, only=ARRAYS | priced), batch_size=batch_size)
