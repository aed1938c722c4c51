"""Fitting the ladder of heads, rung by rung: linear heads everywhere, MLPs where they could pay, convolutions at a few
places.

What a head costs is measured before anything is trained, and a rung is only climbed where the heads below say that it
could pay (:mod:`offramp_worker.prepare.heads.selection`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from offramp_core.bundle import RampSpec
from offramp_core.task import Task
from offramp_worker.bundle.heads import KINDS
from offramp_worker.prepare.heads.features import (
    MIN_HIDDEN,
    Features,
    candidate_ramps,
    collect_features,
    collect_maps,
    heads_of,
    kinds_of,
    ramp_at,
    tapped_logits,
)
from offramp_worker.prepare.heads.objectives import targets_of
from offramp_worker.prepare.heads.plain import head_logits
from offramp_worker.prepare.heads.recipes import Parameters
from offramp_worker.prepare.heads.scales import temperature, tempered
from offramp_worker.prepare.heads.selection import (
    REACH,
    RampCost,
    RampMerit,
    Untrained,
    merit,
    most_promising,
    screen,
    utility,
)
from offramp_worker.prepare.heads.trainer import train_heads
from offramp_worker.prepare.places.cuts import INPUT_POSITION, Place
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.data import FloatArray, HeadSplit, InputArray, SplitName, plan_split, shifted_copies
from offramp_worker.prepare.source.sources import Backbone

if TYPE_CHECKING:
    from offramp_worker.prepare.heads.distillation import Lessons

DEFAULT_HEAD_SHARE = 0.1
ENOUGH_GAIN = 0.01  # doubling the head rows must add this much utility to go on
NARROW_HIDDEN = MIN_HIDDEN // 2
MAX_CONV_HEADS = 2
CONV_HEADS_APART = 0.2  # of the backbone's time
MAP_BYTES = 2**30  # feature maps of one place held at a time; of more rows, only as many as fit teach convolutions


@dataclass(frozen=True, slots=True)
class Rungs:
    """Candidate heads by position: ``linear`` are trained everywhere, ``mlp`` and ``conv`` where they could pay,
    ``own`` never.

    ``narrow`` are MLPs with fewer units: cheaper than those of the usual width where one read of the weights counts.
    """

    linear: tuple[RampSpec, ...]
    mlp: tuple[RampSpec, ...]
    narrow: tuple[RampSpec, ...]
    conv: tuple[RampSpec, ...]
    own: tuple[RampSpec, ...] = ()

    @property
    def all(self) -> tuple[RampSpec, ...]:
        """Every candidate."""
        return (*self.own, *self.linear, *self.mlp, *self.narrow, *self.conv)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What fitting needs whatever the rows.

    ``x`` (n, ...) is the stream, oldest first; ``extra`` are rows that only ever train. ``threads`` is the number of
    cores; with the same ``seed``, rows and machine the bytes are the same.
    """

    backbone: Backbone
    places: tuple[Place, ...]
    x: InputArray
    extra: InputArray
    variations: int
    seed: int
    threads: int
    reporter: Reporter

    @property
    def task(self) -> Task:
        """What the model does."""
        return self.backbone.task

    def features(self, ramps: Sequence[RampSpec], x: InputArray, name: str) -> Features:
        """What heads read of rows, and the model's answers."""
        with self.reporter.step(name, total=len(x)) as advance:
            return collect_features(self.backbone, ramps, self.places, x, threads=self.threads, advance=advance)

    def copies(self, split: HeadSplit) -> FloatArray:
        """Variations of the rows of the stream that train heads."""
        images = np.asarray(self.x[: split.train], dtype=np.float32)
        return shifted_copies(images, copies=self.variations, seed=self.seed)

    def training_rows(self, split: HeadSplit, *, most: int) -> InputArray:
        """The first rows of all that train heads: of the stream, their variations, the extra ones."""
        parts = [self.x[: split.train][:most]]
        if self.variations and len(parts[0]) < most:
            parts.append(self.copies(split)[: most - len(parts[0])])
        parts.append(self.extra[: most - sum(len(part) for part in parts)])
        return np.concatenate(parts)

    def validation_rows(self, split: HeadSplit) -> InputArray:
        """The rows of the stream that say when to stop and which heads stay."""
        return self.x[split.train : split.head]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Trained heads, what they say about the validation rows, and candidates not trained.

    ``head_outputs`` maps ramp id to logits (n, n_classes) and ``reference`` (n, n_classes) are the model's own,
    whatever scale it answers in.
    """

    specs: tuple[RampSpec, ...]
    parameters: Mapping[str, Parameters]
    head_outputs: Mapping[str, FloatArray]
    reference: FloatArray
    task: Task
    untrained: tuple[Untrained, ...] = ()

    def merits(self, costs: Mapping[str, RampCost]) -> dict[RampSpec, RampMerit]:
        """What every trained head is worth on the validation rows."""
        answers = self.task.exit_answers(self.reference)
        return {spec: merit(self.task, self.head_outputs[spec.id], answers, costs[spec.id]) for spec in self.specs}

    def on(self, rows: Features) -> Fitted:
        """The same heads, none of which has convolutions, on other validation rows."""
        head_outputs = {spec.id: head_logits(self.parameters[spec.id], rows.of(spec)) for spec in self.specs}
        return replace(self, head_outputs=head_outputs, reference=rows.logits)

    def then(self, other: Fitted) -> Fitted:
        """These heads and others that were judged on the same rows."""
        return replace(
            self,
            specs=(*self.specs, *other.specs),
            parameters={**self.parameters, **other.parameters},
            head_outputs={**self.head_outputs, **other.head_outputs},
            untrained=(*self.untrained, *other.untrained),
        )


@dataclass(frozen=True, slots=True)
class Taught:
    """Heads and the rows they were taught with; ``answers`` (n, n_classes) are the model's logits on all training
    rows."""

    split: HeadSplit
    fitted: Fitted
    answers: FloatArray


def candidate_rungs(places: Sequence[Place], *, entry: Place | None, exits: Mapping[str, str]) -> Rungs:
    """All candidate heads of a network.

    Parameters
    ----------
    places : sequence of Place
        Cut vertices worth an exit.
    entry : Place, optional
        The model's input where it is an image: small students of the whole network sit there.
    exits : mapping
        The network's own exits: the tensor with the logits -> the tensor of the place that it branches off.
    """
    images = [place for place in (*([] if entry is None else [entry]), *places) if place.is_image]
    tokens = [place for place in places if place.is_tokens]
    usual, at = candidate_ramps(images, kinds=kinds_of("mlp")), {place.position: place for place in images}
    return Rungs(
        linear=(
            *candidate_ramps(images, kinds=kinds_of("linear")),
            *candidate_ramps(tokens, kinds=kinds_of("linear", tokens=True)),
        ),
        mlp=(*usual, *candidate_ramps(tokens, kinds=kinds_of("mlp", tokens=True))),
        narrow=tuple(
            ramp_at(at[spec.position], spec.head, hidden=NARROW_HIDDEN) for spec in usual if spec.hidden > NARROW_HIDDEN
        ),
        conv=candidate_ramps(images, kinds=kinds_of("conv")),
        own=tuple(
            replace(ramp_at(place, "own"), output=output)
            for place in places
            for output, trunk in exits.items()
            if trunk == place.tensor
        ),
    )


def fit_pooled(
    shop: Workshop, rungs: Rungs, costs: Mapping[str, RampCost], training: Features, validation: Features
) -> Fitted:
    """Train the heads that read pooled features: all linear ones, MLPs that could beat them, narrow MLPs that could
    beat all."""
    fitted = _own_exits(shop, rungs.own, validation).then(_fit_features(shop, rungs.linear, training, validation))
    for candidates, reach in ((rungs.mlp, REACH), (rungs.narrow, 0.0)):
        promising, others = screen(candidates, costs, fitted.merits(costs), reach=reach)
        fitted = fitted.then(_fit_features(shop, promising, training, validation))
        fitted = replace(fitted, untrained=(*fitted.untrained, *others))
    return fitted


def fit_given(shop: Workshop, ramps: Sequence[RampSpec], training: Features, validation: Features) -> Fitted:
    """Train heads that read pooled features, whatever they are worth; the network's own exits stay as they are."""
    own = tuple(spec for spec in ramps if KINDS[spec.head].training is None)
    others = [spec for spec in ramps if spec not in own]
    return _own_exits(shop, own, validation).then(_fit_features(shop, others, training, validation))


