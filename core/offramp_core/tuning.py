"""One attempt to find and certify a better plan, from recorded traffic alone.

The control plane calls :func:`tune` with a request and stores what comes back. A *test* is a look at held-out
records for a certificate. Tests spend the service's error allowance and use their records up, whether they
succeed or not, so one is run only when the older records say that a plan would pay and the newer ones are
enough to certify it.

Where the records hold several precisions of the backbone, each has a path of plans of its own. The one that will
probably be certified at most is tested first, the next only if that fails: all paths are made before any test, so a
second test needs no fresh records, only an allowance of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from offramp_core import binomial
from offramp_core.audits import audit_price, check_audit_rate
from offramp_core.certify import (
    BOLD_SCALES,
    INDEPENDENT,
    PATH_SCALES,
    Certificate,
    Certified,
    Dependence,
    DesignEffects,
    Losses,
    Menu,
    NotCertified,
    SliceBudget,
    Subject,
    TierBudget,
    allowance,
    dependence,
    expected_path,
    fewest_for_count,
    fewest_labels,
    labels_for,
    largest_passing_count,
    rank_path,
    test_path,
)
from offramp_core.certify.certificate import answers
from offramp_core.certify.expected import PathStep
from offramp_core.certify.slices import check_slices, in_slice
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evaluate import Evaluation, chain_of, evaluate, evaluate_plan, plan_columns
from offramp_core.evidence.one_arm import check_rate
from offramp_core.plan import Execution, Plan
from offramp_core.precision import EXACT, Precision
from offramp_core.records import BoolArray, Records

# Of the records, the oldest: they find plans. A smoothed path needs few, and a test gains more from the rest
# (docs/decisions/0010).
SEARCH_SHARE = 0.12
OVERHEAD_SLACK = (
    0.1  # of the allowed overhead: profiles are measured anew now and then, and a plan must not fall for that
)
GAP_SHARE = 0.01  # between A and B, so that neighbours in time are not on both sides
FEWEST_SEARCH_ROWS = 50
MOST_SEARCH_ROWS = 20_000  # newest rows of A; more do not improve a plan, only the time to find it
# A test is worth its allowance when a plan at this share of the budget, which has most of the saving there is, passes
# with this power.
TESTABLE_RATE = 0.2
TEST_POWER = 0.8
# Of one tuning: the best precision, and one that saves more without exits; every test takes a share of the allowance.
MOST_TESTS = 2
MENU_MARK = 0.9  # of what a plan without the menu saves, one with it must save: the menu has its share of the allowance
LIKELY = 0.3  # times the best expected saving: a plan with more of it may well be the one that is taken
AS_DENSE = 0.5  # of the audit rate of rows that test, from which on older ones show the same scenes
MANY_ARE_ONE = 10  # labels, while nobody can say how many are worth one
UNCLEAR_GROWTH = 2  # times as many records are awaited before their dependence is measured again

NoGainReason = Literal["NothingSaves", "NotBetter", "OverBudget"]


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What to look for."""

    #: Accuracy budget over all requests, in (0, 1).
    max_disagreement: float
    #: Probability with which the promise may fail, over all tests ever run; 1 - confidence.
    delta: float
    #: Number of the next test for this service, from 1.
    test_index: int
    #: Names of the records' columns, at the precision that they are given at.
    ramp_ids: tuple[str, ...]
    backbone_digest: str
    ramp_set_digest: str
    #: Worst-case time a plan may take beyond the fp32 backbone's, as a share of it.
    max_overhead: float = 0.05
    #: At most so many active ramps.
    max_ramps: int = 3
    #: {"Auto", "ResultsOnly", "ComputeSaving"}.
    execution: Execution = "Auto"
    #: The plan in force (None: exits off); a proposal must save ``min_gain`` (share of the backbone's time) more on the
    #: same records.
    current: Plan | None = None
    min_gain: float = 0.0
    #: What the plan in force saves on the same requests, where it is of another ramp set; ``current`` is None then.
    saving_to_beat: float = 0.0
    #: Time of the newest record that served in a test; records up to it may find a plan, never test one.
    consumed_through: float | None = None
    #: Records older than this are not used at all (the inputs have changed since).
    discard_before: float | None = None
    #: Precisions of the backbone that a plan may run at, as far as they were recorded; None: at any.
    precisions: tuple[Precision, ...] | None = (EXACT,)
    #: Share of requests that will be audited while the plan serves. Every plan pays the same for it, the one in force
    #: and exits off too (:mod:`offramp_core.audits` says why), so it decides between none of them; the proposal tells
    #: the price.
    audit_rate: float = 0.0
    #: Groups of requests, and of answers that name a class, with a budget of their own besides. A plan is proposed when
    #: it is certified for everybody and for each of them; the allowance of a test is shared evenly.
    slices: tuple[SliceBudget, ...] = ()
    #: Smaller budgets that requests may ask for, and the larger one of overload; each has its even share of the
    #: allowance too. One that no plan passes takes the plan from nobody.
    tiers: tuple[TierBudget, ...] = ()
    #: The plan in force was made without some of the tiers, and this is the attempt to have them: it must then save
    #: ``MENU_MARK`` of what that plan saves.
    menu_is_new: bool = False
    #: What leaves at no exit is computed once more, by the core of an edge: plans are looked for as if it cost the fp32
    #: backbone's time on top, and by that a plan takes the place of the one in force. What is told is this machine's
    #: time as ever, of which a plan saves some.
    computed_again: bool = False
    #: Newest rows, used ones included, that are looked at for scenes at least: fresh ones may be too few to show those
    #: of many sources without names.
    scene_rows: int = 0
    #: Any sign of scenes, however slight, asks for more labels.
    wary: bool = False

    def subject(self, records: Records) -> Subject:
        """What a certificate on these records, which are those of one precision, would be about."""
        ids = self.ramp_ids if records.precision == EXACT else records.ramp_ids
        return Subject(ids, self.backbone_digest, self.ramp_set_digest, self.execution, records.precision)

    def allows(self, precision: Precision) -> bool:
        """Whether a plan may run at a precision."""
        return self.precisions is None or precision in self.precisions


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plan did on the held-out records, as fractions; ``exit_shares`` by ramp id, ``tiers`` what is saved of a
    request of each. ``audits`` will take their share of what is saved."""

    saving: float
    disagreement: float
    exit_shares: dict[str, float]
    audits: float = 0.0
    tiers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proposed:
    """A certified plan that saves more than the one in force.

    With ``current_over_budget`` the plan in force breaks the budget on the held-out records, so that the new one need
    not save more than it. ``design_effect`` labels are worth one, of which the share ``sampled`` of requests had one.
    """

    plan: Plan
    certificate: Certificate
    predicted: Predicted
    records_through: float
    n_b: int
    tests_run: int = 1
    current_over_budget: bool = False
    design_effect: float = 1.0
    sampled: float = 1.0


@dataclass(frozen=True, slots=True)
class NeedsLabels:
    """Too few fresh records: those that no test has used.

    ``n`` there are now; ``needed`` is about how many there must be for the next attempt to be worth a test.
    ``tests_run`` is 1, and ``records_through`` set, when a test was run and failed by little: ``n`` is 0 then. With
    ``current_over_budget`` these records are enough to show that the plan in force breaks the budget. ``design_effect``
    labels are worth one; None where mistakes come together over so large a part of the records that these cannot say.
    The share ``sampled`` of requests had a label.
    """

    n: int
    needed: int
    tests_run: int = 0
    records_through: float | None = None
    current_over_budget: bool = False
    design_effect: float | None = 1.0
    sampled: float = 1.0


@dataclass(frozen=True, slots=True)
class NoGain:
    """Nothing to propose; stay with the plan in force (or with exits off).

    ``best_saving`` is what the best plan found would save, as a fraction of the backbone's time. With
    ``current_over_budget`` the records show that the plan in force breaks the budget: exits off is all that is left.
    Without ``current_allowed`` the request's other limits (precision, execution, ramps, overhead) rule it out.
    ``slices`` are those whose budgets no plan kept.
    """

    reason: NoGainReason
    best_saving: float
    n: int
    tests_run: int = 0
    records_through: float | None = None
    current_over_budget: bool = False
    current_allowed: bool = True
    slices: tuple[SliceBudget, ...] = ()
    design_effect: float = 1.0
    sampled: float = 1.0


TuningOutcome = Proposed | NeedsLabels | NoGain


def tune(records: Records, request: TuningRequest, *, should_stop: Callable[[], bool] | None = None) -> TuningOutcome:
    """Find a plan on the older records, certify it on the newer ones.

    Parameters
    ----------
    records : Records
        Equal-weight sample, in any order; ``records.time`` must be set when ``consumed_through`` or ``discard_before``
        is.
    request : TuningRequest
    should_stop : callable, optional
        Asked now and then during the search; True ends it with the best plan so far.

    Raises
    ------
    InvalidArgumentError
        A field of the request lies outside its range, or the records do not fit it.
    """
    _check(records, request)
    records, fresh = _usable(records, request)
    outcome = replace(_attempt(records, fresh, request, should_stop), sampled=records.sampled(since=fresh))
    if not isinstance(outcome, Proposed) and _surely_over_budget(records, request):
        outcome = replace(outcome, current_over_budget=True)
    if isinstance(outcome, NoGain) and request.current is not None and not _allows(records, request, request.current):
        outcome = replace(outcome, current_allowed=False)
    return outcome


def _attempt(
    records: Records, fresh: int, request: TuningRequest, should_stop: Callable[[], bool] | None
) -> TuningOutcome:
    level = _level(request, request.test_index)
    n, budget, graded = len(records), request.max_disagreement, records.graded
    looked_at = records.take(_looked_at(records, fresh, request))
    seen = dependence(looked_at, budget=budget)
    if seen is None:
        wanted = math.ceil(testable_labels(budget, level, graded=graded) * MANY_ARE_ONE)
        return NeedsLabels(n - fresh, max(wanted, UNCLEAR_GROWTH * (n - fresh)), design_effect=None)
    effect = seen.design_effect
    worth = math.ceil(effect * testable_labels(budget, level, graded=graded))
    needed = _rows_for(worth, fresh=fresh, seen=seen)
    if n < needed:
        return NeedsLabels(n - fresh, needed - fresh, design_effect=effect)
    if request.wary:
        signs = dependence(looked_at, budget=budget, wary=True)
        if signs is None or signs.design_effect > effect:
            return NeedsLabels(n - fresh, UNCLEAR_GROWTH * (n - fresh), design_effect=effect)
    outcome = _searched(records, fresh, request, level=level, seen=seen, should_stop=should_stop)
    return replace(outcome, design_effect=effect)


def _looked_at(records: Records, fresh: int, request: TuningRequest) -> npt.NDArray[np.intp]:
    """Rows that show scenes: those that may test, and as many older ones as it takes, if they were audited about as
    densely."""
    dense = np.flatnonzero(_as_dense(records, np.arange(len(records)) >= fresh))
    start = split_rows(len(records), fresh)[1]
    first = min(start, int(dense[-min(len(dense), max(1, request.scene_rows))])) if len(dense) else start
    return np.asarray(dense[dense >= first])


def rows_for_scenes(records: Records, *, consumed_through: float | None, discard_before: float | None) -> int:
    """How many rows a look for scenes has: of those that no alarm has made stale, used ones included, drawn at about
    the rate of the fresh ones or at a higher one, as many as that rate would have drawn."""
    if records.time is None:
        return 0
    kept = _not_stale(records.time, discard_before)
    fresh = kept & _unused(records.time, consumed_through)
    if records.draw is not None and records.audit_rate is not None and fresh.any():
        kept &= records.draw < records.audit_rate[fresh].min()
    return int(np.count_nonzero(kept & _as_dense(records, fresh)))


def _as_dense(records: Records, tested: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    if records.audit_rate is None or not tested.any():
        return np.ones(len(records), bool)
    return np.asarray(records.audit_rate >= AS_DENSE * records.audit_rate[tested].min())


def _searched(
    records: Records,
    fresh: int,
    request: TuningRequest,
    *,
    level: float,
    seen: Dependence,
    should_stop: Callable[[], bool] | None,
) -> TuningOutcome:
    """Enough labels are there: find plans on the older records, and test them if they promise enough."""
    n = len(records)
    exact = None if records.graded else request.max_disagreement
    a_end, b_start = split_rows(n, fresh, budget=exact, level=level, seen=seen)
    a, b = records.take(slice(max(0, a_end - MOST_SEARCH_ROWS), a_end)), records.take(slice(b_start, None))
    allowed = [p for p in (records.precision, *records.others) if request.allows(p)]
    goal = _mark(a, request)
    passing = _Passing.of(len(b), request, level=level, effect=seen.design_effect, graded=b.graded)
    found = [_path(a.at(p), request, passing, goal=goal, should_stop=should_stop) for p in allowed]
    paths = sorted(found, key=lambda path: (-path.likely, -path.saving))
    best = max((path.saving for path in paths), default=0.0)
    if best <= 0:
        return NoGain("NothingSaves", 0.0, n)
    if max(path.gain for path in paths) < goal:
        return NoGain("NotBetter", best, n)
    effects = _effects(b, request, seen)
    worth = [path for path in paths if path.gain >= goal and path.saving > 0]
    return _tested(worth, request, a=a, b=b, n=n - fresh, effects=effects)


def _effects(b: Records, request: TuningRequest, seen: Dependence) -> DesignEffects:
    """The design effect of each slice's own requests besides that of all: a slice may be one camera's.

    In which class an answer falls depends on the plan, so classes have that of all requests.
    """
    mine = {
        s: dependence(b.take(np.flatnonzero(b.slice_id == s.slice_id)), budget=s.budget)
        for s in request.slices
        if s.of == "Request"
    }
    found = {s: d.design_effect if d is not None else math.inf for s, d in mine.items()}
    return DesignEffects(seen.design_effect, found)


@dataclass(frozen=True, slots=True)
class _Path:
    """One precision's plans from cautious to bold."""

    precision: Precision
    plans: tuple[Plan, ...]
    #: What tiers may get: for the ramps of each plan that may well be taken plans from cautious to bold.
    menu: tuple[Plan, ...]
    #: The most that one of them saved on A within the budget, and the most that one was worth (:func:`gain`).
    saving: float
    gain: float
    #: The most that one of them saved on A times its chance to pass on B, of those that save enough to be proposed. A
    #: plan at the budget's edge saves more than one that will pass, and a test that fails is spent.
    likely: float


