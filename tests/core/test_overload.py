"""Overload: when a worker gives requests that name no budget a larger one, and that nothing of it is anybody else's."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fleet import MANIFEST, Fleet, promoted, published  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st
from scores import IDS, REQUEST, recorded

from offramp_core.admission import Pace, QueueAdmission
from offramp_core.batching import OfframpBatching
from offramp_core.certify import TierBudget, allowance, verify_certificate
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_core.evaluate import evaluate_plan
from offramp_core.overload import LEAST_SECONDS, LONGEST_SECONDS, NEARLY, SHORT, SPARE_LOAD, Overload
from offramp_core.protocol import OVERLOAD
from offramp_core.task import task_of
from offramp_core.tuning import Proposed, tune
from offramp_worker.engine.queue.batcher import Batcher
from offramp_worker.engine.queue.tickets import OverloadedError, new_ticket

LOOSE = {"maxDisagreement": "0.1"}
ASKED = replace(REQUEST, max_disagreement=0.03, tiers=(TierBudget(OVERLOAD, 0.1), TierBudget("strict", 0.01)))
PACE = Pace(tuple(0.01 * n for n in range(33)), least=0.0)


def manifest(overload: Any = LOOSE, **fields: Any) -> dict[str, Any]:
    objective = {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.03"}, "overload": overload}
    return {**MANIFEST, "objective": {k: v for k, v in objective.items() if v is not None}, **fields}


# --- when ------------------------------------------------------------------------------------------

seconds = st.floats(0, 10, allow_nan=False)
looks = st.tuples(st.sampled_from(["came", "asked", "judged"]), seconds, st.floats(0, 1), st.floats(0, 5))


@given(st.lists(looks, max_size=60))
def test_it_begins_only_where_requests_are_nearly_refused_and_lasts_a_while(events: list[Any]) -> None:
    now, overload = 0.0, Overload(PACE)
    for kind, amount, room, pause in events:
        now += pause
        before = overload
        if kind == "came":
            overload = overload.came(amount, now=now)
            assert overload.on == before.on
            continue
        if kind == "asked":
            overload = overload.asked(wait=amount, room=room, priority=2, now=now)
            assert overload.on or not before.on
        else:
            overload = overload.judged(wait=amount, room=room, now=now)
            assert before.on or not overload.on
        if overload.on and not before.on:
            assert amount >= NEARLY * room and amount > 0
        if before.on and not overload.on:
            assert (amount < SHORT * room or amount == 0) and now - before.since >= LEAST_SECONDS
            assert before.load(now) < SPARE_LOAD or now - before.since >= LONGEST_SECONDS
        if overload.on != before.on:
            assert overload.since == now


def test_an_empty_queue_does_not_end_it_while_as_much_comes_and_after_a_while_everybodys_plan_is_tried() -> None:
    overload, ended = Overload(PACE).asked(wait=1.0, room=1.0, priority=1, now=0.0), None
    for step in range(1, 4000):
        now = step * 0.01
        overload = overload.came(0.02, now=now).judged(wait=0.0, room=1.0, now=now)
        if not overload.on:
            ended = now
            break
    assert ended == pytest.approx(LONGEST_SECONDS)


def test_it_knows_no_load_before_requests_came_and_forgets_those_of_long_ago() -> None:
    overload = Overload(PACE)
    assert overload.load(1e9) == 0.0
    busy = overload.came(5.0, now=100.0)
    assert busy.load(100.0) == 5.0 > busy.load(101.0) > busy.load(110.0) > 0


# --- a burst, in time that the test turns ----------------------------------------------------------


@dataclass
class Worker:
    """The worker's own queue in front of an engine that takes what it is told: a hundredth of a second a row with exits
    off, nine tenths of it under everybody's plan, a quarter of it under overload."""

    may_ease: bool
    #: Of all these times.
    scale: float = 1.0
    #: Of a batch under overload besides those of its rows, and how long the machine stands still and how often.
    own: float = 0.0
    stall: float = 0.0
    every: float = 2.0
    now: float = 0.0
    refused: int = 0
    #: When each request came, and what it waited for its answer; of those under overload apart.
    usual: list[tuple[float, float]] = field(default_factory=list)
    eased: list[tuple[float, float]] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)

    def serve(self, arrivals: list[float], *, objective: float) -> None:
        batcher = Batcher(
            policy=OfframpBatching(),
            door=QueueAdmission(objective, Pace(tuple(self.scale * s for s in PACE.profile_seconds))),
            max_rows=10_000,
            clock=lambda: self.now,
            may_ease=lambda: self.may_ease,
        )
        coming = iter(arrivals)
        following, was_on = next(coming, None), False
        while following is not None or batcher.rows:
            while following is not None and following <= self.now:
                x = np.zeros((1, 2), dtype=np.float32)
                ticket = new_ticket(
                    x, never_exit=False, task=task_of(None, width=2), now=following, wall_time=0.0, draw=lambda: 1.0
                )
                try:
                    batcher.put(ticket)
                except OverloadedError:
                    self.refused += 1
                following = next(coming, None)
            batch = batcher.take(wait=False)
            if batch is None:
                self.now = self.now if following is None else following
                continue
            if batch.overload != was_on:
                self.switches.append(self.now)
                was_on = batch.overload
            began = self.now
            self.now += self.scale * len(batch) * (0.0025 if batch.overload else 0.009) + self.own * batch.overload
            if began // self.every != self.now // self.every:
                self.now += self.stall
            batcher.ended(batch, eased=batch.overload)
            (self.eased if batch.overload else self.usual).extend(
                (t.admitted, self.now - t.admitted) for t, _ in batch.owners
            )


