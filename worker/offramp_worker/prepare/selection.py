"""Which candidate ramps stay: those that can pay for themselves, and of two heads at a place the undominated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import RampSpec
from offramp_core.uncertainty import raw_score
from offramp_worker.prepare.data import FloatArray
from offramp_worker.prepare.profiling import Measurements

BUDGETS = (0.005, 0.01, 0.02, 0.05)
LOOSEST = BUDGETS[-1]
MAX_RAMPS = 40

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RampMerit:
    """What one ramp is worth on rows that trained no head.

    ``exits`` maps a disagreement budget to the largest share of all inputs that can leave at this ramp alone within
    it (threshold in hindsight); ``cost`` is the head's time and ``depth`` the time up to it, as shares of the
    backbone's time at batch size 1.
    """

    agreement: float
    exits: Mapping[float, float]
    cost: float
    depth: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A candidate ramp and, when it was refused, why."""

    spec: RampSpec
    merit: RampMerit
    refused: str = ""


def exit_share(score: npt.NDArray[np.floating], agrees: BoolArray, *, budget: float) -> float:
    """Largest share that can leave below one threshold with at most ``budget`` of **all** rows answered differently.

    Parameters
    ----------
    score : (n,)
        Lower is more certain; rows of equal score leave together.
    agrees : (n,) bool
    """
    order = np.argsort(score, kind="stable")
    wrong = np.cumsum(~agrees[order])
    ends = np.append(np.diff(score[order]) > 0, True) & np.isfinite(score[order])
    allowed = ends & (wrong <= int(budget * len(score) + 1e-9))
    return float(np.flatnonzero(allowed)[-1] + 1) / len(score) if allowed.any() else 0.0


def merit(logits: FloatArray, reference: npt.NDArray[np.integer], *, cost: float, depth: float) -> RampMerit:
    """Judge a head by its logits (n, n_classes) against the model's answers (n,)."""
    agrees = logits.argmax(axis=1) == reference
    score = raw_score(logits)
    shares = {budget: exit_share(score, agrees, budget=budget) for budget in BUDGETS}
    return RampMerit(float(agrees.mean()), shares, cost, depth)


def utility(merits: Sequence[RampMerit]) -> float:
    """One number for a set of heads: the best single ramp's saving, averaged over budgets of 1, 2 and 5 %."""
    savings = [max(_saving(m, budget) for m in merits) for budget in BUDGETS[1:]]
    return float(np.mean([max(0.0, saving) for saving in savings]))


def select_ramps(
    ramps: Sequence[RampSpec], merits: Mapping[str, RampMerit], measured: Measurements
) -> tuple[Verdict, ...]:
    """Judge every candidate.

    A ramp is refused when no input could leave there even at a budget of 5 %, when its head costs more than those
    inputs save at every batch size measured, or when the other head at its place is at least as good and as cheap.
    """
    verdicts = [Verdict(spec, merits[spec.id], _cannot_pay(spec, merits[spec.id], measured)) for spec in ramps]
    verdicts = [v if v.refused else Verdict(v.spec, v.merit, _dominated(v, verdicts)) for v in verdicts]
    kept = [v for v in verdicts if not v.refused]
    surplus = sorted(kept, key=lambda v: -_saving(v.merit, LOOSEST))[MAX_RAMPS:]
    return tuple(
        Verdict(v.spec, v.merit, f"more than {MAX_RAMPS} ramps pay; this one saves least") if v in surplus else v
        for v in verdicts
    )


def _cannot_pay(spec: RampSpec, value: RampMerit, measured: Measurements) -> str:
    if value.exits[LOOSEST] == 0:
        return f"nothing could leave here at a budget of {LOOSEST:.0%}"
    gains = [value.exits[LOOSEST] * (1 - b.depth[spec.position]) - b.head_share(spec.id) for b in measured.batches]
    if max(gains) <= 0:
        return "the head costs more than leaving here could save"
    return ""


def _dominated(candidate: Verdict, verdicts: Sequence[Verdict]) -> str:
    for other in verdicts:
        same_place = other.spec.position == candidate.spec.position and other.spec.id != candidate.spec.id
        if same_place and not other.refused and _at_least_as_good(other.merit, candidate.merit):
            return f"{other.spec.id} is at least as good here and as cheap"
    return ""


def _at_least_as_good(a: RampMerit, b: RampMerit) -> bool:
    """Whether a dominates b; strictly somewhere, so that two equal heads do not refuse each other."""
    pairs = [(-a.cost, -b.cost), *((a.exits[budget], b.exits[budget]) for budget in BUDGETS)]
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


def _saving(value: RampMerit, budget: float) -> float:
    return value.exits[budget] * (1 - value.depth) - value.cost
