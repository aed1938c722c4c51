"""Who runs next on a shared executor and which models leave memory: shares, starvation, work conservation, brute
force."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.errors import InvalidArgumentError
from offramp_core.sharing import QUANTUM_SECONDS, Claim, Held, Popularity, Shares, evicted, next_turn

LONGEST = 0.05  # seconds of a batch in these simulations
seconds = st.floats(0.001, LONGEST)
weights = st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6)


@dataclass
class World:
    """An executor in simulated time; each model has a queue of (arrival, due, seconds)."""

    shares: Shares
    now: float = 0.0
    ran: dict[str, float] = field(default_factory=dict)
    log: list[tuple[str, float, frozenset[str]]] = field(default_factory=list)

    def turn(self, claims: dict[str, Claim], took: float, *, still: set[str]) -> str:
        """One batch: who is chosen runs for ``took``; ``still`` have work when it ends."""
        chosen = next_turn(claims, self.shares)
        assert chosen in claims, "only who has work may run, and somebody always does"
        self.log.append((chosen, took, frozenset(claims)))
        self.now += took
        self.ran[chosen] = self.ran.get(chosen, 0.0) + took
        self.shares = self.shares.after(chosen, took, working=still)
        return chosen


@given(weights, st.data())
def test_who_always_has_work_gets_its_share_whatever_is_due(shares: list[float], data: st.DataObject) -> None:
    given_weights = {f"m{i}": weight for i, weight in enumerate(shares)}
    world = World(Shares(given_weights))
    for _ in range(data.draw(st.integers(20, 150))):
        claims = {name: Claim(due=world.now + data.draw(st.floats(-5, 5))) for name in given_weights}
        world.turn(claims, data.draw(seconds), still=set(given_weights))
    for name, weight in given_weights.items():
        fair = world.now * weight / sum(shares)
        assert world.ran.get(name, 0.0) <= fair + QUANTUM_SECONDS + LONGEST
        assert world.ran.get(name, 0.0) >= fair - len(shares) * (QUANTUM_SECONDS + LONGEST)


@given(weights, st.data())
def test_nobody_starves_even_if_nobody_waits_for_its_work(shares: list[float], data: st.DataObject) -> None:
    """Audits are due never. What they may wait is time by their share, and a turn of everybody who is owed more."""
    given_weights = {f"m{i}": weight for i, weight in enumerate(shares)}
    world, waited, longest = World(Shares(given_weights)), 0.0, 0.0
    for _ in range(data.draw(st.integers(20, 150))):
        claims = {name: Claim(due=-math.inf) for name in given_weights} | {"m0": Claim(due=math.inf)}
        took = data.draw(seconds)
        waited = 0.0 if world.turn(claims, took, still=set(given_weights)) == "m0" else waited + took
        longest = max(longest, waited)
    share = shares[0] / sum(shares)
    assert longest <= (2 * QUANTUM_SECONDS + LONGEST) / share + len(shares) * (QUANTUM_SECONDS + LONGEST) / share


@given(st.integers(1, 5), st.data())
def test_a_flood_never_begins_a_batch_before_those_within_their_share_once_it_had_its_own(
    others: int, data: st.DataObject
) -> None:
    """The others ask for at most half of their shares, in batches, at any time and due late; the flood is due first."""
    names = [f"m{i}" for i in range(others)]
    world = World(Shares(dict.fromkeys(["flood", *names], 1.0)))
    owed = dict.fromkeys(names, 0.0)  # of time at half a share
    waiting: dict[str, tuple[float, float]] = {}
    for _ in range(data.draw(st.integers(30, 150))):
        for name in names:
            wants = data.draw(st.floats(0.001, 0.02))
            if name not in waiting and owed[name] >= wants and data.draw(st.booleans()):
                waiting[name], owed[name] = (world.now, wants), owed[name] - wants
        claims = {"flood": Claim(due=-1e9)} | {name: Claim(due=since + 10.0) for name, (since, _) in waiting.items()}
        took = {"flood": data.draw(seconds)} | {name: wants for name, (_, wants) in waiting.items()}
        before = world.shares.of("flood")
        chosen = next_turn(claims, world.shares)
        within = [name for name in waiting if world.shares.of(name) >= -QUANTUM_SECONDS]
        if chosen == "flood" and within:
            assert before >= -QUANTUM_SECONDS, "it had more than its share, and they had not"
        waiting.pop(chosen, None)
        world.turn(claims, took[chosen], still={"flood", *waiting})
        for name in names:
            owed[name] = min(0.02, owed[name] + took[chosen] / (others + 1) / 2)


def test_within_their_shares_the_least_slack_runs() -> None:
    equal = Shares({"a": 1.0, "b": 1.0})
    assert next_turn({"a": Claim(due=5.0, seconds=1.0), "b": Claim(due=5.5, seconds=2.0)}, equal) == "b"
    assert next_turn({"a": Claim(due=5.0), "b": Claim(due=math.inf)}, equal) == "a"


def test_time_that_nobody_else_asked_for_costs_no_credit() -> None:
    alone = Shares({"a": 1.0, "b": 3.0}).after("a", 60.0, working=set())
    assert alone.of("a") == 0.0 and alone.of("b") == 0.0
    contended = alone.after("a", 0.04, working={"a", "b"})
    assert contended.of("a") == pytest.approx(-0.03) and contended.of("b") == pytest.approx(0.03)
    left = contended.after("a", 0.01, working={"a"})
    assert left.of("b") == 0.0, "who asks for nothing is owed nothing"


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
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
