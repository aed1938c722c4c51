"""Which worker to start or stop next. Pure, so that its promises can be tested on every situation.

Workers of a changed template are replaced one at a time: a new one is started, and an old one goes only when
the new one serves. A new worker that never becomes ready therefore holds everything as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that is not being stopped, oldest first in a sequence.

    ``current``: it runs the wanted template. ``failed``: it was found unable to serve; neither ready nor failed means that it starts.
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


def next_move(workers: Sequence[WorkerView], replicas: int) -> Move:
    """One move towards ``replicas`` ready workers of the wanted template.

    Never takes the number of ready workers below ``replicas`` (or below what there is, if that is less), and gives
    an old worker that is still starting (after a restart of everything) the time to serve.
    """
    current = [w for w in workers if w.current]
    arrived = sum(w.ready for w in current) >= replicas
    useless = [w for w in workers if not w.current and not w.ready and (w.failed or arrived)]
    old = [w for w in workers if not w.current and w not in useless]
    missing = max(0, replicas - len(current))
    one_by_one = 0 if any(not w.ready for w in current) else min(1, missing)
    stop = [*(w.name for w in useless), *_surplus_old(current, old, replicas), *_surplus_current(current, replicas)]
    return Move(one_by_one if old else missing, tuple(stop))


def _surplus_old(current: Sequence[WorkerView], old: Sequence[WorkerView], replicas: int) -> list[str]:
    serving = [w.name for w in old if w.ready]
    ready = min(replicas, sum(w.ready for w in current))
    return serving[: max(0, ready + len(serving) - replicas)]


def _surplus_current(current: Sequence[WorkerView], replicas: int) -> list[str]:
    """Scaling down takes those first that do not serve, then the youngest."""
    surplus = max(0, len(current) - replicas)
    by_worth = sorted(range(len(current)), key=lambda i: (current[i].ready, -i))
    return [current[i].name for i in by_worth[:surplus]]
