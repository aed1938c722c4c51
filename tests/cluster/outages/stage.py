"""The stage of one outage: a namespace with a service, operators as processes behind a proxy, traffic, and a record of
all that happened."""

from __future__ import annotations

import base64
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from proxy import credentials  # type: ignore[import-not-found]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
GROUP = "/apis/earlyexit.dev/v1alpha1"
NAME = "tiny"
SLOWNESS = float(os.environ.get("OFFRAMP_TEST_SLOWNESS", "1"))  # of this machine; see operator_process.py
PATIENCE_SECONDS = 240.0
Json = dict[str, Any]

# Which phase may follow which. What is finished never moves again. A plan that has not begun ends at once: nobody runs
# it.
FOLLOWS: dict[str, set[str]] = {
    "Pending": {"Progressing", "RolledBack", "Superseded", "Aborted"},
    "Progressing": {"Paused", "AwaitingPromotion", "Promoting", "RollingBack"},
    "Paused": {"Progressing", "RollingBack"},
    "AwaitingPromotion": {"Paused", "Progressing", "Promoting", "RollingBack"},
    "Promoting": {"Succeeded", "RollingBack"},
    "RollingBack": {"RolledBack", "Aborted", "Superseded"},
}
FINISHED = {"Succeeded", "RolledBack", "Aborted", "Superseded"}


def in_node(*command: str, log: Path, stdin: int | None = None, environment: dict[str, str] | None = None) -> Any:
    """A process that reaches pods and Services. It is the command itself: what is done to it is done to no shell in
    between."""
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    with log.open("ab") as file:
        return subprocess.Popen(
            ["cluster/exec-in-node", "env", *variables, *command],
            cwd=ROOT,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )


# --- what the test does and sees itself -------------------------------------------------------------


class Api:
    """The test's own way to the API server, with no proxy in between."""

    def __init__(self, kubeconfig: Path) -> None:
        server, context = credentials(kubeconfig)
        self.client = httpx.Client(base_url=server, verify=context, timeout=30, trust_env=False)

    def get(self, path: str, **params: str) -> Json:
        answer = self.client.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def post(self, path: str, body: Json) -> Json:
        answer = self.client.post(path, json=body)
        assert answer.status_code in (200, 201), answer.text
        return dict(answer.json())

    def delete(self, path: str, **body: Any) -> None:
        answer = self.client.request("DELETE", path, json=body or None)
        assert answer.status_code in (200, 202, 404), answer.text

    def merge(self, path: str, patch: Json) -> None:
        answer = self.client.patch(path, json=patch, headers={"Content-Type": "application/merge-patch+json"})
        assert answer.status_code == 200, answer.text

    def apply(self, path: str, manifest: Json) -> Json:
        headers = {"Content-Type": "application/apply-patch+yaml"}
        answer = self.client.patch(
            path, params={"fieldManager": "user", "force": "true"}, content=json.dumps(manifest), headers=headers
        )
        assert answer.status_code in (200, 201), answer.text
        return dict(answer.json())


