"""Running a stage without copies: inputs and outputs are bound to buffers that are kept by batch size.

A plain session call makes arrays of its outputs and looks its inputs up by name; on a small backbone that takes longer
than a ramp's arithmetic. Here a stage writes into a buffer that the next stage reads in place. Rows are copied in two
cases only: a batch that comes in, and the rows that stay when a batch is regrouped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from offramp_worker.engine.execution.execute import HeadOutput
from offramp_worker.weights import aligned

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.intp]
MAX_BINDINGS = 1024  # by shape of the input; beyond it (lengths that are not bucketed) they are made again


@dataclass(frozen=True, slots=True)
class StageSession:
    """A piece of backbone and the heads at its end, as a session that any number of arms may run.

    ``source`` is the input with the features, ``entry`` the model's own input where the stage reads it besides (else
    empty). ``outputs`` are the features it ``hands_on`` (if it does) and of each head the logits and the confidence;
    ``ramps`` are those heads' indices into the bundle's.
    """

    session: Any
    source: str
    entry: str
    outputs: tuple[str, ...]
    hands_on: bool
    ramps: tuple[int, ...]


class Stage:
    """A stage of one arm, with buffers of its own: one batch at a time, and results last until the next one.

    One that ``follows`` another reads what that one wrote where it lies.
    """

    pads = False

    def __init__(self, session: StageSession, *, follows: bool = False) -> None:
        self._session, self._follows = session, follows
        self._bindings: dict[tuple[int, ...], _Binding] = {}
        self._source, self._features = _Buffer(), _Buffer()

    @property
    def ramps(self) -> tuple[int, ...]:
        return self._session.ramps

    @property
    def reads_input(self) -> bool:
        """Whether ``x`` of :meth:`run` matters behind the first stage."""
        return bool(self._session.entry)

    def run(self, features: Array, x: Array, rows: IndexArray | None = None) -> tuple[Array, list[HeadOutput]]:
        """Run a batch.

        Parameters
        ----------
        features : (n, ...)
            What the stage before returned last, or in the first stage the batch.
        x : (m, ...)
            The model's input of the m rows to run, read by stages that :attr:`reads_input`.
        rows : (m,) int, optional
            The rows of ``features`` to run, rising; the others are dropped. All by default.

        Returns
        -------
        features : (m, ...)
            For the next stage; in the last one the logits.
        heads : list of ((m, n_classes), (m,))
            Logits and confidence of each head. All of it lies in buffers that the next run overwrites.
        """
        n = len(features) if rows is None else len(rows)
        key = (n, *features.shape[1:], *(x.shape[1:] if self.reads_input else ()))
        binding = self._bindings.get(key)
        reads_in_place = rows is None and self._follows
        if binding is None:
            binding = self._bind(key, features if rows is None else features[rows], x)
        else:
            bound = binding.in_place(features) if reads_in_place else binding.copied(features, rows)
            if binding.entry is not None:
                np.copyto(binding.entry, x)
            self._session.session.run_with_iobinding(bound)
        if self._session.hands_on:
            return binding.outputs[0], binding.heads
        return features if reads_in_place else binding.source, binding.heads

    def _bind(self, key: tuple[int, ...], features: Array, x: Array) -> _Binding:
        """Run a batch of a new shape unbound, and lay its outputs and those of later ones out."""
        names = self._session
        feed = {names.source: features} | ({names.entry: x} if names.entry else {})
        found = names.session.run(names.outputs, feed)
        if (names.hands_on and not self._features.holds(found[0].nbytes)) or not self._source.holds(features.nbytes):
            self._bindings.clear()  # they would keep the smaller buffers alive
        outputs = [value.copy() for value in found[names.hands_on :]]
        if names.hands_on:
            outputs.insert(0, self._features.array(found[0]))
            np.copyto(outputs[0], found[0])
        if len(self._bindings) >= MAX_BINDINGS:
            self._bindings.clear()
        source = self._source.array(features)
        np.copyto(source, features)
        entry = np.empty_like(x) if names.entry else None
        binding = self._bindings[key] = _Binding(names, source, entry, outputs)
        return binding


class _Binding:
    """The arrays of one stage for one shape of its input, bound in two ways: reading a copy, or the stage before in
    place."""

    def __init__(self, session: StageSession, source: Array, entry: Array | None, outputs: list[Array]) -> None:
        self._session = session
        self.source, self.entry, self.outputs = source, entry, outputs
        heads = outputs[session.hands_on :]
        self.heads: list[HeadOutput] = list(zip(heads[::2], heads[1::2], strict=True))
        self._copied = self._bound_to(source)
        self._in_place: Any = None
        self._read_in_place: Array | None = None

    def copied(self, features: Array, rows: IndexArray | None) -> Any:
        """The binding that reads ``rows`` of ``features``, copied to where it reads."""
        if rows is None:
            np.copyto(self.source, features)
        else:
            np.take(features, rows, axis=0, out=self.source, mode="clip")  # "raise" would go through another buffer
        return self._copied

    def in_place(self, features: Array) -> Any:
        """The binding that reads ``features`` where they are; the same array as last time but for a grown buffer."""
        if self._read_in_place is not features:
            self._read_in_place, self._in_place = features, self._bound_to(features)
        return self._in_place

    def _bound_to(self, features: Array) -> Any:
        names = self._session
        binding = names.session.io_binding()
        binding.bind_ortvalue_input(names.source, ort.OrtValue.ortvalue_from_numpy(features))
        if self.entry is not None:
            binding.bind_ortvalue_input(names.entry, ort.OrtValue.ortvalue_from_numpy(self.entry))
        for name, array in zip(names.outputs, self.outputs, strict=True):
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        return binding


class _Buffer:
    """Memory that arrays of any shape share, one at a time; it grows to the largest asked for."""

    def __init__(self) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def holds(self, size: int) -> bool:
        return size <= len(self._bytes)

    def array(self, like: Array) -> Array:
        """An array of the shape and type of ``like`` at the beginning of the memory."""
        if not self.holds(like.nbytes):
            self._bytes = aligned(like.nbytes)
        return self._bytes[: like.nbytes].view(like.dtype).reshape(like.shape)
