"""``offramp prepare`` from model and data to an exit bundle, step by step."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import RampSpec, TensorSpec, profile_arrays
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_core.task import Task, TaskSpec
from offramp_core.uncertainty import quantile_table, uncertainty
from offramp_worker.bundle.lengths import pad_rows
from offramp_worker.devices import CPU, DEVICES, Device, missing
from offramp_worker.prepare.heads.features import blank_heads, tapped_logits
from offramp_worker.prepare.heads.fitting import (
    DEFAULT_HEAD_SHARE,
    Rungs,
    Taught,
    Workshop,
    calibrated,
    candidate_rungs,
    choose_convolutions,
    fit_convolutions,
    fit_growing,
    fit_pooled,
)
from offramp_worker.prepare.heads.recipes import Parameters
from offramp_worker.prepare.heads.selection import CandidateVerdict, RampCost, RampMerit, cost_of, merit, select_ramps
from offramp_worker.prepare.measuring.executors import COMPILE_LIMIT, ORT, ORT_FP32, Executors, compare_executors
from offramp_worker.prepare.measuring.outlook import outlooks
from offramp_worker.prepare.measuring.profiling import BATCH_SIZES, Measurements, measure
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.places.places import FoundPlaces, find_places
from offramp_worker.prepare.precision.precisions import (
    Allowed,
    Approximations,
    Chain,
    VariantWork,
    Work,
    approximate,
    merits,
)
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.report import PrepareReport, RampLine, approximation_lines, write_report
from offramp_worker.prepare.source.data import (
    FloatArray,
    HeadSplit,
    InputArray,
    SplitName,
    content_digest,
    load_inputs,
    plan_split,
    remove_repeats,
    with_one_length,
)
from offramp_worker.prepare.source.locations import FAMILY, local_path, model_file
from offramp_worker.prepare.source.preprocessing import ImageReader, StepsBefore, steps_before
from offramp_worker.prepare.source.sources import SAMPLE_ROWS, Backbone, fitted_rows, load_backbone
from offramp_worker.prepare.source.texts import find_tokenizer
from offramp_worker.prepare.variants.making import Studio, check_learnable, forget
from offramp_worker.prepare.writing import BundleContents, check_target, ramp_order, write_bundle
from offramp_worker.preprocess.texts import load_tokenizer
from offramp_worker.settings import available_cpus

MIN_DEPTH, MAX_DEPTH = 0.03, 0.95
MAX_PLACES = 14
MAX_TRAINING_THREADS = 4
PLACING_SECONDS, PROFILE_SECONDS = 1.0, 6.0
PROBE_ROWS = 8
VARIANT_SECONDS = 120.0
FEWEST_VARIANT_ROWS = 200  # to learn from
UNSEEN_PART = 5  # one in so many of them compares the states of variants, where no others are left
NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What to prepare."""

    #: model and data: URIs, see :func:`load_backbone` and :func:`load_inputs`.
    model: str
    data: str
    #: Folder of the bundle.
    out: Path
    #: Name of the model in the protocol; empty: from the model.
    name: str = ""
    #: More inputs, which only train heads and never become records: what the backbone itself was trained on.
    head_data: str = ""
    split: SplitName = "default"
    #: Share of the data that heads take. None: 10 %, doubled for as long as that lifts utility by a point.
    head_share: float | None = None
    #: Shifted and slightly noisy copies made of each image that trains heads.
    variations: int = 0
    seed: int = 0
    #: CPU threads of one worker; the profile is measured with as many.
    threads: int = 1
    #: Time spent on the profile.
    profile_seconds: float = PROFILE_SECONDS
    #: URIs of small models to put in front of this one.
    sides: tuple[str, ...] = ()
    #: {"auto", "exact"}; auto: lower precisions of the model where they are faster (int8 on CPUs, of side models too;
    #: fp16 on GPUs); exact: fp32 alone.
    precision: Allowed = "auto"
    #: Where the bundle will be served, a name of :data:`offramp_worker.devices.DEVICES`; it is measured there.
    device: str = CPU.name
    #: Seconds that torch.compile may take while executors are compared; 0 leaves it out.
    compile_limit: float = COMPILE_LIMIT
    #: A ``tokenizer.json`` for data that is text; empty: the one beside the model.
    tokenizer: str = ""
    #: Longer texts are cut.
    max_tokens: int = 512
    #: The token id that fills rows up. None: the tokenizer's, else 0.
    pad: int | None = None
    #: The token id that ends each text of a pair. None: the tokenizer's.
    sep: int | None = None
    #: Outputs of the model that are earlier exits of the network's own; they become ramps.
    own_exits: tuple[str, ...] = ()
    #: What the model does; None: the top label.
    task: TaskSpec | None = None
    #: Clients send images or texts, as the data holds them; what makes the model's input of them becomes a part of the
    #: bundle.
    encoded: bool = False
    #: A ``preprocessor_config.json`` for images; empty: the one beside the model.
    preprocessor: str = ""
    #: Try low rank, fewer channels and fewer blocks, each distilled from the model's own answers.
    variants: bool = False
    #: Seconds that each variant learns.
    variant_seconds: float = VARIANT_SECONDS


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of the data without repeats, rows for heads only, how many repeats were dropped, the id that fills token
    rows up, and the one that ends each text of a pair. ``steps`` are those before the model where clients send images
    or texts."""

    x: InputArray
    extra: InputArray
    dropped: int
    pad: int | None = None
    sep: int | None = None
    steps: StepsBefore | None = None

    def fitted(self, spec: TensorSpec) -> Inputs:
        """The rows as the model's input takes them."""
        return replace(self, x=fitted_rows(self.x, spec), extra=fitted_rows(self.extra, spec))


