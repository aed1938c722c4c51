"""How sure an exit is, as nodes behind its head: 1 / (1 + exp(raw score)) of :meth:`offramp_core.task.Task.raw_score`,
in float64.

float32 cannot tell confident rows apart. In the session it takes a handful of operators; from what a head says in numpy
it takes a dozen calls for every batch that reaches a ramp. A kind of score is an entry of :data:`SCORES`.

On CUDA ONNX Runtime takes the maximum of a row through cuDNN, in 70 µs for 1,000 columns of few rows, and sums in 2. So
there the largest probability is a sum, see :meth:`Nodes.largest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from offramp_core.task import Score, Task

DOUBLE = onnx.TensorProto.DOUBLE
AXES_ARE_INPUTS = 18  # the opset from which reductions read their axes as an input
SUM_AXES_ARE_INPUTS = 13
# Logits are float32: two that differ at all are so far apart in these units that the softmax of one of them is 1.
APART = 2.0**40


@dataclass(slots=True)
class Nodes:
    """Nodes under construction whose names begin with ``prefix``; ``by_sums`` is for devices with slow maxima."""

    prefix: str
    opset: int
    by_sums: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """One node; returns its output."""
        output = name or f"{self.prefix}/{operator.lower()}{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(operator, list(inputs), [output], name=f"{self.prefix}/{len(self.nodes)}", **attributes)
        )
        return output

    def constant(self, value: npt.NDArray[Any]) -> str:
        """A constant; returns its name."""
        name = f"{self.prefix}/constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def reduced(self, operator: str, value: str, *, name: str = "") -> str:
        """A reduction over the columns, (n, c) → (n,)."""
        if self.opset >= (SUM_AXES_ARE_INPUTS if operator == "ReduceSum" else AXES_ARE_INPUTS):
            return self.add(operator, value, self.constant(np.array([1], dtype=np.int64)), name=name, keepdims=0)
        return self.add(operator, value, name=name, keepdims=0, axes=[1])

    def largest(self, probabilities: str, logits: str, *, name: str = "") -> str:
        """The largest of the softmax of ``logits``, (n, c) float64 → (n,): by sums, the probabilities times 1 where the
        largest logit is and 0 elsewhere. Equal ones share the 1, near-equal ones have probabilities that are equal to
        1e-11."""
        if not self.by_sums:
            return self.reduced("ReduceMax", probabilities, name=name)
        there = self.add("Softmax", self.add("Mul", logits, self.constant(np.array(APART))), axis=1)
        return self.reduced("ReduceSum", self.add("Mul", probabilities, there), name=name)

    def column(self, value: str, number: int) -> str:
        """One column, (n, c) → (n,)."""
        return self.add("Gather", value, self.constant(np.array(number, dtype=np.int64)), axis=1)


def _softmax(nodes: Nodes, logits: str, task: Task) -> str:
    """The largest probability."""
    del task
    return nodes.largest(nodes.add("Softmax", logits, axis=1), logits, name=nodes.prefix)


def _gap(nodes: Nodes, logits: str, task: Task) -> str:
    """The logistic function of the gap between the last class that is named and the first that is not."""
    k = task.spec.k
    best, place = f"{nodes.prefix}/best", f"{nodes.prefix}/place"
    wanted = nodes.constant(np.array([k + 1], dtype=np.int64))
    nodes.nodes.append(helper.make_node("TopK", [logits, wanted], [best, place], name=f"{nodes.prefix}/topk", axis=1))
    gap = nodes.add("Sub", nodes.column(best, k - 1), nodes.column(best, k))
    return _logistic(nodes, gap)


def _labels(nodes: Nodes, logits: str, task: Task) -> str:
    """The probability that all labels are right: prod 1 / (1 + exp(-|logit - threshold|))."""
    margin = nodes.add("Abs", nodes.add("Sub", logits, nodes.constant(task.offsets)))
    one = nodes.constant(np.array(1.0))
    doubt = nodes.add("Log", nodes.add("Add", one, nodes.add("Exp", nodes.add("Neg", margin))))
    return nodes.add("Exp", nodes.add("Neg", nodes.reduced("ReduceSum", doubt)), name=nodes.prefix)


def _estimate(nodes: Nodes, output: str, task: Task) -> str:
    """The logistic function of minus the logarithm of the expected error."""
    return _logistic(nodes, nodes.add("Neg", nodes.column(output, task.width)))


def _logistic(nodes: Nodes, value: str) -> str:
    one = nodes.constant(np.array(1.0))
    grown = nodes.add("Add", one, nodes.add("Exp", nodes.add("Neg", value)))
    return nodes.add("Div", one, grown, name=nodes.prefix)


SCORES: Mapping[Score, Callable[[Nodes, str, Task], str]] = {
    "softmax": _softmax,
    "gap": _gap,
    "labels": _labels,
    "estimate": _estimate,
}


def add_confidence(model: onnx.ModelProto, *, output: str, task: Task, name: str, by_sums: bool = False) -> None:
    """Add the output ``name`` [n] float64: how sure an exit is that says ``output`` [n, head_width]."""
    opset = next(i.version for i in model.opset_import if i.domain in ("", "ai.onnx"))
    nodes = Nodes(name, opset, by_sums)
    SCORES[task.score](nodes, nodes.add("Cast", output, to=DOUBLE), task)
    model.graph.node.extend(nodes.nodes)
    model.graph.initializer.extend(nodes.constants)
    model.graph.output.append(helper.make_tensor_value_info(name, DOUBLE, None))
