"""Nodes that exist on paper, what services ask of them, and who must be placed: counted without Kubernetes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PRODUCT = "nvidia.com/gpu.product"  # as GPU feature discovery labels nodes
GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
MIG, NO_MIG = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Nodes:
    """``n`` nodes with ``gpus`` GPUs of a product, advertised as ``offers`` of ``resource`` each."""

    name: str
    product: str
    n: int
    gpus: int
    resource: str
    offers: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A WorkerClass, and how many services name it. ``told`` is what the condition of one that waits must say, where
    its devices are all in use or there are none."""

    name: str
    services: int
    resource: str
    each: int
    told: str
    product: str = ""


# 1,000 GPUs: whole ones of four products, shared ones (four replicas of each) and one product cut into slices. NVIDIA's
# plugin names a share as a resource of its own, or else its product with a suffix.
NODES = (
    Nodes("l4", "NVIDIA-L4", 90, 4, GPU, 4),
    Nodes("l4-shared", "NVIDIA-L4", 5, 4, SHARED, 16),
    Nodes("l4-suffix", "NVIDIA-L4-SHARED", 5, 4, GPU, 16),
    Nodes("a10g", "NVIDIA-A10G", 50, 4, GPU, 4),
    Nodes("l40s", "NVIDIA-L40S", 25, 8, GPU, 8),
    Nodes("h100", "NVIDIA-H100-80GB-HBM3", 20, 8, GPU, 8),
    Nodes("a100", "NVIDIA-A100-SXM4-80GB", 5, 8, MIG, 56),
)
ASKED = (
    Asked("l4", 600, GPU, 1, f"no node has a free {GPU}, since other pods use those of", "NVIDIA-L4"),
    Asked("l4-shared", 100, SHARED, 1, f"no node has a free {SHARED}, since other pods use those of"),
    Asked("l4-suffix", 100, GPU, 1, f"no node has a free {GPU}, since other pods use those of", "NVIDIA-L4-SHARED"),
    Asked("a10g-pair", 160, GPU, 2, f"no node has 2 free {GPU}, since other pods use those of", "NVIDIA-A10G"),
    Asked("l40s", 300, GPU, 1, f"no node has a free {GPU}, since other pods use those of", "NVIDIA-L40S"),
    Asked(
        "h100-half", 100, GPU, 4, f"no node has 4 free {GPU}, since other pods use those of", "NVIDIA-H100-80GB-HBM3"
    ),
    Asked("any", 60, GPU, 1, f"no node has a free {GPU}, since other pods use those of"),
    Asked("slice", 500, MIG, 1, f"no node has a free {MIG}, since other pods use those of"),
    Asked("no-slice", 40, NO_MIG, 1, f"no node offers {NO_MIG}"),
    Asked("no-product", 40, GPU, 1, "no suitable node has the labels that workers ask for", "NVIDIA-B200"),
)


def scaled(share: float) -> tuple[tuple[Nodes, ...], tuple[Asked, ...]]:
    """A share of everything, and one of each at least."""
    nodes = tuple(Nodes(k.name, k.product, max(1, round(k.n * share)), k.gpus, k.resource, k.offers) for k in NODES)
    asked = tuple(
        Asked(a.name, max(1, round(a.services * share)), a.resource, a.each, a.told, a.product) for a in ASKED
    )
    return nodes, asked


def node(kind: Nodes, number: int) -> Json:
    room = {"cpu": "192", "memory": "1536Gi", "pods": "110", kind.resource: str(kind.offers)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"{kind.name}-{number:03}", "labels": {PRODUCT: kind.product}},
        "status": {"capacity": room, "allocatable": room},
    }


def worker_class(asked: Asked) -> Json:
    selector = {"nodeSelector": {PRODUCT: asked.product}} if asked.product else {}
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "WorkerClass",
        "metadata": {"name": asked.name},
        "spec": {"resources": {"limits": {asked.resource: str(asked.each)}}, **selector},
    }


def service(asked: Asked, number: int, namespace: str) -> Json:
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": f"{asked.name}-{number:03}", "namespace": namespace},
        "spec": {
            "model": {"uri": "oci://registry.example/models/digits:1", "digest": f"sha256:{0:064}"},
            "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
            "worker": {"className": asked.name, "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
        },
    }


def free(nodes: Iterable[Json], pods: Iterable[Json]) -> dict[str, Counter[str]]:
    """What each node has left of each device: what it offers less what the pods on it ask for."""
    left = {n["metadata"]["name"]: _devices(n["status"]["allocatable"]) for n in nodes}
    for pod in pods:
        if where := pod["spec"].get("nodeName"):
            left[where].subtract(_asked(pod))
    return left


def could_be_placed(nodes: Iterable[Json], pods: Iterable[Json]) -> list[str]:
    """Pods that wait although a node that they may go to has what they ask for."""
    nodes, pods = list(nodes), list(pods)
    left = free(nodes, pods)
    labels = {n["metadata"]["name"]: n["metadata"]["labels"] for n in nodes}
    return [
        pod["metadata"]["name"]
        for pod in pods
        if not pod["spec"].get("nodeName")
        and any(
            _selected(labels[name], pod["spec"].get("nodeSelector") or {})
            and all(has[what] >= n for what, n in _asked(pod).items())
            for name, has in left.items()
        )
    ]


def _selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def _asked(pod: Json) -> Counter[str]:
    return _devices(pod["spec"]["containers"][0]["resources"].get("limits") or {})


def _devices(quantities: Mapping[str, str]) -> Counter[str]:
    return Counter({name: int(n) for name, n in quantities.items() if name.startswith("nvidia.com/")})
