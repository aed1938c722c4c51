"""From requests to batches: a bounded queue in order of priority and deadline, and the policy that cuts batches from
it.

What to run, whom to admit and how large batches may be are pure functions in :mod:`offramp_core.batching` and
:mod:`offramp_core.admission`, which the simulator calls as well; here are the lock, the lanes and the clock.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp_core.admission import Entry, Forecast, Pace, QueueAdmission, due_after, forecast
from offramp_core.batching import Batching, Decision, Drop, Queue, Start, Wait, in_turn
from offramp_core.sharing import Claim
from offramp_worker.engine.queue.relief import Relief
from offramp_worker.engine.queue.tickets import HIGHEST_PRIORITY, Array, OverloadedError, Ticket, UnableError


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows that run together: ``x`` (n, ...), and for row i the request and the row of it that it belongs to.

    ``taken`` is when they left the queue, ``followed`` whether the engine went from batch to batch with requests
    waiting all the time, ``overload`` whether requests that name no budget may have a larger one than everybody's, and
    ``priority`` the most urgent one that may.
    """

    x: Array
    owners: list[tuple[Ticket, int]]
    never_exit: bool
    taken: float = 0.0
    followed: bool = False
    overload: bool = False
    priority: int = HIGHEST_PRIORITY

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def eased(self) -> bool:
        """Whether any row has the larger budget of overload."""
        return any(ticket.eased for ticket, _ in self.owners)

    @property
    def loosened(self) -> bool:
        """Whether any row may have it."""
        return self.overload or self.eased


