"""Training heads on pooled features, the backbone frozen, the model's own answers as soft targets.

Standardisation of the inputs is part of training only: afterwards it is folded into the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from offramp_core.bundle import HeadKind, RampSpec
from offramp_worker.prepare.data import FloatArray
from offramp_worker.prepare.features import Features

LEARNING_RATE: dict[HeadKind, float] = {"pooled-linear": 1e-2, "grid-mlp": 2e-3}
# Strong decay is what keeps 100-400 thousand weights honest on a few thousand inputs.
WEIGHT_DECAY: dict[HeadKind, float] = {"pooled-linear": 1e-2, "grid-mlp": 0.3}
WARM_UP_SHARE = 0.25
AIMED_STEPS = 400
PATIENCE_SHARE = 0.5  # of all epochs without a better validation loss
MIN_DEVIATION = 1e-3

Parameters = dict[str, FloatArray]


def train_heads(
    ramps: Sequence[RampSpec],
    training: Features,
    validation: Features,
    *,
    seed: int,
    threads: int,
    advance: Callable[[int], None],
) -> dict[str, Parameters]:
    """Train every ramp's head.

    Parameters
    ----------
    training, validation : Features
        Rows to learn from, and rows that decide when to stop; no row is in both.
    seed : int
        The same seed and inputs give the same bytes.
    threads : int
        Heads trained at a time, one core each.
    advance : callable
        Told 1 after each head.

    Returns
    -------
    dict
        Ramp id -> ``w1``, ``b1`` (and ``w2``, ``b2``), float32, weights [in, out].
    """
    targets, held_out = (torch.from_numpy(probabilities(part.logits)) for part in (training, validation))

    def train(spec: RampSpec) -> Parameters:
        x, v = (torch.from_numpy(part.pooled[spec.id]) for part in (training, validation))
        generator = torch.Generator().manual_seed(seed * 1_000 + 2 * spec.position + (spec.head == "grid-mlp"))
        parameters = _train_one(spec, x, targets, v, held_out, generator=generator)
        advance(1)
        return parameters

    before = torch.get_num_threads()
    # Heads are small: one core each, several at a time, wastes nothing on synchronising and makes the bytes
    # independent of the number of cores.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        trained = list(pool.map(train, ramps))
    torch.set_num_threads(before)
    return {spec.id: parameters for spec, parameters in zip(ramps, trained, strict=True)}


def head_logits(parameters: Parameters, pooled: FloatArray) -> FloatArray:
    """What a trained head says about pooled features (n, width) -> (n, n_classes)."""
    hidden = pooled @ parameters["w1"] + parameters["b1"]
    return hidden if "w2" not in parameters else np.maximum(hidden, 0) @ parameters["w2"] + parameters["b2"]


def probabilities(logits: FloatArray) -> FloatArray:
    """The model's answers as class probabilities, (n, n_classes); outputs that already are stay as they are."""
    if (logits >= 0).all() and np.allclose(logits.sum(axis=1), 1, atol=1e-3):
        return logits
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def _train_one(
    spec: RampSpec, x: Tensor, targets: Tensor, v: Tensor, held_out: Tensor, *, generator: torch.Generator
) -> Parameters:
    mean, deviation = x.mean(0), x.std(0) + MIN_DEVIATION
    x, v = (x - mean) / deviation, (v - mean) / deviation
    net = _network(spec, width=x.shape[1], n_classes=targets.shape[1], generator=generator)
    _fit(net, spec.head, (x, targets), (v, held_out), generator=generator)
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    weights = [layer.weight.detach().double().T for layer in layers]
    biases = [layer.bias.detach().double() for layer in layers]
    scaled = weights[0] / deviation.double()[:, None]
    biases[0] = biases[0] - mean.double() @ scaled
    weights[0] = scaled
    parameters = {}
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True), start=1):
        parameters[f"w{number}"] = np.ascontiguousarray(weight.float().numpy())
        parameters[f"b{number}"] = np.ascontiguousarray(bias.float().numpy())
    return parameters


def _network(spec: RampSpec, *, width: int, n_classes: int, generator: torch.Generator) -> nn.Sequential:
    sizes = [width, n_classes] if spec.head == "pooled-linear" else [width, spec.hidden, n_classes]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.utils.skip_init(nn.Linear, fan_in, fan_out)  # the default start would draw from the global generator
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -(fan_in**-0.5), fan_in**-0.5, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _fit(
    net: nn.Sequential,
    kind: HeadKind,
    training: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    *,
    generator: torch.Generator,
) -> None:
    """AdamW under a one-cycle schedule; the network ends with the weights of its best epoch."""
    x, targets = training
    batch, epochs = _schedule(len(x))
    steps = max(1, len(x) // batch)
    rate = LEARNING_RATE[kind]
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=WEIGHT_DECAY[kind], fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, rate, total_steps=steps * epochs + 1, pct_start=WARM_UP_SHARE
    )
    best, best_epoch, kept = float("inf"), 0, [p.detach().clone() for p in net.parameters()]
    for epoch in range(epochs):
        net.train()
        order = torch.randperm(len(x), generator=generator)
        for step in range(steps):
            rows = order[step * batch : (step + 1) * batch]
            loss = nn.functional.cross_entropy(net(x[rows]), targets[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        with torch.inference_mode():
            held_out_loss = float(nn.functional.cross_entropy(net(validation[0]), validation[1]))
        if held_out_loss < best:
            best, best_epoch, kept = held_out_loss, epoch, [p.detach().clone() for p in net.parameters()]
        elif epoch - best_epoch > PATIENCE_SHARE * epochs:
            break
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), kept, strict=True):
            parameter.copy_(value)


def _schedule(rows: int) -> tuple[int, int]:
    """Batch size and epochs: about 400 steps, and at least a dozen passes over large sets, at most 60 over small ones."""
    batch = 256 if rows >= 4_000 else 64
    return batch, min(60, max(12, round(AIMED_STEPS * batch / rows)))
