"""A pool's models are packed into few workers, stay where they are, and what finds no place is told why."""

from __future__ import annotations

import math
import random

import pytest
from bench.sharing.packed import compared, copies_of, drawn, fewest, needed
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.errors import InvalidArgumentError
from offramp_core.sharing.packing import Demand, Size, pack

SIZE = Size(busy=0.6, bytes=1000, min_workers=0, max_workers=50)
rngs = st.integers(0, 2**32).map(random.Random)
DEMANDS = st.lists(
    st.builds(
        Demand,
        st.sampled_from([f"m{i}" for i in range(12)]),
        st.floats(0, 1.5),
        st.integers(0, 1100),
        st.integers(1, 3),
    ),
    max_size=9,
    unique_by=lambda demand: demand.name,
)
SIZES = st.builds(Size, st.floats(0.2, 1.0), st.integers(500, 2000), st.integers(0, 2), st.integers(2, 7))
HELD = st.lists(st.frozensets(st.sampled_from([f"m{i}" for i in range(12)]), max_size=5), max_size=8)


@given(DEMANDS, SIZES, HELD)
def test_no_worker_holds_more_than_its_memory_and_whoever_has_too_few_workers_is_told(
    demands: list[Demand], size: Size, held: list[frozenset[str]]
) -> None:
    by_name = {demand.name: demand for demand in demands}
    packing = pack(demands, size, held=held)
    assert needed(packing) <= size.max_workers
    assert len(packing.workers) >= len(held)
    for names in packing.workers:
        assert names <= set(by_name)
        assert sum(by_name[name].bytes for name in names) <= size.bytes
    for demand in demands:
        holders = sum(demand.name in names for names in packing.workers)
        assert (holders >= copies_of(demand, size)) or demand.name in packing.unplaced


@given(DEMANDS, SIZES, HELD)
def test_a_worker_is_crowded_only_where_no_more_may_be_started(
    demands: list[Demand], size: Size, held: list[frozenset[str]]
) -> None:
    packing = pack(demands, size, held=held)
    if packing.crowded and not packing.unplaced and max(d.busy for d in demands) <= size.busy * size.max_workers:
        assert needed(packing) == size.max_workers


@given(DEMANDS, SIZES, HELD)
def test_packing_again_moves_nothing(demands: list[Demand], size: Size, held: list[frozenset[str]]) -> None:
    first = pack(demands, size, held=held)
    if not first.crowded:
        again = pack(demands, size, held=first.workers)
        assert (again.workers, again.moves) == (first.workers, 0)


@given(DEMANDS.filter(bool), SIZES, rngs)
def test_a_tenth_of_noise_in_what_is_measured_moves_nothing_to_and_fro(
    demands: list[Demand], size: Size, rng: random.Random
) -> None:
    """Workers may be emptied when a measurement is low, but nothing comes back when the next one is high."""
    tight = Size(size.busy / 1.1, size.bytes, size.min_workers, size.max_workers)
    packing = pack(demands, tight)
    if packing.crowded or packing.unplaced:
        return
    for _ in range(10):
        noisy = [Demand(d.name, d.busy * rng.uniform(0.9, 1.1), d.bytes, d.copies) for d in demands]
        after = pack(noisy, size, held=packing.workers)
        assert not after.crowded
        assert after.moves == 0 or needed(after) < needed(packing)
        packing = after


def test_the_number_of_copies_does_not_follow_noise() -> None:
    rng, packing = random.Random(0), pack([Demand("hot", 0.61, 10)], SIZE)
    for _ in range(200):
        packing = pack([Demand("hot", 0.6 * rng.uniform(0.97, 1.03), 10)], SIZE, held=packing.workers)
        assert (packing.moves, needed(packing)) == (0, 2)
    assert needed(pack([Demand("hot", 0.4, 10)], SIZE, held=packing.workers)) == 1


def test_on_small_cases_workers_are_within_5_percent_of_the_fewest_possible() -> None:
    for demands in drawn(cases=120):
        packing = pack(demands, SIZE)
        assert not packing.unplaced and not packing.crowded
        assert needed(packing) >= fewest(demands, SIZE)
    found = compared(cases=120)
    assert found["ours"] <= 1.05 * found["fewest"]


def test_a_model_that_comes_is_placed_beside_the_others_and_none_of_them_moves() -> None:
    held = (frozenset({"a"}), frozenset({"b"}))
    demands = [Demand("a", 0.1, 700), Demand("b", 0.1, 400), Demand("c", 0.1, 300)]
    packing = pack(demands, SIZE, held=held)
    assert packing.workers == (frozenset({"a", "c"}), frozenset({"b"})) or packing.workers == (
        frozenset({"a"}),
        frozenset({"b", "c"}),
    )
    assert packing.moves == 1


def test_a_worker_whose_models_fit_elsewhere_is_emptied() -> None:
    held = (frozenset({"a"}), frozenset({"b"}), frozenset({"c"}))
    demands = [Demand(name, 0.1, 300) for name in "abc"]
    assert needed(pack(demands, SIZE, held=held)) == 1
    kept = Size(SIZE.busy, SIZE.bytes, min_workers=3, max_workers=5)
    assert pack(demands, kept, held=held).workers == held


def test_a_model_that_needs_more_than_one_worker_is_held_by_several() -> None:
    packing = pack([Demand("busy", 1.5, 100)], SIZE)
    assert [names for names in packing.workers if names] == [frozenset({"busy"})] * 3


def test_the_fewest_workers_that_there_are_share_the_models_evenly() -> None:
    size = Size(busy=0.6, bytes=1000, min_workers=2, max_workers=2)
    packing = pack([Demand(name, 0.1, 100) for name in "abcd"], size)
    assert sorted(map(len, packing.workers)) == [2, 2]


def test_what_finds_no_place_is_told_what_to_change() -> None:
    small = Size(busy=0.6, bytes=100, min_workers=1, max_workers=1)
    packing = pack([Demand("giant", 0.1, 101), Demand("a", 0.1, 80), Demand("b", 0.1, 80)], small)
    assert "takes 101 bytes, and a worker has 100 for models" in packing.unplaced["giant"]
    assert "raise maxWorkers" in packing.unplaced["b"]


def test_more_time_than_there_is_crowds_workers_and_leaves_no_model_out() -> None:
    small = Size(busy=0.5, bytes=100, min_workers=1, max_workers=2)
    packing = pack([Demand(name, 0.4, 30) for name in "abc"], small)
    assert not packing.unplaced
    assert len(packing.crowded) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Demand("a", -0.1, 1),
        lambda: Demand("a", math.nan, 1),
        lambda: Demand("a", 0.1, -1),
        lambda: Demand("a", 0.1, 1, copies=0),
        lambda: Size(0.0, 1, 0, 1),
        lambda: Size(0.5, 0, 0, 1),
        lambda: Size(0.5, 1, 2, 1),
        lambda: pack([Demand("a", 0.1, 1), Demand("a", 0.2, 1)], SIZE),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(InvalidArgumentError):
        wrong()
