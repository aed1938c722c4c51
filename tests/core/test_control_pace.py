"""A new worker image over a fleet: who goes first, how many at a time, and where it ends when it is bad."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.workers.pace import FEWEST_AT_ONCE, MOST_SHARE, PROVEN_SECONDS, Member, at_once, next_turns

NOW = 1_000_000.0
LONG_AGO = NOW - PROVEN_SECONDS
WAITS = Member(waits=True, ready=1)
PROVEN = Member(done_at=LONG_AGO, ready=2)


def test_one_goes_first_and_the_fleet_follows_when_it_is_proven() -> None:
    fleet = {f"s{i}": WAITS for i in range(10)}
    assert next_turns(fleet, NOW).may_go == {"s0"}
    fleet["s0"] = Member(done_at=NOW - 1)
    assert next_turns(fleet, NOW).may_go == frozenset(), "ready is not proven"
    assert next_turns(fleet, NOW + PROVEN_SECONDS).may_go == {"s1"}


def test_the_first_is_one_that_notices_and_loses_little() -> None:
    fleet = {
        "interrupted": replace(WAITS, goes_first=True, busy=True, spare=True),
        "alone": replace(WAITS, busy=True, spare=True),
        "idle": replace(WAITS, ready=3, spare=True),
        "full": replace(WAITS, ready=3, busy=True),
        "best": replace(WAITS, ready=3, busy=True, spare=True),
        "larger": replace(WAITS, ready=5, busy=True, spare=True),
    }
    order = []
    while fleet:
        (name,) = next_turns(fleet, NOW).may_go
        order.append(name)
        del fleet[name]
    assert order == ["larger", "best", "idle", "full", "alone", "interrupted"]


def test_a_failure_stops_everybody_else_until_it_is_cured_or_something_else_is_asked_for() -> None:
    fleet = {**{f"p{i}": PROVEN for i in range(20)}, "bad": Member(failure="it crashes"), "next": WAITS}
    stopped = next_turns(fleet, NOW)
    assert (stopped.may_go, stopped.failed) == (frozenset(), {"bad": "it crashes"})
    assert next_turns({**fleet, "bad": PROVEN}, NOW).may_go == {"next"}
    another = {name: replace(member, waits=True) for name, member in fleet.items()}
    assert next_turns(another, NOW).may_go == {"bad"}, "it has nothing to lose, and tells the most"


@pytest.mark.parametrize(
    "member", [Member(counts=False), Member(counts=False, failure="the user's own bundle")], ids=str
)
def test_what_a_user_changes_neither_proves_nor_stops_anything(member: Member) -> None:
    assert next_turns({"theirs": member, "next": WAITS}, NOW).may_go == {"next"}


MEMBERS = st.dictionaries(
    st.uuids().map(str),
    st.builds(
        Member,
        waits=st.booleans(),
        counts=st.booleans(),
        done_at=st.none() | st.floats(NOW - 1000, NOW),
        failure=st.sampled_from(["", "", "", "x"]),
        ready=st.integers(0, 5),
        busy=st.booleans(),
        spare=st.booleans(),
        goes_first=st.booleans(),
    ),
    max_size=60,
)


@given(MEMBERS)
def test_never_more_are_touched_than_the_proven_ones_allow_and_none_beside_a_failure(fleet: dict[str, Member]) -> None:
    turns = next_turns(fleet, NOW)
    assert all(fleet[name].waits for name in turns.may_go)
    sound = [name for name in turns.may_go if not fleet[name].failure]
    assert not (turns.failed and sound)
    under_way = turns.standing["UnderWay"]
    assert not sound or under_way + len(turns.may_go) <= max(1, turns.standing["Proven"])
    assert not sound or under_way + len(turns.may_go) <= max(FEWEST_AT_ONCE, MOST_SHARE * len(fleet))
    assert sum(turns.standing.values()) == len(fleet)


@given(n=st.integers(1, 100), bad=st.sets(st.integers(0, 99), max_size=3), seconds=st.integers(1, 90))
def test_a_sound_image_gets_everywhere_and_a_bad_one_no_further_than_those_under_way(
    n: int, bad: set[int], seconds: int
) -> None:
    """``bad`` services fail with it, all others are available after ``seconds``; the operator forgets everything all
    the time."""
    taken_at: dict[str, float] = {}
    names = [f"{i:03}" for i in range(n)]

    def member(name: str, now: float) -> Member:
        if name not in taken_at:
            return Member(waits=True, ready=2, busy=int(name) % 2 == 0)
        done = taken_at[name] + seconds
        if int(name) in bad:
            return Member(failure="x" if now >= done else "")
        return Member(done_at=done if now >= done else None, ready=2)

    now = NOW
    for _ in range(3000):
        turns = next_turns({name: member(name, now) for name in names}, now)
        for name in turns.may_go:
            taken_at[name] = now
        now += 10
        if len(taken_at) == n or turns.failed:
            break
    failing = [name for name in taken_at if int(name) in bad]
    if failing:
        assert len(taken_at) <= 2 * at_once(len(taken_at), n) + len(
            [t for t in taken_at.values() if t < min(taken_at[f] for f in failing)]
        )
    else:
        assert len(taken_at) == n


def test_two_thousand_services_are_reached_in_rounds_and_not_one_by_one() -> None:
    proven, rounds = 0, 0
    while proven < 2000:
        proven, rounds = proven + at_once(proven, 2000), rounds + 1
    assert rounds < 30
