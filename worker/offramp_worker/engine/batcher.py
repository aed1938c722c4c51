"""From requests to batches: whatever is queued when the engine becomes idle, up to a cap. No artificial delay."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import Profile
from offramp_core.errors import OfframpError
from offramp_worker.engine.arms import EXITS_OFF

Array = npt.NDArray[Any]
MAX_BATCH = 32


class OverloadedError(OfframpError):
    """The queue is full; the request was not taken. ``retry_after_seconds`` is when to try again."""

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request of n rows, and its answer as it comes in.

    Each row is batched, drawn for audit and answered on its own; the ticket is done when all are. ``x`` is (n, ...) contiguous.
    ``never_exit`` asks for the exact executor, ``deadline`` (a time like ``admitted``) for an answer by then, if need be the best one so
    far; ``due`` says which rows got that. ``error`` is set when a batch failed.
    """

    x: Array
    never_exit: bool
    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    admitted: float
    wall_time: float
    draws: tuple[float, ...]
    pending: int
    exits: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    audited: list[bool] = field(default_factory=list)
    error: str | None = None
    deadline: float = math.inf
    due: list[bool] = field(default_factory=list)

    @property
    def counted(self) -> bool:
        """Whether the rows belong to the statistics of a plan.

        A deadline comes sooner to rows that do not leave early, so answers in time would be no fair sample; nor would the others.
        """
        return not self.never_exit and self.deadline == math.inf


def new_ticket(
    x: Array,
    *,
    never_exit: bool,
    n_classes: int,
    now: float,
    wall_time: float,
    draw: Callable[[], float],
    deadline_seconds: float = math.inf,
) -> Ticket:
    """Admit ``x`` (n, ...): the one uniform number of each row is drawn here, before anything is known of its fate."""
    n = len(x)
    return Ticket(
        x=x,
        never_exit=never_exit,
        logits=np.empty((n, n_classes), dtype=np.float32),
        labels=np.empty(n, dtype=np.int64),
        admitted=now,
        wall_time=wall_time,
        draws=tuple(draw() for _ in range(n)),
        pending=n,
        exits=["final"] * n,
        configs=[EXITS_OFF] * n,
        arms=["stable"] * n,
        epochs=[0] * n,
        audited=[False] * n,
        deadline=now + deadline_seconds,
        due=[False] * n,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that run together: ``x`` (n, ...), and for row i the request and the row of it that it belongs to."""

    x: Array
    owners: list[tuple[Ticket, int]]
    never_exit: bool

    def __len__(self) -> int:
        return len(self.owners)


class Batcher:
    """A bounded queue of rows in two lanes: requests under the plan, and requests that must not exit early."""

    def __init__(self, *, max_rows: int, max_batch: int) -> None:
        self._max_rows, self._max_batch = max_rows, max_batch
        self._changed = threading.Condition()
        self._lanes: dict[bool, deque[tuple[Ticket, int]]] = {False: deque(), True: deque()}
        self._rows = 0
        self._closed = False
        self._woken = False

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def rows(self) -> int:
        """Rows queued at this moment."""
        return self._rows

    def put(self, ticket: Ticket, *, wake: bool = True) -> None:
        """Queue all rows of a request. Without ``wake`` a thread that waits in :meth:`take` sleeps on until :meth:`wake`.

        Raises
        ------
        OverloadedError
            They do not fit, or the worker is shutting down.
        """
        n = len(ticket.x)
        with self._changed:
            if self._closed:
                raise OverloadedError("the worker is shutting down; try another one")
            if self._rows + n > self._max_rows:
                raise OverloadedError(
                    f"{self._rows} of {self._max_rows} queue places are taken; {n} more do not fit; retry later"
                )
            self._lanes[ticket.never_exit].append((ticket, 0))
            self._rows += n
            if wake:
                self._changed.notify()

    def take(self, *, wait: bool) -> Batch | None:
        """The next batch of the lane whose head is oldest; None when there is none (with ``wait``: at a :meth:`wake` or when closed)."""
        with self._changed:
            while wait and not (self._rows or self._closed or self._woken):
                self._changed.wait()
            self._woken = False
            if not self._rows:
                return None
            return self._cut(self._oldest_lane())

    def wake(self) -> None:
        """End a wait in :meth:`take`, now or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Take no more requests; those queued are still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def _oldest_lane(self) -> bool:
        heads = {lane: queue[0][0].admitted for lane, queue in self._lanes.items() if queue}
        return min(heads, key=lambda lane: heads[lane])

    def _cut(self, lane: bool) -> Batch:
        queue, room = self._lanes[lane], self._max_batch
        parts: list[Array] = []
        owners: list[tuple[Ticket, int]] = []
        while queue and room:
            ticket, begin = queue.popleft()
            end = min(len(ticket.x), begin + room)
            parts.append(ticket.x[begin:end])
            owners.extend((ticket, row) for row in range(begin, end))
            room -= end - begin
            if end < len(ticket.x):
                queue.appendleft((ticket, end))
        self._rows -= len(owners)
        return Batch(parts[0] if len(parts) == 1 else np.concatenate(parts), owners, lane)


def batch_cap(profile: Profile, *, latency_seconds: float | None) -> int:
    """Largest batch, at most 32, whose exact execution takes at most half of what the latency objective allows.

    The other half is for waiting while the batch before runs. Sizes between measured ones are interpolated.
    """
    if latency_seconds is None:
        return MAX_BATCH
    return max(1, rows_within(profile, seconds=latency_seconds / 2))


def rows_within(profile: Profile, *, seconds: float) -> int:
    """Largest batch, 0 to 32, whose exact execution takes at most ``seconds`` by the profile."""
    sizes = np.array([b.batch_size for b in profile.batches], dtype=np.float64)
    measured = np.array([b.exact_seconds for b in profile.batches], dtype=np.float64)
    return max((n for n in range(1, MAX_BATCH + 1) if _exact_seconds(sizes, measured, n) <= seconds), default=0)


def _exact_seconds(sizes: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], n: int) -> float:
    if n > sizes[-1]:
        return float(seconds[-1] * n / sizes[-1])
    return float(np.interp(n, sizes, seconds))
