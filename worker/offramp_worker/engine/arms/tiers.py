"""Tiers: which budget a request has, and who leaves where in a batch that mixes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.protocol import DEFAULT_TIER, OVERLOAD, PlanDocument
from offramp_core.uncertainty import ExitTest
from offramp_worker.engine.arms.breaker import Breaker

BoolArray = npt.NDArray[np.bool_]
Tests = Mapping[int, ExitTest]


@dataclass(frozen=True, slots=True)
class TierExits:
    """Who leaves among the requests of a tier, by ramp, and the tier's ``budget``. ``breaker`` watches their audits;
    once it is open nobody leaves."""

    tests: Tests = field(default_factory=dict)
    budget: float = 0.0
    breaker: Breaker | None = None

    @property
    def stopped(self) -> bool:
        return self.breaker is not None and self.breaker.is_open


def unknown_tier(name: str, document: PlanDocument | None) -> Sequence[str]:
    """What there is instead of a tier that the service does not have; nothing for one that it has.

    Before the first document nobody knows what there is, and the model itself answers, which is good enough for all.
    Nobody asks for overload.
    """
    tiers = sorted(document.tiers) if document is not None else [name]
    known = (DEFAULT_TIER, *(tier for tier in tiers if tier != OVERLOAD))
    return () if name in known else known


def tier_within(most: float, document: PlanDocument | None) -> str | None:
    """The tier of the largest budget that is at most ``most``; empty for everybody's, None where there is none.

    Examples
    --------
    >>> tier_within(0.01, None)
    ''
    """
    if document is None or most >= document.accuracy_budget:
        return ""
    fitting = [(budget, name) for name, budget in document.tiers.items() if budget <= most]
    return max(fitting)[1] if fitting else None


class MixedTests:
    """Who leaves in a batch whose rows belong to several tiers."""

    def __init__(self, groups: Sequence[tuple[BoolArray, Tests]]) -> None:
        """``groups`` are rows of the batch, (n,) each, and the tests that hold for them."""
        self._groups = groups

    def take(self, rows: BoolArray) -> MixedTests:
        """Of some of the rows."""
        return MixedTests([(mine[rows], tests) for mine, tests in self._groups])

    def leaves(
        self,
        ramp: int,
        logits: npt.NDArray[np.floating[Any]],
        confidence: npt.NDArray[np.float64],
        carried: npt.NDArray[np.intp],
    ) -> BoolArray | None:
        """Which of the ``carried`` rows leave at a ramp, whose outputs are given; None for nobody."""
        found: BoolArray | None = None
        for mine, tests in self._groups:
            test = tests.get(ramp)
            leaves = test.leaves(logits, confidence) if test is not None else None
            if leaves is not None:
                leaves = leaves & mine[carried]
                found = leaves if found is None else found | leaves
        return found
