"""Arrays from npz files; nothing in them is unpickled."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy.typing as npt

from offramp_core import npz
from offramp_core.errors import InvalidRecordsError


def read_npz(path: Path, *, only: frozenset[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The plain arrays of an npz file.

    Raises
    ------
    InvalidRecordsError
        It cannot be read, or holds anything but plain arrays.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise InvalidRecordsError(f"{path} is not an .npz file")
    try:
        with path.open("rb") as file:
            return npz.read_npz(file, names=only)
    except OSError as error:
        raise InvalidRecordsError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRecordsError(f"{path} does not hold plain arrays: {error}") from error
