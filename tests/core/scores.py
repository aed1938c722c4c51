"""Synthetic recorded scores: inputs have a latent difficulty, ramps see it through noise, deeper ramps see more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offramp_core.records import ExitCosts, Records
from offramp_core.tuning import TuningRequest

IDS = tuple(f"r{i:02d}-linear" for i in range(6))
REQUEST = TuningRequest(
    max_disagreement=0.02,
    delta=0.05,
    test_index=1,
    ramp_ids=IDS,
    backbone_digest="sha256:b",
    ramp_set_digest="sha256:r",
)


def recorded(n: int, n_ramps: int, *, seed: int, ramp_seconds: float = 0.008, harder: float = 0.0) -> Records:
    """Records whose uncertainties are ranks on the six-decimal grid, as the product's quantile table makes them.

    ``harder`` shifts the difficulty: the same thresholds then disagree more often.
    """
    rng = np.random.default_rng(seed)
    difficulty = rng.beta(1.2, 1.8, size=n) * 1.25
    depth = np.arange(1, n_ramps + 1) / (n_ramps + 1)
    margin = (depth - difficulty[:, None]) * 6 + rng.normal(0, 0.9, (n, n_ramps)) + 0.35 * rng.normal(size=(n, 1))
    agrees = rng.random((n, n_ramps)) < 1 / (1 + np.exp(-((margin - harder) * 1.1 + 2.2)))
    score = 1 / (1 + np.exp(margin + 2 + rng.normal(0, 0.8, (n, n_ramps))))
    uncertainty = (np.rint(score * 1e6) / 1e6).astype(np.float32)
    costs = ExitCosts(np.full(n_ramps + 1, 1 / (n_ramps + 1)), np.full(n_ramps, ramp_seconds))
    return Records(uncertainty, agrees, np.ones(n, dtype=bool), costs, time=np.arange(n, dtype=np.float64))


def small(seed: int, *, max_rows: int = 8, n_ramps: int | None = None) -> Records:
    """A small random case: every other one with many ties, every third with wrong final answers, some off the grid."""
    rng = np.random.default_rng(seed)
    n, r = int(rng.integers(1, max_rows + 1)), n_ramps or int(rng.integers(1, 4))
    uncertainty = rng.random((n, r))
    if seed % 2 == 0:
        uncertainty = np.round(uncertainty, 1)
    if seed % 7 == 0:  # neighbours closer than a threshold can separate
        uncertainty = 0.3 + rng.integers(0, 40, (n, r)) * 1e-7
    final = rng.random(n) < 0.85 if seed % 3 == 0 else np.ones(n, dtype=bool)
    ramp_seconds = rng.random(r) * 0.05 * (rng.random(r) < 0.7)
    costs = ExitCosts(rng.random(r + 1) * (rng.random(r + 1) < 0.9) + 1e-3, ramp_seconds)
    return Records(uncertainty.astype(np.float32), rng.random((n, r)) < 0.7, final, costs)


def with_predictions(records: Records, *, seed: int = 0, n_classes: int = 4) -> Records:
    """Ramps that agree predict class 0, the others one of the rest, now and then the same one."""
    rng = np.random.default_rng(seed)
    own = rng.integers(1, n_classes, records.agrees.shape)
    shared = rng.integers(1, n_classes, (len(records), 1))
    wrong = np.where(rng.random(records.agrees.shape) < 0.3, shared, own)
    return replace(records, prediction=np.where(records.agrees, 0, wrong))


def with_small_model(records: Records, *, agrees: float = 0.9, seed: int = 0) -> Records:
    """The same with a small model at the input: its column comes first and costs a tenth of the backbone."""
    rng = np.random.default_rng(seed)
    n, costs = len(records), records.costs
    right = rng.random((n, 1)) < agrees
    score = np.where(right, rng.beta(1, 6, (n, 1)), rng.beta(3, 3, (n, 1))).astype(np.float32)
    prediction = None
    if records.prediction is not None:
        prediction = np.column_stack([np.where(right[:, 0], 0, 1), records.prediction])
    return replace(
        records,
        uncertainty=np.column_stack([score, records.uncertainty]),
        agrees=np.column_stack([right, records.agrees]),
        costs=ExitCosts(
            np.append(0.0, costs.segment_seconds), np.append(0.1 * costs.total_seconds, costs.ramp_seconds)
        ),
        prediction=prediction,
    )


def with_int8(records: Records, **shape: Any) -> Records:
    """The same requests with an int8 backbone besides, of the ``shape`` that :func:`with_precision` takes."""
    return with_precision(records, "int8", **shape)


def with_precision(
    records: Records, name: str, *, wrong: float = 0.004, speed: float = 0.5, n_ramps: int = 2, seed: int = 0
) -> Records:
    """The same requests with one more form of the backbone: ``wrong`` of its answers differ, it takes ``speed`` of the
    time, and its ramps are those of fp32 at half of the cost. The uncertain requests are those it gets wrong."""
    rng = np.random.default_rng(seed)
    n, costs = len(records), records.costs
    final_agrees = rng.random(n) >= wrong
    doubt = np.where(final_agrees, rng.beta(1, 8, n), rng.beta(8, 2, n))
    kept = np.linspace(0, records.n_ramps - 1, n_ramps).round().astype(int) if n_ramps else np.array([], dtype=int)
    reached = speed * np.append(np.cumsum(costs.segment_seconds)[kept], costs.total_seconds)
    other = replace(
        records,
        uncertainty=np.ascontiguousarray(records.uncertainty[:, kept]),
        agrees=records.agrees[:, kept] & (final_agrees | (rng.random(n) < 0.5))[:, None],
        final_agrees=final_agrees,
        costs=ExitCosts(np.diff(reached, prepend=0.0), speed * costs.ramp_seconds[kept], costs.total_seconds),
        precision=name,
        final_uncertainty=doubt.astype(np.float32),
        ramp_ids=tuple(f"{name}/r{j:02d}-linear" for j in kept),
        others={},
    )
    return replace(records, others={**records.others, name: other})


def wide_arrays(records: Records, ids: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """What a records file holds of fp32 records with other chains beside them (:func:`with_precision`); class 3 is
    right, 4 wrong."""
    assert records.time is not None
    uncertainty, agrees = [records.uncertainty], [records.agrees]
    names, of_columns, costs = [*ids], ["fp32"] * records.n_ramps, {}
    for name, other in records.others.items():
        assert other.final_uncertainty is not None
        uncertainty += [other.uncertainty, other.final_uncertainty[:, None]]
        agrees += [other.agrees, other.final_agrees[:, None]]
        names += [*other.ramp_ids, f"{name}/final"]
        of_columns += [name] * (other.n_ramps + 1)
        costs[f"{name}_segment_seconds"] = other.costs.segment_seconds
        costs[f"{name}_ramp_seconds"] = other.costs.ramp_seconds
    return {
        "uncertainty": np.column_stack(uncertainty),
        "prediction": np.where(np.column_stack(agrees), 3, 4),
        "final": np.full(len(records), 3),
        "time": records.time,
        "segment_seconds": records.costs.segment_seconds,
        "ramp_seconds": records.costs.ramp_seconds,
        "ramp_id": np.array(names),
        "ramp_precision": np.array(of_columns),
        **costs,
    }
