"""The JSON files that the bench left, and words for those that it did not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.provenance import words

MEASURED = "Measured"  # begins the line under a table that says when
TOLERANCE = 0.05  # measured ratios may be so much beyond a target: a machine with neighbours
MISSING = "not measured on this machine"


@dataclass(frozen=True, slots=True)
class Results:
    """A folder of results."""

    folder: Path

    def get(self, name: str) -> dict[str, Any] | None:
        """A result by the name of its file, or None."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def measured(self, stage: str, name: str = "") -> str:
        """When, from which commit and on what a stage, or one name of it, was measured; empty where that was not
        noted."""
        found = self.get(stage)
        if isinstance(found, dict):
            own = found.get(name, {}).get("measured") if name else found.get("measured")
            if own:
                return words(own)
        return words((self.get("measured") or {}).get(stage))

    def rows(self, name: str) -> list[dict[str, Any]] | None:
        """A result that is a list, or None."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def of_stage(self, stage: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(record set, result) of every set that a stage of bench.replays went through."""
        for path in sorted(self.folder.glob(f"{stage}-*.json")):
            yield path.stem.removeprefix(f"{stage}-"), json.loads(path.read_text())

    def sets(self) -> dict[str, dict[str, Any]]:
        """Every record set that any stage saw, with what is known of it."""
        found: dict[str, dict[str, Any]] = {}
        for stage in ("draws", "frontier", "certificates", "targets", "serving"):
            for name, result in self.of_stage(stage):
                found.setdefault(name, result)
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Goal:
    """One row: what was asked, what came out, how it was measured, whether it is met (None: not measured here, or not
    well enough to tell), when and on what, and whether that took the tolerance."""

    target: str
    measured: str
    how: str
    met: bool | None
    when: str = ""
    tolerated: bool = False  # met only with the tolerance of ratios

    @property
    def mark(self) -> str:
        if self.met and self.tolerated:
            return f"met with the {percent(TOLERANCE, 0)} tolerance only"
        if self.met is None:
            return "–" if self.measured == MISSING else "cannot be told"
        return "met" if self.met else "**not met**"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def spread(values: dict[str, float], digits: int = 1) -> str:
    """Median and the middle 90 %, of shares."""
    return (
        f"{100 * values['median']:.{digits}f} % ({100 * values['p5']:.{digits}f} to {100 * values['p95']:.{digits}f})"
    )


def holds(value: bool | None) -> str:
    """The mark of a promise that was put to a test."""
    return {True: "holds", False: "**refuted**", None: "–"}[value]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, or the words that there is nothing to show."""
    if not rows:
        return [f"*{MISSING[0].upper()}{MISSING[1:]}.*", ""]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(" --- " for _ in head) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def measured_line(when: str, more: str = "") -> list[str]:
    """The line under a table."""
    said = ", ".join(part for part in (when, more) if part)
    return [f"*{MEASURED}: {said}.*", ""] if said else []


def policy_row(result: dict[str, Any], name: str) -> dict[str, Any] | None:
    """One policy of a result that lists them."""
    return next((row for row in result["policies"] if row["name"] == name), None)
