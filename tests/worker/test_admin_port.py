"""Plans over the admin port and the plan file: who may, what is refused, when a plan switches, what is reported."""

from __future__ import annotations

import base64
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import httpx
import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from processes import WorkerProcess, document, eventually, infer_json, plan_for, sign

from offramp_core.plan import Plan
from offramp_core.protocol import SignedDocument
from offramp_core.task import top_labels
from offramp_worker.engine.execution.sessions import Sessions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fresh(bundle_dir: Path) -> Iterator[WorkerProcess]:
    """A worker that got no plan yet; who takes it gives it none."""
    with WorkerProcess(bundle_dir) as process:
        yield process


# --- who may ---------------------------------------------------------------------------------------


def test_without_the_token_every_admin_path_is_401(fresh: WorkerProcess) -> None:
    stranger = httpx.Client(base_url=fresh.admin.base_url, timeout=60)
    for header in (
        None,
        "Bearer wrong",
        "Bearer",
        "Basic a-token-for-tests",
        "a-token-for-tests",
        "Bearer a-token-for-test",
    ):
        headers = {} if header is None else {"Authorization": header}
        for method, path in (("GET", "/v1/state"), ("POST", "/v1/config"), ("GET", "/v1/observations"), ("GET", "/x")):
            reply = stranger.request(method, path, headers=headers)
            assert reply.status_code == 401, (header, method, path)
            assert "a-token" not in reply.text


def test_a_stranger_is_refused_before_anything_of_a_request_is_read(fresh: WorkerProcess) -> None:
    """A body of two megabytes, twice what a document may have: with the token too large, without it not looked at."""
    stranger, body = httpx.Client(base_url=fresh.admin.base_url, timeout=60), b"x" * 2**21
    assert stranger.post("/v1/config", content=body).status_code == 401
    assert fresh.admin.post("/v1/config", content=body).status_code == 413
    assert stranger.post("/v1/config", content=body, headers={"X-Forwarded-For": "127.0.0.1"}).status_code == 401
    metrics = httpx.get(f"{fresh.admin.base_url}/metrics", timeout=60)
    assert metrics.status_code == 401, "nothing on this port is public"


def test_the_first_state_offers_the_bundle_with_exits_off(fresh: WorkerProcess, bundle_dir: Path) -> None:
    state = fresh.state()
    plan = plan_for(bundle_dir)
    assert (state.uid, state.service_uid, state.model, state.ready, state.epoch) == (
        "worker-1",
        "service-1",
        "tiny",
        True,
        0,
    )
    assert (state.backbone_digest, state.ramp_set_digest) == (plan.backbone_digest, plan.ramp_set_digest)
    assert [r.id for r in state.ramps] == ["r00-grid", "r00-linear", "r01-grid", "r02-linear"]
    assert np.array(state.costs["segment_seconds"]).shape == (3, 5)
    assert (state.refused, state.breaker_open, state.crashed_epoch, state.message) == (None, False, None, "")


# --- what is refused -------------------------------------------------------------------------------


def _refusals(folder: Path) -> dict[str, tuple[SignedDocument, int, str]]:
    plan = plan_for(folder, {"r00-grid": "0.5"})
    good = document(plan, epoch=5)
    zeros = "sha256:" + "0" * 64
    stranger = Ed25519PrivateKey.generate()
    return {
        "signed-by-another-key": (sign(good, key=stranger), 400, "BadSignature"),
        "unsigned": (SignedDocument(sign(good).payload, ""), 400, "BadSignature"),
        "signature-is-no-base64": (SignedDocument(sign(good).payload, "ß"), 400, "BadSignature"),
        "changed-after-signing": (
            replace(sign(good), payload=sign(good).payload.replace("0.5", "0.6")),
            400,
            "BadSignature",
        ),
        "old-epoch": (sign(document(plan, epoch=2)), 409, "StaleEpoch"),
        "same-epoch-other-content": (sign(document(plan, epoch=3)), 409, "StaleEpoch"),
        "other-service": (sign(replace(good, service_uid="service-2")), 409, "ForeignService"),
        "other-backbone": (sign(document(replace(plan, backbone_digest=zeros), epoch=5)), 409, "DigestMismatch"),
        "other-ramp-set": (sign(document(replace(plan, ramp_set_digest=zeros), epoch=5)), 409, "DigestMismatch"),
        "unknown-ramp": (sign(document(plan_for(folder, {"r99-grid": "0.5"}), epoch=5)), 409, "UnknownRamp"),
        "canary-with-unknown-ramp": (
            sign(document(plan, canary=plan_for(folder, {"r9": "0"}), epoch=5)),
            409,
            "UnknownRamp",
        ),
        "weight-beyond-100": (sign(document(plan, canary=plan, weight=101, epoch=5)), 400, "Malformed"),
        "weight-without-canary": (sign(document(plan, weight=5, epoch=5)), 400, "Malformed"),
        "audit-rate-beyond-1": (sign(document(plan, audit_rate=1.5, epoch=5)), 400, "Malformed"),
        "budget-of-0": (sign(document(plan, accuracy_budget=0.0, epoch=5)), 400, "Malformed"),
        "slow-seconds-of-text": (sign(document(plan, slow_seconds={"many": 1.0}, epoch=5)), 400, "Malformed"),
        "slow-seconds-of-no-length": (
            sign(document(plan, slow_seconds_by_length={"4xlong": 1.0}, epoch=5)),
            400,
            "Malformed",
        ),
        "plan-without-digests": (sign(document(_Raw({"ramps": []}), epoch=5)), 400, "Malformed"),  # type: ignore[arg-type]
    }


