"""A worker of a pool: the operator brings its list of models, which changes while they serve."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bundles
import grpc
import httpx
import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from processes import KEY, TOKEN, document, eventually, plan_for
from shared import SharedProcess

from offramp_core.protocol import HeldModel, HeldModels, ModelList, PlacedModel, SignedDocument

pytestmark = pytest.mark.slow

ADMIN = hashlib.sha256(TOKEN.encode()).hexdigest()


def bundle(folder: Path, name: str, *, seed: int, calls: str = "") -> Path:
    """A bundle in the claim whose model is called ``calls``, or as its folder."""
    made = bundles.write_bundle(folder / name, seed=seed)
    manifest = json.loads((made / "manifest.json").read_bytes())
    (made / "manifest.json").write_text(json.dumps(manifest | {"name": calls or name}))
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("claim")
    for seed, name in enumerate(("a", "b", "c")):
        bundle(folder, name, seed=seed)
    return folder


@pytest.fixture
def claim(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "claim"))


class Pooled(SharedProcess):
    """A worker of the pool ``pool``; what is told to it has the epochs 1, 2, ..."""

    epoch = 0

    def tell(self, *models: PlacedModel) -> HeldModels:
        self.epoch += 1
        reply = self.post(ModelList("pool", "worker-1", self.epoch, models)).raise_for_status()
        return msgspec.json.decode(reply.content, type=HeldModels)

    def post(self, listed: ModelList, *, key: Ed25519PrivateKey = KEY) -> httpx.Response:
        payload = json.dumps(asdict(listed))
        signed = SignedDocument(payload, base64.b64encode(key.sign(payload.encode())).decode())
        return self.admin.post("/v1/models", content=msgspec.json.encode(signed))

    def held(self) -> dict[str, HeldModel]:
        reply = self.admin.get("/v1/models").raise_for_status()
        return {model.service_uid: model for model in msgspec.json.decode(reply.content, type=HeldModels).models}

    def until(self, uid: str, standing: str, **fields: Any) -> HeldModel:
        def stands() -> bool:
            held = self.held().get(uid)
            return (
                held is not None and held.standing == standing and all(getattr(held, n) == v for n, v in fields.items())
            )

        eventually(stands, what=f"{uid} being {standing} with {fields}; it is {self.held().get(uid)}")
        return self.held()[uid]


def pooled(claim: Path, *, env: Mapping[str, str] | None = None, wait_ready: bool = False) -> Pooled:
    state = claim.parent / "state"
    state.mkdir(exist_ok=True)
    told = {
        "OFFRAMP_BUNDLE": "",
        "OFFRAMP_SERVICE_UID": "",
        "OFFRAMP_POOL_UID": "pool",
        "OFFRAMP_BUNDLES": str(claim),
        "OFFRAMP_STATE_DIR": str(state),
    }
    return Pooled(claim, env={**told, **(env or {})}, wait_ready=wait_ready)


def placed(name: str, *, mark: str = "1", **fields: Any) -> PlacedModel:
    return PlacedModel(f"service-{name}", f"uid-{name}", name, ADMIN, mark, **fields)


def test_services_come_and_go_while_others_serve(claim: Path) -> None:
    x = bundles.inputs(3)
    with pooled(claim, env={"OFFRAMP_GRPC_PORT": "0"}) as worker:
        channel, states = grpc.insecure_channel(f"127.0.0.1:{worker.port('grpc')}"), list[Any]()
        channel.subscribe(states.append, try_to_connect=True)
        assert worker.public.get("/v2/health/ready").status_code == 503  # nobody has said what it is to hold
        worker.tell(placed("a"))
        eventually(worker.is_ready, what="readiness")
        boot = worker.state_of("a").boot_id
        expected = worker.answer("a", x)["logits"]

        worker.tell(placed("a"), placed("b"))
        held = worker.until("uid-b", "Serving", model="b", mark="1")
        assert held.bytes > 0
        worker.answer("b", x)
        assert worker.held()["uid-b"].busy_seconds > 0
        assert 'service="service-b"' in worker.public.get("/metrics").text
        delivered = worker.deliver_to("b", document(plan_for(claim / "b"), service_uid="uid-b"))
        assert delivered.status_code == 200, delivered.text  # its plans are its own

        worker.tell(placed("a", leaving=True), placed("b"))
        eventually(lambda: worker.ask("a", x).headers.get("connection") == "close", what="connections that end")
        worker.tell(placed("b"))
        eventually(lambda: worker.ask("a", x).status_code == 404, what="the end of a")
        assert set(worker.held()) == {"uid-b"}

        worker.tell(placed("a"), placed("b"))
        worker.until("uid-a", "Serving")
        assert worker.state_of("a").boot_id != boot
        np.testing.assert_array_equal(worker.answer("a", x)["logits"], expected)
        # A client over gRPC keeps its connection, unless it is asked to connect anew: then it follows what moves.
        eventually(lambda: grpc.ChannelConnectivity.IDLE in states, what="the end of a connection")
        channel.close()


def test_a_changed_bundle_takes_over_once_it_serves_and_a_broken_one_never_does(claim: Path) -> None:
    x = bundles.inputs(2)
    bundle(claim, "a2", seed=7, calls="a")
    broken = bundle(claim, "a3", seed=8, calls="a")
    ramps = broken / "ramps.safetensors"
    ramps.write_bytes(ramps.read_bytes()[:-1] + b"?")
    with pooled(claim) as worker:
        worker.tell(placed("a"), placed("b"))
        eventually(worker.is_ready, what="readiness")
        first = worker.answer("a", x)["logits"]
        worker.tell(replace(placed("a"), bundle="a2", mark="2"), placed("b"))
        worker.until("uid-a", "Serving", mark="2")
        second = worker.answer("a", x)["logits"]
        assert not np.array_equal(first, second)
        worker.tell(replace(placed("a"), bundle="a3", mark="3"), placed("b"))
        eventually(lambda: "ramps.safetensors" in worker.held()["uid-a"].message, what="the refusal")
        assert worker.held()["uid-a"].standing == "Serving" and worker.held()["uid-a"].mark == "2"
        np.testing.assert_array_equal(worker.answer("a", x)["logits"], second)


@pytest.fixture(scope="module")
def running(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooled]:
    """A worker that was told to serve what is there and what is not."""
    claim = Path(shutil.copytree(made, tmp_path_factory.mktemp("running") / "claim"))
    bundle(claim, "twin", seed=9, calls="a")
    (claim / "pipe").mkdir()
    os.mkfifo(claim / "pipe" / "manifest.json")  # whoever opens it waits
    with pooled(claim) as worker:
        worker.tell(placed("a"), placed("nowhere"), placed("pipe"))
        eventually(worker.is_ready, what="readiness beside one that fails")
        yield worker


def test_what_cannot_be_served_is_told_and_costs_the_others_nothing(running: Pooled) -> None:
    assert "there is no bundle at 'pipe'" in running.until("uid-pipe", "Failed").message
    running.tell(placed("a"), placed("nowhere"), placed("twin"))
    assert "there is no bundle at 'nowhere'" in running.until("uid-nowhere", "Failed").message
    assert "another service's of this pool" in running.until("uid-twin", "Failed", model="a").message
    running.answer("a", bundles.inputs(1))


def test_a_list_counts_only_from_the_operator_for_this_worker_and_if_it_is_no_older(running: Pooled) -> None:
    good = ModelList("pool", "worker-1", 5, (placed("b"),))
    for listed, key, reason in (
        (good, Ed25519PrivateKey.generate(), "BadSignature"),
        (replace(good, pool_uid="another"), KEY, "ForeignService"),
        (replace(good, uid="worker-2"), KEY, "ForeignService"),
        (replace(good, epoch=0), KEY, "StaleEpoch"),
        (replace(good, models=(replace(placed("b"), service_uid="../b"),)), KEY, "Malformed"),
    ):
        reply = running.post(listed, key=key)
        assert (reply.status_code, reply.json()["reason"]) == (409, reason)
    assert httpx.get(running.admin.base_url.join("/v1/models")).status_code == 401
    assert "uid-b" not in running.held()


def test_a_worker_that_starts_again_serves_what_it_was_told_with_nobody_telling_it(claim: Path) -> None:
    bundle(claim, "evil", seed=8, calls="newest-plan.new")  # as a file of the state folder
    with pooled(claim) as worker:
        worker.tell(placed("a"), placed("evil"))
        eventually(worker.is_ready, what="readiness")
        worker.tell(placed("a"), placed("b"))
        worker.until("uid-b", "Serving")
        expected = worker.answer("b", bundles.inputs(2))["logits"]
    with pooled(claim, wait_ready=True) as again:
        np.testing.assert_array_equal(again.answer("b", bundles.inputs(2))["logits"], expected)
        stale = again.post(ModelList("pool", "worker-1", 0, ()))
        assert stale.json()["reason"] == "StaleEpoch"


def canary_runs(claim: Path, *, epoch: int) -> None:
    """What the state of every service says while a canary batch executes."""
    markers = list((claim.parent / "state").rglob("crash-marker"))
    assert markers
    for path in markers:
        with path.open("r+b") as file:
            file.write(b"%020d\n" % epoch)


def test_what_is_changed_in_its_canary_has_not_crashed(claim: Path) -> None:
    with pooled(claim) as worker:
        worker.tell(placed("a"))
        eventually(worker.is_ready, what="readiness")
        canary_runs(claim, epoch=3)
        worker.tell(placed("a", mark="2"))
        worker.until("uid-a", "Serving", mark="2")
        assert worker.state_of("a").crashed_epoch is None


def test_a_service_that_is_made_anew_serves_at_once_and_inherits_nothing(claim: Path) -> None:
    with pooled(claim) as worker:
        worker.tell(placed("a"), placed("b"))
        eventually(worker.is_ready, what="readiness")
        worker.process.kill()
        worker.process.wait()
    canary_runs(claim, epoch=7)
    with pooled(claim, wait_ready=True) as worker:
        worker.epoch = 10
        assert worker.state_of("a").crashed_epoch == 7
        worker.tell(replace(placed("a"), service_uid="uid-new"), placed("b"))
        worker.until("uid-new", "Serving", model="a", message="")
        state = worker.state_of("a")
        assert (state.service_uid, state.crashed_epoch) == ("uid-new", None)
        services = claim.parent / "state" / "services"
        eventually(lambda: {f.name for f in services.iterdir()} == {"uid-new", "uid-b"}, what="the end of its state")
        worker.process.kill()
        worker.process.wait()
    (services / "uid-gone").mkdir()
    with pooled(claim, wait_ready=True):
        assert {f.name for f in services.iterdir()} == {"uid-new", "uid-b"}


def test_nobody_leaves_for_another_service(claim: Path) -> None:
    for name in "abc":
        with (claim / name / "notes.bin").open("wb") as file:
            file.truncate(40_000_000)
    with pooled(claim, env={"OFFRAMP_MODELS_BYTES": "100000000"}) as worker:
        worker.tell(placed("a"), placed("b"))
        eventually(worker.is_ready, what="readiness")
        boots = [worker.state_of(name).boot_id for name in "ab"]
        worker.tell(placed("a"), placed("b", mark="2"), placed("c"))
        held = worker.until("uid-c", "Failed", model="c", mark="")
        assert "no room" in held.message and "100000000" in held.message and held.bytes >= 40_000_000
        eventually(lambda: "no room" in worker.held()["uid-b"].message, what="the refusal of a change")
        assert worker.ask("c", bundles.inputs(1)).status_code == 503
        assert [worker.state_of(name).boot_id for name in "ab"] == boots
        worker.until("uid-b", "Serving", mark="1")
        worker.tell(placed("b"), placed("c"))
        worker.until("uid-c", "Serving", mark="1")  # as soon as there is room


def test_what_leaves_or_fails_keeps_no_file_open(claim: Path) -> None:
    broken = bundle(claim, "a3", seed=8, calls="a")
    ramps = broken / "ramps.safetensors"
    ramps.write_bytes(ramps.read_bytes()[:-1] + b"?")

    def markers(worker: Pooled) -> int:
        folder = Path(f"/proc/{worker.process.pid}/fd")
        return sum(file.resolve().name.startswith("crash-marker") for file in folder.iterdir())

    with pooled(claim) as worker:
        worker.tell(placed("a"), placed("b"))
        eventually(worker.is_ready, what="readiness")
        worker.tell(placed("a"), placed("b", mark="2"), replace(placed("c"), bundle="a3"))
        worker.until("uid-b", "Serving", mark="2")
        for mark in "34":
            worker.tell(replace(placed("a"), bundle="a3", mark=mark), placed("b", mark="2"), placed("c"))
            worker.until("uid-c", "Serving")
            eventually(lambda: "ramps.safetensors" in worker.held()["uid-a"].message, what="the refusal")
            worker.tell(placed("a"), placed("b", mark="2"))
            eventually(lambda: set(worker.held()) == {"uid-a", "uid-b"}, what="the end of c")
        eventually(lambda: markers(worker) == 2, what="a file for each of the two")
