"""What approximates the backbone as a whole: lower precisions with heads read off them, and side models at the input.

All of them spend from the one disagreement budget, so all of them are recorded beside the exits: a row of records has
the columns of :mod:`offramp_core.columns`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import onnx

from offramp_core.bundle import PrecisionSpec, Profile, RampSpec, side_model_file
from offramp_core.columns import final_id
from offramp_core.precision import EXACT, Precision
from offramp_worker.devices import CPU, CUDA, CUDA_TF32, WEBGPU, Device
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
from offramp_worker.prepare.heads.side import (
    Side,
    cannot_pay,
    load_side,
    side_logits,
    side_merit,
    timed,
    variant_side,
)
from offramp_worker.prepare.measuring.profiling import Measurements, measure, profile_of, with_chain, with_heads
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.precision.halving import choose_half
from offramp_worker.prepare.precision.judging import JUDGED_ROWS, Lowered
from offramp_worker.prepare.precision.mixing import Exits
from offramp_worker.prepare.precision.quantizing import choose_quantized
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.data import FloatArray, InputArray
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.prepare.variants.choosing import MOST_IN_FRONT, Point, forms_of, in_front, in_place, points_of
from offramp_worker.prepare.variants.making import RECIPES, Studio, make_variants

Allowed = Literal["auto", "exact"]


class Choose(Protocol):
    """Makes a lower precision of a backbone in every way that may pay on the device, and keeps the best, or none."""

    def __call__(
        self,
        backbone: Backbone,
        x: InputArray,
        *,
        cuts: Collection[str],
        exits: Exits,
        seed: int,
        threads: int,
        seconds: float,
        device: Device,
    ) -> Lowered: ...


#: The precisions below fp32 that are tried on a device, and who makes them.
LOWER: Mapping[str, Mapping[Precision, Choose]] = {
    CPU.name: {"int8": choose_quantized},
    CUDA.name: {"fp16": choose_half},
    CUDA_TF32.name: {"fp16": choose_half},
    WEBGPU.name: {"fp16": choose_half},
}

HeadOutputs = dict[str, FloatArray]
Tensors = Mapping[str, Mapping[str, FloatArray]]


@dataclass(frozen=True, slots=True)
class Chain:
    """The backbone's graph at one precision with the ramps read off it and what they cost. ``places`` are those of the
    fp32 graph."""

    backbone: Backbone
    places: tuple[Place, ...]
    ramps: tuple[RampSpec, ...]
    parameters: Tensors
    measured: Measurements
    precision: Precision = EXACT

    @property
    def file(self) -> str:
        """The graph's in the bundle, unless it is the reference."""
        return f"backbone.{self.precision}.onnx"

    def score(self, x: InputArray, *, threads: int, advance: Advance) -> tuple[FloatArray, HeadOutputs]:
        """The graph's logits (n, n_classes) and each ramp's, in one pass as a worker's audits make it.

        fp32 says the same everywhere, but for the order of sums, unless the device rounds; a lower precision is asked
        on its device.
        """
        device = self.measured.device.reference if self.precision == EXACT else self.measured.device
        nodes = heads_of(self.ramps, self.places, tensors=self.parameters, task=self.backbone.task)
        final, logits = tapped_logits(self.backbone, nodes, x, threads=threads, device=device, advance=advance)
        return final, {spec.id: values for spec, values in zip(self.ramps, logits, strict=True)}


