"""Plans of the engine that classifies: ramp sets are read, stages cut, built and warmed before a plan may take over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offramp_core.batching import MAX_BATCH
from offramp_core.bundle import Profile
from offramp_core.costs import CostTable
from offramp_core.errors import InvalidBundleError, PlanRefusedError
from offramp_core.execution import Regrouping, carries_on
from offramp_core.plan import Plan, RampThreshold
from offramp_core.precision import EXACT
from offramp_core.protocol import PlanDocument, class_of
from offramp_core.reasons import Reason
from offramp_core.uncertainty import ExitTest, exit_test
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.arms.arms import Active
from offramp_worker.engine.arms.tiers import TierExits
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.ramp_sets import HeldSet
from offramp_worker.padded import padded_rows
from offramp_worker.plans.preparation import PlanTarget


class ClassifierPlans(PlanTarget):
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        self._engine, bundle = engine, engine.bundle
        self.arms, self.counters, self.vitals = engine.arms, engine.counters, engine.vitals
        self.backbone_digest, self.columns = bundle.manifest.backbone_digest, bundle.columns
        self.precisions = [spec.name for spec in bundle.manifest.backbones]

    def activate(self, active: Active) -> None:
        self._engine.activate(active)

    def count_refusal(self, reason: str) -> None:
        self._engine.metrics.plan_refusals(reason).inc()

    def keep_inputs(self, *, since: float | None) -> None:
        if self._engine.captures is not None:
            self._engine.captures.ask(since)

    def runnable(self, document: PlanDocument, plans: Sequence[Plan]) -> list[dict[str, Any]]:
        self._check_classes(document)
        sets = self._sets(document, plans)
        stages = [self._stages(plan, sets) for plan in plans]
        fields = [self._fields(plan, of_plan, sets) for plan, of_plan in zip(plans, stages, strict=True)]
        self._engine.sets.keep(list(sets.values()))
        return fields

    def _check_classes(self, document: PlanDocument) -> None:
        """Slices of answers are of classes, which only some tasks name."""
        named = [name for name in document.slices if class_of(name) is not None]
        if named and not self._engine.task.names_classes:
            raise PlanRefusedError(
                Reason.UNSUPPORTED,
                f"slice {named[0]} is of answers that name a class; this bundle answers with {self._engine.task.title}",
            )

    def _sets(self, document: PlanDocument, plans: Sequence[Plan]) -> dict[str, HeldSet]:
        """The ramp sets of a document by digest: those it names, and those of plans with exits. Where there is none,
        the bundle's own."""
        sets = self._engine.sets
        wanted = [*document.ramp_sets, *(plan.ramp_set_digest for plan in plans if _has_ramps(plan))]
        odd = [plan.ramp_set_digest for plan in plans if plan.ramp_set_digest not in (sets.own_digest, *wanted)]
        if odd:
            raise PlanRefusedError(
                Reason.DIGEST_MISMATCH, f"rampSetDigest is {odd[0]}; this worker has loaded {sets.own_digest}"
            )
        return sets.loaded(wanted or [sets.own_digest])

    def _stages(self, plan: Plan, sets: Mapping[str, HeldSet]) -> tuple[Runnable, ...]:
        """Warm stages for the ramps that some row can leave at. A plan in force keeps its own: epochs change more often
        than plans do, and warming takes seconds from the requests that are served meanwhile.

        A threshold of 0 lets no row leave, so that ramp's head need not run.
        """
        in_force = self._engine.arms.active
        for runtime in (in_force.stable, in_force.canary):
            if runtime is not None and runtime.plan == plan and runtime.stages:
                return runtime.stages
        index = self.columns_of(plan)
        active = sorted(index[ramp.id] for ramp in plan.ramps if ramp.threshold > 0)
        sessions = sets[plan.ramp_set_digest].sessions if active else self._engine.sessions
        try:
            stages = sessions.stages(active, plan.precision)
            forwarding = self._engine.forwarding
            if forwarding is not None and active and plan.precision == EXACT and not stages[-1].reads_input:
                behind = _seconds_behind(self._bundle(plan, sets).profile, list(index.values()))
                if (further := forwarding.hands_on_at(active, behind)) is not None:
                    stages = sessions.stages([*active, further])
        except InvalidBundleError as error:
            raise PlanRefusedError(Reason.UNSUPPORTED, str(error)) from error
        self._engine.sessions.warm_up(self._engine.batch_rows, stages)
        return stages

    def _bundle(self, plan: Plan, sets: Mapping[str, HeldSet]) -> Bundle:
        """The bundle with the heads of a plan, and what they cost."""
        held = sets.get(plan.ramp_set_digest)
        return held.bundle if held is not None else self._engine.bundle

    def _fields(self, plan: Plan, stages: tuple[Runnable, ...], sets: Mapping[str, HeldSet]) -> dict[str, Any]:
        engine, index, bundle = self._engine, self.columns_of(plan), self._bundle(plan, sets)
        profile = bundle.profile.of(plan.precision)
        table = CostTable(profile, sizes=range(MAX_BATCH + 1))  # batches may grow with what is measured
        priced = list(index.values())  # the chain's ramps as the profile has them
        seconds = stage_seconds(
            table, profile, stages, [[priced.index(j) for j in stage.ramps] for stage in stages[:-1]]
        )
        carry_on = carries_on(plan.execution, profile) and not engine.at_edge  # there rows do not go on to the end
        exits = {index[ramp.id] for ramp in plan.ramps if ramp.threshold > 0}
        handing = {j: 0.0 for stage in stages for j in stage.ramps if j not in exits}  # on alone: nobody leaves there

        def tests(ramps: Sequence[RampThreshold]) -> dict[int, ExitTest]:
            columns = handing | {index[ramp.id]: float(ramp.threshold) for ramp in ramps if ramp.threshold > 0}
            return {j: exit_test(t, bundle.quantiles[j], score=engine.task.raw_score) for j, t in columns.items()}

        return {
            "stages": stages,
            "tests": tests(plan.ramps),
            "tiers": {tier.name: TierExits(tests(tier.ramps)) for tier in plan.tiers},
            "regrouping": None if carry_on or not stages else Regrouping.of(seconds, table.regroup.tolist()),
            "stage_seconds": seconds,
            "further": len(handing),
        }


def stage_seconds(
    table: CostTable, profile: Profile, stages: Sequence[Runnable], groups: Sequence[Sequence[int]]
) -> list[list[float]]:
    """By stage, by rows; of a stage that pads, what the rows cost that run.

    ``table`` has the ``profile`` by rows as they are, ``groups`` are the ramps of each stage but the last.
    """
    as_they_are = table.stage_seconds(groups)
    if not any(stage.pads for stage in stages):
        return as_they_are
    filled_up = CostTable(profile, sizes=[0, *map(padded_rows, range(1, len(as_they_are[0])))]).stage_seconds(groups)
    return [full if stage.pads else own for stage, full, own in zip(stages, filled_up, as_they_are, strict=True)]


def _seconds_behind(profile: Profile, chain: Sequence[int]) -> dict[int, float]:
    """What one row takes behind each column of a chain."""
    segments = CostTable(profile, sizes=[1]).segment[0]
    return {j: float(segments[k + 1 :].sum()) for k, j in enumerate(chain)}


def _has_ramps(plan: Plan) -> bool:
    return any(ramp.threshold > 0 for ramp in plan.ramps)
