"""Seconds of a batch of any size on its way through a plan's stages, from a profile of some sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import Profile

SecondsArray = npt.NDArray[np.float64]


class CostTable:
    """Segment, ramp and regroup seconds for every batch size from 0 to ``max_batch``.

    Sizes between measured ones are interpolated, smaller ones cost what the smallest measured one costs, and beyond the
    largest the line through the last two goes on (with one measured size: in proportion). ``sizes`` maps a number of
    rows to the size that runs, for servers that pad to allowed sizes.
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
        """By stage, by rows; ``groups`` are the active ramps by the stage that ends with them. A last stage runs to the
        output."""
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
