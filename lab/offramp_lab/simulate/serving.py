"""The discrete-event loop: one worker, one batch at a time, requests in order of arrival."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offramp_core.admission import Entry, Pace, QueueAdmission, forecast
from offramp_core.batching import Batching, Drop, Queue, Start, exact_seconds
from offramp_core.bundle import Profile
from offramp_core.costs import CostTable
from offramp_core.errors import InvalidArgumentError
from offramp_core.execution import carries_on
from offramp_core.plan import Execution
from offramp_lab.simulate.outcome import ANSWERED, DROPPED, REJECTED, SecondsArray, SimulatedRun
from offramp_lab.simulate.stages import Stages, stages_of


class InForce(Protocol):
    """Which ramps were active from which request on; :class:`offramp_lab.policies.PlanInForce` is one."""

    @property
    def since(self) -> int: ...

    @property
    def active(self) -> tuple[int, ...]: ...


class Decided(Protocol):
    """Where each request of a stream left; :class:`offramp_lab.policies.Trace` is one."""

    @property
    def exit(self) -> npt.NDArray[np.intp]: ...

    @property
    def plans(self) -> Sequence[InForce]: ...


def serve_stream(
    arrivals: SecondsArray,
    decided: Decided,
    profile: Profile,
    *,
    batching: Batching,
    execution: Execution = "Auto",
    slo_seconds: float | None = None,
    admission: bool = False,
    front_seconds: float = 0.0,
    batch_seconds: float = 0.0,
) -> SimulatedRun:
    """Serve a stream on one worker.

    Ramps in force are paid by every batch that reaches them and regrouping by every batch that loses rows, so both
    lengthen the queue. A batch holds requests of one set of active ramps only, since a worker switches plans between
    batches. Audits are not simulated.

    Parameters
    ----------
    arrivals : (n,) float64
        Seconds, not falling.
    decided : Trace
        Where each of the n requests left, and the plans in force.
    profile : Profile
        Seconds by batch size.
    batching : Batching
    execution : {"Auto", "ResultsOnly", "ComputeSaving"}
        ``Auto`` decides from the profile, as a worker does.
    slo_seconds : float, optional
        What counts as a miss.
    admission : bool
        Reject at arrival what could not meet ``slo_seconds`` if nobody left early, as a worker with that objective
        does; the policy then sees the times that a worker predicts instead of the true longest ones.
    front_seconds : float
        Added to each request's latency: receiving, parsing and replying happen beside the engine.
    batch_seconds : float
        Added to each batch: what the engine does around the model.

    Raises
    ------
    InvalidArgumentError
        Arrivals fall, are not finite, or do not match the stream; a time is negative; admission without an objective.
    """
    _check(arrivals, decided, front_seconds=front_seconds, batch_seconds=batch_seconds)
    table = CostTable(profile, sizes=[batching.padded(rows) for rows in range(batching.max_batch + 1)])
    carry_on = carries_on(execution, profile)
    entry = _entry(profile, batching, slo_seconds) if admission else None
    periods = _periods(decided, table)
    loop = _Loop(arrivals.tolist(), periods, batching, entry=entry, carry_on=carry_on, batch_seconds=batch_seconds)
    loop.run()
    latency = np.array(loop.answered) - arrivals + front_seconds
    return SimulatedRun(
        latency=latency,
        status=np.array(loop.status, dtype=np.int8),
        busy_seconds=loop.busy,
        span_seconds=max(loop.free_at, float(arrivals[-1])) - float(arrivals[0]),
        batches=loop.batches,
        slo_seconds=slo_seconds,
    )


@dataclass(frozen=True, slots=True)
class _Period:
    """Requests from ``begin`` to before ``end`` run through the same stages."""

    begin: int
    end: int
    stages: Stages
    position: list[int]  # by request, from ``begin`` on: the stage where it leaves


def _periods(decided: Decided, table: CostTable) -> list[_Period]:
    """Plans in force, joined where only thresholds changed."""
    starts = [plan for i, plan in enumerate(decided.plans) if i == 0 or plan.active != decided.plans[i - 1].active]
    ends = [*(plan.since for plan in starts[1:]), len(decided.exit)]
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Stages] = {}
    periods = []
    for plan, end in zip(starts, ends, strict=True):
        left = decided.exit[plan.since : end]
        used = tuple(int(ramp) for ramp in np.unique(left[left >= 0]))
        foresight = tuple(ramp for ramp in used if ramp not in plan.active)
        if (plan.active, foresight) not in known:
            known[plan.active, foresight] = stages_of(table, active=plan.active, used=foresight)
        stages = known[plan.active, foresight]
        by_ramp = np.array([*stages.position, len(stages.seconds) - 1])  # -1, no exit, picks the last
        periods.append(_Period(plan.since, end, stages, by_ramp[left].tolist()))
    return periods


@dataclass(slots=True)
class _Entry:
    """The way into the queue; the decisions are a worker's."""

    door: QueueAdmission
    began: float = float("-inf")
    rows: int = 0  # of the batch that runs
    late: int = 0
    on_time: set[int] = field(default_factory=set)  # requests admitted because they could meet the objective

    def admits(self, request: int, *, now: float, ahead: int, batch_rows: int) -> bool:
        """Whether a request that comes while the last batch may still run joins the queue."""
        pace = self.door.pace
        running = pace.left(self.rows, began=self.began, now=now)
        seen = forecast(pace, running=running, ahead=ahead, rows=1, batch_rows=batch_rows)
        entry = self.door.entry(seen)
        if entry is Entry.ON_CREDIT:
            self.door = self.door.spent(1)
        elif self.door.promises(entry, seen):
            self.on_time.add(request)
        return entry is not Entry.REFUSED

    def start(self, batch: list[int], arrivals: list[float], *, now: float, end: float) -> None:
        """A batch of requests, which came at ``arrivals``, runs from ``now`` to ``end``."""
        self.began, self.rows = now, len(batch)
        self.door = self.door.stalled(end - now, now=end)
        self.late = sum(self.door.late(arrivals[r], now=end) for r in batch if r in self.on_time)
        self.on_time.difference_update(batch)

    def learn(self, seconds: float) -> None:
        """That batch has ended."""
        self.door, self.rows = self.door.after(rows=self.rows, seconds=seconds, late=self.late), 0


