"""Who runs next on a shared executor and which models leave memory: shares, starvation, work conservation, brute
force."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.errors import InvalidArgumentError
from offramp_core.sharing import WINDOW_SECONDS, Claim, Held, Popularity, Shares, Turn, evicted, next_turn
from offramp_core.sharing.turns import NEARLY_FULL, QUANTUM_DEAREST, SURPLUS_DEAREST

LONGEST = 0.05  # seconds of a batch in these simulations
seconds = st.floats(0.001, LONGEST)
rngs = st.integers(0, 2**32).map(random.Random)
weights = st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6)


@dataclass
class World:
    """An executor in simulated time."""

    shares: Shares
    now: float = 0.0
    ran: dict[str, float] = field(default_factory=dict)

    def turn(self, claims: dict[str, Claim], took: dict[str, float]) -> str:
        """One batch: who is chosen runs for what it takes."""
        chosen = next_turn(claims, self.shares, now=self.now)
        assert chosen in claims, "only who has work may run, and somebody always does"
        self.now += took[chosen]
        self.ran[chosen] = self.ran.get(chosen, 0.0) + took[chosen]
        self.shares = self.shares.after(chosen, took[chosen], now=self.now)
        return chosen


def run_for(world: World, length: float, claims: Callable[[float], dict[str, Claim]], rng: random.Random) -> list[str]:
    """Batches until a time has passed; who ran."""
    ran, end = [], world.now + length
    while world.now < end:
        asked = claims(world.now)
        ran.append(world.turn(asked, {name: rng.uniform(0.001, LONGEST) for name in asked}))
    return ran


@given(weights, rngs)
def test_who_always_has_work_gets_its_share_whatever_is_due(shares: list[float], rng: random.Random) -> None:
    """Four fifths of it at least: so much of the time is shared out before what is left goes by what is due."""
    given_weights = {f"m{i}": weight for i, weight in enumerate(shares)}
    world = World(Shares(given_weights))
    run_for(world, 10.0, lambda now: {name: Claim(now + rng.uniform(-5, 5)) for name in given_weights}, rng)
    for name, weight in given_weights.items():
        fair = world.now * weight / sum(shares)
        assert world.ran.get(name, 0.0) >= NEARLY_FULL * fair - WINDOW_SECONDS - LONGEST


@given(weights, rngs)
def test_nobody_starves_even_if_nobody_waits_for_its_work(shares: list[float], rng: random.Random) -> None:
    """Audits are due never. Others that are always late run before them only until they have had too much."""
    given_weights = {f"m{i}": weight for i, weight in enumerate(shares)}
    claims = {name: Claim(due=-math.inf) for name in given_weights} | {"m0": Claim(due=math.inf)}
    world = World(Shares(given_weights))
    run_for(world, 10.0, lambda now: claims, rng)
    assert world.ran["m0"] >= NEARLY_FULL * world.now * shares[0] / sum(shares) - 2 * WINDOW_SECONDS - LONGEST


@given(st.integers(1, 5), rngs)
def test_others_within_their_share_never_wait_for_a_second_batch_of_a_flood(others: int, rng: random.Random) -> None:
    """They ask for half of their shares, at any time and due late; the flood is due first, and has had its window."""
    names = [f"m{i}" for i in range(others)]
    world = World(Shares(dict.fromkeys(["flood", *names], 1.0)))
    owed, waiting = dict.fromkeys(names, 0.0), dict[str, float]()
    waited = dict.fromkeys(names, 0)
    while world.now < 10.0:
        for name in names:
            wants = rng.uniform(0.001, 0.02)
            if name not in waiting and owed[name] >= wants:
                waiting[name], owed[name], waited[name] = wants, owed[name] - wants, 0
        claims = {"flood": Claim(due=-1e9)} | {name: Claim(due=world.now + 10.0) for name in waiting}
        before = world.now
        chosen = world.turn(claims, waiting | {"flood": rng.uniform(0.001, LONGEST)})
        if chosen == "flood":
            waited = {name: n + (name in waiting) for name, n in waited.items()}
            assert world.now < 2 * WINDOW_SECONDS or max(waited.values()) <= 1
        waiting.pop(chosen, None)
        for name in names:
            owed[name] = min(0.02, owed[name] + (world.now - before) / (others + 1) / 2)


def test_shares_may_be_a_million_to_one() -> None:
    shares = Shares({"a": 1000.0, "b": 0.001}, {"a": 0.3, "b": 0.2})
    assert shares.level(now=0.0) == pytest.approx(0.1 / 0.001)
    assert next_turn({"a": Claim(due=2.0), "b": Claim(due=1.0)}, shares, now=0.0) == "a"


def test_while_there_is_time_to_spare_the_least_slack_runs_whoever_had_more() -> None:
    equal = Shares({"a": 1.0, "b": 1.0}).after("b", 0.2, now=0.2)
    assert next_turn({"a": Claim(due=5.0, seconds=1.0), "b": Claim(due=5.5, seconds=2.0)}, equal, now=0.2) == "b"
    assert next_turn({"a": Claim(due=5.0), "b": Claim(due=math.inf)}, equal, now=0.2) == "a"


def test_the_first_of_a_long_queue_is_no_sooner_due_than_what_has_just_come_to_others() -> None:
    """A flood of as much as the executor can do: what has waited for 30 ms has 30 ms of rows behind it."""
    equal = Shares({"flood": 1.0, "other": 1.0})
    flood, other = Claim(due=1.02, seconds=0.002, behind=0.031), Claim(due=1.05, seconds=0.002)
    assert next_turn({"flood": flood, "other": other}, equal, now=1.0) == "other"
    assert next_turn({"flood": replace(flood, behind=0.0), "other": other}, equal, now=1.0) == "flood"


def test_a_flood_of_less_than_the_executor_can_do_is_late_by_what_the_others_leave_to_it() -> None:
    """The others take half of the time; what comes of the flood in 100 ms takes 30, which the others leave in 100."""
    weights = {"flood": 1.0, "a": 1.0, "b": 1.0}
    shares = Shares(weights, {"flood": 0.1, "a": 0.125, "b": 0.125})
    flood, other = Claim(due=0.95, behind=0.03), Claim(due=1.05)
    assert shares.level(now=1.0) == math.inf, "nobody has had too much yet"
    assert next_turn({"flood": flood, "a": other}, shares, now=0.0) == "a"
    alone = Shares(weights, {"flood": 0.1})
    assert next_turn({"flood": flood, "a": other}, alone, now=0.0) == "flood", "it could have four fifths of the time"


def test_batches_of_a_queue_that_the_others_leave_no_time_for_are_as_short_as_those_of_who_had_too_much() -> None:
    shares = Shares({"flood": 1.0, "other": 1.0}, {"flood": 0.01, "other": 0.2})
    turns = [shares.turn_of("flood", now=0.0, others_wait=True, behind=each) for each in (0.0, 0.01, 0.03)]
    assert turns == [Turn.QUANTUM, Turn.QUANTUM, Turn.SURPLUS]
    assert Shares({"flood": 1.0}).turn_of("flood", now=0.0, others_wait=False, behind=9.0) is Turn.ALONE


def test_a_long_queue_beside_others_that_are_hardly_there_is_answered_in_batches_of_cheap_rows() -> None:
    shares = Shares({"burst": 1.0, "rare": 1.0}, {"burst": 0.45, "rare": 0.002})
    assert shares.of("burst", now=0.0) > shares.level(now=0.0)
    assert shares.turn_of("burst", now=0.0, others_wait=False, behind=1.0) is Turn.THRIFTY
    assert Turn.THRIFTY.rows([0.0, *(0.005 + 0.0001 * n for n in range(32))]) >= 28, "they batch well"
    assert Turn.THRIFTY.rows([0.01 * n for n in range(33)]) == 1, "nothing is gained by more"
    assert shares.turn_of("burst", now=0.0, others_wait=True, behind=1.0) is Turn.SURPLUS, "then it is waited for"
    assert shares.turn_of("burst", now=0.0, others_wait=False) is Turn.QUANTUM, "it needs no more"


@given(st.lists(st.floats(0.0, 0.01), min_size=1, max_size=40), st.floats(1e-4, 0.2))
def test_no_batch_is_so_short_that_its_rows_take_much_longer(rows: list[float], fixed: float) -> None:
    seconds = [0.0, *(fixed + had for had in accumulate(rows))]
    by_row = [each / n for n, each in enumerate(seconds) if n]
    costs = {turn: by_row[turn.rows(seconds) - 1] / min(by_row) for turn in Turn}
    assert costs[Turn.QUANTUM] <= QUANTUM_DEAREST + 1e-9 and costs[Turn.SURPLUS] <= SURPLUS_DEAREST + 1e-9


def test_a_long_queue_does_not_keep_a_model_from_what_it_is_guaranteed() -> None:
    """From the first batch on, on an executor that was idle: ten of 18 shares, eight others."""
    rows, took = {"large": 200, **{f"m{i}": 40 for i in range(8)}}, {"large": 0.005}
    shares = {name: 10.0 if name == "large" else 1.0 for name in rows}
    world, had = World(Shares(shares)), 0.0
    while world.now < 0.5:
        each = {name: took.get(name, 0.002) for name in rows if rows[name]}
        chosen = world.turn({n: Claim(0.05, s, (rows[n] - 1) * s) for n, s in each.items()}, each)
        rows[chosen] -= 1
        had = world.ran.get("large", 0.0)
        assert had >= NEARLY_FULL * world.now * 10 / 18 - 0.005


def test_a_request_does_not_wait_for_what_is_behind_it_until_it_is_of_no_use() -> None:
    claim = Claim(due=1.0, seconds=0.25, behind=5.0, expires=2.0)
    assert claim.first == 0.75
    assert [claim.last(rate=rate) for rate in (1.0, 10.0)] == [1.75, 1.25]
    assert Claim(due=math.inf, behind=5.0).last(rate=1.0) == math.inf


def test_a_popular_model_that_leaves_time_to_the_others_is_not_taken_for_the_flood() -> None:
    shares = Shares(dict.fromkeys("abcd", 1.0))
    for name, had in (("a", 0.02), ("b", 0.03), ("popular", 0.12), ("flood", 0.33)):
        shares = Shares({**shares.weights, name: 1.0}, shares.used).after(name, had, now=0.0)
    assert shares.of("popular", now=0.0) < shares.level(now=0.0) < shares.of("flood", now=0.0)
    claims = {"popular": Claim(due=5.0), "flood": Claim(due=1.0)}
    assert next_turn(claims, shares, now=0.0) == "popular"


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.floats(0.2, 5), st.floats(0.001, 0.5)), min_size=1))
def test_the_level_is_that_of_max_min_fairness(models: dict[str, tuple[float, float]]) -> None:
    """With it everybody gets what it wants or the level by its share, and together that is what there is."""
    used = {name: had for name, (_, had) in models.items()}
    shares = Shares({name: weight for name, (weight, _) in models.items()}, used)
    level = shares.level(now=0.0)
    got = sum(min(used[name], level * weight) for name, (weight, _) in models.items())
    assert got == pytest.approx(min(sum(used.values()), NEARLY_FULL * WINDOW_SECONDS))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan, 1e-300, 1e30])
def test_a_share_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(InvalidArgumentError, match="share of 'a'"):
        Shares({"a": weight})


models = st.lists(
    st.tuples(st.integers(1, 100), st.floats(0.1, 10), st.floats(0, 5), st.booleans()), min_size=0, max_size=7
).map(lambda rows: [Held(f"m{i}", *row) for i, row in enumerate(rows)])


@given(models, st.integers(-10, 300))
def test_evictions_are_enough_and_none_is_needless(held: list[Held], needed: int) -> None:
    """Brute force says whether it can be done at all."""
    may = {model.name: model for model in held if not model.kept}
    possible = any(
        sum(m.size_bytes for m in some) >= needed for n in range(len(may) + 1) for some in combinations(may.values(), n)
    )
    leaving = evicted(held, needed_bytes=needed)
    assert (leaving is not None) == possible
    if leaving is None:
        return
    freed = sum(may[name].size_bytes for name in leaving)
    assert freed >= needed
    assert all(freed - may[name].size_bytes < needed for name in leaving), "each of them is needed"
    assert evicted(list(reversed(held)), needed_bytes=needed) == leaving or len({m.worth for m in held}) < len(held)


def test_popularity_halves_and_does_not_grow_backwards() -> None:
    once = Popularity().after(100.0)
    assert once.rate(700.0) == pytest.approx(once.rate(100.0) / 2)
    assert once.after(700.0).count == pytest.approx(1.5)
    assert once.after(50.0).at == 100.0, "a clock that goes back forgets nothing"
    steady = Popularity()
    for second in range(10_000):
        steady = steady.after(float(second))
    assert steady.rate(10_000.0) == pytest.approx(1.0, rel=0.01), "requests a second"
