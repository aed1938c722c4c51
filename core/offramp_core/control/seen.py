"""What one pass sees of a service whose workers have reported their model: sorted by whom it concerns, the same for
every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offramp_core.control.objects import RampSetStatus, Service
from offramp_core.control.served import Served, votes, who_say
from offramp_core.control.snapshot import RecordStore, Snapshot, Worker
from offramp_core.control.spec import ServiceSpec
from offramp_core.control.trust import foreign, quarantined, strangers
from offramp_core.control.tuning.retraining import working_set
from offramp_core.control.workers.update import Update
from offramp_core.control.workers.versions import Version
from offramp_core.plan import Plan
from offramp_core.protocol import ArmCounts, Observations


@dataclass(frozen=True, slots=True)
class Seen:
    """The snapshot's ``workers`` are those that serve the leading model: whatever another says is about other answers,
    so nothing of it is looked at. ``everybody`` are all, those of a version on ``trial`` included.

    ``stores`` has the records of the model that is served, by ramp set. ``foreign`` and ``quarantined`` say why workers
    are not pooled, by name; ``trusted`` is what the others say, ``counts`` what they counted in all. ``outvoted`` says
    that more ready workers serve another model, which a rollout under way keeps from leading.
    """

    snapshot: Snapshot
    everybody: tuple[Worker, ...]
    trial: tuple[Worker, ...]
    served: Served
    version: Version
    update: Update
    stores: Mapping[str, RecordStore]
    foreign: Mapping[str, str]
    quarantined: Mapping[str, str]
    trusted: tuple[Observations, ...]
    counts: tuple[ArmCounts, ...]
    outvoted: bool
    now: float
    canary_lease_seconds: float

    @property
    def service(self) -> Service:
        return self.snapshot.service

    @property
    def spec(self) -> ServiceSpec:
        return self.snapshot.service.spec

    def working_set(self, sets: RampSetStatus) -> str:
        """Digest of the set that plans are looked for in."""
        return working_set(sets, self.served.ramp_set_digest)

    def records(self, sets: RampSetStatus) -> RecordStore | None:
        """Records of the set that plans are looked for in."""
        return self.stores.get(self.working_set(sets))

    def fits(self, plan: Plan, sets: RampSetStatus) -> bool:
        """Whether a plan is for the model that is served and for a ramp set that workers may hold."""
        pinned = self.spec.pin.ramp_set_digest if self.spec.pin is not None else None
        known = (self.served.ramp_set_digest, sets.current, sets.candidate, pinned)
        return plan.backbone_digest == self.served.backbone_digest and plan.ramp_set_digest in known


def see(
    snapshot: Snapshot,
    served: Served,
    *,
    trial: tuple[Worker, ...],
    version: Version,
    update: Update,
    now: float,
    canary_lease_seconds: float,
) -> Seen:
    """Sort what was gathered. The snapshot's workers are those that are not on trial."""
    leading = (served.backbone_digest, served.ramp_set_digest)
    published, bundle = snapshot.gathered.published, snapshot.service.status.ramp_sets.bundle
    others, ready = strangers(snapshot.workers, leading), votes(who_say(snapshot.workers, published, bundle))
    members = snapshot.with_workers(tuple(w for w in snapshot.workers if w.endpoint.name not in others))
    distrusted = quarantined(members)
    reports = ((w.endpoint.name, w.observations) for w in members.workers)
    trusted = tuple(o for name, o in reports if o is not None and name not in distrusted)
    return Seen(
        snapshot=members,
        everybody=(*snapshot.workers, *trial),
        trial=trial,
        served=served,
        version=version,
        update=update,
        stores=_stores(snapshot, served.backbone_digest),
        foreign=foreign(snapshot.workers, others),
        quarantined=distrusted,
        trusted=trusted,
        counts=tuple(c for o in trusted for c in o.counts),
        outvoted=max(ready.values()) > ready[leading],
        now=now,
        canary_lease_seconds=canary_lease_seconds,
    )


def _stores(snapshot: Snapshot, backbone_digest: str) -> dict[str, RecordStore]:
    """Records of the model that is served, by ramp set."""
    found = [
        store for store in (snapshot.observed.records, *snapshot.observed.more_records.values()) if store is not None
    ]
    return {store.ramp_set_digest: store for store in found if store.backbone_digest == backbone_digest}