def burst(
    seed: int, *, most: float = 160.0, begins: float = 10.0, ends: float = 20.0, until: float = 30.0
) -> list[float]:
    """A quarter of the most, ``most`` requests a second, a quarter again; a worker answers 100 with exits off."""
    rng, now, found = np.random.default_rng(seed), 0.0, []
    while now < until:
        now += rng.exponential(1 / (most if begins <= now < ends else most / 4))
        found.append(now)
    return found


@pytest.mark.parametrize("seed", range(2))
def test_a_burst_of_four_times_is_answered_within_a_second_of_its_beginning_and_nothing_is_refused(seed: int) -> None:
    arrivals, objective = burst(seed), 0.4
    without, worker = Worker(may_ease=False), Worker(may_ease=True)
    for each in (without, worker):
        each.serve(arrivals, objective=objective)
    assert without.refused > 100 and not without.eased
    assert worker.refused == 0
    waits = np.array([wait for _, wait in worker.usual + worker.eased])
    assert len(waits) == len(arrivals)
    assert np.mean(waits <= objective) >= 0.99
    came = np.array([at for at, _ in worker.eased])
    assert 10 < worker.switches[0] < 11 and came.min() > 9.5
    assert worker.switches[-1] < 22.5 and len(worker.switches) <= 4
    assert np.mean((came > 10) & (came < 20)) > 0.9


@pytest.mark.parametrize(("times", "within"), [(2.4, 1.0), (1.1, 10.0)])
def test_the_sooner_the_first_would_come_too_late_the_sooner_it_begins(times: float, within: float) -> None:
    """A burst of so many times what everybody's plan answers: until then nobody needs the larger budget."""
    arrivals = burst(0, most=times / 0.009, begins=2.0, ends=12.0, until=2.5 + within)
    without, worker = Worker(may_ease=False), Worker(may_ease=True)
    for each in (without, worker):
        each.serve(arrivals, objective=1.0)
    late = min(came for came, waited in without.usual if waited > 1.0)
    assert 2.0 < worker.switches[0] < min(late + 0.3, 2.0 + within), "0.3 s is the batch that runs"
    assert worker.refused == 0 and max(waited for _, waited in worker.usual + worker.eased) <= 1.0


def test_who_waited_for_a_stall_is_not_refused_where_one_batch_answers_all() -> None:
    """Fails where what a batch takes counts as its rows' time alone: after small ones a full one seems long."""
    arrivals = [at for at in burst(0) if 8 < at < 20]
    worker = Worker(may_ease=True, own=0.04, stall=0.35)
    worker.serve(arrivals, objective=0.4)
    assert worker.refused == 0 and len(worker.eased) > 1000


