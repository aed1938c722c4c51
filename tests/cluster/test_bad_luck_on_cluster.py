"""Trouble with nodes, registries and quotas is told in a sentence while what served goes on."""

from __future__ import annotations

import json
from typing import Any

import kube
import pytest
import yaml
from kube import Namespace, infer, ready, resources, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

GPU = {"resources": {"limits": {"cpu": "200m", "memory": "256Mi", "amd.com/gpu": 1}}}  # other tests offer NVIDIA's
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "small"},
    "spec": {"hard": {"limits.memory": "700Mi"}},
}
LARGE = {"resources": {"limits": {"cpu": "200m", "memory": "600Mi"}}}
OTHER = "sha256:" + "0" * 64
# What is asked for next: spec.model or spec.worker, and what the condition must say of it.
TROUBLE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "missing GPU": ({"worker": GPU}, ("no node offers amd.com/gpu", "spec.worker.resources.limits")),
    "missing bundle": (
        {"model": {"uri": "oci://registry.invalid/digits:1"}},
        ("the bundle registry.invalid/digits:1", "cannot be reached from node", "spec.model.uri"),
    ),
    "another digest": (
        {"model": {"digest": OTHER}},
        ("backbone_digest is sha256:", f"must serve {OTHER}; ", "set spec.model.digest"),
    ),
    "no registry of the worker image": (
        {"worker": {"image": "registry.invalid/worker:1", "imagePullPolicy": "IfNotPresent"}},
        (
            "the registry of the worker image registry.invalid/worker:1 cannot be reached from node",
            "check the registry's name in spec.worker.image",
        ),
    ),
    "missing worker image": (
        {"worker": {"image": "registry.invalid/worker:1", "imagePullPolicy": "Never"}},
        ("the worker image registry.invalid/worker:1 is not on node", "change spec.worker.imagePullPolicy"),
    ),
    "quota used up": ({"worker": LARGE}, ("the namespace's quota small is used up", "raise the quota")),
}


def manifest(image: str, **spec: Any) -> dict[str, Any]:
    """Of a worker so small that the quota has room for two of them."""
    small = {"imagePullPolicy": "Never", "resources": resources("200m", "256Mi")}
    return kube.manifest(image, **spec | {"worker": small | spec.get("worker", {})})


def test_what_keeps_new_workers_away_is_told_in_a_sentence_while_the_old_one_serves(
    namespace: Namespace, good: str
) -> None:
    namespace.apply(manifest(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    run("kubectl", "apply", "-n", namespace.name, "-f", "-", stdin=yaml.safe_dump(QUOTA))
    told = {}
    for name, (spec, parts) in TROUBLE.items():
        namespace.apply(manifest(good, **spec))

        def said(parts: tuple[str, ...] = parts) -> str:
            message = str(namespace.condition("tiny", "Reconciling").get("message", ""))
            return message if all(part in message for part in parts) else ""

        told[name] = namespace.eventually(f"{name} to be told", said)
        assert namespace.condition("tiny", "Ready")["status"] == "True", name
        assert "\n" not in told[name]
        assert infer(namespace) == ["200"], name
    print(json.dumps(told, indent=2))
    namespace.apply(manifest(good))
    namespace.eventually("the service to settle again", lambda: ready(namespace))
