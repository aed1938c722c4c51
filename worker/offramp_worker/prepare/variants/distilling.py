"""A variant learns the model's own answers, and its features where ramps read, for a stated time.

Of its states the one counts that answers most of some other rows as the model does, that of before it learned among
them: what leaves out little may be better then, above all if it learns from rows that the model knows by heart. No
labels are needed. The time is a bound, so what a variant becomes depends on the machine; how many steps it took is
recorded. The clock is the thread's processor time, of which neighbors on a shared machine take none away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import torch
from torch import Tensor, nn

from offramp_core.bundle import TensorSpec
from offramp_core.scale import Scale
from offramp_worker.bundle.graph import output_name, tensor_values, with_outputs
from offramp_worker.bundle.lengths import by_length, pad_rows
from offramp_worker.devices import open_session
from offramp_worker.prepare.variants.twin import Twin

BATCH = 64
LEARNING_RATES = {"images": 5e-4, "tokens": 1e-4}
WARM_UP = 0.1  # of the time
TEMPERATURE = 2.0
HINTS = 0.5  # weight of features beside answers
MOST_SHIFT = 2  # pixels
LARGEST_STEP = 1.0  # of a gradient's norm
SMALLEST = 1e-7  # probability
CHECKS = 4  # of states while a variant learns, the last one among them
CHECKED_ROWS = 128  # at once
DRAWN_BATCHES = 16  # of which those of about one length are made

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Course:
    """What variants learn from: ``rows`` (n, ...) of the input ``spec``, and the ``teacher``, whose answers are in a
    ``scale``. Their states are compared on ``unseen`` rows (m, ...), m > 0."""

    teacher: onnx.ModelProto
    rows: Array
    unseen: Array
    spec: TensorSpec
    scale: Scale
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Learned:
    """The variant's graph with what it learned in so many steps, of which the first ``kept`` count."""

    model: onnx.ModelProto
    steps: int
    kept: int


def distill(model: onnx.ModelProto, course: Course, *, read: Sequence[str], advance: Callable[[int], None]) -> Learned:
    """Teach a variant on this thread.

    Parameters
    ----------
    read : sequence of str
        Tensors that teacher and variant have in common, whose values it learns, too.
    advance : callable
        Told how many of the seconds have passed.

    Raises
    ------
    InvalidArgumentError
        The graph has operators through which nothing is learned.
    """
    twin = Twin(model)
    names = [output_name(course.teacher), *read]
    teacher = open_session(with_outputs(course.teacher, list(read)), threads=1)
    random = np.random.default_rng(course.seed)
    peak = LEARNING_RATES["images" if course.rows.ndim == 4 else "tokens"]
    optimizer = torch.optim.AdamW(twin.parameters(), lr=peak, weight_decay=0.0)
    best, checks, batches = _Best(twin, course, teacher), 0, _batches(course, random)
    start, steps, reported = time.thread_time(), 0, 0
    while (passed := time.thread_time() - start) < course.seconds:
        for group in optimizer.param_groups:
            group["lr"] = peak * _share(passed / course.seconds)
        x = next(batches)
        values = tensor_values(teacher, names, x, entry=course.spec.name)
        wanted = [torch.from_numpy(values[name]) for name in names]
        output, features = twin(torch.from_numpy(x), read)
        loss = _answers_differ(output, wanted[0], course.scale)
        if read:
            hints = [_features_differ(f, w) for f, w in zip(features, wanted[1:], strict=True)]
            loss = loss + HINTS * torch.stack(hints).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), LARGEST_STEP)
        optimizer.step()
        steps += 1
        if CHECKS * passed >= (checks + 1) * course.seconds:
            checks = int(CHECKS * passed / course.seconds)
            best.check(steps)
        advance(int(passed) - reported)
        reported = int(passed)
    advance(round(course.seconds) - reported)
    best.check(steps)
    best.restore()
    learned = onnx.ModelProto()
    learned.CopyFrom(model)
    twin.write_back(learned)
    return Learned(learned, steps, best.steps)


class _Best:
    """The state of a variant, of those that were checked, that gives most unseen rows the teacher's top label; of
    several the latest one."""

    def __init__(self, twin: Twin, course: Course, teacher: ort.InferenceSession) -> None:
        name = output_name(course.teacher)
        self._twin = twin
        self._parts = [
            pad_rows([course.unseen[rows]], course.spec)
            for rows in by_length(course.unseen, course.spec, size=CHECKED_ROWS)
        ]
        self._labels = [
            tensor_values(teacher, [name], x, entry=course.spec.name)[name].argmax(axis=1) for x in self._parts
        ]
        self._fewest, self._state, self.steps = len(course.unseen) + 1, twin.state_dict(), 0
        self.check(0)

    def check(self, steps: int) -> None:
        with torch.no_grad():
            answers = (self._twin(torch.from_numpy(x))[0].argmax(dim=1).numpy() for x in self._parts)
            others = sum(int((a != b).sum()) for a, b in zip(answers, self._labels, strict=True))
        if others <= self._fewest:
            self._fewest, self.steps = others, steps
            self._state = {name: value.clone() for name, value in self._twin.state_dict().items()}

    def restore(self) -> None:
        self._twin.load_state_dict(self._state)


def _share(done: float) -> float:
    """Of the peak's learning rate: a line up, then half a cosine down."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.02)
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def _batches(course: Course, random: np.random.Generator) -> Iterator[Array]:
    """Rows drawn at random without an end; where lengths vary, rows of about one length together, or most of a batch
    would be what the longest row is filled up to."""
    spec = course.spec
    while True:
        rows = course.rows[random.integers(len(course.rows), size=BATCH * (DRAWN_BATCHES if spec.varies else 1))]
        parts = list(by_length(rows, spec, size=BATCH))
        for number in random.permutation(len(parts)):
            batch = rows[parts[number]]
            yield _moved(batch, random) if batch.ndim == 4 and batch.dtype == np.float32 else pad_rows([batch], spec)


def _moved(rows: Array, random: np.random.Generator) -> Array:
    """Images, some pixels to the side."""
    down, right = random.integers(-MOST_SHIFT, MOST_SHIFT + 1, size=2)
    sides = [(max(by, 0), max(-by, 0)) for by in (down, right)]
    moved = np.pad(rows, ((0, 0), (0, 0), *sides))
    height, width = rows.shape[2:]
    top, left = max(-down, 0), max(-right, 0)
    return np.ascontiguousarray(moved[:, :, top : top + height, left : left + width])


def _answers_differ(output: Tensor, wanted: Tensor, scale: Scale) -> Tensor:
    """Divergence of the variant's answers from the model's, both softened."""
    if scale.kind == "probabilities":
        output, wanted = ((values / scale.total).clamp_min(SMALLEST).log() for values in (output, wanted))
    given, meant = (torch.log_softmax(values / TEMPERATURE, dim=1) for values in (output, wanted))
    return TEMPERATURE**2 * nn.functional.kl_div(given, meant, reduction="batchmean", log_target=True)


def _features_differ(values: Tensor, wanted: Tensor) -> Tensor:
    return (values - wanted).square().mean() / wanted.square().mean().clamp_min(SMALLEST)
