"""What the front end costs: Offramp with exits off against a bare FastAPI handler, one core. ``python -m bench.front``.

Server processes are pinned to one core and the client to another. For each server: the idle server one request at a
time, the p95 at 0.6 of the bare handler's capacity, the highest Poisson rate whose p95 over *all* requests (refused
ones count as late) meets an objective, and the answers in time a second when twice what the bare handler can do is
offered. Rounds are interleaved; every answer is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from rich.console import Console

from bench.openloop import OpenLoopClient, Target, Trial, infer, post
from bench.ports import free_port
from bench.provenance import provenance
from bench.subjects import make_subject

OUT = Path("build/bench/front.json")
SERVER_CORE, CLIENT_CORE = 0, 1
INPUTS = 64
LOOSE_SECONDS = 0.05
CAPACITY_TRIALS = 14  # of each server, each this share of the other trials' length
CAPACITY_SHARE = 0.6
FIRST_STEP, FINEST_STEP = 0.35, 0.02  # of the rate's logarithm
TIGHT_FACTOR = 4  # times the model's own time
START_SECONDS = 120.0
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Data:
    """The model's file, inputs [n, C, H, W], and the labels that the model gives them."""

    model: Path
    bundle: Path
    x: Rows
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Contender:
    """A server to measure: how it is started on a port for a latency objective, and how it is talked to."""

    name: str
    command: Callable[[int], Sequence[str]]
    environment: Callable[[int, float], Mapping[str, str]]
    target: Callable[[int], Target]
    ready: str = "/"


@dataclass
class Figures:
    """Of one server at one objective; lists have one entry per round."""

    idle_ms: list[float] = field(default_factory=list)
    loaded_p95_ms: list[float] = field(default_factory=list)
    capacity: float = 0.0
    goodput: list[float] = field(default_factory=list)
    resident_mib: float = 0.0


def load_data() -> Data:
    """ResNet-56 with its bundle, made unless it is there."""
    subject = make_subject("resnet56", Console(stderr=True))
    model = subject.bundle / "backbone.onnx"
    x: Rows = subject.x[:INPUTS]
    session = _session(model)
    name = session.get_inputs()[0].name
    labels = np.array([int(session.run(None, {name: row[None]})[0].argmax()) for row in x], dtype=np.int64)
    return Data(model, subject.bundle, x, labels)


def model_seconds(data: Data, *, runs: int = 200) -> float:
    """Median time of the model alone on the servers' core, called with pauses as an idle server is."""
    session = _session(data.model)
    name = session.get_inputs()[0].name
    seconds = []
    with on_core(SERVER_CORE):
        for i in range(runs):
            time.sleep(0.002)
            row = data.x[i % len(data.x)][None]
            began = time.perf_counter()
            session.run(None, {name: row})
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def offramp(data: Data, *, name: str = "offramp") -> Contender:
    """A worker without a control plane: exits off, exact; Open Inference Protocol with a binary tensor."""
    manifest = json.loads((data.bundle / "manifest.json").read_text())
    tensor, model = manifest["inputs"][0]["name"], manifest["name"]

    def request(row: Rows) -> bytes:
        return infer(row[None], model=model, input_name=tensor)

    return Contender(
        name,
        command=lambda _: [sys.executable, "-m", "offramp_worker.main"],
        environment=lambda port, objective: {
            "OFFRAMP_BUNDLE": str(data.bundle),
            "OFFRAMP_HOST": "127.0.0.1",
            "OFFRAMP_PORT": str(port),
            "OFFRAMP_THREADS": "1",
            "OFFRAMP_LATENCY_SECONDS": str(objective),
        },
        target=lambda port: Target(
            name, port, [request(row) for row in data.x], lambda body: int(json.loads(body)["outputs"][0]["data"][0])
        ),
        ready="/v2/health/ready",
    )


