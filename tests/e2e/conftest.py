"""``offramp up`` as a user runs it: a process, a file, a state folder, and clients on its one port."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from identity_bundle import CLASSES, MODEL, answers, inputs, write_bundle

DEADLINE_SECONDS = 180.0
SENT = itertools.count()  # requests, of eight sources in turn
Json = dict[str, Any]


def eventually(
    condition: Callable[[], Any], *, what: str, seconds: float = DEADLINE_SECONDS, state: Callable[[], object] = str
) -> Any:
    """Poll until ``condition`` gives something; on the deadline fail with the last state seen."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds:.0f} s; last state: {state()}"
        time.sleep(0.05)
    return value


class Up:
    """One ``offramp up`` process after another on the same file and state folder."""

    def __init__(self, folder: Path, spec: Json, *, name: str = "tiny") -> None:
        self.folder, self.name = folder, name
        self.file, self.state = folder / "service.yaml", folder / "state"
        self.log = folder / "up.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0
        self.write(spec)

    def write(self, spec: Json) -> None:
        """What the user saves in an editor."""
        manifest = {
            "apiVersion": "earlyexit.dev/v1alpha1",
            "kind": "EarlyExitService",
            "metadata": {"name": self.name},
            "spec": spec,
        }
        temporary = self.file.with_suffix(".new")
        temporary.write_text(yaml.safe_dump(manifest))
        temporary.replace(self.file)

    def start(self, *flags: str) -> None:
        offset = self.started_at = len(self.events())
        command = [sys.executable, "-m", "offramp_cli", "up", str(self.file), "--state", str(self.state)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--port", "0", "--json", *flags], stdout=log, stderr=log)
        self.url = str(eventually(lambda: self._listening(offset), what="listening", state=self.tail)["url"])

    def _listening(self, offset: int) -> Json | None:
        assert self.process is not None and self.process.poll() is None, f"`offramp up` ended: {self.tail()}"
        return next((e for e in self.events()[offset:] if e.get("event") == "listening"), None)

    def stop(self, number: signal.Signals = signal.SIGTERM, *, seconds: float = 120) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(seconds)

    # --- what can be seen --------------------------------------------------------------------------

    def events(self, name: str = "") -> list[Json]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        parsed = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [e for e in parsed if not name or e.get("event") == name]

    def tail(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else "no log"

    def objects(self, kind: str) -> list[Json]:
        found = [json.loads(p.read_text()) for p in sorted((self.state / "objects" / kind).glob("*.json"))]
        return sorted(found, key=lambda o: str(o["metadata"]["creationTimestamp"]))

    def service(self) -> Json:
        found = self.objects("EarlyExitService")
        return found[0] if found else {"status": {}}

    def status(self) -> Json:
        return dict(self.service().get("status") or {})

    def condition(self, kind: str) -> Json:
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), {})

    def rollout(self) -> Json:
        """The newest attempt, or an empty object."""
        found = self.objects("RampRollout")
        return {"status": {}, **found[-1]} if found else {"status": {}}

    def worker_pids(self) -> list[int]:
        workers = json.loads((self.state / "workers.json").read_text())["workers"]
        return [int(w["pid"]) for w in workers if w["pid"]]

    def await_ready(self, n: int) -> None:
        """Until ``n`` workers of the present process serve; the status in the folder may still be that of an earlier
        one."""

        def ready() -> bool:
            serving = {e["worker"] for e in self.events()[self.started_at :] if e.get("event") == "worker-ready"}
            told = self.status().get("workers", {}).get("ready")
            return len(serving) >= n and told == n and self.condition("Ready").get("status") == "True"

        eventually(ready, what=f"{n} ready workers", state=self.tail)

    def infer(self, rows: npt.NDArray[np.float32], **parameters: Any) -> Json:
        with httpx.Client(trust_env=False) as client:
            return ask(client, self.url, rows, **parameters)


def ask(client: httpx.Client, url: str, rows: npt.NDArray[np.float32], **parameters: Any) -> Json:
    """One request over Open Inference Protocol, its tensor as binary data: numbers in JSON cost more than the model."""
    size = {"binary_data_size": rows.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(rows.shape), "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"stream": f"client-{next(SENT) % 8}", **parameters}}).encode()
    reply = client.post(
        f"{url}/v2/models/{MODEL}/infer",
        content=head + rows.tobytes(),
        headers={"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"},
        timeout=20,
    )
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Traffic:
    """Open-loop clients in threads: ``rate`` requests per second of rows drawn with replacement, ``together`` in each;
    answers are compared with the model's own. ``answered``, ``agreed`` and ``exits`` count rows."""

    url: Callable[[], str]
    rows: npt.NDArray[np.float32]
    truth: npt.NDArray[np.int64]
    rate: float = 60.0
    clients: int = 3
    together: int = 1
    parameters: Json = field(default_factory=dict)
    answered: int = 0
    agreed: int = 0
    failures: list[str] = field(default_factory=list)
    exits: dict[str, int] = field(default_factory=dict)
    _running: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        self._running.set()
        self._threads = [threading.Thread(target=self._send, args=(i,), daemon=True) for i in range(self.clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._running.clear()
        for thread in self._threads:
            thread.join(30)

    def _send(self, seed: int) -> None:
        rng = np.random.default_rng([seed, self.answered])
        with httpx.Client(trust_env=False) as client:
            while self._running.is_set():
                time.sleep(float(rng.exponential(self.clients / self.rate)))
                self._one(client, rng.integers(len(self.rows), size=self.together))

    def _one(self, client: httpx.Client, drawn: npt.NDArray[np.int64]) -> None:
        try:
            reply = ask(client, self.url(), self.rows[drawn], **self.parameters)
        except (httpx.HTTPError, AssertionError) as error:
            with self._lock:
                self.failures.append(repr(error))
            return
        labels = next(o["data"] for o in reply["outputs"] if o["name"] == "label")
        with self._lock:
            self.answered += len(drawn)
            self.agreed += int((np.array(labels) == self.truth[drawn]).sum())
            for exit_name in str(reply["parameters"]["exit"]).split(","):
                self.exits[exit_name] = self.exits.get(exit_name, 0) + 1


class Tools:
    """The helpers above, as a fixture: pytest imports test modules without a package around them."""

    eventually = staticmethod(eventually)
    alive = staticmethod(alive)
    inputs = staticmethod(inputs)
    write_bundle = staticmethod(write_bundle)
    n_classes = CLASSES
    answers = staticmethod(answers)
    ask = staticmethod(ask)
    Traffic = Traffic
    Up = Up


@pytest.fixture
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def up(tmp_path: Path, bundle: Path) -> Iterator[Callable[..., Up]]:
    """Makes :class:`Up`s whose processes are gone when the test ends."""
    with ExitStack() as stack:

        def make(**spec: Any) -> Up:
            base = {
                "model": {"uri": f"file://{bundle}"},
                "objective": {"latency": {"threshold": "200ms"}, "accuracy": {"maxDisagreement": "0.05"}},
                "replicas": 2,
            }
            made = Up(tmp_path, {**base, **spec})
            stack.callback(_end, made)
            return made

        yield make


def _end(made: Up) -> None:
    if made.process is not None and made.process.poll() is None:
        made.process.terminate()
        try:
            made.process.wait(60)
        except subprocess.TimeoutExpired:
            os.kill(made.process.pid, signal.SIGKILL)
