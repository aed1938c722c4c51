"""Plans of a model that generates: nothing has to be built, for every variant is loaded already."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from offramp_core.errors import PlanRefusedError
from offramp_core.generation.losses import Output
from offramp_core.plan import Plan, exits_off_plan
from offramp_core.protocol import PlanDocument, RampInfo, class_of
from offramp_core.reasons import Reason
from offramp_worker.engine.accounts.counters import Counters
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.engine.vitals import Vitals
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.seam import GenerationBundle
from offramp_worker.plans.preparation import PlanTarget


class GenerationPlans(PlanTarget):
    """See the module."""

    def __init__(
        self,
        bundle: GenerationBundle,
        *,
        arms: Arms,
        counters: Counters,
        vitals: Vitals,
        columns: Sequence[RampInfo],
        digest: str,
        metrics: GenerationMetrics,
    ) -> None:
        """``digest`` names the records that plans are found in."""
        self.arms, self.counters, self.vitals, self.columns = arms, counters, vitals, columns
        self.backbone_digest, self.precisions = bundle.digest, [variant.name for variant in bundle.variants]
        self._digest, self._metrics = digest, metrics

    def runnable(self, document: PlanDocument, plans: Sequence[Plan]) -> list[dict[str, Any]]:
        named = [name for name in document.slices if class_of(name) is not None]
        if named:
            raise PlanRefusedError(
                Reason.UNSUPPORTED, f"slice {named[0]} is of answers that name a class; a generated text names none"
            )
        for plan in plans:
            if plan.ramp_set_digest != self._digest:
                raise PlanRefusedError(
                    Reason.DIGEST_MISMATCH,
                    f"rampSetDigest is {plan.ramp_set_digest}; this worker judges answers under {self._digest}",
                )
        return [{} for _ in plans]

    def activate(self, active: Active) -> None:
        self.arms.activate(active)
        self._metrics.epoch.set(active.epoch)
        self._metrics.breaker_open.set(self.arms.breaker_open)

    def count_refusal(self, reason: str) -> None:
        self._metrics.plan_refusals(reason).inc()

    def keep_inputs(self, *, since: float | None) -> None:
        """Nothing is trained from live prompts; they are kept nowhere."""


def judged_as(bundle: GenerationBundle, output: Output, pattern: str) -> str:
    """What records and plans of a bundle are filed under: its content and what of an answer counts, so that a
    certificate of one never stands for another."""
    text = f"{bundle.digest}/{output}/{pattern}"
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def variant_seconds(bundle: GenerationBundle) -> dict[str, float]:
    """Each variant's time per token as the bundle measured it; where it did not, by the bytes that a token reads, in
    units of the reference's."""
    measured = {variant.name: variant.token_seconds for variant in bundle.variants}
    if all(seconds > 0 for seconds in measured.values()):
        return measured
    of_reference = max(1, bundle.variants[0].weight_bytes)
    return {variant.name: max(1, variant.weight_bytes) / of_reference for variant in bundle.variants}


def off_runtime(bundle: GenerationBundle, counters: Counters, *, digest: str, audit_rate: float) -> Runtime:
    """The reference answers everything."""
    plan = exits_off_plan(backbone_digest=bundle.digest, ramp_set_digest=digest)
    return Runtime(plan, audit_rate, counters.open(epoch=0, arm="stable", plan_hash=plan.content_hash))