def test_one_long_stall_shuts_the_door_to_nobody_who_comes_after_it() -> None:
    """Fails where those that waited for it count as let in too freely: whoever came was late, however few had been."""
    worker = Worker(may_ease=True, stall=2.0, every=12.0)
    worker.serve([at for at in burst(0) if 8 < at < 20], objective=1.0)
    assert worker.refused == 0 and len(worker.eased) > 1000


def test_what_batches_under_overload_take_is_learned_by_their_rows_and_by_themselves() -> None:
    overload, rng = Overload(PACE), np.random.default_rng(1)
    assert overload.pace.seconds == PACE.seconds
    for rows in rng.integers(1, 20, 300).tolist():
        overload = overload.after(rows=rows, seconds=0.02 + 0.001 * rows)
    assert overload.pace.seconds[1] == pytest.approx(0.021, rel=0.05)
    assert overload.pace.seconds[32] == pytest.approx(0.052, rel=0.05)
    for _ in range(300):
        overload = overload.after(rows=2, seconds=0.03)
    assert overload.pace.seconds[2] == pytest.approx(0.03, rel=0.01)


def test_rows_of_two_sizes_are_forecast_by_their_rows() -> None:
    """Texts share a batch by their length: those of long ones have fewer rows and take longer, so that a line through
    both says that rows take nothing, and many would be answered late."""
    overload, rng = Overload(PACE), np.random.default_rng(1)
    for long in (rng.random(200) < 0.3).tolist():
        rows = int(rng.integers(4, 12) if long else rng.integers(16, 33))
        overload = overload.after(rows=rows, seconds=0.002 + rows * (0.04 if long else 0.0005))
    assert overload.pace.seconds[32] == pytest.approx(32 * overload.pace.seconds[1])


@given(st.lists(st.tuples(st.integers(1, 32), st.floats(0, 10)), min_size=1, max_size=60))
def test_no_batch_is_expected_to_take_less_than_one_of_fewer_rows(batches: list[tuple[int, float]]) -> None:
    overload = Overload(PACE)
    for rows, seconds in batches:
        overload = overload.after(rows=rows, seconds=seconds)
    expected = overload.pace.seconds
    assert expected[1] >= 0 and all(a <= b + 1e-9 for a, b in itertools.pairwise(expected[1:]))


# --- what begins it, by the worker's own queue -----------------------------------------------------


class Turned:
    """The worker's own queue, a request of a row taking so many seconds, in time that the test turns."""

    def __init__(self, *, row_seconds: float, objective: float) -> None:
        self.now, self.row_seconds = 0.0, row_seconds
        pace = Pace(tuple(row_seconds * n for n in range(33)))
        door = QueueAdmission(objective, pace, credit=0.0)
        policy, may_ease = OfframpBatching(), lambda: True
        self.batcher = Batcher(policy=policy, door=door, max_rows=10_000, clock=lambda: self.now, may_ease=may_ease)

    def put(self, *, rows: int = 1, never_exit: bool = False, **asked: Any) -> bool:
        """Whether a request is taken."""
        x, task = np.zeros((rows, 2), dtype=np.float32), task_of(None, width=2)
        ticket = new_ticket(x, never_exit=never_exit, task=task, now=self.now, wall_time=0.0, draw=lambda: 1.0, **asked)
        try:
            self.batcher.put(ticket)
        except OverloadedError:
            return False
        return True

    @property
    def on(self) -> bool:
        return self.batcher.overload_seconds() is not None


def test_a_request_that_is_refused_begins_it_for_nobody() -> None:
    worker = Turned(row_seconds=0.01, objective=0.1)
    assert worker.put() and worker.batcher.take(wait=False) is not None
    for asked in ({"rows": 7, "timeout_seconds": 1e-6}, {"rows": 8, "timeout_seconds": 0.05}):
        assert not worker.put(**asked) and not worker.on
    assert worker.put(rows=7) and not worker.on, "nor does a large one: an ordinary one has room to wait"


