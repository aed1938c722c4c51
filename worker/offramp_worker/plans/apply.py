"""Take a plan document: verify, prepare in the background, switch between two batches. Anything doubtful is refused
with a reason."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from offramp_core.errors import PlanRefusedError
from offramp_core.protocol import PlanDocument, Refusal, SignedDocument
from offramp_core.reasons import Reason
from offramp_worker.engine.arms.arms import Active
from offramp_worker.engine.execution.ramp_sets import PlanPostponedError
from offramp_worker.logs import log_event
from offramp_worker.plans.memory import PlanMemory
from offramp_worker.plans.preparation import PlanTarget
from offramp_worker.plans.verification import parse, verify
from offramp_worker.reporting import Resting

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
        self, target: PlanTarget | Resting, *, public_key: bytes, service_uid: str, memory: PlanMemory | None = None
    ) -> None:
        """``target``: the engine, or what a worker is whose bundle is not in memory."""
        self._target, self._service_uid = target, service_uid
        self._newest: SignedDocument | None = None  # that this process took
        self._memory = memory or PlanMemory(None)
        self._key = Ed25519PublicKey.from_public_bytes(public_key)
        self._lock = threading.Lock()
        self._in_force: str = ""
        self._postponed: _Postponed | None = None
        self._given_up: str = ""  # the payload that had its minute
        self._watched: Active | None = None  # before the bundle left memory, while no document came after it
        self.clock: Callable[[], float] = time.monotonic
        self.refused: Refusal | None = None
        self.newest_epoch = self._remembered()

    def deliver(self, document: SignedDocument) -> None:
        """Put a document in force, or refuse it and go on serving. Blocks while sessions are built; call it off the
        event loop.

        The document already in force is taken again without effect, so that a poke may be repeated.

        Raises
        ------
        PlanRefusedError
            With the reason; the refusal is also kept in ``refused`` until another document is taken.
        PlanPostponedError
            Its ramp set may still come, or the executor work again: :meth:`try_again` takes it then. It is refused once
            ``PATIENCE_SECONDS`` have passed.
        """
        with self._lock:
            self._deliver(document)

    def try_again(self) -> None:
        """Take the document that waits, if there is one and what it waits for has come."""
        with self._lock, contextlib.suppress(PlanRefusedError):
            if self._postponed is not None:
                self._deliver(self._postponed.document)

    def rest(self, make: Callable[[], Resting]) -> Resting:
        """The bundle leaves memory, while no document is taken: until :meth:`wake` they are checked and kept."""
        with self._lock:
            self._target = resting = make()
            if self._watched is not None and resting.remains is not None:
                arms = resting.remains.arms
                arms.active = replace(arms.active, stable=self._watched.stable)
            self._watched = None
            return resting

    def wake(self, target: PlanTarget) -> None:
        """The bundle is there again: the newest document that this process took is in force from the first batch on,
        or refused."""
        with self._lock:
            self._target, refused = target, self.refused
            if self._newest is None or target.arms.active.document is not None:
                return
            self._in_force = ""
            try:
                self._deliver(self._newest)
                self.refused = refused
            except PlanRefusedError:
                self._watched = target.arms.active
                target.arms.active = Active(off=self._watched.off)

    def _deliver(self, document: SignedDocument) -> None:
        epoch = 0
        try:
            verify(document, self._key)
            if document.payload == self._in_force:
                return
            plan = parse(document.payload)
            epoch = plan.epoch
            self._check_addressee(plan)
            self._take(plan)
        except PlanPostponedError as error:
            if self._may_wait(document, epoch, error):
                raise
            self._refuse(document, epoch, error)
            raise PlanRefusedError(error.reason, str(error)) from error
        except PlanRefusedError as error:
            self._refuse(document, epoch, error)
            raise
        if self._postponed is not None and self._postponed.epoch <= epoch:
            self._postponed = None
        self._in_force, self.refused, self.newest_epoch = document.payload, None, epoch
        if document is not self._newest:
            self._newest = document
            self._memory.remember(document)
        log_event(
            "plan-kept" if isinstance(self._target, Resting) else "plan-in-force",
            epoch=epoch,
            weight_percent=plan.weight_percent,
        )

    def _take(self, plan: PlanDocument) -> None:
        """Put it in force, or keep it for the next load."""
        target = self._target
        if isinstance(target, Resting):
            target.took(plan)
            return
        if plan.canary is None:  # a rollback waits for nothing, least of all for the sessions of what follows
            target.arms.end_canary()
        if trouble := target.vitals.trouble:  # sessions cannot be built and warmed now, which is no fault of the plan's
            raise PlanPostponedError(Reason.EXECUTOR_FAILING, trouble)
        was = target.arms.active
        try:
            target.arms.active = self._watched or was
            active = target.prepare(plan)
        finally:
            target.arms.active = was
        self._resume_breaker(self._watched or was, active)
        target.activate(active)
        self._watched = None
        target.keep_inputs(since=plan.capture_since)

    def _remembered(self) -> int:
        """The epoch of the newest document that an earlier process took, 0 where that is not known. Nobody but the
        operator can have made it up."""
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

    def _resume_breaker(self, was: Active, active: Active) -> None:
        """Have what the breaker sees kept; one that is new in this process goes on where that of the process before
        stopped."""
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
        if not isinstance(self._target, Resting):
            self._target.count_refusal(error.reason)
        self.refused = Refusal(epoch, error.reason, str(error))
        log_event("plan-refused", level="warning", epoch=epoch, reason=error.reason, message=str(error))

    def _check_addressee(self, document: PlanDocument) -> None:
        if document.service_uid != self._service_uid:
            raise PlanRefusedError(
                Reason.FOREIGN_SERVICE,
                f"the document is for service uid {document.service_uid!r}; this worker serves {self._service_uid!r}",
            )
        target = self._target
        epoch = target.state.epoch if isinstance(target, Resting) else target.arms.active.epoch
        if document.epoch <= epoch:
            raise PlanRefusedError(
                Reason.STALE_EPOCH, f"epoch {document.epoch} is not newer than {epoch}, which is in force"
            )
        if document.epoch < self.newest_epoch:
            raise PlanRefusedError(
                Reason.STALE_EPOCH,
                f"epoch {document.epoch} is older than {self.newest_epoch}, which this worker took before it restarted",
            )
