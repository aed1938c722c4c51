"""24 services and the processes of the two arms, all of them on one core: two shared workers, and a worker for each.

Two of three are the digits' network, every third is ResNet-56. Bundles are copies: no worker knows that two of them
are alike, and what the page cache shares is split among those who use it in both arms (PSS).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench.demo.pools import prepare_digits
from bench.front import CLIENT_CORE, SERVER_CORE, on_core
from bench.openloop import OpenLoopClient, Target, Trial, infer
from bench.subjects import make_subject
from bench.validate_simulator import LoopbackWorker
from offramp_core.sharing.packing import Demand, Size, pack
from offramp_worker.bundle.load import load_bundle

FOLDER = Path("build/sharing")
SERVICES, WORKERS = 24, 2
ROWS = 32
OBJECTIVE_SECONDS = 0.05
SETTINGS = {"OFFRAMP_LATENCY_SECONDS": str(OBJECTIVE_SECONDS)}
Floats = npt.NDArray[np.float64]
Kind = tuple[Path, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Service:
    """A service: its bundle, whole requests, and what a row takes."""

    name: str
    bundle: Path
    requests: Sequence[bytes]
    seconds: float


def kinds(console: Console) -> list[Kind]:
    """The bundles that services are copies of, and inputs of each."""
    digits = prepare_digits(Path("build/demo"), console)
    resnet = make_subject("resnet56", console)
    return [(digits.bundle, digits.clean.x), (digits.bundle, digits.clean.x), (resnet.bundle, resnet.x)]


def services(of: Sequence[Kind], *, n: int = SERVICES, folder: Path = FOLDER) -> list[Service]:
    """``n`` of them, the kinds in turn, in ``folder``. The most popular comes first."""
    return [_service(folder / f"s{i:02}", *of[i % len(of)]) for i in range(n)]


def _service(folder: Path, bundle: Path, x: npt.NDArray[Any]) -> Service:
    if not folder.is_dir():
        shutil.copytree(bundle, folder)
    loaded = load_bundle(folder)
    rows = np.ascontiguousarray(x[:ROWS], dtype=np.float32)
    requests = [infer(row[None], model=folder.name, input_name=loaded.manifest.inputs[0].name) for row in rows]
    return Service(folder.name, folder, requests, loaded.profile.batches[0].exact_seconds)


def zipf(n: int) -> Floats:
    """Shares of traffic: the k-th most popular has 1/k of the first one's."""
    shares = 1 / np.arange(1, n + 1)
    return np.asarray(shares / shares.sum())


def request_weights(shares: Floats) -> Floats:
    """How often each request of all services is sent."""
    return np.repeat(shares / ROWS, ROWS)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve all of them: its processes and a client on the other core."""

    name: str
    workers: Sequence[LoopbackWorker]
    client: OpenLoopClient

    def run(self, *, rate: float, seconds: float, seed: int, shares: Floats) -> Trial:
        """Poisson arrivals for all services."""
        self.client.run(rate=min(rate, 100.0), seconds=0.5, seed=seed + 1000, weights=request_weights(shares))
        return self.client.run(rate=rate, seconds=seconds, seed=seed, weights=request_weights(shares))

    def proportional_bytes(self) -> int:
        """Memory of its processes; a page that several use counts in parts (PSS)."""
        return sum(_pss(worker.pid) for worker in self.workers)

    @contextmanager
    def awake(self) -> Iterator[Arm]:
        """Only while it is measured do its processes get any time."""
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGCONT)
        try:
            yield self
        finally:
            for worker in self.workers:
                os.kill(worker.pid, signal.SIGSTOP)


def homes(of: Sequence[Service]) -> list[list[Service]]:
    """Which shared worker holds which, as the operator would pack them."""
    demands = [
        Demand(service.name, float(share) * service.seconds, sum(f.stat().st_size for f in service.bundle.iterdir()))
        for service, share in zip(of, zipf(len(of)), strict=True)
    ]
    room = sum(demand.bytes for demand in demands)
    busy = sum(demand.busy for demand in demands)
    packing = pack(demands, Size(busy, room, min_workers=WORKERS, max_workers=WORKERS))
    return [[service for service in of if service.name in names] for names in packing.workers]


@contextmanager
def arms(of: Sequence[Service]) -> Iterator[Mapping[str, Arm]]:
    """Both, asleep; this process is on the client's core."""
    with shared(of) as together, ExitStack() as stack:
        separate, ports = [], {}
        with on_core(SERVER_CORE):
            for service in of:
                own = SETTINGS | {"OFFRAMP_MODEL_NAME": service.name}
                separate.append(_started(stack, LoopbackWorker(service.bundle, settings=own)))
                ports[service.name] = _port(separate[-1])
        apart = Arm("separate", separate, stack.enter_context(_client("separate", of, ports)))
        with apart.awake():
            pass
        stack.enter_context(on_core(CLIENT_CORE))
        yield {"shared": together, "separate": apart}


@contextmanager
def shared(of: Sequence[Service]) -> Iterator[Arm]:
    """The workers that share them, asleep, in the order of :func:`homes`."""
    with ExitStack() as stack:
        workers, ports = [], {}
        with on_core(SERVER_CORE):
            for held in homes(of):
                asked = zipf(len(of))[[of.index(service) for service in held]]
                workers.append(_started(stack, shared_worker(held, shares=asked, settings=SETTINGS)))
                ports |= {service.name: _port(workers[-1]) for service in held}
        arm = Arm("shared", workers, stack.enter_context(_client("shared", of, ports)))
        with arm.awake():
            pass
        yield arm


def shared_worker(
    of: Sequence[Service], *, shares: Floats | None = None, settings: Mapping[str, str] | None = None, room: int = 0
) -> LoopbackWorker:
    """One that serves these, each with its share of the executor, and with ``room`` bytes for models where that is
    bounded."""
    weights = np.ones(len(of)) if shares is None else shares / shares.max()
    listed = [
        {"name": service.name, "bundle": str(service.bundle.resolve()), "share": float(weight)}
        for service, weight in zip(of, weights, strict=True)
    ]
    with NamedTemporaryFile("w", suffix=".json", dir=of[0].bundle.parent, delete=False) as file:
        json.dump({"models": listed}, file)
    command = ("offramp_cli", "serve", "--models", file.name, "--port", "0", *(("--memory", str(room)) if room else ()))
    return LoopbackWorker(FOLDER, settings={**(settings or {}), "OFFRAMP_SERVICE_UID": ""}, command=command)


def _started(stack: ExitStack, worker: LoopbackWorker) -> LoopbackWorker:
    """One that is woken before it is ended."""
    stack.enter_context(worker)
    stack.callback(os.kill, worker.pid, signal.SIGCONT)
    return worker


def _client(name: str, of: Sequence[Service], ports: Mapping[str, int]) -> OpenLoopClient:
    return OpenLoopClient(
        Target(
            name,
            0,
            [request for service in of for request in service.requests],
            lambda body: int(json.loads(body)["outputs"][0]["data"][0]),
            ports=[ports[service.name] for service in of for _ in service.requests],
        )
    )


def _port(worker: LoopbackWorker) -> int:
    return int(worker.url.rpartition(":")[2])


def _pss(pid: int) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"process {pid} is gone")
    return int(found[1]) * 1024
