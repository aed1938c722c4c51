"""Whether budgets are kept: many short replays, each with certificates of its own.

In each replay every plan is tested on fresh labels, with the allowance divided by the number of plans. The planner
serves what passed; policies that know profiles but no certificates serve what their profile, the share among the same
labels, says keeps the budget. The bold plan's truth is beyond the budget: it is what tempts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import binom

from bench.fleetplan.runs import INFAAS, OURS, PROTEUS, UNCERTIFIED, devices
from bench.fleetplan.scenes import BOLD, BUDGET, DAY, MINILM, Model, Scene, certified, pools, twitter_task
from offramp_lab.fleet import Infaas, Planned, Policy, Proteus, simulate

LABELS, DELTA = 4000, 0.05
BOLD_TRUTH = 0.011
SECONDS = 120


@dataclass(frozen=True, slots=True)
class Replays:
    """How many replays kept the budget, and what they cost and missed on average."""

    policy: str
    kept: int
    runs: int
    cost: float
    missed: float
    disagreement: float
    worst: float


def shown_by_certificate(k: int, n: int, plans: int) -> float:
    """The share among the labels where the test passes at this plan's part of the allowance, else as much as none."""
    passed = float(binom.cdf(k, n, BUDGET)) <= DELTA / plans
    return k / n if passed else UNCERTIFIED


def replays(count: int, *, seed: int = 0) -> list[Replays]:
    """All policies on the same stretches, with the same labels."""
    kinds: dict[str, Callable[[Scene], Policy]] = {
        OURS: lambda _scene: Planned(),
        INFAAS: lambda _scene: Infaas(),
        PROTEUS: lambda scene: Proteus(devices=devices(scene)),
    }
    rng = np.random.default_rng(seed)
    found: dict[str, list[tuple[bool, float, float, float]]] = {name: [] for name in kinds}
    for i in range(count):
        plain = _stretch(rng)
        task = plain.tasks[0]
        truths = {m.column.key.plan: m.true_disagreement for m in task.menu}
        seen = {plan: int(rng.binomial(LABELS, truth)) for plan, truth in truths.items()}
        proven = {
            plan: 0.0 if not truths[plan] else shown_by_certificate(k, LABELS, len(seen) - 1)
            for plan, k in seen.items()
        }
        profiled = {plan: k / LABELS for plan, k in seen.items()}
        for name, policy in kinds.items():
            menu = certified(task.menu, proven if name == OURS else profiled)
            scene = replace(plain, tasks=(replace(task, menu=menu),))
            out = simulate(scene.tasks, scene.pools, policy(scene), seed=i)
            found[name].append((out.keeps_budgets(scene.tasks), out.cost, out.missed, out.disagreement))
    return [_summed(name, rows) for name, rows in found.items()]


def _stretch(rng: np.random.Generator) -> Scene:
    begin = 8.0 + float(rng.uniform(0, 13 - SECONDS / DAY))
    task = twitter_task(_tempting(MINILM), day=begin, seconds=SECONDS, times=8)
    return Scene((task,), pools(1.0))


def _tempting(model: Model) -> Model:
    return replace(model, plans={**model.plans, BOLD: (model.plans[BOLD][0], BOLD_TRUTH)})


def _summed(name: str, rows: list[tuple[bool, float, float, float]]) -> Replays:
    kept, cost, missed, disagreement = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    return Replays(
        policy=name,
        kept=int(kept.sum()),
        runs=len(rows),
        cost=float(cost.mean()),
        missed=float(missed.mean()),
        disagreement=float(disagreement.mean()),
        worst=float(disagreement.max()),
    )
