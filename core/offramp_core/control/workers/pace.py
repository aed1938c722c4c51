"""Whose workers may be replaced now when the administrator changes what all of them run: a new image, a new release of
the operator.

One service goes first. As many as are proven may then be under way at a time, up to a share of all: what is wrong with
an image shows itself at one service, and a sound one is everywhere after a number of rounds that grows with the
logarithm of the fleet. The order is by what a bad image costs against how soon it is noticed: services with several
ready workers, capacity to spare and traffic first (one of their workers fails under requests while the others answer),
services whose only worker is taken away last. A failure stops the fleet: nobody else is touched until the failing
service recovers or something else is asked for, which it is then the first to take.

Everything is read off what is there (which pods a Deployment asks for, since when they are available), so nothing is
lost with a process, and nothing has to be written for it. What a user changes is never held back; a service whose own
change is under way says nothing about the image and takes no turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MOST_SHARE = 0.05  # of the services that may be under way at a time
FEWEST_AT_ONCE = 4  # that a small fleet's growth ends at
PROVEN_SECONDS = 60.0  # all workers available for so long
Standing = Literal["Waiting", "UnderWay", "Proven", "Failed", "Apart"]


@dataclass(frozen=True, slots=True)
class Member:
    """How one service stands.

    ``waits`` says that its pods are not yet what the administrator asks for, ``counts`` that what becomes of it tells
    something about that. ``done_at`` is since when all its workers are available, None while they are not; ``failure``
    is what is wrong with its newest workers, or empty.
    """

    waits: bool = False
    counts: bool = True
    done_at: float | None = None
    failure: str = ""
    ready: int = 0
    busy: bool = False
    spare: bool = False
    goes_first: bool = False  # an old worker, before its successor

    def standing(self, now: float) -> Standing:
        if self.waits:
            return "Waiting"
        if not self.counts:
            return "Apart"
        if self.failure:
            return "Failed"
        return "Proven" if self.done_at is not None and now - self.done_at >= PROVEN_SECONDS else "UnderWay"

    @property
    def cost(self) -> tuple[bool, bool, bool, bool, int]:
        """What orders those that wait, cheapest first: an interruption, a single worker, no spare capacity, no traffic
        to notice anything by, few workers."""
        return (self.goes_first and self.ready < 2, self.ready < 2, not self.spare, not self.busy, -self.ready)


@dataclass(frozen=True, slots=True)
class Turns:
    """Who may go, who has failed and why, and how many stand how."""

    may_go: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    standing: Mapping[Standing, int] = field(default_factory=dict)


def at_once(proven: int, fleet: int) -> int:
    """How many services may be under way.

    Examples
    --------
    >>> [at_once(proven, 2000) for proven in (0, 1, 2, 30, 500)]
    [1, 1, 2, 30, 100]
    """
    return min(max(1, proven), max(FEWEST_AT_ONCE, int(MOST_SHARE * fleet)))


def next_turns(members: Mapping[str, Member], now: float) -> Turns:
    """Who may take what the administrator asks for. The same for the same members, and fewer never become more by
    asking twice.

    A service that waits and fails already, on what was asked for before, may go at any time: it has nothing to lose,
    and tells the most.
    """
    by_standing: dict[Standing, list[str]] = {"Waiting": [], "UnderWay": [], "Proven": [], "Failed": [], "Apart": []}
    for name in sorted(members):
        by_standing[members[name].standing(now)].append(name)
    failing = [name for name in by_standing["Waiting"] if members[name].failure]
    sound = sorted(
        (name for name in by_standing["Waiting"] if not members[name].failure), key=lambda n: members[n].cost
    )
    free = at_once(len(by_standing["Proven"]), len(members)) - len(by_standing["UnderWay"]) - len(failing)
    stopped = bool(by_standing["Failed"])
    return Turns(
        may_go=frozenset([*failing, *([] if stopped else sound[: max(0, free)])]),
        failed={name: members[name].failure for name in by_standing["Failed"]},
        standing={standing: len(names) for standing, names in by_standing.items()},
    )