@dataclass(frozen=True, slots=True)
class Work:
    """How approximations are made: rows that are no records, and the means.

    ``rows`` (n, ...) calibrate and judge graphs of lower precisions; ``validation`` (m, ...), which no head has learned
    from, judges ramps and makes quantile tables. ``threads`` are those of one worker on the ``device``,
    ``pass_threads`` those of a pass over data.
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
    variants: VariantWork | None = None


@dataclass(frozen=True, slots=True)
class VariantWork:
    """How variants are made: the ``studio``, and rows (n, ...) that judge them, from which none learns."""

    studio: Studio
    judged: InputArray


@dataclass(frozen=True, slots=True)
class Approximations:
    """The fp32 chain with everything that may stand in for it.

    ``others`` are the chains of lower precisions that stay, ``lowered`` tells what was tried at each that was allowed.
    ``head_outputs`` maps the columns that the fp32 heads do not fill to their logits on the validation rows.
    ``refused`` are side models and ramps of other chains that do not stay, ``frontier`` is what was measured of
    variants.
    """

    exact: Chain
    sides: tuple[Side, ...]
    others: tuple[Chain, ...]
    lowered: Mapping[Precision, Lowered]
    head_outputs: Mapping[str, FloatArray]
    refused: tuple[CandidateVerdict, ...]
    frontier: tuple[Point, ...] = ()

    @property
    def at_input(self) -> tuple[RampSpec, ...]:
        """Ramps of every chain."""
        entry = self.exact.backbone.input.name
        heads = (spec for spec in self.exact.ramps if spec.tensor == entry)
        return tuple(sorted((*heads, *(side.spec for side in self.sides)), key=lambda s: (s.head, s.hidden)))

    @property
    def ramps(self) -> tuple[RampSpec, ...]:
        """All ramps of the bundle, in the order of records."""
        return (*self._fp32, *(spec for chain in self.others for spec in chain.ramps))

    @property
    def columns(self) -> tuple[str, ...]:
        """The ids of the columns of records."""
        of_others = (id for c in self.others for id in (*(spec.id for spec in c.ramps), final_id(c.precision)))
        return (*(spec.id for spec in self._fp32), *of_others)

    @property
    def column_precisions(self) -> tuple[str, ...]:
        """The chain of each column; empty for those at the input, which every chain shares."""
        n_input, n_fp32 = len(self.at_input), len(self._fp32)
        of_others = (chain.precision for chain in self.others for _ in range(len(chain.ramps) + 1))
        return (*[""] * n_input, *[EXACT] * (n_fp32 - n_input), *of_others)

    @property
    def precisions(self) -> tuple[PrecisionSpec, ...]:
        """The other graphs of the backbone, for the manifest."""
        return tuple(PrecisionSpec(c.precision, c.file, self.lowered[c.precision].method) for c in self.others)

    @property
    def graphs(self) -> dict[str, onnx.ModelProto]:
        """The other graphs by their file in the bundle."""
        files = {side_model_file(side.spec.id): side.model for side in self.sides}
        return files | {chain.file: chain.backbone.model for chain in self.others}

    @property
    def profile(self) -> Profile:
        """Seconds of every chain."""
        sides = {side.spec.id: side.seconds for side in self.sides}
        profile = profile_of(self._fp32, with_heads(self.exact.measured, sides))
        heads = [s.id for s in self.at_input if s.id not in sides]
        shared = sides | {h: {b.batch_size: b.head_seconds[h] for b in self.exact.measured.batches} for h in heads}
        for chain in self.others:
            ramps = (*self.at_input, *chain.ramps)
            profile = with_chain(profile, chain.precision, ramps, with_heads(chain.measured, shared))
        return profile

    def score(self, x: InputArray, *, threads: int, advance: Advance) -> tuple[FloatArray, HeadOutputs]:
        """The reference's logits (n, n_classes) and those of every column."""
        reference, head_outputs = self.exact.score(x, threads=threads, advance=advance)
        return reference, head_outputs | _score_others(self.exact, self.sides, self.others, x, threads=threads)

    @property
    def _fp32(self) -> tuple[RampSpec, ...]:
        entry = self.exact.backbone.input.name
        return (*self.at_input, *(spec for spec in self.exact.ramps if spec.tensor != entry))