class _Raw:
    """Stands in for a plan whose mapping is wrong."""

    def __init__(self, mapping: dict[str, Any]) -> None:
        self.mapping = mapping

    def to_mapping(self) -> dict[str, Any]:
        return self.mapping


def test_every_doubtful_document_is_refused_with_its_reason_and_changes_nothing(
    worker: WorkerProcess, bundle_dir: Path
) -> None:
    in_force = document(plan_for(bundle_dir, {"r02-linear": "0.9"}), epoch=3)
    assert worker.deliver(in_force).status_code == 200
    for name, (signed, status, reason) in _refusals(bundle_dir).items():
        reply = worker.deliver(signed)
        assert (reply.status_code, reply.json()["reason"]) == (status, reason), (name, reply.text)
        state = worker.state()
        assert (state.epoch, state.stable_hash) == (3, plan_for(bundle_dir, {"r02-linear": "0.9"}).content_hash), name
        assert state.refused is not None and state.refused.reason == reason, name
        assert worker.infer(bundles.inputs(1))["parameters"]["epoch"] == 3
    assert worker.admin.post("/v1/config", content=b"{").status_code == 400
    assert worker.admin.post("/v1/config", content=b" " * 2_000_000).status_code == 413
    assert worker.deliver(in_force).status_code == 200  # the one in force may be delivered again
    assert worker.deliver(document(plan_for(bundle_dir), epoch=4)).json()["refused"] is None


# --- switching -------------------------------------------------------------------------------------


def test_a_plan_switch_under_load_answers_every_request_under_one_plan(
    worker: WorkerProcess, bundle_dir: Path, sessions: Sessions
) -> None:
    x = bundles.inputs(24, seed=21)
    scores = sessions.tapped(x)
    plans = [
        plan_for(bundle_dir, {ramp: "1"}, execution=e)
        for ramp in ("r00-grid", "r02-linear")
        for e in ("ComputeSaving", "ResultsOnly")
    ]
    plans.append(plan_for(bundle_dir))
    ramp_of = {p.content_hash[:10]: p.ramps[0].id for p in plans if p.ramps} | {"exits-off": None}
    ids = ["r00-grid", "r00-linear", "r01-grid", "r02-linear"]
    wrong: list[Any] = []
    seen: set[tuple[str, int]] = set()
    stop = threading.Event()

    def ask(offset: int) -> None:
        with httpx.Client(base_url=f"http://{worker.address}", timeout=60) as client:
            row = offset
            while not stop.is_set():
                row = (row + 1) % len(x)
                reply = client.post("/v2/models/tiny/infer", json=infer_json(x[row : row + 1]))
                said = reply.json()["parameters"]
                ramp = ramp_of[said["config"]]
                leaves = ramp is not None and scores.uncertainty[row, ids.index(ramp)] < 1
                expected = (
                    scores.prediction[row, ids.index(ramp)] if ramp and leaves else top_labels(scores.logits)[row]
                )
                seen.add((said["config"], said["epoch"]))
                if reply.json()["outputs"][1]["data"] != [expected] or said["exit"] != (ramp if leaves else "final"):
                    wrong.append((row, reply.json()))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for epoch in range(1, 31):
        plan = plans[epoch % len(plans)]
        worker.deliver(document(plan, epoch=epoch, accuracy_budget=0.9)).raise_for_status()
        config = "exits-off" if plan.exits_off else plan.content_hash[:10]
        eventually(lambda config=config, epoch=epoch: (config, epoch) in seen, what=f"replies of epoch {epoch}")
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    counts = worker.observations().counts
    assert [c.epoch for c in counts] == [0, *range(23, 31)]
    assert {c.plan_hash for c in counts[1:]} == {p.content_hash for p in plans}


