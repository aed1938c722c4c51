"""What a plan is worth: mean and tail of the time to answer, and the engine's busy time, in seconds.

A profile holds seconds of whole batches. A search needs costs per request that depend on nothing but where the
request leaves, so that a plan's mean and busy time are linear in how many leave at each ramp. For a batch of b
requests and a stretch of the network that takes T(b) seconds, in compute-saving execution (that of DREX,
arXiv:2512.15705):

- *Time to answer*: every request that gets so far waits T(b). A batch that has lost rows is faster than that, so this
  is the time a request may count on; nothing is credited for what others save it.
- *Busy time*: T is taken as affine in b. A row that is gone saves its slope; the rest of T(b) / b is paid by all,
  except in a batch of one, which ends when its request leaves.
- *Regrouping* is paid by those who reach a ramp, once per active ramp, in batches of more than one: on top of the
  ramp's own seconds to answer, and shared by the batch in busy time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import BatchProfile, Profile
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evaluate import Evaluation
from offramp_core.precision import EXACT
from offramp_core.records import ExitCosts, IndexArray, Records, SecondsArray

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts: a plan is worth the weighted sum of seconds it saves per request.

    ``tail`` weighs the time within which the share ``percentile`` of requests is answered.
    """

    mean: float = 1.0
    tail: float = 0.0
    busy: float = 0.0
    percentile: float = 0.95

    def __post_init__(self) -> None:
        for name in ("mean", "tail", "busy"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidArgumentError(f"{name} weight is {value}; it must be finite and >= 0")
        if not self.mean + self.tail + self.busy > 0:
            raise InvalidArgumentError("all weights are 0; give mean, tail or busy a weight above 0")
        if not 0 < self.percentile <= 1:
            raise InvalidArgumentError(f"percentile is {self.percentile}; it must lie in (0, 1]")


@dataclass(frozen=True, slots=True)
class Figures:
    """A plan's seconds per request: mean and ``percentile`` of the time to answer, and engine-busy time."""

    mean_seconds: float
    p95_seconds: float
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class Charges:
    """Seconds per request, by what it goes through.

    ``segment`` (R+1) and ``ramp`` (R) are paid by requests that get so far, ``always`` (R) by all requests while the
    ramp is active, ``base`` by all.
    """

    segment: SecondsArray
    ramp: SecondsArray
    always: SecondsArray
    base: float = 0.0

    @property
    def total(self) -> float:
        """The backbone without any ramp."""
        return self.base + float(self.segment.sum())

    def leave_seconds(self, active: npt.ArrayLike) -> Floats:
        """To leave at each ramp of the sets ``active`` (..., d), and last to take no exit: (..., d + 1)."""
        ramps = np.asarray(active, dtype=np.intp)
        paid = np.cumsum(self.ramp[ramps], axis=-1)
        stays = (
            self.segment.sum() + paid[..., -1:]
            if ramps.shape[-1]
            else np.full((*ramps.shape[:-1], 1), self.segment.sum())
        )
        reached = np.concatenate((np.cumsum(self.segment)[ramps] + paid, stays), axis=-1)
        return np.asarray(reached + (self.base + self.always[ramps].sum(axis=-1, keepdims=True)))


@dataclass(frozen=True, slots=True)
class Pricing:
    """Costs of exits and what counts of them. ``scale`` is what the backbone alone costs, per request, in weighted
    seconds."""

    time: Charges
    busy: Charges
    weights: Weights = field(default_factory=Weights)

    @property
    def scale(self) -> float:
        w = self.weights
        return (w.mean + w.tail) * self.time.total + w.busy * self.busy.total

    def values(self, active: npt.ArrayLike) -> Floats:
        """Weighted seconds of mean and busy time a request saves by leaving at each ramp, and by staying: (..., d +
        1)."""
        out = self.weights.mean * (self.time.total - self.time.leave_seconds(active))
        if self.weights.busy:
            out = out + self.weights.busy * (self.busy.total - self.busy.leave_seconds(active))
        return np.asarray(out)

    def tails(self, active: npt.ArrayLike) -> Floats | None:
        """Weighted seconds of tail saved when the percentile falls on each ramp, or on the end; None when the tail does
        not count."""
        if not self.weights.tail:
            return None
        return np.asarray(self.weights.tail * (self.time.total - self.time.leave_seconds(active)))

    def needed(self, n: int) -> int:
        """Of ``n`` requests, how many must have been answered by the time that is the percentile."""
        return max(1, math.ceil(self.weights.percentile * n - 1e-9))

    def figures(self, seen: Evaluation) -> Figures:
        if not seen.active:
            return Figures(self.time.total, self.time.total, self.busy.total)
        counts = np.append(seen.exits, seen.n - sum(seen.exits))
        time = self.time.leave_seconds(seen.active)
        position = int(np.searchsorted(np.cumsum(counts), self.needed(seen.n)))
        return Figures(
            float(counts @ time) / seen.n,
            float(time[position]),
            float(counts @ self.busy.leave_seconds(seen.active)) / seen.n,
        )

    def saving(self, figures: Figures) -> float:
        """Weighted seconds saved, as a share of what the backbone costs."""
        w = self.weights
        spent = w.mean * figures.mean_seconds + w.tail * figures.p95_seconds + w.busy * figures.busy_seconds
        return 1.0 - spent / self.scale


def price(records: Records, *, weights: Weights | None = None, batch_size: int | None = None) -> Pricing:
    """Turn a records' costs into those of a search.

    Parameters
    ----------
    records : Records
    weights : Weights, optional
        Default: mean time to answer alone.
    batch_size : int, optional
        Of the batches that requests are served in. Needs ``records.profile``; sizes between measured ones are
        interpolated, those beyond cost what the nearest does. Without it ``records.costs`` are the time to answer, and
        the engine is busy with one request at a time.

    Raises
    ------
    InvalidArgumentError
        A batch size below 1, or one where no profile was recorded.
    InvalidRecordsError
        Costs that are negative or not finite, or a backbone that takes no time.
    """
    _check_costs(records)
    weights = Weights() if weights is None else weights
    if batch_size is None:
        time = _charges(records.costs.segment_seconds, records.costs.ramp_seconds)
        return Pricing(time, time, weights)
    if batch_size < 1:
        raise InvalidArgumentError(f"batch_size is {batch_size}; it is a whole number from 1 on")
    if records.profile is None:
        raise InvalidArgumentError("batch_size is given but the records hold no costs by batch size")
    return Pricing(*_at(records.profile, batch_size), weights)


def overheads(records: Records) -> Floats:
    """What each ramp adds in the worst case, as a share of the fp32 backbone's time, by batch size where that was
    measured: (B, R)."""
    return np.array([c.ramp_seconds / c.baseline_seconds for c in _all_costs(records)])


def head_starts(records: Records) -> Floats:
    """By how much the chain's own backbone is faster than fp32, as a share of the latter, by batch size: (B,). 0 at
    fp32."""
    return np.array([c.head_start for c in _all_costs(records)])


def _all_costs(records: Records) -> list[ExitCosts]:
    costs = [records.costs]
    if records.profile is not None:
        costs += [
            ExitCosts(
                np.array(b.segment_seconds),
                np.array(b.ramp_seconds),
                None if records.precision == EXACT else b.exact_seconds,
            )
            for b in records.profile.batches
        ]
    return [c for c in costs if c.baseline_seconds > 0]


def _check_costs(records: Records) -> None:
    costs = records.costs
    for name, seconds in (("segment_seconds", costs.segment_seconds), ("ramp_seconds", costs.ramp_seconds)):
        bad = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
        if len(bad):
            raise InvalidRecordsError(f"{name}[{bad[0]}] is {seconds[bad[0]]}; seconds must be finite and >= 0")
    if costs.total_seconds <= 0:
        raise InvalidRecordsError("segment_seconds sums to 0; the backbone must take some time")


def _charges(segment: SecondsArray, ramp: SecondsArray) -> Charges:
    return Charges(segment, ramp, np.zeros_like(ramp))


def _at(profile: Profile, size: int) -> tuple[Charges, Charges]:
    """Time to answer and busy time per request in batches of one size."""
    segment, ramp, regroup = _measured(profile, size)
    if size == 1:
        return _charges(segment, ramp), _charges(segment, ramp)
    slopes = _slopes(profile)
    own_segment, own_ramp = np.minimum(slopes[0], segment / size), np.minimum(slopes[1], ramp / size)
    busy = Charges(
        own_segment, own_ramp + regroup / size, ramp / size - own_ramp, float((segment / size - own_segment).sum())
    )
    return _charges(segment, ramp + regroup), busy


def _measured(profile: Profile, size: int) -> tuple[SecondsArray, SecondsArray, float]:
    sizes = [b.batch_size for b in profile.batches]

    def at(rows: list[tuple[float, ...]]) -> SecondsArray:
        return np.array([np.interp(size, sizes, column) for column in np.array(rows, dtype=np.float64).T])

    segment = at([b.segment_seconds for b in profile.batches])
    ramp = at([b.ramp_seconds for b in profile.batches])
    return segment, ramp, float(np.interp(size, sizes, [b.regroup_seconds for b in profile.batches]))


def _slopes(profile: Profile) -> tuple[SecondsArray, SecondsArray]:
    """Seconds that one row more costs per segment and per ramp: least squares over the measured sizes, never negative.

    With a single measured size nothing is known of smaller batches; then a row costs its share.
    """

    def fit(rows: list[tuple[float, ...]]) -> SecondsArray:
        seconds = np.array(rows, dtype=np.float64)
        if len(sizes) == 1:
            return np.asarray(seconds[0] / sizes[0])
        centred = sizes - sizes.mean()
        return np.asarray(np.maximum(centred @ seconds / (centred @ centred), 0.0))

    batches: tuple[BatchProfile, ...] = profile.batches
    sizes = np.array([b.batch_size for b in batches], dtype=np.float64)
    return fit([b.segment_seconds for b in batches]), fit([b.ramp_seconds for b in batches])


def as_sets(prefix: Sequence[int], lasts: Sequence[int]) -> IndexArray:
    """Sets of ramps that differ in the last, (len(lasts), d)."""
    out = np.empty((len(lasts), len(prefix) + 1), dtype=np.intp)
    out[:, :-1], out[:, -1] = prefix, lasts
    return out
