"""When to tune, on which records, and what to do with the outcome. Pins are judged here as well.

A tuning is wanted for the first time, for a changed objective, after an alarm, and every so often in the hope
of a better plan. It then waits for labels; asking for them is what makes the audit rate eager.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offramp_core.certify import SliceBudget, TierBudget, all_streams_differ, allowance
from offramp_core.control.objects import Config, ConfigStatus, PinStatus, Prediction, Rollout, TuningStatus
from offramp_core.control.snapshot import Event, NewConfig, NewRollout, RecordStore, Snapshot
from offramp_core.control.spec import SliceObjective
from offramp_core.control.stable.audit import (
    clustering,
    expected_rate,
    quiet_rate,
    records_for_scenes,
    records_for_slight_scenes,
)
from offramp_core.control.workers.versions import concerns_versions
from offramp_core.evaluate import chain_of
from offramp_core.plan import Plan
from offramp_core.precision import EXACT
from offramp_core.protocol import slice_number
from offramp_core.reasons import MaybeReason, Reason
from offramp_core.tuning import (
    SEARCH_SHARE,
    NeedsLabels,
    NoGain,
    PinCheck,
    Proposed,
    TuningRequest,
    check_pin,
    fresh_rows,
    rows_for_scenes,
    testable_labels,
    testable_slices,
)

RETUNE_SECONDS = 3600.0
EAGER_PAUSE = 9.0  # times as long as audits were many for an attempt they are few after it, where that is longer
MIN_GAIN = 0.01
RETRY_SECONDS = 10.0
PIN_RECORDS = 2000
CERTIFICATES_KEPT = 5
TUNE = "tune"  # what a user may ask for, besides what the spec says
LABELS_STEP = 100  # at most: labels are told in steps, so that the status is not written for every one
FEWEST_STEPS = 10  # at least, until there are enough
_LABELS_PER_BUDGET = 10  # a first attempt waits for this many budgeted disagreements' worth of labels
_MIN_LABELS, _MAX_LABELS = 300, 5000
# Budgets beyond a tenth, as whole answers have, are decided by fewer.
_LABELS_PER_LARGE_BUDGET, _FEWEST_LABELS = 30, 100
MOST_LABELS = 200_000  # that are ever waited for: an operator keeps them in memory, and inputs change meanwhile
REMEASURE_GROWTH = 2  # times as many labels, until it is measured again what one is worth
REMEASURE_SECONDS = 86_400.0  # after which it is measured again with fewer, where requests name their sources
# Times what a test for everybody is worth, that may be waited for so that tiers are tested as well: one at a sixth of
# the budget comes with the first plan, one that is stricter where traffic brings its labels anyway.
MENU_PATIENCE = 8
_PATIENCE = 4  # times what a test is worth: a plan that needs more labels is given up for a more cautious one


@dataclass(frozen=True, slots=True)
class TunerView:
    """``stable`` is the plan that serves all traffic now; ``rollout`` an unfinished attempt, if any.

    ``recommended`` is an attempt that waits for a person's approval instead: a better one may be looked for meanwhile.
    ``known`` names a plan that was stable lately and may come back, where exits are off. ``ramp_set`` is the set in
    which plans are looked for (empty: that of the stable plan), ``saving_to_beat`` what the stable plan saves where it
    is of another.
    """

    snapshot: Snapshot
    status: TuningStatus
    stable: Config
    rollout: Rollout | None
    now: float
    recommended: Rollout | None = None
    known: str = ""
    ramp_set: str = ""
    saving_to_beat: float = 0.0

    @property
    def objective(self) -> str:
        plan = self.stable.plan
        ramp_set = self.ramp_set or plan.ramp_set_digest
        return f"{self.snapshot.service.spec.objective_key}/{plan.backbone_digest[-12:]}/{ramp_set[-12:]}"

    @property
    def on_trial(self) -> bool:
        """Whether plans are looked for in another ramp set than the one that serves."""
        plan = self.stable.plan
        return not plan.exits_off and self.ramp_set not in ("", plan.ramp_set_digest)

    @property
    def wanted(self) -> bool:
        """Whether a better plan is being looked for right now."""
        spec = self.snapshot.service.spec
        if spec.mode not in ("Auto", "Recommend") or spec.suspend or self.rollout is not None:
            return False
        due = self.status.next_attempt_at is None or self.now >= self.status.next_attempt_at
        return due or self.status.tuned_for != self.objective or self.asks_to_tune

    @property
    def request(self) -> str:
        """What the user asks for, until it is answered."""
        asked, service = self.snapshot.service.request, self.snapshot.service
        if asked == self.status.handled_request or concerns_versions(service):
            return ""
        return asked

    @property
    def asks_to_tune(self) -> bool:
        return self.request.startswith(f"{TUNE}/")

    @property
    def asks_the_unknown(self) -> bool:
        return bool(self.request) and not self.asks_to_tune


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the tuner wants done.

    ``stable_over_budget`` and ``stable_not_allowed`` say why exits go off first: records show that the stable plan
    breaks the budget, or the spec no longer allows it and nothing can take its place. ``withdraw`` says why a
    recommendation no longer holds.
    """

    status: TuningStatus
    request: TuningRequest | None = None
    new_config: NewConfig | None = None
    new_rollout: NewRollout | None = None
    events: tuple[Event, ...] = ()
    stable_over_budget: str = ""
    stable_not_allowed: str = ""
    withdraw: str = ""


