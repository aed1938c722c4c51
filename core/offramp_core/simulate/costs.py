"""Seconds of a batch of any size on its way through a plan's stages, from a profile of some sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import Profile
from offramp_core.execution import Regrouping

SecondsArray = npt.NDArray[np.float64]


class CostTable:
    """Segment, ramp and regroup seconds for every batch size from 0 to ``max_batch``.

    Sizes between measured ones are interpolated, smaller ones cost what the smallest measured one costs, and beyond the largest the
    line through the last two goes on (with one measured size: in proportion). ``sizes`` maps a number of rows to the size that runs,
    for servers that pad to allowed sizes.
    """

    def __init__(self, profile: Profile, *, sizes: Sequence[int]) -> None:
        wanted = np.asarray(sizes, dtype=np.float64)
        measured = np.array([b.batch_size for b in profile.batches], dtype=np.float64)
        segments = np.array([b.segment_seconds for b in profile.batches])
        ramps = np.array([b.ramp_seconds for b in profile.batches])
        regroup = np.array([[b.regroup_seconds] for b in profile.batches])
        self.segment = _at(measured, segments, wanted)  # (max_batch + 1, R + 1)
        self.ramp = _at(measured, ramps, wanted)  # (max_batch + 1, R)
        self.regroup = _at(measured, regroup, wanted)[:, 0]  # (max_batch + 1,)
        self.shares_place = (segments[:, 1:-1] == 0).all(axis=0)  # (R - 1,): ramp j + 1 sits where ramp j does

    @property
    def n_ramps(self) -> int:
        return int(self.ramp.shape[1])

    def stage_seconds(self, groups: Sequence[Sequence[int]]) -> list[list[float]]:
        """By stage, by rows; ``groups`` are the active ramps by the stage that ends with them. A last stage runs to the output."""
        seconds, begin = [], 0
        for group in groups:
            end = max(group) + 1
            seconds.append((self.segment[:, begin:end].sum(axis=1) + self.ramp[:, list(group)].sum(axis=1)).tolist())
            begin = max(begin, end)
        return [*seconds, self.segment[:, begin:].sum(axis=1).tolist()]


def _at(measured: SecondsArray, seconds: SecondsArray, wanted: SecondsArray) -> SecondsArray:
    """(B, K) seconds at ``measured`` sizes → (len(wanted), K)."""
    out = np.empty((len(wanted), seconds.shape[1]))  # K may be 0: a chain without ramps
    for k, column in enumerate(seconds.T):
        out[:, k] = np.interp(wanted, measured, column)
    beyond = wanted > measured[-1]
    if beyond.any():
        if len(measured) > 1:
            slope = np.maximum(0.0, (seconds[-1] - seconds[-2]) / (measured[-1] - measured[-2]))
        else:
            slope = seconds[-1] / measured[-1]
        out[beyond] = seconds[-1] + (wanted[beyond] - measured[-1])[:, None] * slope
    return out


@dataclass(frozen=True)
class Stages:
    """A plan's stages as a worker runs them: backbone up to a place, then the heads of all active ramps there.

    Attributes
    ----------
    position : tuple of int
        Stage of each ramp index where a request may leave; -1 where it cannot.
    seconds : list of list of float
        By stage, by rows carried; the last stage runs to the output.
    regroup : list of float
        By rows carried before the leavers are dropped.
    extra : dict
        Seconds by (stage, rows that leave there) of heads that no plan has in force, which only policies with foresight use:
        they are charged for the rows that leave and for nobody else.
    """

    position: tuple[int, ...]
    seconds: list[list[float]]
    regroup: list[float]
    extra: dict[int, list[float]]
    _known: dict[tuple[bool, tuple[int, ...]], tuple[tuple[float, ...], float]] = field(default_factory=dict)

    def run(self, leaves: tuple[int, ...], *, carry_on: bool) -> tuple[tuple[float, ...], float]:
        """When the rows that leave at each stage are answered, and when the worker is free, in seconds from the start.

        ``leaves`` counts the rows of the batch by the stage where they leave, those that run to the output last. With ``carry_on``
        (results only) all rows are carried to the output; else a batch that all rows left ends, and one that some left is regrouped
        where that pays. The rules are those of :func:`offramp_worker.engine.execute.run_stages`.
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
