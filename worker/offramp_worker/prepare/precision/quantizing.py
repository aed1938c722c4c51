"""The backbone at int8: candidates are made, measured against fp32, and the best one stays, or none and the reason.

Weights get seven bits. The int8 kernels of processors without VNNI instructions add pairs of products in 16 bits, which
eight bits overflow silently: the same file would answer differently, and worse, on another machine. With seven bits
every integer sum is exact everywhere (decision 16).

Tensors that feed ramps keep their names and stay float32: the name goes to the value after rounding to 255 levels,
which is what everything behind reads. Stages are cut out of the graph as ONNX Runtime optimises it
(:mod:`offramp_worker.bundle.stages`), where the levels themselves are handed on and both sides run on integers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.dataflow import dependent_tensors, graph_steps
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.devices import CPU, Device
from offramp_worker.prepare.places.cuts import WEIGHTED_OPERATORS, float_tensors
from offramp_worker.prepare.precision.calibration import (
    RANGE_METHODS,
    Histogram,
    RangeMethod,
    collect_histograms,
    value_range,
)
from offramp_worker.prepare.precision.convolutions import (
    SCALING,
    Studied,
    add_channels_last,
    study_convolutions,
    with_even_channels,
    with_levels,
)
from offramp_worker.prepare.precision.folding import folded, tidied
from offramp_worker.prepare.precision.judging import JUDGED_ROWS, Candidate, Judge, Lowered
from offramp_worker.prepare.precision.mixing import Exits, Part, parts_of, promising, worth
from offramp_worker.prepare.precision.products import integer_products
from offramp_worker.prepare.source.sources import Backbone

CALIBRATION_ROWS = 128
AS_FAST = 1.05  # times that differ by less are equal
DYNAMIC = "dynamic"
KEEPS_FLOAT = ("Relu", "Clip")
IN_FLOAT = ", in float: "
CONVOLUTIONS, PRODUCTS = ("Conv", "ConvTranspose"), ("MatMul", "Gemm")

Array = npt.NDArray[Any]


def choose_quantized(
    backbone: Backbone,
    x: Array,
    *,
    cuts: Collection[str] = (),
    exits: Exits | None = None,
    seed: int,
    threads: int,
    seconds: float,
    device: Device = CPU,
) -> Lowered:
    """Quantise a model in every way that may pay, and keep the best.

    Parameters
    ----------
    x : (n, ...)
        Rows that are no records: up to 128 calibrate, up to 1,000 others judge the answers.
    cuts : collection of str
        Tensors that feed ramps; they keep their names.
    exits : Exits, optional
        What exits save. With them, parts of the network that spend more of the budget than their time is worth stay in
        float; without, none does.
    seed : int
        Draws the rows. The same seed, rows and parts give the same bytes.
    threads : int
        CPU threads of the sessions that are timed.
    seconds : float
        Time spent on timing, about, on the ``device``.

    Notes
    -----
    A candidate stays only if it takes at most 0.9 of the fp32 time at some batch size and disagrees on at most 5 % of
    the rows; of several equally fast ones the one that disagrees least.
    """
    order = np.random.default_rng(seed).permutation(len(x))
    n_calibration = min(CALIBRATION_ROWS, len(x) // 2)
    calibration = x[np.sort(order[:n_calibration])]
    judged = x[np.sort(order[n_calibration : n_calibration + JUDGED_ROWS])]
    static = static_parts(backbone, calibration, cuts=cuts, threads=threads)
    models = static.models if static else _dynamic_models(backbone, calibration, cuts=cuts, threads=threads)
    if not models:
        return Lowered(None, "", (), "it has no weighted operator to quantise")
    judge = Judge.of(backbone, judged, threads=threads, device=device)
    tried = judge.candidates(models, seconds=seconds / 2, kind=_kind)
    best = _best([c for c in tried if not c.refused])
    if static is not None and exits is not None:
        # One sensitive part is reason enough to refuse the whole, and none to do without the rest.
        base = best or min(tried, key=lambda c: c.expected)
        mixtures = _mixtures(static, base.method, judge, exits, seconds=seconds / 2)
        models |= mixtures
        tried += judge.candidates(mixtures, seconds=seconds / 2, kind=_kind)
        rivals = [c for c in tried if not c.refused and (c is best or c.method in mixtures)]
        best = max(rivals, key=lambda c: worth(c.time, c.expected, exits), default=None)
    if best is None:
        return Lowered(None, "", tried)
    better = f"{best.method} is worth more: the least time and disagreement together"
    tried = tuple(c if c.refused or c is best else replace(c, refused=better) for c in tried)
    return Lowered(models[best.method], best.method, tried)


def quantized_models(
    backbone: Backbone, calibration: Array, *, cuts: Collection[str], threads: int
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Every candidate with its method's name: static ranges where convolutions prevail, dynamic ones for matrix
    products."""
    static = static_parts(backbone, calibration, cuts=cuts, threads=threads)
    if static is not None:
        yield from static.models.items()
    else:
        yield from _dynamic_models(backbone, calibration, cuts=cuts, threads=threads).items()


