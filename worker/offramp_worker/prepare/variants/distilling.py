"""A variant learns the model's own answers, and its features where ramps read, for a stated time.

No labels are needed. The time is a bound, so what a variant becomes depends on the machine; how many steps it took is
recorded. The clock is the thread's processor time, of which neighbors on a shared machine take none away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor, nn

from offramp_core.bundle import TensorSpec
from offramp_core.scale import Scale
from offramp_worker.bundle.graph import output_name, tensor_values, with_outputs
from offramp_worker.bundle.lengths import pad_rows
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

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Course:
    """What variants learn from: ``rows`` (n, ...) of the input ``spec``, and the ``teacher``, whose answers are in a
    ``scale``."""

    teacher: onnx.ModelProto
    rows: Array
    spec: TensorSpec
    scale: Scale
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Learned:
    """The variant's graph with what it learned, after so many steps."""

    model: onnx.ModelProto
    steps: int


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
    start, steps, reported = time.thread_time(), 0, 0
    while (passed := time.thread_time() - start) < course.seconds:
        for group in optimizer.param_groups:
            group["lr"] = peak * _share(passed / course.seconds)
        x = _batch(course, random)
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
        advance(int(passed) - reported)
        reported = int(passed)
    advance(round(course.seconds) - reported)
    learned = onnx.ModelProto()
    learned.CopyFrom(model)
    twin.write_back(learned)
    return Learned(learned, steps)


def _share(done: float) -> float:
    """Of the peak's learning rate: a line up, then half a cosine down."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.02)
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def _batch(course: Course, random: np.random.Generator) -> Array:
    rows = course.rows[random.integers(len(course.rows), size=BATCH)]
    if rows.ndim != 4 or rows.dtype != np.float32:
        return pad_rows([rows], course.spec)
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
