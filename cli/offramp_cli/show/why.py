"""``why``: what serves, what a rollout has seen, and what is waited for, as lines."""

from __future__ import annotations

from rich.text import Text

from offramp_cli.show.lines import Cell, filled, heading, state, table
from offramp_core.control.objects import Rollout
from offramp_operator.explain.capacity import capacity_facts
from offramp_operator.explain.family import Family
from offramp_operator.explain.generation import routes
from offramp_operator.explain.savings import sentences
from offramp_operator.explain.version import version_facts
from offramp_operator.explain.why import (
    NO_READING,
    GateReading,
    about_rollout,
    cooling,
    pin,
    readings,
    serving,
    tuning,
    wrong,
)
from offramp_operator.explain.words import ago

_TITLES = ("GATE", "STATE", "SEEN", "AGAINST", "E-VALUE", "LIMIT", "EXPOSURE", "MEANING")


def why_lines(family: Family, rollout: Rollout | None, now: float) -> list[Text]:
    """What serves and why; the rollout's evidence; the tuner; the pin; what cools down; what is not as it should be."""
    lines = [Text(sentence) for sentence in serving(family)]
    if rollout is not None:
        lines += [Text(), *_rollout_lines(family, rollout, now)]
    else:
        lines += [Text(), Text("Rollout: none so far")]
    for title, section in (
        ("Version on trial", version_facts(family, now)),
        ("Savings", sentences(family)),
        ("Variants and drafts", routes(family)),
        ("Capacity", capacity_facts(family)),
        ("Tuning", tuning(family, now)),
        ("Pin", pin(family)),
        ("Cooling down", cooling(family, now)),
        ("Not as it should be", wrong(family)),
    ):
        if section:
            lines += [Text(), heading(title), *(Text(f"  {sentence}") for sentence in section)]
    return lines


def _rollout_lines(family: Family, rollout: Rollout, now: float) -> list[Text]:
    status = rollout.status
    title = heading("Rollout ") + Text(
        f"{rollout.name}: {rollout.from_config} → {rollout.to_config} ({rollout.cause}), "
    )
    title += state(status.phase) + Text(
        f" {ago(status.finished_at or status.phase_started_at, now)} ago" if status.finished else ""
    )
    lines = [title, *_indented(filled(about_rollout(family, rollout)))]
    seen = readings(rollout, now)
    if not seen:
        return [*lines, Text(f"  {NO_READING}")]
    return [*lines, *_indented(table(_TITLES, map(_gate_row, seen)))]


def _indented(lines: list[Text]) -> list[Text]:
    return [Text("  ") + line for line in lines]


def _gate_row(r: GateReading) -> list[Cell]:
    shown = Text(r.state, style="dim") if r.state == "NotApplicable" else state(r.state)
    return [r.gate, shown, r.seen, r.against, r.e_value, r.limit, r.exposure, r.meaning]
