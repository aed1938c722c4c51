"""What heads are trained for, one definition for both trainers: the loss of what a head says, and its slope.

    classes   cross entropy with the model's distribution over classes
    labels    cross entropy with the model's probability of each label, averaged over labels
    values    squared error of standardized values, and of the last column the negative log likelihood of the error that
    the values have at that moment, were
              it exponentially distributed with the mean exp(column): its best value is the logarithm of the expected
              error

An objective is an entry of :data:`OBJECTIVES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.task import Lesson, Task
from offramp_worker.prepare.source.data import FloatArray

MIN_DEVIATION = 1e-6
# An error that is more times the expected one counts by its logarithm: one row must not throw a head off.
LARGEST_SURPRISE = 20.0
Parameters = Mapping[str, FloatArray]


class Objective(ABC):
    """Loss and slope for one head; ``targets`` (n, t) are what :func:`targets_of` makes of the model's answers."""

    @abstractmethod
    def losses(self, outputs: FloatArray, targets: FloatArray) -> npt.NDArray[np.float64]:
        """Of each row (n,), from what a head says (n, head_width)."""

    @abstractmethod
    def slope(self, outputs: FloatArray, targets: FloatArray) -> FloatArray:
        """The gradient of the mean loss with respect to what the head says."""

    def folded(self, parameters: Parameters) -> dict[str, FloatArray]:
        """A trained head's parameters as they are served."""
        return dict(parameters)


class Classes(Objective):
    """A distribution over classes."""

    def losses(self, outputs: FloatArray, targets: FloatArray) -> npt.NDArray[np.float64]:
        logits = outputs.astype(np.float64)
        z = logits - logits.max(axis=1, keepdims=True)
        return np.asarray(np.log(np.exp(z).sum(axis=1)) - (targets * z).sum(axis=1))

    def slope(self, outputs: FloatArray, targets: FloatArray) -> FloatArray:
        back: FloatArray = (softmax(outputs) - targets) / np.float32(len(outputs))
        return back


class Labels(Objective):
    """A probability for each label."""

    def losses(self, outputs: FloatArray, targets: FloatArray) -> npt.NDArray[np.float64]:
        z = outputs.astype(np.float64)
        return np.asarray((np.logaddexp(0, z) - targets * z).mean(axis=1))

    def slope(self, outputs: FloatArray, targets: FloatArray) -> FloatArray:
        back: FloatArray = (logistic(outputs) - targets) / np.float32(outputs.size)
        return back


@dataclass(frozen=True, slots=True)
class Values(Objective):
    """Values and the error that they are expected to have. Heads learn standardized values, ``mean`` and ``deviation``
    (width,) of which are folded in, and errors as shares of the ``typical`` one, that of always saying the mean."""

    task: Task
    mean: FloatArray
    deviation: FloatArray
    typical: float

    def losses(self, outputs: FloatArray, targets: FloatArray) -> npt.NDArray[np.float64]:
        values, expected = outputs[:, :-1].astype(np.float64), outputs[:, -1].astype(np.float64)
        surprise = self._errors(outputs, targets) * np.exp(-expected)
        small = np.minimum(surprise, LARGEST_SURPRISE)
        beyond = LARGEST_SURPRISE * np.log(np.maximum(surprise, LARGEST_SURPRISE) / LARGEST_SURPRISE)
        return np.asarray(((values - self._standardized(targets)) ** 2).mean(axis=1) / 2 + small + beyond + expected)

    def slope(self, outputs: FloatArray, targets: FloatArray) -> FloatArray:
        back = np.empty_like(outputs)
        back[:, :-1] = (outputs[:, :-1] - self._standardized(targets)) / np.float32(len(self.mean))
        back[:, -1] = 1 - np.minimum(
            self._errors(outputs, targets) * np.exp(-outputs[:, -1].astype(np.float64)), LARGEST_SURPRISE
        )
        return back / np.float32(len(outputs))

    def folded(self, parameters: Parameters) -> dict[str, FloatArray]:
        last = str(max(int(name[1:]) for name in parameters if name[0] == "w"))
        gain, shift = np.append(self.deviation, np.float32(1)), np.append(self.mean, np.float32(np.log(self.typical)))
        weight, bias = parameters[f"w{last}"] * gain, parameters[f"b{last}"] * gain + shift
        return {**parameters, f"w{last}": weight.astype(np.float32), f"b{last}": bias.astype(np.float32)}

    def _standardized(self, targets: FloatArray) -> FloatArray:
        return (targets - self.mean) / self.deviation

    def _errors(self, outputs: FloatArray, targets: FloatArray) -> npt.NDArray[np.float64]:
        """As the task measures them, in typical ones."""
        return self.task.errors(outputs[:, :-1] * self.deviation + self.mean, targets) / self.typical


def _values(task: Task, targets: FloatArray) -> Objective:
    mean, deviation = targets.mean(axis=0), targets.std(axis=0)
    # Columns that hardly vary must not be blown up to the size of the others.
    deviation = np.maximum(deviation, max(MIN_DEVIATION, 1e-3 * float(deviation.max()))).astype(np.float32)
    errors = task.errors(np.broadcast_to(mean, targets.shape), targets)
    typical = float(np.median(errors[np.isfinite(errors)])) if np.isfinite(errors).any() else 1.0
    return Values(task, mean, deviation, max(typical, MIN_DEVIATION))


OBJECTIVES: Mapping[Lesson, Callable[[Task, FloatArray], Objective]] = {
    "classes": lambda _task, _targets: Classes(),
    "labels": lambda _task, _targets: Labels(),
    "values": _values,
}


def objective_of(task: Task, targets: FloatArray) -> Objective:
    """What heads of a task learn from training ``targets`` (n, width)."""
    return OBJECTIVES[task.lesson](task, targets)


def targets_of(task: Task, reference: FloatArray) -> FloatArray:
    """What the model's own logits, or values, (n, width) teach: probabilities, or the values themselves."""
    if task.lesson == "values":
        return reference
    return softmax(reference) if task.lesson == "classes" else logistic(reference)


def softmax(logits: FloatArray) -> FloatArray:
    """Of each row, (n, n_classes)."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def logistic(logits: FloatArray) -> FloatArray:
    """Of each number."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float32)
