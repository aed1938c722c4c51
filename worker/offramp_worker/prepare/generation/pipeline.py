"""``offramp prepare --task generate``, step by step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from offramp_core.errors import InvalidArgumentError
from offramp_worker.generate.llama.architecture import variant_shapes
from offramp_worker.generate.llama.decoder import Decoder
from offramp_worker.generate.llama.engine import LlamaEngine
from offramp_worker.generate.llama.manifest import DraftFigures, GenerationProfile, VariantEntry, weight_bytes
from offramp_worker.generate.load import file_entry, load_generation, read_tensors
from offramp_worker.generate.seam import REFERENCE, DecodingRoute, DraftSpec, GenerationBundle, VariantSpec
from offramp_worker.generate.tokenizer import load_tokenizer
from offramp_worker.prepare.generation.bench import Workbench, workbench
from offramp_worker.prepare.generation.checkpoint import Checkpoint, FloatArray
from offramp_worker.prepare.generation.measuring import agreement, compare, importance, seconds_at_once, written
from offramp_worker.prepare.generation.picture import draw
from offramp_worker.prepare.generation.prompts import read_prompts
from offramp_worker.prepare.generation.report import (
    NOT_WORTH_IT,
    WORTH,
    DraftLine,
    GenerationReport,
    VariantLine,
    draft_line,
    judged,
)
from offramp_worker.prepare.generation.sources import read_checkpoint
from offramp_worker.prepare.generation.writing import (
    EXACT,
    open_variant,
    probe_tensors,
    variant_tensors,
    write_common,
    write_rest,
    write_variant,
)
from offramp_worker.prepare.pipeline import NAME_PATTERN
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.locations import local_path

CANDIDATES = (("int8", 8, (8,)), ("int4", 4, (4, 8)))  # name, bits of layers, bits of the head that are tried
HEAD_WORTH = 0.01  # of agreement, for which a head of more bits is taken
DRAFT_TOKENS = (1, 2, 3, 4, 6, 8)
FITTED, HELD_OUT = 24, 16  # prompts, at most
CACHES = 2**34  # bytes; one sequence runs at a time
MIN_ANSWER = 8
REPORT_FILE, PICTURE_FILE = "report.json", "report.png"
Weights = Callable[[], Mapping[str, FloatArray]]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to prepare.

    ``model`` and ``data`` are paths or file URIs. ``prompt_tokens`` bounds prompts, ``answer_tokens`` the answers that
    variants and drafts are compared on. ``threads`` are those of one worker.
    """

    model: str
    data: str
    out: Path
    name: str = ""
    threads: int = 1
    prompt_tokens: int = 512
    answer_tokens: int = 64


@dataclass(frozen=True, slots=True)
class _Texts:
    """Prompts to choose by, prompts to judge on, and the reference's answers to the first."""

    fitted: list[list[int]]
    held_out: list[list[int]]
    answers: list[list[int]] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[list[int], list[int]]]:
        return list(zip(self.fitted, self.answers, strict=True))


@dataclass(frozen=True, slots=True)
class _Shop:
    """What every step works with."""

    request: GenerationRequest
    checkpoint: Checkpoint
    texts: _Texts
    work: Workbench
    reporter: Reporter


def prepare_generation(request: GenerationRequest, reporter: Reporter) -> GenerationReport:
    """Make a bundle for generation.

    Raises
    ------
    InvalidArgumentError
        The request, the data or a file it names is at fault.
    ModelRefusedError
        The model is no decoder of the Llama family that can be read; names the field.
    """
    _check(request)
    with reporter.step("reading the model", total=1) as advance:
        checkpoint = read_checkpoint(request.model)
        advance(1)
    with workbench(request.out, _asked(request, checkpoint)) as work:
        write_common(work.folder, checkpoint)
        texts = _read_texts(request, checkpoint, work.folder)
        return _prepare(_Shop(request, checkpoint, texts, work, reporter))


