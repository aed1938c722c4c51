"""The example driver of dynamic resource allocation (``sigs.k8s.io/dra-example-driver``), built from its Go module and
installed with its own chart: GPUs that exist in name only, which it publishes for every node, prepares for the kubelet
and hands to containers through CDI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kube import run

DRIVER = "gpu.example.com"  # also the name of the DeviceClass that the chart brings
PROGRAM = "dra-example-kubeletplugin"
IMAGE, TAG = "localhost/offramp/dra-example-driver", "test"
RELEASE, NAMESPACE = "dra-example-driver", "dra-example-driver"


class ExampleDriver:
    """The driver as a DaemonSet, with ``devices`` GPUs on each node."""

    def __init__(self, folder: Path, *, devices: int) -> None:
        self._helm = f"{run('cluster/tools', 'charts').strip()}/helm"
        module = run("go", "-C", "cluster/go/devices", "mod", "download", "-json", "sigs.k8s.io/dra-example-driver")
        self._chart = f"{json.loads(module)['Dir']}/deployments/helm/dra-example-driver"
        _load(folder)
        self.offer(devices)

    def offer(self, devices: int) -> None:
        """Publish so many from now on, by another driver pod in the place of this one."""
        values = {
            "image.repository": IMAGE,
            "image.tag": TAG,
            "image.pullPolicy": "Never",
            "kubeletPlugin.numDevices": devices,
        }
        options = [f"--set={name}={value}" for name, value in values.items()]
        self._run("upgrade", "--install", RELEASE, self._chart, "--create-namespace", "--timeout=300s", *options)

    def uninstall(self) -> None:
        self._run("uninstall", RELEASE, "--timeout=180s")
        run("kubectl", "delete", "namespace", NAMESPACE, "--wait=false")

    def _run(self, *command: str) -> None:
        run(self._helm, *command, "--namespace", NAMESPACE, "--wait=watcher")


def _load(folder: Path) -> None:
    """The driver's program, alone in an image, into the cluster."""
    program, archive = folder / "program", str(folder / "driver.tar")
    program.mkdir()
    shutil.copy2(Path(run("cluster/tools", "devices").strip()) / PROGRAM, program)
    name = f"{IMAGE}:{TAG}"
    run("cluster/oci_image.py", "build", "--name", name, "--layer", f"{program}=/usr/bin", "--output", archive)
    run("cluster/load-image", archive)
