"""Load a bundle for vLLM and trust none of it: sizes, digests and names before anything is started. Nothing of it is
executed: no pickles are read, and no code of a checkpoint. Errors name the file and the field.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from offramp_core.bundle import MANIFEST_FILE
from offramp_core.errors import InvalidBundleError
from offramp_worker.bundle.load import plain_file
from offramp_worker.generate.load import check_content, manifest_bytes, parse_manifest, read_profile
from offramp_worker.generate.seam import GenerationBundle, Loaded, VariantSpec
from offramp_worker.generate.tokenizer import TOKENIZER_FILE, load_tokenizer
from offramp_worker.generate.vllm.command import Room, command, environment
from offramp_worker.generate.vllm.engine import VllmEngine
from offramp_worker.generate.vllm.manifest import (
    MODELS,
    PROFILE_FILE,
    Configuration,
    VllmManifest,
    VllmProfile,
    manifest_fault,
    models_of,
)
from offramp_worker.generate.vllm.process import VllmProcess

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# No process has processors of its own. On CPUs vLLM would start a further process for each configuration, and both ends
# of the pipe between would wait by computing for a second after each answer.
SHARED_PROCESSORS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
STOPPED_POLL_SECONDS = 0.2
MAX_JSON_BYTES, MAX_TOKENIZER_BYTES = 4 * 2**20, 256 * 2**20
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
NO_VLLM = "install vLLM 0.32 or newer for it, or set OFFRAMP_VLLM_PYTHON to the Python of an environment that has it"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How vLLM is started. ``python`` is that of the environment that has it; ``running`` answers are computed side by
    side."""

    python: str = sys.executable
    running: int = 8
    start_seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class Model:
    """What a checkpoint says of itself."""

    vocabulary: int
    longest: int
    end_tokens: tuple[int, ...]
    cache_numbers: int  # that one token of one sequence keeps
    dtype: str


class StoppedError(Exception):
    """The worker was told to end while vLLM was starting."""


def load_vllm(
    folder: Path,
    *,
    threads: int,
    cache_bytes: int,
    settings: VllmSettings,
    stopped: Callable[[], bool] = lambda: False,
) -> Loaded:
    """See :class:`offramp_worker.generate.seam.Loader`. Blocks until each configuration answers, minutes for a large
    model. Once it is ``stopped`` meanwhile, it ends what it has started and raises :class:`StoppedError`."""
    manifest = check_vllm(folder)
    model = folder / MODELS / manifest.configurations[0].model
    tokenizer = load_tokenizer(model)
    find_vllm(settings.python)
    bundle = _bundle(folder, manifest, model_of(model), begin=begin_tokens(model))
    at = Path(tempfile.mkdtemp(prefix="offramp-vllm-"))  # for its owner alone
    env = {"OMP_NUM_THREADS": str(threads), **SHARED_PROCESSORS, **environment(os.environ)}
    cache = cache_bytes // len(manifest.configurations)
    processes = {}
    for i, one in enumerate(manifest.configurations):
        room = Room(folder, at / f"{i}.sock", cache, settings.running + 1)  # and an audit
        processes[one.name] = VllmProcess(
            one.name, [settings.python, *command(manifest, one, room)], environment=env, at=room.socket
        )
    try:
        _start(processes.values(), seconds=settings.start_seconds, stopped=stopped)
    except BaseException as error:
        for process in processes.values():
            process.close()
        shutil.rmtree(at, ignore_errors=True)
        if stopped():
            raise StoppedError from error
        raise
    closed = partial(shutil.rmtree, at, ignore_errors=True)
    engine = VllmEngine(bundle, processes, cache_bytes=cache, running=settings.running, closed=closed)
    return Loaded(bundle, engine, tokenizer)


