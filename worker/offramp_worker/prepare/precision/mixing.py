"""Which parts of a network of convolutions stay in float although the rest runs on integers (decision 79).

Errors of parts are about independent, so their variances add up, and so, about, does the time: with each part measured
alone in float, every set of parts has a forecast. The sets that promise most are then made and measured, since changes
of layout between parts are in no forecast.

What a mixture is worth is what it saves under a certificate: of the budget that a certificate allows, its own
disagreement is spent, and exits save with the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core import binomial
from offramp_core.certify.planner import largest_passing_count
from offramp_worker.bundle.dataflow import dependent_tensors, graph_steps
from offramp_worker.bundle.graph import input_name

USUAL_BUDGET = 0.01
USUAL_LABELS, USUAL_LEVEL = 2_640, 0.05  # what is left of 3,000 for the test
MOST_PARTS = 8
NEAR = 0.25  # of the rows, those whose answer the least error changes
SMALLEST_VARIANCE = 0.02  # of the whole error; weights and the tail of the network are never without
MADE = 3  # forecasts that are made and measured

Floats = npt.NDArray[np.float64]
Single = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes, by name, that stay in float together."""

    name: str
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Measure:
    """Of a graph: its time as a share of fp32's, and the variance of its errors in the margin between fp32's two best
    classes."""

    ratio: float
    variance: float


@dataclass(frozen=True, slots=True)
class Exits:
    """What exits save, as a share of the time, by the budget they may spend."""

    saving: Mapping[float, float]

    def at(self, budget: float) -> float:
        """Between the known budgets on a line; nothing at none."""
        known = sorted(self.saving.items())
        return float(np.interp(budget, [0.0, *(b for b, _ in known)], [0.0, *(s for _, s in known)]))


def parts_of(model: onnx.ModelProto, *, exclude: Collection[str]) -> tuple[Part, ...]:
    """The first convolution, the additions of residual connections by the size of their maps, and the other
    convolutions: each by itself where they are few, else by size too.

    ``exclude`` are names of nodes that are in float anyhow.
    """
    dependent = dependent_tensors(graph_steps(model.graph), source=input_name(model)) | {input_name(model)}
    inferred = onnx.shape_inference.infer_shapes(model).graph
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim[2:]] for v in inferred.value_info}
    nodes = [n for n in model.graph.node if n.name not in exclude and dependent & set(n.input)]
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    additions = [node for node in nodes if node.op_type == "Add" and len(dependent & set(node.input)) == 2]

    def by_size(kind: str, some: Sequence[onnx.NodeProto]) -> list[Part]:
        found: dict[str, set[str]] = {}
        for node in some:
            size = "x".join(map(str, shapes.get(node.output[0], [])))
            found.setdefault(f"{kind} at {size}" if size else kind, set()).add(node.name)
        return [Part(name, frozenset(names)) for name, names in found.items()]

    parts = [Part("first convolution", frozenset({node.name})) for node in convolutions[:1]]
    parts += by_size("additions", additions)
    each = [Part(f"convolution {i}", frozenset({node.name})) for i, node in enumerate(convolutions[1:], start=2)]
    others = each if len(parts) + len(each) <= MOST_PARTS else by_size("convolutions", convolutions[1:])
    return tuple((*parts, *others)[:MOST_PARTS])


def margin_errors(logits: Single, reference: Single) -> tuple[Floats, Floats]:
    """Margins of the reference between its two best classes (n,), and by how much ``logits`` move them (n,)."""
    rows, best = np.arange(len(reference)), np.argsort(reference, axis=1)
    first, second = best[:, -1], best[:, -2]
    margins = (reference[rows, first] - reference[rows, second]).astype(np.float64)
    return margins, (logits[rows, first] - logits[rows, second]).astype(np.float64) - margins


def error_variance(logits: Single, reference: Single) -> float:
    """The mean square of margin errors on the quarter of the rows with the least margins, the only ones that matter;
    errors grow with margins."""
    margins, errors = margin_errors(logits, reference)
    near = margins <= np.quantile(margins, NEAR)
    return float((errors[near] ** 2).mean())


def expected_disagreement(variance: float, margins: Floats) -> float:
    """The share of rows whose answer a normal error of this variance changes. It varies much less from sample to sample
    than a count of a few rows."""
    error = NormalDist(sigma=max(variance, 1e-12) ** 0.5)  # not SciPy, which the worker's image lacks
    return float(np.mean([error.cdf(-margin) for margin in margins]))


def worth(ratio: float, disagreement: float, exits: Exits) -> float:
    """Expected share of the fp32 time that a certified plan of this graph and exits saves at the usual budget and
    labels."""
    passing = largest_passing_count(USUAL_LABELS, budget=USUAL_BUDGET, level=USUAL_LEVEL)
    passes = float(binomial.cdf(passing, USUAL_LABELS, disagreement))
    left = max(0.0, passing / USUAL_LABELS - disagreement)
    return passes * (1 - ratio * (1 - exits.at(left)))


def promising(
    base: Measure, alone: Mapping[Part, Measure], margins: Floats, exits: Exits, *, most: int = MADE
) -> list[tuple[Part, ...]]:
    """The sets of parts that would be worth most in float, by forecast; none at all is not among them, since that is
    measured already.

    Parameters
    ----------
    base : Measure
        Of the graph with nothing in float.
    alone : mapping
        Of the graph with one part in float.
    margins : (n,)
        Of fp32's answers.
    """
    parts = list(alone)
    sets = [some for size in range(1, len(parts) + 1) for some in combinations(parts, size)]
    return sorted(sets, key=lambda some: -_forecast(base, [alone[part] for part in some], margins, exits))[:most]


def _forecast(base: Measure, some: Sequence[Measure], margins: Floats, exits: Exits) -> float:
    variance = base.variance + sum(measure.variance - base.variance for measure in some)
    ratio = base.ratio + sum(measure.ratio - base.ratio for measure in some)
    variance = max(variance, SMALLEST_VARIANCE * base.variance)
    return worth(ratio, expected_disagreement(variance, margins), exits)