@dataclass(frozen=True, slots=True)
class _Passing:
    """What B will let through: at most ``k`` of its ``n`` labels, each worth one; ``effect`` labels of A are."""

    k: int
    n: int
    effect: float

    @classmethod
    def of(cls, labels: int, request: TuningRequest, *, level: float, effect: float, graded: bool) -> _Passing:
        n = max(1, int(labels / effect))
        return cls(largest_passing_count(n, budget=request.max_disagreement, level=level, graded=graded), n, effect)

    def chance(self, seen: Evaluation) -> float:
        """That a plan passes which did so on A."""
        return binomial.predictive_cdf(self.k, self.n, lost=seen.lost / self.effect, seen=seen.n / self.effect)


def _path(
    a: Records,
    request: TuningRequest,
    passing: _Passing,
    *,
    goal: float,
    should_stop: Callable[[], bool] | None,
) -> _Path:
    steps = expected_path(
        a,
        max_disagreement=request.max_disagreement,
        max_ramps=request.max_ramps,
        max_overhead=request.max_overhead,
        stay=float(request.computed_again),
        should_stop=should_stop,
    )
    seen = [evaluate(a, step.active, step.thresholds) for step in steps]
    subject = request.subject(a)
    again = request.computed_again
    worth = [e.saving * passing.chance(e) if e.saving > 0 and gain(e, again) >= goal else 0.0 for e in seen]
    kept = [e for e in seen if e.disagreement <= request.max_disagreement]
    return _Path(
        a.precision,
        tuple(subject.plan(step.active, step.thresholds) for step in steps),
        menu=_menu(a, subject, steps, worth, bold=any(t.loosens for t in request.tiers)) if request.tiers else (),
        saving=max((e.saving for e in kept), default=0.0),
        gain=max((gain(e, again) for e in kept if e.saving > 0), default=0.0),
        likely=max(worth, default=0.0),
    )