class _Lane:
    """Waiting requests of one kind, first to run first."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.rows = 0

    def add(self, ticket: Ticket) -> None:
        insort(self.tickets, ticket, key=_order)
        self.rows += ticket.waiting

    def remove(self, ticket: Ticket) -> bool:
        """Whether it was there."""
        at = bisect_left(self.tickets, _order(ticket), key=_order)
        if at == len(self.tickets) or self.tickets[at] is not ticket:
            return False
        del self.tickets[at]
        self.rows -= ticket.waiting
        return True

    def drop(self, tickets: list[Ticket]) -> None:
        """Forget requests whose rows all run, given in order."""
        if self.tickets[: len(tickets)] == tickets:
            del self.tickets[: len(tickets)]
        else:
            gone = set(tickets)
            self.tickets = [ticket for ticket in self.tickets if ticket not in gone]

    def rows_before(self, ticket: Ticket) -> int:
        """Rows that would run before those of a request that is not here yet."""
        at = bisect_left(self.tickets, _order(ticket), key=_order)
        return self.rows if at == len(self.tickets) else sum(t.waiting for t in self.tickets[:at])

    def rows_up_to(self, priority: int) -> int:
        """Rows of requests that are no less urgent."""
        at = bisect_right(self.tickets, priority, key=lambda ticket: ticket.priority)
        return self.rows if at == len(self.tickets) else sum(t.waiting for t in self.tickets[:at])


class Batcher:
    """Requests under the plan and requests that must not exit early wait in a lane each. A batch that is taken must
    be :meth:`ended`."""

    def __init__(
        self,
        *,
        policy: Batching,
        door: QueueAdmission,
        max_rows: int,
        clock: Callable[[], float] = time.perf_counter,
        changed: threading.Condition | None = None,
        join: Callable[[Sequence[Array]], Array] = np.concatenate,
        group: Callable[[Array], int] | None = None,
        may_ease: Callable[[], bool] = lambda: False,
        of_use: Callable[[Ticket], bool] = lambda ticket: ticket.may_be_eased(budget=0.0),
    ) -> None:
        """``changed`` is what threads wait on for requests; a simulation of time brings its own. ``join`` makes one
        batch of rows.

        Requests share a batch only if ``group`` says the same of their rows: one long text would have all others filled
        up to its length. ``may_ease`` says whether the plan in force has thresholds for overload, ``of_use`` for whom.
        """
        self._relief = Relief(door.pace, offered=may_ease, of_use=of_use)
        self._join, self._group = join, group
        self._policy, self._door, self._clock = policy, door, clock
        self._max_rows, self._objective = max_rows, door.objective_seconds
        self._changed = changed or threading.Condition()
        self._lanes = {False: _Lane(), True: _Lane()}
        self._rows = self._number = 0
        self._closed = False
        self._next_expiry = math.inf  # no waiting request expires before it
        self._given_up: list[Ticket] = []
        self._woken = False
        self._taken: list[Batch] = []  # not ended yet: the one that runs, and those that wait for their turn
        self._last_end = -math.inf
        self._busy = False  # whether requests have waited ever since the last batch ended
        self._began = 0  # the number of the request that the last batch began with

    # --- called from any thread -----------------------------------------------------------------

    def put(self, ticket: Ticket, *, wake: bool = True) -> None:
        """Queue all rows of a request. Without ``wake`` a thread that waits in :meth:`take` sleeps on
        until :meth:`wake`.

        Raises
        ------
        OverloadedError
            They do not fit, or could not be answered in time behind those that wait.
        UnableError
            The worker is shutting down, or needs longer for this request alone than its timeout.
        """
        if self._group is not None:
            ticket.group = self._group(ticket.x)
        with self._changed:
            if self._closed:
                raise UnableError("the worker is shutting down; try another one")
            self._admit(ticket)
            self._queue(ticket)
            if wake:
                self.wake()

    def put_back(self, ticket: Ticket) -> bool:
        """Queue a request that waited for another one's answer, whatever waits here; False when that is too late."""
        with self._changed:
            if self._closed:
                return False
            if self._group is not None:
                ticket.group = self._group(ticket.x)
            # From when it came: who has waited for another request's answer does not begin again.
            _set_due(ticket, self._door, batch_rows=self._policy.batch_rows)
            self._queue(ticket)
            self.wake()
            return True

    def remove(self, ticket: Ticket) -> int:
        """Take the rows of a request that no batch has yet out of the queue; how many there were."""
        with self._changed:
            return self._remove(ticket)

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
    def rows(self) -> int:
        """Rows that wait."""
        return self._rows

    @property
    def batch_rows(self) -> int:
        """The most rows that run together now."""
        return self._policy.batch_rows

    @property
    def closed(self) -> bool:
        """Whether no more requests are taken."""
        return self._closed

    @property
    def finished(self) -> bool:
        """Whether nothing waits and nothing will come."""
        return self._closed and not self._rows

    def overload_seconds(self) -> float | None:
        """For how long there has been overload; None without."""
        with self._changed:
            self._review(now := self._clock())
            return now - self._relief.since if self._relief.on else None

    # --- called by whoever runs batches -------------------------------------------------------------------

    def take(self, *, wait: bool, most: int = sys.maxsize) -> Batch | None:
        """The next batch, of at most so many rows. None when there is none yet; with ``wait`` at a :meth:`wake`, when
        none will ever come, or for :meth:`given_up`."""
        with self._changed:
            start, now = self._start(wait=wait)
            return None if start is None else self._cut(*self._in_turn(), min(most, start.rows), now)

    def claim(self, *, wait: bool) -> Claim | None:
        """What the next batch asks for, which is not taken yet; None as of :meth:`take`."""
        with self._changed:
            if self._start(wait=wait)[0] is None:
                return None
            pace, first = self._door.pace, self._first_lane().tickets[0]
            behind = sum(lane.rows_up_to(first.priority) for lane in self._lanes.values()) - 1
            return Claim(first.run_by, pace.seconds[1], pace.queue(behind, batch_rows=self.batch_rows), first.expires)

    def rest(self) -> None:
        """Where somebody else takes the batches: until :meth:`wake`, or :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._closed)
            self._woken = False

    def given_up(self) -> list[Ticket]:
        """Requests whose time ran out since the last call; their rows that waited will not run."""
        with self._changed:
            tickets, self._given_up = self._given_up, []
            return tickets

    def ended(self, batch: Batch, *, eased: bool = False) -> None:
        """A batch has run: learn from how long it took, and from how long the engine was kept from the next one in
        all. An ``eased`` one teaches nothing about everybody's plan."""
        with self._changed:
            now, rows = self._clock(), len(batch)
            began = max(batch.taken, self._last_end)
            self._policy = self._policy.after(rows=rows, seconds=now - began)
            kept_from = self._last_end if batch.followed else began
            door = self._door.stalled(now - kept_from, now=now)
            door = door.after(rows=rows, seconds=now - kept_from, late=_late(door, batch, now))
            if eased:
                self._relief.after(rows=rows, seconds=now - kept_from)
                door = replace(door, pace=self._door.pace)
            else:
                self._relief.timed_at = now
            self._door = door
            self._taken.remove(batch)
            self._last_end, self._busy = now, self._rows > 0
            self._review(now)

    # --- under the lock -------------------------------------------------------------------------

    def _admit(self, ticket: Ticket) -> None:
        """Say when the request is due; raise unless it fits and can be answered in time."""
        rows, now, pace, batch_rows = len(ticket.x), ticket.admitted, self._door.pace, self._policy.batch_rows
        timeout = None if ticket.expires == math.inf else ticket.expires - now
        _set_due(ticket, self._door, batch_rows=batch_rows)
        ticket.number = self._number + 1
        if self._rows + rows > self._max_rows:
            taken = f"{self._rows} of {self._max_rows} queue places are taken"
            wait = pace.queue(self._rows, batch_rows=batch_rows)
            raise _overloaded(f"{taken}; {rows} more do not fit; retry later", wait)
        if timeout is None and self._objective is None:
            return
        ahead = sum(lane.rows_before(ticket) for lane in self._lanes.values())
        relief, door = self._relief, self._door
        offered, usual = relief.offered, self._foreseen(pace, ahead=ahead, rows=rows, now=now)
        seen = self._foreseen(relief.pace, ahead=ahead, rows=rows, now=now) if relief.on else usual
        _check_timeout(seen, timeout)
        if self._objective is None:
            return
        if offered and relief.asked(door, ticket, wait=usual.wait):
            seen = self._foreseen(relief.pace, ahead=ahead, rows=rows, now=now)
        entry = self._door.entry(seen)
        if entry is Entry.REFUSED:
            raise _too_late(seen, self._objective)
        ticket.on_time = self._door.promises(entry, seen)
        if entry is Entry.ON_CREDIT:
            self._door = self._door.spent(rows)
        if offered:
            relief.came(door, rows=rows, batch_rows=batch_rows, now=now)

    def _foreseen(self, pace: Pace, *, ahead: int, rows: int, now: float) -> Forecast:
        """What awaits a request of so many ``rows`` that has so many ``ahead`` in the queue."""
        left = _seconds_left(self._taken, pace, last_end=self._last_end, now=now)
        return forecast(pace, running=left, ahead=ahead, rows=rows, batch_rows=self._policy.batch_rows)

    def _review(self, now: float) -> None:
        """Whether there is overload any more."""
        if self._relief.on:
            left = _seconds_left(self._taken, self._door.pace, last_end=self._last_end, now=now)
            rows = sum(lane.rows_up_to(self._relief.priority) for lane in self._lanes.values())
            wait = left + self._door.pace.queue(rows, batch_rows=self._policy.batch_rows)
            self._door = self._relief.review(self._door, wait=wait, now=now)

    def _queue(self, ticket: Ticket) -> None:
        self._number += 1
        ticket.number = self._number
        self._lanes[ticket.never_exit].add(ticket)
        self._rows += ticket.waiting
        self._next_expiry = min(self._next_expiry, ticket.expires)

    def _remove(self, ticket: Ticket) -> int:
        rows = ticket.waiting if self._lanes[ticket.never_exit].remove(ticket) else 0
        self._rows -= rows
        return rows

    def _first_lane(self) -> _Lane:
        return min((lane for lane in self._lanes.values() if lane.tickets), key=lambda lane: _order(lane.tickets[0]))

    def _in_turn(self) -> tuple[_Lane, Sequence[Ticket]]:
        """The lane that the next batch is cut from, and its requests in the order in which they join it."""
        lane = self._first_lane()
        first, batch_rows = lane.tickets[0], self._policy.batch_rows
        may_pass = self._began == first.number and not first.on_time
        if not may_pass or first.waiting <= batch_rows:  # nearly always
            self._began = first.number
            return lane, lane.tickets
        rivals = _rivals(self._lanes.values(), first, batch_rows=batch_rows)
        self._began, never_exit = rivals[0].number, rivals[0].never_exit
        lane = self._lanes[never_exit]
        behind = [t for t in lane.tickets if t.priority != first.priority]
        return lane, [*(t for t in rivals if t.never_exit == never_exit), *behind]

    def _start(self, *, wait: bool) -> tuple[Start | None, float]:
        """The decision to begin a batch, and when; None as of :meth:`take`."""
        while True:
            now = self._clock()
            self._expire(now)
            decision = self._decide(now)
            if isinstance(decision, Drop):
                self._give_up(self._first_lane().tickets[0])
                continue
            if isinstance(decision, Start):
                return decision, now
            self._busy = False  # nothing waits, or it waits for a batch to fill
            if not wait:
                return None, now
            if self._given_up or self._woken or (self._closed and not self._rows):
                self._woken = False
                return None, now
            until = min(math.inf if decision is None else decision.until, self._next_expiry)
            self._changed.wait(None if until == math.inf else until - now)

    def _decide(self, now: float) -> Decision | None:
        if not self._rows:
            return None
        lane = self._first_lane()
        head = lane.tickets[0]
        decision = self._policy.decide(Queue(now, lane.rows, head.admitted, self._door.pace.seconds, head.expires))
        if self._closed and isinstance(decision, Wait):
            return Start(min(lane.rows, self._policy.batch_rows))  # nothing more will come to fill the batch
        return decision

    def _expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        tickets = [ticket for lane in self._lanes.values() for ticket in lane.tickets]
        for ticket in tickets:
            if ticket.expires <= now:
                self._give_up(ticket)
        self._next_expiry = min((t.expires for t in tickets if t.expires > now), default=math.inf)

    def _give_up(self, ticket: Ticket) -> None:
        self._remove(ticket)
        self._given_up.append(ticket)

    def _cut(self, lane: _Lane, tickets: Sequence[Ticket], rows: int, now: float) -> Batch:
        parts, owners, finished = _begin(tickets, rows)
        lane.drop(finished)
        lane.rows -= len(owners)
        self._rows -= len(owners)
        never, on, priority = lane is self._lanes[True], self._relief.on, self._relief.priority
        batch = Batch(self._join(parts), owners, never, now, followed=self._busy, overload=on, priority=priority)
        self._taken.append(batch)
        return batch


