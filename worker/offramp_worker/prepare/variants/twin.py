"""An ONNX graph as a PyTorch module that learns: the same operators under the same names, its weights as parameters.

Variants are edits of the reference's own graph, whatever it was exported from. What a variant learns goes back into its
initializers, so that no tensor is renamed and ramps find theirs. Operators that exits need anyway stand in a table; a
graph with others keeps its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from offramp_core.errors import InvalidArgumentError
from offramp_worker.bundle.graph import input_name, output_name

Attributes = Mapping[str, Any]
Operator = Callable[..., Any]
TORCH_TYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.BOOL: torch.bool,
}


class Twin(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A graph of one input and one output that answers as ONNX Runtime does, up to the order of sums.

    Raises
    ------
    InvalidArgumentError
        The graph has an operator that this module does not know.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        self._nodes = list(model.graph.node)
        unknown = sorted({node.op_type for node in self._nodes} - OPERATORS.keys())
        if unknown:
            raise InvalidArgumentError(
                f"variants: the model has the operator {unknown[0]}, through which variants cannot learn; leave "
                "--variants out, or export the model with operators of the standard set"
            )
        self._attributes = [{a.name: helper.get_attribute_value(a) for a in node.attribute} for node in self._nodes]
        self._entry, self._output = input_name(model), output_name(model)
        self._constants: dict[str, Tensor] = {}
        self.learned = nn.ParameterDict()
        self._keys: dict[str, str] = {}
        looked_up = {node.input[0] for node in self._nodes if node.op_type == "Gather"}  # embeddings stay
        for number, tensor in enumerate(model.graph.initializer):
            value = torch.from_numpy(numpy_helper.to_array(tensor).copy())
            if value.dtype == torch.float32 and value.numel() > 1 and tensor.name not in looked_up:
                self._keys[tensor.name] = str(number)
                self.learned[str(number)] = nn.Parameter(value)
            else:
                self._constants[tensor.name] = value

    def forward(self, x: Tensor, read: Sequence[str] = ()) -> tuple[Tensor, list[Tensor]]:
        """The output (n, width), and the tensors named in ``read``."""
        values: dict[str, Any] = {**self._constants, self._entry: x}
        values |= {name: self.learned[key] for name, key in self._keys.items()}
        for node, attributes in zip(self._nodes, self._attributes, strict=True):
            result = OPERATORS[node.op_type](attributes, *(values[name] if name else None for name in node.input))
            results = result if isinstance(result, tuple) else (result,)
            values.update(zip(node.output, results, strict=False))
        return values[self._output], [values[name] for name in read]

    def write_back(self, model: onnx.ModelProto) -> None:
        """Put what was learned into the graph's initializers."""
        for tensor in model.graph.initializer:
            if tensor.name in self._keys:
                value = self.learned[self._keys[tensor.name]].detach().numpy()
                tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), tensor.name))


def _ints(value: Any) -> list[int]:
    return [int(each) for each in (value.tolist() if isinstance(value, Tensor) else value)]