def _menu(
    a: Records, subject: Subject, steps: Sequence[PathStep], worth: Sequence[float], *, bold: bool
) -> tuple[Plan, ...]:
    """One path of plans that tiers may get, whichever plan the test takes: tiers leave at its ramps, so for the ramps
    of each likely one there are its thresholds scaled together. At a lower precision its backbone alone is one too.
    With a budget above everybody's among them the path goes on ``bold``-ly."""
    best: dict[tuple[int, ...], tuple[float, PathStep]] = {}
    for step, w in zip(steps, worth, strict=True):
        if w > max(best.get(step.active, (0.0, step))[0], LIKELY * max(worth)):
            best[step.active] = w, step
    found: list[tuple[tuple[int, ...], tuple[Decimal, ...]]] = [((), ())] if a.precision != EXACT else []
    scales = BOLD_SCALES if bold else PATH_SCALES
    found += [
        (step.active, t) for _, step in best.values() for t in rank_path(a, step.active, step.thresholds, scales=scales)
    ]
    seen = [evaluate(a, active, thresholds) for active, thresholds in found]
    order = sorted(range(len(found)), key=lambda i: (seen[i].lost, seen[i].saving))
    return tuple(dict.fromkeys(subject.plan(*found[i]) for i in order))


def _tested(
    paths: Sequence[_Path], request: TuningRequest, *, a: Records, b: Records, n: int, effects: DesignEffects
) -> TuningOutcome:
    """Test the paths in order until one has a certified plan that is better than the one in force, :data:`MOST_TESTS`
    at most.

    What the first one came to is the outcome where none has, as it promised most. Where one has, a path whose backbone
    alone saves more than that plan is tested all the same: what a precision saves without exits is known, and what
    exits save on A is a promise.
    """
    through = float(b.time.max()) if b.time is not None else float(n)
    outcomes: list[TuningOutcome] = []
    best: Proposed | None = None
    tests = 0
    for path in paths:
        if tests == most_tests(request.precisions):
            break
        if best is not None and b.at(path.precision).costs.head_start <= best.predicted.saving:
            continue
        asked = replace(request, test_index=request.test_index + tests)
        fewest = fewest_labels(request.max_disagreement, _level(request, asked.test_index), graded=b.graded)
        if tests and effects.of(None) * fewest > len(b):
            break
        tests += 1
        view = b.at(path.precision)
        result = test_path(
            path.plans,
            view,
            ramp_ids=asked.subject(view).ramp_ids,
            budget=request.max_disagreement,
            delta=request.delta,
            test_index=asked.test_index,
            slices=request.slices,
            stops=False,
            effects=effects,
            menu=Menu(request.tiers, path.menu) if request.tiers else None,
        )
        outcome: TuningOutcome
        if isinstance(result, NotCertified):
            outcome = _failed(result, asked, n=n, b=b, best_saving=path.saving, through=through, effects=effects)
        else:
            outcome = _judge(result, asked, a=a, b=b, through=through)
        outcomes.append(outcome)
        if isinstance(outcome, Proposed) and (best is None or outcome.predicted.saving > best.predicted.saving):
            best = outcome
    return replace(best or outcomes[0], tests_run=tests)


