"""What a replay prints: JSON (a public contract) and tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from offramp_core import binomial
from offramp_core.audits import audit_price
from offramp_core.control.stable.audit import QUIET_RATE
from offramp_core.evaluate import evaluate
from offramp_core.plan import MAX_ACTIVE_RAMPS
from offramp_core.precision import EXACT
from offramp_core.records import Records
from offramp_lab.policies import Objective, Outcome, PlanInForce
from offramp_lab.policies.planned import pricing_of
from offramp_lab.replay.measure import Drawn, PolicyResult, Queueing, Serving

SPREAD = (0.05, 0.5, 0.95)
GOAL_NAMES = {"p95": "95th percentile of the time to answer", "busy": "busy time"}


@dataclass(frozen=True, slots=True)
class FileResult:
    """All of one file: ``stream`` is the half that no policy tuned on; ``left_out`` says which policies it cannot show,
    and why."""

    path: Path
    records: Records
    stream: Records
    policies: list[PolicyResult]
    left_out: tuple[str, ...] = ()

    @property
    def outcomes(self) -> dict[str, Outcome]:
        return {result.policy.name: result.trace.outcome(self.stream) for result in self.policies}


def to_mapping(result: FileResult, objective: Objective) -> dict[str, Any]:
    """The JSON of ``--json``; keys are only ever added. ``serving`` and ``draws`` are there when they were asked for,
    ``precision`` where a plan runs at another than fp32."""
    return {
        "records": str(result.path),
        "n": len(result.records),
        "budget": objective.budget,
        "confidence": objective.confidence,
        "policies": [
            _policy_mapping(each, each.trace.outcome(result.stream), objective, result.stream)
            for each in result.policies
        ],
    }


def _policy_mapping(result: PolicyResult, outcome: Outcome, objective: Objective, stream: Records) -> dict[str, Any]:
    certificate = outcome.certificate
    mapping: dict[str, Any] = {
        "name": result.policy.name,
        "active": list(outcome.active),
        "thresholds": [float(t) for t in outcome.thresholds],
        "saving": outcome.saving,
        "disagreement": outcome.disagreement,
        "certificate": None
        if certificate is None
        else {"n": certificate.n, "k": certificate.k, "p_value": certificate.p_value, "method": certificate.method},
    }
    if outcome.precision != EXACT:
        mapping["precision"] = outcome.precision  # ``active`` are columns of its chain: input ramps, then its own
    if certificate is not None and certificate.slices:
        mapping["certificate"]["slices"] = [
            {"slice": s.slice_id, "budget": s.budget, "n": s.n, "k": s.k, "p_value": s.p_value}
            for s in certificate.slices
        ]
    if objective.goal != "mean" and result.policy.name == "exact":
        mapping["objective"] = {
            "name": objective.goal,
            "saving": saving_of_goal(result.trace.plans[-1], stream, objective),
        }
    if result.serving:
        mapping["serving"] = [_serving_mapping(serving) for serving in result.serving]
    if result.drawn is not None:
        mapping["draws"] = draws_mapping(result.drawn, objective)
    return mapping


def _serving_mapping(serving: Serving) -> dict[str, Any]:
    served = serving.served
    return {
        "arrivals": serving.arrivals,
        "batching": serving.batching,
        "rate": _finite(serving.rate),
        "load": _finite(serving.load),
        "requests": len(served.status),
        "answered": served.answered,
        "dropped": served.dropped,
        "rejected": served.rejected,
        "slo_seconds": served.slo_seconds,
        "slo_misses": served.slo_misses,
        "mean_seconds": _finite(served.mean_seconds),
        "p50_seconds": _finite(served.quantile(0.5)),
        "p95_seconds": _finite(served.quantile(0.95)),
        "p99_seconds": _finite(served.quantile(0.99)),
        "busy_seconds": served.busy_seconds,
        "busy_share": served.busy_share,
        "mean_batch": served.mean_batch,
        "p50_ratio": _finite(_ratio(serving, 0.5)),
        "p95_ratio": _finite(_ratio(serving, 0.95)),
        "busy_ratio": served.busy_seconds / serving.baseline.busy_seconds,
    }


def draws_mapping(drawn: Drawn, objective: Objective) -> dict[str, Any]:
    """Medians and spread over draws. ``over_budget`` counts draws whose true disagreement exceeds the budget.

    ``p_value`` is the chance of so many or more if each draw broke the budget with probability 1 - confidence; below
    0.001 the bound is refuted.
    """
    n = len(drawn.truths)
    over = sum(truth.disagreement > objective.budget for truth in drawn.truths)
    with_exits = n - drawn.exits_off
    return {
        "n": n,
        "saving": _spread([truth.saving for truth in drawn.truths]),
        "disagreement": _spread([truth.disagreement for truth in drawn.truths]),
        "over_budget": over,
        "with_exits": with_exits,
        "certified": drawn.certified,
        "p_value": float(binomial.sf(over - 1, n, 1 - objective.confidence)),
        "of_the_pool": all(truth.exact for truth in drawn.truths),
    }


def saving_of_goal(plan: PlanInForce, stream: Records, objective: Objective) -> float:
    """Share of the objective that one plan saves on a stream."""
    pricing = pricing_of(stream, objective)
    return pricing.saving(pricing.figures(evaluate(stream, plan.active, plan.thresholds)))


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, median, high = np.quantile(values, SPREAD)
    return {"p5": float(low), "median": float(median), "p95": float(high)}


def _ratio(serving: Serving, q: float) -> float:
    return serving.served.quantile(q) / serving.baseline.quantile(q)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(result: FileResult, objective: Objective, queueing: Queueing) -> None:
    """Tables for people, and what they say in a sentence or two."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_policy_table(result, objective))
    if any(each.drawn for each in result.policies):
        console.print(_draws_table(result, objective))
    if any(each.serving for each in result.policies):
        console.print(_serving_table(result, queueing))
    console.print(_meaning(objective, result.outcomes))
    for each in result.policies:
        if objective.goal != "mean" and each.policy.name == "exact":
            share = saving_of_goal(each.trace.plans[-1], result.stream, objective)
            console.print(
                f"The exact search found the least {GOAL_NAMES[objective.goal]}: it saves {share:.1%} of that."
            )
    for reason in result.left_out:
        console.print(f"Left out: {reason}", style="dim", markup=False)


