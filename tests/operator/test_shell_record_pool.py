"""Record blocks on the wire, and the pool they end up in."""

from __future__ import annotations

import base64
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp_core.errors import InvalidRecordsError
from offramp_core.protocol import RecordBlock
from offramp_core.records import UNKNOWN_REPEATS, Records, records_from_arrays

sys.path.insert(0, str(Path(__file__).parent))
from stub_worker import block

from offramp_operator.shell.record_pool import (
    CAPACITY_ROWS,
    ENOUGH_ROWS,
    POOLS_BYTES,
    RecordPool,
    rows_each,
    shares_of_waiting,
)
from offramp_operator.shell.wire import MAX_BLOCK_ROWS, RecordRows, decode_rows


def rows_of(first: int, n: int, *, time_from: float = 0.0, seed: int = 0) -> RecordRows:
    return decode_rows(block(first, n, time_from=time_from, seed=seed), n_ramps=2)


def test_a_block_decodes_to_its_columns() -> None:
    rows = decode_rows(
        RecordBlock(
            first=7,
            next=9,
            ramp_set_digest="d",
            time=base64.b64encode(np.array([1.5, 2.5], "<f8").tobytes()).decode(),
            uncertainty=base64.b64encode(np.array([[0.0, 1.0], [0.25, 0.5]], "<f4").tobytes()).decode(),
            prediction=base64.b64encode(np.array([[1, 2], [3, 4]], "<i4").tobytes()).decode(),
            final=base64.b64encode(np.array([1, 3], "<i4").tobytes()).decode(),
            reference=base64.b64encode(np.array([1, 4], "<i4").tobytes()).decode(),
        ),
        n_ramps=2,
    )
    assert (rows.first, rows.next, len(rows)) == (7, 9, 2)
    assert rows.time.tolist() == [1.5, 2.5]
    assert rows.uncertainty.tolist() == [[0.0, 1.0], [0.25, 0.5]]
    assert rows.answers["prediction"].tolist() == [[1, 2], [3, 4]]
    assert (rows.answers["final"].tolist(), rows.answers["reference"].tolist()) == ([1, 3], [1, 4])


def test_an_empty_block_is_no_rows() -> None:
    assert len(decode_rows(RecordBlock(5, 5, "d"), n_ramps=3)) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"time": "***"},
        {"time": base64.b64encode(b"seven b").decode()},
        {"final": ""},
        {"uncertainty": base64.b64encode(np.full((3, 2), 1.5, "<f4").tobytes()).decode()},
        {"uncertainty": base64.b64encode(np.full((3, 2), np.nan, "<f4").tobytes()).decode()},
        {"time": base64.b64encode(np.array([1.0, np.inf, 2.0], "<f8").tobytes()).decode()},
        {"next": 1},
        {"first": -1, "next": 2},
    ],
    ids=[
        "not-base64",
        "half-a-number",
        "short-column",
        "above-one",
        "nan",
        "infinite-time",
        "next-before-rows",
        "negative",
    ],
)
def test_a_malformed_block_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRecordsError):
        decode_rows(replace(block(0, 3), **change), n_ramps=2)  # type: ignore[arg-type]


def test_a_block_of_another_number_of_ramps_or_larger_than_promised_is_refused() -> None:
    with pytest.raises(InvalidRecordsError, match="uncertainty"):
        decode_rows(block(0, 3), n_ramps=3)
    with pytest.raises(InvalidRecordsError):
        decode_rows(block(0, MAX_BLOCK_ROWS + 1), n_ramps=2)


