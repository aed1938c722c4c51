"""``offramp prepare --task generate --vllm FILE``: a bundle that vLLM computes, each configuration measured here."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from offramp_core.bundle import MANIFEST_FILE
from offramp_core.errors import InvalidArgumentError
from offramp_core.generation.losses import AnswerLosses, Output
from offramp_worker.generate.audits import GREEDY, equality
from offramp_worker.generate.load import file_entry
from offramp_worker.generate.seam import REFERENCE, DecodingRoute, Loaded
from offramp_worker.generate.tokenizer import TOKENIZER_FILE, load_tokenizer
from offramp_worker.generate.vllm.engine import VllmEngine
from offramp_worker.generate.vllm.load import VllmSettings, begin_tokens, check_models, load_vllm, model_of
from offramp_worker.generate.vllm.manifest import (
    MODEL_FILES,
    MODELS,
    PROFILE_FILE,
    SCHEMA_VERSION,
    VLLM,
    Configuration,
    Draft,
    VllmManifest,
    VllmProfile,
    manifest_fault,
    models_of,
)
from offramp_worker.prepare.generation.measuring import Written, written
from offramp_worker.prepare.generation.prompts import read_prompts
from offramp_worker.prepare.pipeline import NAME_PATTERN
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.locations import local_path

PROMPTS, WARM = 16, 2
CACHE_BYTES = 2**30
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """What to prepare. ``asked`` is what the file of configurations says, ``model`` the checkpoint of those that name
    none, ``beside`` the folder that paths in the file begin at. Others as
    :class:`offramp_worker.prepare.generation.pipeline.GenerationRequest` has them."""

    asked: Mapping[str, Any]
    beside: Path
    data: str
    out: Path
    model: str = ""
    name: str = ""
    threads: int = 1
    prompt_tokens: int = 512
    answer_tokens: int = 64


@dataclass(frozen=True, slots=True)
class ConfigurationLine:
    """One configuration on the same prompts as the reference, in turns. ``time_ratio`` is its time per token over the
    reference's, ``loss`` the mean by what is lost."""

    name: str
    time_ratio: float
    equal: int
    ties: int
    different: int
    accepted: float
    loss: dict[str, float]


@dataclass(frozen=True, slots=True)
class VllmReport:
    """What was found. Seconds are those of one token of one answer by the reference."""

    name: str
    digest: str
    vllm: str
    prompts: int
    reference_seconds: float
    configurations: tuple[ConfigurationLine, ...]


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration as a user writes it: models are paths."""

    name: str
    model: str = ""
    dtype: str = "auto"
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    draft: dict[str, Any] | None = None


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of configurations."""

    configurations: tuple[_Named, ...]
    context_length: int = 2048
    enforce_eager: bool = False


