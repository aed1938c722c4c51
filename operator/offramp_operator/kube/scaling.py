"""Who decides how many workers a service has: its spec, the autoscaler that the spec asks for, or one that a user made.

Pure. Two writers of ``spec.replicas`` would take turns for ever, so the operator leaves the field alone as soon as an
autoscaler targets the Deployment. A user's goes before the one that the spec asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Scaling
from offramp_core.control.workers.capacity import floor_in_force
from offramp_core.reasons import MaybeReason, Reason, parse_reason
from offramp_operator.kube.kinds import FIELD_MANAGER, Object, name_of
from offramp_operator.kube.pods import controls

REPLICAS = ("f:spec", "f:replicas")


@dataclass(frozen=True, slots=True)
class Scalers:
    """The autoscalers that target a service's Deployment, by whose they are."""

    own: Object | None = None
    others: tuple[Object, ...] = ()


def scalers(service: Service, autoscalers: Iterable[Object]) -> Scalers:
    """Tell the operator's own among the autoscalers that target the Deployment."""
    live = [obj for obj in autoscalers if not obj["metadata"].get("deletionTimestamp")]
    own = next((obj for obj in live if controls(service.uid, obj)), None)
    return Scalers(own, tuple(obj for obj in live if obj is not own))


def scaling(service: Service, found: Scalers, deployment: Object | None) -> Scaling | None:
    """What decides on the number of workers; None where ``spec.replicas`` does."""
    wanted = service.spec.autoscaling
    if found.others:
        by, desired = (
            f"HorizontalPodAutoscaler {name_of(found.others[0])}",
            _replicas(deployment, service.spec.replicas),
        )
        if wanted is None:
            return Scaling(by, desired)
        message = f"{by} scales the workers, so spec.autoscaling rests; delete one of the two"
        return Scaling(by, desired, message, Reason.ANOTHER_AUTOSCALER)
    if wanted is None:
        return None
    reason, message = _failure(found.own)
    desired = _replicas(deployment, floor_in_force(wanted, service.status.capacity))
    return Scaling(f"HorizontalPodAutoscaler {service.name}", desired, message, reason)


def handed_over(service: Service, live: int, others: Sequence[Object]) -> int:
    """The number with which an autoscaler begins: what there is, within the limits of the one that the spec asks for.

    Zero, which nobody chose but a pause after rejected pods, would switch it off for good.
    """
    wanted = service.spec.autoscaling
    if others or wanted is None:
        return max(live, 1)
    return min(max(live, floor_in_force(wanted, service.status.capacity)), wanted.max_replicas)


def holds_replicas_alone(deployment: Object) -> bool:
    """Whether ``spec.replicas`` belongs to the operator and to nobody else.

    Leaving it out of an apply would then remove it, and the API server's default is one worker.
    """
    entries = deployment["metadata"].get("managedFields") or ()
    owners = {
        (entry.get("manager"), entry.get("operation"), entry.get("subresource", ""))
        for entry in entries
        if _has(entry.get("fieldsV1") or {}, REPLICAS)
    }
    return owners == {(FIELD_MANAGER, "Apply", "")}


def _has(fields: Object, path: tuple[str, ...]) -> bool:
    for step in path:
        if step not in fields:
            return False
        fields = fields[step]
    return True


def _replicas(deployment: Object | None, otherwise: int) -> int:
    return otherwise if deployment is None else int(deployment["spec"].get("replicas", 1))


def _failure(autoscaler: Object | None) -> tuple[MaybeReason, str]:
    """What keeps an autoscaler from working, in its own words; empty where nothing does, or where someone scaled to
    zero."""
    for condition in ((autoscaler or {}).get("status") or {}).get("conditions") or ():
        reason = str(condition.get("reason", ""))
        fails = condition.get("type") in ("AbleToScale", "ScalingActive") and condition.get("status") == "False"
        if fails and reason not in ("", "ScalingDisabled"):
            hint = "; an adapter must serve earlyexit_inflight as a metric of pods" if "Metric" in reason else ""
            return parse_reason(reason), f"{condition.get('message') or reason}{hint}"
    return "", ""
