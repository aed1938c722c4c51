"""Stages on a GPU: features stay in its memory from stage to stage, and what heads say comes back for the decision who
leaves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from offramp_worker.devices import Device, open_session
from offramp_worker.engine.execution.execute import HeadOutput, Runnable
from offramp_worker.engine.execution.stages import IndexArray, Stage, StageSession

Array = npt.NDArray[Any]
Features = Any  # an array of the host, or a tensor in the device's memory


class DeviceStage:
    """A stage of one arm. What it hands on lies in the device's memory, but for the ``last`` stage's logits.

    Memory for what it hands out is ONNX Runtime's: its arena on the device keeps it from batch to batch.
    """

    def __init__(self, session: StageSession, device: Device, *, last: bool) -> None:
        self._session, self._device, self._last = session, device, last

    @property
    def ramps(self) -> tuple[int, ...]:
        return self._session.ramps

    @property
    def reads_input(self) -> bool:
        """Whether ``x`` of :meth:`run` matters behind the first stage."""
        return bool(self._session.entry)

    def run(self, features: Features, x: Array, rows: IndexArray | None = None) -> tuple[Features, list[HeadOutput]]:
        """Run a batch, as :meth:`offramp_worker.engine.execution.stages.Stage.run` does; ``features`` is what the stage
        before returned."""
        with self._device.turn:
            return self._run(features if rows is None else take_rows(features, rows, self._device), x)

    def _run(self, features: Features, x: Array) -> tuple[Features, list[HeadOutput]]:
        names = self._session
        binding = names.session.io_binding()
        if isinstance(features, np.ndarray):
            binding.bind_cpu_input(names.source, np.ascontiguousarray(features))
        else:
            binding.bind_ortvalue_input(names.source, features)
        if names.entry:
            binding.bind_cpu_input(names.entry, np.ascontiguousarray(x))
        for number, name in enumerate(names.outputs):
            stays = names.hands_on and number == 0 and not self._last
            binding.bind_output(name, self._device.name if stays else "cpu")
        names.session.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        if names.hands_on:
            features, *outputs = outputs
            if self._last:
                features = features.numpy()
        values = [value.numpy() for value in outputs]
        return features, list(zip(values[::2], values[1::2], strict=True))


def take_rows(features: Features, rows: IndexArray, device: Device) -> Features:
    """``rows`` of what a stage handed on, without leaving the device's memory."""
    return features[rows] if isinstance(features, np.ndarray) else _taken(features, rows, device, to=device.name)


def wait_for(features: Features, device: Device) -> None:
    """Return once features in the device's memory are computed: a run whose results stay there may end before.

    It reads a row: ONNX Runtime's own call for it does not wait with every provider.
    """
    _taken(features, np.zeros(1, np.intp), device, to="cpu")


def _taken(features: Features, rows: IndexArray, device: Device, *, to: str) -> Features:
    session = _taker(device, features.element_type(), len(features.shape()))
    with device.turn:
        binding = session.io_binding()
        binding.bind_ortvalue_input("features", features)
        binding.bind_cpu_input("rows", rows.astype(np.int32))
        binding.bind_output("taken", to)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]


def stage_on(device: Device, session: StageSession, *, follows: bool, last: bool) -> Runnable:
    """A stage with what it needs of its own, one that ``follows`` another or is the ``last`` of its chain."""
    return Stage(session, follows=follows) if device.is_cpu else DeviceStage(session, device, last=last)


def chain_on(device: Device, sessions: Sequence[StageSession]) -> tuple[Runnable, ...]:
    """A chain of stages for one arm."""
    last = len(sessions) - 1
    return tuple(stage_on(device, session, follows=k > 0, last=k == last) for k, session in enumerate(sessions))


@cache
def _taker(device: Device, element_type: int, rank: int) -> ort.InferenceSession:
    """A session that takes rows of a tensor."""
    shape = ["n", *(f"d{axis}" for axis in range(1, rank))]
    features = helper.make_tensor_value_info("features", element_type, shape)
    rows = helper.make_tensor_value_info("rows", onnx.TensorProto.INT32, ["m"])
    taken = helper.make_tensor_value_info("taken", element_type, ["m", *shape[1:]])
    node = helper.make_node("Gather", ["features", "rows"], ["taken"], axis=0)
    graph = helper.make_graph([node], "take rows", [features, rows], [taken])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return open_session(model, threads=1, device=device)