@dataclass(frozen=True, slots=True)
class _Search:
    """What is known before any head is trained: the model, the places, the candidate ramps and their cost."""

    request: PrepareRequest
    reporter: Reporter
    inputs: Inputs
    backbone: Backbone
    found: FoundPlaces
    places: tuple[Place, ...]
    rungs: Rungs
    measured: Measurements

    @property
    def costs(self) -> dict[str, RampCost]:
        """Ramp id -> what it costs."""
        return {spec.id: cost_of(spec, self.measured) for spec in self.rungs.all}

    @property
    def shop(self) -> Workshop:
        """Where heads are fitted."""
        request = self.request
        return Workshop(
            self.backbone,
            self.places,
            self.inputs.x,
            self.inputs.extra,
            request.variations,
            request.seed,
            training_threads(),
            self.reporter,
        )


def prepare_bundle(request: PrepareRequest, reporter: Reporter) -> PrepareReport:
    """Make an exit bundle.

    Raises
    ------
    InvalidArgumentError
        The request, the data or a file it names is at fault.
    ModelRefusedError
        Exits cannot be attached to this model, or none would pay; says why.
    """
    start = time.perf_counter()
    check_request(request)
    if reason := missing(DEVICES[request.device]):
        raise InvalidArgumentError(f"device {request.device}: {reason}")
    search = _begin(request, reporter, read_inputs(request))
    heads = _train(search)
    return _finish(search, heads, select_ramps(heads.fitted.merits(search.costs)), start=start)


def training_threads() -> int:
    """CPU threads for the backbone pass and for training: those this process may use, at most 4."""
    return min(MAX_TRAINING_THREADS, available_cpus())


def check_request(request: PrepareRequest) -> None:
    """Raise InvalidArgumentError for what can be told before anything is read."""
    check_target(request.out)
    if request.name and not NAME_PATTERN.fullmatch(request.name):
        raise InvalidArgumentError(f"name {request.name!r} must be lower-case letters, digits and '-', at most 63")
    if request.split not in ("default", "apparate"):
        raise InvalidArgumentError(f"split {request.split!r} is unknown; use default (9:1) or apparate (1:9)")
    if request.threads < 1:
        raise InvalidArgumentError(f"threads is {request.threads}; it must be at least 1")
    if not 0 <= request.variations <= 64:
        raise InvalidArgumentError(f"variations is {request.variations}; it must lie in [0, 64]")
    if request.precision not in ("auto", "exact"):
        raise InvalidArgumentError(
            f"precision {request.precision!r} is unknown; use auto (lower ones too) or exact (fp32 alone)"
        )
    if request.device not in DEVICES:
        raise InvalidArgumentError(f"device {request.device!r} is unknown; use {', '.join(DEVICES)}")
    if request.task is not None and (request.sides or request.own_exits):
        field = "side" if request.sides else "own-exits"
        raise InvalidArgumentError(f"{field} belongs to the task Top1; {request.task.output} has trained heads alone")
    _check_variants(request)
    if request.preprocessor and not request.encoded:
        raise InvalidArgumentError("preprocessor belongs to --encoded; give both, or neither")
    if not 0 <= request.seed < 2**31:
        raise InvalidArgumentError(f"seed is {request.seed}; it must lie in [0, 2**31)")