def most_tests(precisions: Sequence[Precision] | None) -> int:
    """So many tests one tuning may run at most, where plans may run at these ``precisions`` (None: at any)."""
    return MOST_TESTS if precisions is None else min(len(precisions), MOST_TESTS)


def _level(request: TuningRequest, test_index: int) -> float:
    """What a test may spend on each of its promises."""
    return allowance(request.delta, test_index) / (1 + len(request.slices) + len(request.tiers))


@lru_cache(maxsize=4096)
def testable_labels(budget: float, level: float, *, graded: bool = False) -> int:
    """Held-out labels worth a test, each worth one. Remembered, because every pass of every service that waits for
    labels asks."""
    wanted = labels_for(budget * TESTABLE_RATE, budget=budget, level=level, power=TEST_POWER, graded=graded)
    return fewest_labels(budget, level, graded=graded) if wanted is None else wanted


def testable_slices(
    records: Records, slices: Sequence[SliceBudget], *, delta: float, test_index: int, consumed_through: float | None
) -> tuple[SliceBudget, ...]:
    """Those of the ``slices`` with enough fresh records that a plan worth having would probably pass for them; a test
    of the others would mostly fail for want of labels.

    How many requests name a slice says nothing about their errors, so the test's own records may be counted. How many
    answers name a class does: of those only the oldest records are asked, which no test sees, by what the model itself
    says.
    """
    check_slices(records, slices)
    fresh = np.ones(len(records), dtype=np.bool_)
    if consumed_through is not None and records.time is not None:
        fresh = records.time > consumed_through
    level = allowance(delta, test_index) / (1 + len(slices))
    return tuple(
        s for s in slices if _worth(s, records, fresh) >= testable_labels(s.budget, level, graded=records.graded)
    )


