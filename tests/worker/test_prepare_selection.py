"""Judging ramps: exit shares against brute force, refusals, and the measured profile's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offramp_core.bundle import RampSpec
from offramp_worker.bundle.heads import HeadNodes
from offramp_worker.prepare import profiling
from offramp_worker.prepare.cuts import Place
from offramp_worker.prepare.profiling import BatchMeasurement, Measurements, profile_of
from offramp_worker.prepare.selection import BUDGETS, RampMerit, exit_share, select_ramps

ROWS = st.integers(1, 40)


@given(st.data(), ROWS, st.sampled_from([0.0, 0.01, 0.05, 0.3]))
def test_exit_share_is_the_best_over_every_threshold(data: st.DataObject, n: int, budget: float) -> None:
    score = data.draw(hnp.arrays(np.float64, n, elements=st.integers(0, 8).map(float)))  # many ties
    agrees = data.draw(hnp.arrays(np.bool_, n))
    leaves = [score < threshold for threshold in (*np.unique(score), np.inf)]
    best = max((go.mean() for go in leaves if (go & ~agrees).sum() <= budget * n + 1e-9), default=0.0)
    assert exit_share(score, agrees, budget=budget) == pytest.approx(best)


def test_rows_without_a_finite_score_never_leave() -> None:
    assert exit_share(np.array([0.0, np.inf]), np.array([True, True]), budget=0.05) == 0.5


def spec(position: int, kind: str) -> RampSpec:
    head = "grid-mlp" if kind == "grid" else "pooled-linear"
    return RampSpec(f"r{position:02d}-{kind}", f"t{position}", position, 0.0, head, 8)  # type: ignore[arg-type]


def measurements(heads: dict[str, float]) -> Measurements:
    batches = tuple(BatchMeasurement(size, 1.0, (0.25, 0.25, 0.5), heads, 0.01, {0: 0.25, 1: 0.5}) for size in (1, 8))
    return Measurements(tuple(Place(i, f"t{i}", 8, 8, 8) for i in range(2)), 1, batches)


def worth(share: float, *, cost: float, depth: float) -> RampMerit:
    return RampMerit(0.9, dict.fromkeys(BUDGETS, share), cost, depth)


def test_ramps_that_cannot_pay_or_are_dominated_are_refused_with_the_reason() -> None:
    ramps = [spec(0, "grid"), spec(0, "linear"), spec(1, "grid"), spec(1, "linear")]
    cost = {"r00-grid": 0.02, "r00-linear": 0.01, "r01-grid": 0.3, "r01-linear": 0.01}
    share = {"r00-grid": 0.4, "r00-linear": 0.1, "r01-grid": 0.5, "r01-linear": 0.0}
    merits = {s.id: worth(share[s.id], cost=cost[s.id], depth=(0.25, 0.5)[s.position]) for s in ramps}
    verdicts = {v.spec.id: v.refused for v in select_ramps(ramps, merits, measurements(cost))}
    assert verdicts["r00-grid"] == ""
    assert verdicts["r00-linear"] == ""  # worse but cheaper: both compete
    assert "costs more" in verdicts["r01-grid"]  # saves 0.5 x 0.5, costs 0.3
    assert "nothing could leave" in verdicts["r01-linear"]


def test_of_two_heads_at_a_place_the_worse_and_dearer_one_goes() -> None:
    ramps = [spec(0, "grid"), spec(0, "linear")]
    cost = {"r00-grid": 0.02, "r00-linear": 0.01}
    merits = {
        "r00-grid": worth(0.2, cost=0.02, depth=0.25),
        "r00-linear": worth(0.3, cost=0.01, depth=0.25),
    }
    verdicts = {v.spec.id: v.refused for v in select_ramps(ramps, merits, measurements(cost))}
    assert verdicts == {"r00-grid": "r00-linear is at least as good here and as cheap", "r00-linear": ""}


def test_segments_between_ramps_add_up_to_the_exact_time_and_are_zero_at_a_shared_place() -> None:
    cost = {"r00-grid": 0.02, "r00-linear": 0.01, "r01-grid": 0.03}
    ramps = [spec(0, "grid"), spec(0, "linear"), spec(1, "grid")]
    profile = profile_of(ramps, measurements(cost))
    assert [b.batch_size for b in profile.batches] == [1, 8]
    for batch in profile.batches:
        assert batch.segment_seconds == pytest.approx((0.25, 0.0, 0.25, 0.5))
        assert sum(batch.segment_seconds) == pytest.approx(batch.exact_seconds)
        assert batch.ramp_seconds == (0.02, 0.01, 0.03)


def test_what_cutting_the_backbone_costs_is_charged_to_the_heads_of_the_cuts() -> None:
    places = measurements({}).places
    heads = [HeadNodes("r00-grid", places[0].tensor, "logits", (), ())]
    pieces = {"exact": 1.0, "segment 0": 0.25, "segment 1": 0.25, "segment 2": 0.6, "head r00-grid": 0.02}
    batch = profiling._measurement(1, places, heads, {**pieces, "regroup 0": 0.0, "regroup 1": 0.0})
    assert sum(batch.segment_seconds) == pytest.approx(1.0)
    assert batch.head_seconds["r00-grid"] == pytest.approx(0.02 + 0.1 / 2)
