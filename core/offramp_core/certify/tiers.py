"""Tiers: smaller budgets that requests may ask for, each tested by itself.

A tier has the plan's ramps and precision, with thresholds of its own. Its test is that of a slice turned round: a slice
is other requests under the same plan, a tier is all requests under another plan. The plans that it may get are a path
too, made from A alone, and it walks that path at its own budget with its share of the level; so all promises of a
certificate hold together (Bonferroni), and which of the plans that passed is taken may depend on anything.

A tier that no plan passes is not in the plan, and its requests take no exits: it takes the plan from nobody.

One budget is larger than everybody's: that of overload, which no request asks for. Its path is longer, and it has a
plan only where that saves more than everybody's: else nothing would be won by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from offramp_core.evidence.one_arm import check_rate
from offramp_core.protocol import OVERLOAD


@dataclass(frozen=True, slots=True)
class TierBudget:
    """Allowed disagreement, in (0, 1), of a tier's plan over all requests."""

    name: str
    budget: float

    def __post_init__(self) -> None:
        check_rate(f"budget of tier {self.name}", self.budget)

    @property
    def loosens(self) -> bool:
        """Whether it may be larger than everybody's."""
        return self.name == OVERLOAD


@dataclass(frozen=True, slots=True)
class TierResult:
    """A tier's plan on the held-out records: ``k`` of ``n`` disagreed; it passed at ``level``. ``lost`` is the sum of
    graded losses, None where each disagreement loses all."""

    name: str
    budget: float
    level: float
    n: int
    k: int
    p_value: float
    design_effect: float = 1.0
    lost: float | None = None
    certified: ClassVar[bool] = True

    @property
    def title(self) -> str:
        """What people call it: ``tier strict``."""
        return f"tier {self.name}"

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; rates are decimal strings that read back to the same number."""
        value = {
            "tier": self.name,
            "budget": repr(self.budget),
            "level": repr(self.level),
            "n": self.n,
            "k": self.k,
            "pValue": repr(self.p_value),
        }
        effect = {} if self.design_effect == 1 else {"designEffect": repr(self.design_effect)}
        return {**value, **effect, **({} if self.lost is None else {"lost": repr(self.lost)})}

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> TierResult:
        return cls(
            str(value["tier"]),
            float(value["budget"]),
            float(value["level"]),
            int(value["n"]),
            int(value["k"]),
            float(value["pValue"]),
            design_effect=float(value.get("designEffect", 1.0)),
            lost=float(value["lost"]) if "lost" in value else None,
        )