def _conv(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    n = x.ndim - 2
    x, padding = _padded(a, x, n)
    run = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    strides, dilations = a.get("strides", [1] * n), a.get("dilations", [1] * n)
    return run(x, weight, bias, strides, padding, dilations, a.get("group", 1))


def _padded(a: Attributes, x: Tensor, n: int, *, value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Symmetric padding is left to the operator, other padding done here."""
    if a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise InvalidArgumentError("variants: the model pads by auto_pad; export it with explicit pads")
    pads = list(a.get("pads", [0] * 2 * n))
    if pads[:n] == pads[n:]:
        return x, pads[:n]
    flat = [side for axis in reversed(range(n)) for side in (pads[axis], pads[axis + n])]
    return F.pad(x, flat, value=value), [0] * n


def _max_pool(a: Attributes, x: Tensor) -> Tensor:
    n = x.ndim - 2
    x, padding = _padded(a, x, n, value=float("-inf"))
    run = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
    return run(x, a["kernel_shape"], a.get("strides", [1] * n), padding, ceil_mode=bool(a.get("ceil_mode", 0)))


def _average_pool(a: Attributes, x: Tensor) -> Tensor:
    n = x.ndim - 2
    counted = bool(a.get("count_include_pad", 0))
    pads = list(a.get("pads", [0] * 2 * n))
    if pads[:n] != pads[n:]:
        raise InvalidArgumentError("variants: the model averages over uneven padding, which variants cannot learn with")
    run = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    strides = a.get("strides", [1] * n)
    return run(x, a["kernel_shape"], strides, pads[:n], bool(a.get("ceil_mode", 0)), counted)


def _gemm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, weight = (x.T if a.get("transA", 0) else x), (weight.T if a.get("transB", 0) else weight)
    out = a.get("alpha", 1.0) * (x @ weight)
    return out if bias is None else out + a.get("beta", 1.0) * bias


def _axes(a: Attributes, axes: Tensor | None, x: Tensor) -> list[int]:
    given = axes if axes is not None else a.get("axes")
    return list(range(x.ndim)) if given is None else _ints(given)


def _reduced(run: Operator) -> Operator:
    def reduce(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
        return run(x, dim=_axes(a, axes, x), keepdim=bool(a.get("keepdims", 1)))

    return reduce


def _reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    wanted = _ints(shape)
    return x.reshape([x.shape[i] if size == 0 and not a.get("allowzero", 0) else size for i, size in enumerate(wanted)])


def _squeeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    given = axes if axes is not None else a.get("axes")
    return x.squeeze() if given is None else x.squeeze(_ints(given))


def _unsqueeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    given = _ints(axes if axes is not None else a["axes"])
    rank = x.ndim + len(given)
    for axis in sorted(axis % rank for axis in given):
        x = x.unsqueeze(axis)
    return x


def _slice(_a: Attributes, x: Tensor, starts: Tensor, ends: Tensor, axes: Any = None, steps: Any = None) -> Tensor:
    begin, end = _ints(starts), _ints(ends)
    at = _ints(axes) if axes is not None else list(range(len(begin)))
    by = _ints(steps) if steps is not None else [1] * len(begin)
    index = [slice(None)] * x.ndim
    for axis, first, last, step in zip(at, begin, end, by, strict=True):
        index[axis] = slice(first, min(last, x.shape[axis]), step)
    return x[tuple(index)]


def _pad(a: Attributes, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    if a.get("mode", b"constant") != b"constant":
        raise InvalidArgumentError("variants: the model pads by reflection or repetition, which variants cannot do")
    sides = _ints(pads)
    at = [axis % x.ndim for axis in _ints(axes)] if axes is not None else list(range(x.ndim))
    flat = [0] * 2 * x.ndim
    for number, axis in enumerate(at):
        place = 2 * (x.ndim - 1 - axis)
        flat[place], flat[place + 1] = sides[number], sides[number + len(at)]
    return F.pad(x, flat, value=0.0 if value is None else float(value))


def _gather(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.ndim
    index = torch.where(index < 0, index + x.shape[axis], index).long()
    chosen = x.index_select(axis, index.reshape(-1))
    return chosen.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _expand(_a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(_ints(shape))))


def _layer_norm(a: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    axis = a.get("axis", -1) % x.ndim
    return F.layer_norm(x, x.shape[axis:], scale, bias, a.get("epsilon", 1e-5))


def _batch_norm(a: Attributes, x: Tensor, *of_channels: Tensor) -> Tensor:
    scale, bias, mean, variance = of_channels
    shape = [1, -1, *[1] * (x.ndim - 2)]
    gain = scale / (variance.detach() + a.get("epsilon", 1e-5)).sqrt()
    return (x - mean.detach().reshape(shape)) * gain.reshape(shape) + bias.reshape(shape)


def _split(a: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = a.get("axis", 0)
    if sizes is not None or "split" in a:
        return tuple(x.split(_ints(sizes if sizes is not None else a["split"]), dim=axis))
    return tuple(x.chunk(a["num_outputs"], dim=axis))


def _clip(_a: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x.clamp(None if low is None else float(low), None if high is None else float(high))


def _division(_a: Attributes, x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _constant(a: Attributes) -> Tensor:
    if "value" in a:
        return torch.from_numpy(numpy_helper.to_array(a["value"]).copy())
    (value,) = a.values()
    return torch.tensor(value)


def _constant_of_shape(a: Attributes, shape: Tensor) -> Tensor:
    value = torch.from_numpy(numpy_helper.to_array(a["value"]).copy()) if "value" in a else torch.zeros(1)
    return value.expand(_ints(shape)).clone()


#: How each operator is computed; inputs that are left out are None.
OPERATORS: Mapping[str, Operator] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": lambda _a, x, y: x @ y,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda _a, x: x.mean(dim=tuple(range(2, x.ndim)), keepdim=True),
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "Relu": lambda _a, x: torch.relu(x),
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
    "Sigmoid": lambda _a, x: torch.sigmoid(x),
    "HardSigmoid": lambda a, x: (a.get("alpha", 0.2) * x + a.get("beta", 0.5)).clamp(0, 1),
    "HardSwish": lambda _a, x: F.hardswish(x),
    "Gelu": lambda a, x: F.gelu(x, approximate=a.get("approximate", b"none").decode()),
    "Tanh": lambda _a, x: torch.tanh(x),
    "Erf": lambda _a, x: torch.erf(x),
    "Exp": lambda _a, x: torch.exp(x),
    "Sqrt": lambda _a, x: torch.sqrt(x),
    "Reciprocal": lambda _a, x: torch.reciprocal(x),
    "Neg": lambda _a, x: -x,
    "Abs": lambda _a, x: torch.abs(x),
    "Pow": lambda _a, x, y: torch.pow(x, y),
    "Softmax": lambda a, x: torch.softmax(x, dim=a.get("axis", -1)),
    "LogSoftmax": lambda a, x: torch.log_softmax(x, dim=a.get("axis", -1)),
    "Add": lambda _a, x, y: x + y,
    "Sub": lambda _a, x, y: x - y,
    "Mul": lambda _a, x, y: x * y,
    "Div": _division,
    "Min": lambda _a, x, y: torch.minimum(x, y),
    "Max": lambda _a, x, y: torch.maximum(x, y),
    "Clip": _clip,
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "Reshape": _reshape,
    "Flatten": lambda a, x: x.flatten(a.get("axis", 1)),
    "Transpose": lambda a, x: x.permute(list(a.get("perm", reversed(range(x.ndim))))),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Split": _split,
    "Concat": lambda a, *parts: torch.cat(parts, dim=a["axis"]),
    "Pad": _pad,
    "Gather": _gather,
    "Expand": _expand,
    "Shape": lambda a, x: torch.tensor(x.shape)[a.get("start", 0) : a.get("end", None)],
    "Identity": lambda _a, x: x,
    "Dropout": lambda _a, x, *_rest: x,
    "Cast": lambda a, x: x.to(TORCH_TYPES[a["to"]]),
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Range": lambda _a, start, limit, step: torch.arange(int(start), int(limit), int(step)),
    "CumSum": lambda _a, x, axis: x.cumsum(int(axis)),
    "IsNaN": lambda _a, x: torch.isnan(x),
    "Equal": lambda _a, x, y: x == y,
    "Less": lambda _a, x, y: x < y,
    "LessOrEqual": lambda _a, x, y: x <= y,
    "Greater": lambda _a, x, y: x > y,
    "GreaterOrEqual": lambda _a, x, y: x >= y,
    "And": lambda _a, x, y: x & y,
    "Or": lambda _a, x, y: x | y,
    "Not": lambda _a, x: ~x,
    "Where": lambda _a, condition, x, y: torch.where(condition, x, y),
}