def approximate(exact: Chain, side_uris: Sequence[str], work: Work) -> Approximations:
    """Make lower precisions of the backbone and load side models; keep what pays.

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
    lowered: dict[Precision, Lowered] = {}
    chains: list[Chain] = []
    if work.allowed == "auto":
        exits = _exits(exact, heard, reference)
        for precision, choose in LOWER[work.device.name].items():
            lowered[precision] = made = _lower(precision, choose, exact, exits, work)
            if made.model is not None:
                chains.append(_chain(precision, made.model, exact, work))
    frontier: tuple[Point, ...] = ()
    if work.variants is not None:
        tried = _variants(exact, chains, sides, work)
        lowered |= tried.lowered
        chains += [_chain(name, made.model, exact, work) for name, made in tried.lowered.items() if made.model]
        sides += tried.sides
        frontier = tried.points
    kept = tuple(side for side in sides if not side.refused)
    head_outputs = _score_others(exact, kept, chains, work.validation, threads=work.pass_threads)
    refused = [CandidateVerdict(side.spec, side.merit, side.refused) for side in sides if side.refused and side.merit]
    for index, chain in enumerate(chains):
        verdicts = _judge(chain, exact.measured, head_outputs, reference)
        chains[index] = replace(chain, ramps=tuple(v.spec for v in verdicts if not v.refused))
        refused += [v for v in verdicts if v.refused]
    gone = {v.spec.id for v in refused}
    head_outputs = {key: value for key, value in head_outputs.items() if key not in gone}
    return Approximations(exact, kept, tuple(chains), lowered, head_outputs, tuple(refused), frontier)


def merits(
    found: Approximations, head_outputs: Mapping[str, FloatArray], reference: FloatArray
) -> dict[str, RampMerit]:
    """What side models and ramps of other chains are worth by the logits they gave, against the fp32 backbone's
    time."""
    exact = {b.batch_size: b.exact_seconds for b in found.exact.measured.batches}
    values = {
        s.spec.id: side_merit(
            s, head_outputs[s.spec.id], reference, task=found.exact.backbone.task, exact_seconds=exact
        )
        for s in found.sides
    }
    measured = found.exact.measured
    return values | {
        spec.id: _merit(chain, measured, spec, head_outputs, reference)
        for chain in found.others
        for spec in chain.ramps
    }


def _sides(exact: Chain, uris: Sequence[str], reference: FloatArray, work: Work) -> list[Side]:
    sides: list[Side] = []
    for uri in uris:
        side = load_side(
            uri,
            exact.backbone,
            work.rows,
            taken={*(spec.id for spec in exact.ramps), *(other.spec.id for other in sides)},
            quantize=work.allowed == "auto" and work.device.is_cpu,
            seed=work.seed,
            threads=work.threads,
            device=work.device,
            seconds=work.seconds / 4,
            reporter=work.reporter,
        )
        sides += _weighed([side], exact, work.validation, reference, work)
    return sides


def _weighed(sides: Sequence[Side], exact: Chain, rows: InputArray, reference: FloatArray, work: Work) -> list[Side]:
    """Side models as sure as the model is, with what each is worth on rows of which the model said ``reference``."""
    seconds = {b.batch_size: b.exact_seconds for b in exact.measured.batches}
    logits = side_logits(sides, rows, exact.backbone.input, threads=work.pass_threads)
    weighed = []
    for side, outputs in zip(sides, logits, strict=True):
        by = temperature(outputs, softmax(exact.backbone.scale.to_logits(reference)))
        worth = side_merit(side, outputs / np.float32(by), reference, task=exact.backbone.task, exact_seconds=seconds)
        weighed.append(replace(side, model=with_temperature(side.model, by), merit=worth, refused=cannot_pay(worth)))
    return weighed


@dataclass(frozen=True, slots=True)
class _Tried:
    lowered: dict[Precision, Lowered]
    sides: list[Side]
    points: tuple[Point, ...]


def _variants(exact: Chain, chains: Sequence[Chain], sides: Sequence[Side], work: Work) -> _Tried:
    """Variants in the place of the model and in front of it, with the reason where they do not stay."""
    assert work.variants is not None
    studio = work.variants.studio
    made = make_variants(studio, RECIPES)
    graphs = {chain.precision: chain.backbone.model for chain in chains}
    forms, others = forms_of(made, graphs, studio, work.variants.judged, seconds=work.seconds, threads=work.threads)
    judged = in_place(forms, others)
    lowered = {variant.name: Lowered(None, "", (), variant.refused) for variant in made if variant.model is None}
    for form in forms:
        worth = judged[form.name]
        lowered[form.name] = Lowered(None if worth.refused else form.model, form.method, (worth,))
    taken = {*(spec.id for spec in exact.ramps), *(side.spec.id for side in sides)}
    fast = [form for form in forms if min(form.worth.ratio.values()) < MOST_IN_FRONT]
    fronts = [variant_side(form.name, form.model, form.method, exact.backbone, taken=taken) for form in fast]
    fronts = timed(fronts, exact.backbone, work.rows, threads=work.threads, seconds=work.seconds, device=work.device)
    judges = work.variants.judged[:JUDGED_ROWS]
    reference, _ = exact.score(judges, threads=work.pass_threads, advance=_silent)
    fronts = in_front(_weighed(fronts, exact, judges, reference, work), [side for side in sides if not side.refused])
    points = points_of(
        exact.backbone.model,
        graphs,
        others,
        forms,
        stay={name for name, worth in judged.items() if not worth.refused},
        fronts={side.source for side in fronts if not side.refused},
    )
    return _Tried(lowered, fronts, points)


def _exits(exact: Chain, head_outputs: Mapping[str, FloatArray], reference: FloatArray) -> Exits:
    """What the best single ramp saves of the fp32 time, by budget."""
    task = exact.backbone.task
    answers = task.answers(reference)
    worths = [merit(task, head_outputs[s.id], answers, cost_of(s, exact.measured)) for s in exact.ramps]
    return Exits({budget: max([0.0, *(worth.utility[budget] for worth in worths)]) for budget in BUDGETS})


def _lower(precision: Precision, choose: Choose, exact: Chain, exits: Exits, work: Work) -> Lowered:
    """The backbone at a lower precision, or why it stays without."""
    entry = exact.backbone.input.name
    with work.reporter.step(f"try the model at {precision}", total=1) as advance:
        lowered = choose(
            exact.backbone,
            work.rows,
            cuts={place.tensor for place in exact.places if place.tensor != entry},
            exits=exits,
            seed=work.seed,
            threads=work.threads,
            seconds=work.seconds / 2,
            device=work.device,
        )
        advance(1)
    return lowered


def _chain(precision: Precision, model: onnx.ModelProto, exact: Chain, work: Work) -> Chain:
    """A graph of the backbone with all heads read off it, measured."""
    backbone = replace(exact.backbone, model=model)
    made = {name for node in model.graph.node for name in node.output}
    own = [spec for spec in exact.ramps if spec.tensor in made]
    ramps = tuple(replace(spec, id=f"{precision}/{spec.id}", precision=precision) for spec in own)
    read = {spec.tensor for spec in ramps}
    inside = tuple(place for place in exact.places if place.tensor in read)
    sizes = [batch.batch_size for batch in exact.measured.batches]
    with work.reporter.step(f"measure the {precision} profile", total=len(sizes)) as advance:
        measured = measure(
            backbone,
            inside,
            blank_heads(ramps, inside, task=backbone.task),
            work.rows,
            threads=work.threads,
            seconds=work.seconds,
            batch_sizes=sizes,
            device=work.device,
            advance=advance,
        )
    parameters = {spec.id: exact.parameters[one.id] for spec, one in zip(ramps, own, strict=True)}
    ramps = tuple(replace(spec, depth=round(measured.depth(spec.position), 6)) for spec in ramps)
    return Chain(backbone, inside, ramps, parameters, measured, precision)


def _judge(
    chain: Chain, exact: Measurements, head_outputs: Mapping[str, FloatArray], reference: FloatArray
) -> tuple[CandidateVerdict, ...]:
    """Refuse ramps whose head costs more than leaving there saves of their own backbone's time."""
    verdicts = []
    for spec in chain.ramps:
        worth = _merit(chain, exact, spec, head_outputs, reference)
        saved = [
            worth.exits[LOOSEST] * (1 - b.depth_at(spec.position)) - b.head_share(spec.id)
            for b in chain.measured.batches
        ]
        reason = "" if max(saved) > 0 else f"at {chain.precision} the head costs more than leaving here could save"
        verdicts.append(CandidateVerdict(spec, worth, reason))
    return tuple(verdicts)


