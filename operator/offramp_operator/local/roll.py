"""Which worker to start or stop next. Pure, so that its promises can be tested on every situation.

Workers of a changed template are replaced one at a time: a new one is started, and an old one goes only when
the new one serves. A new worker that never becomes ready therefore holds everything as it is. Without surge the order
is the other one: an old worker goes, a new one starts in its place, and the next goes when it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that is not being stopped, oldest first in a sequence.

    ``current``: it runs the wanted template. ``failed``: it was found unable to serve; neither ready nor failed means
    that it starts.
    """

    name: str
    current: bool
    ready: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """How many workers of the wanted template to start, and which to stop."""

    start: int = 0
    stop: tuple[str, ...] = ()


def next_move(workers: Sequence[WorkerView], replicas: int, *, surge: bool = True, leaving: int = 0) -> Move:
    """One move towards ``replicas`` ready workers of the wanted template.

    With ``surge`` it never takes the number of ready workers below ``replicas`` (or below what there is, if that is
    less), and gives an old worker that is still starting (after a restart of everything) the time to serve. Without, it
    never takes the number below ``replicas - 1``, and starts none before the ``leaving`` ones, which are being stopped,
    have made room.
    """
    if not surge and (leaving or any(not w.current for w in workers)):
        return _in_place(workers, replicas, leaving)
    current = [w for w in workers if w.current]
    arrived = sum(w.ready for w in current) >= replicas
    useless = [w for w in workers if not w.current and not w.ready and (w.failed or arrived)]
    old = [w for w in workers if not w.current and w not in useless]
    missing = max(0, replicas - len(current))
    one_by_one = 0 if any(not w.ready for w in current) else min(1, missing)
    stop = [*(w.name for w in useless), *_surplus_old(current, old, replicas), *_surplus_current(current, replicas)]
    return Move(one_by_one if old else missing, tuple(stop))


def _in_place(workers: Sequence[WorkerView], replicas: int, leaving: int) -> Move:
    current, old = [w for w in workers if w.current], [w for w in workers if not w.current]
    room = max(0, replicas - len(workers) - leaving)
    start = min(room, max(0, replicas - len(current)))
    surplus = _surplus_current(current, replicas)
    useless = [w.name for w in old if not w.ready and w.failed]
    if start or leaving or useless or any(not w.ready for w in current):
        return Move(start, (*useless, *surplus))
    can_spare_one = sum(w.ready for w in workers) >= replicas
    leavers = [w.name for w in sorted(old, key=lambda w: w.ready) if can_spare_one or not w.ready]
    return Move(0, (*leavers[:1], *surplus))


def _surplus_old(current: Sequence[WorkerView], old: Sequence[WorkerView], replicas: int) -> list[str]:
    serving = [w.name for w in old if w.ready]
    ready = min(replicas, sum(w.ready for w in current))
    return serving[: max(0, ready + len(serving) - replicas)]


def _surplus_current(current: Sequence[WorkerView], replicas: int) -> list[str]:
    """Scaling down takes those first that do not serve, then the youngest."""
    surplus = max(0, len(current) - replicas)
    by_worth = sorted(range(len(current)), key=lambda i: (current[i].ready, -i))
    return [current[i].name for i in by_worth[:surplus]]