def _check_variants(request: PrepareRequest) -> None:
    if not request.variants:
        return
    if request.precision == "exact":
        raise InvalidArgumentError("variants answer differently, which --precision exact rules out; give one of both")
    if request.task is not None:
        raise InvalidArgumentError(f"variants belong to the task Top1; leave --variants out with {request.task.output}")
    if not DEVICES[request.device].is_cpu:
        raise InvalidArgumentError(
            f"variants are tried on CPUs alone; leave --variants out with --device {request.device}"
        )
    if not 1 <= request.variant_seconds <= 86_400:
        raise InvalidArgumentError(f"variant-seconds is {request.variant_seconds}; it must lie in [1, 86400]")


def read_inputs(request: PrepareRequest, images: ImageReader | None = None) -> Inputs:
    """Read the data; repeated rows go, because a copy of a training row among the records would be no test.

    ``images`` reads a folder of images that clients send; None: as the request says.
    """
    file = find_tokenizer(request.model, request.tokenizer)
    texts = load_tokenizer(file, most=request.max_tokens) if file is not None else None
    pad = texts.pad if texts is not None and request.pad is None else request.pad
    sep = texts.sep if texts is not None and request.sep is None else request.sep
    steps = steps_before(request, file, texts) if request.encoded else None
    images = images if steps is None else steps.images

    def load(uri: str) -> InputArray:
        is_folder = images is not None and local_path(uri, field="data").is_dir()
        return images.read(uri) if images is not None and is_folder else load_inputs(uri, texts=texts)

    x = load(request.data)
    plan_split(
        len(x), name=request.split, share=request.head_share or DEFAULT_HEAD_SHARE
    )  # refuse a bad share before any work
    unique = _first_occurrences(x)
    if not request.head_data:
        _check_variant_rows(request, unique, 0)
        return Inputs(unique, unique[:0], len(x) - len(unique), pad, sep, steps)
    extra = load(request.head_data)
    if x.dtype.kind == extra.dtype.kind == "i":
        unique, extra = with_one_length(unique, extra, pad=pad or 0)
    if extra.shape[1:] != unique.shape[1:]:
        raise InvalidArgumentError(
            f"head-data {request.head_data} has rows of shape {list(extra.shape[1:])}, data has {list(x.shape[1:])}"
        )
    fresh = remove_repeats(extra, of=unique)
    _check_variant_rows(request, unique, len(fresh))
    return Inputs(unique, fresh, len(x) - len(unique) + len(extra) - len(fresh), pad, sep, steps)


def _check_variant_rows(request: PrepareRequest, x: InputArray, extra: int) -> None:
    """Refuse data of which variants would learn from too few rows."""
    if not request.variants:
        return
    split = plan_split(len(x), name=request.split, share=request.head_share or DEFAULT_HEAD_SHARE)
    rows = max(extra, split.train if split is not None else 0)
    if rows < FEWEST_VARIANT_ROWS:
        raise InvalidArgumentError(
            f"data: variants would learn from {rows} rows, and need {FEWEST_VARIANT_ROWS} at least; give more, "
            "--head-data or a larger --head-share"
        )


def _first_occurrences(x: InputArray) -> InputArray:
    flat = np.ascontiguousarray(x.reshape(len(x), -1))
    keys = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).ravel()
    _, first = np.unique(keys, return_index=True)
    return x if len(first) == len(x) else x[np.sort(first)]


