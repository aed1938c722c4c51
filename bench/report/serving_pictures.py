"""Plots of the engine, of exits through HTTP, of servers side by side, and of overload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.report.results import Results
from bench.report.serving import TITLES
from offramp_lab.replay.plots import COLOURS

Draw = Callable[[Any], None]  # takes one axes, or as many as columns
MIB = 2**20


def serving_pictures(results: Results) -> Iterator[tuple[str, Draw, int]]:
    """Name, drawing and columns of what there are results for."""
    for name, result in (results.get("engine") or {}).items():
        if any("ratio" in row for row in result["plans"]):
            yield f"engine-{name}", partial(_engine, name=name, rows=result["plans"]), 1
    for name, result in (results.get("served") or {}).items():
        yield f"served-{name}", partial(_served, name=name, arms=result["arms"]), 2
    runs = {**({"offramp": front} if (front := results.get("front")) else {}), **(results.get("peers") or {})}
    runs = {name: run for name, run in runs.items() if "skipped" not in run}
    if runs:
        yield "servers", partial(_servers, runs=runs), 1
    soak = results.get("soak")
    if soak is not None:
        yield "soak", partial(_soak, result=soak), 2


def _engine(axes: Any, *, name: str, rows: list[dict[str, Any]]) -> None:
    """Bars of every plan at every batch size, with the range of pairs; a tick where an input takes no exit."""
    rows = [row for row in rows if "ratio" in row]
    plans, batches = list(dict.fromkeys(row["plan"] for row in rows)), sorted({row["batch"] for row in rows})
    width = 0.8 / len(plans)
    for i, plan in enumerate(plans):
        mine = [row for row in rows if row["plan"] == plan]
        at = [batches.index(row["batch"]) + (i - (len(plans) - 1) / 2) * width for row in mine]
        middle, low, high = (np.array([row["ratio"][key] for row in mine]) for key in ("median", "low", "high"))
        axes.bar(at, middle, width, color=COLOURS[i % len(COLOURS)], label=plan)
        axes.errorbar(at, middle, yerr=(middle - low, high - middle), fmt="none", ecolor="black", elinewidth=0.8)
        axes.plot(at, [row["worst"]["median"] for row in mine], "_", color="black", ms=8)
    axes.axhline(1.0, color="black", lw=0.8, ls="--")
    axes.set(
        xlabel="batch size",
        ylabel="time over the exact executor's",
        title=f"{TITLES.get(name, name)}; ticks: no row takes an exit",
        ylim=(0, None),
    )
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.legend(fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _served(both: Any, *, name: str, arms: dict[str, Any]) -> None:
    """p50 and p95 against exits off by load, with the range of rounds; no point where too many were refused."""
    for axes, figure in zip(both, ("p50", "p95"), strict=True):
        for i, (arm, row) in enumerate((arm, row) for arm, row in arms.items() if arm != "off"):
            seen = [(float(load), f[figure]) for load, f in row["loads"].items() if f[figure]["ratio"] is not None]
            if seen:
                at = [load + 0.01 * (i - 1.5) for load, _ in seen]
                middle, low, high = (np.array([f[key] for _, f in seen]) for key in ("ratio", "low", "high"))
                errors = middle - low, high - middle
                axes.errorbar(at, middle, yerr=errors, fmt="o-", capsize=3, color=COLOURS[i % len(COLOURS)], label=arm)
        axes.axhline(1.0, color="black", lw=0.8, ls="--")
        axes.set(xlabel="load, of what exits off can do", ylabel=f"{figure} over that of exits off", ylim=(0, None))
        axes.set_title(f"{TITLES.get(name, name)} through HTTP")
    if both[0].get_legend_handles_labels()[0]:
        both[0].legend(fontsize=8)


def _servers(axes: Any, *, runs: dict[str, Any]) -> None:
    """What each server can do over what the bare handler of the same run can."""
    names = list(runs)
    for i, objective in enumerate(("loose", "tight")):
        ratios = [_capacity_ratio(runs[name][objective]["servers"]) for name in names]
        label = f"p95 within {np.median([runs[name][objective]['objective_ms'] for name in names]):.0f} ms"
        axes.bar(np.arange(len(names)) + 0.4 * (i - 0.5), ratios, 0.4, color=COLOURS[i], label=label)
    axes.axhline(1.0, color="black", lw=0.8, ls="--")
    axes.set(ylabel="capacity over a bare handler's", title="Exits off, one core, single images")
    axes.set_xticks(range(len(names)), names)
    axes.legend(fontsize=8)


def _capacity_ratio(servers: dict[str, Any]) -> float:
    """Of the server beside the yardstick."""
    return next((row["capacity_ratio"] or 0.0 for server, row in servers.items() if server != "bare"), 0.0)


def _soak(both: Any, *, result: dict[str, Any]) -> None:
    """Latencies of the accepted by stretch, and the resident set."""
    latency, memory = both
    stretches = result["stretches"]
    for i, q in enumerate(("p50", "p95", "p99")):
        values = [np.nan if s["accepted_ms"][q] is None else s["accepted_ms"][q] for s in stretches]
        latency.plot(range(1, len(stretches) + 1), values, "o-", color=COLOURS[i], label=q)
    latency.axhline(result["slo_ms"], color="black", lw=0.8, ls="--")
    latency.set(xlabel="stretch", ylabel="accepted requests (ms)", title="Dashed: the objective", ylim=(0, None))
    latency.set_xticks(range(1, len(stretches) + 1), ["on" if s["exits"] else "off" for s in stretches])
    latency.legend(fontsize=8)
    memory.plot(np.array(result["memory"]["samples"]) / MIB, color=COLOURS[0])
    memory.set(xlabel="seconds", ylabel="resident set (MiB)", title="One worker at twice its capacity", ylim=(0, None))
