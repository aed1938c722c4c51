"""Every query of every dashboard panel and every rule, asked of a real Prometheus that scraped a real service through a promotion and a rollback."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
import safetensors.numpy
import yaml
from bench.ports import free_port

sys.path.insert(0, str(Path(__file__).parent))

from identity_bundle import _run_tapped, inputs

ROOT = Path(__file__).parents[2]
FILES = ROOT / "helm" / "offramp" / "files"
SCRAPE_SECONDS = 2
# Panels that may have nothing to show of this service.
EMPTY = {
    "True labels from clients": "the worker keeps no answers (OFFRAMP_FEEDBACK_ROWS)",
    "Prediction cache": "spec.predictionCache is not set",
    "Slices without exits": "requests have no slices",
    "Time saved against the holdback": "a few minutes hold too few batches back to compare with",
}


@contextlib.contextmanager
def prometheus(folder: Path, *, operator: int) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes what docs/reference/metrics.md says, with the chart's rules."""
    built = subprocess.run([ROOT / "cluster" / "tools", "prometheus"], capture_output=True, text=True, check=True)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "5s"},
        "rule_files": [str(path) for path in sorted((FILES / "rules").glob("*.yaml"))],
        "scrape_configs": [
            {"job_name": "operator", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{operator}"]}]},
            {"job_name": "workers", "http_sd_configs": [{"url": f"http://127.0.0.1:{operator}/targets", "refresh_interval": "2s"}]},
        ],
    }  # fmt: skip
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [Path(built.stdout.strip()) / "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def asked(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(f"/api/v1/{path}", params=query).json()
    assert answer["status"] == "success", (query, answer)
    return answer["data"]


def values(client: httpx.Client, expr: str, *, since: float) -> list[float]:
    """Every finite value that an expression had since a time."""
    for name, value in (("$namespace", "default"), ("$service", "tiny"), ("$__rate_interval", "1m")):
        expr = expr.replace(name, value)
    series = asked(client, "query_range", query=expr, start=since, end=time.time(), step=SCRAPE_SECONDS)["result"]
    found = [float(value) for one in series for _, value in one["values"]]
    return [value for value in found if math.isfinite(value)]


def hard_rows(bundle: Path) -> Any:
    """Inputs that the first ramp gets wrong."""
    x = inputs(3000, seed=5)
    logits, heads = _run_tapped(
        onnx.load(bundle / "backbone.onnx"), safetensors.numpy.load_file(bundle / "ramps.safetensors"), x
    )
    return x[heads[0].argmax(axis=1) != logits.argmax(axis=1)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_panel_and_every_rule_has_data_of_a_promotion_and_a_rollback(
    up: Callable[..., Any], tools: Any, bundle: Path, tmp_path: Path
) -> None:
    service = up(
        replicas=1,
        ramps={"maxOverhead": "0.5"},  # a shared machine makes batches slow for reasons of its own
        objective={"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": "0.05"}},
        rollout={"steps": [{"weight": 50}], "confidence": "0.9"},
    )
    rows, port, began = tools.inputs(400, seed=77), free_port(), time.time()
    traffic = tools.Traffic(lambda: service.url, rows, tools.answers(bundle, rows), rate=100.0)
    service.start("--metrics-port", str(port))
    with prometheus(tmp_path, operator=port) as client:
        service.await_ready(1)
        traffic.start()
        service.infer(rows[:1], deadline_ms=0.001)

        def ended(verdict: str) -> bool:
            return any(r.get("status", {}).get("verdict") == verdict for r in service.objects("RampRollout"))

        def state() -> tuple[Any, str]:
            return service.rollout()["status"], service.tail()

        tools.eventually(lambda: ended("Succeeded"), what="the promotion", seconds=240, state=state)
        for _ in range(3):
            service.infer(rows[:8], deadline_ms=0.001)
        hard = hard_rows(bundle)
        truth = tools.answers(bundle, hard)  # before the canary: it must not be promoted meanwhile
        pin = {"ramps": [{"id": "r00-linear", "threshold": "1"}]}
        service.write({
            "model": {"uri": f"file://{bundle}"}, "replicas": 1, "rollout": {"steps": [{"weight": 50}], "confidence": "0.9"},
            "objective": {"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": "0.1"}},
            "ramps": {"maxOverhead": "0.5", "mode": "Pinned", "pin": pin},
        })  # fmt: skip
        tools.eventually(lambda: service.rollout()["status"].get("phase") == "Progressing" and service.rollout()["spec"]["cause"] == "Pinned",
                         what="the pin's canary", seconds=120, state=state)  # fmt: skip
        traffic.stop()
        traffic.rows, traffic.truth = hard, truth
        traffic.start()
        tools.eventually(lambda: ended("RolledBack"), what="the rollback", seconds=240, state=state)
        rollbacks = 'increase(earlyexit_rollouts_total{verdict="RolledBack"}[10m])'
        tools.eventually(lambda: max(values(client, rollbacks, since=began), default=0) > 0,
                         what="a scrape of the rollback", seconds=120, state=state)  # fmt: skip
        time.sleep(3 * SCRAPE_SECONDS)
        traffic.stop()

        empty = {}
        for path in sorted((FILES / "dashboards").glob("*.json")):
            for panel in json.loads(path.read_text())["panels"]:
                for target in panel.get("targets", ()):
                    if not values(client, target["expr"], since=began):
                        empty.setdefault(panel["title"], []).append(target["expr"])
        assert set(empty) <= set(EMPTY), {title: empty[title] for title in set(empty) - set(EMPTY)}
        rules = [rule for group in asked(client, "rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 30 and {rule["health"] for rule in rules} == {"ok"}, [
            r for r in rules if r["health"] != "ok"
        ]
        silent = [r["name"] for r in rules if r["type"] == "recording" and not values(client, r["query"], since=began)]
        assert silent == []

        # What the figures say is what happened.
        assert max(values(client, rollbacks, since=began)) > 0
        assert max(values(client, 'earlyexit_rollout_phase{phase="Progressing"}', since=began)) == 1
        assert max(values(client, "earlyexit:ramp_utility:rate5m", since=began)) > 0
        assert max(values(client, "earlyexit_rollout_gate_evidence_ratio", since=began)) >= 1
        answered = max(values(client, 'sum(earlyexit_requests_total{outcome="ok"})', since=began))
        assert answered >= 0.9 * traffic.answered
    assert traffic.failures == []
    assert service.stop() == 0
