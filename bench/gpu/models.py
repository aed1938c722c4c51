"""Models to measure on a GPU, made here: real architectures at their real sizes, with weights drawn from a seed.

What an operator costs does not depend on what its weights are worth, and weights of this size could not be brought
along. ``vit-b`` is ViT-B/16 (Dosovitskiy et al. 2021, table 1), ``resnet50`` is ResNet-50 (He et al. 2016, table 1)
with its batch normalization folded into the convolutions, as it is deployed. ``small`` makes one with the same
operators that a software GPU computes within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

FloatArray = npt.NDArray[np.float32]
OPSET, IR_VERSION = 17, 9
FLOAT = onnx.TensorProto.FLOAT


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure: ``model`` takes images ``x`` [n, 3, side, side], answers ``logits`` [n, classes].

    ``places`` are tensors where exits can be attached, in network order.
    """

    name: str
    model: onnx.ModelProto
    side: int
    classes: int
    places: tuple[str, ...]

    def inputs(self, n: int, *, seed: int = 1) -> FloatArray:
        """(n, 3, side, side) smooth images: each has a contrast and a mean of its own, so that answers vary."""
        rng = np.random.default_rng(seed)
        coarse = rng.normal(size=(n, 3, 8, 8)).astype(np.float32) * rng.uniform(0.2, 2.0, (n, 1, 1, 1))
        coarse += rng.normal(0.0, 0.7, (n, 3, 1, 1))
        fine = np.repeat(np.repeat(coarse, -(-self.side // 8), axis=2), -(-self.side // 8), axis=3)
        return np.ascontiguousarray(fine[:, :, : self.side, : self.side], dtype=np.float32)


class _Graph:
    """Nodes and weights of one model, in the order in which they are added."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[str, onnx.TensorProto] = {}

    def add(self, kind: str, *inputs: str, out: str, **attributes: object) -> str:
        self._nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def drawn(self, name: str, *shape: int, scale: float) -> str:
        return self.constant(name, self._rng.standard_normal(shape, np.float32) * np.float32(scale))

    def constant(self, name: str, value: npt.ArrayLike) -> str:
        if name not in self._weights:
            self._weights[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def linear(self, x: str, width: int, out_width: int, *, out: str, scale: float | None = None) -> str:
        weight = self.drawn(f"{out}/w", width, out_width, scale=scale or width**-0.5)
        product = self.add("MatMul", x, weight, out=f"{out}/product")
        return self.add("Add", product, self.constant(f"{out}/b", np.zeros(out_width, np.float32)), out=out)

    def norm(self, x: str, width: int, *, out: str) -> str:
        one = self.constant(f"{out}/scale", np.ones(width, np.float32))
        zero = self.constant(f"{out}/shift", np.zeros(width, np.float32))
        return self.add("LayerNormalization", x, one, zero, out=out, axis=-1, epsilon=1e-6)

    def model(self, name: str, *, side: int, classes: int) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info("x", FLOAT, ["n", 3, side, side])],
            [helper.make_tensor_value_info("logits", FLOAT, ["n", classes])],
            list(self._weights.values()),
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


@dataclass(frozen=True, slots=True)
class _VitSize:
    width: int
    depth: int
    heads: int
    patch: int
    side: int
    classes: int

    @property
    def tokens(self) -> int:
        return (self.side // self.patch) ** 2 + 1


VIT_B = _VitSize(width=768, depth=12, heads=12, patch=16, side=224, classes=1000)
VIT_SMALL = _VitSize(width=64, depth=6, heads=4, patch=8, side=32, classes=10)


def vit(*, small: bool = False) -> Subject:
    """ViT-B/16 at 224 pixels and 1,000 classes."""
    size = VIT_SMALL if small else VIT_B
    g, width, cells = _Graph(), size.width, size.tokens - 1
    kernel = g.drawn("patch/w", width, 3, size.patch, size.patch, scale=(3 * size.patch**2) ** -0.5)
    patches = g.add("Conv", "x", kernel, out="patch", strides=[size.patch] * 2)
    flat = g.add("Reshape", patches, g.constant("patch/shape", np.array([0, width, cells])), out="patch/flat")
    tokens = g.add("Transpose", flat, out="patch/tokens", perm=[0, 2, 1])
    # The class token, once per row: zero times the first patch, so that the batch size stays free.
    first = g.add("Slice", tokens, *(g.constant(f"slice/{n}", np.array([v])) for n, v in enumerate((0, 1, 1))), out="f")
    blank = g.add("Mul", first, g.constant("zero", np.zeros(1, np.float32)), out="blank")
    token = g.add("Add", blank, g.drawn("class", 1, 1, width, scale=0.5), out="class/token")
    x = g.add("Concat", token, tokens, out="sequence", axis=1)
    x = g.add("Add", x, g.drawn("position", 1, size.tokens, width, scale=0.1), out="embedded")
    for number in range(size.depth):
        x = _vit_block(g, x, size, f"block{number}")
    x = g.norm(x, width, out="norm")
    x = g.add("Gather", x, g.constant("zero/index", np.array(0)), out="pooled", axis=1)
    g.linear(x, width, size.classes, out="logits", scale=0.2)
    every = size.depth // 6
    places = tuple(f"block{n}/end" for n in range(every, size.depth - 1, every))
    name = "vit-small" if small else "vit-b"
    return Subject(name, g.model("vit", side=size.side, classes=size.classes), size.side, size.classes, places)


def _vit_block(g: _Graph, x: str, size: _VitSize, name: str) -> str:
    width, each = size.width, size.width // size.heads
    normed = g.norm(x, width, out=f"{name}/norm1")
    split = g.constant("heads/shape", np.array([0, 0, size.heads, each]))
    parts = {}
    for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        flat = g.linear(normed, width, width, out=f"{name}/{part}")
        shaped = g.add("Reshape", flat, split, out=f"{name}/{part}/split")
        parts[part] = g.add("Transpose", shaped, out=f"{name}/{part}/heads", perm=perm)
    scores = g.add("MatMul", parts["q"], parts["k"], out=f"{name}/scores")
    scaled = g.add("Mul", scores, g.constant("heads/scale", np.array(each**-0.5, np.float32)), out=f"{name}/scaled")
    weights = g.add("Softmax", scaled, out=f"{name}/weights", axis=-1)
    mixed = g.add("MatMul", weights, parts["v"], out=f"{name}/mixed")
    back = g.add("Transpose", mixed, out=f"{name}/mixed/tokens", perm=[0, 2, 1, 3])
    joined = g.add("Reshape", back, g.constant("tokens/shape", np.array([0, 0, width])), out=f"{name}/joined")
    x = g.add("Add", x, g.linear(joined, width, width, out=f"{name}/out"), out=f"{name}/middle")
    inner = g.linear(g.norm(x, width, out=f"{name}/norm2"), width, 4 * width, out=f"{name}/up")
    outer = g.linear(_gelu(g, inner, f"{name}/gelu"), 4 * width, width, out=f"{name}/down")
    return g.add("Add", x, outer, out=f"{name}/end")


def _gelu(g: _Graph, x: str, name: str) -> str:
    """As PyTorch exports it; ONNX Runtime makes one kernel of it."""
    scaled = g.add("Div", x, g.constant("gelu/root", np.array(2**0.5, np.float32)), out=f"{name}/scaled")
    erf = g.add("Erf", scaled, out=f"{name}/erf")
    raised = g.add("Add", erf, g.constant("gelu/one", np.array(1.0, np.float32)), out=f"{name}/raised")
    product = g.add("Mul", x, raised, out=f"{name}/product")
    return g.add("Mul", product, g.constant("gelu/half", np.array(0.5, np.float32)), out=name)


def resnet50(*, small: bool = False) -> Subject:
    """ResNet-50 at 224 pixels and 1,000 classes."""
    stages, width, side, classes = ((3, 4, 6, 3), 64, 224, 1000) if not small else ((1, 1, 1, 1), 8, 64, 10)
    g = _Graph()
    x = _conv(g, "x", 3, width, out="stem", kernel=7, stride=2, relu=True)
    x = g.add("MaxPool", x, out="stem/pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = width
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            inner, stride = width * 2**stage, 2 if block == 0 and stage else 1
            x = _bottleneck(g, x, channels, inner, stride=stride, name=f"layer{stage}.{block}")
            channels = 4 * inner
    pooled = g.add("GlobalAveragePool", x, out="pooled/map")
    flat = g.add("Flatten", pooled, out="pooled", axis=1)
    g.linear(flat, channels, classes, out="logits", scale=0.2)
    ends = [f"layer{stage}.{blocks - 1}/end" for stage, blocks in enumerate(stages[:-1])]
    places = tuple(ends if small else [*ends[:2], "layer2.2/end", *ends[2:]])
    name = "resnet-small" if small else "resnet50"
    return Subject(name, g.model("resnet", side=side, classes=classes), side, classes, places)


def _bottleneck(g: _Graph, x: str, channels: int, inner: int, *, stride: int, name: str) -> str:
    y = _conv(g, x, channels, inner, out=f"{name}/a", kernel=1, relu=True)
    y = _conv(g, y, inner, inner, out=f"{name}/b", kernel=3, stride=stride, relu=True)
    y = _conv(g, y, inner, 4 * inner, out=f"{name}/c", kernel=1, gain=0.3)
    if stride != 1 or channels != 4 * inner:
        x = _conv(g, x, channels, 4 * inner, out=f"{name}/skip", kernel=1, stride=stride, gain=0.7)
    return g.add("Relu", g.add("Add", x, y, out=f"{name}/sum"), out=f"{name}/end")


def _conv(
    g: _Graph, x: str, channels: int, filters: int, *, out: str, kernel: int, stride: int = 1, relu: bool = False,
    gain: float = 1.0,
) -> str:  # fmt: skip
    scale = gain * (2.0 / (channels * kernel**2)) ** 0.5
    weight = g.drawn(f"{out}/w", filters, channels, kernel, kernel, scale=scale)
    bias = g.constant(f"{out}/bias", np.zeros(filters, np.float32))
    pads, name = [kernel // 2] * 4, f"{out}/conv" if relu else out
    y = g.add("Conv", x, weight, bias, out=name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)
    return g.add("Relu", y, out=out) if relu else y


SUBJECTS: dict[str, Callable[..., Subject]] = {"vit-b": vit, "resnet50": resnet50}
