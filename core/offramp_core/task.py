"""What a model's outputs mean: how they become an answer, how much one answer loses against another, how sure an exit
is of its own.

Everything behind the answer (search, certificates, gates, detectors, pins, the holdback) knows losses in [0, 1] only; 0
is agreement. A bundle declares its task when it is prepared, ``spec.objective.accuracy.output`` of a service names it.

    Top1        the most likely of several classes                    loss 0 or 1
    TopK        the k most likely classes, as a set                   0 or 1; Overlap: the share of them that is missing
    MultiLabel  every label whose probability is above its threshold  0 or 1; Hamming: the share of labels that differ
    Binary      yes or no, from one score                             0 or 1
    Regression  numbers, right within a tolerance                     0 or 1
    Embedding   a vector, right within a tolerance                    0 or 1

An exit says logits where the task is about classes or labels, and otherwise the values themselves with one column more:
the logarithm of the error that it expects, in tolerances. A task is an entry of :data:`TASKS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.scale import LOGITS, Scale
from offramp_core.uncertainty import raw_score

Output = Literal["Top1", "TopK", "MultiLabel", "Binary", "Regression", "Embedding"]
LossName = Literal["Exact", "Overlap", "Hamming"]
Measure = Literal["", "absolute", "relative", "cosine"]
Lesson = Literal["classes", "labels", "values"]  # what heads are trained for
Score = Literal["softmax", "gap", "labels", "estimate"]  # how an exit says how sure it is
FloatArray = npt.NDArray[np.float32]
LossArray = npt.NDArray[np.float64]
LabelArray = npt.NDArray[np.int64]
Outputs = npt.NDArray[np.floating[Any]]
Answers = npt.NDArray[Any]  # (n,) or (n, width of an answer)

NO_ANSWER = -1
# What the reference of a lost audit says: no class, and not what it says of an input that it has no answer to.
UNKNOWN = -2
LABEL = "label"  # the output that replies have besides the model's own
MAX_WIDTH = 65_536


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task as a bundle declares it."""

    #: Which of :data:`TASKS`.
    output: Output = "Top1"
    #: TopK: how many classes an answer names.
    k: int = 0
    #: MultiLabel and Binary: the probability above which a label is given, one for all or one for each. None: 0.5.
    thresholds: tuple[float, ...] = ()
    #: {"Exact", "Overlap", "Hamming"}. What an answer that differs loses. Exact: everything.
    loss: LossName = "Exact"
    #: measure and tolerance: Regression and Embedding: how far an answer may be from the model's. Absolute: the largest
    #: difference of a number (Regression) or the length of the difference (Embedding); relative: the same as a share of
    #: the model's; cosine: 1 - cosine.
    measure: Measure = ""
    tolerance: float = 0.0


