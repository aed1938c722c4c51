"""An API server on paper, for what the operator makes of one service: it keeps objects, counts generations, and refuses
a Deployment another selector. No controller runs: a test says what became of pods."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from itertools import count
from typing import Any, cast

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import InvalidObjectError, KubeClient
from offramp_operator.kube.kinds import DEPLOYMENT, NETWORK_SERVICE, SERVICE, Kind, Object, name_of
from offramp_operator.kube.manifests import OperatorPods, WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.signing import SigningKey

KEY = SigningKey(b"k" * 32)
NAMESPACE = "shop"
SETTINGS = WorkerSettings("offramp/worker:1", admin_from=OperatorPods("offramp-system", {"a": "b"}))


class PaperApi:
    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str], Object] = {}
        self._numbers = count(1)

    async def get(self, kind: Kind, namespace: str, name: str, **_: Any) -> Object | None:
        return copy.deepcopy(self.objects.get((kind, name)))

    async def create(self, kind: Kind, body: Object, **_: Any) -> Object:
        return self.store(kind, body)

    async def apply(self, kind: Kind, body: Object, **_: Any) -> Object:
        return self.store(kind, body)

    async def delete(self, kind: Kind, obj: Object, **_: Any) -> None:
        del self.objects[kind, name_of(obj)]

    def store(self, kind: Kind, body: Object) -> Object:
        old, new = self.objects.get((kind, name_of(body)), {}), copy.deepcopy(body)
        if kind is DEPLOYMENT and old and old["spec"]["selector"] != new["spec"]["selector"]:
            raise InvalidObjectError(422, "Invalid", f"{name_of(body)}: spec.selector: field is immutable")
        known, number = old.get("metadata", {}), str(next(self._numbers))
        new["metadata"] |= {
            "namespace": NAMESPACE,
            "uid": known.get("uid", f"uid-{number}"),
            "resourceVersion": number,
            "generation": known.get("generation", 0) + (old.get("spec") != new.get("spec")),
        }
        if old.get("status"):
            new.setdefault("status", old["status"])
        self.objects[kind, name_of(new)] = {"apiVersion": kind.api_version, "kind": kind.name} | new
        return copy.deepcopy(self.objects[kind, name_of(new)])


class PaperService:
    """The service ``digits`` under the operator's hands. Deployments have followed and are available as far as
    ``settle`` was called."""

    def __init__(self, **spec: Any) -> None:
        self.api, self.cache, self.now = PaperApi(), ObjectCache(), 1e9
        self.failures: list[str] = []
        self.platform = KubePlatform(
            cast("KubeClient", self.api),
            self.cache,
            workers=SETTINGS,
            instance="paper",
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )
        objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
        self._spec = {"model": {"uri": bundle(1)}, "objective": objective}
        self.edit(**spec)

    def edit(self, **changes: Any) -> None:
        """Of the user's spec; None takes a field out."""
        self._spec = {key: value for key, value in {**self._spec, **changes}.items() if value is not None}
        self.api.store(SERVICE, {"metadata": {"name": "digits"}, "spec": self._spec})

    def step(self, *settled: str, passes: int = 1, seconds: float = 60.0) -> None:
        """Passes of the operator, ``seconds`` apart. After each the Deployments that are named have followed."""
        for _ in range(passes):
            self.now += seconds
            asyncio.run(self._pass())
            for name in settled:
                self.settle(name)

    async def _pass(self) -> None:
        self._look()
        gathered = await self.platform.gather(ServiceKey(NAMESPACE, "digits"))
        assert gathered is not None
        self.failures = [endpoint.failure for endpoint in gathered.workers if endpoint.failure]
        await self.platform.ensure_workers(gathered.service, KEY.identity(gathered.service.uid))
        self._look()

    def _look(self) -> None:
        for (kind, _), obj in self.api.objects.items():
            self.cache.put(kind, copy.deepcopy(obj))

    def settle(self, name: str, *, ready: int | None = None, updated: int | None = None) -> None:
        """Pods of a Deployment have come to be what it asks for; or only so many are ``ready`` and ``updated``."""
        if name not in self.names(DEPLOYMENT):
            return
        live = copy.deepcopy(self.api.objects[DEPLOYMENT, name])
        n = live["spec"]["replicas"]
        there = n if ready is None else ready
        live["status"] = {
            "observedGeneration": live["metadata"]["generation"],
            "replicas": n,
            "updatedReplicas": n if updated is None else updated,
            "readyReplicas": there,
            "availableReplicas": there,
        }
        self.api.store(DEPLOYMENT, live)

    def settle_all(self) -> None:
        for name in self.names(DEPLOYMENT):
            self.settle(name)

    def names(self, kind: Kind) -> set[str]:
        return {name for of, name in self.api.objects if of is kind}

    def deployment(self, name: str) -> Object:
        return cast("Object", self.api.objects[DEPLOYMENT, name]["spec"])

    def bundles(self) -> dict[str, str]:
        """By Deployment, what its pods are asked to serve."""
        return {
            name: self.deployment(name)["template"]["spec"]["volumes"][0]["image"]["reference"]
            for name in self.names(DEPLOYMENT)
        }

    def found_by(self, selector: Mapping[str, str]) -> set[str]:
        """The Deployments whose pods have these labels."""
        named = {name: self.deployment(name)["template"]["metadata"]["labels"] for name in self.names(DEPLOYMENT)}
        return {name for name, labels in named.items() if selector.items() <= labels.items()}

    def behind(self, service: str) -> set[str]:
        """The Deployments whose pods a Service sends requests to."""
        return self.found_by(self.api.objects[NETWORK_SERVICE, service]["spec"]["selector"])

    @property
    def ready(self) -> int:
        """Pods that answer requests to the service's own Service."""
        status = (self.api.objects[DEPLOYMENT, name].get("status", {}) for name in self.behind("digits"))
        return sum(s.get("readyReplicas", 0) for s in status)


def bundle(number: int) -> str:
    return f"oci://offramp/digits:{number}@sha256:{str(number) * 64}"
