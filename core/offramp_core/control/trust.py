"""Whose word counts: workers of another model, counts that cannot be true, and the newest epoch that anybody is
believed to know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from offramp_core.control.objects import Rollout
from offramp_core.control.rollouts.ledger import impossible
from offramp_core.control.served import digests_of
from offramp_core.control.snapshot import Snapshot, Worker
from offramp_core.control.workers.capacity import impossible_pace
from offramp_core.plan import Plan
from offramp_core.protocol import PlanDocument

MAX_EPOCH_LEAP = 1_000_000  # a worker that claims to be further ahead of what is published is not believed


def strangers(workers: Sequence[Worker], leading: tuple[str, str]) -> frozenset[str]:
    """Names of the workers that serve another model or ramp set than the ``leading`` one."""
    return frozenset(w.endpoint.name for w in workers if (digests := digests_of(w)) is not None and digests != leading)


def foreign(workers: Sequence[Worker], names: Collection[str]) -> dict[str, str]:
    """What strangers of the present template serve, by name: their image has changed under its name, or the bundle of
    their pool has not the model and exits of the spec's.

    While workers of an older template are ready nobody is called foreign: an update brings another model.
    """
    if any(not w.endpoint.current for w in workers if w.endpoint.ready):
        return {}
    found = {}
    for worker in workers:
        if worker.endpoint.name in names and worker.state is not None:
            theirs, next_step = worker.state, "delete the pod if its image is the wrong one"
            if worker.endpoint.own_bundle:
                next_step = (
                    f"no plan is for it; make the bundle of {worker.endpoint.pool_field}.model.uri from that of "
                    "spec.model.uri, with `offramp prepare --remeasure`"
                )
            found[worker.endpoint.name] = (
                f"it serves {theirs.backbone_digest[:19]} with ramps {theirs.ramp_set_digest[:19]}, unlike the other "
                f"workers; {next_step}"
            )
    return found


def quarantined(snapshot: Snapshot) -> dict[str, str]:
    """Why a worker's counts cannot be true, by its name."""
    published = snapshot.gathered.published
    plans = {}
    if published is not None:
        arms = {"stable": published.stable, "canary": published.canary}
        plans = {
            (published.epoch, arm): Plan.from_mapping(a.plan).content_hash for arm, a in arms.items() if a is not None
        }
    found = {}
    for worker in snapshot.workers:
        if worker.observations is None:
            continue
        seen = worker.observations
        counts = (*seen.counts, *seen.held_back)
        why = worker.distrusted or impossible(
            counts, newest_epoch=_newest(published, worker), plans=plans, measured=seen.plans
        )
        if not why and worker.state is not None and impossible_pace(worker.state.pace):
            why = f"it tells that batches take {worker.state.pace:g} times what the profile says"
        if why:
            found[worker.endpoint.name] = why
    return found


def not_pooled(workers: Sequence[Worker], known: Mapping[str, str], rollout: Rollout | None) -> dict[str, str]:
    """Why workers are not pooled, by name: what is ``known`` of them now, or what they said earlier in this step."""
    found = dict(known)
    boots = rollout.status.ledger.quarantined if rollout is not None else ()
    for worker in workers:
        if worker.observations is not None and worker.observations.boot_id in boots:
            found.setdefault(worker.endpoint.name, "its counts of this step went backwards or could not be true")
    return found


def last_epoch(
    workers: Iterable[Worker],
    distrusted: Collection[str],
    *,
    published: PlanDocument | None,
    rollouts: Iterable[Rollout],
) -> int:
    """The newest epoch anybody knows: workers refuse older ones, also when the published document was lost."""
    states = [w.state for w in workers if w.state is not None and w.endpoint.name not in distrusted]
    seen = [max(state.epoch, state.newest_epoch) for state in states]
    newest = max([published.epoch if published is not None else 0, *(r.status.ledger.epoch for r in rollouts)])
    return max([newest, *(e for e in seen if e <= newest + MAX_EPOCH_LEAP)])


def live_boots(workers: Iterable[Worker], counted: Iterable[str]) -> frozenset[str]:
    """Boots that may still report: each worker's last known one. While a worker was never heard, any might be its
    own."""
    known = [w.state or w.observations for w in workers]
    boots = {seen.boot_id for seen in known if seen is not None}
    if None in known:
        boots |= set(counted)
    return frozenset(boots)


def _newest(published: PlanDocument | None, worker: Worker) -> int | None:
    """The newest epoch that a worker can have counted for: what is published, unless workers hold a newer one whose
    document was lost."""
    if published is None:
        return None
    holds = worker.state.epoch if worker.state is not None else 0
    return max(published.epoch, holds) if holds <= published.epoch + MAX_EPOCH_LEAP else published.epoch
