"""Judging ramps: exit shares against brute force, what is trained, what is refused, and the measured profile's
arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offramp_core.bundle import RampSpec
from offramp_worker.bundle.heads import HeadNodes
from offramp_worker.prepare.heads.selection import (
    BUDGETS,
    MAX_RAMPS,
    RampCost,
    RampMerit,
    cost_of,
    exit_share,
    most_promising,
    screen,
    select_ramps,
)
from offramp_worker.prepare.measuring import profiling
from offramp_worker.prepare.measuring.profiling import BatchMeasurement, Measurements, profile_of
from offramp_worker.prepare.places.cuts import Place

ROWS = st.integers(1, 40)


@pytest.mark.slow
@given(st.data(), ROWS, st.sampled_from([0.0, 0.01, 0.05, 0.3]))
def test_exit_share_is_the_best_over_every_threshold(data: st.DataObject, n: int, budget: float) -> None:
    score = data.draw(hnp.arrays(np.float64, n, elements=st.integers(0, 8).map(float)))  # many ties
    agrees = data.draw(hnp.arrays(np.bool_, n))
    leaves = [score < threshold for threshold in (*np.unique(score), np.inf)]
    best = max((go.mean() for go in leaves if (go & ~agrees).sum() <= budget * n + 1e-9), default=0.0)
    assert exit_share(score, 1.0 - agrees, budget=budget) == pytest.approx(best)


def test_rows_without_a_finite_score_never_leave() -> None:
    assert exit_share(np.array([0.0, np.inf]), np.zeros(2), budget=0.05) == 0.5


def spec(position: int, kind: str) -> RampSpec:
    head = {"grid": "grid-mlp", "linear": "pooled-linear", "cells": "grid-linear", "conv": "conv"}[kind]
    return RampSpec(f"r{position:02d}-{kind}", f"t{position}", position, 0.0, head, 8)  # type: ignore[arg-type]


def measurements(heads: dict[str, float]) -> Measurements:
    batches = tuple(BatchMeasurement(size, 1.0, (0.25, 0.25, 0.5), heads, 0.01, {1: 0.25, 2: 0.5}) for size in (1, 8))
    return Measurements(tuple(Place(i, f"t{i}", (8, 8, 8)) for i in (1, 2)), 1, batches)


def costing(cost: float | dict[int, float], *, depth: float) -> RampCost:
    head = cost if isinstance(cost, dict) else {1: cost, 8: cost}
    return RampCost(head, dict.fromkeys(head, depth))


def worth(share: float | tuple[float, ...], *, cost: float | dict[int, float], depth: float) -> RampMerit:
    shares = share if isinstance(share, tuple) else (share,) * len(BUDGETS)
    return RampMerit(0.9, dict(zip(BUDGETS, shares, strict=True)), costing(cost, depth=depth))


def verdicts(**merits: RampMerit) -> dict[str, str]:
    """Reasons for refusal by ramp; ``linear_1`` is a linear head at place 1."""
    named = {spec(int(name[-1]), name[:-2]): value for name, value in merits.items()}
    return {v.spec.id: v.refused for v in select_ramps(named)}


def test_ramps_that_cannot_pay_are_refused_with_the_reason() -> None:
    said = verdicts(
        grid_1=worth(0.4, cost=0.02, depth=0.25),
        grid_2=worth(0.5, cost=0.3, depth=0.5),  # saves 0.5 x 0.5, costs 0.3
        linear_2=worth(0.0, cost=0.01, depth=0.5),
    )
    assert said["r01-grid"] == ""
    assert "costs more" in said["r02-grid"]
    assert "nothing could leave" in said["r02-linear"]


def test_a_head_that_pays_at_one_batch_size_only_stays() -> None:
    assert verdicts(grid_1=worth(0.1, cost={1: 0.2, 8: 0.01}, depth=0.25)) == {"r01-grid": ""}


def test_of_two_heads_at_a_place_the_worse_and_dearer_one_goes() -> None:
    said = verdicts(grid_1=worth(0.2, cost=0.02, depth=0.25), linear_1=worth(0.3, cost=0.01, depth=0.25))
    assert said["r01-linear"] == ""
    assert said["r01-grid"].startswith("r01-linear saves as much here, or more")


def test_heads_that_save_most_at_different_budgets_or_batch_sizes_all_stay() -> None:
    said = verdicts(
        linear_1=worth((0.1, 0.1, 0.1, 0.5), cost=0.01, depth=0.25),  # best at 5 %
        grid_1=worth((0.2, 0.2, 0.2, 0.2), cost=0.03, depth=0.25),  # best at 0.5 to 2 %
        conv_1=worth((0.25, 0.25, 0.25, 0.25), cost={1: 0.3, 8: 0.02}, depth=0.25),  # best at batches of 8
    )
    assert said == {"r01-linear": "", "r01-grid": "", "r01-conv": ""}


def test_a_hair_more_saving_does_not_justify_a_dearer_head() -> None:
    said = verdicts(grid_1=worth(0.301, cost=0.0105, depth=0.0), linear_1=worth(0.3, cost=0.01, depth=0.0))
    assert said["r01-linear"] == ""
    assert said["r01-grid"] != ""


def test_of_too_many_ramps_those_that_save_least_go() -> None:
    merits = {spec(i, "grid"): worth(0.5 - i / 1000, cost=0.01, depth=0.2) for i in range(1, MAX_RAMPS + 3)}
    refused = [v.spec.position for v in select_ramps(merits) if v.refused]
    assert refused == [MAX_RAMPS + 1, MAX_RAMPS + 2]


def test_a_dearer_head_is_trained_only_where_it_could_add_more_than_it_costs() -> None:
    trained = {
        spec(1, "linear"): worth(0.1, cost=0.01, depth=0.2),
        spec(2, "linear"): worth(0.97, cost=0.01, depth=0.9),  # three in a hundred are left to save a tenth of the time
    }
    candidates = [spec(1, "grid"), spec(2, "grid")]
    costs = {"r01-grid": costing(0.03, depth=0.2), "r02-grid": costing(0.03, depth=0.9)}
    promising, refused = screen(candidates, costs, trained)
    assert [s.id for s in promising] == ["r01-grid"]
    assert [u.spec.id for u in refused] == ["r02-grid"]
    assert refused[0].reason.startswith("not trained")


def test_a_head_without_cheaper_ones_at_its_place_gets_its_chance() -> None:
    assert screen([spec(1, "conv")], {"r01-conv": costing(0.05, depth=0.0)}, {})[1] == ()
    assert screen([spec(1, "conv")], {"r01-conv": costing(0.5, depth=0.0)}, {})[0] == ()


def test_dear_heads_are_trained_at_the_places_that_promise_most_and_apart_from_each_other() -> None:
    depths = {1: 0.1, 2: 0.15, 3: 0.5, 4: 0.9}
    candidates = [spec(i, "conv") for i in depths]
    costs = {f"r0{i}-conv": costing(0.03, depth=depth) for i, depth in depths.items()}
    trained = {spec(i, "grid"): worth(0.3, cost=0.02, depth=depth) for i, depth in depths.items()}
    chosen, rest = most_promising(candidates, costs, trained, most=2, apart=0.2)
    assert [s.id for s in chosen] == ["r01-conv", "r03-conv"]  # 2 is too near to 1, and 4 comes too late
    assert {u.spec.id for u in rest} == {"r02-conv", "r04-conv"}
    assert "r01-conv, r03-conv promise more" in rest[0].reason
    chosen, _ = most_promising(candidates, costs, trained, most=2, apart=0.2, first=[candidates[3]])
    assert [s.id for s in chosen] == ["r01-conv", "r04-conv"]


def test_costs_are_shares_of_the_backbones_time_by_batch_size_and_the_input_is_at_depth_zero() -> None:
    measured = measurements({"r00-conv": 0.04, "r02-grid": 0.02})
    assert cost_of(spec(2, "grid"), measured) == RampCost({1: 0.02, 8: 0.02}, {1: 0.5, 8: 0.5})
    assert cost_of(spec(0, "conv"), measured).depth == {1: 0.0, 8: 0.0}


def test_segments_between_ramps_add_up_to_the_exact_time_and_are_zero_at_a_shared_place() -> None:
    cost = {"r00-conv": 0.04, "r01-grid": 0.02, "r01-linear": 0.01, "r02-grid": 0.03}
    ramps = [spec(0, "conv"), spec(1, "grid"), spec(1, "linear"), spec(2, "grid")]
    profile = profile_of(ramps, measurements(cost))
    assert [b.batch_size for b in profile.batches] == [1, 8]
    for batch in profile.batches:
        assert batch.segment_seconds == pytest.approx((0.0, 0.25, 0.0, 0.25, 0.5))
        assert sum(batch.segment_seconds) == pytest.approx(batch.exact_seconds)
        assert batch.ramp_seconds == (0.04, 0.02, 0.01, 0.03)


def test_what_cutting_the_backbone_costs_is_charged_to_the_heads_of_the_cuts() -> None:
    places = measurements({}).places
    heads = [HeadNodes(f"r{i:02d}", tensor, "logits", (), ()) for i, tensor in enumerate(("x", places[0].tensor))]
    pieces = {"exact": 1.0, "segment 0": 0.25, "segment 1": 0.25, "segment 2": 0.6, "head r00": 0.05, "head r01": 0.02}
    batch = profiling._measurement(1, places, heads, {**pieces, "regroup 0": 0.0, "regroup 1": 0.0})
    assert sum(batch.segment_seconds) == pytest.approx(1.0)
    assert batch.head_seconds["r01"] == pytest.approx(0.02 + 0.1 / 2)
    assert batch.head_seconds["r00"] == pytest.approx(0.05)  # at the input nothing is cut
