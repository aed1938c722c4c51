"""What a worker tells its control plane of an engine: its state, and what it counted and recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from offramp_core.bundle import profile_arrays
from offramp_core.errors import InvalidArgumentError, PlanRefusedError
from offramp_core.plan import Plan
from offramp_core.protocol import ArmCounts, ArmPlan, Observations, PlanDocument, RecordBlock, WorkerState
from offramp_core.reasons import Reason
from offramp_worker.engine.accounts.counters import Counters, RecordRing
from offramp_worker.engine.arms.leases import Arms, Leases
from offramp_worker.engine.remains import Remains
from offramp_worker.plans.preparation import check_fits

if TYPE_CHECKING:
    from offramp_worker.bundle.load import Bundle
    from offramp_worker.engine.engine import Engine
    from offramp_worker.process import ServingProcess
    from offramp_worker.worker import InferenceWorker


def blank_state(worker: ServingProcess) -> WorkerState:
    """Of a worker that has no bundle yet."""
    return WorkerState(
        uid=worker.settings.uid,
        boot_id=worker.boot_id,
        service_uid=worker.settings.service_uid,
        model="",
        ready=False,
        backbone_digest="",
        ramp_set_digest="",
        ramps=(),
        costs={},
        crashed_epoch=worker.marker.crashed_epoch,
    )


def in_force(state: WorkerState, worker: ServingProcess, arms: Arms) -> WorkerState:
    """With what serves now, by the newest document."""
    active, plans = arms.active, worker.plans
    return replace(
        state,
        ready=worker.ready,
        epoch=active.epoch,
        stable_hash=active.stable.plan.content_hash if active.stable else "",
        canary_hash=active.canary.plan.content_hash if active.canary and not arms.canary_lease_ended else "",
        refused=plans.refused if plans else None,
        breaker_open=arms.breaker_open,
        suspicion=arms.suspicion,
        failing=worker.failing,
        newest_epoch=plans.newest_epoch if plans else 0,
    )


def bundle_state(worker: InferenceWorker, bundle: Bundle) -> WorkerState:
    """Of a worker whose bundle has been read and verified."""
    manifest = bundle.manifest
    costs: dict[str, list[Any]] = {name: a.tolist() for name, a in profile_arrays(bundle.profile).items()}
    return replace(
        blank_state(worker),
        model=manifest.name,
        backbone_digest=manifest.backbone_digest,
        ramp_set_digest=manifest.ramp_set_digest,
        ramps=bundle.columns,
        costs=costs,
        output=bundle.task.spec.output,
        ramp_sets=(manifest.ramp_set_digest,),
    )


def state_of(worker: InferenceWorker, engine: Engine) -> WorkerState:
    """Of a worker whose bundle is loaded. ``message`` of an unready one is the reason of a broken bundle and nothing
    else."""
    captures = engine.captures
    return replace(
        in_force(bundle_state(worker, engine.bundle), worker, engine.arms),
        stopped_tiers=engine.arms.stopped_tiers,
        message=engine.arms.describe() if worker.ready else "",
        ramp_sets=engine.sets.digests,
        captures=captures.count if captures else 0,
        capture_since=captures.since if captures else None,
        pace=engine.pace,
        overload_seconds=engine.overload_seconds(),
        at_edge=engine.at_edge,
    )


def observed(
    report: Observations,
    counters: Counters,
    rings: Mapping[str, RecordRing],
    *,
    own: str,
    after: int,
    also: Mapping[str, int],
) -> Observations:
    """With all counters, and records from sequence number ``after`` on. ``also`` has the numbers to go on from in the
    rings of other ramp sets than the bundle's ``own``, by digest."""
    records, others = RecordBlock(after, after, own), []
    for digest, ring in rings.items():
        if digest == own:
            records = ring.read(after)
        else:
            others.append(ring.read(also.get(digest, 0)))
    return replace(
        report,
        counts=counters.snapshot(),
        records=records,
        held_back=counters.held_back(),
        plans=counters.plans(),
        refused=counters.refused,
        other_seconds=counters.other_seconds,
        more_records=tuple(others),
    )