@settings(deadline=None, max_examples=60)
@given(
    pulls=st.lists(
        st.tuples(st.sampled_from(["boot-a", "boot-b"]), st.integers(0, 40), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    ),
    capacity=st.integers(5, 60),
)
def test_however_blocks_overlap_each_row_is_kept_once_and_only_the_newest_stay(
    pulls: list[tuple[str, int, int]], capacity: int
) -> None:
    pool = RecordPool(n_ramps=2, capacity=capacity)
    expected: dict[tuple[str, int], float] = {}
    furthest: dict[str, int] = {}
    for boot, first, n in pulls:
        pool.add(boot, rows_of(first, n, time_from=0.25 * (boot == "boot-b")), latest_time=np.inf)
        for seq in range(max(first, furthest.get(boot, 0)), first + n):
            expected[boot, seq] = seq + 0.25 * (boot == "boot-b")
        furthest[boot] = max(furthest.get(boot, 0), first + n)
    # A pool that is looked at keeps exactly its capacity; the newest of everything ever added is an upper bound on
    # time.
    newest = sorted(expected.values())[-capacity:]
    assert pool.columns()["time"].tolist() == newest
    assert len(pool) == len(newest)


def test_a_pool_that_may_keep_less_drops_the_oldest_rows_and_collects_again_when_it_may_keep_more() -> None:
    pool = RecordPool(n_ramps=2, capacity=100)
    pool.add("boot", rows_of(0, 80), latest_time=np.inf)
    pool.keep(20)
    assert pool.columns()["time"].tolist() == list(range(60, 80))
    pool.keep(100)
    pool.add("boot", rows_of(60, 40), latest_time=np.inf)
    assert pool.columns()["time"].tolist() == list(range(60, 100))


def test_the_pools_of_many_services_share_an_operators_memory_and_each_can_still_certify_a_plan() -> None:
    assert rows_each(1, n_ramps=12) == CAPACITY_ROWS
    assert rows_each(300, n_ramps=12) * 300 * (8 * 12 + 37) == pytest.approx(POOLS_BYTES, rel=0.01)
    assert rows_each(5000, n_ramps=27) == ENOUGH_ROWS


@pytest.mark.parametrize(
    ("kept", "shares"),
    [
        ([], []),
        ([900, 50], [1_000, 1_000]),
        ([800, 50, 300], [650, 650, 650]),
        ([800, 600, 100], [450, 450, 450]),
        ([90] * 12, [100] * 11 + [0]),
        ([90] * 10 + [500], [100] * 11),
    ],
    ids=["nobody", "room for all", "one gives way", "two do", "the last waits for its turn", "a whole pool each"],
)
def test_of_services_that_wait_for_records_the_largest_give_way_first(kept: list[int], shares: list[int]) -> None:
    assert shares_of_waiting(kept, whole=[100] * len(kept), total=1_000) == shares


def test_rows_stay_together_when_workers_are_interleaved_by_time() -> None:
    pool = RecordPool(n_ramps=2)
    late, early = rows_of(0, 4, time_from=10.5, seed=1), rows_of(0, 4, time_from=10.0, seed=2)
    pool.add("late", late, latest_time=np.inf)
    pool.add("early", early, latest_time=np.inf)
    columns = pool.columns()
    assert columns["time"].tolist() == [10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5]
    np.testing.assert_array_equal(columns["uncertainty"][0::2], early.uncertainty)
    np.testing.assert_array_equal(columns["prediction"][1::2], late.answers["prediction"])


def test_a_worker_whose_clock_is_ahead_cannot_write_into_the_future() -> None:
    pool = RecordPool(n_ramps=2)
    pool.add("boot", rows_of(0, 3, time_from=1_000_000.0), latest_time=500.0)
    assert pool.columns()["time"].tolist() == [500.0, 500.0, 500.0]


def test_rows_that_were_used_are_no_younger_when_a_fresh_pool_reads_them_from_a_clock_that_is_ahead() -> None:
    first = RecordPool(n_ramps=2)
    first.add("fast", rows_of(0, 3, time_from=1_000_000.0), latest_time=500.0)
    first.add("right", rows_of(0, 3, time_from=400.0), latest_time=500.0)
    assert first.ahead() == RecordPool.load(first.dump()).ahead() == {"fast": 3}
    again = RecordPool(n_ramps=2)
    again.add("fast", rows_of(0, 5, time_from=1_000_000.0), latest_time=900.0, not_younger=((3, 500.0), (2, 480.0)))
    assert again.columns()["time"].tolist() == [480.0, 480.0, 500.0, 900.0, 900.0]


def test_a_pool_goes_on_after_a_restart_where_it_stopped() -> None:
    pool = RecordPool(n_ramps=2, capacity=10)
    pool.add("boot", rows_of(0, 8), latest_time=np.inf)
    again = RecordPool.load(pool.dump(), capacity=10)
    assert again.next_of("boot") == 8
    assert again.add("boot", rows_of(6, 4), latest_time=np.inf) == 2
    assert again.columns()["time"].tolist() == list(range(10))


def eager_and_busy(pool: RecordPool, *, first: int) -> RecordPool:
    """Rows of a busy hour, at 2 %, after those that a pool has."""
    rows = replace(rows_of(first, 20, time_from=1e4), audit_rate=np.full(20, 0.02, np.float32))
    pool.add("boot", replace(rows, draw=np.linspace(0, 0.019, 20, dtype=np.float32)), latest_time=np.inf)
    return pool


@pytest.mark.parametrize("restarted", [False, True])
def test_rows_of_a_time_when_all_requests_were_recorded_keep_their_draws_over_a_restart(restarted: bool) -> None:
    """They are alike until a busy hour comes, and were taken for rows that 2 % of it stand beside."""
    pool, quiet = RecordPool(n_ramps=2), replace(rows_of(0, 100), draw=np.linspace(0.005, 0.995, 100, dtype=np.float32))
    pool.add("boot", quiet, latest_time=np.inf)
    assert records_of(pool).draw is None
    records = records_of(eager_and_busy(RecordPool.load(pool.dump()) if restarted else pool, first=100))
    assert np.count_nonzero(records.equal_weight()[:100]) == 2
    assert records.equal_weight()[100:].all()


def test_rows_whose_draw_nobody_told_count_while_rates_are_alike_and_not_beside_a_smaller_one() -> None:
    """Of a worker of before, and of a file from before draws were kept while all rates were 1."""
    pool = RecordPool(n_ramps=2)
    pool.add("boot", rows_of(0, 100), latest_time=np.inf)
    without = {name: column for name, column in pool.dump().items() if name not in ("draw", "audit_rate")}
    for each in (pool, RecordPool.load(without)):
        assert records_of(each).equal_weight().all()
        equal = records_of(eager_and_busy(each, first=100)).equal_weight()
        assert not equal[:100].any() and equal[100:].all()


def test_rows_that_nobody_told_of_whether_they_repeat_a_stream_count_as_neither() -> None:
    """Of a worker of before, and of a file from before. Taken for rows that repeat none, they would make names of
    gateways those of sources."""
    pool = RecordPool(n_ramps=2)
    pool.add("before", rows_of(0, 100), latest_time=np.inf)
    assert records_of(pool).repeats is None
    without = {name: column for name, column in pool.dump().items() if name != "repeats"}
    for each in (pool, RecordPool.load(without)):
        told = replace(rows_of(100, 2), repeats=np.array([1, 0], dtype=np.uint8))
        each.add("now", told, latest_time=np.inf)
        repeats = records_of(each).repeats
        assert repeats is not None and repeats.tolist() == [UNKNOWN_REPEATS] * 100 + [1, 0]


def lossy(losses: list[list[float]], **changes: object) -> RecordBlock:
    n = len(losses)
    columns = {
        "time": np.zeros(n, "<f8"),
        "uncertainty": np.zeros((n, 2), "<f4"),
        "loss": np.array(losses, "<f4"),
        "final_loss": np.zeros(n, "<f4"),
    }
    told = {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}
    return RecordBlock(first=0, next=n, ramp_set_digest="d", **{**told, **changes})  # type: ignore[arg-type]


def records_of(pool: RecordPool) -> Records:
    costs = {"segment_seconds": np.ones(3), "ramp_seconds": np.zeros(2)}
    return records_from_arrays({**pool.columns(), **costs})


def test_losses_are_graded_unless_the_worker_says_that_they_are_all_or_nothing() -> None:
    for told, graded in (({"zero_one": True}, False), ({}, True)):
        pool = RecordPool(n_ramps=2)
        pool.add("boot", decode_rows(lossy([[0, 1], [1, 0]], **told), n_ramps=2), latest_time=9.0)
        assert records_of(pool).graded is graded
        assert records_of(RecordPool.load(pool.dump())).graded is graded


def test_a_pool_that_was_told_one_graded_loss_is_graded() -> None:
    pool = RecordPool(n_ramps=2)
    pool.add("one", decode_rows(lossy([[0, 1]], zero_one=True), n_ramps=2), latest_time=9.0)
    pool.add("other", decode_rows(lossy([[0, 0.25]]), n_ramps=2), latest_time=9.0)
    records = records_of(pool)
    assert records.graded
    assert records.loss is not None and records.loss.tolist() == [[0, 1], [0, 0.25]]


def test_a_fraction_that_is_said_to_be_all_or_nothing_is_refused() -> None:
    with pytest.raises(InvalidRecordsError, match="loss holds a value that is neither 0 nor 1"):
        decode_rows(lossy([[0, 0.25]], zero_one=True), n_ramps=2)
