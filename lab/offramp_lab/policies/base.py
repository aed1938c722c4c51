"""What a policy is: a function of tuning records and of a stream, which it serves request by request.

A policy that chooses one plan from the tuning records and keeps it is the special case of a constant plan,
see :func:`constant`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from offramp_core.certify import Certificate, SliceBudget
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evaluate import Threshold, answers_agree, check_active, leave_position
from offramp_core.precision import EXACT, Precision
from offramp_core.records import BoolArray, IndexArray, Records, SecondsArray

NO_EXIT = -1
Goal = Literal["mean", "p95", "busy"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What every policy is asked for.

    ``budget`` is the allowed disagreement, ``max_ramps`` ramps at most may be active and add at most ``max_overhead``
    of the backbone's time together. ``batch_size`` is how many requests an online policy sees at a time. ``precisions``
    are those a plan may run at, as far as they were recorded (None: any); policies that were published without any run
    at fp32. ``goal`` is what the exact search makes least: the mean time to answer, its 95th percentile, or the
    engine's busy time. Requests of ``slices`` have a budget of their own, which the exact search and the certified
    policy keep. Published policies know neither.
    """

    budget: float
    confidence: float = 0.95
    max_ramps: int = 3
    max_overhead: float = 0.05
    batch_size: int = 1
    precisions: tuple[Precision, ...] | None = None
    goal: Goal = "mean"
    slices: tuple[SliceBudget, ...] = ()

    def __post_init__(self) -> None:
        if self.precisions is not None and EXACT not in self.precisions:
            raise InvalidArgumentError(f"precisions are {list(self.precisions)}; {EXACT} must be among them")
        if self.batch_size < 1:
            raise InvalidArgumentError(f"batch_size is {self.batch_size}; a policy sees at least 1 request at a time")

    def allows(self, precision: Precision) -> bool:
        """Whether a plan may run at a precision."""
        return self.precisions is None or precision in self.precisions


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan and the first row of the stream it served.

    ``thresholds`` has one entry per active ramp; all are 0 where a policy leaves by another rule than a threshold.
    Ramps are columns of the chain of ``precision``.
    """

    since: int
    active: tuple[int, ...]
    thresholds: tuple[Threshold, ...]
    precision: Precision = EXACT


@dataclass(frozen=True, slots=True)
class Trace:
    """What a policy did with a stream, request by request."""

    #: (n,) int. Ramp where each request left, as a column of its plan's chain, ``NO_EXIT`` (-1) where it ran to the
    #: output.
    exit: IndexArray
    #: By rising ``since``, the first at 0. Ramps in force are paid by every request that reaches them.
    plans: tuple[PlanInForce, ...]
    #: (n,) bool. The answer given equals the reference's.
    agrees: BoolArray
    #: None for policies that prove nothing.
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        starts = [plan.since for plan in self.plans]
        if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise InvalidArgumentError(f"plans begin at rows {starts}; the first must begin at 0 and the others rise")

    @property
    def disagreement(self) -> float:
        """Share of all requests answered differently from the reference."""
        return float((~self.agrees).mean())

    def seconds(self, records: Records) -> SecondsArray:
        """Seconds each request took, the ramps it reached included: (n,).

        A request that left at a ramp no plan had in force (only policies that look ahead do that) pays for that ramp
        besides.
        """
        self._check_length(records)
        out = np.empty(len(self.exit))
        ends = [*(plan.since for plan in self.plans[1:]), len(self.exit)]
        for plan, end in zip(self.plans, ends, strict=True):
            rows = slice(plan.since, end)
            out[rows] = _seconds_by_exit(records.at(plan.precision), plan.active)[self.exit[rows]]
        return out

    def saving(self, records: Records) -> float:
        """Share of the fp32 backbone's time saved; negative when ramps cost more than they save."""
        total = records.costs.baseline_seconds
        return float((total - self.seconds(records)).mean()) / total

    def outcome(self, records: Records) -> Outcome:
        """The last plan in force, and what the whole trace saved and cost."""
        last = self.plans[-1]
        return Outcome(
            last.active, last.thresholds, self.saving(records), self.disagreement, self.certificate, last.precision
        )

    def _check_length(self, records: Records) -> None:
        if len(records) != len(self.exit):
            raise InvalidRecordsError(
                f"uncertainty has {len(records)} rows; the trace was made on {len(self.exit)} and needs the same ones"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a trace in one line.

    ``active``, ``thresholds`` and ``precision`` are the last plan in force; ``saving`` and ``disagreement`` fractions
    over the whole stream. ``certificate`` is None for policies that prove nothing.
    """

    active: tuple[int, ...]
    thresholds: tuple[Threshold, ...]
    saving: float
    disagreement: float
    certificate: Certificate | None = None
    precision: Precision = EXACT


StreamPolicy = Callable[[Records, Records, Objective], Trace]
"""(tuning records, stream in time order, objective) -> what it did."""


def without_ramps(records: Records) -> str | None:
    """Why there are no exits to choose from, in one line; None where there are. Only a file with other precisions may
    have none at fp32."""
    return None if records.n_ramps else "ramp_precision names no ramp at fp32; this policy needs one"


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy as `offramp replay` lists it."""

    name: str
    #: One line: what it is, and its source.
    describe: str
    run: StreamPolicy
    #: Its plan changes while it serves, by what it has already served.
    online: bool = False
    #: It looks at the very stream it is judged on: a ceiling, not something that can be deployed.
    hindsight: bool = False
    #: One line that says why these records cannot show this policy, None where they can; by default where there is no
    #: ramp.
    refusal: Callable[[Records], str | None] = without_ramps

    def __call__(self, tune: Records, report: Records, objective: Objective) -> Outcome:
        """Run it and sum up what it did on the report records."""
        return self.run(tune, report, objective).outcome(report)


def constant(
    stream: Records,
    active: Sequence[int],
    thresholds: Sequence[Threshold],
    certificate: Certificate | None = None,
    *,
    precision: Precision = EXACT,
) -> Trace:
    """The trace of one plan kept for the whole stream; ``active`` are columns of the chain of ``precision``."""
    chain = stream.at(precision)
    ramps = check_active(chain, active)
    left, agrees = serve(chain, ramps, thresholds)
    return Trace(left, (PlanInForce(0, ramps, tuple(thresholds), precision),), agrees, certificate)


def serve(stream: Records, active: tuple[int, ...], thresholds: Sequence[Threshold]) -> tuple[IndexArray, BoolArray]:
    """Where each request leaves under a plan (ramp index or ``NO_EXIT``), and whether its answer agrees."""
    position = leave_position(stream, active, thresholds)
    left = np.append(np.asarray(active, dtype=np.intp), NO_EXIT)[position]
    return left, answers_agree(stream, active, position)


def answers(stream: Records, left: IndexArray) -> BoolArray:
    """Whether what each request was told agrees, by where it left, with exits on.

    With exits off the exact executor answers instead, which is the reference.
    """
    stays = left == NO_EXIT
    return np.where(stays, stream.final_agrees, stream.agrees[np.arange(len(stream)), np.where(stays, 0, left)])


def _seconds_by_exit(records: Records, active: tuple[int, ...]) -> SecondsArray:
    """Seconds to leave at each ramp with some in force, and last (so at index -1) to run to the output: (R + 1,)."""
    costs = records.costs
    in_force = np.zeros(costs.n_ramps)
    in_force[list(active)] = costs.ramp_seconds[list(active)]
    paid = np.cumsum(in_force)
    at_ramp = np.cumsum(costs.segment_seconds)[:-1] + paid + np.where(in_force > 0, 0.0, costs.ramp_seconds)
    return np.append(at_ramp, costs.total_seconds + (paid[-1] if len(paid) else 0.0))
