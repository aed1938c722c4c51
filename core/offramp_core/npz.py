"""Arrays of NumPy's formats from people we do not know: nothing is unpickled, and nothing takes more memory than its
bytes promise."""

from __future__ import annotations

import io
import math
import zipfile
from collections import Counter
from collections.abc import Collection
from typing import IO, Any

import numpy.typing as npt
from numpy.lib import format as npy

Array = npt.NDArray[Any]
MAX_EXPANSION = 100  # of an archive's bytes; images compress by ten or so, and zeros alone by a thousand
ALWAYS_BYTES = 1024 * 1024 * 1024  # what may be unpacked whatever the archive's size
MAX_ARRAYS = 100_000
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(file: IO[bytes], *, names: Collection[str] | None = None) -> dict[str, Array]:
    """The arrays of an ``.npz`` archive, or those among ``names``.

    Raises
    ------
    ValueError
        It is no archive of plain arrays, or one that unpacks to far more than its size.
    OSError
        It cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {
                entry.filename.removesuffix(".npy"): entry for entry in _checked(archive.infolist(), _size(file))
            }
            return {name: _read(archive, entry) for name, entry in entries.items() if names is None or name in names}
    except OSError:
        raise
    except Exception as error:  # zipfile and zlib raise types of their own; all mean the same here
        raise ValueError(str(error) or type(error).__name__) from error


def read_npy(raw: bytes) -> Array:
    """The array of an ``.npy`` file.

    Raises
    ------
    ValueError
        It is none of plain values, or has other bytes than its header says.
    """
    try:
        _check_header(io.BytesIO(raw), len(raw))
        array: Array = npy.read_array(io.BytesIO(raw), allow_pickle=False)
    except Exception as error:  # as above
        raise ValueError(str(error) or type(error).__name__) from error
    return array


def _size(file: IO[bytes]) -> int:
    at = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(at)
    return size


def _checked(entries: list[zipfile.ZipInfo], size: int) -> list[zipfile.ZipInfo]:
    if len(entries) > MAX_ARRAYS:
        raise ValueError(f"it has {len(entries)} members; at most {MAX_ARRAYS} are read")
    counts = Counter(entry.filename.removesuffix(".npy") for entry in entries)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ValueError(f"it has the array {twice[:80]!r} twice")
    limit = max(ALWAYS_BYTES, MAX_EXPANSION * size)
    if (total := sum(entry.file_size for entry in entries)) > limit:
        raise ValueError(f"its {size} bytes unpack to {total}; at most {limit} are read")
    return entries


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    try:
        with archive.open(entry) as member:
            _check_header(member, entry.file_size)
        with archive.open(entry) as member:
            array: Array = npy.read_array(member, allow_pickle=False)
            return array
    except Exception as error:  # a header is parsed as a Python literal, which fails in many ways
        raise ValueError(f"{entry.filename[:80]}: {error or type(error).__name__}") from error


def _check_header(file: IO[bytes], size: int) -> None:
    """Refuse an array whose header promises other bytes than the ``size`` that there are, before room is made for
    it."""
    version = npy.read_magic(file)
    if version not in READERS:
        raise ValueError(f"has version {version} of the format; {', '.join(map(str, READERS))} are read")
    shape, _, dtype = READERS[version](file)
    if dtype.hasobject:
        raise ValueError("holds Python objects, which are never loaded")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size - file.tell():
        raise ValueError(f"has the shape {shape} of {dtype}, which does not fit its {size} bytes")