def _worth(wanted: SliceBudget, records: Records, fresh: BoolArray) -> float:
    """How many independent labels of a slice a test of the ``fresh`` (n,) records would have."""
    rows = (1 - SEARCH_SHARE) * _rows_of(wanted, records, fresh)
    if wanted.of == "Answer":
        return rows
    seen = dependence(records.take(np.flatnonzero(fresh & (records.slice_id == wanted.slice_id))), budget=wanted.budget)
    return 0.0 if seen is None else rows / seen.design_effect


def _rows_of(wanted: SliceBudget, records: Records, fresh: BoolArray) -> float:
    """About how many of the ``fresh`` (n,) records belong to a slice."""
    if wanted.of == "Request" or records.final is None:
        return float(np.count_nonzero(in_slice(wanted, records, np.empty(0, dtype=np.int64)) & fresh))
    order = np.arange(len(records)) if records.time is None else np.argsort(records.time, kind="stable")
    oldest = order[: int(SEARCH_SHARE * len(records))]
    share = float(np.mean(records.final[oldest] == wanted.slice_id)) if len(oldest) else 0.0
    return share * np.count_nonzero(fresh)


def _judge(result: Certified, request: TuningRequest, *, a: Records, b: Records, through: float) -> Proposed | NoGain:
    seen = result.on_test
    if gain(seen, request.computed_again) < _mark(b, request) or result.plan == request.current:
        return NoGain("NotBetter", seen.saving, len(a) + len(b), 1, through)
    ramp_ids = result.certificate.ramp_ids
    shares = {ramp_ids[i]: share for i, share in zip(seen.active, seen.exit_shares, strict=True)}
    audits, tiers = audit_price(b, rate=request.audit_rate), dict(result.tier_savings)
    predicted = Predicted(seen.saving, seen.disagreement, shares, audits, tiers)
    current = None if request.current is None else evaluate_plan(b, request.current, request.ramp_ids)
    over = current is not None and current.disagreement > request.max_disagreement
    return Proposed(result.plan, result.certificate, predicted, through, len(b), current_over_budget=over)


