"""Workers of several tasks over time, second by second, with a policy in the loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from offramp_core.fleet import (
    DAY_SECONDS,
    DAYS,
    HOUR_SECONDS,
    HOURS,
    RECENT,
    Key,
    Pool,
    Present,
    Step,
    Window,
    Workers,
    burst_variation,
    next_steps,
    variation_to_plan_for,
)
from offramp_lab.fleet.compiled import ANSWERED, BUSY, FIGURES, MISSED, SOJOURN, Floats, serve_until
from offramp_lab.fleet.parts import Policy, Seen, Task

SWITCH_SECONDS = 0.05  # between two batches, in which a worker takes another plan
WINDOW_SECONDS = 15
LEAD_SECONDS = 120  # of earlier days that a policy may look ahead
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """One task, by second: requests, those that were missed (late or given up), those answered otherwise than the
    reference answers (expected), what its workers cost, and how many there were, starting ones included."""

    task: str
    requests: Floats
    missed: Floats
    disagreed: Floats
    answered: Floats
    cost: Floats
    workers: Floats


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a policy."""

    policy: str
    tasks: tuple[TaskOutcome, ...]

    def _sum(self, field: str) -> float:
        return float(sum(getattr(task, field).sum() for task in self.tasks))

    @property
    def cost(self) -> float:
        return self._sum("cost")

    @property
    def missed(self) -> float:
        """A share of all requests."""
        return self._sum("missed") / max(self._sum("requests"), 1.0)

    @property
    def disagreement(self) -> float:
        """A share of the answered requests."""
        return self._sum("disagreed") / max(self._sum("answered"), 1.0)

    def keeps_budgets(self, tasks: Sequence[Task]) -> bool:
        """Whether every task's answers differ as often as its budget allows, or less."""
        shares = (float(o.disagreed.sum()) / max(float(o.answered.sum()), 1.0) for o in self.tasks)
        return all(share <= task.max_disagreement for share, task in zip(shares, tasks, strict=True))


def simulate(tasks: Sequence[Task], pools: Sequence[Pool], policy: Policy, *, seed: int = 0) -> Outcome:
    """Play all tasks from their first second to their last one.

    The workers of the first decision are there at once. Afterwards a worker answers its column's start-up time after
    it was started, is paid for from then until it is stopped, and finishes the batch that it has begun.
    """
    services = [_Service(task, np.random.default_rng([seed, i])) for i, task in enumerate(tasks)]
    planned: dict[str, tuple[Workers, ...]] = {task.name: () for task in tasks}
    cost = {pool.name: pool.cost_per_hour / 3600 for pool in pools}
    now, last = 0, max(len(task.counts) for task in tasks)
    while now < last:
        if now % policy.interval_seconds == 0:
            seen = [one.seen(now, planned[one.task.name], policy.interval_seconds) for one in services]
            planned |= {name: tuple(workers) for name, workers in policy.decide(seen, pools, now=now).items()}
        if any(one.is_on_its_way(planned[one.task.name]) for one in services):
            steps = next_steps({one.task.name: one.present() for one in services}, planned, pools)
            for one in services:
                one.take(steps[one.task.name], now, at_once=now == 0)
        until = now + 1  # while workers start or go, else until somebody decides again
        if not any(one.is_on_its_way(planned[one.task.name]) for one in services):
            until = min(now - now % policy.interval_seconds + policy.interval_seconds, last)
        for one in services:
            one.let_pass(now, until, cost)
        now = until
    return Outcome(policy.name, tuple(one.outcome() for one in services))


