"""A model of a pool that nobody asks for leaves its worker's memory and comes back with the next request, and nothing
is lost: each a story with a real process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import httpx
import msgspec
import numpy as np
import pytest
from processes import document, eventually, infer_json, plan_for
from test_shared_delivered import Pooled, claim, made, placed, pooled

from offramp_core.protocol import ArmCounts, Observations

pytestmark = pytest.mark.slow
__all__ = ["claim", "made"]


def seen_of(worker: Pooled, name: str) -> Observations:
    reply = worker.admin.get(f"/models/{name}/v1/observations", params={"after": "0"}).raise_for_status()
    return msgspec.json.decode(reply.content, type=Observations)


def counts_of(worker: Pooled, name: str) -> dict[int, ArmCounts]:
    return {count.epoch: count for count in seen_of(worker, name).counts}


def sent_to(claim: Path, name: str, **fields: Any) -> Any:
    plan = plan_for(claim / name, {"r00-grid": "0.5"})
    return document(
        plan, **{"epoch": 4, "service_uid": f"uid-{name}", "audit_rate": 1.0, "accuracy_budget": 0.9, **fields}
    )


@pytest.fixture(scope="module")
def worker(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooled]:
    """One for several stories, each about another of its three models."""
    claim = Path(shutil.copytree(made, tmp_path_factory.mktemp("unloading") / "claim"))
    with pooled(claim, env={"OFFRAMP_LOAD_WAITING": "8"}) as worker:
        worker.tell(placed("a"), placed("b"), placed("c"))
        eventually(worker.is_ready, what="readiness")
        yield worker


def rest(worker: Pooled, *names: str) -> None:
    """These leave memory once nobody has asked for them for a moment."""
    worker.tell(*(placed(name, unload_after_seconds=0.3 if name in names else None) for name in "abc"))


def test_what_nobody_asks_for_leaves_memory_and_comes_back_as_it_was(worker: Pooled, made: Path) -> None:
    x = bundles.inputs(3)
    worker.deliver_to("a", sent_to(made, "a")).raise_for_status()
    answer = worker.answer("a", x)
    assert answer["parameters"]["epoch"] == 4
    rest(worker, "a")
    for times in (1, 2):
        held = worker.until("uid-a", "Unloaded", mark="1", message="", wanted=False)
        assert held.bytes > 0 and held.load_seconds > 0
        assert worker.metric("earlyexit_model_unloads_total", model="a") == times
        assert worker.metric("earlyexit_model_loaded", model="a") == 0
        state, seen = worker.state_of("a"), seen_of(worker, "a")
        assert (state.ready, state.epoch) == (True, 4)
        assert seen.records.next == 3 * times, "all audits were done before"
        assert counts_of(worker, "a")[4].requests == 3 * times
        stale = worker.deliver_to("a", sent_to(made, "a", epoch=3))
        assert (stale.status_code, stale.json()["reason"]) == (409, "StaleEpoch")
        again = worker.answer("a", x)
        assert again["parameters"] == answer["parameters"], "the plan is in force from the first request on"
        np.testing.assert_array_equal(again["logits"], answer["logits"])
        assert worker.state_of("a").boot_id == state.boot_id
    assert worker.metric("earlyexit_model_cold_requests_total", model="a", outcome="waited") == 2
    assert worker.held()["uid-b"].standing == "Serving"


def test_a_flood_of_first_requests_waits_within_the_bound_and_the_rest_is_told_when_to_come(worker: Pooled) -> None:
    body = infer_json(bundles.inputs(1))
    rest(worker, "b")
    worker.until("uid-b", "Unloaded")

    def ask(_: int) -> httpx.Response:
        return httpx.post(worker.public.base_url.join("/v2/models/b/infer"), json=body, timeout=60)

    with ThreadPoolExecutor(32) as clients:
        replies = list(clients.map(ask, range(32)))
    refused = [reply for reply in replies if reply.status_code != 200]
    assert len(replies) - len(refused) >= 8, "those who wait, and those who come later"
    assert {reply.status_code for reply in refused} <= {503}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert worker.metric("earlyexit_model_cold_requests_total", outcome="refused", model="b") == len(refused)


def test_a_canary_keeps_its_model_in_memory(worker: Pooled, made: Path) -> None:
    off, exits = plan_for(made / "c"), plan_for(made / "c", {"r00-grid": "0.5"})
    canary = document(off, epoch=1, service_uid="uid-c", canary=exits, weight=50)
    worker.deliver_to("c", canary).raise_for_status()
    rest(worker, "a", "c")
    worker.until("uid-a", "Unloaded")
    assert worker.held()["uid-c"].standing == "Serving", "though nobody has asked for it for as long"
    worker.deliver_to("c", document(off, epoch=2, service_uid="uid-c")).raise_for_status()
    worker.until("uid-c", "Unloaded")
    rest(worker)
    worker.until("uid-c", "Serving")


def test_an_unload_by_hand_of_what_is_at_rest_holds_against_requests(worker: Pooled) -> None:
    rest(worker, "b")
    worker.until("uid-b", "Unloaded")
    worker.unload("b").raise_for_status()
    assert worker.held()["uid-b"].standing == "Failed"
    refused = worker.ask("b", bundles.inputs(1))
    assert refused.status_code == 503 and "unloaded by hand" in refused.json()["error"]
    assert not worker.state_of("b").ready
    worker.load("b").raise_for_status()
    worker.answer("b", bundles.inputs(1))


def test_the_room_of_what_has_left_is_others_and_who_finds_none_asks_for_it(claim: Path) -> None:
    for name in "abc":
        with (claim / name / "notes.bin").open("wb") as file:
            file.truncate(40_000_000)
    with pooled(claim, env={"OFFRAMP_MODELS_BYTES": "100000000"}) as worker:
        resting = placed("a", unload_after_seconds=0.3)
        worker.tell(resting, placed("b"))
        eventually(worker.is_ready, what="readiness")
        worker.until("uid-a", "Unloaded")
        worker.tell(resting, placed("b"), placed("c"))
        worker.until("uid-c", "Serving")
        refused = worker.ask("a", bundles.inputs(1))
        assert refused.status_code == 503 and refused.headers["retry-after"] == "30"
        assert "no room" in refused.json()["error"]
        assert worker.held()["uid-a"].standing == "Unloaded" and worker.held()["uid-a"].wanted
        worker.tell(resting, placed("c"))
        eventually(lambda: worker.ask("a", bundles.inputs(1)).status_code == 200, what="room")
        assert not worker.held()["uid-a"].wanted


def test_a_place_may_be_taken_without_a_load_and_a_worker_that_starts_again_keeps_it_so(claim: Path) -> None:
    resting = placed("a", unload_after_seconds=600.0, at_rest=True)
    with pooled(claim) as worker:
        worker.tell(resting, placed("b"))
        eventually(worker.is_ready, what="readiness")
        held = worker.until("uid-a", "Unloaded", mark="1", model="a")
        assert (held.bytes, held.load_seconds) == (0, 0.0), "nothing is known of it yet"
        worker.deliver_to("a", sent_to(claim, "a")).raise_for_status()
        state = worker.state_of("a")
        assert (state.epoch, state.ready) == (4, True) and state.ramps and state.costs, (
            "its bundle was read and verified"
        )
        assert worker.held()["uid-a"].standing == "Unloaded"
        worker.process.kill()
        worker.process.wait()
    with pooled(claim, wait_ready=True) as worker:
        worker.epoch = 10
        assert worker.held()["uid-a"].standing == "Unloaded"
        stale = worker.deliver_to("a", sent_to(claim, "a", epoch=3))
        assert (stale.status_code, stale.json()["reason"]) == (409, "StaleEpoch")
        worker.deliver_to("a", sent_to(claim, "a")).raise_for_status()
        assert worker.answer("a", bundles.inputs(1))["parameters"]["epoch"] == 4
        assert worker.held()["uid-a"].standing == "Serving"
        worker.tell(replace(resting, at_rest=False), placed("b"))
        assert worker.held()["uid-a"].standing == "Serving"
