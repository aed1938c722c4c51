"""How waiting requests become batches: one code for worker and simulator. A policy is asked whenever the engine is idle
and something waits."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import numpy as np

from offramp_core.bundle import Profile
from offramp_core.errors import InvalidArgumentError

MAX_BATCH = 32
MAX_QUEUE = 1024
BACKOFF = 0.9  # Clipper's
# What a batch may take of the objective; the other half is for waiting while the batch before runs.
SECONDS_OF_OBJECTIVE = 0.5


class Queue(NamedTuple):
    """``rows`` > 0 requests that wait at ``now``, the first of which came at ``head_arrival`` and is of no use any more
    at ``head_deadline``. ``worst_seconds`` is the longest a batch can take, by its rows."""

    now: float
    rows: int
    head_arrival: float
    worst_seconds: Sequence[float]
    head_deadline: float = math.inf


class Start(NamedTuple):
    """Run the first ``rows`` of the queue now."""

    rows: int


class Drop(NamedTuple):
    """Give up the first ``rows`` of the queue: their time cannot be met."""

    rows: int


class Wait(NamedTuple):
    """Ask again when a request comes, at the latest at ``until``."""

    until: float


Decision = Start | Drop | Wait


class Batching(Protocol):
    """A policy: a value that never changes. ``queue_rows`` requests at most wait (None: any number), one that finds the
    queue full is rejected."""

    @property
    def max_batch(self) -> int:
        """The most rows that ever run together."""

    @property
    def batch_rows(self) -> int:
        """The most rows that run together now."""

    @property
    def queue_rows(self) -> int | None: ...

    def padded(self, rows: int) -> int:
        """The batch size that runs when ``rows`` rows are in it."""

    def decide(self, queue: Queue) -> Decision:
        """What to do with the requests that wait."""

    def after(self, *, rows: int, seconds: float) -> Self:
        """The policy once a batch of ``rows`` rows took ``seconds``."""


class _Plain:
    """What most policies do: batches up to ``max_batch``, none is padded, and nothing is learned from one."""

    __slots__ = ()
    max_batch: int

    @property
    def batch_rows(self) -> int:
        return self.max_batch

    def padded(self, rows: int) -> int:
        return rows

    def after(self, *, rows: int, seconds: float) -> Self:  # noqa: ARG002 - what others learn from
        return self


@dataclass(frozen=True, slots=True)
class OfframpBatching(_Plain):
    """Whatever waits when the engine becomes idle, up to a limit; no artificial delay.

    With ``target_seconds`` the limit adapts to how long batches take: one row more after a full batch within the
    target, a tenth less after one beyond it. Source of the limit: Clipper (Crankshaw et al., NSDI 2017), section 4.3.1.
    """

    max_batch: int = MAX_BATCH
    queue_rows: int | None = MAX_QUEUE
    #: What a batch may take; None leaves the limit at ``max_batch``.
    target_seconds: float | None = None
    #: Where the limit is, in rows; its whole part counts.
    limit: float = math.inf

    def __post_init__(self) -> None:
        check_sizes(max_batch=self.max_batch)
        if self.target_seconds is not None and not self.target_seconds > 0:
            raise InvalidArgumentError(f"target_seconds is {self.target_seconds}; it must be positive")
        if not self.limit >= 1:
            raise InvalidArgumentError(f"limit is {self.limit}; a batch has at least one row")

    @property
    def batch_rows(self) -> int:
        return int(min(self.limit, self.max_batch))

    def decide(self, queue: Queue) -> Decision:
        return Start(min(queue.rows, self.batch_rows))

    def after(self, *, rows: int, seconds: float) -> Self:
        if self.target_seconds is None:
            return self
        limit = min(self.limit, float(self.max_batch))
        if seconds > self.target_seconds:
            return replace(self, limit=max(1.0, BACKOFF * limit))
        if rows >= self.batch_rows and limit < self.max_batch:
            return replace(self, limit=min(float(self.max_batch), limit + 1.0))
        return self


@dataclass(frozen=True, slots=True)
class TfServingBatching(_Plain):
    """Batches that wait to fill, up to a timeout, and are padded to allowed sizes.

    A batch runs when it is full or when ``batch_timeout_micros`` have passed since its first request; a request is
    rejected when ``max_enqueued_batches`` full ones wait. Source: TensorFlow Serving, `BatchingParameters` and
    `BasicBatchScheduler` (tensorflow/core/kernels/batching_util/basic_batch_scheduler.h).
    """

    max_batch: int = MAX_BATCH
    batch_timeout_micros: int = 2000
    allowed_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    max_enqueued_batches: int = 100

    def __post_init__(self) -> None:
        check_sizes(max_batch=self.max_batch, max_enqueued_batches=self.max_enqueued_batches)
        sizes = self.allowed_batch_sizes
        if sizes and (list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] != self.max_batch):
            raise InvalidArgumentError(
                f"allowed_batch_sizes are {list(sizes)}; they must rise and end with max_batch, {self.max_batch}"
            )
        if self.batch_timeout_micros < 0:
            raise InvalidArgumentError(f"batch_timeout_micros is {self.batch_timeout_micros}; it must be >= 0")

    @property
    def queue_rows(self) -> int | None:
        return self.max_batch * self.max_enqueued_batches

    def padded(self, rows: int) -> int:
        return next((size for size in self.allowed_batch_sizes if size >= rows), rows) if rows else 0

    def decide(self, queue: Queue) -> Decision:
        ripe_at = queue.head_arrival + self.batch_timeout_micros * 1e-6
        if queue.rows >= self.max_batch or ripe_at <= queue.now:
            return Start(min(queue.rows, self.max_batch))
        return Wait(ripe_at)


@dataclass(frozen=True, slots=True)
class ClockworkBatching(_Plain):
    """The largest batch that still answers its oldest request in time; what can no longer be answered in time is
    dropped.

    There is a strategy for every batch size: it may start until the head's deadline less what a batch of that size
    takes. The largest one that may still start wins, since its last moment comes first. Times are those of a batch that
    nobody leaves. Source: Clockwork (Gujarati et al., OSDI 2020), section 5.3.
    """

    slo_seconds: float
    max_batch: int = MAX_BATCH
    queue_rows: int | None = field(default=None)

    def __post_init__(self) -> None:
        check_sizes(max_batch=self.max_batch)
        if not self.slo_seconds > 0:
            raise InvalidArgumentError(f"slo_seconds is {self.slo_seconds}; Clockwork needs a positive deadline")

    def decide(self, queue: Queue) -> Decision:
        left = min(queue.head_arrival + self.slo_seconds, queue.head_deadline) - queue.now
        largest = min(queue.rows, self.max_batch)
        fits = bisect_right(queue.worst_seconds, left, 1, largest + 1) - 1
        return Start(fits) if fits >= 1 else Drop(1)


def in_turn(waiting: Sequence[int], *, batch_rows: int, may_pass: bool) -> Sequence[int]:
    """The order in which requests join the next batch, as indices into ``waiting``: the rows of each that wait, first
    in order first.

    They come in order, but for one case: a request that needs more than a batch would keep everybody behind it from all
    of its batches. So of those batches every second one takes the smallest first instead. A single row waits for one
    batch of such a request, however many rows that has and however many such requests there are; and whatever comes in
    the meantime, the first in order begins every other batch.

    Parameters
    ----------
    waiting : sequence of int
        Of one priority.
    batch_rows : int
        The most rows that run together now.
    may_pass : bool
        Whether the first in order has been promised no time, and began the batch before.
    """
    order = range(len(waiting))
    if not may_pass or waiting[0] <= batch_rows:
        return order
    return sorted(order, key=waiting.__getitem__)


def check_sizes(**sizes: int) -> None:
    """Every size is a whole number from 1 on."""
    for name, value in sizes.items():
        if value < 1:
            raise InvalidArgumentError(f"{name} is {value}; it must be at least 1")


def exact_seconds(profile: Profile, *, max_batch: int = MAX_BATCH) -> tuple[float, ...]:
    """Seconds of the whole backbone by rows, 0 to ``max_batch``: (max_batch + 1,).

    Sizes between measured ones are interpolated, beyond the largest time grows in proportion.
    """
    sizes = [b.batch_size for b in profile.batches]
    return seconds_by_rows(sizes, [b.exact_seconds for b in profile.batches], max_batch=max_batch)


def seconds_by_rows(
    sizes: Sequence[float], seconds: Sequence[float], *, max_batch: int = MAX_BATCH
) -> tuple[float, ...]:
    """The same from measured ``sizes``, which rise, and their ``seconds``."""
    rows, measured = np.arange(max_batch + 1, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    inside = np.interp(rows, sizes, measured)
    at = np.where(rows > sizes[-1], measured[-1] * rows / sizes[-1], inside)
    return (0.0, *at[1:].tolist())


def rows_within(profile: Profile, *, seconds: float) -> int:
    """Largest batch, 0 to ``MAX_BATCH``, whose exact execution takes at most ``seconds`` by the profile."""
    by_rows = exact_seconds(profile)
    return max((n for n in range(1, MAX_BATCH + 1) if by_rows[n] <= seconds), default=0)


def thrifty_rows(seconds: Sequence[float], *, dearer: float) -> int:
    """The smallest batch whose rows take at most ``dearer`` times what those of the best batch take. Who comes while a
    larger one runs waits longer, and little is gained by it.

    Parameters
    ----------
    seconds : sequence of float
        Of batches of 0, 1, ... rows, as :func:`exact_seconds` has them.
    dearer : float
        From 1 on.
    """
    by_row = [each / rows for rows, each in enumerate(seconds) if rows]
    return next(rows for rows, each in enumerate(by_row, 1) if each <= dearer * min(by_row))


def batch_cap(profile: Profile, *, latency_seconds: float | None) -> int:
    """Largest batch, 1 to ``MAX_BATCH``, whose exact execution takes at most half of what the latency objective
    allows."""
    if latency_seconds is None:
        return MAX_BATCH
    return max(1, rows_within(profile, seconds=SECONDS_OF_OBJECTIVE * latency_seconds))


def offramp_batching(profile: Profile, *, latency_seconds: float | None) -> OfframpBatching:
    """How a worker with this latency objective begins: at the limit that the profile predicts; without an objective
    always whole batches."""
    if latency_seconds is None:
        return OfframpBatching()
    return OfframpBatching(
        target_seconds=SECONDS_OF_OBJECTIVE * latency_seconds, limit=batch_cap(profile, latency_seconds=latency_seconds)
    )


def _clockwork(latency_seconds: float | None) -> ClockworkBatching:
    if latency_seconds is None:
        raise InvalidArgumentError("batching 'clockwork' needs a latency objective; give one or choose another")
    return ClockworkBatching(latency_seconds)


_BY_NAME: dict[str, Callable[[Profile, float | None], Batching]] = {
    "offramp": lambda profile, slo: offramp_batching(profile, latency_seconds=slo),
    "tf-serving": lambda _profile, _slo: TfServingBatching(),
    "clockwork": lambda _profile, slo: _clockwork(slo),
    "none": lambda _profile, _slo: OfframpBatching(max_batch=1),
}
BATCHING = tuple(_BY_NAME)
#: Those whose requests may wait for a batch to fill though nothing runs.
WAITING = frozenset({"tf-serving"})


def check_name(name: str) -> None:
    """Raise :class:`InvalidArgumentError`, which lists the known names, unless there is a batching policy ``name``."""
    if name not in _BY_NAME:
        raise InvalidArgumentError(f"batching {name!r} is unknown; choose from {', '.join(BATCHING)}")


def batching(name: str, *, profile: Profile, slo_seconds: float | None) -> Batching:
    """A batching policy by name, with its usual settings.

    Raises
    ------
    InvalidArgumentError
        The name is unknown; the message lists the known ones. Or it needs an objective and there is none.
    """
    check_name(name)
    return _BY_NAME[name](profile, slo_seconds)
