"""Read records files."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidRecordsError
from offramp_core.records import Records, records_from_arrays

ARRAYS = frozenset(
    {"uncertainty", "prediction", "final", "reference", "segment_seconds", "ramp_seconds", "slice", "time", "stream"}
    | {"batch_size", "regroup_seconds"}
)


def load_records(path: Path, *, batch_size: int | None = None) -> Records:
    """Read a records file; nothing in it is unpickled.

    ``batch_size`` is the measured size that prices the exits, by default the smallest.

    Raises
    ------
    InvalidRecordsError
        It cannot be read, is no npz, or breaks the contract of records.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise InvalidRecordsError(f"{path} is not an .npz file")
    return records_from_arrays(read_npz(path, only=ARRAYS), batch_size=batch_size)


def read_npz(path: Path, *, only: frozenset[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The plain arrays of an npz file.

    Raises
    ------
    InvalidRecordsError
        It cannot be read, or holds anything but plain arrays.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if only is None or name in only}
    except OSError as error:
        raise InvalidRecordsError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError) as error:
        raise InvalidRecordsError(f"{path} does not hold plain arrays: {error}") from error
