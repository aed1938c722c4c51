"""What candidate ramps are worth: which to train at all, and which of those trained stay.

Worth is *predicted utility*: what leaving here saves, on rows that trained no head, less what the head costs, both as
measured on this machine, at every budget reported and every batch size profiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import RampSpec
from offramp_core.task import Answers, LossArray, Task
from offramp_worker.prepare.measuring.profiling import Measurements
from offramp_worker.prepare.source.data import FloatArray

BUDGETS = (0.005, 0.01, 0.02, 0.05)
LOOSEST = BUDGETS[-1]
MAX_RAMPS = 30  # audits run all of them, the tuner searches all triples
# Two heads of one place whose savings differ by less are equal, and the cheaper one is better.
INDIFFERENT = 0.002
# Of the inputs that cannot leave with the best cheaper head, at most such a share can with the next dearer kind.
# Measured on CIFAR-10 (ResNet-20, ResNet-56), MLP over linear 10-27 %, convolutions over MLP 8-16 %.
REACH = 0.3


@dataclass(frozen=True, slots=True)
class RampCost:
    """A head's time and the time up to it, by batch size, as shares of the backbone's."""

    head: Mapping[int, float]
    depth: Mapping[int, float]

    @property
    def mean_depth(self) -> float:
        """The time up to it, mean over batch sizes."""
        return float(np.mean(list(self.depth.values())))


@dataclass(frozen=True, slots=True)
class RampMerit:
    """What one ramp is worth on rows that trained no head.

    ``exits`` maps a disagreement budget to the largest share of all inputs that can leave at this ramp alone within
    it (threshold in hindsight).
    """

    agreement: float
    exits: Mapping[float, float]
    costs: RampCost

    @property
    def cost(self) -> float:
        """The head's share of the backbone's time at the smallest batch size."""
        return self.costs.head[min(self.costs.head)]

    @property
    def depth(self) -> float:
        """Share of the backbone's time up to here, mean over batch sizes."""
        return self.costs.mean_depth

    def saving(self, budget: float, batch_size: int) -> float:
        """Share of the backbone's time that this ramp alone saves."""
        return self.exits[budget] * (1 - self.costs.depth[batch_size]) - self.costs.head[batch_size]

    @property
    def utility(self) -> Mapping[float, float]:
        """Saving by budget at the batch size where it is best."""
        return {budget: max(self.saving(budget, size) for size in self.costs.head) for budget in self.exits}


@dataclass(frozen=True, slots=True)
class CandidateVerdict:
    """A trained candidate and, when it was refused, why."""

    spec: RampSpec
    merit: RampMerit
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Untrained:
    """A candidate that was not worth training, what it would have cost, and why not."""

    spec: RampSpec
    costs: RampCost
    reason: str


def exit_share(score: npt.NDArray[np.floating], losses: LossArray, *, budget: float) -> float:
    """Largest share that can leave below one threshold with a loss of at most ``budget`` on average over **all** rows.

    Parameters
    ----------
    score : (n,)
        Lower is more certain; rows of equal score leave together.
    losses : (n,)
        In [0, 1]: what those that leave lose; 0 is agreement.
    """
    order = np.argsort(score, kind="stable")
    lost = np.cumsum(losses[order])
    ends = np.append(np.diff(score[order]) > 0, True) & np.isfinite(score[order])
    allowed = ends & (lost <= budget * len(score) + 1e-9)
    return float(np.flatnonzero(allowed)[-1] + 1) / len(score) if allowed.any() else 0.0


def cost_of(spec: RampSpec, measured: Measurements) -> RampCost:
    """What a candidate costs as it was measured."""
    return RampCost(
        {batch.batch_size: batch.head_share(spec.id) for batch in measured.batches},
        {batch.batch_size: batch.depth_at(spec.position) for batch in measured.batches},
    )


def merit(task: Task, outputs: FloatArray, reference: Answers, costs: RampCost) -> RampMerit:
    """Judge a head by what it says (n, head_width) against the model's answers (n, ...)."""
    losses = task.losses(task.exit_answers(outputs), reference)
    score = task.raw_score(outputs)
    shares = {budget: exit_share(score, losses, budget=budget) for budget in BUDGETS}
    return RampMerit(float((1 - losses).mean()), shares, costs)


def utility(merits: Iterable[RampMerit]) -> float:
    """One number for a set of heads: the best single ramp's saving, averaged over budgets of 1, 2 and 5 %."""
    each = [value.utility for value in merits]
    return float(np.mean([max([0.0, *(shares[budget] for shares in each)]) for budget in BUDGETS[1:]]))


