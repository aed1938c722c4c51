"""Tiers: whether every budget of a menu is kept, and what choosing one costs a request: ``python -m bench.tiers``.

Plans are tuned on draws from a pool whose rate is the truth, with certificates of the product's own confidence. The
choice is what a request without a tier does not pay: finding its tier when it comes, and who leaves in a batch of all
tiers when it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson

from bench.promise import BUDGET, DELTA, one_ramp_pool
from bench.provenance import provenance
from offramp_core.certify import TierBudget
from offramp_core.evaluate import evaluate_plan
from offramp_core.protocol import OVERLOAD, ArmPlan, PlanDocument
from offramp_core.records import Records
from offramp_core.tuning import Proposed, TuningRequest, tune
from offramp_core.uncertainty import TABLE_SIZE, exit_test
from offramp_worker.engine.arms.tiers import MixedTests, tier_within, unknown_tier

OUT = Path("build/bench/tiers.json")
EVERYBODY = "everybody"
TIERS = (TierBudget("fine", 0.005), TierBudget(OVERLOAD, 0.03), TierBudget("strict", 0.002))
LABELS, ROWS = 8000, 32
KEPT_GOAL, CHOICE_GOAL = 0.95, 50.0  # of the draws, and microseconds


@dataclass(frozen=True, slots=True)
class Kept:
    """One budget over all draws: in how many a plan had been certified for it, and in how many of these it was kept."""

    budget: float
    certified: int
    kept: int
    median_disagreement: float


def budgets(pool: Records, *, draws: int, seed: int = 0) -> dict[str, Kept]:
    """Everybody's budget and that of each tier."""
    ids = tuple(f"r{i:02d}" for i in range(pool.n_ramps))
    request = TuningRequest(
        max_disagreement=BUDGET,
        delta=DELTA,
        test_index=1,
        ramp_ids=ids,
        backbone_digest="b",
        ramp_set_digest="r",
        tiers=TIERS,
    )
    allowed = {EVERYBODY: BUDGET} | {tier.name: tier.budget for tier in TIERS}
    rates: dict[str, list[float]] = {name: [] for name in allowed}
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        drawn = replace(pool.take(rng.integers(0, len(pool), LABELS)), time=np.arange(LABELS, dtype=np.float64))
        found = tune(drawn, request)
        if isinstance(found, Proposed):
            for name, plan in {EVERYBODY: replace(found.plan, tiers=()), **found.plan.menu}.items():
                rates[name].append(evaluate_plan(pool, plan, ids).disagreement)
    return {
        name: Kept(most, len(rates[name]), sum(r <= most for r in rates[name]), float(np.median(rates[name] or [0.0])))
        for name, most in allowed.items()
    }


def choices(*, repeats: int = 2000) -> dict[str, float]:
    """Microseconds of each choice, medians: by name and by the largest budget that will do, for each request; of a
    batch that mixes all tiers, what each of its requests costs at one ramp more than in a batch of everybody."""
    document = PlanDocument(
        service="s",
        service_uid="u",
        epoch=1,
        stable=ArmPlan({}, 0.0),
        canary=None,
        weight_percent=0,
        salt="",
        accuracy_budget=BUDGET,
        tiers={tier.name: tier.budget for tier in TIERS},
    )
    names = [("", *(t.name for t in TIERS))[i % (1 + len(TIERS))] for i in range(ROWS)]
    logits = np.random.default_rng(0).normal(size=(ROWS, 10)).astype(np.float32)
    confidence, carried = np.linspace(0, 1, ROWS), np.arange(ROWS)
    test = exit_test(0.5, np.linspace(-5.0, 5.0, TABLE_SIZE))

    def mixed() -> object:
        named = np.array(names)
        groups = [(named == name, {0: test}) for name in ("", *(t.name for t in TIERS))]
        return MixedTests(groups).leaves(0, logits, confidence, carried)

    usual = _microseconds(lambda: test.leaves(logits, confidence), repeats)
    return {
        "by name": _microseconds(lambda: unknown_tier("strict", document), repeats),
        "by budget": _microseconds(lambda: tier_within(0.003, document), repeats),
        "in a batch": max(0.0, _microseconds(mixed, repeats) - usual) / ROWS,
    }


def _microseconds(call: Callable[[], Any], repeats: int) -> float:
    seen = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        call()
        seen.append(time.perf_counter_ns() - began)
    return median(seen) / 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, and leave them for the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description="budgets and choices of tiers")
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args(argv)
    kept = budgets(one_ramp_pool(100_000, seed=1), draws=options.draws)
    found = {
        "draws": options.draws,
        "labels": LABELS,
        "budgets": {name: asdict(one) for name, one in kept.items()},
        "microseconds": choices(),
        "measured": provenance(),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    print(OUT.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
