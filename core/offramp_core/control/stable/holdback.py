"""What the stable plan really saves: the pooled counts of batches with exits and of those held back, and what follows
from them.

Counters are cumulative per worker process, so a pull that is lost or repeated changes nothing, and sums of processes
that are gone are kept. A look is taken only once the counts have grown by a tenth: the intervals hold whenever one
looks, so nothing is lost by looking seldom, and the status is written a few hundred times in a plan's life instead of
with every pull. What is said is about the last one to two windows, because a plan that saved much last month may cost
time today.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from offramp_core.control.objects import Measured, RampUse, Saving, SliceStop, SliceUse
from offramp_core.control.spec import SliceObjective
from offramp_core.evidence import savings
from offramp_core.evidence.intervals import rate_interval
from offramp_core.evidence.meter import BOUND
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.plan import Plan
from offramp_core.protocol import PlanCounts, SliceCounts, TimeSums
from offramp_core.records import ExitCosts

WINDOW_SECONDS = 86_400.0
GROWTH = 1.1
MIN_REQUESTS = 100
MIN_HELD_BACK = 10
MAX_STOPS = 64  # remembered, of all plans
_WORST = -9.999  # an interval may reach down to -infinity, which JSON cannot say
_AGES = 1e10  # seconds: no process runs for centuries
_MOST_AUDITS = 999.0  # times the model's own time, which a status can say in a few digits
_NOTHING = PlanCounts()
_TIMES = ("answer_time", "engine_time")


def update_measured(
    before: Measured,
    reports: Iterable[tuple[str, PlanCounts]],
    *,
    plan: Plan,
    share: float,
    live_boots: frozenset[str],
    ramp_ids: Sequence[str],
    costs: ExitCosts,
    alpha: float,
    now: float,
    slices: Sequence[SliceObjective] = (),
    slice_alpha: float = 0.05,
    design_effect: float = 1.0,
) -> Measured:
    """Bring the figures of the stable plan up to date.

    Parameters
    ----------
    before : Measured
        As persisted; one of another plan or share starts anew, but slices that a plan was stopped for stay stopped
        under it.
    reports : iterable of (boot id, PlanCounts)
        Whatever could be pulled; those of other plans or shares are left out, and so is one that went backwards.
    plan, share
        The stable plan, and the share of batches held back from it.
    live_boots : frozenset of str
        Boot ids of processes that may still report.
    ramp_ids, costs
        Names and profiled seconds of the ramps in the plan's chain.
    alpha : float
        Probability that any of the intervals of a window is ever wrong; the two savings share it, and so do the ramps.
    slices, slice_alpha
        Groups with a budget of their own, and the probability that any of them that keeps to it is stopped in a window.
    design_effect : float
        So many audits are worth one.

    Returns
    -------
    Measured
        ``before`` itself while there is too little news for another look.
    """
    if plan.exits_off:
        return before.of(plan)
    known = _under(before, plan, share=share, now=now)
    mine = [(boot, c) for boot, c in reports if (c.plan_hash, c.holdback_share) == (plan.content_hash, share)]
    folded = _turned(_fold(known, mine, live_boots), now=now)
    total = _total(folded)
    declared = [(s.name, s.max_disagreement) for s in slices] == [(s.name, s.budget) for s in before.slices]
    if known is before and folded.since_at == before.since_at and declared and not _grew(before, total):
        return before
    uses = tuple(_slice(s, total, known, alpha=slice_alpha / len(slices), design_effect=design_effect) for s in slices)
    return replace(
        _counted(folded, total),
        answer_time=_saving(total, total.answer_time, share=share, alpha=alpha / 2),
        engine_time=_saving(total, total.engine_time, share=share, alpha=alpha / 2),
        ramps=_ramps(total, plan, ramp_ids, costs, alpha=alpha),
        slices=uses,
        stops=_newest(replace(known, slices=uses)),
    )


def loss(measured: Measured, *, max_overhead: float, off: str = "exits off") -> str:
    """How a plan costs time beyond doubt, or empty. ``off`` names what it is compared with.

    It must not make answers later, and it may take more of the engine's time (results-only execution does) only as far
    as the user allows ramps to. Either is tested by an interval that holds at all times, so a plan that just breaks
    even is called a loss with at most half the interval's level, however long it serves.
    """
    answer, engine = measured.answer_time, measured.engine_time
    if answer is not None and answer.high < 0:
        return f"its answers come later than with {off}"
    if engine is not None and engine.high < -max_overhead:
        return f"it takes more engine time than {off} and the {max_overhead:.2%} that ramps.maxOverhead allows"
    return ""


def impossible_counts(counts: PlanCounts) -> bool:
    """Whether a process cannot have counted this."""
    sums = [getattr(getattr(counts, time), name) for time in _TIMES for name in TimeSums.__dataclass_fields__]
    spans = (counts.audit_seconds, counts.exact_seconds)
    surprises = [
        s for time in _TIMES for s in (getattr(counts, time).saved_surprise, getattr(counts, time).spent_surprise)
    ]
    numbers = (
        counts.requests,
        counts.batches,
        counts.held_back,
        *counts.exits.values(),
        *(min(s.disagreements, s.requests) for s in counts.slices.values()),
    )
    return (
        min(numbers) < 0
        or counts.held_back > counts.batches
        or sum(counts.exits.values()) > counts.requests
        or any(s.disagreements > s.audited for s in counts.slices.values())
        or not all(map(math.isfinite, sums))
        or min(surprises) < 0
        or not all(0 <= seconds <= _AGES for seconds in spans)  # NaN compares false
    )


# --- pooling ---------------------------------------------------------------------------------------


def _under(before: Measured, plan: Plan, *, share: float, now: float) -> Measured:
    """What is known of a plan and share; nothing but stops where it was of others."""
    if (before.plan_hash, before.holdback_share) == (plan.content_hash, share):
        return before
    return Measured(plan.content_hash, share, previous_since_at=now, since_at=now, stops=before.all_stops)


def _fold(known: Measured, reports: Iterable[tuple[str, PlanCounts]], live_boots: frozenset[str]) -> Measured:
    live, base, retired = dict(known.live), dict(known.base), known.retired
    for boot, counts in reports:
        last = live.get(boot, _NOTHING)
        if counts.requests >= last.requests and counts.batches >= last.batches and counts.held_back >= last.held_back:
            live[boot] = _shortened(counts)
    for boot in sorted(set(live) - live_boots):
        retired = _add(retired, _add(live.pop(boot), base.pop(boot, _NOTHING), sign=-1))
    return replace(known, live=live, base=base, retired=retired)


def _turned(known: Measured, *, now: float) -> Measured:
    """The same figures, in a new window where the last one is over."""
    if known.since_at is None or now - known.since_at < WINDOW_SECONDS:
        return known
    return replace(
        known,
        previous=_window(known),
        base=dict(known.live),
        retired=_NOTHING,
        previous_since_at=known.since_at,
        since_at=now,
    )


def _window(known: Measured) -> PlanCounts:
    total = known.retired
    for boot, counts in known.live.items():
        total = _add(_add(total, counts), known.base.get(boot, _NOTHING), sign=-1)
    return total


def _total(known: Measured) -> PlanCounts:
    return _add(known.previous, _window(known))


def _counted(known: Measured, total: PlanCounts) -> Measured:
    return replace(
        known, requests=total.requests, batches=total.batches, held_back=total.held_back, audits=_audits(total)
    )


def _grew(before: Measured, total: PlanCounts) -> bool:
    return any(
        now >= max(fewest, GROWTH * then)
        for now, then, fewest in (
            (total.requests, before.requests, MIN_REQUESTS),
            (total.held_back, before.held_back, MIN_HELD_BACK),
            *((total.slices.get(s.name, SliceCounts()).disagreements, s.disagreements, 1) for s in before.slices),
            *((total.slices.get(s.name, SliceCounts()).requests, s.requests, MIN_REQUESTS) for s in before.slices),
        )
    )


def _add(one: PlanCounts, other: PlanCounts, *, sign: int = 1) -> PlanCounts:
    exits = {r: one.exits.get(r, 0) + sign * other.exits.get(r, 0) for r in one.exits.keys() | other.exits.keys()}
    slices = {
        name: SliceCounts(*(getattr(a, n) + sign * getattr(b, n) for n in SliceCounts.__dataclass_fields__))
        for name in sorted(one.slices.keys() | other.slices.keys())
        for a, b in [(one.slices.get(name, SliceCounts()), other.slices.get(name, SliceCounts()))]
    }
    return PlanCounts(
        "",
        0.0,
        one.requests + sign * other.requests,
        dict(sorted(exits.items())),
        one.batches + sign * other.batches,
        one.held_back + sign * other.held_back,
        _add_sums(one.answer_time, other.answer_time, sign),
        _add_sums(one.engine_time, other.engine_time, sign),
        slices,
        one.audit_seconds + sign * other.audit_seconds,
        one.exact_seconds + sign * other.exact_seconds,
    )


def _add_sums(one: TimeSums, other: TimeSums, sign: int) -> TimeSums:
    return TimeSums(*(getattr(one, n) + sign * getattr(other, n) for n in TimeSums.__dataclass_fields__))


def _shortened(counts: PlanCounts) -> PlanCounts:
    """As it is stored: what it is about is known, and sums need no seventeen digits."""
    answer, engine = (
        TimeSums(*(float(f"{getattr(getattr(counts, t), n):.9g}") for n in TimeSums.__dataclass_fields__))
        for t in _TIMES
    )
    audits, exact = (float(f"{seconds:.9g}") for seconds in (counts.audit_seconds, counts.exact_seconds))
    return replace(
        counts,
        plan_hash="",
        holdback_share=0.0,
        answer_time=answer,
        engine_time=engine,
        audit_seconds=audits,
        exact_seconds=exact,
    )


# --- figures ---------------------------------------------------------------------------------------


def _saving(total: PlanCounts, sums: TimeSums, *, share: float, alpha: float) -> Saving | None:
    if share <= 0 or total.held_back < MIN_HELD_BACK:
        return None
    saved, spent = sums.saved, sums.spent
    surprises = (max(0.0, sums.saved_surprise), max(0.0, sums.spent_surprise))  # differences of rounded sums
    state = savings.SavingsState(share, BOUND, total.batches, saved, surprises[0], spent, surprises[1])
    interval = savings.estimate(state, alpha=alpha).share
    estimate = saved / (spent + saved) if spent + saved > 0 else 0.0
    low, high = (min(1.0, max(_WORST, bound)) for bound in (interval.low, interval.high))
    return Saving(round(max(_WORST, estimate), 3), math.floor(low * 1e3) / 1e3, math.ceil(high * 1e3) / 1e3)


def _audits(total: PlanCounts) -> float | None:
    """What audits took, as a share of the model's own time for the same requests; unknown before enough of them, or
    from workers of before."""
    if total.requests < MIN_REQUESTS or total.exact_seconds <= 0:
        return None
    return round(min(_MOST_AUDITS, max(0.0, total.audit_seconds) / total.exact_seconds), 3)


def _ramps(
    total: PlanCounts, plan: Plan, ramp_ids: Sequence[str], costs: ExitCosts, *, alpha: float
) -> tuple[RampUse, ...]:
    active = [ramp.id for ramp in plan.ramps if ramp.threshold > 0]
    if total.requests < MIN_REQUESTS or not set(active) <= set(ramp_ids):
        return ()
    behind = costs.total_seconds - np.cumsum(costs.segment_seconds)  # what leaving spares
    reach, uses = total.requests, []
    for ramp in active:
        at, left = ramp_ids.index(ramp), total.exits.get(ramp, 0)
        uses.append(
            _use(
                ramp,
                left,
                reach,
                of=total.requests,
                saves=float(behind[at]),
                costs=float(costs.ramp_seconds[at]),
                alpha=alpha / len(active),
            )
        )
        reach -= left
    return tuple(uses)


def _slice(
    asked: SliceObjective, total: PlanCounts, before: Measured, *, alpha: float, design_effect: float
) -> SliceUse:
    """A slice is stopped once its audits are surely over its budget, and stays so under the plan: its later audits, all
    answered by the model itself, say nothing about the plan."""
    seen = total.slices.get(asked.name, SliceCounts())
    stopped = before.stopped(before.plan_hash, asked.name, asked.max_disagreement)
    evidence = log_e_value(seen.disagreements, seen.audited, p0=asked.max_disagreement, design_effect=design_effect)
    over = evidence >= math.log(1 / alpha)
    return SliceUse(
        asked.name, asked.max_disagreement, seen.audited, seen.disagreements, stopped or over, seen.requests
    )


def _newest(measured: Measured) -> tuple[SliceStop, ...]:
    """The stops to remember: those of the plan that serves before all others."""
    return tuple(sorted(measured.all_stops, key=lambda stop: stop.plan_hash == measured.plan_hash))[-MAX_STOPS:]


def _use(ramp: str, left: int, reach: int, *, of: int, saves: float, costs: float, alpha: float) -> RampUse:
    """A ramp pays when, of the inputs that reach it, more leave than its cost is a share of what leaving spares."""
    utility = (left * saves - reach * costs) / of
    break_even = costs / saves if saves > 0 else math.inf
    pays = reach == 0 or rate_interval(left, reach, alpha=2 * alpha).high >= min(break_even, 1.0)
    return RampUse(ramp, round(left / of, 4), float(f"{utility:.3g}"), pays)
