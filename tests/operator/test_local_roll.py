"""Replacing workers one by one: what is promised at every moment, and that it gets there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offramp_operator.local.roll import Move, WorkerView, next_move

HEALTH = st.sampled_from([(True, False), (False, False), (False, True)])  # ready, starting, failed
FLEETS = st.lists(st.tuples(st.booleans(), HEALTH), max_size=8).map(
    lambda kinds: [WorkerView(f"w{i}", current, *health) for i, (current, health) in enumerate(kinds)]
)
REPLICAS = st.integers(0, 5)


@given(workers=FLEETS, replicas=REPLICAS)
def test_a_move_never_takes_capacity_that_is_wanted(workers: list[WorkerView], replicas: int) -> None:
    move = next_move(workers, replicas)
    ready_before = sum(w.ready for w in workers)
    ready_after = sum(w.ready for w in workers if w.name not in move.stop)
    assert ready_after >= min(ready_before, replicas)


@given(workers=FLEETS, replicas=REPLICAS)
def test_a_move_never_starts_more_than_one_above_what_is_wanted(workers: list[WorkerView], replicas: int) -> None:
    move = next_move(workers, replicas)
    kept = [w for w in workers if w.name not in move.stop]
    assert len([w for w in kept if w.current]) + move.start <= replicas
    if any(w.ready and not w.current for w in workers):
        assert move.start <= 1


@given(workers=FLEETS, replicas=REPLICAS)
def test_when_every_new_worker_becomes_ready_the_fleet_arrives_and_then_rests(
    workers: list[WorkerView], replicas: int
) -> None:
    for step in range(40):
        move = next_move(workers, replicas)
        if move == Move() and all(w.ready for w in workers if w.current):
            break
        workers = [w for w in workers if w.name not in move.stop]
        workers = [WorkerView(w.name, w.current, w.ready or w.current) for w in workers]
        workers += [WorkerView(f"new{step}.{i}", current=True, ready=False) for i in range(move.start)]
    assert [(w.current, w.ready) for w in workers] == [(True, True)] * replicas


@given(replicas=st.integers(1, 5))
def test_a_new_worker_that_never_serves_leaves_all_old_ones_in_place(replicas: int) -> None:
    old = [WorkerView(f"old{i}", current=False, ready=True) for i in range(replicas)]
    assert next_move(old, replicas) == Move(start=1)
    assert next_move([*old, WorkerView("new", current=True, ready=False)], replicas) == Move()


def test_an_attempt_that_was_given_up_for_a_newer_template_is_stopped() -> None:
    workers = [
        WorkerView("old", current=False, ready=True),
        WorkerView("failed", current=False, ready=False, failed=True),
    ]
    assert next_move(workers, 1) == Move(start=1, stop=("failed",))


def test_old_workers_that_are_just_starting_again_are_waited_for() -> None:
    workers = [WorkerView(name, current=False, ready=False) for name in "ab"]
    assert next_move(workers, 2) == Move(start=1)
    failing = WorkerView("new", current=True, ready=False, failed=True)
    assert next_move([*workers, failing], 2) == Move()
    arrived = [WorkerView(name, current=True, ready=True) for name in "cd"]
    assert next_move([*workers, *arrived], 2) == Move(stop=("a", "b"))


def test_the_first_workers_start_together() -> None:
    assert next_move([], 3) == Move(start=3)


def test_scaling_down_takes_those_that_do_not_serve_first_then_the_youngest() -> None:
    workers = [WorkerView(n, current=True, ready=r) for n, r in (("a", True), ("b", False), ("c", True))]
    assert next_move(workers, 2).stop == ("b",)
    assert next_move(workers, 1).stop == ("b", "c")
    assert next_move(workers, 0).stop == ("b", "c", "a")


# --- in place: an old worker goes before the new one starts ------------------------------------------


@given(workers=FLEETS, replicas=st.integers(1, 5), leaving=st.integers(0, 2))
def test_in_place_at_most_one_serving_worker_is_missing_and_no_process_is_too_many(
    workers: list[WorkerView], replicas: int, leaving: int
) -> None:
    move = next_move(workers, replicas, surge=False, leaving=leaving)
    ready_before = sum(w.ready for w in workers)
    ready_after = sum(w.ready for w in workers if w.name not in move.stop)
    assert ready_after >= min(ready_before, replicas - 1)
    if move.start and (leaving or any(not w.current for w in workers)):
        assert len(workers) + leaving + move.start <= replicas


@given(workers=FLEETS, replicas=st.integers(0, 5))
def test_in_place_the_fleet_arrives_and_then_rests_when_every_new_worker_becomes_ready(
    workers: list[WorkerView], replicas: int
) -> None:
    for step in range(60):
        move = next_move(workers, replicas, surge=False)
        if move == Move() and all(w.ready for w in workers if w.current):
            break
        workers = [w for w in workers if w.name not in move.stop]
        workers = [WorkerView(w.name, w.current, w.ready or w.current) for w in workers]
        workers += [WorkerView(f"new{step}.{i}", current=True, ready=False) for i in range(move.start)]
    assert [(w.current, w.ready) for w in workers] == [(True, True)] * replicas


def test_in_place_a_new_worker_that_never_serves_costs_one_and_no_more() -> None:
    old = [WorkerView(f"old{i}", current=False, ready=True) for i in range(3)]
    assert next_move(old, 3, surge=False) == Move(stop=("old0",))
    assert next_move(old[1:], 3, surge=False, leaving=1) == Move(), "memory is free only when the old process has ended"
    assert next_move([], 1, surge=False, leaving=1) == Move(), "nor does the only one make room before it has"
    assert next_move(old[1:], 3, surge=False) == Move(start=1)
    for health in ({"ready": False}, {"ready": False, "failed": True}):
        assert next_move([*old[1:], WorkerView("new", current=True, **health)], 3, surge=False) == Move()


def test_in_place_going_back_ends_the_failed_one_and_starts_the_old_template_again() -> None:
    workers = [
        WorkerView("kept", current=True, ready=True),
        WorkerView("failed", current=False, ready=False, failed=True),
    ]
    assert next_move(workers, 2, surge=False) == Move(stop=("failed",))
    assert next_move(workers[:1], 2, surge=False) == Move(start=1)
