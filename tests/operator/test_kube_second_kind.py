"""A second managed kind is one entry: the operator's process watches, queues, fences and reconciles it as it does
services."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from offramp_operator.kube.kinds import CONFIG_MAP, MANAGED_BY, MANAGED_BY_LABEL, Kind, Object, uid_of
from offramp_operator.kube.managed import Managed, ObjectKey, Reconcile, Right, Seat
from offramp_operator.main import Operator
from offramp_operator.settings import parse_settings
from offramp_operator.shell.signing import SigningKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GREETING = Kind("example.dev", "v1", "Greeting", "greetings")


def greetings() -> Managed:
    """All that the operator has to know of the kind: a greeting is spelled out in a ConfigMap."""

    def begin(seat: Seat) -> Reconcile:
        async def reconcile(key: ObjectKey) -> float | None:
            greeting = seat.cache.get(GREETING, key.namespace, key.name)
            if greeting is None:
                return None
            text, known = f"hello, {greeting['spec']['name']}", seat.cache.get(CONFIG_MAP, key.namespace, key.name)
            if known is None or known["data"] != {"text": text}:
                body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _owned(greeting), "data": {"text": text}}
                seat.cache.put(CONFIG_MAP, await seat.client.apply(CONFIG_MAP, body))
            return None

        return reconcile

    rights = (Right(GREETING, "get list watch"), Right(CONFIG_MAP, "get list watch patch"))
    return Managed(GREETING, begin, rights, children=(CONFIG_MAP,))


def _owned(greeting: Object) -> Object:
    owner = {
        "apiVersion": GREETING.api_version,
        "kind": GREETING.name,
        "name": greeting["metadata"]["name"],
        "uid": uid_of(greeting),
        "controller": True,
    }
    names = {name: greeting["metadata"][name] for name in ("name", "namespace")}
    return {**names, "labels": {MANAGED_BY_LABEL: MANAGED_BY}, "ownerReferences": [owner]}


def _definition() -> Object:
    spec = {"type": "object", "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}
    names = {"plural": GREETING.plural, "kind": GREETING.name, "singular": "greeting"}
    version = {"name": GREETING.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": spec}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{GREETING.plural}.{GREETING.group}"},
        "spec": {"group": GREETING.group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


@pytest.fixture
def environment(api: Any, namespace: str, free_port: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    # The client reads the variable when it is imported, which it is by now.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(api.kubeconfig))
    return {
        "OFFRAMP_LEASE_NAMESPACE": namespace,
        "OFFRAMP_LEASE_NAME": "second-kind",
        "OFFRAMP_PORT": str(free_port()),
        "OFFRAMP_WORKER_IMAGE": "offramp/worker:1",
        "OFFRAMP_SIGNING_KEY_FILE": "unused",
    }


def test_a_second_kind_is_reconciled_beside_services(
    api: Any, manifests: Any, namespace: str, tools: Any, environment: dict[str, str]
) -> None:
    assert api.create(_definition(), keep=True).status_code == 201
    greeting = {
        "apiVersion": "example.dev/v1",
        "kind": "Greeting",
        "metadata": {"name": "first", "namespace": namespace},
    }
    service = manifests.service()
    service["metadata"]["namespace"] = namespace
    child = f"/api/v1/namespaces/{namespace}/configmaps/first"
    workers = f"/apis/apps/v1/namespaces/{namespace}/deployments/digits"

    def text() -> str:
        return str(api.request("GET", child).json().get("data", {}).get("text"))

    async def story() -> None:
        operator = Operator(
            parse_settings(environment), SigningKey(b"k" * 32), on_lost=pytest.fail, more=(greetings(),)
        )
        served = f"/apis/{GREETING.api_version}/{GREETING.plural}"
        await tools.eventually(lambda: api.request("GET", served).status_code == 200, what="the kind being served")
        running = asyncio.create_task(operator.run())
        api.create(greeting | {"spec": {"nobody": 1}}, keep=True)  # its pass fails, and is tried again
        api.create(service, keep=True)
        await tools.eventually(lambda: api.request("GET", workers).status_code == 200, what="a service's workers")
        for name in ("you", "all"):
            api.apply(greeting | {"spec": {"name": name}}, manager="me")
            await tools.eventually(lambda name=name: text() == f"hello, {name}", what="the greeting", state=text)
        api.request("DELETE", child)
        await tools.eventually(lambda: text() == "hello, all", what="the child that somebody deleted", state=text)
        operator.stop()
        assert await running == 0

    tools.run(story())
