"""Take a plan document: verify, prepare in the background, switch between two batches. Anything doubtful is refused with a reason."""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from offramp_core.batching import MAX_BATCH
from offramp_core.columns import chain
from offramp_core.costs import CostTable
from offramp_core.errors import InvalidArgumentError, InvalidBundleError, PlanRefusedError
from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.evidence.slow import shape_of, told_limits
from offramp_core.execution import Regrouping, carries_on
from offramp_core.plan import Plan
from offramp_core.protocol import Arm, ArmPlan, PlanDocument, Refusal, SignedDocument, class_of
from offramp_core.reasons import Reason
from offramp_core.uncertainty import exit_test
from offramp_worker.documents import parse_document
from offramp_worker.engine.arms import Active, Runtime
from offramp_worker.engine.breaker import Breaker
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execute import Runnable
from offramp_worker.engine.ramp_sets import HeldSet, PlanPostponedError
from offramp_worker.logs import log_event
from offramp_worker.plans.memory import PlanMemory

MAX_SLICES = 64  # a document may name; memory must stay bounded
PATIENCE_SECONDS = 60.0  # for a ramp set that the store does not show; half of a rollout's for acknowledgements


@dataclass(frozen=True, slots=True)
class _Postponed:
    """A document that waits for its ramp set, ``until`` which time on the desk's clock."""

    document: SignedDocument
    epoch: int
    until: float


