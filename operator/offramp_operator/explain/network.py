"""The network as a line of blocks with its ramps: where they attach, when inputs leave, how many do, and what that is
worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from offramp_core.control.objects import Config
from offramp_core.control.served import Served
from offramp_core.evaluate import utilities
from offramp_core.plan import Plan, format_threshold
from offramp_core.protocol import ArmCounts
from offramp_core.records import ExitCosts

NOT_ACTIVE = ""


@dataclass(frozen=True, slots=True)
class RampFacts:
    """One ramp. ``place`` is the share of the backbone's time that lies before it; ``threshold`` is empty where the
    plan does not use it.

    ``exit_share`` is of all requests under the plan. ``utility_seconds`` per request: what leaving here saves, less
    what the ramp costs those that reach it. Both are None where nothing was counted yet, or the ramp is not active.
    """

    id: str
    head: str
    place: float
    ramp_seconds: float
    threshold: str = NOT_ACTIVE
    exits: int = 0
    exit_share: float | None = None
    utility_seconds: float | None = None

    @property
    def active(self) -> bool:
        return self.threshold != NOT_ACTIVE


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """A plan on its network. ``blocks`` are the shares of the backbone's time between the places of ramps; they add up
    to 1.

    ``saving`` is the share of the fp32 model's time that the exits saved, at profiled seconds.
    """

    config: str
    role: str
    precision: str
    blocks: tuple[float, ...]
    total_seconds: float
    ramps: tuple[RampFacts, ...]
    requests: int = 0
    stay_share: float | None = None
    saving: float | None = None


def network(config: Config, role: str, served: Served, counts: Iterable[ArmCounts]) -> NetworkFacts:
    """The network under a plan, with what workers counted under it; ``role`` is ``stable`` or ``canary``."""
    ids, costs = served.chain(config.plan.precision)
    mine = [c for c in counts if c.plan_hash == config.plan.content_hash]
    requests = sum(c.requests for c in mine)
    left = {ramp: sum(c.exits.get(ramp, 0) for c in mine) for ramp in ids}
    active = _active(config.plan, ids)
    worth = _worth(costs, active, [left[ids[j]] for j in active], requests)
    reached = np.cumsum(costs.segment_seconds) / (costs.total_seconds or 1.0)
    thresholds = {ramp.id: format_threshold(ramp.threshold) for ramp in config.plan.ramps}
    heads = {column.id: column.head for column in served.columns}
    ramps = tuple(
        RampFacts(
            id=name,
            head=heads.get(name, ""),
            place=float(min(1.0, reached[j])),
            ramp_seconds=float(costs.ramp_seconds[j]),
            threshold=thresholds[name] if j in worth else NOT_ACTIVE,
            exits=left[name],
            exit_share=left[name] / requests if requests and j in worth else None,
            utility_seconds=worth.get(j) if requests else None,
        )
        for j, name in enumerate(ids)
    )
    stayed = max(0, requests - sum(left[ids[j]] for j in active))
    return NetworkFacts(
        config=config.name,
        role=role,
        precision=config.plan.precision,
        blocks=_blocks(reached),
        total_seconds=costs.total_seconds,
        ramps=ramps,
        requests=requests,
        stay_share=stayed / requests if requests else None,
        saving=_saving(costs, active, [left[ids[j]] for j in active], requests),
    )


def _active(plan: Plan, ids: Sequence[str]) -> tuple[int, ...]:
    """Columns of the ramps where something can leave, in network order."""
    return tuple(sorted(ids.index(r.id) for r in plan.ramps if r.id in ids and r.threshold > 0))


def _worth(costs: ExitCosts, active: Sequence[int], left: list[int], requests: int) -> dict[int, float]:
    if not requests:
        return dict.fromkeys(active, 0.0)
    return dict(zip(active, utilities(costs, active, [*left, requests - sum(left)]), strict=True))


def _saving(costs: ExitCosts, active: Sequence[int], left: list[int], requests: int) -> float | None:
    if not requests or not costs.baseline_seconds:
        return None
    if not active:
        return costs.head_start
    mean = float(np.array([*left, requests - sum(left)]) @ costs.leave_seconds(active)) / requests
    return 1.0 - mean / costs.baseline_seconds


def _blocks(reached: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, ...]:
    """Widths between places that differ; ramps may share one, or sit at the input."""
    places = np.unique(np.clip(np.round([0.0, *reached, 1.0], 6), 0.0, 1.0))
    return tuple(float(width) for width in np.diff(places))
