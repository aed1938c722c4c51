"""Every query of every dashboard panel and every rule, asked of a real Prometheus that scraped a real service through a
promotion and a rollback."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
import safetensors.numpy
from bench.ports import free_port

from offramp_operator.local.embedded import USUAL_WEB_PORT
from offramp_operator.local.process import HOST

sys.path.insert(0, str(Path(__file__).parent))

from identity_bundle import _run_tapped, inputs
from prometheus_beside import GENERATED, SCRAPE_SECONDS, asked, prometheus, queries, values, without_data

pytestmark = pytest.mark.slow

# A service that has something to show in every panel: a slice, a cache, answers kept for true labels, and enough
# batches held back to measure savings in a minute.
SPEC = {
    "replicas": 1,
    "ramps": {"maxOverhead": "0.5", "holdback": "0.2"},  # a shared machine makes batches slow for reasons of its own
    "objective": {
        "latency": {"threshold": "500ms"},
        "accuracy": {"maxDisagreement": "0.05", "slices": [{"name": "vip", "maxDisagreement": "0.5"}]},
    },
    "predictionCache": {"sizeLimit": "1Mi"},
    "feedback": {"maxAnswers": 1000},
    "rollout": {"steps": [{"weight": 50}], "confidence": "0.9"},
}


def give_true_labels(tools: Any, url: str, rows: Any, truth: Any) -> None:
    """A client says of twenty of the model's own answers what was true; the first of them was wrong."""
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        for row in range(20):
            reply = tools.ask(client, "", rows[row : row + 1], exit="never")
            label = (int(truth[row]) + (row == 0)) % tools.n_classes
            told = client.post("/v2/models/tiny/feedback", json={"id": reply["id"], "label": label})
            assert told.status_code == 200, told.text


def hard_rows(bundle: Path) -> Any:
    """Inputs that the first ramp gets wrong."""
    x = inputs(3000, seed=5)
    logits, heads = _run_tapped(
        onnx.load(bundle / "backbone.onnx"), safetensors.numpy.load_file(bundle / "ramps.safetensors"), x
    )
    return x[heads[0].argmax(axis=1) != logits.argmax(axis=1)]


@contextlib.contextmanager
def usual_web_port_taken() -> Iterator[None]:
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another has it
            own.bind((HOST, USUAL_WEB_PORT))
            own.listen()
        yield


def look_at_the_page(browser: Any, service: Any) -> None:
    """The page of the same run in a real browser: what was measured, and why the pin's canary was rolled back."""
    page = browser.new_page()
    page.set_default_timeout(90_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(service.events("web")[-1]["url"])
    page.get_by_role("link", name="tiny").click()
    try:
        page.get_by_text("live", exact=True).wait_for()
    except Exception as error:
        error.add_note(f"{page.url} {complaints}\n{page.locator('body').inner_text()}\n{service.tail()}")
        raise
    assert page.locator("svg.network").count() >= 1
    assert page.locator("svg.cdf").get_by_text("exits on").count() == 1
    attempts = page.locator("#history details.attempt")
    assert attempts.first.get_by_text("RolledBack").is_visible() and attempts.last.get_by_text("Succeeded").is_visible()
    attempts.first.locator("summary").first.click()
    rejected = attempts.first.get_by_role("row", name="accuracy").get_by_text("Rejected")
    assert rejected.is_visible()
    assert attempts.first.locator("svg.evidence .curve").count() >= 1
    assert complaints == []
    page.close()


@pytest.mark.timeout(1200)
def test_every_panel_and_every_rule_has_data_of_a_promotion_and_a_rollback(
    up: Callable[..., Any], tools: Any, bundle: Path, tmp_path: Path, browser: Any
) -> None:
    service = up(**SPEC)
    rows, port, began = tools.inputs(400, seed=77), free_port(), time.time()
    traffic = tools.Traffic(
        lambda: service.url, rows, tools.answers(bundle, rows), rate=100.0, parameters={"slice": "vip"}
    )
    with usual_web_port_taken():  # as by another `offramp up`
        service.start("--metrics-port", str(port))
        service.await_ready(1)
    with prometheus(tmp_path, operator=port) as client:
        traffic.start()
        service.infer(rows[:1], deadline_ms=0.001)

        def ended(verdict: str) -> bool:
            return any(r.get("status", {}).get("verdict") == verdict for r in service.objects("RampRollout"))

        def state() -> tuple[Any, str]:
            return service.rollout()["status"], service.tail()

        tools.eventually(lambda: ended("Succeeded"), what="the promotion", seconds=240, state=state)
        give_true_labels(tools, service.url, rows, traffic.truth)
        for _ in range(3):
            service.infer(rows[:8], deadline_ms=0.001)
        hard = hard_rows(bundle)
        truth = tools.answers(bundle, hard)  # before the canary: it must not be promoted meanwhile
        pin = {"ramps": [{"id": "r00-linear", "threshold": "1"}]}
        for panel in ("earlyexit_service_measured_saving_ratio", "earlyexit_service_slice_stopped"):
            tools.eventually(
                lambda panel=panel: values(client, panel, since=began), what=panel, seconds=120, state=state
            )
        accuracy = {**SPEC["objective"]["accuracy"], "maxDisagreement": "0.1"}
        service.write(
            {
                **SPEC,
                "model": {"uri": f"file://{bundle}"},
                "objective": {**SPEC["objective"], "accuracy": accuracy},
                "ramps": {**SPEC["ramps"], "mode": "Pinned", "pin": pin},
            }
        )
        tools.eventually(
            lambda: (
                service.rollout()["status"].get("phase") == "Progressing"
                and service.rollout()["spec"]["cause"] == "Pinned"
            ),
            what="the pin's canary",
            seconds=120,
            state=state,
        )
        traffic.stop()
        traffic.rows, traffic.truth = hard, truth
        traffic.start()
        tools.eventually(lambda: ended("RolledBack"), what="the rollback", seconds=240, state=state)
        rollbacks = 'increase(earlyexit_rollouts_total{verdict="RolledBack"}[10m])'
        tools.eventually(
            lambda: max(values(client, rollbacks, since=began), default=0) > 0,
            what="a scrape of the rollback",
            seconds=120,
            state=state,
        )
        time.sleep(3 * SCRAPE_SECONDS)
        traffic.stop()

        assert without_data(client, [q for q in queries() if q[0] != GENERATED], since=began) == {}
        rules = [rule for group in asked(client, "rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 30 and {rule["health"] for rule in rules} == {"ok"}, [
            r for r in rules if r["health"] != "ok"
        ]
        silent = [r["name"] for r in rules if r["type"] == "recording" and not values(client, r["query"], since=began)]
        assert silent == []

        # What the figures say is what happened.
        assert max(values(client, rollbacks, since=began)) > 0
        assert max(values(client, 'sum(earlyexit_feedback_total{outcome="right"})', since=began)) == 19
        assert max(values(client, 'sum(earlyexit_feedback_total{outcome="wrong"})', since=began)) == 1
        assert max(values(client, 'earlyexit_cache_requests_total{result="hit"}', since=began)) > 0
        assert max(values(client, 'earlyexit_rollout_phase{phase="Progressing"}', since=began)) == 1
        assert max(values(client, "earlyexit:ramp_utility:rate5m", since=began)) > 0
        assert max(values(client, "earlyexit_rollout_gate_evidence_ratio", since=began)) >= 1
        answered = max(values(client, 'sum(earlyexit_requests_total{outcome="ok"})', since=began))
        assert answered >= 0.9 * traffic.answered
        look_at_the_page(browser, service)
    assert traffic.failures == []
    assert service.stop() == 0
