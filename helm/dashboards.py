"""Write (or with --check compare) the chart's Grafana dashboards, from the list of panels below.

A panel here is a title, queries and a unit; what Grafana wants besides is the same for all of them, so it is added
once. The queries ask for plain metrics, not for recorded ones: dashboards work without the chart's rules.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "offramp" / "files" / "dashboards"
SCHEMA_VERSION = 39  # Grafana 10.4 and later read it as it is
COLUMNS = 24
ROWS_PER_SECOND = "suffix: rows/s"
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: ``queries`` are (expression, legend)."""

    title: str
    queries: Sequence[tuple[str, str]]
    about: str = ""
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    log: bool = False
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


def stat(title: str, expr: str, legend: str = "", *, unit: str = "short", about: str = "", width: int = 4) -> Panel:
    return Panel(title, [(expr, legend)], about, unit, "stat", width, 4)


# --- the fleet -------------------------------------------------------------------------------------

NS = 'namespace=~"$namespace"'
BY = "namespace, service"


def saved(labels: str, by: str) -> str:
    """Share of the model's time that exits save, as measured, audits paid for. Workers of before tell of no audits."""
    window = "[$__rate_interval]"
    spared = f"sum by ({by}) (rate(earlyexit_ramp_saved_seconds_total{{{labels}}}{window}))"
    return (
        f"({spared} - sum by ({by}) (rate(earlyexit_ramp_overhead_seconds_total{{{labels}}}{window}))"
        f" - (sum by ({by}) (rate(earlyexit_audit_seconds_total{{{labels}}}{window})) or 0 * {spared}))"
        f" / (sum by ({by}) (rate(earlyexit_exact_seconds_total{{{labels}}}{window})) > 0)"
    )


def bad(labels: str, by: str) -> str:
    """Share of requests that were late, failed, expired or shed."""
    window = "[$__rate_interval]"
    return (
        f'1 - (sum by ({by}) (rate(earlyexit_requests_total{{{labels}, outcome="ok"}}{window})) - sum by ({by}) '
        f"(rate(earlyexit_late_requests_total{{{labels}}}{window})))"
        f' / (sum by ({by}) (rate(earlyexit_requests_total{{{labels}, outcome!~"invalid|cancelled"}}{window})) > 0)'
    )


def early(labels: str, by: str) -> str:
    window = "[$__rate_interval]"
    return (
        f'1 - sum by ({by}) (rate(earlyexit_exits_total{{{labels}, ramp="final"}}{window}))'
        f" / (sum by ({by}) (rate(earlyexit_exits_total{{{labels}}}{window})) > 0)"
    )


def quantile(q: float, metric: str, labels: str, by: str = "") -> str:
    selector = f"{{{labels}}}" if labels else ""
    return (
        f"histogram_quantile({q}, sum by ({', '.join(('le', *filter(None, [by])))}) "
        f"(rate({metric}_bucket{selector}[$__rate_interval])))"
    )


