"""The backbone at int8: candidates are made, measured against fp32, and the best one stays, or none and the reason.

Weights get seven bits. The int8 kernels of processors without VNNI instructions add pairs of products in 16 bits, which
eight bits overflow silently: the same file would answer differently, and worse, on another machine. With seven bits every
integer sum is exact everywhere (decision 16).

Tensors that feed ramps keep their names and stay float32: the name goes to the value after rounding to 255 levels, which is what
everything behind reads. Stages are cut out of the graph as ONNX Runtime optimises it (:mod:`offramp_worker.bundle.stages`), where the levels
themselves are handed on and both sides run on integers.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.dataflow import dependent_tensors, graph_steps
from offramp_worker.bundle.graph import input_name, output_name, with_outputs
from offramp_worker.bundle.lengths import typical_batch
from offramp_worker.bundle.tensors import closed_options
from offramp_worker.devices import open_session
from offramp_worker.prepare.calibration import RANGE_METHODS, Histogram, RangeMethod, collect_histograms, value_range
from offramp_worker.prepare.cuts import WEIGHTED_OPERATORS, float_tensors
from offramp_worker.prepare.features import model_logits
from offramp_worker.prepare.products import integer_products
from offramp_worker.prepare.profiling import Job, time_jobs
from offramp_worker.prepare.sources import Backbone

CALIBRATION_ROWS = 128
JUDGED_ROWS = 1_000
MAX_DISAGREEMENT = 0.05
WORTHWHILE = 0.9  # of the fp32 time, at some batch size
AS_FAST = 1.05  # times that differ by less are equal
COMPARED_SIZES = (1, 4, 16, 32)
DYNAMIC = "dynamic"
CONVOLUTIONS, PRODUCTS = ("Conv", "ConvTranspose"), ("MatMul", "Gemm")

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to quantise and what it is worth.

    ``disagreement`` is the share of judged rows it answers differently from fp32, ``ratio`` its time over fp32's by batch
    size. ``refused`` says why it does not stay; empty for the one that does.
    """

    method: str
    disagreement: float
    ratio: Mapping[int, float]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The graph that stays, or None, and everything that was tried."""

    model: onnx.ModelProto | None
    method: str
    tried: tuple[Candidate, ...]

    @property
    def refused(self) -> str:
        """Why there is none; empty where there is one."""
        if self.model is not None:
            return ""
        return "; ".join(f"{c.method}: {c.refused}" for c in self.tried) or "it has no weighted operator to quantise"


def choose_quantized(
    backbone: Backbone,
    x: Array,
    *,
    cuts: Collection[str] = (),
    seed: int,
    threads: int,
    seconds: float,
) -> Quantized:
    """Quantise a model in every way that may pay, and keep the best.

    Parameters
    ----------
    x : (n, ...)
        Rows that are no records: up to 128 calibrate, up to 1,000 others judge the answers.
    cuts : collection of str
        Tensors that feed ramps; they keep their names.
    seed : int
        Draws the rows. The same seed and rows give the same bytes.
    threads : int
        CPU threads of the sessions that are timed.
    seconds : float
        Time spent on timing, about.

    Notes
    -----
    A candidate stays only if it takes at most 0.9 of the fp32 time at some batch size and disagrees on at most 5 % of the
    rows; of several equally fast ones the one that disagrees least.
    """
    order = np.random.default_rng(seed).permutation(len(x))
    n_calibration = min(CALIBRATION_ROWS, len(x) // 2)
    calibration = x[np.sort(order[:n_calibration])]
    judged = x[np.sort(order[n_calibration : n_calibration + JUDGED_ROWS])]
    models = dict(quantized_models(backbone, calibration, cuts=cuts, threads=threads))
    if not models:
        return Quantized(None, "", ())
    tried = _judged(backbone, models, judged, threads=threads, seconds=seconds)
    best = _best([c for c in tried if not c.refused])
    if best is None:
        return Quantized(None, "", tried)
    better = f"{best.method} is faster, or as fast and disagrees no more"
    tried = tuple(c if c.refused or c is best else replace(c, refused=better) for c in tried)
    return Quantized(models[best.method], best.method, tried)


def quantized_models(
    backbone: Backbone, calibration: Array, *, cuts: Collection[str], threads: int
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Every candidate with its method's name: static ranges where convolutions prevail, dynamic ones for matrix products."""
    prepared = _optimised(backbone.model, keep=cuts)
    operators = [node.op_type for node in prepared.graph.node]
    convolutions, products = (sum(operators.count(name) for name in names) for names in (CONVOLUTIONS, PRODUCTS))
    last = _last_weighted(prepared)
    if convolutions and convolutions >= products:
        histograms = _activations(prepared, calibration, backbone.input, threads=threads)
        for method in RANGE_METHODS:
            yield f"static-{method}", _static(prepared, histograms, method, exclude=last, cuts=cuts)
    elif products:
        yield DYNAMIC, _tidied(integer_products(prepared, calibration, backbone.input, exclude=last, threads=threads))


