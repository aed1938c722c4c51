"""What a bundle for generation holds: numbers, a tokenizer and what was measured; no graph and no code.

manifest.json           this module's :class:`GenerationManifest`, with size and SHA-256 of every other file
tokenizer.json          of the tokenizers library
tokenizer_config.json   optional: the chat template, and the names of special tokens
common.safetensors      the embedding and the weights of the norms, float32: all variants share them
fp32.safetensors        the matrices of the reference
<variant>.safetensors   those of a variant of fewer bits, in blocks (``variant_shapes``)
probe.safetensors       ``tokens`` [n] and per variant ``logits.<variant>`` [vocabulary], to check a worker by
profile.json            this module's :class:`GenerationProfile`
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from offramp_core.plan import canonical_json
from offramp_worker.generate.llama.architecture import BITS, Architecture, fault, variant_shapes
from offramp_worker.generate.seam import REFERENCE, DraftSpec, GenerationBundle, VariantSpec
from offramp_worker.generate.tokenizer import CONFIG_FILE, TOKENIZER_FILE

SCHEMA_VERSION = 1
COMMON_FILE, PROBE_FILE, PROFILE_FILE = "common.safetensors", "probe.safetensors", "profile.json"
REQUIRED = (TOKENIZER_FILE, COMMON_FILE, PROBE_FILE, PROFILE_FILE)
MOST_DRAFT_TOKENS, TRIED_LENGTHS = 16, 2  # at a time; of each draft those that were the fastest
MAX_DRAFT_LENGTHS, SLOWEST_RATIO = 4, 100.0  # of a draft: lengths that are tried; a ratio that makes sense
MAX_DRAFTS, MAX_VARIANTS, MAX_END_TOKENS = 16, 8, 64
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Bytes and SHA-256 (hex) of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class VariantEntry:
    """One precision: bits of the layers' matrices and of the head, 32, 8 or 4. ``method`` says how they were
    rounded."""

    name: str
    bits: int
    head_bits: int
    method: str = ""

    @property
    def file(self) -> str:
        return f"{self.name}.safetensors"


@dataclass(frozen=True, slots=True)
class GenerationManifest:
    """See the module. ``data`` says what it was made with, for people."""

    schema_version: int
    task: Literal["generate"]
    name: str
    architecture: Architecture
    end_tokens: tuple[int, ...]
    begin_tokens: tuple[int, ...]
    variants: tuple[VariantEntry, ...]
    drafts: tuple[DraftSpec, ...]
    files: dict[str, FileEntry]
    created: int = 0
    source: str = ""
    data: dict[str, Any] | None = None

    @property
    def digest(self) -> str:
        """Names what it computes: sizes, tokens, drafts and the content of every file but the profile."""
        files = {name: asdict(entry) for name, entry in self.files.items() if name != PROFILE_FILE}
        content = [
            asdict(self.architecture),
            self.end_tokens,
            self.begin_tokens,
            [asdict(v) for v in self.variants],
            [asdict(d) for d in self.drafts],
            files,
        ]
        return "sha256:" + hashlib.sha256(canonical_json(content)).hexdigest()

    def bundle(self, profile: GenerationProfile) -> GenerationBundle:
        """What doors and the desk need."""
        a = self.architecture
        ratios = self._draft_ratios(profile)
        seconds = {name: by_tokens.get("1", 0.0) for name, by_tokens in profile.variants.items()}
        return GenerationBundle(
            name=self.name,
            digest=self.digest,
            context_length=a.context_length,
            vocabulary=a.vocabulary,
            end_tokens=self.end_tokens,
            variants=tuple(
                VariantSpec(v.name, weight_bytes(a, v), v.method, seconds.get(v.name, 0.0)) for v in self.variants
            ),
            drafts=tuple(
                d if d.draft_tokens else replace(d, draft_tokens=best_lengths(d, ratios)) for d in self.drafts
            ),
            begin_tokens=self.begin_tokens,
            cache_bytes_per_token=a.cache_bytes_per_token,
            created=self.created,
            draft_ratios=ratios,
        )

    def _draft_ratios(self, profile: GenerationProfile) -> dict[tuple[str, int], float]:
        """Those of the profile that make sense: the digest does not cover it. No pass writes more than the proposed
        tokens and one."""
        lengths = [(d.id, n) for d in self.drafts for n in range(1, MOST_DRAFT_TOKENS + 1)]
        known = {(draft, n): profile.drafts.get(draft, {}).get(str(n)) for draft, n in lengths}
        return {
            (draft, n): of.time_ratio
            for (draft, n), of in known.items()
            if of is not None and 1 / (n + 1) <= of.time_ratio <= SLOWEST_RATIO
        }


@dataclass(frozen=True, slots=True)
class GenerationProfile:
    """Measured seconds. ``variants`` has by variant and number of tokens computed at once the seconds of one pass;
    ``drafts`` has by draft and draft length what was measured on held-out prompts (:class:`DraftFigures`)."""

    executor: str
    threads: int
    variants: dict[str, dict[str, float]]
    drafts: dict[str, dict[str, DraftFigures]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """One draft at one length: the share of proposed tokens that the reference accepted, and its seconds per token over
    the reference's alone."""

    acceptance: float
    time_ratio: float


