"""Who gets how many workers of one kind that there are too few of.

Workers are given one at a time, each to the service for which it is worth most [1]_. What it is worth is the share of
the service's own demand that it answers and nobody else could: the first quarter of a demand counts eight times as much
as the last one, and what is to spare a quarter of that, as in :mod:`offramp_core.fleet.exact`. Each further worker of a
service is worth no more than the one before, so that no other division of as many workers is worth more.

References
----------
.. [1] B. Fox, "Discrete optimization via marginal analysis", Management Science 13 (1966).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from offramp_core.fleet.exact import PARTS, SPARE_PART
from offramp_core.fleet.parts import refuse_twice

WORTHLESS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one service would do with workers of the kind."""

    name: str
    #: Workers that it has now.
    present: int
    #: Below which nobody presses it for the sake of another one's share.
    least: int
    #: With so many it has all that it would use.
    most: int
    #: Requests per second that a worker answers.
    worker_rate: float
    #: demand and spare: requests per second that are asked for, > 0, and what is kept free beyond them.
    demand: float
    spare: float
    #: Of the demand, what nobody asks yet and is only expected.
    expected: float = 0.0
    #: Requests per second of these that workers of other kinds could answer.
    elsewhere: float = 0.0
    #: What a worker saves an hour where those of other kinds could answer in its place.
    saving: float = 0.0
    #: Whether it is asked, and nothing of it would answer without a worker of the kind.
    answers: bool = False

    def worth(self, count: int, *, asked_only: bool = False) -> float:
        """Of so many workers beside those of other kinds: what they answer of the demand, the first parts most."""
        demand = self.demand - self.expected if asked_only else self.demand
        if demand <= 0:
            return 0.0
        answered, total, quarter = self.elsewhere + count * self.worker_rate, 0.0, demand / len(PARTS)
        spare = self.spare * demand / self.demand
        for weight, size in (*((weight, quarter) for weight in reversed(PARTS)), (SPARE_PART, spare)):
            part = min(answered, size)
            total, answered = total + weight * part, answered - part
        return total / demand


def divide(claims: Sequence[Claim], room: int) -> dict[str, int]:
    """Workers of each claim, by its name; the same whatever the order of the claims.

    Nobody has more than its ``most``. What somebody has of its ``least`` stays before anybody gets more, then the last
    worker of each that answers; then every ``least`` is filled and who is asked has a first worker, then comes what no
    other workers could answer of what is asked, then of what is only expected, and what is left goes to where it saves
    most.
    """
    refuse_twice("claims", (claim.name for claim in claims))
    counts = dict.fromkeys(sorted(claim.name for claim in claims), 0)
    worth, saving = _worth_of_next, _saving
    _give(claims, counts, room, limit=lambda claim: min(claim.present, claim.least, claim.most), value=worth)
    _give(claims, counts, room, limit=lambda claim: min(claim.present, int(claim.answers), claim.most), value=worth)
    _give(claims, counts, room, limit=lambda claim: min(claim.least, claim.most), value=worth)
    _give(claims, counts, room, limit=lambda claim: min(int(claim.answers), claim.most), value=worth)
    _give(claims, counts, room, limit=lambda claim: claim.most, value=partial(worth, asked_only=True), above=WORTHLESS)
    _give(claims, counts, room, limit=lambda claim: claim.most, value=worth, above=WORTHLESS)
    _give(claims, counts, room, limit=lambda claim: claim.most, value=saving)
    return counts


def _give(
    claims: Iterable[Claim],
    counts: dict[str, int],
    room: int,
    *,
    limit: Callable[[Claim], int],
    value: Callable[[Claim, int], float],
    above: float = -math.inf,
) -> None:
    """Give what is left of the room, up to each one's limit and while the next worker's value is above one."""
    by_name = {claim.name: claim for claim in claims}
    left = room - sum(counts.values())
    waiting = [(-value(claim, counts[name]), counts[name], name) for name, claim in by_name.items()]
    heapq.heapify(waiting)
    while waiting and left > 0:
        value_of_next, count, name = heapq.heappop(waiting)
        claim = by_name[name]
        if count < limit(claim) and -value_of_next > above:
            counts[name], left = count + 1, left - 1
            heapq.heappush(waiting, (-value(claim, count + 1), count + 1, name))


def _worth_of_next(claim: Claim, count: int, *, asked_only: bool = False) -> float:
    return claim.worth(count + 1, asked_only=asked_only) - claim.worth(count, asked_only=asked_only)


def _saving(claim: Claim, _: int) -> float:
    return claim.saving