def check_vllm(folder: Path) -> VllmManifest:
    """Its manifest, once all that it lists is there, whole, and fits together. Starts nothing.

    Raises
    ------
    InvalidBundleError
        Names the file and the field.
    """
    manifest = parse_manifest(manifest_bytes(folder), VllmManifest, fault=manifest_fault)
    check_content(folder, manifest.files, most_bytes={})
    for file in (folder / MODELS).rglob("*"):  # vLLM reads whatever weights it finds
        name = file.relative_to(folder).as_posix()
        if file.is_symlink():  # what is behind it is not looked at here
            raise InvalidBundleError(f"{name}: is a link; a bundle has plain files and folders alone")
        if not file.is_dir() and name not in manifest.files:
            raise InvalidBundleError(f"{name}: {MANIFEST_FILE} does not list it; take it away")
    check_models(folder, manifest)
    return manifest


def check_models(folder: Path, manifest: VllmManifest) -> None:
    """Each checkpoint has the reference's tokenizer, and fits the context.

    Raises
    ------
    InvalidBundleError
        Names the checkpoint.
    """
    reference = manifest.configurations[0].model
    facts = model_of(folder / MODELS / reference)
    for name in models_of(manifest.configurations):
        where, own = f"{MODELS}/{name}", model_of(folder / MODELS / name)
        if wrong := tokenizer_fault(folder / MODELS / reference, folder / MODELS / name):
            raise InvalidBundleError(f"{where}/{TOKENIZER_FILE}: {wrong}")
        if own.vocabulary != facts.vocabulary:
            raise InvalidBundleError(
                f"{where}/{CONFIG}: vocab_size is {own.vocabulary}; it must be {reference!r}'s, {facts.vocabulary}"
            )
        if own.longest < manifest.context_length:
            raise InvalidBundleError(
                f"{where}/{CONFIG}: max_position_embeddings is {own.longest}; context_length in {MANIFEST_FILE} is "
                f"{manifest.context_length}"
            )


def tokenizer_fault(ours: Path, other: Path) -> str:
    """Whether two checkpoints divide text alike: why not, or empty."""
    first, second = (_text(folder / TOKENIZER_FILE, most=MAX_TOKENIZER_BYTES) for folder in (ours, other))
    if first == second:
        return ""
    try:
        vocabularies = [Library.from_str(text.decode()).get_vocab() for text in (first, second)]
    except Exception as error:  # the library raises bare ones
        return f"cannot be read: {str(error)[:200]}"
    if vocabularies[0] == vocabularies[1]:
        return ""
    return (
        f"is another tokenizer than that of {ours.name!r} ({len(vocabularies[1])} tokens, not the same as its "
        f"{len(vocabularies[0])}); use a checkpoint of the same family"
    )


