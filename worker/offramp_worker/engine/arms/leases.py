"""Arms and leases: what the next batch runs under, by the document in force, its leases, the breaker and the draw.

No threads and no locks: a batch reads one reference and keeps it, everything else is numbers. Times come from the clock
that is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from offramp_core.protocol import OVERLOAD
from offramp_worker.engine.arms.arms import Active, Runtime, canary_drawn, held_back, staggered
from offramp_worker.logs import log_event


@dataclass(frozen=True, slots=True)
class Leases:
    """How far they have run, by the clock of this process: when the control plane was last heard of, whether it has
    spoken to this process itself, and the epoch of the canary that has ended."""

    last_pull: float
    met: bool = False
    canary_ended_epoch: int = 0


class Arms:
    """Says what each batch runs under; a canary that has ended stays out until a newer document brings one."""

    def __init__(
        self, off: Runtime, *, uid: str, boot_id: str = "", clock: Callable[[], float], crashed_epoch: int | None = None
    ) -> None:
        """``off`` serves while there is no document; ``crashed_epoch`` is that of a canary that killed an earlier
        process."""
        self.active = Active(off=off)
        self._uid, self._boot_id, self._clock, self._crashed_epoch = uid, boot_id, clock, crashed_epoch
        self._last_pull = clock()
        self._met = False  # whether this process has heard of the control plane itself
        self._canary_ended_epoch = 0

    # --- what the control plane does --------------------------------------------------------------

    def activate(self, active: Active) -> None:
        """Put a document in force from the next batch on; its leases begin."""
        self.renew()
        self.active = active

    def meet(self) -> None:
        """The control plane has spoken to this process itself, and can act: leases begin anew."""
        self._met = True
        self.renew()

    def renew(self) -> None:
        """Leases begin anew, but for a canary's that ran out before: it stays out."""
        self._end_expired_canary(self.active)
        self._last_pull = self._clock()

    def end_canary(self) -> None:
        """Let no batch begin under the canary in force any more. A newer document without one says so before it is
        prepared."""
        active = self.active
        if active.canary is not None and self._canary_ended_epoch != active.epoch:
            self._canary_ended_epoch = active.epoch
            log_event("canary-ended", epoch=active.epoch)

    def go_on(self, before: Leases) -> None:
        """Leases go on as they stood before the bundle was unloaded."""
        self._last_pull, self._met = before.last_pull, before.met
        self._canary_ended_epoch = before.canary_ended_epoch

    # --- what a batch runs under ------------------------------------------------------------------

    def drawn(self, active: Active, number: int) -> Runtime:
        """What batch ``number`` runs under unless it is held back: leases and the breaker first, then the draw."""
        document, canary = active.document, self.canary(active)
        if document is not None and canary is not None:
            drawn = canary_drawn(
                salt=document.salt, uid=self._uid, batch_number=number, weight_percent=document.weight_percent
            )
            if drawn:
                return canary
        return self.without_canary(active)

    def held_back(self, active: Active, runtime: Runtime, number: int) -> tuple[Runtime, bool]:
        """What batch ``number`` runs under that was drawn for ``runtime`` and may be held back, and whether it is one
        of those that are compared with the holdback.

        One that is held back would have run under the canary now and then; that is not compared, since it says nothing
        about the stable plan.
        """
        document, held = active.document, active.holdback
        assert document is not None and held is not None
        drawn = held_back(
            uid=self._uid,
            boot_id=self._boot_id,
            epoch=document.epoch,
            batch_number=number,
            share=document.holdback_share,
        )
        return (held if drawn else runtime), runtime is active.stable

    def canary(self, active: Active) -> Runtime | None:
        """The canary, while batches may be drawn for it. What lay in a file when this process started is proven by
        nobody who watches."""
        if active.document is None or active.stable is None or active.breaker_open or not self._met:
            return None
        if active.epoch == self._crashed_epoch or self._end_expired_canary(active):
            return None
        return active.canary if active.document.weight_percent > 0 else None

    def without_canary(self, active: Active) -> Runtime:
        """What a batch runs under that was not drawn for the canary."""
        document, stable = active.document, active.stable
        if document is None or stable is None or active.breaker_open:
            return active.off
        lease = staggered(document.stable_lease_seconds, uid=self._uid)
        if not stable.exits_off and self._clock() - self._last_pull > lease:
            return active.off
        return stable

    # --- what people and the control plane hear ---------------------------------------------------

    @property
    def leases(self) -> Leases:
        """How far they have run."""
        return Leases(self._last_pull, self._met, self._canary_ended_epoch)

    @property
    def breaker_open(self) -> bool:
        """Whether the worker's own detector keeps the exits off."""
        return self.active.breaker_open

    @property
    def stopped_tiers(self) -> tuple[str, ...]:
        """Tiers of the stable plan whose own detectors keep their exits off."""
        stable = self.active.stable
        return () if stable is None else tuple(name for name, exits in stable.tiers.items() if exits.stopped)

    @property
    def may_ease(self) -> bool:
        """Whether the stable plan is in force and has thresholds for overload, which make batches shorter."""
        stable = self.active.stable
        exits = None if stable is None else stable.tiers.get(OVERLOAD)
        if stable is None or exits is None or exits.stopped or stable.carry_on:
            return False
        return self.without_canary(self.active) is stable

    @property
    def exits_off(self) -> bool:
        """Whether the next batch, canaries aside, runs the exact executor: by its plan, the breaker, or a lease that
        ran out."""
        return self.without_canary(self.active).exits_off

    @property
    def canary_lease_ended(self) -> bool:
        """Whether the canary of the document in force has stopped by itself."""
        return self._end_expired_canary(self.active)

    @property
    def suspicion(self) -> float:
        """How far the detector of the stable plan has come towards its alarm, in tenths: the share of logarithms."""
        stable = self.active.stable
        breaker = stable.breaker if stable is not None else None
        if breaker is None or breaker.is_open:
            return 0.0 if breaker is None else 1.0
        return round(min(1.0, max(0.0, math.log(max(1.0, breaker.statistic)) / math.log(max(2.0, breaker.limit)))), 1)

    def describe(
        self, how: Callable[[Runtime], str] = lambda r: "results only" if r.carry_on else "compute saving"
    ) -> str:
        """What people should know about the document in force, in one line. ``how`` says how an arm is executed."""
        notes = [
            f"{runtime.counter.arm}: {runtime.plan.precision}, {how(runtime)}"
            for runtime in (self.active.stable, self.active.canary)
            if runtime is not None and not runtime.exits_off
        ]
        if self.breaker_open:
            notes.append("exits off: the breaker is open")
        if self.canary_lease_ended:
            notes.append("the canary's lease has ended")
        return "; ".join(notes)

    def _end_expired_canary(self, active: Active) -> bool:
        """Whether the canary's lease has run out; once it has, only a new document brings a canary back."""
        document = active.document
        if document is None or active.canary is None:
            return False
        if (
            self._canary_ended_epoch != document.epoch
            and self._clock() - self._last_pull > document.canary_lease_seconds
        ):
            self._canary_ended_epoch = document.epoch
            log_event("canary-lease-ended", level="warning", epoch=document.epoch)
        return self._canary_ended_epoch == document.epoch
