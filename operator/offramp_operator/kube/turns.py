"""Which services may have their workers replaced because the administrator changed what all of them run (see :mod:`offramp_core.control.pace`).

What is known of each service is what its last pass has seen; before every service has had one, nobody's turn has come. A process paces the services of the shards that it
holds, so a bad image costs at most one service for each process that leads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from offramp_core.control.objects import Service
from offramp_core.control.pace import Member, Standing, Turns, next_turns
from offramp_core.control.snapshot import Turn
from offramp_operator.kube.failures import condition
from offramp_operator.kube.kinds import Object
from offramp_operator.kube.manifests import CONTAINER, FETCH_CONTAINER
from offramp_operator.kube.slim import content
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey

FRESH_SECONDS = 1.0  # that a look at the whole fleet stands
FAILING = ("NewWorkersFail", "RecreateFailed")


class TurnKeeper:
    """Remembers how services stand and whose turn it is. All of it is read anew by the passes of another process."""

    def __init__(self, *, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._members: dict[str, Member] = {}
        self._turns = Turns()
        self._looked_at = -FRESH_SECONDS

    def standing(self, how: Standing) -> int:
        """How many services stand so; those that nobody has looked at as a whole yet count as they are."""
        now = self._clock()
        return sum(member.standing(now) == how for member in self._members.values())

    def note(self, key: ServiceKey, member: Member) -> None:
        self._members[str(key)] = member

    def forget(self, key: ServiceKey) -> None:
        self._members.pop(str(key), None)

    def may_go(self, key: ServiceKey, everybody: Iterable[tuple[str, str]]) -> bool:
        """Whether it is a service's turn; ``everybody`` are the namespaces and names of all services."""
        self.look(everybody)
        return str(key) in self._turns.may_go

    def look(self, everybody: Iterable[tuple[str, str]]) -> frozenset[ServiceKey]:
        """Look at the fleet again unless that was just done; returns those for whom something is new."""
        now = self._monotonic()
        if now - self._looked_at < FRESH_SECONDS or any(
            f"{space}/{name}" not in self._members for space, name in everybody
        ):
            return frozenset()
        self._looked_at = now
        before, self._turns = self._turns, next_turns(self._members, self._clock())
        if self._turns.failed != before.failed:
            self._tell()
            changed = {name for name, member in self._members.items() if member.waits}
        else:
            changed = set(self._turns.may_go - before.may_go)
        return frozenset(ServiceKey(*name.split("/", 1)) for name in changed)

    def told(self) -> Turn:
        """What is said of a service whose turn has not come."""
        if not self._turns.failed:
            return Turn(
                "WaitingForTurn", "the operator's administrator changed what workers run; other services take it first"
            )
        name, why = min(self._turns.failed.items())
        return Turn(
            "FleetUpdateStopped",
            f"what the operator's administrator changed fails at {name} ({why}) and goes no further; it goes on when that service recovers or the chart asks for another "
            "worker image, and spec.worker.image takes an image for this service at once",
        )

    def _tell(self) -> None:
        failed = self._turns.failed
        if failed:
            said = "; ".join(f"{name}: {why}" for name, why in sorted(failed.items()))
            log_event("fleet-update-stopped", f"no further service is updated: {said}", level=logging.ERROR)
        else:
            log_event("fleet-update-resumed", "no service fails any more")


def member(service: Service, deployment: Object | None, *, waits: bool, counts: bool, busy: bool) -> Member:
    """How a service stands, by its Deployment and by what its last pass has told."""
    told = {c.type: c for c in service.status.conditions}
    updating, spare = told.get("WorkersUpdating"), told.get("NoExitCapacity")
    failure = updating.message if updating is not None and updating.reason in FAILING else ""
    live: Object = deployment or {}
    stuck = condition(live, "Progressing")
    if not failure and stuck.get("status") == "False":
        failure = str(stuck.get("message") or stuck.get("reason"))
    return Member(
        waits=waits,
        counts=counts and service.status.workers.desired > 0,
        done_at=_done_at(live),
        failure=failure,
        ready=service.status.workers.ready,
        busy=busy,
        spare=spare is not None and spare.status == "True",
        goes_first=service.spec.update_policy.type in ("Recreate", "ResourceAware"),
    )


def _done_at(deployment: Object) -> float | None:
    """Since when all pods of a Deployment are of its newest template and available; None while they are not."""
    status, wanted = deployment.get("status") or {}, (deployment.get("spec") or {}).get("replicas", 1)
    seen = int(status.get("observedGeneration") or 0) >= int((deployment.get("metadata") or {}).get("generation") or 0)
    complete = all(
        int(status.get(count) or 0) == wanted for count in ("replicas", "updatedReplicas", "availableReplicas")
    )
    since = condition(deployment, "Progressing").get("lastUpdateTime")
    if not (seen and complete):
        return None
    return datetime.fromisoformat(str(since)).timestamp() if since else 0.0


def administrators_image(service: Service, deployment: Object) -> str | None:
    """The image in a Deployment that the administrator chose; None where its pods run none."""
    spec = (msgspec.json.decode(content(deployment))["template"] or {}).get("spec") or {}
    name = FETCH_CONTAINER if service.spec.worker.get("image") else CONTAINER
    both: list[Mapping[str, Any]] = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    return next((str(each.get("image")) for each in both if each.get("name") == name), None)
