"""Models come into memory and leave it beside serving, within a bound, and no request is lost for it."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import grpc
import httpx
import orjson
import pytest
from processes import TOKEN, document, infer_json, plan_for, sign
from prometheus_client import generate_latest
from shared import SharedProcess, key, shared, write_models

from offramp_core.errors import PlanRefusedError
from offramp_worker.devices import ARENA, _options, share_arena
from offramp_worker.grpc.messages import SERVICE, message
from offramp_worker.http.refusals import Response
from offramp_worker.shared.http import admin_port, public_port
from offramp_worker.shared.inference import SharedInference
from offramp_worker.shared.model import Model, Waiting
from offramp_worker.shared.repository import Repository, UnavailableError
from offramp_worker.shared.settings import shared_settings

MB = 10**6
NAMES = ("a", "b", "c", "d")
FILE_BYTES = 40 * MB
HEADERS = [(b"authorization", f"Bearer {TOKEN}".encode())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of 40 MB each, nearly all of it a file that nobody reads: far more than a tiny model's own memory. So
    what they are counted for is the same on every machine: 40 MB, and 80 before they were ever loaded."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        bundle = bundles.write_bundle(folder / name, seed=seed)
        with (bundle / "notes.bin").open("wb") as file:
            file.truncate(FILE_BYTES - sum(f.stat().st_size for f in bundle.iterdir()))
    return folder


def listed(folder: Path, *names: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": name, "bundle": str(folder / name), **fields} for name in names]


def loaded(worker: SharedProcess) -> set[str]:
    return {name for name, entry in worker.index().items() if entry["state"] == "READY"}


@pytest.mark.slow
def test_a_model_that_is_asked_for_comes_back_and_the_least_asked_for_leaves(folder: Path, tmp_path: Path) -> None:
    file = write_models(tmp_path, listed(folder, *NAMES))
    with shared(file, env={"OFFRAMP_MODELS_BYTES": str(130 * MB)}) as worker:
        assert loaded(worker) == {"a", "b"}, "what fits, in the order of the file"
        for _ in range(3):
            worker.answer("b", bundles.inputs(1))
        worker.answer("c", bundles.inputs(1))
        assert loaded(worker) == {"b", "c"}
        assert worker.metric("earlyexit_model_evictions_total", model="a") == 1
        assert worker.metric("earlyexit_model_cold_requests_total", model="c", outcome="waited") == 1
        assert worker.metric("earlyexit_model_bytes", model="c") == FILE_BYTES
        worker.answer("a", bundles.inputs(1))
        assert loaded(worker) == {"a", "b", "c"}, "its size is known by now, and fits"
        assert worker.events("model-evicted")[0]["wanted"] == "c"


@pytest.mark.slow
def test_nobody_loses_a_request_while_all_models_push_each_other_out(folder: Path, tmp_path: Path) -> None:
    """Four clients ask four models, one request after the other; there is memory for one or two."""
    file = write_models(tmp_path, listed(folder, *NAMES))
    statuses: dict[str, list[int]] = {name: [] for name in NAMES}
    env = {"OFFRAMP_MODELS_BYTES": str(85 * MB), "OFFRAMP_LOAD_WAIT_SECONDS": "120"}
    with shared(file, env=env) as worker:

        def ask(name: str) -> None:
            with httpx.Client(base_url=worker.public.base_url, timeout=120) as client:
                for _ in range(12):
                    reply = client.post(f"/v2/models/{name}/infer", json=infer_json(bundles.inputs(2)))
                    statuses[name].append(reply.status_code)

        threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        evictions = sum(worker.metric("earlyexit_model_evictions_total", model=name) for name in NAMES)
        held = sum(worker.metric("earlyexit_model_bytes", model=name) for name in NAMES)
    assert statuses == {name: [200] * 12 for name in NAMES}
    assert evictions >= 2 and held <= 85 * MB


@pytest.mark.slow
def test_what_is_kept_loaded_stays_and_who_has_no_room_is_told(folder: Path, tmp_path: Path) -> None:
    file = write_models(tmp_path, [*listed(folder, "a", "b", keepLoaded=True), *listed(folder, "c")])
    with shared(file, env={"OFFRAMP_MODELS_BYTES": str(115 * MB)}) as worker:
        assert loaded(worker) == {"a", "b"}
        refused = worker.ask("c", bundles.inputs(1))
        assert refused.status_code == 503 and refused.headers["retry-after"] == "30"
        assert "OFFRAMP_MODELS_BYTES" in refused.json()["error"]
        assert worker.load("c").status_code == 503
        worker.unload("b").raise_for_status()
        worker.answer("c", bundles.inputs(1))
        assert loaded(worker) == {"a", "c"}


@pytest.mark.slow
def test_a_model_that_may_take_more_than_there_is_is_tried_and_measured(folder: Path, tmp_path: Path) -> None:
    """80 MB are expected of each, and there are 50: what they take, 40, fits one at a time."""
    file = write_models(tmp_path, listed(folder, "a", "b"))
    with shared(file, env={"OFFRAMP_MODELS_BYTES": str(50 * MB)}) as worker:
        assert not loaded(worker)
        for name in ("a", "b", "a"):
            worker.answer(name, bundles.inputs(1))
            assert loaded(worker) == {name}


@pytest.mark.slow
def test_a_call_over_grpc_waits_for_its_model_too_or_is_told_why_it_is_not_there(folder: Path, tmp_path: Path) -> None:
    file = write_models(tmp_path, listed(folder, "a", "b"))
    env = {"OFFRAMP_MODELS_BYTES": str(50 * MB), "OFFRAMP_GRPC_PORT": "0"}
    x = bundles.inputs(1)
    with shared(file, env=env) as worker, grpc.insecure_channel(f"127.0.0.1:{worker.port('grpc')}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=message("ModelInferResponse").FromString,
        )
        request = message("ModelInferRequest")(model_name="b")
        request.inputs.add(name="x", datatype="FP32", shape=x.shape)
        request.raw_input_contents.append(x.tobytes())
        assert not loaded(worker)
        assert call(request, timeout=60).model_name == "b"
        assert loaded(worker) == {"b"}
        worker.unload("b").raise_for_status()
        with pytest.raises(grpc.RpcError) as refused:
            call(request, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "unloaded by hand" in refused.value.details()


@pytest.mark.slow
def test_a_model_evicted_in_mid_canary_goes_on_with_it_and_the_others_lose_nothing(
    folder: Path, tmp_path: Path
) -> None:
    file = write_models(tmp_path, listed(folder, "a", "b", "c", serviceUid="uid"))
    sent = {
        name: document(
            plan_for(folder / name),
            canary=plan_for(folder / name, {"r00-grid": "0.5"}),
            weight=100,
            epoch=4,
            audit_rate=1.0,
            accuracy_budget=0.9,
            service_uid="uid",
        )
        for name in ("a", "b")
    }
    env = {"OFFRAMP_MODELS_BYTES": str(130 * MB), "OFFRAMP_STATE_DIR": str(tmp_path / "state")}
    with shared(file, env=env) as worker:
        for name, requests in (("a", 1), ("b", 60)):  # of popularity: reloads of the two differ by less than that
            worker.deliver_to(name, sent[name]).raise_for_status()
            for _ in range(requests):
                worker.answer(name, bundles.inputs(1))
        first = worker.state_of("a")
        worker.answer("c", bundles.inputs(1))
        assert worker.index()["a"]["state"] == "UNAVAILABLE"
        assert worker.answer("b", bundles.inputs(1))["parameters"]["arm"] == "canary", "b goes on as it was"
        assert worker.state_of("a") == first, "to its control plane it is as it was"
        worker.deliver_to("a", sent["a"]).raise_for_status()
        assert worker.index()["a"]["state"] == "UNAVAILABLE", "what is in force already loads nothing"
        assert worker.answer("a", bundles.inputs(1))["parameters"]["arm"] == "canary", "it goes on as it was"
        again = worker.state_of("a")
        assert (again.boot_id, again.epoch) == (first.boot_id, 4)
        assert again.crashed_epoch is None, "and that did not crash"


class _Client:
    """A request that waits, and what became of it."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def waiting(self) -> Waiting:
        return Waiting(
            go=lambda: self.answered.set_result("goes on"),
            refuse=lambda error, again: self.answered.set_result(f"{error}; again in {again}"),
        )