class Task(ABC):
    """How one bundle's outputs are read. ``width`` is that of the model's output, ``scale`` what its numbers mean."""

    #: What heads are trained for.
    lesson: ClassVar[Lesson]
    #: How an exit says how sure it is.
    score: ClassVar[Score]
    #: Whether answers name classes, so that slices may be of answers and clients may send true labels.
    names_classes: ClassVar[bool] = False
    #: Fields of :class:`TaskSpec` that the task reads.
    reads: ClassVar[frozenset[str]] = frozenset()
    #: Losses besides Exact.
    losses_known: ClassVar[tuple[LossName, ...]] = ()
    #: The measure that is meant where none is given.
    usual_measure: ClassVar[Measure] = ""

    def __init__(self, spec: TaskSpec, *, width: int, scale: Scale | None = None) -> None:
        self.spec, self.width, self.scale = spec, width, LOGITS if scale is None else scale

    @abstractmethod
    def problem(self) -> str:
        """What is wrong with the spec for outputs of this width; empty where nothing is."""

    @property
    def graded(self) -> bool:
        """Whether a loss may lie between 0 and 1."""
        return self.spec.loss != "Exact"

    @cached_property
    def offsets(self) -> LossArray:
        """Where the logits of labels (width,) turn from no to yes; zeros where there are none."""
        return np.zeros(self.width)

    @cached_property
    def limits(self) -> FloatArray:
        """What outputs (n, width) of labels are compared with; zeros where there are none."""
        return np.zeros(self.width, dtype=np.float32)

    @property
    def head_width(self) -> int:
        """Columns of what an exit says."""
        return self.width

    @property
    def label_shape(self) -> tuple[int, ...] | None:
        """Shape of the label that a row's reply has besides the model's own output; None without one."""
        return None

    @property
    def title(self) -> str:
        """In words, for people."""
        return self.spec.output

    def blank(self, n: int) -> Answers:
        """Room for the answers of n rows."""
        return np.empty((n, *(self.label_shape or ())), dtype=np.int64)

    @abstractmethod
    def answers(self, outputs: Outputs) -> Answers:
        """The model's outputs (n, width) as answers (n, ...)."""

    def exit_outputs(self, outputs: Outputs) -> Outputs:
        """An exit's outputs (n, head_width) in the scale of the model's, (n, width)."""
        return self.scale.from_logits(outputs)

    def exit_answers(self, outputs: Outputs) -> Answers:
        """What an exit says (n, head_width), or the model itself in logits (n, width), as answers (n, ...)."""
        return self.answers(self.exit_outputs(outputs))

    @abstractmethod
    def losses(self, given: Answers, reference: Answers) -> LossArray:
        """What answers (n, ...) lose against the reference's (n, ...), in [0, 1]; the leading axes broadcast."""

    @abstractmethod
    def raw_score(self, outputs: Outputs) -> LossArray:
        """How unsure an exit is by what it says (n, head_width) → (n,): lower is more certain, +inf for a row that is
        not finite."""

    def errors(self, given: Outputs, reference: Outputs) -> LossArray:
        """How far answers (n, width) are from the reference's, where that is a question of more or less."""
        return self.losses(given, reference)

    def recorded(self, exits: Answers, *, final: Answers, reference: Answers) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a records file about answers: those of R exits (n, R, ...), of the executor that served and of
        the reference (n, ...)."""
        return {
            "loss": self.losses(exits, reference[:, None]).astype(self._loss_type),
            "final_loss": self.losses(final, reference).astype(self._loss_type),
        }

    def lost(self, served: Answers, *, n_ramps: int) -> dict[str, npt.NDArray[Any]]:
        """The same of one row whose reference nobody knows: wrong wherever it might have left."""
        del served
        return {"loss": np.ones((1, n_ramps), self._loss_type), "final_loss": np.zeros(1, self._loss_type)}

    @property
    def _loss_type(self) -> type[np.generic]:
        return np.float32 if self.graded else np.uint8  # records of whole numbers are counted, others are not


class _Top1(Task):
    lesson, score = "classes", "softmax"
    names_classes = True

    def problem(self) -> str:
        return "" if self.width > 1 else "a top label needs at least two classes"

    @property
    def label_shape(self) -> tuple[int, ...] | None:
        return ()

    def answers(self, outputs: Outputs) -> LabelArray:
        return top_labels(outputs)

    def exit_answers(self, outputs: Outputs) -> LabelArray:
        return top_labels(outputs)  # probabilities may tie where logits do not

    def losses(self, given: Answers, reference: Answers) -> LossArray:
        return np.asarray(given != reference, dtype=np.float64)

    def raw_score(self, outputs: Outputs) -> LossArray:
        return raw_score(outputs)

    def recorded(self, exits: Answers, *, final: Answers, reference: Answers) -> dict[str, npt.NDArray[Any]]:
        return {"prediction": exits, "final": final, "reference": reference}

    def lost(self, served: Answers, *, n_ramps: int) -> dict[str, npt.NDArray[Any]]:
        unknown = np.array([UNKNOWN])
        return {"prediction": np.full((1, n_ramps), served), "final": unknown, "reference": unknown}


class _TopK(Task):
    lesson, score = "classes", "gap"
    reads = frozenset({"k"})
    losses_known = ("Overlap",)

    def problem(self) -> str:
        fits = 1 < self.spec.k < self.width
        return (
            "" if fits else f"k is {self.spec.k}; it must lie in [2, {self.width - 1}], below the {self.width} classes"
        )

    @property
    def label_shape(self) -> tuple[int, ...] | None:
        return (self.spec.k,)

    @property
    def title(self) -> str:
        return f"top {self.spec.k}"

    def answers(self, outputs: Outputs) -> LabelArray:
        """The k classes, most likely first."""
        best: LabelArray = np.argsort(-outputs, axis=1, kind="stable")[:, : self.spec.k].astype(np.int64)
        return _without_answer(best, outputs)

    def exit_answers(self, outputs: Outputs) -> LabelArray:
        return self.answers(outputs)

    def losses(self, given: Answers, reference: Answers) -> LossArray:
        found = (given[..., :, None] == reference[..., None, :]).any(axis=-1)
        if not self.graded:
            return np.asarray(~found.all(axis=-1), dtype=np.float64)
        return np.asarray(1.0 - found.mean(axis=-1))

    def raw_score(self, outputs: Outputs) -> LossArray:
        """The gap between the last class that is named and the first that is not, its sign turned."""
        k = self.spec.k
        best = -np.sort(-outputs.astype(np.float64), axis=1)[:, k - 1 : k + 1]
        return _finite_or_infinite(best[:, 1] - best[:, 0], outputs)


class _Labels(Task):
    """Labels that are right or wrong independently of each other."""

    lesson, score = "labels", "labels"
    reads = frozenset({"thresholds"})

    @cached_property
    def offsets(self) -> LossArray:
        limits = self._thresholds
        return np.broadcast_to(np.log(limits) - np.log1p(-limits), (self.width,)).astype(np.float64)

    @cached_property
    def limits(self) -> FloatArray:
        """What outputs (n, width) are compared with."""
        alone = self.scale.kind == "independent-probabilities"
        return np.broadcast_to(self._thresholds if alone else self.offsets, (self.width,)).astype(np.float32)

    @property
    def _thresholds(self) -> LossArray:
        return np.array(self.spec.thresholds or (0.5,), dtype=np.float64)

    def problem(self) -> str:
        if len(self.spec.thresholds) not in (0, 1, self.width):
            return f"{len(self.spec.thresholds)} thresholds for {self.width} labels; give one for all or one for each"
        wrong = [t for t in self.spec.thresholds if not 0 < t < 1]
        return f"threshold {wrong[0]} is none of a probability; it must lie above 0 and below 1" if wrong else ""

    def answers(self, outputs: Outputs) -> LabelArray:
        given: LabelArray = (outputs > self.limits).astype(np.int64)
        return _without_answer(given, outputs)

    def raw_score(self, outputs: Outputs) -> LossArray:
        """Log odds against all labels being right, were they independent: with m = |logit - threshold|, log(prod(1 +
        exp(-m)) - 1)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            doubt = np.log1p(np.exp(-np.abs(outputs.astype(np.float64) - self.offsets))).sum(axis=1)
            return _finite_or_infinite(np.log(np.expm1(doubt)), outputs)


