"""The backbone's segments and the heads as a worker runs them, ready to be timed.

A head is priced by what its stage takes more than the segment without it: the head's operators, the larger set of
outputs and the decision who leaves. Stages are bound to kept buffers as in the engine
(:mod:`offramp_worker.engine.execution.stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core.uncertainty import TABLE_SIZE, exit_test
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.bundle.heads import HeadNodes
from offramp_worker.bundle.stages import StageGraph, pieces, side_stage
from offramp_worker.devices import CPU, Device, open_session
from offramp_worker.engine.execution.chains import stage_on
from offramp_worker.engine.execution.device_stages import take_rows, wait_for
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.stages import StageSession
from offramp_worker.page_locked import as_batch

Array = npt.NDArray[Any]
Open = Callable[[onnx.ModelProto, bool], Any]  # a graph, and whether it is optimised already → a session
N_CLASSES = 10
CERTAIN, DOUBTFUL = 12.0, 0.0  # logits of a row that leaves and of one that stays


def opener(*, threads: int, device: Device) -> Open:
    """Sessions as a worker opens them."""
    return lambda model, optimised: open_session(model, threads=threads, optimised=optimised, device=device)


@dataclass(frozen=True, slots=True)
class Runs:
    """Calls for one batch. ``heads`` has per ramp the call and the segment that it contains (None: nothing of the
    backbone).

    On a GPU what stays in its memory is waited for: in all segments but the last one and when regrouping. ``wait`` is
    that alone.
    """

    exact: Callable[[], object]
    segments: tuple[Callable[[], object], ...]
    heads: Mapping[str, tuple[Callable[[], object], int | None]]
    regroups: tuple[Callable[[], object], ...]
    wait: Callable[[], object] | None


class Priced:
    """A backbone cut at ``tensors`` (of ``shapes``, without batch axis), its heads and models at the input (by ramp
    id)."""

    def __init__(
        self,
        model: onnx.ModelProto,
        heads: Sequence[HeadNodes],
        tensors: Sequence[str],
        *,
        shapes: dict[str, tuple[int, ...]],
        open_session: Open,
        sides: Mapping[str, onnx.ModelProto] | None = None,
        device: Device = CPU,
    ) -> None:
        cut = pieces(model, heads, tensors, shapes=shapes, optimise=device.is_cpu)
        entry = input_name(model)

        def stage(graph: StageGraph, *, follows: bool, last: bool = False) -> Runnable:
            opened = open_session(graph.model, graph.optimised)
            session = StageSession(opened, graph.source, graph.entry, graph.outputs, bool(graph.target), ())
            return stage_on(device, session, follows=follows, last=last)

        whole = StageSession(open_session(model, False), entry, "", (output_name(model),), True, ())
        self._device, self._exact = device, stage_on(device, whole, follows=False, last=True)
        self._segments = [
            stage(graph, follows=number > 0, last=number == len(tensors)) for number, graph in enumerate(cut.segments)
        ]
        self._heads: dict[str, tuple[Runnable, int | None]] = {
            name: (stage(graph, follows=bool(number)), number) for name, number, graph in cut.heads
        }
        for name, side in (sides or {}).items():
            self._heads[name] = (
                stage(side_stage(side, name, entry=entry, optimise=device.is_cpu), follows=False),
                None,
            )

    def at(self, x: Array) -> Runs:
        """Calls that run on ``x`` (n, ...). Those of another batch do not work any more."""
        x = as_batch(x, self._device)
        inputs: list[Any] = [x]
        for stage in self._segments[:-1]:
            inputs.append(stage.run(inputs[-1], x)[0])
        decide = _decision(len(x))
        heads = {
            name: (_after(_run(stage, inputs[number or 0], x), decide), number)
            for name, (stage, number) in self._heads.items()
        }
        device, segments = self._device, list(zip(self._segments, inputs, strict=True))
        return Runs(
            exact=_run(self._exact, x, x),
            segments=(
                *(_complete(_features_of(stage, features, x), device) for stage, features in segments[:-1]),
                _run(*segments[-1], x),
            ),
            heads=heads,
            regroups=tuple(_complete(_regroup(features, len(x), device), device) for features in inputs[1:]),
            wait=None if device.is_cpu or len(inputs) == 1 else lambda: wait_for(inputs[1], device),
        )


def _run(stage: Runnable, features: Any, x: Array) -> Callable[[], object]:
    """The call, with what heads say read: whoever decides who leaves reads it."""

    def run() -> object:
        _, heads = stage.run(features, x)
        return [np.asarray(logits) for logits, _ in heads]

    return run


def _features_of(stage: Runnable, features: Any, x: Array) -> Callable[[], object]:
    return lambda: stage.run(features, x)[0]


def _complete(run: Callable[[], object], device: Device) -> Callable[[], object]:
    """The call, with what it leaves in a GPU's memory computed when it returns."""
    return run if device.is_cpu else lambda: wait_for(run(), device)


def _after(run: Callable[[], object], decide: Callable[[], object]) -> Callable[[], object]:
    def both() -> object:
        run()
        return decide()

    return both


def _decision(n: int) -> Callable[[], object]:
    """Who leaves, of a batch of which every other row does; of a single row, which stays. Every batch that reaches a
    ramp pays it."""
    logits = np.zeros((n, N_CLASSES), dtype=np.float32)
    logits[:, 0] = np.where(np.arange(n) % 2, CERTAIN, DOUBTFUL)
    odds = (N_CLASSES - 1) * np.exp(-logits[:, 0].astype(np.float64))
    test, confidence = exit_test(0.5, np.linspace(-20.0, 10.0, TABLE_SIZE)), 1 / (1 + odds)
    return lambda: test.leaves(logits, confidence)


def _regroup(features: Any, n: int, device: Device) -> Callable[[], object]:
    rows = np.arange(0, n, 2)  # half of the batch stays, spread over it
    if not device.is_cpu:
        return lambda: take_rows(features, rows, device)
    out = np.empty_like(features[rows])
    return lambda: np.take(features, rows, axis=0, out=out, mode="clip")
