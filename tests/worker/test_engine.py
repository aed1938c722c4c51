"""The engine without HTTP: arms, early replies, audits and what is counted. Gates stand in for slow stages, never
sleeps."""

from __future__ import annotations

import base64
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from desks import Service
from engines import new_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import DEADLINE_SECONDS, eventually, plan_for
from scipy.special import softmax
from stages import behind, broken

from offramp_core.batching import BATCHING
from offramp_core.bundle import BatchProfile, Profile, TensorSpec, column_arrays, profile_arrays
from offramp_core.evaluate import evaluate
from offramp_core.evidence.slow import parse_limits
from offramp_core.execution import Regrouping, carries_on
from offramp_core.protocol import LONGEST_PACE, ArmPlan, PlanDocument
from offramp_core.records import records_from_arrays
from offramp_core.sketch import SecondsSketch
from offramp_core.task import NO_ANSWER, top_labels
from offramp_core.uncertainty import STEPS, TABLE_SIZE, exit_test, uncertainty
from offramp_worker.bundle.load import Bundle
from offramp_worker.devices import CPU
from offramp_worker.engine.accounts.audits import BACKLOG_LIMIT
from offramp_worker.engine.accounts.counters import Counters, RecordRing
from offramp_worker.engine.arms.arms import Active, Runtime, canary_drawn, staggered
from offramp_worker.engine.arms.breaker import Breaker
from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.engine.execution.chains import chain_on
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.pace import measured_pace
from offramp_worker.engine.execution.scores import ScoreTables
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.usual import UsualInputs
from offramp_worker.engine.execution.warming import PROBE_RUNS, warm_up
from offramp_worker.engine.queue.tickets import OverloadedError, Ticket, UnableError
from offramp_worker.metrics import Metrics
from offramp_worker.settings import settings_from_env
from offramp_worker.worker import InferenceWorker

EVERYONE = "1"  # a threshold that all but the least certain input of the table pass


STAGE_SECONDS = 0.25  # what the profile is said to tell of every stage, for requests with deadlines


