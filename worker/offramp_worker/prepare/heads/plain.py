"""Training heads without PyTorch, for the worker image: what reads pooled features, in NumPy alone.

At the rates of :data:`offramp_worker.bundle.heads.KINDS`: the model's own answers as targets, AdamW
(Loshchilov and Hutter 2019) under a one-cycle schedule (Smith and Topin 2018), the weights of the best epoch,
standardisation folded in. Heads with convolutions are not trained here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from offramp_core.bundle import RampSpec
from offramp_core.task import Task
from offramp_worker.bundle.heads import TOP_LABEL_TASK, Training
from offramp_worker.prepare.heads.features import Features
from offramp_worker.prepare.heads.objectives import Objective, objective_of, targets_of
from offramp_worker.prepare.heads.recipes import MIN_DEVIATION, PATIENCE_SHARE, WARM_UP_SHARE, Parameters, training_of
from offramp_worker.prepare.source.data import FloatArray

FIRST_RATE, LAST_RATE = 1 / 25, 1 / 250_000  # of the highest learning rate
DECAYS = 0.9, 0.999  # of the moments

Generator = np.random.Generator


def train_heads(
    ramps: Sequence[RampSpec],
    training: Features,
    validation: Features,
    *,
    task: Task = TOP_LABEL_TASK,
    seed: int,
    threads: int,
    advance: Callable[[int], None],
) -> dict[str, Parameters]:
    """As :func:`offramp_worker.prepare.heads.distillation.train_heads`, one head after the other: ``threads``
    are those of NumPy's own products."""
    del threads
    targets, held_out = (targets_of(task, rows.logits) for rows in (training, validation))
    trained = {}
    for spec in ramps:
        lessons = (training.of(spec), targets), (validation.of(spec), held_out)
        trained[spec.id] = train_head(spec, *lessons, task=task, seed=seed)
        advance(1)
    return trained


def train_head(
    spec: RampSpec,
    training: tuple[FloatArray, FloatArray],
    validation: tuple[FloatArray, FloatArray],
    *,
    task: Task = TOP_LABEL_TASK,
    seed: int,
) -> Parameters:
    """Train one head on (inputs (n, width), what the model's answers teach (n, n_classes)); the same seed, id and rows
    give the same bytes."""
    generator = np.random.default_rng(zlib.crc32(f"{seed}/{spec.id}".encode()))
    x, targets = training[0].astype(np.float32), training[1]
    mean, deviation = x.mean(axis=0), x.std(axis=0) + MIN_DEVIATION
    held_out = (validation[0].astype(np.float32) - mean) / deviation, validation[1]
    widths = [x.shape[1], *([spec.hidden] if spec.hidden else []), targets.shape[1] + task.head_width - task.width]
    objective = objective_of(task, targets)
    learned = _fit(
        training_of(spec),
        widths,
        ((x - mean) / deviation, targets),
        held_out,
        objective=objective,
        generator=generator,
    )
    weight = learned["w1"].astype(np.float64) / deviation[:, None]
    learned |= {"w1": weight, "b1": learned["b1"] - mean @ weight}
    learned = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in learned.items()}
    return objective.folded(learned)


def head_logits(parameters: Parameters, pooled: FloatArray) -> FloatArray:
    """What a head says about pooled features (n, width) -> (n, n_classes); one without parameters reads logits."""
    return _layers(parameters, pooled)[-1]


