"""``offramp prepare --refresh``: the heads of a bundle trained again on recent inputs.

The backbone, the places, the kinds of heads and what they cost stay; labels are the model's own answers, so the inputs
are all it takes. The result is a new ramp set on the same backbone, with quantile tables and records of the new inputs:
a canary, not a model rollout. A head that the new rows do not improve is kept as it was, and so are heads with
convolutions where PyTorch is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import safetensors.numpy

from offramp_core.bundle import (
    RAMPS_FILE,
    TOKENIZER_FILE,
    BatchProfile,
    Manifest,
    Profile,
    RampSpec,
    profile_arrays,
    side_model_file,
)
from offramp_core.columns import final_id
from offramp_core.errors import InvalidArgumentError
from offramp_core.precision import EXACT
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.bundle.heads import KINDS, parameter_shapes
from offramp_worker.bundle.load import NUMPY_TYPES, Bundle, load_bundle
from offramp_worker.devices import open_session
from offramp_worker.prepare.heads.features import heads_of, tapped_logits
from offramp_worker.prepare.heads.fitting import Fitted, Workshop, calibrated, fit_convolutions, fit_given, fit_growing
from offramp_worker.prepare.heads.objectives import Objective, objective_of, targets_of
from offramp_worker.prepare.heads.recipes import Parameters
from offramp_worker.prepare.heads.selection import CandidateVerdict, RampCost, RampMerit, merit
from offramp_worker.prepare.heads.trainer import HAS_TORCH
from offramp_worker.prepare.measuring.outlook import Outlook, outlooks
from offramp_worker.prepare.pipeline import (
    PrepareRequest,
    check_request,
    provenance,
    read_inputs,
    recorded_scores,
    score_table,
    training_threads,
)
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.progress import Advance, Reporter
from offramp_worker.prepare.report import PrepareReport, RampLine, write_report
from offramp_worker.prepare.source.data import FloatArray, HeadSplit, InputArray
from offramp_worker.prepare.source.preprocessing import ImageReader
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.prepare.source.task import found_scale
from offramp_worker.prepare.writing import write_refreshed

Logits = dict[str, FloatArray]


def refresh_bundle(request: PrepareRequest, reporter: Reporter, *, written_report: bool = True) -> PrepareReport:
    """Train the heads of the bundle in folder ``request.model`` again and write a new bundle.

    ``request.data`` are recent inputs, oldest first; a first share of them trains heads and the rest become records, as
    in :func:`offramp_worker.prepare.pipeline.prepare_bundle`. ``request.out`` may be the bundle itself. Without
    ``written_report`` the report for people is not put beside it.

    Raises
    ------
    InvalidBundleError
        The bundle is damaged.
    InvalidArgumentError
        The data do not fit the bundle's model, or the request is at fault.
    """
    start = time.perf_counter()
    check_request(request)
    bundle = load_bundle(Path(request.model))
    inputs = read_inputs(*as_sent(request, bundle))
    if inputs.x.dtype.kind == bundle.input_dtype.kind:
        inputs = inputs.fitted(bundle.manifest.inputs[0])
    check_fits(inputs.x, bundle.manifest, request.data)
    refreshing = _Refreshing(bundle, request, reporter, inputs.x, inputs.extra)
    split, fitted = refreshing.train()
    report = refreshing.finish(split, fitted, provenance(request, split, inputs), start=start)
    if written_report:
        write_report(report)
    return report


def as_sent(request: PrepareRequest, bundle: Bundle) -> tuple[PrepareRequest, ImageReader | None]:
    """Where clients send images or texts, the data may be such: what reads them is in the bundle."""
    steps, spec = bundle.manifest.preprocess, bundle.manifest.inputs[0]
    if steps is None:
        return request, None
    if steps.text is not None:
        file = request.tokenizer or str(bundle.path / TOKENIZER_FILE)
        return replace(request, tokenizer=file, max_tokens=steps.text.tokens, pad=spec.pad), None
    assert steps.image is not None
    return request, ImageReader(steps.image, None)


def cost_in_profile(profile: Profile, column: int) -> RampCost:
    """What a column of the fp32 chain costs as the bundle's profile has it."""

    def depth(batch: BatchProfile) -> float:
        return min(1.0, sum(batch.segment_seconds[: column + 1]) / batch.exact_seconds)

    return RampCost(
        {b.batch_size: b.ramp_seconds[column] / b.exact_seconds for b in profile.batches},
        {b.batch_size: depth(b) for b in profile.batches},
    )


