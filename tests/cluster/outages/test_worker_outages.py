"""Workers die, hang, are taken away, never acknowledge, or are the only ones for which a plan is bad."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hard_inputs import inputs_on_which_a_ramp_is_wrong  # type: ignore[import-not-found]
from stage import SLOWNESS, Json, Stage, signal_worker, worker_pid  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

LONG_STEP = {"steps": [{"weight": 100, "pause": "10s"}], "confidence": "0.9"}
STEPS = {"steps": [{"weight": w, "pause": "3s"} for w in (30, 60, 100)], "confidence": "0.9"}
HELD = {"steps": [{"weight": 100, "pause": "5m"}], "confidence": "0.9"}  # nothing but a rejection ends it
RATE = 50.0  # of the traffic, over two workers
ENDPOINT_SECONDS = 2.0  # from a pod that is not ready to a Service that sends it nothing
DYING_SECONDS = 0.5  # from the end of a process's first thread to the end of its sockets
DYING_SECONDS = 0.5  # from the end of a process's first thread to the end of its sockets
IN_FLIGHT_SECONDS = 2.0  # within which a request that is not lost is answered, on a machine that does much else


class Taken(NamedTuple):
    """A pod that does not answer from one time to another. What had been sent to it and not been answered may be lost
    with it; nothing else."""

    pod: Json
    begin: float
    end: float

    def __call__(self, failure: Json) -> bool:
        there = failure["pod"] in (self.pod["status"]["podIP"], None)
        sent = self.begin - IN_FLIGHT_SECONDS * SLOWNESS <= failure["at"] <= self.end + DYING_SECONDS * SLOWNESS
        return there and sent and failure["how"] in ("broken", "late") and failure["ended"] >= self.begin

    @property
    def at_most(self) -> float:
        """Half of what is sent in that time and the time in flight before it, and half as much again for chance."""
        return 0.75 * RATE * (self.end - self.begin + IN_FLIGHT_SECONDS * SLOWNESS)


def test_worker_killed(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout=HELD)
    killed = stage.pods()[0]
    at = time.time()
    signal_worker(killed, signal.SIGKILL)
    lost = Taken(killed, at, time.time())
    stage.until("the verdict", lambda: stage.phase("RolledBack"))
    assert stage.rollout()["reason"] in ("WorkerRestarted", "WorkerCrashed")
    off_again(stage)
    stage.check(lost=lost, at_most=lost.at_most)


def test_worker_oom_killed(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout=HELD)
    pod = stage.pods()[0]
    pid = worker_pid(pod)
    balloon = fill_memory(pid)
    try:
        alive = time.time()
        while runs(pid):  # looked at as often as possible: what was sent before the last look may be lost
            alive = time.time()
            time.sleep(0.01)
        lost = Taken(pod, alive, time.time())
        stage.until("the kernel's kill to be told", lambda: restarted(stage, pod))
    finally:
        balloon.kill()
    last = stage.history.now("pod")[pod["metadata"]["name"]]["status"]["containerStatuses"][0]["lastState"][
        "terminated"
    ]
    assert last["reason"] == "OOMKilled", last
    stage.until("the verdict", lambda: stage.phase("RolledBack"))
    assert stage.rollout()["reason"] in ("WorkerRestarted", "WorkerCrashed")
    off_again(stage)
    stage.check(lost=lost, at_most=lost.at_most)


def test_worker_hung(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout=LONG_STEP)
    hung = stage.pods()[0]
    at = time.time()
    signal_worker(hung, signal.SIGSTOP)
    name = hung["metadata"]["name"]
    stage.until("the hung worker to be out of the Service", lambda: not is_ready(stage, name), seconds=50)
    out = time.time()
    time.sleep(ENDPOINT_SECONDS * SLOWNESS)
    signal_worker(hung, signal.SIGCONT)
    stage.until("the worker to be back", lambda: is_ready(stage, name))
    stage.until("the end of the rollout", lambda: stage.phase("Succeeded", "RolledBack", "Aborted"))
    assert stage.rollout()["verdict"] == "Succeeded", "a worker that hangs says nothing against a plan"
    stage.until("the service to be settled", stage.settled)
    lost = Taken(hung, at, out + ENDPOINT_SECONDS * SLOWNESS)
    stage.check(lost=lost, at_most=lost.at_most)


def test_worker_drained_mid_step(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout=STEPS)
    pod = stage.pods()[0]["metadata"]["name"]
    name = stage.rollout()["name"]
    # What `kubectl drain` does for each pod of a node.
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": stage.namespace}}
    stage.api.post(f"/api/v1/namespaces/{stage.namespace}/pods/{pod}/eviction", eviction)
    stage.until("another worker", lambda: pod not in names(stage) and len(stage.pods()) == 2)
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    stage.until("the service to be settled", stage.settled)
    assert stage.steps() == [30, 60, 100]
    assert [r["metadata"]["name"] for r in stage.rollouts()] == [name]
    stage.check()


def test_worker_that_never_acknowledges(stage: Stage) -> None:
    stage.operate()
    stage.serve(
        ramps={"mode": "Recommend", "maxOverhead": "1"}, rollout={"steps": [{"weight": 100}], "confidence": "0.9"}
    )
    stage.send()
    stage.until("a recommendation", lambda: stage.phase("Pending"))
    deaf = stage.pods()[0]
    with admin_port_closed(deaf):
        stage.tell(stage.rollout()["name"], decision="Promote")
        stage.until("the attempt to begin", lambda: stage.phase("Progressing"))
        stage.until("the roll-back to begin", lambda: stage.phase("RollingBack", "Aborted"))
        assert stage.rollout()["reason"] == "AckTimeout" and deaf["metadata"]["name"] in stage.rollout()["message"]
        assert stage.condition("Ready")["status"] == "True"
    stage.until("the abort", lambda: stage.phase("Aborted"))
    stage.until("the worker to acknowledge what is stable", lambda: stage.status()["workers"].get("acked") == 2)
    off_again(stage)
    stage.check()


def test_bad_plan_on_one_of_four_workers_only(stage: Stage, tmp_path: Path) -> None:
    ramp, hard = inputs_on_which_a_ramp_is_wrong(tmp_path)
    stage.operate()
    stage.serve(ramps={"mode": "Auto", "maxOverhead": "1"}, replicas=4, suspend=True)
    stage.send(30.0)
    pin = {"ramps": [{"id": ramp, "threshold": "1"}]}
    stage.apply(
        ramps={"mode": "Pinned", "maxOverhead": "1", "pin": pin},
        rollout={"steps": [{"weight": 50, "pause": "5m"}], "confidence": "0.9"},
        suspend=False,
    )
    stage.until("the pin's canary", lambda: stage.phase("Progressing") and stage.rollout().get("stepStartedAt"))
    victim = stage.pods()[0]["status"]["podIP"]
    stage.send(30.0, url=f"http://{victim}:8080", rows=hard)
    stage.until("the verdict", lambda: stage.phase("RolledBack"))
    assert stage.rollout()["reason"] in ("AccuracyRejected", "DriftRejected")
    stage.until("the pin to be refused", lambda: stage.condition("Stalled").get("reason") == "PinRejected")
    off_again(stage, settled=False)
    assert len(stage.rollouts()) == 1
    stage.check()


# --- helpers ----------------------------------------------------------------------------------------


def off_again(stage: Stage, *, settled: bool = True) -> None:
    """What served before the attempt serves: here, the model itself."""
    first = stage.rollouts()[0]["spec"]["from"]
    stage.until("the plan before to serve", lambda: stage.status().get("stableConfig") == first)
    if settled:
        stage.until("the service to be settled", stage.settled)
    assert stage.condition("Ready")["status"] == "True"


def names(stage: Stage) -> list[str]:
    return [p["metadata"]["name"] for p in stage.pods()]


def is_ready(stage: Stage, pod: str) -> bool:
    conditions = stage.history.now("pod")[pod]["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def restarted(stage: Stage, pod: Json) -> bool:
    return any(
        s["restartCount"] > 0 for s in stage.history.now("pod")[pod["metadata"]["name"]]["status"]["containerStatuses"]
    )


def runs(pid: int) -> bool:
    """Whether the process has all its parts: one that the kernel has killed keeps its entry until it is waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


