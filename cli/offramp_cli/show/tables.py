"""``history`` and ``top``: one line per rollout, one line per service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from offramp_cli.show.lines import Cell, state, table
from offramp_operator.explain.capacity import capacity_data, headroom_text
from offramp_operator.explain.family import Family
from offramp_operator.explain.health import health
from offramp_operator.explain.progress import Attempt, attempts
from offramp_operator.explain.savings import measured, savings_data
from offramp_operator.explain.words import ago, milliseconds, share

SHORT = {"latency": "", "first_token": "to first token", "per_token": "per token"}


def history_lines(family: Family, now: float, *, wide: bool = False) -> list[Text]:
    """Rollouts, newest first."""
    if not family.rollouts:
        return [Text(f"{family.name} has had no rollout yet; `offramp why {family.name}` says what it waits for")]
    titles = [
        "NAME",
        "FROM",
        "TO",
        "CAUSE",
        "VERDICT",
        "REASON",
        "AUDITS",
        "TOOK",
        "AGE",
        *(["MESSAGE"] if wide else []),
    ]
    return table(titles, (_row(attempt, now, wide=wide) for attempt in attempts(family, now)))


def _row(attempt: Attempt, now: float, *, wide: bool) -> list[Cell]:
    row: list[Cell] = [
        attempt.name,
        attempt.from_config,
        attempt.to_config,
        attempt.cause,
        state(attempt.verdict),
        attempt.reason,
        attempt.audits,
        attempt.took,
        ago(attempt.created_at, now),
    ]
    return [*row, attempt.message] if wide else row


def history_data(family: Family) -> dict[str, Any]:
    """The stored rollouts, newest first."""
    return {"service": family.name, "rollouts": list(reversed(family.manifests["rollouts"]))}


def top_lines(families: Sequence[Family], *, wide: bool = False, namespaces: bool = False) -> list[Text]:
    """The figures that the operator last rounded for people."""
    titles = [
        "NAME",
        "HEALTH",
        "P50",
        "P95",
        "SLO",
        "AGREE",
        "BUDGET",
        "EXIT%",
        "SAVED",
        "MEASURED",
        "NO-EXIT",
        "LABELS",
    ]
    if namespaces:
        titles.insert(0, "NAMESPACE")
    if wide:
        titles += ["MODE", "CONFIG", "AUDITS", "WORKERS"]
    rows: list[list[Cell]] = []
    for family in families:
        row = _figures(family, wide=wide)
        rows.append([family.service.namespace, *row] if namespaces else row)
    return table(titles, rows)


def _figures(family: Family, *, wide: bool) -> list[Cell]:
    spec, status = family.service.spec, family.service.status
    seen, tuning = status.observed, status.tuning
    slo = ", ".join(f"{milliseconds(goal.seconds)} {SHORT[goal.counted_as]}".strip() for goal in spec.time_goals)
    labels = f"{tuning.labels}/{tuning.labels_needed}" if tuning.labels_needed else str(tuning.labels)
    row: list[Cell] = [
        family.name,
        state(health(family).verdict),
        seen.p50 or "-",
        seen.p95 or "-",
        slo,
        seen.agreement or "-",
        share(spec.max_disagreement),
        seen.exit_rate or "-",
        seen.savings or "-",
        measured(family) or "-",
        headroom_text(family) or "-",
        labels,
    ]
    return [*row, spec.mode, status.stable_config, str(seen.samples), status.workers.summary] if wide else row


def top_data(families: Sequence[Family]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "services": [
            {
                "namespace": f.service.namespace,
                "name": f.name,
                "health": health(f).verdict,
                "observed": (f.manifests["service"].get("status") or {}).get("observed", {}),
                "savings": savings_data(f),
                "capacity": capacity_data(f),
                "labels": f.service.status.tuning.labels,
                "labelsNeeded": f.service.status.tuning.labels_needed,
            }
            for f in families
        ]
    }