def resting_of(worker: InferenceWorker, bundle: Bundle, engine: Engine | None = None) -> Resting:
    """A worker whose bundle was verified and let go, or whose engine has ended."""
    remains = None if engine is None else Remains.of(engine)  # its audits that are lost may open the breaker
    state = bundle_state(worker, bundle) if engine is None else _left_by(worker, engine)
    return Resting(
        state,
        remains,
        precisions=[spec.name for spec in bundle.manifest.backbones],
        has_store=worker.settings.ramp_set_store is not None,
    )


def _left_by(worker: InferenceWorker, engine: Engine) -> WorkerState:
    return replace(state_of(worker, engine), failing="", message=engine.arms.describe())


@dataclass(slots=True)
class Resting:
    """A worker whose bundle is out of memory until somebody asks for it. Its control plane hears what it would if the
    bundle were there and nobody asked. Without ``remains`` it was never loaded."""

    state: WorkerState
    remains: Remains | None = None
    #: Of the bundle, and whether there are ramp sets besides its own.
    precisions: Sequence[str] = ()
    has_store: bool = False
    #: The newest document that came meanwhile; its leases are in ``_heard``.
    _taken: PlanDocument | None = None
    #: As the state was when the bundle left.
    _left: WorkerState = field(init=False)
    _heard: Leases = field(default_factory=lambda: Leases(time.perf_counter()))

    def __post_init__(self) -> None:
        self._left = self.state

    @property
    def leases(self) -> Leases:
        """How far they have run, for the next engine."""
        if self._taken is None:
            return self._heard if self.remains is None else self.remains.arms.leases
        ended, lease = self._heard.canary_ended_epoch, self._taken.canary_lease_seconds
        if self._taken.canary is not None and time.perf_counter() - self._heard.last_pull > lease:
            ended = self._taken.epoch
        return replace(self._heard, canary_ended_epoch=ended)

    def report(self, *, ready: bool) -> WorkerState:
        """Its state. ``ready``: a request would load it."""
        if self._taken is None:
            ended = self.remains is not None and self.remains.arms.canary_lease_ended
        else:
            ended = self.leases.canary_ended_epoch == self._taken.epoch
        message, canary = self.state.message if ready else "", "" if ended else self.state.canary_hash
        return replace(self.state, ready=ready, message=message, canary_hash=canary)

    def took(self, document: PlanDocument) -> None:
        """A newer document will be in force with the next load.

        Raises
        ------
        PlanRefusedError
            No bundle could run it, or this one could not.
        """
        stable, before, left = self._hash(document.stable), self.state, self._left
        canary = "" if document.canary is None else self._hash(document.canary)
        for digest in () if self.has_store else document.ramp_sets:
            self._check_set(digest)
        same = stable == left.stable_hash
        self.state = replace(
            before,
            epoch=document.epoch,
            newest_epoch=document.epoch,
            stable_hash=stable,
            canary_hash=canary,
            breaker_open=left.breaker_open and same,
            stopped_tiers=left.stopped_tiers if same else (),
            suspicion=left.suspicion if same else 0.0,
            message="",
        )
        self._heard, self._taken = replace(self.leases, last_pull=time.perf_counter()), document

    def _hash(self, arm: ArmPlan) -> str:
        try:
            plan = Plan.from_mapping(arm.plan)
        except InvalidArgumentError as error:
            raise PlanRefusedError(Reason.MALFORMED, str(error)) from error
        own = self.state.backbone_digest
        check_fits(plan, backbone_digest=own, precisions=self.precisions, columns=self.state.ramps)
        if not self.has_store:
            self._check_set(plan.ramp_set_digest)
        return plan.content_hash

    def _check_set(self, digest: str) -> None:
        if digest != self.state.ramp_set_digest:
            own = self.state.ramp_set_digest
            message = f"rampSetDigest is {digest}; this worker's bundle has {own}, and there is no ramp-set store"
            raise PlanRefusedError(Reason.DIGEST_MISMATCH, message)

    def renew(self) -> None:
        """The control plane is alive, and has spoken to this process."""
        if self._taken is None and self.remains is not None:
            self.remains.arms.meet()
        else:
            self._heard = replace(self.leases, last_pull=time.perf_counter(), met=True)


def owes_audits(pulled: tuple[ArmCounts, ...], now: tuple[ArmCounts, ...]) -> bool:
    """Whether draws that were open when the control plane ``pulled`` counts last have been compared by ``now``."""
    audited = {(c.epoch, c.arm): c.audited for c in now}
    return any(c.audited < c.drawn and c.audited < audited.get((c.epoch, c.arm), 0) for c in pulled)
