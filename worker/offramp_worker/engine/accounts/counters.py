"""Cumulative counts per (epoch, arm), and the ring of records. The engine writes, the admin port reads."""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.evidence.slow import BatchShape
from offramp_core.protocol import LABELS, LOSSES, Arm, ArmCounts, PlanCounts, RecordBlock
from offramp_core.sketch import bucket_index

KEPT_EPOCHS = 8
KEPT_PLANS = 4
RING_ROWS = 20_000
ROWS_PER_ANSWER = 5_000
Histogram = dict[int, int]


class ArmCounter:
    """The growing form of :class:`offramp_core.protocol.ArmCounts`, which says what there is to count: its fields are
    the fields here.

    Histograms have numbers and shapes for keys here, and text there. Change it only under the lock of
    its :class:`Counters`.
    """

    __slots__ = tuple(f.name for f in fields(ArmCounts))
    epoch: int
    arm: Arm
    plan_hash: str

    if TYPE_CHECKING:  # a name that is no field of ArmCounts raises AttributeError

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, epoch: int, arm: Arm, plan_hash: str) -> None:
        nothing = ArmCounts(epoch, arm, plan_hash)
        for name in self.__slots__:
            setattr(self, name, getattr(nothing, name))

    def count_batch(
        self,
        *,
        shape: BatchShape,
        seconds: float,
        slow_above: float | None,
        failed: bool,
        timed: bool = True,
        busy: float | None = None,
    ) -> None:
        """One batch ended after ``seconds`` of execution, of which it took ``busy`` of the engine: all where nothing is
        computed beside it. A failed one is neither ``timed`` nor judged."""
        self.batches += 1
        self.busy_seconds += seconds if busy is None else busy
        self.failed_batches += failed
        if failed or not timed:
            return
        _add(self.execution.setdefault(shape.rows, {}), seconds)
        if shape.length:
            _add(self.execution_by_length.setdefault(shape, {}), seconds)
        if slow_above is not None:
            self.judged_batches += 1
            self.slow_batches += seconds > slow_above

    def count_replies(self, *, exit_name: str, latencies: Sequence[float], drawn: int) -> None:
        """Rows were answered at one exit; ``drawn`` of them are to be audited."""
        self.requests += len(latencies)
        self.exits[exit_name] = self.exits.get(exit_name, 0) + len(latencies)
        self.drawn += drawn
        for seconds in latencies:
            _add(self.latency, seconds)

    def count_first_token(self, seconds: float) -> None:
        """The first token of an answer was there so long after its admission."""
        _add(self.first_token, seconds)

    def count_per_token(self, seconds: float) -> None:
        """An answer was written whose tokens came so far apart on average."""
        _add(self.per_token, seconds)

    def count_audits(self, *, audited: int, disagreements: int) -> None:
        """Drawn rows were compared with the reference."""
        self.audited += audited
        self.disagreements += disagreements

    def count_tier(self, tier: str, *, audited: int, disagreements: int) -> None:
        """Drawn rows that asked for a tier were compared with the reference. The caller bounds how many tiers there
        are."""
        self.tier_audited[tier] = self.tier_audited.get(tier, 0) + audited
        self.tier_disagreements[tier] = self.tier_disagreements.get(tier, 0) + disagreements

    def freeze(self) -> ArmCounts:
        """The counts so far, as they go to the control plane."""
        return ArmCounts(**{name: _frozen(getattr(self, name)) for name in self.__slots__})


class Counters:
    """Counters of the last epochs. Epoch 0, which counts what ran without a plan, is always kept."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Rows of requests turned away at once, and seconds of answers that count for no plan; change them only under
        # the lock.
        self.refused, self.other_seconds = 0, 0.0
        self._counters: OrderedDict[tuple[int, Arm], ArmCounter] = OrderedDict()
        self._meters: OrderedDict[tuple[str, float], HoldbackMeter] = OrderedDict()

    def open(self, *, epoch: int, arm: Arm, plan_hash: str) -> ArmCounter:
        """The counter of an (epoch, arm); an epoch has one plan per arm, so a second call finds the first one's."""
        with self.lock:
            counter = self._counters.setdefault((epoch, arm), ArmCounter(epoch, arm, plan_hash))
            kept = sorted({key[0] for key in self._counters} - {0})[-KEPT_EPOCHS:]
            for key in [k for k in self._counters if k[0] and k[0] not in kept]:
                del self._counters[key]
            return counter

    def meter(self, *, plan_hash: str, share: float) -> HoldbackMeter:
        """The meter of a stable plan, which outlives its epochs. Use it only under the lock."""
        with self.lock:
            key = (plan_hash, share)
            meter = self._meters.setdefault(key, HoldbackMeter(plan_hash=plan_hash, share=share))
            self._meters.move_to_end(key)
            while len(self._meters) > KEPT_PLANS:
                self._meters.popitem(last=False)
            return meter

    def snapshot(self) -> tuple[ArmCounts, ...]:
        """The counters of both arms at one moment, oldest epoch first."""
        with self.lock:
            return tuple(self._counters[key].freeze() for key in sorted(self._counters) if key[1] != "holdback")

    def held_back(self) -> tuple[ArmCounts, ...]:
        """Those of the batches that ran with exits off beside a stable plan."""
        with self.lock:
            return tuple(self._counters[key].freeze() for key in sorted(self._counters) if key[1] == "holdback")

    def plans(self) -> tuple[PlanCounts, ...]:
        """What the meters say, of the plan of longest ago first."""
        with self.lock:
            return tuple(meter.counts() for meter in self._meters.values())

    def exits(self) -> dict[tuple[int, Arm, str], tuple[int, dict[str, int]]]:
        """By epoch, arm and plan: rows answered, and how many of them where. Cheaper than a snapshot."""
        with self.lock:
            return {(c.epoch, c.arm, c.plan_hash): (c.requests, dict(c.exits)) for c in self._counters.values()}


