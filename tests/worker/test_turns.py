"""One executor, several engines: whose turn is next is decided, and a batch has all that waits by then."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from typing import Any

import bundles
import pytest
from engines import new_engine
from processes import eventually

from offramp_core.batching import exact_seconds
from offramp_core.sharing import WINDOW_SECONDS, Claim, Turn
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.turns import SharedExecutor, SharedTurn
from offramp_worker.engine.queue.tickets import Ticket


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Line:
    """Threads that wait for turns; ``ran`` says in which order they had them."""

    def __init__(self, executor: SharedExecutor, clock: Clock) -> None:
        self.executor, self.clock = executor, clock
        self.ran: list[str] = []
        self.threads: list[threading.Thread] = []

    def wait(self, name: str, due: float, *, seconds: float = 0.0) -> None:
        """One more thread that waits; returns once it does."""
        turn, before = self.executor.turn(name), self._waiting()

        def run() -> None:
            with turn.claimed(Claim(due)):
                self.ran.append(name)
                self.clock.now += seconds

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)
        eventually(lambda: self._waiting() > before, what=f"{name} in line")

    def _waiting(self) -> int:
        return sum(len(line) for line in self.executor._waiting.values())

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join()
        return self.ran


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_of_those_who_wait_the_earliest_due_runs_next(clock: Clock) -> None:
    executor = SharedExecutor(dict.fromkeys("abc", 1.0), clock=clock)
    line = Line(executor, clock)
    with executor.turn("a"):
        line.wait("a", due=3.0)
        line.wait("b", due=2.0)
        line.wait("c", due=1.0)
        line.wait("b", due=math.inf)
    assert line.join() == ["c", "b", "a", "b"]


def test_who_has_had_too_much_waits_for_the_others_whatever_is_due(clock: Clock) -> None:
    executor = SharedExecutor({"flood": 1.0, "other": 1.0}, clock=clock)
    line = Line(executor, clock)
    with executor.turn("flood"):
        line.wait("flood", due=-100.0, seconds=0.05)
        line.wait("flood", due=-99.0, seconds=0.05)
        line.wait("other", due=50.0, seconds=0.05)
        clock.now += WINDOW_SECONDS
    assert line.join() == ["other", "flood", "flood"]
    assert executor.seconds == {"flood": pytest.approx(WINDOW_SECONDS + 0.1), "other": pytest.approx(0.05)}


def test_batches_are_shorter_the_more_they_keep_others_waiting(clock: Clock) -> None:
    executor = SharedExecutor({"flood": 1.0, "other": 1.0}, clock=clock)
    line, flood, other = Line(executor, clock), executor.turn("flood"), executor.turn("other")
    with flood:
        assert flood.now is Turn.ALONE, "nobody else is there"
        line.wait("other", due=1.0, seconds=0.01)
        assert flood.now is Turn.QUANTUM
        clock.now += WINDOW_SECONDS
    line.join()
    with flood:
        assert flood.now is Turn.SURPLUS, "it had nearly all of the time"
    with other:
        assert other.now is Turn.QUANTUM, "the flood may come back any time"
        clock.now += 10 * WINDOW_SECONDS
    with other:
        assert other.now is Turn.ALONE, "it has not for long"


def test_the_event_loop_runs_nobody_while_the_executor_is_busy(clock: Clock) -> None:
    """Meanwhile it reads, and so whose turn it is decides, not whose request came first."""
    executor = SharedExecutor({"a": 1.0, "b": 1.0}, clock=clock)
    turn = executor.turn("a")
    for _ in range(20):
        assert turn.acquire(blocking=False)
        clock.now += 0.4 * WINDOW_SECONDS / 20
        turn.release()
        clock.now += 0.6 * WINDOW_SECONDS / 20
    with turn:
        clock.now += 0.4 * WINDOW_SECONDS
    assert not turn.acquire(blocking=False) and not executor.turn("b").acquire(blocking=False)
    clock.now += 2 * WINDOW_SECONDS
    assert turn.acquire(blocking=False)


def test_a_turn_is_there_at_once_where_nobody_runs_and_not_where_somebody_does() -> None:
    executor = SharedExecutor({"a": 1.0, "b": 1.0})
    first, second = executor.turn("a"), executor.turn("b")
    assert first.acquire(blocking=False) and not second.acquire(blocking=False)
    first.release()
    assert second.acquire(blocking=False)
    second.release()


def test_a_batch_that_fails_gives_its_turn_back() -> None:
    executor = SharedExecutor({"a": 1.0})
    with pytest.raises(RuntimeError), executor.turn("a").claimed(Claim(0.0)):
        raise RuntimeError
    assert executor.try_take("a")


def test_a_thread_does_not_pass_the_event_loop_which_has_been_chosen(clock: Clock) -> None:
    executor = SharedExecutor({"a": 1.0, "b": 1.0}, clock=clock)
    line, called = Line(executor, clock), list[None]()
    executor.on_free = lambda: called.append(None)
    asks = {"a": Claim(1.0)}
    assert executor.begin(asks) == "a"
    executor.give("a", asked=asks)
    assert len(called) == 1
    line.wait("b", due=math.inf)
    assert len(called) == 2, "the loop decides"
    assert not executor.turn("b").acquire(blocking=False)
    assert executor.begin(asks) == "a" and not line.ran
    executor.give("a", asked={})
    assert line.join() == ["b"]


def test_time_in_which_nobody_asks_counts_for_nobody(clock: Clock) -> None:
    executor = SharedExecutor({"a": 1.0, "b": 1.0}, clock=clock)
    for nothing_left in (True, False):
        assert executor.begin({"a": Claim(1.0)}) == "a"
        clock.now += 0.002
        executor.give("a", asked={} if nothing_left else None)
        if not nothing_left:
            assert executor.begin({}) is None
        with executor.turn("b"):
            clock.now += 0.002
        clock.now += 600.0
    assert executor.begin({"a": Claim(1.0)}) == "a"
    executor.give("a", asked={})
    assert executor.seconds == {"a": pytest.approx(0.004), "b": pytest.approx(0.004)}


def test_time_in_which_requests_are_read_counts_for_those_whose_requests_they_are(clock: Clock) -> None:
    executor, asks = SharedExecutor(dict.fromkeys(("flood", "other", "third"), 1.0), clock=clock), {"other": Claim(1.0)}
    assert executor.begin(asks) == "other"
    executor.read("third")  # in another thread, while a batch runs
    executor.give("other", asked=asks)
    for name, seconds in (("flood", 0.002), ("other", 0.003), ("flood", 0.001)):
        executor.read(name)
        clock.now += seconds
    assert executor.begin(asks) == "other"
    clock.now += 0.01
    executor.give("other", asked=asks)
    clock.now += 0.002
    assert executor.begin(asks) == "other", "what read nothing counts for who is next"
    executor.give("other", asked={})
    assert executor.seconds == {"flood": pytest.approx(0.003), "other": pytest.approx(0.015), "third": 0.0}


ROW, READ = 0.003, 0.00025  # seconds


@pytest.mark.parametrize("seed", range(3))
def test_others_hardly_wait_for_a_flood_that_is_read_and_refused(clock: Clock, seed: int) -> None:
    """Twelve models by Zipf's popularity; the first one, with half of the shares, asks for twice the executor."""
    weights = {f"m{i}": 1 / (i + 1) for i in range(12)}
    rates = {name: 50 * weight for name, weight in weights.items()} | {"m0": 800.0}
    executor, rng = SharedExecutor(weights, clock=clock), random.Random(seed)
    coming = sorted((rng.uniform(0, 4), name) for name, rate in rates.items() for _ in range(int(4 * rate)))
    queues, waits = {name: deque[float]() for name in weights}, list[float]()

    def asked() -> dict[str, Claim]:
        return {n: Claim(q[0] + 0.05, ROW, behind=ROW * (len(q) - 1)) for n, q in queues.items() if q}

    for t, name in coming:
        while clock.now < t and (chosen := executor.begin(asked())) is not None:
            clock.now += ROW
            came = queues[chosen].popleft()
            waits += [clock.now - came] if chosen != "m0" else []
            executor.give(chosen, asked=asked())
        clock.now = max(clock.now, t)
        executor.read(name)
        clock.now += READ
        if len(queues[name]) < 12:
            queues[name].append(t)
    assert sorted(waits)[int(0.95 * len(waits))] < 5 * ROW


