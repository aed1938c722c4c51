"""From the workers that there are to those that are planned: nobody is left without workers on the way, and no pool is
asked for more than it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.errors import InvalidArgumentError
from offramp_core.fleet import Key, Pool, Present, Step, Workers, next_steps

A, B = "a", "b"


def pools(a: int = 10, b: int = 10) -> list[Pool]:
    return [Pool(name=n, cost_per_hour=1.0, max_workers=most, worker_memory_bytes=1) for n, most in ((A, a), (B, b))]


def key(plan: str = "exits", pool: str = A) -> Key:
    return Key(plan=plan, pool=pool, batch_size=1)


def some(count: int, plan: str = "exits", pool: str = A) -> tuple[Workers, ...]:
    return (Workers(key=key(plan, pool), count=count),)


def after(present: Present, step: Step, *, starts_are_done: bool = True) -> Present:
    """What a step makes of what was there."""
    ready = Counter({w.key: w.count for w in present.ready})
    starting = Counter({w.key: w.count for w in present.starting})
    for switch in step.switch:
        where = starting if switch.starting else ready
        where[switch.before] -= switch.count
        where[switch.after] += switch.count
    ready.subtract({w.key: w.count for w in step.stop})
    starting.subtract({w.key: w.count for w in step.stop_starting})
    assert min([*ready.values(), *starting.values(), 0]) == 0, "nothing is taken that is not there"
    starting.update({w.key: w.count for w in step.start})
    if starts_are_done:
        ready, starting = ready + starting, Counter()
    return Present(
        ready=tuple(Workers(key=k, count=n) for k, n in ready.items() if n),
        starting=tuple(Workers(key=k, count=n) for k, n in starting.items() if n),
    )


def test_another_plan_on_the_same_pool_is_a_switch_and_starts_nothing() -> None:
    step = next_steps({"s": Present(ready=some(3, "slow"))}, {"s": some(3, "fast")}, pools())["s"]
    assert [(s.before.plan, s.after.plan, s.count, s.starting) for s in step.switch] == [("slow", "fast", 3, False)]
    assert not step.start and not step.stop


def test_what_still_starts_is_switched_as_well() -> None:
    present = Present(ready=some(1, "slow"), starting=some(2, "slow"))
    step = next_steps({"s": present}, {"s": some(3, "fast")}, pools())["s"]
    assert sorted((s.count, s.starting) for s in step.switch) == [(1, False), (2, True)]


def test_old_workers_go_only_once_the_new_ones_of_another_pool_answer() -> None:
    old, new = some(3), some(2, pool=B)
    present = Present(ready=old)
    first = next_steps({"s": present}, {"s": new}, pools())["s"]
    assert first.start == new and not first.stop
    meanwhile = after(present, first, starts_are_done=False)
    assert not next_steps({"s": meanwhile}, {"s": new}, pools())["s"]
    last = next_steps({"s": after(present, first)}, {"s": new}, pools())["s"]
    assert last.stop == old


def test_fewer_workers_go_at_once_and_those_that_never_answered_first() -> None:
    present = Present(ready=some(3), starting=some(2))
    step = next_steps({"s": present}, {"s": some(3)}, pools())["s"]
    assert step == Step(stop_starting=some(2))
    assert next_steps({"s": Present(ready=some(3))}, {"s": some(1)}, pools())["s"] == Step(stop=some(2))


def test_starts_wait_for_room_that_others_leave() -> None:
    present = {"leaves": Present(ready=some(3)), "comes": Present()}
    planned = {"leaves": some(1, pool=B), "comes": some(3)}
    first = next_steps(present, planned, pools(a=4))
    assert first["leaves"].start == some(1, pool=B)
    assert first["comes"].start == some(1)
    now = {name: after(present[name], step) for name, step in first.items()}
    second = next_steps(now, planned, pools(a=4))
    assert second["leaves"].stop == some(3)
    assert second["comes"].start == some(2)


def test_two_services_that_want_each_others_full_pool_do_not_wait_for_ever() -> None:
    present = {"one": Present(ready=some(2)), "two": Present(ready=some(2, pool=B))}
    planned = {"one": some(2, pool=B), "two": some(2)}
    for _ in range(6):
        steps = next_steps(present, planned, pools(2, 2))
        present = {name: after(present[name], step) for name, step in steps.items()}
    assert {name: p.ready for name, p in present.items()} == planned


def test_a_pool_that_shrank_loses_what_is_not_planned_at_once() -> None:
    present = {"s": Present(ready=(*some(3), *some(1, pool=B)))}
    steps = next_steps(present, {"s": (*some(1), *some(3, pool=B))}, pools(a=1))
    assert steps["s"].stop == some(2)


def test_a_service_that_is_not_planned_any_more_keeps_nothing() -> None:
    assert next_steps({"gone": Present(ready=some(2))}, {}, pools())["gone"].stop == some(2)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="planned asks a for 11 workers; it has 10"):
        next_steps({}, {"s": some(11)}, pools())


COUNTS = st.tuples(*[st.integers(0, 3)] * 4)


def at(counts: tuple[int, ...]) -> tuple[Workers, ...]:
    keys = [key(plan, pool) for plan in ("slow", "fast") for pool in (A, B)]
    return tuple(Workers(key=k, count=n) for k, n in zip(keys, counts, strict=True) if n)


@given(st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=3))
def test_every_plan_is_reached_and_no_pool_is_overdrawn_on_the_way(services: list[tuple[tuple[int, ...], ...]]) -> None:
    present = {str(i): Present(ready=at(now)) for i, (now, _) in enumerate(services)}
    planned = {str(i): at(then) for i, (_, then) in enumerate(services)}

    def used(name: str) -> int:
        every = [w for p in present.values() for w in (*p.ready, *p.starting)]
        return sum(w.count for w in every if w.key.pool == name)

    def asked(name: str) -> int:
        return sum(w.count for workers in planned.values() for w in workers if w.key.pool == name)

    room = pools(*(max(used(name), asked(name)) for name in (A, B)))
    for turn in range(40):
        steps = next_steps(present, planned, room)
        present = {name: after(present[name], step, starts_are_done=turn % 2 == 1) for name, step in steps.items()}
        assert all(used(pool.name) <= pool.max_workers for pool in room)
    assert {name: set(p.ready) for name, p in present.items()} == {name: set(w) for name, w in planned.items()}
    assert not any(next_steps(present, planned, room).values())


def test_what_is_there_already_needs_nothing() -> None:
    present = Present(ready=some(2))
    assert next_steps({"s": present}, {"s": some(2)}, pools())["s"] == Step()
    assert not replace(Step(), start=()) and Step(start=some(1))