def _failed(
    result: NotCertified,
    request: TuningRequest,
    *,
    n: int,
    b: Records,
    best_saving: float,
    through: float,
    effects: DesignEffects,
) -> NeedsLabels | NoGain:
    """The test was run and nothing passed. Its records are used up, so the next one, at its lower level, needs a fresh
    set."""
    if result.reason == "NothingSaves":
        return NoGain("NothingSaves", best_saving, n, 1, through)
    if result.needed_more is None:
        return NoGain("OverBudget", best_saving, n, 1, through, slices=result.slices)
    next_level = _level(request, request.test_index + 1)
    worth = math.ceil(effects.of(None) * testable_labels(request.max_disagreement, next_level, graded=b.graded))
    return NeedsLabels(0, max(len(b) + result.needed_more, worth), 1, through)


def _check(records: Records, request: TuningRequest) -> None:
    check_rate("max_disagreement", request.max_disagreement)
    if request.max_overhead < 0 or request.max_ramps < 0 or request.min_gain < 0:
        raise InvalidArgumentError(
            f"max_overhead={request.max_overhead}, max_ramps={request.max_ramps}, min_gain={request.min_gain}; none "
            "may be negative"
        )
    check_audit_rate(request.audit_rate)
    if len(request.ramp_ids) != records.n_ramps:
        raise InvalidArgumentError(
            f"{len(request.ramp_ids)} ramp_ids for records of {records.n_ramps} ramps; name every column"
        )
    check_scores(records)
    check_slices(records, request.slices)
    loose = [tier.name for tier in request.tiers if tier.budget > request.max_disagreement and not tier.loosens]
    if loose:
        raise InvalidArgumentError(f"tier {loose[0]!r} allows more than max_disagreement; a tier only tightens")
    if records.time is None and (request.consumed_through is not None or request.discard_before is not None):
        raise InvalidRecordsError("time is missing; without it used records cannot be distinguished from fresh ones")


