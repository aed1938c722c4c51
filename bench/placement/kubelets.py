"""Kubernetes' own controllers and scheduler over nodes whose kubelets kwok plays."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tests.needed import ROOT, built

from bench.fleet.api import load_starter
from bench.fleet.processes import Cluster, Json

CONTROLLERS = "deployment-controller,replicaset-controller,garbage-collector-controller"
MODULE = "sigs.k8s.io/kwok"
STAGES = ("node/fast/node-initialize", "pod/fast/pod-ready", "pod/fast/pod-delete")  # of kustomize/stage in its module
POD_ADDRESSES = "127.96.0.1/16"  # where the workers of bench.placement.world listen; bench.fleet has others
MERGE = "application/merge-patch+json"
FASTER = ("--kube-api-qps=500", "--kube-api-burst=1000")  # than one cluster of many needs


def start(cluster: Cluster, folder: Path, stack: ExitStack) -> None:
    """Controllers, scheduler and kubelets, until the stack ends."""
    starter = load_starter()
    client = (f"--kubeconfig={cluster.api.kubeconfig}", *FASTER)
    alone = ("--leader-elect=false", "--secure-port=0")
    starter._spawn(stack, folder, "kube-controller-manager", *client, *alone, f"--controllers={CONTROLLERS}")
    starter._spawn(stack, folder, "kube-scheduler", *client, *alone)
    stages = [f"--config={_module()}/kustomize/stage/{stage}.yaml" for stage in STAGES]
    kwok = [built("tools", "devices") / "kwok", f"--kubeconfig={cluster.api.kubeconfig}", *stages]
    log = stack.enter_context((folder / "kwok.log").open("wb"))
    command = [*kwok, "--manage-all-nodes", f"--cidr={POD_ADDRESSES}", "--node-lease-duration-seconds=0"]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(starter._stop, process)


def add_nodes(cluster: Cluster, nodes: Iterable[Json]) -> None:
    for node in nodes:
        name = node["metadata"]["name"]
        answer = cluster.api.request("POST", "/api/v1/nodes", node)
        if answer.status_code != 201:
            raise SystemExit(f"node {name} was refused: {answer.text}")
        # Admission taints a new node until its kubelet reports, and a controller that is not here would take that back.
        cluster.api.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, content_type=MERGE)


def _module() -> Path:
    command = ["go", "-C", str(ROOT / "cluster" / "go" / "devices"), "mod", "download", "-json", MODULE]
    return Path(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["Dir"])