def _table(title: str, columns: Sequence[str], *, text: Sequence[str] = (), caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption)
    for column in columns:
        table.add_column(column, justify="left" if column in text else "right")
    return table


def _policy_table(result: FileResult, objective: Objective) -> Table:
    n_stream = len(result.stream)
    table = _table(
        f"{result.path.name}: budget {objective.budget:.2%} disagreement, confidence {objective.confidence:.1%}",
        ("policy", "saving", "disagreement", "plan (ramp < threshold)", "certificate"),
        text=("policy", "plan (ramp < threshold)", "certificate"),
        caption=f"Tuned on the older {len(result.records) - n_stream:,} records; saving and disagreement on the newer "
        f"{n_stream:,}, "
        "used for neither search nor certificate. Savings are without audits, which take "
        f"{audit_price(result.records, rate=QUIET_RATE):.1%} of the "
        f"model's time where {QUIET_RATE:.0%} of requests are audited.",
    )
    for each in result.policies:
        outcome = each.trace.outcome(result.stream)
        table.add_row(
            each.policy.name,
            f"{outcome.saving:.1%}",
            _judged_share(outcome.disagreement, objective.budget),
            _plan_text(each, outcome),
            _certificate_text(outcome),
        )
    return table


def _judged_share(share: float, budget: float) -> str:
    return f"[red]{share:.2%} !" if share > budget else f"{share:.2%}"


def _plan_text(result: PolicyResult, outcome: Outcome) -> str:
    if len(result.trace.plans) > 1:
        return f"{len(result.trace.plans)} plans in turn"
    at = "" if outcome.precision == EXACT else f"{outcome.precision}: "
    if not outcome.active:
        return f"{at}no exits" if at else "each input its own" if result.policy.hindsight else "exits off"
    if len(outcome.active) > MAX_ACTIVE_RAMPS:
        return f"{at}{len(outcome.active)} ramps"
    return at + "  ".join(f"{ramp}<{float(t):.4g}" for ramp, t in zip(outcome.active, outcome.thresholds, strict=True))


