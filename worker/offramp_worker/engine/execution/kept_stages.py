"""Stages on CUDA whose bindings and memory are kept by the shape of a batch.

Between two stages the GPU waits for the host: it binds inputs and outputs by name, asks for memory and makes arrays of
what came back, in 0.1 to 0.2 ms, since a processor that has waited for milliseconds is slow at first. Here that is done
once a shape. On the CPU :mod:`offramp_worker.engine.execution.stages` does the same for its own reasons.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from offramp_worker.devices import Device
from offramp_worker.engine.execution.device_stages import DTYPES, DeviceStage, Held, Later
from offramp_worker.engine.execution.execute import HeadOutput
from offramp_worker.engine.execution.stages import MAX_BINDINGS, StageSession
from offramp_worker.padded import filled, padded_rows

MOST_ROOM = 2.5  # times the largest: what lengths that double add up to

Array = npt.NDArray[Any]
Features = Any  # an array of the host, or :class:`Held`


@dataclass(slots=True)
class _Kept:
    """A session's inputs and outputs for one shape."""

    session: Any
    binding: Any
    #: What the stage hands on: in the device's memory, or an array of the host. None: what it was given.
    features: ort.OrtValue | Array | None
    #: Of each head the logits in the device's memory, for at least as many rows, and the confidences.
    heads: Sequence[tuple[ort.OrtValue, Array]]
    #: Where the features lie that are bound as its input.
    source: int = 0


class KeptStage(DeviceStage):
    """A stage of one arm: one batch at a time, and results last until the next one."""

    def __init__(self, session: StageSession, device: Device, *, last: bool) -> None:
        super().__init__(session, device, last=last)
        self._kept: dict[tuple[int, ...], _Kept] = {}
        self._features: dict[tuple[int, ...], ort.OrtValue] = {}  # by the shape of a row
        self._logits: dict[tuple[int, ...], ort.OrtValue] = {}  # by head, rows and width

    def _run(self, source: Features, x: Array, n: int, size: int) -> tuple[Features, list[HeadOutput]]:
        key = (size, *_row_shape(source), *(x.shape[1:] if self.reads_input else ()))
        kept = self._kept.get(key)
        if kept is None:
            found = super()._run(source, x, n, size)
            with contextlib.suppress(Exception):  # where there is no room to keep anything, it runs as it did now
                self._keep(key, found, size)
            return found
        self._bind_source(kept, source, size)
        if self.reads_input:
            self._bind_array(kept.binding, self._session.entry, filled(x, size))
        kept.session.run_with_iobinding(kept.binding)
        if isinstance(source, np.ndarray) or self.reads_input:
            kept.binding.clear_binding_inputs()  # it would keep the device's copy of the batch, for every shape
            kept.source = 0
        logits: list[Any] = [Later(value, n, self._device) for value, _ in kept.heads]
        heads = [(value, confidence[:n]) for value, (_, confidence) in zip(logits, kept.heads, strict=True)]
        if kept.features is None:
            return self._handed_through(source, n), heads
        return (kept.features[:n] if isinstance(kept.features, np.ndarray) else Held(kept.features, n, size)), heads

    def _bind_source(self, kept: _Kept, source: Features, size: int) -> None:
        name = self._session.source
        if isinstance(source, np.ndarray):
            self._bind_array(kept.binding, name, source)
            return
        value = source.value
        if (where := value.data_ptr()) != kept.source:
            shape = [size, *value.shape()[1:]]
            kept.binding.bind_input(name, self._device.memory, 0, DTYPES[value.element_type()], shape, where)
            kept.source = where

    def _bind_array(self, binding: Any, name: str, x: Array) -> None:
        """Unlike ``bind_cpu_input`` this lets go of the array when the inputs are cleared."""
        value = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x), self._device.memory, 0)
        binding.bind_ortvalue_input(name, value)

    def _keep(self, key: tuple[int, ...], found: tuple[Features, list[HeadOutput]], size: int) -> None:
        """Bind outputs like those of an unbound run of that shape."""
        names, (features, heads) = self._session, found
        out: ort.OrtValue | Array | None = None
        if names.hands_on and isinstance(features, np.ndarray):
            out = np.empty((size, *features.shape[1:]), features.dtype)
        elif names.hands_on:
            out = self._room(features.value, size)
        if len(self._kept) >= MAX_BINDINGS:
            self._kept.clear()
        session = self._session_of(size)
        kept = _Kept(
            session, session.io_binding(), out, [self._head(j, example, size) for j, example in enumerate(heads)]
        )
        outputs = [] if out is None else [out]
        outputs += [part for head in kept.heads for part in head]
        for name, value in zip(names.outputs, outputs, strict=True):
            if isinstance(value, np.ndarray):
                kept.binding.bind_output(name, "cpu", 0, value.dtype.type, list(value.shape), value.ctypes.data)
            else:
                shape, dtype = [size, *value.shape()[1:]], DTYPES[value.element_type()]
                kept.binding.bind_output(name, self._device.memory, 0, dtype, shape, value.data_ptr())
        self._kept[key] = kept

    def _room(self, like: ort.OrtValue, size: int) -> ort.OrtValue:
        """Memory for features; it grows to the largest batch, and what was bound to a smaller one is bound anew.

        Rows of other lengths have memory of their own, as long as all of it is little more than twice the largest.
        """
        _, *row = like.shape()
        room = self._features.get(tuple(row))
        if room is None or room.shape()[0] < size:
            self._kept.clear()
            self._features.pop(tuple(row), None)
            wanted = [padded_rows(size), *row]
            values = [math.prod(wanted), *(math.prod(held.shape()) for held in self._features.values())]
            if sum(values) > MOST_ROOM * max(values):
                self._features.clear()
                self._logits.clear()
            room = self._features[tuple(row)] = self._memory(wanted, like.element_type())
        return room

    def _head(self, number: int, example: HeadOutput, size: int) -> tuple[ort.OrtValue, Array]:
        logits: Any = example[0]
        _, *row = logits.value.shape()
        key = (number, padded_rows(size), *row)
        if key not in self._logits:
            self._logits[key] = self._memory([padded_rows(size), *row], logits.value.element_type())
        return self._logits[key], np.empty(size, example[1].dtype)

    def _memory(self, shape: list[int], element_type: int) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, DTYPES[element_type], self._device.memory, 0)


def _row_shape(source: Features) -> tuple[int, ...]:
    return tuple(source.shape[1:] if isinstance(source, np.ndarray) else source.value.shape()[1:])