@dataclass(frozen=True, slots=True)
class Static:
    """What static graphs are made of: the prepared fp32 graph, what calibration rows say of it, nodes in float in all
    of them, and tensors that feed ramps."""

    prepared: onnx.ModelProto
    histograms: Mapping[str, Histogram]
    studied: Studied
    exclude: tuple[str, ...]
    cuts: frozenset[str]

    @property
    def models(self) -> dict[str, onnx.ModelProto]:
        """All on integers, by the name of the ranges."""
        return {_static_name(method): self.model(method) for method in RANGE_METHODS}

    def model(self, method: RangeMethod, parts: Sequence[Part] = ()) -> onnx.ModelProto:
        """The graph with ``parts`` in float."""
        names = frozenset().union(*(part.nodes for part in parts))
        even, ranges = with_even_channels(self.prepared, names, self.studied.channels)
        ranges |= {name: value_range(h, method) for name, h in self.histograms.items()}
        model = _static(even, ranges, floats={*names, *self.exclude}, cuts=self.cuts)
        with_levels(model, self.studied.levels)
        return tidied(model)


def static_parts(backbone: Backbone, calibration: Array, *, cuts: Collection[str], threads: int) -> Static | None:
    """What static graphs are made of; None where no convolutions prevail."""
    prepared = _prepared(backbone.model, cuts)
    if not _convolutions_prevail(prepared):
        return None
    return Static(
        prepared,
        _activations(prepared, calibration, backbone.input, threads=threads),
        study_convolutions(prepared, calibration, backbone.input, threads=threads),
        tuple(_last_weighted(prepared)),
        frozenset(cuts),
    )


def _convolutions_prevail(model: onnx.ModelProto) -> bool:
    operators = [node.op_type for node in model.graph.node]
    convolutions, products = (sum(operators.count(name) for name in names) for names in (CONVOLUTIONS, PRODUCTS))
    return convolutions > 0 and convolutions >= products


def _dynamic_models(
    backbone: Backbone, calibration: Array, *, cuts: Collection[str], threads: int
) -> dict[str, onnx.ModelProto]:
    prepared = _prepared(backbone.model, cuts)
    if not any(node.op_type in PRODUCTS for node in prepared.graph.node):
        return {}
    last = _last_weighted(prepared)
    return {DYNAMIC: tidied(integer_products(prepared, calibration, backbone.input, exclude=last, threads=threads))}


def _mixtures(static: Static, base: str, judge: Judge, exits: Exits, *, seconds: float) -> dict[str, onnx.ModelProto]:
    """The graph ``base`` with parts in float, for the sets of parts that promise most."""
    method: RangeMethod = next(m for m in RANGE_METHODS if base == _static_name(m))
    parts = parts_of(static.prepared, exclude=static.exclude)
    models = {"": static.model(method)} | {part.name: static.model(method, [part]) for part in parts}
    measured = judge.measures(models, seconds=seconds)
    alone = {part: measured[part.name] for part in parts}
    sets = promising(measured[""], alone, judge.margins, exits)
    return {f"{base}{IN_FLOAT}{', '.join(part.name for part in some)}": static.model(method, some) for some in sets}


def _static_name(method: RangeMethod) -> str:
    return f"static-{method}"


