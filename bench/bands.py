"""What a plan per load band could add to one plan for all loads: ``python -m bench.bands [--sets NAME...]``.

An idle worker serves batches of one, a busy one large batches, and what an exit is worth differs between them. So a plan might have
thresholds for either. Here is the most that this could bring: plans are searched exactly on *all* records (no noise of a small
sample), for every batch size, for the time to answer as well as for the engine's time, and for several budgets, since two bands may spend one
budget unevenly. A single plan keeps `maxOverhead` at every batch size, a band's own at the sizes of the band. Traffic is half the time idle and half the time busy; the band is known without delay, and a change costs nothing. Every
pair of plans whose joint disagreement keeps the budget is a rival of every single plan that does. What is best by a figure is chosen on one
simulated stream of arrivals and judged on others. A third rival is one plan that keeps `maxOverhead` at the busy sizes only, which is what a larger
`maxOverhead` would allow today. A real band would be certified with a share of the error allowance, and earn less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.replays import BUDGET, MAX_OVERHEAD, OUT, RECORDS
from offramp_cli.replay.load import load_records
from offramp_cli.replay.measure import default_slo_seconds
from offramp_core.batching import MAX_BATCH, batching
from offramp_core.bundle import BatchProfile, Profile
from offramp_core.execution import carries_on
from offramp_core.policies.base import PlanInForce, Trace, serve
from offramp_core.records import ExitCosts, Records
from offramp_core.search.objective import LoadBand, Mode, Weights, price
from offramp_core.search.placement import best_plan
from offramp_core.simulate import capacity, serve_stream
from offramp_core.simulate.arrivals import poisson

Json = dict[str, Any]
SETS = ("resnet56-mx4", "resnet56-gap", "sst2-mean", "sst2-cls", "video-grid")
IDLE_LOAD, BUSY_LOADS = 0.05, (0.5, 0.8)  # of what one worker can do without exits
SIZES = (1, 4, 16)
LARGEST_IDLE_BATCH = 2
GOALS = {"mean": Weights(), "busy": Weights(mean=0.0, busy=1.0)}
SHARES_OF_BUDGET = (0.5, 0.75, 1.0, 1.25, 1.5)
IDLE_REQUESTS = 3000
CHOOSE_SEED, JUDGE_SEEDS = 0, (1, 2, 3)
WORTH_POINTS, WORTH_P95 = 0.01, 0.03  # what a band must add to be built


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of the whole pool; ``disagreement`` is its true one. Without ramps exits are off.

    ``fits`` are the bands, idle and busy, where its ramps keep the allowed overhead.
    """

    made_for: str
    active: tuple[int, ...]
    thresholds: tuple[float, ...]
    disagreement: float
    fits: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Band:
    """A candidate's requests in one band of one stream: ``latency`` (n,), infinite for those that were turned away, and the engine's ``busy`` seconds."""

    latency: npt.NDArray[np.float64]
    busy: float


def candidates(pool: Records, profile: Profile, execution: Mode) -> list[Candidate]:
    """The best plans for each batch size, goal and share of the budget, for all loads and for one band, each once; exits off first."""
    bands = [
        [batch for batch in profile.batches if (batch.batch_size > LARGEST_IDLE_BATCH) == busy]
        for busy in (False, True)
    ]
    found: dict[tuple[tuple[int, ...], tuple[float, ...]], Candidate] = {
        ((), ()): Candidate("exits off", (), (), 0.0, (True, True))
    }
    for size, (goal, weights), share in itertools.product(SIZES, GOALS.items(), SHARES_OF_BUDGET):
        if goal == "busy" and (size == 1 or execution == "ResultsOnly"):
            continue  # the same as the mean, or nothing to save
        pricing = price(pool, weights=weights, load=LoadBand((size,), (1.0,)), execution=execution)
        for batches in (profile.batches, tuple(bands[size > LARGEST_IDLE_BATCH])):
            one = batches[0]
            costs = ExitCosts(np.array(one.segment_seconds), np.array(one.ramp_seconds))
            allowed = replace(pool, costs=costs, profile=replace(profile, batches=batches))
            plan = best_plan(
                allowed,
                max_disagreement=share * BUDGET,
                max_ramps=3,
                max_overhead=MAX_OVERHEAD,
                pricing=pricing,
                max_gap=0.001,
            ).plan
            thresholds = tuple(float(t) for t in plan.thresholds)
            fits = tuple(all(_adds(b, plan.active) <= MAX_OVERHEAD * (1 + 1e-9) for b in band) for band in bands)
            made = Candidate(
                f"{goal} at {size}, {share * BUDGET:.2%}",
                plan.active,
                thresholds,
                plan.disagreement,
                (fits[0], fits[1]),
            )
            found.setdefault((made.active, made.thresholds), made)
    return list(found.values())


def _adds(batch: BatchProfile, active: Sequence[int]) -> float:
    """What ramps add to a batch at worst, as a share of it."""
    return sum(batch.ramp_seconds[i] for i in active) / batch.exact_seconds


