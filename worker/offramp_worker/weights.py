"""Weights that are in memory once, however many sessions of this process read them.

A plan's stages, the exact model and the tapped ones are pieces of one backbone, each in a session of its own. ONNX
Runtime gives every session copies of its initializers; here those of equal content are one array that all of them read.
Graphs are optimised before, not by the session: what a session makes of its weights while it optimises (blocked
layouts, folded constants) would be its own again. On CUDA the same holds of the GPU's memory, where sessions optimise
what they are given: what they fold is theirs, the weights of products and convolutions are not.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import numpy_helper

LEAST_BYTES = 4096
PLAIN_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
ALIGNMENT = 64  # bytes; what vector instructions like best
# The kernels of these rewrite their weights once more when a session opens and forget what they were given: to share
# that would add a copy.
PACKED = frozenset(
    {
        "Attention",
        "ConvInteger",
        "ConvTranspose",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "FusedGemm",
        "FusedMatMul",
        "GRU",
        "Gemm",
        "LSTM",
        "MatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QAttention",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)

_lock = threading.Lock()
_known: WeakValueDictionary[tuple[bytes, str], ort.OrtValue] = WeakValueDictionary()
HOST = "cpu"


@dataclass(frozen=True, slots=True)
class Shared:
    """Weights by name that sessions of one graph read in place. They must live as long as the sessions, which do not
    hold them."""

    values: tuple[tuple[str, ort.OrtValue], ...]

    def into(self, options: ort.SessionOptions) -> None:
        """Let a session with these options read them."""
        for name, value in self.values:
            options.add_initializer(name, value)


def share(model: onnx.ModelProto, *, memory: str = HOST) -> Shared:
    """The weights of a graph that sessions can share, in memory once: the host's or that of a GPU."""
    tensors = _read_in_place(model.graph) if memory == HOST else _plain(model.graph)
    return Shared(tuple((tensor.name, _interned(tensor, memory)) for tensor in tensors))


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Memory that begins where vector instructions like it."""
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _read_in_place(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers of some size that no kernel rewrites."""
    packed = {name for node in _nodes(graph) if node.op_type in PACKED for name in node.input}
    return (tensor for tensor in _large(graph) if tensor.name not in packed)


def _plain(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers of some size of types that NumPy has."""
    return (tensor for tensor in _large(graph) if tensor.data_type in PLAIN_TYPES)


def _large(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    return (tensor for tensor in graph.initializer if len(tensor.raw_data) >= LEAST_BYTES)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Those of branches and loops included."""
    for node in graph.node:
        yield node
        for inner in _graphs(node.attribute):
            yield from _nodes(inner)


def _graphs(attributes: Iterable[Any]) -> Iterator[onnx.GraphProto]:
    for attribute in attributes:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _interned(tensor: onnx.TensorProto, memory: str) -> ort.OrtValue:
    kind = f"{tensor.data_type}/{tuple(tensor.dims)}/".encode()
    key = hashlib.blake2b(kind + tensor.raw_data, digest_size=32).digest(), memory
    with _lock:
        value = _known.get(key)
        if value is None:
            value = _known[key] = _placed(numpy_helper.to_array(tensor), memory)
        return value


def _placed(given: npt.NDArray[Any], memory: str) -> ort.OrtValue:
    if memory != HOST:
        # Sessions share only what they do not own: the same memory once more, by way of DLPack.
        return ort.OrtValue.from_dlpack(ort.OrtValue.ortvalue_from_numpy(given, memory, 0))
    array = aligned(given.nbytes).view(given.dtype).reshape(given.shape)
    np.copyto(array, given)
    return ort.OrtValue.ortvalue_from_numpy(array)
