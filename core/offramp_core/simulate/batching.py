"""How waiting requests become batches. A policy is asked whenever the server is idle and something waits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from offramp_core.errors import InvalidArgumentError

MAX_BATCH = 32
MAX_QUEUE = 1024


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
    """A policy. ``queue_rows`` requests at most wait (None: any number), one that finds the queue full is rejected."""

    @property
    def max_batch(self) -> int: ...

    @property
    def queue_rows(self) -> int | None: ...

    def padded(self, rows: int) -> int:
        """The batch size that runs when ``rows`` rows are in it."""

    def decide(self, *, now: float, queued: int, head_arrival: float, worst_seconds: Sequence[float]) -> Decision:
        """What to do with ``queued`` > 0 waiting requests, the oldest of which came at ``head_arrival``.

        ``worst_seconds`` is the longest a batch can take, by its rows.
        """


@dataclass(frozen=True, slots=True)
class OfframpBatching:
    """Whatever waits when the engine becomes idle, up to a cap; no artificial delay. Source: offramp_worker.engine.batcher."""

    max_batch: int = MAX_BATCH
    queue_rows: int | None = MAX_QUEUE

    def __post_init__(self) -> None:
        check_sizes(max_batch=self.max_batch)

    def padded(self, rows: int) -> int:
        return rows

    def decide(self, *, now: float, queued: int, head_arrival: float, worst_seconds: Sequence[float]) -> Decision:
        del now, head_arrival, worst_seconds
        return Start(min(queued, self.max_batch))


@dataclass(frozen=True, slots=True)
class TfServingBatching:
    """Batches that wait to fill, up to a timeout, and are padded to allowed sizes.

    A batch runs when it is full or when ``batch_timeout_micros`` have passed since its first request; a request is rejected when
    ``max_enqueued_batches`` full ones wait. Source: TensorFlow Serving, `BatchingParameters` and `BasicBatchScheduler`
    (tensorflow/core/kernels/batching_util/basic_batch_scheduler.h).
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

    def decide(self, *, now: float, queued: int, head_arrival: float, worst_seconds: Sequence[float]) -> Decision:
        del worst_seconds
        ripe_at = head_arrival + self.batch_timeout_micros * 1e-6
        if queued >= self.max_batch or ripe_at <= now:
            return Start(min(queued, self.max_batch))
        return Wait(ripe_at)


@dataclass(frozen=True, slots=True)
class ClockworkBatching:
    """The largest batch that still answers its oldest request in time; what can no longer be answered in time is dropped.

    There is a strategy for every batch size: it may start until the head's deadline less what a batch of that size takes. The largest
    one that may still start wins, since its last moment comes first. Times are those of a batch that nobody leaves. Source: Clockwork
    (Gujarati et al., OSDI 2020), section 5.3.
    """

    slo_seconds: float
    max_batch: int = MAX_BATCH
    queue_rows: int | None = field(default=None)

    def __post_init__(self) -> None:
        check_sizes(max_batch=self.max_batch)
        if not self.slo_seconds > 0:
            raise InvalidArgumentError(f"slo_seconds is {self.slo_seconds}; Clockwork needs a positive deadline")

    def padded(self, rows: int) -> int:
        return rows

    def decide(self, *, now: float, queued: int, head_arrival: float, worst_seconds: Sequence[float]) -> Decision:
        left = head_arrival + self.slo_seconds - now
        largest = min(queued, self.max_batch)
        fits = bisect_right(worst_seconds, left, 1, largest + 1) - 1
        return Start(fits) if fits >= 1 else Drop(1)


def check_sizes(**sizes: int) -> None:
    """Every size is a whole number from 1 on."""
    for name, value in sizes.items():
        if value < 1:
            raise InvalidArgumentError(f"{name} is {value}; it must be at least 1")


_BY_NAME: dict[str, Callable[[float], Batching]] = {
    "offramp": lambda _slo: OfframpBatching(),
    "tf-serving": lambda _slo: TfServingBatching(),
    "clockwork": ClockworkBatching,
    "none": lambda _slo: OfframpBatching(max_batch=1),
}
BATCHING = tuple(_BY_NAME)


def batching(name: str, *, slo_seconds: float) -> Batching:
    """A batching policy by name, with its usual settings.

    Raises
    ------
    InvalidArgumentError
        The name is unknown; the message lists the known ones.
    """
    if name not in _BY_NAME:
        raise InvalidArgumentError(f"batching {name!r} is unknown; choose from {', '.join(BATCHING)}")
    return _BY_NAME[name](slo_seconds)
