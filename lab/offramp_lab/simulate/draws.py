"""The recorded pool as the population: what a policy chooses on a sample, judged on everything that was recorded.

Tuning records and the stream are drawn from the pool with replacement, so they are exchangeable with it, and a plan's
rate on the whole pool is its true rate. Splitting a finite pool instead would make calibration error and test error run
against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import evaluate
from offramp_core.records import Records
from offramp_lab.policies import NamedPolicy, Objective, Trace
from offramp_lab.policies.base import serve


@dataclass(frozen=True, slots=True)
class Truth:
    """What a trace would have saved and cost on the whole pool; shares as fractions.

    ``exact`` says that thresholds tell who leaves, so that the pool could be asked. Else (patience, oracles) both are
    of the stream itself, which estimates the same with the noise of a sample.
    """

    saving: float
    disagreement: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One draw: records to tune on, and the stream to serve."""

    tune: Records
    stream: Records


def draw_sample(pool: Records, *, tune_rows: int, stream_rows: int, rng: np.random.Generator) -> Sample:
    """Draw both with replacement; the order of rows is that of drawing, so recorded times are left out.

    Raises
    ------
    InvalidArgumentError
        A size is not positive.
    """
    for name, value in (("tune_rows", tune_rows), ("stream_rows", stream_rows)):
        if value < 1:
            raise InvalidArgumentError(f"{name} is {value}; a draw needs at least 1")
    timeless = replace(pool, time=None)
    return Sample(*(timeless.take(rng.integers(len(pool), size=n)) for n in (tune_rows, stream_rows)))


def draw_rng(seed: int, number: int) -> np.random.Generator:
    """The generator of draw ``number``: the same in any process and any order."""
    return np.random.default_rng([seed, number])


def run_draw(
    sample: Sample, pool: Records, policies: Sequence[NamedPolicy], objective: Objective
) -> dict[str, tuple[Trace, Truth]]:
    """Every policy on one draw, by name."""
    out = {}
    for policy in policies:
        trace = policy.run(sample.tune, sample.stream, objective)
        out[policy.name] = (trace, truth(trace, sample.stream, pool))
    return out


def saving_in_sample(trace: Trace, tune: Records) -> float:
    """What the last plan in force saves on the records it was tuned on."""
    last = trace.plans[-1]
    return evaluate(tune.at(last.precision), last.active, last.thresholds).saving


def truth(trace: Trace, stream: Records, pool: Records) -> Truth:
    """The plans of a trace on the pool, weighted by the requests they served."""
    if not _explained_by_thresholds(trace, stream):
        return Truth(trace.saving(stream), trace.disagreement, exact=False)
    ends = [*(plan.since for plan in trace.plans[1:]), len(trace.exit)]
    saving = disagreement = 0.0
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for plan, end in zip(trace.plans, ends, strict=True):
        key = (plan.precision, plan.active, plan.thresholds)
        if key not in known:
            seen = evaluate(pool.at(plan.precision), plan.active, plan.thresholds)
            known[key] = (seen.saving, seen.disagreement)
        share = (end - plan.since) / len(trace.exit)
        saving += share * known[key][0]
        disagreement += share * known[key][1]
    return Truth(saving, disagreement, exact=True)


def _explained_by_thresholds(trace: Trace, stream: Records) -> bool:
    """Whether the plans in force alone explain where each request left."""
    ends = [*(plan.since for plan in trace.plans[1:]), len(trace.exit)]
    for plan, end in zip(trace.plans, ends, strict=True):
        rows = slice(plan.since, end)
        left, _ = serve(stream.at(plan.precision).take(rows), plan.active, plan.thresholds)
        if not np.array_equal(left, trace.exit[rows]):
            return False
    return True
