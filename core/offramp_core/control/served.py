"""What a fleet serves: the digests its workers agree on, the columns of their records, and what each ramp costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp_core.columns import chain
from offramp_core.control.snapshot import Worker
from offramp_core.control.tuning.retraining import bundle_identity
from offramp_core.precision import EXACT, Precision
from offramp_core.protocol import PlanDocument, RampInfo
from offramp_core.records import ExitCosts


@dataclass(frozen=True, slots=True)
class Served:
    """What the workers serve: the digests they agree on, the columns of their records, their costs, and the task
    (``output``) of the bundle."""

    backbone_digest: str
    ramp_set_digest: str
    columns: tuple[RampInfo, ...]
    costs: Mapping[str, list[Any]]
    output: str = "Top1"

    @property
    def ramp_ids(self) -> tuple[str, ...]:
        return tuple(column.id for column in self.columns)

    def chain(self, precision: Precision) -> tuple[tuple[str, ...], ExitCosts]:
        """Names and costs (at the smallest batch) of the ramps that a plan of this precision may use."""
        prefix = f"{precision}_"
        if f"{prefix}segment_seconds" not in self.costs:
            precision, prefix = EXACT, ""
        segment, ramp, whole = (
            np.asarray(self.costs[name][0], float)
            for name in (f"{prefix}segment_seconds", f"{prefix}ramp_seconds", "segment_seconds")
        )
        ids = tuple(self.columns[j].id for j in chain([c.precision for c in self.columns], precision))
        return ids, ExitCosts(segment, ramp, None if precision == EXACT else float(whole.sum()))


def digests_of(worker: Worker) -> tuple[str, str] | None:
    """Model and ramp set of a worker that has loaded them."""
    state = worker.state
    return (state.backbone_digest, state.ramp_set_digest) if state is not None and state.ready else None


def votes(workers: Sequence[Worker]) -> Counter[tuple[str, str]]:
    """How many ready workers serve each model and ramp set."""
    return Counter(digests for w in workers if w.endpoint.ready and (digests := digests_of(w)) is not None)


def who_say(workers: Sequence[Worker], published: PlanDocument | None, bundle: str = "") -> Sequence[Worker]:
    """The workers that say what is served and what it costs: those with the spec's bundle while any of them is ready.

    A pool with a bundle of its own has another device, and perhaps another model or other exits by mistake. Without the
    others its workers say it only where they serve what was served so far: what is ``published``, or the ``bundle``
    that trained ramp sets are for (:attr:`offramp_core.control.objects.RampSetStatus.bundle`).
    """
    main = [w for w in workers if not w.endpoint.own_bundle]
    if votes(main):
        return main
    return [w for w in workers if published is None or not w.endpoint.own_bundle or _goes_on(w, published, bundle)]


def _goes_on(worker: Worker, published: PlanDocument, bundle: str) -> bool:
    """Whether a worker serves what was served so far."""
    digests, plan = digests_of(worker), published.stable.plan
    if worker.state is None or digests is None or plan.get("backboneDigest") != digests[0]:
        return False
    if bundle:
        return bundle_identity(*digests) == bundle
    return plan.get("rampSetDigest") in (digests[1], *worker.state.ramp_sets)


def served_by(
    workers: Sequence[Worker], published: PlanDocument | None, *, bundle: str = "", rollout_under_way: bool = False
) -> Served | None:
    """What most of the ready workers that may say so serve (:func:`who_say`); None until one has told.

    Where as many serve one model as another, the one that the published plan is for goes on: a rolling update switches
    over when its workers are the majority, and one worker with a foreign model never stops the decisions about the
    others. While a rollout is under way that one goes on as well: its workers refuse plans of another model, so a
    canary could not be taken from them any more. Pools with a bundle of their own follow the others.
    """
    workers = who_say(workers, published, bundle)
    ready = votes(workers)
    if not ready:
        return None
    plan = published.stable.plan if published is not None else {}
    incumbent = (plan.get("backboneDigest", ""), plan.get("rampSetDigest", ""))
    leading = max(ready, key=lambda digests: (ready[digests], digests == incumbent, digests))
    if rollout_under_way and incumbent in ready:
        leading = incumbent
    state = next(w.state for w in workers if w.endpoint.ready and digests_of(w) == leading)
    assert state is not None
    return Served(state.backbone_digest, state.ramp_set_digest, state.ramps, state.costs, state.output)