def model_of(folder: Path) -> Model:
    """What a checkpoint says of itself.

    Raises
    ------
    InvalidBundleError
        Names the file and the field.
    """
    where = f"{MODELS}/{folder.name}/{CONFIG}"
    config = _object(folder / CONFIG, where)
    if "speculators_config" in config:
        raise InvalidBundleError(f"{where}: speculators_config names another model; list a draft in the configuration")
    inner = config.get("text_config")  # of a model that takes more than texts
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config

    def number(name: str, default: int | None = None) -> int:
        value = default if text.get(name) is None else text[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
            raise InvalidBundleError(f"{where}: {name} is {str(value)[:40]!r}; it must be a whole number of at least 1")
        return value

    heads = number("num_attention_heads")
    head_size = number("head_dim", number("hidden_size") // heads)
    generation = folder / GENERATION_CONFIG
    named = _object(generation, generation.name) if generation.is_file() else {}
    ends = _tokens(named.get("eos_token_id", text.get("eos_token_id")))
    vocabulary = number("vocab_size")
    if not ends or not all(0 <= token < vocabulary for token in ends):
        raise InvalidBundleError(f"{where}: eos_token_id is {list(ends)[:8]}; no answer would ever end")
    return Model(
        vocabulary,
        number("max_position_embeddings"),
        ends,
        2 * number("num_hidden_layers") * number("num_key_value_heads", heads) * head_size,
        str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"),
    )


def begin_tokens(folder: Path) -> tuple[int, ...]:
    """What the checkpoint's tokenizer puts before every text."""
    library = Library.from_file(str(folder / TOKENIZER_FILE))
    plain, whole = (library.encode("a", add_special_tokens=special).ids for special in (False, True))
    return next((tuple(whole[:i]) for i in range(len(whole)) if whole[i : i + len(plain)] == plain), ())


def find_vllm(python: str) -> None:
    """Raises :class:`InvalidBundleError` unless this Python has vLLM."""
    try:
        done = subprocess.run(
            [python, "-c", _FIND], env=environment(os.environ), capture_output=True, check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidBundleError.needing(f"vLLM: {python!r} cannot be run ({error})", remedy=NO_VLLM) from error
    if done.returncode != 0:
        raise InvalidBundleError.needing(f"vLLM: {python!r} does not have it", remedy=NO_VLLM)


def _bundle(folder: Path, manifest: VllmManifest, facts: Model, *, begin: tuple[int, ...]) -> GenerationBundle:
    profile = read_profile(folder / PROFILE_FILE, VllmProfile)
    return GenerationBundle(
        name=manifest.name,
        digest=manifest.digest,
        context_length=manifest.context_length,
        vocabulary=facts.vocabulary,
        end_tokens=facts.end_tokens,
        variants=tuple(
            VariantSpec(c.name, _weights(manifest, c.model), text_of(c), profile.seconds.get(c.name, 0.0))
            for c in manifest.configurations
        ),
        begin_tokens=begin,
        cache_bytes_per_token=facts.cache_numbers * _cache_width(manifest.configurations, facts),
        created=manifest.created,
    )


def text_of(c: Configuration) -> str:
    """A configuration for people: ``smollm2 in float32, 4 tokens by ngram``."""
    numbers = c.quantization or ("its own numbers" if c.dtype == "auto" else c.dtype)
    drafts = f", {c.draft.tokens} tokens by {c.draft.model or c.draft.kind}" if c.draft else ""
    return f"{c.model} in {numbers}{drafts}"


def _cache_width(configurations: tuple[Configuration, ...], facts: Model) -> int:
    """Bytes of a number in the widest caches."""
    return max(_BYTES.get(facts.dtype if c.dtype == "auto" else c.dtype, 4) for c in configurations)


def _weights(manifest: VllmManifest, model: str) -> int:
    inside = f"{MODELS}/{model}/"
    return sum(
        e.size for name, e in manifest.files.items() if name.startswith(inside) and name.endswith(".safetensors")
    )


def _start(processes: Collection[VllmProcess], *, seconds: float, stopped: Callable[[], bool]) -> None:
    """All at once. Where one cannot be started, or all are to be ``stopped``, nobody waits for the others."""
    failed: list[Exception] = []

    def start(process: VllmProcess) -> None:
        try:
            process.start(seconds=seconds)
        except Exception as error:
            failed.append(error)

    starting = [threading.Thread(target=start, args=(one,), name=f"start-{one.name}", daemon=True) for one in processes]
    for thread in starting:
        thread.start()
    for thread in starting:
        while thread.is_alive():
            thread.join(STOPPED_POLL_SECONDS)
            if failed or stopped():
                for process in processes:
                    process.let_go()
    if failed:
        raise failed[0]


def _object(file: Path, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(_text(file, most=MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise InvalidBundleError(f"{where}: is no JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise InvalidBundleError(f"{where}: must be an object")
    return value


def _text(file: Path, *, most: int) -> bytes:
    try:
        if plain_file(file).stat().st_size > most:
            raise InvalidBundleError(f"{file.name}: has more than {most} bytes")
        return file.read_bytes()
    except OSError as error:
        raise InvalidBundleError(f"{file.name}: cannot be read ({error.strerror})") from error


def _tokens(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))