class Origin(NamedTuple):
    """Where a record comes from: the numbers of its slice and stream, what :class:`.turns.Turns` says of it, what was
    drawn for it and the rate that was compared with."""

    slice_id: int = 0
    stream: int = 0
    repeats: bool = False
    draw: float = 0.0
    audit_rate: float = 1.0


#: How a ring keeps the fields of :class:`Origin`, by what records call them.
ORIGINS: Mapping[str, str] = {"slice": "<i4", "stream": "<i8", "repeats": "u1", "draw": "<f4", "audit_rate": "<f4"}


class RecordRing:
    """The last ``rows`` equal-weight records. Every row has a sequence number that never repeats within the process."""

    def __init__(
        self,
        *,
        n_ramps: int,
        ramp_set_digest: str,
        rows: int = RING_ROWS,
        first: int = 0,
        losses: bool = False,
        graded: bool = True,
    ) -> None:
        """``first`` is the sequence number to begin with; ``losses`` says that rows have losses in the place of labels,
        and ``graded`` that these may lie between 0 and 1."""
        self._zero_one = losses and not graded
        self._lock = threading.Lock()
        self._rows, self._first, self._next, self._digest = rows, first, first, ramp_set_digest
        self._time = np.zeros(rows, dtype="<f8")
        self._uncertainty = np.zeros((rows, n_ramps), dtype="<f4")
        answers = LOSSES if losses else LABELS
        self._answers = {
            name: np.zeros((rows, n_ramps) if by_ramp else rows, dtype=kind) for name, kind, by_ramp in answers
        }
        self._origins = {name: np.zeros(rows, dtype=kind) for name, kind in ORIGINS.items()}

    @property
    def next(self) -> int:
        """Sequence number of the record to come."""
        return self._next

    def append(
        self,
        *,
        time: npt.ArrayLike,
        uncertainty: npt.NDArray[Any],
        answers: Mapping[str, npt.ArrayLike],
        origins: Sequence[Origin] = (),
    ) -> None:
        """Add n <= ``rows`` records: time [n], uncertainty [n, R], the columns
        of :meth:`offramp_core.task.Task.recorded`, and n origins or none."""
        with self._lock:
            at = np.arange(self._next, self._next + len(uncertainty)) % self._rows
            self._time[at], self._uncertainty[at] = time, uncertainty
            for name, column in self._answers.items():
                column[at] = answers[name]
            columns: Iterable[Any] = zip(*origins, strict=True) if origins else Origin()
            for kept, column in zip(self._origins.values(), columns, strict=True):
                kept[at] = column
            self._next += len(uncertainty)

    def read(self, after: int, *, limit: int = ROWS_PER_ANSWER) -> RecordBlock:
        """Up to ``limit`` records from sequence number ``after`` on, or from the oldest one still held."""
        with self._lock:
            first = min(max(after, self._next - self._rows, self._first), self._next)
            stop = min(self._next, first + limit)
            at = np.arange(first, stop) % self._rows
            kept = {"time": self._time, "uncertainty": self._uncertainty, **self._answers, **self._origins}
            columns = {name: base64.b64encode(column[at].tobytes()).decode() for name, column in kept.items()}
        return RecordBlock(first=first, next=stop, ramp_set_digest=self._digest, zero_one=self._zero_one, **columns)


def _add(histogram: Histogram, seconds: float) -> None:
    index = bucket_index(max(seconds, 0.0))
    histogram[index] = histogram.get(index, 0) + 1


def _frozen(value: Any) -> Any:
    """A count as it is, a histogram apart from the growing one and with text for its keys."""
    if not isinstance(value, dict):
        return value
    if isinstance(next(iter(value.values()), 0), dict):
        return {str(key): _frozen(histogram) for key, histogram in value.items()}
    return {str(key): count for key, count in value.items()}
