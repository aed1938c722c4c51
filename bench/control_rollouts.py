"""The rollouts of ``python -m bench.control``: what is canaried, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.control_fleet import MANIFEST, Fleet, service_of
from bench.control_world import BACKBONE, BUDGET, RAMP_SET, World
from offramp_core.control.snapshot import RecordStore
from offramp_core.plan import THRESHOLD_STEP, Plan

WARM_UP_REQUESTS = 32_000  # that the stable plan serves before: enough for every batch size to be judged
LONGEST_SECONDS = 3 * 3600.0
UTILISATION = (0.1, 0.65)  # of the fleet without exits, drawn for each rollout: beyond 0.35 audits become scarce
CURVES = 6  # rollouts of a scenario whose evidence is kept for the picture
ROLLOUTS_PER_DRAW = 10  # rollouts that share a draw of labels and so a certified plan
FIRST_LABELS, LABEL_SECONDS = 1000, 20.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is rolled out, and what must not happen to it in more than a share ``allowed`` of rollouts.

    ``rate`` is the true disagreement of the canary (None: the tuner's own plan from 1,000 labels of its own),
    ``stable`` that of the plan it would replace (0: exits off). ``request_rate`` is the fleet's.
    """

    name: str
    promise: str
    misses: Callable[[Attempt], bool]
    allowed: float
    rate: float | None
    stable: float = 0.0
    slowdown: float = 1.0
    request_rate: float = 1600.0
    only_healthy: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One simulated rollout.

    ``n`` and ``k`` are the audits and disagreements that the verdict was made on, over all steps; ``n_until_off`` also
    counts what the canary answered until the last worker had left it. ``seconds`` is the simulated time to the verdict,
    ``batches`` are the canary's in the last step, ``truth`` is the plan's disagreement on the whole pool. ``curve`` has
    (step, audits, log e-value of accuracy, slow batches, log e-value of slowness) of each pass.
    """

    verdict: str
    reason: str
    n: int
    k: int
    n_until_off: int
    seconds: float
    batches: int
    truth: float
    curve: tuple[tuple[int, int, float, int, float], ...] = ()


def not_promoted(attempt: Attempt) -> bool:
    return attempt.verdict != "Succeeded"


def stopped_late(attempt: Attempt) -> bool:
    return attempt.verdict != "RolledBack" or attempt.reason != "AccuracyRejected" or attempt.n > 225


def not_called_slow(attempt: Attempt) -> bool:
    return attempt.verdict != "RolledBack" or attempt.reason != "SlownessRejected"


SCENARIOS = (
    Scenario("half", "a plan at half its budget is falsely rolled back in <= 1 %", not_promoted, 0.01, 0.5 * BUDGET),
    Scenario(
        "harmful",
        "a plan at 5 % disagreement is stopped within 225 audits in >= 90 %",
        stopped_late,
        0.10,
        5 * BUDGET,
        request_rate=100.0,
    ),
    Scenario(
        "equal",
        "an equal canary under bursty load, batches of 1 to 32, is rejected in <= 1 %",
        not_promoted,
        0.01,
        0.3 * BUDGET,
        stable=0.3 * BUDGET,
    ),
    Scenario(
        "slow",
        "a canary that takes twice the time is rejected in >= 99 %",
        not_called_slow,
        0.01,
        0.3 * BUDGET,
        stable=0.3 * BUDGET,
        slowdown=2.0,
    ),
    Scenario(
        "healthy",
        "a healthy plan that the tuner certified is promoted in >= 99 %",
        not_promoted,
        0.01,
        None,
        only_healthy=True,
    ),
)


def attempt(world: World, scenario: Scenario, seed: int) -> Attempt:
    """One rollout, from a fleet that has served for a while to the verdict."""
    utilisation = float(np.random.default_rng([seed, 1]).uniform(*UTILISATION))
    stable = world.plan_at(scenario.stable) if scenario.stable else world.exits_off
    service = service_of(MANIFEST, stable=stable.name("sim") if scenario.stable else "")
    fleet = Fleet(
        world, service, seed=seed, rate=scenario.request_rate, utilisation=utilisation, slowdown=scenario.slowdown
    )
    if scenario.stable:
        fleet.add_config(stable)
    for _ in range(2):
        fleet.step(WARM_UP_REQUESTS / scenario.request_rate / 2)
    if scenario.rate is None:
        _let_it_tune(fleet, world, seed // ROLLOUTS_PER_DRAW)
    else:
        config = fleet.add_config(_nudged(world.plan_at(scenario.rate)))
        fleet.begin(config)
    return _follow(fleet, world, keep_curve=seed < CURVES)


def _let_it_tune(fleet: Fleet, world: World, number: int) -> None:
    """The tuner finds its own plan on labels of its own, and proposes it."""
    rng = np.random.default_rng([number, 2])
    rows = world.draw(rng, FIRST_LABELS)
    time = fleet.now - LABEL_SECONDS + np.sort(rng.uniform(0.0, LABEL_SECONDS, FIRST_LABELS))
    records = replace(world.records.take(rows), time=time)
    fleet.records = RecordStore(records, world.ramp_ids, BACKBONE, RAMP_SET)
    request = fleet.reconcile().tune
    assert request is not None, fleet.service.status.tuning
    fleet.outcome = world.tune_draw(number, records, request)
    fleet.step()
    fleet.records = None


def _follow(fleet: Fleet, world: World, *, keep_curve: bool) -> Attempt:
    if not fleet.rollouts:
        return Attempt("NotProposed", fleet.service.status.tuning.state, 0, 0, 0, 0.0, 0, 0.0)
    (rollout,) = fleet.rollouts.values()
    began, name, curve = fleet.now, rollout.name, []
    truth = world.served(fleet.configs[rollout.to_config].plan).disagreement
    while not fleet.rollouts[name].status.finished and fleet.now - began < LONGEST_SECONDS:
        fleet.step()
        status = fleet.rollouts[name].status
        if keep_curve and status.gates and status.phase in ("Progressing", "RollingBack"):
            by_name = {gate.name: gate for gate in status.gates}
            accuracy, slowness = by_name["accuracy"], by_name["slowness"]
            curve.append((status.step, accuracy.n, accuracy.log_e_value, slowness.n, slowness.log_e_value))
    status = fleet.rollouts[name].status
    n, k = status.audited
    judged = status.ledger.total.canary.batches
    counters = [c for w in fleet.workers for c in w.counters if c.arm == "canary"]
    return Attempt(
        status.verdict or "Unfinished",
        status.reason,
        n,
        k,
        sum(c.audited for c in counters),
        (status.phase_started_at or fleet.now) - began,
        judged,
        truth,
        tuple(curve),
    )


def _nudged(plan: Plan) -> Plan:
    """The same plan under another name: one threshold moves by the smallest step there is."""
    first = plan.ramps[0]
    step = THRESHOLD_STEP if first.threshold < 1 else -THRESHOLD_STEP
    return replace(plan, ramps=(replace(first, threshold=first.threshold + step), *plan.ramps[1:]))