def _worthwhile(
    request: PrepareRequest, backbone: Backbone, places: Sequence[Place], x: InputArray
) -> tuple[Place, ...]:
    """Places between 3 % and 95 % of the measured time, thinned evenly in time to at most 14."""
    quick = measure(
        backbone,
        places,
        (),
        x,
        threads=request.threads,
        seconds=min(PLACING_SECONDS, request.profile_seconds),
        batch_sizes=(1,),
        device=DEVICES[request.device],
        advance=lambda _: None,
    )
    depth = {place.position: quick.depth(place.position) for place in places}
    # The embeddings of a text lie at the very beginning, yet say much of it.
    first = {place.position: 0.0 if place.is_tokens else MIN_DEPTH for place in places}
    inside = [place for place in places if first[place.position] <= depth[place.position] <= MAX_DEPTH]
    if not inside:
        raise ModelRefusedError(
            f"no exit can be attached: the places found lie at {', '.join(f'{d:.0%}' for d in depth.values())} "
            f"of the model's time; one between {MIN_DEPTH:.0%} and {MAX_DEPTH:.0%} is needed to save anything"
        )
    goals = np.linspace(depth[inside[0].position], depth[inside[-1].position], MAX_PLACES)
    if len(inside) > MAX_PLACES:
        nearest = {min(inside, key=lambda p: abs(depth[p.position] - goal)) for goal in goals}
        inside = sorted(nearest, key=lambda place: place.position)
    return tuple(inside)


def _load(request: PrepareRequest, inputs: Inputs) -> Backbone:
    """The model, behind the scaling of pixels where clients send images."""
    scaling = inputs.steps.scaling if inputs.steps is not None else None
    if scaling is not None and request.sides:
        raise InvalidArgumentError("side models take the model's own input; leave --side out with --encoded images")
    x = inputs.x if scaling is None else scaling.of(inputs.x[:SAMPLE_ROWS])
    backbone = load_backbone(
        request.model, x, pad=inputs.pad, sep=inputs.sep, own_exits=request.own_exits, task=request.task
    )
    if inputs.steps is not None:
        inputs.steps.check(backbone.input)
    return backbone if scaling is None else scaling.before(backbone)


def _begin(request: PrepareRequest, reporter: Reporter, inputs: Inputs) -> _Search:
    """Load the model, find places and measure them."""
    with reporter.step("export the model", total=1) as advance:
        backbone = _load(request, inputs)
        advance(1)
    inputs = inputs.fitted(backbone.input)
    if request.variations and (inputs.x.ndim != 4 or inputs.x.dtype != np.float32):
        raise InvalidArgumentError("variations need images, x of float32 [N, channels, height, width]; use 0")
    if request.variants:
        check_learnable(backbone, inputs.x[:SAMPLE_ROWS])
    found = find_places(backbone, inputs.x)
    backbone, entry = found.backbone, found.entry
    places = _worthwhile(request, backbone, found.places, inputs.x)
    rungs = candidate_rungs(places, entry=entry, exits=found.exits)
    places = places if entry is None else (entry, *places)
    heads = blank_heads(rungs.all, places, task=backbone.task)
    with reporter.step("measure the profile", total=len(BATCH_SIZES)) as advance:
        measured = measure(
            backbone,
            places,
            heads,
            inputs.x,
            threads=request.threads,
            seconds=request.profile_seconds,
            device=DEVICES[request.device],
            advance=advance,
        )
    return _Search(request, reporter, inputs, backbone, found, places, rungs, measured)


def _train(search: _Search) -> Taught:
    """Climb the ladder: heads on pooled features first, then convolutions where these leave them something to win."""
    request, shop, rungs, costs = search.request, search.shop, search.rungs, search.costs
    taught = fit_growing(
        shop,
        rungs.all,
        costs,
        lambda training, validation: fit_pooled(shop, rungs, costs, training, validation),
        split=request.split,
        share=request.head_share,
    )
    chosen, others = choose_convolutions(rungs, costs, taught.fitted)
    taught = fit_convolutions(shop, chosen, taught)
    fitted = taught.fitted
    return replace(taught, fitted=replace(fitted, untrained=(*fitted.untrained, *others)))


def _kept(verdicts: Sequence[CandidateVerdict]) -> tuple[RampSpec, ...]:
    kept = [replace(v.spec, depth=round(v.merit.depth, 6)) for v in verdicts if not v.refused]
    if not kept:
        reasons = "; ".join(sorted({verdict.refused for verdict in verdicts}))
        raise ModelRefusedError(f"none of the {len(verdicts)} ramps tried would pay for this model and data: {reasons}")
    return ramp_order(kept)


