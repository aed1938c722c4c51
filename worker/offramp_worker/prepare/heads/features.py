"""What heads learn from: pooled features of every place and the model's own answers, in one pass over the data.

The pooling nodes are those of :mod:`offramp_worker.bundle.heads`, so a head trained here computes the same when it
is served. Heads of one place that pool alike share their features. Whole feature maps leave ONNX Runtime only for
heads with convolutions, one place at a time (:func:`collect_maps`); the rest is a few KiB per input and place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import HeadKind, RampSpec, TensorSpec
from offramp_core.task import Task
from offramp_worker.bundle.graph import stage_model, tapped_model
from offramp_worker.bundle.heads import KINDS, TOP_LABEL_TASK, HeadNodes, head_nodes, parameter_shapes
from offramp_worker.bundle.lengths import by_length, pad_rows
from offramp_worker.devices import CPU, Device, open_session
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.source.data import FloatArray, InputArray
from offramp_worker.prepare.source.sources import Backbone

CHUNK_ROWS = 64
# Hidden units of a grid-mlp. Its first layer is read cold from memory by nearly every batch, so bytes cost more than
# arithmetic; on CIFAR-10 a hundred thousand weights exit as many inputs as two hundred thousand do.
MIN_HIDDEN, MAX_HIDDEN = 64, 192
FIRST_LAYER_WEIGHTS = 98_304
CONV_CHANNELS = 32

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Features:
    """Pooled inputs of heads and the model's answers for the same rows.

    ``pooled`` maps :func:`feature_key` to (n, width) float32; ``logits`` is (n, n_classes), whatever scale the model
    answers in.
    """

    pooled: Mapping[str, FloatArray]
    logits: FloatArray

    def __len__(self) -> int:
        return len(self.logits)

    def of(self, spec: RampSpec) -> FloatArray:
        """What the first linear layer of a head reads, (n, width)."""
        return self.pooled[feature_key(spec)]

    def rows(self, start: int, stop: int) -> Features:
        """Rows [start, stop)."""
        return Features({k: v[start:stop] for k, v in self.pooled.items()}, self.logits[start:stop])

    def then(self, other: Features) -> Features:
        """These rows, then those of ``other``."""
        pooled = {key: np.concatenate([value, other.pooled[key]]) for key, value in self.pooled.items()}
        return Features(pooled, np.concatenate([self.logits, other.logits]))


def feature_key(spec: RampSpec) -> str:
    """Name of the pooled features a head without convolutions reads; heads that pool one tensor alike share them."""
    return f"{spec.output or spec.tensor}/{KINDS[spec.head].pooling.name}"


def kinds_of(rung: str, *, tokens: bool = False) -> tuple[HeadKind, ...]:
    """The kinds of one rung, of those that read maps or of those that read tokens."""
    return tuple(name for name, kind in KINDS.items() if kind.rung == rung and kind.pooling.tokens == tokens)


def candidate_ramps(places: Sequence[Place], *, kinds: Sequence[HeadKind]) -> tuple[RampSpec, ...]:
    """A head of each of ``kinds`` at every place whose map is large enough for it, by position."""
    return tuple(
        ramp_at(place, kind)
        for place in places
        for kind in kinds
        if not place.is_image or min(place.height, place.width) >= KINDS[kind].pooling.least_side
    )


def ramp_at(place: Place, kind: HeadKind, *, hidden: int = 0) -> RampSpec:
    """The spec of one head; ``hidden`` 0 is the kind's usual width at that place."""
    if not hidden and KINDS[kind].needs_hidden:
        hidden = (
            CONV_CHANNELS if KINDS[kind].convolutions else _hidden_units(KINDS[kind].pooling.cells * place.channels)
        )
    return RampSpec(
        id=f"r{place.position:02d}-{KINDS[kind].suffix}{hidden or ''}",
        tensor=place.tensor,
        position=place.position,
        depth=0.0,
        head=kind,
        channels=place.channels,
        hidden=hidden,
    )