def _fit(
    recipe: Training,
    widths: Sequence[int],
    training: tuple[FloatArray, FloatArray],
    validation: tuple[FloatArray, FloatArray],
    *,
    objective: Objective,
    generator: Generator,
) -> Parameters:
    """AdamW under a one-cycle schedule; the weights of the best epoch."""
    x, targets = training
    batch, epochs = recipe.schedule(len(x))
    steps = max(1, len(x) // batch)
    weights, rates = _start(widths, generator), _one_cycle(recipe.learning_rate, steps * epochs)
    adam = _Adam(weights, recipe.weight_decay)
    best, best_epoch, kept = math.inf, 0, weights
    for epoch in range(epochs):
        order = generator.permutation(len(x))
        for step in range(steps):
            rows = order[step * batch : (step + 1) * batch]
            slopes = _slopes(
                weights, x[rows], targets[rows], objective=objective, dropout=recipe.dropout, generator=generator
            )
            weights = adam.step(weights, slopes, next(rates))
        loss = _loss(weights, *validation, objective)
        if loss < best:
            best, best_epoch, kept = loss, epoch, weights
        elif epoch - best_epoch > PATIENCE_SHARE * epochs:
            break
    return dict(kept)


def _loss(weights: Parameters, x: FloatArray, targets: FloatArray, objective: Objective) -> float:
    return float(objective.losses(head_logits(weights, x), targets).mean())


def _start(widths: Sequence[int], generator: Generator) -> Parameters:
    weights: Parameters = {}
    for number, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        bound = fan_in**-0.5
        weights[f"w{number}"] = generator.uniform(-bound, bound, (fan_in, fan_out)).astype(np.float32)
        weights[f"b{number}"] = generator.uniform(-bound, bound, fan_out).astype(np.float32)
    return weights


def _one_cycle(highest: float, steps: int) -> Iterator[float]:
    """Up along a cosine, and down to almost nothing."""
    rise = max(1, round(WARM_UP_SHARE * steps))
    for step in range(steps):
        rising = step < rise
        low, share = (
            (highest * FIRST_RATE, step / rise)
            if rising
            else (highest * LAST_RATE, 1 - (step - rise) / max(1, steps - rise))
        )
        yield low + (highest - low) * (1 - math.cos(math.pi * share)) / 2


class _Adam:
    """Adam's moments with decoupled weight decay."""

    def __init__(self, weights: Parameters, decay: float) -> None:
        self._decay, self._steps = decay, 0
        self._moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in weights.items()}

    def step(self, weights: Parameters, slopes: Parameters, rate: float) -> Parameters:
        """New arrays; those given stay as they are."""
        self._steps += 1
        first, second = (1 - decay**self._steps for decay in DECAYS)
        moved = {}
        for name, weight in weights.items():
            m, v = self._moments[name]
            m = DECAYS[0] * m + (1 - DECAYS[0]) * slopes[name]
            v = DECAYS[1] * v + (1 - DECAYS[1]) * slopes[name] ** 2
            self._moments[name] = m, v
            shift = (m / first) / (np.sqrt(v / second) + 1e-8)
            moved[name] = (weight * (1 - rate * self._decay) - rate * shift).astype(np.float32)
        return moved


def _layers(weights: Parameters, x: FloatArray) -> list[FloatArray]:
    """What every layer reads, and last what the last one says. Masks of dropout are applied to what is read, by the
    caller."""
    layers, number = [x], 1
    while f"w{number}" in weights:
        read = layers[-1] if number == 1 else np.maximum(layers[-1], 0)
        layers.append(read @ weights[f"w{number}"] + weights[f"b{number}"])
        number += 1
    return layers


def _slopes(
    weights: Parameters,
    x: FloatArray,
    targets: FloatArray,
    *,
    objective: Objective,
    dropout: float,
    generator: Generator,
) -> Parameters:
    """The gradient of the mean loss."""
    count = len(weights) // 2
    reads: list[FloatArray] = []
    masks: list[FloatArray] = []
    outputs: FloatArray = x
    for number in range(1, count + 1):
        mask = _mask(outputs.shape, dropout, generator)
        masks.append(mask if number == 1 else np.where(outputs > 0, mask, np.float32(0)))
        reads.append(outputs * masks[-1])
        outputs = reads[-1] @ weights[f"w{number}"] + weights[f"b{number}"]
    slopes: Parameters = {}
    back = objective.slope(outputs, targets)
    for number in range(count, 0, -1):
        slopes[f"w{number}"], slopes[f"b{number}"] = reads[number - 1].T @ back, back.sum(axis=0)
        back = (back @ weights[f"w{number}"].T) * masks[number - 1]
    return slopes


def _mask(shape: tuple[int, ...], dropout: float, generator: Generator) -> FloatArray:
    if not dropout:
        return np.ones(shape, dtype=np.float32)
    kept = generator.random(shape, dtype=np.float32) >= dropout
    return np.asarray(kept / np.float32(1 - dropout), dtype=np.float32)
