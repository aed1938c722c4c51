"""Heads as ONNX nodes: the one place that says what a ramp's parameters compute.

``prepare`` trains heads and the engine serves them; both build them here, so what was calibrated is what runs.

    pooled-linear   mean over H, W → w1 [C, n_classes], b1
    grid-linear     grid → w1 [32 * C, n_classes], b1
    grid-mlp        grid → w1 [32 * C, hidden], b1 → relu → w2 [hidden, n_classes], b2
    conv            three 3x3 convolutions k1, k2, k3 [out, in, 3, 3] of ``hidden`` channels, each with a bias and relu,
                    then grid → w1 [32 * hidden, n_classes], b1
    mean-linear     mean over the tokens that are no padding → w1 [C, n_classes], b1
    own             no parameters: the logits of an exit that the network brings with it
    mean-mlp        the same mean → w1 [C, hidden], b1 → relu → w2 [hidden, n_classes], b2

``grid`` is concat(4x4 average pooling, 4x4 maximum pooling), each flattened channel first (C, 4, 4), average first.
Linear weights are stored [in, out]; all are float32; input standardisation is folded into the first layer. A kind is
an entry of :data:`KINDS`: how its ramps are called, what they compute and how they learn. `offramp prepare` tries all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from offramp_core.bundle import HeadKind, RampSpec
from offramp_core.errors import InvalidArgumentError
from offramp_core.task import Task, task_of

TOP_LABEL_TASK = task_of(None, width=2)  # whatever the number of classes: what is asked of it does not depend on that
GRID = 4
MEAN_WEIGHT = "offramp/mean_weight"  # [n or 1, 1, tokens] in a backbone with tokens: 1 over their number, 0 at padding
CONVOLUTIONS, KERNEL = 3, 3
LARGE_SIDE, HALVED_SIDE = 64, 16  # a convolution takes steps of 4 from maps of 64 cells on, of 2 from 16 on
FEW_ROWS = 4_000  # to learn from
Array = npt.NDArray[Any]
Nodes = list[onnx.NodeProto]


@dataclass(frozen=True, slots=True)
class HeadNodes:
    """One ramp as a piece of ONNX graph: reads the tensor ``source``, writes ``output`` [n, head_width] float32.
    ``task`` says how sure that is."""

    ramp_id: str
    source: str
    output: str
    nodes: tuple[Any, ...]
    initializers: tuple[Any, ...]
    task: Task = TOP_LABEL_TASK


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a tensor becomes the vector that a linear layer reads.

    ``nodes`` makes them of (source, prefix, height, width); the last one writes ``<prefix>/pooled``. ``cells`` is the
    number of values per channel, ``least_side`` the smallest map it can pool; ``tokens`` instead of a map are pooled.
    """

    name: str
    nodes: Callable[[str, str, int, int], Nodes]
    cells: int
    least_side: int = 1
    tokens: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """How a kind of head is trained."""

    #: learning_rate and weight_decay: of AdamW under a one-cycle schedule.
    learning_rate: float
    weight_decay: float
    #: Share of a layer's inputs left out of every step.
    dropout: float = 0.0
    #: Rows per step when there are thousands; 64 when there are few.
    batch: int = 256
    #: Steps aimed at, between ``fewest`` and ``most`` passes over the rows.
    steps: int = 400
    fewest: int = 12
    most: int = 60

    def schedule(self, rows: int) -> tuple[int, int]:
        """Batch size and number of epochs."""
        batch = self.batch if rows >= FEW_ROWS else min(64, self.batch)
        return batch, min(self.most, max(self.fewest, round(self.steps * batch / rows)))


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """A kind of head."""

    #: Behind the place in the ids of its ramps: ``r03-<suffix>``.
    suffix: str
    pooling: Pooling
    #: None: it has no parameters; ``RampSpec.output`` holds the logits already.
    training: Training | None
    #: Convolutions of ``RampSpec.hidden`` channels before the pooling.
    convolutions: int = 0
    #: Whether a layer of ``RampSpec.hidden`` units lies between the pooled vector and the logits.
    hidden_layer: bool = False

    @property
    def rung(self) -> Literal["own", "linear", "mlp", "conv"]:
        """What it takes to train one: dearer rungs are trained where cheaper ones leave something to gain."""
        if self.training is None:
            return "own"
        return "conv" if self.convolutions else "mlp" if self.hidden_layer else "linear"

    @property
    def needs_hidden(self) -> bool:
        """Whether a spec of this kind must say a width."""
        return self.hidden_layer or self.convolutions > 0


def grid_window(size: int) -> tuple[int, int]:
    """Kernel and stride that pool an axis of ``size`` >= 4 cells to exactly 4.

    Windows overlap where ``size`` is no multiple of 4, which plain AveragePool and MaxPool can express.

    >>> grid_window(8), grid_window(7), grid_window(4)
    ((2, 2), (4, 1), (1, 1))
    """
    if size < GRID:
        raise InvalidArgumentError(
            f"feature map axis is {size}; a head that pools to a grid needs at least {GRID} cells"
        )
    stride = size // GRID
    return size - (GRID - 1) * stride, stride


