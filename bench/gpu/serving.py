"""A worker process with a bundle on a GPU under open-loop load, and a bundle for which a GPU has no room."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.models import FloatArray, Subject
from bench.openloop import OpenLoopClient, Target, infer
from bench.validate_simulator import LoopbackWorker
from offramp_core.errors import InvalidBundleError
from offramp_core.plan import Plan, RampThreshold
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import Device, open_session
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.page_locked import cuda_runtime

Json = dict[str, Any]
LOADS = (0.3, 0.9)
COMMAND = ("offramp_worker.main",)  # the worker's image has no command line
LEFT_BYTES = 192 * 2**20


def under_load(folder: Path, x: FloatArray, *, capacity: float, seconds: float, share: float) -> list[Json]:
    """Of exits off, and of a plan with one ramp at which a ``share`` leaves: latencies at shares of a ``capacity`` in
    rows a second, how many were refused, and how busy the GPU was."""
    bundle, rows = load_bundle(folder), []
    plans = {"off": _plan(bundle, 0.0), "exits": _plan(bundle, share)}
    settings = {"OFFRAMP_BUNDLE": str(folder), "OFFRAMP_PORT": "0", "OFFRAMP_HOST": "127.0.0.1"}
    name, entry = bundle.manifest.name, bundle.manifest.inputs[0].name
    requests = [infer(row[None], model=name, input_name=entry) for row in x]
    with LoopbackWorker(folder, settings=settings, command=COMMAND) as worker:
        target = Target("offramp", int(worker.url.rsplit(":", 1)[1]), requests, lambda _: 0)
        with OpenLoopClient(target) as client:
            for which, plan in plans.items():
                worker.put_in_force(plan)
                client.run(rate=LOADS[0] * capacity, seconds=1.0)
                for load in LOADS:
                    with Utilization() as busy:
                        trial = client.run(rate=load * capacity, seconds=seconds, seed=7)
                    rows.append(
                        {
                            "plan": which,
                            "load": load,
                            "p50": trial.percentile_ms(50),
                            "p95": trial.percentile_ms(95),
                            "answered": float(trial.ok.mean()),
                            "busy": busy.mean,
                        }
                    )
    return rows


def _plan(bundle: Bundle, share: float) -> Plan:
    manifest = bundle.manifest
    ramps = (RampThreshold(bundle.columns[0].id, Decimal(str(round(share, 4)))),) if share else ()
    return Plan(manifest.backbone_digest, manifest.ramp_set_digest, ramps, "fp32", "ComputeSaving")


class Utilization:
    """How busy the first GPU is while the block runs, in percent; None where nothing can tell."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Utilization:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def mean(self) -> float | None:
        return float(np.mean(self._seen)) if self._seen else None

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
        while shutil.which(command[0]) and not self._over.wait(0.3):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                self._seen.append(float(done.stdout.split()[0]))


def memory(subject: Subject, device: Device) -> Json:
    """MiB of the GPU that the first session of a model takes, and what each of two more takes beside it."""
    runtime, taken, sessions = _runtime(), [], []
    before = _free(runtime)
    for _ in range(3):
        sessions.append(open_session(subject.model, threads=1, device=device))
        taken.append((before - _free(runtime)) / 2**20)
    return {"model": subject.model.ByteSize() / 2**20, "first": taken[0], "more": (taken[2] - taken[0]) / 2}


def without_room(folder: Path) -> str:
    """What a bundle says for which the GPU has no room left; the memory is taken in this process, and given back."""
    runtime = _runtime()
    taken = _take_all_but(runtime, LEFT_BYTES)
    try:
        Sessions(load_bundle(folder), threads=1)
    except InvalidBundleError as error:
        return f"refused: {str(error)[:200]}"
    else:
        return "not refused"
    finally:
        runtime.cudaFree(taken)


def _runtime() -> ctypes.CDLL:
    if (runtime := cuda_runtime()) is None:
        raise RuntimeError("NVIDIA's runtime is not loaded")
    return runtime


def _take_all_but(runtime: ctypes.CDLL, left: int) -> ctypes.c_void_p:
    block = ctypes.c_void_p()
    if runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(_free(runtime) - left)):
        raise RuntimeError("the GPU's memory cannot be taken")
    return block


def _free(runtime: ctypes.CDLL) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return free.value