@pytest.mark.parametrize(
    "asked", [{"tier": "default"}, {"tier": "strict"}, {"never_exit": True}, {"deadline_seconds": 9.0}], ids=str
)
def test_requests_that_keep_their_budget_begin_it_for_nobody(asked: dict[str, Any]) -> None:
    worker = Turned(row_seconds=0.01, objective=0.1)
    while worker.put(**asked):
        pass
    assert not worker.on and worker.batcher.rows >= 7


def test_only_requests_no_more_urgent_than_those_that_wait_have_the_larger_budget() -> None:
    worker = Turned(row_seconds=0.01, objective=0.1)
    while not worker.on:
        assert worker.put(priority=9)
    assert worker.put(priority=1)
    batch = worker.batcher.take(wait=False)
    assert batch is not None and batch.overload and batch.priority == 9
    worker.batcher.ended(batch, eased=True)
    for _ in range(8):
        worker.put(priority=3)
    batch = worker.batcher.take(wait=False)
    assert batch is not None and batch.priority == 3, "now these wait as well"


def test_a_worker_whose_model_leaves_no_room_has_it_at_any_wait_and_refuses_less() -> None:
    arrivals, refused = burst(0)[:900], {}
    for may_ease in (False, True):
        worker = Worker(may_ease=may_ease, scale=8.5)  # a row takes 85 ms of an objective of 100
        worker.serve([5 * at for at in arrivals], objective=0.1)
        refused[may_ease] = worker.refused
        assert bool(worker.eased) == may_ease
    assert refused[True] < refused[False] / 2


# --- intent ----------------------------------------------------------------------------------------


def test_it_is_read_and_belongs_to_what_a_plan_is_tuned_for() -> None:
    spec = parse_spec(manifest())
    assert spec.overload == 0.1 and [t.name for t in spec.menu] == [OVERLOAD] and spec.tiers == ()
    assert len({parse_spec(manifest(o)).objective_key for o in (None, LOOSE, {"maxDisagreement": "0.2"})}) == 3
    assert parse_spec(manifest(None)).menu == ()


@pytest.mark.parametrize(
    ("overload", "fields", "complaint"),
    [
        ({"maxDisagreement": "0.03"}, {}, "not above accuracy.maxDisagreement 0.03"),
        ({"maxDisagreement": "0.6"}, {}, r"objective.overload.maxDisagreement"),
        ({}, {}, r"objective.overload.maxDisagreement"),
        ({"maxDisagreement": "0.1", "latency": "1s"}, {}, r"objective.overload"),
        (LOOSE, {"execution": "ResultsOnly"}, "spares nothing with execution ResultsOnly"),
    ],
)
def test_a_bad_one_is_refused_by_its_path(overload: Any, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSpecError, match=complaint):
        parse_spec(manifest(overload, **fields))


def test_no_tier_has_its_name() -> None:
    bad = manifest(None)
    bad["objective"]["tiers"] = [{"name": OVERLOAD, "maxDisagreement": "0.01"}]
    with pytest.raises(InvalidSpecError, match="use another name"):
        parse_spec(bad)


# --- certificates ----------------------------------------------------------------------------------


def test_it_is_certified_for_its_own_budget_saves_more_and_costs_nobody_the_plan() -> None:
    records = recorded(4000, 6, seed=5)
    found, plain = tune(records, ASKED), tune(records, replace(ASKED, tiers=()))
    assert isinstance(found, Proposed) and isinstance(plain, Proposed)
    own = next(t for t in found.certificate.tiers if t.name == OVERLOAD)
    assert (own.budget, found.certificate.budget) == (0.1, 0.03)
    assert own.level == found.certificate.level == pytest.approx(allowance(0.05, 1) / 3)
    assert found.predicted.tiers[OVERLOAD] > found.predicted.saving > found.predicted.tiers["strict"] > 0
    held_out = records.take(slice(-found.n_b, None))
    seen = evaluate_plan(held_out, found.plan.menu[OVERLOAD], IDS)
    assert (seen.n, seen.disagreements) == (own.n, own.k)
    assert seen.disagreement > found.certificate.disagreement, "a budget that is larger, and used"
    assert verify_certificate(found.certificate, found.plan, records=held_out, ramp_ids=IDS) is None
    everybody = evaluate_plan(held_out, replace(found.plan, tiers=()), IDS)
    assert (everybody.n, everybody.disagreements) == (found.certificate.n, found.certificate.k)


