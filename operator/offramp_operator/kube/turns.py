"""Which services may have their workers replaced because the administrator changed what all of them run
(see :mod:`offramp_core.control.workers.pace`).

What is known of each service is what its last pass has seen; before every service has had one, nobody's turn has come.
A process paces the services of the shards that it holds, so a bad image costs at most one service for each process that
leads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from offramp_core.control.objects import Condition, Service
from offramp_core.control.snapshot import Trouble
from offramp_core.control.workers.pace import Member, Standing, Turns, next_turns
from offramp_core.reasons import ConditionType, PassedOn, Reason
from offramp_operator.kube.failures import condition
from offramp_operator.kube.kinds import Object
from offramp_operator.kube.manifests import CONTAINER, FETCH_CONTAINER
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey

FRESH_SECONDS = 1.0  # that a reading of the whole fleet stands
FAILING = {
    ConditionType.WORKERS_UPDATING: (Reason.NEW_WORKERS_FAIL, Reason.RECREATE_FAILED),
    ConditionType.WORKERS_AVAILABLE: (  # after the last old one went
        Reason.CRASH_LOOP_BACK_OFF,
        Reason.ERROR,
        Reason.OOM_KILLED,
        Reason.INVALID_BUNDLE,
        Reason.EXECUTOR_FAILING,
    ),
}
CROWDED = (Reason.NO_ROOM_TO_SURGE, Reason.WAITING_FOR_ROOM)  # no fault of the image; nothing has been replaced yet


class TurnKeeper:
    """Remembers how services stand and whose turn it is. All of it is read anew by the passes of another process."""

    def __init__(self, *, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._members: dict[str, Member] = {}
        self._turns = Turns()
        self._failed: Mapping[str, str] = {}
        self._woken: set[ServiceKey] = set()
        self._refreshed_at = -FRESH_SECONDS

    def standing(self, how: Standing) -> int:
        """How many services stand so; those that nobody has looked at as a whole yet count as they are."""
        now = self._clock()
        return sum(member.standing(now) == how for member in self._members.values())

    def note(self, key: ServiceKey, member: Member) -> None:
        self._members[str(key)] = member

    def forget(self, key: ServiceKey) -> None:
        self._members.pop(str(key), None)

    def may_go(self, key: ServiceKey, *, services: int) -> bool:
        """Whether it is a service's turn. Before all ``services`` have been noted it is nobody's."""
        self._refresh(services)
        return str(key) in self._turns.may_go

    def woken(self, *, services: int) -> frozenset[ServiceKey]:
        """Those for whom something is new since the last call."""
        self._refresh(services)
        found, self._woken = frozenset(self._woken), set()
        return found

    def reason_to_wait(self) -> Trouble:
        """The message about a service whose turn has not come."""
        if not self._failed:
            return Trouble(
                Reason.WAITING_FOR_TURN,
                "the operator's administrator changed what workers run; other services take it first",
            )
        name, why = min(self._failed.items())
        return Trouble(
            Reason.FLEET_UPDATE_STOPPED,
            f"what the operator's administrator changed fails at {name} ({why}) and goes no further; it goes on when "
            "that service recovers or the chart asks for another "
            "worker image, and spec.worker.image takes an image for this service at once",
        )

    def _refresh(self, services: int) -> None:
        """Read the fleet again, unless that was just done."""
        now = self._monotonic()
        if now - self._refreshed_at < FRESH_SECONDS or len(self._members) < services:
            return
        self._refreshed_at = now
        before, self._turns = self._turns, next_turns(self._members, self._clock())
        changed = set(self._turns.may_go - before.may_go)
        # By name: what they say may change with every pass, and all that wait would write it.
        if self._turns.failed.keys() != self._failed.keys():
            self._failed = self._turns.failed
            changed |= {name for name, member in self._members.items() if member.waits}
            self._log_failed()
        self._woken |= {ServiceKey(*name.split("/", 1)) for name in changed}

    def _log_failed(self) -> None:
        if self._failed:
            failures = "; ".join(f"{name}: {why}" for name, why in sorted(self._failed.items()))
            log_event("fleet-update-stopped", f"no further service is updated: {failures}", level=logging.ERROR)
        else:
            log_event("fleet-update-resumed", "no service fails any more")


def member(service: Service, deployments: Sequence[Object], *, waits: bool, counts: bool) -> Member:
    """How a service stands, by its Deployments and by what its last pass reported."""
    conditions = {c.type: c for c in service.status.conditions}
    updating, spare = conditions.get(ConditionType.WORKERS_UPDATING), conditions.get(ConditionType.NO_EXIT_CAPACITY)
    no_room = updating is not None and updating.reason in CROWDED
    return Member(
        waits=waits,
        counts=counts and service.status.workers.desired > 0 and not no_room,
        done_at=_all_done_at(deployments),
        failure=next(filter(None, (_failure(conditions, each) for each in deployments)), ""),
        ready=service.status.workers.ready,
        busy=service.status.capacity.peak_rate > 0,
        spare=spare is not None and spare.status == "True",
        goes_first=service.spec.update_policy.type in ("Recreate", "ResourceAware"),
    )


def _failure(conditions: Mapping[ConditionType | PassedOn, Condition], deployment: Object) -> str:
    """What is wrong with the newest workers: by the service's conditions, or because Kubernetes gave their rollout
    up."""
    for kind, reasons in FAILING.items():
        if kind in conditions and conditions[kind].reason in reasons:
            return conditions[kind].message
    stuck = condition(deployment, "Progressing")
    return str(stuck.get("message") or stuck.get("reason")) if stuck.get("status") == "False" else ""


def _all_done_at(deployments: Sequence[Object]) -> float | None:
    """Since when the pods of all are of their newest template."""
    moments = [moment for each in deployments if (moment := _done_at(each)) is not None]
    return max(moments, default=None) if len(moments) == len(deployments) else None


def _done_at(deployment: Object) -> float | None:
    """Since when all pods of a Deployment have been of its newest template; None while they are not. Scaling does not
    touch it."""
    seen = int((deployment.get("status") or {}).get("observedGeneration") or 0)
    state = condition(deployment, "Progressing")
    if seen < int(deployment["metadata"].get("generation") or 0) or state.get("reason") != "NewReplicaSetAvailable":
        return None
    return datetime.fromisoformat(str(state["lastUpdateTime"])).timestamp() if state.get("lastUpdateTime") else None


def administrators_image(service: Service, deployed: Object) -> str | None:
    """The image in a Deployment's spec that the administrator chose; None where its pods run none."""
    spec = (deployed.get("template") or {}).get("spec") or {}
    name = FETCH_CONTAINER if service.spec.worker.get("image") else CONTAINER
    both: list[Mapping[str, Any]] = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    return next((str(each.get("image")) for each in both if each.get("name") == name), None)
