"""Plots of the page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.fleetplan.pictures import draw as draw_fleet
from bench.fleetplan.scenes import BUDGET
from bench.report.results import Results, percent, policy_row
from bench.report.serving_pictures import serving_pictures
from offramp_lab.replay.plots import COLOURS, DPI

SIZE = (7.5, 4.6)
LEFT_OUT = {"deebert", "deebert+", "deebert-opt", "exits-off"}  # those of single head kinds equal BranchyNet's


def draw_pictures(results: Results, folder: Path) -> dict[str, Path]:
    """Write what the results can fill; names and files."""
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    for name, result in results.of_stage("draws"):
        out[f"policies-{name}"] = _save(folder / f"policies-{name}.png", partial(_policies, result=result))
    if any(True for _ in results.of_stage("certificates")):
        out["certificates"] = _save(folder / "certificates.png", partial(_certificates, results=results))
    for name, result in results.of_stage("serving"):
        out[f"queue-{name}"] = _save(folder / f"queue-{name}.png", partial(_queue, result=result))
    simulator = results.get("simulator")
    if simulator is not None:
        out["simulator"] = _save(folder / "simulator.png", partial(_simulator, result=simulator))
    control = results.get("control")
    if control is not None:
        out["control"] = _save(folder / "control.png", partial(_control, result=control), columns=2)
    for name, scene in (results.get("fleetplan") or {"scenes": {}})["scenes"].items():
        path = folder / f"fleetplan-{name}.png"
        out[f"fleetplan-{name}"] = draw_fleet(scene["rows"], scene["hours"], path, budget=BUDGET)
    for name, draw, columns in serving_pictures(results):
        out[name] = _save(folder / f"{name}.png", draw, columns=columns)
    return out


def _save(path: Path, draw: Callable[[Any], None], *, columns: int = 1) -> Path:
    figure = Figure(figsize=(SIZE[0] * (1 + columns) / 2, SIZE[1]), layout="constrained")
    draw(figure.subplots(1, columns))
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


def _policies(axes: Any, result: dict[str, Any]) -> None:
    """Every draw a faint point, the median a strong one."""
    shown = [row for row in result["policies"] if row["name"] not in LEFT_OUT and row["saving"]["median"] != 0]
    for i, row in enumerate(shown):
        points = 100 * np.array(row["points"])
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(points[:, 0], points[:, 1], ".", color=colour, alpha=0.25, ms=4)
        marker = "D" if row["hindsight"] else "o"
        axes.plot(
            100 * row["disagreement"]["median"],
            100 * row["saving"]["median"],
            marker,
            color=colour,
            mec="black",
            label=row["name"],
        )
    axes.axvline(100 * result["budget"], color="black", lw=0.8, ls="--")
    axes.set(
        xlabel="true disagreement with the full model (%)",
        ylabel="time saved (%)",
        xlim=(-0.1, None),
        title=f"{result['set']}: {result['draws']} draws",
    )
    axes.set_xscale("symlog", linthresh=3)
    ticks = [tick for tick in (0, 0.5, 1, 1.5, 2, 3, 5, 10, 20) if tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=7, ncols=2)


def _certificates(axes: Any, results: Results) -> None:
    for i, (name, result) in enumerate(results.of_stage("certificates")):
        labels = [row["labels"] for row in result["rows"]]
        low, median, high = (
            np.array([100 * row["saving"][k] for row in result["rows"]]) for k in ("p5", "median", "p95")
        )
        axes.errorbar(
            labels, median, yerr=(median - low, high - median), fmt="o-", capsize=3, color=COLOURS[i], label=name
        )
        frontier = results.get(f"frontier-{name}")
        if frontier is not None:
            axes.axhline(100 * frontier["prices"]["time"]["exact"]["saving"], color=COLOURS[i], ls="--", lw=0.8)
    axes.set(
        xscale="log",
        xlabel="labels",
        ylabel="certified saving (%)",
        title="Dashed: the best plan at 1 % true disagreement",
        ylim=(0, None),
    )
    axes.set_xticks(labels, [f"{n:,}" for n in labels])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def _queue(axes: Any, result: dict[str, Any]) -> None:
    """p50 (full) and p95 (hollow) against exits off, by load, Poisson arrivals and Offramp's batching."""
    loads = [each["load"] for each in result["loads"]]
    names = [row["name"] for row in result["loads"][0]["policies"] if row["name"] not in ("exits-off", "branchynet+")]
    for i, name in enumerate(names):
        rows = [_poisson(policy_row(each, name)) for each in result["loads"]]
        axes.plot(loads, [row["p50_ratio"] for row in rows], "o-", color=COLOURS[i], label=f"{name}, p50")
        axes.plot(loads, [row["p95_ratio"] for row in rows], "o--", color=COLOURS[i], mfc="white", label=f"{name}, p95")
    axes.axhline(1, color="black", lw=0.8)
    axes.set(
        xlabel="load (share of what one worker without exits can do)",
        ylabel="latency against exits off",
        ylim=(0, None),
    )
    axes.set(title=f"{result['set']}: Poisson arrivals, simulated")
    axes.set_xticks(loads)
    axes.legend(fontsize=6, ncols=3)


