"""Which worker to start or stop next. Pure, so that its promises can be tested on every situation.

Workers of a changed template are replaced one at a time: a new one is started, and an old one goes only when
the new one serves. A new worker that never becomes ready therefore holds everything as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that is not being stopped, oldest first in a sequence. ``current``: it runs the wanted template."""

    name: str
    current: bool
    ready: bool


@dataclass(frozen=True, slots=True)
class Move:
    """How many workers of the wanted template to start, and which to stop."""

    start: int = 0
    stop: tuple[str, ...] = ()


def next_move(workers: Sequence[WorkerView], replicas: int) -> Move:
    """One move towards ``replicas`` ready workers of the wanted template.

    Never takes the number of ready workers below ``replicas`` (or below what there is, if that is less).
    """
    current = [w for w in workers if w.current]
    serving_old = [w for w in workers if not w.current and w.ready]
    useless_old = [w.name for w in workers if not w.current and not w.ready]
    missing = max(0, replicas - len(current))
    starting = any(not w.ready for w in current)
    one_by_one = 0 if starting else min(1, missing)
    return Move(
        start=one_by_one if serving_old else missing,
        stop=(*useless_old, *_surplus_old(current, serving_old, replicas), *_surplus_current(current, replicas)),
    )


def _surplus_old(current: Sequence[WorkerView], serving_old: Sequence[WorkerView], replicas: int) -> list[str]:
    kept = min(len(current), replicas)
    ready = min(sum(w.ready for w in current), kept)
    surplus = max(0, ready + len(serving_old) - replicas)
    return [w.name for w in serving_old[:surplus]]


def _surplus_current(current: Sequence[WorkerView], replicas: int) -> list[str]:
    """Scaling down takes those first that do not serve, then the youngest."""
    surplus = max(0, len(current) - replicas)
    by_worth = sorted(range(len(current)), key=lambda i: (current[i].ready, -i))
    return [current[i].name for i in by_worth[:surplus]]