def fit_growing(
    shop: Workshop,
    ramps: Sequence[RampSpec],
    costs: Mapping[str, RampCost],
    fit: Callable[[Features, Features], Fitted],
    *,
    split: SplitName,
    share: float | None,
) -> Taught:
    """Train heads on the first ``share`` of the stream; None: on 10 %, and on twice as much for as long as that pays.

    Parameters
    ----------
    ramps : sequence of RampSpec
        All heads whose features may be needed.
    fit : callable
        Trains heads that read pooled features: (training, validation) -> Fitted.
    """
    first = DEFAULT_HEAD_SHARE if share is None else share
    extra = shop.features(ramps, shop.extra, "run head data") if len(shop.extra) else None

    def teach(part: HeadSplit) -> Taught:
        training = stream.rows(0, part.train)
        if shop.variations:
            training = training.then(shop.features(ramps, shop.copies(part), "run variations"))
        if extra is not None:
            training = training.then(extra)
        return Taught(part, fit(training, stream.rows(part.train, part.head)), training.logits)

    start = plan_split(len(shop.x), name=split, share=first)
    assert start is not None
    stream = shop.features(ramps, shop.x[: start.head], "run head rows")
    taught, doublings = teach(start), 0
    while share is None and split == "default":
        doublings += 1
        larger = plan_split(len(shop.x), name=split, share=first, doublings=doublings)
        if larger is None:
            break
        stream = stream.then(shop.features(ramps, shop.x[len(stream) : larger.head], "run more head rows"))
        candidate = teach(larger)
        # Both are judged on the larger split's validation rows, which neither has seen.
        earlier = taught.fitted.on(stream.rows(larger.train, larger.head))
        before, after = (utility(fitted.merits(costs).values()) for fitted in (earlier, candidate.fitted))
        if after - before < ENOUGH_GAIN:
            break
        taught = candidate
    return taught


