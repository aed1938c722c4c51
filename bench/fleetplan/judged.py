"""What was asked of the planner, and whether a scene's figures meet it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.fleetplan.runs import BEST_SINGLE, LARGEST, MOST_MISSED, OURS

COST_GOAL, KEPT_GOAL = 0.70, 0.95
ROUNDING = 1e-3


def ahead(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Of cost, misses, or both; a policy that breaks a budget is told as such."""
    cheaper = ours["cost"] <= other["cost"] * (1 + ROUNDING)
    fewer = ours["missed"] <= other["missed"] + ROUNDING / 10
    words = {(True, True): "both", (True, False): "cost only", (False, True): "misses only", (False, False): "neither"}
    return words[cheaper, fewer]


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """What the issue asks, by its words."""
    by_name = {row["policy"]: row for row in rows}
    ours = by_name[OURS]
    found = {
        f"cost <= {COST_GOAL:.2f} of the largest variant alone": ours["cost"] <= COST_GOAL * by_name[LARGEST]["cost"],
        f"misses <= {MOST_MISSED:.0%}": ours["missed"] <= MOST_MISSED,
    }
    if BEST_SINGLE in by_name:
        single = by_name[BEST_SINGLE]
        kept = single["missed"] > MOST_MISSED or ours["cost"] <= single["cost"] * (1 + ROUNDING)
        found["never above the best single certified variant"] = kept
    return found