def tune_or_wait(view: TunerView) -> Tuned:
    """Digest a finished tuning, or start one when enough labels are there, or say what is missing."""
    view = _by_this_clock(view)
    status = view.status
    labels = _labels(view)
    if view.snapshot.tuning_outcome is not None:
        return _digest(view)
    if view.snapshot.tuning_running:
        return Tuned(replace(status, state=Reason.TUNING, message="searching and certifying"))
    if view.asks_the_unknown or not view.wanted:
        return _rest(view)
    if view.known and view.recommended is None and status.failures == 0:
        return _come_back(view)
    needed = labels_awaited(view)
    if view.snapshot.observed.records is None or labels < needed:
        wait = _hopeless if max(needed, _worth(view)) > MOST_LABELS else _collecting
        return Tuned(wait(view, labels=labels, needed=needed))
    begun = replace(
        status, state=Reason.TUNING, labels=labels, requested_for=view.objective, message="searching and certifying"
    )
    return Tuned(begun, request=_request(view, view.snapshot.observed.records))


def _by_this_clock(view: TunerView) -> TunerView:
    """A clock that was ahead at an attempt postpones the next one by a day at most."""
    by, latest = view.status.remeasure_by_at, view.now + REMEASURE_SECONDS
    return view if by is None or by <= latest else replace(view, status=replace(view.status, remeasure_by_at=latest))


def _come_back(view: TunerView) -> Tuned:
    """A plan of the rollback window is proven for what is asked: it returns before anything new is looked for. One
    failure ends this."""
    rollout = new_rollout(view.snapshot, view.known, from_config=view.stable.name, cause="Tuned")
    message = f"{view.known} was stable lately and comes back"
    status = replace(
        view.status,
        state=Reason.ROLLING_OUT,
        message=message,
        tuned_for=view.objective,
        next_attempt_at=view.now + RETUNE_SECONDS,
    )
    return Tuned(status, new_rollout=rollout, events=(Event(Reason.RAMP_PROPOSED, message),))


def labels_awaited(view: TunerView) -> int:
    """Fresh labels that the next attempt waits for. Without names of streams it also waits for records in which scenes
    of many sources would show."""
    named, lacking = _awaited_with_names(view), _lacking_for_scenes(view)
    if not lacking:
        return named
    return max(named, LABELS_STEP * math.ceil((_labels(view) + lacking) / LABELS_STEP))


def _awaited_with_names(view: TunerView) -> int:
    """Fresh labels that the next attempt waits for: computed anew in every pass, since budget, tests and what labels
    are worth change.

    What the last attempt for the same objective asked for counts as well, within reason. What few labels seemed to be
    worth is measured again before there are as many as a certificate would take: it may have been their change. With no
    more of them it is measured again only where scenes are told apart by names: without, one of many looks sees none.
    """
    status, spec = view.status, view.snapshot.service.spec
    first = first_attempt_labels(spec.max_disagreement) if status.consumed_through_at is None else 0
    same = status.requested_for == view.objective
    if same and status.remeasure_at and view.now >= (status.remeasure_by_at or 0.0) and _sources_named(view):
        return first_attempt_labels(spec.max_disagreement)
    if same and status.remeasure_at:
        return max(first, status.remeasure_at)
    worth = _worth(view)
    if worth > MOST_LABELS:  # so little were labels worth before an alarm, or for another objective
        worth = _testable(view)
    menu = _menu_labels(view) if menu_is_new(view) else 0
    asked = status.labels_needed if same else 0
    return max(first, worth, min(asked, _PATIENCE * worth), min(menu, MENU_PATIENCE * worth))


