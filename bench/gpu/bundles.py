"""A bundle of a model to measure: cut, priced and scored by the product's own parts, with heads of random weights.

Training heads would take longer than everything that is measured, and what a head costs does not depend on what it
knows. Thresholds are quantiles of what each head says of the recorded rows, so any share of rows can be made to leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.models import FloatArray, Subject
from offramp_core.bundle import RampSpec, TensorSpec
from offramp_core.uncertainty import quantile_table, raw_score, uncertainty
from offramp_worker.bundle.graph import tapped_model
from offramp_worker.bundle.heads import HeadNodes, parameter_shapes
from offramp_worker.devices import Device, open_session
from offramp_worker.prepare.heads.features import heads_of
from offramp_worker.prepare.heads.fitting import candidate_rungs
from offramp_worker.prepare.measuring.profiling import measure, profile_of
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.prepare.writing import BundleContents, write_bundle

RECORDS, SAMPLES, PROBE_ROWS, CHUNK = 256, 2, 4, 32
HEAD_SCALE = 4.0


def make_bundle(subject: Subject, folder: Path, *, device: Device, batch_sizes: Sequence[int], seconds: float) -> Path:
    """Write a bundle with a linear head at every place; its folder.

    ``seconds`` are spent on the profile, about.
    """
    folder.mkdir(parents=True, exist_ok=True)
    x = subject.inputs(RECORDS)
    image, logits_spec = TensorSpec("x", "FP32", x.shape[1:]), TensorSpec("logits", "FP32", (subject.classes,))
    found = find_places(Backbone(subject.model, subject.name, image, logits_spec), x[:SAMPLES])
    backbone, places = found.backbone, [place for place in found.places if place.tensor in subject.places]
    # Of a map the pooled head: one that reads a grid would have as many weights as the network.
    linear = {ramp.position: ramp for ramp in reversed(candidate_rungs(places, entry=None, exits={}).linear)}
    ramps = tuple(linear[place.position] for place in places)
    rng = np.random.default_rng(5)
    tensors = {ramp.id: _drawn(ramp, subject.classes, rng) for ramp in ramps}
    heads = heads_of(ramps, places, tensors=tensors, task=backbone.task)
    measured = measure(
        backbone, places, heads, x, threads=1, seconds=seconds, batch_sizes=batch_sizes, device=device,
        advance=lambda _: None,
    )  # fmt: skip
    ramps = tuple(replace(ramp, depth=round(measured.depth(ramp.position), 6)) for ramp in ramps)
    logits, said = _scored(backbone, heads, x, device)
    tables, records = _records(said, logits)
    contents = BundleContents(
        name=subject.name,
        source="bench.gpu",
        backbone=backbone,
        ramps=ramps,
        precisions=(),
        graphs={},
        parameters=tensors,
        quantiles={ramp.id: table for ramp, table in zip(ramps, tables, strict=True)},
        profile=profile_of(ramps, measured),
        records=records,
        probe=(x[:PROBE_ROWS], logits[:PROBE_ROWS]),
        data={},
    )
    write_bundle(folder / "bundle", contents)
    return folder / "bundle"


def _drawn(ramp: RampSpec, classes: int, rng: np.random.Generator) -> dict[str, FloatArray]:
    shapes = parameter_shapes(ramp, n_classes=classes)
    return {
        name: (rng.normal(size=shape) * (HEAD_SCALE * shape[0] ** -0.5 if len(shape) > 1 else 0.0)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _records(
    said: Sequence[FloatArray], logits: FloatArray
) -> tuple[list[npt.NDArray[np.float64]], dict[str, npt.NDArray[Any]]]:
    """A table of quantiles for each head, and the arrays of a records file."""
    tables = [quantile_table(raw_score(values)) for values in said]
    return tables, {
        "uncertainty": np.stack([uncertainty(v, table) for v, table in zip(said, tables, strict=True)], axis=1),
        "prediction": np.stack([values.argmax(axis=1) for values in said], axis=1).astype(np.int32),
        "final": logits.argmax(axis=1).astype(np.int32),
    }


def _scored(
    backbone: Backbone, heads: Sequence[HeadNodes], x: FloatArray, device: Device
) -> tuple[FloatArray, list[FloatArray]]:
    session = open_session(tapped_model(backbone.model, heads), threads=1, device=device)
    parts = [session.run(None, {backbone.input.name: x[at : at + CHUNK]}) for at in range(0, len(x), CHUNK)]
    logits, *said = (np.concatenate(column) for column in zip(*parts, strict=True))
    return logits, list(said)