def _hidden_units(inputs: int) -> int:
    return min(MAX_HIDDEN, max(MIN_HIDDEN, FIRST_LAYER_WEIGHTS // inputs))


def blank_heads(ramps: Sequence[RampSpec], places: Sequence[Place], *, task: Task) -> tuple[HeadNodes, ...]:
    """Heads with zero weights: their cost and their pooling are those of trained ones."""
    blank = {
        spec.id: {
            name: np.zeros(shape, dtype=np.float32)
            for name, shape in parameter_shapes(spec, n_classes=task.head_width).items()
        }
        for spec in ramps
    }
    return heads_of(ramps, places, tensors=blank, task=task)


def heads_of(
    ramps: Sequence[RampSpec],
    places: Sequence[Place],
    *,
    tensors: Mapping[str, Mapping[str, FloatArray]],
    task: Task = TOP_LABEL_TASK,
) -> tuple[HeadNodes, ...]:
    """ONNX nodes of ramps; ``tensors`` maps ramp id to its parameters."""
    at = {place.position: place for place in places}
    return tuple(
        head_nodes(spec, tensors[spec.id], height=at[spec.position].height, width=at[spec.position].width, task=task)
        for spec in ramps
    )


def collect_features(
    backbone: Backbone,
    ramps: Sequence[RampSpec],
    places: Sequence[Place],
    x: InputArray,
    *,
    threads: int,
    advance: Advance,
) -> Features:
    """Run the backbone once over ``x`` (n, ...) and keep what every head without convolutions would read."""
    distinct = {feature_key(spec): spec for spec in ramps if not KINDS[spec.head].convolutions}
    blank = blank_heads(tuple(distinct.values()), places, task=backbone.task)
    heads = tuple(_pooling_only(head) for head in blank)
    answers, pooled = tapped_logits(backbone, heads, x, threads=threads, advance=advance)
    return Features(dict(zip(distinct, pooled, strict=True)), backbone.scale.to_logits(answers))


def collect_maps(
    backbone: Backbone, place: Place, x: InputArray, *, threads: int, advance: Advance
) -> npt.NDArray[np.float16]:
    """The whole feature maps at one place, (n, channels, height, width), in half precision to halve the memory.

    Only the part of the backbone before the place runs.
    """
    maps = np.empty((len(x), place.channels, place.height, place.width), dtype=np.float16)
    if place.tensor == backbone.input.name:
        maps[:] = x
        advance(len(x))
        return maps
    front = stage_model(
        backbone.model,
        source=None,
        target=place.tensor,
        heads=(),
        shapes={place.tensor: (place.channels, place.height, place.width)},
    )
    session = open_session(front, threads=threads)
    for start in range(0, len(x), CHUNK_ROWS):
        chunk = x[start : start + CHUNK_ROWS]
        (maps[start : start + len(chunk)],) = session.run(None, {backbone.input.name: chunk})
        advance(len(chunk))
    return maps


def tapped_logits(
    backbone: Backbone,
    heads: Sequence[HeadNodes],
    x: InputArray,
    *,
    threads: int,
    device: Device = CPU,
    advance: Advance,
) -> tuple[FloatArray, list[FloatArray]]:
    """The model's logits (n, n_classes) and each head's output, computed as a worker's audits on the device compute
    them."""
    session = open_session(tapped_model(backbone.model, heads), threads=threads, device=device)
    names = [backbone.output.name, *(head.output for head in heads)]
    out: list[FloatArray] = []
    for rows in by_length(x, backbone.input, size=CHUNK_ROWS):
        with device.turn:
            values = session.run(names, {backbone.input.name: pad_rows([x[rows]], backbone.input)})
        if not out:
            out = [np.empty((len(x), *value.shape[1:]), dtype=np.float32) for value in values]
        for whole, value in zip(out, values, strict=True):
            whole[rows] = value
        advance(len(rows))
    return out[0], out[1:]


def model_logits(session: Any, x: InputArray, spec: TensorSpec, *, device: Device = CPU) -> FloatArray:
    """What a whole model with the input ``spec``, in a session on the device, says about rows ``x`` (n, ...): its
    logits (n, n_classes)."""
    outputs: FloatArray | None = None
    for rows in by_length(x, spec, size=CHUNK_ROWS):
        with device.turn:
            (logits,) = session.run(None, {spec.name: pad_rows([x[rows]], spec)})
        if outputs is None:
            outputs = np.empty((len(x), logits.shape[1]), dtype=np.float32)
        outputs[rows] = logits
    assert outputs is not None
    return outputs


def _pooling_only(head: HeadNodes) -> HeadNodes:
    """The nodes of a head before its first layer."""
    first_layer = next((index for index, node in enumerate(head.nodes) if node.op_type == "Gemm"), None)
    if first_layer is None:  # an exit of the network's own
        return head
    return replace(head, nodes=head.nodes[:first_layer], initializers=(), output=str(head.nodes[first_layer].input[0]))