class History:
    """Every version of the service, its rollouts, its plan and its pods, as watches report them."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self.changed = threading.Condition()
        self.seen: list[tuple[float, str, str, Json]] = []  # (when, kind, ADDED | MODIFIED | DELETED, object)
        core = f"/api/v1/namespaces/{namespace}"
        self._stopped = False
        for kind, path in (
            ("service", f"{GROUP}/namespaces/{namespace}/earlyexitservices"),
            ("rollout", f"{GROUP}/namespaces/{namespace}/ramprollouts"),
            ("plan", f"{core}/configmaps"),
            ("pod", f"{core}/pods"),
            ("lease", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"),
        ):
            threading.Thread(target=self._watch, args=(kind, path), daemon=True).start()

    def stop(self) -> None:
        self._stopped = True

    def _watch(self, kind: str, path: str) -> None:
        version = "0"
        while not self._stopped:
            try:
                query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "300"}
                with self._api.client.stream("GET", path, params=query, timeout=None) as stream:
                    stream.raise_for_status()  # 404 for a moment where the kinds are new, 429 from a busy server
                    for line in stream.iter_lines():
                        event = json.loads(line)
                        if event["type"] == "ERROR":  # the server has forgotten that version: begin with what is there
                            version = "0"
                            break
                        version = event["object"]["metadata"]["resourceVersion"]
                        with self.changed:
                            self.seen.append((time.time(), kind, event["type"], event["object"]))
                            self.changed.notify_all()
            except (httpx.HTTPError, ValueError):  # cut short, maybe in the middle of a line
                time.sleep(0.2)

    def of(self, kind: str) -> list[Json]:
        """All versions in their order."""
        with self.changed:
            return [obj for _, k, event, obj in self.seen if k == kind and event != "DELETED"]

    def now(self, kind: str) -> dict[str, Json]:
        """The present objects, by name."""
        present: dict[str, Json] = {}
        with self.changed:
            for _, k, event, obj in self.seen:
                if k == kind and event == "DELETED":
                    present.pop(obj["metadata"]["name"], None)
                elif k == kind:
                    present[obj["metadata"]["name"]] = obj
        return present

    def until(
        self, what: str, holds: Callable[[], Any], *, seconds: float = PATIENCE_SECONDS, state: Callable[[], str] = str
    ) -> Any:
        """Wait until it holds, looking again at every change (and every second)."""
        deadline = time.monotonic() + seconds * SLOWNESS
        while not (found := holds()):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{state()}"
            with self.changed:
                self.changed.wait(1.0)
        return found


@dataclass
class Traffic:
    process: Any
    summary: Json = field(default_factory=dict)

    def stop(self) -> Json:
        if not self.summary:
            self.process.stdout.readline()  # a process that has hardly begun would end without a summary
            self.process.send_signal(signal.SIGTERM)
            self.summary = json.loads(self.process.stdout.read().splitlines()[-1])
            self.process.wait(60)
        return self.summary


# --- operators --------------------------------------------------------------------------------------


class Operator:
    """One operator of the service's namespace, started again when it ends, as the kubelet does with a container."""

    def __init__(self, stage: Stage, channel: int, *, image: str, **environment: str) -> None:
        self.stage, self.channel, self.image, self.environment = stage, channel, image, environment
        self.log = stage.folder / f"operator-{channel}.log"
        self.starts = 0
        self.wanted = True
        self._changing = threading.Lock()  # one that is stopped must not be started again at that moment
        self.port = 20_000 + secrets.randbelow(12_000)  # below those that connections are given
        self.process = self._start()
        threading.Thread(target=self._keep, daemon=True).start()

    def _start(self) -> Any:
        self.starts += 1
        ports = self.stage.ports[self.channel]
        kubeconfig = self.stage.folder / f"kubeconfig-{self.channel}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{ports['api']}"}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "operator"}}],
            "users": [{"name": "operator", "user": {"token": "the-proxy-has-the-credentials"}}],
        }
        kubeconfig.write_text(yaml.safe_dump(config))
        environment = {
            "KUBECONFIG": str(kubeconfig),
            "OFFRAMP_TEST_WORKERS_PROXY": f"http://127.0.0.1:{ports['workers']}",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "OFFRAMP_NAMESPACES": self.stage.namespace,
            "OFFRAMP_LEASE_NAMESPACE": self.stage.namespace,
            "OFFRAMP_LEASE_NAME": "offramp",
            "OFFRAMP_WORKER_IMAGE": self.image,
            "OFFRAMP_SIGNING_KEY_FILE": str(self.stage.key),
            "OFFRAMP_PORT": str(self.port),
            "POD_NAME": f"operator-{self.channel}",
            "PYTHONPATH": "core:operator:worker:cli:.",
            "OMP_NUM_THREADS": "1",
            "OFFRAMP_TEST_SLOWNESS": str(SLOWNESS),
            **self.environment,
        }
        return in_node(sys.executable, str(HERE / "operator_process.py"), log=self.log, environment=environment)

    def _keep(self) -> None:
        while self.wanted:
            self.process.wait()
            time.sleep(0.5)
            with self._changing:
                if self.wanted:
                    self.process = self._start()

    def kill(self) -> None:
        """No goodbye; it is started again right away."""
        self.process.kill()

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Gone for good."""
        with self._changing:
            self.wanted = False
            self.process.send_signal(number)
            self.process.wait(90)

    def tail(self) -> str:
        return self.log.read_text()[-2500:] if self.log.exists() else ""


class Stage:
    """See the module. ``spec`` of the service is in :meth:`apply`."""

    def __init__(self, *, namespace: str, folder: Path, bundle: str, worker: str) -> None:
        self.namespace, self.folder, self.bundle, self.worker = namespace, folder, bundle, worker
        self.key = folder / "signing-key"
        self.key.write_bytes(base64.b64encode(secrets.token_bytes(32)))
        self.api = Api(ROOT / "build" / "cluster" / "kubeconfig")
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.api.post("/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
        self.history = History(self.api, namespace)
        self._proxy = in_node(
            sys.executable,
            str(HERE / "proxy.py"),
            str(ROOT / "build" / "cluster" / "kubeconfig-inside"),
            "2",
            log=folder / "proxy.log",
            stdin=subprocess.PIPE,
        )
        self.ports = json.loads(self._proxy.stdout.readline())
        self.operators: list[Operator] = []
        self.traffic: list[Traffic] = []
        self.manifest: Json = {}
        self.generation = 0  # which the API server gave what was applied last

    # --- acting ------------------------------------------------------------------------------------

    def operate(self, channel: int = 0, *, image: str = "", **environment: str) -> Operator:
        made = Operator(self, channel, image=image or self.worker, **environment)
        self.operators.append(made)
        return made

    def broken(self, *faults: str, channel: int = 0) -> None:
        """What is broken between an operator and the cluster from now on; nothing where none is named."""
        self._ask_proxy(channel=channel, faults=list(faults))

    def struck(self, fault: str, *, channel: int = 0) -> int:
        """How often a fault has struck so far."""
        return int(self._ask_proxy(channel=channel).get(fault, 0))

    def _ask_proxy(self, **line: Any) -> Json:
        self._proxy.stdin.write(json.dumps(line) + "\n")
        self._proxy.stdin.flush()
        return dict(json.loads(self._proxy.stdout.readline()))

    def apply(self, **spec: Any) -> None:
        """What the user applies; None leaves a field out. One step at full weight needs no comparison of two arms,
        hence few batches."""
        before = self.manifest.get("spec") or {
            "model": {"uri": f"oci://{self.bundle}"},
            "objective": {"latency": {"threshold": "5s"}, "accuracy": {"maxDisagreement": "0.05"}},
            "ramps": {"maxOverhead": "1"},
            "replicas": 2,
            "rollout": {"steps": [{"weight": 100, "pause": "4s"}], "confidence": "0.9"},
            "worker": {
                "imagePullPolicy": "Never",
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
            },
        }
        self.manifest = {
            "apiVersion": "earlyexit.dev/v1alpha1",
            "kind": "EarlyExitService",
            "metadata": {"name": NAME, "namespace": self.namespace},
            "spec": {name: value for name, value in {**before, **spec}.items() if value is not None},
        }
        self.generation = int(self.api.apply(self.path, self.manifest)["metadata"]["generation"])

    @property
    def path(self) -> str:
        return f"{GROUP}/namespaces/{self.namespace}/earlyexitservices/{NAME}"

    def tell(self, rollout: str, **spec: Any) -> None:
        """A person changes a rollout."""
        self.api.merge(f"{GROUP}/namespaces/{self.namespace}/ramprollouts/{rollout}", {"spec": spec})

    def refresh_volumes(self) -> None:
        """Have the kubelet look at the workers' ConfigMaps now, and then not before its sync period (10 s here) has
        passed."""
        for pod in self.pods():
            path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
            self.api.merge(path, {"metadata": {"annotations": {"outages/refreshed": f"{time.time()}"}}})

    def send(self, rate: float = 50.0, *, url: str = "", rows: Path | None = None) -> Traffic:
        """Open-loop traffic through the Service (or to one pod), until the story ends."""
        command = [
            sys.executable,
            str(HERE / "traffic.py"),
            url or f"http://{NAME}.{self.namespace}.svc.cluster.local",
            str(rate),
        ]
        made = Traffic(
            in_node(
                *command,
                *([str(rows)] if rows else []),
                log=self.folder / "traffic.log",
                environment={"PYTHONPATH": "core:operator:worker:cli:.", "OMP_NUM_THREADS": "1"},
            )
        )
        self.traffic.append(made)
        return made

    # --- seeing ------------------------------------------------------------------------------------

    def until(self, what: str, holds: Callable[[], Any], *, seconds: float = PATIENCE_SECONDS) -> Any:
        return self.history.until(what, holds, seconds=seconds, state=self.state)

    def serve(self, **spec: Any) -> None:
        """Apply, and wait until the service is settled."""
        self.apply(**spec)
        self.until("the service to be settled", self.settled)

    def settled(self) -> bool:
        """In what was applied last, although the watch may still tell of the one before."""
        status = self.status()
        generation = self.history.now("service").get(NAME, {}).get("metadata", {}).get("generation")
        return status.get("phase") == "Ready" and status.get("settledGeneration") == generation >= self.generation

    def status(self) -> Json:
        return dict(self.history.now("service").get(NAME, {}).get("status") or {})

    def condition(self, kind: str) -> Json:
        return next((dict(c) for c in self.status().get("conditions", []) if c["type"] == kind), {})

    def rollouts(self) -> list[Json]:
        found = self.history.now("rollout").values()
        return sorted(found, key=lambda r: int(r["metadata"]["name"].rsplit("-", 1)[1]))

    def rollout(self) -> Json:
        """The newest one: name, phase, verdict, status."""
        found = self.rollouts()
        return {"name": found[-1]["metadata"]["name"], **(found[-1].get("status") or {})} if found else {}

    def phase(self, *wanted: str) -> bool:
        return self.rollout().get("phase") in wanted

    def published(self) -> int:
        """The newest epoch in the service's ConfigMap."""
        return int(self.history.now("plan")[f"{NAME}-plan"]["data"]["epoch"])

    def audited(self) -> int:
        """Audits of the canary in the step at hand."""
        ledger = self.rollout().get("ledger") or {}
        arms = [*(ledger.get("live") or {}).values(), ledger.get("retired") or {}]
        return sum((arm.get("canary") or {}).get("audited", 0) for arm in arms)

    def pods(self) -> list[Json]:
        """Workers that run and are not ending."""
        found = self.history.now("pod").values()
        return sorted(
            (p for p in found if not p["metadata"].get("deletionTimestamp") and p["status"].get("podIP")),
            key=lambda p: str(p["metadata"]["name"]),
        )

    def events(self, reason: str) -> list[Json]:
        found = self.api.get(f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return [e for e in found if e["reason"] == reason and e["involvedObject"]["kind"] == "EarlyExitService"]

    def health(self, operator: Operator) -> str:
        """What the operator's liveness probe says."""
        address = f"http://127.0.0.1:{operator.port}/healthz"
        done = subprocess.run(
            ["cluster/exec-in-node", "curl", "-s", "-m", "2", address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    def state(self) -> str:
        pods = {
            p["metadata"]["name"]: (
                p["status"].get("phase"),
                p["status"].get("containerStatuses", [{}])[0].get("state"),
            )
            for p in self.history.now("pod").values()
        }
        told = [json.dumps(self.status())[:2500], json.dumps(self.rollout())[:2500], str(pods)]
        return "\n".join([*told, *(o.tail() for o in self.operators)])

    # --- the end -----------------------------------------------------------------------------------

    def check(
        self,
        *,
        lost: Callable[[Json], bool] = lambda failure: False,
        at_most: float = 0.0,
        operators_alive: bool = True,
    ) -> None:
        """What must hold after every outage: requests, decisions, epochs.

        ``lost`` says whether a failed request was lost by a pod that the story took; there may be ``at_most`` so many
        of them.
        """
        for traffic in self.traffic:
            summary = traffic.stop()
            failures = [f for f in summary["failures"] if not lost(f)]
            assert not failures, f"{len(failures)} of {summary['sent']} requests failed: {failures[:5]}"
            assert len(summary["failures"]) <= at_most, (
                f"{len(summary['failures'])} requests lost: {summary['failures'][:5]}"
            )
            assert summary["answered"] > 0
            print(
                f"{summary['sent']} requests, {len(summary['failures'])} lost, {summary['reconnected']} connections "
                "refused"
            )
        self._check_decisions()
        self._check_epochs()
        if operators_alive:
            assert all(o.process.poll() is None for o in self.operators if o.wanted), self.state()

    def _check_decisions(self) -> None:
        """Each rollout goes one way, ends once, and is told of at most once."""
        statuses: dict[str, list[Json]] = {}
        names: dict[str, str] = {}
        for obj in self.history.of("rollout"):
            statuses.setdefault(obj["metadata"]["uid"], []).append(obj.get("status") or {})
            names[obj["metadata"]["uid"]] = obj["metadata"]["name"]
        active: set[str] = set()
        for uid, seen in statuses.items():
            phases = [s["phase"] for s in seen if "phase" in s]
            way = [phase for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
            for before, after in itertools.pairwise(way):
                assert after in FOLLOWS.get(before, set()), f"{names[uid]} went {' → '.join(way)}"
            verdicts = {
                (s.get("verdict"), s.get("reason"), s.get("finishedAt")) for s in seen if s.get("phase") in FINISHED
            }
            assert len(verdicts) <= 1, f"{names[uid]} was decided more than once: {verdicts}"
            if not verdicts:
                active.add(uid)
            self._check_steps(names[uid], seen)
        assert len(active) <= 1, [names[uid] for uid in active]
        for reason, verdict in (("Promoted", "Succeeded"), ("RolledBack", "RolledBack")):
            told = sum(int(e.get("count") or (e.get("series") or {}).get("count") or 1) for e in self.events(reason))
            ended = sum(any(s.get("verdict") == verdict for s in seen) for seen in statuses.values())
            assert told <= ended, f"{told} Events {reason} for {ended} rollouts"

    def _check_steps(self, name: str, seen: list[Json]) -> None:
        """One follows the other, and what a step is judged by does not move once it has begun, whoever goes on with
        it."""
        steps = [s.get("step", 0) for s in seen]
        assert steps == sorted(steps), f"{name} took its steps in the order {steps}"
        frozen: dict[tuple[int, str], set[str]] = {}
        for status in seen:
            if status.get("stepStartedAt") and status["phase"] in ("Progressing", "Paused", "AwaitingPromotion"):
                limits = [status.get(field) for field in ("weight", "slowSeconds", "slowNeeded", "auditRate")]
                step = (status.get("step", 0), status["stepStartedAt"])
                frozen.setdefault(step, set()).add(json.dumps(limits, sort_keys=True))
        moved = {step: limits for step, limits in frozen.items() if len(limits) > 1}
        assert not moved, f"{name}: {moved}"

    def steps(self) -> list[int]:
        """The weights that the newest rollout has served with, in their order."""
        uid = self.rollouts()[-1]["metadata"]["uid"]
        seen = [r.get("status") or {} for r in self.history.of("rollout") if r["metadata"]["uid"] == uid]
        return list(dict.fromkeys(s["weight"] for s in seen if s.get("stepStartedAt") and s["phase"] == "Progressing"))

    def _check_epochs(self) -> None:
        """Published epochs only rise, and one epoch never means two plans."""
        plans: dict[str, list[Json]] = {}
        for obj in self.history.of("plan"):
            if obj["metadata"]["name"] == f"{NAME}-plan":
                plans.setdefault(obj["metadata"]["uid"], []).append(obj["data"])
        for versions in plans.values():
            epochs = [int(data["epoch"]) for data in versions]
            assert epochs == sorted(epochs), f"epochs went {epochs}"
            assert len({data["plan.json"] for data in versions}) == len(set(epochs)), "one epoch stands for two plans"

    def close(self) -> None:
        """End everything, whatever state the story left it in."""
        with ExitStack() as ending:
            ending.callback(self.api.delete, f"/api/v1/namespaces/{self.namespace}", propagationPolicy="Background")
            ending.callback(self.history.stop)
            ending.callback(self._proxy.kill)
            for traffic in self.traffic:
                if not traffic.summary:
                    ending.callback(traffic.process.kill)
            for operator in self.operators:
                if operator.wanted:
                    ending.callback(operator.stop)


# --- workers as processes of this machine -----------------------------------------------------------


def worker_pid(pod: Json) -> int:
    """The process of the worker's container, seen from this machine."""
    uid = pod["metadata"]["uid"]
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            groups, command = (folder / "cgroup").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if (uid in groups or uid.replace("-", "_") in groups) and b"offramp-worker" in command:
            return int(folder.name)
    raise AssertionError(f"no process of {pod['metadata']['name']}")


def delivered(pod: Json) -> int:
    """The epoch in the kubelet's own copy of the ConfigMap, as the worker reads it; 0 before the first."""
    file = Path(f"/proc/{worker_pid(pod)}/root/etc/offramp/plan/plan.json")
    return int(json.loads(json.loads(file.read_text())["payload"])["epoch"]) if file.exists() else 0


def signal_worker(pod: Json, number: signal.Signals) -> None:
    os.kill(worker_pid(pod), number)
