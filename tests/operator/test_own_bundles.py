"""Pools with a bundle of their own: how their workers are made, and what holds them to the model of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from offramp_core.control.objects import ModelStatus, Service, ServiceStatus
from offramp_core.control.snapshot import Trouble
from offramp_core.control.spec import parse_spec
from offramp_core.errors import OR_ANOTHER_MODEL
from offramp_operator.kube.kinds import DEPLOYMENT, REPLICA_SET, Kind
from offramp_operator.kube.manifests import OperatorPods, WorkerSettings, deployment, model_config_map, network_policy
from offramp_operator.kube.platform.fleet import FleetReader
from offramp_operator.kube.platform.memory import Memory
from offramp_operator.kube.platform.templates import Templates
from offramp_operator.kube.pools import in_pools, in_words_of
from offramp_operator.kube.turns import TurnKeeper
from offramp_operator.kube.worker_class import WorkerClass, with_class
from offramp_operator.shell.platform import ServiceKey, WorkerIdentity

MAIN, CUDA = "oci://offramp/digits@sha256:" + 64 * "0", "oci://offramp/digits-cuda:1"
FOUND = "sha256:" + 64 * "1"
IDENTITY = WorkerIdentity("", "")
GPU = {"limits": {"nvidia.com/gpu": 1}}
POOLS: list[dict[str, Any]] = [
    {"name": "gpu", "replicas": 1, "model": {"uri": CUDA}, "image": "offramp/worker-cuda:1", "resources": GPU},
    {"name": "cpu", "replicas": 2},
]


def service(*, pools: list[dict[str, Any]] = POOLS, status: ServiceStatus | None = None, **model: str) -> Service:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    spec = {"model": {"uri": MAIN, **model}, "objective": objective, "pools": pools}
    return Service("default", "digits", "uid", 1, parse_spec(spec), status or ServiceStatus())


def pods(of: Service) -> dict[str, dict[str, Any]]:
    """The pod template of each pool, in the order in which they are changed."""
    settings = WorkerSettings("offramp/worker:1")
    made = {each.spec.in_pool: deployment(each, IDENTITY, settings, replicas=1) for each in in_pools(of)}
    return {name: body["spec"]["template"]["spec"] for name, body in made.items()}


def held_to(pod: dict[str, Any]) -> Any:
    """The model that a pod must have: a digest, the key of one, or None."""
    (worker,) = pod["containers"]
    entry = next((e for e in worker["env"] if e["name"] == "OFFRAMP_MODEL_DIGEST"), {})
    return entry.get("value") or entry.get("valueFrom", {}).get("configMapKeyRef", {}).get("key")


def test_each_pool_has_its_bundle_and_image_and_the_one_of_the_spec_is_changed_first() -> None:
    made = pods(service())
    assert list(made) == ["cpu", "gpu"]
    bundles = {name: pod["volumes"][0]["image"]["reference"] for name, pod in made.items()}
    images = {name: pod["containers"][0]["image"] for name, pod in made.items()}
    assert bundles == {"cpu": MAIN.removeprefix("oci://"), "gpu": CUDA.removeprefix("oci://")}
    assert images == {"cpu": "offramp/worker:1", "gpu": "offramp/worker-cuda:1"}


def test_a_bundle_of_a_pool_is_held_to_the_model_that_the_bundle_of_the_spec_was_found_to_have() -> None:
    found = service(status=ServiceStatus(models=(ModelStatus(MAIN, FOUND),)))
    data = (model_config_map(found) or {})["data"]
    made = pods(found)
    assert data[held_to(made["gpu"])] == FOUND
    assert held_to(made["cpu"]) is None, "its own URI cannot move"
    assert pods(service()) == made, "what is found replaces no worker"
    assert held_to(pods(service(digest=FOUND))["gpu"]) == FOUND


def test_without_own_bundles_pods_are_what_they_were() -> None:
    plain = [{"name": name, "replicas": 1} for name in ("gpu", "cpu")]
    assert list(pods(service(pools=plain))) == ["gpu", "cpu"]
    assert all(held_to(pod) is None for pod in pods(service(pools=plain)).values())


class Cluster:
    """A cache of workers that were made for ``of``, one in each pool."""

    def __init__(self, of: Service) -> None:
        settings = WorkerSettings("offramp/worker:1")
        made = [deployment(each, IDENTITY, settings, replicas=1) for each in in_pools(of)]
        self._made = [each | {"metadata": each["metadata"] | {"uid": each["metadata"]["name"]}} for each in made]

    def owned(self, kind: Kind, uid: str) -> list[Any]:
        if kind is DEPLOYMENT:
            return self._made
        of = next(each for each in self._made if uid in (each["metadata"]["uid"], f"{each['metadata']['uid']}-set"))
        name = of["metadata"]["name"]
        if kind is REPLICA_SET:
            return [{"metadata": {"name": f"{name}-set", "uid": f"{name}-set"}}]
        pod = of["spec"]["template"]["metadata"] | {"name": f"{name}-pod", "uid": f"{name}-pod"}
        return [{"metadata": pod, "status": {"phase": "Running"}}]

    def autoscalers(self, namespace: str, name: str) -> tuple[Any, ...]:
        return ()


@pytest.mark.parametrize(
    "pools",
    [POOLS, POOLS[1:], [{"name": "gpu", "replicas": 1}, POOLS[1]], [POOLS[0], POOLS[1] | {"model": {"uri": CUDA}}]],
    ids=["as made", "the pool is removed", "its model is removed", "the other pool gets one"],
)
def test_which_bundle_a_worker_has_is_what_it_was_made_with_whatever_the_spec_says_now(
    pools: list[dict[str, Any]],
) -> None:
    third = {"name": "third", "replicas": 1}
    cache: Any = Cluster(service(pools=[*POOLS, third]))
    turns = TurnKeeper(clock=lambda: 0.0, monotonic=lambda: 0.0)
    templates = Templates(cache, WorkerSettings("offramp/worker:1"), turns)
    nothing_rejected: Any = SimpleNamespace(endpoint=lambda *_, **__: None)
    reader = FleetReader(cache, templates, nothing_rejected, monotonic=lambda: 0.0)
    found = reader.endpoints(service(pools=[*pools, third]), Memory("uid"))
    assert {worker.name: worker.own_bundle for worker in found} == {
        "digits-gpu-pod": True,
        "digits-cpu-pod": False,
        "digits-third-pod": False,
    }


@pytest.mark.parametrize(
    ("own", "told"),
    [(True, "spec.pools[1].model.uri or spec.pools[1].image"), (False, "spec.model.uri or spec.pools[1].image")],
)
def test_what_keeps_a_worker_from_running_names_the_fields_of_its_pool(own: bool, told: str) -> None:
    secrets = "name credentials in spec.worker.imagePullSecrets"
    message = f"correct spec.model.uri or spec.worker.image, or {secrets}"
    assert in_words_of(message, 1, own_bundle=own) == f"correct {told}, or {secrets}"


def test_a_bundle_with_another_model_is_told_how_to_get_one_of_the_right_model() -> None:
    told = in_words_of(f"correct spec.model.uri; put that bundle back there, {OR_ANOTHER_MODEL}", 1, own_bundle=True)
    assert told == (
        "correct spec.pools[1].model.uri; put that bundle back there, made from the one of spec.model.uri with "
        "`offramp prepare --remeasure`"
    )


def test_a_pool_has_no_other_image_than_the_administrator_says() -> None:
    found = with_class(service(), WorkerClass("large", "m", {"image": "offramp/worker:9"}))
    assert isinstance(found, Trouble) and found.message.startswith("spec.pools[0].image says something else than")


def test_the_image_of_a_pool_is_no_sign_that_the_administrators_change_has_begun() -> None:
    of = service(status=ServiceStatus(settled_generation=1))
    live = {
        each.spec.in_pool: deployment(each, IDENTITY, WorkerSettings("a/worker:1"), replicas=1) for each in in_pools(of)
    }

    class Cache:
        def get(self, kind: Kind, namespace: str, name: str) -> Any:
            return live[name.removeprefix("digits-")]

        def names(self, kind: Kind) -> list[str]:
            return ["digits", "another"]

    turns = TurnKeeper(clock=lambda: 0.0, monotonic=lambda: 0.0)
    templates = Templates(cast(Any, Cache()), WorkerSettings("a/worker:2"), turns)
    memory = Memory("uid")
    turn = templates.turn(ServiceKey("default", "digits"), of, memory)
    assert turn is not None and memory.image == "a/worker:1" and set(memory.kept) == {"cpu", "gpu"}


def test_workers_may_connect_to_where_the_bundle_of_any_pool_is_fetched() -> None:
    fetched = [POOLS[0] | {"model": {"uri": "https://a.example/b.tar"}}, POOLS[1]]
    operator = OperatorPods("offramp-system", {"a": "b"})
    assert "egress" in network_policy(service(pools=fetched), operator, allow_egress=False)["spec"]
    assert "egress" not in network_policy(service(), operator, allow_egress=False)["spec"]
