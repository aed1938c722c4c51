"""What pods say of devices: which a worker asks for, what keeps it from one, and which of its own are unhealthy.

All of it stands in the pod. The operator reads no nodes: that is a right on the whole cluster, which a release that
watches some namespaces alone does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from offramp_operator.kube.kinds import CLASS_LABEL, Object

_SHORT = re.compile(r"Insufficient (?P<what>[\w.-]+/[\w.-]*\w)")
_COUNTED = re.compile(r"(?P<nodes>\d+) (?P<cause>[^,]+)")
_PREEMPTION = re.compile(r"preemption: 0/(?P<nodes>\d+) nodes are available: (?P<causes>.+)", re.DOTALL)
_UNHELPFUL = re.compile(r"(?P<nodes>\d+) Preemption is not helpful for scheduling")
# Causes that stay when a node is empty, as the lack of a resource that it does not have does.
_LASTING = ("taint", "node affinity/selector", "were unschedulable")


@dataclass(frozen=True, slots=True)
class Shortage:
    """``n`` devices ``what`` that no node has free. ``offering`` nodes have as many, and other pods use them; None
    where that cannot be told. ``elsewhere`` nodes were not asked, since they do not take the pod at all."""

    what: str
    n: int
    offering: int | None
    elsewhere: int
    limits: str

    @property
    def cause(self) -> str:
        free = f"a free {self.what}" if self.n == 1 else f"{self.n} free {self.what}"
        if self.offering == 0:
            which = "no node that takes these workers" if self.elsewhere else "no node"
            return f"{which} offers {self.what if self.n == 1 else f'{self.n} {self.what}'}"
        if self.offering is None:
            return f"no node has {free}"
        nodes = "1 node" if self.offering == 1 else f"{self.offering} nodes"
        return f"no node has {free}, since other pods use those of {nodes}"

    @property
    def remedy(self) -> str:
        if self.offering == 0:
            return (
                f"name in {self.limits} what nodes do offer (Allocatable in kubectl describe nodes), or add a node "
                "whose device plugin reports it as healthy"
            )
        end = "" if self.offering is None else "end one of those pods, or "
        return f"{end}add a node with one and its device plugin, or change {self.limits}"


def requested(pod: Object) -> tuple[str, ...]:
    """What a worker asks for: extended resources, and claims by their names."""
    resources = _resources(pod)
    extended = sorted(name for name in resources.get("limits") or {} if "/" in name)
    return (*extended, *(f"claim {claim['name']}" for claim in resources.get("claims") or ()))


def unhealthy(pod: Object) -> str:
    """The devices of a pod that its node reports as unhealthy, in words; empty where there is none.

    Nodes report it from Kubernetes 1.36 on, of devices that their plugin or driver still lists.
    """
    found = sorted(_unhealthy(pod))
    return f"{' and '.join(found)} on node {pod['spec'].get('nodeName', '')}" if found else ""


def shortage(pod: Object, message: str) -> Shortage | None:
    """The devices that a pod waits for, by the scheduler's ``message``; None where it waits for something else."""
    found = _SHORT.search(message)
    if found is None:
        return None
    what = found["what"]
    asked = str((_resources(pod).get("limits") or {}).get(what, ""))
    name = (pod["metadata"].get("labels") or {}).get(CLASS_LABEL)
    limits = "spec.worker.resources.limits" + (f" or resources.limits of WorkerClass {name}" if name else "")
    offering, elsewhere = _offering(message, what)
    return Shortage(what, int(asked) if asked.isdigit() else 1, offering, elsewhere, limits)


def _offering(message: str, what: str) -> tuple[int | None, int]:
    """How many nodes have the resource in use, and how many do not take the pod at all.

    What the scheduler says of preemption tells the first: it does not help on a node that is too small when empty.
    """
    counted = message.partition("nodes are available:")[2].partition(". ")[0]
    causes = {found["cause"].strip(" ."): int(found["nodes"]) for found in _COUNTED.finditer(counted)}
    short = causes.pop(f"Insufficient {what}", 0)
    elsewhere = sum(causes.values())
    preemption = _PREEMPTION.search(message)
    lasting = all(any(text in cause for text in _LASTING) for cause in causes)
    if preemption is None or not lasting or short + elsewhere != int(preemption["nodes"]):
        return None, elsewhere
    unhelpful = _UNHELPFUL.search(preemption["causes"])
    return short + elsewhere - (int(unhelpful["nodes"]) if unhelpful else 0), elsewhere


def _resources(pod: Object) -> Object:
    first = ((pod.get("spec") or {}).get("containers") or [{}])[0]
    return dict(first.get("resources") or {})


def _unhealthy(pod: Object) -> Iterator[str]:
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        for resource in status.get("allocatedResourcesStatus") or ():
            for device in resource.get("resources") or ():
                if device.get("health") == "Unhealthy":
                    why = f" ({device['message']})" if device.get("message") else ""
                    yield f"device {device['resourceID']} of {resource['name']}{why}"
