"""Policies on the halves of a records file, on draws from it, and behind a queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from offramp_core.batching import MAX_BATCH, Batching
from offramp_core.bundle import BatchProfile, Profile
from offramp_core.plan import Execution
from offramp_core.precision import EXACT
from offramp_core.records import Records, SecondsArray
from offramp_lab.policies import NamedPolicy, Objective, Trace, policy, replay_halves
from offramp_lab.policies.base import NO_EXIT, PlanInForce
from offramp_lab.replay.arrivals import Arrivals
from offramp_lab.simulate import SimulatedRun, batching, capacity, serve_stream
from offramp_lab.simulate.draws import Truth, draw_rng, draw_sample, run_draw, saving_in_sample

SMALLEST_SLO_SECONDS = 0.010  # Apparate's rule for an objective that nobody gave: twice a lone request, at least 10 ms
EXITS_OFF = "exits-off"


@dataclass(frozen=True, slots=True)
class Queueing:
    """How requests come and are served. ``load`` is the share of what one worker without exits can do, at its best
    batch size."""

    arrivals: tuple[Arrivals, ...] = ()
    batching: tuple[str, ...] = ("offramp",)
    execution: Execution = "Auto"
    load: float | None = None
    slo_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """One policy behind one queue; ``served`` beside what exits-off made of the same arrivals."""

    arrivals: str
    batching: str
    rate: float
    load: float
    served: SimulatedRun
    baseline: SimulatedRun


@dataclass(frozen=True, slots=True)
class Drawn:
    """One policy on all draws: what was true of its plans on the whole pool, and what the last saved on its own tuning
    records."""

    truths: tuple[Truth, ...]
    in_sample: tuple[float, ...]
    certified: int
    exits_off: int


@dataclass(slots=True)
class PolicyResult:
    """A policy on one file."""

    policy: NamedPolicy
    trace: Trace
    serving: list[Serving] = field(default_factory=list)
    drawn: Drawn | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Everything a draw needs; sent once to each process."""

    pool: Records
    policies: tuple[str, ...]
    objective: Objective
    seed: int
    tune_rows: int
    stream_rows: int


def replay_file(
    records: Records, policies: Sequence[NamedPolicy], objective: Objective, *, advance: Callable[[str], None]
) -> tuple[Records, list[PolicyResult]]:
    """The newer half of a file, and what every policy did with it after tuning on the older half."""
    tune, stream = replay_halves(records)
    results = []
    for each in policies:
        advance(each.name)
        results.append(PolicyResult(each, each.run(tune, stream, objective)))
    return stream, results


def serving_profile(records: Records) -> Profile:
    """Costs by batch size; a file without them has a batch cost its rows one by one."""
    if records.profile is not None:
        return records.profile
    costs = records.costs
    one = BatchProfile(
        1, costs.baseline_seconds, tuple(costs.segment_seconds.tolist()), tuple(costs.ramp_seconds.tolist()), 0.0
    )
    return Profile("recorded", 1, (one,))


def default_slo_seconds(profile: Profile) -> float:
    return max(SMALLEST_SLO_SECONDS, 2 * profile.batches[0].exact_seconds)


def simulate_queues(
    stream: Records, results: Sequence[PolicyResult], queueing: Queueing, *, seed: int, advance: Callable[[str], None]
) -> None:
    """Put every policy behind every queue; the rows of the stream arrive in order."""
    chains = {p: serving_profile(stream.at(p)) for p in (stream.precision, *stream.others)}
    profile = chains[stream.precision]
    top_rate = capacity(profile, max_batch=MAX_BATCH)
    slo = queueing.slo_seconds or default_slo_seconds(profile)
    rate = None if queueing.load is None else queueing.load * top_rate
    for arrivals in queueing.arrivals:
        times = arrivals.times(len(stream), rate=rate, rng=np.random.default_rng(seed))
        seen_rate = (len(times) - 1) / float(times[-1]) if len(times) > 1 and times[-1] > 0 else float("nan")
        for name in queueing.batching:
            policy_of_batches = batching(name, profile=profile, slo_seconds=slo)

            def served(trace: Trace, *, by: Batching = policy_of_batches, at: SecondsArray = times) -> SimulatedRun:
                of = chains[trace.plans[-1].precision]
                trace = _first(trace, len(at))
                return serve_stream(at, trace, of, batching=by, execution=queueing.execution, slo_seconds=slo)

            baseline = served(_exits_off(len(times)))
            for result in results:
                advance(f"{result.policy.name}: {arrivals.spec}, {name}")
                result.serving.append(
                    Serving(arrivals.spec, name, seen_rate, seen_rate / top_rate, served(result.trace), baseline)
                )


def _first(trace: Trace, n: int) -> Trace:
    """The first ``n`` requests of a trace; an arrival trace may be shorter than the stream."""
    if n == len(trace.exit):
        return trace
    plans = tuple(plan for plan in trace.plans if plan.since < n)
    return Trace(trace.exit[:n], plans, trace.agrees[:n], trace.certificate)


def _exits_off(n: int) -> Trace:
    return Trace(np.full(n, NO_EXIT, dtype=np.intp), (PlanInForce(0, (), ()),), np.ones(n, dtype=np.bool_))


def run_draws(work: Work, draws: int, *, jobs: int, advance: Callable[[int], None]) -> dict[str, Drawn]:
    """All policies on ``draws`` samples, over ``jobs`` processes; the result does not depend on their number."""
    seen: dict[str, list[DrawOutcome]] = {name: [] for name in work.policies}
    for outcomes in _outcomes(work, draws, jobs=jobs):
        for name, outcome in outcomes.items():
            seen[name].append(outcome)
        advance(1)
    return {name: _summed(outcomes) for name, outcomes in seen.items()}


@dataclass(frozen=True, slots=True)
class DrawOutcome:
    """One policy on one draw."""

    truth: Truth
    in_sample: float
    certified: bool
    exits_off: bool


def _summed(outcomes: Sequence[DrawOutcome]) -> Drawn:
    return Drawn(
        truths=tuple(outcome.truth for outcome in outcomes),
        in_sample=tuple(outcome.in_sample for outcome in outcomes),
        certified=sum(outcome.certified for outcome in outcomes),
        exits_off=sum(outcome.exits_off for outcome in outcomes),
    )


def _outcomes(work: Work, draws: int, *, jobs: int) -> Iterator[dict[str, DrawOutcome]]:
    if jobs == 1:
        for number in range(draws):
            yield _one_draw(work, number)
        return
    with ProcessPoolExecutor(jobs, get_context("forkserver"), initializer=_remember, initargs=(work,)) as pool:
        yield from pool.map(_remembered_draw, range(draws))


_work: list[Work] = []  # of a child process; set once, so that the pool is not sent with every draw


def _remember(work: Work) -> None:
    _work[:] = [work]


def _remembered_draw(number: int) -> dict[str, DrawOutcome]:
    return _one_draw(_work[0], number)


def _one_draw(work: Work, number: int) -> dict[str, DrawOutcome]:
    sample = draw_sample(
        work.pool, tune_rows=work.tune_rows, stream_rows=work.stream_rows, rng=draw_rng(work.seed, number)
    )
    outcomes = run_draw(sample, work.pool, [policy(name) for name in work.policies], work.objective)
    return {
        name: DrawOutcome(
            truth=seen,
            in_sample=saving_in_sample(trace, sample.tune),
            certified=trace.certificate is not None,
            exits_off=trace.plans[-1].precision == EXACT and bool((trace.exit == NO_EXIT).all()),
        )
        for name, (trace, seen) in outcomes.items()
    }
