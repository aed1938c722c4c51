"""One variant of a model as a session of ONNX Runtime, and the caches that it writes into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from offramp_worker.bundle.tensors import closed_options
from offramp_worker.generate.llama.architecture import Architecture, rotary_tables
from offramp_worker.generate.llama.graph import build, cache_names, matrix_inputs

FloatArray = npt.NDArray[np.float32]
Weights = Mapping[str, npt.NDArray[Any]]
_value = ort.OrtValue.ortvalue_from_numpy  # without a copy: both see the same memory


class Decoder:
    """Computes logits behind tokens. Runs of different caches may be on different threads."""

    def __init__(
        self, a: Architecture, *, bits: int, head_bits: int, weights: Weights, threads: int, taps: bool = False
    ) -> None:
        """``weights`` are the common ones and those of the variant, of the shapes that the architecture calls for. What
        the session repacks is not needed afterwards; the rest is kept."""
        self.architecture = a
        model = build(a, bits=bits, head_bits=head_bits, taps=taps)
        cosines, sines = rotary_tables(a)
        known = {**weights, "cosines": cosines, "sines": sines}
        stubs = [t.name for t in model.graph.initializer if t.external_data]
        options = closed_options()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # workers share their cores
        options.add_external_initializers(stubs, [_value(np.ascontiguousarray(known[name])) for name in stubs])
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.taps = list(dict.fromkeys(matrix_inputs(a).values())) if taps else []

    def run(self, cache: Cache, tokens: Sequence[int], *, start: int, rows: Sequence[int]) -> FloatArray:
        """Compute ``tokens`` behind the first ``start`` tokens of the cache, and write their keys and values behind
        those.

        Returns
        -------
        (len(rows), vocabulary) float32
            Logits behind the tokens at these places.
        """
        new = np.array(tokens, dtype=np.int64).reshape(1, len(tokens))
        return cache.binding(self).run(new, starts=[start], rows=rows)

    def run_each(self, cache: Cache, tokens: Sequence[int], *, starts: Sequence[int]) -> FloatArray:
        """Compute one token of each sequence of the cache in one pass, behind the first ``starts`` tokens of each.

        Returns
        -------
        (len(tokens), vocabulary) float32
        """
        new = np.array(tokens, dtype=np.int64).reshape(len(tokens), 1)
        return cache.binding(self).run(new, starts=starts, rows=range(len(tokens)))


@dataclass(eq=False)
class Cache:
    """Keys and values of sequences, (layers, 2, sequences, kv_heads, capacity, head_width); variants of one model may
    share them."""

    values: FloatArray
    _bindings: dict[int, _Binding] = field(default_factory=dict)

    @classmethod
    def of(cls, a: Architecture, capacity: int) -> Cache:
        """Room for so many tokens of one sequence. Memory is taken as it is written."""
        return cls(np.zeros((a.layers, 2, 1, a.kv_heads, capacity, a.head_width), dtype=np.float32))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def capacity(self) -> int:
        return int(self.values.shape[4])

    def binding(self, decoder: Decoder) -> _Binding:
        """Inputs and outputs of a decoder on this cache."""
        found = self._bindings.get(id(decoder))
        if found is None:
            found = self._bindings[id(decoder)] = _Binding(decoder, self.values)
        return found


class _Binding:
    """What a session reads and writes, bound once; only tokens, rows and logits differ from run to run."""

    def __init__(self, decoder: Decoder, values: FloatArray) -> None:
        self._decoder = decoder
        self._io = decoder.session.io_binding()
        self._last, self._longest = np.zeros(values.shape[2], dtype=np.int32), np.zeros((), dtype=np.int32)
        for i, (past, present) in enumerate(cache_names(decoder.architecture)):
            value = _value(values[i // 2, i % 2])
            self._io.bind_ortvalue_input(past, value)
            self._io.bind_ortvalue_output(present, value)
        self._io.bind_ortvalue_input("last", _value(self._last))
        self._io.bind_ortvalue_input("longest", _value(self._longest))
        for name in decoder.taps:
            self._io.bind_output(name)

    def run(self, new: npt.NDArray[np.int64], *, starts: Sequence[int], rows: Sequence[int]) -> FloatArray:
        """As many new tokens of each sequence, (sequences, tokens)."""
        n = new.shape[1]
        self._last[:], self._longest[()] = [start + n - 1 for start in starts], max(starts) + n
        logits = np.empty((len(rows), self._decoder.architecture.vocabulary), dtype=np.float32)
        places = np.array(rows, dtype=np.int64)
        self._io.bind_ortvalue_input("tokens", _value(new))
        self._io.bind_ortvalue_input("rows", _value(places))
        self._io.bind_ortvalue_output("logits", _value(logits))
        self._decoder.session.run_with_iobinding(self._io)
        return logits

    def tapped(self) -> dict[str, FloatArray]:
        """What each matrix read in the last run, (tokens, inputs)."""
        bound = [present for _, present in cache_names(self._decoder.architecture)] + self._decoder.taps
        values = dict(zip([*bound, "logits"], self._io.get_outputs(), strict=True))  # in the order they were bound
        return {name: _rows(values[name].numpy()) for name in self._decoder.taps}


def _rows(x: Any) -> FloatArray:
    return np.asarray(x).reshape(-1, x.shape[-1])