def _sources_named(view: TunerView) -> bool:
    """Whether nearly all requests name their sources."""
    store, budget = view.snapshot.observed.records, view.snapshot.service.spec.max_disagreement
    return store is not None and records_for_scenes(store.records, budget=budget) == 0


def _lacking_for_scenes(view: TunerView) -> int:
    """Records that lack until a look for scenes of many sources without names shows something."""
    store, budget = view.snapshot.observed.records, view.snapshot.service.spec.max_disagreement
    return 0 if store is None else max(0, records_for_scenes(store.records, budget=budget) - _kept(view))


def _kept(view: TunerView) -> int:
    """Records of these inputs that the next attempt looks for scenes in."""
    store = view.snapshot.observed.records
    if store is None:
        return 0
    return rows_for_scenes(
        store.records, consumed_through=_used_through(view), discard_before=view.status.records_since_at
    )


def _testable(view: TunerView) -> int:
    """Independent labels that the next test is worth."""
    spec = view.snapshot.service.spec
    return testable_labels(spec.max_disagreement, allowance(1 - spec.confidence, view.status.tests_run + 1))


def _worth(view: TunerView) -> int:
    """Labels that the next test is worth, as far as the last attempt could tell."""
    return math.ceil(view.status.design_effect * _testable(view))


def menu_is_new(view: TunerView) -> bool:
    """Whether this attempt is to bring tiers that the stable plan was made without. One is made for it, and whenever
    somebody asks: what no plan could be certified for must not cost a test every hour."""
    wanted = {tier.name for tier in view.snapshot.service.spec.menu}
    new = view.status.tuned_for != view.objective or view.asks_to_tune
    return new and not wanted <= {tier.name for tier in view.stable.plan.tiers}


def _menu_labels(view: TunerView) -> int:
    """Labels with which the strictest tier could be tested as well, beside the search's share."""
    strictest = min(tier.max_disagreement for tier in view.snapshot.service.spec.menu)
    labels = testable_labels(strictest, _menu_level(view))
    return math.ceil(view.status.design_effect * labels / (1 - SEARCH_SHARE))


def _menu_level(view: TunerView) -> float:
    """What the next test allows each tier: an even share beside everybody and the slices."""
    spec = view.snapshot.service.spec
    return allowance(1 - spec.confidence, view.status.tests_run + 1) / (1 + len(spec.slices) + len(spec.menu))


def first_attempt_labels(budget: float) -> int:
    """Labels worth waiting for before a first attempt: fewer would mostly waste a test."""
    fewest = max(_FEWEST_LABELS, min(_MIN_LABELS, math.ceil(_LABELS_PER_LARGE_BUDGET / budget)))
    return min(_MAX_LABELS, max(fewest, math.ceil(_LABELS_PER_BUDGET / budget)))


def _hopeless(view: TunerView, *, labels: int, needed: int) -> TuningStatus:
    """No sample that is ever kept proves such a budget, as far as one can tell: audits stay few."""
    status, shown = view.status, labels - labels % LABELS_STEP
    if (status.state, status.labels, status.labels_needed) == (Reason.IDLE, shown, needed):
        return status
    return replace(
        status, state=Reason.IDLE, labels=shown, labels_needed=needed, message=_too_many(view, needed=needed)
    )


def _too_many(view: TunerView, *, needed: int) -> str:
    effect, budget = view.status.design_effect, view.snapshot.service.spec.max_disagreement
    worth = f", as {effect:.1f} of them are worth one" if effect > 1 else ""
    day = ", or a day after the last attempt" if _sources_named(view) else ""
    again = f"; measured again at {needed}{day}" if needed < MOST_LABELS else ""
    return (
        f"a certificate for a budget of {budget:.4%} takes about {max(needed, _worth(view))} labels{worth}; at most "
        f"{MOST_LABELS} are kept{again}. "
        "Raise maxDisagreement, or name the streams of requests that resemble each other"
    )