def test_a_model_whose_every_run_fails_leaves_alone_and_the_last_one_ends_the_process(
    folder: Path, tmp_path: Path
) -> None:
    file = write_models(tmp_path, listed(folder, "a", "b"))

    async def story() -> None:
        lost = list[str]()
        repository = Repository(shared_settings({"OFFRAMP_MODELS": str(file)}), on_lost=lost.append)
        await repository.start()
        a, b = repository.models["a"], repository.models["b"]
        await asyncio.to_thread(a.doors.worker._give_up, "every run has failed for 60 s")
        while a.state != "out" or not a.broken:
            await asyncio.sleep(0.01)
        assert (b.ready, repository.ready, lost) == (True, True, [])
        with pytest.raises(UnavailableError, match="every run has failed") as refused:
            repository.wait_for(a, _Client().waiting())
        assert refused.value.retry_after == 120
        await asyncio.to_thread(b.doors.worker._give_up, "every run has failed for 60 s")
        while not lost:
            await asyncio.sleep(0.01)
        repository.drain()
        await repository.close(seconds=10)

    asyncio.run(story())


def run(folder: Path, tmp_path: Path, story: Callable[[Repository, Model], Any], **env: str) -> None:
    """A story about a repository whose model ``a`` is not loaded."""
    fields = {"serviceUid": "uid", "publicKey": key(), "tokenSha256": hashlib.sha256(TOKEN.encode()).hexdigest()}
    file = write_models(tmp_path, listed(folder, "a", **fields))

    async def begin() -> None:
        repository = Repository(shared_settings({"OFFRAMP_MODELS": str(file), **env}), on_lost=pytest.fail)
        try:
            await story(repository, repository.models["a"])
        finally:
            repository.drain()
            await repository.close(seconds=10)

    asyncio.run(begin())


