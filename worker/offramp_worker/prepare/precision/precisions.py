"""What approximates the backbone as a whole: its int8 form with the heads read off it, and side models at the input.

All of them spend from the one disagreement budget, so all of them are recorded beside the exits: a row of records has
the columns of :mod:`offramp_core.columns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx

from offramp_core.bundle import PrecisionSpec, Profile, RampSpec, side_model_file
from offramp_core.columns import final_id
from offramp_core.precision import EXACT, Precision
from offramp_worker.devices import Device
from offramp_worker.prepare.heads.features import Advance, blank_heads, heads_of, tapped_logits
from offramp_worker.prepare.heads.objectives import softmax
from offramp_worker.prepare.heads.scales import temperature, with_temperature
from offramp_worker.prepare.heads.selection import (
    BUDGETS,
    LOOSEST,
    CandidateVerdict,
    RampCost,
    RampMerit,
    cost_of,
    merit,
)
from offramp_worker.prepare.heads.side import Side, cannot_pay, load_side, side_logits, side_merit
from offramp_worker.prepare.measuring.profiling import Measurements, measure, profile_of, with_chain, with_heads
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.precision.mixing import Exits
from offramp_worker.prepare.precision.quantizing import Quantized, choose_quantized
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.data import FloatArray, InputArray
from offramp_worker.prepare.source.sources import Backbone

INT8: Precision = "int8"
INT8_FILE = "backbone.int8.onnx"
Allowed = Literal["auto", "exact"]

HeadOutputs = dict[str, FloatArray]
Tensors = Mapping[str, Mapping[str, FloatArray]]


@dataclass(frozen=True, slots=True)
class Chain:
    """One graph of the backbone with the ramps read off it and what they cost. ``places`` are those of the fp32
    graph."""

    backbone: Backbone
    places: tuple[Place, ...]
    ramps: tuple[RampSpec, ...]
    parameters: Tensors
    measured: Measurements

    def score(self, x: InputArray, *, threads: int, advance: Advance) -> tuple[FloatArray, HeadOutputs]:
        """The graph's logits (n, n_classes) and each ramp's, in one pass as a worker's audits make it."""
        nodes = heads_of(self.ramps, self.places, tensors=self.parameters, task=self.backbone.task)
        final, logits = tapped_logits(self.backbone, nodes, x, threads=threads, advance=advance)
        return final, {spec.id: values for spec, values in zip(self.ramps, logits, strict=True)}


@dataclass(frozen=True, slots=True)
class Work:
    """How approximations are made: rows that are no records, and the means.

    ``rows`` (n, ...) calibrate and judge int8 graphs; ``validation`` (m, ...), which no head has learned from, judges
    ramps and makes quantile tables. ``threads`` are those of one worker on the ``device``, ``pass_threads`` those of a
    pass over data.
    """

    rows: InputArray
    validation: InputArray
    allowed: Allowed
    seed: int
    threads: int
    device: Device
    pass_threads: int
    seconds: float
    reporter: Reporter


