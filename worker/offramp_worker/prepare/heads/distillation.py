"""Training heads, the backbone frozen, on the model's own answers as soft targets (distillation; no labels).

Standardisation of the inputs and batch normalisation are part of training only: afterwards they are folded into the
weights, so that a served head is what :mod:`offramp_worker.bundle.heads` says and nothing more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from offramp_core.bundle import RampSpec
from offramp_core.task import Task
from offramp_worker.bundle.heads import KINDS, TOP_LABEL_TASK, Training, convolution_steps, grid_window, head_inputs
from offramp_worker.prepare.heads.features import Features
from offramp_worker.prepare.heads.objectives import Classes, Objective, objective_of, targets_of
from offramp_worker.prepare.heads.recipes import MIN_DEVIATION, PATIENCE_SHARE, WARM_UP_SHARE, Parameters, training_of
from offramp_worker.prepare.source.data import FloatArray

VALIDATION_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one head learns from: inputs (n, width) or maps (n, C, H, W), and what the model's answers teach (n,
    n_classes)."""

    x: npt.NDArray[np.floating[Any]]
    targets: FloatArray

    def __len__(self) -> int:
        return len(self.x)


Lessons = tuple[Lesson, Lesson]  # training and validation


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
    """Train heads that read pooled features.

    Parameters
    ----------
    training, validation : Features
        Rows to learn from, and rows that decide when to stop; no row is in both.
    task : Task
        What they are trained for.
    seed : int
        The same seed and inputs give the same bytes.
    threads : int
        Heads trained at a time, one core each.
    advance : callable
        Told 1 after each head.

    Returns
    -------
    dict
        Ramp id -> the parameters of :mod:`offramp_worker.bundle.heads`, float32.
    """
    targets, held_out = (targets_of(task, rows.logits) for rows in (training, validation))

    def lessons(spec: RampSpec) -> Lessons:
        return Lesson(training.of(spec), targets), Lesson(validation.of(spec), held_out)

    return train_each(ramps, lessons, task=task, seed=seed, threads=threads, advance=advance)


def train_each(
    ramps: Sequence[RampSpec],
    lessons: Callable[[RampSpec], Lessons],
    *,
    task: Task = TOP_LABEL_TASK,
    seed: int,
    threads: int,
    advance: Callable[[int], None],
) -> dict[str, Parameters]:
    """Train heads on what ``lessons`` makes for each, just before it is needed; otherwise as :func:`train_heads`."""

    def train(spec: RampSpec) -> Parameters:
        parameters = train_head(spec, *lessons(spec), task=task, seed=seed)
        advance(1)
        return parameters

    before = torch.get_num_threads()
    # Heads are small: one core each, several at a time, wastes nothing on synchronising and makes the bytes
    # independent of the number of cores.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        trained = list(pool.map(train, ramps))
    torch.set_num_threads(before)
    return {spec.id: parameters for spec, parameters in zip(ramps, trained, strict=True)}


def train_head(
    spec: RampSpec, training: Lesson, validation: Lesson, *, task: Task = TOP_LABEL_TASK, seed: int
) -> Parameters:
    """Train one head on this thread; the same seed, id and rows give the same bytes with one torch thread."""
    # The generator uses 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{spec.id}".encode()))
    objective = objective_of(task, training.targets)
    scale = _Scale.of(training.x)
    net = _Head(
        spec, training.x.shape, n_classes=training.targets.shape[1] + task.head_width - task.width, generator=generator
    )
    _fit(net, training_of(spec), scale, training, validation, objective=objective, generator=generator)
    learned = {name: np.ascontiguousarray(value.float().numpy()) for name, value in net.folded(scale).items()}
    return objective.folded(learned)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Mean and deviation of the inputs. Maps are only divided: a shift would be wrong where convolutions pad with 0."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, x: npt.NDArray[np.floating[Any]]) -> _Scale:
        rows = torch.from_numpy(x)
        if rows.ndim == 2:
            return cls(rows.mean(0), rows.std(0) + MIN_DEVIATION)
        deviation = torch.stack([rows[:, c].float().std() for c in range(rows.shape[1])]) + MIN_DEVIATION
        return cls(torch.zeros(1), deviation[:, None, None])

    def apply(self, x: Tensor) -> Tensor:
        return (x.float() - self.mean) / self.deviation


