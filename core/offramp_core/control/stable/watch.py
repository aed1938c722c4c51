"""The restarting detector over the stable plan's audits of the whole fleet.

A worker's breaker sees its own audits only: with twenty workers each is twenty times as slow to notice what happens to
all of them. Here the audits of all workers since the last pass are one block. Counters are cumulative per worker
process, so a pull that is lost or repeated changes nothing.

An audit that was drawn and never compared counts as a disagreement, once (:mod:`offramp_core.evidence.losses` says
when): those of a process that is gone, and those that are still open after ``OVERDUE_SECONDS``. A worker compares what
it drew in order, so what is open are the last draws. One that comes after all was counted already.

The state is the shell's to keep from pass to pass, in memory: it changes with every audit, and a steady state writes
nothing. An operator that starts begins with nothing seen, and at the counters as it finds them, so every audit counts
once in a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from offramp_core.evidence import detector
from offramp_core.evidence.losses import LostAudits, count
from offramp_core.plan import Plan
from offramp_core.protocol import ArmCounts, Observations

# Audits of the fleet between false alarms about a plan exactly at its budget; a worker's own has the same.
RUN_LENGTH = 1_000_000.0
OVERDUE_SECONDS = 600.0  # a full backlog of a model that takes two seconds
_BETWEEN_MARKS = OVERDUE_SECONDS / 4
_LONGEST_PASS = OVERDUE_SECONDS / 2  # a clock that jumps makes nothing overdue by itself
Counter = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Reported:
    """What a process has reported of an epoch's audits. ``lost`` of the open ones were given up. ``marks`` are earlier
    moments, the oldest first: how many had been drawn, and how long ago that was. A process that was seen ``gone`` so
    long ago is remembered for a while: what was only out of sight must not count again."""

    drawn: int = 0
    audited: int = 0
    disagreements: int = 0
    lost: int = 0
    marks: tuple[tuple[int, float], ...] = ()
    gone: float | None = None

    @property
    def open(self) -> int:
        """Draws that were neither compared nor given up."""
        return max(0, self.drawn - self.audited - self.lost)


@dataclass(frozen=True, slots=True)
class Watch:
    """``state`` is about the plan of ``plan_hash`` and ``budget``, of which ``lost`` audits were never compared;
    ``losses`` are those of them that it does not count yet. ``seen`` is by (boot id, epoch, plan), as of the time
    ``at``."""

    plan_hash: str = ""
    budget: float = 0.0
    state: detector.DetectorState = field(default_factory=detector.init)
    seen: Mapping[Counter, Reported] = field(default_factory=dict)
    lost: int = 0
    losses: LostAudits = field(default_factory=LostAudits)
    at: float = 0.0

    @property
    def alarms(self) -> bool:
        return detector.alarm(self.state, run_length=RUN_LENGTH)


def watched(
    before: Watch | None,
    trusted: Iterable[Observations],
    *,
    boots: frozenset[str],
    plan: Plan,
    budget: float,
    now: float,
    design_effect: float = 1.0,
) -> Watch:
    """The detector with the audits that came, or were lost, since the last pass; another plan or budget begins anew.

    ``boots`` are the processes that may still report, trusted or not: what they had reported must not count again.
    ``design_effect`` audits are worth one.
    """
    reports = tuple(trusted)
    reported = {(o.boot_id, c.epoch, c.plan_hash): c for o in reports for c in o.counts if c.arm == "stable"}
    if before is None:
        return Watch(
            plan.content_hash, budget, seen={key: _heard(None, c, 0.0).reported for key, c in reported.items()}, at=now
        )
    reporting, seconds = {o.boot_id for o in reports}, min(max(0.0, now - before.at), _LONGEST_PASS)
    plan_hash = plan.content_hash
    seen: dict[Counter, Reported] = {}
    n = k = lost = 0
    for key in before.seen.keys() | reported.keys():
        then, c = before.seen.get(key, Reported()), reported.get(key)
        if c is not None:
            news = _heard(then, c, seconds)
        elif key[0] in reporting or key[0] not in boots:
            gone = 0.0 if then.gone is None else then.gone + seconds
            news = _News(replace(then, lost=then.lost + then.open, gone=gone), lost=then.open)
        else:
            news = _News(then)
        if key[2] == plan_hash:
            n, k, lost = n + news.n, k + news.k, lost + news.lost
        if news.reported.gone is None or (key[0] not in reporting and news.reported.gone < OVERDUE_SECONDS):
            seen[key] = news.reported
    if (before.plan_hash, before.budget) != (plan_hash, budget):
        before = Watch(plan_hash, budget)
    losses, counted = count(before.losses, lost=lost, seen=n + lost, budget=budget)
    state = (
        before.state
        if plan.exits_off
        else detector.update(before.state, n + counted, k + counted, p0=budget, design_effect=design_effect)
    )
    return Watch(plan_hash, budget, state, seen, before.lost + lost, losses, now)


@dataclass(frozen=True, slots=True)
class _News:
    """``k`` of ``n`` audits disagreed that came since the last pass, and ``lost`` ones were given up in this one."""

    reported: Reported
    n: int = 0
    k: int = 0
    lost: int = 0


def _heard(then: Reported | None, c: ArmCounts, seconds: float) -> _News:
    """What a report says that comes so many seconds after the last pass; None: nobody looked before."""
    known = then or Reported()
    came, wrong = c.audited - known.audited, c.disagreements - known.disagreements
    if then is None or not 0 <= wrong <= came:  # a counter that went backwards is quarantined from its next report on
        return _News(Reported(c.drawn, c.audited, c.disagreements, marks=((c.drawn, 0.0),)))
    counted = min(known.lost, came)
    lost, marks = known.lost - counted, [(drawn, waited + seconds) for drawn, waited in known.marks]
    overdue = max((drawn for drawn, waited in marks if waited >= OVERDUE_SECONDS), default=0)
    given_up = max(0, overdue - c.audited - lost)
    marks = [(drawn, waited) for drawn, waited in marks if drawn > c.audited and waited < OVERDUE_SECONDS]
    if not marks or marks[-1][1] >= _BETWEEN_MARKS:
        marks.append((c.drawn, 0.0))
    new = came - counted
    reported = Reported(c.drawn, c.audited, c.disagreements, lost + given_up, tuple(marks))
    return _News(reported, new, min(wrong, new), given_up)
