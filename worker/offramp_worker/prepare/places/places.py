"""The places for exits of a model: its cut vertices, of which rows can be dropped and whose axes are known.

What a place is fed from is told by running the graph (:mod:`.axes`) and by the operators around (:mod:`.channels`),
never by a tensor's rank. A place of which it cannot be told is left out and says why; the others stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offramp_core.bundle import TensorSpec
from offramp_core.errors import ModelRefusedError
from offramp_worker.bundle.dataflow import GraphStep
from offramp_worker.prepare.places.axes import Shapes, mixed_rows, observed_shapes, sample_rows
from offramp_worker.prepare.places.channels import Channels
from offramp_worker.prepare.places.cuts import (
    INPUT_POSITION,
    Place,
    cut_vertices,
    distinct_places,
    exit_trunks,
    float_tensors,
    graph_steps,
    place_groups,
)
from offramp_worker.prepare.places.turning import Layout, turn, turned_name
from offramp_worker.prepare.source.data import InputArray
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.prepare.source.tokens import add_constant_weight

MAX_TRUNK_RANK = 3  # of the features that a bundle's ramps may stand at, without the batch axis
MAX_NAMED = 8  # places of which an error says why


@dataclass(frozen=True, slots=True)
class Unread:
    """A place without heads, by a tensor of it, and why."""

    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class FoundPlaces:
    """The places of a backbone."""

    #: With features turned to the order that heads read, and the weights of a mean over tokens where some head takes
    #: one.
    backbone: Backbone
    #: Cut vertices of the graph as it was given.
    n_cuts: int
    #: Inside the network, in its order.
    places: tuple[Place, ...]
    #: The model's input, where it is an image.
    entry: Place | None
    #: Exits of the network's own, to the tensors that they branch off.
    exits: Mapping[str, str]
    #: Places that were left out.
    unread: tuple[Unread, ...]


def find_places(backbone: Backbone, x: InputArray) -> FoundPlaces:
    """Find where exits can be attached; ``x`` (n, ...) are inputs, of which three are run.

    Raises
    ------
    ModelRefusedError
        Nowhere; says why of each place.
    """
    search = _Search(backbone, x)
    places, layouts = search.places()
    unread = search.unread(places)
    if not places:
        raise ModelRefusedError(_nowhere(len(search.cuts), unread))
    exits = {name: trunk for name, trunk in search.trunks.items() if trunk in search.branching}
    names = {tensor: turned_name(tensor, layout) for tensor, layout in layouts.items()}
    model = turn(backbone.model, layouts)
    tokens = next((place.shape[0] for place in places if place.is_tokens), 0)
    if tokens and backbone.input.pad is None:
        model = add_constant_weight(model, tokens=tokens)
    entry, refused = search.entry()
    return FoundPlaces(
        backbone=replace(backbone, model=model),
        n_cuts=len(search.cuts),
        places=tuple(replace(place, tensor=names.get(place.tensor, place.tensor)) for place in places),
        entry=entry,
        exits={name: names.get(trunk, trunk) for name, trunk in exits.items()},
        unread=(*refused, *unread),
    )


class _Search:
    """What is known of a backbone's tensors."""

    def __init__(self, backbone: Backbone, x: InputArray) -> None:
        self._spec, self._model = backbone.input, backbone.model
        self._steps: Sequence[GraphStep] = graph_steps(backbone.model.graph)
        self.cuts = cut_vertices(self._steps, source=self._spec.name, sink=backbone.output.name)
        self.trunks = exit_trunks(self._steps, self.cuts, backbone.exits, source=self._spec.name)
        self._rows = sample_rows(x, self._spec)
        tokens = self._spec.pad is not None
        self._shapes = observed_shapes(self._model, self._rows, tokens=tokens, varies=self._spec.varies)
        self._channels = Channels(self._model.graph, self._shapes.three, source=self._spec.name)
        floats = set(float_tensors(self._model, self.cuts))
        readings = {
            name: _layout(name, self._spec, self._shapes, self._channels) for name in self.cuts if name in floats
        }
        self._layouts = {name: reading for name, reading in readings.items() if isinstance(reading, Layout)}
        self._reasons = {name: "it is no float32, which heads read" for name in self.cuts if name not in floats}
        self._reasons |= {name: reading for name, reading in readings.items() if isinstance(reading, str)}
        self.branching = {name for name in self.trunks.values() if name in self._layouts or self._may_branch(name)}

    def places(self) -> tuple[tuple[Place, ...], dict[str, Layout]]:
        """Places whose rows keep to themselves, by tensors of the graph as it is, and how these are turned."""
        checked: set[str] = set()
        while True:
            found = self._representatives()
            axes = {p.tensor: self._row_axis(p.tensor) for p in found if p.tensor not in checked}
            mixed = mixed_rows(self._model, axes, self._rows) if axes else {}
            if not mixed:
                return self._with_one_length(found)
            checked |= set(axes)
            for name, reason in mixed.items():
                self._reasons[name] = reason
                self._layouts.pop(name, None)
                self.branching.discard(name)

    def unread(self, places: Sequence[Place]) -> tuple[Unread, ...]:
        """Places that are not among ``places``, each by its tensor of most axes."""
        taken = {place.tensor for place in places}
        groups = [group for group in place_groups(self._steps, self.cuts) if taken.isdisjoint(group)]
        named = [max(reversed(group), key=lambda name: len(self._shapes.three.get(name, ()))) for group in groups]
        return tuple(Unread(name, self._reasons[name]) for name in named)

    def entry(self) -> tuple[Place | None, tuple[Unread, ...]]:
        """The model's input as a place for ramps, where it is an image; else why it is none."""
        spec = self._spec
        if spec.datatype != "FP32" or len(spec.shape) != 3:
            return None, ()
        axis = self._channels.axis(spec.name, rows=0)
        if axis == 1:
            return Place(INPUT_POSITION, spec.name, spec.shape), ()
        reason = (
            axis
            if isinstance(axis, str)
            else f"its channels lie on axis {axis}; heads at the input read [channels, height, width]"
        )
        return None, (Unread(spec.name, reason),)

    def _representatives(self) -> tuple[Place, ...]:
        shapes = {name: layout.shape for name, layout in self._layouts.items()}
        unread = {name: self._shapes.three[name][1:] for name in self.branching if name not in shapes}
        turned = {name for name, layout in self._layouts.items() if not layout.as_it_lies}
        found = distinct_places(self._steps, self.cuts, shapes=shapes | unread, trunks=self.branching, turned=turned)
        return tuple(replace(place, readable=place.tensor in shapes) for place in found)

    def _row_axis(self, name: str) -> int:
        return self._layouts[name].order[0] if name in self._layouts else 0

    def _may_branch(self, trunk: str) -> bool:
        """Whether an exit of the network's own can be taken at a tensor that no other head reads."""
        ranked = len(self._shapes.three.get(trunk, ())) - 1 <= MAX_TRUNK_RANK
        return ranked and self._shapes.row_axis(trunk) == 0 and not self._shapes.varying(trunk)

    def _with_one_length(self, places: Sequence[Place]) -> tuple[tuple[Place, ...], dict[str, Layout]]:
        """Tokens of images come without padding and in any number: where it is not that of the first place, they are
        read as a line."""
        layouts = {place.tensor: self._layouts[place.tensor] for place in places if place.tensor in self._layouts}
        if self._spec.pad is None:
            first = next((place.shape[0] for place in places if place.is_tokens), 0)
            lines = {p.tensor: layouts[p.tensor].as_line() for p in places if p.is_tokens and p.shape[0] != first}
            layouts |= lines
            places = [replace(p, shape=layouts[p.tensor].shape) if p.tensor in lines else p for p in places]
        return tuple(places), layouts