def best_lengths(draft: DraftSpec, ratios: Mapping[tuple[str, int], float]) -> tuple[int, ...]:
    """The numbers of draft tokens at a time that took least when they were measured, the best one first."""
    known = [n for name, n in ratios if name == draft.id]
    return tuple(sorted(known, key=lambda n: ratios[draft.id, n])[:TRIED_LENGTHS])


def weight_bytes(a: Architecture, variant: VariantEntry) -> int:
    """Bytes of weights that one token reads."""
    tied = a.vocabulary * a.hidden * 4 if variant.head_bits == 32 and a.tied else 0
    size = 0
    for kind, shape in variant_shapes(a, variant.bits, variant.head_bits).values():
        count = kind().itemsize
        for n in shape:
            count *= n
        size += count
    return size + tied + (2 * a.layers + 2) * a.hidden * 4


def manifest_fault(m: GenerationManifest) -> str:
    """What is wrong with a manifest in itself, with the field's name; empty where nothing is."""
    if m.schema_version != SCHEMA_VERSION:
        return f"schema_version is {m.schema_version}; this worker reads {SCHEMA_VERSION}"
    if not NAME.fullmatch(m.name):
        return f"name {m.name!r} must be lower-case letters, digits, '-' and '.', at most 63"
    if wrong := fault(m.architecture):
        return f"architecture.{wrong}"
    return _token_fault(m) or _variant_fault(m) or _draft_fault(m) or _file_fault(m.files, m.variants)


def _token_fault(m: GenerationManifest) -> str:
    for field_name, tokens in (("end_tokens", m.end_tokens), ("begin_tokens", m.begin_tokens)):
        if len(tokens) > MAX_END_TOKENS or any(not 0 <= t < m.architecture.vocabulary for t in tokens):
            return f"{field_name} is {list(tokens)[:8]}; at most {MAX_END_TOKENS} in [0, {m.architecture.vocabulary})"
    return "" if m.end_tokens else "end_tokens is empty; no answer would ever end"


def _variant_fault(m: GenerationManifest) -> str:
    names = [v.name for v in m.variants]
    if len(set(names)) != len(names) or len(names) > MAX_VARIANTS or names[:1] != [REFERENCE]:
        return (
            f"variants are {names}; {REFERENCE} comes first, the others have names of their own, at most {MAX_VARIANTS}"
        )
    for v in m.variants:
        allowed = (32,) if v.name == REFERENCE else BITS
        if v.bits not in allowed or v.head_bits not in (allowed if v.name == REFERENCE else (*BITS, 32)):
            return (
                f"variants: {v.name} has {v.bits} bits and a head of {v.head_bits}; of layers it may be one of "
                f"{allowed}"
            )
        if not NAME.fullmatch(v.name):
            return f"variants: name {v.name!r} must be lower-case letters, digits, '-' and '.'"
    return ""


def _draft_fault(m: GenerationManifest) -> str:
    names, ids = {v.name for v in m.variants}, [d.id for d in m.drafts]
    if len(set(ids)) != len(ids) or len(ids) > MAX_DRAFTS:
        return f"drafts are {ids}; each has an id of its own, at most {MAX_DRAFTS}"
    for d in m.drafts:
        if d.kind == "variant" and (d.id not in names or d.id == REFERENCE):
            return f"drafts: {d.id!r} is no variant of fewer bits; there are {sorted(names - {REFERENCE})}"
        if not NAME.fullmatch(d.id) or not set(d.variants) <= names:
            return f"drafts: {d.id!r} has a bad id, or is verified by {list(d.variants)}; there are {sorted(names)}"
    return next(filter(None, map(_lengths_fault, m.drafts)), "")


def _lengths_fault(d: DraftSpec) -> str:
    lengths = d.draft_tokens
    if len(lengths) > MAX_DRAFT_LENGTHS or len(set(lengths)) != len(lengths):
        return f"drafts: {d.id!r} has {len(lengths)} draft_tokens; at most {MAX_DRAFT_LENGTHS}, each once"
    wrong = next((n for n in lengths if not 1 <= n <= MOST_DRAFT_TOKENS), None)
    if wrong is not None:
        return f"drafts: draft_tokens of {d.id!r} has {wrong}; it must be in 1..{MOST_DRAFT_TOKENS}"
    return ""


def _file_fault(files: Mapping[str, FileEntry], variants: tuple[VariantEntry, ...]) -> str:
    needed = {*REQUIRED, *(v.file for v in variants)}
    if missing := sorted(needed - files.keys()):
        return f"files does not list {', '.join(missing)}"
    if unknown := sorted(files.keys() - needed - {CONFIG_FILE}):
        return f"files lists {unknown[0]!r}, which no part of such a bundle is"
    return ""
