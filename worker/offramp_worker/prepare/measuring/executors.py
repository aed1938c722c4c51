"""The whole backbone on every executor at hand, timed: which one is fastest is measured, not assumed.

Workers serve with ONNX Runtime (decision 3); what is measured here says what that costs or gains on this machine.
torch.compile runs in a process of its own, which is stopped when its time is up: compiling cannot be interrupted
otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core.bundle import TensorSpec
from offramp_core.precision import EXACT
from offramp_worker.bundle.graph import input_name
from offramp_worker.bundle.lengths import typical_batch
from offramp_worker.devices import CPU, Device, open_session
from offramp_worker.padded import run_at_once
from offramp_worker.prepare.measuring.profiling import Job, time_jobs

BATCH_SIZES = (1, 4, 16, 32)
COMPILE_LIMIT = 60.0
MUCH_FASTER = 0.9
ORT = "onnxruntime-"  # and a precision
ORT_FP32 = f"{ORT}{EXACT}"
EAGER, COMPILED = "torch-eager", "torch-compile"

Array = npt.NDArray[Any]
Seconds = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Executors:
    """``seconds`` maps executor to batch size (as text, as JSON has it) to seconds; ``missing`` maps those that were
    not timed to why."""

    seconds: Seconds = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def faster(self) -> str:
        """Says so where torch beats ONNX Runtime at fp32 by more than 10 % at some batch size; else empty."""
        exact = self.seconds.get(ORT_FP32, {})
        ratios = {
            (name, size): seconds / exact[size]
            for name in (EAGER, COMPILED)
            for size, seconds in self.seconds.get(name, {}).items()
        }
        if not ratios or min(ratios.values()) >= MUCH_FASTER:
            return ""
        name, size = min(ratios, key=lambda key: ratios[key])
        return (
            f"{name} takes {ratios[name, size]:.2f} of ONNX Runtime's time at batch size {size}; workers serve "
            "with ONNX Runtime"
        )


def compare_executors(
    models: Mapping[str, onnx.ModelProto],
    program: Any,
    x: Array,
    spec: TensorSpec,
    *,
    threads: int,
    seconds: float,
    compile_limit: float,
    device: Device = CPU,
) -> Executors:
    """Time the backbone in one piece at batch sizes 1, 4, 16 and 32.

    Parameters
    ----------
    models : mapping
        Executor name to the ONNX graph it runs.
    program : torch.export.ExportedProgram or None
        The same model in torch; None where it came as ONNX.
    x : (n, ...)
        Inputs; repeated when there are fewer than the largest batch.
    spec : TensorSpec
        The model's input.
    seconds : float
        Time spent on those that run in this process, about.
    compile_limit : float
        Seconds for compiling and timing torch.compile; 0 leaves it out.
    device : Device
        Where ``models`` run. torch is timed on the CPU, and on a GPU left out.
    """
    batches = {size: typical_batch(x, spec, size=size) for size in BATCH_SIZES}
    runs = {name: _ort(model, threads=threads, device=device) for name, model in models.items()}
    if reason := _not_in_torch(program) if device.is_cpu else f"torch is timed on CPUs, and this is {device.name}":
        timed = _timed(runs, batches, threads=threads, seconds=seconds, device=device)
        return Executors(timed, dict.fromkeys((EAGER, COMPILED), reason))
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs[EAGER] = _torch(program.module())
        timed = _timed(runs, batches, threads=threads, seconds=seconds, device=device)
    finally:
        torch.set_num_threads(before)
    if compile_limit <= 0:
        return Executors(timed, {COMPILED: "not asked for"})
    ratios, reason = _compiled_ratios(program, batches, threads=threads, limit=compile_limit)
    compiled = {size: ratio * timed[EAGER][size] for size, ratio in ratios.items()}
    return Executors(timed | ({COMPILED: compiled} if compiled else {}), {COMPILED: reason} if reason else {})


def _not_in_torch(program: Any) -> str:
    """Why a model cannot be timed in torch; empty where it can."""
    if program is None:
        return "the model came as ONNX"
    if len(program.graph_signature.user_inputs) != 1:
        return "the program takes more than one input"
    return ""


def _timed(
    runs: Mapping[str, Callable[[Array], object]],
    batches: Mapping[int, Array],
    *,
    threads: int,
    seconds: float,
    device: Device,
) -> Seconds:
    found: Seconds = {name: {} for name in runs}
    for size, rows in batches.items():
        jobs = {name: Job(partial(run, rows)) for name, run in runs.items()}
        medians = time_jobs(jobs, threads=threads, seconds=seconds / len(batches), device=device)
        for name, median in medians.items():
            found[name][str(size)] = median
    return found


def _ort(model: onnx.ModelProto, *, threads: int, device: Device) -> Callable[[Array], object]:
    session = open_session(model, threads=threads, device=device)
    entry = input_name(model)
    return lambda rows: run_at_once(session, {entry: rows})


def _torch(module: Any) -> Callable[[Array], object]:
    import torch

    def run(rows: Array) -> object:
        with torch.inference_mode():
            return module(torch.from_numpy(rows))

    return run


def _compiled_ratios(
    program: Any, batches: Mapping[int, Array], *, threads: int, limit: float
) -> tuple[dict[str, float], str]:
    """torch.compile's time over eager's by batch size, and why some are missing."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(program, Path(folder) / "program.pt2")
        named: dict[str, Any] = {str(size): rows for size, rows in batches.items()}
        np.savez(Path(folder) / "batches.npz", **named)
        command = [sys.executable, "-m", "offramp_worker.prepare.measuring.executors", folder, str(threads)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired as late:
            output = late.stdout.decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
            return _ratios(output), f"not done within {limit:.0f} s"
    ratios = _ratios(done.stdout)
    if done.returncode == 0:
        return ratios, ""
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return ratios, f"it fails here: {last[:200]}"


def _ratios(lines: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines.splitlines():
        if line.startswith("{") and line.endswith("}"):
            found |= json.loads(line)
    return found


def _compile_and_time(folder: Path, threads: int) -> None:
    """The process of its own: compile, and print a line of JSON after each batch size."""
    import torch

    torch.set_num_threads(threads)
    with np.load(folder / "batches.npz") as stored:
        batches = dict(stored)
    module = torch.export.load(folder / "program.pt2").module()
    runs = {EAGER: _torch(module), COMPILED: _torch(torch.compile(module))}
    for size, rows in batches.items():
        jobs = {name: Job(partial(run, rows)) for name, run in runs.items()}
        medians = time_jobs(jobs, threads=threads, seconds=1.0)
        print(json.dumps({size: medians[COMPILED] / medians[EAGER]}), flush=True)


if __name__ == "__main__":
    _compile_and_time(Path(sys.argv[1]), int(sys.argv[2]))