class _Refreshing:
    """One refresh: the bundle, the rows, and the parts both sides of it need."""

    def __init__(
        self, bundle: Bundle, request: PrepareRequest, reporter: Reporter, x: InputArray, extra: InputArray
    ) -> None:
        manifest = self._manifest = bundle.manifest
        self._bundle, self._request, self._reporter = bundle, request, reporter
        tensors = safetensors.numpy.load_file(bundle.path / RAMPS_FILE)
        self._heads = tuple(ramp for ramp in manifest.ramps if ramp.head in KINDS)
        self._own = tuple(ramp for ramp in self._heads if manifest.precision_of(ramp) in ("", EXACT))
        self._earlier = {ramp.id: _parameters(ramp, tensors, bundle.task.head_width) for ramp in self._own}
        _check_shared(self._heads, self._earlier, manifest)
        places = {r.position: Place(r.position, r.tensor, tuple(bundle.shapes[r.tensor])) for r in self._own}
        backbone = Backbone(
            bundle.backbone,
            manifest.name,
            manifest.inputs[0],
            manifest.outputs[0],
            scale=manifest.scale or found_scale(bundle.probe_logits),
            declared=manifest.task,
        )
        self._shop = Workshop(
            backbone, tuple(places.values()), x, extra, request.variations, request.seed, training_threads(), reporter
        )
        chain = [ramp for ramp in manifest.ramps if manifest.precision_of(ramp) in ("", EXACT)]
        self._costs = {ramp.id: cost_in_profile(bundle.profile, j) for j, ramp in enumerate(chain)}

    def train(self) -> tuple[HeadSplit, Fitted]:
        """New heads, and the earlier ones where they are better."""
        request, shop = self._request, self._shop
        pooled = tuple(ramp for ramp in self._own if not KINDS[ramp.head].convolutions)
        taught = fit_growing(
            shop,
            pooled,
            self._costs,
            lambda training, validation: fit_given(shop, pooled, training, validation),
            split=request.split,
            share=request.head_share,
        )
        convolutions = [ramp for ramp in self._own if ramp not in pooled] if HAS_TORCH else []
        taught = fit_convolutions(shop, convolutions, taught)
        return taught.split, self._better(taught.split, calibrated(taught.fitted, self._own))

    def finish(self, split: HeadSplit, fitted: Fitted, data: dict[str, Any], *, start: float) -> PrepareReport:
        """Score validation rows for the tables and unseen rows for the records, and write the bundle."""
        shop, bundle, request = self._shop, self._bundle, self._request
        unseen = shop.x[split.head :]
        with self._reporter.step("score the records", total=len(unseen)) as advance:
            reference, head_outputs = self._columns(fitted.parameters, unseen, advance)
        with self._reporter.step("score the earlier heads", total=len(unseen)) as advance:
            _, earlier = self._heads_at(bundle.backbone, self._own, self._earlier, unseen, advance)
        _, held_out = self._columns(fitted.parameters, shop.validation_rows(split), lambda _: None)
        tables = {column: score_table(bundle.task, logits) for column, logits in held_out.items()}
        records = {**_records(self._manifest, head_outputs, reference, tables), **profile_arrays(bundle.profile)}
        manifest = write_refreshed(
            bundle.path,
            request.out,
            self._manifest,
            tensors=_tensors(fitted.parameters, tables),
            records=records,
            data={**data, "refreshed_from": self._manifest.ramp_set_digest},
        )
        return PrepareReport(
            out=request.out,
            name=manifest.name,
            backbone_digest=manifest.backbone_digest,
            ramp_set_digest=manifest.ramp_set_digest,
            places=len(shop.places),
            cut_vertices=len(shop.places),
            lines=self._lines(head_outputs, earlier, reference),
            untrained=(),
            outlooks=self._outlooks(head_outputs, reference),
            outlooks_before=self._outlooks({**head_outputs, **earlier}, reference),
            data=manifest.data or {},
            exact_seconds={batch.batch_size: batch.exact_seconds for batch in bundle.profile.batches},
            threads=bundle.profile.threads,
            seconds=time.perf_counter() - start,
        )

    def _lines(self, head_outputs: Logits, earlier: Logits, reference: FloatArray) -> tuple[RampLine, ...]:
        task = self._bundle.task
        answers = task.answers(reference)

        def worth(spec: RampSpec, logits: Logits) -> RampMerit:
            return merit(task, logits[spec.id], answers, self._costs[spec.id])

        return tuple(
            RampLine(CandidateVerdict(spec, worth(spec, head_outputs)), "records", before=worth(spec, earlier))
            for spec in self._own
        )

    def _outlooks(self, head_outputs: Logits, reference: FloatArray) -> tuple[Outlook, ...]:
        """What plans of the fp32 chain could save; tables are made of the same rows, which moves no order and so no
        plan."""
        ids = [column.id for column in self._manifest.columns if column.precision in ("", EXACT)]
        task, mine = self._bundle.task, [head_outputs[ramp] for ramp in ids]
        scores = recorded_scores(task, mine, reference, [score_table(task, each) for each in mine])
        return outlooks({**scores, **profile_arrays(self._bundle.profile)}, ids)

    def _better(self, split: HeadSplit, fitted: Fitted) -> Fitted:
        """Per ramp the new head, or the earlier one where there is no other or its loss on the validation rows is
        lower."""
        shop = self._shop
        rows = shop.validation_rows(split)
        reference, earlier = self._heads_at(self._bundle.backbone, self._own, self._earlier, rows, lambda _: None)
        targets = targets_of(shop.task, shop.backbone.scale.to_logits(reference))
        loss = partial(_loss, objective_of(shop.task, targets), targets=targets)
        chosen = {
            spec.id: self._earlier[spec.id]
            if spec.id not in fitted.head_outputs or loss(earlier[spec.id]) < loss(fitted.head_outputs[spec.id])
            else fitted.parameters[spec.id]
            for spec in self._own
        }
        return replace(fitted, parameters=chosen)

    def _columns(
        self, parameters: Mapping[str, Parameters], x: InputArray, advance: Advance
    ) -> tuple[FloatArray, Logits]:
        """The reference's logits and those of every column of records: heads, side models, other precisions and their
        heads."""
        manifest, bundle = self._manifest, self._bundle
        reference, head_outputs = self._heads_at(bundle.backbone, self._own, parameters, x, advance)
        for spec in manifest.precisions:
            ramps = [ramp for ramp in self._heads if manifest.precision_of(ramp) == spec.name]
            shared = {ramp.id: parameters[_namesake(ramp)] for ramp in ramps}
            graph = onnx.load(str(bundle.path / spec.file), load_external_data=False)
            whole, heads = self._heads_at(graph, ramps, shared, x, lambda _: None)
            head_outputs |= {**heads, final_id(spec.name): whole}
        for ramp in manifest.ramps:
            if ramp.head == "model":
                head_outputs[ramp.id] = _answers(
                    onnx.load(str(bundle.path / side_model_file(ramp.id)), load_external_data=False), x
                )
        return reference, head_outputs

    def _heads_at(
        self,
        graph: onnx.ModelProto,
        ramps: Sequence[RampSpec],
        parameters: Mapping[str, Parameters],
        x: InputArray,
        advance: Advance,
    ) -> tuple[FloatArray, Logits]:
        shop = self._shop
        whole = replace(shop.backbone, model=graph, output=replace(shop.backbone.output, name=output_name(graph)))
        nodes = heads_of(ramps, shop.places, tensors=parameters, task=shop.task)
        logits, head_outputs = tapped_logits(whole, nodes, x, threads=shop.threads, advance=advance)
        return logits, {ramp.id: each for ramp, each in zip(ramps, head_outputs, strict=True)}


