"""The search's compiled loops: what they find is what numpy finds, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from offramp_core.records import ExitCosts, Records
from offramp_core.search.boxes import Box, divide, whole
from offramp_core.search.limits import make_limits
from offramp_core.search.objective import as_sets, price
from offramp_core.search.pace import LOADING, PACE, SearchPace
from offramp_core.search.placement import best_plan
from offramp_core.search.space import SearchSpace
from offramp_core.search.sweep import Prefix, Sweep

Found = TypeVar("Found")


def records(seed: int, *, n: int, n_ramps: int, levels: int) -> Records:
    """Few distinct scores make ties."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels + 1, (n, n_ramps)) / levels
    agrees = rng.random((n, n_ramps)) < 0.55 + 0.4 * np.arange(1, n_ramps + 1) / n_ramps
    costs = ExitCosts(rng.random(n_ramps + 1) + 0.05, rng.random(n_ramps) * 0.05)
    return Records(scores.astype(np.float32), agrees, np.ones(n, dtype=bool), costs)


pools = st.builds(
    records,
    st.integers(0, 10_000),
    n=st.integers(1, 300),
    n_ramps=st.integers(1, 5),
    levels=st.sampled_from([3, 40, 10_000]),
)
budgets = st.floats(0, 0.5)


def both(search: Callable[[], Found]) -> tuple[Found, Found]:
    """What is found by compiled loops, and by numpy alone."""
    assert PACE.installed, "numba is part of what the tests install"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PACE, "installed", False)
        by_numpy = search()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PACE, "handled", math.inf)
        return search(), by_numpy


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(pools, budgets, st.integers(2, 9), st.data())
def test_cells_are_bounded_alike_in_a_box_and_in_the_boxes_inside_it(
    pool: Records, budget: float, parts: int, data: st.DataObject
) -> None:
    space = SearchSpace(pool, make_limits(pool, max_disagreement=budget))
    ramps = st.sets(st.integers(0, pool.n_ramps - 1), min_size=1, max_size=4)
    active = tuple(sorted(data.draw(ramps)))
    values, box = price(pool).values(active), whole(space, active)
    for _ in range(3):
        (cells, inside), (expected, left) = both(lambda b=box: divide(space, b, parts=parts, values=values))
        np.testing.assert_array_equal(cells.bound, expected.bound)
        np.testing.assert_array_equal(cells.corner, expected.corner)
        for name in ("rows", "still_in", "charged"):
            np.testing.assert_array_equal(getattr(inside, name), getattr(left, name))
        number = data.draw(st.integers(0, math.prod(cells.bound.shape) - 1))
        cell = tuple(int(i) for i in np.unravel_index(number, cells.bound.shape))
        box = Box(active, cells.low(cell), cells.cuts(cell), inside)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(pools, budgets, st.booleans())
def test_sets_of_ramps_are_bounded_alike(pool: Records, budget: float, prepared: bool) -> None:
    space = SearchSpace(pool, make_limits(pool, max_disagreement=budget))
    if prepared:
        space.prepare()
    size = min(3, pool.n_ramps)

    def bounds() -> list[list[float]]:
        sweep, out = Sweep(space, size), []

        def descend(prefix: Prefix, more: int) -> None:
            lasts = list(range(prefix.ramps[-1] + 1 if prefix.ramps else 0, pool.n_ramps))
            if not lasts:
                return
            if more > 1:
                for longer in sweep.extend(prefix, lasts):
                    descend(longer, more - 1)
                return
            values = price(pool).values(as_sets(prefix.ramps, lasts))
            out.append(sweep.bounds(prefix, lasts, values, None, 0).tolist())

        descend(sweep.empty, size)
        return out

    compiled_bounds, numpy_bounds = both(bounds)
    assert compiled_bounds == numpy_bounds


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(pools, budgets, st.sampled_from([0.0, 0.01]))
def test_the_whole_search_finds_the_same_plan_with_the_same_proof(pool: Records, budget: float, gap: float) -> None:
    found, expected = both(lambda: best_plan(pool, max_disagreement=budget, max_gap=gap))
    assert found == expected


def test_a_problem_with_slices_or_wrong_final_answers_is_left_to_numpy() -> None:
    pool = records(1, n=50, n_ramps=2, levels=40)
    sliced = Records(pool.uncertainty, pool.agrees, pool.final_agrees, pool.costs, slice_id=np.arange(50) % 2)
    limited = make_limits(sliced, max_disagreement=0.1, slice_budgets={0: 0.1})
    assert not SearchSpace(sliced, limited).plain
    assert SearchSpace(pool, make_limits(pool, max_disagreement=0.1)).plain
    wrong = Records(pool.uncertainty, pool.agrees, np.arange(50) > 0, pool.costs)
    assert not SearchSpace(wrong, make_limits(wrong, max_disagreement=0.1)).plain


def test_loops_are_loaded_when_numpy_has_taken_as_long_as_loading_them() -> None:
    pace = SearchPace(installed=True)
    assert not pace.compiled(int(LOADING))
    assert pace.compiled(1)
    bare = SearchPace(installed=False)
    bare.hurry()
    assert not bare.compiled(1)
