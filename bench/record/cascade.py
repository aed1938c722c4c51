"""ResNet-20 in front of ResNet-56: the static smaller model as a ramp at the input, before the ramps of
``resnet56-mx4``.

ResNet-20 was trained end to end on the images that ResNet-56 was trained on; it has learned nothing from the pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.record.cifar import Images, load_rows, model_uri
from bench.record.costs import HOW, Costs
from bench.record.network import running_macs
from bench.record.scores import FloatArray, LabelArray, Ramp, judged, record_arrays
from bench.record.store import COST_ARRAYS, RecordSet
from offramp_core.bundle import RampSpec
from offramp_worker.devices import open_session
from offramp_worker.prepare.measuring.profiling import Job, time_jobs
from offramp_worker.prepare.progress import Advance, Reporter
from offramp_worker.prepare.source.sources import Backbone, load_backbone

NAME = "resnet56-cascade"
SMALL, LARGE = 20, 56
PROFILE_SECONDS = 30.0
CHUNK_ROWS = 64


def record_cascade(reporter: Reporter, *, seed: int, mx4: RecordSet) -> RecordSet:
    """Scores of ResNet-20 beside those of ``resnet56-mx4``: same pool, same order."""
    start = time.perf_counter()
    images = load_rows(seed=seed)
    small, large = _backbones(images, reporter)
    with reporter.step("ResNet-20's answers", total=1) as advance:
        ramp = Ramp(_input_ramp(small), _answers(small, images.rows.pool), _answers(small, images.rows.validation))
        advance(1)
    own = record_arrays([ramp], _one_hot(mx4.arrays["reference"]))
    arrays = {name: value for name, value in mx4.arrays.items() if name not in COST_ARRAYS}
    for name in ("uncertainty", "one_minus_max", "prediction"):
        arrays[name] = np.concatenate([own[name], arrays[name]], axis=1)
    at_input = {
        "id": ramp.spec.id,
        "place": 0,
        "macs_depth": 0.0,
        "macs_cost": round(_total_macs(small, images.rows.pool) / _total_macs(large, images.rows.pool), 5),
        **judged(ramp.pool, mx4.arrays["reference"]),
    }
    facts = {
        **mx4.facts,
        "model": f"ResNet-{LARGE}, CIFAR-10, with ResNet-{SMALL} as a ramp at the input",
        "head": f"the whole of ResNet-{SMALL}, then {mx4.facts['head']}",
        "ramps": [at_input, *mx4.facts["ramps"]],
        "seconds": round(time.perf_counter() - start, 1),
    }
    return RecordSet(NAME, arrays, facts)


def cascade_costs(reporter: Reporter, *, seed: int, mx4: RecordSet) -> dict[str, Costs]:
    """Costs of ``resnet56-mx4`` with ResNet-20 before them, priced by its share of ResNet-56's time."""
    images = load_rows(seed=seed)
    sessions = [open_session(backbone.model, threads=1) for backbone in _backbones(images, reporter)]
    sizes = [int(size) for size in mx4.arrays["batch_size"]]
    with reporter.step("measure the costs", total=len(sizes)) as advance:
        shares = _time_shares(sessions, images.rows.pool, sizes, advance=advance)
    total = mx4.arrays["segment_seconds"].sum(axis=1)
    arrays = {
        **{name: mx4.arrays[name] for name in COST_ARRAYS},
        "segment_seconds": np.concatenate([np.zeros((len(total), 1)), mx4.arrays["segment_seconds"]], axis=1),
        "ramp_seconds": np.concatenate([(shares * total)[:, None], mx4.arrays["ramp_seconds"]], axis=1),
    }
    ramps = ({"depth": 0.0, "cost": round(float(shares[0]), 5)}, *mx4.facts["ramps"])
    how = (
        f"{HOW} ResNet-{SMALL} is its share of ResNet-{LARGE}'s time, both timed in interleaved rounds, times the "
        "sum of the segments."
    )
    return {NAME: Costs(arrays, tuple({name: ramp[name] for name in ("depth", "cost")} for ramp in ramps), how)}


def _backbones(images: Images, reporter: Reporter) -> tuple[Backbone, Backbone]:
    with TemporaryDirectory() as folder, reporter.step("export the models", total=2) as advance:
        small = load_backbone(model_uri(Path(folder), SMALL), images.rows.pool)
        advance(1)
        large = load_backbone(model_uri(Path(folder), LARGE), images.rows.pool)
        advance(1)
    return small, large


def _answers(model: Backbone, x: FloatArray) -> FloatArray:
    session = open_session(model.model, threads=1)
    chunks = [x[start : start + CHUNK_ROWS] for start in range(0, len(x), CHUNK_ROWS)]
    return np.concatenate([session.run(None, {model.input.name: chunk})[0] for chunk in chunks])


def _input_ramp(small: Backbone) -> RampSpec:
    """The spec has no word for a whole network; what is recorded is its answers, whatever the head kind says."""
    return RampSpec(
        id=f"r00-resnet{SMALL}",
        tensor=small.input.name,
        position=0,
        depth=0.0,
        head="pooled-linear",
        channels=small.input.shape[0],
    )


def _total_macs(backbone: Backbone, x: FloatArray) -> int:
    return running_macs(backbone, x)[backbone.output.name]


def _one_hot(answers: LabelArray) -> FloatArray:
    return np.eye(int(answers.max()) + 1, dtype=np.float32)[answers]


def _time_shares(sessions: Sequence[Any], x: FloatArray, sizes: Sequence[int], *, advance: Advance) -> FloatArray:
    """Time of the first session over the second's, by batch size."""

    def job(session: Any, rows: FloatArray) -> Job:
        feed = {session.get_inputs()[0].name: rows}
        return Job(lambda: session.run(None, feed))

    shares = []
    for size in sizes:
        jobs = {name: job(session, x[:size]) for name, session in zip(("small", "large"), sessions, strict=True)}
        medians = time_jobs(jobs, threads=1, seconds=PROFILE_SECONDS / len(sizes))
        shares.append(medians["small"] / medians["large"])
        advance(1)
    return np.array(shares)
