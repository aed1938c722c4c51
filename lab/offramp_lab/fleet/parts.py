"""What is simulated: tasks with their plans and arrivals, and what a policy sees of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.fleet import Column, Key, Pool, Present, Window, Workers

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A column, how long a batch of one takes, and what only the simulator knows: how often its answers really differ
    from the reference's."""

    column: Column
    first_seconds: float
    true_disagreement: float

    @property
    def more_seconds(self) -> float:
        """Of each further row of a batch."""
        rows = self.column.key.batch_size - 1
        return (self.column.batch_seconds - self.first_seconds) / rows if rows else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A service that is simulated."""

    name: str
    latency_seconds: float
    max_disagreement: float
    menu: tuple[Measured, ...]
    #: (n,) requests in each second.
    counts: Counts
    #: (m,) requests in each second before, the last one just before the first of ``counts``.
    past: Counts
    late_share: float = 0.01

    def __post_init__(self) -> None:
        for field in ("counts", "past"):
            counts = np.asarray(getattr(self, field))
            if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
                raise InvalidArgumentError(f"Task.{field} must be whole numbers >= 0, one for each second")
        if not self.menu:
            raise InvalidArgumentError(f"Task.menu of {self.name} is empty; a task needs a column")

    def measured(self, key: Key) -> Measured:
        """The column of a key."""
        return next(m for m in self.menu if m.column.key == key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a policy may know of a task: nothing of what is to come, and of answers only what was certified."""

    task: str
    latency_seconds: float
    max_disagreement: float
    late_share: float
    columns: tuple[Column, ...]
    #: What is needed for a forecast, the newest last.
    windows: tuple[Window, ...]
    #: Requests in the second before.
    last_rate: float
    #: What a plan is for (``variation_to_plan_for``): between that of windows as long as the objective and that of
    #: bursts.
    arrival_variation: float
    #: Of the time of the workers that answered, since the policy was last asked.
    busy_share: float
    #: Requests at a time that were waiting or in work, on average since then.
    in_flight: float
    present: Present
    planned: tuple[Workers, ...]

    @property
    def rate(self) -> float:
        """Requests per second in the newest window."""
        return self.windows[-1].rate if self.windows else 0.0


Decision = Mapping[str, Sequence[Workers]]


class Policy(Protocol):
    """Who says which workers there should be. A policy may remember; it begins with the first call."""

    name: str
    interval_seconds: int

    def decide(self, seen: Sequence[Seen], pools: Sequence[Pool], *, now: float) -> Decision:
        """The workers of each task from now on; of those that it leaves out they stay."""
