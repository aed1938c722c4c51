"""The outlook on plans: budgets, the overhead allowed, and lower precisions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offramp_worker.prepare.heads.selection import BUDGETS
from offramp_worker.prepare.measuring.outlook import ANY_OVERHEAD, USUAL_OVERHEAD, Outlook, outlooks

ROWS = 1_000


def arrays(*, ramp_cost: float, int8_errors: int | None = None) -> dict[str, npt.NDArray[Any]]:
    """One ramp at half of the time where four in ten leave rightly; with ``int8_errors`` an int8 chain of half the
    time."""
    uncertainty = np.linspace(0, 1, ROWS, dtype=np.float32)
    wrong = uncertainty >= 0.4
    columns, said = [uncertainty], [np.where(wrong, 1, 0)]
    costs = {
        "batch_size": np.array([1, 16]),
        "segment_seconds": np.array([[0.5, 0.5], [8.0, 8.0]]),
        "ramp_seconds": np.array([[ramp_cost], [16 * ramp_cost]]),
        "regroup_seconds": np.zeros(2),
    }
    names: dict[str, npt.NDArray[Any]] = {}
    if int8_errors is not None:
        columns += [uncertainty, uncertainty]
        said += [said[0], np.where(np.arange(ROWS) >= ROWS - int8_errors, 1, 0)]
        costs |= {"int8_segment_seconds": costs["segment_seconds"] / 2, "int8_ramp_seconds": costs["ramp_seconds"]}
        names = {
            "ramp_id": np.array(["r01-grid", "int8/r01-grid", "int8/final"]),
            "ramp_precision": np.array(["fp32", "int8", "int8"]),
        }
    answers = np.zeros(ROWS, dtype=np.int64)
    scores = {"uncertainty": np.stack(columns, axis=1), "prediction": np.stack(said, axis=1)}
    return {**scores, **names, **costs, "final": answers, "reference": answers}


def at(found: tuple[Outlook, ...], *, batch: int, overhead: float) -> list[Outlook]:
    return [o for o in found if o.batch_size == batch and o.max_overhead == overhead]


def test_every_budget_is_there_for_two_batch_sizes_with_and_without_the_limit() -> None:
    found = outlooks(arrays(ramp_cost=0.02), ["r01-grid"])
    for batch in (1, 16):
        for overhead in (USUAL_OVERHEAD, ANY_OVERHEAD):
            assert [o.budget for o in at(found, batch=batch, overhead=overhead)] == list(BUDGETS)
    for plan, share in zip(at(found, batch=1, overhead=USUAL_OVERHEAD), (0.405, 0.41, 0.42, 0.45), strict=True):
        assert plan.ramps == ("r01-grid",)
        assert plan.saving == pytest.approx(
            share / 2 - 0.02, abs=2e-3
        )  # right ones and as many wrong ones as the budget has


def test_a_ramp_dearer_than_the_overhead_allows_counts_only_without_the_limit() -> None:
    found = outlooks(arrays(ramp_cost=0.06), ["r01-grid"])
    assert {o.ramps for o in at(found, batch=16, overhead=USUAL_OVERHEAD)} == {()}
    assert {o.saving for o in at(found, batch=16, overhead=USUAL_OVERHEAD)} == {0.0}
    assert all(o.ramps == ("r01-grid",) for o in at(found, batch=16, overhead=ANY_OVERHEAD))


def test_a_lower_precision_wins_where_its_own_errors_fit_the_budget() -> None:
    half, one, two, five = at(
        outlooks(arrays(ramp_cost=0.02, int8_errors=15), ["r01-grid"]), batch=1, overhead=USUAL_OVERHEAD
    )
    assert [o.precision for o in (half, one)] == ["fp32", "fp32"]  # 15 of 1,000 are too many
    assert [o.precision for o in (two, five)] == ["int8", "int8"]
    assert two.saving >= 0.5
    assert set(two.ramps) <= {"int8/r01-grid"}