@dataclass(frozen=True, slots=True)
class Approximations:
    """The fp32 chain with everything that may stand in for it.

    ``head_outputs`` maps the columns that the fp32 heads do not fill to their logits on the validation rows.
    ``quantized`` tells what was tried, None where int8 was not allowed. ``refused`` are side models and int8 ramps that
    do not stay.
    """

    exact: Chain
    sides: tuple[Side, ...]
    int8: Chain | None
    quantized: Quantized | None
    head_outputs: Mapping[str, FloatArray]
    refused: tuple[CandidateVerdict, ...]

    @property
    def at_input(self) -> tuple[RampSpec, ...]:
        """Ramps of every chain."""
        entry = self.exact.backbone.input.name
        heads = (spec for spec in self.exact.ramps if spec.tensor == entry)
        return tuple(sorted((*heads, *(side.spec for side in self.sides)), key=lambda s: (s.head, s.hidden)))

    @property
    def ramps(self) -> tuple[RampSpec, ...]:
        """All ramps of the bundle, in the order of records."""
        return (*self._fp32, *(self.int8.ramps if self.int8 else ()))

    @property
    def columns(self) -> tuple[str, ...]:
        """The ids of the columns of records."""
        ids = tuple(spec.id for spec in self.ramps)
        return (*ids, final_id(INT8)) if self.int8 else ids

    @property
    def column_precisions(self) -> tuple[str, ...]:
        """The chain of each column; empty for those at the input, which every chain shares."""
        n_input, n_fp32 = len(self.at_input), len(self._fp32)
        return (*[""] * n_input, *[EXACT] * (n_fp32 - n_input), *[INT8] * (len(self.columns) - n_fp32))

    @property
    def precisions(self) -> tuple[PrecisionSpec, ...]:
        """The other graphs of the backbone, for the manifest."""
        return (PrecisionSpec(INT8, INT8_FILE, self.quantized.method),) if self.int8 and self.quantized else ()

    @property
    def graphs(self) -> dict[str, onnx.ModelProto]:
        """The other graphs by their file in the bundle."""
        files = {side_model_file(side.spec.id): side.model for side in self.sides}
        return files | ({INT8_FILE: self.int8.backbone.model} if self.int8 else {})

    @property
    def profile(self) -> Profile:
        """Seconds of every chain."""
        sides = {side.spec.id: side.seconds for side in self.sides}
        profile = profile_of(self._fp32, with_heads(self.exact.measured, sides))
        if self.int8 is None:
            return profile
        heads = [s.id for s in self.at_input if s.id not in sides]
        shared = sides | {h: {b.batch_size: b.head_seconds[h] for b in self.exact.measured.batches} for h in heads}
        return with_chain(profile, INT8, (*self.at_input, *self.int8.ramps), with_heads(self.int8.measured, shared))

    def score(self, x: InputArray, *, threads: int, advance: Advance) -> tuple[FloatArray, HeadOutputs]:
        """The reference's logits (n, n_classes) and those of every column."""
        reference, head_outputs = self.exact.score(x, threads=threads, advance=advance)
        return reference, head_outputs | _score_others(self.exact, self.sides, self.int8, x, threads=threads)

    @property
    def _fp32(self) -> tuple[RampSpec, ...]:
        entry = self.exact.backbone.input.name
        return (*self.at_input, *(spec for spec in self.exact.ramps if spec.tensor != entry))


def approximate(exact: Chain, side_uris: Sequence[str], work: Work) -> Approximations:
    """Quantise the backbone and load side models; keep what pays.

    Parameters
    ----------
    side_uris : sequence of str
        Model URIs, see :func:`load_backbone`.

    Raises
    ------
    InvalidArgumentError
        A side model cannot be loaded, or does not fit the backbone.
    """
    reference, heard = exact.score(work.validation, threads=work.pass_threads, advance=_silent)
    sides = _sides(exact, side_uris, reference, work)
    kept = tuple(side for side in sides if not side.refused)
    quantized, int8 = _int8_chain(exact, _exits(exact, heard, reference), work)
    head_outputs = _score_others(exact, kept, int8, work.validation, threads=work.pass_threads)
    refused = [CandidateVerdict(side.spec, side.merit, side.refused) for side in sides if side.refused and side.merit]
    if int8 is not None:
        verdicts = _judge_int8(int8, exact.measured, head_outputs, reference)
        paying = tuple(v.spec for v in verdicts if not v.refused)
        refused += [v for v in verdicts if v.refused]
        head_outputs = {
            key: value for key, value in head_outputs.items() if key not in {v.spec.id for v in verdicts if v.refused}
        }
        int8 = replace(int8, ramps=paying)
    return Approximations(exact, kept, int8, quantized, head_outputs, tuple(refused))


def merits(
    found: Approximations, head_outputs: Mapping[str, FloatArray], reference: FloatArray
) -> dict[str, RampMerit]:
    """What side models and int8 ramps are worth by the logits they gave, against the fp32 backbone's time."""
    exact = {b.batch_size: b.exact_seconds for b in found.exact.measured.batches}
    values = {
        s.spec.id: side_merit(
            s, head_outputs[s.spec.id], reference, task=found.exact.backbone.task, exact_seconds=exact
        )
        for s in found.sides
    }
    if found.int8 is not None:
        measured = found.exact.measured
        values |= {
            spec.id: _int8_merit(found.int8, measured, spec, head_outputs, reference) for spec in found.int8.ramps
        }
    return values


def _sides(exact: Chain, uris: Sequence[str], reference: FloatArray, work: Work) -> list[Side]:
    seconds = {b.batch_size: b.exact_seconds for b in exact.measured.batches}
    sides: list[Side] = []
    for uri in uris:
        side = load_side(
            uri,
            exact.backbone,
            work.rows,
            taken={*(spec.id for spec in exact.ramps), *(other.spec.id for other in sides)},
            quantize=work.allowed == "auto",
            seed=work.seed,
            threads=work.threads,
            device=work.device,
            seconds=work.seconds / 4,
            reporter=work.reporter,
        )
        (logits,) = side_logits([side], work.validation, exact.backbone.input, threads=work.pass_threads)
        by = temperature(logits, softmax(exact.backbone.scale.to_logits(reference)))
        worth = side_merit(side, logits / np.float32(by), reference, task=exact.backbone.task, exact_seconds=seconds)
        sides.append(replace(side, model=with_temperature(side.model, by), merit=worth, refused=cannot_pay(worth)))
    return sides


