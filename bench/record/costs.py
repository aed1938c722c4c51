"""What segments, ramps and regrouping cost, measured apart from the scores: on a quieter machine they are measured
again without any training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.record.network import places_and_ramps
from bench.record.scores import FloatArray
from bench.record.store import COST_ARRAYS, RecordSet
from offramp_core.bundle import HeadKind, RampSpec, profile_arrays
from offramp_worker.prepare.heads.features import blank_heads
from offramp_worker.prepare.measuring.profiling import BATCH_SIZES, Measurements, measure, profile_of
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.sources import load_backbone

PROFILE_SECONDS = 60.0
HOW = (
    "Seconds of one machine, ONNX Runtime, one thread; only ratios carry over. Medians of interleaved rounds in that "
    "thread's processor time, per "
    "batch size. Segments are scaled to sum to the whole model's time. A ramp is the median of (segment with head, "
    "softmax and decision) minus "
    "(segment) in the same round, at least 20 microseconds, plus an even share of what cutting the model costs. "
    "Regrouping copies half of a "
    "batch's rows. Weights do not matter."
)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one set.

    Attributes
    ----------
    arrays : mapping
        ``batch_size`` [B], ``segment_seconds`` [B, R+1], ``ramp_seconds`` [B, R], ``regroup_seconds`` [B].
    ramps : tuple
        Per ramp its ``depth`` (share of the model's time up to it, mean over batch sizes) and its ``cost`` (its own
        time as a share of the model's at the smallest batch size).
    how : str
        How they were measured.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    ramps: tuple[Mapping[str, float], ...]
    how: str = HOW


def costs_of(ramps: Sequence[RampSpec], measured: Measurements, *, how: str = HOW) -> Costs:
    """Costs of ramps in network order."""
    arrays: dict[str, npt.NDArray[Any]] = dict(profile_arrays(profile_of(ramps, measured)))
    arrays["batch_size"] = arrays["batch_size"].astype(np.int64)
    smallest = measured.batches[0]
    shares = tuple(
        {"depth": round(measured.depth(ramp.position), 4), "cost": round(smallest.head_share(ramp.id), 5)}
        for ramp in ramps
    )
    return Costs(arrays, shares, how)


def network_costs(model: str, x: FloatArray, reporter: Reporter, *, blocks: int) -> dict[HeadKind, Costs]:
    """Costs of an image network with an exit after each of its last ``blocks`` places, for each kind of head.

    Parameters
    ----------
    model : str
        A URI that :func:`load_backbone` understands.
    x : (n, C, H, W) float32
        Inputs to run on.
    """
    with reporter.step("export the model", total=1) as advance:
        backbone = load_backbone(model, x)
        advance(1)
    places, specs = places_and_ramps(backbone, x, blocks=blocks)
    blank = blank_heads(specs, places, task=backbone.task)
    with reporter.step("measure the costs", total=len(BATCH_SIZES)) as advance:
        measured = measure(
            backbone, places, blank, x[: max(BATCH_SIZES)], threads=1, seconds=PROFILE_SECONDS, advance=advance
        )
    kinds: tuple[HeadKind, ...] = ("grid-mlp", "pooled-linear")
    return {kind: costs_of([spec for spec in specs if spec.head == kind], measured) for kind in kinds}


def with_costs(recorded: RecordSet, costs: Costs) -> RecordSet:
    """A set with these costs instead of any it had."""
    scores = {name: value for name, value in recorded.arrays.items() if name not in COST_ARRAYS}
    ramps = [{**ramp, **shares} for ramp, shares in zip(recorded.facts["ramps"], costs.ramps, strict=True)]
    facts = {**recorded.facts, "costs": costs.how, "ramps": ramps}
    return RecordSet(recorded.name, {**scores, **costs.arrays}, facts)
