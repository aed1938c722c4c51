"""Requests and rows are counted apart, on a real worker: each request once, whatever it asked for and however it
ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import bundles
import grpc
import httpx
import pytest
from processes import WorkerProcess, eventually, infer_json
from prometheus_client.parser import text_string_to_metric_families

from offramp_core.reasons import Reason, RequestOutcome
from offramp_worker.grpc import messages

pytestmark = pytest.mark.slow  # a real worker
INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def process(bundle_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(bundle_dir, env={"OFFRAMP_LATENCY_SECONDS": "30", "OFFRAMP_GRPC_PORT": "0"}) as started:
        yield started


def scraped(process: WorkerProcess, name: str, label: str = "") -> dict[str, float]:
    """Values of a counter by one of its labels."""
    text, found = process.public.get("/metrics").raise_for_status().text, dict[str, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                value = sample.labels.get(label, "")
                found[value] = found.get(value, 0.0) + sample.value
    return found


def requests(process: WorkerProcess) -> dict[str, float]:
    return scraped(process, "earlyexit_requests_total", "outcome")


def test_every_outcome_and_every_refusal_has_a_series_before_its_first_event(bundle_dir: Path) -> None:
    with WorkerProcess(bundle_dir) as fresh:
        assert requests(fresh) == dict.fromkeys(RequestOutcome, 0.0)
        rows = scraped(fresh, "earlyexit_rows_total", "outcome")
        assert rows == dict.fromkeys(set(RequestOutcome) - {RequestOutcome.INVALID}, 0.0)
        assert scraped(fresh, "earlyexit_plan_refusals_total", "reason") == dict.fromkeys(Reason.at("refusal"), 0.0)
        assert scraped(fresh, "earlyexit_late_requests_total") == {"": 0.0}


def test_a_request_counts_once_and_its_rows_each(process: WorkerProcess) -> None:
    before, rows = requests(process), scraped(process, "earlyexit_rows_total", "outcome")
    x = bundles.inputs(7)
    assert process.public.post(INFER, json=infer_json(x)).status_code == 200
    at_once = infer_json(x[:5], parameters={"timeout": 1})  # no request is answered within a microsecond
    assert process.public.post(INFER, json=at_once).status_code == 503
    assert process.public.post(INFER, json=infer_json(x[:, :1])).status_code == 400
    assert process.public.post("/v2/models/other/infer", json=infer_json(x)).status_code == 404
    after = requests(process)
    assert {o: after[o] - before[o] for o in after if after[o] != before[o]} == {"ok": 1, "rejected": 1, "invalid": 2}
    now = scraped(process, "earlyexit_rows_total", "outcome")
    assert {o: now[o] - rows[o] for o in now if now[o] != rows[o]} == {"ok": 7, "rejected": 5}
    assert scraped(process, "earlyexit_request_duration_seconds_count") == {"": after["ok"]}
    assert scraped(process, "earlyexit_row_duration_seconds_count") == {"": now["ok"]}


def test_asking_whether_a_model_is_there_is_no_request_for_an_answer(process: WorkerProcess) -> None:
    before = requests(process)
    with grpc.insecure_channel(f"127.0.0.1:{process.port('grpc')}") as channel:
        for method, kind in (("ModelReady", "ModelReadyRequest"), ("ModelMetadata", "ModelMetadataRequest")):
            call = channel.unary_unary(f"/{messages.SERVICE}/{method}")
            with pytest.raises(grpc.RpcError):
                call(messages.message(kind)(name="other").SerializeToString())
        assert requests(process) == before
        infer = channel.unary_unary(f"/{messages.SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError):
            infer(messages.message("ModelInferRequest")(model_name="other").SerializeToString())
    assert requests(process)["invalid"] == before["invalid"] + 1


def test_a_request_whose_client_goes_away_is_cancelled_even_where_rows_of_it_were_answered(
    process: WorkerProcess,
) -> None:
    before = requests(process)
    body = httpx.Request("POST", f"http://{process.address}{INFER}", json=infer_json(bundles.inputs(1000))).read()
    head = f"POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    for _ in range(5):
        with socket.create_connection(process.address.rsplit(":", 1), timeout=30) as connection:
            connection.sendall(head.encode() + body)

    def counted() -> bool:
        after = requests(process)
        return sum(after.values()) == sum(before.values()) + 5

    eventually(counted, what="all five")
    assert requests(process)["cancelled"] > before["cancelled"]