class _MultiLabel(_Labels):
    losses_known = ("Hamming",)

    def problem(self) -> str:
        return super().problem() if self.width > 1 else "several labels need several columns; one is a Binary task"

    @property
    def label_shape(self) -> tuple[int, ...] | None:
        return (self.width,)

    @property
    def title(self) -> str:
        return f"the set of {self.width} labels"

    def losses(self, given: Answers, reference: Answers) -> LossArray:
        differs = given != reference
        return np.asarray(differs.mean(axis=-1) if self.graded else differs.any(axis=-1), dtype=np.float64)


class _Binary(_Labels):
    def problem(self) -> str:
        return super().problem() if self.width == 1 else f"yes or no needs one column, not {self.width}"

    @property
    def label_shape(self) -> tuple[int, ...] | None:
        return ()

    @property
    def title(self) -> str:
        return "yes or no"

    def answers(self, outputs: Outputs) -> LabelArray:
        found: LabelArray = super().answers(outputs)[:, 0]
        return found

    def losses(self, given: Answers, reference: Answers) -> LossArray:
        return np.asarray(given != reference, dtype=np.float64)


class _Values(Task):
    """Numbers that are right within a tolerance; the last column of what an exit says is the logarithm of its expected
    error, in tolerances."""

    lesson, score = "values", "estimate"
    reads = frozenset({"measure", "tolerance"})
    measures: ClassVar[Mapping[str, Callable[[Outputs, Outputs], LossArray]]]

    def problem(self) -> str:
        if self.spec.measure not in self.measures:
            return f"measure {self.spec.measure!r} is unknown; use {' or '.join(self.measures)}"
        if not 0 < self.spec.tolerance < math.inf:
            return f"tolerance is {self.spec.tolerance}; it must be a number above 0"
        return ""

    @property
    def head_width(self) -> int:
        return self.width + 1

    @property
    def title(self) -> str:
        return f"{self.spec.output.lower()} within {self.spec.tolerance:g} ({self.spec.measure})"

    def blank(self, n: int) -> Answers:
        return np.empty((n, self.width), dtype=np.float32)

    def answers(self, outputs: Outputs) -> Answers:
        return outputs

    def exit_outputs(self, outputs: Outputs) -> Outputs:
        return outputs[:, : self.width]

    def errors(self, given: Outputs, reference: Outputs) -> LossArray:
        """How far answers are from the reference's, in tolerances; infinite where that cannot be told."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            far = self.measures[self.spec.measure](given.astype(np.float64), reference.astype(np.float64))
        return np.where(np.isnan(far), np.inf, far) / self.spec.tolerance

    def losses(self, given: Answers, reference: Answers) -> LossArray:
        same = ((given == reference) | (np.isnan(given) & np.isnan(reference))).all(axis=-1)
        return np.asarray((self.errors(given, reference) > 1) & ~same, dtype=np.float64)

    def raw_score(self, outputs: Outputs) -> LossArray:
        return _finite_or_infinite(outputs[:, -1].astype(np.float64), outputs)


class _Regression(_Values):
    usual_measure = "absolute"
    measures: ClassVar[Mapping[str, Callable[[Outputs, Outputs], LossArray]]] = {
        "absolute": lambda given, reference: np.abs(given - reference).max(axis=-1),
        "relative": lambda given, reference: np.where(
            given == reference, 0.0, np.abs(given - reference) / np.abs(reference)
        ).max(axis=-1),
    }


class _Embedding(_Values):
    usual_measure = "cosine"
    measures: ClassVar[Mapping[str, Callable[[Outputs, Outputs], LossArray]]] = {
        "cosine": lambda given, reference: 1 - (given * reference).sum(axis=-1) / (_length(given) * _length(reference)),
        "absolute": lambda given, reference: _length(given - reference),
        "relative": lambda given, reference: _length(given - reference) / _length(reference),
    }

    def problem(self) -> str:
        return super().problem() if self.width > 1 else "an embedding has several columns; one is a Regression"


TASKS: Mapping[Output, type[Task]] = {
    "Top1": _Top1,
    "TopK": _TopK,
    "MultiLabel": _MultiLabel,
    "Binary": _Binary,
    "Regression": _Regression,
    "Embedding": _Embedding,
}


def task_of(spec: TaskSpec | None, *, width: int, scale: Scale | None = None) -> Task:
    """The task that a spec declares for outputs of ``width`` columns; None, as in bundles of before there were several,
    is the top label.

    Raises
    ------
    InvalidArgumentError
        The spec does not fit; the message names the field.
    """
    spec = TaskSpec() if spec is None else spec
    kind = TASKS[spec.output]
    task = kind(spec, width=width, scale=scale)
    if not 0 < width <= MAX_WIDTH:
        raise InvalidArgumentError(f"{spec.output}: the output has {width} columns; it must have 1 to {MAX_WIDTH}")
    reason = _unread(spec, kind) or task.problem()
    if reason:
        raise InvalidArgumentError(f"{spec.output}: {reason}")
    return task


def declared_spec(
    output: str,
    *,
    k: int = 0,
    thresholds: tuple[float, ...] = (),
    loss: str = "Exact",
    measure: str = "",
    tolerance: float = 0.0,
) -> TaskSpec | None:
    """A task as people declare it, as far as it can be judged without the model; None for the top label.

    Raises
    ------
    InvalidArgumentError
        Names the field and what it may be.
    """
    kind = next((kind for name, kind in TASKS.items() if name == output), None)
    if kind is None:
        raise InvalidArgumentError(f"task {output!r} is unknown; use {', '.join(TASKS)}")
    spec = TaskSpec(output, k, thresholds, loss, measure or kind.usual_measure, tolerance)  # type: ignore[arg-type]  # judged next
    if reason := _unread(spec, kind):
        raise InvalidArgumentError(f"task {output}: {reason}")
    return None if output == "Top1" else spec


def _unread(spec: TaskSpec, kind: type[Task]) -> str:
    """What a spec says that its task does not know."""
    blank = TaskSpec(spec.output)
    odd = [
        f
        for f in ("k", "thresholds", "measure", "tolerance")
        if f not in kind.reads and getattr(spec, f) != getattr(blank, f)
    ]
    if odd:
        return f"{odd[0]} belongs to another task; leave it out"
    if spec.loss not in ("Exact", *kind.losses_known):
        return f"loss {spec.loss} belongs to another task; use {' or '.join(('Exact', *kind.losses_known))}"
    return ""


def top_labels(logits: Outputs) -> LabelArray:
    """Index of the largest logit of each row, (n, n_classes) → (n,), n >= 0; ``NO_ANSWER`` where a logit is NaN."""
    top: LabelArray = logits.argmax(axis=1).astype(np.int64, copy=False)
    if len(top) and np.isnan(logits.max()):  # the maximum is NaN if any logit is, so one number clears the usual batch
        top[np.isnan(logits).any(axis=1)] = NO_ANSWER
    return top


def _without_answer(answers: LabelArray, outputs: Outputs) -> LabelArray:
    """The answers (n, ...), but ``NO_ANSWER`` where an output is NaN."""
    none = np.isnan(outputs).any(axis=1)
    if none.any():
        answers[none] = NO_ANSWER
    return answers


def _finite_or_infinite(score: LossArray, outputs: Outputs) -> LossArray:
    return np.where(np.isfinite(outputs).all(axis=1), score, np.inf)


def _length(vectors: Outputs) -> LossArray:
    return np.asarray(np.sqrt((vectors * vectors).sum(axis=-1)))
