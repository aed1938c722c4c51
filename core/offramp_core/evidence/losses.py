"""Audits that were drawn and lost, as a detector is told of them: each is a disagreement, once, but not all of them at
one moment.

What a process takes along when it ends was lost for one reason, whatever it would have said. Six disagreements in a row
are an alarm of a detector whose run length is a million; six lost audits are a worker that was scaled away under load.
So they are counted at a pace of at most ``PACE`` budgets: a detector that sees that much for long alarms as it should,
and a handful passes.
"""

from __future__ import annotations

from dataclasses import dataclass

PACE = 2.0


@dataclass(frozen=True, slots=True)
class LostAudits:
    """``owed`` lost audits are still to be counted, ``due`` of them by now (with a fraction)."""

    owed: int = 0
    due: float = 1.0


def count(losses: LostAudits, *, lost: int, seen: int, budget: float) -> tuple[LostAudits, int]:
    """What is owed after ``lost`` audits more among ``seen`` draws more, and how many are to be counted now.

    The first one counts at once.
    """
    owed = losses.owed + lost
    due = losses.due + PACE * budget * seen
    now = min(owed, int(due))
    return LostAudits(owed - now, due - now if owed > now else 1.0), now