def prepare_vllm(request: VllmRequest, reporter: Reporter, *, settings: VllmSettings) -> VllmReport:
    """Make a bundle that vLLM computes.

    Raises
    ------
    InvalidArgumentError
        The request, the data or the file of configurations is at fault; names the field.
    InvalidBundleError
        A checkpoint cannot be served so, or vLLM refuses a configuration; has its words.
    """
    if request.out.exists():
        raise InvalidArgumentError(f"out {request.out} is there already; remove it, or name another folder")
    if request.name and not NAME_PATTERN.fullmatch(request.name):
        raise InvalidArgumentError(f"name {request.name!r} must be lower-case letters, digits and '-', at most 63")
    request.out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{request.out.name}-", dir=request.out.parent))
    try:
        report = _prepare(request, work, reporter, settings)
        work.chmod(0o755)
        work.rename(request.out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report


def _prepare(request: VllmRequest, work: Path, reporter: Reporter, settings: VllmSettings) -> VllmReport:
    with reporter.step("reading the checkpoints", total=1) as advance:
        manifest = _laid_out(request, work)
        advance(1)
    model = work / MODELS / manifest.configurations[0].model
    prompts = read_prompts(
        request.data,
        load_tokenizer(model),
        begin=begin_tokens(model),
        longest=min(request.prompt_tokens, manifest.context_length - request.answer_tokens),
        vocabulary=model_of(model).vocabulary,
    )[: PROMPTS + WARM]
    with reporter.step("starting vLLM", total=len(manifest.configurations)):
        loaded = load_vllm(work, threads=request.threads, cache_bytes=CACHE_BYTES, settings=settings)
    try:
        with reporter.step("measuring", total=len(prompts)) as advance:
            found = [_in_turns(loaded, prompt, request.answer_tokens, advance) for prompt in prompts][WARM:]
    finally:
        loaded.engine.close()
    report = _report(manifest, loaded, found)
    (work / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n")
    ratios = {line.name: line.time_ratio * report.reference_seconds for line in report.configurations}
    _write(work, manifest, VllmProfile(report.vllm, {REFERENCE: report.reference_seconds, **ratios}))
    return report


# --- the bundle ------------------------------------------------------------------------------------


def _laid_out(request: VllmRequest, work: Path) -> VllmManifest:
    """Checkpoints and manifest in their places."""
    asked = _parsed(request.asked)
    places: dict[Path, str] = {}

    def placed(path: str, field: str) -> str:
        folder = _checkpoint(path, request.beside, field)
        if folder not in places:
            base = re.sub(r"[^a-z0-9.]+", "-", folder.name.lower()).strip("-.")[:40] or "model"
            places[folder] = base if base not in places.values() else f"{base}-{len(places)}"
        return places[folder]

    configurations = tuple(
        _configuration(one, placed, default=request.model, index=i) for i, one in enumerate(asked.configurations)
    )
    name = request.name or (configurations[0].model.replace(".", "-") if configurations else "model")
    manifest = VllmManifest(
        SCHEMA_VERSION, "generate", VLLM, name, asked.context_length, asked.enforce_eager, configurations, {}
    )
    for folder, place in places.items():
        _copy(folder, work / MODELS / place)
    manifest = _write(work, replace(manifest, created=int(time.time())), VllmProfile(""))
    check_models(work, manifest)
    return manifest


def _parsed(asked: Mapping[str, Any]) -> _Asked:
    try:
        return msgspec.convert(asked, _Asked)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"vllm: {error}") from error


def _configuration(one: _Named, placed: Any, *, default: str, index: int) -> Configuration:
    where = f"vllm: configurations[{index}]"
    if not (one.model or default):
        raise InvalidArgumentError(f"{where}.model is missing; name a checkpoint there, or for all with --model")
    given = {
        "name": one.name,
        "model": placed(one.model or default, f"{where}.model"),
        "dtype": one.dtype,
        "quantization": one.quantization,
        "kv_cache_dtype": one.kv_cache_dtype,
    }
    if one.draft is not None:
        draft = dict(one.draft)
        if unknown := sorted(draft.keys() - set(Draft.__dataclass_fields__)):
            raise InvalidArgumentError(
                f"{where}.draft.{unknown[0]} is unknown; there are {', '.join(Draft.__dataclass_fields__)}"
            )
        if isinstance(draft.get("model"), str) and draft["model"]:
            draft["model"] = placed(draft["model"], f"{where}.draft.model")
        given["draft"] = draft
    try:
        return msgspec.convert(given, Configuration)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"{where}: {error}") from error


def _checkpoint(path: str, beside: Path, field: str) -> Path:
    folder = (beside / local_path(path, field=field)).resolve()
    if not folder.is_dir():
        raise InvalidArgumentError(f"{field} is {path!r}; there is no folder {folder}")
    for needed in ("config.json", TOKENIZER_FILE):
        if not (folder / needed).is_file():
            raise InvalidArgumentError(
                f"{field} is {path!r}; it has no {needed}: save the checkpoint as transformers does"
            )
    if not any(folder.glob("*.safetensors")):
        raise InvalidArgumentError(f"{field} is {path!r}; it has no .safetensors: pickles are not read")
    return folder


def _copy(folder: Path, place: Path) -> None:
    place.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        if not file.is_file() or not MODEL_FILES.fullmatch(file.name):
            continue
        try:
            os.link(file.resolve(), place / file.name)
        except OSError:
            shutil.copyfile(file, place / file.name)


