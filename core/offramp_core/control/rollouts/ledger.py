"""Fold the counters of many workers into one tally per epoch.

Counters are cumulative per worker process, so a pull that is lost or repeated changes nothing; a process
that is gone keeps its last counts, and audits it never answered for count against the canary. A process that
reports something impossible is quarantined for the rest of the epoch instead of being pooled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from offramp_core.control.objects import ArmTally, BothArms, Ledger, TierTally
from offramp_core.control.stable.holdback import impossible_counts
from offramp_core.protocol import ArmCounts, PlanCounts


@dataclass(frozen=True, slots=True)
class BootReport:
    """The latest counters of one worker process."""

    boot_id: str
    counts: tuple[ArmCounts, ...]


def fold(
    ledger: Ledger,
    reports: Iterable[BootReport],
    *,
    epoch: int,
    live_boots: frozenset[str],
    plan_hashes: Mapping[str, str],
    distrusted: frozenset[str] = frozenset(),
) -> Ledger:
    """Bring a ledger up to date.

    Parameters
    ----------
    ledger : Ledger
        As persisted; one of another epoch starts anew.
    reports : iterable of BootReport
        Whatever could be pulled; a process that did not answer keeps its last counts.
    epoch : int
        The epoch of the current step.
    live_boots : frozenset of str
        Boot ids of processes that still run. Others are retired.
    plan_hashes : mapping
        Content hash each arm must run in this epoch, by arm name.
    distrusted : frozenset of str
        Boot ids that said something impossible about another epoch, see :func:`impossible`; they are quarantined in
        this one too.
    """
    if ledger.epoch != epoch:
        ledger = Ledger(epoch=epoch)
    live, quarantined = dict(ledger.live), set(ledger.quarantined)
    for report in reports:
        if report.boot_id in quarantined:
            continue
        tally = _tally(report.counts, epoch=epoch, plan_hashes=plan_hashes)
        if report.boot_id in distrusted or tally is None or not _grew(live.get(report.boot_id, BothArms()), tally):
            quarantined.add(report.boot_id)
            live.pop(report.boot_id, None)
        elif tally != BothArms():
            live[report.boot_id] = tally
    retired = ledger.retired
    for boot in sorted(set(live) - live_boots):
        gone = live.pop(boot)
        retired = retired + BothArms(gone.canary.with_lost_audits, gone.stable, gone.tiers)
    return replace(ledger, live=live, retired=retired, quarantined=tuple(sorted(quarantined)))


def _tally(counts: Iterable[ArmCounts], *, epoch: int, plan_hashes: Mapping[str, str]) -> BothArms | None:
    """The two arms of one epoch, or None when the report cannot be true."""
    arms, tiers = {"canary": ArmTally(), "stable": ArmTally()}, dict[str, TierTally]()
    for c in counts:
        if c.epoch != epoch:
            continue
        if c.arm not in arms:
            return None
        tally = ArmTally.of(c)
        if not tally.possible or (tally.batches and plan_hashes.get(c.arm) != c.plan_hash):
            return None
        arms[c.arm] = arms[c.arm] + tally
        if c.tier_audited and c.arm == "canary":
            tiers = tier_tallies(c)
    if any(not 0 <= t.disagreements <= t.audited for t in tiers.values()):
        return None
    return BothArms(**arms, tiers=tiers)


def tier_tallies(counts: ArmCounts) -> dict[str, TierTally]:
    """The audits of each tier, by name."""
    return {
        name: TierTally(n, counts.tier_disagreements.get(name, 0)) for name, n in sorted(counts.tier_audited.items())
    }


def impossible(
    counts: Iterable[ArmCounts],
    *,
    newest_epoch: int | None,
    plans: Mapping[tuple[int, str], str],
    measured: Iterable[PlanCounts] = (),
) -> str:
    """Why a worker's counts cannot be true; empty where they can.

    Parameters
    ----------
    counts : iterable of ArmCounts
        All that one worker process reports of the two arms and of the holdback.
    measured : iterable of PlanCounts
        What it compares with the holdback.
    newest_epoch : int, optional
        The newest epoch that was ever published; None where the document is lost.
    plans : mapping
        Content hash of the plan that (epoch, arm) runs, as far as it is known.
    """
    for c in counts:
        if newest_epoch is not None and c.epoch > newest_epoch:
            return "it counts for an epoch that was never published"
        if not ArmTally.of(c).possible:
            return "it reports more events than there can have been"
        if c.batches and plans.get((c.epoch, c.arm), c.plan_hash) != c.plan_hash:
            return "it counts for a plan that its epoch does not have"
    if any(map(impossible_counts, measured)):
        return "it compares more batches with the holdback than there can have been"
    return ""


def went_backwards(before: Iterable[ArmCounts], now: Iterable[ArmCounts]) -> bool:
    """Whether a counter of one process is lower than it was. Epochs that are no longer told were dropped, which is no
    lie."""
    known = {(c.epoch, c.arm, c.plan_hash): ArmTally.of(c) for c in before}
    return any(not ArmTally.of(c).at_least(known[key]) for c in now if (key := (c.epoch, c.arm, c.plan_hash)) in known)


def _grew(before: BothArms, now: BothArms) -> bool:
    tiers = (now.tiers.get(name, TierTally()).audited >= tally.audited for name, tally in before.tiers.items())
    return now.canary.at_least(before.canary) and now.stable.at_least(before.stable) and all(tiers)
