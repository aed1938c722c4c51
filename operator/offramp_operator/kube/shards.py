"""Services divided over the replicas of the operator: every service belongs to one shard, and every shard to whoever
holds its Lease.

A service's shard follows from its name alone, by the jump consistent hash of Lamping and Veach (arXiv:1406.2294), so no
table has to be kept: raising the number of shards from n to m moves (m - n) / m of the services, all of them to new
shards. Every replica tries for every Lease, but one that holds k shards leaves a free one to the others for a little
longer with every k, so that they end up evenly spread without talking to each other. One shard is the ordinary leader
election.

Fencing is that of the leader: a process that could not renew *any* of its Leases in time writes nothing more and ends
at once, and the others take its shards when the Leases are over.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence

from offramp_operator.kube.client import MAX_CONNECTIONS
from offramp_operator.kube.leader import LeaderElector
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey

LONGEST_COURTESY = 4  # attempts: a free shard is left to others for one attempt per shard held, up to so many
MAX_SHARDS = 256
_MULTIPLIER = 2862933555777941757  # of the linear congruential generator in the paper


def shard_of(key: ServiceKey, n_shards: int) -> int:
    """The shard of a service, in [0, n_shards). The same on every machine and in every release.

    Examples
    --------
    >>> [shard_of(ServiceKey("default", f"digits-{i}"), 4) for i in range(6)]
    [3, 0, 3, 3, 3, 0]
    """
    if n_shards == 1:  # asked for every object that is seen
        return 0
    seed = int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "big")
    shard, jump = -1, 0
    while jump < n_shards:
        shard = jump
        seed = (seed * _MULTIPLIER + 1) % 2**64
        jump = int((shard + 1) * (2**31 / ((seed >> 33) + 1)))
    return shard


def part_of(limit: int, held: Collection[int], n_shards: int) -> int:
    """What those who hold some shards may give away of a limit on all services: the parts of all shards sum to it.

    Examples
    --------
    >>> [part_of(6, {shard}, 4) for shard in range(4)], part_of(6, {0, 3}, 4)
    ([2, 2, 1, 1], 3)
    """
    return sum(limit // n_shards + (shard < limit % n_shards) for shard in held)


def lease_names(name: str, n_shards: int) -> list[str]:
    """The Leases of all shards. A single one keeps the plain name."""
    return [name] if n_shards == 1 else [f"{name}-{shard}" for shard in range(n_shards)]


def lease_threads(n_shards: int) -> int:
    """Calls about Leases that may be under way at once: every renewal, and an attempt at one more, unless they are so
    many that the API server would feel it."""
    return min(n_shards + 1, MAX_CONNECTIONS)


class Shards:
    """The shards that this process holds. One Lease lost is everything lost: see the module.

    Parameters
    ----------
    electors : sequence of LeaderElector
        One per shard, by its number.
    on_lost : callable
        Called when a Lease was lost. It must end the process at once.
    """

    def __init__(
        self, electors: Sequence[LeaderElector], *, retry_seconds: float, on_lost: Callable[[], object]
    ) -> None:
        self._electors = list(electors)
        self._retry = retry_seconds
        self._on_lost = on_lost
        self._keeping: dict[int, asyncio.Task[None]] = {}

    @property
    def first(self) -> LeaderElector:
        """The election of shard 0: whoever has it is the one to ask about the whole, as far as one replica can tell."""
        return self._electors[0]

    @property
    def held(self) -> frozenset[int]:
        """Shards whose Lease this process has taken."""
        return frozenset(self._keeping)

    def holds(self) -> bool:
        """Whether this process may act now: it has shards, and no renewal is overdue, noticed or not."""
        return bool(self._keeping) and all(self._electors[shard].holds() for shard in self._keeping)

    def owns(self, key: ServiceKey) -> bool:
        """Whether a service belongs to a shard held here."""
        return shard_of(key, len(self._electors)) in self._keeping

    async def acquire(self) -> int:
        """Wait until one more shard is held here, and keep it from then on; returns its number. For ever when all
        are."""
        while True:
            courtesy = self._retry * min(LONGEST_COURTESY, len(self._keeping))
            for shard, elector in enumerate(self._electors):
                if shard not in self._keeping and await elector.attempt(free_seconds=courtesy):
                    self._keeping[shard] = asyncio.create_task(self._keep(elector), name=f"lease-{shard}")
                    return shard
            await asyncio.sleep(self._retry)

    async def release(self) -> None:
        """Let others take over at once. Call it when nothing acts any more."""
        for task in self._keeping.values():
            task.cancel()
        await asyncio.gather(*(self._electors[shard].release() for shard in self._keeping))
        self._keeping.clear()

    async def _keep(self, elector: LeaderElector) -> None:
        try:
            await elector.keep()
        except Exception as error:
            log_event("lease-keeping-failed", repr(error), level=logging.ERROR, error=error)
        self._on_lost()