def _begin(tickets: Sequence[Ticket], rows: int) -> tuple[list[Array], list[tuple[Ticket, int]], list[Ticket]]:
    """Begin the first ``rows`` rows of some requests; what they are, whose, and the requests that have no more."""
    parts: list[Array] = []
    owners: list[tuple[Ticket, int]] = []
    finished: list[Ticket] = []
    group = tickets[0].group
    for ticket in tickets:
        if ticket.group != group:
            continue  # in its turn it is first, and then its like run
        begin, end = ticket.begun, min(len(ticket.x), ticket.begun + rows - len(owners))
        parts.append(ticket.x[begin:end])
        owners.extend((ticket, row) for row in range(begin, end))
        ticket.begun = end
        if end == len(ticket.x):
            finished.append(ticket)
        if len(owners) == rows:
            break
    return parts, owners, finished


def _set_due(ticket: Ticket, door: QueueAdmission, *, batch_rows: int) -> None:
    """Say when a request should run."""
    own = door.pace.queue(len(ticket.x), batch_rows=batch_rows)
    wish = min(ticket.expires, ticket.deadline) - ticket.admitted
    ticket.run_by = ticket.admitted + due_after(own, objective_seconds=door.objective_seconds, wish_seconds=wish)


def _rivals(lanes: Iterable[_Lane], first: Ticket, *, batch_rows: int) -> list[Ticket]:
    """Requests of the priority of the ``first``, in the order in which they begin where some may pass it."""
    rivals = sorted((t for some in lanes for t in some.tickets if t.priority == first.priority), key=_order)
    return [rivals[i] for i in in_turn([t.waiting for t in rivals], batch_rows=batch_rows, may_pass=True)]