def test_only_so_many_wait_and_all_of_them_go_on(folder: Path, tmp_path: Path) -> None:
    async def story(repository: Repository, model: Model) -> None:
        clients = [_Client(), _Client()]
        for client in clients:
            repository.wait_for(model, client.waiting())
        with pytest.raises(UnavailableError, match="2 requests wait for model 'a'") as refused:
            repository.wait_for(model, _Client().waiting())
        assert refused.value.retry_after == 3, "the two seconds that a first load is expected to take, and half more"
        assert [await client.answered for client in clients] == ["goes on", "goes on"]
        assert (model.ready, model.loads, model.waited, model.turned_away) == (True, 1, 2, 1)

    run(folder, tmp_path, story, OFFRAMP_LOAD_WAITING="2")


def test_who_would_wait_too_long_is_told_when_to_come_and_the_model_is_there_by_then(
    folder: Path, tmp_path: Path
) -> None:
    async def story(repository: Repository, model: Model) -> None:
        with pytest.raises(UnavailableError, match=r"takes about 2\.0 s more") as refused:
            repository.wait_for(model, _Client().waiting())
        assert refused.value.retry_after == 3
        await repository.load(model)
        assert (model.ready, model.loads) == (True, 1), "the load that the refused request began, and no other"

    run(folder, tmp_path, story, OFFRAMP_LOAD_WAIT_SECONDS="0.5")


def test_who_has_waited_as_long_as_one_may_is_refused_and_leaves_the_line(folder: Path, tmp_path: Path) -> None:
    async def story(repository: Repository, model: Model) -> None:
        async with repository.changing:  # another model comes or leaves meanwhile
            client, gone = _Client(), _Client()
            leaving = gone.waiting()
            repository.wait_for(model, leaving)
            repository.wait_for(model, client.waiting())
            model.leave_line(leaving)
            assert (await client.answered).startswith("model 'a' was not loaded within 2 s; again in")
            assert not model.waiting and not gone.answered.done()
        await repository.load(model)
        assert model.waited == 0

    run(folder, tmp_path, story, OFFRAMP_LOAD_WAIT_SECONDS="2")


def test_who_waits_hears_of_an_unload_by_hand_and_of_a_shutdown(folder: Path, tmp_path: Path) -> None:
    async def story(repository: Repository, model: Model) -> None:
        first, second = _Client(), _Client()
        async with repository.changing:
            repository.wait_for(model, first.waiting())
            unloading = asyncio.create_task(repository.unload(model))
            await asyncio.sleep(0)
        await unloading
        assert "was unloaded by hand" in await first.answered
        with pytest.raises(UnavailableError, match="by hand"):
            repository.wait_for(model, second.waiting())
        await repository.load(model, by_hand=True)
        assert model.ready
        await repository.unload(model)
        repository.drain()
        with pytest.raises(UnavailableError, match="shutting down"):
            await repository.load(model, by_hand=True)

    run(folder, tmp_path, story)


def test_a_model_leaves_only_once_it_has_answered_what_it_was_handed(folder: Path, tmp_path: Path) -> None:
    async def story(repository: Repository, model: Model) -> None:
        await repository.load(model)
        model.begin()
        unloading = asyncio.create_task(repository.unload(model))
        while model.state != "leaving":
            await asyncio.sleep(0)
        assert model.doors.worker.engine is not None and not unloading.done()
        model.end()
        await unloading
        assert model.state == "out" and model.doors.worker.engine is None

    run(folder, tmp_path, story)


