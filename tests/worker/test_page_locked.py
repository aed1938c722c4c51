"""Memory for batches that a GPU reads directly: no two arrays share a block while one of them is in use."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.bundle import TensorSpec
from offramp_worker import page_locked
from offramp_worker.bundle.lengths import pad_rows
from offramp_worker.devices import CPU, CUDA
from offramp_worker.page_locked import LEAST_BYTES, PageLocked, batch_memory

ROW = LEAST_BYTES // 4  # float32 numbers


class Memory:
    """The host's own memory in the place of locked memory."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def allocate(self, size: int) -> int | None:
        self.blocks.append(np.zeros(size, dtype=np.uint8))
        return int(self.blocks[-1].ctypes.data)

    def holds(self, x: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bool:
        begin = x.ctypes.data
        return any(b.ctypes.data <= begin and begin + x.nbytes <= b.ctypes.data + b.nbytes for b in self.blocks)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_arrays_in_use_never_share_memory_and_blocks_are_used_again(asked: Sequence[tuple[int, bool]]) -> None:
    memory, in_use = Memory(), list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]()
    locked = PageLocked(memory.allocate)
    for rows, drop in asked:
        x = locked.empty((rows, ROW), np.float32)
        assert memory.holds(x)
        assert not any(np.may_share_memory(x, kept) for kept in in_use)
        in_use.append(x[rows // 2 :])  # a view keeps the block
        del x
        if drop:
            in_use.pop(0)
    blocks = len(memory.blocks)
    in_use.clear()
    gc.collect()
    for rows, _ in asked[:1]:
        locked.empty((rows, ROW), np.float32)
        assert len(memory.blocks) == blocks


def test_what_is_small_or_beyond_the_limit_lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    locked = PageLocked(memory.allocate)
    assert not memory.holds(locked.empty((ROW - 1,), np.float32))
    monkeypatch.setattr(page_locked, "MOST_BYTES", 2 * LEAST_BYTES)
    arrays = [locked.empty((ROW,), np.float32) for _ in range(3)]
    assert [memory.holds(x) for x in arrays] == [True, True, False]
    asked: list[int] = []
    none = PageLocked(asked.append)
    assert [none.empty((ROW,), np.float32).shape for _ in range(3)] == 3 * [(ROW,)]
    assert asked == [LEAST_BYTES]  # where there is none nobody asks again


def test_a_worker_without_nvidias_runtime_puts_batches_together_in_its_own_memory() -> None:
    assert batch_memory(CPU) is np.empty
    assert batch_memory(CUDA)((4, ROW), np.float32).shape == (4, ROW)


@pytest.mark.parametrize("varies", [False, True])
def test_rows_are_put_together_in_the_memory_that_is_given(varies: bool) -> None:
    memory = Memory()
    empty = PageLocked(memory.allocate).empty
    if varies:
        spec, parts = (
            TensorSpec("x", "INT64", (-1,), pad=0, longest=64),
            [np.ones((300, 20), np.int64), np.ones((1, 30), np.int64)],
        )
    else:
        spec, parts = TensorSpec("x", "FP32", (ROW,)), [np.full((n, ROW), n, np.float32) for n in (1, 2)]
    joined = pad_rows(parts, spec, empty=empty)
    assert memory.holds(joined)
    np.testing.assert_array_equal(joined, pad_rows(parts, spec))