class Bench:
    """An engine with a clock to turn and replies to wait for."""

    def __init__(self, bundle: Bundle, sessions: Sessions, **options: Any) -> None:
        self.now = 1000.0
        self.done: list[Ticket] = []
        self.fences = 0
        self.metrics = Metrics()
        self.engine = new_engine(
            bundle, sessions, metrics=self.metrics, deliver=self.done.extend, **{"clock": lambda: self.now, **options}
        )

    def activate(
        self,
        folder: Path,
        stable: dict[str, str],
        *,
        canary: dict[str, str] | None = None,
        execution: str = "ComputeSaving",
        audit_rate: float = 0.0,
        breaker: Breaker | None = None,
        wrap: Callable[[Runnable], Runnable] = lambda s: s,
        watched: bool = True,
        **fields: Any,
    ) -> PlanDocument:
        """Put plans in force without the signature's detour; ``watched`` says that the control plane has spoken to this
        process."""
        base = PlanDocument("tiny", "service-1", 1, ArmPlan({}, audit_rate), None, 0, "salt", 0.02)
        document = replace(base, **fields)
        runtimes = {}
        for arm, thresholds in (("stable", stable), ("canary", canary)):
            if thresholds is None:
                continue
            plan = plan_for(folder, thresholds, execution=execution)
            ids = [ramp.id for ramp in self.engine.bundle.ramps]
            tests = {
                ids.index(name): exit_test(float(value), self.engine.bundle.quantiles[ids.index(name)])
                for name, value in thresholds.items()
            }
            stages = tuple(wrap(s) for s in self.engine.sessions.stages(sorted(tests)))
            counter = self.engine.counters.open(epoch=document.epoch, arm=arm, plan_hash=plan.content_hash)
            regrouping = None if execution == "ResultsOnly" else Regrouping([[0.0]] * len(stages), [0.0])
            seconds = [[STAGE_SECONDS] * 64] * len(stages)
            runtimes[arm] = Runtime(plan, audit_rate, counter, stages, tests, regrouping, seconds, breaker)
        off = replace(self.engine.active.off, audit_rate=audit_rate)
        limits = parse_limits(document.slow_seconds, document.slow_seconds_by_length)
        if watched:
            self.engine.renew_lease()
        self.engine.activate(Active(off, document, runtimes["stable"], runtimes.get("canary"), limits))
        return document

    def serve(self, x: Any, *, never_exit: bool = False, one_by_one: bool = True) -> list[Ticket]:
        """Submit every row as a request of its own (or all as one) and wait for the replies and the audits."""
        parts = [x[i : i + 1] for i in range(len(x))] if one_by_one else [x]
        tickets = [self.engine.submit(part, never_exit=never_exit) for part in parts]
        eventually(lambda: all(t.cached or t in self.done for t in tickets), what="replies")
        self.fences += 1  # another input each time: no cache knows it
        fence = self.engine.submit(
            np.full_like(x[:1], self.fences), never_exit=True
        )  # once answered, the batches before it are counted
        eventually(lambda: fence in self.done, what="the fence")
        eventually(lambda: self.settled, what="the end of audits")
        return tickets

    def count(self, tickets: list[Ticket]) -> None:
        """What the front does after a reply."""
        for ticket in tickets:
            self.engine.accounts.replied(ticket)

    def slowed(self, stage: Runnable, seconds: float) -> Runnable:
        """A stage that turns the clock."""

        def turn() -> None:
            self.now += seconds

        return behind(turn, stage)

    @property
    def settled(self) -> bool:
        return all(c.drawn == c.audited for c in self.engine.counters.snapshot())

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if it was never touched."""
        return self.metrics.registry.get_sample_value(f"earlyexit_{name}", labels) or 0.0

    def counts(self, epoch: int, arm: str = "stable") -> Any:
        return next(c for c in self.engine.counters.snapshot() if (c.epoch, c.arm) == (epoch, arm))


@pytest.fixture
def bench(bundle: Bundle, sessions: Sessions) -> Iterator[Bench]:
    bench = Bench(bundle, sessions)
    bench.engine.start()
    yield bench
    bench.engine.close()
    assert bench.engine.join(DEADLINE_SECONDS)


# --- exits -----------------------------------------------------------------------------------------


def test_exits_off_answers_equal_the_exact_session_bit_for_bit(bench: Bench, sessions: Sessions) -> None:
    x = bundles.inputs(40)
    for n in (1, 2, 7, 32):
        ticket = bench.serve(x[:n], one_by_one=False)[0]
        np.testing.assert_array_equal(ticket.logits, sessions.exact(x[:n]))
        assert ticket.configs == ["exits-off"] * n


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_rows_leave_at_the_first_ramp_below_its_threshold(
    bench: Bench, bundle_dir: Path, sessions: Sessions, execution: str
) -> None:
    thresholds = {"r00-grid": "0.3", "r00-linear": "0.2", "r01-grid": "0.4", "r02-linear": "0.5"}
    bench.activate(bundle_dir, thresholds, execution=execution)
    x = bundles.inputs(200, seed=5)
    scores = sessions.tapped(x)
    names, limits = list(thresholds), [np.float32(v) for v in thresholds.values()]
    expected = [next((names[j] for j in range(4) if row[j] < limits[j]), "final") for row in scores.uncertainty]
    tickets = bench.serve(x)
    exits = [t.exits[0] for t in tickets]
    near = (
        np.abs(scores.uncertainty - np.array(limits)).min(axis=1) < 1e-4
    )  # another batch size may round to the other side
    assert [e for e, n in zip(exits, near, strict=True) if not n] == [
        e for e, n in zip(expected, near, strict=True) if not n
    ]
    assert len(set(exits)) >= 4
    for ticket, row in zip(tickets, range(len(x)), strict=True):
        answer = scores.logits[row] if ticket.exits[0] == "final" else None
        if answer is not None:
            np.testing.assert_allclose(ticket.logits[0], answer, rtol=1e-4, atol=1e-4)
    assert sum(bench.counts(1).exits.values()) == 200


def test_a_request_of_many_rows_gets_each_row_its_own_answer(
    bench: Bench, bundle_dir: Path, sessions: Sessions
) -> None:
    bench.activate(bundle_dir, {"r00-grid": "0.5"})
    x = bundles.inputs(75, seed=6)
    together = bench.serve(x, one_by_one=False)[0]
    alone = bench.serve(x)
    for row, ticket in enumerate(alone):
        np.testing.assert_allclose(together.logits[row], ticket.logits[0], rtol=1e-4, atol=1e-4)
        assert together.exits[row] == ticket.exits[0]


def test_never_exit_is_answered_by_the_exact_model_and_counted_for_no_plan(
    bench: Bench, bundle_dir: Path, sessions: Sessions
) -> None:
    bench.activate(bundle_dir, {"r00-grid": EVERYONE}, audit_rate=1.0)
    x = bundles.inputs(1)
    ticket = bench.serve(x, never_exit=True)[0]
    np.testing.assert_array_equal(ticket.logits, sessions.exact(x))
    assert (ticket.exits, ticket.configs, ticket.audited) == (["final"], ["exits-off"], [False])
    assert bench.counts(1).requests == bench.counts(0).requests == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6, -1e30, 3e38], ids=str)
def test_inputs_that_are_not_finite_or_beyond_all_measure_never_leave_early_and_hurt_no_neighbour(
    bench: Bench, bundle_dir: Path, value: float
) -> None:
    bench.activate(bundle_dir, {"r00-grid": EVERYONE, "r02-linear": EVERYONE}, audit_rate=1.0)
    x = bundles.inputs(8, seed=8)
    clean = bench.serve(x, one_by_one=False)[0]
    assert clean.exits[:3] == ["r00-grid"] * 3
    x[2, :, 0, 0] = value
    mixed = bench.serve(x, one_by_one=False)[0]
    assert mixed.exits[2] == "final"
    others = [i for i in range(8) if i != 2]
    np.testing.assert_allclose(mixed.logits[others], clean.logits[others], rtol=1e-4, atol=1e-4)


def test_a_finite_input_that_the_model_has_no_answer_to_shows_it(
    bench: Bench, bundle_dir: Path, sessions: Sessions
) -> None:
    """The ramp is certain, but a layer behind it overflows."""
    bench.activate(bundle_dir, {"r00-grid": EVERYONE})
    x = bundles.inputs(3, seed=8)[1:] * np.float32(1e37)
    assert np.isfinite(x).all()
    exact = sessions.exact(x)
    assert np.isnan(exact).any(axis=1).all()
    ticket = bench.serve(x, one_by_one=False)[0]
    assert ticket.exits == ["final"] * 2
    np.testing.assert_array_equal(ticket.logits, exact)
    assert ticket.labels.tolist() == [NO_ANSWER] * 2


def test_texts_of_padding_alone_and_numbers_far_from_all_known_ones_are_unusual() -> None:
    words = UsualInputs(TensorSpec("ids", "INT64", (-1,), pad=0, values=9, longest=4), np.array([[1, 2, 0, 0]]))
    assert words.rows(np.array([[1, 0, 0], [0, 3, 4]])) is None  # filled up at either end
    odd = words.rows(np.array([[1, 0, 0], [0, 0, 0], [0, 3, 4]]))
    assert odd is not None and odd.tolist() == [True, False, True]
    numbers = UsualInputs(TensorSpec("x", "FP32", (4,)), np.full((2, 4), -3.0, np.float32))
    assert numbers.rows(np.full((500, 4), 2_999.0, np.float32)) is None  # each, if not all of them together
    odd = numbers.rows(np.array([[0, 0, 0, 3_001], [1, 1, 1, 1], [np.nan, 0, 0, 0]], np.float32))
    assert odd is not None and odd.tolist() == [False, True, False]


def test_a_logit_that_is_nan_is_no_answer() -> None:
    assert top_labels(np.array([[1.0, np.nan], [0.0, 1.0], [np.inf, 1.0]], dtype=np.float32)).tolist() == [
        NO_ANSWER,
        1,
        0,
    ]


# --- warming up ------------------------------------------------------------------------------------


def shapes_warmed(
    spec: TensorSpec, known: Any, *, most: int, row_seconds: float = 0.0, seconds: float = 2.0
) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def run(x: Any) -> None:
        shapes.append(x.shape)
        time.sleep(row_seconds)

    warm_up(run, known, spec, most=most, seconds=seconds)
    return shapes[PROBE_RUNS:]


def test_every_size_is_warm_before_requests_come(bundle: Bundle, sessions: Sessions) -> None:
    bench = Bench(bundle, sessions)
    bench.engine.start()
    warm = {key[0] for key in bench.engine._executor.exact_stage._bindings}  # type: ignore[attr-defined]
    assert warm == set(range(1, bench.engine.batch_rows + 1))
    bench.engine.close()
    assert bench.engine.join(DEADLINE_SECONDS)


def test_a_worker_is_not_ready_before_it_is_warm(bundle_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = InferenceWorker(
        settings_from_env({"OFFRAMP_BUNDLE": str(bundle_dir), "OFFRAMP_PORT": "0"}), deliver=lambda _: None
    )
    ready: list[bool] = []
    warm_up = Sessions.warm_up

    def watched(*arguments: Any) -> None:
        warm_up(*arguments)
        ready.append(worker.ready)

    monkeypatch.setattr(Sessions, "warm_up", watched)
    worker.load()
    assert (ready, worker.ready) == ([False], True)
    worker.finish(seconds=30.0)


def test_only_a_plan_that_is_new_is_warmed_beside_requests(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, warmed = Service(bundle_dir, bundle, sessions), list[Sequence[Runnable]]()
    monkeypatch.setattr(Sessions, "warm_up", lambda _sessions, _most, stages: warmed.append(stages))
    first, second = service.plan(), service.plan({"r00-grid": "0.5"})
    service.run(first)
    service.run(first, audit_rate=0.5)
    service.run(first, canary=second, weight=10)
    service.run(first, canary=second, weight=50)
    canary = service.engine.active.canary
    service.run(second)
    stable = service.engine.active.stable
    assert stable is not None and canary is not None and stable.stages is canary.stages
    assert len(warmed) == 2 and warmed[1] is stable.stages
    service.engine.close()
    assert service.engine.join(DEADLINE_SECONDS)


def test_texts_are_warmed_at_every_length_they_are_filled_up_to_and_the_largest_batch_comes_first() -> None:
    spec = TensorSpec("ids", "INT64", (-1,), pad=0, values=9, longest=100)
    shapes = shapes_warmed(spec, np.array([[1, 2, 3, 0], [4, 0, 0, 0]]), most=6)
    assert {shape[1] for shape in shapes if shape[0] == 1} == {16, 32, 64, 100}
    assert {shape[0] for shape in shapes if shape[1] == 16} == {1, 2, 3, 4, 5, 6}
    assert [np.prod(shape) for shape in shapes] == sorted((np.prod(shape) for shape in shapes), reverse=True)


def test_a_slow_model_is_warmed_at_the_usual_sizes_only() -> None:
    spec = TensorSpec("x", "FP32", (2,))
    shapes = shapes_warmed(spec, np.ones((3, 2), np.float32), most=12, row_seconds=0.02, seconds=0.1)
    assert {shape[0] for shape in shapes} >= {1, 2, 4, 8, 12}
    assert len(shapes) <= 6  # by the time of one row there is room for no batch of more than two


# --- stages ----------------------------------------------------------------------------------------


def run_through(stages: Sequence[Runnable], x: Any, keep: dict[int, Any] | None = None) -> Any:
    """What comes out behind the last stage; ``keep`` says which rows go on after a stage."""
    features, rows = x, None
    for number, stage in enumerate(stages):
        features, _ = stage.run(features, x, rows)
        rows = (keep or {}).get(number)
    return features.copy()


def test_rows_that_leave_nowhere_get_the_exact_sessions_answer_bit_for_bit(sessions: Sessions) -> None:
    stages = sessions.stages((0, 1, 2, 3))
    for n in (1, 3, 32, 3):
        x = bundles.inputs(n, seed=n)
        np.testing.assert_array_equal(run_through(stages, x), sessions.exact(x))


def test_dropped_rows_change_nothing_for_those_that_stay(sessions: Sessions) -> None:
    stages = sessions.stages((0, 2, 3))
    x = bundles.inputs(12, seed=9)
    first, second = np.array([0, 3, 4, 7, 11]), np.array([1, 4])
    through = run_through(stages, x, keep={0: first, 1: second})
    np.testing.assert_allclose(through, sessions.exact(x[first][second]), rtol=1e-5, atol=1e-5)


def test_the_same_stages_of_two_arms_share_no_buffer(sessions: Sessions) -> None:
    one, other = sessions.stages((0, 2)), sessions.stages((0, 2))
    x, y = bundles.inputs(4, seed=1), bundles.inputs(4, seed=2)
    features, heads = one[0].run(x, x)
    before = features.copy(), heads[0][0].copy()
    other[0].run(y, y)
    np.testing.assert_array_equal(features, before[0])
    np.testing.assert_array_equal(heads[0][0], before[1])


class Counted:
    """A session whose runs are counted."""

    def __init__(self, session: Any) -> None:
        self._session, self.runs = session, 0

    def run(self, *args: Any) -> Any:
        self.runs += 1
        return self._session.run(*args)

    def run_with_iobinding(self, *args: Any) -> None:
        self.runs += 1
        self._session.run_with_iobinding(*args)

    def io_binding(self) -> Any:
        return self._session.io_binding()


def test_a_batch_of_a_size_not_seen_before_runs_once_and_is_answered_like_any_other(sessions: Sessions) -> None:
    """Regrouped texts come in many sizes and lengths, and not all of them are warm."""
    bound = [stage._session for stage in sessions.stages((0, 2, 3))]
    counted = [Counted(session.session) for session in bound]
    stages = chain_on(CPU, [replace(session, session=count) for session, count in zip(bound, counted, strict=True)])
    kept = np.array([0, 3, 4])
    for n in (12, 12, 7):
        x = bundles.inputs(n, seed=n)
        through = run_through(stages, x, keep={0: kept})
        np.testing.assert_allclose(through, sessions.exact(x[kept]), rtol=1e-5, atol=1e-5)
    assert [count.runs for count in counted] == [3, 3, 3, 3]


def test_a_batch_that_grows_beyond_the_buffers_is_answered_like_any_other(sessions: Sessions) -> None:
    stages = sessions.stages((1, 3))
    for n in (1, 2, 5, 40, 2, 40):
        x = bundles.inputs(n, seed=n)
        np.testing.assert_array_equal(run_through(stages, x), sessions.exact(x))


def held_up(bench: Bench, x: Any, hold: threading.Event) -> Ticket:
    """A request that the engine runs until ``hold`` is set, so that those behind it queue up and share one batch."""
    began, exact = threading.Event(), bench.engine._executor.exact_stage

    def wait() -> None:
        began.set()
        hold.wait(DEADLINE_SECONDS)

    bench.engine._executor.exact_stage = behind(wait, exact)
    blocker = bench.engine.submit(x, never_exit=True)
    assert began.wait(DEADLINE_SECONDS)
    return blocker


def test_a_single_row_is_answered_before_large_requests_that_came_first_and_so_is_a_smaller_one(
    bundle: Bundle, sessions: Sessions
) -> None:
    bench = Bench(bundle, sessions)  # without an objective
    bench.engine.start()
    hold = threading.Event()
    exact = bench.engine._executor.exact_stage
    blocker = held_up(bench, bundles.inputs(1), hold)
    large = [bench.engine.submit(bundles.inputs(n), never_exit=True) for n in (1024, 640)]
    row = bench.engine.submit(bundles.inputs(1, seed=1), never_exit=True)
    other = bench.engine.submit(bundles.inputs(1, seed=2), never_exit=False)
    bench.engine._executor.exact_stage = exact
    hold.set()
    eventually(lambda: len(bench.done) == 5, what="all replies")
    assert bench.done == [blocker, row, other, large[1], large[0]]
    for ticket, x in ((row, bundles.inputs(1, seed=1)), (large[0], bundles.inputs(1024))):
        np.testing.assert_array_equal(ticket.labels, top_labels(sessions.exact(x)))
    bench.engine.close()
    assert bench.engine.join(DEADLINE_SECONDS)


# --- early replies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_a_row_that_leaves_is_answered_while_its_batch_still_runs(
    bench: Bench, bundle_dir: Path, execution: str
) -> None:
    gate = threading.Event()

    def gate_last(stage: Runnable) -> Runnable:
        return stage if stage.ramps else behind(lambda: gate.wait(DEADLINE_SECONDS), stage)

    x = bundles.inputs(16, seed=3)
    bench.activate(bundle_dir, {"r00-grid": "0.5"}, execution=execution, wrap=gate_last)
    hold, exact = threading.Event(), bench.engine._executor.exact_stage
    try:
        blocker = held_up(bench, x[:1], hold)
        tickets = [bench.engine.submit(x[i : i + 1], never_exit=False) for i in range(16)]
        hold.set()
        eventually(lambda: [t for t in bench.done if t in tickets], what="an early reply")
        waiting = [t for t in tickets if t.pending]
        gate.set()
        eventually(lambda: all(t in bench.done for t in (*tickets, blocker)), what="the other replies")
        eventually(lambda: bench.counts(1).execution, what="the batch counted")
        assert bench.counts(1).execution.keys() == {"16"}
        late = [t for t in tickets if t.exits[0] == "final"]
        assert late and all(t in waiting for t in late)
        assert {t.exits[0] for t in tickets} == {"r00-grid", "final"}
    finally:
        bench.engine._executor.exact_stage = exact


# --- deadlines -------------------------------------------------------------------------------------

NOBODY = "0.000001"


def serve_together(bench: Bench, parts: Sequence[Any], deadlines: Sequence[float]) -> list[Ticket]:
    """Requests that share one batch, each with a deadline of its own (infinity: none)."""
    hold, exact = threading.Event(), bench.engine._executor.exact_stage
    try:
        blocker = held_up(bench, parts[0], hold)
        tickets = [
            bench.engine.submit(part, never_exit=False, deadline_seconds=deadline)
            for part, deadline in zip(parts, deadlines, strict=True)
        ]
        hold.set()
        eventually(lambda: all(t in bench.done for t in (blocker, *tickets)), what="replies")
    finally:
        bench.engine._executor.exact_stage = exact
    bench.serve(bundles.inputs(1), never_exit=True)  # the batch is counted, audits are done
    return tickets


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_a_deadline_gets_the_answer_of_the_deepest_ramp_that_there_is_time_for(
    bench: Bench, bundle_dir: Path, sessions: Sessions, execution: str
) -> None:
    plan = {"r00-grid": NOBODY, "r01-grid": NOBODY, "r02-linear": NOBODY}
    bench.activate(bundle_dir, plan, execution=execution, wrap=lambda stage: bench.slowed(stage, STAGE_SECONDS))
    x = bundles.inputs(5, seed=21)
    parts = [x[i : i + 1] for i in range(5)]
    tickets = serve_together(bench, parts, [0.1, 0.6, 0.9, 1.1, float("inf")])
    assert [t.exits[0] for t in tickets] == ["r00-grid", "r01-grid", "r02-linear", "final", "final"]
    assert [t.due[0] for t in tickets] == [True, True, True, False, False]
    stages = sessions.stages((0, 2, 3))
    first, _ = stages[0].run(x, x)
    _, heads = stages[1].run(first, x)
    np.testing.assert_allclose(tickets[1].logits[0], heads[0][0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_requests_with_a_deadline_are_in_no_plans_statistics_but_in_the_records(
    bench: Bench, bundle_dir: Path, execution: str
) -> None:
    bench.activate(bundle_dir, {"r00-grid": NOBODY}, execution=execution, audit_rate=1.0)
    x = bundles.inputs(6, seed=22)
    tickets = serve_together(bench, [x[:4], x[4:]], [0.1, float("inf")])
    counts = bench.counts(1)
    assert tickets[0].due == [True] * 4 and tickets[0].audited == [False] * 4
    assert (counts.requests, counts.drawn, counts.audited, counts.exits) == (2, 2, 2, {"final": 2})
    eventually(lambda: bench.engine.ring.read(0).next == 6, what="records of all")
    text = bench.metrics.text().decode()
    assert 'earlyexit_deadline_answers_total{arm="stable",ramp="r00-grid"} 4.0' in text
    assert 'earlyexit_exits_total{arm="stable",ramp="r00-grid"}' not in text


def test_a_row_that_is_not_finite_gets_no_deadline_answer(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {"r00-grid": NOBODY})
    x = bundles.inputs(2)
    x[0, 0, 0, 0] = np.nan
    assert serve_together(bench, [x], [0.1])[0].exits == ["final", "r00-grid"]


def test_a_certain_row_is_an_exit_whether_or_not_its_deadline_comes(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {"r00-grid": EVERYONE})
    ticket = serve_together(bench, [bundles.inputs(3)], [0.1])[0]
    assert (ticket.exits, ticket.due) == (["r00-grid"] * 3, [False] * 3)


def test_everyone_may_have_the_objective_as_deadline_whether_or_not_it_is_drawn_for_audit(
    bundle: Bundle, sessions: Sessions, bundle_dir: Path
) -> None:
    """What is compared is what is served: else a plan that is cut short is judged by answers that nobody got."""
    draws = iter([0.9] * 3 + [0.1] * 2 + [0.9] * 9)  # the blocker, two rows that are not drawn, two that are, ...
    bench = Bench(
        bundle, sessions, latency_seconds=0.1, always_in_time=True, draw=lambda: next(draws), cache_bytes=10_000
    )
    bench.engine.start()
    bench.activate(bundle_dir, {"r00-grid": NOBODY}, audit_rate=0.5)
    x = bundles.inputs(4, seed=22)
    tickets = serve_together(bench, [x[i : i + 1] for i in range(4)], [float("inf")] * 4)
    assert [t.due[0] for t in tickets] == [True] * 4
    assert [t.exits[0] for t in tickets] == ["r00-grid"] * 4
    assert [t.audited[0] for t in tickets] == [False, False, True, True]
    counts, reference = bench.counts(1), sessions.tapped(x[2:])
    wrong = [int(t.labels[0]) for t in tickets[2:]] != top_labels(reference.logits)
    assert (counts.requests, counts.drawn, counts.audited, counts.exits) == (4, 2, 2, {"final": 4})
    assert counts.disagreements == int(np.sum(wrong))
    again = bench.engine.submit(x[:1], never_exit=False)
    assert not again.cached  # what was cut short is not for others
    bench.engine.close()
    assert bench.engine.join(10)


# --- audits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_audits_count_what_brute_force_counts(
    bench: Bench, bundle_dir: Path, sessions: Sessions, execution: str
) -> None:
    bench.activate(bundle_dir, {"r00-grid": "0.5"}, execution=execution, audit_rate=1.0)
    x = bundles.inputs(300, seed=11)
    tickets = bench.serve(x)
    reference = top_labels(sessions.tapped(x).logits)
    served = np.array([t.labels[0] for t in tickets])
    counts = bench.counts(1)
    assert (counts.requests, counts.drawn, counts.audited) == (300, 300, 300)
    assert counts.disagreements == int((served != reference).sum()) > 0
    assert all(t.audited == [True] for t in tickets)
    assert eventually(lambda: bench.engine.ring.read(0).next == 300, what="records")


def test_results_only_compares_every_request_and_records_the_drawn_ones(
    bundle: Bundle, sessions: Sessions, bundle_dir: Path
) -> None:
    draws = itertools.cycle([0.05, 0.5, 0.9, 0.2])
    bench = Bench(bundle, sessions, draw=lambda: next(draws))
    bench.engine.start()
    bench.activate(bundle_dir, {"r00-grid": "0.5"}, execution="ResultsOnly", audit_rate=0.1)
    bench.serve(bundles.inputs(100))
    eventually(lambda: bench.engine.ring.read(0).next == 25, what="records of the drawn quarter")
    assert (bench.counts(1).drawn, bench.counts(1).audited) == (100, 100)
    bench.engine.close()
    assert bench.engine.join(DEADLINE_SECONDS)


def test_a_results_only_batch_that_every_row_leaves_has_not_failed(bench: Bench, bundle_dir: Path) -> None:
    """Nobody waits for the output any more, and everybody is compared with it."""
    bench.activate(bundle_dir, {"r00-grid": "1"}, execution="ResultsOnly")
    tickets = bench.serve(bundles.inputs(40, seed=6))
    left = [ticket.exits[0] != "final" for ticket in tickets]
    assert sum(left) >= 30, "or it would be idle"
    counts = bench.counts(1)
    assert (counts.requests, counts.audited, counts.failed_batches) == (40, 40, 0)
    assert bench.sample("failed_batches_total", arm="stable") == 0


def test_a_draw_decides_the_audit_whether_or_not_the_row_leaves(
    bundle: Bundle, sessions: Sessions, bundle_dir: Path
) -> None:
    draws = itertools.cycle([0.05, 0.15])
    bench = Bench(bundle, sessions, draw=lambda: next(draws))
    bench.engine.start()
    bench.activate(bundle_dir, {"r00-grid": "0.5"}, audit_rate=0.1)
    tickets = bench.serve(bundles.inputs(100, seed=4))
    assert [t.audited[0] for t in tickets] == [True, False] * 50
    left = [t.exits[0] != "final" for t in tickets[::2]]
    assert any(left) and not all(left)
    assert bench.counts(1).drawn == bench.counts(1).audited == 50
    bench.engine.close()
    assert bench.engine.join(DEADLINE_SECONDS)


def test_records_hold_every_ramp_and_the_final_answer(bench: Bench, bundle_dir: Path, sessions: Sessions) -> None:
    bench.activate(bundle_dir, {"r00-grid": "0.5"}, audit_rate=1.0)
    x = bundles.inputs(64, seed=12)
    bench.serve(x)
    block = eventually(lambda: (b := bench.engine.ring.read(0)).next == 64 and b, what="records")
    scores = sessions.tapped(x)
    recorded = np.frombuffer(base64.b64decode(block.uncertainty), "<f4").reshape(64, 4)
    reference = np.frombuffer(base64.b64decode(block.reference), "<i4")
    final = np.frombuffer(base64.b64decode(block.final), "<i4")
    order = np.lexsort(np.round(recorded, 3).T)
    expected = np.lexsort(np.round(scores.uncertainty, 3).T)
    np.testing.assert_allclose(recorded[order], scores.uncertainty[expected], atol=2e-3)
    assert sorted(reference) == sorted(top_labels(scores.logits))
    np.testing.assert_array_equal(final, reference)


def test_audits_survive_more_draws_than_the_backlog_holds(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {"r00-grid": "0.5"}, audit_rate=1.0)
    n = 4 * BACKLOG_LIMIT
    seen = []
    for part in np.split(bundles.inputs(n, seed=2), 8):
        bench.engine.submit(part, never_exit=False)
        seen.append(len(bench.engine.desk))
    eventually(lambda: bench.counts(1).audited == n, what="all audits")
    assert max(seen) <= BACKLOG_LIMIT + 64


def test_an_audit_that_fails_counts_against_the_plan(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {"r02-linear": EVERYONE}, audit_rate=1.0)
    bench.engine.desk._scored = lambda x: (_ for _ in ()).throw(RuntimeError("no memory"))  # type: ignore[assignment]
    bench.serve(bundles.inputs(5))
    assert (bench.counts(1).drawn, bench.counts(1).audited, bench.counts(1).disagreements) == (5, 5, 5)


def test_an_audit_that_fails_leaves_a_record_that_disagrees_with_every_plan(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {"r02-linear": EVERYONE}, audit_rate=1.0)
    bench.serve(bundles.inputs(3))
    desk, whole = bench.engine.desk, bench.engine.desk._scored
    desk._scored = lambda x: (
        (_ for _ in ()).throw(RuntimeError("no memory")) if len(x) > 1 or x[0, 0, 0, 0] == 7 else whole(x)
    )  # type: ignore[assignment]
    poison = bundles.inputs(2, seed=9)
    poison[:, 0, 0, 0] = 7
    bench.serve(np.concatenate([poison, bundles.inputs(2, seed=8)]))
    block, ramps = bench.engine.ring.read(0), bench.engine.bundle.columns
    arrays = {
        **{
            name: np.frombuffer(base64.b64decode(getattr(block, name)), dtype)
            for name, dtype in (("time", "<f8"), ("final", "<i4"), ("reference", "<i4"))
        },
        **{
            name: np.frombuffer(base64.b64decode(getattr(block, name)), dtype).reshape(-1, len(ramps))
            for name, dtype in (("uncertainty", "<f4"), ("prediction", "<i4"))
        },
        **profile_arrays(bench.engine.bundle.profile),
        **column_arrays(ramps),
    }
    records = records_from_arrays(arrays)
    assert len(records) == 7, "one for each, and none twice"
    lost = ~records.agrees.any(axis=1) & (records.uncertainty == 0).all(axis=1)
    assert lost.sum() == 2 and records.final_agrees.all()
    for ramp in range(records.n_ramps):
        assert evaluate(records.take(np.flatnonzero(lost)), [ramp], [0.000001]).disagreements == 2
    assert evaluate(records, [], []).disagreements == 0


# --- failures, slowness, leases, breaker ---------------------------------------------------------


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_a_batch_that_fails_answers_with_an_error_and_the_worker_goes_on(
    bench: Bench, bundle_dir: Path, execution: str
) -> None:
    def break_last(stage: Runnable) -> Runnable:
        return stage if stage.ramps else broken(stage)

    bench.activate(bundle_dir, {"r00-grid": "0.5"}, execution=execution, audit_rate=1.0, wrap=break_last)
    tickets = bench.serve(bundles.inputs(20, seed=3), one_by_one=True)
    assert {t.exits[0] for t in tickets if t.error is None} == {"r00-grid"}
    failed = [t for t in tickets if t.error is not None]
    counts = bench.counts(1)
    assert failed and counts.failed_batches >= 1
    assert counts.requests == counts.drawn == counts.audited == 20 - len(failed)
    bench.activate(bundle_dir, {}, epoch=2)
    assert bench.serve(bundles.inputs(1))[0].error is None


def test_a_request_answered_later_than_the_objective_is_counted_once(
    bundle: Bundle, bundle_dir: Path, sessions: Sessions
) -> None:
    bench = Bench(bundle, sessions, latency_seconds=2.0)
    bench.engine.start()
    try:
        bench.activate(bundle_dir, {"r02-linear": NOBODY}, wrap=lambda stage: bench.slowed(stage, 0.5))
        bench.count(bench.serve(bundles.inputs(3), one_by_one=False))
        assert bench.sample("late_requests_total") == 0
        bench.activate(bundle_dir, {"r02-linear": NOBODY}, epoch=2, wrap=lambda stage: bench.slowed(stage, 1.5))
        bench.count(bench.serve(bundles.inputs(3), one_by_one=False))
        assert bench.sample("late_requests_total") == 1
        assert bench.sample("requests_total", outcome="ok") == 2
        eventually(lambda: bench.sample("batch_rows_sum", arm="stable") == 6 + 2, what="the two fences counted as well")
    finally:
        bench.engine.close()


def test_batches_of_a_listed_size_are_judged_by_their_execution_time(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(
        bundle_dir,
        {"r02-linear": "0.5"},
        wrap=lambda stage: bench.slowed(stage, 0.5),
        slow_seconds={"2": 0.4, "3": 100.0},
    )
    for n in (1, 2, 3):
        bench.serve(bundles.inputs(n), one_by_one=False)
    counts = bench.counts(1)
    assert (counts.batches, counts.judged_batches, counts.slow_batches) == (3, 2, 1)
    assert set(counts.execution) == {"1", "2", "3"}
    sketch = SecondsSketch({int(i): n for i, n in counts.execution["2"].items()})
    assert sketch.quantile(0.5) == pytest.approx(0.5, rel=0.02) or sketch.quantile(0.5) == pytest.approx(1.0, rel=0.02)


def test_a_canary_batch_may_take_its_allowed_overhead_longer_than_a_stable_one(bench: Bench, bundle_dir: Path) -> None:
    plan = {"r02-linear": "0"}  # two stages, and nothing leaves at the first: half a second
    judged = {}
    for epoch, weight in ((1, 0), (2, 100)):
        bench.activate(
            bundle_dir,
            plan,
            canary=plan,
            weight_percent=weight,
            epoch=epoch,
            slow_seconds={"2": 0.49},
            max_overhead=0.1,
            wrap=lambda stage: bench.slowed(stage, 0.25),
        )
        bench.serve(bundles.inputs(2), one_by_one=False)
        arm = bench.counts(epoch, "canary" if weight else "stable")
        judged[arm.arm] = (arm.judged_batches, arm.slow_batches)
    assert judged == {"stable": (1, 1), "canary": (1, 0)}


def test_a_canary_ends_with_its_lease_and_only_a_new_document_brings_it_back(bench: Bench, bundle_dir: Path) -> None:
    arms = lambda: {t.arms[0] for t in bench.serve(bundles.inputs(4))}  # noqa: E731
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100, canary_lease_seconds=60.0)
    assert arms() == {"canary"}
    bench.now += 59
    bench.engine.renew_lease()
    bench.now += 59
    assert arms() == {"canary"}
    bench.now += 2
    assert arms() == {"stable"}
    assert bench.engine.arms.canary_lease_ended
    bench.engine.renew_lease()
    assert arms() == {"stable"}
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100, epoch=2)
    assert arms() == {"canary"}


def test_a_canary_that_lay_in_a_file_waits_until_the_control_plane_has_spoken_to_this_process(
    bench: Bench, bundle_dir: Path
) -> None:
    """After a restart, or from zero: nobody watches yet, so only the proven plan serves."""
    arms = lambda: {t.arms[0] for t in bench.serve(bundles.inputs(4))}  # noqa: E731
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100, watched=False)
    assert arms() == {"stable"}
    bench.engine.renew_lease()
    assert arms() == {"canary"}


def test_how_suspicious_the_detector_is_is_told_in_tenths(bench: Bench, bundle_dir: Path) -> None:
    breaker = Breaker(accuracy_budget=0.02, run_length=1_000_000.0)
    bench.activate(bundle_dir, {"r00-grid": "0.5"}, breaker=breaker)
    seen = [bench.engine.arms.suspicion]
    for _ in range(6):
        breaker.update(audited=4, disagreements=2)
        seen.append(bench.engine.arms.suspicion)
    assert seen == sorted(seen) and seen[0] < 0.3 and seen[-1] == 1.0
    assert all(round(s, 1) == s for s in seen)


def test_a_canary_that_is_taken_back_ends_before_the_document_that_takes_it_back_is_prepared(
    bench: Bench, bundle_dir: Path
) -> None:
    arms = lambda: {t.arms[0] for t in bench.serve(bundles.inputs(4))}  # noqa: E731
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100)
    assert arms() == {"canary"}
    bench.engine.arms.end_canary()
    bench.engine.renew_lease()
    assert arms() == {"stable"}
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100, epoch=2)
    assert arms() == {"canary"}


def test_a_pull_that_comes_after_the_lease_does_not_revive_the_canary(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100, canary_lease_seconds=60.0)
    bench.now += 61  # no batch looked at the clock in the meantime
    bench.engine.renew_lease()
    assert bench.serve(bundles.inputs(1))[0].arms == ["stable"]


def test_stable_exits_go_off_after_their_lease_and_come_back_with_the_control_plane(
    bench: Bench, bundle_dir: Path
) -> None:
    bench.activate(bundle_dir, {"r00-grid": EVERYONE}, stable_lease_seconds=100.0)
    bench.now += 99
    assert bench.serve(bundles.inputs(1))[0].exits == ["r00-grid"]
    bench.now += 52  # beyond the longest staggered lease
    ticket = bench.serve(bundles.inputs(1))[0]
    assert (ticket.exits, ticket.configs, ticket.epochs) == (["final"], ["exits-off"], [0])
    bench.engine.renew_lease()
    assert bench.serve(bundles.inputs(1))[0].exits == ["r00-grid"]


def test_the_breaker_opens_on_disagreement_and_a_new_epoch_arms_it_again(bench: Bench, bundle_dir: Path) -> None:
    breaker = Breaker(accuracy_budget=0.02, run_length=1e6)
    bench.activate(bundle_dir, {"r00-grid": EVERYONE}, audit_rate=1.0, breaker=breaker)
    bench.serve(bundles.inputs(400, seed=13))
    assert bench.engine.arms.breaker_open
    before = bench.counts(1)
    ticket = bench.serve(bundles.inputs(1))[0]
    assert (ticket.exits, ticket.epochs) == (["final"], [0])
    assert bench.counts(1).requests == before.requests  # what runs without the plan is not counted as the plan
    assert ticket.audited == [True]  # records for the next tuning go on
    bench.activate(bundle_dir, {"r00-grid": EVERYONE}, breaker=Breaker(accuracy_budget=0.02, run_length=1e6), epoch=2)
    assert not bench.engine.arms.breaker_open
    assert bench.serve(bundles.inputs(1))[0].exits == ["r00-grid"]


def test_the_breaker_stays_closed_within_budget(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(
        bundle_dir, {"r02-linear": EVERYONE}, audit_rate=1.0, breaker=Breaker(accuracy_budget=0.02, run_length=1000.0)
    )
    bench.serve(bundles.inputs(2000, seed=13))
    assert bench.counts(1).exits["r02-linear"] > 1900
    assert not bench.engine.arms.breaker_open


@pytest.mark.parametrize("name", BATCHING)
def test_every_batching_policy_answers_exactly(bundle: Bundle, sessions: Sessions, name: str) -> None:
    # a real clock: tf-serving's batches wait two milliseconds to fill
    bench = Bench(bundle, sessions, batching=name, latency_seconds=30.0, clock=time.perf_counter)
    bench.engine.start()
    x = bundles.inputs(70)
    for ticket, row in zip(bench.serve(x), x, strict=True):
        np.testing.assert_allclose(ticket.logits, sessions.exact(row[None]), rtol=1e-4, atol=1e-4)
    bench.engine.close()
    assert bench.engine.join(DEADLINE_SECONDS)


# --- requests that are not answered ----------------------------------------------------------------


def test_a_request_whose_time_runs_out_is_told_so_and_its_rows_do_not_run(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {}, audit_rate=1.0)
    x = bundles.inputs(3)
    with bench.engine._turn:  # nothing runs meanwhile
        first = bench.engine.submit(x[:1], never_exit=False)
        eventually(lambda: bench.engine._batcher.rows == 0, what="the first batch")
        hurried = bench.engine.submit(x[1:2], never_exit=False, timeout_seconds=0.5)
        patient = bench.engine.submit(x[2:], never_exit=False)
        bench.now += 1.0
    eventually(lambda: all(t in bench.done for t in (first, hurried, patient)), what="replies")
    assert [t.expired for t in (first, hurried, patient)] == [False, True, False]
    eventually(lambda: bench.settled and bench.counts(1).requests == 2, what="counts")
    assert bench.counts(1).drawn == 2  # who is not served is no label
    assert bench.sample("rows_total", arm="", outcome="expired") == 1
    eventually(lambda: bench.sample("inflight") == 0, what="nothing in flight")


def test_a_cancelled_request_does_not_run_and_is_never_heard_of_again(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {}, audit_rate=1.0)
    x = bundles.inputs(3)
    with bench.engine._turn:
        running = bench.engine.submit(x[:1], never_exit=False)
        eventually(lambda: bench.engine._batcher.rows == 0, what="the first batch")
        gone = bench.engine.submit(x[1:], never_exit=False)
        for ticket in (gone, gone, running):  # one that runs is not disturbed
            bench.engine.cancel(ticket)
    eventually(lambda: bench.settled and bench.counts(1).requests == 1, what="counts")
    assert bench.done == [running]
    assert bench.sample("rows_total", arm="", outcome="cancelled") == 2
    eventually(lambda: bench.sample("inflight") == 0, what="nothing in flight")


def test_a_refused_request_leaves_no_trace(bundle: Bundle, sessions: Sessions) -> None:
    bench = Bench(bundle, sessions, latency_seconds=1e-6, cache_bytes=1000)
    with pytest.raises(UnableError):
        bench.engine.submit(bundles.inputs(1), never_exit=False, timeout_seconds=1e-9)
    x = np.repeat(bundles.inputs(1), 5000, axis=0)
    for _ in range(2):  # the second one does not wait with the first
        with pytest.raises(OverloadedError, match="queue places"):
            bench.engine.submit(x, never_exit=False)
    assert bench.sample("inflight") == 0


# --- pure parts ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(derandomize=True)  # shares of what is drawn: six deviations are rare, not impossible
@given(st.integers(0, 100), st.text(max_size=8), st.text(max_size=8))
def test_the_arm_of_a_batch_follows_the_weight_and_is_the_same_everywhere(weight: int, salt: str, uid: str) -> None:
    draws = [canary_drawn(salt=salt, uid=uid, batch_number=n, weight_percent=weight) for n in range(400)]
    assert draws == [canary_drawn(salt=salt, uid=uid, batch_number=n, weight_percent=weight) for n in range(400)]
    # 6 standard deviations of a binomial share of 400
    assert abs(sum(draws) / 400 - weight / 100) <= 6 * (weight / 100 * (1 - weight / 100) / 400) ** 0.5 + 1e-12


def test_a_lower_weight_runs_a_subset_of_the_batches_of_a_higher_one() -> None:
    def at(weight: int) -> set[int]:
        return {n for n in range(500) if canary_drawn(salt="s", uid="u", batch_number=n, weight_percent=weight)}

    assert set() == at(0) < at(5) < at(50) < at(100) == set(range(500))


def test_leases_are_staggered_by_worker() -> None:
    leases = [staggered(100.0, uid=f"pod-{i}") for i in range(50)]
    assert min(leases) >= 100 and max(leases) <= 150 and max(leases) - min(leases) > 30


def test_auto_regroups_only_where_smaller_batches_are_cheaper() -> None:
    cheap = Profile("e", 1, tuple(BatchProfile(n, 0.01 * n, (0.01 * n,), (), 1e-5) for n in (1, 8, 32)))
    flat = Profile("e", 1, tuple(BatchProfile(n, 0.01, (0.01,), (), 1e-5) for n in (1, 8, 32)))
    assert (carries_on("Auto", cheap), carries_on("Auto", flat)) == (False, True)
    assert (carries_on("ResultsOnly", cheap), carries_on("ComputeSaving", flat)) == (True, False)


def test_counters_keep_the_last_eight_epochs_and_what_ran_without_a_plan() -> None:
    counters = Counters()
    for epoch in range(20):
        counters.open(epoch=epoch, arm="stable", plan_hash="h")
    assert [c.epoch for c in counters.snapshot()] == [0, *range(12, 20)]


@given(st.lists(st.integers(1, 7), max_size=20), st.integers(0, 60), st.integers(1, 9))
def test_the_record_ring_reads_like_a_list_that_forgets_its_beginning(sizes: list[int], after: int, limit: int) -> None:
    ring = RecordRing(n_ramps=2, ramp_set_digest="d", rows=10)
    everything: list[int] = []
    for n in sizes:
        new = np.arange(len(everything), len(everything) + n)
        answers = {"prediction": np.ones((n, 2)), "final": new, "reference": new}
        ring.append(time=new, uncertainty=np.ones((n, 2)), answers=answers)
        everything += new.tolist()
    block = ring.read(after, limit=limit)
    total = len(everything)
    first = min(max(after, total - 10, 0), total)
    rows = np.frombuffer(base64.b64decode(block.reference), "<i4").tolist()
    assert (block.first, block.next, rows) == (first, min(total, first + limit), everything[first : first + limit])


def test_the_crash_marker_survives_the_process_and_is_forgotten_with_a_newer_epoch(tmp_path: Path) -> None:
    marker = CrashMarker(tmp_path)
    assert marker.crashed_epoch is None
    marker.enter(7)
    marker.close()
    crashed = CrashMarker(tmp_path)
    assert crashed.crashed_epoch == 7
    crashed.enter(8)
    crashed.leave()
    crashed.close()
    again = CrashMarker(tmp_path)
    assert again.crashed_epoch == 7  # until a newer document is in force
    again.forget_before(8)
    again.close()
    assert CrashMarker(tmp_path).crashed_epoch is None


def test_a_canary_that_killed_the_process_does_not_run_again(
    bundle: Bundle, sessions: Sessions, bundle_dir: Path, tmp_path: Path
) -> None:
    first = CrashMarker(tmp_path)
    first.enter(1)
    first.close()
    bench = Bench(bundle, sessions, marker=CrashMarker(tmp_path))
    bench.engine.start()
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100)
    assert bench.serve(bundles.inputs(1))[0].arms == ["stable"]
    bench.activate(bundle_dir, {}, canary={"r00-grid": "0.5"}, weight_percent=100, epoch=2)
    assert bench.serve(bundles.inputs(1))[0].arms == ["canary"]
    bench.engine.close()
    assert bench.engine.join(DEADLINE_SECONDS)


@given(
    st.lists(st.lists(st.floats(width=32), min_size=5, max_size=5), min_size=1, max_size=6), st.integers(0, 2**32 - 1)
)
def test_scores_of_many_heads_equal_the_definition_in_core_bit_for_bit(rows: list[list[float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    quantiles = np.sort(rng.normal(-3, 3, size=(4, TABLE_SIZE)), axis=1)
    heads = [np.array(rows, dtype=np.float32), *rng.normal(0, 4, size=(3, len(rows), 5)).astype(np.float32)]
    with np.errstate(all="ignore"):
        expected = np.stack([uncertainty(h, quantiles[j]) for j, h in zip((2, 0, 1, 3), heads, strict=True)], axis=1)
        np.testing.assert_array_equal(ScoreTables(quantiles).uncertainty((2, 0, 1, 3), heads), expected)


@settings(deadline=None)  # a machine may be busy
@given(
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(0, 1_000_000),
    st.integers(0, 2**32 - 1),
)
def test_who_leaves_is_who_has_an_uncertainty_below_the_threshold(
    rows: list[list[float]], step: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for spread in (3.0, 300.0):
        table = np.sort(rng.normal(-3, spread, size=TABLE_SIZE))
        table[100:300] = table[200]  # a jump of the level
        # Beside rows of any kind: rows whose raw score is where the level of the threshold is, give or take the last
        # digits.
        edge = np.interp(np.array([step - 0.5, step, step + 0.5]) / STEPS, np.linspace(0, 1, TABLE_SIZE), table)
        near = (edge[:, None] + np.array([0.0, 1e-13, -1e-13, 1e-7, -1e-7])).ravel()
        close = np.stack([np.zeros_like(near), near, np.full_like(near, -1e9)], axis=1)
        for logits in (np.array(rows, dtype=np.float32), close, close.astype(np.float32)):
            with np.errstate(all="ignore"):
                expected = uncertainty(logits, table) < np.float32(step / STEPS)
                confidence = softmax(logits.astype(np.float64), axis=1).max(axis=1)
                leaves = exit_test(step / STEPS, table).leaves(logits, confidence)
            np.testing.assert_array_equal(np.zeros(len(logits), dtype=bool) if leaves is None else leaves, expected)


def test_a_threshold_of_zero_lets_nobody_leave(sessions: Sessions, bundle: Bundle) -> None:
    scores = sessions.tapped(bundle.probe_x)
    assert not (scores.uncertainty < np.float32(0)).any()
    assert uncertainty(np.full((1, 5), np.nan), bundle.quantiles[0])[0] == 1.0


# --- the pace of this hardware ---------------------------------------------------------------------


def test_a_worker_that_is_asked_to_tells_what_batches_take_here_before_its_first_request(
    bundle: Bundle, sessions: Sessions
) -> None:
    bench = Bench(bundle, sessions)
    assert bench.engine.pace == 0.0
    bench.engine.start(measure_seconds=0.01)
    try:
        assert bench.engine.pace > 0
    finally:
        bench.engine.close()
        assert bench.engine.join(DEADLINE_SECONDS)


def test_the_pace_is_the_mean_of_whole_batches_in_times_of_the_profile(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor limit holds up later batches, and not the first."""
    clock = [0.0]
    monkeypatch.setattr("offramp_worker.engine.execution.pace.time.perf_counter", lambda: clock[0])
    sizes: list[int] = []

    class Limited:
        def run(self, x: Any, given: Any, rows: Any = None) -> Any:
            sizes.append(len(x))
            clock[0] += 0.1 if len(sizes) <= 5 else 0.3

    stage: Any = Limited()
    profiled = {b.batch_size: sum(b.segment_seconds) for b in bundle.profile.batches}
    largest = max(profiled)
    pace = measured_pace(stage, bundle, most=largest, seconds=1.0)
    assert set(sizes) == {largest} and len(sizes) == 7
    assert pace == pytest.approx((5 * 0.1 + 2 * 0.3) / 7 / profiled[largest])
    assert measured_pace(stage, bundle, most=1, seconds=0.0) > 0 and sizes[-1] == min(profiled), "three runs at least"


def test_a_worker_that_was_held_up_tells_no_pace_that_nobody_would_believe(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("offramp_worker.engine.execution.pace.time.perf_counter", lambda: clock[0])

    class Frozen:
        def run(self, x: Any, given: Any, rows: Any = None) -> Any:
            clock[0] += 1e6

    stage: Any = Frozen()
    assert measured_pace(stage, bundle, most=1, seconds=0.5) == LONGEST_PACE
