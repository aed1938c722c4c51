"""Fold the counters of many workers into one tally per epoch.

Counters are cumulative per worker process, so a pull that is lost or repeated changes nothing; a process
that is gone keeps its last counts, and audits it never answered for count against the canary. A process that
reports something impossible is quarantined for the rest of the epoch instead of being pooled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import ArmTally, BothArms, Ledger, TierTally, summed_tiers
from offramp_core.control.stable.holdback import impossible_counts
from offramp_core.plan import MAX_TIERS
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
    tiers: Collection[str] = (),
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
    tiers : collection of str
        Those that the service has; audits of others are left out.
    distrusted : frozenset of str
        Boot ids that said something impossible about another epoch, see :func:`impossible`; they are quarantined in
        this one too.
    """
    if ledger.epoch != epoch:
        ledger = Ledger(epoch=epoch)
    live = {boot: _with_tiers(both, tiers) for boot, both in ledger.live.items()}
    quarantined = set(ledger.quarantined)
    for report in reports:
        if report.boot_id in quarantined:
            continue
        tally = _tally(report.counts, epoch=epoch, plan_hashes=plan_hashes)
        if report.boot_id in distrusted or tally is None or not _grew(live.get(report.boot_id, BothArms()), tally):
            quarantined.add(report.boot_id)
            live.pop(report.boot_id, None)
        elif (kept := _with_tiers(tally, tiers)) != BothArms():
            live[report.boot_id] = kept
    retired = ledger.retired
    for boot in sorted(set(live) - live_boots):
        gone = live.pop(boot)
        retired = retired + BothArms(gone.canary.with_lost_audits, gone.stable, gone.tiers)
    return replace(ledger, live=live, retired=retired, quarantined=tuple(sorted(quarantined)))


def _tally(counts: Iterable[ArmCounts], *, epoch: int, plan_hashes: Mapping[str, str]) -> BothArms | None:
    """The two arms of one epoch, or None when the report cannot be true."""
    arms = {"canary": _Reported(), "stable": _Reported()}
    for c in counts:
        if c.epoch != epoch:
            continue
        if c.arm not in arms:
            return None
        reported = _Reported.of(c)
        if not reported.possible or (reported.anything and plan_hashes.get(c.arm) != c.plan_hash):
            return None
        arms[c.arm] += reported
    return BothArms(arms["canary"].arm, arms["stable"].arm, arms["canary"].tiers)


def _with_tiers(both: BothArms, tiers: Collection[str]) -> BothArms:
    """Without what a process says of tiers that the service does not have."""
    if both.tiers.keys() <= set(tiers):
        return both
    return replace(both, tiers={name: tally for name, tally in both.tiers.items() if name in tiers})


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
        reported = _Reported.of(c)
        if not reported.possible:
            return "it reports more events than there can have been"
        if reported.anything and plans.get((c.epoch, c.arm), c.plan_hash) != c.plan_hash:
            return "it counts for a plan that its epoch does not have"
    if any(map(impossible_counts, measured)):
        return "it compares more batches with the holdback than there can have been"
    return ""


def went_backwards(before: Iterable[ArmCounts], now: Iterable[ArmCounts]) -> bool:
    """Whether a counter of one process is lower than it was. Epochs that are no longer told were dropped, which is no
    lie."""
    earlier, later = _by_plan(before), _by_plan(now)
    return any(not later[key].at_least(earlier[key]) for key in later.keys() & earlier.keys())


def _grew(before: BothArms, now: BothArms) -> bool:
    return now.stable.at_least(before.stable) and _canary(now).at_least(_canary(before))


# --- what one process says of one arm --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reported:
    """Counters of an arm, and those of its tiers by name."""

    arm: ArmTally = field(default_factory=ArmTally)
    tiers: dict[str, TierTally] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: ArmCounts) -> _Reported:
        audited, disagreements = counts.tier_audited, counts.tier_disagreements
        names = sorted(audited.keys() | disagreements.keys())
        tiers = {name: TierTally(audited.get(name, 0), disagreements.get(name, 0)) for name in names}
        return cls(ArmTally.of(counts), tiers)

    def __add__(self, other: _Reported) -> _Reported:
        return _Reported(self.arm + other.arm, summed_tiers(self.tiers, other.tiers))

    @property
    def anything(self) -> bool:
        """Whether anything was counted at all."""
        return self != _Reported()

    @property
    def possible(self) -> bool:
        """Whether this can have happened. A request that asked for a tier is none of those that were drawn."""
        tiers = self.tiers.values()
        return (
            self.arm.possible
            and len(tiers) <= MAX_TIERS
            and all(0 <= t.disagreements <= t.audited for t in tiers)
            and self.arm.drawn + sum(t.audited for t in tiers) <= self.arm.requests
        )

    def at_least(self, other: _Reported) -> bool:
        """Whether nothing went backwards since ``other``."""
        tiers = ((self.tiers.get(name, TierTally()), tally) for name, tally in other.tiers.items())
        return self.arm.at_least(other.arm) and all(now.at_least(before) for now, before in tiers)


def _canary(both: BothArms) -> _Reported:
    return _Reported(both.canary, both.tiers)


def _by_plan(counts: Iterable[ArmCounts]) -> dict[tuple[int, str, str], _Reported]:
    """Entries of the same plan, arm and epoch are added, as :func:`fold` does."""
    found: dict[tuple[int, str, str], _Reported] = {}
    for c in counts:
        key = (c.epoch, c.arm, c.plan_hash)
        found[key] = found.get(key, _Reported()) + _Reported.of(c)
    return found
