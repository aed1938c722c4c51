"""Weights that are in memory once, however many sessions of this process read them.

A plan's stages, the exact model and the tapped ones are pieces of one backbone, each in a session of its own. ONNX
Runtime gives every session copies of its initializers; here those of equal content are one array that all of them read.
Graphs are optimised before, not by the session: what a session makes of its weights while it optimises (blocked
layouts, folded constants) would be its own again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import numpy_helper

LEAST_BYTES = 4096
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
_known: WeakValueDictionary[bytes, ort.OrtValue] = WeakValueDictionary()


def share(model: onnx.ModelProto, options: ort.SessionOptions) -> list[ort.OrtValue]:
    """Let a session of ``model`` read weights that are in memory already.

    What is returned must live as long as the session, which does not hold it.
    """
    shared = []
    for tensor in _read_in_place(model.graph):
        value = _interned(tensor)
        options.add_initializer(tensor.name, value)
        shared.append(value)
    return shared


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Memory that begins where vector instructions like it."""
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _read_in_place(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers of some size that no kernel rewrites."""
    packed = {name for node in _nodes(graph) if node.op_type in PACKED for name in node.input}
    for tensor in graph.initializer:
        if len(tensor.raw_data) >= LEAST_BYTES and tensor.name not in packed:
            yield tensor


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


def _interned(tensor: onnx.TensorProto) -> ort.OrtValue:
    kind = f"{tensor.data_type}/{tuple(tensor.dims)}/".encode()
    key = hashlib.blake2b(kind + tensor.raw_data, digest_size=32).digest()
    with _lock:
        value = _known.get(key)
        if value is None:
            given = numpy_helper.to_array(tensor)
            array = aligned(given.nbytes).view(given.dtype).reshape(given.shape)
            np.copyto(array, given)
            value = _known[key] = ort.OrtValue.ortvalue_from_numpy(array)
        return value