def bare(data: Data) -> Contender:
    """The handler everyone writes first: raw bytes in, ONNX Runtime called in the handler."""
    script = Path(__file__).parent / "peers" / "servers" / "bare.py"
    headers = {"Content-Type": "application/octet-stream"}
    return Contender(
        "bare",
        command=lambda port: [sys.executable, str(script), str(data.model), str(port)],
        environment=lambda _, __: {},
        target=lambda port: Target(
            "bare",
            port,
            [post("/infer", row.tobytes(), headers=headers) for row in data.x],
            lambda body: int(json.loads(body)["label"]),
        ),
        ready="/health",
    )


class Running:
    """A contender's process tree on the servers' core, and a client connected to it."""

    def __init__(self, contender: Contender, *, objective: float, data: Data) -> None:
        self.name, self.figures = contender.name, Figures()
        self._data = data
        port = free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **contender.environment(port, objective)}
        with on_core(SERVER_CORE):
            self._process = subprocess.Popen(
                contender.command(port), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        self._wait(f"http://127.0.0.1:{port}{contender.ready}")
        self.client = OpenLoopClient(contender.target(port))
        self.checked(self.client.one_by_one(50))

    def checked(self, trial: Trial) -> Trial:
        """The trial, whose answers must be the model's."""
        wrong = trial.ok & (trial.label != self._data.labels[trial.row])
        if wrong.any():
            raise SystemExit(f"{self.name}: {wrong.sum()} of {len(wrong)} answers are not the model's")
        return trial

    def stop(self) -> None:
        """End the server and what it started."""
        self.figures.resident_mib = sum(_resident_mib(pid) for pid in _tree(self._process.pid))
        self.client.__exit__()
        others = _tree(self._process.pid)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self, url: str) -> None:
        end = time.monotonic() + START_SECONDS
        while not _answers(url):
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{self.name} did not start")
            time.sleep(0.2)


