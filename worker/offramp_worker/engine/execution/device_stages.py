"""Stages on a GPU: features stay in its memory from stage to stage, and what heads say comes back for the decision who
leaves: their confidences at once, their logits when somebody reads them, which is when a row leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from offramp_worker.devices import Device, open_session
from offramp_worker.engine.execution.execute import HeadOutput
from offramp_worker.engine.execution.stages import IndexArray, StageSession
from offramp_worker.padded import Padded, filled, padded_rows

Array = npt.NDArray[Any]
Features = Any  # an array of the host, or :class:`Held`
DTYPES = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.INT64: np.int64,
    onnx.TensorProto.INT32: np.int32,
}


@dataclass(frozen=True, slots=True)
class Held:
    """Features in the device's memory: the first ``rows`` of ``value`` (n, ...) are a batch's, and the first ``filled``
    were computed, with those that fill the batch up."""

    value: ort.OrtValue
    rows: int
    filled: int


class Later:
    """The first ``rows`` of an array of the device, read when somebody needs them, in the device's turn."""

    def __init__(self, value: ort.OrtValue, rows: int, device: Device) -> None:
        self.value, self._rows, self._device = value, rows, device
        self._found: Array | None = None

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if self._found is None:
            with self._device.turn:
                self._found = self.value.numpy()[: self._rows]
        return np.array(self._found, dtype=dtype, copy=copy)

    def __getitem__(self, rows: Any) -> Array:
        found: Array = np.asarray(self)[rows]
        return found

    def __len__(self) -> int:
        return self._rows


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

    @property
    def pads(self) -> bool:
        """Whether batches are filled up to :func:`offramp_worker.padded.padded_rows`."""
        return isinstance(self._session.session, Padded)

    def run(self, features: Features, x: Array, rows: IndexArray | None = None) -> tuple[Features, list[HeadOutput]]:
        """Run a batch, as :meth:`offramp_worker.engine.execution.stages.Stage.run` does; ``features`` is what the stage
        before returned."""
        with self._device.turn:
            n = _rows_of(features) if rows is None else len(rows)
            size = padded_rows(n) if self.pads else n
            return self._run(self._source(features, rows, size), x, n, size)

    def _source(self, features: Features, rows: IndexArray | None, size: int) -> Features:
        """The features to run, ``size`` rows."""
        if isinstance(features, np.ndarray):
            return filled(features if rows is None else features[rows], size)
        if rows is None and (size == features.filled or (self._device.is_cuda and size <= features.rows)):
            return Held(features.value, size, size)  # its first rows, where they lie
        wanted = np.arange(features.rows) if rows is None else rows
        return take_rows(features, filled(wanted, size), self._device)

    def _run(self, source: Features, x: Array, n: int, size: int) -> tuple[Features, list[HeadOutput]]:
        names, session = self._session, self._session_of(size)
        binding = session.io_binding()
        if isinstance(source, np.ndarray):
            binding.bind_cpu_input(names.source, np.ascontiguousarray(source))
        else:
            _bind(binding, names.source, source, self._device)
        if names.entry:
            binding.bind_cpu_input(names.entry, np.ascontiguousarray(filled(x, size)))
        for number, name in enumerate(names.outputs):
            is_confidence = number >= names.hands_on and (number - names.hands_on) % 2 == 1
            comes_back = is_confidence or (self._last and number == 0)
            binding.bind_output(name, "cpu" if comes_back else self._device.memory)
        session.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        if names.hands_on:
            first, *outputs = outputs
            features: Features = first.numpy()[:n] if self._last else Held(first, n, size)
        else:
            features = self._handed_through(source, n)
        logits: list[Any] = [Later(value, n, self._device) for value in outputs[::2]]
        return features, list(zip(logits, (value.numpy()[:n] for value in outputs[1::2]), strict=True))

    def _session_of(self, size: int) -> Any:
        return self._session.session.at(size) if self.pads else self._session.session

    @staticmethod
    def _handed_through(source: Features, n: int) -> Features:
        """What a stage was given, without what filled it up."""
        return source[:n] if isinstance(source, np.ndarray) else Held(source.value, n, source.filled)


def _bind(binding: Any, name: str, features: Held, device: Device) -> None:
    """The first rows of features, where they lie."""
    value = features.value
    if value.shape()[0] == features.rows:
        binding.bind_ortvalue_input(name, value)
        return
    shape = [features.rows, *value.shape()[1:]]
    binding.bind_input(name, device.memory, 0, DTYPES[value.element_type()], shape, value.data_ptr())


def _rows_of(features: Features) -> int:
    return len(features) if isinstance(features, np.ndarray) else int(features.rows)


def take_rows(features: Features, rows: IndexArray, device: Device) -> Features:
    """``rows`` of what a stage handed on, without leaving the device's memory."""
    if isinstance(features, np.ndarray):
        return features[rows]
    return Held(_taken(features.value, rows, device, to=device.memory), len(rows), len(rows))


def wait_for(features: Features, device: Device) -> None:
    """Return once features in the device's memory are computed: a run whose results stay there may end before.

    It reads a row: ONNX Runtime's own call for it does not wait with every provider.
    """
    _taken(features.value, np.zeros(1, np.intp), device, to="cpu")


def _taken(features: ort.OrtValue, rows: IndexArray, device: Device, *, to: str) -> ort.OrtValue:
    session = _taker(device, features.element_type(), len(features.shape()))
    with device.turn:
        binding = session.io_binding()
        binding.bind_ortvalue_input("features", features)
        binding.bind_cpu_input("rows", rows.astype(np.int32))
        binding.bind_output("taken", to)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]


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