def _exits(exact: Chain, head_outputs: Mapping[str, FloatArray], reference: FloatArray) -> Exits:
    """What the best single ramp saves of the fp32 time, by budget."""
    task = exact.backbone.task
    answers = task.answers(reference)
    worths = [merit(task, head_outputs[s.id], answers, cost_of(s, exact.measured)) for s in exact.ramps]
    return Exits({budget: max([0.0, *(worth.utility[budget] for worth in worths)]) for budget in BUDGETS})


def _int8_chain(exact: Chain, exits: Exits, work: Work) -> tuple[Quantized | None, Chain | None]:
    """The int8 graph with all heads read off it, measured."""
    if work.allowed == "exact":
        return None, None
    entry = exact.backbone.input.name
    inside = tuple(place for place in exact.places if place.tensor != entry)
    with work.reporter.step("quantise the model", total=1) as advance:
        quantized = choose_quantized(
            exact.backbone,
            work.rows,
            cuts={place.tensor for place in inside},
            exits=exits,
            seed=work.seed,
            threads=work.threads,
            seconds=work.seconds / 2,
        )
        advance(1)
    if quantized.model is None:
        return quantized, None
    backbone = replace(exact.backbone, model=quantized.model)
    made = {name for node in quantized.model.graph.node for name in node.output}
    ramps = tuple(replace(spec, id=f"{INT8}/{spec.id}", precision=INT8) for spec in exact.ramps if spec.tensor in made)
    read = {spec.tensor for spec in ramps}
    inside = tuple(place for place in inside if place.tensor in read)
    sizes = [batch.batch_size for batch in exact.measured.batches]
    with work.reporter.step("measure the int8 profile", total=len(sizes)) as advance:
        measured = measure(
            backbone,
            inside,
            blank_heads(ramps, inside, task=backbone.task),
            work.rows,
            threads=work.threads,
            seconds=work.seconds,
            batch_sizes=sizes,
            advance=advance,
        )
    parameters = {spec.id: exact.parameters[spec.id.removeprefix(f"{INT8}/")] for spec in ramps}
    ramps = tuple(replace(spec, depth=round(measured.depth(spec.position), 6)) for spec in ramps)
    return quantized, Chain(backbone, inside, ramps, parameters, measured)


def _judge_int8(
    int8: Chain, exact: Measurements, head_outputs: Mapping[str, FloatArray], reference: FloatArray
) -> tuple[CandidateVerdict, ...]:
    """Refuse ramps whose head costs more than leaving there saves of the int8 backbone's time."""
    verdicts = []
    for spec in int8.ramps:
        worth = _int8_merit(int8, exact, spec, head_outputs, reference)
        saved = [
            worth.exits[LOOSEST] * (1 - b.depth_at(spec.position)) - b.head_share(spec.id)
            for b in int8.measured.batches
        ]
        reason = "" if max(saved) > 0 else "at int8 the head costs more than leaving here could save"
        verdicts.append(CandidateVerdict(spec, worth, reason))
    return tuple(verdicts)


def _int8_merit(
    int8: Chain, exact: Measurements, spec: RampSpec, head_outputs: Mapping[str, FloatArray], reference: FloatArray
) -> RampMerit:
    """Costs are shares of the fp32 backbone's time, so that ramps of both chains compare."""
    baseline = {b.batch_size: b.exact_seconds for b in exact.batches}
    own = {b.batch_size: b for b in int8.measured.batches}
    costs = RampCost(
        {size: b.head_seconds[spec.id] / baseline[size] for size, b in own.items()},
        {size: b.depth_at(spec.position) * b.exact_seconds / baseline[size] for size, b in own.items()},
    )
    task = int8.backbone.task
    return merit(task, head_outputs[spec.id], task.answers(reference), costs)


def _score_others(
    exact: Chain, sides: Sequence[Side], int8: Chain | None, x: InputArray, *, threads: int
) -> HeadOutputs:
    """Logits of side models, of the int8 ramps and of the whole int8 backbone."""
    logits = side_logits(sides, x, exact.backbone.input, threads=threads)
    head_outputs = {side.spec.id: values for side, values in zip(sides, logits, strict=True)}
    if int8 is None:
        return head_outputs
    final, ramps = int8.score(x, threads=threads, advance=_silent)
    return head_outputs | ramps | {final_id(INT8): final}


def _silent(_done: int) -> None:
    """Progress that nobody watches."""
