"""No further pods are asked for while nodes reject them (see :mod:`offramp_operator.kube.rejected`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from offramp_core.control.snapshot import WorkerEndpoint
from offramp_operator.kube import manifests
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import POD, REPLICA_SET, Object, name_of, namespace_of, uid_of
from offramp_operator.kube.platform.templates import template_mark
from offramp_operator.kube.rejected import Rejections, note, rejections
from offramp_operator.shell.log import log_event


class Holds:
    """Changes what is asked of a Deployment so that nothing of it is taken away and nothing new comes."""

    def __init__(self, client: KubeClient, cache: ObjectCache, *, clock: Callable[[], float]) -> None:
        self._client = client
        self._cache = cache
        self._clock = clock

    async def hold(self, live: Object | None, body: Object) -> None:
        """Where the pods of ``body`` are rejected: as many as nodes have taken or may take, or those that served
        before. An autoscaler's number is its own."""
        if live is None:
            return
        found = self._rejections(live, template_mark(body["spec"]))
        note(body, found)
        if "replicas" not in body["spec"] or not found.holds:
            return
        if not found.served:
            body["spec"]["replicas"] = min(body["spec"]["replicas"], found.kept)
        elif (earlier := await self.earlier_pods(live, found.served)) is not None:
            body["spec"]["template"] = earlier

    def endpoint(
        self, deployment: Object, template: str | None, *, wanted: int, holds: bool = True
    ) -> WorkerEndpoint | None:
        """A worker that stands for pods that nodes rejected, while they have taken fewer than ``wanted``. ``holds``:
        whether the number of pods is ours."""
        found = self._rejections(deployment, template)
        return found.endpoint(wanted=wanted, held=holds and found.holds)

    def _rejections(self, deployment: Object, template: str | None) -> Rejections:
        """What nodes rejected of the pods that a Deployment should have."""
        sets = self._cache.owned(REPLICA_SET, uid_of(deployment))
        pods = (pod for rs in sets for pod in self._cache.owned(POD, uid_of(rs)))
        return rejections(deployment, pods, template=template, now=self._clock())

    async def earlier_pods(self, deployment: Object, wanted: str) -> Object | None:
        """The template of a digest, of which Kubernetes keeps the last ones in ReplicaSets."""
        for known in self._cache.owned(REPLICA_SET, uid_of(deployment)):
            found = await self._client.get(REPLICA_SET, namespace_of(known), name_of(known))
            if found is not None and template_mark(found["spec"]) == wanted:
                return manifests.pods_of(found)
        what = (
            f"{namespace_of(deployment)}/{name_of(deployment)}: no ReplicaSet has the pods {wanted} that served before"
        )
        log_event("earlier-pods-gone", what, level=logging.WARNING)
        return None