def check_scores(records: Records) -> None:
    """Refuse scores outside [0, 1] and times that are no numbers: compared, they would be false without a word."""
    bad = np.argwhere(~((records.uncertainty >= 0) & (records.uncertainty <= 1)))
    if len(bad):
        row, column = (int(i) for i in bad[0])
        value = records.uncertainty[row, column]
        raise InvalidRecordsError(f"uncertainty[{row}, {column}] is {value}; every value must lie in [0, 1]")
    if records.time is not None and not np.isfinite(records.time).all():
        row = int(np.flatnonzero(~np.isfinite(records.time))[0])
        raise InvalidRecordsError(f"time[{row}] is {records.time[row]}; seconds must be finite")


def _usable(records: Records, request: TuningRequest) -> tuple[Records, int]:
    """Records of equal weight in time order, and the first row that may test."""
    if records.time is None:
        return records.take(np.flatnonzero(records.equal_weight())), 0
    records = records.take(np.argsort(records.time, kind="stable"))
    times = records.time
    assert times is not None
    start = 0 if request.discard_before is None else int(np.searchsorted(times, request.discard_before, side="left"))
    fresh = (
        0 if request.consumed_through is None else int(np.searchsorted(times, request.consumed_through, side="right"))
    )
    records, fresh = records.take(slice(start, None)), max(0, fresh - start)
    kept = records.equal_weight(since=fresh)
    return records.take(np.flatnonzero(kept)), int(np.count_nonzero(kept[:fresh]))


def fresh_rows(records: Records, *, consumed_through: float | None, discard_before: float | None) -> int:
    """How many records of equal weight there are that no test has used and no alarm has made stale."""
    if records.time is None:
        return 0
    fresh = _unused(records.time, consumed_through) & _not_stale(records.time, discard_before)
    if records.draw is None or records.audit_rate is None or not fresh.any():
        return int(np.count_nonzero(fresh))
    return int(np.count_nonzero(records.draw[fresh] < records.audit_rate[fresh].min()))


def _unused(time: npt.NDArray[np.float64], consumed_through: float | None) -> BoolArray:
    return np.asarray(time > (-math.inf if consumed_through is None else consumed_through))


def _not_stale(time: npt.NDArray[np.float64], discard_before: float | None) -> BoolArray:
    return np.asarray(time >= (-math.inf if discard_before is None else discard_before))


