"""Objects of the control plane to and from manifests: what the Kubernetes API stores and what the embedded shell keeps
in its state folder.

Reading takes a whole manifest (metadata, spec, status). Writing gives the ``spec`` or ``status`` alone; the
platform adds metadata of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec

from offramp_core.control.codec import from_json, parse_time, to_json
from offramp_core.control.objects import Config, ConfigStatus, Rollout, RolloutStatus, Service, ServiceStatus
from offramp_core.control.shared_pool import SharedPoolStatus
from offramp_core.control.snapshot import NewRollout
from offramp_core.control.spec import parse_spec
from offramp_core.control.workers.pools import with_numbers
from offramp_core.plan import Plan
from offramp_core.protocol import PlanCounts
from offramp_operator.shell.packing import packed, unpacked

S = TypeVar("S", ServiceStatus, ConfigStatus, RolloutStatus, SharedPoolStatus)

GROUP = "earlyexit.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
OBJECT_LIMIT_BYTES = 1_500_000  # of the 1.5 MiB that etcd takes by default; the API server's own notes need the rest
STEPS_KEPT = 16  # of a rollout's history, where it must be short
TEXT_KEPT = 1000  # characters of a text, where it must be short
REQUEST_ANNOTATION = f"{GROUP}/request"
SERVICE_KIND, CONFIG_KIND, ROLLOUT_KIND = "EarlyExitService", "RampConfig", "RampRollout"
WORKER_CLASS_KIND, WORKER_POOL_KIND = "WorkerClass", "WorkerPool"
# Kubernetes' own name for what our codec would call lastTransitionAt; every client knows it by this one.
_OURS, _THEIRS = "lastTransitionAt", "lastTransitionTime"


def service_from_manifest(manifest: Mapping[str, Any]) -> Service:
    """Raises :class:`InvalidSpecError` or :class:`InvalidArgumentError`; the message names the field."""
    metadata = manifest["metadata"]
    service = Service(
        namespace=metadata.get("namespace", "default"),
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        spec=parse_spec(manifest.get("spec")),
        status=status_from_manifest(ServiceStatus, manifest),
        request=(metadata.get("annotations") or {}).get(REQUEST_ANNOTATION, ""),
    )
    return with_numbers(service)


def config_from_manifest(manifest: Mapping[str, Any]) -> Config:
    """Raises :class:`InvalidArgumentError`; the message names the field."""
    return Config(
        name=manifest["metadata"]["name"],
        plan=Plan.from_mapping(dict(manifest.get("spec") or {})),
        status=status_from_manifest(ConfigStatus, manifest),
        created_at=_created_at(manifest),
    )


def rollout_from_manifest(manifest: Mapping[str, Any]) -> Rollout:
    """Raises :class:`InvalidArgumentError`; the message names the field."""
    spec = manifest.get("spec") or {}
    return Rollout(
        name=manifest["metadata"]["name"],
        from_config=spec.get("from", ""),
        to_config=spec.get("to", ""),
        cause=spec.get("cause", "Tuned"),
        generation=spec.get("generation", 0),
        paused=spec.get("paused", False),
        decision=spec.get("decision", ""),
        created_at=_created_at(manifest),
        status=status_from_manifest(RolloutStatus, manifest),
    )


def rollout_spec(service_name: str, rollout: NewRollout) -> dict[str, Any]:
    """``RampRollout.spec`` as the operator creates it; ``paused`` and ``decision`` are left to people."""
    return {
        "serviceName": service_name,
        "from": rollout.from_config,
        "to": rollout.to_config,
        "generation": rollout.generation,
        "cause": rollout.cause,
    }


def status_from_manifest(kind: type[S], manifest: Mapping[str, Any]) -> S:
    """The status of a manifest, with defaults where it says nothing. Raises :class:`InvalidArgumentError`."""
    status = _renamed(manifest.get("status") or {}, _THEIRS, _OURS)
    return from_json(kind, unpacked(status))


def same_status(manifest: Mapping[str, Any], status: ServiceStatus | ConfigStatus | RolloutStatus) -> bool:
    """Whether writing ``status`` would change what readers of the manifest see."""
    kind: type[Any] = type(status)
    return bool(status_from_manifest(kind, manifest) == status_from_manifest(kind, {"status": status_json(status)}))


def status_json(status: ServiceStatus | ConfigStatus | RolloutStatus | SharedPoolStatus) -> dict[str, Any]:
    """A status as the API stores it. Fields at their defaults are left out, but for what people read in a column of its
    own."""
    fields = _renamed(cast(dict[str, Any], to_json(status)), _OURS, _THEIRS)
    if isinstance(status, RolloutStatus):
        return packed({"phase": status.phase, **fields})
    if isinstance(status, ConfigStatus):
        return {"source": status.source, "state": status.state, **fields}
    return packed(fields)


def bounded(status: S, *, limit_bytes: int) -> S:
    """A status that a store can be expected to take: while it is larger than ``limit_bytes``, the next thing on its
    list is left out.

    First goes what can be counted again (what each worker process has counted under the stable plan), then what is
    history, then the ends of long texts. Evidence of a canary and of a version on trial, proofs, and stops are never
    left out: a status that is too large with these alone is refused, and what cannot be stored is not acted on.
    """
    for smaller in _LEFT_OUT:
        if len(msgspec.json.encode(status_json(status))) <= limit_bytes:
            break
        status = smaller(status)
    return status


def _without_counts(status: S) -> S:
    if not isinstance(status, ServiceStatus):
        return status
    return replace(
        status, measured=replace(status.measured, live={}, base={}, retired=PlanCounts(), previous=PlanCounts())
    )


def _without_history(status: S) -> S:
    return replace(status, history=status.history[-STEPS_KEPT:]) if isinstance(status, RolloutStatus) else status


def _with_short_texts(status: S) -> S:
    if isinstance(status, ServiceStatus):
        conditions = tuple(replace(c, message=_cut(c.message)) for c in status.conditions)
        return replace(status, message=_cut(status.message), conditions=conditions)
    if isinstance(status, RolloutStatus):
        gates = tuple(replace(gate, message=_cut(gate.message)) for gate in status.gates)
        return replace(status, message=_cut(status.message), gates=gates)
    return status if isinstance(status, SharedPoolStatus) else replace(status, message=_cut(status.message))


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_KEPT else f"{text[: TEXT_KEPT - 1]}…"


_LEFT_OUT = (_without_counts, _without_history, _with_short_texts)


def _renamed(status: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """A status whose conditions call the field ``old`` by the name ``new``."""
    if "conditions" not in status:
        return dict(status)
    conditions = [{new if key == old else key: item for key, item in c.items()} for c in status["conditions"]]
    return {**status, "conditions": conditions}


def _created_at(manifest: Mapping[str, Any]) -> float:
    created = manifest["metadata"].get("creationTimestamp")
    return parse_time(created) if isinstance(created, str) else 0.0