def _entry(profile: Profile, batching: Batching, slo_seconds: float | None) -> _Entry:
    if slo_seconds is None:
        raise InvalidArgumentError("admission needs slo_seconds, the objective that requests are admitted for")
    return _Entry(QueueAdmission(slo_seconds, Pace(exact_seconds(profile, max_batch=batching.max_batch))))


class _Loop:
    """The server's state between two decisions. Times are floats and rows ints: numpy would cost more than it saves
    here."""

    def __init__(
        self,
        arrivals: list[float],
        periods: list[_Period],
        policy: Batching,
        *,
        entry: _Entry | None,
        carry_on: bool,
        batch_seconds: float,
    ) -> None:
        n = len(arrivals)
        self._arrivals, self._periods, self._policy = arrivals, periods, policy
        self._entry, self._carry_on, self._batch_seconds = entry, carry_on, batch_seconds
        self._ended: tuple[int, float] | None = None  # rows and seconds of a batch that nothing was learned from yet
        self._queue: list[int] = []  # accepted requests; those before ``_head`` have been served or dropped
        self._head = 0
        self._next = 0  # first request that has not come yet
        self._period = 0
        self.answered = [float("nan")] * n
        self.status = [ANSWERED] * n
        self.busy, self.free_at, self.batches = 0.0, 0.0, 0

    def run(self) -> None:
        """Serve until nothing waits and nothing comes."""
        now, n = self._arrivals[0], len(self._arrivals)
        while self._head < len(self._queue) or self._next < n:
            if self._head == len(self._queue):
                now = max(now, self._arrivals[self._next])
            self._admit(now)
            if self._head < len(self._queue):
                now = self._step(now)
        self.free_at = now

    def _admit(self, now: float) -> None:
        arrivals, queue, room = self._arrivals, self._queue, self._policy.queue_rows
        while self._next < len(arrivals) and arrivals[self._next] <= now:
            waiting = len(queue) - self._head
            if (room is not None and waiting >= room) or not self._admits(waiting):
                self.status[self._next] = REJECTED
            else:
                queue.append(self._next)
            self._next += 1
        self._learn()

    def _admits(self, waiting: int) -> bool:
        """Whether the next request may join ``waiting`` others."""
        now, batch_rows = self._arrivals[self._next], self._policy.batch_rows
        return self._entry is None or self._entry.admits(self._next, now=now, ahead=waiting, batch_rows=batch_rows)

    def _learn(self) -> None:
        """What comes while a batch runs meets the policy as it was before."""
        if self._ended is None:
            return
        rows, seconds = self._ended
        self._policy, self._ended = self._policy.after(rows=rows, seconds=seconds), None
        if self._entry is not None:
            self._entry.learn(seconds)

    def _step(self, now: float) -> float:
        """One decision; returns when the next one is due."""
        head = self._queue[self._head]
        period = self._current(head)
        worst = period.stages.worst if self._entry is None else self._entry.door.pace.seconds
        decision = self._policy.decide(Queue(now, len(self._queue) - self._head, self._arrivals[head], worst))
        if isinstance(decision, Start):
            return self._start(now, decision.rows, period)
        if isinstance(decision, Drop):
            self._drop(decision.rows)
            return now
        if self._next < len(self._arrivals):
            return min(decision.until, self._arrivals[self._next])
        return decision.until

    def _current(self, head: int) -> _Period:
        while head >= self._periods[self._period].end:
            self._period += 1
        return self._periods[self._period]

    def _start(self, now: float, rows: int, period: _Period) -> float:
        last = self._head + rows
        if self._queue[last - 1] >= period.end:
            last = bisect_left(self._queue, period.end, self._head, last)
        batch = self._queue[self._head : last]
        self._head = last
        leaves = [0] * len(period.stages.seconds)
        for request in batch:
            leaves[period.position[request - period.begin]] += 1
        ends, seconds = period.stages.run(tuple(leaves), carry_on=self._carry_on)
        begin = now + self._batch_seconds
        for request in batch:
            self.answered[request] = begin + ends[period.position[request - period.begin]]
        self.busy += self._batch_seconds + seconds
        self._ended = len(batch), self._batch_seconds + seconds
        if self._entry is not None:
            self._entry.start(batch, self._arrivals, now=now, end=begin + seconds)
        self.batches += 1
        return begin + seconds

    def _drop(self, rows: int) -> None:
        for request in self._queue[self._head : self._head + rows]:
            self.status[request] = DROPPED
        self._head += rows


def _check(arrivals: SecondsArray, decided: Decided, **seconds: float) -> None:
    if arrivals.ndim != 1 or len(arrivals) == 0 or len(arrivals) != len(decided.exit):
        raise InvalidArgumentError(
            f"arrivals have shape {arrivals.shape}; give one time for each of {len(decided.exit)} requests"
        )
    check_rising(arrivals)
    for name, value in seconds.items():
        if not 0 <= value < np.inf:
            raise InvalidArgumentError(f"{name} is {value}; it must be >= 0")


def check_rising(arrivals: SecondsArray) -> None:
    """Times are finite and do not fall.

    Raises
    ------
    InvalidArgumentError
        Names the first row at fault.
    """
    good = np.isfinite(arrivals)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise InvalidArgumentError(f"arrivals[{row}] is {arrivals[row]}; times must be finite seconds")
    falls = np.flatnonzero(np.diff(arrivals) < 0)
    if len(falls):
        row = int(falls[0]) + 1
        raise InvalidArgumentError(
            f"arrivals[{row}] is {arrivals[row]}, before the one ahead of it; times must not fall"
        )
