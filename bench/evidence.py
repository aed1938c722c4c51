"""What the evidence is worth and what it costs: power, levels, run lengths, and the time of a million observations.

    python -m bench.evidence [--json]

Power and levels of tests on counts are exact (no simulation): the walk of the counts, one look after every
observation. Detector, gates and intervals are simulated with fixed seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from offramp_core.control.objects import ArmTally, BothArms
from offramp_core.control.rollouts.gates import GateInput, harmful_rates, slowness
from offramp_core.evidence import betting, detector, intervals, one_arm, savings, two_arm
from offramp_core.evidence.exposure import audits_needed, judged_batches_needed, rejection_count
from offramp_core.evidence.slow import BatchShape, judged, slow_limits
from offramp_core.sketch import SecondsSketch, bucket_index
from offramp_lab.stopping import corridor, stopping_time

BUDGET, LEVEL, LOOKS = 0.01, 0.05, 40_000
WORSE = (0.015, 0.02, 0.03, 0.05, 0.10)
BETTER = (0.0, 0.002, 0.005, 0.007)
WEIGHTS = (5, 25, 50)
MILLION = 1_000_000
CALLS = 200
Floats = npt.NDArray[np.float64]


# --- power and levels ------------------------------------------------------------------------------


def power_table() -> list[dict[str, Any]]:
    """Observations (median, 90th percentile; None: later than the last look) until the one-arm test decides, by true
    rate."""
    rows = []
    for side, rates in (("less", BETTER), ("greater", WORSE)):
        for rate in rates:
            stop = stopping_time(rate, p0=BUDGET, alpha=LEVEL, looks=LOOKS, alternative=side)  # type: ignore[arg-type]
            rows.append({"test": side, "rate": rate, "median": stop.quantile(0.5), "p90": stop.quantile(0.9)})
    return rows


def levels() -> dict[str, float]:
    """Type-I error of each test exactly at its boundary after 40,000 looks; each must stay below the level."""
    return {
        **{
            f"one arm, {side}": stopping_time(BUDGET, p0=BUDGET, alpha=LEVEL, looks=LOOKS, alternative=side).ever
            for side in ("greater", "less")
        },
        **{f"two arms, share {share}": two_arm_level(share) for share in (0.05, 0.25, 0.5)},
    }


def two_arm_level(share: float, *, alpha: float = LEVEL, looks: int = 10_000) -> float:
    """The same for the share of bad batches; ``looks`` counts bad batches."""
    grid = two_arm.harmful_shares(share)
    return corridor(share, upper=rejection_count(np.arange(1, looks + 1), p0=share, alpha=alpha, grid=grid)).ever


def gate_table() -> dict[str, Any]:
    """What the accuracy gate does at its defaults, with one test per step: (median, p90) audits to stop, and false
    rollbacks."""
    grid = harmful_rates(BUDGET)
    harmful = stopping_time(5 * BUDGET, p0=BUDGET, alpha=LEVEL, looks=5000, grid=grid)
    return {
        "audits to stop a plan at 5 budgets": (harmful.quantile(0.5), harmful.quantile(0.9)),
        "rolled back within 40,000 audits, by true share of the budget": {
            share: stopping_time(share * BUDGET, p0=BUDGET, alpha=LEVEL, looks=LOOKS, grid=grid).ever
            for share in (0.5, 0.7, 0.8, 0.9, 1.0)
        },
        "minimum exposure": audits_needed(budget=BUDGET, harmful=3 * BUDGET, alpha=LEVEL, grid=grid),
    }


# --- detector --------------------------------------------------------------------------------------


def run_lengths(
    rng: np.random.Generator, *, rate: float, p0: float, run_length: float, runs: int, horizon: int
) -> npt.NDArray[np.int64]:
    """Observations to the alarm of runs that begin anew, cut off at ``horizon``."""
    lengths = []
    for _ in range(runs):
        outcomes = rng.random(horizon) < rate
        alarm = detector.watch(detector.init(), outcomes, p0=p0, run_length=run_length).alarm_after
        lengths.append(alarm or horizon)
    return np.asarray(lengths)


def delays(
    rng: np.random.Generator, *, quiet: float, jump: float, p0: float, run_length: float, runs: int
) -> npt.NDArray[np.int64]:
    """Observations from a jump to ``jump`` until the alarm, after 10,000 quiet ones without any."""
    found: list[int] = []
    while len(found) < runs:
        before = detector.watch(detector.init(), rng.random(10_000) < quiet, p0=p0, run_length=run_length)
        after = detector.watch(before.state, rng.random(3000) < jump, p0=p0, run_length=run_length)
        if before.alarm_after is None:
            found.append(after.alarm_after or 3000)
    return np.asarray(found)


def detector_table(rng: np.random.Generator) -> dict[str, Any]:
    at_budget = run_lengths(rng, rate=BUDGET, p0=BUDGET, run_length=1000, runs=300, horizon=10_000)
    table: dict[str, Any] = {"stated run length 1,000: mean at the boundary": float(at_budget.mean())}
    for length in (1e4, 1e5, 1e6):
        late = delays(rng, quiet=0.005, jump=0.05, p0=BUDGET, run_length=length, runs=300)
        table[f"delay of a jump to 5 %, run length {length:.0e}"] = (
            float(np.median(late)),
            float(np.quantile(late, 0.9)),
        )
    return table


# --- two arms under bursty load --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batches:
    """Sizes and the seconds each batch would take under the stable plan; both [n]."""

    size: npt.NDArray[np.int64]
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Load:
    """What load does to batches, in their order: sizes, whether a burst was on, and how many times as long as usual
    each takes; all [n]."""

    size: npt.NDArray[np.int64]
    in_burst: npt.NDArray[np.bool_]
    slowness: Floats


def bursty_load(rng: np.random.Generator, n: int) -> Load:
    """Batches of 1 to 32 while load comes in bursts: bursts make batches large and the machine slow, and whole
    stretches are slow together."""
    in_burst = _stretches(rng, n, calm=200, burst=40)
    size = np.where(in_burst, rng.integers(8, 33, n), np.minimum(32, rng.geometric(0.35, n)))
    wander = _autocorrelated(rng, n, memory=0.98, spread=0.08)
    stalls = np.where(rng.random(n) < 0.005, 3.0, 1.0)
    return Load(size, in_burst, np.exp(wander + rng.normal(0, 0.08, n)) * stalls * np.where(in_burst, 1.4, 1.0))


def bursty_batches(rng: np.random.Generator, n: int) -> Batches:
    """Bursty load on a model that takes 4 ms and 0.8 ms a row."""
    load = bursty_load(rng, n)
    return Batches(load.size, (0.004 + 0.0008 * load.size) * load.slowness)


def _stretches(rng: np.random.Generator, n: int, *, calm: float, burst: float) -> npt.NDArray[np.bool_]:
    lengths = rng.geometric(np.tile([1 / calm, 1 / burst], n // 100 + 10))
    state = np.repeat(np.tile([False, True], len(lengths) // 2), lengths)
    begin = int(rng.integers(0, max(1, len(state) - n)))
    return state[begin : begin + n]


def _autocorrelated(rng: np.random.Generator, n: int, *, memory: float, spread: float) -> Floats:
    kicks = rng.normal(0, spread * math.sqrt(1 - memory**2), n + 500)
    return np.asarray(lfilter([1.0], [1.0, -memory], kicks)[500:])


def sketches_of(batches: Batches) -> dict[BatchShape, SecondsSketch]:
    """Execution sketches by batch size, as workers report them."""
    counts: dict[int, dict[int, int]] = {}
    for size, seconds in zip(batches.size.tolist(), batches.seconds.tolist(), strict=True):
        histogram, index = counts.setdefault(size, {}), bucket_index(seconds)
        histogram[index] = histogram.get(index, 0) + 1
    return {BatchShape(size): SecondsSketch(histogram) for size, histogram in counts.items()}


def slowness_rejects(
    rng: np.random.Generator, *, slowdown: float, batches_per_step: dict[int, int], max_overhead: float = 0.05
) -> bool:
    """Whether the control plane's slowness gate rejects anywhere in a rollout of three steps, looking after every
    batch.

    The limits are frozen beforehand from the stable plan's sketches, as the rollout does.
    """
    limits = slow_limits(sketches_of(bursty_batches(rng, 3000))).by_rows
    for weight, n in batches_per_step.items():
        ran = bursty_batches(rng, n)
        canary = rng.random(n) < weight / 100
        limit = np.asarray([limits.get(size, math.inf) for size in range(33)])[ran.size]
        slow = ran.seconds * np.where(canary, slowdown, 1.0) > limit * np.where(canary, 1 + max_overhead, 1.0)
        if any(slowness(given).state == "Rejected" for given in _looks(canary, slow, np.isfinite(limit), weight)):
            return True
    return False


def _looks(
    canary: npt.NDArray[np.bool_], slow: npt.NDArray[np.bool_], has_limit: npt.NDArray[np.bool_], weight: int
) -> Iterator[GateInput]:
    """What the gate would read after each slow batch of the canary; evidence rises at no other batch."""
    columns = [np.cumsum(x) for x in (canary & has_limit, canary & slow, ~canary & has_limit, ~canary & slow)]
    for i in np.flatnonzero(canary & slow):
        ran_canary, slow_canary, ran_stable, slow_stable = (int(column[i]) for column in columns)
        tally = BothArms(
            ArmTally(batches=ran_canary, judged=ran_canary, slow=slow_canary),
            ArmTally(batches=ran_stable, judged=ran_stable, slow=slow_stable),
        )
        yield GateInput(tally, weight, BUDGET, 0.99, len(WEIGHTS), 0, certified=True)


def exposures(rng: np.random.Generator) -> dict[int, int]:
    """Judged batches that each step waits for, from a long look at the stable plan."""
    sketches = sketches_of(bursty_batches(rng, 50_000))
    stable = judged(sketches, slow_limits(sketches))
    alpha = GateInput(BothArms(), 5, BUDGET, 0.99, len(WEIGHTS), 0, certified=True).alpha
    return {weight: judged_batches_needed(stable, weight=weight, alpha=alpha) for weight in WEIGHTS}


def two_arm_table(rng: np.random.Generator, *, runs: int = 300) -> dict[str, Any]:
    """Share of rollouts that the slowness gate rejects, by how slow the canary truly is (1.05 is allowed)."""
    needed = exposures(rng)
    long = dict.fromkeys(WEIGHTS, 4000)
    return {
        "judged batches waited for, by weight": needed,
        **{
            f"rejected when {slowdown} x as slow": sum(
                slowness_rejects(rng, slowdown=slowdown, batches_per_step=long if slowdown <= 1.05 else needed)
                for _ in range(runs)
            )
            / runs
            for slowdown in (1.0, 1.05, 1.3, 2.0)
        },
    }


# --- the counting trap -----------------------------------------------------------------------------


def counting_trap(rng: np.random.Generator, requests: int = 400_000) -> dict[str, float]:
    """Truth 2 %, 60 % leave early, audits 5 %: what audits read, and what counting every non-exit as an agreement would
    read."""
    leaves = rng.random(requests) < 0.6
    wrong = leaves & (rng.random(requests) < 0.02 / 0.6)
    audited = rng.random(requests) < 0.05  # drawn at admission, whether or not the request leaves
    n, k = int(audited.sum()), int(wrong[audited].sum())
    trap_n, trap_k = int((audited | ~leaves).sum()), int(wrong[audited | ~leaves].sum())
    return {
        "truth": float(wrong.mean()),
        "audits read": k / n,
        "log evidence of harm": one_arm.log_e_value(k, n, p0=BUDGET),
        "wrong counting reads": trap_k / trap_n,
        "its log evidence of harm": one_arm.log_e_value(trap_k, trap_n, p0=BUDGET),
        "its log evidence of being within budget": one_arm.log_e_value(trap_k, trap_n, p0=BUDGET, alternative="less"),
    }


# --- speed -----------------------------------------------------------------------------------------


def speed(rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds of one core (CPU time, median of 7) to take in a million observations."""
    disagrees = rng.random(MILLION) < BUDGET
    seconds = np.clip(rng.normal(0.3, 0.05, MILLION), 0, 1)
    held_back, forecast = rng.random(MILLION) < 0.02, np.full(MILLION, 0.3)
    weights = np.where(disagrees, np.where(rng.random(MILLION) < 0.5, 20.0, 5.0), 0.0)
    quiet = rng.random(MILLION) < BUDGET / 2
    blocks = [(100, k) for k in rng.binomial(100, BUDGET, MILLION // 100).tolist()]
    return {
        "one arm, outcomes": _median_ms(lambda: _count_and_weigh(disagrees)),
        "one arm, 10,000 blocks of counts with a look at each": _median_ms(lambda: _weigh_blocks(blocks)),
        "detector, outcomes, a look at each, plan at half its budget": _median_ms(lambda: _watch(quiet)),
        "detector, outcomes, a look at each, plan at its budget": _median_ms(lambda: _watch(disagrees)),
        "detector, 10,000 blocks of counts": _median_ms(lambda: _detect_blocks(blocks)),
        "weighted audits": _median_ms(lambda: betting.update(betting.init(p0=0.1, highest=20.0), weights)),
        "savings of a holdback": _median_ms(
            lambda: savings.update(savings.init(share=0.02, bound=1.0), seconds, held_back, forecast=forecast)
        ),
    }


def call_times() -> dict[str, float]:
    """Microseconds of one call that the control plane makes per service and pull."""
    calls: dict[str, Callable[[], object]] = {
        "one_arm.log_e_value": lambda: one_arm.log_e_value(6, 200, p0=BUDGET),
        "two_arm.log_e_share": lambda: two_arm.log_e_share(12, 40, share=0.05),
        "detector.update": lambda: detector.update(detector.DetectorState((1.0,) * 6, 10), 20, 1, p0=BUDGET),
        "intervals.rate_interval": lambda: intervals.rate_interval(20, 1000, alpha=0.05),
    }
    return {name: _median_ms(partial(_repeat, call)) * 1000 / CALLS for name, call in calls.items()}


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _count_and_weigh(outcomes: npt.NDArray[np.bool_]) -> float:
    state = one_arm.update(one_arm.init(), len(outcomes), int(outcomes.sum()))
    return one_arm.log_e_value(state.k, state.n, p0=BUDGET)


def _weigh_blocks(blocks: list[tuple[int, int]]) -> float:
    n, k = np.cumsum(np.asarray(blocks), axis=0).T
    return float(one_arm.log_mixture(k, n, p0=BUDGET, grid=one_arm.alternatives(BUDGET)).max())


def _watch(outcomes: npt.NDArray[np.bool_]) -> detector.Watched:
    return detector.watch(detector.init(), outcomes, p0=BUDGET, run_length=1e6)


def _detect_blocks(blocks: list[tuple[int, int]]) -> float:
    state = detector.init()
    for n, k in blocks:
        state = detector.update(state, n, k, p0=BUDGET)
    return detector.statistic(state)


def _median_ms(work: Callable[[], object], repeats: int = 7) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append((time.process_time() - begin) * 1e3)
    return statistics.median(times)


# --- the report ------------------------------------------------------------------------------------


def report() -> dict[str, Any]:
    rng = np.random.default_rng(4)
    return {
        "cpu_ms_per_million": speed(rng),
        "cpu_us_per_call": call_times(),
        "power": power_table(),
        "level_after_40000_looks": levels(),
        "accuracy_gate": gate_table(),
        "detector": detector_table(rng),
        "two_arm_bursty": two_arm_table(rng),
        "counting_trap": counting_trap(rng),
    }


def _print(found: dict[str, Any]) -> None:
    for section, content in found.items():
        print(f"\n{section.replace('_', ' ')}")
        if section == "power":
            print(f"  budget {BUDGET:.0%}, level {LEVEL:.0%}; observations: median (90th percentile)")
            for row in content:
                name = "accept" if row["test"] == "less" else "reject"
                print(f"  {name} at {row['rate']:6.1%}  {_when(row['median']):>7} ({_when(row['p90'])})")
            continue
        for key, value in content.items():
            print(f"  {key}: {_number(value)}")


def _when(n: int | None) -> str:
    return f"{n:,}" if n is not None else f"> {LOOKS:,}"


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_number(inner)}" for key, inner in value.items())
    if isinstance(value, tuple):
        return f"{value[0]:,.0f} ({value[1]:,.0f})"
    return f"{value:,.4g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    found = report()
    if parser.parse_args().json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


if __name__ == "__main__":
    main()
