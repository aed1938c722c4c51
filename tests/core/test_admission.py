"""Adaptive batch limits and the times that admission goes by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.admission import (
    EARNED,
    LARGEST_CREDIT,
    LARGEST_SHARE,
    LATE,
    LENIENT_WAIT,
    PATIENCE_SECONDS,
    SMALLEST_SHARE,
    Entry,
    Forecast,
    Pace,
    QueueAdmission,
    due_after,
    forecast,
)
from offramp_core.batching import (
    MAX_BATCH,
    OfframpBatching,
    batch_cap,
    batching,
    exact_seconds,
    in_turn,
    rows_within,
    thrifty_rows,
)
from offramp_core.bundle import BatchProfile, Profile
from offramp_core.errors import InvalidArgumentError


def profile(row_seconds: float = 0.01, *, largest: int = 32) -> Profile:
    sizes = (1, 8, largest)
    return Profile("e", 1, tuple(BatchProfile(n, row_seconds * n, (row_seconds * n,), (), 0.0) for n in sizes))


LINEAR = Pace(exact_seconds(profile()))


def test_times_between_and_beyond_measured_sizes_follow_the_profile() -> None:
    seconds = exact_seconds(profile(largest=16))
    assert seconds == pytest.approx([0.01 * n for n in range(MAX_BATCH + 1)])
    assert seconds[0] == 0


def test_the_batch_cap_leaves_half_of_the_latency_for_waiting() -> None:
    assert batch_cap(profile(), latency_seconds=None) == 32
    assert batch_cap(profile(), latency_seconds=0.2) == 10
    assert batch_cap(profile(), latency_seconds=0.001) == 1
    assert rows_within(profile(), seconds=0.001) == 0


def test_a_batch_is_thrifty_once_more_rows_would_hardly_be_cheaper() -> None:
    assert thrifty_rows(exact_seconds(profile()), dearer=1.01) == 1, "ten rows take as long as ten single ones"
    assert thrifty_rows([0.0] + [0.01] * 32, dearer=1.2) == 27, "all take as long, and a 27th is 1.2 times a 32nd"
    assert thrifty_rows([0.0] + [0.004 + 0.001 * rows for rows in range(1, 33)], dearer=1.2) == 12


def test_without_an_objective_the_limit_stays_where_it_is() -> None:
    policy = batching("offramp", profile=profile(), slo_seconds=None)
    assert policy.after(rows=32, seconds=100.0) is policy
    assert policy.batch_rows == 32


def test_with_an_objective_the_limit_begins_where_the_profile_says() -> None:
    assert batching("offramp", profile=profile(), slo_seconds=0.2).batch_rows == 10


def test_clockwork_needs_an_objective() -> None:
    with pytest.raises(InvalidArgumentError, match="'clockwork' needs a latency objective"):
        batching("clockwork", profile=profile(), slo_seconds=None)


def test_the_limit_finds_the_largest_batch_within_the_target_and_hovers_below_it() -> None:
    """Additive increase and multiplicative decrease: on a machine where n rows take n hundredths, 0.155 s allow 15."""
    policy = OfframpBatching(target_seconds=0.155, limit=1)
    seen = []
    for _ in range(200):
        rows = policy.batch_rows
        policy = policy.after(rows=rows, seconds=0.01 * rows)
        seen.append(rows)
    assert seen[:15] == list(range(1, 16))
    assert set(seen[50:]) <= {14, 15, 16}


def test_a_batch_below_the_limit_proves_nothing_about_larger_ones() -> None:
    policy = OfframpBatching(target_seconds=1.0, limit=8)
    assert policy.after(rows=7, seconds=0.1) is policy
    assert policy.after(rows=7, seconds=1.1).batch_rows == 7


@given(st.lists(st.tuples(st.integers(1, 32), st.floats(0, 10)), max_size=200), st.floats(1, 40))
def test_the_limit_never_leaves_its_bounds(batches: list[tuple[int, float]], limit: float) -> None:
    policy = OfframpBatching(target_seconds=1.0, limit=limit)
    for rows, seconds in batches:
        policy = policy.after(rows=rows, seconds=seconds)
        assert 1 <= policy.batch_rows <= MAX_BATCH


@pytest.mark.parametrize("options", [{"target_seconds": 0.0}, {"target_seconds": math.nan}, {"limit": 0.5}], ids=str)
def test_an_adaptive_limit_that_cannot_work_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        OfframpBatching(**options)  # type: ignore[arg-type]


@given(st.integers(0, 300), st.integers(1, 32))
def test_the_time_of_a_queue_is_that_of_its_batches(rows: int, batch_rows: int) -> None:
    sizes = [batch_rows] * (rows // batch_rows) + [rows % batch_rows]
    assert LINEAR.queue(rows, batch_rows=batch_rows) == pytest.approx(sum(LINEAR.seconds[n] for n in sizes))


def test_a_pace_follows_a_slow_machine_but_never_trusts_a_fast_one() -> None:
    slow = fast = LINEAR
    for _ in range(100):
        slow, fast = slow.after(rows=4, seconds=0.08), fast.after(rows=4, seconds=0.01)
    assert slow.seconds[8] == pytest.approx(0.16, rel=1e-3)
    assert fast.seconds == LINEAR.seconds  # early exits made those batches short; the next ones need not be


def test_a_machine_that_is_very_slow_is_learned_within_some_batches() -> None:
    pace = LINEAR
    for _ in range(20):
        pace = pace.after(rows=4, seconds=15 * 0.04)
    assert pace.seconds[4] > 0.8 * 15 * 0.04


def test_one_stall_does_not_close_the_door() -> None:
    assert LINEAR.after(rows=1, seconds=60.0).seconds[1] < 1.5 * LINEAR.seconds[1]


def test_a_pace_needs_finite_seconds() -> None:
    for bad in ((), (0.0,), (0.0, math.inf), (0.0, -1.0), (0.0, math.nan)):
        with pytest.raises(InvalidArgumentError, match="profile_seconds"):
            Pace(bad)


def test_a_forecast_counts_what_runs_what_is_ahead_and_the_shared_batch() -> None:
    flat = Pace((0.0, *(0.1 for _ in range(32))))  # a batch takes as long as a row
    seen = forecast(flat, running=0.05, ahead=5, rows=1, batch_rows=8)
    assert (seen.wait, seen.own, seen.total) == pytest.approx((0.05, 0.1, 0.15))
    assert forecast(flat, running=0.05, ahead=8, rows=1, batch_rows=8).total == pytest.approx(0.25)


@given(st.floats(0, 2), st.floats(0.001, 2), st.floats(0.01, 1), st.floats(SMALLEST_SHARE, LARGEST_SHARE))
def test_what_is_admitted_fits_the_objective_unless_it_is_too_large_or_the_worker_idle(
    wait: float, own: float, objective: float, share: float
) -> None:
    admitted = QueueAdmission(objective, LINEAR, share).entry(Forecast(wait, own)) is Entry.IN_TIME
    if own > objective:
        assert admitted == (wait <= share * objective)
    elif wait > 0:
        assert not admitted or wait + own <= share * objective * (1 + 1e-9)
    else:
        assert admitted


def test_without_an_objective_the_door_is_open() -> None:
    assert QueueAdmission(None, LINEAR).entry(Forecast(1e9, 1e9)) is Entry.IN_TIME


def test_a_burst_is_late_on_credit_and_overload_is_refused_once_the_credit_is_spent() -> None:
    door, too_long = QueueAdmission(1.0, LINEAR), Forecast(2.0, 0.1)
    for _ in range(int(LARGEST_CREDIT)):
        assert door.entry(too_long) is Entry.ON_CREDIT
        door = door.spent(1)
    assert door.entry(too_long) is Entry.REFUSED
    assert door.entry(Forecast(0.1, 0.1)) is Entry.IN_TIME


def test_credit_is_earned_by_requests_answered_and_has_a_limit() -> None:
    door = QueueAdmission(1.0, LINEAR, credit=0.0).after(rows=32, seconds=0.3, late=0)
    assert door.credit == pytest.approx(32 * EARNED)
    for _ in range(2000):
        door = door.after(rows=32, seconds=0.3, late=0)
    assert door.credit == LARGEST_CREDIT


def test_no_credit_buys_an_answer_that_comes_many_times_too_late() -> None:
    assert QueueAdmission(1.0, LINEAR).entry(Forecast(LENIENT_WAIT + 0.1, 0.1)) is Entry.REFUSED


@pytest.mark.slow
@given(st.floats(1.1, 4.0), st.integers(0, 2**16))
def test_under_lasting_overload_few_of_those_admitted_come_on_credit(excess: float, seed: int) -> None:
    """Whatever the queue does: over many requests credit is what was there plus what was earned."""
    rng = np.random.default_rng(seed)
    door, on_credit, answered = QueueAdmission(1.0, LINEAR), 0, 0
    for _ in range(500):
        for wait in rng.exponential(excess, 8):
            entry = door.entry(Forecast(wait, 0.01))
            on_credit += entry is Entry.ON_CREDIT
            door = door.spent(1) if entry is Entry.ON_CREDIT else door
            answered += entry is not Entry.REFUSED
        door = door.after(rows=8, seconds=0.08, late=0)
    assert on_credit <= LARGEST_CREDIT + EARNED * 8 * 500 + 1
    assert on_credit < answered


def test_the_door_settles_where_few_of_those_admitted_are_late() -> None:
    """Latencies are exponential around the forecast, so that a share s of the objective leaves exp(-1 / s) late: 3 % at
    0.285."""
    rng = np.random.default_rng(0)
    door = QueueAdmission(1.0, LINEAR)
    late, shares = [], []
    for _ in range(6000):
        missed = int((rng.exponential(door.share, 8) > 1.0).sum())
        door = door.after(rows=8, seconds=0.08, late=missed)
        late.append(missed)
        shares.append(door.share)
    assert np.mean(late[1500:]) / 8 == pytest.approx(LATE, rel=0.1)
    assert np.median(shares[1500:]) == pytest.approx(-1 / math.log(LATE), rel=0.15)


def test_one_stall_does_not_close_the_door_but_hundreds_of_late_requests_do_and_good_ones_open_it_again() -> None:
    door = QueueAdmission(1.0, LINEAR).after(rows=32, seconds=0.3, late=32)
    assert 0.7 * LARGEST_SHARE < door.share < LARGEST_SHARE
    for _ in range(5):
        door = door.after(rows=32, seconds=0.3, late=32)
    assert door.share < 0.4 * LARGEST_SHARE
    for _ in range(100):
        door = door.after(rows=32, seconds=0.3, late=32)
    assert door.share == SMALLEST_SHARE
    for _ in range(2000):
        door = door.after(rows=32, seconds=0.3, late=0)
    assert door.share == LARGEST_SHARE


def test_requests_are_due_by_the_earliest_of_what_they_and_the_service_ask() -> None:
    assert due_after(0.1, objective_seconds=None) == PATIENCE_SECONDS
    assert due_after(0.1, objective_seconds=0.5) == 0.5
    assert due_after(0.1, objective_seconds=0.5, wish_seconds=0.2) == 0.2
    assert due_after(0.1, objective_seconds=0.5, wish_seconds=9.0) == 0.5
    assert due_after(2.0, objective_seconds=0.5) == 4.0


# --- who joins the next batch -----------------------------------------------------------------------


class Line:
    """Requests that wait, by the rows they have left, in order; nobody has an objective."""

    def __init__(self, *waiting: int, batch_rows: int = MAX_BATCH) -> None:
        self.batch_rows = batch_rows
        self.waiting = [[rows] for rows in waiting]
        self._began: list[int] | None = None

    def join(self, rows: int) -> list[int]:
        self.waiting.append([rows])
        return self.waiting[-1]

    def run(self) -> None:
        """Cut a batch and run it, if anybody waits."""
        if not self.waiting:
            return
        may_pass = self._began is self.waiting[0]
        order = in_turn([left for (left,) in self.waiting], batch_rows=self.batch_rows, may_pass=may_pass)
        self._began, room = self.waiting[order[0]], self.batch_rows
        for request in (self.waiting[i] for i in order):
            taken = min(request[0], room)
            request[0] -= taken
            room -= taken
        self.waiting = [request for request in self.waiting if request[0]]


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=30), st.integers(1, MAX_BATCH), st.booleans())
def test_requests_join_in_order_but_where_the_first_would_fill_batch_after_batch(
    waiting: list[int], batch_rows: int, may_pass: bool
) -> None:
    order, numbers = in_turn(waiting, batch_rows=batch_rows, may_pass=may_pass), range(len(waiting))
    passes = may_pass and waiting[0] > batch_rows
    assert list(order) == sorted(numbers, key=(lambda i: (waiting[i], i)) if passes else None)


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=40), st.integers(1, MAX_BATCH), st.integers(0, 20))
def test_a_single_row_waits_for_one_batch_of_however_many_large_requests(
    large: list[int], batch_rows: int, before: int
) -> None:
    line = Line(*(2 * batch_rows + rows for rows in large), batch_rows=batch_rows)
    for _ in range(min(before, len(large))):
        line.run()
    line.waiting = [request for request in line.waiting if request[0] > 2 * batch_rows]
    row = line.join(1)
    line.run()
    line.run()
    assert not row[0]


@given(st.integers(2, 256), st.integers(1, MAX_BATCH), st.integers(1, 3), st.integers(1, MAX_BATCH))
def test_a_large_request_ends_under_an_endless_stream_of_small_ones(
    rows: int, batch_rows: int, load: int, small: int
) -> None:
    line = Line(rows, batch_rows=batch_rows)
    (large,) = line.waiting
    for _ in range(2 * math.ceil(rows / batch_rows)):  # twice what it would take alone
        for _ in range(load * batch_rows):  # as many as would fill the engine, and more
            line.join(small)
        line.run()
    assert not large[0]


def test_of_long_batches_soon_after_each_other_none_is_a_stall() -> None:
    """An engine that had become slow was taken to stall again and again: nobody counted as late, and the door stayed
    open to far more than it answered in time."""
    door = QueueAdmission(0.4, LINEAR).stalled(1.5, now=10.0)
    assert not door.late(9.0, now=10.0), "who waited for the stall"
    slow = door.stalled(0.5, now=11.0)
    assert slow.late(10.5, now=11.0), "the engine is slow by now"
    assert slow.late(9.0, now=11.0), "and it was before: more had been let in than it answers"
    much_later = slow.stalled(1.5, now=60.0)
    assert not much_later.late(59.0, now=60.0), "another stall"


@pytest.mark.parametrize("apart", [2.5, 8.0])
def test_stalls_that_come_again_and_again_are_stalls(apart: float) -> None:
    """A neighbor held up the engine every few objectives: that refusals do not help, and up to 62 % were refused for
    good."""
    door, objective = QueueAdmission(0.4, LINEAR), 0.4
    for end in np.arange(10.0, 60.0, (apart + 1.2) * objective):
        door = door.stalled(1.2 * objective, now=end)
        assert not door.late(end - objective, now=end)
