"""Where a worker has one processor the event loop runs the models' batches itself, one by one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import bundles
import pytest
from engines import new_engine

from offramp_core.sharing import WINDOW_SECONDS
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.accounts.audits import BACKLOG_LIMIT, MAX_CHUNK
from offramp_worker.engine.arms.arms import Active
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.turns import SharedExecutor
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.front import Front
from offramp_worker.http.tensors import InferRequest
from offramp_worker.shared.looped import LoopTurns

DEADLINE_SECONDS = 90


@dataclass
class World:
    """Two engines on an executor of which one has had all of late, and who was answered in which order."""

    bundle: Bundle
    sessions: Sessions
    now: float = 0.0
    order: list[str] = field(default_factory=list)
    engines: dict[str, Engine] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    #: Called with the first answer, while its batch runs.
    on_first: Callable[[], object] = lambda: None

    def run(self, story: Callable[[World], Awaitable[None]]) -> list[str]:
        async def told() -> None:
            self.executor = SharedExecutor({"flood": 1.0, "other": 1.0}, clock=lambda: self.now)
            turns = LoopTurns(self.executor)
            for name in ("flood", "other"):
                turn, deliver = self.executor.turn(name, ask=turns.ask), partial(self.deliver, name)
                self.engines[name] = new_engine(self.bundle, self.sessions, deliver=deliver, turn=turn, **self.options)
                self.engines[name].start()
            for name, seconds in (("other", 0.01 * WINDOW_SECONDS), ("flood", WINDOW_SECONDS)):
                with self.executor.turn(name):
                    self.now += seconds
            await asyncio.wait_for(story(self), DEADLINE_SECONDS)
            for engine in self.engines.values():
                engine.close()
                assert await asyncio.to_thread(engine.join, DEADLINE_SECONDS)

        asyncio.run(told())
        return self.order

    def ask(self, name: str, rows: int = 1) -> Ticket:
        ticket = self.engines[name].submit(bundles.inputs(rows), never_exit=False, wake=False)
        self.engines[name].serve()
        return ticket

    def deliver(self, name: str, tickets: list[Ticket]) -> None:
        if not self.order:
            self.on_first()
        self.order += [name] * len(tickets)

    async def answers(self, n: int) -> None:
        while len(self.order) < n:
            await asyncio.sleep(0)


def test_who_takes_too_much_waits_for_a_request_that_came_later(bundle: Bundle, sessions: Sessions) -> None:
    async def story(world: World) -> None:
        for _ in range(4):
            world.ask("flood")
        world.ask("other")
        await world.answers(5)

    assert World(bundle, sessions).run(story) == ["other", *["flood"] * 4]


def test_what_the_loop_reads_between_two_batches_comes_before_the_next_one(bundle: Bundle, sessions: Sessions) -> None:
    async def story(world: World) -> None:
        for _ in range(4):
            world.ask("flood")
        await world.answers(1)
        world.ask("other")
        await world.answers(5)

    assert World(bundle, sessions).run(story) == ["flood", "other", *["flood"] * 3]


def test_a_request_that_is_read_behind_a_batch_is_there_when_the_next_one_is_chosen(
    bundle: Bundle, sessions: Sessions
) -> None:
    async def story(world: World) -> None:
        loop, request = asyncio.get_running_loop(), InferRequest(bundles.inputs(1), None, False, math.inf, ())
        read = partial(Front(loop).submit, world.engines["other"], request, done=lambda _: None)
        world.on_first = lambda: loop.call_soon(read)
        for _ in range(3):
            world.ask("flood")
        await world.answers(4)

    assert World(bundle, sessions).run(story) == ["flood", "other", "flood", "flood"]


def test_the_loop_waits_for_a_thread_that_has_the_executor(bundle: Bundle, sessions: Sessions) -> None:
    async def story(world: World) -> None:
        turn = world.executor.turn("other")
        await asyncio.to_thread(turn.acquire)
        world.ask("flood")
        for _ in range(10):
            await asyncio.sleep(0)
        assert not world.order
        await asyncio.to_thread(turn.release)
        await world.answers(1)

    assert World(bundle, sessions).run(story) == ["flood"]


def test_requests_of_an_engine_that_closes_are_answered(bundle: Bundle, sessions: Sessions) -> None:
    async def story(world: World) -> None:
        for _ in range(3):
            world.ask("other")
        world.engines["other"].close()

    assert World(bundle, sessions).run(story) == ["other"] * 3


def test_audits_take_precedence_where_too_many_wait_though_requests_always_do(
    bundle: Bundle, sessions: Sessions
) -> None:
    n, most = 2 * BACKLOG_LIMIT, 0

    async def story(world: World) -> None:
        nonlocal most
        engine = world.engines["other"]
        engine.activate(Active(replace(engine.active.off, audit_rate=1.0)))
        for _ in range(n):
            world.ask("other")
        while len(world.order) < n:
            await asyncio.sleep(0)
            most = max(most, len(engine.desk))

    World(bundle, sessions).run(story)
    assert BACKLOG_LIMIT // 2 < most <= BACKLOG_LIMIT + MAX_CHUNK


def test_requests_that_wait_for_a_batch_to_fill_are_answered(bundle: Bundle, sessions: Sessions) -> None:
    async def story(world: World) -> None:
        world.ask("other")
        await world.answers(1)

    assert World(bundle, sessions, options={"batching": "tf-serving"}).run(story) == ["other"]


def test_who_waited_for_the_answer_of_a_request_that_ran_out_of_time_is_answered(
    bundle: Bundle, sessions: Sessions
) -> None:
    async def story(world: World) -> None:
        engine = world.engines["other"]
        engine._batcher.wake = lambda: None  # type: ignore[method-assign]  # its thread is busy
        first, _ = world.ask("other"), world.ask("other")
        engine._batcher._give_up(first)
        await world.answers(2)

    assert World(bundle, sessions, options={"cache_bytes": 1 << 20}).run(story) == ["other"] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("step", ["claim", "take"])
def test_an_engine_that_breaks_is_told_and_the_others_go_on(bundle: Bundle, sessions: Sessions, step: str) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError

    async def story(world: World) -> None:
        engine = world.engines["flood"]
        setattr(engine._batcher, step, broken)
        world.ask("flood")
        world.ask("other")
        await world.answers(1)
        while engine.alive:
            await asyncio.sleep(0)
        world.ask("flood")
        world.ask("other")
        await world.answers(2)

    assert World(bundle, sessions).run(story) == ["other"] * 2