def _layout(name: str, spec: TensorSpec, shapes: Shapes, channels: Channels) -> Layout | str:
    """How a tensor is read, or why not."""
    rows = shapes.row_axis(name)
    if isinstance(rows, str):
        return rows
    rank = len(shapes.three[name])
    if rank not in (3, 4):
        what = "is a single vector" if rank < 3 else f"has {rank - 2} axes of positions"
        return f"it {what} for each row; heads read maps and tokens"
    channel = channels.axis(name, rows=rows)
    if isinstance(channel, str):
        return channel
    if channel in shapes.varying(name):
        return f"its axis {channel}, which holds its channels, varies with the length of the rows"
    positions = [axis for axis in range(rank) if axis not in (rows, channel)]
    if len(positions) == 2:
        return _map(name, shapes, rows, channel, positions)
    return _tokens(name, spec, shapes, (rows, *positions, channel))


def _map(name: str, shapes: Shapes, rows: int, channel: int, positions: Sequence[int]) -> Layout | str:
    shape = shapes.three[name]
    layout = Layout((rows, channel, *positions), (shape[channel], *(shape[axis] for axis in positions)))
    if shapes.varying(name):
        return "it is a map whose size varies with the length of the rows"
    if not layout.as_it_lies and min(layout.shape[1:]) == 1:
        return f"one of its axes has a single entry ({list(shape)} for {shape[rows]} rows)"
    return layout


def _tokens(name: str, spec: TensorSpec, shapes: Shapes, order: tuple[int, ...]) -> Layout | str:
    shape, (_, position, channel) = shapes.three[name], order
    layout = Layout(order, (-1 if shapes.varying(name) else shape[position], shape[channel]))
    if spec.pad is None:
        return layout if position < channel else layout.as_line()
    if not shapes.counts_tokens(name, position):
        long, _ = shapes.lengths
        return (
            f"its axis {position} has {shape[position]} entries for rows of {long} tokens, so that padding cannot "
            "be recognized"
        )
    return layout


def _nowhere(n_cuts: int, unread: Sequence[Unread]) -> str:
    why = "every tensor between them is bypassed by another path" if not n_cuts else "none of them is a map or tokens"
    named = "".join(f"; {each.tensor}: {each.reason}" for each in unread[:MAX_NAMED])
    more = f"; and {len(unread) - MAX_NAMED} more" if len(unread) > MAX_NAMED else ""
    return (
        f"no exit can be attached: input and output are separated by {n_cuts} cut vertices, and {why} "
        f"([channels, height, width] or [tokens, channels]){named}{more}; exits need a network that narrows to one "
        "tensor between its blocks"
    )
