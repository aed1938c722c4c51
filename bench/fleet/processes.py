"""The processes of a bench of fleets: API server, operator, and what stands around the operator."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from bench.fleet.api import load_starter
from bench.provenance import provenance

NAMESPACE, LEASE = "default", "offramp-leader"
WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")
ASKED_BY_WRITING = ("leases", "tokenreviews", "subjectaccessreviews")
LABEL = re.compile(r'(\w+)="([^"]*)"')

Json = dict[str, Any]


@dataclass
class Cluster:
    """The API server, reached by the bench itself."""

    api: Any
    server: str
    token: str

    def writes(self) -> float:
        """Objects written so far, as :meth:`written` counts them."""
        return sum(self.written().values())

    def written(self) -> Counter[str]:
        """Writes so far by what and how, Leases aside: the leader renews its own."""
        counts: Counter[str] = Counter()
        for line in self.api.request("GET", "/metrics").text.splitlines():
            if line.startswith("apiserver_request_total{"):
                labels = dict(LABEL.findall(line))
                if labels["verb"] in WRITES and labels["resource"] not in ASKED_BY_WRITING:
                    what = "/".join(filter(None, (labels["resource"], labels["subresource"])))
                    counts[f"{labels['verb']} {what}"] += int(float(line.rsplit(" ", 1)[1]))
        return counts


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    """etcd and kube-apiserver, empty but for our kinds."""
    starter = load_starter()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        api = starter._start(folder.resolve(), stack)
        starter._install_crds(api)
        config = yaml.safe_load(api.kubeconfig.read_text())
        yield Cluster(api, config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]["token"])


class World:
    """The process around the operator: ``module``, which prints a line of figures for every line it reads."""

    def __init__(self, cluster: Cluster, module: str = "bench.fleet.world") -> None:
        self._module = module
        command = [sys.executable, "-m", module, "--server", cluster.server, "--token", cluster.token]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, what: str = "") -> Json:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Json:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._module} ended; its message stands above")
        return dict(json.loads(line))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class OperatorProcess:
    """The operator as a pod would run it."""

    def __init__(self, cluster: Cluster, folder: Path, *, name: str, port: int) -> None:
        key = folder / "signing-key"
        if not key.exists():
            key.write_bytes(secrets.token_bytes(32))
        environment = {
            "KUBECONFIG": str(cluster.api.kubeconfig),
            "OFFRAMP_LEASE_NAMESPACE": NAMESPACE,
            "OFFRAMP_LEASE_NAME": LEASE,
            "OFFRAMP_WORKER_IMAGE": "offramp/worker:1",
            "OFFRAMP_SIGNING_KEY_FILE": str(key),
            "OFFRAMP_PORT": str(port),
            "POD_NAME": name,
        }
        self._url, self._log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "offramp_operator.main"]
            # As in an image, modules are compiled once and not at every start.
            inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            compiled = {"PYTHONPYCACHEPREFIX": str(Path("build/pycache").resolve())}
            self.process = subprocess.Popen(command, stderr=log, env={**inherited, **compiled, **environment})

    def event(self, name: str) -> Json | None:
        """The first line of the log that tells an event."""
        lines = (line for line in self._log.read_text().splitlines() if line.endswith("}"))
        return next((event for line in lines if (event := json.loads(line))["event"] == name), None)

    def events(self) -> dict[str, int]:
        """How many of each event the log tells."""
        counted: dict[str, int] = {}
        for line in self._log.read_text().splitlines():
            if line.endswith("}"):
                name = json.loads(line)["event"]
                counted[name] = counted.get(name, 0) + 1
        return counted

    def wait_for(self, name: str, seconds: float) -> Json:
        """Until an event is told."""
        end = time.monotonic() + seconds
        while (event := self.event(name)) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the operator did not tell {name!r} within {seconds:.0f} s; see {self._log}")
            time.sleep(0.2)
        return event

    def cpu(self) -> float:
        """Processor seconds so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[str, int]:
        """Resident bytes: now, and at most so far."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        return {"now": int(lines["VmRSS"].split()[0]) * 1024, "peak": int(lines["VmHWM"].split()[0]) * 1024}

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self._url}/metrics", timeout=30).text
        return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")), 0.0)

    def stop(self) -> None:
        """Ask for a clean end, which releases the Lease."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def concluded(result: dict[str, Any], passed: dict[str, bool], *, out: Path, console: Console) -> int:
    """Write what was measured, print which of what was asked held, and give the exit code."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**result, "passed": passed, "measured": provenance()}, indent=1) + "\n")
    for asked, held in passed.items():
        console.print(f"{'yes' if held else 'NO '} {asked}")
    return 0 if all(passed.values()) else 1
