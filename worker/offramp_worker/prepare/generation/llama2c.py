"""Checkpoints of llama2.c (``stories260K.bin`` with ``tok512.bin``): a header of seven numbers, then float32 weights.

The format stands in llama2.c's export.py (version 0).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from offramp_core.errors import ModelRefusedError
from offramp_worker.generate.llama.architecture import Architecture
from offramp_worker.prepare.generation.checkpoint import (
    SPACE,
    Checkpoint,
    FloatArray,
    Projections,
    checked,
    sentence_piece,
    slug,
)

HEADER = struct.Struct("<7i")
BEGIN, END = 1, 2
MAX_PIECES, MAX_PIECE_BYTES = 2**20, 2**12


def read_llama2c(weights: Path, vocabulary: Path) -> Checkpoint:
    """A checkpoint with its tokenizer.

    Raises
    ------
    ModelRefusedError
        Sizes and bytes do not fit each other, or the tokenizer does not fit the model.
    """
    raw = np.memmap(weights, dtype=np.uint8, mode="r")
    if len(raw) < HEADER.size:
        raise ModelRefusedError(f"{weights.name}: has {len(raw)} bytes; a header of llama2.c has {HEADER.size}")
    dim, hidden, layers, heads, kv_heads, signed, context = HEADER.unpack(bytes(raw[: HEADER.size]))
    if min(dim, hidden, layers, heads, kv_heads, abs(signed), context) < 1 or dim % heads:
        raise ModelRefusedError(
            f"{weights.name}: its header {[dim, hidden, layers, heads, kv_heads, signed, context]} is none of llama2.c"
        )
    a = Architecture(dim, hidden, layers, heads, kv_heads, dim // heads, abs(signed), context, tied=signed > 0)
    shapes = _shapes(a)
    wanted = HEADER.size + 4 * sum(math.prod(shape) for shape in shapes.values())
    if len(raw) != wanted:
        raise ModelRefusedError(
            f"{weights.name}: has {len(raw)} bytes and its header calls for {wanted}; it is truncated, or of another "
            "version"
        )
    tensors, at = dict[str, FloatArray](), HEADER.size
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        tensors[name] = np.frombuffer(raw[at:end], "<f4").reshape(shape).astype(np.float32)
        at = end
    pieces, scores = _pieces(vocabulary, a.vocabulary)
    library = sentence_piece(pieces, scores, special=[BEGIN, END], unknown=0)
    return checked(
        Checkpoint(
            name=slug(weights.stem),
            source=weights.name,
            architecture=a,
            common=_common(tensors, a),
            matrices=_matrices(tensors, a),
            tokenizer=library.to_str(),
            begin_tokens=(BEGIN,),
            end_tokens=(BEGIN, END),
            tokenizer_config={"bos_token": pieces[BEGIN], "eos_token": pieces[END], "unk_token": pieces[0]},
        )
    )


def _shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    q, kv, turns = a.heads * a.head_size, a.kv_heads * a.head_size, (a.context_length, a.head_size // 2)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (a.vocabulary, a.hidden),
        "norm1": (a.layers, a.hidden),
        "q": (a.layers, q, a.hidden),
        "k": (a.layers, kv, a.hidden),
        "v": (a.layers, kv, a.hidden),
        "o": (a.layers, a.hidden, q),
        "norm2": (a.layers, a.hidden),
        "gate": (a.layers, a.intermediate, a.hidden),
        "down": (a.layers, a.hidden, a.intermediate),
        "up": (a.layers, a.intermediate, a.hidden),
        "norm": (a.hidden,),
        "cosines": turns,
        "sines": turns,
    }
    return shapes if a.tied else shapes | {"head": (a.vocabulary, a.hidden)}


def _common(t: dict[str, FloatArray], a: Architecture) -> dict[str, FloatArray]:
    norms = {f"layers.{i}.{norm}": t[norm][i] for i in range(a.layers) for norm in ("norm1", "norm2")}
    return {"embedding": t["embedding"], "norm": t["norm"], **norms}


def _matrices(t: dict[str, FloatArray], a: Architecture) -> dict[str, FloatArray]:
    found = {"head": t["embedding"] if a.tied else t["head"]}
    for i in range(a.layers):
        layer = {name: t[name][i] for name in ("q", "k", "v", "gate", "up", "down")}
        found |= Projections(out=t["o"][i], side_by_side=True, **layer).of(a, i)
    return found


def _pieces(file: Path, count: int) -> tuple[list[str], list[float]]:
    """The pieces of a tokenizer.bin as SentencePiece spells them, and their scores."""
    raw, at = file.read_bytes(), 4
    pieces, scores = list[str](), list[float]()
    try:
        while at < len(raw) and len(pieces) < MAX_PIECES:
            score, size = struct.unpack_from("<fi", raw, at)
            if not 0 <= size <= MAX_PIECE_BYTES or at + 8 + size > len(raw) or not math.isfinite(score):
                raise ModelRefusedError(f"{file.name}: piece {len(pieces)} reaches beyond the file")
            pieces.append(raw[at + 8 : at + 8 + size].decode())
            scores.append(score)
            at += 8 + size
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelRefusedError(f"{file.name}: piece {len(pieces)} cannot be read: {error}") from error
    if len(pieces) != count:
        raise ModelRefusedError(
            f"{file.name}: has {len(pieces)} pieces and the model knows {count}; give the model's own tokenizer"
        )
    special = {BEGIN: pieces[BEGIN].strip("\n"), END: pieces[END].strip("\n")}
    return [special.get(i, piece.replace(" ", SPACE)) for i, piece in enumerate(pieces)], scores
