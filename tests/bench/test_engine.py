"""How the plans are chosen that the engine's bench measures."""

from __future__ import annotations

import numpy as np
import pytest
from bench.engine import BUDGET, MAX_OVERHEAD, crossed, within_budget
from scores import recorded

from offramp_core.evaluate import evaluate
from offramp_core.search.placement import best_plan

ROWS, SEEDS = 2_000, range(6)


@pytest.mark.slow
def test_uncertified_plans_keep_the_budget_on_rows_that_had_no_say() -> None:
    naive, chosen, promised = [], [], []
    for seed in SEEDS:
        everything = recorded(ROWS + 20_000, 2, seed=seed)
        seen, judged = everything.take(slice(0, ROWS)), everything.take(slice(ROWS, None))
        found = within_budget(seen, ("fp32",))
        assert found is not None
        for share, into in ((1.0, naive), (found[1], chosen)):
            plan = best_plan(seen, max_disagreement=BUDGET * share, max_overhead=MAX_OVERHEAD).plan
            into.append(evaluate(judged, plan.active, plan.thresholds).disagreement)
        promised.append(crossed(seen, budget=BUDGET * found[1])[1])
    assert max(promised) <= BUDGET
    assert np.mean(chosen) < np.mean(naive)
    assert np.mean(chosen) < 1.15 * BUDGET < np.mean(naive)