def _poisson(row: dict[str, Any] | None) -> dict[str, Any]:
    assert row is not None
    found: dict[str, Any] = next(s for s in row["serving"] if s["arrivals"] == "poisson" and s["batching"] == "offramp")
    return found


def _simulator(axes: Any, result: dict[str, Any]) -> None:
    for i, q in enumerate(("p50", "p95")):
        loads = np.array([each["load"] for each in result["loads"]]) + 0.01 * (i - 0.5)
        verdicts = [each["verdict"][q] for each in result["loads"]]
        middle = np.array([v["measured"] for v in verdicts])
        low, high = (np.array([v[k] for v in verdicts]) for k in ("measured_low", "measured_high"))
        axes.errorbar(
            loads,
            middle,
            yerr=(middle - low, high - middle),
            fmt="o",
            capsize=4,
            color=COLOURS[i],
            label=f"{q}, worker",
        )
        axes.plot(loads, [v["simulated"] for v in verdicts], "x", ms=9, color=COLOURS[i], label=f"{q}, simulated")
    axes.set(
        xlabel="load", ylabel="latency, exits on / off", ylim=(0, None), title="The simulator against a real worker"
    )
    axes.legend()


def _control(axes: Any, result: dict[str, Any]) -> None:
    """Evidence of some rollouts against its limit, step by step; and how many audits it took to stop a harmful plan."""
    curves, stops = axes
    for i, (name, row) in enumerate(result["rollouts"].items()):
        if name not in ("half", "harmful"):
            continue
        for curve in row["curves"]:
            for step in sorted({point[0] for point in curve}):
                seen = [point for point in curve if point[0] == step]
                curves.plot([p[1] for p in seen], [p[2] for p in seen], "-", lw=1, alpha=0.7, color=COLOURS[i])
        curves.plot([], [], color=COLOURS[i], label=f"true disagreement {percent(row['truth']['p50'])}")
    curves.axhline(result["log_limit"], color="black", lw=0.8, ls="--", label="rolled back")
    curves.set(
        xlabel="audits of the canary in its step",
        ylabel="log e-value of harm",
        ylim=(-20, 8),
        title="Accuracy gate: some rollouts",
    )
    curves.legend(fontsize=8)
    harmful = result["rollouts"].get("harmful", {}).get("histogram", [])
    if harmful:
        stops.hist(np.minimum(harmful, 400), bins=40, color=COLOURS[1])
        stops.axvline(float(np.quantile(harmful, 0.9)), color="black", lw=1, label="90th percentile")
        stops.axvline(225, color="black", lw=1, ls="--", label="promised")
        stops.legend(fontsize=8)
    stops.set(xlabel="audits until the verdict", ylabel="rollouts", title=f"A plan at 5 %, {len(harmful):,} rollouts")
