"""Sessions of one process hold equal weights once, and answer as ONNX Runtime's own do."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from offramp_worker import weights
from offramp_worker.devices import open_session
from offramp_worker.weights import LEAST_BYTES

CHANNELS, LAYERS = 256, 12
MEBIBYTE = 2**20
X = np.random.default_rng(5).standard_normal((3, CHANNELS, 6, 6)).astype(np.float32)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing that an earlier test opened is shared with."""
    gc.collect()
    yield
    gc.collect()


@cache
def kernel(layer: int, seed: int) -> npt.NDArray[np.float32]:
    drawn = np.random.default_rng([seed, layer]).standard_normal((CHANNELS, CHANNELS, 3, 3), dtype=np.float32)
    return drawn / np.float32(48)


def convolutions(*, until: int = LAYERS, seed: int = 0) -> onnx.ModelProto:
    """The first layers of a network of 28 MiB."""
    nodes, held, last = [], [], "x"
    for i in range(until):
        held.append(numpy_helper.from_array(kernel(i, seed), f"w{i}"))
        nodes.append(helper.make_node("Conv", [last, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"]))
        last = f"r{i}"
    return _model(nodes, held, last, (CHANNELS, 6, 6))


def products(*, size: int = 64) -> onnx.ModelProto:
    held = np.random.default_rng(1).standard_normal((size, size)).astype(np.float32)
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"])], [numpy_helper.from_array(held, "w")], "y", (size,))


def _model(
    nodes: list[onnx.NodeProto], held: list[onnx.TensorProto], output: str, shape: tuple[int, ...]
) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]) for name in ("x", output)]
    graph = helper.make_graph(nodes, "g", [values[0]], [values[1]], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def shared() -> int:
    """Bytes of weights that sessions share."""
    gc.collect()
    return sum(value.numpy().nbytes for value in weights._known.values())


@pytest.mark.slow
def test_sessions_of_one_network_hold_its_weights_once() -> None:
    size = sum(len(t.raw_data) for t in convolutions().graph.initializer)
    assert size > 25 * MEBIBYTE
    held = [open_session(convolutions(until=1), threads=1)]
    before, shared_before = resident(), shared()
    held += [open_session(convolutions(until=k), threads=1) for k in range(LAYERS, LAYERS - 4, -1)]
    assert resident() - before < 2.5 * size  # once, and what they need besides: three copies and more otherwise
    assert shared() - shared_before <= size
    assert len(held) == 5


@pytest.mark.parametrize("model", [convolutions(until=3), products(size=CHANNELS)], ids=["convolutions", "products"])
def test_answers_are_onnx_runtimes_own_bit_for_bit(model: onnx.ModelProto) -> None:
    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ours = open_session(model, threads=1)
    rows = X if len(model.graph.input[0].type.tensor_type.shape.dim) == 4 else X[:, :, 0, 0]
    for n in (1, 2, 3):
        expected: npt.NDArray[np.float32] = plain.run(None, {"x": rows[:n]})[0]
        np.testing.assert_array_equal(ours.run(None, {"x": rows[:n]})[0], expected)


def test_weights_that_kernels_rewrite_are_left_to_their_session() -> None:
    before = shared()
    session = open_session(products(), threads=1)
    assert LEAST_BYTES <= 64 * 64 * 4 and shared() == before
    assert session.run(None, {"x": np.eye(64, dtype=np.float32)[:2]})[0].shape == (2, 64)


def test_equal_graphs_are_one_session_and_other_threads_another() -> None:
    first, again = open_session(convolutions(until=2), threads=1), open_session(convolutions(until=2), threads=1)
    assert first is again
    assert open_session(convolutions(until=2), threads=2) is not first
    assert open_session(convolutions(until=2, seed=1), threads=1) is not first


@pytest.mark.slow
def test_weights_go_with_the_last_session_that_reads_them() -> None:
    before = shared()
    first, second = (open_session(convolutions(until=k, seed=9), threads=1) for k in (2, 3))
    expected = second.run(None, {"x": X})[0]
    del first
    gc.collect()
    np.testing.assert_array_equal(second.run(None, {"x": X})[0], expected)
    assert shared() > before
    del second
    assert shared() == before


def test_a_graph_that_cannot_be_opened_says_why() -> None:
    model = _model([helper.make_node("NoSuchOperator", ["x"], ["y"])], [], "y", (4,))
    with pytest.raises(Exception, match="NoSuchOperator"):
        open_session(model, threads=1)