class PlanDesk:
    """Where documents arrive, from the admin port and from the plan file. One is taken at a time."""

    def __init__(
        self, engine: Engine, *, public_key: bytes, service_uid: str, memory: PlanMemory | None = None
    ) -> None:
        self._engine, self._service_uid = engine, service_uid
        self._memory = memory or PlanMemory(None)
        self._key = Ed25519PublicKey.from_public_bytes(public_key)
        self._lock = threading.Lock()
        self._in_force: str = ""
        self._postponed: _Postponed | None = None
        self._given_up: str = ""  # the payload that had its minute
        self.clock: Callable[[], float] = time.monotonic
        self.refused: Refusal | None = None
        self.newest_epoch = self._remembered()

    def deliver(self, document: SignedDocument) -> None:
        """Put a document in force, or refuse it and go on serving. Blocks while sessions are built; call it off the event loop.

        The document already in force is taken again without effect, so that a poke may be repeated.

        Raises
        ------
        PlanRefusedError
            With the reason; the refusal is also kept in ``refused`` until another document is taken.
        PlanPostponedError
            Its ramp set may still come, or the executor work again: :meth:`try_again` takes it then. It is refused once ``PATIENCE_SECONDS`` have passed.
        """
        with self._lock:
            self._deliver(document)

    def try_again(self) -> None:
        """Take the document that waits, if there is one and what it waits for has come."""
        with self._lock, contextlib.suppress(PlanRefusedError):
            if self._postponed is not None:
                self._deliver(self._postponed.document)

    def _deliver(self, document: SignedDocument) -> None:
        epoch = 0
        try:
            verify(document, self._key)
            if document.payload == self._in_force:
                return
            plan = parse(document.payload)
            epoch = plan.epoch
            self._check_addressee(plan)
            if plan.canary is None:  # a rollback waits for nothing, least of all for the sessions of what follows
                self._engine.arms.end_canary()
            self._check_executor()
            active = self._prepare(plan)
            self._resume_breaker(active)
            self._engine.activate(active)
        except PlanPostponedError as error:
            if self._may_wait(document, epoch, error):
                raise
            self._refuse(document, epoch, error)
            raise PlanRefusedError(error.reason, str(error)) from error
        except PlanRefusedError as error:
            self._refuse(document, epoch, error)
            raise
        if self._engine.captures is not None:
            self._engine.captures.ask(plan.capture_since)
        if self._postponed is not None and self._postponed.epoch <= epoch:
            self._postponed = None
        self._in_force, self.refused, self.newest_epoch = document.payload, None, epoch
        self._memory.remember(document)
        log_event("plan-in-force", epoch=epoch, weight_percent=plan.weight_percent)

    def _remembered(self) -> int:
        """The epoch of the newest document that an earlier process took, 0 where that is not known. Nobody but the operator can have made it up."""
        document = self._memory.newest()
        if document is None:
            return 0
        try:
            verify(document, self._key)
            plan = parse(document.payload)
        except PlanRefusedError as error:
            log_event("remembered-plan-refused", level="warning", reason=error.reason, message=str(error))
            return 0
        return plan.epoch if plan.service_uid == self._service_uid else 0

    def _resume_breaker(self, active: Active) -> None:
        """Have what the breaker sees kept; one that is new in this process goes on where that of the process before stopped."""
        was = self._engine.active
        breaker, last = (a.stable.breaker if a.stable is not None else None for a in (active, was))
        if breaker is last and breaker is not None:
            return
        if last is not None:
            last.let_go()
        if breaker is None:
            self._memory.forget_breaker()
        else:
            before = self._memory.breaker() if was.document is None else None
            breaker.go_on(before, self._memory.keep_breaker)
            if breaker.is_open:
                log_event("breaker-stays-open", level="warning", epoch=active.epoch)

    def _may_wait(self, document: SignedDocument, epoch: int, error: PlanPostponedError) -> bool:
        """Whether a document has time left to wait in. Of two that wait the newer one is kept."""
        waits = self._postponed
        if document.payload == self._given_up:
            return False
        if waits is not None and waits.document.payload == document.payload:
            return self.clock() < waits.until
        if waits is None or waits.epoch < epoch:
            self._postponed = _Postponed(document, epoch, until=self.clock() + PATIENCE_SECONDS)
            log_event("plan-postponed", level="warning", epoch=epoch, reason=error.reason, message=str(error))
        return True

    def _refuse(self, document: SignedDocument, epoch: int, error: PlanRefusedError) -> None:
        if self._postponed is not None and self._postponed.document.payload == document.payload:
            self._postponed, self._given_up = None, document.payload
        self._engine.metrics.plan_refusals(error.reason).inc()
        self.refused = Refusal(epoch, error.reason, str(error))
        log_event("plan-refused", level="warning", epoch=epoch, reason=error.reason, message=str(error))

    def _check_executor(self) -> None:
        """Sessions cannot be built and warmed now, which is no fault of the plan's."""
        if trouble := self._engine.vitals.trouble:
            raise PlanPostponedError(Reason.EXECUTOR_FAILING, trouble)

    def _check_addressee(self, document: PlanDocument) -> None:
        if document.service_uid != self._service_uid:
            raise PlanRefusedError(
                Reason.FOREIGN_SERVICE,
                f"the document is for service uid {document.service_uid!r}; this worker serves {self._service_uid!r}",
            )
        if document.epoch <= self._engine.active.epoch:
            raise PlanRefusedError(
                Reason.STALE_EPOCH,
                f"epoch {document.epoch} is not newer than {self._engine.active.epoch}, which is in force",
            )
        if document.epoch < self.newest_epoch:
            raise PlanRefusedError(
                Reason.STALE_EPOCH,
                f"epoch {document.epoch} is older than {self.newest_epoch}, which this worker took before it restarted",
            )

    def _prepare(self, document: PlanDocument) -> Active:
        """Everything that can fail, before anything changes: plans, sessions, warm-up; then counters of the epoch."""
        self._check_classes(document)
        plans = {
            "stable": self._plan(document.stable),
            "canary": self._plan(document.canary) if document.canary else None,
        }
        stable, canary = plans["stable"], plans["canary"]
        assert stable is not None
        sets = self._sets(document, [plan for plan in (stable, canary) if plan is not None])
        for plan in (stable, canary):
            if plan is not None:
                self._stages(plan, sets)  # may still be refused; counters of the epoch are opened after that
        breaker = self._breaker(document, stable)
        stable_runtime = self._runtime(
            document, "stable", stable, document.stable.audit_rate, breaker=breaker, sets=sets
        )
        meter = None
        if not stable_runtime.exits_off:
            meter = self._engine.counters.meter(plan_hash=stable.content_hash, share=document.holdback_share)
            stable_runtime = replace(
                stable_runtime,
                meter=meter,
                **_slices(document),
            )
        canary_runtime = None
        if canary is not None and document.canary is not None:
            canary_runtime = self._runtime(
                document, "canary", canary, document.canary.audit_rate, breaker=None, sets=sets
            )
        self._engine.sets.keep(list(sets.values()))
        return Active(
            off=replace(self._engine.active.off, audit_rate=document.stable.audit_rate),
            document=document,
            stable=stable_runtime,
            canary=canary_runtime,
            slow_limits=told_limits(document.slow_seconds, document.slow_seconds_by_length),
            holdback=self._holdback(document, meter) if document.holdback_share > 0 and meter is not None else None,
        )

    def _check_classes(self, document: PlanDocument) -> None:
        """Slices of answers are of classes, which only some tasks name."""
        named = [name for name in document.slices if class_of(name) is not None]
        if named and not self._engine.task.names_classes:
            raise PlanRefusedError(
                Reason.UNSUPPORTED,
                f"slice {named[0]} is of answers that name a class; this bundle answers with {self._engine.task.title}",
            )

    def _holdback(self, document: PlanDocument, meter: HoldbackMeter) -> Runtime:
        """The exact executor once more, audited like the stable plan so that records go on being drawn from all requests alike."""
        off = self._engine.active.off
        counter = self._engine.counters.open(epoch=document.epoch, arm="holdback", plan_hash=off.plan.content_hash)
        return Runtime(off.plan, document.stable.audit_rate, counter, meter=meter)

    def _breaker(self, document: PlanDocument, stable: Plan) -> Breaker | None:
        """What the detector has seen of a stable plan stays with the plan: epochs change more often than plans do."""
        if stable.exits_off:
            return None
        in_force = self._engine.active.stable
        fresh = Breaker(
            accuracy_budget=document.accuracy_budget,
            run_length=document.breaker_run_length,
            plan_hash=stable.content_hash,
            design_effect=document.stable.design_effect,
        )
        kept = in_force.breaker if in_force is not None and in_force.plan == stable else None
        if kept is None or not kept.watches_like(fresh):
            return fresh
        kept.design_effect = fresh.design_effect
        return kept

    def _plan(self, arm: ArmPlan) -> Plan:
        manifest = self._engine.bundle.manifest
        try:
            plan = Plan.from_mapping(arm.plan)
        except InvalidArgumentError as error:
            raise PlanRefusedError(Reason.MALFORMED, str(error)) from error
        if plan.backbone_digest != manifest.backbone_digest:
            raise PlanRefusedError(
                Reason.DIGEST_MISMATCH,
                f"backboneDigest is {plan.backbone_digest}; this worker has loaded {manifest.backbone_digest}",
            )
        precisions = [spec.name for spec in manifest.backbones]
        if plan.precision not in precisions:
            raise PlanRefusedError(
                Reason.UNSUPPORTED, f"precision {plan.precision} is not in the loaded bundle, which has {precisions}"
            )
        known = self._columns(plan)
        unknown = [ramp.id for ramp in plan.ramps if ramp.id not in known]
        if unknown:
            raise PlanRefusedError(
                Reason.UNKNOWN_RAMP,
                f"ramp {unknown[0]!r} is none of the loaded bundle's at {plan.precision}, which are {sorted(known)}",
            )
        return plan

    def _sets(self, document: PlanDocument, plans: Sequence[Plan]) -> dict[str, HeldSet]:
        """The ramp sets of a document by digest: those it names, and those of plans with exits. Where there is none, the bundle's own."""
        sets = self._engine.sets
        wanted = [*document.ramp_sets, *(plan.ramp_set_digest for plan in plans if _has_ramps(plan))]
        odd = [plan.ramp_set_digest for plan in plans if plan.ramp_set_digest not in (sets.own_digest, *wanted)]
        if odd:
            raise PlanRefusedError(
                Reason.DIGEST_MISMATCH, f"rampSetDigest is {odd[0]}; this worker has loaded {sets.own_digest}"
            )
        return sets.loaded(wanted or [sets.own_digest])

    def _columns(self, plan: Plan) -> dict[str, int]:
        """Columns of the ramps that a plan may use, by id: those at the input and those of its precision."""
        columns = self._engine.bundle.columns
        return {columns[j].id: j for j in chain([c.precision for c in columns], plan.precision)}

    def _stages(self, plan: Plan, sets: Mapping[str, HeldSet]) -> tuple[Runnable, ...]:
        """Stages for the ramps that some row can leave at.

        A threshold of 0 lets no row leave, so that ramp's head need not run.
        """
        index = self._columns(plan)
        active = sorted(index[ramp.id] for ramp in plan.ramps if ramp.threshold > 0)
        sessions = sets[plan.ramp_set_digest].sessions if active else self._engine.sessions
        try:
            return sessions.stages(active, plan.precision)
        except InvalidBundleError as error:
            raise PlanRefusedError(Reason.UNSUPPORTED, str(error)) from error

    def _runtime(
        self,
        document: PlanDocument,
        arm: Arm,
        plan: Plan,
        audit_rate: float,
        *,
        breaker: Breaker | None,
        sets: Mapping[str, HeldSet],
    ) -> Runtime:
        engine = self._engine
        held = sets.get(plan.ramp_set_digest)
        bundle = held.bundle if held is not None else engine.bundle
        index, stages = self._columns(plan), self._stages(plan, sets)
        engine.sessions.warm_up(engine.batch_rows, stages)
        profile = bundle.profile.of(plan.precision)
        table = CostTable(profile, sizes=range(MAX_BATCH + 1))  # batches may grow with what is measured
        priced = list(index.values())  # the chain's ramps as the profile has them
        seconds = table.stage_seconds([[priced.index(j) for j in stage.ramps] for stage in stages[:-1]])
        carry_on = carries_on(plan.execution, profile)
        return Runtime(
            plan=plan,
            audit_rate=audit_rate,
            counter=engine.counters.open(epoch=document.epoch, arm=arm, plan_hash=plan.content_hash),
            stages=stages,
            tests={
                index[ramp.id]: exit_test(
                    float(ramp.threshold), bundle.quantiles[index[ramp.id]], score=engine.task.raw_score
                )
                for ramp in plan.ramps
                if ramp.threshold > 0
            },
            regrouping=None if carry_on or not stages else Regrouping.of(seconds, table.regroup.tolist()),
            stage_seconds=seconds,
            breaker=breaker,
        )