def _write(work: Path, manifest: VllmManifest, profile: VllmProfile) -> VllmManifest:
    """Profile and manifest; the manifest as it is then."""
    (work / PROFILE_FILE).write_text(json.dumps(asdict(profile), indent=2) + "\n")
    files = {PROFILE_FILE: file_entry(work / PROFILE_FILE)}
    for model in models_of(manifest.configurations):
        for file in sorted((work / MODELS / model).iterdir()):
            name = f"{MODELS}/{model}/{file.name}"
            files[name] = manifest.files.get(name) or file_entry(file)
    whole = replace(manifest, files=files)
    if wrong := manifest_fault(whole):
        raise InvalidArgumentError(f"vllm: {wrong}")
    (work / MANIFEST_FILE).write_text(json.dumps(asdict(whole), indent=2) + "\n")
    return whole


# --- measuring -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """``seconds`` of each of its tokens, the prompt's share included."""

    written: Written
    text: str
    seconds: float


def _in_turns(loaded: Loaded, prompt: Sequence[int], n: int, advance: Any) -> dict[str, _Answer]:
    """The answers of all configurations to one prompt, one after the other."""
    found = {variant.name: _answer(loaded, prompt, n, variant.name) for variant in loaded.bundle.variants}
    advance(1)
    return found


def _answer(loaded: Loaded, prompt: Sequence[int], n: int, variant: str) -> _Answer:
    decoder, began = loaded.tokenizer.decoder(), time.perf_counter()
    try:
        one = written(loaded.engine, prompt, most=n, route=DecodingRoute(variant), sampling=GREEDY)
    except RuntimeError as error:
        raise InvalidArgumentError(f"vllm: {error}") from error
    seconds = time.perf_counter() - began
    text = "".join(decoder.add(t.id) for t in one.tokens) + decoder.finish()
    return _Answer(one, text, seconds / max(1, len(one.tokens)))


def _report(manifest: VllmManifest, loaded: Loaded, found: Sequence[Mapping[str, _Answer]]) -> VllmReport:
    seconds = statistics.median(answers[REFERENCE].seconds for answers in found)
    return VllmReport(
        manifest.name,
        manifest.digest,
        loaded.engine.version if isinstance(loaded.engine, VllmEngine) else "",
        len(found),
        seconds,
        tuple(_line(v.name, found) for v in loaded.bundle.variants if v.name != REFERENCE),
    )


def _line(name: str, found: Sequence[Mapping[str, _Answer]]) -> ConfigurationLine:
    pairs = [(answers[name], answers[REFERENCE]) for answers in found]
    alike = [equality([t.id for t in own.written.tokens], reference.written.tokens) for own, reference in pairs]
    losses = [AnswerLosses()(own.text, reference.text) for own, reference in pairs]
    proposed = sum(own.written.proposed for own, _ in pairs)
    return ConfigurationLine(
        name,
        round(statistics.median(own.seconds / reference.seconds for own, reference in pairs), 4),
        alike.count("equal"),
        alike.count("tie"),
        alike.count("different"),
        round(sum(own.written.accepted for own, _ in pairs) / proposed, 4) if proposed else 0.0,
        {output: round(statistics.mean(loss[output] for loss in losses), 4) for output in Output},
    )


def print_vllm_report(report: VllmReport, console: Any) -> None:
    """A table for people."""
    from rich.table import Table

    table = Table(
        "configuration",
        "time per token",
        "accepted",
        "equal",
        "ties",
        "different",
        *Output,
        title=f"{report.name} by vLLM {report.vllm}, on {report.prompts} prompts",
    )
    for line in report.configurations:
        table.add_row(
            line.name,
            f"{line.time_ratio:.2f}",
            f"{line.accepted:.0%}" if line.accepted else "",
            *map(str, (line.equal, line.ties, line.different)),
            *(f"{line.loss[output]:.3f}" for output in Output),
        )
    console.print(table)
    console.print(f"{report.digest}", highlight=False)
