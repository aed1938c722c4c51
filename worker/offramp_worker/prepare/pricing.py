"""The backbone's segments and the heads as a worker runs them, ready to be timed.

A head is priced by what its stage takes more than the segment without it: the head's operators, the larger set of outputs and the decision who
leaves. Stages are bound to kept buffers as in the engine (:mod:`offramp_worker.engine.stages`).
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
from offramp_worker.engine.stages import Stage, StageSession

Array = npt.NDArray[Any]
Open = Callable[[onnx.ModelProto, bool], Any]  # a graph, and whether it is optimised already → a session
N_CLASSES = 10
CERTAIN, DOUBTFUL = 12.0, 0.0  # logits of a row that leaves and of one that stays


@dataclass(frozen=True, slots=True)
class Runs:
    """Calls for one batch. ``heads`` has per ramp the call and the segment that it contains (None: nothing of the backbone)."""

    exact: Callable[[], object]
    segments: tuple[Callable[[], object], ...]
    heads: Mapping[str, tuple[Callable[[], object], int | None]]
    regroups: tuple[Callable[[], object], ...]


class Priced:
    """A backbone cut at ``tensors`` (of ``shapes``, without batch axis), its heads and models at the input (by ramp id)."""

    def __init__(
        self,
        model: onnx.ModelProto,
        heads: Sequence[HeadNodes],
        tensors: Sequence[str],
        *,
        shapes: dict[str, tuple[int, ...]],
        open_session: Open,
        sides: Mapping[str, onnx.ModelProto] | None = None,
    ) -> None:
        cut = pieces(model, heads, tensors, shapes=shapes)
        entry = input_name(model)
        whole = StageSession(open_session(model, False), entry, "", (output_name(model),), True, ())
        self._exact = Stage(whole)
        self._segments: list[Stage] = []
        for graph in cut.segments:
            before = self._segments[-1] if self._segments else None
            self._segments.append(Stage(_session(graph, open_session), before=before))
        self._heads: dict[str, tuple[Stage, int | None]] = {}
        for name, number, graph in cut.heads:
            before = self._segments[number - 1] if number else None
            self._heads[name] = (Stage(_session(graph, open_session), before=before), number)
        for name, side in (sides or {}).items():
            self._heads[name] = (Stage(_session(side_stage(side, name, entry=entry), open_session)), None)

    def at(self, x: Array) -> Runs:
        """Calls that run on ``x`` (n, ...). Those of another batch do not work any more."""
        inputs: list[Array] = [x]
        for stage in self._segments[:-1]:
            inputs.append(stage.run(inputs[-1], x)[0])
        decide = _decision(len(x))
        heads = {
            name: (_after(_run(stage, inputs[number or 0], x), decide), number)
            for name, (stage, number) in self._heads.items()
        }
        return Runs(
            exact=_run(self._exact, x, x),
            segments=tuple(_run(stage, features, x) for stage, features in zip(self._segments, inputs, strict=True)),
            heads=heads,
            regroups=tuple(_regroup(features) for features in inputs[1:]),
        )


def _session(graph: StageGraph, open_session: Open) -> StageSession:
    opened = open_session(graph.model, graph.optimised)
    return StageSession(opened, graph.source, graph.entry, graph.outputs, bool(graph.target), ())


def _run(stage: Stage, features: Array, x: Array) -> Callable[[], object]:
    return lambda: stage.run(features, x)


def _after(run: Callable[[], object], decide: Callable[[], object]) -> Callable[[], object]:
    def both() -> object:
        run()
        return decide()

    return both


def _decision(n: int) -> Callable[[], object]:
    """Who leaves, of a batch of which every other row does; of a single row, which stays. Every batch that reaches a ramp pays it."""
    logits = np.zeros((n, N_CLASSES), dtype=np.float32)
    logits[:, 0] = np.where(np.arange(n) % 2, CERTAIN, DOUBTFUL)
    odds = (N_CLASSES - 1) * np.exp(-logits[:, 0].astype(np.float64))
    test, confidence = exit_test(0.5, np.linspace(-20.0, 10.0, TABLE_SIZE)), 1 / (1 + odds)
    return lambda: test.leaves(logits, confidence)


def _regroup(features: Array) -> Callable[[], object]:
    rows = np.arange(0, len(features), 2)  # half of the batch stays, spread over it
    out = np.empty_like(features[rows])
    return lambda: np.take(features, rows, axis=0, out=out, mode="clip")
