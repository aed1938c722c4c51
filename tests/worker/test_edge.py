"""An edge and its core as real processes: answers as of one worker, audits, outages, and what the core refuses."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import bundles
import httpx
import numpy as np
import pytest
from edges import THRESHOLDS, Reply, answer, ask, columns, core_of, edge_of, exits, metric, url
from engines import new_engine
from fixed_plans import certified
from processes import START_SECONDS, WorkerProcess, document, eventually, plan_for

from offramp_core.edge_settings import EdgeSettings
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.edge.door import _Pieces
from offramp_worker.edge.link import Link, OtherModelError
from offramp_worker.edge.wire import DIGEST_HEADER, LENGTH_HEADER, RAMPS_HEADER, SECONDS_HEADER, request_body
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.metrics import Metrics

pytestmark = pytest.mark.slow  # real workers

EXIT = "r02-linear"


@pytest.fixture(scope="module")
def core(bundle_dir: Path) -> Iterator[WorkerProcess]:
    with core_of(bundle_dir) as process:
        yield process


@pytest.fixture
def own_core(bundle_dir: Path) -> Iterator[WorkerProcess]:
    """One that a test may end, at a port that another one can take."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with core_of(bundle_dir, OFFRAMP_PORT=port) as process:
        yield process


def port_of(core: WorkerProcess) -> str:
    """Also of one that has ended."""
    return str(core.public.base_url.port)


def recorded(worker: WorkerProcess, rows: int) -> bool:
    return worker.observations().records.next == rows


def drawn(worker: WorkerProcess) -> int:
    return next(c for c in worker.observations().counts if c.epoch == 1).drawn


def away(edge: WorkerProcess) -> bool:
    return metric(edge, "core_reachable") == 0


# --- answers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, Reply, Reply]:
    """Rows, and what one worker answers them with the plan, and by the model itself."""
    file, x = tmp_path_factory.mktemp("alone") / "plan.json", bundles.inputs(60, seed=3)
    file.write_text(json.dumps(certified(bundle_dir, THRESHOLDS)))
    with WorkerProcess(bundle_dir, control_plane=False, env={"OFFRAMP_FIXED_PLAN": str(file)}) as worker:
        return x, answer(worker, x), answer(worker, x, exit="never")


