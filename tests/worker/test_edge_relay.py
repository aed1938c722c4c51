"""Requests that an edge hands to its core as they came: whose answers they get, and what becomes of them without it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bundles
import httpx
import numpy as np
import pytest
from bench.load import encode
from cores import ScriptedCore
from edges import THRESHOLDS, answer, core_of, exits, url
from fixed_plans import certified
from processes import WorkerProcess, manifest_of, plan_for

from offramp_core.edge import Uplink
from offramp_core.edge_relay import FIRST
from offramp_worker.edge.processor import ProcessorWait
from offramp_worker.edge.relay import REPLY_BYTES, Relay
from offramp_worker.edge.wire import DIGEST_HEADER, PLAN_HEADER, RAMPS_HEADER
from offramp_worker.front import Front
from offramp_worker.http.inference import Inference, Reply
from offramp_worker.http.refusals import Response
from offramp_worker.plans.classifier import ClassifierPlans
from offramp_worker.plans.fixed import take_fixed_plan
from offramp_worker.settings import settings_from_env
from offramp_worker.worker import InferenceWorker

OTHER = {"r02-linear": "0.5"}


def fixed(bundle: Path, folder: Path, thresholds: dict[str, str]) -> dict[str, str]:
    file = folder / "plan.json"
    file.write_text(json.dumps(certified(bundle, thresholds)))
    return {"OFFRAMP_FIXED_PLAN": str(file)}


@pytest.fixture(scope="module")
def core(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with core_of(bundle_dir, **fixed(bundle_dir, tmp_path_factory.mktemp("core"), THRESHOLDS)) as process:
        yield process


def body_of(x: np.ndarray, outputs: Any = (), **parameters: Any) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    body, length = encode(x, "x")
    if parameters or outputs:
        asked = {"parameters": parameters} if parameters else {"outputs": outputs}
        told = json.dumps(json.loads(body[:length]) | asked, separators=(",", ":")).encode()
        body, length = told + body[length:], len(told)
    return body, [(b"inference-header-content-length", str(length).encode())]


def read(response: Response) -> dict[str, Any]:
    length = dict(response.headers).get(b"inference-header-content-length")
    return dict(json.loads(response.body[: None if length is None else int(length)]))


class Slow(Inference):
    """The edge's own way, which takes a second more by the clock of the test."""

    spent: Callable[[], None]

    def answer(self, path: str, headers: Any, body: bytes | bytearray, reply: Reply) -> Any:
        def told(response: Response) -> None:
            self.spent()
            reply(response)

        return super().answer(path, headers, body, told)


class Edge:
    """An edge in this process, whose own way is slow."""

    def __init__(self, bundle: Path, core: str, folder: Path, **env: str) -> None:
        env = {"OFFRAMP_BUNDLE": str(bundle), "OFFRAMP_CORE": core, "OFFRAMP_UPLINK": "10Gbit"} | env
        self.now, self.waited, loop = 0.0, 0.0, asyncio.get_running_loop()
        front = Front(loop)
        self.worker = InferenceWorker(
            settings_from_env(env | fixed(bundle, folder, THRESHOLDS) | {"OFFRAMP_STATE_DIR": str(folder)}),
            deliver=front.deliver,
            on_lost=lambda _: None,
        )
        self.inference = Slow(self.worker, front)
        self.inference.spent = self.spent
        self.relay = Relay(self.worker, self.inference, clock=lambda: self.now, waited=self.waits)

    def waits(self) -> float:
        """The next one for what the one before has taken of a limited processor."""
        waited, self.waited = self.waited, 0.0
        return waited

    def spent(self) -> None:
        self.now += 1.0

    @property
    def relayed(self) -> float:
        return self.worker.metrics.registry.get_sample_value("earlyexit_relayed_requests_total") or 0.0

    async def ask(self, x: np.ndarray, outputs: Any = (), tier: bytes = b"", **parameters: Any) -> dict[str, Any]:
        body, headers = body_of(x, outputs=outputs, **parameters)
        headers += [(b"offramp-tier", tier)] if tier else []
        got = asyncio.get_running_loop().create_future()
        self.relay.answer("/v2/models/tiny/infer", headers, body, got.set_result)
        response = await asyncio.wait_for(got, 30)
        assert response.status == 200, response.body
        return read(response)

    async def warm(self, x: np.ndarray) -> None:
        for i in range(FIRST):
            await self.ask(x[i : i + 1])


