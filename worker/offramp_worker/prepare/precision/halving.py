"""The backbone at fp16, for GPUs: made by ONNX Runtime's own converter, measured against fp32, and kept or refused.

Weights and features are float16 throughout, but for operators that the converter leaves in float32. What clients send
and the logits stay what they are. So do tensors that feed ramps: their names go to float32 values that everything
behind reads through a cast back, which changes none of them. ONNX Runtime takes such a pair of casts out where no ramp
reads and no stage ends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from offramp_worker.devices import CPU, Device
from offramp_worker.prepare.precision.folding import folded, tidied
from offramp_worker.prepare.precision.judging import JUDGED_ROWS, Judge, Lowered
from offramp_worker.prepare.precision.mixing import Exits
from offramp_worker.prepare.source.halves import HALF, SINGLE, read_instead
from offramp_worker.prepare.source.sources import Backbone

METHOD = "float16"

Array = npt.NDArray[Any]


def choose_half(
    backbone: Backbone,
    x: Array,
    *,
    cuts: Collection[str] = (),
    exits: Exits | None = None,  # noqa: ARG001 - there is one form, and nothing to choose by what exits save
    seed: int,
    threads: int,
    seconds: float,
    device: Device = CPU,
) -> Lowered:
    """The model in half precision where that pays on the device.

    Parameters
    ----------
    x : (n, ...)
        Rows that are no records: up to 1,000 judge the answers.
    cuts : collection of str
        Tensors that feed ramps; they keep their names and stay float32.
    seed : int
        Draws the rows.
    seconds : float
        Time spent on timing, about.

    Notes
    -----
    It stays by the rule of :func:`offramp_worker.prepare.precision.quantizing.choose_quantized`, and only if what it
    says of every row is finite: float16 ends at 65,504.
    """
    rows = x[np.sort(np.random.default_rng(seed).permutation(len(x))[:JUDGED_ROWS])]
    judge = Judge.of(backbone, rows, threads=threads, device=device)
    try:
        model = half_model(backbone.model, cuts=cuts)
        (tried,) = judge.candidates({METHOD: model}, seconds=seconds)
    except Exception as error:  # a device without float16: bare exceptions of ONNX Runtime's C++ side
        return Lowered(None, "", (), f"it does not run on {device.name}: {_brief(error)}")
    return Lowered(None, "", (tried,)) if tried.refused else Lowered(model, METHOD, (tried,))


def half_model(model: onnx.ModelProto, *, cuts: Collection[str]) -> onnx.ModelProto:
    """A copy that computes in float16; tensors in ``cuts`` keep their names and are float32."""
    from onnxruntime.quantization.onnx_model import ONNXModel
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half = convert_float_to_float16(folded(model, keep=cuts), keep_io_types=True)
    for name in sorted(cuts):
        _widen(half.graph, name)
    ordered = ONNXModel(half)
    ordered.topological_sort()
    return tidied(ordered.model)


def _widen(graph: onnx.GraphProto, name: str) -> None:
    """Give a tensor's name to its float32 value, which everything that read it reads through a cast back."""
    narrow, again = f"{name}/float16", f"{name}/float16-again"
    read_instead(graph, name, again)
    for node in graph.node:
        node.output[:] = [narrow if given == name else given for given in node.output]
    graph.node.extend(
        [
            helper.make_node("Cast", [narrow], [name], name=f"{name}/widened", to=SINGLE),
            helper.make_node("Cast", [name], [again], name=f"{name}/narrowed", to=HALF),
        ]
    )


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
