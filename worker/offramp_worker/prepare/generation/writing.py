"""Writing a bundle for generation: its files one by one, then the manifest that names them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from offramp_core.bundle import MANIFEST_FILE
from offramp_worker.generate.llama.architecture import common_shapes, matrices
from offramp_worker.generate.llama.decoder import Cache, Decoder
from offramp_worker.generate.llama.manifest import (
    COMMON_FILE,
    PROBE_FILE,
    PROFILE_FILE,
    REQUIRED,
    SCHEMA_VERSION,
    GenerationManifest,
    GenerationProfile,
    VariantEntry,
)
from offramp_worker.generate.load import Tensors, file_entry
from offramp_worker.generate.seam import REFERENCE, DraftSpec
from offramp_worker.generate.tokenizer import CONFIG_FILE, TOKENIZER_FILE
from offramp_worker.prepare.generation.checkpoint import Checkpoint
from offramp_worker.prepare.generation.rounding import SHRINKS, FloatArray, few_bits

PROBE_TOKENS = 12
EXACT = VariantEntry(REFERENCE, 32, 32, "as it was given")


def variant_tensors(
    checkpoint: Checkpoint,
    variant: VariantEntry,
    *,
    importance: Mapping[str, FloatArray] | None = None,
    shrinks: Sequence[float] = SHRINKS,
) -> Tensors:
    """The tensors of a variant. ``importance`` has by matrix how much each of its inputs counts."""
    tensors: Tensors = {}
    for name, _, _ in matrices(checkpoint.architecture):
        bits, matrix = variant.head_bits if name == "head" else variant.bits, checkpoint.matrices[name]
        if bits == 32:
            if name != "head":
                tensors[name] = np.ascontiguousarray(matrix.T)
            elif not checkpoint.architecture.tied:
                tensors[name] = matrix
            continue
        parts = few_bits(matrix, bits, weight=(importance or {}).get(name), shrinks=shrinks)
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
    return tensors


def open_variant(
    checkpoint: Checkpoint, variant: VariantEntry, tensors: Tensors, *, threads: int, taps: bool = False
) -> Decoder:
    """A decoder straight from tensors."""
    shared = {name: checkpoint.common[name] for name in common_shapes(checkpoint.architecture)}
    return Decoder(
        checkpoint.architecture,
        bits=variant.bits,
        head_bits=variant.head_bits,
        weights={**shared, **tensors},
        threads=threads,
        taps=taps,
    )


def write_common(folder: Path, checkpoint: Checkpoint) -> None:
    """What all variants share, and the tokenizer."""
    _save({name: np.ascontiguousarray(t) for name, t in checkpoint.common.items()}, folder / COMMON_FILE)
    (folder / TOKENIZER_FILE).write_text(checkpoint.tokenizer, encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(dict(checkpoint.tokenizer_config), indent=2) + "\n", encoding="utf-8")


def write_variant(folder: Path, variant: VariantEntry, tensors: Tensors) -> None:
    _save(tensors, folder / variant.file)


def probe_tensors(checkpoint: Checkpoint, decoders: Mapping[str, Decoder], prompt: Sequence[int]) -> Tensors:
    """A prompt's first tokens and what each variant says behind them."""
    tokens = np.array(list(prompt)[:PROBE_TOKENS], dtype=np.int64)
    n = len(tokens)
    answers = {
        f"logits.{name}": d.run(Cache.of(checkpoint.architecture, n), tokens.tolist(), start=0, rows=[n - 1])[0]
        for name, d in decoders.items()
    }
    return {"tokens": tokens, **answers}


def write_rest(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    name: str,
    variants: Sequence[VariantEntry],
    drafts: Sequence[DraftSpec],
    probe: Tensors,
    profile: GenerationProfile,
    created: int,
    data: Mapping[str, Any],
) -> GenerationManifest:
    """Probe, profile and, last of all, the manifest."""
    _save(probe, folder / PROBE_FILE)
    _write_json(folder / PROFILE_FILE, asdict(profile))
    names = {*REQUIRED, CONFIG_FILE, *(v.file for v in variants)}
    files = {name: file_entry(folder / name) for name in sorted(names)}
    manifest = GenerationManifest(
        schema_version=SCHEMA_VERSION,
        task="generate",
        name=name or checkpoint.name,
        architecture=checkpoint.architecture,
        end_tokens=checkpoint.end_tokens,
        begin_tokens=checkpoint.begin_tokens,
        variants=tuple(variants),
        drafts=tuple(drafts),
        files=files,
        created=created,
        source=checkpoint.source,
        data=dict(data),
    )
    _write_json(folder / MANIFEST_FILE, asdict(manifest))
    return manifest


def _save(tensors: Mapping[str, Any], path: Path) -> None:
    save_file(dict(tensors), path)
    path.chmod(0o644)  # the library's 0600 would keep a worker with another user out


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