def _finish(search: _Search, heads: Taught, verdicts: Sequence[CandidateVerdict], *, start: float) -> PrepareReport:
    """Score the rows no head has seen with the graph a worker's audits run, and write the bundle."""
    request, backbone, split = search.request, search.backbone, heads.split
    ramps = _kept(verdicts)
    fitted = calibrated(heads.fitted, ramps)
    x, parameters = search.inputs.x, fitted.parameters
    found = _approximated(search, split, ramps, parameters)
    executors = _executors(search, found)
    unseen = x[split.head :]
    with search.reporter.step("score the records", total=len(unseen)) as advance:
        reference, head_outputs = found.score(unseen, threads=training_threads(), advance=advance)
    all_outputs = {**{spec.id: fitted.head_outputs[spec.id] for spec in ramps}, **found.head_outputs}
    tables = {column: score_table(backbone.task, outputs) for column, outputs in all_outputs.items()}
    contents = BundleContents(
        name=request.name or _default_name(backbone.name),
        source=_source(request.model),
        backbone=backbone,
        ramps=found.ramps,
        precisions=found.precisions,
        graphs=found.graphs,
        parameters={spec.id: parameters[spec.id] for spec in ramps},
        quantiles=tables,
        profile=replace(found.profile, executors=executors.seconds),
        records=_records(found, head_outputs, reference, tables),
        probe=_probe(backbone, x[split.train : split.train + PROBE_ROWS], search.measured.device.reference),
        data=provenance(request, split, search.inputs),
        steps=search.inputs.steps,
    )
    manifest = write_bundle(request.out, contents)
    arrays = {**contents.records, **profile_arrays(contents.profile)}
    task, costs = backbone.task, search.costs
    answers = task.answers(reference)
    seen = {spec.id: merit(task, head_outputs[spec.id], answers, costs[spec.id]) for spec in ramps}
    others = merits(found, head_outputs, reference)
    report = PrepareReport(
        out=request.out,
        name=manifest.name,
        backbone_digest=manifest.backbone_digest,
        ramp_set_digest=manifest.ramp_set_digest,
        places=len(search.places),
        cut_vertices=search.found.n_cuts,
        unread=search.found.unread,
        lines=_ramp_lines(verdicts, found, seen, others),
        untrained=fitted.untrained,
        outlooks=outlooks(arrays, found.columns),
        data=contents.data,
        exact_seconds={batch.batch_size: batch.exact_seconds for batch in search.measured.batches},
        threads=request.threads,
        seconds=time.perf_counter() - start,
        approximations=approximation_lines(found, head_outputs, reference),
        frontier=found.frontier,
        executors=executors,
        served=backbone.output.name,
        exits=request.own_exits,
        assumed=backbone.found.assumed(reference) if backbone.found is not None else (),
    )
    write_report(report)
    if request.variants:
        forget(variant_folder(request.out))
    return report


def _approximated(
    search: _Search, split: HeadSplit, ramps: tuple[RampSpec, ...], parameters: Mapping[str, Parameters]
) -> Approximations:
    """What is cheaper than the fp32 backbone and pays: side models, other precisions."""
    request, x = search.request, search.inputs.x
    device = DEVICES[request.device]
    return approximate(
        Chain(search.backbone, search.places, ramps, parameters, search.measured),
        request.sides,
        Work(
            rows=x[: split.head],
            validation=x[split.train : split.head],
            allowed=request.precision if request.task is None else "exact",
            seed=request.seed,
            threads=request.threads,
            device=device,
            pass_threads=training_threads(),
            seconds=request.profile_seconds,
            reporter=search.reporter,
            variants=_variant_work(search, split, ramps) if request.variants else None,
        ),
    )


