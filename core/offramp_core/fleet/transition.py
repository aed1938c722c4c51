"""What may be started, switched and stopped now, on the way from the workers that there are to those that are planned.

Another plan or batch size on the same hardware is a switch and starts nothing. Between pools workers are made before
others are broken: old ones go once all that their service waits for answers. Pools are never asked for more workers
than they have, so that what starts waits for room; where services wait for each other's room, workers that are not
planned any more make way, one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offramp_core.errors import InvalidArgumentError
from offramp_core.fleet.parts import Key, Pool, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """So many workers of a pool go over to another column; ``starting`` tells those that do not answer yet."""

    before: Key
    after: Key
    count: int
    starting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is done for one service now. ``stop_starting`` are stopped before they ever answered."""

    start: tuple[Workers, ...] = ()
    switch: tuple[Switch, ...] = ()
    stop: tuple[Workers, ...] = ()
    stop_starting: tuple[Workers, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.start or self.switch or self.stop or self.stop_starting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The workers of one service: those that answer, and those that start."""

    ready: tuple[Workers, ...] = ()
    starting: tuple[Workers, ...] = ()


def next_steps(
    present: Mapping[str, Present], planned: Mapping[str, Sequence[Workers]], pools: Sequence[Pool]
) -> dict[str, Step]:
    """What brings each service closer to its plan now; an empty step where it is there or has to wait.

    Parameters
    ----------
    present, planned : mapping
        By the service's name; one that is not planned keeps none.

    Raises
    ------
    InvalidArgumentError
        The plan asks a pool for more workers than it has.
    """
    room = {pool.name: pool.max_workers for pool in pools}
    _check(planned, room)
    moves = {
        name: _Move(present.get(name, Present()), planned.get(name, ())) for name in dict.fromkeys([*present, *planned])
    }
    for move in moves.values():
        move.stop_settled()
    free = dict(room)
    for move in moves.values():
        for key, count in (move.ready + move.starting).items():
            free[key.pool] = free.get(key.pool, 0) - count
    _make_way(list(moves.values()), free)
    waiting = True
    while waiting:  # one worker for each service in turn
        waiting = any([move.start_one(free) for move in moves.values()])
    return {name: move.step() for name, move in moves.items()}


def _check(planned: Mapping[str, Sequence[Workers]], room: Mapping[str, int]) -> None:
    asked: Counter[str] = Counter()
    for workers in planned.values():
        for w in workers:
            asked[w.key.pool] += w.count
    for pool, count in asked.items():
        if count > room.get(pool, 0):
            raise InvalidArgumentError(
                f"planned asks {pool} for {count} workers; it has {room.get(pool, 0)}: plan again with the pools of now"
            )


def _make_way(moves: Sequence[_Move], free: dict[str, int]) -> None:
    """Stop workers that nobody plans where a pool has more than its room, or where all who wait for room wait in
    vain."""
    for pool, left in list(free.items()):
        _stop_unplanned(moves, pool, -left, free)
    missing = [key.pool for move in moves for key in move.missing]
    if missing and not any(+move.starting for move in moves) and not any(free.get(pool, 0) > 0 for pool in missing):
        _stop_unplanned(moves, missing[0], 1, free)


def _stop_unplanned(moves: Sequence[_Move], pool: str, count: int, free: dict[str, int]) -> None:
    for move in moves:
        for key in [key for key in move.surplus if key.pool == pool]:
            if count > 0:
                stopped = move.stop(key, count)
                count -= stopped
                free[pool] += stopped


@dataclass
class _Move:
    """One service on its way; the counts are those after what was decided so far."""

    present: Present
    planned: Sequence[Workers]
    ready: Counter[Key] = field(default_factory=Counter)
    starting: Counter[Key] = field(default_factory=Counter)
    surplus: Counter[Key] = field(default_factory=Counter)
    missing: Counter[Key] = field(default_factory=Counter)
    started: Counter[Key] = field(default_factory=Counter)
    stopped: Counter[Key] = field(default_factory=Counter)
    stopped_starting: Counter[Key] = field(default_factory=Counter)
    switched: list[Switch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ready = Counter({w.key: w.count for w in self.present.ready})
        self.starting = Counter({w.key: w.count for w in self.present.starting})
        planned = Counter({w.key: w.count for w in self.planned})
        have = self.ready + self.starting
        self.surplus, self.missing = have - planned, planned - have
        for key in list(self.surplus):
            for other in [other for other in self.missing if other.pool == key.pool]:
                self._switch(key, other, min(self.surplus[key], self.missing[other]))
        self.surplus, self.missing = +self.surplus, +self.missing

    def _switch(self, before: Key, after: Key, count: int) -> None:
        for present, starting in ((self.ready, False), (self.starting, True)):
            n = min(count, present[before])
            if n:
                self.switched.append(Switch(before=before, after=after, count=n, starting=starting))
                present[before] -= n
                present[after] += n
                self.surplus[before] -= n
                self.missing[after] -= n
                count -= n

    def stop_settled(self) -> None:
        """What starts and is not planned any more goes at once; what answers once nothing is waited for."""
        for key in list(self.surplus):
            n = min(self.surplus[key], self.starting[key])
            self._leave(self.starting, self.stopped_starting, key, n)
        if not self.missing and not +self.starting:
            for key in list(self.surplus):
                self._leave(self.ready, self.stopped, key, self.surplus[key])
        self.surplus = +self.surplus

    def stop(self, key: Key, count: int) -> int:
        """Stop so many at most; how many."""
        n = min(count, self.surplus[key])
        self._leave(self.ready, self.stopped, key, n)
        self.surplus = +self.surplus
        return n

    def _leave(self, present: Counter[Key], stopped: Counter[Key], key: Key, n: int) -> None:
        present[key] -= n
        self.surplus[key] -= n
        stopped[key] += n

    def start_one(self, free: dict[str, int]) -> bool:
        """Start a worker where there is room; whether there was."""
        for key in self.missing:
            if free.get(key.pool, 0) > 0:
                free[key.pool] -= 1
                self.missing[key] -= 1
                self.started[key] += 1
                self.missing = +self.missing
                return True
        return False

    def step(self) -> Step:
        return Step(
            start=_workers(self.started),
            switch=tuple(self.switched),
            stop=_workers(self.stopped),
            stop_starting=_workers(self.stopped_starting),
        )


def _workers(counts: Counter[Key]) -> tuple[Workers, ...]:
    return tuple(Workers(key=key, count=n) for key, n in counts.items() if n > 0)