def against_objective(title: str, histogram: str, objective: str, words: str) -> Panel:
    """Percentiles of one service's times beside what it promises."""
    percentiles = [(quantile(q, histogram, ONE), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]
    return Panel(title, [*percentiles, (f"{objective}{{{ONE}}}", "objective")], words, "s")


FLEET = [
    Row(
        "Now",
        [
            stat("Services", f"count(earlyexit_service_phase{{{NS}}})"),
            stat(
                "Ready",
                f'count(earlyexit_service_condition{{{NS}, type="Ready", status="True"}} == 1)',
                about="Services whose condition Ready is True.",
            ),
            stat(
                "Canaries",
                f"count(earlyexit_rollout_weight_ratio{{{NS}}} > 0) or vector(0)",
                about="Services of which a share of batches runs a new plan.",
            ),
            stat(
                "Over budget",
                f'count(earlyexit_service_condition{{{NS}, type="AccuracyWithinBudget", status="False"}} == 1) or '
                "vector(0)",
                about="Services proven to disagree more than allowed.",
            ),
            stat(
                "Workers not ready",
                f'sum(earlyexit_service_workers{{{NS}, state="desired"}}) - sum(earlyexit_service_workers{{{NS}, '
                f'state="ready"}})',
            ),
            stat("Leaders", "sum(earlyexit_operator_leader)", about="One, or one per shard."),
        ],
    ),
    Row(
        "Services",
        [
            Panel(
                "Requests",
                [
                    (
                        f'sum by ({BY}) (rate(earlyexit_requests_total{{{NS}, outcome="ok"}}[$__rate_interval]))',
                        "{{namespace}}/{{service}}",
                    )
                ],
                "Requests answered per second.",
                "reqps",
            ),
            Panel(
                "Late, failed or shed",
                [(bad(NS, BY), "{{namespace}}/{{service}}")],
                "Share of requests that missed the service's objective.",
                "percentunit",
            ),
            Panel(
                "Time saved",
                [(saved(NS, BY), "{{namespace}}/{{service}}")],
                "Share of the model's time that exits save: seconds spared less what ramps cost, at the profile's "
                "prices.",
                "percentunit",
            ),
            Panel(
                "Left early",
                [(early(NS, BY), "{{namespace}}/{{service}}")],
                "Share of rows answered at a ramp.",
                "percentunit",
            ),
            Panel(
                "Disagreement by budget",
                [
                    (
                        f"sum by ({BY}) (increase(earlyexit_disagreements_total{{{NS}}}[1h])) / (sum by ({BY}) "
                        f"(increase(earlyexit_audited_total{{{NS}}}[1h])) > 0)"
                        f" / on ({BY}) earlyexit_service_accuracy_budget_ratio",
                        "{{namespace}}/{{service}}",
                    )
                ],
                "Disagreement of audited requests over an hour, as a share of the budget: 1 spends it all.",
                "percentunit",
            ),
            Panel(
                "Drift",
                [
                    (
                        f"max by ({BY}) (ln(earlyexit_detector_statistic{{{NS}}} + 1) / "
                        f"ln(earlyexit_detector_limit{{{NS}}} + 1))",
                        "{{namespace}}/{{service}}",
                    )
                ],
                "How far the most alarmed worker's detector is on its way to switching exits off, in logarithms.",
                "percentunit",
                top=1.0,
            ),
        ],
    ),
    Row(
        "Rollouts and workers",
        [
            Panel(
                "Rollouts that ended",
                [(f"sum by (verdict) (increase(earlyexit_rollouts_total{{{NS}}}[1h]))", "{{verdict}}")],
                "Per hour.",
            ),
            Panel(
                "Phases entered",
                [(f"sum by (phase) (increase(earlyexit_rollout_phase_transitions_total{{{NS}}}[1h]))", "{{phase}}")],
                "Per hour.",
            ),
            Panel(
                "Workers by state",
                [(f"sum by (state) (earlyexit_service_workers{{{NS}}})", "{{state}}")],
                "A worker is in several states.",
            ),
        ],
    ),
    Row(
        "Operator",
        [
            Panel(
                "Passes",
                [
                    ("sum(rate(earlyexit_operator_reconcile_total[$__rate_interval]))", "passes"),
                    ("sum(rate(earlyexit_operator_reconcile_errors_total[$__rate_interval]))", "failed"),
                ],
                unit="ops",
            ),
            Panel(
                "Duration of a pass",
                [
                    (quantile(q, "earlyexit_operator_reconcile_duration_seconds", ""), name)
                    for q, name in ((0.5, "p50"), (0.99, "p99"))
                ],
                unit="s",
            ),
            Panel(
                "From plan to workers",
                [
                    (
                        quantile(0.99, "earlyexit_operator_acknowledgement_duration_seconds", "", "canary"),
                        "p99, canary {{canary}}",
                    )
                ],
                "From a plan's publication to the pass that found it in every worker; without a canary: rollbacks and "
                "promotions.",
                "s",
            ),
            Panel("Services that wait for a pass", [("sum(earlyexit_operator_queue_keys)", "queue")]),
            Panel(
                "Watch late by",
                [("max(earlyexit_operator_watch_late_seconds)", "late")],
                "The liveness probe restarts the operator at 60 s.",
                "s",
            ),
            Panel(
                "Memory of the operator",
                [("process_resident_memory_bytes and on (instance) earlyexit_operator_leader", "{{instance}}")],
                unit="bytes",
            ),
        ],
    ),
]

# --- one service -----------------------------------------------------------------------------------

ONE = 'namespace="$namespace", service="$service"'
RATE = "[$__rate_interval]"
SERVICE = [
    Row(
        "Now",
        [
            stat("Phase", f"earlyexit_service_phase{{{ONE}}}", "{{phase}}"),
            stat("Plan", f"earlyexit_service_info{{{ONE}}}", "{{config}} ({{mode}})", width=6),
            stat("Accuracy budget", f"earlyexit_service_accuracy_budget_ratio{{{ONE}}}", unit="percentunit"),
            stat("Latency objective", f"earlyexit_service_latency_objective_seconds{{{ONE}}}", unit="s"),
            stat("Workers ready", f'earlyexit_service_workers{{{ONE}, state="ready"}}', width=3),
            stat(
                "Age of the certificate",
                f"time() - earlyexit_service_certificate_timestamp_seconds{{{ONE}}}",
                unit="s",
                width=3,
            ),
        ],
    ),
    Row(
        "Requests",
        [
            Panel(
                "Requests by outcome",
                [(f"sum by (outcome) (rate(earlyexit_requests_total{{{ONE}}}{RATE}))", "{{outcome}}")],
                unit="reqps",
            ),
            Panel(
                "Rows by outcome",
                [(f"sum by (outcome) (rate(earlyexit_rows_total{{{ONE}}}{RATE}))", "{{outcome}}")],
                "A request of 8 rows counts 8.",
                ROWS_PER_SECOND,
            ),
            Panel(
                "Replies by status",
                [
                    (
                        f"sum by (protocol, code) (rate(earlyexit_responses_total{{{ONE}}}{RATE}))",
                        "{{protocol}} {{code}}",
                    )
                ],
                unit="reqps",
            ),
            Panel(
                "Late, failed or shed",
                [(bad(ONE, "service"), "bad"), (f"1 - earlyexit_service_latency_objective_ratio{{{ONE}}}", "allowed")],
                unit="percentunit",
            ),
            against_objective(
                "Latency",
                "earlyexit_request_duration_seconds",
                "earlyexit_service_latency_objective_seconds",
                "Of a request from admission to reply.",
            ),
            Panel(
                "Latency of rows by arm",
                [
                    (quantile(q, "earlyexit_row_duration_seconds", ONE, "arm"), f"p{round(100 * q)} {{{{arm}}}}")
                    for q in (0.5, 0.95)
                ],
                "Of a row from admission until its answer was there.",
                "s",
            ),
            Panel(
                "Execution of a batch",
                [(quantile(0.95, "earlyexit_batch_duration_seconds", ONE, "arm"), "p95 {{arm}}")],
                unit="s",
            ),
            Panel(
                "Rows of a batch",
                [
                    (
                        f"sum by (arm) (rate(earlyexit_batch_rows_sum{{{ONE}}}{RATE})) / (sum by (arm) "
                        f"(rate(earlyexit_batch_rows_count{{{ONE}}}{RATE})) > 0)",
                        "mean {{arm}}",
                    ),
                    (f"max(earlyexit_batch_limit_rows{{{ONE}}})", "limit"),
                ],
            ),
            Panel(
                "Queued and in flight",
                [(f"sum(earlyexit_queue_rows{{{ONE}}})", "queued"), (f"sum(earlyexit_inflight{{{ONE}}})", "in flight")],
            ),
            Panel(
                "Busy share of the engines",
                [
                    (
                        f"sum(rate(earlyexit_batch_duration_seconds_sum{{{ONE}}}{RATE})) / "
                        f"count(earlyexit_worker_ready{{{ONE}}})",
                        "busy",
                    )
                ],
                unit="percentunit",
                top=1.0,
            ),
            Panel(
                "Failed batches",
                [(f"sum by (arm) (rate(earlyexit_failed_batches_total{{{ONE}}}{RATE}))", "{{arm}}")],
                unit="ops",
            ),
        ],
    ),
    Row(
        "Generated answers",
        [
            against_objective(
                "Time to the first token",
                "earlyexit_generation_time_to_first_token_seconds",
                "earlyexit_service_first_token_objective_seconds",
                "Of an answer, from admission.",
            ),
            against_objective(
                "Time per token",
                "earlyexit_generation_time_per_token_seconds",
                "earlyexit_service_per_token_objective_seconds",
                "Of an answer of two tokens or more, between its first and its last.",
            ),
            Panel(
                "Time per token by route",
                [(quantile(0.5, "earlyexit_generation_time_per_token_seconds", ONE, "route"), "p50 {{route}}")],
                "A route is a variant, or the model with a draft and its number of tokens. Classes and loads differ "
                "between routes.",
                "s",
            ),
            Panel(
                "Accepted of what drafts propose",
                [
                    (
                        f'sum by (route) (rate(earlyexit_generation_draft_tokens_total{{{ONE}, result="accepted"}}'
                        f"{RATE})) / (sum by (route) (rate(earlyexit_generation_draft_tokens_total{{{ONE}}}{RATE})) "
                        "> 0)",
                        "{{route}}",
                    )
                ],
                "Share of draft tokens that the model keeps; it falls on content that drafts cannot foresee.",
                "percentunit",
                top=1.0,
            ),
            Panel(
                "Accepted tokens of a proposal",
                [
                    (
                        quantile(q, "earlyexit_generation_accepted_tokens", ONE, "route"),
                        f"p{round(100 * q)} {{{{route}}}}",
                    )
                    for q in (0.5, 0.95)
                ],
                "One token besides comes from the model itself.",
            ),
            Panel(
                "Tokens",
                [(f"sum by (kind) (rate(earlyexit_generation_tokens_total{{{ONE}}}{RATE}))", "{{kind}}")],
                "Read (prompt) and written (answer).",
                "suffix: tokens/s",
            ),
            Panel(
                "Answers by outcome",
                [(f"sum by (outcome) (rate(earlyexit_generation_answers_total{{{ONE}}}{RATE}))", "{{outcome}}")],
                unit="suffix: answers/s",
            ),
            Panel(
                "Turned away for now",
                [(f"sum by (reason) (rate(earlyexit_generation_refused_total{{{ONE}}}{RATE}))", "{{reason}}")],
                "With 429 or 503 and Retry-After.",
                "reqps",
            ),
            Panel(
                "Written side by side",
                [
                    (f"sum(earlyexit_generation_running{{{ONE}}})", "running"),
                    (f"sum(earlyexit_generation_waiting{{{ONE}}})", "waiting"),
                ],
            ),
            Panel(
                "Caches of keys and values",
                [
                    (f"sum(earlyexit_generation_cache_bytes{{{ONE}}})", "taken"),
                    (f"sum(earlyexit_generation_cache_limit_bytes{{{ONE}}})", "limit"),
                ],
                unit="bytes",
            ),
            Panel(
                "Loss of audited answers",
                [
                    (
                        f"sum by (route, output) (increase(earlyexit_generation_answer_loss_sum{{{ONE}}}[1h])) / "
                        f"(sum by (route, output) (increase(earlyexit_generation_answer_loss_count{{{ONE}}}[1h])) > 0)",
                        "{{route}}, {{output}}",
                    )
                ],
                "Mean over an hour; a plan's budget is about its own output.",
                "percentunit",
            ),
            Panel(
                "Answers that drafts changed",
                [(f"sum by (kind) (increase(earlyexit_generation_differences_total{{{ONE}}}[1h]))", "{{kind}}")],
                "Of audited answers in an hour; beyond: no tie of the model's two best words explains it, and the "
                "draft is not used again.",
            ),
        ],
    ),
    Row(
        "Exits",
        [
            Panel(
                "Where rows leave",
                [
                    (
                        f"sum by (ramp) (rate(earlyexit_exits_total{{{ONE}}}{RATE})) / on () group_left () "
                        f"(sum(rate(earlyexit_exits_total{{{ONE}}}{RATE})) > 0)",
                        "{{ramp}}",
                    )
                ],
                "final: the output.",
                "percentunit",
            ),
            Panel(
                "Utility of ramps",
                [
                    (
                        f"sum by (ramp) (rate(earlyexit_ramp_saved_seconds_total{{{ONE}}}{RATE})) - sum by (ramp) "
                        f"(rate(earlyexit_ramp_overhead_seconds_total{{{ONE}}}{RATE}))",
                        "{{ramp}}",
                    )
                ],
                "Seconds saved per second by rows that leave at the ramp, less what it costs those that reach it. "
                "Below zero a ramp does harm.",
                "s",
            ),
            Panel(
                "Time saved",
                [
                    (saved(ONE, "arm"), "measured, {{arm}}"),
                    (f"earlyexit_service_predicted_saving_ratio{{{ONE}}}", "predicted by the certificate"),
                    (f"earlyexit_service_audit_time_ratio{{{ONE}}}", "audits took"),
                ],
                unit="percentunit",
            ),
            Panel(
                "Time saved against the holdback",
                [(f"earlyexit_service_measured_saving_ratio{{{ONE}}}", "{{of}}, {{bound}}")],
                "Measured: batches with exits off are what the others are compared with. Low and high hold at all "
                "times.",
                "percentunit",
            ),
            Panel(
                "Slices without exits",
                [(f"earlyexit_service_slice_stopped{{{ONE}}}", "{{slice}}")],
                "1: its audits are over its budget.",
            ),
            Panel(
                "Exits on",
                [
                    (f"earlyexit_service_exits_active{{{ONE}}}", "by plan"),
                    (f"min(earlyexit_exits_active{{{ONE}}})", "in every worker"),
                    (f"max(earlyexit_breaker_open{{{ONE}}})", "a breaker is open"),
                ],
            ),
            Panel(
                "Plans in force",
                [
                    (
                        f"count by (arm, config, precision, execution) (earlyexit_plan_info{{{ONE}}})",
                        "{{arm}}: {{config}}, {{precision}}, {{execution}}",
                    )
                ],
                "Workers by plan.",
            ),
            Panel(
                "Answers by deadline",
                [(f"sum by (ramp) (rate(earlyexit_deadline_answers_total{{{ONE}}}{RATE}))", "{{ramp}}")],
                "Rows that got the best answer so far; they are no exits.",
                ROWS_PER_SECOND,
            ),
        ],
    ),
    Row(
        "Accuracy",
        [
            Panel(
                "Disagreement",
                [
                    (
                        f"sum by (arm) (increase(earlyexit_disagreements_total{{{ONE}}}[1h])) / (sum by (arm) "
                        f"(increase(earlyexit_audited_total{{{ONE}}}[1h])) > 0)",
                        "{{arm}}",
                    ),
                    (f"earlyexit_service_accuracy_budget_ratio{{{ONE}}}", "budget"),
                ],
                "Of audited requests over an hour.",
                "percentunit",
            ),
            Panel(
                "Audits",
                [
                    (f"sum by (arm) (rate(earlyexit_audited_total{{{ONE}}}{RATE}))", "audits {{arm}} (n)"),
                    (f"sum by (arm) (rate(earlyexit_disagreements_total{{{ONE}}}{RATE}))", "disagreements {{arm}} (k)"),
                ],
                unit="ops",
            ),
            Panel("Audits that wait", [(f"sum(earlyexit_audit_backlog{{{ONE}}})", "backlog")]),
            Panel(
                "Drift detector",
                [
                    (f"max(earlyexit_detector_statistic{{{ONE}}})", "statistic"),
                    (f"max(earlyexit_detector_limit{{{ONE}}})", "limit: exits go off"),
                ],
                log=True,
            ),
            Panel(
                "Labels for the tuner",
                [
                    (f"earlyexit_service_tuning_labels{{{ONE}}}", "there"),
                    (f"earlyexit_service_tuning_labels_needed{{{ONE}}}", "needed"),
                ],
            ),
            Panel(
                "True labels from clients",
                [(f"sum by (outcome) (rate(earlyexit_feedback_total{{{ONE}}}{RATE}))", "{{outcome}}")],
                "Only with spec.feedback: how often the answers are right.",
                "ops",
            ),
        ],
    ),
    Row(
        "Rollout",
        [
            Panel("Phase", [(f"earlyexit_rollout_phase{{{ONE}}}", "{{phase}}")], kind="state-timeline"),
            Panel(
                "Canary's share of batches",
                [(f"earlyexit_rollout_weight_ratio{{{ONE}}}", "weight")],
                unit="percentunit",
                top=1.0,
            ),
            Panel(
                "Epochs",
                [
                    (f"earlyexit_service_epoch{{{ONE}}}", "published"),
                    (f"min(earlyexit_epoch{{{ONE}}})", "oldest in force"),
                ],
                "Apart: a worker has not acknowledged.",
            ),
            Panel(
                "Evidence of harm",
                [(f"earlyexit_rollout_gate_evidence_ratio{{{ONE}}}", "{{gate}}")],
                "By gate; 1 rolls back.",
                "percentunit",
                width=12,
                top=1.0,
            ),
            Panel(
                "Exposure",
                [(f"earlyexit_rollout_gate_exposure_ratio{{{ONE}}}", "{{gate}}")],
                "What was seen, as a share of that with which a harmful plan would have shown itself; at 1 the step "
                "may pass.",
                "percentunit",
                width=12,
                top=1.0,
            ),
        ],
    ),
    Row(
        "Workers",
        [
            Panel("Workers by state", [(f"earlyexit_service_workers{{{ONE}}}", "{{state}}")]),
            Panel(
                "Processor",
                [
                    (
                        f"rate(process_cpu_seconds_total{{{ONE}}}{RATE}) and on (instance) earlyexit_worker_ready",
                        "{{pod}}",
                    )
                ],
                unit="percentunit",
            ),
            Panel(
                "Memory",
                [(f"process_resident_memory_bytes{{{ONE}}} and on (instance) earlyexit_worker_ready", "{{pod}}")],
                unit="bytes",
            ),
            Panel(
                "Since the operator last asked",
                [(f"time() - min(earlyexit_control_plane_contact_timestamp_seconds{{{ONE}}} > 0)", "longest")],
                unit="s",
            ),
            Panel(
                "Plans refused",
                [(f"sum by (reason) (increase(earlyexit_plan_refusals_total{{{ONE}}}[1h]))", "{{reason}}")],
                "Per hour.",
            ),
            Panel(
                "Prediction cache",
                [(f"sum by (result) (rate(earlyexit_cache_requests_total{{{ONE}}}{RATE}))", "{{result}}")],
                "Only with spec.predictionCache.",
                "reqps",
            ),
        ],
    ),
]


# --- what Grafana wants ----------------------------------------------------------------------------


def dashboard(uid: str, title: str, rows: Sequence[Row], variables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of a dashboard; panels flow from left to right."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "type": "row",
                "id": len(panels) + 1,
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
        )
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            panels.append(panel_json(panel, number=len(panels) + 1, x=x, y=y))
            x += panel.width
        y += row.panels[-1].height
    return {
        "uid": uid,
        "title": title,
        "tags": ["offramp", "early-exit"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_DATASOURCE, *variables]},
        "panels": panels,
    }


