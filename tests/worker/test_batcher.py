"""The queue: order, bounds, admission by predicted time, expiry, and the policies that cut batches. A clock to turn,
never sleeps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.admission import LARGEST_SHARE, Pace, QueueAdmission
from offramp_core.batching import Batching, ClockworkBatching, OfframpBatching, TfServingBatching
from offramp_core.task import task_of
from offramp_worker.engine.queue.batcher import Batch, Batcher
from offramp_worker.engine.queue.tickets import OverloadedError, Ticket, UnableError, new_ticket

ROW_SECONDS = 0.01


@dataclass
class Queue:
    """A batcher with a clock, where a batch of n rows is predicted to take n hundredths of a second."""

    policy: Batching = field(default_factory=OfframpBatching)
    max_rows: int = 1000
    objective: float | None = None
    credit: float = -math.inf  # nobody joins who would be late
    now: float = 100.0
    group: Callable[[np.ndarray[Any, Any]], int] | None = None

    def __post_init__(self) -> None:
        pace = Pace(tuple(ROW_SECONDS * n for n in range(33)))
        self.batcher = Batcher(
            policy=self.policy,
            door=QueueAdmission(self.objective, pace, credit=self.credit),
            max_rows=self.max_rows,
            clock=lambda: self.now,
            group=self.group,
        )

    def put(self, n: int = 1, *, never_exit: bool = False, priority: int = 1, timeout: float | None = None) -> Ticket:
        x = np.arange(n * 2, dtype=np.float32).reshape(n, 2) + self.now
        ticket = new_ticket(
            x,
            never_exit=never_exit,
            task=task_of(None, width=2),
            now=self.now,
            wall_time=0.0,
            draw=lambda: 0.5,
            priority=priority,
            timeout_seconds=timeout,
        )
        self.batcher.put(ticket)
        return ticket

    def take(self) -> Batch:
        batch = self.batcher.take(wait=False)
        assert batch is not None
        return batch

    def run(self, seconds: float) -> Batch:
        """Take a batch, let it run for so long, and end it."""
        batch = self.take()
        self.now += seconds
        self.batcher.ended(batch)
        return batch


def rows_of(batch: Batch, tickets: list[Ticket]) -> list[tuple[int, int]]:
    return [(tickets.index(ticket), row) for ticket, row in batch.owners]


# --- order and bounds ------------------------------------------------------------------------------


def test_batches_take_what_is_queued_in_order_and_split_long_requests() -> None:
    queue = Queue(OfframpBatching(max_batch=4))
    tickets = []
    for n, never_exit in ((3, False), (1, False), (6, False), (2, True)):
        tickets.append(queue.put(n, never_exit=never_exit))
        queue.now += 1.0
    taken = [queue.take() for _ in range(4)]
    assert [rows_of(batch, tickets) for batch in taken] == [
        [(0, 0), (0, 1), (0, 2), (1, 0)],
        [(2, 0), (2, 1), (2, 2), (2, 3)],
        [(2, 4), (2, 5)],
        [(3, 0), (3, 1)],
    ]
    assert [batch.never_exit for batch in taken] == [False, False, False, True]
    for batch in taken:
        np.testing.assert_array_equal(batch.x, np.stack([t.x[row] for t, row in batch.owners]))
    assert queue.batcher.take(wait=False) is None


@pytest.mark.parametrize("never_exit", [False, True])
def test_what_is_less_urgent_is_not_behind_a_request(never_exit: bool) -> None:
    queue = Queue()
    for _ in range(10):
        queue.put(20, priority=5, never_exit=never_exit)
    queue.put(3, priority=1, timeout=5.0)
    claim = queue.batcher.claim(wait=False)
    assert claim is not None
    assert claim.behind == pytest.approx(2 * ROW_SECONDS)
    assert claim.last(rate=1.0) == claim.first, "it expires when it is due"


def test_a_request_that_finds_the_engine_idle_runs_alone_at_once() -> None:
    queue = Queue()
    ticket = queue.put()
    assert rows_of(queue.take(), [ticket]) == [(0, 0)]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.integers(1, 3),
            st.booleans(),
            st.one_of(st.none(), st.integers(50, 60)),
            st.booleans(),
        ),
        max_size=25,
    ),
    st.integers(3, 8),  # nobody is passed who needs no third batch
)
def test_every_row_runs_once_in_order_of_priority_and_deadline(
    requests: list[tuple[int, int, bool, int | None, bool]], max_batch: int
) -> None:
    queue = Queue(OfframpBatching(max_batch=max_batch))
    tickets = []
    for n, priority, never_exit, timeout, cancelled in requests:
        ticket = queue.put(n, never_exit=never_exit, priority=priority, timeout=timeout)
        if cancelled:
            assert queue.batcher.remove(ticket) == n
        else:
            tickets.append(ticket)
        queue.now += 0.001
    seen: dict[bool, list[tuple[Ticket, int]]] = {False: [], True: []}
    while (batch := queue.batcher.take(wait=False)) is not None:
        assert 1 <= len(batch) <= max_batch
        seen[batch.never_exit] += batch.owners
    for lane, rows in seen.items():
        wanted = sorted((t for t in tickets if t.never_exit == lane), key=lambda t: (t.priority, t.run_by, t.admitted))
        assert rows == [(ticket, row) for ticket in wanted for row in range(len(ticket.x))]
    assert queue.batcher.rows == 0


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 2)), max_size=25), st.integers(3, 8))
def test_batches_are_of_one_group_that_of_the_first_in_the_queue_and_each_group_keeps_its_order(
    requests: list[tuple[int, int]], max_batch: int
) -> None:
    queue = Queue(OfframpBatching(max_batch=max_batch), group=len)  # by their number of rows
    waiting = []
    for n, priority in requests:
        waiting.append(queue.put(n, priority=priority))
        queue.now += 0.001
    waiting.sort(key=lambda t: t.priority)
    while waiting:
        alike = [t for t in waiting if len(t.x) == len(waiting[0].x)]
        left = [(t, row) for t in alike for row in range(t.begun, len(t.x))]
        batch = queue.take()
        assert batch.owners == left[: len(batch)]
        assert len(batch) == min(len(left), max_batch)
        waiting = [t for t in waiting if t.waiting]
        assert queue.batcher.rows == sum(t.waiting for t in waiting)
    assert queue.batcher.take(wait=False) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 2), st.booleans(), st.one_of(st.none(), st.integers(50, 60))),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 8),
    st.booleans(),
)
def test_every_row_runs_once_whatever_the_sizes_and_no_priority_passes_a_higher_one(
    requests: list[tuple[int, int, bool, int | None]], max_batch: int, in_groups: bool
) -> None:
    queue = Queue(OfframpBatching(max_batch=max_batch), group=(lambda x: len(x) % 2) if in_groups else None)
    tickets = [queue.put(n, priority=p, never_exit=e, timeout=t) for n, p, e, t in requests]
    seen: list[tuple[Ticket, int]] = []
    while queue.batcher.rows:
        best = min(t.priority for t in tickets if t.waiting)
        batch = queue.take()
        assert 1 <= len(batch) <= max_batch and batch.owners[0][0].priority == best
        assert len({(t.never_exit, t.group) for t, _ in batch.owners}) == 1
        seen += batch.owners
        assert queue.batcher.rows == sum(t.waiting for t in tickets)
    assert len(seen) == len(set(seen)) == sum(n for n, *_ in requests)
    for ticket in tickets:
        assert [row for t, row in seen if t is ticket] == list(range(len(ticket.x)))


@pytest.mark.parametrize("never_exit", [False, True], ids=["in its lane", "in the other lane"])
@pytest.mark.parametrize("group", [None, len], ids=["one length", "two lengths"])
def test_a_row_behind_large_requests_runs_in_every_second_batch(group: Any, never_exit: bool) -> None:
    queue = Queue(OfframpBatching(max_batch=8), group=group)
    large = [queue.put(200), queue.put(100)]
    assert queue.take().owners[0][0] is large[0]
    row = queue.put(1, never_exit=never_exit)
    assert [queue.take().owners[0][0] for _ in range(5)] == [row, large[0], large[1], large[0], large[1]]


def test_a_large_request_that_was_promised_a_time_is_passed_by_nobody() -> None:
    queue = Queue(OfframpBatching(max_batch=8), objective=2.0)
    promised = queue.put(100)
    queue.put(1)
    assert promised.on_time
    assert [queue.take().owners[0][0] for _ in range(12)] == [promised] * 12  # as was forecast


def test_a_higher_priority_overtakes_even_the_rest_of_a_long_request() -> None:
    queue = Queue(OfframpBatching(max_batch=4))
    long = queue.put(8, priority=2)
    queue.take()
    urgent = queue.put(1, priority=1)
    assert rows_of(queue.take(), [long, urgent]) == [(1, 0), (0, 4), (0, 5), (0, 6)]


def test_of_one_priority_what_is_due_first_runs_first() -> None:
    queue = Queue(OfframpBatching(max_batch=1))
    patient, hurried = queue.put(timeout=5.0), queue.put(timeout=1.0)
    assert [queue.take().owners[0][0] for _ in range(2)] == [hurried, patient]


def test_a_timeout_longer_than_others_patience_wins_nothing() -> None:
    queue = Queue(OfframpBatching(max_batch=1))
    without, long = queue.put(), queue.put(timeout=3600.0)
    assert [queue.take().owners[0][0] for _ in range(2)] == [without, long]


def test_a_full_queue_refuses_says_when_to_retry_and_takes_again_once_there_is_room() -> None:
    queue = Queue(OfframpBatching(max_batch=4), max_rows=400)
    queue.put(390)
    with pytest.raises(OverloadedError, match="390 of 400 queue places are taken; 11 more do not fit") as caught:
        queue.put(11)
    assert caught.value.retry_after_seconds == 4  # 390 rows at 10 ms
    assert not isinstance(caught.value, UnableError)
    queue.take()
    queue.put(11)


def test_a_closed_queue_refuses_for_good_and_hands_out_what_it_has() -> None:
    queue = Queue(TfServingBatching(max_batch=4, batch_timeout_micros=10**9, allowed_batch_sizes=()))
    ticket = queue.put(2)
    assert queue.batcher.take(wait=False) is None  # it waits for the batch to fill
    queue.batcher.close()
    with pytest.raises(UnableError, match="shutting down"):
        queue.put()
    assert not queue.batcher.put_back(ticket)
    assert not queue.batcher.finished
    assert len(queue.take()) == 2
    assert queue.batcher.finished
    assert queue.batcher.take(wait=True) is None


@pytest.mark.parametrize("objective", [None, 0.5])
def test_a_request_that_is_put_back_is_not_overtaken_for_ever(objective: float | None) -> None:
    queue = Queue(OfframpBatching(max_batch=1), objective=objective)
    x = np.zeros((1, 2), np.float32)
    late = new_ticket(x, never_exit=False, task=task_of(None, width=2), now=queue.now, wall_time=0.0, draw=lambda: 0.5)
    queue.now += 0.3  # it waited for the answer of another request, which failed
    assert queue.batcher.put_back(late)
    overtaken = 0
    while queue.put() and queue.run(ROW_SECONDS).owners[0][0] is not late:  # one comes for each that runs
        overtaken += 1
        assert overtaken < 50
    assert overtaken == 0


def test_a_request_that_is_put_back_shares_batches_with_its_like_only() -> None:
    queue = Queue(group=lambda x: x.shape[1])
    x = np.zeros((1, 5), np.float32)
    late = new_ticket(x, never_exit=False, task=task_of(None, width=2), now=queue.now, wall_time=0.0, draw=lambda: 0.5)
    assert queue.batcher.put_back(late)
    queue.put()
    assert {ticket.x.shape[1] for ticket, _ in queue.take().owners} == {5}


# --- admission by time -----------------------------------------------------------------------------


def test_with_an_objective_the_queue_admits_what_meets_it_if_nobody_leaves_early() -> None:
    queue = Queue(OfframpBatching(max_batch=8), objective=1.0)
    admitted = 0
    with pytest.raises(OverloadedError, match="too close to the latency objective of 1 s") as caught:
        while True:
            queue.put()
            admitted += 1
    assert admitted == round(LARGEST_SHARE * 1.0 / ROW_SECONDS)
    assert caught.value.retry_after_seconds == 1


def test_requests_that_will_be_late_join_while_there_is_credit_and_do_not_close_the_door() -> None:
    queue = Queue(OfframpBatching(max_batch=8), objective=1.0, credit=24.0)
    in_time = round(LARGEST_SHARE * 1.0 / ROW_SECONDS)
    for _ in range(in_time + 24):
        queue.put()
    with pytest.raises(OverloadedError):
        queue.put()
    while queue.batcher.rows:
        queue.run(0.08)
    with pytest.raises(OverloadedError):
        for _ in range(in_time + 3):  # what those answered earned lets in two
            queue.put()
    assert queue.batcher.rows == in_time + 2


def test_what_runs_and_what_waits_for_its_turn_counts_until_it_ends() -> None:
    queue = Queue(OfframpBatching(max_batch=30), objective=1.0)
    queue.put(30)
    first = queue.take()
    queue.put(30)
    queue.take()  # a second thread has it, while the first batch runs
    queue.put(20)
    with pytest.raises(OverloadedError):
        queue.put()
    queue.now += 0.2  # of the first batch's 0.3 s
    queue.put(20)
    with pytest.raises(OverloadedError):
        queue.put()
    queue.now += 0.05
    queue.batcher.ended(first)  # a little sooner than predicted
    queue.put(5)


def test_a_request_too_large_for_the_objective_joins_a_short_queue_and_small_ones_pass_it() -> None:
    queue = Queue(OfframpBatching(max_batch=10), objective=0.5)
    large = queue.put(200)
    small = [queue.put() for _ in range(10)]
    assert {ticket for ticket, _ in queue.take().owners} == set(small)
    queue.now += 10.0  # the large one is overdue, so that it gets its turn before what comes now
    with pytest.raises(OverloadedError):
        queue.put()
    assert queue.take().owners[0][0] is large


def test_a_timeout_that_cannot_be_met_behind_the_queue_is_refused_at_once() -> None:
    queue = Queue(OfframpBatching(max_batch=4))
    for _ in range(20):
        queue.put(timeout=0.5)
    with pytest.raises(OverloadedError, match=r"the request's timeout is 0\.200 s") as caught:
        queue.put(priority=2, timeout=0.2)
    assert caught.value.retry_after_seconds == 1 and not isinstance(caught.value, UnableError)
    queue.put(timeout=0.2)  # due before the others, so it runs before them


def test_a_timeout_that_cannot_be_met_by_an_idle_worker_says_so_and_not_to_retry() -> None:
    with pytest.raises(UnableError, match=r"parameters\.timeout: is 5000 us; this worker needs about 10000") as caught:
        Queue().put(timeout=0.005)
    assert caught.value.retry_after_seconds is None


def test_a_slow_machine_is_learned_and_admits_less() -> None:
    queue = Queue(OfframpBatching(max_batch=8), objective=1.0)
    for _ in range(100):
        queue.put(8)
        queue.run(0.16)  # twice what the profile says
    admitted = 0
    with pytest.raises(OverloadedError):
        while True:
            queue.put()
            admitted += 1
    assert admitted == pytest.approx(LARGEST_SHARE / (2 * ROW_SECONDS), abs=1)


def test_what_the_engine_does_between_batches_counts_only_while_requests_wait() -> None:
    for backlog, expected in ((True, 40), (False, 80)):
        queue = Queue(OfframpBatching(max_batch=8), objective=1.0)
        for _ in range(100):
            queue.put(8)
            if backlog and queue.batcher.rows == 8:
                queue.put(8)
            queue.run(0.08)
            queue.now += 0.08  # audits
        while queue.batcher.rows:
            queue.run(0.16)
        admitted = 0
        with pytest.raises(OverloadedError):
            while True:
                queue.put()
                admitted += 1
        assert admitted == pytest.approx(expected, abs=2), backlog


# --- expiry and cancellation -----------------------------------------------------------------------


def test_a_request_whose_time_runs_out_in_the_queue_is_given_up_before_it_runs() -> None:
    queue = Queue(OfframpBatching(max_batch=4))
    first, gone, stays = queue.put(4, timeout=0.04), queue.put(4, timeout=0.1, priority=2), queue.put(4, priority=3)
    queue.run(0.11)
    assert queue.batcher.given_up() == []
    batch = queue.take()
    assert {ticket for ticket, _ in batch.owners} == {stays}
    assert queue.batcher.given_up() == [gone]
    assert queue.batcher.given_up() == []
    assert (first.waiting, gone.waiting) == (0, 4)


def test_a_deep_request_expires_although_others_stay_before_it() -> None:
    queue = Queue(OfframpBatching(max_batch=1))
    for _ in range(3):
        queue.put()
    gone = queue.put(priority=9, timeout=0.05)
    queue.now += 0.06
    queue.take()
    assert queue.batcher.given_up() == [gone]
    assert queue.batcher.rows == 2


def test_a_cancelled_request_leaves_the_queue_and_makes_room() -> None:
    queue = Queue(OfframpBatching(max_batch=4), max_rows=8)
    begun, waits = queue.put(6), queue.put(2)
    queue.take()
    assert (queue.batcher.remove(begun), queue.batcher.remove(begun)) == (2, 0)
    queue.put(6)
    assert queue.take().owners[0][0] is waits


def test_a_thread_that_waits_gets_what_comes_later() -> None:
    queue = Queue()
    taken: list[Batch | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.batcher.take(wait=True)))
    thread.start()
    ticket = queue.put(3)
    thread.join(10)
    assert taken[0] is not None and [t for t, _ in taken[0].owners] == [ticket] * 3


# --- policies --------------------------------------------------------------------------------------


def test_the_batch_limit_grows_by_a_row_and_falls_by_a_tenth() -> None:
    queue = Queue(OfframpBatching(target_seconds=0.1, limit=10))
    limits = []
    for seconds in (0.05, 0.05, 0.2, 0.2, 0.05):
        queue.put(32)
        queue.run(seconds)
        limits.append(queue.batcher.batch_rows)
        queue.batcher.remove(queue.take().owners[0][0])
    assert limits == [11, 12, 10, 9, 10]  # 12 x 0.9 = 10.8, 9.72, then 10.72


def test_tf_servings_policy_waits_to_fill_a_batch_up_to_its_timeout() -> None:
    queue = Queue(TfServingBatching(max_batch=4, batch_timeout_micros=50_000, allowed_batch_sizes=()))
    queue.put()
    assert queue.batcher.take(wait=False) is None
    queue.now += 0.04
    queue.put()
    assert queue.batcher.take(wait=False) is None
    queue.now += 0.02
    assert len(queue.take()) == 2
    queue.put(5)
    assert len(queue.take()) == 4


def test_clockworks_policy_drops_what_is_too_late_and_runs_what_its_head_allows() -> None:
    queue = Queue(ClockworkBatching(0.1))
    early = queue.put()
    queue.now += 0.045
    later = queue.put(20)
    assert len(queue.take()) == 5  # the head has 55 ms left
    queue.now += 0.095
    assert queue.batcher.take(wait=False) is None
    assert queue.batcher.given_up() == [later]
    assert early.waiting == 0


def test_no_policy_gives_a_request_longer_than_its_own_timeout() -> None:
    queue = Queue(ClockworkBatching(10.0))
    queue.put(timeout=0.035)
    queue.put(20)
    assert len(queue.take()) == 3


def test_the_longest_wait_is_infinite_without_a_timeout() -> None:
    assert Queue().put().expires == math.inf