@pytest.mark.parametrize("residue", ["Input", "Features", "Auto"])
def test_a_client_sees_one_worker_whatever_is_sent_and_connections_are_kept(
    residue: str,
    core: WorkerProcess,
    alone: tuple[np.ndarray, Reply, Reply],
    bundle_dir: Path,
    tmp_path: Path,
) -> None:
    """Auto over an uplink that is as good as none computes the rest on the box."""
    x, expected, exact = alone
    env = {"OFFRAMP_RESIDUE": residue} | ({"OFFRAMP_UPLINK": "1kbit"} if residue == "Auto" else {})
    with edge_of(bundle_dir, url(core), tmp_path, **env) as edge:

        def sent() -> float:
            answer(edge, x[:4])
            return metric(edge, "forwarded_rows_total", sent=residue.lower())

        before = 0.0 if residue == "Auto" else eventually(sent, what="rows that are sent")  # features are proven first
        reply, never = answer(edge, x), answer(edge, x, exit="never")
        after = metric(edge, "forwarded_rows_total", sent=residue.lower())
        table = Path(f"/proc/{edge.process.pid}/net/tcp").read_text().splitlines()[1:]
        to_core = [line for line in table if line.split()[2].endswith(f":{int(port_of(core)):04X}")]
    told = exits(expected, 60)
    assert exits(reply, 60) == told
    assert 0 < told.count("final") < 60
    assert after - before == {"Input": told.count("final") + 60, "Features": told.count("final"), "Auto": 0}[residue]
    for name in ("label", "logits"):
        np.testing.assert_allclose(reply[name], expected[name], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(never[name], exact[name], rtol=1e-5, atol=1e-5)
    assert "offline" not in reply["parameters"]
    assert len(to_core) <= 20  # here and there, of eight and one that asks for the core


def test_features_are_sent_from_behind_the_last_exit_where_they_are_smaller_and_spare_the_core_more(
    core: WorkerProcess, alone: tuple[np.ndarray, Reply, Reply], bundle_dir: Path, tmp_path: Path
) -> None:
    """At the last ramp of the bundle, at which nobody leaves, since the plan does not name it."""
    x, _, exact = alone
    shapes = load_bundle(bundle_dir).shapes
    assert 2 * math.prod(shapes["c2"]) < math.prod(shapes["c0"])
    settings = {"OFFRAMP_RESIDUE": "Features", "OFFRAMP_UPLINK": "10Mbit"}
    with edge_of(bundle_dir, url(core), tmp_path, {"r00-grid": "0.2"}, **settings) as edge:
        sent = partial(metric, edge, "forwarded_rows_total", sent="features")
        eventually(lambda: ask(edge, x) and sent(), what="features that are proven", deadline=20.0)
        rows, size = sent(), metric(edge, "core_request_bytes_total")
        reply = answer(edge, x)
        row_bytes = (metric(edge, "core_request_bytes_total") - size) / (sent() - rows)
        size = metric(edge, "core_request_bytes_total")
        in_time = exits(answer(edge, x, deadline_ms=60_000), 60)
        urgent_bytes = (metric(edge, "core_request_bytes_total") - size) / in_time.count("final")
    assert urgent_bytes > 4 * min(math.prod(shapes["c0"]), x[0].size), "who has a deadline does not go on"
    stay = [told == "final" for told in exits(reply, 60)]
    assert set(exits(reply, 60)) == {"r00-grid", "final"}
    assert 4 * math.prod(shapes["c2"]) < row_bytes < 5 * math.prod(shapes["c2"]), "and what describes them"
    np.testing.assert_allclose(reply["logits"][stay], exact["logits"][stay], rtol=1e-5, atol=1e-5)


# --- audits --------------------------------------------------------------------------------------------


def test_audits_run_at_the_core_after_the_reply_and_switch_off_a_plan_that_answers_otherwise_than_promised(
    core: WorkerProcess, bundle_dir: Path, tmp_path: Path
) -> None:
    """r00-grid knows nothing, so most of what leaves there is wrong: only the core's answers can tell."""
    with edge_of(bundle_dir, url(core), tmp_path, {"r00-grid": "1"}) as edge:
        assert set(exits(answer(edge, bundles.inputs(32, seed=1)), 32)) == {"r00-grid"}

        def off() -> bool:
            return set(exits(answer(edge, bundles.inputs(64, seed=2)), 64)) == {"final"}

        eventually(off, what="exits off")
        assert metric(edge, "audited_total") > 0


def test_records_of_audits_are_those_of_a_worker_that_runs_them_itself(core: WorkerProcess, bundle_dir: Path) -> None:
    """So they tune and certify alike."""
    plan, x = plan_for(bundle_dir, THRESHOLDS), bundles.inputs(24, seed=6)
    blocks = []
    for env in ({"OFFRAMP_CORE": url(core), "OFFRAMP_RESIDUE": "Input"}, {}):
        with WorkerProcess(bundle_dir, env=env) as worker:
            assert worker.deliver(document(plan, audit_rate=1.0)).status_code == 200
            worker.infer(x)
            eventually(partial(recorded, worker, 24), what="24 records")
            found = worker.observations()
            counts = next(c for c in found.counts if c.epoch == 1)
            assert (counts.audited, counts.drawn) == (24, 24)
            blocks.append((*columns(found.records), counts.disagreements))
    for there, here in zip(*blocks, strict=True):
        np.testing.assert_allclose(there, here, atol=1e-5)


# --- outages -------------------------------------------------------------------------------------------


def test_refuse_says_why_and_when_to_come_again_and_the_box_computes_while_the_core_has_other_weights(
    own_core: WorkerProcess, bundle_dir: Path, tmp_path: Path
) -> None:
    x = bundles.inputs(40, seed=3)
    with edge_of(bundle_dir, url(own_core), tmp_path) as edge:
        told = exits(answer(edge, x), 40)
        own_core.process.kill()
        own_core.process.wait()
        for i, name in enumerate(told):
            reply = ask(edge, x[i : i + 1])
            if name == "final":
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
                assert "is out of reach" in reply.json()["error"]
            else:
                assert reply.status_code == 200
        assert away(edge) and edge.is_ready()
        audited = metric(edge, "audited_total")
        other = bundles.write_bundle(tmp_path / "other", seed=5)
        with core_of(other, OFFRAMP_PORT=port_of(own_core)):  # which must answer nobody
            row = x[told.index("final")][None]
            eventually(lambda: ask(edge, row).status_code == 200, what="the box computes it")
            assert away(edge) and exits(answer(edge, x), 40) == told
            [*_, lost] = edge.events("core-away")
            assert "its backbone_digest is" in lost["reason"]
        with core_of(bundle_dir, OFFRAMP_PORT=port_of(own_core)):
            eventually(lambda: not away(edge), what="the core's return")
            assert exits(answer(edge, x), 40) == told
        assert metric(edge, "offline_answers_total") == 0
        assert metric(edge, "audited_total") >= audited


def test_answer_loses_nothing_marks_what_the_last_exit_said_and_counts_it_for_no_plan(
    own_core: WorkerProcess, bundle_dir: Path
) -> None:
    plan, x = plan_for(bundle_dir, THRESHOLDS), bundles.inputs(40, seed=3)
    env = {"OFFRAMP_CORE": url(own_core), "OFFRAMP_RESIDUE": "Input", "OFFRAMP_OFFLINE": "Answer"}
    with WorkerProcess(bundle_dir, env=env) as edge:
        assert edge.deliver(document(plan, audit_rate=1.0, accuracy_budget=0.9)).status_code == 200
        told = exits(edge.infer(x), 40)
        eventually(partial(recorded, edge, 40), what="audits of what was answered before")
        own_core.process.kill()
        own_core.process.wait()
        ask(edge, x[told.index("final")][None])
        eventually(lambda: away(edge), what="that the core is missed")
        # That row was on its way: it counts as one that the model answers, and its audit waits.
        eventually(lambda: drawn(edge) == 41, what="the count of the row that was on its way")
        before = next(c for c in edge.observations().counts if c.epoch == 1)
        for i, name in enumerate(told):
            reply = answer(edge, x[i : i + 1])
            assert reply["parameters"]["exit"] == (EXIT if name == "final" else name)
            assert reply["parameters"].get("offline", False) == (name == "final")
            assert reply["parameters"]["audited"] is False
        assert metric(edge, "offline_answers_total") >= told.count("final")
        assert ask(edge, x[:1], exit="never").status_code == 503
        assert ask(edge, x[told.index("final")][None], max_disagreement=0.5).status_code == 503
        after = next(c for c in edge.observations().counts if c.epoch == 1)
        assert (after.drawn, after.audited, after.requests) == (before.drawn, before.audited, before.requests)
        assert recorded(edge, 40)
        with core_of(bundle_dir, OFFRAMP_PORT=port_of(own_core)):
            eventually(lambda: not away(edge), what="the core's return")
            edge.infer(x)
            eventually(partial(recorded, edge, 81), what="the audit that waited, and those of what is answered now")


def test_an_edge_starts_without_its_core_and_finds_it_later(bundle_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    x = bundles.inputs(40, seed=3)
    with edge_of(bundle_dir, f"http://127.0.0.1:{port}", tmp_path, OFFRAMP_OFFLINE="Answer") as edge:
        assert edge.is_ready() and away(edge)
        assert "final" not in exits(answer(edge, x), 40)
        with core_of(bundle_dir, OFFRAMP_PORT=str(port)):
            eventually(lambda: not away(edge), what="the core's arrival")
            assert "final" in exits(answer(edge, x), 40)


def test_a_deadline_is_kept_by_the_last_exit_while_the_core_hangs(
    own_core: WorkerProcess, bundle_dir: Path, tmp_path: Path
) -> None:
    x = bundles.inputs(40, seed=3)
    with edge_of(bundle_dir, url(own_core), tmp_path) as edge:
        row = x[exits(answer(edge, x), 40).index("final")][None]
        own_core.process.send_signal(signal.SIGSTOP)
        try:
            reply = answer(edge, row, deadline_ms=200)
            assert (reply["parameters"]["exit"], reply["parameters"]["deadline"]) == (EXIT, True)
            assert ask(edge, row, timeout=200_000).status_code == 504
        finally:
            own_core.process.send_signal(signal.SIGCONT)


# --- another core --------------------------------------------------------------------------------------


def test_a_core_with_other_weights_is_refused_at_the_start_in_one_line(core: WorkerProcess, tmp_path: Path) -> None:
    other = bundles.write_bundle(tmp_path / "other", seed=5)
    command = [sys.executable, "-m", "offramp_cli", "serve", str(other), "--port", "0", "--core", url(core)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        f"error: OFFRAMP_CORE is {url(core)}: its backbone_digest is sha256:"
    )
    assert "Traceback" not in result.stderr


def test_a_worker_that_takes_no_edges_is_refused_and_the_message_says_how_to_start_it(
    worker: WorkerProcess, bundle: Bundle
) -> None:
    link = Link(EdgeSettings(url(worker)), bundle, metrics=Metrics())
    with pytest.raises(
        OtherModelError, match="takes no edges of model 'tiny'; start it with `offramp serve BUNDLE --edges`"
    ):
        link.open()
    link.close()


# --- the core's door -----------------------------------------------------------------------------------


def features_request(core: WorkerProcess, what: str, body: bytes, **headers: str) -> httpx.Response:
    return core.public.post(f"/v2/models/tiny/edge/{what}", content=body, headers=headers)


def test_bytes_that_are_no_features_are_refused_by_their_field_and_the_core_serves_on(
    core: WorkerProcess, bundle_dir: Path
) -> None:
    plan = plan_for(bundle_dir)
    good = {DIGEST_HEADER: plan.backbone_digest, RAMPS_HEADER: plan.ramp_set_digest, SECONDS_HEADER: "5"}
    rng = np.random.default_rng(0)

    def sent(what: str, x: np.ndarray, **changed: str) -> tuple[int, str]:
        body, length = request_body("x" if what in ("rows", "scores") else "features", x)
        reply = features_request(core, what, body, **{**good, LENGTH_HEADER: str(length), **changed})
        return reply.status_code, reply.text

    wrong = rng.normal(size=(2, 5)).astype(np.float32)
    for what in ("rows", "scores", f"features/{EXIT}"):
        status, text = sent(what, wrong)
        assert status == 400 and "inputs[0].shape" in text
        assert sent(what, wrong.astype(np.float64))[0] == 400
        for digest in (DIGEST_HEADER, RAMPS_HEADER):
            status, text = sent(what, wrong, **{digest: "sha256:" + "0" * 64})
            assert status == 409 and digest in text
        assert sent(what, wrong, **{SECONDS_HEADER: "nan"})[0] == 400
        assert sent(what, wrong, **{LENGTH_HEADER: "99999999"})[0] == 400
        assert features_request(core, what, rng.bytes(3000), **good, **{LENGTH_HEADER: "30"}).status_code == 400
        assert features_request(core, what, bytes(9_000_000), **good, **{LENGTH_HEADER: "30"}).status_code == 413
    shape = [
        int(part) for part in sent(f"features/{EXIT}", wrong)[1].partition("takes [n, ")[2].partition("]")[0].split(",")
    ]
    bad = np.full((1, *shape), np.nan, dtype=np.float32)
    status, text = sent(f"features/{EXIT}", bad)
    assert status == 400 and "finite" in text
    assert sent(f"features/{EXIT}", np.zeros((1, *shape), dtype=np.float32))[0] == 200
    assert sent("features/no-such-ramp", bad)[0] == 404
    assert sent("secrets", bad)[0] == 404
    assert features_request(core, "", bytes(70_000)).status_code == 413
    assert core.public.get("/v2/models/other/edge").status_code == 404
    assert answer(core, bundles.inputs(2))["label"].shape == (2,)


def test_answers_that_count_for_no_plan_keep_a_worker_busy_all_the_same(worker: WorkerProcess) -> None:
    before = worker.observations()
    answer(worker, bundles.inputs(4), exit="never")
    eventually(lambda: worker.observations().other_seconds > before.other_seconds, what="the work told")
    assert worker.observations().counts == before.counts


def test_a_worker_that_is_no_core_has_no_such_door(worker: WorkerProcess) -> None:
    assert worker.public.post("/v2/models/tiny/edge").status_code == 404


def test_features_are_of_exact_ramps_and_no_request_takes_pieces_from_a_plan(tmp_path: Path) -> None:
    """A column of a lower precision is no place to go on from."""
    folder = bundles.write_wide_bundle(tmp_path / "wide")
    with core_of(folder) as core:
        plan = plan_for(folder)
        digests = {DIGEST_HEADER: plan.backbone_digest, RAMPS_HEADER: plan.ramp_set_digest}
        headers = {**digests, SECONDS_HEADER: "30", LENGTH_HEADER: "2"}
        for ramp in ("int8%2Ffinal", "int8%2Fr02-linear", "%ff%00"):
            reply = features_request(core, f"features/{ramp}", b"{}", **headers)
            assert reply.status_code == 404 and "features: " in reply.json()["error"]
        reply = features_request(core, f"features/{EXIT}", b"{}", **headers)
        assert reply.status_code == 400 and "inputs" in reply.json()["error"]
    bundle = load_bundle(folder)
    engine = new_engine(bundle, Sessions(bundle, threads=1), deliver=lambda _: None)
    at = {column.id: j for j, column in enumerate(bundle.columns)}
    for ramp in ("r00-grid", "r01-grid"):
        engine.sessions.stages([at[ramp]])
    kept = dict(engine.sessions._stages)
    assert _Pieces().spec(engine, EXIT).name == "features"
    assert engine.sessions._stages == kept
