"""The bench of tiers, small, and what the page makes of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from bench.promise import one_ramp_pool
from bench.report.goals import tiers
from bench.report.results import MISSING, Results
from bench.tiers import EVERYBODY, TIERS, Kept, budgets, choices


def test_every_budget_is_judged_by_the_draws_that_certified_a_plan_for_it() -> None:
    kept = budgets(one_ramp_pool(20_000, seed=1), draws=2)
    assert set(kept) == {EVERYBODY, *(tier.name for tier in TIERS)}
    assert all(0 <= one.kept <= one.certified <= 2 for one in kept.values())


def test_one_budget_that_is_broken_too_often_is_told(tmp_path: Path) -> None:
    assert [goal.measured for goal in tiers(Results(tmp_path))] == [MISSING, MISSING]
    found = {"everybody": Kept(0.01, 200, 199, 0.007), "strict": Kept(0.002, 190, 150, 0.001)}
    told = {"labels": 8000, "budgets": {k: asdict(v) for k, v in found.items()}, "microseconds": choices(repeats=3)}
    (tmp_path / "tiers.json").write_text(json.dumps(told))
    budget, _ = tiers(Results(tmp_path))
    assert budget.met is False and "strict (0.2 %) 150 of 190" in budget.measured
