"""What a bundle for vLLM holds: checkpoints, a tokenizer, and how vLLM is started for each configuration.

manifest.json           this module's :class:`VllmManifest`, with size and SHA-256 of every other file
models/NAME/            checkpoints as transformers saves them: config.json, safetensors, tokenizer.json
profile.json            this module's :class:`VllmProfile`

The first configuration is the reference. Plans name it ``fp32``, whatever its numbers are.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from offramp_core.errors import InvalidArgumentError
from offramp_core.plan import canonical_json
from offramp_core.precision import check_precision
from offramp_worker.generate.llama.manifest import NAME, FileEntry
from offramp_worker.generate.seam import REFERENCE

VLLM: Literal["vllm"] = "vllm"
SCHEMA_VERSION = 1
PROFILE_FILE, MODELS = "profile.json", "models"
MODEL_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|model\.safetensors\.index|quantize_config)\.json|[\w.-]{1,80}\.safetensors|merges\.txt|chat_template\.jinja"
)
MOST_CONFIGURATIONS, MOST_DRAFT_TOKENS, MOST_RANGES, LONGEST_CONTEXT = 4, 16, 16, 2**20
_QUANTIZATION = re.compile(r"(?:[a-z0-9][a-z0-9_-]{0,39})?")  # no option of a command line


@dataclass(frozen=True, slots=True)
class Draft:
    """What proposes tokens that the model of the configuration verifies."""

    #: ``ngram``: what followed when the last words came before. ``model``: a smaller model with the same tokenizer.
    kind: Literal["ngram", "model"]
    #: Proposed at a time.
    tokens: int
    #: Of kind ``model``: its folder below ``models/``.
    model: str = ""
    #: Of kind ``ngram``: the most words that must have come before.
    longest_match: int = 4
    #: Other numbers of tokens by how many answers are computed at once: first, last, tokens (0: no draft).
    by_batch_size: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to start vLLM. ``name`` is what plans call it."""

    name: str
    #: The checkpoint's folder below ``models/``.
    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: As vLLM calls it; empty for what the checkpoint itself says.
    quantization: str = ""
    #: Numbers of the caches.
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class VllmManifest:
    """See the module."""

    schema_version: int
    task: Literal["generate"]
    engine: Literal["vllm"]
    name: str
    #: Tokens of prompt and answer together.
    context_length: int
    #: Whether vLLM computes without compiled graphs: it starts sooner and answers later.
    enforce_eager: bool
    configurations: tuple[Configuration, ...]
    files: dict[str, FileEntry]
    created: int = 0

    @property
    def digest(self) -> str:
        """Names what it computes: how vLLM is started, and the content of every file but the profile."""
        files = {name: asdict(entry) for name, entry in self.files.items() if name != PROFILE_FILE}
        content = [self.context_length, self.enforce_eager, [asdict(c) for c in self.configurations], files]
        return "sha256:" + hashlib.sha256(canonical_json(content)).hexdigest()


@dataclass(frozen=True, slots=True)
class VllmProfile:
    """What was measured when the bundle was made: by configuration the seconds of one token of one answer."""

    vllm: str
    seconds: dict[str, float] = field(default_factory=dict)


def manifest_fault(m: VllmManifest) -> str:
    """What is wrong with a manifest in itself, with the field's name; empty where nothing is."""
    if m.schema_version != SCHEMA_VERSION:
        return f"schema_version is {m.schema_version}; this worker reads {SCHEMA_VERSION}"
    if not NAME.fullmatch(m.name):
        return f"name {m.name!r} must be lower-case letters, digits, '-' and '.', at most 63"
    if not 16 <= m.context_length <= LONGEST_CONTEXT:
        return f"context_length is {m.context_length}; it must be in 16..{LONGEST_CONTEXT}"
    return configurations_fault(m.configurations) or _files_fault(m)


def configurations_fault(configurations: tuple[Configuration, ...]) -> str:
    """What is wrong with these, with the field's name; empty where nothing is."""
    names = [c.name for c in configurations]
    if len(set(names)) != len(names) or names[:1] != [REFERENCE] or len(names) > MOST_CONFIGURATIONS:
        return (
            f"configurations are {names}; {REFERENCE} comes first, the others have names of their own, at most "
            f"{MOST_CONFIGURATIONS} in all: each is a process with weights of its own"
        )
    return next(filter(None, map(_configuration_fault, configurations)), "")


def _configuration_fault(c: Configuration) -> str:
    where = f"configurations: {c.name!r}"
    try:
        check_precision(c.name)
    except InvalidArgumentError as error:
        return f"{where}: {error}"
    if not NAME.fullmatch(c.model):
        return f"{where} has model {c.model!r}; it must be lower-case letters, digits, '-' and '.'"
    if not _QUANTIZATION.fullmatch(c.quantization):
        return f"{where} has quantization {c.quantization[:60]!r}; write it as vLLM does, such as fp8"
    if c.draft is None:
        return ""
    if c.name == REFERENCE:
        return f"{where} has a draft; the reference is what others are compared with, so it has none"
    return _draft_fault(f"{where}: draft", c.draft)


def _draft_fault(where: str, d: Draft) -> str:
    if not 1 <= d.tokens <= MOST_DRAFT_TOKENS:
        return f"{where}.tokens is {d.tokens}; it must be in 1..{MOST_DRAFT_TOKENS}"
    if d.kind == "model" and not NAME.fullmatch(d.model):
        return f"{where}.model is {d.model!r}; name the folder of a checkpoint"
    if d.kind == "ngram" and d.model:
        return f"{where}.model is {d.model!r}; a draft of kind ngram has none, leave it out"
    if not 1 <= d.longest_match <= 64:
        return f"{where}.longest_match is {d.longest_match}; it must be in 1..64"
    return _ranges_fault(f"{where}.by_batch_size", d)


def _ranges_fault(where: str, d: Draft) -> str:
    if len(d.by_batch_size) > MOST_RANGES:
        return f"{where} has {len(d.by_batch_size)} ranges; at most {MOST_RANGES}"
    before = 0
    for first, last, tokens in d.by_batch_size:
        if first != before + 1 or last < first or not 0 <= tokens <= d.tokens:
            return (
                f"{where} has [{first}, {last}, {tokens}]; ranges begin at 1, follow each other without a "
                f"gap, and have 0..{d.tokens} tokens"
            )
        before = last
    return ""


def models_of(configurations: tuple[Configuration, ...]) -> tuple[str, ...]:
    """The checkpoints that these name, each once."""
    named = [name for c in configurations for name in (c.model, c.draft.model if c.draft else "") if name]
    return tuple(dict.fromkeys(named))


def _files_fault(m: VllmManifest) -> str:
    models = models_of(m.configurations)
    for name in m.files:
        folder, _, file = name.removeprefix(f"{MODELS}/").partition("/")
        inside = name.startswith(f"{MODELS}/") and folder in models and MODEL_FILES.fullmatch(file)
        if name != PROFILE_FILE and not inside:
            return f"files lists {name[:100]!r}, which no part of such a bundle is"
    needed = {
        PROFILE_FILE,
        *(f"{MODELS}/{model}/{file}" for model in models for file in ("config.json", "tokenizer.json")),
    }
    if missing := sorted(needed - m.files.keys()):
        return f"files does not list {', '.join(missing)}"
    return ""