def _check_timeout(seen: Forecast, timeout: float | None) -> None:
    """Raise where an answer would come after the request's own timeout."""
    if timeout is None:
        return
    if seen.own > timeout:
        raise UnableError(
            f"parameters.timeout: is {timeout * 1e6:.0f} us; this worker needs about {seen.own * 1e6:.0f} for the "
            "request alone",
            retry_after_seconds=None,
        )
    if seen.total > timeout:
        raise _overloaded(
            f"an answer would take about {seen.total:.3f} s; the request's timeout is {timeout:.3f} s; retry later",
            seen.wait,
        )


def _too_late(seen: Forecast, objective: float) -> OverloadedError:
    return _overloaded(
        f"an answer would take about {seen.total:.3f} s, too close to the latency objective of {objective:g} s; "
        "retry later",
        seen.wait,
    )


def _late(door: QueueAdmission, batch: Batch, now: float) -> int:
    """Rows that are late if they are answered now and should not be."""
    return sum(door.late(t.admitted, now=now) for t, _ in batch.owners if t.on_time)


def _seconds_left(taken: Sequence[Batch], pace: Pace, *, last_end: float, now: float) -> float:
    """Of the batch that runs and of those that wait for their turn."""
    if not taken:
        return 0.0
    running, *others = taken
    began = max(running.taken, last_end)
    return pace.left(len(running), began=began, now=now) + sum(pace.seconds[len(b)] for b in others)


def _order(ticket: Ticket) -> tuple[int, float, int]:
    return ticket.priority, ticket.run_by, ticket.number


def _overloaded(message: str, wait_seconds: float) -> OverloadedError:
    return OverloadedError(message, retry_after_seconds=max(1, math.ceil(wait_seconds)))
