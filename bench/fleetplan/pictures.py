"""Cost, misses and disagreement over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.fleetplan.runs import HPA_CPU, INFAAS, LARGEST, OURS, PROTEUS
from offramp_lab.replay.plots import COLOURS, DPI

SHOWN = (OURS, LARGEST, HPA_CPU, INFAAS, PROTEUS)
PARTS = (
    ("cost", "cost per hour", 1.0),
    ("missed", "missed, %", 100.0),
    ("disagreement", "disagreement, %", 100.0),
    ("rate", "requests/s", 1.0),
)


def draw(rows: Sequence[Mapping[str, Any]], hours: float, path: Path, *, budget: float) -> Path:
    """Write the picture of a scene."""
    figure = Figure(figsize=(9.0, 8.5), layout="constrained")
    axes = figure.subplots(len(PARTS), 1, sharex=True)
    by_name = {row["policy"]: row for row in rows}
    for ax, (part, label, times) in zip(axes, PARTS, strict=True):
        for i, name in enumerate(name for name in SHOWN if name in by_name):
            values = times * np.array(by_name[name]["series"][part])
            at = np.linspace(0, hours, len(values), endpoint=False)
            if part != "rate" or name == OURS:
                ax.plot(at, values, lw=1.6 if name == OURS else 0.9, color=COLOURS[i % len(COLOURS)], label=name)
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)
    axes[2].axhline(100 * budget, color="0.4", lw=0.8, ls="--")
    axes[0].legend(fontsize=8, ncols=len(SHOWN))
    axes[-1].set_xlabel("hours")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path