def _judged(
    backbone: Backbone, models: Mapping[str, onnx.ModelProto], rows: Array, *, threads: int, seconds: float
) -> tuple[Candidate, ...]:
    sessions = {"fp32": open_session(backbone.model, threads=threads)}
    sessions |= {method: open_session(model, threads=threads) for method, model in models.items()}
    said = {method: _answers(session, rows, backbone.input) for method, session in sessions.items()}
    # Static ranges are numbers in one and the same graph. Its time is measured once, so that the choice between them is a
    # matter of answers alone, and the same for the same seed.
    timed = {_kind(method): session for method, session in sessions.items()}
    ratios: dict[str, dict[int, float]] = {kind: {} for kind in timed}
    for size in COMPARED_SIZES:
        batch = typical_batch(rows, backbone.input, size=size)
        jobs = {kind: Job(_call(session, batch)) for kind, session in timed.items()}
        medians = time_jobs(jobs, threads=threads, seconds=seconds / len(COMPARED_SIZES))
        for kind in timed:
            ratios[kind][size] = medians[kind] / medians["fp32"]
    candidates = (Candidate(m, float((said[m] != said["fp32"]).mean()), ratios[_kind(m)]) for m in models)
    return tuple(replace(c, refused=_cannot_pay(c)) for c in candidates)


def _kind(method: str) -> str:
    return method.partition("-")[0]


def _cannot_pay(candidate: Candidate) -> str:
    if candidate.disagreement > MAX_DISAGREEMENT:
        return f"it answers {candidate.disagreement:.1%} of the rows differently; at most {MAX_DISAGREEMENT:.0%} may be"
    if (best := min(candidate.ratio.values())) > WORTHWHILE:
        return f"it takes {best:.2f} of the fp32 time at best; {WORTHWHILE} or less would pay"
    return ""


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The least disagreement among the fastest."""
    time = {c.method: float(np.mean(list(c.ratio.values()))) for c in candidates}
    fast = [c for c in candidates if time[c.method] <= AS_FAST * min(time.values())]
    return min(fast, key=lambda c: c.disagreement, default=None)


def _answers(session: ort.InferenceSession, x: Array, spec: TensorSpec) -> npt.NDArray[np.intp]:
    answers: npt.NDArray[np.intp] = model_logits(session, x, spec).argmax(axis=1)
    return answers


def _call(session: ort.InferenceSession, rows: Array) -> Callable[[], object]:
    feed = {session.get_inputs()[0].name: rows}
    return lambda: session.run(None, feed)


def _optimised(model: onnx.ModelProto, *, keep: Collection[str]) -> onnx.ModelProto:
    """The graph with constants folded and normalisation merged into convolutions; tensors in ``keep`` survive."""
    probe, outputs = with_outputs(model, sorted(keep)), len(model.graph.output)
    options = closed_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        ort.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
        optimised = onnx.load(options.optimized_model_filepath)
    del optimised.graph.output[outputs:], optimised.graph.value_info[:]  # quantising makes notes of shapes stale
    for index, node in enumerate(optimised.graph.node):
        node.name = f"n{index}"  # nodes are excluded by name, and the exporter's need not be unique
    return optimised


def _last_weighted(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes from the last weighted operator to the output.

    They stay in float: rounding logits to 255 levels would tie the uncertainties of different inputs, for no time saved.
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
    entry = [spec.name] if x.dtype.kind == "f" else []
    return collect_histograms(model, [*entry, *floats], x, spec, threads=threads)


def _static(
    model: onnx.ModelProto,
    histograms: Mapping[str, Histogram],
    method: RangeMethod,
    *,
    exclude: list[str],
    cuts: Collection[str],
) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType
    from onnxruntime.quantization.calibrate import TensorsData
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    ranges = {name: value_range(h, method) for name, h in histograms.items()}
    single = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
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
            nodes_to_exclude=exclude,
            op_types_to_quantize=sorted({*QDQRegistry, *QLinearOpsRegistry}),
            extra_options={},
        )
        quantizer.quantize_model()
    quantizer.model.topological_sort()
    quantized: onnx.ModelProto = quantizer.model.model
    _name_rounded(quantized.graph, cuts)
    return _tidied(quantized)


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


def _tidied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without notes, so that the bytes depend on the graph alone."""
    model.producer_name, model.producer_version, model.doc_string = "offramp", "", ""
    del model.metadata_props[:]
    del model.graph.value_info[:]
    return model


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
