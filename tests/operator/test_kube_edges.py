"""What workers at the edge and their core look like in a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from offramp_core.control.objects import Service
from offramp_core.control.spec import parse_spec
from offramp_operator.kube.manifests import (
    DeliverySettings,
    OperatorPods,
    WorkerSettings,
    deployment,
    disruption_budget,
    edges_network_policy,
    edges_service,
    network_policy,
    network_service,
    template_digest,
)
from offramp_operator.kube.pools import in_pools, take_over
from offramp_operator.shell.platform import WorkerIdentity
from offramp_worker.settings import Settings, settings_from_env

SETTINGS = WorkerSettings("offramp/worker:1")
IDENTITY = WorkerIdentity("cHVibGljLWtleS1vZi0zMi1ieXRlcy0wMDAwMDAwMDA=", "0" * 64)
POOLS = [{"name": "box", "replicas": 2}, {"name": "core", "replicas": 1}, {"name": "spot", "replicas": 1}]
EDGE = {"pool": "box", "uplink": "10Mbit", "residue": "Input", "offline": "Answer"}


def service(**spec: Any) -> Service:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    given = {"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, "pools": POOLS, **spec}
    return Service("shop", "digits", "uid-1", 3, parse_spec(given))


def deployments(**spec: Any) -> dict[str, Any]:
    """By pool, in the order in which they are changed."""
    return {
        each.spec.in_pool: deployment(each, IDENTITY, SETTINGS, replicas=each.spec.replicas)
        for each in in_pools(service(**spec))
    }


def labels(made: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = made["spec"]["template"]["metadata"]["labels"]
    return found


def settings(made: dict[str, Any]) -> Settings:
    """As the worker itself reads what it is told."""
    [container] = made["spec"]["template"]["spec"]["containers"]
    return settings_from_env({e["name"]: e["value"] for e in container["env"] if "value" in e})


def selects(selector: dict[str, Any], made: dict[str, Any]) -> bool:
    """Whether a NetworkPolicy or a disruption budget finds the pods of a Deployment."""
    return all(labels(made).get(key) == value for key, value in selector["matchLabels"].items()) and all(
        labels(made).get(asked["key"]) in asked["values"] for asked in selector.get("matchExpressions", ())
    )


def test_workers_of_the_named_pool_have_the_others_as_their_core() -> None:
    made = deployments(edge=EDGE)
    edge = settings(made["box"]).edge
    assert edge is not None and not settings(made["box"]).takes_edges
    assert (edge.core, edge.uplink, edge.residue, edge.offline) == (
        "http://digits.shop.svc",
        1.25e6,
        "Input",
        "Answer",
    )
    for name in ("core", "spot"):
        assert settings(made[name]).takes_edges and settings(made[name]).edge is None
    assert all(s.edge is None and not s.takes_edges for s in map(settings, deployments().values()))


def test_the_services_own_service_finds_the_core_alone_and_edges_have_one_of_theirs() -> None:
    made = deployments(edge=EDGE)
    own = network_service(service(edge=EDGE))["spec"]["selector"]
    assert [name for name in made if own.items() <= labels(made[name]).items()] == ["core", "spot"]
    edges = edges_service(service(edge=EDGE))
    assert edges["metadata"]["name"] == "digits-edges"
    chosen = edges["spec"]["selector"]
    assert [name for name in made if chosen.items() <= labels(made[name]).items()] == ["box"]


def test_a_pool_that_becomes_the_edge_has_other_pods_and_the_core_is_asked_for_edges_in_place() -> None:
    before, after = deployments(), deployments(edge=EDGE)
    assert before["box"]["metadata"]["name"] != after["box"]["metadata"]["name"]
    assert not before["box"]["spec"]["selector"]["matchLabels"].items() <= labels(after["box"]).items()
    for name in ("core", "spot"):
        assert before[name]["spec"]["selector"] == after[name]["spec"]["selector"]


def test_workers_at_the_edge_come_last() -> None:
    assert list(deployments(edge=EDGE)) == ["core", "spot", "box"]
    assert list(deployments()) == ["box", "core", "spot"]


def test_the_fence_around_admin_ports_is_of_edges_as_well_even_those_that_nobody_asks_for_any_more() -> None:
    made, operator = deployments(edge=EDGE), OperatorPods("offramp-system", {"a": "b"})
    for asked in (service(edge=EDGE), service()):
        policy = network_policy(asked, operator, allow_egress=False, delivery=DeliverySettings())
        assert all(selects(policy["spec"]["podSelector"], each) for each in made.values())


def test_core_and_edges_are_drained_by_budgets_of_their_own() -> None:
    made = deployments(edge=EDGE)
    for edges, drained in ((False, ["core", "spot"]), (True, ["box"])):
        budget = disruption_budget(service(edge=EDGE), edges=edges)["spec"]["selector"]
        assert [name for name in made if selects(budget, made[name])] == drained


def test_edges_connect_to_names_and_their_core_and_nothing_else() -> None:
    made, policy = deployments(edge=EDGE), edges_network_policy(service(edge=EDGE))["spec"]
    assert policy["policyTypes"] == ["Egress"]
    assert [name for name in made if selects(policy["podSelector"], made[name])] == ["box"]
    names, core = policy["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    [to] = core["to"]
    assert [name for name in made if selects(to["podSelector"], made[name])] == ["core", "spot"]
    assert [port["port"] for port in core["ports"]] == ["http"]


@pytest.mark.parametrize("name", ["box", "core", "spot"])
def test_without_an_edge_pods_are_as_they_were(name: str) -> None:
    [plain] = [each for each in in_pools(service()) if each.spec.in_pool == name]
    [at_edge] = [each for each in in_pools(service(edge=EDGE)) if each.spec.in_pool == name]
    assert template_digest(plain, SETTINGS) != template_digest(at_edge, SETTINGS)
    assert not any(
        e["name"] in ("OFFRAMP_CORE", "OFFRAMP_EDGES", "OFFRAMP_RESIDUE", "OFFRAMP_OFFLINE")
        for e in deployments()[name]["spec"]["template"]["spec"]["containers"][0]["env"]
    )


def test_workers_of_before_go_once_core_and_edges_are_there() -> None:
    available = {"metadata": {"generation": 1}, "status": {"observedGeneration": 1, "availableReplicas": 2}}
    with_edge = service(edge=EDGE)
    assert take_over(with_edge, {"box": available, "core": available, "spot": available}, None)
    assert not take_over(with_edge, {"box": None, "core": available, "spot": available}, None)
    assert not take_over(with_edge, {"box": available, "core": available, "spot": None}, None)