def _certificate_text(outcome: Outcome) -> str:
    if outcome.certificate is None:
        return "-"
    certificate = outcome.certificate
    differ = f"{certificate.k} of {certificate.n:,} differ"
    lost = f"{certificate.n:,} lose {certificate.disagreement:.2%}"
    text = f"{differ if certificate.lost is None else lost}, p = {certificate.p_value:.3f}"
    return text + "".join(f"; {s.title}: {s.k} of {s.n:,}" for s in outcome.certificate.slices)


def _draws_table(result: FileResult, objective: Objective) -> Table:
    table = _table(
        "Draws with replacement from the whole file, truth on the whole file: median (5 % to 95 %)",
        ("policy", "true saving", "true disagreement", "over budget", "with exits"),
        text=("policy",),
        caption="A policy that promises the confidence above may go over budget in "
        f"{1 - objective.confidence:.0%} of the draws; ! where a binomial test refutes that at 0.1 %.",
    )
    for each in result.policies:
        if each.drawn is None:
            continue
        seen = draws_mapping(each.drawn, objective)
        refuted = " !" if seen["p_value"] < 0.001 else ""
        table.add_row(
            each.policy.name + ("" if seen["of_the_pool"] else " *"),
            _spread_text(seen["saving"], "{:.1%}"),
            _spread_text(seen["disagreement"], "{:.2%}"),
            f"{seen['over_budget']} of {seen['n']}{refuted}",
            f"{seen['with_exits']} of {seen['n']}",
        )
    return table


def _spread_text(spread: dict[str, float], form: str) -> str:
    show_one: Callable[[float], str] = form.format
    return f"{show_one(spread['median'])} ({show_one(spread['p5'])} to {show_one(spread['p95'])})"


def _serving_table(result: FileResult, queueing: Queueing) -> Table:
    rows = [(serving, each.policy.name) for each in result.policies for serving in each.serving]
    slo = rows[0][0].served.slo_seconds or 0.0
    table = _table(
        f"Behind a queue, one worker, {queueing.execution} execution: milliseconds (against exits off)",
        ("arrivals (load)", "batching", "policy", "p50", "p95", "p99", "busy", "answered", "dropped", "SLO misses"),
        text=("arrivals (load)", "batching", "policy"),
        caption=f"Ramps and regrouping lengthen the queue here. SLO {slo * 1e3:.4g} ms; dropped includes rejected.",
    )
    queues = list(dict.fromkeys((serving.arrivals, serving.batching) for serving, _ in rows))
    for serving, name in sorted(rows, key=lambda row: queues.index((row[0].arrivals, row[0].batching))):
        table.add_row(
            f"{serving.arrivals} ({serving.load:.2f})",
            serving.batching,
            name,
            *(f"{serving.served.quantile(q) * 1e3:.1f} ({_ratio(serving, q):.2f})" for q in (0.5, 0.95, 0.99)),
            f"{serving.served.busy_share:.0%}",
            f"{serving.served.answered:,}",
            f"{serving.served.dropped + serving.served.rejected:,}",
            f"{serving.served.slo_misses:,}",
        )
    return table


def _meaning(objective: Objective, outcomes: dict[str, Outcome]) -> str:
    """One or two sentences on what the table says."""
    lines = []
    proven = outcomes.get("certified")
    if proven is not None and proven.certificate is not None:
        lines.append(
            f"The certified plan saves {proven.saving:.1%} of the model's time before audits, and at most "
            f"{objective.budget:.2%} of answers change "
            f"with {objective.confidence:.0%} confidence."
        )
    elif proven is not None:
        lines.append(
            "Nothing could be certified on so few records (or saves nothing), so the certified answer is exits off."
        )
    over = [name for name, outcome in outcomes.items() if outcome.disagreement > objective.budget]
    if over:
        lines.append(f"Over budget on the newer half (!): {', '.join(over)}.")
    return "\n".join(lines)
