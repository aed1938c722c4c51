"""What the workers of a pool are told on the way from one packing to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from offramp_core.sharing.placing import Orders, PoolWorker, orders, slots_of

NAMES = ("a", "b", "c")


@dataclass
class Worker:
    """A worker that does what it is told; what it is to hold it serves one step later."""

    uid: str
    current: bool = True
    ready: bool = True
    slot: int | None = None
    holds: frozenset[str] = frozenset()
    serves: frozenset[str] = frozenset()
    routed: frozenset[str] = frozenset()

    def seen(self) -> PoolWorker:
        return PoolWorker(self.uid, self.current, self.ready, self.slot, self.holds, self.serves)

    def obey(self, told: Orders) -> None:
        self.serves = self.holds & told.holds
        self.slot, self.holds, self.routed = told.slot, told.holds, told.routed

    @property
    def answers(self) -> frozenset[str]:
        """Services whose requests come here and are answered."""
        return self.routed & self.serves if self.ready else frozenset()


@dataclass
class Pool:
    workers: list[Worker]
    packed: list[frozenset[str]]
    members: frozenset[str] = frozenset(NAMES)
    unrouted: dict[tuple[str, str], int] = field(default_factory=dict)

    def step(self, *, patience: int) -> None:
        drained = {place for place, steps in self.unrouted.items() if steps >= patience}
        told = orders([w.seen() for w in self.workers], self.packed, members=self.members, drained=drained)
        for worker in self.workers:
            worker.obey(told[worker.uid])
        off = {(w.uid, name) for w in self.workers for name in w.holds - w.routed}
        self.unrouted = {place: self.unrouted.get(place, 0) + 1 for place in off}

    @property
    def answered(self) -> frozenset[str]:
        return frozenset().union(*(worker.answers for worker in self.workers))


packings = st.lists(st.frozensets(st.sampled_from(NAMES)), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    first=packings, then=st.lists(packings, min_size=1, max_size=3), patience=st.integers(1, 3), late=st.integers(0, 2)
)
def test_who_was_answered_is_answered_at_every_step_to_any_other_packing(
    first: list[frozenset[str]], then: list[list[frozenset[str]]], patience: int, late: int
) -> None:
    pool = Pool([Worker(f"w{i}") for i in range(3 - late)], first)
    for _ in range(6):
        pool.step(patience=patience)
    for packing in then:
        pool.packed = packing
        wanted = frozenset().union(*packing)
        for step in range(8 + patience):
            before = pool.answered
            pool.step(patience=patience)
            assert before & wanted <= pool.answered
            if step == 2:  # workers that start late
                pool.workers += [Worker(f"w{i}") for i in range(len(pool.workers), 3)]
        assert pool.answered >= wanted
        for worker in pool.workers:
            assert worker.holds == (packing[worker.slot] if worker.slot is not None else frozenset())


@settings(max_examples=100, deadline=None)
@given(packed=packings)
def test_workers_are_replaced_one_by_one_with_nobody_missed(packed: list[frozenset[str]]) -> None:
    pool = Pool([Worker(f"old{i}") for i in range(len(packed))], packed)
    for _ in range(4):
        pool.step(patience=1)
    wanted = frozenset().union(*packed)
    assert pool.answered == wanted
    for worker in pool.workers:
        worker.current = False
    for i in range(len(packed)):
        new = Worker(f"new{i}", ready=False)
        pool.workers.append(new)
        for _ in range(3):
            pool.step(patience=1)
        new.ready = True
        pool.step(patience=1)
        gone = next(w for w in pool.workers if not w.current and w.slot == new.slot)
        pool.workers.remove(gone)  # as the platform does, told by the cost of deleting each
        pool.step(patience=1)
        assert pool.answered == wanted


def test_a_successor_takes_the_place_of_one_that_died() -> None:
    workers = [PoolWorker("b", slot=1), PoolWorker("new")]
    assert slots_of(workers, 2) == {"b": 1, "new": 0}
    assert slots_of([*workers, PoolWorker("spare")], 2).keys() == {"b", "new"}


def test_a_service_that_left_the_pool_is_dropped_at_once() -> None:
    worker = PoolWorker("w", ready=True, slot=0, holds=frozenset("ab"), serves=frozenset("ab"))
    told = orders([worker], [frozenset("a")], members={"a"}, drained=())
    assert told["w"] == Orders(0, frozenset("a"), frozenset(), frozenset("a"))
