"""What ``offramp prepare`` says at its end: a table for people, JSON for machines, and both with a picture beside the
bundle's files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offramp_core.columns import final_id
from offramp_core.precision import EXACT
from offramp_worker.prepare.heads.selection import BUDGETS, CandidateVerdict, RampMerit, Untrained
from offramp_worker.prepare.measuring.executors import Executors
from offramp_worker.prepare.measuring.outlook import USUAL_OVERHEAD, Outlook
from offramp_worker.prepare.places.places import Unread
from offramp_worker.prepare.precision.judging import Lowered
from offramp_worker.prepare.precision.precisions import Approximations
from offramp_worker.prepare.source.data import FloatArray
from offramp_worker.prepare.variants.choosing import Point
from offramp_worker.prepare.writing import ramp_order

if TYPE_CHECKING:  # the worker image trains without showing anything, and has no such library
    from rich.console import Console
    from rich.table import Table

REPORT_FILE, PICTURE_FILE, FRONTIER_FILE = "report.json", "report.png", "frontier.png"


@dataclass(frozen=True, slots=True)
class RampLine:
    """One candidate ramp. Merits of kept ramps are measured on the records, of refused ones on the validation rows.

    ``before`` is what the earlier head of a refreshed ramp is worth on the same rows.
    """

    verdict: CandidateVerdict
    measured_on: str
    before: RampMerit | None = None

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; shares are fractions."""
        spec, merit = self.verdict.spec, self.verdict.merit
        before = {} if self.before is None else {"exit_share_before": _rounded(self.before.exits)}
        return {
            "id": spec.id,
            "tensor": spec.tensor,
            "position": spec.position,
            "depth": round(merit.depth, 4),
            "head": spec.head,
            "hidden": spec.hidden,
            "cost": round(merit.cost, 4),
            "cost_by_batch": _rounded(merit.costs.head),
            "agreement": round(merit.agreement, 4),
            "exit_share": _rounded(merit.exits),
            **before,
            "utility": _rounded(merit.utility),
            "measured_on": self.measured_on,
            "refused": self.verdict.refused,
        }


