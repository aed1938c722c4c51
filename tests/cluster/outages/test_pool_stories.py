"""Workers in pools on a real node, under traffic: a pool loses its nodes and gets them back; one has a bundle of its
own; a price changes; two services compete for the last workers; a burst comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import identity_bundle  # type: ignore[import-not-found]
import numpy as np
import pytest
from stage import GROUP, Json, Stage  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

LABEL = "pools.example.com/size"
Labeled = Callable[[bool], None]


@pytest.fixture
def labeled(stage: Stage) -> Iterator[Labeled]:
    """Gives the one node the label of a pool, or takes it away."""
    node = stage.api.get("/api/v1/nodes")["items"][0]["metadata"]["name"]

    def label(there: bool) -> None:
        labels = {LABEL: stage.namespace if there else None}
        stage.api.merge(f"/api/v1/nodes/{node}", {"metadata": {"labels": labels}})

    yield label
    label(False)


def test_a_pool_loses_its_nodes_and_the_other_serves_until_they_are_back(stage: Stage, labeled: Labeled) -> None:
    labeled(True)
    stage.operate()
    resources = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}}
    stage.serve(
        replicas=None,
        ramps={"mode": "Disabled"},
        pools=[
            {"name": "fast", "replicas": 1, "nodeSelector": {LABEL: stage.namespace}},
            {"name": "steady", "replicas": 1, "resources": resources},
        ],
    )
    stage.send(20.0)
    stage.until("what workers of each pool can do", lambda: all(pool(stage, p).get("workerRate") for p in POOLS))
    measured = {name: pool(stage, name)["workerRate"] for name in POOLS}
    stage.until("how long they took to start", lambda: all(sum(pool(stage, p)["startup"].values()) for p in POOLS))
    (lost,) = in_pool(stage, "fast")

    labeled(False)
    stage.api.delete(f"/api/v1/namespaces/{stage.namespace}/pods/{lost['metadata']['name']}")  # as a drain does
    stage.until("the complaint", lambda: stage.condition("PoolsAvailable").get("status") == "False")
    told = stage.condition("PoolsAvailable")["message"]
    assert told.startswith("spec.pools[0] (fast): 0 of 1 workers ready; ") and "spec.pools[0].nodeSelector" in told
    assert stage.condition("Ready")["status"] == "True" and pool(stage, "fast")["workerRate"] == measured["fast"]

    labeled(True)
    stage.until("the pool's worker", lambda: pool(stage, "fast").get("ready") == 1 and len(in_pool(stage, "fast")) == 1)
    stage.until("the end of the complaint", lambda: not stage.condition("PoolsAvailable"))
    stage.check()


def test_a_pool_with_a_bundle_of_its_own_runs_the_plans_of_the_others_and_never_another_model(
    stage: Stage, images: Any
) -> None:
    def pools(own: str) -> list[Json]:
        return [
            {"name": "steady", "replicas": 1, "model": {"uri": f"oci://{own}"}},
            {"name": "fast", "replicas": 1},
        ]

    stage.operate()
    stage.serve(replicas=None, pools=pools(images.elsewhere))
    stage.send()
    stage.until("a plan that all workers run", lambda: stage.phase("Succeeded") and stage.settled())
    assert stage.status()["workers"]["acked"] == 2 and not stage.condition("WorkersQuarantined")
    assert all(pool(stage, name)["workerRate"] for name in POOLS)

    served = {p["metadata"]["uid"] for p in in_pool(stage, "steady")}
    stage.apply(pools=pools(images.changed))
    refused = "spec.pools[0].model.uri: manifest.json: backbone_digest is "
    stage.until("the refusal", lambda: refused in stage.condition("Reconciling").get("message", ""))
    assert stage.condition("Ready")["status"] == "True" and pool(stage, "steady")["ready"] == 1

    stage.serve(pools=pools(images.elsewhere))
    assert {p["metadata"]["uid"] for p in in_pool(stage, "steady")} == served
    stage.check()


def test_a_price_that_changes_moves_workers_and_loses_no_request(stage: Stage) -> None:
    stage.operate()
    stage.serve(replicas=None, ramps={"mode": "Disabled"}, pools=priced(fast="1", steady="0.1"))
    stage.send(20.0)
    stage.until("the cheaper pool alone", lambda: planned(stage) == {"fast": (0, 0, 0), "steady": (1, 1, 1)})
    stage.apply(pools=priced(fast="0.01", steady="1"))
    stage.until("the other pool alone", lambda: planned(stage) == {"fast": (1, 1, 1), "steady": (0, 0, 0)})
    notes = [event["message"] for event in stage.events("PoolsPlanned")]
    assert any("fast 1 (was 0)" in note and "0.01 an hour" in note for note in notes), notes
    stage.check()


def test_two_services_compete_for_the_last_workers_of_a_class(stage: Stage, three_in_all: str) -> None:
    stage.operate()
    own = {"name": "fast", "className": three_in_all, "costPerHour": "1", "maxWorkers": 3}
    stage.serve(replicas=None, ramps={"mode": "Disabled"}, pools=[{**own, "minWorkers": 2}])
    stage.send(20.0)
    stage.until("two workers", lambda: planned(stage) == {"fast": (2, 2, 2)})

    other = {**stage.manifest, "metadata": {"name": "other", "namespace": stage.namespace}}
    stage.api.apply(stage.path.replace("/tiny", "/other"), other)
    stage.until("the last worker", lambda: planned(stage, "other") == {"fast": (1, 1, 1)})
    told = stage.until("the complaint", lambda: condition(stage, "other", "PoolsAvailable"))
    assert (told["status"], told["reason"]) == ("False", "WorkerClassFull")
    assert told["message"].startswith("spec.pools[0] (fast) has 1 of the 2 workers that it needs: ")
    stage.send(20.0, url=f"http://other.{stage.namespace}.svc.cluster.local")

    stage.apply(pools=[{**own, "minWorkers": 1}])
    stage.until("one that goes", lambda: planned(stage) == {"fast": (1, 1, 1)})
    stage.until("one that comes", lambda: planned(stage, "other") == {"fast": (2, 2, 2)})
    stage.until("the end of the complaint", lambda: not condition(stage, "other", "PoolsAvailable"))
    assert most_at_once(stage) == 3
    stage.check()


@pytest.fixture
def three_in_all(stage: Stage) -> Iterator[str]:
    """A WorkerClass that has three workers for all services."""
    made = {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "WorkerClass", "metadata": {"name": stage.namespace}}
    stage.api.post(f"{GROUP}/workerclasses", made | {"spec": {"maxWorkers": 3}})
    yield stage.namespace
    stage.api.delete(f"{GROUP}/workerclasses/{stage.namespace}")


QUIET = 0.6  # of what a worker is measured to answer with exits off


def test_a_burst_of_four_times_is_answered_by_other_thresholds_before_any_worker_starts_and_then_by_workers(
    stage: Stage, images: Any
) -> None:
    """The ramps err too often for the usual budget to let many leave, so that a worker cannot answer the burst by it;
    under overload it can. What it answers is measured in this run, right before the burst."""
    resources = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}}
    stage.operate()
    stage.serve(
        model={"uri": f"oci://{images.unsure}"},
        objective={
            "latency": {"threshold": "1s"},
            "accuracy": {"maxDisagreement": "0.2"},
            "overload": {"maxDisagreement": "0.5"},
        },
        execution="ComputeSaving",
        rollout={"steps": [{"weight": 100}], "confidence": "0.9"},
        replicas=None,
        pools=[{"name": "fast", "costPerHour": "1", "maxWorkers": 3, "resources": resources}],
    )
    rate = lambda: float(pool(stage, "fast").get("workerRate", 0))  # noqa: E731
    rows = stage.folder / "rows.npy"
    np.save(rows, identity_bundle.inputs(2000))  # labels of the same few would be worth little
    labels = stage.send(QUIET * stage.until("what a worker answers", rate), rows=rows)
    stage.until("two plans", lambda: stage.phase("Succeeded") and overload(stage).get("state") == "Exits")
    labels.stop()
    quiet = QUIET * rate()
    stage.send(quiet, rows=rows)
    stage.until("calm", lambda: not overload(stage).get("workers") and settled(stage))
    before = {p["metadata"]["uid"] for p in stage.pods()}

    burst = stage.send(3 * quiet, rows=rows)
    stage.until("overload", lambda: overload(stage).get("sinceAt"))
    stage.until("more workers", lambda: settled(stage) and planned(stage)["fast"][0] > len(before))
    sent = burst.stop()
    started = min(started_at(p) for p in stage.pods() if p["metadata"]["uid"] not in before)
    switched, waited = sent["eased_at"] - sent["began"], started - sent["began"]
    print(f"the first answer by other thresholds after {switched:.2f} s, the first worker after {waited:.1f} s")
    assert switched < waited
    assert sent["eased"] > sent["answered"] / 4
    stage.until("the end of overload", lambda: not overload(stage).get("workers") and stage.events("OverloadEnded"))
    assert stage.events("OverloadBegan")
    stage.check()


POOLS = ("fast", "steady")


def priced(**costs: str) -> list[Json]:
    return [{"name": name, "costPerHour": cost, "maxWorkers": 1} for name, cost in costs.items()]


def planned(stage: Stage, service: str = "tiny") -> dict[str, tuple[int, int, int]]:
    """Workers that are planned, asked for and ready, by pool."""
    pools = status(stage, service).get("pools", ())
    return {p["name"]: (p.get("planned", 0), p.get("desired", 0), p.get("ready", 0)) for p in pools}


def pool(stage: Stage, name: str) -> Json:
    return next((dict(p) for p in stage.status().get("pools", ()) if p["name"] == name), {})


def overload(stage: Stage) -> Json:
    return next((dict(t) for t in stage.status().get("tiers", ()) if t["name"] == "overload"), {})


def settled(stage: Stage) -> bool:
    """Whether as many workers are ready as are planned."""
    return len(set(planned(stage)["fast"])) == 1


def seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def started_at(pod: Json) -> float:
    return seconds(pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"])


def in_pool(stage: Stage, name: str) -> list[Json]:
    return [p for p in stage.pods() if p["metadata"]["labels"]["earlyexit.dev/pool"] == name]


def status(stage: Stage, service: str) -> Json:
    return dict(stage.history.now("service").get(service, {}).get("status") or {})


def condition(stage: Stage, service: str, kind: str) -> Json:
    return next((dict(c) for c in status(stage, service).get("conditions", ()) if c["type"] == kind), {})


def most_at_once(stage: Stage) -> int:
    """Workers that there ever were at a time, those that were ending not counted."""
    there, most = set[str](), 0
    for _, kind, event, pod in stage.history.seen:
        if kind == "pod":
            gone = event == "DELETED" or pod["metadata"].get("deletionTimestamp")
            (there.discard if gone else there.add)(pod["metadata"]["uid"])
            most = max(most, len(there))
    return most
