"""Objects of our kinds from and to the JSON of the Kubernetes API."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from offramp_core.control.codec import from_json, parse_time, to_json
from offramp_core.control.objects import (
    Config,
    ConfigStatus,
    Rollout,
    RolloutStatus,
    Service,
    ServiceStatus,
)
from offramp_core.control.spec import parse_spec
from offramp_core.plan import Plan
from offramp_operator.kube.kinds import Object, name_of, namespace_of, uid_of

S = TypeVar("S", ServiceStatus, ConfigStatus, RolloutStatus)

# Kubernetes conditions call the time of their last transition by this name; everything else of ours ends in "At".
_OURS, _THEIRS = "lastTransitionAt", "lastTransitionTime"


def status_to_json(status: ServiceStatus | ConfigStatus | RolloutStatus) -> Object:
    """The ``status`` of an object."""
    value = cast(Object, to_json(status))
    return _renamed(value, _OURS, _THEIRS) if isinstance(status, ServiceStatus) else value


def status_of(kind: type[S], obj: Object) -> S:
    """The status of an object, with defaults where it says nothing.

    Raises
    ------
    InvalidArgumentError
        Somebody wrote what no status can hold.
    """
    return from_json(kind, _renamed(obj.get("status") or {}, _THEIRS, _OURS))


def same_status(obj: Object, status: ServiceStatus | ConfigStatus | RolloutStatus) -> bool:
    """Whether writing ``status`` would change what readers of the object see."""
    written = {"status": status_to_json(status)}
    if isinstance(status, ServiceStatus):
        return status_of(ServiceStatus, obj) == status_of(ServiceStatus, written)
    if isinstance(status, ConfigStatus):
        return status_of(ConfigStatus, obj) == status_of(ConfigStatus, written)
    return status_of(RolloutStatus, obj) == status_of(RolloutStatus, written)


def service_of(obj: Object) -> Service:
    """Parse an EarlyExitService.

    Raises
    ------
    InvalidSpecError
        The spec breaks a rule that the API server did not know.
    """
    return Service(
        namespace=namespace_of(obj),
        name=name_of(obj),
        uid=uid_of(obj),
        generation=int(obj["metadata"]["generation"]),
        spec=parse_spec(obj.get("spec")),
        status=status_of(ServiceStatus, obj),
    )


def config_of(obj: Object) -> Config:
    """Parse a RampConfig."""
    return Config(name_of(obj), Plan.from_mapping(obj["spec"]), status_of(ConfigStatus, obj), _created_at(obj))


def rollout_of(obj: Object) -> Rollout:
    """Parse a RampRollout."""
    spec = obj["spec"]
    return Rollout(
        name=name_of(obj),
        from_config=spec["from"],
        to_config=spec["to"],
        cause=spec["cause"],
        generation=spec["generation"],
        paused=spec.get("paused", False),
        decision=spec.get("decision", ""),
        created_at=_created_at(obj),
        status=status_of(RolloutStatus, obj),
    )


def _created_at(obj: Object) -> float:
    return parse_time(obj["metadata"]["creationTimestamp"])


def _renamed(status: Object, old: str, new: str) -> Object:
    conditions: list[dict[str, Any]] = status.get("conditions") or []
    if not conditions:
        return status
    return status | {"conditions": [{new if key == old else key: item for key, item in c.items()} for c in conditions]}