@pytest.mark.parametrize("asked_each_second", [1, 20])
def test_a_burst_is_soon_over_where_a_model_batches_well(clock: Clock, asked_each_second: int) -> None:
    """190 rows at once, then 150 a second: one by one they take 0.75 of the time, and the burst would stay."""
    executor = SharedExecutor({"burst": 1.0, "other": 1.0}, clock=clock)
    seconds = [0.0, *(0.005 + 0.0001 * i for i in range(32))]
    most = {turn: turn.rows(seconds) for turn in Turn}
    coming = [(0.0, "burst")] * 190 + [(i / 150, "burst") for i in range(450)]
    coming = sorted(coming + [(i / asked_each_second, "other") for i in range(3 * asked_each_second)])
    queues = {name: deque[float]() for name in ("burst", "other")}
    late = []

    def asked() -> dict[str, Claim]:
        behind = {name: divmod(len(q) - 1, 32) for name, q in queues.items() if q}
        return {n: Claim(queues[n][0] + 0.1, behind=k * seconds[32] + seconds[rest]) for n, (k, rest) in behind.items()}

    while coming or asked():
        while coming and coming[0][0] <= clock.now:
            came, name = coming.pop(0)
            queues[name].append(came)
        if (chosen := executor.begin(asked())) is None:
            clock.now = coming[0][0]
            continue
        rows = min(len(queues[chosen]), most[executor.turn_of(chosen)] if chosen == "burst" else 1)
        clock.now += seconds[rows] if chosen == "burst" else 0.002
        late += [clock.now - queues[chosen].popleft() > 0.1 for _ in range(rows)]
        executor.give(chosen, asked=asked())
    assert not any(late)


