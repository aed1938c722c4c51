"""What a service's workers answer with exits off, what is asked of them, and how many workers that takes.

Exits may go off at any moment: a rollback, an alarm, a breaker that a worker opens by itself. Where plans save compute
that is a jump in demand, so the fewest workers that an autoscaler may leave follow from the demand as it would be then.
Figures are persisted rounded to the safe side and kept while they still are about right, so that a steady service
writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp_core.batching import MAX_BATCH, SECONDS_OF_OBJECTIVE, seconds_by_rows
from offramp_core.control.objects import CapacityStatus, ServiceStatus
from offramp_core.control.snapshot import Scaling, seconds_since
from offramp_core.control.spec import Autoscaling, ServiceSpec
from offramp_core.fleet.parts import MOST_WORKERS
from offramp_core.protocol import LONGEST_PACE, SHORTEST_PACE, ArmCounts
from offramp_core.reasons import Reason

PEAK_SECONDS = 3600.0  # that Load.peak_rate looks back
LARGEST_SHARE = 0.8  # of a worker's throughput that can be relied on
OWN_TIMES = 1.5  # what queueing takes of the objective, in times of a request alone
SMALLEST_SHARE = 0.1
MIN_BATCHES = 50  # with exits off, before what they took says more than the profile
TOLERANCE = 0.15  # how far a figure may be off, on the safe side, before it is told anew
MARGIN = 0.03  # on top of a figure that is told anew
RECOVERED = 0.9  # of the capacity that the peak must be below again
SUSPICIOUS = 0.5  # of the way to a bound, in logarithms
QUIET_SECONDS = 600.0  # a proven plan must have served so long before workers are spared


# --- what a worker can do --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerBatch:
    """The batches in which a worker answers most: rows, seconds, and the requests per second that it answers in
    time."""

    rows: int
    seconds: float
    rate: float


def worker_rate(
    costs: Mapping[str, Sequence[Any]],
    counts: Iterable[ArmCounts],
    *,
    exits_off_hash: str,
    latency_seconds: float,
) -> float:
    """Requests per second that one worker answers within the latency objective with exits off; 0 where nothing is
    known."""
    best = best_batch(costs, counts, exits_off_hash=exits_off_hash, latency_seconds=latency_seconds)
    return 0.0 if best is None else best.rate


def best_batch(
    costs: Mapping[str, Sequence[Any]],
    counts: Iterable[ArmCounts],
    *,
    exits_off_hash: str,
    latency_seconds: float,
    least_pace: float = 0.0,
    batch_share: float = SECONDS_OF_OBJECTIVE,
) -> WorkerBatch | None:
    """In which batches one worker answers most within the latency objective with exits off, and how much; None where
    nothing is known.

    The profile says how long batches take, and batches that ran with exits off here (all of them before the first plan,
    those held back from it later) how much slower or faster this machine is. A batch may take ``batch_share`` of the
    objective: half, as the worker's batching has it. ``latency_seconds`` is infinite where the whole reply has no
    objective.

    Parameters
    ----------
    costs : mapping
        The cost arrays that workers report: ``batch_size`` [B], ``segment_seconds`` [B, R+1] of the model as given.
    counts : iterable of ArmCounts
        Whatever was counted; only what ran under ``exits_off_hash`` is looked at.
    least_pace : float
        What batches take at least, in times of the profile: a processor limit slows many batches down, and few not.

    Notes
    -----
    Throughput cannot be used up: the less of the objective a request alone leaves for waiting, the less. The share is
    fitted to the queue simulator (``offramp_lab.simulate``) with Poisson arrivals and the worker's own admission, where
    at most 3 % are refused at the rate told from three times a request's own time on.
    """
    try:
        sizes = [float(size) for size in costs["batch_size"]]
        whole = [float(sum(row)) for row in costs["segment_seconds"]]
    except (KeyError, TypeError, ValueError):
        return None
    if not sizes or len(sizes) != len(whole) or not all(0 < s < math.inf for s in (*sizes, *whole)):
        return None
    profiled = seconds_by_rows(sizes, whole)
    pace = _pace(profiled, (c for c in counts if c.plan_hash == exits_off_hash), least=least_pace)
    seconds = [pace * s for s in profiled]
    allowed = batch_share * latency_seconds
    fits = [n for n in range(1, MAX_BATCH + 1) if n == 1 or seconds[n] <= allowed]
    share = min(LARGEST_SHARE, max(SMALLEST_SHARE, 1 - OWN_TIMES * seconds[1] / latency_seconds))
    best = max(fits, key=lambda n: n / seconds[n])
    return WorkerBatch(best, seconds[best], share * best / seconds[best])


def _pace(profiled: Sequence[float], counts: Iterable[ArmCounts], *, least: float) -> float:
    """What batches with exits off took, in times of what the profile says of their sizes; before there are enough 1, or
    the ``least`` that is known."""
    batches, taken, expected = 0, 0.0, 0.0
    for count in counts:
        if count.busy_seconds <= 0:
            continue
        taken += count.busy_seconds
        for size, buckets in count.execution.items():
            n = sum(buckets.values())
            batches += n
            expected += n * profiled[min(max(int(size), 0), len(profiled) - 1)]
    return max(least, taken / expected) if batches >= MIN_BATCHES and expected > 0 else least or 1.0


def impossible_pace(pace: float) -> bool:
    """Whether no worker can have measured this; 0 says that none did."""
    return pace != 0 and not SHORTEST_PACE <= pace <= LONGEST_PACE  # NaN compares false


# --- what is asked of them -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CapacityView:
    """What the rules may look at. ``worker_rate`` and ``peak_rate`` are as measured now.

    ``exits_on`` says that the stable plan has exits; ``at_risk`` that something points to their end, or a rollout is
    under way. ``watched_since`` is since when the peak was looked for: an earlier process saw what is not in it.
    ``scaling`` is who decides on the number of workers.
    """

    before: CapacityStatus
    worker_rate: float
    peak_rate: float
    ready: int
    exits_on: bool
    at_risk: bool
    now: float
    watched_since: float = 0.0
    autoscaling: Autoscaling | None = None
    scaling: Scaling | None = None
    was_short: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """The next status, and whether what is ready carries the peak with exits off (None: not known)."""

    status: CapacityStatus = field(default_factory=CapacityStatus)
    enough: bool | None = None


def next_capacity(view: CapacityView) -> Capacity:
    """Tell the figures anew where they are no longer about right, and what follows from them.

    The floor rises with the demand and never beyond ``maxReplicas``. Figures of before stand while nothing better is
    known.
    """
    before = view.before
    rate = rate_anew(before.worker_rate, view.worker_rate) if view.worker_rate > 0 else before.worker_rate
    peak = _above(before.peak_rate, _peak(view))
    needed = workers_for(peak, rate)
    quiet = _quiet_since(view)
    floor = _floor(view, needed, quiet)
    status = CapacityStatus(rate, peak, needed, floor, quiet)
    if rate <= 0:
        return Capacity(status)
    carried = view.ready * rate * (RECOVERED if view.was_short else 1.0)
    return Capacity(status, peak <= carried)


def workers_for(rate: float, worker_rate: float) -> int:
    """How many workers answer ``rate`` requests per second, as far as can be planned; 0 where either is not known."""
    return math.ceil(min(MOST_WORKERS, rate / worker_rate - 1e-9)) if rate > 0 and worker_rate > 0 else 0


def _peak(view: CapacityView) -> float:
    """Of the last hour. Until this process has watched for as long, what an earlier one has told counts."""
    watched = view.now - view.watched_since
    return view.peak_rate if watched >= PEAK_SECONDS else max(view.peak_rate, view.before.peak_rate)


def _quiet_since(view: CapacityView) -> float | None:
    """Only where something hangs on it, as every change is a write."""
    scaled = view.autoscaling
    if scaled is None or scaled.no_exit_floor != "PreScale" or not view.exits_on or view.at_risk:
        return None
    return view.now if view.before.quiet_since_at is None else view.before.quiet_since_at


def _floor(view: CapacityView, needed: int, quiet_since: float | None) -> int:
    scaled = view.autoscaling
    by_another = view.scaling is not None and view.scaling.failure_reason == Reason.ANOTHER_AUTOSCALER
    if scaled is None or scaled.no_exit_floor == "None" or by_another:
        return 0
    quiet = seconds_since(quiet_since, now=view.now, watched_since=view.watched_since)
    if scaled.no_exit_floor == "PreScale" and quiet >= QUIET_SECONDS:
        needed = 0
    return min(max(needed, scaled.min_replicas), scaled.max_replicas)


def floor_in_force(autoscaling: Autoscaling, status: CapacityStatus) -> int:
    """The fewest workers that the autoscaler of the spec may leave. The status is one pass old, so it is held within
    the limits of now."""
    if autoscaling.no_exit_floor == "None":
        return autoscaling.min_replicas
    return min(max(status.floor, autoscaling.min_replicas), autoscaling.max_replicas)


def headroom(spec: ServiceSpec, status: ServiceStatus) -> float | None:
    """What the ready workers answer with exits off, in times of the peak; None where either is not known. Those at the
    edge answer nothing then."""
    capacity = status.capacity
    known = capacity.worker_rate > 0 and capacity.peak_rate > 0 and status.workers.desired > 0
    ready = status.workers.ready - sum(pool.ready for pool in status.pools if spec.at_edge(pool.name))
    return ready * capacity.worker_rate / capacity.peak_rate if known else None


# --- figures that seldom change --------------------------------------------------------------------


def rate_anew(reported: float, now: float) -> float:
    """A figure not above ``now``; the one told before while it is that and not far below."""
    if reported <= now <= reported * (1 + TOLERANCE):
        return reported
    return _two_digits(now * (1 - MARGIN), math.floor)


def _above(reported: float, now: float) -> float:
    """A figure not below ``now``, 0 only for 0; the one told before while it is that and not far above."""
    if now <= 0:
        return 0.0
    if reported * (1 - TOLERANCE) <= now <= reported:
        return reported
    return max(1.0, _two_digits(now * (1 + MARGIN), math.ceil))


def _two_digits(value: float, to: Any) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{to(value / unit) * unit:.6g}")
