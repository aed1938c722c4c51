"""Times of whole models and of plans on one device, through the stages that a worker runs.

Every figure is the median of repeated runs between two looks at the clock of this process, with the batch on the host
before, where a worker puts its batches together, and the logits on the host behind: what a request waits for. What is
compared takes turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from bench.gpu.models import FloatArray, Subject
from offramp_core.costs import CostTable
from offramp_core.execution import Regrouping
from offramp_core.uncertainty import exit_test
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.bundle.load import Bundle
from offramp_worker.bundle.stages import StageGraph, pieces
from offramp_worker.devices import CPU, Device, open_session
from offramp_worker.engine.execution.chains import stage_on
from offramp_worker.engine.execution.execute import Runnable, run_exact, run_stages
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.stages import StageSession
from offramp_worker.padded import Padded, padded_rows, run_at_once
from offramp_worker.page_locked import as_batch
from offramp_worker.plans.classifier import stage_seconds

Json = dict[str, Any]
ROUNDS, WARM = 7, 2
KERNEL_ROUNDS = 41
MOST_ROWS = 512  # that are priced


def medians(jobs: Mapping[Any, Callable[[], object]], *, rounds: int = ROUNDS) -> dict[Any, float]:
    """Median seconds of each job; jobs take turns."""
    for job in jobs.values():
        for _ in range(WARM):
            job()
    taken: dict[Any, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            taken[name].append(time.perf_counter() - began)
    return {name: float(np.median(values)) for name, values in taken.items()}


def whole(model: onnx.ModelProto, device: Device) -> Runnable:
    """The model in one piece, as a worker runs it where exits are off."""
    session = open_session(model, threads=1, device=device)
    stage = StageSession(session, input_name(model), "", (output_name(model),), True, ())
    return stage_on(device, stage, follows=False, last=True)


def by_size(forms: Mapping[str, Runnable], x: FloatArray, sizes: Sequence[int], device: Device) -> Json:
    """Milliseconds of each form of a model by batch size."""
    found: Json = {name: {} for name in forms}
    for size in sizes:
        batch = as_batch(x[:size], device)
        jobs = {name: _exact(stage, batch) for name, stage in forms.items()}
        for name, seconds in medians(jobs).items():
            found[name][str(size)] = seconds * 1e3
    return found


def _exact(stage: Runnable, batch: FloatArray) -> Callable[[], object]:
    return lambda: list(run_exact(stage, batch))


def alternating(model: onnx.ModelProto, device: Device, x: FloatArray, largest: int, batches: int) -> Json:
    """Milliseconds a batch whose size changes every time, through the product and through one plain session, and what
    the same batches take where the size never changes."""
    sizes = np.random.default_rng(3).integers(1, largest + 1, batches)
    stage, plain = whole(model, device), _plain(model, device)
    name, batch = input_name(model), as_batch(x[:largest], device)

    def ours(size: int) -> object:
        return list(run_exact(stage, batch[:size]))

    def theirs(size: int) -> object:
        return plain.run(None, {name: batch[:size]})

    for size in {padded_rows(int(size)) for size in sizes}:
        ours(size)
    constant = medians({int(size): lambda size=size: ours(size) for size in sorted(set(sizes))}, rounds=3)
    return {
        "largest": largest,
        "constant": 1e3 * float(np.mean([constant[int(size)] for size in sizes])),
        "alternating": 1e3 * _mean_seconds(ours, sizes),
        "plain session": 1e3 * _mean_seconds(theirs, sizes[: batches // 4]),
    }


def _plain(model: onnx.ModelProto, device: Device) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    providers = [(device.provider, dict(device.options))]
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)


def _mean_seconds(run: Callable[[int], object], sizes: Sequence[int]) -> float:
    began = time.perf_counter()
    for size in sizes:
        run(int(size))
    return (time.perf_counter() - began) / len(sizes)


@dataclass(frozen=True, slots=True)
class Plan:
    """Ramps of a bundle in force, as columns, and the share of recorded rows that leave at the first of them."""

    sessions: Sessions
    bundle: Bundle
    columns: tuple[int, ...]
    share: float

    def run(self, batch: FloatArray, *, saving: bool) -> Callable[[], object]:
        """A batch under the plan; ``saving`` drops the rows that left, else all of them run to the output."""
        stages = self.sessions.stages(self.columns)
        first, *others = self.columns
        tests = {first: exit_test(self.share, self.bundle.quantiles[first])}
        tests |= {j: exit_test(0.0, self.bundle.quantiles[j]) for j in others}
        table, seconds = self._priced(stages)
        regroups = Regrouping.of(seconds, table.regroup.tolist()) if saving else None
        return lambda: list(run_stages(stages, batch, tests=tests, may_leave=None, regroups=regroups))

    def predicted(self, size: int, *, saving: bool) -> float:
        """Seconds of a batch by the bundle's profile."""
        stay = size - round(self.share * size)
        table, (first, *rest) = self._priced(self.sessions.stages(self.columns))
        carried = stay if saving else size
        dropping = float(table.regroup[size]) if carried < size else 0.0
        return dropping + first[size] + (sum(stage[carried] for stage in rest) if carried else 0.0)

    def _priced(self, stages: Sequence[Runnable]) -> tuple[CostTable, list[list[float]]]:
        """What rows cost by the profile, and by stage, as a worker reckons it."""
        table = CostTable(self.bundle.profile, sizes=range(MOST_ROWS + 1))
        return table, stage_seconds(table, self.bundle.profile, stages, [stage.ramps for stage in stages[:-1]])