@dataclass
class _Service:
    """A task's workers and queues. ``free`` is when each ready worker of a column is free, ``starting`` when each one
    that starts will be ready, ``waiting`` the arrivals of those who wait at a column."""

    task: Task
    rng: np.random.Generator
    free: dict[Key, Floats] = field(default_factory=dict)
    starting: dict[Key, list[float]] = field(default_factory=dict)
    waiting: dict[Key, Floats] = field(default_factory=dict)
    lost: Floats = field(default_factory=lambda: np.empty(0))  # those who wait where no worker is
    settled: tuple[Workers, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.task.counts)
        self.by_key = {m.column.key: m for m in self.task.menu}
        self.figures = {name: np.zeros(n) for name in ("missed", "disagreed", "answered", "cost", "workers")}
        self.counts = np.concatenate([self.task.past, self.task.counts])
        self.totals = np.concatenate([[0], np.cumsum(self.counts)])
        self.slots = max(1, round(1 / self.task.latency_seconds))
        self.busy = self.able = self.sojourn = 0.0
        self.windows: dict[int, Window] = {}
        self.known: tuple[int, tuple[Window, ...]] = (-1, ())
        self.variances, self.means = np.zeros(n), np.zeros(n)  # of counts within each second

    # --- what a policy sees ------------------------------------------------------------------------

    def seen(self, now: int, planned: tuple[Workers, ...], interval: int) -> Seen:
        """Resets what is averaged between two decisions."""
        busy, in_flight = self.busy / max(self.able, 1e-9), self.sojourn / interval
        self.busy = self.able = self.sojourn = 0.0
        return Seen(
            task=self.task.name,
            latency_seconds=self.task.latency_seconds,
            max_disagreement=self.task.max_disagreement,
            late_share=self.task.late_share,
            columns=tuple(m.column for m in self.task.menu),
            windows=self._windows(now),
            last_rate=float(self.counts[max(now + len(self.task.past) - 1, 0)]),
            arrival_variation=self._variation(now),
            busy_share=min(busy, 1.0),
            in_flight=in_flight,
            present=self.present(),
            planned=planned,
        )

    def _windows(self, now: int) -> tuple[Window, ...]:
        """Of whole windows since the beginning, the same until the next one ends."""
        now -= now % WINDOW_SECONDS
        if self.known[0] != now:
            self.known = now, self._windows_at(now)
        return self.known[1]

    def _windows_at(self, now: int) -> tuple[Window, ...]:
        ends = set(range(now - int(HOUR_SECONDS) - RECENT * WINDOW_SECONDS, now, WINDOW_SECONDS))
        for hour in range(1, HOURS + 1):
            begin = now - hour * int(HOUR_SECONDS)
            ends |= set(range(begin - RECENT * WINDOW_SECONDS, begin + LEAD_SECONDS, WINDOW_SECONDS))
        for day in range(1, DAYS + 1):
            begin = now - day * int(DAY_SECONDS)
            ends |= set(range(begin, begin + LEAD_SECONDS, WINDOW_SECONDS))
        every = (end + WINDOW_SECONDS for end in sorted(ends))
        return tuple(self._window(end) for end in every if WINDOW_SECONDS - len(self.task.past) <= end <= now)

    def _window(self, end: int) -> Window:
        found = self.windows.get(end)
        if found is None:
            found = self.windows[end] = self._counted(end)
        return found

    def _counted(self, end: int) -> Window:
        at = end + len(self.task.past)
        rate = float(self.totals[at] - self.totals[at - WINDOW_SECONDS]) / WINDOW_SECONDS
        return Window(ended_at=float(end), seconds=float(WINDOW_SECONDS), rate=rate)

    def _variation(self, now: int) -> float:
        recent = slice(max(now - RECENT * WINDOW_SECONDS, 0), now)
        mean = float(self.means[recent].sum())
        at, hour_ago = now + len(self.task.past), max(now - int(HOUR_SECONDS), 0)
        asked = float(self.totals[at] - self.totals[hour_ago + len(self.task.past)])
        return variation_to_plan_for(
            calm=max(1.0, float(self.variances[recent].sum()) / mean) if mean else 1.0,
            bursts=burst_variation(self.counts[max(at - RECENT * WINDOW_SECONDS, 0) : at]),
            late=float(self.figures["missed"][hour_ago:now].sum()),
            requests=asked * HOUR_SECONDS / max(now - hour_ago, 1),
            late_share=self.task.late_share,
        )

    # --- workers -----------------------------------------------------------------------------------

    def present(self) -> Present:
        """What there is now."""
        return Present(
            ready=_workers({key: len(free) for key, free in self.free.items()}),
            starting=_workers({key: len(ends) for key, ends in self.starting.items()}),
        )

    def is_on_its_way(self, planned: tuple[Workers, ...]) -> bool:
        """Whether there is anything but the planned workers, ready."""
        if self.settled is not planned:
            present = self.present()
            same = not present.starting and set(present.ready) == set(planned)
            self.settled = planned if same else None
        return self.settled is None

    def take(self, step: Step, now: int, *, at_once: bool) -> None:
        """Do what a step says; what starts is there at once where nothing was before."""
        for switch in step.switch:
            if switch.starting:
                ends = self.starting[switch.before]
                moved, self.starting[switch.before] = ends[: switch.count], ends[switch.count :]
                self.starting.setdefault(switch.after, []).extend(moved)
            else:
                took = np.maximum(self._leave(switch.before, switch.count), now) + SWITCH_SECONDS
                self._join(switch.after, took)
        for w in step.stop:
            self._leave(w.key, w.count)
        for w in step.stop_starting:
            self.starting[w.key] = self.starting[w.key][w.count :]
        for w in step.start:
            ready = now + (0.0 if at_once else self.by_key[w.key].column.startup_seconds)
            self.starting.setdefault(w.key, []).extend([ready] * w.count)

    def _leave(self, key: Key, count: int) -> Floats:
        free = np.sort(self.free[key])
        self.free[key] = free[count:]
        if not len(self.free[key]):
            self.lost = np.concatenate([self.lost, self.waiting.pop(key, np.empty(0))])
        return free[:count]

    def _join(self, key: Key, free: Floats) -> None:
        self.free[key] = np.concatenate([self.free.get(key, np.empty(0)), free])

    # --- time ----------------------------------------------------------------------------------------

    def let_pass(self, now: int, until: int, cost: Mapping[str, float]) -> None:
        """Whole seconds, in which nothing starts but at the beginning."""
        for key, ends in self.starting.items():
            ready = [end for end in ends if end <= now]
            if ready:
                self._join(key, np.array(ready))
                self.starting[key] = [end for end in ends if end > now]
        self.starting = {key: ends for key, ends in self.starting.items() if ends}
        self.free = {key: free for key, free in self.free.items() if len(free)}
        until = min(until, len(self.task.counts))
        if now >= until:
            return
        sums = self._serve(now, until, self._shared(*self._arrivals(now, until), until))
        self.busy, self.sojourn = self.busy + sums[BUSY], self.sojourn + sums[SOJOURN]
        self.able += (until - now) * sum(map(len, self.free.values()))
        present = Counter({key: len(free) for key, free in self.free.items()})
        present.update({key: len(ends) for key, ends in self.starting.items()})
        self.figures["workers"][now:until] = present.total()
        self.figures["cost"][now:until] = sum(cost[key.pool] * n for key, n in present.items())

    def _arrivals(self, now: int, until: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """When requests come, and the how many-th of its second each is."""
        counts, passing = self.task.counts[now:until], slice(now, until)
        second = np.repeat(np.arange(now, until), counts)
        arrivals = np.sort(second + self.rng.random(len(second)))
        slot = ((arrivals - second) * self.slots).astype(np.int64)
        size = (until - now) * self.slots
        spread = np.bincount((second - now) * self.slots + slot, minlength=size)[:size].reshape(-1, self.slots)
        self.variances[passing] = spread.var(axis=1, ddof=1) if self.slots > 1 else 0.0
        self.means[passing] = spread.mean(axis=1)
        return arrivals, np.arange(len(second)) - np.repeat(np.cumsum(counts) - counts, counts)

    def _shared(self, arrivals: Floats, number: npt.NDArray[np.int64], until: int) -> dict[Key, Floats]:
        """Who goes to which column: in proportion to what its workers answer, evenly in time."""
        arrivals = np.concatenate([self.lost, arrivals])
        number = np.concatenate([np.arange(len(self.lost)), number])
        self.lost = np.empty(0)
        if not self.free:
            ends = np.ceil(arrivals + self.task.latency_seconds).astype(np.int64)
            late = ends <= until
            np.add.at(self.figures["missed"], np.maximum(ends[late] - 1, 0), 1)
            self.lost = arrivals[~late]
            return {}
        keys = list(self.free)
        able = np.array([self.by_key[key].column.worker_rate * len(self.free[key]) for key in keys])
        upper = np.cumsum(able) / able.sum()
        to = np.searchsorted(upper[:-1], (number * GOLDEN) % 1.0, side="right")
        return {key: arrivals[to == i] for i, key in enumerate(keys)}

    def _serve(self, now: int, until: int, shared: Mapping[Key, Floats]) -> Floats:
        total, passing = np.zeros((until - now, FIGURES)), slice(now, until)
        for key, arrivals in shared.items():
            measured, sums = self.by_key[key], np.zeros_like(total)
            queue = np.sort(np.concatenate([self.waiting.get(key, np.empty(0)), arrivals]))
            done = serve_until(
                queue,
                self.free[key],
                now,
                measured.first_seconds,
                measured.more_seconds,
                key.batch_size,
                self.task.latency_seconds,
                sums,
            )
            self.waiting[key] = queue[done:]
            self.figures["answered"][passing] += sums[:, ANSWERED]
            self.figures["disagreed"][passing] += sums[:, ANSWERED] * measured.true_disagreement
            total += sums
        self.figures["missed"][passing] += total[:, MISSED]
        return np.asarray(total.sum(axis=0))

    def outcome(self) -> TaskOutcome:
        """Who still waits in the end is neither answered nor missed."""
        return TaskOutcome(self.task.name, self.task.counts.astype(np.float64), **self.figures)


def _workers(counts: Mapping[Key, int]) -> tuple[Workers, ...]:
    return tuple(Workers(key=key, count=n) for key, n in counts.items() if n)