def served(pool: Records, profile: Profile, candidate: Candidate, *, load: float, requests: int, seed: int) -> Band:
    """A candidate behind a queue at one load; arrivals and inputs depend on ``load`` and ``seed`` alone."""
    rng = np.random.default_rng([seed, round(1000 * load)])
    arrivals = poisson(requests, load * capacity(profile, max_batch=MAX_BATCH), rng)
    stream = pool.take(rng.integers(len(pool), size=requests))
    left, agrees = serve(stream, candidate.active, candidate.thresholds)
    trace = Trace(left, (PlanInForce(0, candidate.active, candidate.thresholds),), agrees)
    slo = default_slo_seconds(profile)
    found = serve_stream(
        arrivals, trace, profile, batching=batching("offramp", profile=profile, slo_seconds=slo), slo_seconds=slo
    )
    return Band(np.nan_to_num(found.latency, nan=np.inf), found.busy_seconds)


Figure = Callable[[Band, Band], float]


def _mean(idle: Band, busy: Band) -> float:
    return float(np.concatenate([idle.latency, busy.latency]).mean())


def _p95(idle: Band, busy: Band) -> float:
    return float(np.quantile(np.concatenate([idle.latency, busy.latency]), 0.95))


def _engine(idle: Band, busy: Band) -> float:
    return idle.busy + busy.busy


FIGURES: dict[str, Figure] = {"mean_latency": _mean, "p95": _p95, "engine_time": _engine}


def measure(pool: Records, *, busy_load: float) -> Json:
    """By each figure, the best single plan, the best one that need not keep the allowed overhead when idle, and the best pair."""
    profile = pool.profile
    assert profile is not None
    execution: Mode = "ResultsOnly" if carries_on("Auto", profile) else "ComputeSaving"
    plans = candidates(pool, profile, execution)
    requests = (IDLE_REQUESTS, round(IDLE_REQUESTS * busy_load / IDLE_LOAD))  # both bands last as long
    share = requests[0] / sum(requests)

    def streams(seed: int, wanted: Sequence[int]) -> dict[int, tuple[Band, Band]]:
        loads = zip((IDLE_LOAD, busy_load), requests, strict=True)
        bands = [
            {i: served(pool, profile, plans[i], load=load, requests=n, seed=seed) for i in wanted} for load, n in loads
        ]
        return {i: (bands[0][i], bands[1][i]) for i in wanted}

    chosen_on = streams(CHOOSE_SEED, range(len(plans)))
    kept = [i for i, plan in enumerate(plans) if plan.disagreement <= BUDGET]
    rivals = {
        "one": [(i, i) for i in kept if all(plans[i].fits)],
        "loose": [(i, i) for i in kept if plans[i].fits[1]],
        "two": [
            (i, j)
            for i, j in itertools.product(range(len(plans)), repeat=2)
            if plans[i].fits[0]
            and plans[j].fits[1]
            and share * plans[i].disagreement + (1 - share) * plans[j].disagreement <= BUDGET
        ],
    }
    best = {
        name: {who: min(by, key=lambda p: of(chosen_on[p[0]][0], chosen_on[p[1]][1])) for who, by in rivals.items()}
        for name, of in FIGURES.items()
    }
    wanted = sorted({0, *(i for pairs in best.values() for pair in pairs.values() for i in pair)})
    judged = [streams(seed, wanted) for seed in JUDGE_SEEDS]
    return {
        "execution": execution, "plans": len(plans), "pairs": len(rivals["two"]), "busy_load": busy_load,
        "idle_overhead": max(_adds(profile.batches[0], plans[at["loose"][0]].active) for at in best.values()),
        "figures": {
            name: {who: _judged(judged, FIGURES[name], pair) | {"plans": [plans[i].made_for for i in pair]} for who, pair in pairs.items()}
            for name, pairs in best.items()
        },
    }  # fmt: skip


def _judged(judged: Sequence[dict[int, tuple[Band, Band]]], of: Figure, pair: tuple[int, int]) -> Json:
    """What a pair takes as a share of what exits off takes: on average, and by stream."""
    shares = [of(at[pair[0]][0], at[pair[1]][1]) / of(*at[0]) for at in judged]
    return {"share": float(np.mean(shares)), "streams": shares}


def _results(names: Sequence[str], records: Path) -> Iterator[Json]:
    for name in names:
        pool = load_records(records / f"{name}.npz", batch_size=1)
        for busy_load in BUSY_LOADS:
            began = time.perf_counter()
            found = measure(pool.at("fp32"), busy_load=busy_load)
            told = ", ".join(
                f"{name} " + " ".join(f"{1 - rival['share']:.2%}" for rival in rivals.values())
                for name, rivals in found["figures"].items()
            )
            print(f"{name}, busy at {busy_load}: {told}; {time.perf_counter() - began:.0f} s", file=sys.stderr)
            yield {"set": name, **found}


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when there are no records."""
    parser = argparse.ArgumentParser(prog="bench.bands", description="a plan per load band against one plan for all")
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=OUT / "bands.json")
    options = parser.parse_args(arguments)
    names = [name for name in options.sets if (options.records / f"{name}.npz").is_file()]
    if not names:
        print(f"bench.bands: {options.records} holds no such records; run python -m bench.record all", file=sys.stderr)
        return 1
    results = list(_results(names, options.records))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    head = {"budget": BUDGET, "idle_load": IDLE_LOAD, "worth": {"points": WORTH_POINTS, "p95": WORTH_P95}}
    options.out.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
