"""Ceilings: what could have been saved by one who knew the stream in advance."""

from __future__ import annotations

import numpy as np

from offramp_core.policies.base import NO_EXIT, Objective, PlanInForce, Trace
from offramp_core.records import Records


def oracle(_tune: Records, stream: Records, _objective: Objective) -> Trace:
    """Each input leaves at the first ramp that answers it correctly and pays for that ramp alone; nothing disagrees.

    No plan can do this: it has no thresholds, and its saving is a ceiling. Source: the per-sample optimum of Apparate (SOSP 2024),
    arXiv:2312.05385 section 4.
    """
    costs = stream.costs
    at_ramp = np.cumsum(costs.segment_seconds)[:-1] + costs.ramp_seconds
    seconds = np.where(stream.agrees, at_ramp, np.inf)
    best = seconds.argmin(axis=1)
    pays = seconds[np.arange(len(stream)), best] < costs.total_seconds
    left = np.where(pays, best, NO_EXIT)
    return Trace(left, (PlanInForce(0, (), ()),), np.ones(len(stream), dtype=np.bool_))
