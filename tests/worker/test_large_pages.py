"""Weights are moved into large pages as they are, and what is sparse stays small."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from offramp_worker.memory import LARGE, use_large_pages

BYTES = 16 * LARGE


def in_memory(memory: mmap.mmap) -> dict[str, int]:
    """Bytes of it that are in RAM, and of those in large pages, as the system says."""
    start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    found, inside = {"Rss": 0, "AnonHugePages": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(address, 16) for address in first.split("-"))
            inside = low < start + BYTES and start < high
        elif inside and first.rstrip(":") in found:
            found[first.rstrip(":")] += 1024 * int(rest[0])
    return found


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@pytest.mark.slow
def test_what_is_written_is_moved_and_stays_what_it_was(memory: mmap.mmap) -> None:
    values = np.frombuffer(memory, dtype=np.float32)
    values[:] = np.arange(len(values))
    if not use_large_pages():
        pytest.skip("this system moves nothing into large pages")
    assert np.array_equal(values, np.arange(len(values), dtype=np.float32))
    assert in_memory(memory)["AnonHugePages"] > 0


def test_what_is_sparse_takes_no_more_memory_than_before(memory: mmap.mmap) -> None:
    values = np.frombuffer(memory, dtype=np.uint8).reshape(-1, LARGE)
    values[:, : LARGE // 2] = 1
    before = in_memory(memory)["Rss"]
    use_large_pages()
    assert in_memory(memory)["Rss"] < before + LARGE
