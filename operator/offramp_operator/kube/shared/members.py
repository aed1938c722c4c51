"""The services of a pool: what its workers are told of each."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from offramp_core.control.objects import Service
from offramp_core.errors import OfframpError
from offramp_core.protocol import PlacedModel
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.shared.pool import SharedPool
from offramp_operator.shell.manifests import service_from_manifest
from offramp_operator.shell.signing import SigningKey
from offramp_operator.shell.variables import option_variables


@dataclass(frozen=True, slots=True)
class Member:
    """A service of a pool. ``trouble`` says why it can be in none of its workers."""

    service: Service
    created: str
    trouble: str = ""

    @property
    def name(self) -> str:
        return self.service.name

    def placed(self, key: SigningKey) -> PlacedModel:
        """What workers are told."""
        spec = self.service.spec
        return PlacedModel(
            service=self.service.name,
            service_uid=self.service.uid,
            bundle=_folder(self.service),
            token_sha256=key.identity(self.service.uid).token_sha256,
            mark=mark_of(self.service),
            model_digest=spec.model_digest or self.service.proven_digest or "",
            latency_seconds=spec.latency_seconds,
            options=option_variables(spec),
            unload_after_seconds=spec.unload_after_seconds,
        )


def mark_of(service: Service) -> str:
    """What is to be served, in 16 hex digits: what carries another mark is of an older spec."""
    spec = service.spec
    asked = [spec.model_uri, spec.model_digest, spec.latency_seconds, option_variables(spec)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def members(cache: ObjectCache, pool: SharedPool) -> list[Member]:
    """The services that name the pool, oldest first. One that cannot be read has no part in it; its own pass says
    why."""
    found = []
    for obj in cache.of_shared_pool(pool.namespace, pool.name):
        if obj["metadata"].get("deletionTimestamp"):
            continue
        try:
            service = service_from_manifest(obj)
        except OfframpError:
            continue
        if service.spec.replicas:
            created = str(obj["metadata"].get("creationTimestamp", ""))
            found.append(Member(service, created, _of_other_claim(service, pool)))
    return sorted(found, key=lambda member: (member.created, member.name))


def _of_other_claim(service: Service, pool: SharedPool) -> str:
    claim = service.spec.model_uri.removeprefix("pvc://").partition("/")[0]
    if claim == pool.spec.claim:
        return ""
    return (
        f"spec.model.uri names claim {claim}, and the workers of WorkerPool {pool.name} have {pool.spec.claim}; put "
        "the bundle there"
    )


def _folder(service: Service) -> str:
    return service.spec.model_uri.removeprefix("pvc://").partition("/")[2].strip("/")
