"""``make demo-cluster``: the same story on a real Kubernetes, through ``helm install`` and ``kubectl apply``.

Uses ResNet-56 on CIFAR-10 where OFFRAMP_DATA has it, else the digits. Outside the cluster it prepares the bundle,
builds and loads three images and installs the chart; the story itself runs where pod addresses can be reached
(``cluster/exec-in-node``). Afterwards it deletes the service and the release and looks at what is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import yaml
from rich.console import Console

from bench.demo.embedded import report
from bench.demo.story import Json, Settings, StoryError, Storyteller, print_summary, tell, write

BUILD = Path("build/demo-cluster")
NAMESPACE, RELEASE, SYSTEM = "offramp-demo", "offramp", "offramp-system"
GROUP, VERSION = "earlyexit.dev", "v1alpha1"
KINDS = "earlyexitservices,rampconfigs,ramprollouts"
CHILDREN = "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets,rampconfigs,ramprollouts"
IN_ITS_NAMESPACE = (
    "deployments,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,"
    "poddisruptionbudgets,networkpolicies,leases"
)
# The namespace's own, and the Lease: whoever led last cannot take it away, for its own role may have gone before it.
KEPT = ("configmap/kube-root-ca.crt", "serviceaccount/default", f"lease.coordination.k8s.io/{RELEASE}-leader")
DIFF_EVERY_SECONDS = 3.0
TAG = "demo"


def run(*command: str, stdin: str | None = None, check: bool = True) -> str:
    """Run a command to its end; its standard output.

    Raises
    ------
    StoryError
        It failed; the message has its last words.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise StoryError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")
    return done.stdout


def kubectl(*arguments: str, stdin: str | None = None, check: bool = True) -> str:
    return run("kubectl", *arguments, stdin=stdin, check=check)


class Inside(Protocol):
    """The part of a demo that runs in the cluster's network; its exit code."""

    async def __call__(self, console: Console, *, digits: bool) -> int: ...


class ClusterStage:
    """A service on the cluster that ``KUBECONFIG`` names."""

    def __init__(self, manifest: Json) -> None:
        from kubernetes import client, config

        config.load_kube_config()
        self._objects = client.CustomObjectsApi()
        self._core = client.CoreV1Api()
        self._name = manifest["metadata"]["name"]
        self._manifest = manifest
        self._applying = asyncio.Lock()
        self._diffed_at = 0.0

    @property
    def url(self) -> str:
        service: Any = self._core.read_namespaced_service(self._name, NAMESPACE)
        return f"http://{service.spec.cluster_ip}"

    async def apply(self, manifest: Json) -> None:
        async with self._applying:
            self._manifest = manifest
            text = yaml.safe_dump(manifest, sort_keys=False)
            await asyncio.to_thread(kubectl, "apply", "--server-side", "--field-manager=user", "-f", "-", stdin=text)

    async def service(self) -> Json:
        found: Json = await asyncio.to_thread(
            self._objects.get_namespaced_custom_object, GROUP, VERSION, NAMESPACE, "earlyexitservices", self._name
        )
        return found

    async def rollouts(self) -> list[Json]:
        found: Json = await asyncio.to_thread(
            self._objects.list_namespaced_custom_object, GROUP, VERSION, NAMESPACE, "ramprollouts"
        )
        return sorted(found["items"], key=lambda r: (r["metadata"]["creationTimestamp"], r["metadata"]["name"]))

    async def pods(self) -> list[Any]:
        """Workers, those that start or end included."""
        selector = f"earlyexit.dev/service={self._name}"
        found: Any = await asyncio.to_thread(self._core.list_namespaced_pod, NAMESPACE, label_selector=selector)
        return list(found.items)

    async def metrics(self) -> list[str]:
        pages = []
        async with aiohttp.ClientSession() as session:
            for pod in await self.pods():
                async with session.get(f"http://{pod.status.pod_ip}:8080/metrics") as response:
                    pages.append(await response.text())
        return pages

    async def check(self) -> list[str]:
        """A server-side diff of the user's manifest is empty, and the operator owns nothing but the status."""
        if time.monotonic() - self._diffed_at < DIFF_EVERY_SECONDS:
            return []
        self._diffed_at = time.monotonic()
        async with self._applying:
            text = yaml.safe_dump(self._manifest, sort_keys=False)
            diff = await asyncio.to_thread(
                kubectl, "diff", "--server-side", "--field-manager=user", "-f", "-", stdin=text, check=False
            )
            fields = (await self.service())["metadata"].get("managedFields", [])
        found = [f"kubectl diff is not empty: {diff[:500]}"] if diff.strip() else []
        foreign = [f for f in fields if f["manager"] != "user" and f.get("subresource") != "status"]
        return found + [f"{f['manager']} owns {f['fieldsV1']}" for f in foreign]


