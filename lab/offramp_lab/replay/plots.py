"""Pictures of a replay. The only module of the command line that imports matplotlib; it draws without a screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from offramp_core.evaluate import evaluate
from offramp_core.evidence.one_arm import Alternative, log_e_value
from offramp_core.plan import MAX_ACTIVE_RAMPS
from offramp_lab.policies import Objective
from offramp_lab.replay.measure import PolicyResult
from offramp_lab.replay.report import SPREAD, FileResult
from offramp_lab.simulate import ANSWERED

SIZE, DPI = (7.5, 4.5), 110
MOMENTS, BISECTIONS = 40, 30
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C564B",
    "#7F7F7F",
    "#BCBD22",
    "#17BECF",
    "#9467BD",
    "#AEC7E8",
    "#FFBB78",
)
Draw = Callable[[Any, FileResult, Objective], bool]


def draw_all(results: Sequence[FileResult], objective: Objective, folder: Path) -> Iterator[Path]:
    """Write every picture that these results can fill; yields the files."""
    for result in results:
        for name, draw in _PICTURES.items():
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.subplots()
            if not draw(axes, result, objective):
                continue
            path = folder / f"{result.path.stem}-{name}.png"
            figure.savefig(path, dpi=DPI)
            yield path


def saving_against_agreement(axes: Any, result: FileResult, objective: Objective) -> bool:
    """One point a policy; with draws its median and the middle 90 %."""
    for colour, each in _coloured(result.policies):
        outcome = each.trace.outcome(result.stream)
        x, y, spread = 100 * (1 - outcome.disagreement), 100 * outcome.saving, {}
        if each.drawn is not None:
            agreement = 100 * (1 - np.quantile([t.disagreement for t in each.drawn.truths], SPREAD))[::-1]
            saving = 100 * np.quantile([t.saving for t in each.drawn.truths], SPREAD)
            x, y = agreement[1], saving[1]
            spread = {"xerr": _arms(agreement), "yerr": _arms(saving)}
        axes.errorbar(x, y, fmt="o", color=colour, capsize=3, label=each.policy.name, **spread)
    axes.axvline(100 * (1 - objective.budget), color="black", lw=0.8, ls="--")
    axes.set(xlabel="true agreement with the full model (%)", ylabel="time saved (%)", title=result.path.stem)
    axes.legend(fontsize=8)
    return True


def latency_cdf(axes: Any, result: FileResult, _objective: Objective) -> bool:
    """Latency behind the first queue that was asked for."""
    shown = [(colour, each) for colour, each in _coloured(result.policies) if each.serving]
    if not shown:
        return False
    first = shown[0][1].serving[0]
    for colour, each in shown:
        _cdf(axes, each.serving[0].served.latency[each.serving[0].served.status == ANSWERED], colour, each.policy.name)
    slo = first.served.slo_seconds
    if slo is not None:
        axes.axvline(slo * 1e3, color="black", lw=0.8, ls="--")
    axes.set(
        xlabel="latency (ms)",
        ylabel="share answered by then",
        xscale="log",
        title=f"{result.path.stem}: {first.arrivals}, {first.batching} batching, load {first.load:.2f}",
    )
    axes.legend(fontsize=8)
    return True


def agreement_over_time(axes: Any, result: FileResult, objective: Objective) -> bool:
    """Agreement so far along the stream, between bounds that hold at all moments at once with 95 %."""
    n = len(result.stream)
    moments = np.unique(np.geomspace(min(50, n), n, MOMENTS).astype(int))
    for colour, each in _coloured(result.policies):
        if each.policy.hindsight or each.trace.agrees.all():
            continue
        wrong = np.cumsum(~each.trace.agrees)[moments - 1]
        bounds = np.array([anytime_bounds(int(k), int(m), alpha=0.05) for k, m in zip(wrong, moments, strict=True)])
        axes.plot(moments, 100 * (1 - wrong / moments), color=colour, lw=1.2, label=each.policy.name)
        axes.fill_between(moments, *(100 * (1 - bounds.T)), color=colour, alpha=0.12, lw=0)
    if not axes.lines:
        return False
    axes.axhline(100 * (1 - objective.budget), color="black", lw=0.8, ls="--")
    low = min(float(np.min(line.get_ydata())) for line in axes.lines)
    axes.set(
        xlabel="requests so far",
        ylabel="agreement so far (%)",
        xscale="log",
        ylim=(1.5 * low - 50, 100.05),
        title=result.path.stem,
    )
    axes.legend(fontsize=8, loc="lower right")
    return True


def thresholds_over_time(axes: Any, result: FileResult, _objective: Objective) -> bool:
    """Thresholds in force, one line a ramp, one style a policy; policies without thresholds, or with one at every ramp,
    are left out."""
    styles, shown = ("-", "--", ":", "-."), 0
    n = len(result.stream)
    for each in filter(_few_thresholds, result.policies):
        for ramp in sorted({ramp for plan in each.trace.plans for ramp in plan.active}):
            points = [(plan.since, _threshold_of(plan, ramp)) for plan in each.trace.plans]
            x, y = zip(*points, (n, points[-1][1]), strict=True)
            axes.step(
                x,
                y,
                where="post",
                color=COLOURS[ramp % len(COLOURS)],
                ls=styles[shown % len(styles)],
                lw=1,
                label=f"{each.policy.name}, ramp {ramp}",
            )
        shown += 1
    axes.set(xlabel="request", ylabel="threshold", title=result.path.stem)
    if shown:
        axes.figure.legend(fontsize=6, loc="outside right upper")
    return shown > 0


def _few_thresholds(result: PolicyResult) -> bool:
    plans = result.trace.plans
    return (
        any(float(t) > 0 for plan in plans for t in plan.thresholds)
        and max(len(plan.active) for plan in plans) <= MAX_ACTIVE_RAMPS
    )


def ramp_utilities(axes: Any, result: FileResult, _objective: Objective) -> bool:
    """What each active ramp of a policy's last plan brings: seconds saved less seconds it costs those who pass."""
    bars = []
    for colour, each in _coloured(result.policies):
        last = each.trace.plans[-1]
        if any(float(t) > 0 for t in last.thresholds):
            utility = evaluate(result.stream.at(last.precision), last.active, last.thresholds).utility_seconds
            bars += [
                (f"{each.policy.name} {ramp}", value, colour) for ramp, value in zip(last.active, utility, strict=True)
            ]
    if not bars:
        return False
    names, values, colours = zip(*bars, strict=True)
    share = 100 * np.array(values) / result.stream.costs.baseline_seconds
    axes.barh(range(len(bars)), share, color=colours)
    axes.set_yticks(range(len(bars)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(0, color="black", lw=0.8)
    axes.set(xlabel="utility (% of the model's time per request)", title=f"{result.path.stem}: ramps of the last plan")
    return True


_PICTURES: dict[str, Draw] = {
    "saving-agreement": saving_against_agreement,
    "latency": latency_cdf,
    "agreement-over-time": agreement_over_time,
    "thresholds": thresholds_over_time,
    "utilities": ramp_utilities,
}


def _coloured(results: Sequence[PolicyResult]) -> list[tuple[str, PolicyResult]]:
    return [(COLOURS[i % len(COLOURS)], each) for i, each in enumerate(results)]


def _arms(spread: npt.NDArray[np.float64]) -> list[list[float]]:
    low, median, high = spread
    return [[float(median - low)], [float(high - median)]]


def _cdf(axes: Any, latency: npt.NDArray[np.float64], colour: str, label: str) -> None:
    if len(latency):
        axes.plot(
            1e3 * np.sort(latency), np.arange(1, len(latency) + 1) / len(latency), color=colour, lw=1.2, label=label
        )


def _threshold_of(plan: Any, ramp: int) -> float:
    return float(plan.thresholds[plan.active.index(ramp)]) if ramp in plan.active else 0.0


def anytime_bounds(k: int, n: int, *, alpha: float) -> tuple[float, float]:
    """Rates that k events in n trials leave standing, at every moment at once: those against which evidence stays below
    2 / alpha.

    A confidence sequence by inverting the one-arm test; see :mod:`offramp_core.evidence.one_arm`.
    """
    limit = np.log(2 / alpha)

    def end(alternative: Alternative, outside: float, inside: float) -> float:
        for _ in range(BISECTIONS):
            middle = (outside + inside) / 2
            rejected = log_e_value(k, n, p0=middle, alternative=alternative) >= limit
            outside, inside = (middle, inside) if rejected else (outside, middle)
        return outside

    rate = min(max(k / n, 1e-9), 1 - 1e-9)
    return (end("greater", 0.0, rate) if k else 0.0, end("less", 1.0, rate) if k < n else 1.0)