def with_edge(bundle: Path, core: str, folder: Path, story: Callable[[Edge], Any], **env: str) -> None:
    async def told() -> None:
        edge = Edge(bundle, core, folder, **env)
        await asyncio.to_thread(edge.worker.load)
        try:
            await story(edge)
        finally:
            edge.worker.drain()
            await asyncio.to_thread(edge.worker.finish, seconds=5.0)

    asyncio.run(told())


def labels(reply: dict[str, Any]) -> list[Any]:
    return list(next(output["data"] for output in reply["outputs"] if output["name"] == "label"))


def test_where_the_core_is_sooner_requests_go_there_as_they_came_and_get_the_same_answers_from_the_same_exits(
    bundle_dir: Path, core: WorkerProcess, tmp_path: Path
) -> None:
    x = bundles.inputs(40, seed=5)
    expected = answer(core, x)

    async def story(edge: Edge) -> None:
        await edge.warm(x)
        assert edge.relayed == 0, "the box is measured first"
        replies = [await edge.ask(x[i : i + 1]) for i in range(40)]
        assert edge.relayed == 40
        assert [labels(reply)[0] for reply in replies] == list(expected["label"])
        told = [reply["parameters"]["exit"] for reply in replies]
        assert told == exits(expected, 40) and set(told) != {"final"}

    with_edge(bundle_dir, url(core), tmp_path, story)


def test_where_one_way_is_the_sooner_one_by_far_few_requests_are_learned_from_and_slow_ones_always(
    bundle_dir: Path, core: WorkerProcess, tmp_path: Path
) -> None:
    x = bundles.inputs(1, seed=5)

    async def story(edge: Edge) -> None:
        await edge.warm(np.repeat(x, FIRST, axis=0))
        looked, judged = 0, edge.relay._judged

        def waits() -> float:
            nonlocal looked
            looked += 1
            return 0.0

        def slowly(*of: Any) -> Any:
            edge.now += 5.0
            return judged(*of)

        edge.relay._waited = waits
        for _ in range(60):
            await edge.ask(x)
        assert edge.relayed == 60 and looked < 60, "once behind each reply and once before the next request"
        edge.relay._judged = slowly  # type: ignore[method-assign]
        for _ in range(30):
            await edge.ask(x)
        assert edge.relayed < 60 + 15

    with_edge(bundle_dir, url(core), tmp_path, story)


class Timed(Relay):
    """An edge whose ways take what a test says, by its clock."""

    def __init__(self, uplink: Uplink, took: Callable[[str], float]) -> None:
        link = SimpleNamespace(away="", uplink=uplink, core="http://127.0.0.1:1")
        worker: Any = SimpleNamespace(engine=object(), edge=SimpleNamespace(residue="Auto", link=link))
        self.now, self.handed_on, self.took, own = 0.0, 0, took, SimpleNamespace(refusals=None, answer=self.here)
        super().__init__(worker, cast(Any, own), clock=lambda: self.now, waited=lambda: 0.0)

    def _plan(self, engine: Any) -> Any:
        return engine

    def _rows(self, *_: Any) -> int:
        return 1

    def here(self, path: str, headers: Any, body: Any, reply: Reply) -> None:
        self.now += self.took("Edge")
        reply(Response(200, b"", []))

    def _hand_on(self, request: Any, *_: Any) -> None:
        self.now, self.handed_on = self.now + self.took("Core"), self.handed_on + 1
        request.over = True
        self._learn(request, answered=True)
        request.reply(None)


@pytest.mark.parametrize(
    ("share", "mbit", "edge", "core"), [(1.0, 100, 2.3, 3.3), (0.25, 10, 10.8, 12.8), (0.25, 100, 12.2, 3.6)]
)
def test_a_box_whose_requests_take_long_at_times_hands_on_only_where_the_core_is_sooner_on_average(
    monkeypatch: pytest.MonkeyPatch, share: float, mbit: float, edge: float, core: float
) -> None:
    """As measured, in milliseconds: a whole processor takes three times as long for one row in five, and at times 8 ms
    more. A limited one is stopped for 75 ms by one request in ten."""
    draw = random.Random(5)  # fixed: the bound is that of this stream
    monkeypatch.setattr("offramp_worker.edge.relay.random", draw.random)

    def took(by: str) -> float:
        if share < 1.0:
            at_times, rest = (75.0, edge - 7.5) if by == "Edge" else (0.0, core)
            return 1e-3 * (rest * draw.lognormvariate(-0.02, 0.2) + (at_times if draw.random() < 0.1 else 0.0))
        held_up = draw.expovariate(1 / 8.0) if draw.random() < 0.03 else 0.0
        slow = 2.1 if draw.random() < 0.2 else 0.725
        own = (edge - 0.24) * slow if by == "Edge" else core - 0.24 + slow - 1.0
        return 1e-3 * (own * draw.lognormvariate(-0.06, 0.35) + held_up)

    handed_on, n = 0, 2400
    for _ in range(4):
        relay = Timed(Uplink(mbit * 1.25e5, 0.0005), took)
        for _ in range(n):
            relay.answer("", [], bytes(14_000), lambda _: None)
        handed_on += relay.handed_on
    later = handed_on if edge < core else 4 * n - handed_on
    assert later < 0.1 * 4 * n