def _collecting(view: TunerView, *, labels: int, needed: int) -> TuningStatus:
    """How many labels are there, and how long the rest will take at the pace of the last ones."""
    step = max(1, min(LABELS_STEP, needed // FEWEST_STEPS))
    status, shown = view.status, labels - labels % step
    if (status.state, status.labels, status.labels_needed) == (Reason.COLLECTING_LABELS, shown, needed):
        return status
    message = f"{shown} of {needed} labels"
    if (named := _awaited_with_names(view)) < needed:
        message += f" ({named} where requests name their sources)"
    if needed < _worth(view):
        message += f", when it is measured again whether {status.design_effect:.1f} are worth one"
    store = view.snapshot.observed.records
    if store is not None and store.records.time is not None and shown > 0 and needed > shown:
        seconds = max(0.0, view.now - float(store.records.time[-step])) / step * (needed - shown)
        message += f"; {_about(seconds)} more at today's traffic"
    return replace(status, state=Reason.COLLECTING_LABELS, labels=shown, labels_needed=needed, message=message)


def _about(seconds: float) -> str:
    """A duration as people say it."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"about {seconds / size:.0f} {unit}"
    return "less than a minute"


def _rest(view: TunerView) -> Tuned:
    """Nothing to look for; a request that nobody knows is told of once."""
    if not view.asks_the_unknown:
        return Tuned(_idle(view))
    message = f"annotation {view.request!r} asks for nothing known; use {TUNE}/TIME"
    status = replace(_idle(view), handled_request=view.request)
    return Tuned(status, events=(Event(Reason.REQUEST_REFUSED, message, warning=True),))


def _idle(view: TunerView) -> TuningStatus:
    spec = view.snapshot.service.spec
    if view.rollout is not None:
        return replace(view.status, state=Reason.ROLLING_OUT, message=f"waiting for {view.rollout.name}")
    if spec.suspend:
        return replace(view.status, state=Reason.SUSPENDED, message="spec.suspend is true")
    if spec.mode in ("Disabled", "Pinned"):  # whatever was found before, tuning begins anew when it is wanted again
        state = Reason.PINNED if spec.mode == "Pinned" else Reason.DISABLED
        return replace(
            view.status,
            state=Reason.ANOTHER_TASK if spec.no_exits_because else state,
            message=spec.no_exits_because or f"ramps.mode is {spec.mode}",
            tuned_for="",
            next_attempt_at=None,
            failures=0,
        )
    if view.recommended is not None:
        asked = view.recommended
        return replace(
            view.status,
            state=Reason.RECOMMENDED,
            message=f"{asked.to_config} waits for spec.decision: Promote on {asked.name}",
        )
    stale = view.status.state in (Reason.ROLLING_OUT, Reason.RECOMMENDED)  # it told of a rollout that is over
    return replace(view.status, state=Reason.IDLE, message="" if stale else view.status.message)


def _labels(view: TunerView) -> int:
    """Fresh records: no alarm has made them stale and no test has used them."""
    return max(_fresh(view, view.status.consumed_through_at), _fresh(view, _eager_from(view.status)))


def _fresh(view: TunerView, used: float | None) -> int:
    store = view.snapshot.observed.records
    if store is None:
        return 0
    return fresh_rows(store.records, consumed_through=used, discard_before=view.status.records_since_at)


def _eager_from(status: TuningStatus) -> float | None:
    """Records from then on were drawn at one high rate; with those of before, only as many would count as their low
    rate had drawn."""
    known = [at for at in (status.consumed_through_at, status.eager_since_at) if at is not None]
    return max(known, default=None)


def _used_through(view: TunerView) -> float | None:
    """Records up to then test nothing: those that a test has used, and those of before audits became many, where the
    former leave too few."""
    status = view.status
    enough = _fresh(view, status.consumed_through_at) >= _fresh(view, _eager_from(status))
    return status.consumed_through_at if enough else _eager_from(status)


def _request(view: TunerView, store: RecordStore) -> TuningRequest:
    spec = view.snapshot.service.spec
    scene_rows = records_for_slight_scenes(store.records, budget=spec.max_disagreement)
    return TuningRequest(
        max_disagreement=spec.max_disagreement,
        delta=1 - spec.confidence,
        test_index=view.status.tests_run + 1,
        max_overhead=spec.max_overhead,
        max_ramps=spec.max_active,
        ramp_ids=store.ramp_ids,
        backbone_digest=store.backbone_digest,
        ramp_set_digest=store.ramp_set_digest,
        execution=spec.execution,
        current=None if view.on_trial else view.stable.plan,
        saving_to_beat=view.saving_to_beat if view.on_trial else 0.0,
        min_gain=_min_gain(view),
        consumed_through=_used_through(view),
        discard_before=view.status.records_since_at,
        precisions=spec.precisions,
        audit_rate=expected_rate(view.snapshot.observed.load),
        slices=_slices_to_certify(view, store),
        tiers=_tiers_to_certify(view, store),
        menu_is_new=menu_is_new(view) and not view.stable.plan.exits_off,
        computed_again=view.snapshot.has_edges,
        scene_rows=scene_rows,
        wary=_kept(view) < scene_rows,
    )


def _tiers_to_certify(view: TunerView, store: RecordStore) -> tuple[TierBudget, ...]:
    """Tiers with labels enough that a plan worth having would probably pass; the others would only cost a share of the
    level."""
    level, held_out = _menu_level(view), (1 - SEARCH_SHARE) * _labels(view) / view.status.design_effect
    graded = store.records.graded
    return tuple(
        TierBudget(tier.name, tier.max_disagreement)
        for tier in view.snapshot.service.spec.menu
        if testable_labels(tier.max_disagreement, level, graded=graded) <= held_out
    )


def _slices_to_certify(view: TunerView, store: RecordStore) -> tuple[SliceBudget, ...]:
    """Slices with enough labels. Those that are too rare for a certificate do not keep the others from theirs; their
    audits watch over them."""
    spec, status, records = view.snapshot.service.spec, view.status, store.records
    wanted = [
        _budget(s) for s in spec.slices if (records.slice_id if s.predicted is None else records.final) is not None
    ]
    return testable_slices(
        store.records,
        wanted,
        delta=1 - spec.confidence,
        test_index=status.tests_run + 1,
        consumed_through=status.consumed_through_at,
    )


def _budget(asked: SliceObjective) -> SliceBudget:
    """A slice as records know it."""
    if asked.predicted is None:
        return SliceBudget(slice_number(asked.name), asked.max_disagreement)
    return SliceBudget(asked.predicted, asked.max_disagreement, "Answer")


def _min_gain(view: TunerView) -> float:
    """Nothing is asked of the plan that replaces one with a ramp that does not pay, at the attempt that this brings
    about."""
    return 0.0 if view.status.unpaying == view.stable.name and not view.status.tuned_for else MIN_GAIN


def _digest(view: TunerView) -> Tuned:
    """What came out, and what keeps streams from being of use."""
    tuned, store = _outcome_digested(view), view.snapshot.observed.records
    if store is None or not all_streams_differ(store.records):
        return tuned
    message = (
        f"{len(store.records)} records name nearly as many streams; name the source of requests, such as a "
        "camera or a conversation"
    )
    return replace(tuned, events=(*tuned.events, Event(Reason.STREAMS_ALL_DIFFER, message, warning=True)))


def _outcome_digested(view: TunerView) -> Tuned:
    """Whatever came out, tests that ran are counted and the records they used are spent."""
    outcome, status = view.snapshot.tuning_outcome, view.status
    assert outcome is not None
    if outcome.records_through is not None:
        spent = max(outcome.records_through, status.consumed_through_at or 0.0)
        status = replace(status, tests_run=status.tests_run + outcome.tests_run, consumed_through_at=spent)
    intent_changed = not view.wanted or status.requested_for != view.objective
    inputs_changed = (outcome.records_through or math.inf) < (status.records_since_at or 0.0)
    if intent_changed or inputs_changed:  # while the tuning ran
        return Tuned(_idle(replace(view, status=status)))
    if outcome.design_effect is not None:
        effect = outcome.design_effect
        known = clustering(status.clustering, design_effect=effect, sampled=outcome.sampled)
        status = replace(status, design_effect=round(effect, 2), clustering=known)
    over = ""
    if outcome.current_over_budget and not view.stable.plan.exits_off:
        over = (
            f"{view.stable.name} breaks the budget of {view.snapshot.service.spec.max_disagreement:.2%} on recent "
            f"records; {view.snapshot.service.spec.off_now}"
        )
    if isinstance(outcome, NeedsLabels):
        return Tuned(_more_labels(replace(view, status=status), outcome), stable_over_budget=over)
    status = replace(
        status,
        labels_needed=0,
        remeasure_at=0,
        remeasure_by_at=None,
        next_attempt_at=view.now + _pause(view),
        tuned_for=view.objective,
    )
    if view.asks_to_tune:
        status = replace(status, handled_request=view.request)
    if isinstance(outcome, NoGain):
        names = [s.name for s in view.snapshot.service.spec.slices if _budget(s) in outcome.slices]
        of = f" of {', '.join(names)}" if names else ""
        message = _NO_GAIN[outcome.reason].format(saving=outcome.best_saving, of=of)
        none_fits = (
            "" if outcome.current_allowed else f"{view.stable.name} is not what the spec allows now, and {message}"
        )
        withdraw = "" if view.recommended is None else f"on newer records {message}"
        return Tuned(
            replace(status, state=Reason.IDLE, message=message),
            events=(Event(Reason.NO_BETTER_PLAN, message),),
            stable_over_budget=over,
            stable_not_allowed=none_fits,
            withdraw=withdraw,
        )
    return replace(_propose(view, status, outcome), stable_over_budget=over)


def remeasured_at(outcome: NeedsLabels, *, labels: int) -> int:
    """Labels at which the next attempt is made after one that ran no test, of so many ``labels``; 0 after one that
    did."""
    if outcome.tests_run:
        return 0
    return min(outcome.needed, REMEASURE_GROWTH * max(outcome.n, labels), MOST_LABELS)


def _more_labels(view: TunerView, outcome: NeedsLabels) -> TuningStatus:
    """Wait for as many as a test is worth; where none was run, at most for twice as many as there are."""
    status = view.status
    if outcome.n >= MOST_LABELS:
        return replace(
            status,
            state=Reason.IDLE,
            labels=outcome.n,
            labels_needed=MOST_LABELS,
            remeasure_at=0,
            remeasure_by_at=None,
            next_attempt_at=view.now + REMEASURE_SECONDS,
            tuned_for=view.objective,
            handled_request=view.request if view.asks_to_tune else status.handled_request,
            message=_too_many(view, needed=outcome.needed),
        )
    again = remeasured_at(outcome, labels=status.labels)
    needed = again or outcome.needed
    hopeless = _worth(view) > MOST_LABELS
    message = f"about {outcome.needed} labels are needed for a certificate{_resemblance(outcome)}"
    if needed < outcome.needed:
        message += f"; measured again at {needed}{', or in a day' if _sources_named(view) else ''}"
    return replace(
        status,
        state=Reason.IDLE if hopeless else Reason.COLLECTING_LABELS,
        labels=outcome.n,
        labels_needed=needed,
        remeasure_at=again,
        remeasure_by_at=view.now + REMEASURE_SECONDS if again else None,
        message=_too_many(view, needed=needed) if hopeless else message,
    )


def _pause(view: TunerView) -> float:
    """Seconds to the next attempt: an hour, or longer where labels took long, so that audits are many for a tenth of
    the time at most."""
    status = view.status
    if status.eager_since_at is None or status.audit_rate <= quiet_rate(view.snapshot.observed.load):
        return RETUNE_SECONDS
    return max(RETUNE_SECONDS, EAGER_PAUSE * (view.now - status.eager_since_at))


def _resemblance(outcome: NeedsLabels) -> str:
    """What is to be said where labels are worth less than one each."""
    if outcome.design_effect is None:
        return (
            ": mistakes come together over so many requests that nobody can say what a label is worth; name the "
            "streams they come from"
        )
    return f": {outcome.design_effect:.1f} of them are worth one" if outcome.design_effect > 1 else ""


_NO_GAIN = {
    "NothingSaves": "no plan saves time within the budget",
    "NotBetter": "the best plan found saves {saving:.0%}, not enough more than the one that serves",
    "OverBudget": "no plan could be certified within the budget{of}",
}


def _propose(view: TunerView, status: TuningStatus, outcome: Proposed) -> Tuned:
    name = outcome.plan.name(view.snapshot.service.name)
    if name == view.stable.name:  # it came to serve while the tuning ran
        return Tuned(replace(status, state=Reason.IDLE, message=f"{name} is the best plan found, and serves"))
    known = view.snapshot.gathered.configs.get(name)
    if known is not None and (known.status.rejected_until_at or 0.0) > view.now:
        return Tuned(replace(status, state=Reason.COOLING_DOWN, message=f"{name} was rejected lately"))
    certificates = (known.status.certificates if known is not None else ()) + (outcome.certificate.to_mapping(),)
    seen = outcome.predicted
    tiers = {name: round(saving, 4) for name, saving in sorted(seen.tiers.items())}
    prediction = Prediction(round(seen.saving, 4), round(seen.disagreement, 6), round(seen.audits, 4), tiers)
    rejections = known.status.rejections if known is not None else 0  # a further failure must cool down longer
    config = NewConfig(
        name,
        outcome.plan,
        ConfigStatus("Tuned", "Certified", certificates[-CERTIFICATES_KEPT:], prediction, rejections),
    )
    at = "" if outcome.plan.precision == EXACT else f" at {outcome.plan.precision}"
    event = Event(
        Reason.RAMP_PROPOSED,
        f"{name}: certified{at}, saves {prediction.saving:.0%} at {prediction.disagreement:.2%} disagreement on its "
        f"records; audits will take {prediction.audits:.1%}{_of_tiers(view, prediction)}",
    )
    if view.recommended is not None and view.recommended.to_config == name:
        return Tuned(
            _idle(replace(view, status=status)), new_config=config
        )  # still the best: only its certificate is newer
    rollout = new_rollout(view.snapshot, name, from_config=view.stable.name, cause="Tuned")
    withdraw = "" if view.recommended is None else f"{name} is better on newer records"
    if view.snapshot.service.spec.mode == "Recommend":
        status = replace(
            status, state=Reason.RECOMMENDED, message=f"{name} waits for spec.decision: Promote on {rollout.name}"
        )
    else:
        status = replace(status, state=Reason.ROLLING_OUT, message=f"rolling out {name}")
    return Tuned(status, None, config, rollout, (event,), withdraw=withdraw)


def _of_tiers(view: TunerView, prediction: Prediction) -> str:
    """What tiers may expect of a plan, as the rest of a sentence."""
    saved = [
        f"{t.name} {prediction.tiers[t.name]:.0%}" if t.name in prediction.tiers else f"{t.name} has no plan"
        for t in view.snapshot.service.spec.menu
    ]
    return f"; of tiers: {', '.join(saved)}" if saved else ""


def new_rollout(snapshot: Snapshot, to: str, *, from_config: str, cause: str) -> NewRollout:
    """The next attempt; numbers rise for good, because the newest attempts are never collected."""
    name = f"{snapshot.service.name}-{max((r.number for r in snapshot.gathered.rollouts), default=0) + 1}"
    return NewRollout(name, from_config, to, cause, snapshot.service.generation)  # type: ignore[arg-type]


# --- after the fact --------------------------------------------------------------------------------


def after_alarm(status: TuningStatus, *, now: float) -> TuningStatus:
    """The inputs changed: what was recorded before says nothing about what comes now."""
    nothing_awaited = replace(status, labels_needed=0, remeasure_at=0, remeasure_by_at=None)
    return replace(nothing_awaited, records_since_at=now, tuned_for="", next_attempt_at=None)


def after_rollback(status: TuningStatus, *, reason: MaybeReason, cooldown: float, now: float) -> TuningStatus:
    """Look again soon, later after each failure. A certified plan that broke its budget means that the inputs moved."""
    failures = status.failures + 1
    retry = now + min(cooldown, RETRY_SECONDS * 2 ** (failures - 1))
    if reason in (Reason.ACCURACY_REJECTED, Reason.DRIFT_REJECTED, Reason.DRIFT_DETECTED):
        return replace(after_alarm(status, now=now), failures=failures)
    return replace(status, failures=failures, next_attempt_at=retry)


# --- pins ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PinJudged:
    status: PinStatus
    new_config: NewConfig | None = None
    new_rollout: NewRollout | None = None
    events: tuple[Event, ...] = ()


def pinned_plan(
    snapshot: Snapshot, *, backbone_digest: str, ramp_set_digest: str, order: tuple[str, ...]
) -> Plan | None:
    """The user's thresholds as a plan, ramps in network order; an unknown ramp goes last, for the workers to refuse."""
    spec = snapshot.service.spec
    if spec.pin is None:
        return None
    rank = {ramp_id: index for index, ramp_id in enumerate(order)}
    ramps = tuple(sorted(spec.pin.ramps, key=lambda ramp: rank.get(ramp.id, len(rank))))
    return Plan(backbone_digest, spec.pin.ramp_set_digest or ramp_set_digest, ramps, spec.pin.precision, spec.execution)


def judge_pin(snapshot: Snapshot, *, plan: Plan, stable: Config, rollout: Rollout | None) -> PinJudged:
    """Refuse a pin that recorded traffic clearly contradicts; else let it canary and earn its place."""
    service, status = snapshot.service, snapshot.service.status.pin
    name = plan.name(service.name)
    known, intent = snapshot.gathered.configs.get(name), f"{name}/{service.spec.objective_key}"
    if stable.name == name and (rollout is None or rollout.to_config != name):
        return PinJudged(PinStatus(service.generation, "Accepted", f"{name} serves", intent))
    waiting = PinStatus(service.generation, "", f"{name} is being judged", intent)
    if rollout is not None:
        return PinJudged(waiting)
    lost = _lost(snapshot, name, known, judged=status.intent == intent)
    if lost:
        return PinJudged(PinStatus(service.generation, "Rejected", lost, intent))
    refused = _refused_by_records(snapshot, plan)
    if refused:
        before = known.status if known is not None else ConfigStatus("Pinned")
        return PinJudged(
            PinStatus(service.generation, "Rejected", refused, intent),
            NewConfig(name, plan, replace(before, state="Rejected", message=refused)),
            events=(Event(Reason.PIN_REJECTED, refused, warning=True),),
        )
    config = NewConfig(name, plan, known.status if known is not None else ConfigStatus("Pinned", "Proposed"))
    return PinJudged(waiting, config, new_rollout(snapshot, name, from_config=stable.name, cause="Pinned"))


def _lost(snapshot: Snapshot, name: str, known: Config | None, *, judged: bool) -> str:
    """Why the pin has lost already, or empty.

    ``judged`` says that this intent was judged before, maybe for an earlier generation: then the verdict stands, and a
    plan that was accepted and has fallen since is no better. Else only an attempt of this very generation counts.
    """
    status = snapshot.service.status.pin
    if judged and status.verdict == "Rejected":
        return status.message
    if judged and status.verdict == "Accepted" and known is not None and known.status.state == "Rejected":
        return known.status.message
    attempts = [r for r in snapshot.gathered.rollouts if r.to_config == name and r.cause == "Pinned"]
    last = max(attempts, key=lambda r: r.number, default=None)
    if last is None or last.status.verdict in ("", "Succeeded", "Superseded"):
        return ""
    mine = judged or last.generation == snapshot.service.generation
    return f"{last.name}: {last.status.message}" if mine else ""


def _refused_by_records(snapshot: Snapshot, plan: Plan) -> str:
    """Why recorded traffic contradicts the pin, or empty."""
    store, spec = snapshot.observed.records, snapshot.service.spec
    if store is None or store.ramp_set_digest != plan.ramp_set_digest:
        return ""
    if plan.precision not in (store.records.precision, *store.records.others):
        return ""
    if not {r.id for r in plan.ramps} <= set(chain_of(store.records, plan, store.ramp_ids)[1]):
        return ""
    since, time = snapshot.service.status.tuning.records_since_at, store.records.time
    fresh = 0 if since is None or time is None else int(time.searchsorted(since))
    recent = store.records.take(slice(max(fresh, len(store.records) - PIN_RECORDS), None))
    check = check_pin(recent, plan, store.ramp_ids, budget=spec.max_disagreement, alpha=1 - spec.rollout.confidence)
    if not isinstance(check, PinCheck) or not check.refused:
        return ""
    return (
        f"on {check.n} recorded requests {check.words}; the budget is {spec.max_disagreement:.2%}. Lower the "
        "thresholds or raise maxDisagreement"
    )
