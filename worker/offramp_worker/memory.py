"""Memory that this process holds: given back once it was needed, and in large pages where it is read all the time.

A token of a model that generates reads every weight once. In pages of 4 KiB half a gigabyte of weights has more
addresses than a processor remembers, and how long it looks for them depends on where the system happened to put them:
the same model, opened twice, took up to a ninth longer in one place than in the other. In pages of 2 MiB it is a few
hundred addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WORTH_BYTES = 64 * 2**20  # of weights; fewer lie in the processor's caches
LARGE = 2**21
DENSE = 0.9  # of a large page must be there already: what is sparse would take memory that nobody wrote
ADVISE, COLLAPSE = 14, 25  # Linux's; the second one, which moves at once, from 6.1 on
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS = Path("/proc/self/maps")

Range = tuple[int, int]


def return_memory() -> None:
    """Give back what only loading needed: glibc keeps the models' copies, a tenth of a small worker's memory, in case
    somebody asks again."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def use_large_pages() -> int:
    """Ask the system to hold what this process has in memory in large pages; how many bytes it moved into them at once.

    Older systems move them in the background. One that has none, or whose administrator wants none, leaves all as it
    is.
    """
    if sys.platform != "linux" or not _allowed():
        return 0
    system = _system()
    moved = 0
    for memory in _own_memory():
        for start, end in _dense(system, memory):
            system.madvise(start, end - start, ADVISE)
            if system.madvise(start, end - start, COLLAPSE) == 0:
                moved += end - start
    return moved


def _allowed() -> bool:
    try:
        return "[never]" not in POLICY.read_text()
    except OSError:
        return False


def _system() -> ctypes.CDLL:
    system = ctypes.CDLL(None)
    system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    system.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return system


def _own_memory() -> Iterator[Range]:
    """What this process may write and no file is behind, in whole large pages."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:  # a container may hide it
        return
    for line in lines:
        addresses, rights, *_, inode = line.split()[:5]
        name = line.split()[5:]
        if rights.startswith("rw-p") and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // LARGE) * LARGE, end // LARGE * LARGE
            if start < end:
                yield start, end


def _dense(system: ctypes.CDLL, memory: Range) -> Iterator[Range]:
    """The large pages most of which has been written, those next to each other together."""
    start, end = memory
    there = np.empty((end - start) // mmap.PAGESIZE, dtype=np.uint8)
    if system.mincore(start, end - start, there.ctypes.data) != 0:
        return  # another thread has given it back
    dense = (there & 1).reshape(-1, LARGE // mmap.PAGESIZE).mean(axis=1) >= DENSE
    borders = np.flatnonzero(np.diff(dense, prepend=False, append=False))
    for first, last in borders.reshape(-1, 2).tolist():
        yield start + first * LARGE, start + last * LARGE