def test_nothing_that_computes_stays_in_memory_of_a_model_that_has_left(folder: Path, tmp_path: Path) -> None:
    async def story(repository: Repository, model: Model) -> None:
        await repository.load(model)
        answered, ports = list[int](), (public_port(repository), admin_port(repository))

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(event: Any) -> None:
            answered.append(event.get("status", 0))

        for port, path in zip(ports, ("/v2/models/a/ready", "/models/a/v1/state"), strict=True):
            scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": HEADERS}
            await port(scope, receive, send)
        assert answered == [200, 0, 200, 0]
        assert model.doors.worker.plans is not None
        plan = plan_for(folder / "a", {"r00-grid": "0.5"})
        model.doors.worker.plans.deliver(
            sign(document(plan, canary=plan_for(folder / "a"), weight=50, service_uid="uid"))
        )
        serves(repository)
        await until(lambda: model.doors.worker.observations(after=0, now=0.0).counts[-1].requests)
        engine = model.doors.worker.engine
        assert engine is not None
        parts = [weakref.ref(part) for part in (engine, engine.sessions)]
        del engine
        await repository.unload(model)
        for _ in range(1000):  # threads that have just told their results may hold them for a moment
            gc.collect()
            if not any(part() for part in parts):
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"{[part() for part in parts]} are there")

    run(folder, tmp_path, story)


def serves(repository: Repository, *, times: int = 1) -> None:
    """Requests of one row to model ``a``, at once."""
    for _ in range(times):
        replies = list[Response]()
        body = orjson.dumps(infer_json(bundles.inputs(1)))
        SharedInference(repository).answer("/v2/models/a/infer", [], body, replies.append)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def leaves(repository: Repository, model: Model) -> None:
    async with repository.changing:
        await repository._evict([model.name], wanted="another")
    assert model.state == "out" and model.doors.worker.engine is None


def test_what_was_seen_of_a_plan_stays_when_memory_is_needed_without_a_state_folder(
    folder: Path, tmp_path: Path
) -> None:
    """The breaker, the newest epoch, counts, records and series."""
    plan = plan_for(folder / "a", {"r00-grid": "0.5"})
    sent = document(plan, epoch=5, audit_rate=1.0, service_uid="uid", accuracy_budget=0.9)

    async def story(repository: Repository, model: Model) -> None:
        await repository.load(model)
        worker = model.doors.worker
        assert worker.plans is not None and worker.engine is not None
        await asyncio.to_thread(worker.plans.deliver, sign(sent))
        serves(repository, times=7)
        await until(lambda: sum(c.audited for c in worker.observations(after=0, now=0.0).counts) == 7)
        stable = worker.engine.active.stable
        assert stable is not None and stable.breaker is not None
        stable.breaker.update(audited=400, disagreements=400)
        state, seen = worker.state(), worker.observations(after=0, now=0.0)
        assert state.breaker_open and state.epoch == 5 and seen.records.next == 7
        await leaves(repository, model)
        assert (worker.state(), worker.observations(after=0, now=0.0)) == (state, seen)
        with pytest.raises(PlanRefusedError, match="epoch 4 is not newer than 5"):
            worker.plans.deliver(sign(replace(sent, epoch=4)))
        refused = worker.state().refused
        assert refused is not None and refused.epoch == 4
        await repository.load(model)
        assert (worker.state(), worker.observations(after=0, now=0.0)) == (replace(state, refused=refused), seen)
        with pytest.raises(PlanRefusedError, match="epoch 4 is not newer than 5"):
            worker.plans.deliver(sign(replace(sent, epoch=4)))
        serves(repository)
        await until(lambda: worker.observations(after=0, now=0.0).records.next == 8)
        counts = {c.epoch: c.requests for c in worker.observations(after=0, now=0.0).counts}
        assert counts == {0: 1, 5: 7}, "exits stay off"
        assert (
            'earlyexit_rows_total{arm="stable",outcome="ok"} 8.0' in generate_latest(worker.metrics.registry).decode()
        )

    run(folder, tmp_path, story)


