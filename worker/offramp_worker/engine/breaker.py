"""The breaker: the worker's own detector over the stable arm's audits. On alarm the plan's exits go off, operator or not."""

from __future__ import annotations

from offramp_core.evidence import detector


class Breaker:
    """Feeds audited outcomes to a Shiryaev-Roberts detector; once open it stays open (another plan brings a new breaker)."""

    def __init__(self, *, accuracy_budget: float, run_length: float, design_effect: float = 1.0) -> None:
        self._p0, self._run_length = accuracy_budget, run_length
        self.design_effect = design_effect  # so many audits are worth one; it follows the audit rate
        self._state = detector.init()
        self.is_open = False

    def watches_like(self, other: Breaker) -> bool:
        """Whether both watch for the same harm."""
        return (self._p0, self._run_length) == (other._p0, other._run_length)

    @property
    def statistic(self) -> float:
        """What is compared with :attr:`limit`: about 1 when quiet, and growing with every disagreement beyond the budget."""
        return detector.statistic(self._state)

    @property
    def limit(self) -> float:
        """The statistic at which it opens: the run length, in audits between two false alarms."""
        return self._run_length

    def update(self, *, audited: int, disagreements: int) -> bool:
        """Add outcomes; True when these ones opened it."""
        if self.is_open or audited == 0:
            return False
        self._state = detector.update(
            self._state, audited, disagreements, p0=self._p0, design_effect=self.design_effect
        )
        self.is_open = detector.alarm(self._state, run_length=self._run_length)
        return self.is_open