def _merit(
    chain: Chain, exact: Measurements, spec: RampSpec, head_outputs: Mapping[str, FloatArray], reference: FloatArray
) -> RampMerit:
    """Costs are shares of the fp32 backbone's time, so that ramps of all chains compare."""
    baseline = {b.batch_size: b.exact_seconds for b in exact.batches}
    own = {b.batch_size: b for b in chain.measured.batches}
    costs = RampCost(
        {size: b.head_seconds[spec.id] / baseline[size] for size, b in own.items()},
        {size: b.depth_at(spec.position) * b.exact_seconds / baseline[size] for size, b in own.items()},
    )
    task = chain.backbone.task
    return merit(task, head_outputs[spec.id], task.answers(reference), costs)


def _score_others(
    exact: Chain, sides: Sequence[Side], chains: Sequence[Chain], x: InputArray, *, threads: int
) -> HeadOutputs:
    """Logits of side models, of the ramps of other chains and of their whole backbones."""
    logits = side_logits(sides, x, exact.backbone.input, threads=threads)
    head_outputs = {side.spec.id: values for side, values in zip(sides, logits, strict=True)}
    for chain in chains:
        final, ramps = chain.score(x, threads=threads, advance=_silent)
        head_outputs |= ramps | {final_id(chain.precision): final}
    return head_outputs


def _silent(_done: int) -> None:
    """Progress that nobody watches."""
