"""True labels from clients, against a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import pytest
from processes import WorkerProcess, document, infer_json, plan_for
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.slow

URL = "/v2/models/tiny/feedback"
ROWS = 20


@pytest.fixture(scope="module")
def process(bundle_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(bundle_dir, env={"OFFRAMP_FEEDBACK_ROWS": str(ROWS)}) as process:
        process.deliver(document(plan_for(bundle_dir, {"r02-linear": "0.5"}))).raise_for_status()
        yield process


def counted(process: WorkerProcess, outcome: str) -> float:
    families = text_string_to_metric_families(process.public.get("/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == "earlyexit_feedback_total"]
    return sum(s.value for s in samples if s.labels == {"arm": "stable", "outcome": outcome})


def test_true_labels_are_counted_by_arm_once_per_reply(process: WorkerProcess) -> None:
    right, wrong = counted(process, "right"), counted(process, "wrong")
    reply = process.infer(bundles.inputs(3), id="mine")
    truth = reply["label"].tolist()
    truth[1] = (truth[1] + 1) % bundles.CLASSES
    verdict = process.public.post(URL, json={"id": "mine", "label": truth})
    assert (verdict.status_code, verdict.json()) == (200, {"id": "mine", "right": 2, "wrong": 1})
    assert process.public.post(URL, json={"id": "mine", "label": truth}).status_code == 404
    assert (counted(process, "right"), counted(process, "wrong")) == (right + 2, wrong + 1)


def test_a_reply_to_a_request_without_id_has_one_to_answer_to(process: WorkerProcess) -> None:
    first, second = process.infer(bundles.inputs(1)), process.infer(bundles.inputs(1))
    assert first["id"] != second["id"]
    verdict = process.public.post(URL, json={"id": first["id"], "label": int(first["label"][0])})
    assert verdict.json() == {"id": first["id"], "right": 1, "wrong": 0}


def test_only_the_last_rows_are_kept(process: WorkerProcess) -> None:
    names = [process.infer(bundles.inputs(4), id=f"kept-{i}")["id"] for i in range(ROWS // 4 + 1)]
    statuses = [process.public.post(URL, json={"id": name, "label": [0] * 4}).status_code for name in names]
    assert statuses == [404] + [200] * (ROWS // 4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body: is no JSON"),
        ([], "id: must be"),
        ({"id": 3, "label": 1}, "id: must be"),
        ({"id": "bad"}, "label: is None"),
        ({"id": "bad", "label": "1"}, "label: is '1'"),
        ({"id": "bad", "label": True}, "label: is True"),
        ({"id": "bad", "label": bundles.CLASSES}, f"label: is {bundles.CLASSES}"),
        ({"id": "bad", "label": [0, 0]}, "label: has 2 labels; the reply has 1 rows"),
    ],
    ids=["no-json", "no-object", "id-no-text", "no-label", "text", "boolean", "beyond", "too-many"],
)
def test_bad_feedback_is_refused_and_may_be_mended(process: WorkerProcess, body: Any, message: str) -> None:
    process.infer(bundles.inputs(1), id="bad")
    reply = process.public.post(URL, **({"content": body} if isinstance(body, bytes) else {"json": body}))
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(message)
    assert process.public.post(URL, json={"id": "bad", "label": 0}).status_code == 200


def test_feedback_is_off_unless_asked_for(bundle_dir: Path) -> None:
    with WorkerProcess(bundle_dir, control_plane=False) as process:
        reply = process.public.post("/v2/models/tiny/infer", json=infer_json(bundles.inputs(1))).json()
        assert "id" not in reply
        refused = process.public.post(URL, json={"id": "x", "label": 0})
        said = refused.json()["error"]
        assert refused.status_code == 404 and "spec.feedback.maxAnswers" in said and "OFFRAMP_FEEDBACK_ROWS" in said
