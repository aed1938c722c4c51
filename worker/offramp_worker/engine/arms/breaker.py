"""The breaker: the worker's own detector over the stable arm's audits. On alarm the plan's exits go off, operator or
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence import detector
from offramp_core.evidence.losses import LostAudits, count


@dataclass(frozen=True, slots=True)
class BreakerState:
    """All there is to remember: which plan it is about and how it is judged, what was seen of it, and how many drawn
    audits are ``open``."""

    plan_hash: str
    budget: float
    run_length: float
    detector: detector.DetectorState = field(default_factory=detector.init)
    losses: LostAudits = field(default_factory=LostAudits)
    open: int = 0
    is_open: bool = False


class Breaker:
    """Feeds audited outcomes to a Shiryaev-Roberts detector; once open it stays open (another plan brings a new
    breaker)."""

    def __init__(
        self, *, accuracy_budget: float, run_length: float, plan_hash: str = "", design_effect: float = 1.0
    ) -> None:
        self._state = BreakerState(plan_hash, accuracy_budget, run_length)
        self.design_effect = design_effect  # so many audits are worth one; it follows the audit rate
        self._keep: Callable[[BreakerState], None] = _nowhere

    @property
    def is_open(self) -> bool:
        return self._state.is_open

    def watches_like(self, other: Breaker) -> bool:
        """Whether both alarm on the same evidence."""
        return _about(self._state)[1:] == _about(other._state)[1:]

    @property
    def statistic(self) -> float:
        """What is compared with :attr:`limit`: about 1 when quiet, and growing with every disagreement beyond the
        budget."""
        return detector.statistic(self._state.detector)

    @property
    def limit(self) -> float:
        """The statistic at which it opens: the run length, in audits between two false alarms."""
        return self._state.run_length

    def go_on(self, before: BreakerState | None, keep: Callable[[BreakerState], None]) -> None:
        """Go on where the process before stopped, if that was about the same plan, and have all that follows kept.

        What that process had drawn and not compared is lost, and counts as disagreements. Exits that were off stay off.
        """
        self._keep = keep
        lost = 0
        if before is not None and _about(before) == _about(self._state):
            try:
                detector.update(before.detector, 0, 0, p0=before.budget)  # refuses one that was made for another budget
                lost, self._state = max(0, before.open), replace(before, open=0)
            except InvalidArgumentError:
                pass
        self._count(0, 0, lost=lost)
        keep(self._state)

    def give_up(self) -> None:
        """What was drawn and not compared never will be: it is lost, and counts as disagreements."""
        lost, self._state = self._state.open, replace(self._state, open=0)
        if lost and not self.is_open:
            self._count(0, 0, lost=lost)
        self._keep(self._state)

    def let_go(self) -> None:
        """Another plan's breaker is kept from now on; late audits of this one are nobody's any more."""
        self._keep = _nowhere

    def draw(self, n: int) -> None:
        """So many requests more are to be audited."""
        if n and not self.is_open:
            self._state = replace(self._state, open=self._state.open + n)
            self._keep(self._state)

    def update(self, *, audited: int, disagreements: int) -> bool:
        """Add outcomes; True when these ones opened it."""
        if self.is_open or audited == 0:
            return False
        self._state = replace(self._state, open=max(0, self._state.open - audited))
        self._count(audited, disagreements)
        self._keep(self._state)
        return self.is_open

    def _count(self, n: int, k: int, *, lost: int = 0) -> None:
        state = self._state
        losses, now = count(state.losses, lost=lost, seen=n + lost, budget=state.budget)
        seen = detector.update(state.detector, n + now, k + now, p0=state.budget, design_effect=self.design_effect)
        alarms = detector.alarm(seen, run_length=state.run_length)
        self._state = replace(state, detector=seen, losses=losses, is_open=state.is_open or alarms)


def _nowhere(_: BreakerState) -> None:
    """Where nothing is kept."""


def _about(state: BreakerState) -> tuple[str, float, float]:
    return state.plan_hash, state.budget, state.run_length