def convolution_steps(height: int, width: int) -> tuple[tuple[int, tuple[int, int]], ...]:
    """Stride and resulting (height, width) of each convolution of a ``conv`` head: most of its time is the first one.

    >>> convolution_steps(32, 32), convolution_steps(8, 8)[-1]
    (((2, (16, 16)), (2, (8, 8)), (1, (8, 8))), (1, (8, 8)))
    """
    steps = []
    for _ in range(CONVOLUTIONS):
        side = min(height, width)
        stride = 4 if side >= LARGE_SIDE else 2 if side >= HALVED_SIDE else 1
        height, width = -(-height // stride), -(-width // stride)
        steps.append((stride, (height, width)))
    return tuple(steps)


def head_inputs(spec: RampSpec) -> int:
    """Width of the vector that the head's first linear layer reads."""
    kind = KINDS[spec.head]
    return kind.pooling.cells * (spec.hidden if kind.convolutions else spec.channels)


def parameter_shapes(spec: RampSpec, *, n_classes: int) -> dict[str, tuple[int, ...]]:
    """Name → shape of the head's parameters, as they stand in ``ramps.safetensors`` after ``<id>/``."""
    kind, shapes, width = KINDS[spec.head], dict[str, tuple[int, ...]](), spec.channels
    if kind.training is None:
        return shapes
    for number in range(1, kind.convolutions + 1):
        shapes |= {f"k{number}": (spec.hidden, width, KERNEL, KERNEL), f"kb{number}": (spec.hidden,)}
        width = spec.hidden
    sizes = [head_inputs(spec), *([spec.hidden] if kind.hidden_layer else []), n_classes]
    for number in range(1, len(sizes)):
        shapes |= {f"w{number}": (sizes[number - 1], sizes[number]), f"b{number}": (sizes[number],)}
    return shapes


def head_nodes(
    spec: RampSpec, tensors: Mapping[str, Array], *, height: int, width: int, task: Task = TOP_LABEL_TASK
) -> HeadNodes:
    """The nodes of one head.

    Parameters
    ----------
    spec : RampSpec
        ``spec.tensor`` is the (n, channels, height, width) or (n, tokens, channels) tensor the head reads.
    tensors : mapping
        The parameters that :func:`parameter_shapes` names; float32.
    height, width : int
        Size of the feature map; both >= 4 where the kind pools to a grid. Tokens have 1 and their number (-1: it
        varies).
    task : Task
        What the head is for.

    Raises
    ------
    InvalidArgumentError
        A parameter is missing or has another shape; or the map is too small for the head.
    """
    kind, prefix = KINDS[spec.head], f"offramp/{spec.id}"
    if kind.training is None:
        node = helper.make_node("Identity", [spec.output], [f"{prefix}/logits"], name=f"{prefix}/own")
        return HeadNodes(spec.id, spec.tensor, f"{prefix}/logits", (node,), (), task)
    last = "b2" if kind.hidden_layer else "b1"
    if last not in tensors:
        raise InvalidArgumentError(f"{spec.id}/{last} is missing; a {spec.head} head needs it")
    n_classes = int(tensors[last].shape[0])
    _check_shapes(spec, tensors, n_classes=n_classes)
    nodes, source = list[onnx.NodeProto](), spec.tensor
    for number, (stride, size) in enumerate(convolution_steps(height, width)[: kind.convolutions], start=1):
        nodes += _convolution(prefix, source=source, number=number, stride=stride)
        source, (height, width) = f"{prefix}/relu{number}", size
    output = f"{prefix}/logits"
    nodes += kind.pooling.nodes(source, prefix, height, width)
    if kind.hidden_layer:
        nodes += _linear(prefix, source=f"{prefix}/pooled", target=f"{prefix}/hidden", layer=1)
        nodes.append(helper.make_node("Relu", [f"{prefix}/hidden"], [f"{prefix}/active"], name=f"{prefix}/relu"))
        nodes += _linear(prefix, source=f"{prefix}/active", target=output, layer=2)
    else:
        nodes += _linear(prefix, source=f"{prefix}/pooled", target=output, layer=1)
    initializers = tuple(
        numpy_helper.from_array(np.ascontiguousarray(tensors[name], dtype=np.float32), f"{prefix}/{name}")
        for name in parameter_shapes(spec, n_classes=n_classes)
    )
    return HeadNodes(spec.id, spec.tensor, output, tuple(nodes), initializers, task)


def _check_shapes(spec: RampSpec, tensors: Mapping[str, Array], *, n_classes: int) -> None:
    for name, shape in parameter_shapes(spec, n_classes=n_classes).items():
        if name not in tensors:
            raise InvalidArgumentError(f"{spec.id}/{name} is missing; a {spec.head} head needs it")
        if tensors[name].shape != shape:
            raise InvalidArgumentError(f"{spec.id}/{name} has shape {tensors[name].shape}; it needs {shape}")


def _pool_mean(source: str, prefix: str, _height: int, _width: int) -> Nodes:
    return [
        helper.make_node("GlobalAveragePool", [source], [f"{prefix}/mean"], name=f"{prefix}/gap"),
        helper.make_node("Flatten", [f"{prefix}/mean"], [f"{prefix}/pooled"], name=f"{prefix}/flat", axis=1),
    ]


def _pool_grid(source: str, prefix: str, height: int, width: int) -> Nodes:
    (kernel_h, stride_h), (kernel_w, stride_w) = grid_window(height), grid_window(width)
    window = {"kernel_shape": [kernel_h, kernel_w], "strides": [stride_h, stride_w]}
    nodes = []
    for op, name in (("AveragePool", "avg"), ("MaxPool", "max")):
        nodes.append(helper.make_node(op, [source], [f"{prefix}/{name}4"], name=f"{prefix}/{name}pool", **window))
        nodes.append(
            helper.make_node(
                "Flatten", [f"{prefix}/{name}4"], [f"{prefix}/{name}"], name=f"{prefix}/{name}flat", axis=1
            )
        )
    sources = [f"{prefix}/avg", f"{prefix}/max"]
    nodes.append(helper.make_node("Concat", sources, [f"{prefix}/pooled"], name=f"{prefix}/concat", axis=1))
    return nodes


def _pool_tokens(source: str, prefix: str, _height: int, _width: int) -> Nodes:
    return [
        helper.make_node("MatMul", [MEAN_WEIGHT, source], [f"{prefix}/mean"], name=f"{prefix}/mean"),
        helper.make_node("Flatten", [f"{prefix}/mean"], [f"{prefix}/pooled"], name=f"{prefix}/flat", axis=1),
    ]


def pool_by_one_product(graph: onnx.GraphProto) -> None:
    """Let heads in a graph for a GPU pool tokens whose weights are constants with a product that broadcasts nothing.

    Of one that does, ONNX Runtime copies addresses of matrices to the GPU, and behind the run it waits 150 µs for the
    driver to give that memory back.
    """
    weight = next((tensor for tensor in graph.initializer if tensor.name == MEAN_WEIGHT), None)
    means = [node for node in graph.node if weight is not None and MEAN_WEIGHT in node.input]
    if weight is None or any(node.op_type != "MatMul" for node in means):
        return
    column = f"{MEAN_WEIGHT}/column"
    graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(weight).reshape(-1, 1), column))
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        if node in means:
            turned = f"{node.name}/turned"
            nodes.append(helper.make_node("Transpose", [node.input[1]], [turned], name=turned, perm=[0, 2, 1]))
            node.input[:] = [turned, column]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _convolution(prefix: str, *, source: str, number: int, stride: int) -> Nodes:
    target, inputs = f"{prefix}/conv{number}", [source, f"{prefix}/k{number}", f"{prefix}/kb{number}"]
    shape = {"kernel_shape": [KERNEL] * 2, "strides": [stride] * 2, "pads": [KERNEL // 2] * 4}
    return [
        helper.make_node("Conv", inputs, [target], name=target, **shape),
        helper.make_node("Relu", [target], [f"{prefix}/relu{number}"], name=f"{prefix}/relu{number}"),
    ]


def _linear(prefix: str, *, source: str, target: str, layer: int) -> Nodes:
    inputs = [source, f"{prefix}/w{layer}", f"{prefix}/b{layer}"]
    return [helper.make_node("Gemm", inputs, [target], name=f"{prefix}/gemm{layer}")]


MEAN = Pooling("mean", _pool_mean, cells=1)
CELLS = Pooling("grid", _pool_grid, cells=2 * GRID * GRID, least_side=GRID)
TOKENS = Pooling("tokens", _pool_tokens, cells=1, tokens=True)
OWN = Pooling("own", lambda _source, _prefix, _height, _width: [], cells=1)
# Strong decay and dropout are what keep 100-400 thousand weights honest on a few thousand inputs.
LINEAR = Training(1e-2, 1e-2, fewest=8)
CELLS_LINEAR = Training(3e-3, 0.3, fewest=8)
MLP = Training(2e-3, 0.3, dropout=0.3, fewest=14)
CONV = Training(4e-3, 0.05, batch=128, steps=500, fewest=6, most=40)
KINDS: Mapping[HeadKind, HeadRecipe] = {
    "pooled-linear": HeadRecipe("linear", MEAN, LINEAR),
    "grid-linear": HeadRecipe("cells", CELLS, CELLS_LINEAR),
    "grid-mlp": HeadRecipe("grid", CELLS, MLP, hidden_layer=True),
    "conv": HeadRecipe("conv", CELLS, CONV, convolutions=CONVOLUTIONS),
    "mean-linear": HeadRecipe("mean", TOKENS, LINEAR),
    "mean-mlp": HeadRecipe("mlp", TOKENS, MLP, hidden_layer=True),
    "own": HeadRecipe("own", OWN, None),
}