def _answers(url: str) -> bool:
    """Whether a server is there and able."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


class CapacitySearch:
    """Where the p95 stops to meet the objective, found by going up after a trial that met it and down after one that
    did not.

    Steps halve where the direction turns and double when it has been kept three times, so that a trial spoilt by the
    machine is made good for by those after it. What is found is the rate that the fewest of all trials speak against.
    """

    def __init__(self, *, low: float, high: float) -> None:
        self._low, self._high = float(np.log(low)), float(np.log(high))
        self._at, self._step = (self._low + self._high) / 2, FIRST_STEP
        self._trials: list[tuple[float, bool]] = []

    @property
    def rate(self) -> float:
        """To try next."""
        return float(np.exp(self._at))

    def learn(self, *, met: bool) -> None:
        """Whether the objective was met at ``rate``."""
        before = [was for _, was in self._trials]
        self._trials.append((self._at, met))
        if before and before[-1] != met:
            self._step = max(FINEST_STEP, self._step / 2)
        elif before[-2:] == [met, met]:
            self._step *= 2
        self._at = min(self._high, max(self._low, self._at + (self._step if met else -self._step)))

    @property
    def found(self) -> float:
        """Half-way between two rates that were tried (or the highest one); 0 when none met the objective."""
        if not any(met for _, met in self._trials):
            return 0.0
        tried = sorted({at for at, _ in self._trials})
        edges = [*((a + b) / 2 for a, b in pairwise(tried)), tried[-1]]
        against = [sum(met == (at > edge) for at, met in self._trials) for edge in edges]
        return float(np.exp(np.mean([edge for edge, n in zip(edges, against, strict=True) if n == min(against)])))


def measure(
    contenders: Sequence[Contender], data: Data, *, objective: float, rounds: int, seconds: float, model: float
) -> dict[str, Figures]:
    """All figures of the contenders, the first of which is the yardstick for load."""
    with ExitStack() as stack:
        servers = []
        for contender in contenders:
            server = Running(contender, objective=objective, data=data)
            stack.callback(server.stop)
            servers.append(server)
        for seed in range(rounds):
            for server in servers:
                idle = server.checked(server.client.one_by_one(100, seed=seed))
                server.figures.idle_ms.append(float(np.median(idle.seconds)) * 1e3)
        by_name = {server.name: server for server in servers}

        def trial(name: str, rate: float, seed: int) -> Trial:
            server = by_name[name]
            return server.checked(server.client.run(rate=rate, seconds=CAPACITY_SHARE * seconds, seed=seed))

        found = find_capacities(trial, by_name, objective=objective, low=0.02 / model, high=2.0 / model)
        for server in servers:
            server.figures.capacity = found[server.name]
        yardstick = max(servers[0].figures.capacity, 1.0)
        for seed in range(rounds):
            for server in servers:
                loaded = server.checked(server.client.run(rate=0.6 * yardstick, seconds=seconds, seed=100 + seed))
                server.figures.loaded_p95_ms.append(loaded.percentile_ms(95))
                flooded = server.checked(server.client.run(rate=2 * yardstick, seconds=seconds / 2, seed=200 + seed))
                server.figures.goodput.append(flooded.goodput(objective))
    return {server.name: server.figures for server in servers}


def find_capacities(
    trial: Callable[[str, float, int], Trial], names: Iterable[str], *, objective: float, low: float, high: float
) -> dict[str, float]:
    """The highest rate from ``low`` to ``high`` of each name whose p95 meets the objective; ``trial`` takes a name, a
    rate and a seed. They take turns, and who begins changes."""
    searches = {name: CapacitySearch(low=low, high=high) for name in names}
    order = list(searches)
    for step in range(CAPACITY_TRIALS):
        for name in order[step % len(order) :] + order[: step % len(order)]:
            rate = searches[name].rate
            searches[name].learn(met=trial(name, rate, 300 + step).percentile_ms(95) <= objective * 1e3)
    return {name: search.found for name, search in searches.items()}


def summary(figures: Mapping[str, Figures], *, yardstick: str, model: float) -> dict[str, Any]:
    """Plain numbers, and ratios to the yardstick: medians of the rounds' own ratios."""
    base = figures[yardstick]
    return {
        name: {
            "idle_ms": median(f.idle_ms),
            "idle_over_model_ms": median(f.idle_ms) - model * 1e3,
            "p95_at_0.6_ms": median(f.loaded_p95_ms),
            "p95_at_0.6_ratio": _ratio(f.loaded_p95_ms, base.loaded_p95_ms),
            "capacity": f.capacity,
            "capacity_ratio": f.capacity / base.capacity if base.capacity else None,
            "goodput_at_twice": median(f.goodput),
            "resident_mib": f.resident_mib,
        }
        for name, f in figures.items()
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if np.isfinite(a) and np.isfinite(b)]
    return median(ratios) if ratios else None


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run, and start processes, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core} & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _session(model: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += _tree(int(child))
    return found


def _resident_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def run(contenders: Callable[[Data], Sequence[Contender]], options: argparse.Namespace) -> dict[str, Any]:
    """Both objectives; the first contender is the yardstick."""
    data = load_data()
    with on_core(CLIENT_CORE):
        model = model_seconds(data)
        result: dict[str, Any] = {
            "model_ms": model * 1e3,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "measured": provenance(),
        }
        for name, objective in (("loose", LOOSE_SECONDS), ("tight", TIGHT_FACTOR * model)):
            figures = measure(
                contenders(data), data, objective=objective, rounds=options.rounds, seconds=options.seconds, model=model
            )
            yardstick = next(iter(figures))
            result[name] = {
                "objective_ms": objective * 1e3,
                "servers": summary(figures, yardstick=yardstick, model=model),
            }
    return result


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Options of both commands that measure servers."""
    made = argparse.ArgumentParser(prog=prog, description=description)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--seconds", type=float, default=8.0, help="of every trial under load")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    options = parser("bench.front", "the front end against a bare handler").parse_args(arguments)
    result = run(lambda data: (bare(data), offramp(data)), options)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