@pytest.mark.parametrize("seed", range(2))
def test_it_has_no_plan_that_saves_no_more_than_everybodys(seed: int) -> None:
    """At a budget a hair above there may be nothing to win."""
    found = tune(recorded(1500, 6, seed=seed), replace(ASKED, tiers=(TierBudget(OVERLOAD, 0.0300001),)))
    if isinstance(found, Proposed):
        assert all(saving > found.predicted.saving for saving in found.predicted.tiers.values())
        assert set(found.plan.menu) == set(found.predicted.tiers)


# --- the loop --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Fleet:
    return promoted(manifest())


@pytest.fixture
def fleet(served: Fleet) -> Fleet:
    return copy.deepcopy(served)


def test_the_plan_brings_it_and_its_status_says_by_what_proof(fleet: Fleet) -> None:
    assert [t.name for t in fleet.stable.tiers] == [OVERLOAD]
    assert (published(fleet).tiers, published(fleet).stable.tiers) == ({OVERLOAD: 0.1}, (OVERLOAD,))
    use = fleet.status.tiers[0]
    assert (use.name, use.state, use.budget, use.workers, use.since_at) == (OVERLOAD, "Exits", 0.1, 0, None)
    assert use.saving > 0 and use.certified_n > 0


def test_errors_under_overload_are_its_own_and_stop_it_alone(fleet: Fleet) -> None:
    """Fails where they are counted with everybody's: these would fall, or hide."""
    name, before = fleet.status.stable_config, fleet.status.measured
    for worker in fleet.workers:
        worker.tier_wrong = 0.5
    fleet.run(lambda f: published(f).stable.tiers == (), limit=400)
    assert fleet.status.stable_config == name and not fleet.stable.exits_off
    assert fleet.status.tiers[0].state == "Stopped"
    told = [e for e in fleet.events if e.reason == "SliceStopped"]
    assert len(told) == 1 and "audits of requests under overload disagreed; its budget is 10.00%" in told[0].message
    assert "requests have everybody's budget" in told[0].message
    assert fleet.status.measured.plan_hash == before.plan_hash


def test_its_beginning_and_end_are_told_with_numbers_and_since_when_stands(fleet: Fleet) -> None:
    one = fleet.workers[0]
    one.overload_seconds = 2.0
    fleet.step()
    use = fleet.status.tiers[0]
    assert use.workers == 1 and use.since_at == pytest.approx(fleet.now - 2.0)
    for _ in range(3):
        one.overload_seconds += 1.3
        fleet.step()
    assert fleet.status.tiers[0].since_at == use.since_at
    one.overload_seconds = None
    fleet.step()
    assert (fleet.status.tiers[0].workers, fleet.status.tiers[0].since_at) == (0, None)
    told = [e for e in fleet.events if e.reason in ("OverloadBegan", "OverloadEnded")]
    assert [e.reason for e in told] == ["OverloadBegan", "OverloadEnded"]
    assert "1 of 2 workers" in told[0].message and "10.00% in the place of 3.00%" in told[0].message


@pytest.mark.parametrize("lie", [float("nan"), -1.0, float("inf")])
def test_a_worker_that_tells_nonsense_of_it_ends_nothing(fleet: Fleet, lie: float) -> None:
    fleet.workers[0].overload_seconds = lie
    fleet.step()
    assert fleet.status.stable_config


def test_a_larger_budget_than_was_proven_is_never_used_and_a_smaller_one_takes_it_away(fleet: Fleet) -> None:
    fleet.edit(objective=manifest({"maxDisagreement": "0.05"})["objective"])
    fleet.step()
    assert published(fleet).stable.tiers == () and not fleet.stable.exits_off
    assert fleet.status.tiers[0].state == "NoPlan"
