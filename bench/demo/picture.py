"""The demo's picture: latency, exits and disagreement over time, with the turns of the story."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import Reply

NEAR_SECONDS = 5.0  # turns so close to each other: the numbers would lie on each other
ROLLING = 10  # disagreement is a rare event; show it over this many seconds


def draw(replies: Sequence[Reply], marks: Sequence[tuple[float, str]], *, title: str, path: Path) -> None:
    """Three stacked panels over the seconds of the run, written as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    origin = marks[0][0]
    seconds = np.array([r.sent_at - origin for r in replies])
    bins = np.arange(0, seconds.max() + 1)
    which = np.digitize(seconds, bins) - 1
    latency = np.array([r.seconds for r in replies]) * 1e3
    left = np.array([r.exit not in ("final", "") for r in replies])
    canary = np.array([r.arm == "canary" for r in replies])
    wrong = np.array([r.ok and not r.agrees for r in replies])

    def per_second(values: np.ndarray, how: str | float) -> np.ndarray:  # type: ignore[type-arg]
        out = np.full(len(bins), np.nan)
        for i in range(len(bins)):
            mine = values[which == i]
            if len(mine):
                out[i] = mine.mean() if how == "mean" else np.percentile(mine, float(how))
        return out

    fig, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(12, 8), sharex=True, height_ratios=[3, 2, 2], layout="constrained"
    )
    top.plot(bins, per_second(latency, 50), label="p50", color="#1f77b4")
    top.plot(bins, per_second(latency, 95), label="p95", color="#1f77b4", alpha=0.35)
    top.set_ylabel("latency, ms")
    top.set_ylim(0, np.nanpercentile(per_second(latency, 95), 98) * 1.3)
    top.legend(loc="upper right")
    middle.fill_between(bins, per_second(left, "mean") * 100, color="#2ca02c", alpha=0.5, label="left early")
    middle.plot(bins, per_second(canary, "mean") * 100, color="#9467bd", label="in the canary")
    middle.set_ylabel("share of requests, %")
    middle.legend(loc="upper right")
    smooth = np.convolve(np.nan_to_num(per_second(wrong, "mean")), np.ones(ROLLING) / ROLLING)[: len(bins)]
    bottom.plot(bins, smooth * 100, color="#d62728", label=f"disagreement, {ROLLING} s mean")
    bottom.set_ylabel("%")
    bottom.set_xlabel("seconds since traffic began")
    bottom.legend(loc="upper right")
    for axis in (top, middle, bottom):
        axis.margins(x=0)
    number_turns(fig, (top, middle, bottom), [(at - origin, text) for at, text in marks])
    fig.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(fig)


def number_turns(fig: Any, axes: Sequence[Any], turns: Sequence[tuple[float, str]]) -> None:
    """A line at each turn of the story, and below the picture what happened."""
    below = 0.02
    for i, (when, text) in enumerate(turns):
        for axis in axes:
            axis.axvline(when, color="#555555", linewidth=0.8, linestyle=":")
        near = i and when - turns[i - 1][0] < NEAR_SECONDS
        axes[0].annotate(
            f"{i + 1}", (when, 1.06 if near else 1.01), xycoords=("data", "axes fraction"), fontsize=9, ha="center"
        )
        lines = textwrap.wrap(f"{i + 1}  {when:5.0f} s  {text}", 150, subsequent_indent=" " * 14)
        fig.text(0.02, -below, "\n".join(lines), fontsize=9, va="top")
        below += 0.024 * len(lines)
