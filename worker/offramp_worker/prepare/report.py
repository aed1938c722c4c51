"""What ``offramp prepare`` says at its end, as a table for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from offramp_worker.prepare.selection import BUDGETS, Untrained, Verdict


@dataclass(frozen=True, slots=True)
class RampLine:
    """One candidate ramp. Merits of kept ramps are measured on the records, of refused ones on the validation rows."""

    verdict: Verdict
    measured_on: str

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; shares are fractions."""
        spec, merit = self.verdict.spec, self.verdict.merit
        return {
            "id": spec.id,
            "tensor": spec.tensor,
            "position": spec.position,
            "depth": round(merit.depth, 4),
            "head": spec.head,
            "hidden": spec.hidden,
            "cost": round(merit.cost, 4),
            "agreement": round(merit.agreement, 4),
            "exit_share": {str(budget): round(share, 4) for budget, share in merit.exits.items()},
            "measured_on": self.measured_on,
            "refused": self.verdict.refused,
        }


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What a bundle holds, which rows went where, and how long each part took."""

    out: Path
    name: str
    backbone_digest: str
    ramp_set_digest: str
    places: int
    cut_vertices: int
    lines: tuple[RampLine, ...]
    untrained: tuple[Untrained, ...]
    data: Mapping[str, Any]
    exact_seconds: Mapping[int, float]
    threads: int
    seconds: float

    @property
    def kept(self) -> tuple[RampLine, ...]:
        """Ramps in the bundle."""
        return tuple(line for line in self.lines if not line.verdict.refused)

    @property
    def next_command(self) -> str:
        """What to run next."""
        return f"offramp serve {self.out} --port 8080"

    def to_mapping(self) -> dict[str, Any]:
        """The ``--json`` output."""
        return {
            "bundle": str(self.out),
            "name": self.name,
            "backbone_digest": self.backbone_digest,
            "ramp_set_digest": self.ramp_set_digest,
            "cut_vertices": self.cut_vertices,
            "places": self.places,
            "ramps": [line.to_mapping() for line in self.kept],
            "refused": [line.to_mapping() for line in self.lines if line.verdict.refused],
            "data": dict(self.data),
            "exact_seconds": {str(size): seconds for size, seconds in self.exact_seconds.items()},
            "threads": self.threads,
            "seconds": round(self.seconds, 1),
            "next": self.next_command,
        }


def print_report(report: PrepareReport, console: Console) -> None:
    """The report for people."""
    console.print(Group(_ramp_table(report), *_notes(report)), highlight=False)


def _ramp_table(report: PrepareReport) -> Table:
    table = Table(
        title=f"Ramps of {report.name}: what could leave at a disagreement budget of 0.5, 1, 2, 5 %, "
        f"% of {report.data['records']} records",
        title_justify="left",
    )
    table.add_column("ramp", no_wrap=True)
    table.add_column("after", overflow="ellipsis", no_wrap=True, max_width=24)
    for title in ("depth", "cost", "agrees", *(f"@{budget * 100:g}%" for budget in BUDGETS)):
        table.add_column(title, justify="right", no_wrap=True)
    for line in report.kept:
        merit = line.verdict.merit
        shares = [merit.depth, merit.cost, merit.agreement, *(merit.exits[budget] for budget in BUDGETS)]
        table.add_row(line.verdict.spec.id, line.verdict.spec.tensor, *(f"{100 * share:.1f}" for share in shares))
    return table


def _notes(report: PrepareReport) -> list[str]:
    data = report.data
    refused = [line.verdict for line in report.lines if line.verdict.refused]
    times = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in report.exact_seconds.items())
    lines = [
        f"places: {report.cut_vertices} cut vertices, {report.places} places considered",
        f"exact model, ms by batch size ({report.threads} thread{'s' if report.threads > 1 else ''}): {times}",
        f"data: {data['head_training']} rows trained heads, {data['head_validation']} validated them, "
        f"{data['records']} are records; no row is in two of them",
    ]
    if data["extra_training"] or data["variations"]:
        lines.append(
            f"      heads also learned from {data['extra_training']} rows of head data and {data['variations']} variations"
        )
    if data["repeats_dropped"]:
        lines.append(f"      {data['repeats_dropped']} rows dropped because they repeat others")
    lines += [f"refused {verdict.spec.id}: {verdict.refused}" for verdict in refused]
    return [*lines, f"bundle written to {report.out} in {report.seconds:.0f} s", f"next: {report.next_command}"]