@dataclass(frozen=True, slots=True)
class ApproximationLine:
    """The backbone at another precision, or a side model: how it was made, and its disagreement with the reference on
    the records."""

    name: str
    lowered: Lowered | None
    disagreement: float | None
    refused: str

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; shares are fractions, times are over fp32's by batch size."""
        tried = self.lowered.tried if self.lowered else ()
        return {
            "name": self.name,
            "method": self.lowered.method if self.lowered else "",
            "disagreement": self.disagreement,
            "refused": self.refused,
            "tried": [
                {
                    "method": c.method,
                    "disagreement": round(c.disagreement, 4),
                    "expected_disagreement": round(c.expected, 5),
                    "ratio": {str(size): round(ratio, 3) for size, ratio in c.ratio.items()},
                    "refused": c.refused,
                }
                for c in tried
            ],
        }


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What a bundle holds, which rows went where, and how long each part took.

    ``outlooks_before`` is the outlook with the earlier heads on the same records, where heads were refreshed.
    ``served`` is the output whose answers are served, ``exits`` are those that the request named as exits of the
    network's own. ``unread`` are the places that no head can be fed from. ``assumed`` says what the model's answers
    were taken for.
    """

    out: Path
    name: str
    backbone_digest: str
    ramp_set_digest: str
    places: int
    cut_vertices: int
    lines: tuple[RampLine, ...]
    untrained: tuple[Untrained, ...]
    outlooks: tuple[Outlook, ...]
    data: Mapping[str, Any]
    exact_seconds: Mapping[int, float]
    threads: int
    seconds: float
    outlooks_before: tuple[Outlook, ...] = ()
    approximations: tuple[ApproximationLine, ...] = ()
    executors: Executors = field(default_factory=Executors)
    served: str = ""
    exits: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()
    assumed: tuple[str, ...] = ()
    frontier: tuple[Point, ...] = ()

    @property
    def kept(self) -> tuple[RampLine, ...]:
        """Ramps in the bundle, in its order."""
        kept = {line.verdict.spec: line for line in self.lines if not line.verdict.refused}
        return tuple(kept[spec] for spec in ramp_order(tuple(kept)))

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
            "unread": [{"tensor": each.tensor, "reason": each.reason} for each in self.unread],
            "served_output": self.served,
            "own_exits": list(self.exits),
            "assumed": list(self.assumed),
            "ramps": [line.to_mapping() for line in self.kept],
            "refused": [line.to_mapping() for line in self.lines if line.verdict.refused],
            "untrained": [
                {
                    "id": each.spec.id,
                    "position": each.spec.position,
                    "head": each.spec.head,
                    "hidden": each.spec.hidden,
                    "cost_by_batch": _rounded(each.costs.head),
                    "refused": each.reason,
                }
                for each in self.untrained
            ],
            "outlook": [outlook.to_mapping() for outlook in self.outlooks],
            "outlook_before": [outlook.to_mapping() for outlook in self.outlooks_before],
            "approximations": [line.to_mapping() for line in self.approximations],
            "frontier": [asdict(point) for point in self.frontier],
            "executors": {"seconds": self.executors.seconds, "missing": dict(self.executors.missing)},
            "data": dict(self.data),
            "exact_seconds": {str(size): seconds for size, seconds in self.exact_seconds.items()},
            "threads": self.threads,
            "seconds": round(self.seconds, 1),
            "next": self.next_command,
        }


def write_report(report: PrepareReport) -> None:
    """Put report.json and its pictures into the bundle's folder. They are for people: no manifest lists and no worker
    reads them."""
    from offramp_worker.prepare.picture import draw, draw_frontier  # matplotlib takes a second to import

    (report.out / REPORT_FILE).write_text(json.dumps(report.to_mapping(), indent=1) + "\n", encoding="utf-8")
    draw(report, report.out / PICTURE_FILE)
    if report.frontier:
        draw_frontier(report.frontier, report.out / FRONTIER_FILE)


def approximation_lines(
    found: Approximations, outputs: Mapping[str, FloatArray], reference: FloatArray
) -> tuple[ApproximationLine, ...]:
    """What was tried on the whole backbone and on side models; disagreement of what stays is measured on the
    records."""

    task = found.exact.backbone.task

    def disagreement(column: str) -> float | None:
        losses = task.losses(task.exit_answers(outputs[column]), task.answers(reference)) if column in outputs else None
        return None if losses is None else float(losses.mean())

    lines = [
        ApproximationLine(precision, lowered, disagreement(final_id(precision)), lowered.refused)
        for precision, lowered in found.lowered.items()
    ]
    lines += [ApproximationLine(s.spec.id, s.quantized, disagreement(s.spec.id), s.refused) for s in found.sides]
    return tuple(lines)


def print_report(report: PrepareReport, console: Console) -> None:
    """The report for people."""
    from rich.console import Group

    console.print(
        Group(
            _ramp_table(report),
            _outlook_table(report),
            *_executor_table(report),
            *_frontier_table(report),
            *_notes(report),
        ),
        highlight=False,
    )


def _ramp_table(report: PrepareReport) -> Table:
    table = _table(
        title=f"Ramps of {report.name}, in %: the model's time up to one and its own at batch sizes, who could leave "
        "there alone "
        f"at a disagreement budget, of {report.data['records']} records, and what that saves of the model's time"
    )
    table.add_column("ramp", no_wrap=True)
    table.add_column("after", overflow="ellipsis", no_wrap=True, max_width=16)
    sizes = _shown_sizes(report)
    refreshed = any(line.before for line in report.kept)
    for title in (
        "depth",
        *(f"cost b{size}" for size in sizes),
        "agrees",
        *(f"@{budget * 100:g}%" for budget in BUDGETS),
        "saves @1%",
        "@5%",
        *(["before: @1%"] if refreshed else []),
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for line in report.kept:
        merit = line.verdict.merit
        shares = [
            merit.depth,
            *(merit.costs.head[size] for size in sizes),
            merit.agreement,
            *(merit.exits[budget] for budget in BUDGETS),
            merit.utility[0.01],
            merit.utility[0.05],
            *([line.before.exits[0.01]] if line.before else []),
        ]
        table.add_row(line.verdict.spec.id, line.verdict.spec.tensor, *(f"{100 * share:.1f}" for share in shares))
    return table


def _table(*, title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left")


def _shown_sizes(report: PrepareReport) -> list[int]:
    """The smallest, a middle and the largest batch size."""
    sizes = list(report.exact_seconds)
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})


def _outlook_table(report: PrepareReport) -> Table:
    table = _table(
        title=f"Best plan of at most 3 ramps that add at most {USUAL_OVERHEAD:.0%}, in hindsight on the records: an "
        "outlook, no promise"
    )
    refreshed = ["with the earlier heads"] if report.outlooks_before else []
    for title in ("budget", "batch", "saves", "ramps", "with any overhead", *refreshed):
        table.add_column(title, justify="left" if title == "ramps" else "right", no_wrap=title != "ramps")
    usual = [o for o in report.outlooks if o.max_overhead == USUAL_OVERHEAD]
    free = [o for o in report.outlooks if o.max_overhead != USUAL_OVERHEAD]
    before = [f"{o.saving:.1%}" for o in report.outlooks_before if o.max_overhead == USUAL_OVERHEAD]
    for row, (within, anything) in enumerate(zip(usual, free, strict=True)):
        names = _plan_name(within)
        figures = f"{within.budget:.1%}", str(within.batch_size), f"{within.saving:.1%}"
        table.add_row(*figures, names, f"{anything.saving:.1%}", *before[row : row + 1])
    return table


def _executor_table(report: PrepareReport) -> list[Table]:
    if not report.executors.seconds:
        return []
    table = _table(
        title=f"The whole model, ms by batch size ({report.threads} thread{'s' if report.threads > 1 else ''})"
    )
    sizes = list(next(iter(report.executors.seconds.values())))
    for column in ("executor", *sizes):
        table.add_column(column, justify="left" if column == "executor" else "right", no_wrap=True)
    for name, seconds in report.executors.seconds.items():
        table.add_row(name, *(f"{1e3 * seconds[size]:.2f}" if size in seconds else "" for size in sizes))
    return [table]


def _frontier_table(report: PrepareReport) -> list[Table]:
    if not report.frontier:
        return []
    table = _table(
        title="Forms of the model: mean time over batch sizes and expected disagreement against fp32, on rows that no "
        "variant learned from"
    )
    for column in ("form", "time", "disagrees", "MiB", "stays"):
        table.add_column(column, justify="left" if column in ("form", "stays") else "right", no_wrap=True)
    for p in sorted(report.frontier, key=lambda point: -point.time):
        table.add_row(p.name, f"{p.time:.2f}", f"{p.disagreement:.2%}", f"{p.size_bytes / 2**20:.1f}", p.stays)
    return [table]


def _approximation_notes(line: ApproximationLine) -> list[str]:
    if line.lowered is None:
        return [f"{line.name}: kept at fp32"]
    notes = []
    if line.lowered.untried:
        notes.append(f"{line.name} refused: {line.lowered.untried}")
    if not line.refused:
        shares = (
            f"; it answers {line.disagreement:.2%} of the records differently" if line.disagreement is not None else ""
        )
        notes.append(f"{line.name}: {line.lowered.method or 'kept at fp32'}{shares}")
    return notes + [
        f"{line.name} {c.method}: {', '.join(f'{r:.2f}' for r in c.ratio.values())} of the fp32 time at batch sizes "
        f"{', '.join(map(str, c.ratio))}, {c.disagreement:.2%} of the head rows differ from fp32, {c.expected:.2%} by "
        "the size of the errors" + (f"; refused: {c.refused}" if c.refused else "")
        for c in line.lowered.tried
    ]


def _notes(report: PrepareReport) -> list[str]:
    data = report.data
    times = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in report.exact_seconds.items())
    lines = [
        f"places: {report.cut_vertices} cut vertices, {report.places} places considered",
        f"exact model, ms by batch size ({report.threads} thread{'s' if report.threads > 1 else ''}): {times}",
        f"data: {data['head_training']} rows trained heads, {data['head_validation']} validated them, "
        f"{data['records']} are records; no row is in two of them",
    ]
    lines += _task(report)
    lines += _own_exits(report)
    if data["extra_training"] or data["variations"]:
        lines.append(
            f"      heads also learned from {data['extra_training']} rows of head data and {data['variations']} "
            "variations"
        )
    if data["repeats_dropped"]:
        lines.append(f"      {data['repeats_dropped']} rows dropped because they repeat others")
    lines += [note for line in report.approximations for note in _approximation_notes(line)]
    lines += [f"{name}: {reason}" for name, reason in report.executors.missing.items()]
    lines += [report.executors.faster] if report.executors.faster else []
    lines += _refusals(
        [
            *((each.tensor, each.reason) for each in report.unread),
            *((line.verdict.spec.id, line.verdict.refused) for line in report.lines if line.verdict.refused),
            *((each.spec.id, each.reason) for each in report.untrained),
        ]
    )
    return [
        *lines,
        f"bundle written to {report.out} in {report.seconds:.0f} s, with {REPORT_FILE} and {PICTURE_FILE}"
        + (f", all forms in {FRONTIER_FILE}" if report.frontier else ""),
        f"next: {report.next_command}",
    ]


def _plan_name(outlook: Outlook) -> str:
    if outlook.precision == EXACT:
        return ", ".join(outlook.ramps) or "none pays"
    return f"{outlook.precision}: {', '.join(outlook.ramps) or 'no ramps'}"


def _rounded(shares: Mapping[Any, float]) -> dict[str, float]:
    return {str(key): round(share, 4) for key, share in shares.items()}


def _task(report: PrepareReport) -> list[str]:
    """What the model's answers were taken for; what speaks against it stands below."""
    if not report.assumed:
        return []
    taken, *doubts = report.assumed
    return [f"task: {taken}", *(f"      {doubt}; is this a classifier's top label?" for doubt in doubts)]


def _own_exits(report: PrepareReport) -> list[str]:
    """What the network's own exits are worth: one that seldom agrees may answer another question."""
    if not report.exits:
        return []
    own = (line.verdict for line in report.lines if line.verdict.spec.head == "own")
    agreement = ", ".join(f"{verdict.spec.id} {verdict.merit.agreement:.0%}" for verdict in own)
    return [
        f"outputs: {report.served} is served; {', '.join(report.exits)} {'are' if len(report.exits) > 1 else 'is'} "
        "taken for earlier exits of the same task, "
        f"as --own-exits says, which agree with it on {agreement}"
    ]


def _refusals(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """One line per reason."""
    ramps = defaultdict(list)
    for ramp, reason in reasons:
        ramps[reason].append(ramp)
    return [f"refused {', '.join(names)}: {reason}" for reason, names in ramps.items()]
