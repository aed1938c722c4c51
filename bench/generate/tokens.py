"""Scores of single tokens at trained exits, as a records file: ``offramp replay`` judges the rules of papers on it.

Exits are those of :mod:`bench.generate.exits`: an affine map and a small network before a head of the most used words.
Recorded along the model's own greedy answers to prompts that nothing was fitted to; how unsure an exit is, is 1 less
the difference of its two best probabilities (CALM's "softmax response"). Seconds are arithmetic on a measured pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.generate.exits import WIDTH, Head, Texts, decoders, depths_of, most_used, texts_of, train
from offramp_lab.tokens.command import Draws, replay_tokens, tokens_to_mapping
from offramp_lab.tokens.judged import Limits
from offramp_lab.tokens.records import LOSSES
from offramp_worker.generate.llama.architecture import matrices
from offramp_worker.prepare.generation.checkpoint import Checkpoint
from offramp_worker.prepare.generation.measuring import FloatArray, seconds_at_once

BUDGETS = (0.01, 0.05, 0.10)


def recorded_tokens(
    checkpoint: Checkpoint,
    fitted: Sequence[str],
    held_out: Sequence[str],
    *,
    tokens: int,
    minutes: float,
    tick: Callable[[str], None],
) -> dict[str, Any]:
    """Arrays of a records file of tokens."""
    depths = depths_of(checkpoint)
    plain, tapped = decoders(checkpoint)
    learnt = texts_of(checkpoint, plain, tapped, fitted, depths, tokens=tokens, tick=tick)
    unseen = texts_of(checkpoint, plain, tapped, held_out, depths, tokens=tokens, tick=tick)
    one = seconds_at_once({"fp32": plain}, start=128, token=5)["fp32"]["1"]
    kept = most_used(learnt, checkpoint.architecture.vocabulary)
    matrix = torch.from_numpy(np.ascontiguousarray(checkpoint.matrices["head"]))[kept]
    unsure, said = [], []
    for depth in depths:
        head = Head(learnt.before[depth], learnt.last, matrix)
        train(head, learnt, depth, minutes=minutes / len(depths))
        scores, words = _scores(head, unseen, depth)
        unsure.append(scores)
        said.append(kept[words].numpy())
        tick(f"head before layer {depth}")
    return {
        "uncertainty": np.column_stack(unsure).astype(np.float32),
        "prediction": np.column_stack(said),
        "final": unseen.token[unseen.answers].numpy(),
        "answer": unseen.answer.numpy(),
        **_seconds(checkpoint, depths, one, words=len(kept)),
    }


def judged_tokens(file: Path, *, draws: int) -> list[dict[str, Any]]:
    """What every rule saves and loses at a few budgets."""
    found = []
    for loss in LOSSES:
        for budget in BUDGETS:
            limits = Limits(budget, 0.95)
            found.append(tokens_to_mapping(replay_tokens(file, None, loss, limits, Draws(draws, None, 1)), limits))
    return found


@torch.no_grad()
def _scores(head: Head, texts: Texts, depth: int) -> tuple[FloatArray, torch.Tensor]:
    best = head(texts.before[depth][texts.answers]).softmax(dim=1).topk(2, dim=1)
    response = best.values[:, 0] - best.values[:, 1]
    scores: FloatArray = (1 - response).clamp(0, 1).numpy()
    return scores, best.indices[:, 0]


def _seconds(checkpoint: Checkpoint, depths: Sequence[int], one: float, *, words: int) -> dict[str, FloatArray]:
    """Seconds between exits and of exits: a pass takes what it reads."""
    a = checkpoint.architecture
    sizes = {name: n * k for name, n, k in matrices(a)}
    total, own = sum(sizes.values()), a.hidden * a.hidden + 2 * WIDTH * a.hidden + words * a.hidden
    layers = one * (1 - sizes["head"] / total)
    between = layers * np.diff([0, *depths, a.layers]) / a.layers
    between[-1] += one * sizes["head"] / total
    return {"segment_seconds": between, "ramp_seconds": np.full(len(depths), one * own / total)}