FILL = """
import os, sys, time
open("/proc/self/oom_score_adj", "w").write("-999")  # the kernel is to choose the worker
for root in sys.argv[1:]:
    open(root + "/cgroup.procs", "w").write(str(os.getpid()))
held = []
while True:
    held.append(bytearray(os.urandom(1 << 20) * 8))
    time.sleep(0.01)
"""


def fill_memory(pid: int) -> Any:
    """A process that takes what the worker's container may have, until the kernel has to kill."""
    roots = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            roots.append(f"/sys/fs/cgroup/memory{path}")
        elif controllers == "" and Path(f"/sys/fs/cgroup{path}/memory.max").exists():
            roots.append(f"/sys/fs/cgroup{path}")
    assert roots, "the worker's container has no memory cgroup"
    return subprocess.Popen([sys.executable, "-c", FILL, *roots])


@contextmanager
def admin_port_closed(pod: Json) -> Iterator[None]:
    """Neither pokes nor pulls reach a worker that goes on serving."""
    enter = ["nsenter", "-t", str(worker_pid(pod)), "-n", "nft"]
    rules = "table inet deaf { chain input { type filter hook input priority 0; tcp dport 8081 drop\n}\n}\n"
    subprocess.run([*enter, "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "delete", "table", "inet", "deaf"], check=True)
