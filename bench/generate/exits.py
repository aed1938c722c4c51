"""Exit drafts: the first k layers with a trained adapter and a head of few words write ahead, the rest verifies.

Heads learn from the model's own texts: prompts, and the greedy answers that it writes to them; no labels. Each is an
affine map from the state before layer k to the state before the model's own head, found by ridge regression, and a
small network beside it, trained on the divergence from the model's own distribution over the words that it uses most
(self-distillation, as in LayerSkip, Elhoushi et al. 2024, and Kangaroo, Liu et al. 2024). Acceptance is counted on
answers to prompts that nothing was fitted to.

Time per token is arithmetic on measured passes. Layers 0..k run once for every drafted token and share their keys and
values with the verification, which runs layers k..L for all of them in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from offramp_worker.generate.llama.architecture import matrices
from offramp_worker.generate.llama.decoder import Cache, Decoder
from offramp_worker.prepare.generation.checkpoint import Checkpoint
from offramp_worker.prepare.generation.measuring import FloatArray, seconds_at_once
from offramp_worker.prepare.generation.writing import EXACT, open_variant, variant_tensors

WORDS = 8192  # of the head that drafts
WIDTH = 512  # of the network beside the affine map
BATCH = 256
DRAFT_TOKENS = range(1, 7)
RIDGE = 1e-2


@dataclass(frozen=True)
class Texts:
    """States and the model's own next token at every place; ``answers`` are places behind which it wrote itself,
    ``answer`` which of the answers each belongs to."""

    before: dict[int, torch.Tensor]
    last: torch.Tensor
    token: torch.Tensor
    answers: torch.Tensor
    answer: torch.Tensor


class Head(nn.Module):
    """From the state before layer k to the logits of the most used words."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, words: torch.Tensor) -> None:
        super().__init__()
        with_one = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        gram = with_one.T @ with_one
        gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
        solved = torch.linalg.solve(gram, with_one.T @ y)
        self.affine = nn.Linear(x.shape[1], y.shape[1])
        self.affine.weight.data, self.affine.bias.data = solved[:-1].T.contiguous(), solved[-1]
        self.beside = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.SiLU(), nn.Linear(WIDTH, y.shape[1]))
        nn.init.zeros_(self.beside[2].weight)
        nn.init.zeros_(self.beside[2].bias)
        self.register_buffer("words", words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.affine(x) + self.beside(x)) @ self.words.T


def exit_drafts(
    checkpoint: Checkpoint,
    train: Sequence[str],
    held_out: Sequence[str],
    *,
    tokens: int,
    minutes: float,
    tick: Callable[[str], None],
) -> dict[str, Any]:
    """Every exit of a few depths, trained for ``minutes`` in all: acceptance and time per token."""
    a = checkpoint.architecture
    depths = depths_of(checkpoint)
    plain, tapped = decoders(checkpoint)
    began = time.perf_counter()
    learnt = texts_of(checkpoint, plain, tapped, train, depths, tokens=tokens, tick=tick)
    gathered = time.perf_counter() - began
    unseen = texts_of(checkpoint, plain, tapped, held_out, depths, tokens=tokens, tick=tick)
    passes = {int(n): s for n, s in seconds_at_once({"fp32": plain}, start=128, token=5)["fp32"].items()}
    kept = most_used(learnt, a.vocabulary)
    matrix = torch.from_numpy(np.ascontiguousarray(checkpoint.matrices["head"]))[kept]
    rows = []
    for depth in depths:
        head = Head(learnt.before[depth], learnt.last, matrix)
        affine = _acceptance(head, unseen, depth, kept)
        seconds = train(head, learnt, depth, minutes=minutes / len(depths))
        acceptance = _acceptance(head, unseen, depth, kept)
        ratio, drafted = _time(checkpoint, depth, acceptance, passes, words=len(kept))
        rows.append(
            {
                "layers": depth,
                "affine": affine,
                "acceptance": acceptance,
                "ratio": ratio,
                "draft_tokens": drafted,
                "train_seconds": seconds,
            }
        )
        tick(f"head before layer {depth}")
    return {
        "layers": a.layers,
        "words": len(kept),
        "places": len(learnt.token),
        "gather_seconds": gathered,
        "unseen_tokens": len(unseen.answers),
        "passes": passes,
        "rows": rows,
    }


def depths_of(checkpoint: Checkpoint) -> list[int]:
    """The layers before which exits are tried."""
    layers = checkpoint.architecture.layers
    return sorted({max(1, round(layers * share)) for share in (0.2, 0.35, 0.5, 0.65, 0.8)})


