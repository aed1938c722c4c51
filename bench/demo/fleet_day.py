"""The figures of ``make demo-fleet`` without a cluster: the day's rates, what the largest variant alone would cost, the
closing table, the promises and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from rich.table import Table

from bench.load import Reply
from offramp_core.control.objects import PoolStatus
from offramp_core.control.snapshot import Load
from offramp_core.control.spec import ServiceSpec
from offramp_core.control.workers.pool_demand import demand_of
from offramp_core.control.workers.pool_plan import PoolsView, plan_pools, startup_seconds
from offramp_core.fleet import Window

Floats = npt.NDArray[np.float64]
HOURS, HOUR_SECONDS, MINUTES = 24, 3600, 60
WINDOW_SECONDS = 10.0  # in which the operator counts requests
AS_MANY_AS_IT_TAKES = 100  # workers of a pool
BINS = 48  # of the picture: half hours of the day


@dataclass(frozen=True, slots=True)
class Sample:
    """How the service stood at a moment: workers that there were by pool (those that start and end included), audits
    and disagreements since the beginning, and the demand that the plan is for and what it answers."""

    at: float
    workers: Mapping[str, int]
    audited: int = 0
    disagreed: int = 0
    demand: float = 0.0
    answered: float = 0.0


@dataclass(frozen=True, slots=True)
class Day:
    """A day that was played in ``seconds`` from ``began`` on, and all that was seen of it. ``planned`` is what the
    largest variant alone would have been planned with: workers by pool in each ten seconds."""

    began: float
    seconds: float
    budget: float
    objective_seconds: float
    prices: Mapping[str, float]
    replies: Sequence[Reply]
    samples: Sequence[Sample]
    planned: Sequence[Mapping[str, int]]


# --- the trace -------------------------------------------------------------------------------------


def day_shape(counts: npt.NDArray[np.int64]) -> Floats:
    """Requests a second in each hour of 24, of counts for each second: those of the hour's median minute.

    What comes in single minutes of an hour would come within a tenth of a second here.
    """
    minutes = counts[: HOURS * HOUR_SECONDS].reshape(HOURS, MINUTES, -1).sum(axis=2)
    return np.asarray(np.median(minutes, axis=1) / MINUTES, dtype=np.float64)


def rate_at(shape: Floats, share: float, *, peak: float) -> float:
    """Requests a second after so much of the day (0 to 1), scaled so that the busiest hour has ``peak``; straight lines
    between the middles of hours, and the day before and after is the same."""
    middles = (np.arange(len(shape)) + 0.5) / len(shape)
    return float(np.interp(share, middles, shape, period=1.0) * peak / shape.max())


# --- the largest variant only ----------------------------------------------------------------------


def largest_only(spec: ServiceSpec, known: Sequence[PoolStatus], windows: Sequence[Window]) -> list[dict[str, int]]:
    """Workers by pool that the operator's own rule plans after each window where nothing leaves early, as many as it
    takes.

    The rates of workers are those that were measured with exits off. Workers are there as soon as they are planned, and
    gone as soon as they are not: what a start costs in time and money is left out, in favor of this variant.
    """
    pools = tuple(replace(pool, max_workers=AS_MANY_AS_IT_TAKES) for pool in spec.pools)
    lead, planned = max(map(startup_seconds, known)), {pool.name: 0 for pool in known}
    found = []
    for i, window in enumerate(windows):
        demand = demand_of(Load(windows=tuple(windows[: i + 1])), window.ended_at, lead_seconds=lead)
        there = {pool.name: planned[pool.name] for pool in known}
        now = tuple(replace(p, planned=there[p.name], desired=there[p.name], ready=there[p.name]) for p in known)
        latency, late = spec.latency_seconds or 0.0, 1 - spec.latency_share
        view = PoolsView(pools, now, demand, latency, late, by_weight=spec.route is not None)
        planned = {**planned, **plan_pools(view).planned}
        found.append(planned)
    return found


def windows_of(sent: Sequence[float], *, began: float, seconds: float) -> list[Window]:
    """What came in each ten seconds, as the operator counts it."""
    edges = began + np.arange(0.0, seconds + WINDOW_SECONDS / 2, WINDOW_SECONDS)
    counts, _ = np.histogram(np.asarray(sent), edges)
    return [
        Window(ended_at=float(end), seconds=WINDOW_SECONDS, rate=float(n) / WINDOW_SECONDS)
        for end, n in zip(edges[1:], counts, strict=True)
    ]


# --- figures ---------------------------------------------------------------------------------------


def price(workers: Mapping[str, int], prices: Mapping[str, float]) -> float:
    """What they cost an hour."""
    return sum(n * prices[name] for name, n in workers.items())


def cost_per_hour(day: Day) -> float:
    """Of the workers that there were, on average over the day."""
    at = np.array([sample.at for sample in day.samples])
    costs = np.array([price(sample.workers, day.prices) for sample in day.samples])
    until = np.append(at[1:], day.began + day.seconds)
    return float((costs * (until - at)).sum() / (until - at).sum())


def refused(reply: Reply) -> bool:
    """Told at once to come back later, as the worker could not answer in time."""
    return not reply.ok and reply.error.startswith("HTTP 429")


def summary_of(day: Day) -> dict[str, Any]:
    """All figures of the table and of the promises."""
    replies, first, last = day.replies, day.samples[0], day.samples[-1]
    answered = [r for r in replies if r.ok]
    largest = float(np.mean([price(workers, day.prices) for workers in day.planned]))
    ours = cost_per_hour(day)
    audited = last.audited - first.audited
    return {
        "requests": len(replies),
        "lost": sum(not r.ok and not refused(r) for r in replies),
        "errors": sorted({r.error for r in replies if not r.ok and not refused(r)})[:5],
        "refused": sum(map(refused, replies)),
        "late": sum(r.seconds > day.objective_seconds for r in answered),
        "left_early": round(sum(r.exit != "final" for r in answered) / max(1, len(answered)), 4),
        "differed": sum(not r.agrees for r in answered),
        "audited": audited,
        "disagreed": last.disagreed - first.disagreed,
        "budget": day.budget,
        "cost_per_hour": round(ours, 4),
        "largest_cost_per_hour": round(largest, 4),
        "cost_ratio": round(ours / largest, 4),
        "most_workers": max(sum(s.workers.values()) for s in day.samples),
        "largest_most_workers": max(sum(workers.values()) for workers in day.planned),
        "mean_workers": round(float(np.mean([sum(s.workers.values()) for s in day.samples])), 2),
        "largest_mean_workers": round(float(np.mean([sum(workers.values()) for workers in day.planned])), 2),
        "changes": sum(a.workers != b.workers for a, b in zip(day.samples, day.samples[1:], strict=False)),
    }


def broken(summary: Mapping[str, Any]) -> list[str]:
    """The promises that were not kept, a sentence each."""
    differing = summary["differed"] / max(1, summary["requests"] - summary["refused"] - summary["lost"])
    disagreeing = summary["disagreed"] / max(1, summary["audited"])
    checks = {
        f"{summary['lost']} requests were lost: {summary['errors']}": summary["lost"] == 0,
        f"{differing:.2%} of the answers differ from the model's own, of a budget of {summary['budget']:.1%}": differing
        <= summary["budget"],
        f"{disagreeing:.2%} of the audits disagree, of a budget of {summary['budget']:.1%}": disagreeing
        <= summary["budget"],
        "no audit was counted": summary["audited"] > 0,
        f"the workers cost {summary['cost_ratio']:.0%} of the largest variant only": summary["cost_ratio"] < 1,
        "the numbers of workers never changed": summary["changes"] > 0,
    }
    return [text for text, kept in checks.items() if not kept]


def closing_table(summary: Mapping[str, Any]) -> Table:
    """Offramp as it was measured beside the largest variant only."""
    table = Table(title="The day", title_justify="left")
    for column in ("", "Offramp (measured)", "largest variant only (computed)"):
        table.add_column(column, justify="right" if column else "left")
    requests, audited = summary["requests"], max(1, summary["audited"])
    missed = summary["late"] + summary["refused"]
    for row in (
        ("cost of the day", f"{24 * summary['cost_per_hour']:.2f}", f"{24 * summary['largest_cost_per_hour']:.2f}"),
        ("", f"{summary['cost_ratio']:.0%}", "100%"),
        ("workers, mean", f"{summary['mean_workers']:.1f}", f"{summary['largest_mean_workers']:.1f}"),
        ("workers, most", f"{summary['most_workers']}", f"{summary['largest_most_workers']}"),
        ("requests", f"{requests:,}", f"{requests:,}"),
        ("lost", f"{summary['lost']}", "–"),
        ("missed", f"{missed / max(1, requests):.2%}", "–"),
        ("  refused, late", f"{summary['refused']}, {summary['late']}", "–"),
        ("left early", f"{summary['left_early']:.0%}", "none"),
        (
            "audits that disagree",
            f"{summary['disagreed']} of {audited:,}: {summary['disagreed'] / audited:.2%}",
            "none",
        ),
        ("answers that differ", f"{summary['differed'] / max(1, requests):.2%}", "none"),
        ("budget", f"{summary['budget']:.1%}", "–"),
    ):
        table.add_row(*row)
    return table


def as_json(day: Day) -> dict[str, Any]:
    """What was seen, for whoever wants to look closer; times from the beginning of the day."""
    return {
        "samples": [asdict(sample) | {"at": round(sample.at - day.began, 1)} for sample in day.samples],
        "largest_variant_only": [dict(workers) for workers in day.planned],
    }


# --- the picture -----------------------------------------------------------------------------------


def draw(day: Day, path: Path, *, title: str) -> Path:
    """Requests, workers and their cost, misses and disagreement over the hours of the day."""
    figure = Figure(figsize=(9.0, 9.0), layout="constrained")
    asked, cost, missed, wrong = figure.subplots(4, 1, sharex=True, height_ratios=[3, 3, 2, 2])
    hours = np.linspace(0, HOURS, BINS, endpoint=False)
    which = np.array([min(BINS - 1, max(0, int(BINS * (r.sent_at - day.began) / day.seconds))) for r in day.replies])
    count = np.maximum(np.bincount(which, minlength=BINS), 1)

    def share(of: Sequence[bool]) -> Floats:
        return np.asarray(100 * np.bincount(which, np.array(of, dtype=np.float64), minlength=BINS) / count)

    at = np.array([(sample.at - day.began) / day.seconds * HOURS for sample in day.samples])
    asked.bar(hours, count * BINS / day.seconds, width=HOURS / BINS, align="edge", color="#c6dbef", label="requests/s")
    answered = [sample.answered for sample in day.samples]
    asked.step(at, answered, where="post", color="#08519c", lw=1.2, label="what the planned workers answer with exits")
    asked.set_ylabel("requests/s")
    bottom = np.zeros(len(at))
    for name, color in zip(day.prices, ("#74c476", "#238b45"), strict=False):
        part = np.array([sample.workers.get(name, 0) * day.prices[name] for sample in day.samples])
        cost.fill_between(at, bottom, bottom + part, step="post", color=color, lw=0, label=f"{name} workers")
        bottom = bottom + part
    largest = [price(workers, day.prices) for workers in day.planned]
    ends = np.linspace(0, HOURS, len(largest), endpoint=False)
    cost.step(ends, largest, where="post", color="0.25", lw=1.2, ls="--", label="largest variant only (computed)")
    cost.set_ylabel("cost an hour")
    late = share([r.ok and r.seconds > day.objective_seconds for r in day.replies])
    turned_away = share([not r.ok for r in day.replies])
    missed.bar(hours, turned_away, width=HOURS / BINS, align="edge", color="#cb181d", label="refused")
    missed.bar(hours, late, bottom=turned_away, width=HOURS / BINS, align="edge", color="#fc9272", label="late")
    missed.set_ylabel("missed, %")
    missed.set_ylim(0, max(5.0, 1.2 * float((late + turned_away).max())))
    _draw_disagreement(wrong, day, at, hours, share([r.ok and not r.agrees for r in day.replies]))
    for axis in (asked, cost, missed, wrong):
        axis.margins(x=0)
        axis.set_ylim(bottom=0)
        axis.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), fontsize=8, ncols=3, frameon=False)
    wrong.set_xlabel(f"hours of the day, played in {day.seconds:.0f} s")
    wrong.set_xticks(range(0, HOURS + 1, 3))
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def _draw_disagreement(axis: Any, day: Day, at: Floats, hours: Floats, differing: Floats) -> None:
    axis.bar(hours, differing, width=HOURS / BINS, align="edge", color="#dadaeb", label="answers that differ")
    n = np.array([sample.audited - day.samples[0].audited for sample in day.samples])
    k = np.array([sample.disagreed - day.samples[0].disagreed for sample in day.samples])
    axis.plot(at[n > 0], 100 * k[n > 0] / n[n > 0], color="#54278f", lw=1.4, label="audits that disagree, so far")
    axis.axhline(100 * day.budget, color="0.3", lw=0.8, ls="--", label="budget")
    axis.set_ylabel("disagreement, %")
    axis.set_ylim(0, max(1.6 * 100 * day.budget, 1.2 * float(differing.max())))
