"""The attempt under way: which rollout it is, what its rules may look at, and what its verdict changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from offramp_core.control.document import drafted
from offramp_core.control.draft import Draft
from offramp_core.control.objects import Config, Ledger, Rollout
from offramp_core.control.rollouts.ledger import BootReport, fold
from offramp_core.control.rollouts.rollout import (
    CANARY_SERVES,
    Change,
    RolloutView,
    acceptance_level,
    advance,
    closed,
    forbidden,
    has_earned_acceptance,
    is_certified,
)
from offramp_core.control.seen import Seen
from offramp_core.control.stable.audit import measured_clustering, records_for_scenes
from offramp_core.control.stable.falling import rejected
from offramp_core.control.stable.history import promoted_lately
from offramp_core.control.trust import live_boots
from offramp_core.control.tuning.retraining import after_rollout
from offramp_core.control.tuning.tuner import CERTIFICATES_KEPT, after_rollback
from offramp_core.evidence.slow import BatchShape, by_shape
from offramp_core.protocol import ArmCounts, PlanDocument
from offramp_core.reasons import Reason
from offramp_core.sketch import SecondsSketch
from offramp_core.tuning import most_tests


def advanced(seen: Seen, draft: Draft) -> Draft:
    """One pass over the oldest attempt that is not finished; others give way to it."""
    unfinished = sorted((r for r in seen.snapshot.gathered.rollouts if not r.status.finished), key=lambda r: r.number)
    for extra in unfinished[1:]:
        given_way = closed(
            extra.status, "Superseded", Reason.ANOTHER_IS_ACTIVE, message=extra.status.message, now=seen.now
        )
        draft = draft.with_rollout_status(extra.name, given_way)
    if not unfinished:
        return draft
    rollout = unfinished[0]
    if rollout.to_config not in draft.configs:
        gone = f"{rollout.to_config} does not exist"
        ended = closed(rollout.status, "Aborted", Reason.CONFIG_GONE, message=gone, now=seen.now)
        return draft.with_rollout_status(rollout.name, ended)
    change = advance(_view(seen, draft, rollout))
    if change.event is not None:
        draft = draft.with_events(replace(change.event, rollout=rollout.name))
    if change.status != rollout.status:
        draft = draft.with_rollout_status(rollout.name, change.status)
    return _followed(seen, draft, replace(rollout, status=change.status), change)


def _followed(seen: Seen, draft: Draft, rollout: Rollout, change: Change) -> Draft:
    """What follows from a change at once: which plan is stable, and what a verdict teaches."""
    status = change.status
    tests = max(draft.tuning.tests_run, status.acceptance_test)
    known = draft.tuning.clustering if change.clustering is None else change.clustering
    draft = replace(draft, tuning=replace(draft.tuning, tests_run=tests, clustering=known), rollout=rollout)
    if status.phase == "Promoting":
        draft = _accepted(seen, draft, rollout)
        draft = replace(draft, stable=draft.configs[rollout.to_config])
    elif status.phase == "RollingBack" and draft.stable.name == rollout.to_config:
        draft = replace(draft, stable=_rollback_target(seen, draft, rollout.from_config))
    return replace(_learnt(seen, draft, rollout), rollout=None) if status.finished else draft


# --- what its rules may look at --------------------------------------------------------------------


def _view(seen: Seen, draft: Draft, rollout: Rollout) -> RolloutView:
    snapshot, published = seen.snapshot, seen.snapshot.gathered.published
    serving = draft.configs[rollout.to_config] if rollout.status.phase == "Promoting" else draft.stable
    document = drafted(seen, replace(draft, stable=serving, rollout=rollout))
    epoch = published.epoch if published is not None and _same_plans(published, document) else None
    # It stays as it was while the epoch is unknown: a late read must not lose what vanished workers had counted.
    ledger = rollout.status.ledger
    if rollout.status.phase in CANARY_SERVES and epoch is not None:
        ledger = _folded(seen, draft, rollout, epoch, serving)
    notes = published.withdrawn if published is not None else ()
    return RolloutView(
        rollout=rollout,
        service=seen.service,
        configs=draft.configs,
        workers=tuple(w for w in snapshot.workers if w.endpoint.ready),
        epoch=epoch,
        ledger=ledger,
        execution=partial(_execution, seen.counts, draft.stable.plan.content_hash),
        clustering=partial(_clustering, seen, draft),
        looked_at=partial(_looked_at, seen, draft),
        load=snapshot.observed.load,
        stable_config=draft.stable.name,
        now=seen.now,
        fell=draft.fell,
        returns_to=promoted_lately(seen, draft, draft.configs[rollout.to_config]),
        inputs_since=draft.tuning.records_since_at,
        watched_since=snapshot.watched_since,
        fallen=tuple(w for w in snapshot.workers if not w.endpoint.ready),
        next_test=_next_test(seen, draft),
        withdrawn=next((note for note in notes if note.rollout == rollout.name), None),
    )


def _same_plans(a: PlanDocument, b: PlanDocument) -> bool:
    """Whether two documents make workers run the same thing; epoch, captures, stable audit rate and notes aside."""
    return _plans_alone(a) == _plans_alone(b)


def _plans_alone(document: PlanDocument) -> PlanDocument:
    stable = replace(document.stable, audit_rate=0.0, design_effect=1.0)
    return replace(document, epoch=0, capture_since=None, stable=stable, withdrawn=())


def _folded(seen: Seen, draft: Draft, rollout: Rollout, epoch: int, stable: Config) -> Ledger:
    """The ledger with what workers have counted by now."""
    ledger, workers = rollout.status.ledger, seen.snapshot.workers
    heard = [(w.endpoint.name, w.observations) for w in workers if w.observations is not None]
    return fold(
        ledger,
        [BootReport(o.boot_id, o.counts) for _, o in heard],
        epoch=epoch,
        live_boots=live_boots(workers, ledger.live),
        plan_hashes={"stable": stable.plan.content_hash, "canary": draft.configs[rollout.to_config].plan.content_hash},
        tiers=frozenset(t.name for t in seen.spec.menu),
        distrusted=frozenset(o.boot_id for name, o in heard if name in seen.quarantined),
    )


def _execution(counts: tuple[ArmCounts, ...], plan_hash: str) -> Mapping[BatchShape, SecondsSketch]:
    """Execution sketches of one plan by the shape of batches, over all workers and recent epochs; a worker that is
    older than lengths tells sizes alone."""
    return by_shape(c.execution_by_length or c.execution for c in counts if c.plan_hash == plan_hash)


def _clustering(seen: Seen, draft: Draft, wary: bool) -> float | None:
    """How much requests resemble each other, by the newest records; None where these cannot say."""
    store, known = seen.records(draft.ramp_sets), draft.tuning.clustering
    if store is None:
        return known
    return measured_clustering(store.records, known=known, budget=seen.spec.max_disagreement, wary=wary)


def _looked_at(seen: Seen, draft: Draft) -> tuple[int, int]:
    """Records to look for scenes in, and how many it takes."""
    store = seen.records(draft.ramp_sets)
    records = None if store is None else store.records
    return len(records or ()), records_for_scenes(records, budget=seen.spec.max_disagreement)


def _next_test(seen: Seen, draft: Draft) -> int:
    """The number of a test that begins now; those of a tuning that has not been digested are taken."""
    pending = seen.snapshot.tuning_running or seen.snapshot.tuning_outcome is not None
    return draft.tuning.tests_run + 1 + pending * most_tests(seen.spec.precisions)


# --- what its verdict changes ----------------------------------------------------------------------


def _accepted(seen: Seen, draft: Draft, rollout: Rollout) -> Draft:
    """An uncertified plan that is promoted has earned it; that is written down before it serves as stable.

    It is a proof for the objective that the canary was judged by, and for no other: the test of the gate
    ``acceptance``, one of those that share the service's allowance.
    """
    config, service, spec = draft.configs[rollout.to_config], seen.service, seen.spec
    if is_certified(config, service) or not has_earned_acceptance(rollout.status, service):
        return draft
    n, k = rollout.status.audited
    earned = {
        "method": "canary-acceptance",
        "budget": repr(spec.max_disagreement),
        "delta": repr(1 - spec.confidence),
        "testIndex": rollout.status.acceptance_test,
        "level": repr(acceptance_level(rollout.status, service)),
        "n": n,
        "k": k,
        "recordsThrough": repr(seen.now),
    }
    certificates = (*config.status.certificates, earned)[-CERTIFICATES_KEPT:]
    return draft.with_config_status(config.name, replace(config.status, certificates=certificates))


def _rollback_target(seen: Seen, draft: Draft, name: str) -> Config:
    """What serves after a promotion was taken back: what served before, where that may serve, else exits off."""
    before = draft.configs.get(name)
    if before is None or not seen.fits(before.plan, draft.ramp_sets):
        return draft.configs[draft.baseline.name]
    may_serve = before.plan.exits_off or not forbidden(before, seen.service)
    return before if may_serve else draft.configs[draft.baseline.name]


def _learnt(seen: Seen, draft: Draft, rollout: Rollout) -> Draft:
    """A verdict changes what is proposed next and when."""
    status, config, cooldown = rollout.status, draft.configs[rollout.to_config], seen.spec.rollout.cooldown_seconds
    tried = config.plan.ramp_set_digest
    sets = after_rollout(draft.ramp_sets, ramp_set=tried, verdict=status.verdict, cooldown=cooldown, now=seen.now)
    draft = replace(draft, ramp_sets=sets)
    if status.verdict == "Succeeded":
        proven = replace(config.status, state="Stable", rejections=0, rejected_until_at=None)
        return replace(draft.with_config_status(config.name, proven), tuning=replace(draft.tuning, failures=0))
    # Of the plan it was compared with, or of itself while it was being promoted: then it is rejected already.
    drifted = status.reason == Reason.DRIFT_DETECTED
    if (status.verdict == "RolledBack" and not drifted) or status.reason == Reason.DECISION_ABORT:
        draft = rejected(seen, draft, config.name, status.message)
    if status.verdict in ("RolledBack", "Aborted"):
        tuning = after_rollback(draft.tuning, reason=status.reason, cooldown=cooldown, now=seen.now)
        draft = replace(draft, tuning=tuning)
    return draft