def decoders(checkpoint: Checkpoint) -> tuple[Decoder, Decoder]:
    """The model as it writes, and one that also gives the states between its layers."""
    tensors = variant_tensors(checkpoint, EXACT)
    plain, tapped = (open_variant(checkpoint, EXACT, tensors, threads=1, taps=taps) for taps in (False, True))
    return plain, tapped


def most_used(texts: Texts, vocabulary: int) -> torch.Tensor:
    """The words that the model writes most."""
    counted = torch.bincount(texts.token, minlength=vocabulary)
    return torch.argsort(counted, descending=True, stable=True)[: min(WORDS, vocabulary)]


def texts_of(
    checkpoint: Checkpoint,
    plain: Decoder,
    tapped: Decoder,
    prompts: Sequence[str],
    depths: Sequence[int],
    *,
    tokens: int,
    tick: Callable[[str], None],
) -> Texts:
    """Prompts with the greedy answers that the model writes to them."""
    before: dict[int, list[FloatArray]] = {depth: [] for depth in depths}
    last, token, n = list[FloatArray](), list[FloatArray](), 0
    answers, answer = list[int](), list[int]()
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer)
    for number, prompt in enumerate(prompts):
        ids = [*checkpoint.begin_tokens, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        cache = Cache.of(checkpoint.architecture, len(ids) + tokens)
        written = [int(plain.run(cache, ids, start=0, rows=[len(ids) - 1]).argmax())]
        while len(written) < tokens and written[-1] not in checkpoint.end_tokens:
            start = len(ids) + len(written) - 1
            written.append(int(plain.run(cache, written[-1:], start=start, rows=[0]).argmax()))
        text = [*ids, *written[:-1]]
        whole = Cache.of(checkpoint.architecture, len(text))
        logits = tapped.run(whole, text, start=0, rows=range(len(text)))
        read = whole.binding(tapped).tapped()
        for depth in depths:
            name = f"layers.{depth}.norm1/y" if depth < checkpoint.architecture.layers else "last_hidden"
            before[depth].append(read[name].copy())
        last.append(read["last_hidden"].copy())
        token.append(logits.argmax(axis=1))
        answers += range(n + len(ids) - 1, n + len(text))
        answer += [number] * len(written)
        n += len(text)
        tick("texts")
    return Texts(
        {depth: torch.from_numpy(np.concatenate(parts)) for depth, parts in before.items()},
        torch.from_numpy(np.concatenate(last)),
        torch.from_numpy(np.concatenate(token)),
        torch.tensor(answers),
        torch.tensor(answer),
    )


def train(head: Head, texts: Texts, depth: int, *, minutes: float) -> float:
    """Train the network of a head; returns the seconds that it took."""
    torch.manual_seed(0)
    x, began = texts.before[depth], time.perf_counter()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=1e-2)
    while (spent := time.perf_counter() - began) < 60 * minutes:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - spent / (60 * minutes))
        rows = torch.randint(len(x), (BATCH,))
        with torch.no_grad():
            wanted = (texts.last[rows] @ head.words.T).softmax(dim=1)
        loss = nn.functional.cross_entropy(head(x[rows]), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - began


@torch.no_grad()
def _acceptance(head: Head, texts: Texts, depth: int, kept: torch.Tensor) -> float:
    at = texts.answers
    drafted = kept[head(texts.before[depth][at]).argmax(dim=1)]
    return float((drafted == texts.token[at]).float().mean())


def _time(
    checkpoint: Checkpoint, depth: int, acceptance: float, passes: dict[int, float], *, words: int
) -> tuple[float, int]:
    """Seconds per token over fp32's, and the number of drafted tokens at which they are least."""
    a, one = checkpoint.architecture, passes[1]
    sizes = {name: n * k for name, n, k in matrices(a)}
    total, own = sum(sizes.values()), a.hidden * a.hidden + 2 * WIDTH * a.hidden + words * a.hidden
    head_share, below = sizes["head"] / total, depth / a.layers

    def at(rows: int) -> float:
        return float(np.interp(rows, sorted(passes), [passes[n] for n in sorted(passes)]))

    found = []
    for drafted in DRAFT_TOKENS:
        first = (1 - head_share) * below * one
        rest = ((1 - head_share) * (1 - below) + head_share) * at(drafted + 1)
        spent = (drafted + 1) * first + drafted * own / total * one + rest
        tokens = sum(acceptance**i for i in range(drafted + 1))
        found.append((spent / tokens / one, drafted))
    return min(found)