def panel_json(panel: Panel, *, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": {}}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        defaults |= {"min": 0} if not panel.title.startswith(("Utility", "Time saved", "Evidence")) else {}
        defaults |= {"max": panel.top} if panel.top is not None else {}
        defaults["custom"] = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
        defaults["custom"] |= {"scaleDistribution": {"type": "log", "log": 10}} if panel.log else {}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        named = bool(panel.queries[0][1])
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "textMode": "name" if named else "value",
            "colorMode": "none",
        }
    return {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "datasource": PROMETHEUS,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend or "__auto", "datasource": PROMETHEUS}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


_DATASOURCE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def variable(name: str, query: str, *, several: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": PROMETHEUS,
        "query": query,
        "refresh": 2,
        "sort": 1,
    }
    return made | (
        {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
        if several
        else {}
    )


NAMESPACES = "label_values(earlyexit_service_phase, namespace)"
DASHBOARDS = {
    "offramp-fleet.json": dashboard(
        "offramp-fleet", "Offramp / Fleet", FLEET, [variable("namespace", NAMESPACES, several=True)]
    ),
    "offramp-service.json": dashboard(
        "offramp-service",
        "Offramp / Service",
        SERVICE,
        [
            variable("namespace", NAMESPACES, several=False),
            variable(
                "service", 'label_values(earlyexit_service_phase{namespace="$namespace"}, service)', several=False
            ),
        ],
    ),
}


def main() -> None:
    """Write the dashboards, or fail where they have drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in DASHBOARDS.items():
        path, text = FOLDER / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} has drifted from helm/dashboards.py; run 'make gen'")


if __name__ == "__main__":
    main()