def ramps(sessions: Sessions, bundle: Bundle, x: FloatArray, sizes: Sequence[int]) -> Json:
    """Of a batch that nobody leaves: milliseconds without exits and, by the number of ramps in force, more than that,
    where all rows run to the output and where each decision is waited for."""
    exact, counts = sessions.exact_stage(), sorted({1, 2, len(bundle.columns)})
    found: Json = {}
    for size in sizes:
        batch = as_batch(x[:size], bundle.device)
        jobs: dict[Any, Callable[[], object]] = {"exact": _exact(exact, batch)}
        for n in counts:
            plan = Plan(sessions, bundle, tuple(range(n)), 0.0)
            jobs |= {(n, saving): plan.run(batch, saving=saving) for saving in (False, True)}
        took = medians(jobs)
        ways = {"results only": False, "compute saving": True}
        found[str(size)] = {"exact": took["exact"] * 1e3} | {
            way: {str(n): 1e3 * (took[n, saving] - took["exact"]) for n in counts} for way, saving in ways.items()
        }
    return found


def kernels(bundle: Bundle, device: Device, x: FloatArray, sizes: Sequence[int]) -> Json:
    """Microseconds of the GPU that the kernels of one head take, by batch size: its stage with it and without, with
    nothing that comes back but what is waited for. Where launching takes longer than the kernels, it says that
    instead."""
    heads = [head for head in bundle.heads if head is not None]
    cut = pieces(bundle.backbone, heads[:2], [h.source for h in heads[:2]], shapes=bundle.shapes, optimise=False)
    (_, first, _), (_, _, with_head) = cut.heads
    assert first == 0
    first_stage = open_session(cut.segments[0].model, threads=1, device=device)
    graphs, found = {"bare": cut.segments[1], "headed": with_head}, {}
    sessions = {name: open_session(graph.model, threads=1, device=device) for name, graph in graphs.items()}
    for size in sizes:
        features = run_at_once(first_stage, {input_name(bundle.backbone): x[:size]})[0]
        jobs = {name: _on_device(session, graphs[name], features, device) for name, session in sessions.items()}
        took = medians(jobs, rounds=KERNEL_ROUNDS)
        found[str(size)] = 1e6 * (took["headed"] - took["bare"])
    return found


def _on_device(session: Any, graph: StageGraph, features: FloatArray, device: Device) -> Callable[[], object]:
    """A run of a stage whose input lies on the device and whose outputs stay there."""
    session = session.at(padded_rows(len(features))) if isinstance(session, Padded) else session
    binding = session.io_binding()
    binding.bind_cpu_input(graph.source, features)
    for name in graph.outputs:
        binding.bind_output(name, device.memory)
    return lambda: session.run_with_iobinding(binding)


def exits(
    sessions: Sessions, bundle: Bundle, x: FloatArray, *, sizes: Sequence[int], shares: Sequence[float]
) -> list[Json]:
    """One ramp at which a share of the rows leaves: the time of a batch without exits, with the plan in both modes, and
    what the profile says of each."""
    exact, rows = sessions.exact_stage(), []
    for size in sizes:
        batch = as_batch(x[:size], bundle.device)
        plans = {share: Plan(sessions, bundle, (0,), share) for share in shares}
        jobs: dict[Any, Callable[[], object]] = {"exact": _exact(exact, batch)}
        jobs |= {(s, saving): plan.run(batch, saving=saving) for s, plan in plans.items() for saving in (False, True)}
        took = medians(jobs)
        for share, plan in plans.items():
            for saving in (False, True):
                rows.append(
                    {
                        "size": size,
                        "share": share,
                        "saving": saving,
                        "exact": took["exact"] * 1e3,
                        "measured": took[share, saving] * 1e3,
                        "predicted": plan.predicted(size, saving=saving) * 1e3,
                    }
                )
    return rows


def agreement(subject: Subject, device: Device, *, rows: int) -> Json:
    """Whether the device says what the CPU says, and its stages what the whole model says."""
    x = subject.inputs(rows, seed=11)
    here, there = (np.asarray(whole(subject.model, d).run(x, x)[0]) for d in (CPU, device))
    return {
        "relative error": float(np.linalg.norm(there - here) / np.linalg.norm(here)),
        "same answers": float((there.argmax(axis=1) == here.argmax(axis=1)).mean()),
    }