def test_arms_share_the_batches_by_weight_and_replies_say_which(worker: WorkerProcess, bundle_dir: Path) -> None:
    stable, canary = plan_for(bundle_dir, {"r02-linear": "0.5"}), plan_for(bundle_dir, {"r02-linear": "0.9"})
    worker.deliver(document(stable, canary=canary, weight=50, epoch=1, audit_rate=0.5)).raise_for_status()
    replies = [worker.infer(row[None])["parameters"] for row in bundles.inputs(200)]
    configs = {"stable": stable.content_hash[:10], "canary": canary.content_hash[:10]}
    assert all(r["config"] == configs[r["arm"]] for r in replies)

    def settled() -> Any:
        by_arm = {c.arm: c for c in worker.observations().counts if c.epoch == 1}
        return all(c.drawn == c.audited for c in by_arm.values()) and by_arm

    by_arm = eventually(settled, what="audits")
    for arm, counts in by_arm.items():
        mine = [r for r in replies if r["arm"] == arm]
        assert counts.requests == len(mine) and 60 <= len(mine) <= 140
        assert counts.drawn == sum(r["audited"] for r in mine)
        assert counts.exits == {e: n for e in {r["exit"] for r in mine} if (n := sum(r["exit"] == e for r in mine))}
        assert sum(counts.latency.values()) == counts.requests
        assert sum(sum(h.values()) for h in counts.execution.values()) == counts.batches


def test_records_are_pulled_in_pieces_without_gap_or_repeat(worker: WorkerProcess, bundle_dir: Path) -> None:
    worker.deliver(document(plan_for(bundle_dir), audit_rate=1.0)).raise_for_status()
    for part in np.split(bundles.inputs(6000, seed=30), 6):
        worker.infer_binary(part)
    eventually(lambda: worker.observations(after=5990).counts[1].audited == 6000, what="audits")
    state = worker.state()
    first = worker.observations(boot=state.boot_id)
    second = worker.observations(after=first.records.next, boot=state.boot_id)
    assert (first.records.first, first.records.next) == (0, 5000)
    assert (second.records.first, second.records.next) == (5000, 6000)
    assert len(base64.b64decode(second.records.uncertainty)) == 1000 * 4 * 4
    assert worker.observations(after=5000, boot="another process").records.first == 0
    assert worker.admin.get("/v1/observations", params={"after": "-1"}).status_code == 400


def test_a_document_that_is_no_text_or_nested_without_end_is_malformed(fresh: WorkerProcess) -> None:
    for body in (b'{"payload": "\xff"}', b'{"more": ' + b"[" * 100_000, b"[", b""):
        reply = fresh.admin.post("/v1/config", content=body)
        assert (reply.status_code, reply.json()["reason"]) == (400, "Malformed")


# --- the plan file ---------------------------------------------------------------------------------


def test_the_plan_file_is_taken_before_ready_and_when_its_content_changes(bundle_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"

    def write(epoch: int, plan: Plan) -> None:
        file.write_bytes(msgspec.json.encode(sign(document(plan, epoch=epoch))))

    write(1, plan_for(bundle_dir, {"r02-linear": "0.5"}))
    with WorkerProcess(bundle_dir, env={"OFFRAMP_PLAN_FILE": str(file)}) as process:
        assert process.infer(bundles.inputs(1))["parameters"]["epoch"] == 1
        for complaints, broken in enumerate((b"half a docu", b'{"payload": "\xff"}', b'{"more": ' + b"[" * 100_000), 1):
            file.write_bytes(broken)
            eventually(
                lambda wanted=complaints: len(process.events("plan-file-unreadable")) == wanted,
                what="a complaint about the file",
            )
        assert process.state().epoch == 1
        write(2, plan_for(bundle_dir))
        eventually(lambda: process.state().epoch == 2, what="epoch 2")


def test_a_worker_that_drains_stays_until_the_audits_that_were_waited_for_are_told(
    bundle_dir: Path, tmp_path: Path
) -> None:
    with WorkerProcess(bundle_dir, env={"OFFRAMP_STATE_DIR": str(tmp_path)}) as process:
        process.deliver(document(plan_for(bundle_dir, {"r02-linear": "0.5"}), audit_rate=1.0)).raise_for_status()

        def still_open() -> bool:
            process.infer(bundles.inputs(200, seed=3))
            return any(c.drawn > c.audited for c in process.observations().counts)

        eventually(still_open, what="audits that the control plane knows to be open")
        process.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)  # an idle worker is done with them long before, and gone if it does not care
        eventually(lambda: all(c.drawn == c.audited for c in process.observations().counts), what="the last of them")
        assert process.process.wait(10) == 0


