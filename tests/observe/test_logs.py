"""The one schema of the log lines of operator and worker, and that secrets stay out of them."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))

import bundles
from processes import KEY, TOKEN, WorkerProcess, document, plan_for

from offramp_operator.shell.log import configure_json_logging, log_event

ROOT = Path(__file__).parents[2]
KEYS = ("time", "level", "component", "event", "message")


def check(line: dict[str, object], component: str) -> None:
    assert tuple(line)[: len(KEYS)] == KEYS, line
    assert datetime.fromisoformat(str(line["time"])).utcoffset() is not None
    assert line["level"] in ("debug", "info", "warning", "error", "critical") and line["component"] == component
    assert line["message"] and re.fullmatch(r"[A-Za-z][A-Za-z-]*(\.[\w.]+)?", str(line["event"]))


def test_the_operators_lines_have_the_keys_that_are_documented() -> None:
    stream, root, ours = io.StringIO(), logging.getLogger(), logging.getLogger("offramp")
    before = root.handlers[:], root.level, ours.level
    configure_json_logging(stream=stream)
    try:
        log_event("published", "epoch 3", service="default/digits", epoch=3)
        log_event("conflict-lost", error=ValueError("x"), level=logging.ERROR)
        logging.getLogger("aiohttp.server").warning("a library says %s", "this")
    finally:
        root.handlers[:], level, ours_level = before
        root.setLevel(level)
        ours.setLevel(ours_level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    for line in lines:
        check(line, "operator")
    assert lines[1]["message"] == "conflict-lost" and "ValueError" in lines[1]["error"]
    guide = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    for key in (*KEYS, "service", "error", "traceback"):
        assert f"| `{key}` |" in guide, key


@pytest.mark.slow
def test_a_workers_lines_have_the_same_keys_and_no_secret_in_them(tmp_path: Path) -> None:
    bundle = bundles.write_bundle(tmp_path / "bundle")
    with WorkerProcess(bundle) as worker:
        worker.deliver(document(plan_for(bundle, {"r00-grid": "0.5"}))).raise_for_status()
        worker.deliver(document(plan_for(bundle, {"r00-grid": "0.5"}), epoch=0))
        worker.admin.get("/v1/state", headers={"authorization": f"Bearer {TOKEN}x"})
        worker.public.post("/v2/models/tiny/infer", content=TOKEN.encode())
        worker.infer(bundles.inputs(1))
    lines = worker.log
    assert {"listening", "serving", "plan-in-force", "plan-refused", "stopped"} <= {line["event"] for line in lines}
    for line in lines:
        check(line, "worker")
    said = json.dumps([*lines, *worker.noise])
    assert TOKEN not in said and KEY.private_bytes_raw().hex() not in said