def test_who_asks_again_before_its_turn_ends_has_its_share_though_its_batches_are_short(clock: Clock) -> None:
    executor = SharedExecutor({"long": 1.0, "short": 1.0}, clock=clock)

    def run(name: str, seconds: float) -> None:
        turn = executor.turn(name)
        with turn.claimed(Claim(0.0)):
            while clock.now < 20 * WINDOW_SECONDS:
                clock.now += seconds
                turn.again(Claim(0.0))

    threads = [threading.Thread(target=run, args=each) for each in (("long", 0.012), ("short", 0.002))]
    with executor.turn("short"):
        for thread in threads:
            thread.start()
        eventually(lambda: len(executor._waiting) == 2, what="both in line")
    for thread in threads:
        thread.join()
    assert executor.seconds["short"] >= 0.4 * sum(executor.seconds.values())


class Always(SharedTurn):
    """A turn that is always of one kind."""

    def __init__(self, executor: SharedExecutor, name: str, turn: Turn) -> None:
        super().__init__(executor, name)
        self._turn = turn

    @property
    def now(self) -> Turn:
        return self._turn


@pytest.fixture
def pair(bundle: Bundle, sessions: Sessions) -> Any:
    """An engine on a shared executor, what it has answered, and the turn of another."""
    executor, answered = SharedExecutor({"a": 1.0, "b": 1.0}), list[Ticket]()
    engine = new_engine(bundle, sessions, deliver=answered.extend, turn=Always(executor, "a", Turn.ALONE))
    engine.start()
    yield engine, answered, executor.turn("b")
    engine.close()
    assert engine.join(60)


def test_what_comes_while_another_engine_runs_is_one_batch_when_the_turn_comes(pair: Any) -> None:
    engine, answered, other = pair
    with other:
        for seed in range(3):
            engine.submit(bundles.inputs(2, seed=seed), never_exit=False)
        assert not answered
    eventually(lambda: len(answered) == 3, what="the answers")
    [counts] = engine.counters.snapshot()
    assert (counts.requests, counts.batches) == (6, 1)


def test_batches_are_short_while_others_wait(bundle: Bundle, sessions: Sessions) -> None:
    most = Turn.QUANTUM.rows(exact_seconds(bundle.profile))
    executor, answered = SharedExecutor({"a": 1.0}), list[Ticket]()
    engine = new_engine(bundle, sessions, deliver=answered.extend, turn=Always(executor, "a", Turn.QUANTUM))
    engine.start()
    engine.submit(bundles.inputs(3 * most + 1), never_exit=False)
    eventually(lambda: answered, what="the answer")
    engine.close()
    assert engine.join(60)
    [counts] = engine.counters.snapshot()
    assert (counts.requests, counts.batches) == (3 * most + 1, 4)


def test_an_engine_is_served_though_another_always_has_work_that_is_due_first(pair: Any) -> None:
    engine, answered, other = pair
    stop = threading.Event()

    def always_due() -> None:
        while not stop.is_set():
            with other.claimed(Claim(-math.inf)):
                time.sleep(0.001)  # with less its turns may be less than the time between them: nearly idle

    rivals = [threading.Thread(target=always_due) for _ in range(2)]
    for rival in rivals:
        rival.start()
    engine.submit(bundles.inputs(4), never_exit=False)
    eventually(lambda: answered, what="the answer")
    stop.set()
    for rival in rivals:
        rival.join()


def test_an_engine_with_more_requests_asks_before_its_turn_is_over(
    bundle: Bundle, sessions: Sessions, clock: Clock
) -> None:
    most, executor = Turn.QUANTUM.rows(exact_seconds(bundle.profile)), SharedExecutor({"a": 1.0, "b": 1.0}, clock=clock)
    line, turn = Line(executor, clock), Always(executor, "a", Turn.QUANTUM)
    engine = new_engine(bundle, sessions, deliver=lambda tickets: line.ran.extend("a" for _ in tickets), turn=turn)
    engine.start()
    with executor.turn("b"):
        engine.submit(bundles.inputs(3 * most), never_exit=False)
        line.wait("b", due=math.inf)
        eventually(lambda: len(executor._waiting) == 2, what="both in line")
    assert line.join() == ["a", "b"], "its request is due first, to the last row"
    engine.close()
    assert engine.join(60)