# --- crashes ---------------------------------------------------------------------------------------


def test_a_process_that_dies_in_a_canary_batch_is_known_to_the_next_one(bundle_dir: Path, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    env = {"OFFRAMP_STATE_DIR": str(state_dir)}
    plan, canary = plan_for(bundle_dir), plan_for(bundle_dir, {"r00-grid": "0.5"}, execution="ResultsOnly")
    marker = state_dir / "crash-marker"
    with WorkerProcess(bundle_dir, env=env) as process:
        process.deliver(document(plan, canary=canary, weight=100, epoch=4, accuracy_budget=0.9)).raise_for_status()
        stop = threading.Event()

        def load() -> None:
            with httpx.Client(base_url=f"http://{process.address}", timeout=60) as client:
                body = infer_json(bundles.inputs(500))
                while not stop.is_set():
                    try:
                        client.post("/v2/models/tiny/infer", json=body)
                    except httpx.TransportError:
                        return

        thread = threading.Thread(target=load)
        thread.start()

        def caught_in_a_batch() -> bool:
            process.process.send_signal(signal.SIGSTOP)
            status = Path(f"/proc/{process.process.pid}/status")
            eventually(lambda: "State:\tT" in status.read_text(), what="a stopped process")
            if marker.read_bytes()[:20].endswith(b"4"):
                process.process.kill()
                return True
            process.process.send_signal(signal.SIGCONT)
            return False

        eventually(caught_in_a_batch, what="a canary batch in execution")
        stop.set()
        thread.join()
    with WorkerProcess(bundle_dir, env=env) as process:
        assert process.state().crashed_epoch == 4
        process.deliver(document(plan, canary=canary, weight=100, epoch=4)).raise_for_status()
        assert process.infer(bundles.inputs(1))["parameters"]["arm"] == "stable"  # not again under the same epoch


def test_the_breaker_shows_in_the_state_and_the_canary_stops_too(worker: WorkerProcess, bundle_dir: Path) -> None:
    reckless = plan_for(bundle_dir, {"r00-grid": "1"})
    worker.deliver(document(reckless, canary=reckless, weight=50, audit_rate=1.0)).raise_for_status()

    def opened() -> Any:
        worker.infer(bundles.inputs(40, seed=40))
        return worker.state().breaker_open

    eventually(opened, what="the breaker")
    said = worker.infer(bundles.inputs(64, seed=41))["parameters"]
    assert set(said["exit"].split(",")) == {"final"} and said["config"] == "exits-off"
    assert "breaker" in worker.state().message
    worker.deliver(document(reckless, audit_rate=0.5, epoch=2)).raise_for_status()
    assert worker.state().breaker_open  # a new epoch of the same plan is no reason to forget
    worker.deliver(document(plan_for(bundle_dir, {"r02-linear": "0.5"}), epoch=3)).raise_for_status()
    assert not worker.state().breaker_open


def test_a_canary_whose_lease_has_ended_is_told_by_its_absence_until_a_new_document_comes(
    worker: WorkerProcess, bundle_dir: Path
) -> None:
    canary = plan_for(bundle_dir, {"r00-grid": "0.5"})
    on_lease = document(plan_for(bundle_dir), epoch=4, canary=canary, weight=100, canary_lease_seconds=2.0)
    assert worker.deliver(on_lease).raise_for_status().json()["canary_hash"] == canary.content_hash
    time.sleep(2.5)  # nobody pulls
    lapsed = worker.state()
    assert (lapsed.epoch, lapsed.canary_hash) == (4, ""), "the pull that comes too late sees what it missed"
    again = worker.deliver(replace(on_lease, epoch=5)).raise_for_status().json()
    assert again["canary_hash"] == canary.content_hash


def test_pulls_of_an_operator_that_cannot_act_let_a_canary_end_with_its_lease(
    worker: WorkerProcess, bundle_dir: Path
) -> None:
    canary = plan_for(bundle_dir, {"r00-grid": "0.5"})
    on_lease = document(plan_for(bundle_dir), epoch=4, canary=canary, weight=100, canary_lease_seconds=2.0)

    def pulled_for(seconds: float, query: str) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            worker.admin.get(f"/v1/observations?after=0&state=1{query}").raise_for_status()
            time.sleep(0.05)
        return worker.state().canary_hash

    worker.deliver(on_lease).raise_for_status()
    assert pulled_for(3.0, "") == canary.content_hash, "renewed by every pull, as those of earlier releases"
    assert pulled_for(3.0, "&renew=0") == "", "it watches, and could do nothing about what it sees"
