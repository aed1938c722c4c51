"""Which arm a batch runs under, and what an arm runs. Pure; the engine brings batch numbers and times."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.evidence.slow import BatchShape, SlowLimits
from offramp_core.execution import Regrouping
from offramp_core.plan import NAME_HASH_LENGTH, Plan
from offramp_core.precision import EXACT
from offramp_core.protocol import OVERLOAD, PlanDocument, tier_slice
from offramp_core.uncertainty import ExitTest
from offramp_worker.engine.accounts.counters import ArmCounter
from offramp_worker.engine.arms.breaker import Breaker
from offramp_worker.engine.arms.tiers import TierExits
from offramp_worker.engine.execution.execute import Runnable

EXITS_OFF = "exits-off"
MAX_STAGGER = 0.5


@dataclass(frozen=True, slots=True)
class Runtime:
    """One arm, ready to run: stages and who leaves at which column, or neither for the exact executor.

    ``regrouping`` says when a batch that lost rows is made smaller; without it execution is results-only: every row
    goes on to the end. ``stage_seconds`` is what each stage takes, by rows. ``breaker`` watches the arm's audits,
    ``meter`` what its exits save. Audits of ``slices`` are counted apart, requests of ``stopped`` ones leave nowhere.
    So are those of answers that name a class of ``classes``, which have slices of these names; no exit gives an answer
    that names one of ``stopped_classes``. Requests of ``tiers`` leave by tests of their own, at the same ramps; those
    of any other tier leave nowhere. ``budget`` is everybody's. ``alarmed`` are detectors of tiers that the document
    leaves out now: a stop lasts while the plan serves. ``further`` stages behind the last exit lead to where an edge
    hands features on.
    """

    plan: Plan
    audit_rate: float
    counter: ArmCounter
    stages: tuple[Runnable, ...] = ()
    tests: Mapping[int, ExitTest] = field(default_factory=dict)
    regrouping: Regrouping | None = None
    stage_seconds: Sequence[Sequence[float]] = ()
    breaker: Breaker | None = None
    meter: HoldbackMeter | None = None
    slices: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    tiers: Mapping[str, TierExits] = field(default_factory=dict)
    budget: float = 0.0
    alarmed: Mapping[str, Breaker] = field(default_factory=dict)
    classes: Mapping[int, str] = field(default_factory=dict)
    stopped_classes: tuple[int, ...] = ()
    further: int = 0
    exits_off: bool = field(init=False)  # whether it is the exact executor

    def __post_init__(self) -> None:
        object.__setattr__(self, "exits_off", self.plan.exits_off and not self.stages)

    def slices_of(self, asked: str, answer: Any, *, tier: str = "") -> tuple[str, ...]:
        """Which slices the audit of a request counts for: its tier's first, then by what it ``asked`` for, and by the
        class that its ``answer`` names. Answers under overload count for its budget and for no other."""
        if tier == OVERLOAD:
            return (tier_slice(tier),)
        named = self.classes.get(int(answer)) if self.classes else None
        mine = [tier_slice(tier)] if tier else []
        return (*mine, *([asked] if asked in self.slices else []), *([] if named is None else [named]))

    def lets_go(self, *, slice_name: str, tier: str, max_disagreement: float) -> bool:
        """Whether requests of a slice and tier may leave early, for which a budget of so much will do: what was asked
        for came with the request, what the tier allows now came with the plan."""
        if slice_name in self.stopped:
            return False
        if not tier:
            return self.budget <= max_disagreement
        exits = self.tiers.get(tier)
        return exits is not None and not exits.stopped and exits.budget <= max_disagreement

    @property
    def carry_on(self) -> bool:
        """Whether execution is results-only: every row goes on to the end."""
        return not self.exits_off and self.regrouping is None

    @property
    def judges_itself(self) -> bool:
        """Whether every batch ends with the reference's answers to all of its rows, so that no audit has to run the
        model again."""
        return self.carry_on and self.plan.precision == EXACT

    @property
    def config(self) -> str:
        """What replies call it: the hash part of the ``RampConfig``'s name."""
        return EXITS_OFF if self.exits_off else self.plan.content_hash[:NAME_HASH_LENGTH]


@dataclass(frozen=True, slots=True)
class Active:
    """The document in force. A batch takes one reference and keeps it to its end, which is what makes a switch atomic.

    ``off`` is the exact executor without a plan, counted under epoch 0: it serves when there is no document, when the
    breaker has opened and when the stable lease has run out, so that the counts of an epoch are of its plans alone. Its
    audit rate is the stable arm's, so that records for the next tuning go on coming.

    ``holdback`` is the exact executor as well, counted apart, for the batches that are held back from a stable plan
    that has exits.
    """

    off: Runtime
    document: PlanDocument | None = None
    stable: Runtime | None = None
    canary: Runtime | None = None
    slow_limits: SlowLimits = field(default_factory=SlowLimits)
    holdback: Runtime | None = None

    @property
    def epoch(self) -> int:
        return self.document.epoch if self.document is not None else 0

    @property
    def breaker_open(self) -> bool:
        """Whether the worker's own detector keeps the exits of the stable plan off."""
        return self.stable is not None and self.stable.breaker is not None and self.stable.breaker.is_open

    def slow_above(self, runtime: Runtime, shape: BatchShape) -> float | None:
        """Execution seconds above which a batch of ``runtime`` counts as slow; the canary may take its allowed overhead
        longer."""
        exits_off = runtime is self.off or runtime is self.holdback
        limit = None if exits_off else self.slow_limits.of(shape)
        if limit is None or runtime is not self.canary or self.document is None:
            return limit
        return limit * (1 + self.document.max_overhead)


def canary_drawn(*, salt: str, uid: str, batch_number: int, weight_percent: float) -> bool:
    """Whether a batch runs under the canary: a uniform hash of (salt, worker, batch number) below the weight."""
    return 100.0 * _uniform(f"{salt}/{uid}/{batch_number}") < weight_percent


def held_back(*, uid: str, boot_id: str, epoch: int, batch_number: int, share: float) -> bool:
    """Whether a batch runs with exits off to be compared with: a draw of its own, so that it says nothing about the
    canary's."""
    return _uniform(f"holdback/{uid}/{boot_id}/{epoch}/{batch_number}") < share


def staggered(seconds: float, *, uid: str) -> float:
    """A lease of ``seconds``, up to half longer by worker, so that a fleet does not lose its exits at one moment."""
    return seconds * (1.0 + MAX_STAGGER * _uniform(uid))


def _uniform(text: str) -> float:
    """A number in [0, 1) that any machine computes alike."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64
