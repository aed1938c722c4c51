"""Small models in front of the big one: a cascade, as ramps at the model's input.

A side model is judged like any head: what could leave there at a disagreement budget, against what it costs every
input. It is quantised where that makes it faster; its own disagreement with its fp32 form matters to nobody, because
records hold what it says as it will be served.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import compose, helper

from offramp_core.bundle import RampSpec, TensorSpec
from offramp_core.errors import InvalidArgumentError
from offramp_core.task import Task
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.devices import CPU, Device, open_session
from offramp_worker.prepare.heads.features import model_logits
from offramp_worker.prepare.heads.scales import ending_in_logits
from offramp_worker.prepare.heads.selection import LOOSEST, RampCost, RampMerit, merit
from offramp_worker.prepare.measuring.profiling import side_seconds
from offramp_worker.prepare.places.cuts import INPUT_POSITION
from offramp_worker.prepare.precision.judging import Lowered
from offramp_worker.prepare.precision.quantizing import choose_quantized
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.data import FloatArray, InputArray
from offramp_worker.prepare.source.sources import Backbone, load_backbone

COMPARE_SECONDS = 1.5
MAX_ID = 56  # the CRDs take 63 characters; a number may follow


@dataclass(frozen=True, slots=True)
class Side:
    """A side model as a ramp.

    ``quantized`` says whether ``model`` is an int8 graph, and what was tried. ``seconds`` maps batch size to its time
    with the decision. ``refused`` says why it does not stay.
    """

    spec: RampSpec
    source: str
    model: onnx.ModelProto
    quantized: Lowered | None
    seconds: Mapping[int, float]
    merit: RampMerit | None = None
    refused: str = ""


def load_side(
    uri: str,
    backbone: Backbone,
    x: InputArray,
    *,
    taken: Collection[str],
    quantize: bool,
    seed: int,
    threads: int,
    seconds: float,
    device: Device = CPU,
    reporter: Reporter,
) -> Side:
    """Load a side model, quantise it where that is faster, and time it.

    Parameters
    ----------
    uri : str
        As for the backbone, see :func:`load_backbone`.
    x : (n, ...) float32
        Rows that are no records.
    taken : collection of str
        Ramp ids in use.
    quantize : bool
        False keeps fp32.
    device : Device
        Where it is timed.

    Raises
    ------
    InvalidArgumentError
        It cannot be loaded, takes other inputs, or tells other classes apart than the backbone.
    """
    with reporter.step("export the side model", total=1) as advance:
        small = load_backbone(uri, x, pad=backbone.input.pad, sep=backbone.sep)
        advance(1)
    if small.n_classes != backbone.n_classes:
        raise InvalidArgumentError(
            f"side {uri} tells {small.n_classes} classes apart, the model {backbone.n_classes}; "
            "it must have been trained for the same classes, in the same order"
        )
    small = _with_input(small, backbone.input.name)
    quantized = None
    if quantize:
        with reporter.step("quantise the side model", total=1) as advance:
            quantized = choose_quantized(small, x, seed=seed, threads=threads, seconds=COMPARE_SECONDS)
            advance(1)
    model = small.model if quantized is None or quantized.model is None else quantized.model
    side = Side(
        _spec(small.name, backbone, taken), uri, ending_in_logits(model, small.scale), quantized, dict[int, float]()
    )
    return timed([side], backbone, x, threads=threads, seconds=seconds, device=device)[0]


def variant_side(name: str, model: onnx.ModelProto, method: str, backbone: Backbone, *, taken: Collection[str]) -> Side:
    """A form of the backbone itself in front of it, not timed yet."""
    small = _with_input(replace(backbone, name=name, model=model), backbone.input.name)
    return Side(
        _spec(name, backbone, taken),
        name,
        ending_in_logits(small.model, backbone.scale),
        Lowered(model, method, ()),
        dict[int, float](),
    )


def timed(
    sides: Sequence[Side], backbone: Backbone, x: InputArray, *, threads: int, seconds: float, device: Device = CPU
) -> list[Side]:
    """The sides with their seconds, measured in turn."""
    models = {side.spec.id: side.model for side in sides}
    taken = side_seconds(models, backbone, x, threads=threads, seconds=seconds, device=device)
    return [replace(side, seconds=taken[side.spec.id]) for side in sides]


def _spec(name: str, backbone: Backbone, taken: Collection[str]) -> RampSpec:
    return RampSpec(
        id=_ramp_id(name, taken),
        tensor=backbone.input.name,
        position=INPUT_POSITION,
        depth=0.0,
        head="model",
        channels=max(1, backbone.input.shape[0]),
    )


def side_merit(
    side: Side, logits: FloatArray, reference: FloatArray, *, task: Task, exact_seconds: Mapping[int, float]
) -> RampMerit:
    """What a side model is worth by its logits (n, n_classes) against the model's; ``exact_seconds`` is the model's
    time by batch size."""
    costs = RampCost(
        {size: seconds / exact_seconds[size] for size, seconds in side.seconds.items()},
        dict.fromkeys(side.seconds, 0.0),
    )
    return merit(task, logits, task.answers(reference), costs)


def cannot_pay(worth: RampMerit) -> str:
    """Why a side model does not stay; empty where it does."""
    if worth.utility[LOOSEST] > 0:
        return ""
    return (
        f"at a budget of {LOOSEST:.0%} no more than {worth.exits[LOOSEST]:.0%} of the inputs could leave with it, "
        f"and it takes {min(worth.costs.head.values()):.0%} of the model's time at best"
    )


def side_logits(sides: Sequence[Side], x: InputArray, spec: TensorSpec, *, threads: int) -> list[FloatArray]:
    """What each side model says about rows ``x`` of the input ``spec``: (n, n_classes) float32."""
    return [model_logits(open_session(side.model, threads=threads), x, spec) for side in sides]


def _with_input(small: Backbone, name: str) -> Backbone:
    """The model under the backbone's name for the input, which all graphs of a bundle share."""
    model = compose.add_prefix(small.model, "side/")
    (entry,) = [value for value in model.graph.input if value.name == input_name(model)]
    model.graph.node.insert(0, helper.make_node("Identity", [name], [entry.name], name="side/entry"))
    entry.name = name
    return replace(
        small,
        model=model,
        input=replace(small.input, name=name),
        output=replace(small.output, name=output_name(model)),
        program=None,
    )


def _ramp_id(name: str, taken: Collection[str]) -> str:
    """``side-NAME``, numbered where another ramp has that id already."""
    base = ("side-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))[:MAX_ID].strip("-")
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in taken)