class _Head(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A head while it learns: its convolutions with batch normalisation, its pooling, its linear layers."""

    def __init__(self, spec: RampSpec, shape: Sequence[int], *, n_classes: int, generator: torch.Generator) -> None:
        super().__init__()
        kind, channels = KINDS[spec.head], spec.channels
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        if kind.convolutions:
            steps = convolution_steps(*shape[2:])
            for stride, _ in steps:
                layer = nn.utils.skip_init(nn.Conv2d, channels, spec.hidden, 3, stride=stride, padding=1, bias=False)
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
                self.convolutions.append(layer)
                self.norms.append(nn.BatchNorm2d(spec.hidden))
                channels = spec.hidden
            (kernel_h, stride_h), (kernel_w, stride_w) = (grid_window(side) for side in steps[-1][1])
            self.window = {"kernel_size": (kernel_h, kernel_w), "stride": (stride_h, stride_w)}
        width = head_inputs(spec) if kind.convolutions else shape[1]
        sizes = [width, *([spec.hidden] if kind.hidden_layer else []), n_classes]
        self.layers = nn.ModuleList(_linear(sizes[i], sizes[i + 1], generator=generator) for i in range(len(sizes) - 1))

    def forward(self, x: Tensor, *, dropout: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """(n, width) or (n, C, H, W) -> logits (n, n_classes)."""
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.relu(norm(layer(x)))
        if len(self.convolutions):
            pools = (nn.functional.avg_pool2d, nn.functional.max_pool2d)
            x = torch.cat([pool(x, **self.window).flatten(1) for pool in pools], dim=1)
        for number, layer in enumerate(self.layers):
            x = layer(_dropped(nn.functional.relu(x) if number else x, dropout, generator))
        return x

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def folded(self, scale: _Scale) -> dict[str, Tensor]:
        """The parameters as they are served: without normalisation of inputs or between layers, linear ones [in,
        out]."""
        out: dict[str, Tensor] = {}
        for number, (layer, norm) in enumerate(zip(self.convolutions, self.norms, strict=True), start=1):
            gain = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
            kernel = layer.weight.double() * gain[:, None, None, None]
            out[f"k{number}"] = kernel / scale.deviation.double() if number == 1 else kernel
            out[f"kb{number}"] = norm.bias.double() - norm.running_mean.double() * gain
        for number, layer in enumerate(self.layers, start=1):
            weight, bias = layer.weight.double().T, layer.bias.double()
            if number == 1 and not len(self.convolutions):
                weight = weight / scale.deviation.double()[:, None]
                bias = bias - scale.mean.double() @ weight
            out[f"w{number}"], out[f"b{number}"] = weight, bias
        return out


def _linear(fan_in: int, fan_out: int, *, generator: torch.Generator) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, fan_in, fan_out)  # the default start would draw from the global generator
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -(fan_in**-0.5), fan_in**-0.5, generator=generator)
    return layer


def _dropped(x: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """Dropout from a generator of our own: heads that train at the same time must not share one."""
    if not share:
        return x
    return x * (torch.rand(x.shape, generator=generator) >= share) / (1 - share)


def _fit(
    net: _Head,
    recipe: Training,
    scale: _Scale,
    training: Lesson,
    validation: Lesson,
    *,
    objective: Objective,
    generator: torch.Generator,
) -> None:
    """AdamW under a one-cycle schedule; the network ends with the weights of its best epoch."""
    x, targets = torch.from_numpy(training.x), torch.from_numpy(training.targets)
    if x.ndim == 2:
        x = scale.apply(x)
    batch, epochs = recipe.schedule(len(x))
    steps = max(1, len(x) // batch)
    optimiser = torch.optim.AdamW(
        net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=steps * epochs + 1, pct_start=WARM_UP_SHARE
    )
    best, best_epoch, kept = float("inf"), 0, _copy(net)
    for epoch in range(epochs):
        net.train()
        order = torch.randperm(len(x), generator=generator)
        for step in range(steps):
            rows = order[step * batch : (step + 1) * batch]
            inputs = x[rows] if x.ndim == 2 else scale.apply(x[rows])
            outputs = net(inputs, dropout=recipe.dropout, generator=generator)
            optimiser.zero_grad()
            _descend(outputs, targets[rows], objective)
            optimiser.step()
            schedule.step()
        held_out = _loss(net, scale, validation, objective)
        if held_out < best:
            best, best_epoch, kept = held_out, epoch, _copy(net)
        elif epoch - best_epoch > PATIENCE_SHARE * epochs:
            break
    net.load_state_dict(kept)
    net.eval()


def _copy(net: _Head) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def _descend(outputs: Tensor, targets: Tensor, objective: Objective) -> None:
    """Leave the gradient of the mean loss at the head's parameters; of classes as torch has it, else as the objective
    has it."""
    if isinstance(objective, Classes):
        nn.functional.cross_entropy(outputs, targets).backward()
    else:
        outputs.backward(torch.from_numpy(objective.slope(outputs.detach().numpy(), targets.numpy())))


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _loss(net: _Head, scale: _Scale, rows: Lesson, objective: Objective) -> float:
    net.eval()
    parts = [
        _summed(net(scale.apply(x)), y, objective)
        for x, y in zip(
            torch.from_numpy(rows.x).split(VALIDATION_CHUNK),
            torch.from_numpy(rows.targets).split(VALIDATION_CHUNK),
            strict=True,
        )
    ]
    return float(torch.stack(parts).sum()) / len(rows)


def _summed(outputs: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """The loss of some rows, summed."""
    if isinstance(objective, Classes):
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")
    return torch.tensor(objective.losses(outputs.numpy(), targets.numpy()).sum())
