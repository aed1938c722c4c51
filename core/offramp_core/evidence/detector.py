"""A detector that watches a stable plan for as long as it serves.

Evidence that accumulated over a quiet month is blind to a change today, so this one restarts itself all the
time: the Shiryaev-Roberts statistic is the sum of the evidence since every possible moment of change. Under
the null hypothesis M minus the number of observations is a martingale, hence the first alarm at ``M >=
run_length`` takes at least ``run_length`` observations on average, however often one looks.

Several workers are pooled by adding their counts of a round and updating once: a round is a block whose order is
unknown anyway. (Adding their statistics would keep the run length too, but each worker alone is slow to notice.)

Source: Shin, Ramdas and Rinaldo (2024), "E-detectors", arXiv:2203.03532.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import (
    HARM_FACTORS,
    alternatives,
    as_outcomes,
    check_counts,
    check_design_effect,
    log_ratios,
)

_LARGEST_LOG = 700.0  # exp of it is still finite; far beyond any run length
_LARGEST = math.exp(_LARGEST_LOG)
_STRETCH = 256  # outcomes; a factor of at most 10 for each stays within floating point


@dataclass(frozen=True, slots=True)
class DetectorState:
    """``m`` has one Shiryaev-Roberts statistic per alternative rate (empty: nothing seen); ``n`` counts
    observations."""

    m: tuple[float, ...] = ()
    n: int = 0

    @classmethod
    def from_mapping(cls, value: dict[str, Any]) -> DetectorState:
        m, n = tuple(float(x) for x in value["m"]), int(value["n"])
        if n < 0 or len(m) > len(HARM_FACTORS) or not all(math.isfinite(x) and x >= 0 for x in m):
            raise InvalidArgumentError(f"detector state is {value!r}; m must be finite and >= 0, n >= 0")
        return cls(m, n)


def init() -> DetectorState:
    """Nothing seen."""
    return DetectorState()


def update(state: DetectorState, n: int, k: int, *, p0: float, design_effect: float = 1.0) -> DetectorState:
    """Add a block of ``n`` audited requests with ``k`` disagreements; ``n=1`` adds a single outcome.

    Within a block the order is unknown: a change may be dated to its beginning only, with the weight of its ``n``
    possible moments. That keeps the run length in observations; single outcomes merely notice a little sooner. Where
    ``design_effect`` labels are worth one, each likelihood ratio is taken to the power of its inverse.

    Raises
    ------
    InvalidArgumentError
        ``p0`` is not in (0, 1), or the counts or the design effect are impossible.
    """
    gained, begin = evidence(n, k, p0=p0, design_effect=design_effect), _before(state, p0)
    return DetectorState(moved(begin, n, gained), state.n + n) if n else state


def evidence(n: int, k: int, *, p0: float, design_effect: float = 1.0) -> tuple[float, ...]:
    """Log likelihood ratio of a block against ``p0``, one per alternative rate."""
    check_counts(k, n)
    check_design_effect(design_effect)
    missed = n - k
    return tuple((k * gain + missed * loss) / design_effect for gain, loss in _log_ratios(p0))


def moved(m: tuple[float, ...], n: int, gained: tuple[float, ...]) -> tuple[float, ...]:
    """The statistics after a block of ``n`` with that :func:`evidence`."""
    return tuple([math.exp(min(_LARGEST_LOG, math.log(x + n) + gain)) for x, gain in zip(m, gained, strict=True)])


@dataclass(frozen=True, slots=True)
class Watched:
    """The state after a stretch of outcomes, and how many of them it took until the detector first alarmed (None: it
    did not)."""

    state: DetectorState
    alarm_after: int | None


def watch(state: DetectorState, outcomes: npt.ArrayLike, *, p0: float, run_length: float) -> Watched:
    """Add single outcomes [n] in order, with a look after each: as many updates with ``n=1``, up to rounding, but fast.

    Raises
    ------
    InvalidArgumentError
        ``p0`` or ``run_length`` is out of range, or an outcome is not 0 or 1.
    """
    happened = as_outcomes(outcomes)
    _check_run_length(run_length)
    m, ratios = _before(state, p0), np.exp(_log_ratios(p0))
    whole = len(happened) - len(happened) % _STRETCH
    m, first = _follow_side_by_side(m, happened[:whole], ratios, run_length)
    m, late = _follow(m, happened[whole:].tolist(), ratios.tolist(), run_length)
    if first is None and late is not None:
        first = whole + late
    return Watched(DetectorState(m, state.n + len(happened)) if len(happened) else state, first)


def statistic(state: DetectorState) -> float:
    """The average of the statistics over the alternatives; what is compared with the run length."""
    return sum(state.m) / len(state.m) if state.m else 0.0


def alarm(state: DetectorState, *, run_length: float) -> bool:
    """Whether the detector alarms. On a plan within budget this happens about once in ``run_length`` observations, or
    less often.

    Raises
    ------
    InvalidArgumentError
        ``run_length`` is not above 1.
    """
    _check_run_length(run_length)
    return statistic(state) >= run_length


def _check_run_length(run_length: float) -> None:
    if not run_length > 1:
        raise InvalidArgumentError(f"run_length is {run_length}; it must be above 1")


@lru_cache(maxsize=256)
def _log_ratios(p0: float) -> tuple[tuple[float, float], ...]:
    return log_ratios(p0, alternatives(p0))


def _before(state: DetectorState, p0: float) -> tuple[float, ...]:
    """The statistics so far, one per alternative."""
    size = len(_log_ratios(p0))
    if state.m and len(state.m) != size:
        raise InvalidArgumentError(f"detector state was made for another budget than p0={p0}; start anew with init()")
    return state.m or (0.0,) * size


def _follow(
    m: tuple[float, ...], happened: list[bool], ratios: list[list[float]], run_length: float
) -> tuple[tuple[float, ...], int | None]:
    """The recursion itself, one outcome at a time."""
    limit, first = run_length * len(m), None
    for i, event in enumerate(happened, start=1):
        m = tuple(min(_LARGEST, (x + 1) * (hit if event else miss)) for x, (hit, miss) in zip(m, ratios, strict=True))
        if first is None and sum(m) >= limit:
            first = i
    return m, first


def _follow_side_by_side(
    m: tuple[float, ...], happened: npt.NDArray[np.bool_], ratios: npt.NDArray[np.float64], run_length: float
) -> tuple[tuple[float, ...], int | None]:
    """The same for whole stretches of outcomes.

    A stretch maps the statistic m before it to a m + b after it. All stretches are walked in step from 0, which gives
    their b; chained, these say where each truly begins; and those that could reach the run length are walked again from
    there.
    """
    if len(happened) == 0:
        return m, None
    steps = np.ascontiguousarray(happened.reshape(-1, _STRETCH).T)  # [step, stretch]
    k, (hit, miss) = steps.sum(axis=0), (ratios[:, :1], ratios[:, 1:])
    a = hit**k * miss ** (_STRETCH - k)
    b = np.zeros_like(a)
    for _ in _walk(b, steps, hit, miss):
        pass
    chains = [_chain(x, a_row, b_row) for x, a_row, b_row in zip(m, a.tolist(), b.tolist(), strict=True)]
    begin, end = np.asarray([chain[:-1] for chain in chains]), tuple(chain[-1] for chain in chains)
    limit = run_length * len(m)
    with np.errstate(over="ignore"):  # beyond the largest number it has alarmed long ago
        loud = np.flatnonzero(((begin + _STRETCH) * hit**k).sum(axis=0) >= limit)
        if not len(loud):
            return end, None
        reached = [now.sum(axis=0) >= limit for now in _walk(begin[:, loud], steps[:, loud], hit, miss)]
    row, step = np.nonzero(np.asarray(reached).T)
    return end, int(loud[row[0]] * _STRETCH + step[0]) + 1 if len(row) else None


def _walk(
    m: npt.NDArray[np.float64],
    steps: npt.NDArray[np.bool_],
    hit: npt.NDArray[np.float64],
    miss: npt.NDArray[np.float64],
) -> Iterator[npt.NDArray[np.float64]]:
    """The statistics [alternative, stretch] after each step, in place. Events are few, so every outcome is a miss
    first."""
    hit_instead = hit / miss
    step, stretch = np.nonzero(steps)
    ends = np.searchsorted(step, np.arange(len(steps) + 1)).tolist()
    for begin, end in pairwise(ends):
        m += 1.0
        m *= miss
        if end > begin:
            m[:, stretch[begin:end]] *= hit_instead
        yield m


def _chain(m: float, a: list[float], b: list[float]) -> list[float]:
    """Where every stretch begins, and where the last one ends."""
    return list(accumulate(zip(a, b, strict=True), lambda x, ab: min(_LARGEST, ab[0] * x + ab[1]), initial=m))