def _check(request: GenerationRequest) -> None:
    if request.name and not NAME_PATTERN.fullmatch(request.name):
        raise InvalidArgumentError(f"name {request.name!r} must be lower-case letters, digits and '-', at most 63")
    if request.threads < 1:
        raise InvalidArgumentError(f"threads is {request.threads}; it must be at least 1")
    if request.answer_tokens < MIN_ANSWER:
        raise InvalidArgumentError(f"answer-tokens is {request.answer_tokens}; it must be at least {MIN_ANSWER}")


def _asked(request: GenerationRequest, checkpoint: Checkpoint) -> dict[str, Any]:
    """All that the result depends on. Of the weights a few stand for all: who changes a checkpoint changes these."""
    data = local_path(request.data, field="data")
    if not data.is_file():
        raise InvalidArgumentError(f"data {data}: there is no such file")
    tensors = {**checkpoint.common, **checkpoint.matrices}
    sums = {
        name: float(np.abs(tensor[:: max(1, len(tensor) // 64)]).sum(dtype=np.float64))
        for name, tensor in tensors.items()
    }
    return {
        "source": checkpoint.source,
        "weights": sums,
        "tokenizer": checkpoint.tokenizer,
        "data": file_entry(data).sha256,
        "name": request.name,
        "threads": request.threads,
        "prompt": request.prompt_tokens,
        "answer": request.answer_tokens,
        "runtime": ort.__version__,
        "candidates": repr((CANDIDATES, DRAFT_TOKENS, FITTED, HELD_OUT)),
    }


def _read_texts(request: GenerationRequest, checkpoint: Checkpoint, folder: Path) -> _Texts:
    a = checkpoint.architecture
    room = a.context_length - request.answer_tokens
    if room < 1:
        raise InvalidArgumentError(
            f"answer-tokens is {request.answer_tokens}; the model's context has {a.context_length} tokens"
        )
    prompts = read_prompts(
        request.data,
        load_tokenizer(folder),
        begin=checkpoint.begin_tokens,
        longest=min(request.prompt_tokens, room),
        vocabulary=a.vocabulary,
    )
    held_out = min(HELD_OUT, len(prompts) // 2)
    older = prompts[:-held_out]
    step = max(1, len(older) // FITTED)
    return _Texts(older[::step][:FITTED], prompts[-held_out:])


def _prepare(shop: _Shop) -> GenerationReport:
    checkpoint, work, threads = shop.checkpoint, shop.work, shop.request.threads
    decoders = {REFERENCE: _reference(checkpoint, work, threads)}
    answers = work.step("answers", lambda: _answers(shop, decoders))
    shop = replace(shop, texts=replace(shop.texts, answers=answers))
    entries, agreements = {REFERENCE: EXACT}, {REFERENCE: 1.0}
    weights = cache(lambda: _importance(shop))  # only if something is to be rounded still
    for candidate in CANDIDATES:
        found = work.step(candidate[0], partial(_choose, shop, candidate, weights))
        entry = VariantEntry(**found["entry"])
        entries[entry.name], agreements[entry.name] = entry, found["agreement"]
        decoders[entry.name] = _reopened(checkpoint, entry, work, threads)
    with shop.reporter.step("timing variants", total=1) as advance:
        start = min(128, checkpoint.architecture.context_length // 2)
        token = shop.texts.fitted[0][-1]
        seconds = work.step("seconds", lambda: seconds_at_once(decoders, start=start, token=token))
        advance(1)
    lines = [DraftLine(**x) for x in work.step("drafts", lambda: _measure(shop, decoders, entries))]
    return _finish(shop, _Found(decoders, entries, agreements, seconds, lines))


def _reference(checkpoint: Checkpoint, work: Workbench, threads: int) -> Decoder:
    tensors = variant_tensors(checkpoint, EXACT)
    write_variant(work.folder, EXACT, tensors)
    return open_variant(checkpoint, EXACT, tensors, threads=threads)


def _reopened(checkpoint: Checkpoint, entry: VariantEntry, work: Workbench, threads: int) -> Decoder:
    """A variant as a worker will read it."""
    wanted = variant_shapes(checkpoint.architecture, entry.bits, entry.head_bits)
    return open_variant(checkpoint, entry, read_tensors(work.folder / entry.file, wanted), threads=threads)


def _engine(checkpoint: Checkpoint, decoders: Mapping[str, Decoder], drafts: Sequence[DraftSpec] = ()) -> LlamaEngine:
    a = checkpoint.architecture
    bundle = GenerationBundle(
        name=checkpoint.name,
        digest="",
        context_length=a.context_length,
        vocabulary=a.vocabulary,
        end_tokens=checkpoint.end_tokens,
        variants=tuple(VariantSpec(name, 0) for name in decoders),
        drafts=tuple(drafts),
        cache_bytes_per_token=a.cache_bytes_per_token,
    )
    return LlamaEngine(bundle, decoders, cache_bytes=CACHES)


def _answers(shop: _Shop, decoders: Mapping[str, Decoder]) -> list[list[int]]:
    """The reference's own answers: what variants are chosen by."""
    engine, answers, prompts = _engine(shop.checkpoint, decoders), list[list[int]](), shop.texts.fitted
    with shop.reporter.step("answers of the model itself", total=len(prompts)) as advance:
        for prompt in prompts:
            one = written(engine, prompt, most=shop.request.answer_tokens, route=DecodingRoute())
            answers.append([t.id for t in one.tokens])
            advance(1)
    return answers


def _importance(shop: _Shop) -> dict[str, FloatArray]:
    """By matrix how much each of its inputs counts."""
    tensors = variant_tensors(shop.checkpoint, EXACT)
    decoder = open_variant(shop.checkpoint, EXACT, tensors, threads=1, taps=True)
    return importance(decoder, [[*prompt, *answer] for prompt, answer in shop.texts.pairs])


def _choose(shop: _Shop, candidate: tuple[str, int, tuple[int, ...]], weights: Weights) -> dict[str, Any]:
    """Round a variant in every way that is known, and keep that whose tokens are most often the reference's. A head of
    more bits must earn them."""
    name, bits, heads = candidate
    ways: dict[str, dict[str, Any]] = {
        "whole range": {"shrinks": (1.0,)},
        "searched ranges": {},
        "searched ranges, weighted by inputs": {"importance": weights()},
    }
    best: tuple[float, float, VariantEntry] | None = None
    with shop.reporter.step(f"rounding to {name}", total=len(heads) * len(ways)) as advance:
        for (i, head_bits), (way, options) in product(enumerate(heads), ways.items()):
            head = "" if head_bits == bits else f", head of {head_bits} bits"
            entry = VariantEntry(name, bits, head_bits, f"blocks of 32, {way}{head}")
            tensors = variant_tensors(shop.checkpoint, entry, **options)
            found = agreement(open_variant(shop.checkpoint, entry, tensors, threads=1), shop.texts.pairs)
            if best is None or found - HEAD_WORTH * i > best[0]:
                best = found - HEAD_WORTH * i, found, entry
                write_variant(shop.work.folder, entry, tensors)
            advance(1)
    assert best is not None
    return {"entry": asdict(best[2]), "agreement": best[1]}


def _candidate_drafts(checkpoint: Checkpoint, entries: Mapping[str, VariantEntry]) -> list[DraftSpec]:
    a = checkpoint.architecture
    drafts = [
        DraftSpec(
            name,
            "variant",
            vocabulary=a.vocabulary,
            layers=a.layers,
            weight_bytes=weight_bytes(a, entry),
            variants=(REFERENCE,),
        )
        for name, entry in entries.items()
        if name != REFERENCE
    ]
    return [*drafts, DraftSpec("ngram", "ngram")]


def _measure(shop: _Shop, decoders: Mapping[str, Decoder], entries: Mapping[str, VariantEntry]) -> list[dict[str, Any]]:
    """Every draft at every length on prompts that nothing was fitted to."""
    drafts, prompts = _candidate_drafts(shop.checkpoint, entries), shop.texts.held_out
    engine = _engine(shop.checkpoint, decoders, drafts)
    routes = [DecodingRoute(REFERENCE, d.id, n) for d in drafts for n in DRAFT_TOKENS]
    with shop.reporter.step("measuring drafts", total=(1 + len(routes)) * len(prompts)) as advance:
        tallies = compare(engine, prompts, routes, most=shop.request.answer_tokens, advance=advance)
    return [asdict(draft_line(r.draft, r.draft_tokens, tallies[r], tallies[DecodingRoute()])) for r in routes]


@dataclass(frozen=True, slots=True)
class _Found:
    decoders: Mapping[str, Decoder]
    entries: Mapping[str, VariantEntry]
    agreements: Mapping[str, float]
    seconds: Mapping[str, Mapping[str, float]]
    lines: Sequence[DraftLine]

    def ratio(self, variant: str) -> float:
        return self.seconds[variant]["1"] / self.seconds[REFERENCE]["1"]


def _finish(shop: _Shop, found: _Found) -> GenerationReport:
    """Leave out what does not pay, and write what is left."""
    request, checkpoint, work, texts = shop.request, shop.checkpoint, shop.work, shop.texts
    refused: dict[str, str] = {}
    for draft in _candidate_drafts(checkpoint, found.entries):
        if why := judged([line for line in found.lines if line.draft == draft.id]):
            refused[f"draft {draft.id}"] = why
    for name in found.entries:
        if name != REFERENCE and found.ratio(name) > WORTH:
            refused[f"variant {name}"] = (
                f"{NOT_WORTH_IT}: {found.ratio(name):.2f} of fp32's time per token, more than {WORTH}"
            )
    entries = {name: e for name, e in found.entries.items() if f"variant {name}" not in refused}
    candidates = _candidate_drafts(checkpoint, found.entries)
    for draft in candidates:
        if draft.kind == "variant" and draft.id not in entries:
            refused.setdefault(f"draft {draft.id}", f"{NOT_WORTH_IT}: variant {draft.id}, which drafts, is left out")
    drafts = [draft for draft in candidates if f"draft {draft.id}" not in refused]
    for name in found.entries.keys() - entries.keys():
        (work.folder / found.entries[name].file).unlink()
    figures: dict[str, dict[str, DraftFigures]] = {}
    for line in found.lines:
        if any(d.id == line.draft for d in drafts):
            figures.setdefault(line.draft, {})[str(line.tokens)] = DraftFigures(line.acceptance, line.time_ratio)
    seconds = {name: dict(found.seconds[name]) for name in entries}
    profile = GenerationProfile(f"onnxruntime-{ort.__version__}", request.threads, seconds, figures)
    manifest = write_rest(
        work.folder,
        checkpoint,
        name=request.name,
        variants=list(entries.values()),
        drafts=drafts,
        probe=probe_tensors(checkpoint, {n: found.decoders[n] for n in entries}, texts.fitted[0]),
        profile=profile,
        created=int(time.time()),
        data={"prompts": len(texts.fitted), "held_out": len(texts.held_out)},
    )
    # What is written can be served.
    load_generation(work.folder, threads=request.threads, cache_bytes=2**20, to_serve=False).engine.close()
    report = GenerationReport(
        name=manifest.name,
        source=checkpoint.source,
        digest=manifest.digest,
        prompts=len(texts.fitted),
        answers=len(texts.held_out),
        reference_seconds=found.seconds[REFERENCE]["1"],
        variants=tuple(
            _variant_line(checkpoint, found, name, refused.get(f"variant {name}", "")) for name in found.entries
        ),
        drafts=tuple(found.lines),
        kept=tuple(d.id for d in drafts),
        refused=refused,
    )
    (work.folder / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    draw(report, work.folder / PICTURE_FILE)
    return report


def _variant_line(checkpoint: Checkpoint, found: _Found, name: str, refused: str) -> VariantLine:
    entry = found.entries[name]
    megabytes = weight_bytes(checkpoint.architecture, entry) / 1e6
    return VariantLine(
        name, entry.method, round(megabytes, 3), round(found.agreements[name], 4), round(found.ratio(name), 4), refused
    )
