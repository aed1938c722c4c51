"""What a plan's stages take, batch by batch, by the rules that a worker runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from offramp_core.costs import CostTable
from offramp_core.execution import Regrouping


@dataclass(frozen=True)
class Stages:
    """A plan's stages as a worker runs them: backbone up to a place, then the heads of all active ramps there."""

    #: Stage of each ramp index where a request may leave; -1 where it cannot.
    position: tuple[int, ...]
    #: By stage, by rows carried; the last stage runs to the output.
    seconds: list[list[float]]
    #: By rows carried before the leavers are dropped.
    regroup: list[float]
    #: Seconds by (stage, rows that leave there) of heads that no plan has in force, which only policies with foresight
    #: use: they are charged for the rows that leave and for nobody else.
    extra: dict[int, list[float]]
    _known: dict[tuple[bool, tuple[int, ...]], tuple[tuple[float, ...], float]] = field(default_factory=dict)

    def run(self, leaves: tuple[int, ...], *, carry_on: bool) -> tuple[tuple[float, ...], float]:
        """When the rows that leave at each stage are answered, and when the worker is free, in seconds from the start.

        ``leaves`` counts the rows of the batch by the stage where they leave, those that run to the output last. With
        ``carry_on`` (results only) all rows are carried to the output; else a batch that all rows left ends, and one
        that some left is regrouped where that pays. The rules are those
        of :func:`offramp_worker.engine.execution.execute.run_stages`.
        """
        key = (carry_on, leaves)
        if key not in self._known:
            self._known[key] = self._timed(leaves, carry_on=carry_on)
        return self._known[key]

    def _timed(self, leaves: tuple[int, ...], *, carry_on: bool) -> tuple[tuple[float, ...], float]:
        carried = waiting = sum(leaves)
        now, ends = 0.0, []
        for stage, left in enumerate(leaves[:-1]):
            now += self.seconds[stage][carried]
            if left and stage in self.extra:
                now += self.extra[stage][left]
            ends.append(now)
            waiting -= left
            if waiting < carried and not carry_on:
                if not waiting:
                    return (*ends, *(now for _ in leaves[stage + 1 :])), now
                if self.regrouping.pays(stage, carried=carried, waiting=waiting):
                    now += self.regroup[carried]
                    carried = waiting
        now += self.seconds[-1][carried]
        return (*ends, now), now

    @cached_property
    def regrouping(self) -> Regrouping:
        """When a batch that lost rows is made smaller."""
        return Regrouping.of(self.seconds, self.regroup)

    @cached_property
    def worst(self) -> list[float]:
        """Seconds of a batch that nobody leaves, by rows."""
        return [sum(by_stage) for by_stage in zip(*self.seconds, strict=True)]


def stages_of(costs: CostTable, *, active: Sequence[int], used: Sequence[int]) -> Stages:
    """Stages for some active ramps; ``used`` are the ramps where requests leave, in force or not.

    Active ramps between which the backbone takes no time share a stage, as they share a session in a worker.
    """
    stops = sorted({*active, *used})
    groups: list[list[int]] = []
    for ramp in stops:
        if groups and {ramp, groups[-1][-1]} <= set(active) and costs.shares_place[groups[-1][-1] : ramp].all():
            groups[-1].append(ramp)
        else:
            groups.append([ramp])
    position = [-1] * costs.n_ramps
    seconds, extra = [], {}
    edges = [-1, *(group[-1] for group in groups)]
    for stage, (group, (before, upto)) in enumerate(zip(groups, pairwise(edges), strict=True)):
        heads = costs.ramp[:, group].sum(axis=1)
        backbone = costs.segment[:, before + 1 : upto + 1].sum(axis=1)
        if group[0] in active:
            seconds.append((backbone + heads).tolist())
        else:
            seconds.append(backbone.tolist())
            extra[stage] = heads.tolist()
        for ramp in group:
            position[ramp] = stage
    seconds.append(costs.segment[:, edges[-1] + 1 :].sum(axis=1).tolist())
    return Stages(tuple(position), seconds, costs.regroup.tolist(), extra)
