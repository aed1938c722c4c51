"""The threshold hill-climb of Apparate, on any window of records.

Source: Apparate (SOSP 2024), arXiv:2312.05385 section 3.2, and its public artifact (github.com/dywsjtu/apparate,
`tune_threshold`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.evaluate import leave_position
from offramp_core.records import BoolArray, IndexArray, Records, SecondsArray

_ROUNDS = 20_000  # a climb ends long before; a guard against cycling on degenerate records


@dataclass(frozen=True, slots=True)
class Climbing:
    """Constants of a hill-climb."""

    #: step and smallest_step: how far a threshold is first moved, and below what the search does not refine.
    step: float = 0.01
    smallest_step: float = 0.001
    #: Disagreement must stay strictly below the budget, as in the artifact, instead of at most at it.
    below: bool = True
    #: Moves that change nothing may be taken and double their step, as in the artifact, so that thresholds end beyond
    #: the last score that called for them. Otherwise a ramp whose step reaches no score looks further from where it is.
    idle_moves: bool = True
    #: Inputs that run to the output count as answered correctly, as they do for a system whose reference is its own
    #: output.
    trusts_final: bool = False


@dataclass(frozen=True, slots=True)
class Climbed:
    """Thresholds, and what they do on the window they were found on."""

    thresholds: tuple[float, ...]
    saving: float
    disagreement: float


def climb(
    window: Records,
    active: tuple[int, ...],
    budget: float,
    rules: Climbing,
    *,
    start: npt.ArrayLike | None = None,
    frozen: BoolArray | None = None,
) -> Climbed:
    """Raise thresholds from 0, or from ``start``, as long as the window keeps the budget.

    Each round tries every ramp one step up and takes, of the moves that keep the budget, the one that loses least
    agreement per second gained; its step doubles. When no move is left steps halve, down to the smallest. ``frozen``
    ramps keep their threshold.
    """
    if not active or not len(window):
        return Climbed((0.0,) * len(active), 0.0, 0.0)
    begin = np.zeros(len(active)) if start is None else np.asarray(start, dtype=np.float64)
    state = _Climb(window, active, budget, rules=rules, start=begin, frozen=frozen)
    state.run()
    thresholds = tuple(float(t) for t in np.minimum(state.thresholds, 1.0))
    return Climbed(thresholds, state.saving, state.errors / len(window))


class _Climb:
    """State of one hill-climb: where each input of the window leaves, and what a further step of each ramp would
    change."""

    def __init__(
        self,
        window: Records,
        active: tuple[int, ...],
        budget: float,
        *,
        rules: Climbing,
        start: SecondsArray,
        frozen: BoolArray | None,
    ) -> None:
        columns = list(active)
        self._rules, self._limit = rules, budget * len(window)
        self._uncertainty = window.uncertainty[:, columns]
        final_wrong = np.zeros(len(window), bool) if rules.trusts_final else ~window.final_agrees
        self._wrong = np.column_stack([~window.agrees[:, columns], final_wrong]).astype(np.int8)
        self._total = window.costs.total_seconds
        self._cost = window.costs.leave_seconds(active)
        self._ramps = np.arange(len(active))
        self._rows = np.arange(len(window))
        self._position: IndexArray = leave_position(window, active, np.minimum(start, 1.0).tolist())
        self._frozen = np.zeros(len(active), bool) if frozen is None else frozen
        self.thresholds = start.astype(np.float64).copy()
        self._overstepped = np.zeros(len(active), bool)
        self._steps = np.where(self._frozen, rules.smallest_step, rules.step)
        self.errors = int(self._wrong[self._rows, self._position].sum())

    @property
    def saving(self) -> float:
        """Share of the backbone's time saved on the window."""
        return 1.0 - float(self._cost[self._position].mean()) / self._total

    def run(self) -> None:
        for _ in range(_ROUNDS):
            raised = _to_four_places(self.thresholds + self._steps)
            leaves = self._newly_leaving(raised)
            lost, gained = self._changes(leaves)
            errors = self.errors + lost
            allowed = ((errors < self._limit) if self._rules.below else (errors <= self._limit)) & ~self._frozen
            chosen, idle = self._choose(lost, gained, allowed)
            if chosen is not None and self.thresholds[chosen] <= 1:
                self.thresholds[chosen] = raised[chosen]
                self._position[leaves[:, chosen]] = chosen
                self.errors += int(lost[chosen])
                idle[chosen] = True
                self._steps[idle] *= 2
            elif not (self._halve() if self._rules.idle_moves else self._refine(allowed)):
                break

    def _newly_leaving(self, raised: SecondsArray) -> BoolArray:
        """Inputs that each ramp would take from later exits if its threshold alone were raised: (w, k)."""
        limits = np.minimum(raised, 1.0).astype(np.float32)
        leaves: BoolArray = (self._uncertainty < limits) & (self._ramps < self._position[:, None])
        return leaves

    def _changes(self, leaves: BoolArray) -> tuple[SecondsArray, SecondsArray]:
        """Errors added and seconds saved by each ramp's move: (k,) each. Seconds are exactly 0 where nothing moves."""
        wrong_now = self._wrong[self._rows, self._position]
        lost = ((self._wrong[:, :-1] - wrong_now[:, None]) * leaves).sum(axis=0, dtype=np.float64)
        gained = ((self._cost[self._position][:, None] - self._cost[:-1]) * leaves).sum(axis=0)
        return lost, gained

    def _choose(self, lost: SecondsArray, gained: SecondsArray, allowed: BoolArray) -> tuple[int | None, BoolArray]:
        """The move to make, and the ramps whose move changes cost or agreement not at all: (k,)."""
        idle = allowed & ((lost == 0) | (gained == 0)) & self._rules.idle_moves
        paying = np.flatnonzero(allowed & ((gained != 0) if self._rules.idle_moves else (gained > 0)))
        best = int(paying[np.argmin(np.abs(lost[paying]) / np.abs(gained[paying]))]) if len(paying) else None
        if best is None and idle.any():
            best = int(idle.argmax())
        return best, idle

    def _refine(self, allowed: BoolArray) -> bool:
        """Halve the steps that went too far, double those that reached nothing yet; False when neither is left."""
        too_far = ~allowed & ~self._frozen & (_to_four_places(self._steps) > self._rules.smallest_step)
        self._overstepped |= too_far
        too_short = allowed & ~self._overstepped & (self.thresholds + self._steps < 1)
        self._steps[too_far] /= 2
        self._steps[too_short] *= 2
        return bool((too_far | too_short).any())

    def _halve(self) -> bool:
        """Halve every step that is not the smallest yet; False when all are."""
        wide = (_to_four_places(self._steps) > self._rules.smallest_step) & (self.thresholds <= 1)
        self._steps[wide] /= 2
        return bool(wide.any())


def _to_four_places(values: SecondsArray) -> SecondsArray:
    """Rounded as the artifact does, by the decimal value; numpy's rounding differs in the last place where a step ends
    in 5."""
    return np.array([round(value, 4) for value in values.tolist()])