def split_rows(
    n: int, fresh: int = 0, *, budget: float | None = None, level: float | None = None, seen: Dependence = INDEPENDENT
) -> tuple[int, int]:
    """End of A and start of B among ``n`` rows in time order, of which those from ``fresh`` on may test.

    A has the oldest share; where used records already fill it, every fresh one tests. The gap is taken from A, which
    needs it less; it is at least a block of what was ``seen`` to come together. With ``budget`` and ``level`` B is only
    as large as it has use for: an exact test of independent labels gains nothing from further ones until they allow one
    more disagreement, and A has those instead.
    """
    gap = max(round(GAP_SHARE * n), seen.block if seen.block > 1 else 0)
    a_end = max(round(SEARCH_SHARE * n), min(FEWEST_SEARCH_ROWS, n // 2), fresh) - gap
    a_end = max(a_end, 0 if seen.block == 1 else min(FEWEST_SEARCH_ROWS, n // 2))
    b_start = min(n, a_end + gap)
    if budget is None or level is None or seen.design_effect > 1 or n - b_start < fewest_labels(budget, level):
        return a_end, b_start
    b_start = n - fewest_for_count(
        largest_passing_count(n - b_start, budget=budget, level=level), budget=budget, level=level
    )
    return b_start - gap, b_start


def _rows_for(wanted: int, *, fresh: int, seen: Dependence = INDEPENDENT) -> int:
    """Rows in all with which B has ``wanted``, of which ``fresh`` and older ones may not test."""
    low, high = wanted, 2 * (wanted + fresh + seen.block) + 2 * FEWEST_SEARCH_ROWS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle - split_rows(middle, fresh, seen=seen)[1] >= wanted else (middle, high)
    return high


def _surely_over_budget(records: Records, request: TuningRequest) -> bool:
    """Whether the plan in force would hardly disagree that often if it kept the budget."""
    if request.current is None or not len(records):
        return False
    losses = _losses(records, request.current, request.ramp_ids)
    if losses.total <= request.max_disagreement * len(records):
        return False  # whatever its labels are worth
    p = _harm(records, losses, budget=request.max_disagreement)
    return p is not None and p <= request.delta


def _harm(records: Records, losses: Losses, *, budget: float) -> float | None:
    """p-value of a plan that keeps its budget, by what it lost on records; None where nobody can say how many labels
    these are worth."""
    seen = dependence(records, budget=budget)
    return None if seen is None else losses.harm(budget=budget, design_effect=seen.design_effect)


def _losses(records: Records, plan: Plan, ramp_ids: Sequence[str]) -> Losses:
    view, names = chain_of(records, plan, ramp_ids)
    return answers(view, plan, names).losses


def gain(seen: Evaluation, computed_again: bool) -> float:
    """What a plan is worth against exits off, as a share of the backbone's time: what it saves here, and one run of the
    backbone for each input that leaves, where somebody else would compute it again."""
    return seen.saving + (sum(seen.exit_shares) if computed_again else 0.0)


def _mark(records: Records, request: TuningRequest) -> float:
    """What a plan must be worth to be proposed."""
    saved = _current_saving(records, request)
    return saved * MENU_MARK if request.menu_is_new else saved + request.min_gain


def _current_saving(records: Records, request: TuningRequest) -> float:
    """What the plan in force is worth. One that breaks the budget on these records, or another limit of the request, is
    no mark to beat: anything that keeps to all of them is better."""
    if request.current is None:
        return request.saving_to_beat
    if not _allows(records, request, request.current):
        return 0.0
    seen = evaluate_plan(records, request.current, request.ramp_ids)
    return gain(seen, request.computed_again) if seen.disagreement <= request.max_disagreement else 0.0


def _allows(records: Records, request: TuningRequest, plan: Plan) -> bool:
    """Whether a plan keeps to the limits of the request, its budget aside."""
    if plan.exits_off:
        return True
    if not request.allows(plan.precision) or plan.execution != request.execution:
        return False
    view, names = chain_of(records, plan, request.ramp_ids)
    overhead = view.costs.overhead(plan_columns(plan, names)[0])
    return len(plan.ramps) <= request.max_ramps and overhead <= request.max_overhead * (1 + OVERHEAD_SLACK)


# --- pins ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PinCheck:
    """A user's own thresholds against recorded traffic.

    ``refused`` when ``p_value`` = P(Bin(n, budget) >= k), of counts divided by the design effect, is at most alpha:
    clearly over budget. Not refused is no proof of the contrary. Of graded losses ``lost`` is the sum, and the p-value
    is of a bet on their mean.
    """

    n: int
    k: int
    lost: float
    p_value: float
    saving: float
    refused: bool

    @property
    def words(self) -> str:
        """What the pin would have done, for people."""
        if self.lost != self.k:
            return f"answers would have lost {self.lost / self.n:.1%} on average"
        return f"{self.k} answers would have differed ({self.k / self.n:.1%})"


@dataclass(frozen=True, slots=True)
class Undecided:
    """Too few records to say: ``n`` there are, about ``needed`` would do."""

    n: int
    needed: int


def check_pin(
    records: Records, plan: Plan, ramp_ids: Sequence[str], *, budget: float, alpha: float = 0.05
) -> PinCheck | Undecided:
    """Would these thresholds have broken the budget on what was recorded?

    Even few records may refuse a reckless plan. They are too few to let one through while a plan at three times the
    budget would be refused less often than not in five.

    Raises
    ------
    InvalidArgumentError
        The plan names a ramp that was not recorded, or a rate is outside (0, 1).
    """
    check_rate("budget", budget)
    check_rate("alpha", alpha)
    needed = _refusable(budget, alpha)
    if len(records) == 0:
        return Undecided(0, needed)
    seen = evaluate_plan(records, plan, ramp_ids)
    p = _harm(records, _losses(records, plan, ramp_ids), budget=budget)
    if p is None or (p > alpha and seen.n < needed):
        return Undecided(seen.n, needed)
    return PinCheck(seen.n, seen.disagreements, seen.lost, p, seen.saving, refused=p <= alpha)


def _refusable(budget: float, alpha: float, *, factor: float = 3.0, power: float = 0.8) -> int:
    """Records with which a plan at ``factor`` times the budget is refused with ``power``."""
    harmful = min(factor * budget, (1 + budget) / 2)
    n = 1
    while binomial.sf(binomial.isf(alpha, n, budget), n, harmful) < power:
        n = n + max(1, n // 20)
    return n
