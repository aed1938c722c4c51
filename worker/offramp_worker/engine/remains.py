"""What an engine leaves to the next one of the same bundle in this process: all that was counted, recorded and seen,
and nothing that computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offramp_worker.engine.accounts.counters import Counters, RecordRing
from offramp_worker.engine.accounts.scrape import RampUtility
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.arms.leases import Arms

if TYPE_CHECKING:
    from offramp_worker.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Remains:
    """``rings`` are the records by ramp set, ``arms`` the document in force with its leases and detectors but without
    stages, ``batches`` the number of the next batch."""

    backbone_digest: str
    ramp_set_digest: str
    counters: Counters
    rings: Mapping[str, RecordRing]
    arms: Arms
    utility: RampUtility
    batches: int

    @classmethod
    def of(cls, engine: Engine) -> Remains:
        """Of an engine that has been joined, which shows nothing to Prometheus any more."""
        _hide(engine)
        active = engine.arms.active
        if active.stable is not None and engine.desk.open:
            _give_up(active.stable)
        engine.arms.active = replace(
            active,
            off=_without_stages(active.off),
            stable=active.stable and _without_stages(active.stable),
            canary=active.canary and _without_stages(active.canary),
            holdback=active.holdback and _without_stages(active.holdback),
        )
        return cls(
            engine.bundle.manifest.backbone_digest,
            engine.bundle.manifest.ramp_set_digest,
            engine.counters,
            {held.digest: held.ring for held in engine.sets.held},
            engine.arms,
            engine.utility,
            engine.batches,
        )

    def watched(self, off: Runtime) -> Active:
        """What an engine begins with that is about to be told the same document: nothing is in force, and the detectors
        of the plan that was go on with it."""
        return Active(off=off, stable=self.arms.active.stable)


def _hide(engine: Engine) -> None:
    engine.metrics.audit_backlog.set_function(lambda: 0.0)
    for collector in engine.shown:
        engine.metrics.registry.unregister(collector)


def _give_up(runtime: Runtime) -> None:
    """Its audits were abandoned."""
    for breaker in (runtime.breaker, *(exits.breaker for exits in runtime.tiers.values())):
        if breaker is not None:
            breaker.give_up()


def _without_stages(runtime: Runtime) -> Runtime:
    return replace(runtime, stages=())
