"""A detector that watches a stable plan for as long as it serves.

Evidence that accumulated over a quiet month is blind to a change today, so this one restarts itself all the
time: the Shiryaev-Roberts statistic is the sum of the evidence since every possible moment of change. Under
the null hypothesis M minus the number of observations is a martingale, hence the first alarm at ``M >=
run_length`` takes at least ``run_length`` observations on average, however often one looks.

Source: Shin, Ramdas and Rinaldo (2024), "E-detectors", arXiv:2203.03532.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import HARM_FACTORS, alternatives, check_counts

_LARGEST_LOG = 700.0  # exp of it is still finite; far beyond any run length


@dataclass(frozen=True, slots=True)
class DetectorState:
    """``m`` has one Shiryaev-Roberts statistic per alternative rate (empty: nothing seen); ``n`` counts observations."""

    m: tuple[float, ...] = ()
    n: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; :meth:`from_mapping` gives back an equal state, so a restart loses nothing."""
        return {"m": list(self.m), "n": self.n}

    @classmethod
    def from_mapping(cls, value: dict[str, Any]) -> DetectorState:
        m, n = tuple(float(x) for x in value["m"]), int(value["n"])
        if n < 0 or len(m) > len(HARM_FACTORS) or not all(math.isfinite(x) and x >= 0 for x in m):
            raise InvalidArgumentError(f"detector state is {value!r}; m must be finite and >= 0, n >= 0")
        return cls(m, n)


def init() -> DetectorState:
    """Nothing seen."""
    return DetectorState()


def update(state: DetectorState, n: int, k: int, *, p0: float) -> DetectorState:
    """Add a block of ``n`` audited requests with ``k`` disagreements; ``n=1`` adds a single outcome.

    Within a block the order is unknown: a change may be dated to its beginning only, with the weight of its ``n`` possible moments. That
    keeps the run length in observations; single outcomes merely notice a little sooner.

    Raises
    ------
    InvalidArgumentError
        ``p0`` is not in (0, 1), or the counts are impossible.
    """
    check_counts(k, n)
    grid = alternatives(p0)
    if n == 0:
        return state
    before = state.m or (0.0,) * len(grid)
    if len(before) != len(grid):
        raise InvalidArgumentError(f"detector state was made for another budget than p0={p0}; start anew with init()")
    return DetectorState(tuple(_step(m, n, k, q=q, p0=p0) for m, q in zip(before, grid, strict=True)), state.n + n)


def statistic(state: DetectorState) -> float:
    """The average of the statistics over the alternatives; what is compared with the run length."""
    return sum(state.m) / len(state.m) if state.m else 0.0


def alarm(state: DetectorState, *, run_length: float) -> bool:
    """Whether the detector alarms. On a plan within budget this happens about once in ``run_length`` observations, or less often.

    Raises
    ------
    InvalidArgumentError
        ``run_length`` is not above 1.
    """
    if not run_length > 1:
        raise InvalidArgumentError(f"run_length is {run_length}; it must be above 1")
    return statistic(state) >= run_length


def _step(m: float, n: int, k: int, *, q: float, p0: float) -> float:
    log_ratio = k * math.log(q / p0) + (n - k) * (math.log1p(-q) - math.log1p(-p0))
    return math.exp(min(_LARGEST_LOG, math.log(m + n) + log_ratio))
