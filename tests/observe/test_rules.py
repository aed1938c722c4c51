"""Alert and recording rules against the real promtool: every alert fires on what it is for, and is quiet when all is
nearly well."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

sys.path[:0] = [str(Path(__file__).parents[1] / "worker")]

import bundles  # noqa: E402
from processes import WorkerProcess, infer_json  # noqa: E402

from offramp_operator.metrics import Metrics as OperatorMetrics  # noqa: E402
from offramp_worker.metrics import Metrics as WorkerMetrics  # noqa: E402

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm" / "offramp" / "files" / "rules"
ALERTS, RECORDING = (
    [rule for group in yaml.safe_load((RULES / f"{file}.yaml").read_text())["groups"] for rule in group["rules"]]
    for file in ("alerts", "recording")
)
RECORDS = [rule["record"] for rule in RECORDING]

OBJECTIVE = {"earlyexit_service_latency_objective_ratio": "0.95x{n}"}
LATE_5, LATE_50, LATE_90 = (
    {
        "earlyexit_requests_total|outcome=ok,pod=a": "0+100x{n}",
        "earlyexit_late_requests_total|pod=a": f"0+{late}x{{n}}",
        **OBJECTIVE,
    }
    for late in (4, 12, 90)
)
"""Of 100 requests a minute so many were late; the objective is that 95 % are not."""


def counter(name: str, per_minute: float, **labels: str) -> dict[str, str]:
    return {f"{name}|{','.join(f'{k}={v}' for k, v in labels.items())}": f"0+{per_minute}x{{n}}"}


def gauge(name: str, value: float | str, **labels: str) -> dict[str, str]:
    return {f"{name}|{','.join(f'{k}={v}' for k, v in labels.items())}": f"{value}x{{n}}"}


def workers(**states: int) -> dict[str, str]:
    return {f"earlyexit_service_workers|state={state}": f"{n}x{{n}}" for state, n in states.items()}


AUDITS = counter("earlyexit_audited_total", 10, arm="stable", pod="a")
BUDGET = gauge("earlyexit_service_accuracy_budget_ratio", 0.02)
TRAFFIC = counter("earlyexit_requests_total", 100, outcome="ok", pod="a")
PHASE = "earlyexit_rollout_phase"
START = "earlyexit_rollout_phase_start_timestamp_seconds"
PASSES = {"earlyexit_operator_reconcile_total|pod=o": "0+60x{n}"}
LIMIT = gauge("earlyexit_detector_limit", 1_000_000, pod="a")
AUTO = gauge("earlyexit_service_info", 1, mode="Auto", config="c")
CONTACT = "earlyexit_control_plane_contact_timestamp_seconds"


def passes_within(ten: int, thirty: int) -> dict[str, str]:
    counts = {"10.0": ten, "30.0": thirty, "+Inf": 100}
    return {f"earlyexit_operator_reconcile_duration_seconds_bucket|le={le}": f"0+{n}x{{n}}" for le, n in counts.items()}


FIRST_TOKEN, PER_TOKEN = (f"earlyexit_generation_time_{what}_seconds" for what in ("to_first_token", "per_token"))
FIRST_TOKENS = gauge("earlyexit_service_first_token_objective_seconds", 0.512)
TOKENS = gauge("earlyexit_service_per_token_objective_seconds", 0.512)
REPLIES = counter("earlyexit_generation_responses_total", 100, code="200", pod="a")
WRITTEN = counter("earlyexit_generation_tokens_total", 100, kind="answer", pod="a")


def late_answers(metric: str, late: float) -> dict[str, str]:
    """Of 100 answers a minute so many take longer than 0.512 s."""
    counts = {"0.256": 50, "0.512": 100 - late, "1.024": 100, "+Inf": 100}
    return {f"{metric}_bucket|route=fp32,pod=a,le={le}": f"0+{n}x{{n}}" for le, n in counts.items()}


def proposed(accepted: float, of: float) -> dict[str, str]:
    """Tokens a minute of a draft that the model kept, and of all."""
    return counter(
        "earlyexit_generation_draft_tokens_total", accepted, route="fp32+int8:3", result="accepted", pod="a"
    ) | counter(
        "earlyexit_generation_draft_tokens_total", of - accepted, route="fp32+int8:3", result="refused", pod="a"
    )


# alert: (minutes, series on which it fires, series on which it must not)
CASES: dict[str, tuple[int, dict[str, str], dict[str, str]]] = {
    "EarlyExitErrorBudgetBurnsFast": (90, LATE_90, LATE_50),
    "EarlyExitErrorBudgetBurnsSlowly": (600, LATE_50, LATE_5),
    "EarlyExitAccuracyBudgetExceeded": (
        10,
        gauge("earlyexit_service_condition", 1, type="AccuracyWithinBudget", status="False"),
        gauge("earlyexit_service_condition", 1, type="AccuracyWithinBudget", status="Unknown"),
    ),
    "EarlyExitAccuracyBudgetAtRisk": (
        400,
        AUDITS | BUDGET | counter("earlyexit_disagreements_total", 0.3, arm="stable", pod="a"),
        AUDITS | BUDGET | counter("earlyexit_disagreements_total", 0.1, arm="stable", pod="a"),
    ),
    "EarlyExitDriftSuspected": (
        10,
        LIMIT | gauge("earlyexit_detector_statistic", 30_000, pod="a"),
        LIMIT | gauge("earlyexit_detector_statistic", 100, pod="a"),
    ),
    "EarlyExitRolloutStuck": (
        180,
        gauge(START, 0) | gauge(PHASE, 1, phase="Progressing"),
        gauge(START, 0) | gauge(PHASE, 1, phase="Paused"),
    ),
    "EarlyExitRolloutAwaitsDecision": (
        26 * 60,
        gauge(PHASE, 1, phase="AwaitingPromotion"),
        gauge(PHASE, 1, phase="Progressing"),
    ),
    "EarlyExitRolledBackRepeatedly": (
        24 * 60,
        counter("earlyexit_rollouts_total", 0.003, verdict="RolledBack"),
        counter("earlyexit_rollouts_total", 0.003, verdict="Succeeded"),
    ),
    "EarlyExitPlanNotAcknowledged": (10, workers(ready=4, acknowledged=3), workers(ready=3, acknowledged=3, desired=4)),
    "EarlyExitWorkersMissing": (20, workers(desired=4, ready=3), workers(desired=4, ready=4)),
    "EarlyExitNoExitCapacityShort": (
        20,
        gauge("earlyexit_service_no_exit_headroom_ratio", 0.8, floor="Reserve"),
        gauge("earlyexit_service_no_exit_headroom_ratio", 0.8, floor="PreScale")
        | gauge("earlyexit_service_no_exit_headroom_ratio", 1.1, floor="Fixed"),
    ),
    "EarlyExitWorkerQuarantined": (10, workers(quarantined=1), workers(quarantined=0)),
    "EarlyExitBreakerOpen": (
        5,
        gauge("earlyexit_breaker_open", 1, pod="a"),
        gauge("earlyexit_breaker_open", 0, pod="a"),
    ),
    "EarlyExitExitsOffForLong": (
        26 * 60,
        TRAFFIC | AUTO | gauge("earlyexit_service_exits_active", 0),
        TRAFFIC
        | gauge("earlyexit_service_info", 1, mode="Disabled", config="c")
        | gauge("earlyexit_service_exits_active", 0),
    ),
    "EarlyExitSavingNothing": (
        240,
        gauge("earlyexit_service_exits_active", 1)
        | counter("earlyexit_exact_seconds_total", 10, arm="stable")
        | counter("earlyexit_ramp_saved_seconds_total", 1, ramp="r0")
        | counter("earlyexit_ramp_overhead_seconds_total", 2, ramp="r0"),
        gauge("earlyexit_service_exits_active", 1)
        | counter("earlyexit_exact_seconds_total", 10, arm="stable")
        | counter("earlyexit_ramp_saved_seconds_total", 2, ramp="r0")
        | counter("earlyexit_ramp_overhead_seconds_total", 1, ramp="r0"),
    ),
    "EarlyExitSheddingLoad": (
        15,
        TRAFFIC | counter("earlyexit_requests_total", 5, outcome="rejected", pod="a"),
        TRAFFIC
        | counter("earlyexit_requests_total", 50, outcome="invalid", pod="a")
        | counter("earlyexit_requests_total", 0.5, outcome="rejected", pod="a"),
    ),
    "EarlyExitBatchesFail": (
        10,
        counter("earlyexit_failed_batches_total", 1, pod="a"),
        counter("earlyexit_failed_batches_total", 0, pod="a"),
    ),
    "EarlyExitPlanForged": (
        20,
        counter("earlyexit_plan_refusals_total", 1, reason="BadSignature", pod="a"),
        counter("earlyexit_plan_refusals_total", 1, reason="StaleEpoch", pod="a"),
    ),
    "EarlyExitFirstTokenLate": (
        60,
        FIRST_TOKENS | late_answers(FIRST_TOKEN, 10),
        FIRST_TOKENS | late_answers(FIRST_TOKEN, 4),
    ),
    "EarlyExitTokensSlow": (60, TOKENS | late_answers(PER_TOKEN, 10), TOKENS | late_answers(PER_TOKEN, 4)),
    "EarlyExitAnswersTurnedAway": (
        15,
        REPLIES | counter("earlyexit_generation_refused_total", 5, reason="queue", pod="a"),
        REPLIES | counter("earlyexit_generation_refused_total", 0.5, reason="queue", pod="a"),
    ),
    "EarlyExitDraftsMostlyRefused": (120, WRITTEN | proposed(10, 100), WRITTEN | proposed(1, 10)),
    "EarlyExitDraftsChangeAnswers": (
        70,
        counter("earlyexit_generation_differences_total", 1, route="fp32+int8:3", kind="beyond", pod="a"),
        counter("earlyexit_generation_differences_total", 1, route="fp32+int8:3", kind="tie", pod="a"),
    ),
    "EarlyExitControlPlaneSilent": (30, gauge(CONTACT, 1, pod="a"), gauge(CONTACT, 0, pod="a")),
    "EarlyExitOperatorDown": (10, {}, gauge("earlyexit_operator_leader", 0, pod="o")),
    "EarlyExitNoLeader": (
        10,
        gauge("earlyexit_operator_leader", 0, pod="o") | gauge("earlyexit_operator_leader", 0, pod="p"),
        gauge("earlyexit_operator_leader", 0, pod="o") | gauge("earlyexit_operator_leader", 1, pod="p"),
    ),
    "EarlyExitWatchStale": (
        5,
        gauge("earlyexit_operator_watch_late_seconds", 90, pod="o"),
        gauge("earlyexit_operator_watch_late_seconds", 30, pod="o"),
    ),
    "EarlyExitReconcileErrors": (
        30,
        PASSES | {"earlyexit_operator_reconcile_errors_total|pod=o": "0+12x{n}"},
        PASSES | {"earlyexit_operator_reconcile_errors_total|pod=o": "0+3x{n}"},
    ),
    "EarlyExitReconcileSlow": (30, passes_within(50, 100), passes_within(100, 100)),
}


def answered(**outcomes: float) -> dict[str, str]:
    """Requests per minute by what became of them, over two workers."""
    return {
        key: values
        for outcome, number in outcomes.items()
        for pod in ("a", "b")
        for key, values in counter("earlyexit_requests_total", number / 2, outcome=outcome, pod=pod).items()
    }


def late(per_minute: float) -> dict[str, str]:
    return counter("earlyexit_late_requests_total", per_minute, pod="a")


# Of 100 requests a minute that count, 10 are shed and 5 of the answers are late.
SOME_BAD = answered(ok=90, rejected=6, expired=4, invalid=40, cancelled=20) | late(5)
BOTH_RAMPS = (
    counter("earlyexit_ramp_saved_seconds_total", 3, ramp="r0")
    | counter("earlyexit_ramp_overhead_seconds_total", 1.2, ramp="r0")
    | counter("earlyexit_ramp_saved_seconds_total", 0, ramp="r1")
    | counter("earlyexit_ramp_overhead_seconds_total", 0.6, ramp="r1")
)
# recording rule: (minutes, series, value by the label `ramp`; "" is none)
RECORDED: dict[str, tuple[int, dict[str, str], dict[str, float]]] = {
    "earlyexit:requests:rate5m": (10, answered(ok=60, failed=30, invalid=600, cancelled=600), {"": 1.5}),
    "earlyexit:shed:ratio_rate5m": (10, SOME_BAD, {"": 0.1}),
    "earlyexit:bad:ratio_rate5m": (10, SOME_BAD, {"": 0.15}),
    "earlyexit:bad:ratio_rate30m": (60, SOME_BAD, {"": 0.15}),
    "earlyexit:bad:ratio_rate1h": (120, SOME_BAD, {"": 0.15}),
    "earlyexit:bad:ratio_rate6h": (500, SOME_BAD, {"": 0.15}),
    "earlyexit:bad:ratio_rate3d": (3 * 24 * 60 + 60, SOME_BAD, {"": 0.15}),
    "earlyexit:disagreement:ratio6h": (
        500,
        AUDITS
        | counter("earlyexit_disagreements_total", 0.3, arm="stable", pod="a")
        | counter("earlyexit_audited_total", 10, arm="canary", pod="a")
        | counter("earlyexit_disagreements_total", 10, arm="canary", pod="a"),
        {"": 0.03},
    ),
    "earlyexit:detector:ratio": (
        10,
        gauge("earlyexit_detector_limit", 999_999, pod="a")
        | gauge("earlyexit_detector_statistic", 999, pod="a")
        | gauge("earlyexit_detector_limit", 999_999, pod="b")
        | gauge("earlyexit_detector_statistic", 0, pod="b"),
        {"": 0.5},
    ),
    "earlyexit:ramp_utility:rate5m": (10, BOTH_RAMPS, {"r0": 0.03, "r1": -0.01}),
    "earlyexit:saving:ratio_rate1h": (
        120,
        BOTH_RAMPS | counter("earlyexit_exact_seconds_total", 10, arm="stable"),
        {"": 0.12},
    ),
    "earlyexit:audits:ratio_rate1h": (
        120,
        counter("earlyexit_audit_seconds_total", 0.3, arm="stable")
        | counter("earlyexit_audit_seconds_total", 0.1, arm="holdback")
        | counter("earlyexit_exact_seconds_total", 10, arm="stable"),
        {"": 0.04},
    ),
}


def series(given: dict[str, str], minutes: int) -> list[dict[str, str]]:
    """``name|label=value,…`` and values → what promtool reads; everything belongs to one service, but what operators
    tell of themselves."""
    out = []
    for key, values in given.items():
        name, _, labels = key.partition("|")
        pairs = [pair.partition("=") for pair in labels.split(",") if pair]
        if not name.startswith("earlyexit_operator_"):
            pairs += [("namespace", "=", "vision"), ("service", "=", "digits")]
        text = ",".join(f'{k}="{v}"' for k, _, v in pairs)
        out.append({"series": f"{name}{{{text}}}", "values": values.format(n=minutes)})
    return out


def case(alert: str, minutes: int, given: dict[str, str], *, fires: bool) -> dict[str, Any]:
    """One test of promtool. The alert itself becomes a series, so that its texts need not be repeated here."""
    asked = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "name": f"{alert} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": series(given, minutes),
        "promql_expr_test": [{"expr": asked, "eval_time": f"{minutes}m", "exp_samples": expected}],
    }


def promtool(tools: Path, *arguments: str | Path, stdin: bytes | None = None) -> str:
    done = subprocess.run([tools / "promtool", *arguments], input=stdin, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def alone(folder: Path, rule: dict[str, Any]) -> str:
    """A file with a rule and the recorded series that it is made of: promtool works out all rules of a file at every
    moment of a test, which takes ten times as long and says nothing more of this one."""
    needed, asked = [rule], rule["expr"]
    for recorded in reversed(RECORDING):  # each is made of earlier ones
        if recorded is not rule and recorded["record"] in asked:
            needed, asked = [recorded, *needed], asked + recorded["expr"]
    file = folder / f"{rule.get('alert') or rule['record'].replace(':', '-')}.rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "alone", "rules": needed}]}))
    return str(file)


def test_every_alert_has_a_case_and_says_what_to_do() -> None:
    assert sorted(CASES) == sorted(rule["alert"] for rule in ALERTS)
    for rule in ALERTS:
        told = rule["annotations"]
        assert set(told) == {"summary", "description", "action", "runbook_url"}, rule["alert"]
        assert told["runbook_url"].endswith(f"/docs/reference/alerts.html#{rule['alert'].lower()}")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.slow
def test_rules_are_sound(prometheus_tools: Path) -> None:
    said = promtool(prometheus_tools, "check", "rules", "--lint=all", "--lint-fatal", *sorted(RULES.glob("*.yaml")))
    assert said.count("SUCCESS") == 2, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_alert_fires_when_it_should_and_not_before(prometheus_tools: Path, tmp_path: Path) -> None:
    files = []
    for rule in ALERTS:
        alert = rule["alert"]
        minutes, bad, nearly = CASES[alert]
        tests = [case(alert, minutes, bad, fires=True), case(alert, minutes, nearly, fires=False)]
        interval = "4m" if minutes > 500 else "2m"
        files.append(tmp_path / f"{alert}.yaml")
        rules = {"rule_files": [alone(tmp_path, rule)], "evaluation_interval": interval}
        files[-1].write_text(yaml.safe_dump(rules | {"tests": tests}))
    assert promtool(prometheus_tools, "test", "rules", *files).count("SUCCESS") == len(CASES)


def test_every_recording_rule_has_a_value_to_record() -> None:
    assert list(RECORDED) == RECORDS


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDED)
def test_a_recording_rule_records_what_its_name_says(prometheus_tools: Path, tmp_path: Path, record: str) -> None:
    minutes, given, values = RECORDED[record]
    expected = [
        {"labels": '{namespace="vision", service="digits"' + (f', ramp="{ramp}"' if ramp else "") + "}", "value": value}
        for ramp, value in values.items()
    ]
    asked = {"expr": f"round({record}, 1e-6)", "eval_time": f"{minutes}m", "exp_samples": expected}
    test = {"interval": "1m", "input_series": series(given, minutes), "promql_expr_test": [asked]}
    rule = next(rule for rule in RECORDING if rule["record"] == record)
    once = f"{minutes}m"  # at the moment that is looked at: three days of it every few minutes are seconds of computing
    rules = {"rule_files": [alone(tmp_path, rule)], "evaluation_interval": once, "fuzzy_compare": True}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(rules | {"tests": [test]}))
    promtool(prometheus_tools, "test", "rules", file)


@pytest.mark.slow
def test_an_alert_names_the_service_and_the_figure(prometheus_tools: Path, tmp_path: Path) -> None:
    minutes, bad, _ = CASES["EarlyExitSheddingLoad"]
    rule = next(rule for rule in ALERTS if rule["alert"] == "EarlyExitSheddingLoad")
    expected = {
        "exp_labels": {"severity": "warning", "namespace": "vision", "service": "digits"},
        "exp_annotations": rule["annotations"]
        | {
            "summary": "vision/digits refuses requests",
            "description": "4.762% of its requests are shed: the queue is full, or they could not be answered in time "
            "any more.",
        },
    }
    test = {
        "interval": "1m",
        "input_series": series(bad, minutes),
        "alert_rule_test": [
            {"eval_time": f"{minutes}m", "alertname": "EarlyExitSheddingLoad", "exp_alerts": [expected]}
        ],
    }
    file = tmp_path / "test.yaml"
    rules = [str(path) for path in sorted(RULES.glob("*.yaml"))]
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": [test]}))
    promtool(prometheus_tools, "test", "rules", file)


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [WorkerMetrics, OperatorMetrics])
def test_metrics_follow_the_conventions_that_promtool_checks(prometheus_tools: Path, metrics: Any) -> None:
    assert promtool(prometheus_tools, "check", "metrics", stdin=metrics().text()) == ""


def test_rules_ask_only_for_metrics_that_exist() -> None:
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    known = set(re.findall(r"^\| `(\w+)` \|", reference, re.M))
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "count", "sum")}
    texts = [path.read_text() for path in [*RULES.glob("*.yaml"), *(RULES.parent / "dashboards").glob("*.json")]]
    asked = {name for text in texts for name in re.findall(r"\bearlyexit_\w+", text)}
    assert asked - known == set(), json.dumps(sorted(known))


# --- a real worker's own counters --------------------------------------------------------------------

INFER = "/v2/models/tiny/infer"
ROWS, TAKEN, SHED, MINUTES = 100, 3, 37, 10


def sampled(text: str) -> list[dict[str, str]]:
    """A scrape as series that grew from nothing to what it says, evenly."""
    series = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("earlyexit_") and family.type == "counter":
                labels = {**sample.labels, "namespace": "vision", "service": "digits", "pod": "a"}
                told = ",".join(f'{k}="{v}"' for k, v in labels.items())
                series.append({"series": f"{sample.name}{{{told}}}", "values": f"0+{sample.value / MINUTES}x{MINUTES}"})
    return series


@pytest.mark.slow
def test_a_worker_that_sheds_37_of_40_requests_reads_as_refusing_92_percent(
    prometheus_tools: Path, tmp_path: Path
) -> None:
    with WorkerProcess(bundles.write_bundle(tmp_path / "bundle"), control_plane=False) as worker:
        for _ in range(TAKEN):
            assert worker.public.post(INFER, json=infer_json(bundles.inputs(ROWS))).status_code == 200
        for _ in range(SHED):  # nothing is answered within a microsecond
            hurried = infer_json(bundles.inputs(1), parameters={"timeout": 1})
            assert worker.public.post(INFER, json=hurried).status_code == 503
        text = worker.public.get("/metrics").text
    expected: list[dict[str, Any]] = [
        {"expr": expr, "eval_time": f"{MINUTES}m", "exp_samples": [{"labels": labels, "value": SHED / (SHED + TAKEN)}]}
        for expr, labels in (
            ("round(earlyexit:shed:ratio_rate5m, 1e-6)", '{namespace="vision", service="digits"}'),
            ("round(earlyexit:bad:ratio_rate5m, 1e-6)", '{namespace="vision", service="digits"}'),
        )
    ]
    test = {"interval": "1m", "input_series": sampled(text), "promql_expr_test": expected}
    rules = {"rule_files": [str(RULES / "recording.yaml")], "evaluation_interval": "1m", "fuzzy_compare": True}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(rules | {"tests": [test]}))
    promtool(prometheus_tools, "test", "rules", file)
