"""The rooms of the engine, each by itself: without threads or HTTP."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import bundles
import numpy as np
import pytest
from stages import broken

from offramp_core.bundle import TensorSpec
from offramp_core.control.objects import ArmTally
from offramp_core.evidence.slow import BatchShape
from offramp_core.execution import Regrouping
from offramp_core.plan import Plan, exits_off_plan
from offramp_core.protocol import Arm, ArmCounts, ArmPlan, PlanDocument
from offramp_core.reasons import RequestOutcome
from offramp_core.task import task_of
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.accounts.accounts import Accounts
from offramp_worker.engine.accounts.audits import Audit
from offramp_worker.engine.accounts.counters import ArmCounter, Counters
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.arms.breaker import Breaker
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.engine.execution.execute import Leave
from offramp_worker.engine.execution.executor import Executor
from offramp_worker.engine.execution.ramp_sets import HeldSets
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.options import EngineOptions
from offramp_worker.engine.queue.batcher import Batch
from offramp_worker.engine.queue.cache import PredictionCache
from offramp_worker.engine.queue.deadlines import Deadlines
from offramp_worker.engine.queue.followers import Followers
from offramp_worker.engine.queue.replies import Progress, Replies
from offramp_worker.engine.queue.tickets import Ticket, new_ticket
from offramp_worker.metrics import Metrics

PLAN: Plan = exits_off_plan(backbone_digest="b", ramp_set_digest="r")
STAGE: Any = object()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def runtime(epoch: int = 0, arm: Arm = "stable", *, exits: bool = False, **options: Any) -> Runtime:
    options = {"stages": (STAGE,), "regrouping": Regrouping([[0.0]], [0.0]), **options} if exits else options
    return Runtime(PLAN, options.pop("audit_rate", 0.0), ArmCounter(epoch, arm, PLAN.content_hash), **options)


def in_force(epoch: int = 1, *, weight: int = 100, breaker: Breaker | None = None, **document: Any) -> Active:
    """Stable and canary with exits."""
    asked = PlanDocument("tiny", "s", epoch, ArmPlan({}, 0.0), None, weight, "salt", 0.02, **document)
    stable, canary = runtime(epoch, exits=True, breaker=breaker), runtime(epoch, "canary", exits=True)
    return Active(runtime(), asked, stable, canary, holdback=runtime(epoch, "holdback"))


def ticket(*, rows: int = 1, draws: float = 1.0, now: float = 1000.0, **asked: Any) -> Ticket:
    x = np.ones((rows, 2), np.float32)
    asked = {"never_exit": False, **asked}
    return new_ticket(x, task=task_of(None, width=2), now=now, wall_time=0.0, draw=lambda: draws, **asked)


def batch(*tickets: Ticket) -> Batch:
    owners = [(t, row) for t in tickets for row in range(len(t.x))]
    return Batch(np.concatenate([t.x for t in tickets]), owners, False)


# --- options -----------------------------------------------------------------------------------------


def test_everyone_has_a_deadline_only_where_all_are_to_be_in_time() -> None:
    options = EngineOptions(uid="w", max_queue_rows=1, latency_seconds=0.5)
    assert options.everyones_deadline is None
    assert replace(options, always_in_time=True).everyones_deadline == 0.5


# --- arms and leases -----------------------------------------------------------------------------------


def test_no_batch_is_drawn_for_a_canary_before_the_control_plane_has_spoken(clock: Clock) -> None:
    arms = Arms(runtime(), uid="w", clock=clock)
    active = in_force()
    arms.activate(active)
    assert arms.drawn(active, 0) is active.stable
    arms.meet()
    assert arms.drawn(active, 0) is active.canary


def test_a_canary_ends_with_its_lease_and_does_not_come_back_when_that_is_renewed(clock: Clock) -> None:
    arms = Arms(runtime(), uid="w", clock=clock)
    active = in_force(canary_lease_seconds=60.0)
    arms.meet()
    arms.activate(active)
    clock.now += 61.0
    arms.meet()
    assert arms.drawn(active, 0) is active.stable and arms.canary_lease_ended
    newer = in_force(2)
    arms.activate(newer)
    assert arms.drawn(newer, 0) is newer.canary and not arms.canary_lease_ended


def test_a_canary_that_killed_an_earlier_process_is_not_run_again(clock: Clock) -> None:
    arms = Arms(runtime(), uid="w", clock=clock, crashed_epoch=1)
    arms.meet()
    assert arms.drawn(in_force(1), 0).counter.arm == "stable"
    assert arms.drawn(in_force(2), 0).counter.arm == "canary"


def test_exits_go_off_with_the_stable_lease_and_with_an_open_breaker(clock: Clock) -> None:
    arms = Arms(runtime(), uid="w", clock=clock)
    breaker = Breaker(accuracy_budget=0.02, run_length=100.0)
    active = in_force(stable_lease_seconds=100.0, weight=0, breaker=breaker)
    arms.activate(active)
    assert not arms.exits_off and arms.drawn(active, 0) is active.stable
    clock.now += 151.0  # leases differ by up to a half
    assert arms.exits_off and arms.drawn(active, 0) is active.off
    arms.renew()
    assert not arms.exits_off
    breaker.update(audited=50, disagreements=50)
    assert arms.exits_off and arms.suspicion == 1.0 and "breaker" in arms.describe()


def test_a_batch_that_is_held_back_from_the_canary_is_not_compared(clock: Clock) -> None:
    arms = Arms(runtime(), uid="w", clock=clock)
    active = in_force(holdback_share=0.5)
    assert active.stable is not None and active.canary is not None
    of_stable = [arms.held_back(active, active.stable, n) for n in range(100)]
    of_canary = [arms.held_back(active, active.canary, n) for n in range(100)]
    assert [r is active.holdback for r, _ in of_stable] == [r is active.holdback for r, _ in of_canary]
    assert {r.counter.arm for r, _ in of_stable} == {"stable", "holdback"}
    assert all(compared for _, compared in of_stable) and not any(compared for _, compared in of_canary)


# --- deadlines -----------------------------------------------------------------------------------------


def test_rows_are_due_when_the_next_stage_would_make_them_late(clock: Clock) -> None:
    rule = Deadlines(everyones=None, clock=clock)
    mixed = batch(ticket(deadline_seconds=0.4), ticket())
    assert not rule.none_in(mixed) and rule.none_in(batch(ticket()))
    deadlines = rule.of(mixed, runtime(exits=True, stage_seconds=[[0.3, 0.3], [0.3, 0.3]]))
    assert deadlines is not None and deadlines.due(0, np.arange(2)) is None
    clock.now += 0.2
    assert (due := deadlines.due(0, np.arange(2))) is not None and due.tolist() == [True, False]
    assert deadlines.of(np.array([False, True])).due(0, np.arange(1)) is None


def test_everyones_deadline_is_of_those_who_ask_for_none_and_of_nobody_who_is_compared_anyway(clock: Clock) -> None:
    rule = Deadlines(everyones=0.1, clock=clock)
    assert not rule.none_in(batch(ticket()))
    clock.now += 1.0
    deadlines = rule.of(
        batch(ticket(), ticket(deadline_seconds=9.0)), runtime(exits=True, stage_seconds=[[0.0], [0.0]])
    )
    assert deadlines is not None and (due := deadlines.due(0, np.arange(2))) is not None
    assert due.tolist() == [True, False]
    assert rule.of(batch(ticket()), runtime(exits=True, regrouping=None)) is None


# --- accounts ------------------------------------------------------------------------------------------


class Books:
    """Accounts with what they write to."""

    def __init__(self, clock: Clock) -> None:
        self.counters, self.metrics = Counters(), Metrics()
        self.accounts = Accounts(
            self.counters,
            self.metrics,
            spec=TensorSpec("x", "FP32", (2,)),
            task=task_of(None, width=2),
            exact_seconds=[0.0, 0.1],
            objective=1.0,
            breaker_open=lambda: True,
            clock=clock,
        )

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"earlyexit_{name}", labels) or 0.0


@pytest.fixture
def books(clock: Clock) -> Books:
    return Books(clock)


def test_a_request_that_does_not_fit_is_in_flight_no_more_and_part_of_the_demand(books: Books) -> None:
    books.accounts.admitted(3)
    assert books.sample("inflight") == 3
    books.accounts.rejected(3)
    assert books.sample("inflight") == 0 and books.sample("rows_total", arm="", outcome="rejected") == 3
    books.accounts.refused(2)
    assert books.counters.refused == 5


def test_rows_by_their_deadline_are_measured_apart_from_those_that_left(books: Books) -> None:
    served = runtime(1, exits=True)
    books.accounts.admitted(3)
    books.accounts.measure_replies(served, "r00", [0.1, 0.1], due=False)
    books.accounts.measure_replies(served, "r00", [0.1], due=True)
    assert books.sample("exits_total", ramp="r00", arm="stable") == 2
    assert books.sample("deadline_answers_total", ramp="r00", arm="stable") == 1
    assert books.sample("inflight") == 0 and served.counter.requests == 0


def test_an_audit_that_opens_the_breaker_is_counted_and_shown(books: Books) -> None:
    served = runtime(1, exits=True, breaker=Breaker(accuracy_budget=0.02, run_length=100.0))
    books.accounts.judge(served, 50, 50, ())
    assert (served.counter.audited, served.counter.disagreements) == (50, 50)
    assert books.sample("breaker_open") == 1 and books.sample("disagreements_total", arm="stable") == 50


def test_a_failed_batch_is_counted_and_neither_timed_nor_judged(books: Books) -> None:
    active = in_force()
    assert active.stable is not None
    books.accounts.count_batch(batch(ticket()), active, active.stable, seconds=0.1, failed=True, answer_seconds=None)
    counts = active.stable.counter.freeze()
    assert (counts.batches, counts.failed_batches, counts.execution) == (1, 1, {})


def test_a_request_is_late_beyond_the_objective(books: Books, clock: Clock) -> None:
    asked = ticket()
    clock.now += 2.0
    books.accounts.replied(asked)
    assert books.sample("late_requests_total") == 1 and books.sample("requests_total", outcome="ok") == 1
    asked.expired = True
    books.accounts.replied(asked)
    assert books.sample("requests_total", outcome=RequestOutcome.EXPIRED) == 1


# --- executor and replies ------------------------------------------------------------------------------


def test_the_executor_runs_a_batch_without_an_engine_and_its_probe_finds_a_sick_stage(
    bundle: Bundle, sessions: Sessions, clock: Clock
) -> None:
    executor = Executor(HeldSets(bundle, sessions), deadlines=Deadlines(everyones=None, clock=clock))
    x = bundles.inputs(3)
    asked = new_ticket(x, never_exit=False, task=task_of(None, width=5), now=clock(), wall_time=0.0, draw=lambda: 1.0)
    (leave,) = executor.run(Batch(x, [(asked, row) for row in range(3)], False), runtime())
    np.testing.assert_array_equal(leave.logits, sessions.exact(x))
    executor.probe(2)
    executor.exact_stage = broken(executor.exact_stage)
    with pytest.raises(RuntimeError, match="kernel exploded"):
        executor.probe(2)


def replies(
    bundle: Bundle, books: Books, clock: Clock, served: Runtime
) -> tuple[Replies, list[tuple[Ticket, int]], list[Audit]]:
    """With the tickets that were delivered, each with the requests that its runtime had counted by then."""
    done: list[tuple[Ticket, int]] = []
    audits: list[Audit] = []
    made = Replies(
        bundle,
        accounts=books.accounts,
        followers=None,
        audit=audits.append,
        clock=clock,
        deliver=lambda tickets: done.extend((one, served.counter.requests) for one in tickets),
    )
    return made, done, audits


def test_a_row_is_answered_before_it_is_counted_and_its_audit_waits(bundle: Bundle, books: Books, clock: Clock) -> None:
    served = runtime(1, exits=True, audit_rate=0.5)
    made, done, audits = replies(bundle, books, clock, served)
    first, second = ticket(draws=0.1), ticket(rows=2, draws=0.9)
    both, progress = batch(first, second), Progress(clock(), {0, 1, 2})
    clock.now += 0.2
    made.answer(both, served, Leave(np.array([0, 1]), 0, np.zeros((2, 2), np.float32)), progress)
    assert done == [(first, 0)] and served.counter.requests == 2
    assert [(audit.served, audit.left) for audit in audits] == [(0, True)]
    assert progress.open_rows == {2} and progress.answer_seconds == pytest.approx(0.4)
    made.answer(both, served, Leave(np.array([2]), None, np.zeros((1, 2), np.float32)), progress)
    assert done[1:] == [(second, 2)] and second.exits == [bundle.columns[0].id, "final"]


def test_rows_of_a_failed_batch_that_have_no_answer_get_an_error(bundle: Bundle, books: Books, clock: Clock) -> None:
    served = runtime(1, exits=True)
    made, done, _ = replies(bundle, books, clock, served)
    left, lost = ticket(), ticket()
    both, progress = batch(left, lost), Progress(clock(), {0, 1})
    books.accounts.admitted(2)
    made.answer(both, served, Leave(np.array([0]), 0, np.zeros((1, 2), np.float32)), progress)
    made.fail(both, served, progress)
    assert [one for one, _ in done] == [left, lost] and left.error is None and lost.error is not None
    assert books.sample("inflight") == 0 and books.sample("rows_total", arm="stable", outcome="failed") == 1


def test_a_request_whose_time_ran_out_is_delivered_as_expired(bundle: Bundle, books: Books, clock: Clock) -> None:
    made, done, _ = replies(bundle, books, clock, runtime())
    asked = ticket(rows=2)
    made.give_up([asked])
    assert done == [(asked, 0)] and asked.outcome is RequestOutcome.EXPIRED
    assert books.sample("rows_total", arm="", outcome="expired") == 2


# --- followers -----------------------------------------------------------------------------------------


class Line:
    """Followers with what they hand on."""

    def __init__(self, books: Books, clock: Clock, active: Active) -> None:
        self.queued: list[Ticket] = []
        self.done: list[Ticket] = []
        self.audits: list[Audit] = []
        self.open = True
        self.room = 10
        self.arms = Arms(active.off, uid="w", clock=clock)
        self.arms.activate(active)
        self.followers = Followers(
            PredictionCache(max_bytes=10**6),
            arms=self.arms,
            accounts=books.accounts,
            metrics=books.metrics,
            audit=self.audits.append,
            put_back=self._put_back,
            deliver=self.done.extend,
            clock=clock,
            room=lambda: self.room,
        )

    def _put_back(self, one: Ticket) -> bool:
        self.queued.append(one)
        return self.open


def answered(one: Ticket, served: Runtime) -> Ticket:
    one.logits[:], one.labels[:], one.pending = 0.0, 1, 0
    one.configs, one.epochs = [served.config] * len(one.x), [served.counter.epoch] * len(one.x)
    return one


def test_copies_of_an_answer_that_does_not_count_do_not_count_nor_do_those_that_no_audit_has_room_for(
    books: Books, clock: Clock
) -> None:
    active = replace(in_force(weight=0), canary=None)
    stable = active.stable
    assert stable is not None
    line = Line(books, clock, active)
    for counts, room, expected in ((False, 10, 0), (True, 0, 0), (True, 10, 1)):
        line.room = room
        leader, follower, later = ticket(), ticket(), ticket()
        assert not line.followers.answers(leader) and line.followers.answers(follower)
        line.followers.share([answered(leader, stable)], stable, counts=counts)
        assert stable.counter.requests == expected
        line.room = 0
        assert line.followers.answers(later) and stable.counter.requests == expected
        line.followers.forget()
    assert len(line.done) == 3


def test_who_follows_gets_the_leaders_answer_and_whoever_comes_later_the_cached_one(books: Books, clock: Clock) -> None:
    active = replace(in_force(weight=0), canary=None)
    assert active.stable is not None
    line, leader, follower, later = Line(books, clock, active), ticket(), ticket(), ticket()
    assert not line.followers.answers(leader) and line.followers.answers(follower)
    line.followers.share([answered(leader, active.stable)], active.stable, counts=True)
    assert line.done == [follower] and follower.labels.tolist() == [1]
    assert line.followers.answers(later) and later.cached and line.done == [follower]
    assert active.stable.counter.requests == 2, "the leader is counted where it was answered"
    line.followers.forget()
    assert not line.followers.answers(ticket())


def test_followers_of_a_request_that_is_not_answered_go_into_the_queue_or_hear_that_there_is_none(
    books: Books, clock: Clock
) -> None:
    line = Line(books, clock, Active(runtime()))
    leader, follower, other = ticket(), ticket(), ticket()
    assert [line.followers.answers(one) for one in (leader, follower)] == [False, True]
    line.followers.abandon(leader)
    assert line.queued == [follower] and line.done == []
    assert [line.followers.answers(one) for one in (leader, other)] == [False, True]
    line.open = False
    line.followers.abandon(leader)
    assert line.done == [other] and other.error == "the worker has shut down"


def test_nobody_follows_while_a_canary_is_drawn_for_or_with_a_deadline(books: Books, clock: Clock) -> None:
    line = Line(books, clock, Active(runtime()))
    assert not line.followers.answers(ticket(deadline_seconds=1.0)) and not line.followers.answers(ticket())
    assert line.followers.answers(ticket())
    line.arms.meet()
    line.arms.activate(in_force())
    assert not line.followers.answers(ticket()) and not line.followers.answers(ticket())


# --- one definition of what is counted -------------------------------------------------------------------


def test_what_is_counted_is_defined_once() -> None:
    growing = ArmCounter(3, "canary", "hash")
    assert growing.__slots__ == tuple(f.name for f in fields(ArmCounts))
    assert growing.freeze() == ArmCounts(3, "canary", "hash")
    with pytest.raises(AttributeError):
        growing.no_such_count = 1


def test_what_is_told_is_apart_from_what_goes_on_growing() -> None:
    growing = ArmCounter(3, "canary", "hash")
    growing.count_batch(shape=BatchShape(4, 128), seconds=0.1, slow_above=0.05, failed=False)
    growing.count_replies(exit_name="r00", latencies=[0.1] * 4, drawn=2)
    told, other = growing.freeze(), ArmCounter(3, "canary", "hash")
    growing.count_replies(exit_name="r00", latencies=[0.1] * 4, drawn=2)
    assert told.exits == {"r00": 4} and sum(told.latency.values()) == 4
    assert told.execution_by_length.keys() == {"4x128"} and told.execution.keys() == {"4"}
    assert other.freeze() == ArmCounts(3, "canary", "hash"), "counters share nothing"


def test_a_batch_with_others_beside_it_is_judged_by_its_own_time_and_keeps_the_engine_busy_for_its_part() -> None:
    growing = ArmCounter(3, "canary", "hash")
    growing.count_batch(shape=BatchShape(1), seconds=0.8, slow_above=0.5, failed=False, busy=0.1)
    assert (growing.slow_batches, growing.busy_seconds) == (1, 0.1)


def test_the_ledger_sums_counts_by_the_names_that_they_have() -> None:
    counts = ArmCounts(
        1,
        "canary",
        "hash",
        requests=8,
        drawn=7,
        audited=6,
        disagreements=5,
        batches=4,
        judged_batches=3,
        slow_batches=2,
        failed_batches=1,
    )
    tally = ArmTally.of(counts)
    assert (tally.requests, tally.drawn, tally.audited, tally.disagreements) == (8, 7, 6, 5)
    assert (tally.batches, tally.judged, tally.slow, tally.failed) == (4, 3, 2, 1)
    assert tally + tally == ArmTally(16, 14, 12, 10, 8, 6, 4, 2)
