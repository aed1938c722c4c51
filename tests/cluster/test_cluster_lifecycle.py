"""A cluster of its own, made from a copy of cluster/, lives beside any other and leaves nothing when it goes.

The copy has another path and so another name: a cluster that a developer has up is not touched.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

CLUSTER_DIR = Path(__file__).parents[2] / "cluster"
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web", "labels": {"app": "web"}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "web",
                "image": "localhost/lifecycle-web:1",
                "ports": [{"containerPort": 8080}],
                "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "bundle", "mountPath": "/bundle", "readOnly": True}],
            }
        ],
        "volumes": [
            {"name": "bundle", "image": {"reference": "localhost/lifecycle-bundle:1", "pullPolicy": "IfNotPresent"}}
        ],
    },
}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
}


def run(*command, **options):
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=900, **options
    )
    assert result.returncode == 0, f"{command} gave {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@dataclass(frozen=True)
class Cluster:
    folder: Path

    @property
    def name(self):
        """What lib/common.sh calls a cluster of this path."""
        return "offramp-" + hashlib.sha256(str(self.folder.parent).encode()).hexdigest()[:8]

    def command(self, name, *arguments):
        return run(self.folder / name, *arguments, stdin=subprocess.DEVNULL)

    def environment(self):
        lines = run(
            "bash",
            "-c",
            f'eval "$({self.folder}/env)" && env -0',
            env={"HOME": str(Path.home()), "PATH": os.environ["PATH"]},
        )
        return dict(line.split("=", 1) for line in lines.split("\0") if "=" in line)

    def kubectl(self, *arguments, document=None):
        text = json.dumps(document) if document is not None else None
        return run("kubectl", *arguments, env=self.environment(), input=text)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(CLUSTER_DIR, clone / "cluster")
    cluster = Cluster(clone / "cluster")
    cluster.command("up")
    yield cluster
    cluster.command("down")


@pytest.fixture(scope="module")
def web(cluster, tmp_path_factory):
    """A namespace with restricted pod security, and in it a pod that serves a file of an image volume."""
    work = tmp_path_factory.mktemp("images")
    (work / "bundle").mkdir()
    (work / "bundle" / "index.html").write_text("from the bundle")
    base = cluster.command("base-image").strip()
    cluster.command(
        "oci_image.py",
        "build",
        "--name",
        "localhost/lifecycle-web:1",
        "--layer",
        base,
        "--user",
        "65532:65532",
        *(f"--entrypoint={word}" for word in ("python3", "-m", "http.server", "8080", "--directory", "/bundle")),
        "--output",
        work / "web",
    )
    cluster.command(
        "oci_image.py",
        "build",
        "--name",
        "localhost/lifecycle-bundle:1",
        "--layer",
        work / "bundle",
        "--output",
        work / "bundle.tar",
    )
    cluster.command("load-image", work / "web", work / "bundle.tar")
    cluster.kubectl("create", "namespace", "shop")
    cluster.kubectl("label", "namespace", "shop", "pod-security.kubernetes.io/enforce=restricted")
    for document in (POD, SERVICE):
        cluster.kubectl("--namespace=shop", "apply", "--filename=-", document=document)
    cluster.kubectl("--namespace=shop", "wait", "--for=condition=Ready", "pod/web", "--timeout=300s")
    return "web.shop.svc.cluster.local"


def test_the_api_server_is_new_enough_and_every_node_is_ready(cluster):
    version = json.loads(cluster.kubectl("version", "--output=json"))["serverVersion"]
    assert (int(version["major"]), int(version["minor"])) >= (1, 34)
    nodes = json.loads(cluster.kubectl("get", "nodes", "--output=json"))["items"]
    ready = [
        condition["status"]
        for node in nodes
        for condition in node["status"]["conditions"]
        if condition["type"] == "Ready"
    ]
    assert ready == ["True"]


def test_up_again_changes_nothing(cluster):
    before = cluster.kubectl("get", "namespace", "kube-system", "--output=jsonpath={.metadata.uid}")
    cluster.command("up")
    assert cluster.kubectl("get", "namespace", "kube-system", "--output=jsonpath={.metadata.uid}") == before


def test_a_pod_serves_an_image_volume_that_it_cannot_write(cluster, web):
    assert cluster.kubectl("--namespace=shop", "exec", "web", "--", "cat", "/bundle/index.html") == "from the bundle"
    attempt = cluster.kubectl("--namespace=shop", "exec", "web", "--", "sh", "-c", "touch /bundle/x /x 2>&1; id -u")
    assert attempt.count("Read-only file system") == 2
    assert attempt.endswith("65532\n")


def test_a_service_answers_by_name_from_a_pod_and_from_a_node(cluster, web):
    fetch = f"import urllib.request as u; print(u.urlopen('http://{web}', timeout=10).read().decode())"
    deadline = time.monotonic() + 120
    while True:  # a service's rules follow its pods, after a moment
        try:
            answers = (
                cluster.kubectl("--namespace=shop", "exec", "web", "--", "python3", "-c", fetch),
                cluster.command("exec-in-node", "python3", "-c", fetch),
            )
            break
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    assert answers == ("from the bundle\n", "from the bundle\n")


def test_logs_reach_kubectl(cluster, web):
    assert "GET / HTTP/1.1" in cluster.kubectl("--namespace=shop", "logs", "web")


def test_a_pod_may_not_ask_for_more_than_its_namespace_allows(cluster, web):
    document = {**POD, "metadata": {"name": "bold"}, "spec": {**POD["spec"], "hostNetwork": True}}
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        cluster.kubectl("--namespace=shop", "apply", "--filename=-", document=document)


def traces(cluster):
    """Return what of the cluster can be seen on this machine: folders, namespaces, mounts, cgroups and processes."""
    name, state = cluster.name, cluster.folder.parent / "build" / "cluster"
    places = [Path("/run", name), state, *Path("/sys/fs/cgroup").glob(name), *Path("/sys/fs/cgroup").glob(f"*/{name}")]
    found = [str(place) for place in places if place.exists()]
    found += [line for line in run("ip", "netns", "list").splitlines() if line.startswith(name)]
    found += [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line or str(state) in line
    ]
    return found + [line for line in run("ps", "-eo", "pid,args").splitlines() if str(state) in line or name in line]


def test_a_crashed_cluster_starts_afresh_and_down_leaves_nothing(cluster, web):
    """Last in this file: it ends the cluster."""
    assert len(traces(cluster)) > 5
    pid = int(Path("/run", cluster.name, "init.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    cluster.command("up")
    assert json.loads(cluster.kubectl("get", "pods", "--all-namespaces", "--output=json"))["items"] == []

    cluster.command("down")
    assert traces(cluster) == []
