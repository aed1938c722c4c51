"""``status``: the verdict and every condition."""

from __future__ import annotations

from rich.text import Text

from offramp_cli.show.lines import STYLES, Cell, state, table
from offramp_core.reasons import condition_tone
from offramp_operator.explain.capacity import capacity_facts
from offramp_operator.explain.family import Family
from offramp_operator.explain.health import health
from offramp_operator.explain.pools import pool_facts
from offramp_operator.explain.savings import sentences
from offramp_operator.explain.words import ago


def health_lines(family: Family, now: float) -> list[Text]:
    """The verdict and every condition."""
    found = health(family)
    rows: list[list[Cell]] = [
        [
            c.type,
            Text(c.status, style=STYLES[condition_tone(c.type, c.status, c.reason)]),
            c.reason,
            ago(c.last_transition_at, now),
            c.message,
        ]
        for c in family.service.status.conditions
    ]
    return [
        Text(f"{family.name}: ") + state(found.verdict) + f": {found.message}",
        *(table(("CONDITION", "STATUS", "REASON", "FOR", "MESSAGE"), rows) if rows else []),
        *(Text(f"capacity: {sentence}") for sentence in capacity_facts(family)),
        *(Text(sentence) for sentence in pool_facts(family)),
        *(Text(f"savings: {sentence}") for sentence in sentences(family)),
    ]