def test_a_plan_that_comes_while_its_model_is_out_of_memory_is_in_force_with_the_next_load(
    folder: Path, tmp_path: Path
) -> None:
    exits, off = plan_for(folder / "a", {"r00-grid": "0.5"}), plan_for(folder / "a")

    async def story(repository: Repository, model: Model) -> None:
        await repository.load(model)
        worker = model.doors.worker
        assert worker.plans is not None
        worker.plans.deliver(sign(document(exits, epoch=5, service_uid="uid")))
        await leaves(repository, model)
        worker.plans.deliver(sign(document(off, epoch=6, service_uid="uid")))
        assert (worker.state().epoch, worker.state().stable_hash) == (6, off.content_hash)
        foreign = replace(off, backbone_digest="sha256:" + "0" * 64)
        with pytest.raises(PlanRefusedError, match="backboneDigest"):
            worker.plans.deliver(sign(document(foreign, epoch=7, service_uid="uid")))
        assert model.state == "out"
        await repository.load(model)
        assert worker.engine is not None and worker.engine.active.epoch == 6
        assert (worker.state().epoch, worker.state().stable_hash) == (6, off.content_hash)

    run(folder, tmp_path, story)


def test_leases_go_on_while_a_model_is_out_of_memory(folder: Path, tmp_path: Path) -> None:
    sent = document(plan_for(folder / "a", {"r00-grid": "0.5"}), epoch=5, service_uid="uid", stable_lease_seconds=0.05)

    async def story(repository: Repository, model: Model) -> None:
        await repository.load(model)
        worker = model.doors.worker
        assert worker.plans is not None
        worker.plans.deliver(sign(sent))
        await leaves(repository, model)
        await asyncio.sleep(0.1)  # longer than the lease with its stagger
        await repository.load(model)
        assert worker.engine is not None and worker.engine.active.epoch == 5
        assert worker.engine.arms.exits_off, "nobody has renewed it since"
        worker.renew_lease()
        assert not worker.engine.arms.exits_off

    run(folder, tmp_path, story)


def test_a_state_folder_that_is_lost_keeps_no_model_from_leaving_and_coming_back(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"

    async def story(repository: Repository, model: Model) -> None:
        await repository.load(model)
        shutil.rmtree(state)
        state.write_text("no folder")
        await leaves(repository, model)
        await repository.load(model)
        assert model.ready

    run(folder, tmp_path, story, OFFRAMP_STATE_DIR=str(state))


def test_another_bundle_in_the_folder_of_one_that_has_left_begins_anew(folder: Path, tmp_path: Path) -> None:
    async def story(repository: Repository, model: Model) -> None:
        await repository.load(model)
        worker = model.doors.worker
        assert worker.plans is not None
        worker.plans.deliver(sign(document(plan_for(folder / "a", {"r00-grid": "0.5"}), epoch=5, service_uid="uid")))
        boot = worker.boot_id
        await leaves(repository, model)
        worker.settings = replace(worker.settings, bundle=folder / "b")
        await repository.load(model)
        state = worker.state()
        assert state.boot_id != boot and (state.epoch, state.newest_epoch) == (0, 5)
        assert state.refused is not None and state.refused.reason == "DigestMismatch"

    run(folder, tmp_path, story)


def test_a_load_that_fails_in_any_way_is_told_to_who_waits_and_tried_again_by_hand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(repository: Repository, model: Model) -> None:
        def no_memory() -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(model.doors.worker, "load", no_memory)
            client = _Client()
            repository.wait_for(model, client.waiting())
            assert "model 'a' cannot be served: MemoryError()" in await client.answered
        with pytest.raises(UnavailableError, match="MemoryError"):
            repository.wait_for(model, client.waiting())
        await repository.load(model, by_hand=True)
        assert model.ready and not model.broken

    run(folder, tmp_path, story)


def test_a_client_that_leaves_while_it_waits_is_forgotten(folder: Path, tmp_path: Path) -> None:
    async def story(repository: Repository, model: Model) -> None:
        inference, replies, gone = SharedInference(repository), list[Response](), list[bool]()
        async with repository.changing:
            routed = inference.answer("/v2/models/a/infer", [], b"{}", replies.append)
            assert len(model.waiting) == 1
            inference.cancel(routed, gone=lambda: gone.append(True))
            assert not model.waiting and gone == [True]
        await repository.load(model)
        assert (model.ready, model.waited, replies) == (True, 0, [])

    run(folder, tmp_path, story)


def test_sessions_of_shared_models_compute_in_one_arena() -> None:
    share_arena()
    share_arena()  # once is enough
    assert _options(threads=1).get_session_config_entry(ARENA) == "1"