def _slices(document: PlanDocument) -> dict[str, Any]:
    """Slices of a document as a runtime takes them: of requests by name, of answers by the class they name."""
    classes = {name: class_of(name) for name in document.slices}
    return {
        "slices": frozenset(name for name, number in classes.items() if number is None),
        "stopped": frozenset(name for name in document.stopped_slices if classes[name] is None),
        "classes": {number: name for name, number in classes.items() if number is not None},
        "stopped_classes": tuple(n for n in (classes[name] for name in document.stopped_slices) if n is not None),
    }


def _has_ramps(plan: Plan) -> bool:
    return any(ramp.threshold > 0 for ramp in plan.ramps)


def verify(document: SignedDocument, key: Ed25519PublicKey) -> None:
    """Check the Ed25519 signature over the payload's bytes.

    Raises
    ------
    PlanRefusedError
        ``BadSignature``.
    """
    try:
        key.verify(base64.b64decode(document.signature, validate=True), document.payload.encode())
    except (InvalidSignature, binascii.Error, ValueError) as error:
        raise PlanRefusedError(
            Reason.BAD_SIGNATURE, "the document is not signed with the key this worker trusts"
        ) from error


def parse(payload: str) -> PlanDocument:
    """Decode and check the ranges of a document.

    Raises
    ------
    PlanRefusedError
        ``Malformed``; the message names the field.
    """
    try:
        document = parse_document(payload, PlanDocument)
    except ValueError as error:
        raise PlanRefusedError(Reason.MALFORMED, f"the document does not parse: {error}") from error
    arms = [document.stable] + ([document.canary] if document.canary else [])
    checks = {
        "epoch": document.epoch >= 1,
        "weight_percent": 0 <= document.weight_percent <= 100,
        "weight_percent (without a canary)": document.canary is not None or document.weight_percent == 0,
        "audit_rate": all(0 <= arm.audit_rate <= 1 for arm in arms),
        "accuracy_budget": 0 < document.accuracy_budget < 1,
        "canary_lease_seconds": _positive(document.canary_lease_seconds),
        "stable_lease_seconds": _positive(document.stable_lease_seconds),
        "breaker_run_length": 1 < document.breaker_run_length < math.inf,
        "design_effect": all(1 <= arm.design_effect < math.inf for arm in (document.stable, document.canary) if arm),
        "max_overhead": 0 <= document.max_overhead < math.inf,
        "holdback_share": 0 <= document.holdback_share <= 0.5,
        "slices": len(document.slices) <= MAX_SLICES and set(document.stopped_slices) <= set(document.slices),
        "capture_since": document.capture_since is None or math.isfinite(document.capture_since),
        "slow_seconds": all(size.isdecimal() and _positive(s) for size, s in document.slow_seconds.items()),
        "slow_seconds_by_length": all(shape_of(t) and _positive(s) for t, s in document.slow_seconds_by_length.items()),
    }
    wrong = [name for name, is_right in checks.items() if not is_right]
    if wrong:
        raise PlanRefusedError(Reason.MALFORMED, f"{wrong[0]} of the document is out of range")
    return document


def _positive(value: float) -> bool:
    return 0 < value < math.inf