def _variant_work(search: _Search, split: HeadSplit, ramps: Sequence[RampSpec]) -> VariantWork:
    """Variants learn from the rows for heads only, where there are enough: then rows of the stream compare their
    states, and the others judge them."""
    request, x, extra = search.request, search.inputs.x, search.inputs.extra
    if len(extra) >= split.train:
        rows, unseen, judged = extra, x[: split.train // 2], x[split.train // 2 : split.head]
    else:
        taught = split.train - split.train // UNSEEN_PART
        rows, unseen, judged = x[:taught], x[taught : split.train], x[split.train : split.head]
    entry = search.backbone.input.name
    studio = Studio(
        search.backbone,
        search.found.places,
        tuple(sorted({spec.tensor for spec in ramps if spec.tensor != entry})),
        rows,
        unseen,
        request.variant_seconds,
        request.seed,
        training_threads(),
        variant_folder(request.out),
        search.reporter,
    )
    return VariantWork(studio, judged)


def variant_folder(out: Path) -> Path:
    """Where finished variants wait for the bundle."""
    return out.absolute().parent / f".{out.name}.variants"


def _ramp_lines(
    verdicts: Sequence[CandidateVerdict],
    found: Approximations,
    seen: Mapping[str, RampMerit],
    others: Mapping[str, RampMerit],
) -> tuple[RampLine, ...]:
    """A line for every ramp, with what it is worth on the records (``seen``, ``others``) where it was scored on
    them."""
    fitted = (
        RampLine(replace(v, merit=seen[v.spec.id]), "records") if v.spec.id in seen else RampLine(v, "validation")
        for v in verdicts
    )
    approximations = (
        RampLine(CandidateVerdict(spec, others[spec.id]), "records") for spec in found.ramps if spec.id in others
    )
    return (*fitted, *approximations, *(RampLine(verdict, "validation") for verdict in found.refused))


def _executors(search: _Search, found: Approximations) -> Executors:
    """The whole backbone on every executor there is, timed."""
    request = search.request
    models = {ORT_FP32: search.backbone.model}
    models |= {f"{ORT}{chain.precision}": chain.backbone.model for chain in found.others}
    with search.reporter.step("compare executors", total=1) as advance:
        compared = compare_executors(
            models,
            search.backbone.program,
            search.inputs.x,
            search.backbone.input,
            threads=request.threads,
            seconds=request.profile_seconds / 2,
            compile_limit=request.compile_limit,
            device=DEVICES[request.device],
        )
        advance(1)
    return compared


def _records(
    found: Approximations,
    head_outputs: Mapping[str, FloatArray],
    reference: FloatArray,
    tables: Mapping[str, npt.NDArray[np.float64]],
) -> dict[str, npt.NDArray[Any]]:
    return {
        "ramp_id": np.array(found.columns, dtype=np.str_),
        "ramp_precision": np.array(found.column_precisions, dtype=np.str_),
        **recorded_scores(
            found.exact.backbone.task,
            [head_outputs[c] for c in found.columns],
            reference,
            [tables[c] for c in found.columns],
        ),
    }


def recorded_scores(
    task: Task, outputs: Sequence[FloatArray], reference: FloatArray, tables: Sequence[npt.NDArray[np.float64]]
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a records file that say what columns said, and what that is against the model's outputs (n,
    width)."""
    score, answers = task.raw_score, task.answers(reference)
    return {
        "uncertainty": np.stack(
            [uncertainty(s, table, score=score) for s, table in zip(outputs, tables, strict=True)], axis=1
        ),
        **task.recorded(np.stack([task.exit_answers(s) for s in outputs], axis=1), final=answers, reference=answers),
    }


def score_table(task: Task, outputs: FloatArray) -> npt.NDArray[np.float64]:
    """A ramp's quantile table from validation rows.

    One point beyond each end, as far away as the scores spread, keeps resolution for inputs more (or less) certain
    than any of a possibly small validation part: without it they would all tie at 0 (or 1).
    """
    raw = task.raw_score(outputs)
    raw = raw[np.isfinite(raw)]
    spread = max(float(np.ptp(raw)), 1.0)
    return quantile_table(np.concatenate([[raw.min() - spread], raw, [raw.max() + spread]]))


def _probe(backbone: Backbone, x: InputArray, device: Device) -> tuple[InputArray, FloatArray]:
    x = pad_rows([x], backbone.input)
    logits, _ = tapped_logits(backbone, (), x, threads=1, device=device, advance=lambda _: None)
    return x, logits


def provenance(request: PrepareRequest, split: HeadSplit, inputs: Inputs) -> dict[str, Any]:
    """Which rows went where, for the manifest."""
    return {
        "head_training": split.train,
        "head_validation": split.validation,
        "records": split.records,
        "extra_training": len(inputs.extra),
        "variations": split.train * request.variations,
        "repeats_dropped": inputs.dropped,
        "split": request.split,
        "seed": request.seed,
        "sha256": content_digest(inputs.x),
    }


def _source(uri: str) -> str:
    """The model URI without folders, which mean nothing on another machine."""
    return re.sub(r"(?<=weights=)[^&]*/", "", uri) if uri.startswith(FAMILY) else model_file(uri).name


def _default_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-") or "model"
