"""Which variants stay: those on the frontier of time and disagreement, measured beside everything that is there.

A variant can stand in the place of the model, as a precision does, or in front of it, as a model at the input: then it
answers what it is sure of, and the rest goes on to the model. It is tried as both, in fp32 and at int8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from offramp_core.precision import EXACT, Precision
from offramp_worker.prepare.heads.selection import BUDGETS, LOOSEST
from offramp_worker.prepare.heads.side import Side
from offramp_worker.prepare.precision.judging import JUDGED_ROWS, Candidate, Judge
from offramp_worker.prepare.precision.quantizing import CALIBRATION_ROWS, quantized_models
from offramp_worker.prepare.source.data import InputArray
from offramp_worker.prepare.variants.making import Made, Studio

INT8 = "int8"
MOST_IN_FRONT = 0.6  # of the model's time, or what goes in front of it cannot pay


@dataclass(frozen=True, slots=True)
class Form:
    """A variant at one precision, and what it is worth in the place of the model."""

    name: Precision
    method: str
    model: onnx.ModelProto
    worth: Candidate


@dataclass(frozen=True, slots=True)
class Point:
    """One entry of the frontier's picture: time as a share of fp32's, expected disagreement, bytes of weights; and what
    became of it."""

    name: str
    time: float
    disagreement: float
    size_bytes: int
    stays: str


def weight_bytes(model: onnx.ModelProto) -> int:
    """Of a graph's constants."""
    return sum(len(t.raw_data) or t.ByteSize() for t in model.graph.initializer)


def forms_of(
    made: Sequence[Made],
    others: Mapping[Precision, onnx.ModelProto],
    studio: Studio,
    judged: InputArray,
    *,
    seconds: float,
    threads: int,
) -> tuple[tuple[Form, ...], tuple[Candidate, ...]]:
    """Variants in fp32 and at int8, and the ``others`` of the bundle, all measured in turn on rows that no variant has
    learned from."""
    judge = Judge.of(studio.backbone, judged[:JUDGED_ROWS], threads=threads)
    models: dict[str, onnx.ModelProto] = {}
    methods: dict[str, str] = {}
    with studio.reporter.step("quantise the variants", total=len(made)) as advance:
        for variant in made:
            if variant.model is not None:
                models[variant.name], methods[variant.name] = variant.model, variant.method
                if (lower := _at_int8(variant.model, judge, studio)) is not None:
                    name = f"{variant.name}{INT8}"
                    models[name], methods[name] = lower[1], f"{variant.method}; {lower[0]}"
            advance(1)
    with studio.reporter.step("compare the variants", total=1) as advance:
        tried = {c.method: c for c in judge.candidates({**others, **models}, seconds=seconds)}
        advance(1)
    forms = tuple(Form(name, methods[name], model, tried[name]) for name, model in models.items())
    return forms, tuple(tried[name] for name in others)


def _at_int8(model: onnx.ModelProto, judge: Judge, studio: Studio) -> tuple[str, onnx.ModelProto] | None:
    """The variant on integers, with the ranges that disagree least; None where it has nothing to quantise."""
    backbone = replace(studio.backbone, model=model)
    there = {name for node in model.graph.node for name in node.output}
    order = np.random.default_rng(studio.seed).permutation(len(studio.rows))[:CALIBRATION_ROWS]
    calibration = studio.rows[np.sort(order)]
    cuts = there & set(studio.read)
    found = dict(quantized_models(backbone, calibration, cuts=cuts, threads=studio.threads))
    if not found:
        return None
    errors = judge.errors(found)
    best = min(found, key=errors.__getitem__)
    return best, found[best]


def in_place(forms: Sequence[Form], others: Sequence[Candidate]) -> dict[Precision, Candidate]:
    """Every form as a candidate for the place of the model, with the reason where it does not stay.

    It stays where, at some budget, no entry that disagrees no more takes less time: entries are forms, ``others`` of
    the bundle, and the model itself.
    """
    exact = Candidate(EXACT, 0.0, 0.0, {1: 1.0})
    rivals = [exact, *others, *(form.worth for form in forms if not form.worth.refused)]
    return {form.name: _judged(form.worth, rivals) for form in forms}


def _judged(worth: Candidate, rivals: Sequence[Candidate]) -> Candidate:
    if worth.refused:
        return worth
    better = [
        other
        for other in rivals
        if other.time <= worth.time
        and other.expected <= worth.expected
        and (other.time, other.expected) != (worth.time, worth.expected)
    ]
    if better:
        other = min(better, key=lambda c: c.time)
        return replace(
            worth,
            refused=f"{other.method} takes {other.time:.2f} of the fp32 time instead of {worth.time:.2f} and disagrees "
            f"no more ({other.expected:.2%} instead of {worth.expected:.2%})",
        )
    for budget in BUDGETS:
        within = [other for other in rivals if other.expected <= budget]
        if worth in within and min(within, key=lambda c: c.time) is worth:
            return worth
    return replace(worth, refused=f"at no budget up to {BUDGETS[-1]:.0%} is it the fastest that keeps it")


def in_front(fronts: Sequence[Side], others: Sequence[Side]) -> list[Side]:
    """Variants as models at the input, with the reason where one does not stay.

    It stays where, at some budget, none of them and of the ``others`` saves more alone: an audit runs all that stay.
    """
    paying = [side for side in (*others, *fronts) if not side.refused and side.merit is not None]
    best = {max(paying, key=lambda side: _saves(side, budget)).spec.id: budget for budget in BUDGETS if paying}
    judged = []
    for side in fronts:
        if side.refused or side.spec.id in best:
            judged.append(side)
            continue
        first = max(paying, key=lambda other: _saves(other, LOOSEST))
        judged.append(
            replace(
                side,
                refused=f"at every budget another one saves more in front of the model: at "
                f"{LOOSEST:.0%}, {first.spec.id} {_saves(first, LOOSEST):.0%} and this one "
                f"{_saves(side, LOOSEST):.0%} of the time",
            )
        )
    return judged


def _saves(side: Side, budget: float) -> float:
    assert side.merit is not None
    return side.merit.utility[budget]


def points_of(
    exact: onnx.ModelProto,
    others: Mapping[str, onnx.ModelProto],
    worths: Sequence[Candidate],
    forms: Sequence[Form],
    *,
    stay: Collection[str],
    fronts: Collection[str],
) -> tuple[Point, ...]:
    """Entries of the picture: the model, the other precisions with what they are worth, and every form. ``stay`` and
    ``fronts`` name those that do in the place of the model and before it."""
    points = [Point(EXACT, 1.0, 0.0, weight_bytes(exact), "the reference")]
    points += [Point(c.method, c.time, c.expected, weight_bytes(others[c.method]), "a precision") for c in worths]
    for form in forms:
        where = ["in the model's place"] if form.name in stay else []
        where += ["in front of the model"] if form.name in fronts else []
        size = weight_bytes(form.model)
        points.append(Point(form.name, form.worth.time, form.worth.expected, size, " and ".join(where)))
    return tuple(points)