def manifest_of(image: str) -> Json:
    """What a user would write, with canary steps sized for a demo's patience."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "EarlyExitService",
        "metadata": {"name": "demo", "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": f"oci://{image}"},
            "objective": {"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": "0.005"}},
            "ramps": {"mode": "Disabled", "maxOverhead": "0.1"},
            "rollout": {"steps": [{"weight": 30}, {"weight": 70}], "confidence": "0.95"},
            "replicas": 2,
            "worker": {
                "imagePullPolicy": "Never",
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
            },
        },
    }


# --- outside the cluster ---------------------------------------------------------------------------


def use_cluster() -> None:
    """Take KUBECONFIG and PATH from ``cluster/env``, as a shell would."""
    for line in run("cluster/env").splitlines():
        name, value = line.removeprefix("export ").split("=", 1)
        os.environ[name] = os.path.expandvars("".join(shlex.split(value)))


def install(console: Console, *, digits: bool) -> None:
    """Bundle, images, chart."""
    from bench.demo.pools import prepare_cluster_pool

    pool = prepare_cluster_pool(BUILD, console, digits=digits)
    for part, arguments in (("operator", ()), ("worker", ()), ("bundle", (str(pool.bundle),))):
        began = time.monotonic()
        archive = run(
            "images/build", part, *arguments, image_of(part), "--output", str(BUILD / f"{part}.tar")
        ).splitlines()[-1]
        run("cluster/load-image", archive)
        console.print(f"image {image_of(part)}: {time.monotonic() - began:.0f} s")
    values = {
        "replicas": 1,
        "image": {"repository": image_of("operator").rsplit(":", 1)[0], "tag": TAG, "pullPolicy": "Never"},
        "workerImage": {"repository": image_of("worker").rsplit(":", 1)[0], "tag": TAG},
    }
    run(
        "helm",
        "upgrade",
        "--install",
        RELEASE,
        "helm/offramp",
        "--namespace",
        SYSTEM,
        "--create-namespace",
        "--wait",
        "--timeout",
        "180s",
        "-f",
        "-",
        stdin=yaml.safe_dump(values),
    )
    kubectl("create", "namespace", NAMESPACE, check=False)
    kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    console.print("helm install: done; the namespace of the service enforces restricted pod security")


def image_of(part: str) -> str:
    return f"localhost/offramp/{part}:{TAG}"


def leave(console: Console) -> list[str]:
    """Delete the service, then the release; what is left that should not be."""
    problems = []
    kubectl("delete", "earlyexitservice", "demo", "--namespace", NAMESPACE, "--wait=true")
    left = _wait_empty(
        lambda: kubectl("get", CHILDREN, "--namespace", NAMESPACE, "-o", "name").split(),
        ignore=("configmap/kube-root-ca.crt",),
    )
    if left:
        problems.append(f"deleting the service left {left}")
    if not set(of_the_release()) - set(KEPT):
        problems.append("nothing of the release was found before it was removed: what is looked for is wrong")
    run("helm", "uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    left = _wait_empty(of_the_release, ignore=KEPT)
    if left:
        problems.append(f"helm uninstall left {left}")
    crds = kubectl("get", "crds", "-o", "name").split()
    console.print(
        f"after helm uninstall only the CRDs are left: {', '.join(c.split('/')[1] for c in crds if GROUP in c)}"
    )
    return problems


def of_the_release() -> list[str]:
    """All that lies in its namespace, and what is its own in the whole cluster."""
    within = kubectl("get", IN_ITS_NAMESPACE, "--namespace", SYSTEM, "-o", "name")
    roles = kubectl(
        "get", "clusterroles,clusterrolebindings", "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name"
    )
    return (within + roles).split()


def _wait_empty(names: Callable[[], list[str]], *, ignore: tuple[str, ...] = (), seconds: float = 90.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while True:
        left = [name for name in names() if name not in ignore]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(1.0)


def outside(console: Console, module: str, *, digits: bool) -> int:
    """Install, play the part of a module that runs inside, and look at what is left; the exit code."""
    BUILD.mkdir(parents=True, exist_ok=True)
    use_cluster()
    install(console, digits=digits)
    story = [sys.executable, "-m", module, "--inside", *(["--digits"] if digits else [])]
    code = subprocess.run(["cluster/exec-in-node", *story], check=False).returncode
    if code != 0:
        console.print(kubectl("get", "pods", "--all-namespaces", "-o", "wide", check=False))
        console.print(kubectl("logs", "--namespace", SYSTEM, "deployment/offramp", "--tail=60", check=False))
    problems = leave(console)
    for problem in problems:
        console.print(f"[bold red]failed:[/] {problem}")
    return code or (1 if problems else 0)


# --- inside ----------------------------------------------------------------------------------------


async def inside(console: Console, *, digits: bool) -> int:
    from bench.demo.pools import prepare_cluster_pool

    pool = prepare_cluster_pool(BUILD, console, digits=digits)
    manifest = manifest_of(image_of("bundle"))
    stage = ClusterStage(manifest)
    await stage.apply(manifest)
    console.print(yaml.safe_dump(manifest, sort_keys=False))
    deadline = time.monotonic() + 120
    while not kubectl("get", "service", "demo", "--namespace", NAMESPACE, "-o", "name", check=False):
        if time.monotonic() > deadline:
            raise StoryError("the operator made no Service within 120 s")
        await asyncio.sleep(0.5)
    settings = Settings(
        name=f"Offramp on Kubernetes: {pool.title}, two worker pods",
        model=pool.model,
        rate=pool.rate,
        clean=pool.clean,
        drifted=pool.drifted,
        reckless_ramp=pool.reckless_ramp,
        budget="0.005",
        loose_budget="0.05",
        measure_seconds=15.0,
        input_name=pool.input_name,
        patience_seconds=400.0,
    )
    teller = Storyteller(stage, settings, manifest, [stage.url], BUILD, console)
    summary = await tell(teller)
    console.print(kubectl("get", KINDS, "--namespace", NAMESPACE))
    write(teller, summary)
    print_summary(summary, console)
    return report(summary, BUILD, console)


def enter(module: str, description: str | None, inside: Inside) -> int:
    """The command line of a demo in two parts; its exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", action="store_true", help="the part that runs in the cluster's network")
    parser.add_argument("--digits", action="store_true", help="the small model, also where OFFRAMP_DATA has ResNet-56")
    arguments = parser.parse_args()
    console = Console(width=160 if not sys.stdout.isatty() else None)
    try:
        if arguments.inside:
            return asyncio.run(inside(console, digits=arguments.digits))
        return outside(console, module, digits=arguments.digits)
    except StoryError as error:
        console.print(f"[bold red]the story took another turn:[/] {error}")
        return 1


if __name__ == "__main__":
    sys.exit(enter("bench.demo.cluster", __doc__, inside))
