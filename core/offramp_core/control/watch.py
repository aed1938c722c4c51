"""The restarting detector over the stable plan's audits of the whole fleet.

A worker's breaker sees its own audits only: with twenty workers each is twenty times as slow to notice what happens to all of them. Here
the audits of all workers since the last pass are one block. Counters are cumulative per worker process, so a pull that is lost or repeated
changes nothing.

The state is the shell's to keep from pass to pass, in memory: it changes with every audit, and a steady state writes nothing. An operator that
starts begins with nothing seen, and at the counters as it finds them, so every audit counts once in a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offramp_core.evidence import detector
from offramp_core.plan import Plan
from offramp_core.protocol import Observations

RUN_LENGTH = 1_000_000.0  # audits of the fleet between false alarms about a plan exactly at its budget; a worker's own has the same
Counter = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Watch:
    """``state`` is about the plan of ``plan_hash`` and ``budget``; ``seen`` has (audited, disagreements) by (boot id, epoch, plan)."""

    plan_hash: str = ""
    budget: float = 0.0
    state: detector.DetectorState = field(default_factory=detector.init)
    seen: Mapping[Counter, tuple[int, int]] = field(default_factory=dict)

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
    design_effect: float = 1.0,
) -> Watch:
    """The detector with the audits that came since the last pass; another plan or budget begins anew.

    ``boots`` are the processes that may still report, trusted or not: what they had told must not count again. ``design_effect`` audits are
    worth one.
    """
    reports = tuple(trusted)
    now = {
        (o.boot_id, c.epoch, c.plan_hash): (c.audited, c.disagreements)
        for o in reports
        for c in o.counts
        if c.arm == "stable"
    }
    if before is None:
        return Watch(plan.content_hash, budget, seen=now)
    n = k = 0
    for counter, (audited, disagreements) in now.items():
        if counter[2] == plan.content_hash:
            then = before.seen.get(counter, (0, 0))
            n, k = n + audited - then[0], k + disagreements - then[1]
    same = (before.plan_hash, before.budget) == (plan.content_hash, budget)
    state = before.state if same else detector.init()
    if not plan.exits_off and 0 <= k <= n:  # a counter that went backwards is quarantined from its next report on
        state = detector.update(state, n, k, p0=budget, design_effect=design_effect)
    silent = boots - {o.boot_id for o in reports}
    kept = {counter: counts for counter, counts in before.seen.items() if counter[0] in silent}
    return Watch(plan.content_hash, budget, state, {**kept, **now})
