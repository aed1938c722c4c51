"""Objects of the control plane to and from manifests: what the Kubernetes API stores and what the embedded shell keeps in its state folder.

Reading takes a whole manifest (metadata, spec, status). Writing gives the ``spec`` or ``status`` alone; the
platform adds metadata of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from offramp_core.control.codec import from_json, parse_time, to_json
from offramp_core.control.objects import Config, ConfigStatus, Rollout, RolloutStatus, Service, ServiceStatus
from offramp_core.control.snapshot import NewConfig, NewRollout
from offramp_core.control.spec import parse_spec
from offramp_core.plan import Plan

S = TypeVar("S", ServiceStatus, ConfigStatus, RolloutStatus)

GROUP = "earlyexit.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
REQUEST_ANNOTATION = f"{GROUP}/request"
SERVICE_KIND, CONFIG_KIND, ROLLOUT_KIND = "EarlyExitService", "RampConfig", "RampRollout"
# Kubernetes' own name for what our codec would call lastTransitionAt; every client knows it by this one.
_OURS, _THEIRS = "lastTransitionAt", "lastTransitionTime"


def service_from_manifest(manifest: Mapping[str, Any]) -> Service:
    """Raises :class:`InvalidSpecError` or :class:`InvalidArgumentError`; the message names the field."""
    metadata = manifest["metadata"]
    return Service(
        namespace=metadata.get("namespace", "default"),
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        spec=parse_spec(manifest.get("spec")),
        status=status_from_manifest(ServiceStatus, manifest),
        request=(metadata.get("annotations") or {}).get(REQUEST_ANNOTATION, ""),
    )


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


def config_spec(config: NewConfig) -> dict[str, Any]:
    """``RampConfig.spec``: the plan and nothing else."""
    return config.plan.to_mapping()


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
    return from_json(kind, _renamed(manifest.get("status") or {}, _THEIRS, _OURS))


def same_status(manifest: Mapping[str, Any], status: ServiceStatus | ConfigStatus | RolloutStatus) -> bool:
    """Whether writing ``status`` would change what readers of the manifest see."""
    kind: type[Any] = type(status)
    return bool(status_from_manifest(kind, manifest) == status_from_manifest(kind, {"status": status_json(status)}))


def status_json(status: ServiceStatus | ConfigStatus | RolloutStatus) -> dict[str, Any]:
    """A status as the API stores it. Fields at their defaults are left out, but for what people read in a column of its own."""
    told = _renamed(cast(dict[str, Any], to_json(status)), _OURS, _THEIRS)
    if isinstance(status, RolloutStatus):
        return {"phase": status.phase, **told}
    if isinstance(status, ConfigStatus):
        return {"source": status.source, "state": status.state, **told}
    return told


def _renamed(status: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """A status whose conditions call the field ``old`` by the name ``new``."""
    if "conditions" not in status:
        return dict(status)
    conditions = [{new if key == old else key: item for key, item in c.items()} for c in status["conditions"]]
    return {**status, "conditions": conditions}


def _created_at(manifest: Mapping[str, Any]) -> float:
    created = manifest["metadata"].get("creationTimestamp")
    return parse_time(created) if isinstance(created, str) else 0.0