def test_stops_longer_than_a_period_are_not_in_a_row_where_usual_requests_came_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request in five takes 0.2 s, the others 5 ms: 44 on average, and the core takes 60."""
    draw = random.Random(5)  # fixed: the bound is that of this stream
    monkeypatch.setattr("offramp_worker.edge.relay.random", draw.random)

    def took(by: str) -> float:
        own = 0.2 if draw.random() < 0.2 else 0.005 * draw.uniform(0.8, 1.2)
        return own if by == "Edge" else 0.06 * draw.uniform(0.95, 1.05)

    relay = Timed(Uplink(1.25e7, 0.0005), took)
    for _ in range(6000):
        relay.answer("", [], bytes(14_000), lambda _: None)
    assert relay.handed_on < 0.05 * 6000


def test_a_box_whose_requests_wait_before_they_are_read_hands_on(
    bundle_dir: Path, core: WorkerProcess, tmp_path: Path
) -> None:
    """As with a limit of its processor: by the clock its own way takes no time."""
    x = bundles.inputs(20, seed=5)

    async def story(edge: Edge) -> None:
        edge.inference.spent = lambda: None
        for i in range(20):
            await edge.ask(x[i : i + 1])
            edge.waited = 1.0 if edge.relayed == 0 else 0.0
        assert edge.relayed == 20 - FIRST

    with_edge(bundle_dir, url(core), tmp_path, story)


def test_what_linux_counts_as_waiting_is_told_once_and_nothing_where_it_does_not_count(tmp_path: Path) -> None:
    counted = tmp_path / "schedstat"
    counted.write_text("100 2000000000 5\n")
    waited = ProcessorWait(counted)
    assert waited() == 0.0
    counted.write_text("900 2500000000 9\n")
    assert waited() == pytest.approx(0.5) and waited() == 0.0
    assert ProcessorWait(tmp_path / "none")() == 0.0
    assert ProcessorWait()() == 0.0


def test_what_a_request_asks_of_the_edge_is_not_handed_on(
    bundle_dir: Path, core: WorkerProcess, tmp_path: Path
) -> None:
    x = bundles.inputs(4, seed=5)

    async def story(edge: Edge) -> None:
        await edge.warm(x)
        for parameters in ({"deadline_ms": 1000}, {"exit": "never"}, {"timeout": 10_000_000}):
            await edge.ask(x[:1], **parameters)
        await edge.ask(x[:1], tier=b"default")
        assert edge.relayed == 0
        await edge.ask(x[:1])
        assert edge.relayed == 1

    with_edge(bundle_dir, url(core), tmp_path, story)


def test_an_edge_that_was_told_what_to_send_hands_nothing_on(
    bundle_dir: Path, core: WorkerProcess, tmp_path: Path
) -> None:
    async def story(edge: Edge) -> None:
        x = bundles.inputs(4, seed=5)
        await edge.warm(x)
        await edge.ask(x[:1])
        assert edge.relayed == 0

    with_edge(bundle_dir, url(core), tmp_path, story, OFFRAMP_RESIDUE="Input")


def test_a_core_that_ends_loses_no_request_and_the_edge_answers(bundle_dir: Path, tmp_path: Path) -> None:
    x = bundles.inputs(30, seed=5)
    with core_of(bundle_dir, **fixed(bundle_dir, tmp_path, THRESHOLDS)) as own:

        async def story(edge: Edge) -> None:
            await edge.warm(x)
            await edge.ask(x[:1])
            assert edge.relayed == 1
            own.process.kill()
            await asyncio.to_thread(own.process.wait)
            replies = [await edge.ask(x[i : i + 1]) for i in range(30)]
            assert edge.relayed == 1 and len(replies) == 30
            assert edge.worker.edge is not None and edge.worker.edge.link.away
            assert edge.relay._rows_here == 0 and edge.relay._bytes_out == 0

        with_edge(bundle_dir, url(own), tmp_path, story, OFFRAMP_OFFLINE="Answer")


def test_a_client_that_goes_away_leaves_nothing_in_line(bundle_dir: Path, core: WorkerProcess, tmp_path: Path) -> None:
    x = bundles.inputs(4, seed=5)

    async def story(edge: Edge) -> None:
        await edge.warm(x)
        body, headers = body_of(x[:1])
        gone, told = list[bool](), list[Response]()
        pending = edge.relay.answer("/v2/models/tiny/infer", headers, body, told.append)
        edge.relay.cancel(pending, gone=lambda: gone.append(True))
        assert gone == [True]
        await edge.ask(x[1:2])
        assert told == [] and edge.relay._rows_here == 0
        assert edge.worker.metrics.request_outcomes()["cancelled"] == 1

        def idle() -> bool:
            return edge.relay._bytes_out == 0

        while not idle():
            await asyncio.sleep(0.001)

    with_edge(bundle_dir, url(core), tmp_path, story)


def test_clients_that_do_not_wait_for_a_slow_core_get_their_answers_from_the_edge(
    bundle_dir: Path, core: WorkerProcess, tmp_path: Path
) -> None:
    x = bundles.inputs(4, seed=5)

    async def story(edge: Edge) -> None:
        await edge.warm(x)
        for _ in range(FIRST):
            await edge.ask(x[:1])
        assert edge.relayed == FIRST
        body, headers = body_of(x[:1])
        for _ in range(40):
            told = list[Response]()
            pending = edge.relay.answer("/v2/models/tiny/infer", headers, body, told.append)
            assert pending is not None
            if pending.by == "Edge":
                break
            edge.now += 100.0
            edge.relay.cancel(pending, gone=lambda: None)
            while edge.relay._bytes_out:
                await asyncio.sleep(0.001)
        assert pending.by == "Edge"

    with_edge(bundle_dir, url(core), tmp_path, story)


def test_a_core_that_refuses_requests_is_asked_less_and_less_and_malformed_ones_change_nothing(
    bundle_dir: Path, tmp_path: Path
) -> None:
    x = bundles.inputs(4, seed=5)
    with ScriptedCore(manifest_of(bundle_dir)) as scripted:

        async def story(edge: Edge) -> None:
            assert edge.worker.edge is not None
            link = edge.worker.edge.link
            await edge.warm(x)
            body, headers = body_of(x[:1])
            wrong = body.replace(b'"FP32"', b'"FP64"')
            scripted.says["infer"] = (400, b"{}")
            for _ in range(3):
                got = asyncio.get_running_loop().create_future()
                edge.relay.answer("/v2/models/tiny/infer", headers, wrong, got.set_result)
                assert (await got).status == 400
            assert scripted.asked.count("infer") == 3, "malformed requests of clients are no reason to rest"
            for said in ((400, b"{}"), (503, b"{}"), (200, bytes(10 * REPLY_BYTES))):
                scripted.says["infer"] = said
                edge.relay._failures, edge.now, before = 0, edge.now + 1000.0, scripted.asked.count("infer")
                for _ in range(30):  # of a second each
                    await edge.ask(x[:1])
                assert 3 <= scripted.asked.count("infer") - before <= 6, said
                assert not link.away, "it is there, and only does not answer these"

        with_edge(bundle_dir, scripted.url, tmp_path, story)


def test_a_request_whose_reply_may_be_large_is_answered_by_the_edge(
    bundle_dir: Path, core: WorkerProcess, tmp_path: Path
) -> None:
    async def story(edge: Edge) -> None:
        x = bundles.inputs(4, seed=5)
        await edge.warm(x)
        await edge.ask(x[:1], outputs=[{"name": "logits"}, {"name": "label"}])
        assert edge.relayed == 1
        await edge.ask(x[:1], outputs=[{"name": "logits"}] * 300)
        assert edge.relayed == 1

    with_edge(bundle_dir, url(core), tmp_path, story)


# --- the core's side ---------------------------------------------------------------------------------


def post(core: WorkerProcess, x: np.ndarray, **headers: str) -> httpx.Response:
    body, length = body_of(x)
    manifest = manifest_of(core.bundle)
    told = {
        "inference-header-content-length": length[0][1].decode(),
        DIGEST_HEADER: manifest.backbone_digest,
        RAMPS_HEADER: manifest.ramp_set_digest,
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return core.public.post("/v2/models/tiny/infer", content=body, headers=told | named)


def exits_of(reply: httpx.Response, n: int) -> list[str]:
    assert reply.status_code == 200, reply.text
    length = reply.headers.get("inference-header-content-length")
    told = json.loads(reply.content[: None if length is None else int(length)])
    return exits(told, n)


def test_a_core_answers_by_its_exits_only_where_they_are_those_of_the_plan_that_the_edge_names(
    bundle_dir: Path, core: WorkerProcess
) -> None:
    x = bundles.inputs(40, seed=5)
    mine, other = plan_for(bundle_dir, THRESHOLDS), plan_for(bundle_dir, OTHER)
    same = post(core, x, **{PLAN_HEADER: mine.content_hash})
    assert set(exits_of(same, 40)) != {"final"}
    assert same.headers[DIGEST_HEADER] == manifest_of(bundle_dir).backbone_digest
    for plan in (other.content_hash, "", "x" * 4000):
        assert set(exits_of(post(core, x, **{PLAN_HEADER: plan}), 40)) == {"final"}


def test_a_core_with_other_weights_answers_no_request_of_an_edge(bundle_dir: Path, core: WorkerProcess) -> None:
    plan = {PLAN_HEADER: plan_for(bundle_dir, THRESHOLDS).content_hash}
    for name in (DIGEST_HEADER, RAMPS_HEADER):
        refused = post(core, bundles.inputs(1, seed=5), **plan, **{name: "sha256:" + "0" * 64})
        assert refused.status_code == 409 and name in refused.json()["error"]


def test_a_worker_that_is_no_core_takes_such_a_header_for_nothing(bundle_dir: Path, tmp_path: Path) -> None:
    with WorkerProcess(bundle_dir, control_plane=False, env=fixed(bundle_dir, tmp_path, THRESHOLDS)) as worker:
        reply = post(worker, bundles.inputs(40, seed=5), **{PLAN_HEADER: "none"})
        assert set(exits_of(reply, 40)) != {"final"}
        assert DIGEST_HEADER not in reply.headers


def test_what_was_handed_on_is_answered_by_no_deadline_of_the_core_and_by_no_plan_that_comes_while_it_waits(
    bundle_dir: Path, tmp_path: Path
) -> None:
    x, mine = bundles.inputs(40, seed=5), plan_for(bundle_dir, OTHER)
    manifest = manifest_of(bundle_dir)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = fixed(bundle_dir, tmp_path / "one", OTHER)
    second = fixed(bundle_dir, tmp_path / "two", {"r01-grid": "0.99"})["OFFRAMP_FIXED_PLAN"]
    env = {"OFFRAMP_BUNDLE": str(bundle_dir), "OFFRAMP_EDGES": "true", "OFFRAMP_STATE_DIR": str(tmp_path)} | first
    env |= {"OFFRAMP_DEADLINE_ANSWERS": "always", "OFFRAMP_LATENCY_SECONDS": "0.0001"}
    prepared = list[Any]()

    class Prepared(ClassifierPlans):
        def activate(self, active: Any) -> None:
            prepared.append(active)

    async def main() -> None:
        front = Front(asyncio.get_running_loop())
        core = InferenceWorker(settings_from_env(env), deliver=front.deliver, on_lost=lambda _: None)
        await asyncio.to_thread(core.load)
        assert core.engine is not None
        take_fixed_plan(Path(second), Prepared(core.engine), core.memory)
        inference = Inference(core, front)
        body, headers = body_of(x)
        digests = {DIGEST_HEADER: manifest.backbone_digest, RAMPS_HEADER: manifest.ramp_set_digest}
        named = digests | {PLAN_HEADER: mine.content_hash}
        headers += [(name.encode(), value.encode()) for name, value in named.items()]

        async def told(*, change: bool) -> list[str]:
            got = asyncio.get_running_loop().create_future()
            inference.answer("/v2/models/tiny/infer", headers, body, got.set_result)
            if change:
                core.engine.activate(prepared[0])
            return exits(read(await asyncio.wait_for(got, 30)), 40)

        counter = core.engine.active.stable.counter
        left = await told(change=False)
        assert 0 < left.count("r02-linear") < 40 and set(left) == {"r02-linear", "final"}
        answer = await told(change=True)
        assert set(answer) == {"final"}
        core.drain()
        await asyncio.to_thread(core.finish, seconds=5.0)
        assert counter.requests == 40, "of both plans' epoch: those that its exits must not answer count for no plan"

    asyncio.run(main())