def screen(
    candidates: Sequence[RampSpec],
    costs: Mapping[str, RampCost],
    trained: Mapping[RampSpec, RampMerit],
    *,
    reach: float = REACH,
) -> tuple[tuple[RampSpec, ...], tuple[Untrained, ...]]:
    """Which further heads could pay, judged by those trained at their places, and the others with the reason.

    A candidate gets the benefit of the doubt: it is taken to let a share ``reach`` of those leave that the best head
    trained at its place cannot let leave; 0 for one that can only be cheaper, not better. If that saves no more than
    the trained heads do, at no budget and batch size, training it would be a waste.
    """
    promising, refused = list[RampSpec](), list[Untrained]()
    for spec in candidates:
        rivals = _at(spec.position, trained)
        hoped = _hoped(costs[spec.id], rivals, reach=reach)
        now = [[max([0.0, *(r.saving(b, size) for r in rivals)]) for size in hoped.costs.head] for b in BUDGETS]
        then = [[hoped.saving(b, size) for size in hoped.costs.head] for b in BUDGETS]
        if np.max(np.subtract(then, now)) > INDIFFERENT:
            promising.append(spec)
        else:
            reason = "not trained: at its cost it could not save more than the heads trained here"
            refused.append(Untrained(spec, costs[spec.id], reason))
    return tuple(promising), tuple(refused)


def most_promising(
    candidates: Sequence[RampSpec],
    costs: Mapping[str, RampCost],
    trained: Mapping[RampSpec, RampMerit],
    *,
    most: int,
    apart: float,
    first: Sequence[RampSpec] = (),
) -> tuple[tuple[RampSpec, ...], tuple[Untrained, ...]]:
    """Of dear candidates, those that could save most, and the others with the reason.

    At most ``most`` are taken, those in ``first`` before others, at least ``apart`` of the backbone's time from each
    other. What one could save is hoped for as in :func:`screen` and averaged over budgets of 1, 2 and 5 % and all batch
    sizes.
    """

    def promise(spec: RampSpec) -> float:
        hoped = _hoped(costs[spec.id], _at(spec.position, trained), reach=REACH)
        return float(np.mean([hoped.saving(budget, size) for budget in BUDGETS[1:] for size in hoped.costs.head]))

    chosen: list[RampSpec] = []
    for spec in sorted(candidates, key=lambda s: (s not in first, -promise(s), s.position)):
        gaps = [abs(costs[spec.id].mean_depth - costs[other.id].mean_depth) for other in chosen]
        if len(chosen) < most and all(gap >= apart for gap in gaps):
            chosen.append(spec)
    names = ", ".join(sorted(spec.id for spec in chosen))
    left = [spec for spec in candidates if spec not in chosen]
    return (
        tuple(spec for spec in candidates if spec in chosen),
        tuple(Untrained(spec, costs[spec.id], f"not trained: {names} promise more of their kind") for spec in left),
    )


def _at(position: int, trained: Mapping[RampSpec, RampMerit]) -> list[RampMerit]:
    return [value for spec, value in trained.items() if spec.position == position]


def _hoped(costs: RampCost, rivals: Sequence[RampMerit], *, reach: float) -> RampMerit:
    best = {budget: max((rival.exits[budget] for rival in rivals), default=0.0) for budget in BUDGETS}
    return RampMerit(0.0, {budget: share + reach * (1 - share) for budget, share in best.items()}, costs)


def select_ramps(merits: Mapping[RampSpec, RampMerit]) -> tuple[CandidateVerdict, ...]:
    """Judge every trained candidate.

    A ramp is refused when no input could leave there even at a budget of 5 %; when its head costs more than those
    inputs save at every batch size measured; or when at every budget and batch size another head at its place saves
    as much, or nothing is saved there at all.
    """
    verdicts = [CandidateVerdict(spec, value, _cannot_pay(value)) for spec, value in merits.items()]
    for position in dict.fromkeys(spec.position for spec in merits):
        rivals = [v for v in verdicts if v.spec.position == position and not v.refused]
        best = _ever_best(rivals)
        verdicts = [
            replace(v, refused=f"{best[0].spec.id} saves as much here, or more, at every budget and batch size")
            if v in rivals and v not in best
            else v
            for v in verdicts
        ]
    kept = [v for v in verdicts if not v.refused]
    surplus = sorted(kept, key=lambda v: -v.merit.utility[LOOSEST])[MAX_RAMPS:]
    return tuple(
        replace(v, refused=f"more than {MAX_RAMPS} ramps pay; this one saves least") if v in surplus else v
        for v in verdicts
    )


def _cannot_pay(value: RampMerit) -> str:
    if value.exits[LOOSEST] == 0:
        return f"nothing could leave here at a budget of {LOOSEST:.0%}"
    if value.utility[LOOSEST] <= 0:
        return "the head costs more than leaving here could save"
    return ""


def _ever_best(rivals: Sequence[CandidateVerdict]) -> list[CandidateVerdict]:
    """The heads of one place that save most at some budget and batch size, the one that does so most often first."""
    wins = dict.fromkeys((v.spec.id for v in rivals), 0)
    for budget in BUDGETS:
        for size in rivals[0].merit.costs.head if rivals else ():
            savings = {v.spec.id: v.merit.saving(budget, size) for v in rivals}
            most = max(savings.values())
            if most > 0:
                close = [v for v in rivals if savings[v.spec.id] >= most - INDIFFERENT]
                wins[min(close, key=lambda v: v.merit.costs.head[size]).spec.id] += 1
    winners = [v for v in rivals if wins[v.spec.id]]
    return sorted(winners, key=lambda v: -wins[v.spec.id])
