"""Everything that Offramp does on a GPU, measured: ``make bench-gpu``.

    python -m bench.gpu [--device cuda|webgpu] [--small] [--only TEXT] [--minutes 15]
        [--out build/bench/gpu.json]

Takes CUDA where it is there, else WebGPU; ``--small`` takes models that a software GPU computes. Parts that do not fit
into the minutes are left out by name; one that fails says why and the others go on. The results are kept after every
part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnxruntime as ort
from rich.console import Console

from bench.gpu import serving, timing
from bench.gpu.bundles import make_bundle
from bench.gpu.models import SUBJECTS, FloatArray, Subject
from bench.provenance import provenance
from bench.report.gpu import page
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import CUDA, CUDA_TF32, WEBGPU, Device, missing
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.precision.halving import half_model

Json = dict[str, Any]
OUT = Path("build/bench/gpu.json")
PROFILE_SECONDS, SERVE_SECONDS = 3.0, 3.0
PROFILED = (1, 8, 32, 128)
SHARES = (0.0, 0.3, 0.6, 0.9)
HALF = " fp16"


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is: on a real GPU, or on one in software."""

    small: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1, 4) if self.small else (1, 4, 8, 16, 32, 64, 128, 256)

    @property
    def served_sizes(self) -> tuple[int, ...]:
        return (1, 4) if self.small else (1, 8, 32, 128)

    @property
    def alternating(self) -> tuple[int, int]:
        """The largest of the alternating sizes, and how many batches."""
        return (4, 8) if self.small else (32, 64)

    @property
    def profiled(self) -> tuple[int, ...]:
        return (1, 2, 4) if self.small else PROFILED


class Measured:
    """A subject on a device, with its bundle, made when somebody asks."""

    def __init__(self, subject: Subject, device: Device, scale: Scale, folder: Path) -> None:
        self.subject, self.device, self.scale, self._folder = subject, device, scale, folder

    @cached_property
    def x(self) -> FloatArray:
        return self.subject.inputs(max(self.scale.sizes), seed=2)

    @cached_property
    def folder(self) -> Path:
        """Of the bundle."""
        where, sizes = self._folder / f"{self.subject.name}-{self.device.name}", self.scale.profiled
        return make_bundle(self.subject, where, device=self.device, batch_sizes=sizes, seconds=PROFILE_SECONDS)

    @cached_property
    def bundle(self) -> Bundle:
        return load_bundle(self.folder)

    @cached_property
    def sessions(self) -> Sessions:
        return Sessions(self.bundle, threads=1)

    def capacity(self) -> float:
        """Rows a second of the exact executor, at the largest profiled size that a worker batches."""
        batch = next(b for b in reversed(self.bundle.profile.batches) if b.batch_size <= 32)
        return batch.batch_size / batch.exact_seconds


def forms(measured: Measured) -> Json:
    """Milliseconds of the whole model by arithmetic and batch size."""
    subject, device = measured.subject, measured.device
    stages = {"fp32": timing.whole(subject.model, device)}
    if device.is_cuda:
        stages["tf32"] = timing.whole(subject.model, CUDA_TF32)
        stages["fp16"] = timing.whole(half_model(subject.model, cuts=()), device)
    return timing.by_size(stages, measured.x, measured.scale.sizes, device)


def parts(all_measured: dict[str, Measured], scale: Scale) -> dict[str, Callable[[], Any]]:
    """Each part by its name, in the order in which it is worth its time."""
    found: dict[str, Callable[[], Any]] = {}
    sizes = scale.served_sizes
    first = next(iter(all_measured.values()))
    for name, m in all_measured.items():
        whole = not name.endswith(HALF)
        if whole:
            found[f"{name}: agreement"] = lambda m=m: timing.agreement(m.subject, m.device, rows=8)
            found[f"{name}: sizes"] = lambda m=m: forms(m)
            found[f"{name}: alternating"] = lambda m=m: timing.alternating(
                m.subject.model, m.device, m.x, *scale.alternating
            )
        found[f"{name}: ramps"] = lambda m=m: timing.ramps(m.sessions, m.bundle, m.x, sizes)
        found[f"{name}: exits"] = lambda m=m: timing.exits(m.sessions, m.bundle, m.x, sizes=sizes[1:], shares=SHARES)
        found[f"{name}: kernels"] = lambda m=m: timing.kernels(m.bundle, m.device, m.x, sizes)
        if whole:
            found[f"{name}: serve"] = lambda m=m: serving.under_load(
                m.folder, m.x[:64], capacity=m.capacity(), seconds=SERVE_SECONDS, share=SHARES[2]
            )
        if m is first and m.device.is_cuda:
            found["memory"] = lambda: serving.memory(first.subject, first.device)
            found["no room"] = lambda: serving.without_room(first.folder)
    return found


def device_name(device: Device) -> str:
    """What the device is, for people."""
    if not device.is_cuda:
        return f"{device.name}, in software or not"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def chosen(name: str) -> Device:
    """The device to measure on; raise SystemExit where there is none."""
    reasons = {device: missing(device) for device in (CUDA, WEBGPU) if name in ("", device.name)}
    for device, reason in reasons.items():
        if not reason:
            return device
    raise SystemExit("no GPU: " + "; ".join(f"{device.name}: {reason}" for device, reason in reasons.items()))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="what Offramp does on a GPU, measured")
    parser.add_argument("--device", choices=("cuda", "webgpu"), default="")
    parser.add_argument("--small", action="store_true", help="models that a software GPU computes")
    parser.add_argument("--only", default="", help="parts whose names have this in them")
    parser.add_argument("--minutes", type=float, default=15.0, help="parts that would begin later are left out")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    device, scale, console = chosen(options.device), Scale(options.small), Console()
    results: Json = {
        "device": device_name(device),
        "small": options.small,
        "runtime": ort.__version__,
        "provenance": provenance(),
        "parts": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began, ended = time.monotonic(), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        subjects = {name: make(small=options.small) for name, make in SUBJECTS.items()}
        kinds = {f"{n} fp32": (s, device) for n, s in subjects.items()}
        if device.is_cuda:
            halves = {name: replace(s, model=half_model(s.model, cuts=s.places)) for name, s in subjects.items()}
            kinds = {
                f"{n}{form}": (s[n], device) for n in subjects for form, s in ((" fp32", subjects), (HALF, halves))
            }
        everything = {name: Measured(s, d, scale, Path(folder) / name) for name, (s, d) in kinds.items()}
        wanted = {name: part for name, part in parts(everything, scale).items() if options.only in name}
        for name, part in wanted.items():
            results["parts"][name] = run(part) if time.monotonic() < ended else {"left out": "no time was left"}
            console.print(f"{name}: {time.monotonic() - began:.0f} s so far")
            options.out.write_text(json.dumps(results, indent=1))
    console.print(page(results), highlight=False)
    if failed := [name for name, part in results["parts"].items() if isinstance(part, dict) and "failed" in part]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(part: Callable[[], Any]) -> Any:
    """What a part found, or why it failed."""
    try:
        return part()
    except Exception as error:  # one part must not cost the others, on a machine that is there for minutes
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}


if __name__ == "__main__":
    main(sys.argv[1:])
