"""The work queue: nothing is lost, nothing runs twice at once, failures back off."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offramp_core.errors import UnavailableError
from offramp_operator.kube.client import ApiUnavailableError
from offramp_operator.kube.queue import FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, Schedule, WorkQueue

KEYS = st.sampled_from("abc")


class ScheduleMachine(RuleBasedStateMachine):
    """The schedule against the plainest model: a dictionary of due times and a set of keys in work."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[str] = Schedule()
        self.due: dict[str, float] = {}
        self.running: set[str] = set()
        self.now = 0.0

    @rule(key=KEYS, delay=st.integers(0, 20))
    def add(self, key: str, delay: int) -> None:
        at = self.now + delay
        self.schedule.add(key, at=at)
        self.due[key] = min(at, self.due.get(key, math.inf))

    @rule(seconds=st.integers(0, 10))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        waiting = {key: at for key, at in self.due.items() if key not in self.running}
        earliest = min(waiting.values(), default=math.inf)
        taken = self.schedule.take(self.now)
        if earliest > self.now:
            assert taken is None
        else:
            assert taken is not None and waiting[taken] == earliest
            del self.due[taken]
            self.running.add(taken)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def done(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(key)
        self.schedule.done(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), jitter=st.floats(0, 0.999))
    def fail(self, data: Any, jitter: float) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        wait = self.schedule.failed(key, now=self.now, jitter=jitter)
        assert FIRST_BACKOFF_SECONDS / 2 <= wait <= LAST_BACKOFF_SECONDS
        self.due[key] = min(self.now + wait, self.due.get(key, math.inf))
        self.running.remove(key)
        self.schedule.done(key)

    @invariant()
    def knows_when_to_wake(self) -> None:
        waiting = [at for key, at in self.due.items() if key not in self.running]
        assert self.schedule.next_at() == min(waiting, default=None)
        assert len(self.schedule) == len(self.due)


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)


def test_backoff_doubles_to_its_limit_and_starts_anew_after_a_success() -> None:
    schedule: Schedule[str] = Schedule()
    waits = []
    for _ in range(9):
        schedule.add("a", at=0)
        assert schedule.take(0) == "a"
        waits.append(schedule.failed("a", now=0, jitter=1.0))
        schedule.done("a")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    schedule.succeeded("a")
    schedule.add("a", at=0)
    schedule.take(0)
    assert schedule.failed("a", now=0, jitter=1.0) == 1


@given(st.integers(1, 5000))
def test_backoff_never_overflows(failures: int) -> None:
    schedule: Schedule[str] = Schedule()
    for _ in range(min(failures, 50)):
        schedule.add("a", at=0)
        schedule.take(0)
        wait = schedule.failed("a", now=0, jitter=0.5)
        schedule.done("a")
    assert wait <= LAST_BACKOFF_SECONDS


def test_whoever_asks_to_be_left_alone_longer_is() -> None:
    schedule: Schedule[str] = Schedule()
    schedule.add("a", at=0)
    schedule.take(0)
    assert schedule.failed("a", now=0, jitter=0.0, at_least=7.0) == 7.0


def _queue(work: Any, failures: list[Any] | None = None, *, workers: int = 2) -> WorkQueue[str]:
    told = failures if failures is not None else []
    return WorkQueue(
        work,
        on_failure=lambda key, error, wait: told.append((key, error, wait)),
        workers=workers,
        clock=asyncio.get_running_loop().time,
        jitter=lambda: 0.0,
    )


def test_a_key_added_while_in_work_runs_once_more_afterwards(tools: Any) -> None:
    async def story() -> None:
        started, release, runs = asyncio.Event(), asyncio.Event(), []

        async def work(key: str) -> None:
            runs.append(key)
            if len(runs) == 1:
                started.set()
                await release.wait()

        queue = _queue(work, workers=4)
        running = asyncio.create_task(queue.run())
        queue.add("a")
        await started.wait()
        for _ in range(5):
            queue.add("a")
        queue.add("b")
        await tools.eventually(lambda: "b" in runs, what="the other key's turn")
        assert runs.count("a") == 1, "a key must not be in work twice"
        release.set()
        await tools.eventually(lambda: runs.count("a") == 2, what="the second run")
        await tools.eventually(lambda: len(queue) == 0, what="an empty queue")
        queue.stop()
        await running
        assert runs.count("a") == 2

    tools.run(story())


def test_a_pass_comes_back_when_it_asked_to(tools: Any) -> None:
    async def story() -> None:
        runs: list[str] = []

        async def work(key: str) -> float | None:
            runs.append(key)
            return 0.01 if len(runs) < 4 else None

        queue = _queue(work)
        running = asyncio.create_task(queue.run())
        queue.add("a")
        await tools.eventually(lambda: len(runs) == 4, what="four passes")
        assert len(queue) == 0
        queue.stop()
        await running

    tools.run(story())


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_keys_are_in_work_at_once_than_there_are_workers_and_all_have_their_turn(
    tools: Any, workers: int
) -> None:
    async def story() -> None:
        done: list[str] = []
        at_once = [0]

        async def work(key: str) -> None:
            at_once.append(at_once[-1] + 1)
            await asyncio.sleep(0)
            at_once.append(at_once[-1] - 1)
            done.append(key)

        queue = _queue(work, workers=workers)
        running = asyncio.create_task(queue.run())
        keys = [f"service-{n}" for n in range(50)]
        for key in keys:
            queue.add(key)
        await tools.eventually(lambda: len(done) == len(keys), what="every key's turn")
        assert sorted(done) == sorted(keys) and max(at_once) == workers
        queue.stop()
        await running

    tools.run(story())


@pytest.mark.parametrize(
    ("error", "wait"),
    [(ValueError("broken"), 0.5), (UnavailableError("down"), 0.5), (ApiUnavailableError("busy", 9.0), 9.0)],
)
def test_a_failure_is_told_and_keeps_the_others_going(tools: Any, error: Exception, wait: float) -> None:
    async def story() -> None:
        failures: list[Any] = []
        done: list[str] = []

        async def work(key: str) -> None:
            if key == "bad":
                raise error
            done.append(key)

        queue = _queue(work, failures)
        running = asyncio.create_task(queue.run())
        queue.add("bad")
        queue.add("good")
        await tools.eventually(lambda: bool(failures) and bool(done), what="both keys")
        assert failures == [("bad", error, wait)]
        assert len(queue) == 1, "the failed key waits for its next attempt"
        queue.stop()
        await running

    tools.run(story())


def test_stopping_lets_the_work_in_hand_end_and_starts_nothing_new(tools: Any) -> None:
    async def story() -> None:
        started, release, ended = asyncio.Event(), asyncio.Event(), []

        async def work(key: str) -> None:
            started.set()
            await release.wait()
            ended.append(key)

        queue = _queue(work, workers=1)
        running = asyncio.create_task(queue.run())
        queue.add("a")
        queue.add("b")
        await started.wait()
        assert queue.longest_running_seconds() >= 0
        queue.stop()
        release.set()
        await running
        assert ended == ["a"]

    tools.run(story())
