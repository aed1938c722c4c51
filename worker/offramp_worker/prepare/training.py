"""Training heads on pooled features, the backbone frozen, the model's own answers as soft targets.

Standardisation of the inputs is part of training only: afterwards it is folded into the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        The same seed, inputs and threads give the same bytes.
    threads : int
        CPU threads of PyTorch.
    advance : callable
        Told 1 after each head.

    Returns
    -------
    dict
        Ramp id -> ``w1``, ``b1`` (and ``w2``, ``b2``), float32, weights [in, out].
    """
    targets, held_out = (torch.from_numpy(probabilities(part.logits)) for part in (training, validation))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    trained: dict[str, Parameters] = {}
    try:
        for spec in ramps:
            x, v = (torch.from_numpy(part.pooled[spec.id]) for part in (training, validation))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed * 1_000 + 2 * spec.position + (spec.head == "grid-mlp"))
                trained[spec.id] = _train_one(spec, x, targets, v, held_out)
            advance(1)
    finally:
        torch.set_num_threads(before)
    return trained


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


def _train_one(spec: RampSpec, x: Tensor, targets: Tensor, v: Tensor, held_out: Tensor) -> Parameters:
    mean, deviation = x.mean(0), x.std(0) + MIN_DEVIATION
    x, v = (x - mean) / deviation, (v - mean) / deviation
    net = _network(spec, width=x.shape[1], n_classes=targets.shape[1])
    _fit(net, spec.head, x, targets, validation=(v, held_out))
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


def _network(spec: RampSpec, *, width: int, n_classes: int) -> nn.Sequential:
    if spec.head == "pooled-linear":
        return nn.Sequential(nn.Linear(width, n_classes))
    return nn.Sequential(nn.Linear(width, spec.hidden), nn.ReLU(), nn.Linear(spec.hidden, n_classes))


def _fit(net: nn.Sequential, kind: HeadKind, x: Tensor, targets: Tensor, *, validation: tuple[Tensor, Tensor]) -> None:
    """AdamW under a one-cycle schedule; the network ends with the weights of its best epoch."""
    batch, epochs = _schedule(len(x))
    steps = max(1, len(x) // batch)
    rate = LEARNING_RATE[kind]
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=WEIGHT_DECAY[kind])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, rate, total_steps=steps * epochs + 1, pct_start=WARM_UP_SHARE
    )
    best, best_epoch, kept = float("inf"), 0, [p.detach().clone() for p in net.parameters()]
    for epoch in range(epochs):
        net.train()
        order = torch.randperm(len(x))
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
    """Batch size and epochs: small sets need more passes, large ones have enough steps in a dozen."""
    if rows >= 9_000:
        return 256, 12
    return (128, 25) if rows >= 2_000 else (64, 50)
