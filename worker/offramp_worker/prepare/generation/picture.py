"""The picture of a report: what is accepted, and what a token costs, by draft and draft length."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from offramp_worker.prepare.generation.report import WORTH, GenerationReport

SIZE, DPI = (11.0, 4.8), 110
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def draw(report: GenerationReport, path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=SIZE, layout="constrained")
    accepted, times = figure.subplots(1, 2)
    names = list(dict.fromkeys(line.draft for line in report.drafts))
    for name, color in zip(names, COLORS * len(names), strict=False):
        lines = [line for line in report.drafts if line.draft == name]
        style = "-" if name in report.kept else ":"
        label = name if name in report.kept else f"{name} (left out)"
        x = [line.tokens for line in lines]
        accepted.plot(x, [100 * line.acceptance for line in lines], style, marker="o", color=color, label=label)
        times.plot(x, [line.time_ratio for line in lines], style, marker="o", color=color, label=label)
    for variant, color in zip(report.variants[1:], COLORS, strict=False):
        times.axhline(variant.time_ratio, color=color, lw=0.8, ls="--")
        times.annotate(
            f"{variant.name} alone, {variant.agreement:.0%} same tokens",
            (0.98, variant.time_ratio),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    times.axhline(1.0, color="black", lw=0.8)
    times.axhspan(WORTH, 1.0, color="0.9", lw=0)
    accepted.set(xlabel="draft tokens", ylabel="accepted (%)", ylim=(0, 102), title="Proposed tokens that fp32 accepts")
    times.set(
        xlabel="draft tokens",
        ylabel="time per token / fp32's",
        title=f"Time per token (fp32 alone: {1e3 * report.reference_seconds:.1f} ms)",
    )
    times.set_ylim(bottom=0)
    if names:
        accepted.legend(fontsize=8)
    figure.suptitle(f"{report.name}: drafts on {report.answers} held-out prompts")
    figure.savefig(path, dpi=DPI)
