"""From a packing to what each worker of a pool is told, so that nobody is without a service on the way.

A packing is of slots. A worker has one; where workers are replaced, a new one shares the slot of an old one until that
is gone. A service that moves is loaded where it goes before requests are sent there, and leaves where it was only
after requests have ceased to be sent there for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A worker as it is. ``current`` says that it is made as the pool asks for now, ``ready`` that the platform sends
    it requests, ``slot`` which place it had."""

    uid: str
    current: bool = True
    ready: bool = False
    slot: int | None = None
    holds: frozenset[str] = frozenset()
    serves: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker is to hold, those that are ``leaving`` included, and which of that requests are sent to."""

    slot: int | None = None
    holds: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    routed: frozenset[str] = frozenset()


def slots_of(workers: Sequence[PoolWorker], n: int) -> dict[str, int]:
    """The slot of each worker that is needed, out of ``n``: the one it had, else one that is free, else for a current
    worker one that only old ones have.

    Examples
    --------
    >>> slots_of([PoolWorker("old", current=False, slot=0), PoolWorker("new")], 1)
    {'old': 0, 'new': 0}
    """
    found: dict[str, int] = {}
    for worker in sorted(workers, key=lambda w: not w.current):
        if worker.slot is not None and 0 <= worker.slot < n:
            found[worker.uid] = worker.slot
    for worker in sorted(workers, key=lambda w: not w.current):
        if worker.uid in found:
            continue
        free = [slot for slot in range(n) if slot not in found.values()]
        if not free and worker.current:
            renewed = {found[w.uid] for w in workers if w.current and w.uid in found}
            free = [slot for slot in range(n) if slot not in renewed]
        if free:
            found[worker.uid] = free[0]
    return found


def orders(
    workers: Sequence[PoolWorker],
    packed: Sequence[frozenset[str]],
    *,
    members: Collection[str],
    drained: Collection[tuple[str, str]],
) -> dict[str, Orders]:
    """What each worker is told.

    Parameters
    ----------
    packed
        What each slot is to hold.
    members
        Services of the pool; what is none of them any more is dropped at once.
    drained
        Worker and service, where requests have ceased to be sent for long enough.
    """
    slots = slots_of(workers, len(packed))
    wanted = {w.uid: packed[slots[w.uid]] if w.uid in slots else frozenset[str]() for w in workers}
    homes = {name: [i for i, services in enumerate(packed) if name in services] for name in members}
    serving = {(slots[w.uid], name) for w in workers if w.ready and w.uid in slots for name in w.serves}
    moved = {name for name, there in homes.items() if all((slot, name) in serving for slot in there)}
    given = {}
    for worker in workers:
        own = wanted[worker.uid] & frozenset(members)
        strays = {name for name in worker.holds - own if homes.get(name)}
        staying = {name for name in strays if name not in moved}
        leaving = {name for name in strays & moved if (worker.uid, name) not in drained}
        ways = {name for name in own | staying if not worker.ready or name in worker.serves}
        given[worker.uid] = Orders(slots.get(worker.uid), own | staying | leaving, frozenset(leaving), frozenset(ways))
    return given
