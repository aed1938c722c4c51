"""From a plan document to what an engine runs: what all engines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offramp_core.columns import chain
from offramp_core.errors import InvalidArgumentError, PlanRefusedError
from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.evidence.slow import parse_limits
from offramp_core.plan import Plan
from offramp_core.protocol import Arm, ArmPlan, PlanDocument, RampInfo, class_of
from offramp_core.reasons import Reason
from offramp_worker.engine.accounts.counters import Counters
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.arms.breaker import Breaker
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.engine.arms.tiers import TierExits
from offramp_worker.engine.vitals import Vitals

MOST_ALARMED = 64  # tiers that were stopped and are left out, which are remembered


class PlanTarget(ABC):
    """An engine as plans know it."""

    #: What runs next.
    arms: Arms
    #: Its accounts for the control plane.
    counters: Counters
    vitals: Vitals
    #: Of the bundle that is loaded.
    backbone_digest: str
    #: The bundle's, the reference's first.
    precisions: Sequence[str]
    #: Of the bundle's records.
    columns: Sequence[RampInfo]

    @abstractmethod
    def runnable(self, document: PlanDocument, plans: Sequence[Plan]) -> list[dict[str, Any]]:
        """Everything that can fail, before anything changes: what runs each plan, as fields of a :class:`Runtime`.

        Raises
        ------
        PlanRefusedError, PlanPostponedError
            With the reason.
        """

    @abstractmethod
    def activate(self, active: Active) -> None:
        """Put it in force from the next batch on."""

    @abstractmethod
    def count_refusal(self, reason: str) -> None:
        """A document was refused."""

    @abstractmethod
    def keep_inputs(self, *, since: float | None) -> None:
        """Keep inputs for training that are admitted after that time; None for none."""

    def prepare(self, document: PlanDocument) -> Active:
        """What the engine should run from the next batch on. Raises what :meth:`runnable` does."""
        stable = self._plan(document.stable)
        canary = self._plan(document.canary) if document.canary else None
        fields = self.runnable(document, [stable] if canary is None else [stable, canary])
        runs_stable = self._runtime(document, "stable", stable, document.stable, fields[0])
        meter = None
        if not runs_stable.exits_off:
            meter = self.counters.meter(plan_hash=stable.content_hash, share=document.holdback_share)
            breaker = self._breaker(document, stable)
            tiers, alarmed = self._watched_tiers(document, runs_stable)
            runs_stable = replace(
                runs_stable, meter=meter, breaker=breaker, tiers=tiers, alarmed=alarmed, **_slices(document)
            )
        runs_canary = None
        if canary is not None and document.canary is not None:
            runs_canary = self._runtime(document, "canary", canary, document.canary, fields[1])
        return Active(
            off=replace(self.arms.active.off, audit_rate=document.stable.audit_rate),
            document=document,
            stable=runs_stable,
            canary=runs_canary,
            slow_limits=parse_limits(document.slow_seconds, document.slow_seconds_by_length),
            holdback=self._holdback(document, meter) if document.holdback_share > 0 and meter is not None else None,
        )

    def columns_of(self, plan: Plan) -> dict[str, int]:
        """Columns of the ramps that a plan may use, by id."""
        return columns_of(plan, self.columns)

    def _plan(self, arm: ArmPlan) -> Plan:
        try:
            plan = Plan.from_mapping(arm.plan)
        except InvalidArgumentError as error:
            raise PlanRefusedError(Reason.MALFORMED, str(error)) from error
        check_fits(plan, backbone_digest=self.backbone_digest, precisions=self.precisions, columns=self.columns)
        return plan

    def _runtime(
        self, document: PlanDocument, arm: Arm, plan: Plan, arm_plan: ArmPlan, fields: Mapping[str, Any]
    ) -> Runtime:
        counter = self.counters.open(epoch=document.epoch, arm=arm, plan_hash=plan.content_hash)
        runtime = Runtime(plan=plan, audit_rate=arm_plan.audit_rate, counter=counter, **fields)
        going = {
            name: replace(exits, budget=document.tiers[name])
            for name, exits in runtime.tiers.items()
            if name in arm_plan.tiers
        }
        return replace(runtime, tiers=going, budget=document.accuracy_budget)

    def _holdback(self, document: PlanDocument, meter: HoldbackMeter) -> Runtime:
        """The exact executor once more, audited like the stable plan so that records go on being drawn from all
        requests alike."""
        off = self.arms.active.off
        counter = self.counters.open(epoch=document.epoch, arm="holdback", plan_hash=off.plan.content_hash)
        return Runtime(off.plan, document.stable.audit_rate, counter, meter=meter)

    def _watched_tiers(
        self, document: PlanDocument, runtime: Runtime
    ) -> tuple[dict[str, TierExits], dict[str, Breaker]]:
        """Each tier with a detector over its own audits, and the detectors of others that have alarmed."""
        alarmed = self._alarmed_tiers(runtime.plan)
        watched = {
            name: replace(exits, breaker=alarmed.get(name) or self._breaker(document, runtime.plan, tier=name))
            for name, exits in runtime.tiers.items()
        }
        left_out = [(name, breaker) for name, breaker in alarmed.items() if name not in watched]
        return watched, dict(left_out[-MOST_ALARMED:])

    def _alarmed_tiers(self, plan: Plan) -> dict[str, Breaker]:
        """Detectors that have alarmed since a stable plan is in force: whatever a later document says of the tier, it
        stays stopped while that plan serves."""
        in_force = self.arms.active.stable
        if in_force is None or in_force.plan != plan:
            return {}
        going = {name: exits.breaker for name, exits in in_force.tiers.items() if exits.breaker and exits.stopped}
        return {**in_force.alarmed, **going}

    def _breaker(self, document: PlanDocument, stable: Plan, *, tier: str = "") -> Breaker:
        """What the detector has seen of a stable plan stays with the plan: epochs change more often than plans do."""
        in_force = self.arms.active.stable
        fresh = Breaker(
            accuracy_budget=document.tiers[tier] if tier else document.accuracy_budget,
            run_length=document.breaker_run_length,
            plan_hash=stable.content_hash,
            design_effect=document.stable.design_effect,
        )
        watching = in_force if in_force is not None and in_force.plan == stable else None
        exits = watching.tiers.get(tier) if watching is not None else None
        kept = exits.breaker if exits is not None else None if watching is None or tier else watching.breaker
        if kept is None or not kept.watches_like(fresh):
            return fresh
        kept.design_effect = fresh.design_effect
        return kept


def columns_of(plan: Plan, columns: Sequence[RampInfo]) -> dict[str, int]:
    """Columns of the ramps that a plan may use, by id: those at the input and those of its precision."""
    return {columns[j].id: j for j in chain([c.precision for c in columns], plan.precision)}


def check_fits(plan: Plan, *, backbone_digest: str, precisions: Sequence[str], columns: Sequence[RampInfo]) -> None:
    """Whether a plan is one of a loaded bundle, whose ``columns`` and ``precisions`` these are.

    Raises
    ------
    PlanRefusedError
        It names another model, a precision or a ramp that the bundle has not.
    """
    if plan.backbone_digest != backbone_digest:
        raise PlanRefusedError(
            Reason.DIGEST_MISMATCH,
            f"backboneDigest is {plan.backbone_digest}; this worker has loaded {backbone_digest}",
        )
    if plan.precision not in precisions:
        raise PlanRefusedError(
            Reason.UNSUPPORTED,
            f"precision {plan.precision} is not in the loaded bundle, which has {list(precisions)}",
        )
    known = columns_of(plan, columns)
    unknown = [ramp.id for ramp in plan.ramps if ramp.id not in known]
    if unknown:
        raise PlanRefusedError(
            Reason.UNKNOWN_RAMP,
            f"ramp {unknown[0]!r} is none of the loaded bundle's at {plan.precision}, which are {sorted(known)}",
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