def choose_convolutions(
    rungs: Rungs, costs: Mapping[str, RampCost], fitted: Fitted
) -> tuple[tuple[RampSpec, ...], tuple[Untrained, ...]]:
    """The few heads with convolutions that are worth training, and why not the others.

    A student at the input comes first, wherever it could pay at all: pooled pixels, which is what the other heads there
    read, say nothing about what it can learn. Inside, those count that could save most beyond the heads fitted at their
    places.
    """
    merits = fitted.merits(costs)
    worth, hopeless = screen(rungs.conv, costs, merits)
    chosen, rest = most_promising(
        worth,
        costs,
        merits,
        first=[spec for spec in worth if spec.position == INPUT_POSITION],
        most=MAX_CONV_HEADS,
        apart=CONV_HEADS_APART,
    )
    return chosen, (*hopeless, *rest)


def fit_convolutions(shop: Workshop, specs: Sequence[RampSpec], taught: Taught) -> Taught:
    """Add heads that read whole maps, which are computed again for each: all of them at once would fill the memory."""
    if not specs:
        return taught
    from offramp_worker.prepare.heads.distillation import Lesson, train_each  # PyTorch, which only these heads need

    split, fitted = taught.split, taught.fitted
    at = {place.position: place for place in shop.places}
    targets, held_out = (targets_of(shop.task, rows) for rows in (taught.answers, fitted.reference))
    cells = max(math.prod(at[spec.position].shape) for spec in specs)
    x, v = shop.training_rows(split, most=MAP_BYTES // (2 * cells)), shop.validation_rows(split)

    def lessons(spec: RampSpec) -> Lessons:
        maps, others = (
            collect_maps(shop.backbone, at[spec.position], rows, threads=1, advance=lambda _: None) for rows in (x, v)
        )
        return Lesson(maps, targets[: len(maps)]), Lesson(others, held_out)

    name = f"train {_kinds(specs)} heads on {len(x)} rows"
    with shop.reporter.step(name, total=len(specs)) as advance:
        parameters = train_each(specs, lessons, task=shop.task, seed=shop.seed, threads=shop.threads, advance=advance)
    nodes = heads_of(specs, shop.places, tensors=parameters, task=shop.task)
    _, logits = tapped_logits(shop.backbone, nodes, v, threads=shop.threads, advance=lambda _: None)
    head_outputs = {spec.id: each for spec, each in zip(specs, logits, strict=True)}
    return replace(
        taught, fitted=fitted.then(Fitted(tuple(specs), parameters, head_outputs, fitted.reference, fitted.task))
    )


def calibrated(fitted: Fitted, specs: Sequence[RampSpec]) -> Fitted:
    """The heads of ``specs`` with a temperature, found on the validation rows, that makes them as sure as the model is
    of classes or labels.

    What the network brings with it stays as it is.
    """
    if fitted.task.lesson == "values":
        return fitted
    targets = targets_of(fitted.task, fitted.reference)
    by = {
        spec.id: temperature(fitted.head_outputs[spec.id], targets, of=fitted.task.lesson)
        for spec in specs
        if KINDS[spec.head].training and spec.id in fitted.head_outputs
    }
    return replace(
        fitted,
        parameters={**fitted.parameters, **{ramp: tempered(fitted.parameters[ramp], t) for ramp, t in by.items()}},
        head_outputs={
            **fitted.head_outputs,
            **{ramp: fitted.head_outputs[ramp] / np.float32(t) for ramp, t in by.items()},
        },
    )


def _own_exits(shop: Workshop, specs: Sequence[RampSpec], validation: Features) -> Fitted:
    parameters: dict[str, Parameters] = {spec.id: {} for spec in specs}
    return Fitted(tuple(specs), parameters, {}, validation.logits, shop.task).on(validation)


def _fit_features(shop: Workshop, specs: Sequence[RampSpec], training: Features, validation: Features) -> Fitted:
    if not specs:
        return Fitted((), {}, {}, validation.logits, shop.task)
    name = f"train {_kinds(specs)} heads on {len(training)} rows"
    with shop.reporter.step(name, total=len(specs)) as advance:
        parameters = train_heads(
            specs, training, validation, task=shop.task, seed=shop.seed, threads=shop.threads, advance=advance
        )
    return Fitted(tuple(specs), parameters, {}, validation.logits, shop.task).on(validation)


def _kinds(specs: Sequence[RampSpec]) -> str:
    return ", ".join(dict.fromkeys(spec.head for spec in specs))
