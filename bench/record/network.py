"""Recording an image network: heads at every place, trained, and scored on the pool with the graph a worker runs.

All steps are those of ``offramp prepare``; what differs is that every place keeps its heads, worth it or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.record.scores import FloatArray, Ramp
from offramp_core.bundle import RampSpec
from offramp_worker.bundle.graph import feature_shapes
from offramp_worker.bundle.heads import parameter_shapes
from offramp_worker.prepare.heads.distillation import train_heads
from offramp_worker.prepare.heads.features import candidate_ramps, collect_features, heads_of, tapped_logits
from offramp_worker.prepare.heads.plain import head_logits
from offramp_worker.prepare.heads.recipes import Parameters
from offramp_worker.prepare.pipeline import training_threads
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.sources import Backbone, load_backbone

# `offramp prepare` gives deep places fewer, which costs 3 to 6 points of exits there and saves cold weights. The best
# known heads are what tuners should be compared on.
HIDDEN = 192
PRODUCTS = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs (n, C, H, W) by what they are for; no row is in two of them.

    ``training`` teaches heads, ``validation`` decides when to stop and makes quantile tables, ``pool`` is recorded.
    """

    training: FloatArray
    validation: FloatArray
    pool: FloatArray


@dataclass(frozen=True, slots=True)
class Recording:
    """Both kinds of head at every place.

    ``reference`` (n, n_classes) are the full model's logits on the pool. ``macs`` maps ramp id to (share of the model's
    multiplications up to the ramp, those of its head as a share), which no machine's load or cache moves.
    """

    ramps: tuple[Ramp, ...]
    reference: FloatArray
    macs: Mapping[str, tuple[float, float]]

    def of_kind(self, head: str) -> tuple[Ramp, ...]:
        """The ramps with one kind of head, in network order."""
        return tuple(ramp for ramp in self.ramps if ramp.spec.head == head)


def record_network(model: str, rows: Rows, reporter: Reporter, *, blocks: int, seed: int) -> Recording:
    """Train heads after each of the last ``blocks`` places of a model and score the pool.

    Parameters
    ----------
    model : str
        A URI that :func:`load_backbone` understands.
    blocks : int
        How many places count, from the back: what lies before the first block of a residual network is no exit.

    Raises
    ------
    OfframpError
        The model or the inputs are refused.
    """
    with reporter.step("export the model", total=1) as advance:
        backbone = load_backbone(model, rows.pool)
        advance(1)
    places, specs = places_and_ramps(backbone, rows.pool, blocks=blocks)
    parameters, validation = _train(backbone, specs, places, rows, reporter, seed=seed)
    nodes = heads_of(specs, places, tensors=parameters)
    with reporter.step("score the pool", total=len(rows.pool)) as advance:
        reference, logits = tapped_logits(backbone, nodes, rows.pool, threads=training_threads(), advance=advance)
    ramps = tuple(Ramp(s, scored, validation[s.id]) for s, scored in zip(specs, logits, strict=True))
    return Recording(ramps, reference, _macs(backbone, specs, rows.pool))


def places_and_ramps(
    backbone: Backbone, x: FloatArray, *, blocks: int
) -> tuple[tuple[Place, ...], tuple[RampSpec, ...]]:
    """The last ``blocks`` places of a model and both kinds of head at each of them."""
    places = last_places(find_places(backbone, x).places, blocks=blocks)
    specs = candidate_ramps(places, kinds=("grid-mlp", "pooled-linear"))
    return places, tuple(replace(s, hidden=HIDDEN) if s.hidden else s for s in specs)


def last_places(places: Sequence[Place], *, blocks: int) -> tuple[Place, ...]:
    """The last ``blocks`` places, renumbered from 1: position k is after block k."""
    if len(places) < blocks:
        raise ValueError(f"the model has {len(places)} places for exits; {blocks} were expected")
    kept = places[len(places) - blocks :]
    return tuple(replace(place, position=k) for k, place in enumerate(kept, start=1))


def _train(
    backbone: Backbone, specs: Sequence[RampSpec], places: Sequence[Place], rows: Rows, reporter: Reporter, *, seed: int
) -> tuple[Mapping[str, Parameters], Mapping[str, FloatArray]]:
    """Parameters of every head, and its logits on the validation rows. The features (GiBs) live no longer than this."""
    x = np.concatenate([rows.training, rows.validation])
    with reporter.step("run head rows", total=len(x)) as advance:
        features = collect_features(backbone, specs, places, x, threads=training_threads(), advance=advance)
    training, validation = features.rows(0, len(rows.training)), features.rows(len(rows.training), len(x))
    with reporter.step(f"train heads on {len(training)} rows", total=len(specs)) as advance:
        parameters = train_heads(specs, training, validation, seed=seed, threads=training_threads(), advance=advance)
    return parameters, {s.id: head_logits(parameters[s.id], validation.of(s)) for s in specs}


def running_macs(backbone: Backbone, x: FloatArray) -> dict[str, int]:
    """Multiplications of convolutions and matrix products made until each tensor is there; pooling is not counted."""
    graph = backbone.model.graph
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    products = {node.output[0]: sizes[node.input[1]] for node in graph.node if node.op_type in PRODUCTS}
    shapes = feature_shapes(backbone.model, products, x[:1])
    reached: dict[str, int] = {}
    done = 0
    for node in graph.node:
        first = node.output[0]
        if first in products:
            done += math.prod(products[first]) * math.prod(shapes[first][1:])
        reached |= dict.fromkeys(node.output, done)
    return reached


def _macs(backbone: Backbone, specs: Sequence[RampSpec], x: FloatArray) -> dict[str, tuple[float, float]]:
    reached = running_macs(backbone, x)
    total = reached[backbone.output.name]
    return {s.id: (reached[s.tensor] / total, _head_macs(s, backbone.n_classes) / total) for s in specs}


def _head_macs(spec: RampSpec, n_classes: int) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(spec, n_classes=n_classes).values() if len(shape) == 2)
