"""The pictures at the end of ``offramp prepare``: who could leave where, what it costs, and what plans could save; with
variants, time, disagreement and memory of all forms of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from offramp_core.bundle import HeadKind
from offramp_worker.bundle.heads import KINDS
from offramp_worker.prepare.heads.selection import BUDGETS
from offramp_worker.prepare.measuring.outlook import USUAL_OVERHEAD, Outlook
from offramp_worker.prepare.report import PrepareReport, RampLine
from offramp_worker.prepare.variants.choosing import Point

SIZE, DPI = (11.0, 7.5), 110
FRONTIER_SIZE, MARK_AREA = (8.0, 5.0), 600.0
LEAST_SHOWN = 0.01  # %
SHOWN_BUDGET = 0.01
SPREAD = 0.013  # of the x axis, between heads of one place
# Of kinds of heads, as they come. The last one is of whole models at the input.
MARKS = (("#56B4E9", "o"), ("#0072B2", "s"), ("#D55E00", "D"), ("#009E73", "^"), ("#E69F00", "v"), ("#000000", "X"))
OTHER = ("#CC79A7", "P")


def draw(report: PrepareReport, path: Path) -> None:
    """Write the picture of a report as PNG."""
    figure = Figure(figsize=SIZE, layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 0.9))
    leaving, paying = figure.add_subplot(grid[0, :2]), figure.add_subplot(grid[1, :2])
    saving = figure.add_subplot(grid[:, 2])
    at = _positions(report.kept)
    _exits(leaving, report.kept, at)
    _costs(paying, report.kept, at)
    for axes in (leaving, paying):
        _network(axes, report.kept)
    _savings(saving, report.outlooks)
    figure.suptitle(
        f"{report.name}: {len(report.kept)} ramps at {len({r.verdict.spec.position for r in report.kept})} places"
    )
    figure.savefig(path, dpi=DPI)


def draw_frontier(points: Sequence[Point], path: Path) -> None:
    """Write the picture of all forms of the model as PNG: time, expected disagreement, and memory as the size of a
    mark."""
    figure = Figure(figsize=FRONTIER_SIZE, layout="constrained")
    axes = figure.add_subplot()
    largest = max(point.size_bytes for point in points)
    for point in points:
        x, y = max(100 * point.disagreement, LEAST_SHOWN), point.time
        colour = "#0072B2" if point.stays else "#999999"
        size = MARK_AREA * point.size_bytes / largest
        axes.scatter([x], [y], s=size, color=colour, alpha=0.5, edgecolors="black" if point.stays else "none")
        axes.annotate(point.name, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    for budget in BUDGETS:
        axes.axvline(100 * budget, color="black", lw=0.6, ls=":")
    axes.set(
        xlabel=f"expected disagreement (%); what is below {LEAST_SHOWN:g} stands there, dotted: budgets",
        ylabel="time as a share of the model's, mean over batch sizes",
        title=f"Forms of the model: blue stay. Area: memory, up to {largest / 2**20:.1f} MiB",
    )
    figure.savefig(path, dpi=DPI)


def _positions(lines: Sequence[RampLine]) -> dict[str, float]:
    """Where each ramp is drawn: its depth in %, those of one place side by side."""
    at: dict[str, float] = {}
    for position in {line.verdict.spec.position for line in lines}:
        here = [line for line in lines if line.verdict.spec.position == position]
        depth = here[0].verdict.merit.depth
        for number, line in enumerate(here):
            at[line.verdict.spec.id] = 100 * (depth + SPREAD * (number - (len(here) - 1) / 2))
    return at


def _mark(head: HeadKind) -> tuple[str, str]:
    kinds = list(KINDS)
    return MARKS[kinds.index(head) % len(MARKS)] if head in kinds else OTHER


def _exits(axes: Any, lines: Sequence[RampLine], at: dict[str, float]) -> None:
    for line in lines:
        exits = {budget: 100 * share for budget, share in line.verdict.merit.exits.items()}
        colour, marker = _mark(line.verdict.spec.head)
        x = at[line.verdict.spec.id]
        axes.vlines(x, exits[BUDGETS[0]], exits[BUDGETS[-1]], color=colour, lw=1.5, alpha=0.5)
        axes.plot(x, exits[SHOWN_BUDGET], marker, color=colour, ms=6)
    present = {line.verdict.spec.head for line in lines}
    heads = [*(head for head in KINDS if head in present), *sorted(present - KINDS.keys())]
    handles = [
        Line2D([], [], ls="", color=colour, marker=marker, label=head)
        for head, (colour, marker) in ((head, _mark(head)) for head in heads)
    ]
    axes.legend(handles=handles, fontsize=8, loc="upper left")
    axes.set(
        ylabel="inputs that could leave (%)",
        ylim=(0, 102),
        title=f"Exits at one ramp alone: mark at {SHOWN_BUDGET:.0%} disagreement, line from {BUDGETS[0]:.1%} to "
        f"{BUDGETS[-1]:.0%}",
    )


def _costs(axes: Any, lines: Sequence[RampLine], at: dict[str, float]) -> None:
    sizes = list(lines[0].verdict.merit.costs.head)
    first, last = sizes[0], sizes[-1]
    for line in lines:
        colour, marker = _mark(line.verdict.spec.head)
        head, x = line.verdict.merit.costs.head, at[line.verdict.spec.id]
        axes.vlines(x, 100 * head[last], 100 * head[first], color=colour, lw=1.5, alpha=0.5)
        axes.plot(x, 100 * head[first], marker, color=colour, ms=6)
        axes.plot(x, 100 * head[last], marker, color=colour, ms=6, mfc="white")
    axes.axhline(100 * USUAL_OVERHEAD, color="black", lw=0.8, ls="--")
    axes.annotate(
        "usual maxOverhead, for all active ramps together",
        (99, 100 * USUAL_OVERHEAD),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
        ha="right",
        bbox={"color": "white", "alpha": 0.7, "pad": 1},
    )
    top = max(100 * USUAL_OVERHEAD, *(100 * max(line.verdict.merit.costs.head.values()) for line in lines))
    axes.set(
        ylabel="cost (% of the model's time)",
        xlabel="the network: share of the model's time (%)",
        ylim=(0, 1.15 * top),
        title=f"What a ramp costs: filled for single requests, open for batches of {last}"
        if first == 1
        else f"What a ramp costs: filled for batches of {first}, open for {last}",
    )


def _network(axes: Any, lines: Sequence[RampLine]) -> None:
    """The network as a line of places along the bottom."""
    axes.set_xlim(-3, 103)
    low = axes.get_ylim()[0]
    axes.plot([0, 100], [low, low], color="black", lw=5, clip_on=False, solid_capstyle="butt", zorder=1)
    depths = sorted({100 * line.verdict.merit.depth for line in lines})
    axes.plot(depths, [low] * len(depths), "|", color="white", ms=7, mew=1.5, clip_on=False, zorder=2)


def _savings(axes: Any, outlooks: Sequence[Outlook]) -> None:
    sizes = sorted({o.batch_size for o in outlooks})
    for size, colour in zip(sizes, ("#0072B2", "#D55E00"), strict=False):
        for overhead in sorted({o.max_overhead for o in outlooks}):
            points = [o for o in outlooks if o.batch_size == size and o.max_overhead == overhead]
            within = overhead == USUAL_OVERHEAD
            label = f"batch {size}, " + (f"overhead ≤ {overhead:.0%}" if within else "any overhead")
            axes.plot(
                [100 * o.budget for o in points],
                [100 * o.saving for o in points],
                "o-" if within else "o:",
                color=colour,
                label=label,
                mfc=colour if within else "white",
            )
    axes.set(
        xlabel="disagreement budget (%)",
        ylabel="time saved (%)",
        xlim=(0, 100 * BUDGETS[-1] * 1.05),
        title="Best plan of at most 3 ramps,\nin hindsight on the records",
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper left")