def check_fits(x: InputArray, manifest: Manifest, source: str) -> None:
    spec = manifest.inputs[0]
    if not spec.fits(x.shape[1:]) or x.dtype != NUMPY_TYPES[spec.datatype]:
        raise InvalidArgumentError(
            f"data {source} has rows of {x.dtype} {list(x.shape[1:])}; the bundle's model {manifest.name} takes "
            f"{spec.datatype} {list(spec.shape)}: give inputs of this model"
        )


def _check_shared(heads: Sequence[RampSpec], own: Mapping[str, object], manifest: Manifest) -> None:
    for ramp in heads:
        if ramp.id not in own and _namesake(ramp) not in own:
            raise InvalidArgumentError(
                f"ramp {ramp.id} of precision {manifest.precision_of(ramp)} shares its weights with no fp32 ramp, so "
                "that it cannot "
                "be refreshed; prepare the model again"
            )


def _namesake(ramp: RampSpec) -> str:
    """The fp32 ramp whose weights a ramp of another precision uses."""
    return ramp.id.partition("/")[2] or ramp.id


def _parameters(ramp: RampSpec, tensors: Mapping[str, npt.NDArray[Any]], n_classes: int) -> Parameters:
    return {name: tensors[f"{ramp.id}/{name}"] for name in parameter_shapes(ramp, n_classes=n_classes)}


def _answers(model: onnx.ModelProto, x: InputArray) -> FloatArray:
    session, name = open_session(model, threads=training_threads()), input_name(model)
    return np.concatenate([session.run(None, {name: chunk})[0] for chunk in _chunks(x)])


def _chunks(x: InputArray, rows: int = 64) -> Iterator[InputArray]:
    yield from (x[start : start + rows] for start in range(0, len(x), rows))


def _loss(objective: Objective, outputs: FloatArray, *, targets: FloatArray) -> float:
    """On average; infinite for a head that says nothing finite."""
    losses = objective.losses(outputs, targets)
    return float(losses.mean()) if np.isfinite(losses).all() else float("inf")


def _records(
    manifest: Manifest, head_outputs: Logits, reference: FloatArray, tables: Mapping[str, npt.NDArray[np.float64]]
) -> dict[str, npt.NDArray[Any]]:
    columns = manifest.columns
    ids = [column.id for column in columns]
    return {
        "ramp_id": np.array([column.id for column in columns], dtype=np.str_),
        "ramp_precision": np.array([column.precision for column in columns], dtype=np.str_),
        **recorded_scores(manifest.does, [head_outputs[i] for i in ids], reference, [tables[i] for i in ids]),
    }


def _tensors(
    parameters: Mapping[str, Parameters], tables: Mapping[str, npt.NDArray[np.float64]]
) -> dict[str, npt.NDArray[Any]]:
    heads = {f"{ramp}/{name}": value for ramp, own in parameters.items() for name, value in own.items()}
    return heads | {f"{column}/quantiles": table for column, table in tables.items()}