def _kind(method: str) -> str:
    """Static ranges are numbers in one and the same graph. Its time is measured once, so that the choice between them
    is a matter of answers alone, and the same for the same seed."""
    return method if IN_FLOAT in method else method.partition("-")[0]


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The least disagreement among the fastest."""
    fast = [c for c in candidates if c.time <= AS_FAST * min(other.time for other in candidates)]
    return min(fast, key=lambda c: c.expected, default=None)


def _prepared(model: onnx.ModelProto, cuts: Collection[str]) -> onnx.ModelProto:
    prepared = folded(model, keep=cuts)
    del prepared.graph.value_info[:]  # quantising makes notes of shapes stale
    return prepared


def _last_weighted(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes from the last weighted operator to the output.

    They stay in float: rounding logits to 255 levels would tie the uncertainties of different inputs, for no time
    saved.
    """
    producer = {name: node for node in model.graph.node for name in node.output if name}
    names, stack = [], [output_name(model)]
    while stack:
        node = producer.get(stack.pop())
        if node is None or node.name in names:
            continue
        names.append(node.name)
        if node.op_type not in WEIGHTED_OPERATORS:
            stack.extend(node.input)
    return names


def _activations(model: onnx.ModelProto, x: Array, spec: TensorSpec, *, threads: int) -> dict[str, Histogram]:
    """Histograms of everything float32 that depends on the input."""
    dependent = dependent_tensors(graph_steps(model.graph), source=input_name(model))
    named = [name for node in model.graph.node for name in node.output if name in dependent]
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)}
    floats = [name for name in float_tensors(model, named) if types.get(name) == onnx.TensorProto.FLOAT]
    entry = [spec.name] if x.dtype == np.float32 else []
    return collect_histograms(model, [*entry, *floats], x, spec, threads=threads)


def _static(
    model: onnx.ModelProto, ranges: Mapping[str, tuple[float, float]], *, floats: Collection[str], cuts: Collection[str]
) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType
    from onnxruntime.quantization.calibrate import TensorsData
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    single = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
    scalings = [node.name for node in model.graph.node if node.op_type == "Mul" and node.name.endswith(SCALING)]
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with _quiet():
        quantizer = QDQQuantizer(
            copy,
            per_channel=True,
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, single),
            nodes_to_quantize=[],
            nodes_to_exclude=sorted({*floats, *scalings}),
            op_types_to_quantize=sorted({*QDQRegistry, *QLinearOpsRegistry}),
            extra_options={},
        )
        quantizer.quantize_model()
    quantizer.model.topological_sort()
    quantized: onnx.ModelProto = quantizer.model.model
    raw = _unrounded(quantized.graph, floats)
    _name_rounded(quantized.graph, set(cuts) - raw)
    return quantized


def _unrounded(graph: onnx.GraphProto, floats: Collection[str]) -> set[str]:
    """Let nodes in float read what others of them give as it is, not rounded for the integers that read it too. Returns
    the tensors read so."""
    producer = {name: node for node in graph.node for name in node.output}
    given: set[str] = set()
    for node in graph.node:
        if node.name in floats or (node.op_type in KEEPS_FLOAT and node.input[0] in given):
            given.update(node.output)
    raw: set[str] = set()
    for node in graph.node:
        for index, name in enumerate(node.input if node.name in floats else ()):
            back = producer.get(name)
            if back is None or back.op_type != "DequantizeLinear" or (to := producer.get(back.input[0])) is None:
                continue
            if to.input[0] in given:
                node.input[index] = to.input[0]
                raw.add(to.input[0])
    images = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 4}
    additions = {node.name for node in graph.node if node.op_type == "Add" and node.name in floats}
    for name in sorted(raw & {read for node in graph.node if node.name in additions for read in node.input}):
        if _convolved(producer, name, images):
            add_channels_last(graph, name, readers=additions)
    return raw


def _convolved(producer: Mapping[str, onnx.NodeProto], name: str, images: Collection[str]) -> bool:
    """Whether a tensor in float comes right out of a convolution over images, whose weights are among ``images``."""
    node = producer[name]
    while node.op_type in KEEPS_FLOAT and node.input[0] in producer:
        node = producer[node.input[0]]
    return str(node.op_type) == "Conv" and node.input[1] in images


def _name_rounded(graph: onnx.GraphProto, cuts: Collection[str]) -> None:
    """Give each cut tensor's name to its rounded value, which everything behind it reads."""
    rounding = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] in cuts
    }
    before = {name: f"{name}/unrounded" for name in rounding.values()}
    after = {
        node.output[0]: rounding[node.input[0]]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in rounding
    }
    for node in graph.node:
        _rename(node.output, before | after)
        _rename(node.input, before if set(node.output) & set(rounding) else after)


def _rename(tensors: Any, names: Mapping[str, str]) -> None:
    for index, name in enumerate(tensors):
        tensors[index] = names.get(name, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence ONNX Runtime's advice, which goes to the root logger."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
