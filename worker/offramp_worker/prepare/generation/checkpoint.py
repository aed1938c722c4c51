"""A checkpoint as it was read, whatever format it came in, and what the formats share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.generate.llama.architecture import Architecture, common_shapes, fault, matrices
from offramp_worker.preprocess.texts import named_panics

FloatArray = npt.NDArray[np.float32]
SPACE = "▁"  # of SentencePiece


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A decoder of the Llama family, float32.

    ``common`` has the embedding and the norms, ``matrices`` each matrix as (outputs, inputs); both are named as
    :mod:`offramp_worker.generate.llama.architecture` has them. Rotary pairs are (i, i + head_size / 2). ``tokenizer``
    is the content of a tokenizer.json, ``tokenizer_config`` what is kept of the file of that name: the chat template
    and the names of special tokens.
    """

    name: str
    source: str
    architecture: Architecture
    common: Mapping[str, FloatArray]
    matrices: Mapping[str, FloatArray]
    tokenizer: str
    begin_tokens: tuple[int, ...]
    end_tokens: tuple[int, ...]
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)


def checked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, once sizes, weights and tokenizer fit each other.

    Raises
    ------
    ModelRefusedError
        Names the field, and what would be taken.
    """
    a = checkpoint.architecture
    if wrong := fault(a):
        raise ModelRefusedError(f"{checkpoint.source}: {wrong}")
    wanted = {**common_shapes(a), **{name: (n, k) for name, n, k in matrices(a)}}
    found = {**checkpoint.common, **checkpoint.matrices}
    for name, shape in wanted.items():
        tensor = found.get(name)
        if tensor is None or tensor.shape != shape:
            has = "is missing" if tensor is None else f"is {list(tensor.shape)}"
            raise ModelRefusedError(f"{checkpoint.source}: {name} {has}; its sizes call for {list(shape)}")
        if not np.isfinite(tensor).all():
            raise ModelRefusedError(f"{checkpoint.source}: {name} holds what is no finite number")
    tokens = 1 + max(_library(checkpoint.tokenizer).get_vocab(with_added_tokens=True).values(), default=-1)
    if tokens > a.vocabulary:
        raise ModelRefusedError(
            f"{checkpoint.source}: the tokenizer has {tokens} tokens and the model knows {a.vocabulary}; give the "
            "model's own tokenizer.json"
        )
    if not checkpoint.end_tokens or any(
        not 0 <= t < a.vocabulary for t in (*checkpoint.end_tokens, *checkpoint.begin_tokens)
    ):
        raise ModelRefusedError(
            f"{checkpoint.source}: end tokens {list(checkpoint.end_tokens)} or begin tokens "
            f"{list(checkpoint.begin_tokens)} are not in [0, {a.vocabulary})"
        )
    return checkpoint


def slug(text: str) -> str:
    """A name for the protocol."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-") or "model"


def begin_tokens_of(tokenizer: str) -> tuple[int, ...]:
    """What the tokenizer's own template puts before a text."""
    return tuple(_library(tokenizer).encode("", add_special_tokens=True).ids)


def _library(tokenizer: str) -> Tokenizer:
    with named_panics("tokenizer.json cannot be read"):
        return Tokenizer.from_str(tokenizer)


@dataclass(frozen=True, slots=True)
class Projections:
    """The matrices of one layer as checkpoints have them, (outputs, inputs). ``side_by_side``: rotary pairs are (2i, 2i
    + 1), as llama2.c and GGUF keep them, not (i, i + half)."""

    q: FloatArray
    k: FloatArray
    v: FloatArray
    out: FloatArray
    gate: FloatArray
    up: FloatArray
    down: FloatArray
    side_by_side: bool

    def of(self, a: Architecture, layer: int) -> dict[str, FloatArray]:
        """As the graph wants them: joined where they read the same, heads filled up with zeros to the width that the
        kernels take.

        Raises
        ------
        ValueError
            A matrix has another shape than the sizes call for.
        """
        q, k = self._turned(self.q, a, a.heads), self._turned(self.k, a, a.kv_heads)
        v = _wide(self.v.reshape(a.kv_heads, a.head_size, a.hidden), a.head_width)
        out = _wide(self.out.T.reshape(a.heads, a.head_size, a.hidden), a.head_width)
        at = f"layers.{layer}"
        return {
            f"{at}.qkv": np.concatenate([q, k, v]),
            f"{at}.out": np.ascontiguousarray(out.T),
            f"{at}.gate_up": np.concatenate([self.gate, self.up]),
            f"{at}.down": np.ascontiguousarray(self.down),
        }

    def _turned(self, x: FloatArray, a: Architecture, heads: int) -> FloatArray:
        half = a.head_size // 2
        if self.side_by_side:
            halves = x.reshape(heads, half, 2, a.hidden).swapaxes(1, 2)
        else:
            halves = x.reshape(heads, 2, half, a.hidden)
        return _wide(halves.reshape(heads * 2, half, a.hidden), a.head_width // 2)


def _wide(x: FloatArray, width: int) -> FloatArray:
    """(groups, rows, k) with zero rows up to ``width`` behind each group, as (groups * width, k)."""
    groups, rows, k = x.shape
    filled = np.zeros((groups, width, k), dtype=np.float32)
    filled[:, :rows] = x
    return filled.reshape(groups * width, k)


def sentence_piece(
    words: list[str], scores: list[float], *, special: list[int], unknown: int, prefix: str = ""
) -> Tokenizer:
    """A SentencePiece vocabulary as byte-pair merges: two pieces join where the whole is a piece too, those of the
    highest score first.

    ``words`` spell a space as SPACE, bytes as ``<0x0A>``. ``prefix`` goes before each text.
    """
    ids = {word: i for i, word in enumerate(words)}
    if len(ids) != len(words):
        raise InvalidArgumentError("the tokenizer names a piece twice")
    plain = [w for i, w in enumerate(words) if i not in special and not (w.startswith("<0x") and len(w) == 6)]
    pairs = ((w, w[:i], w[i:]) for w in plain for i in range(1, len(w)))
    merges = sorted(((scores[ids[w]], a, b) for w, a, b in pairs if a in ids and b in ids), key=lambda m: -m[0])
    model = models.BPE(
        vocab=ids, merges=[(a, b) for _, a, b in merges], byte_fallback=True, unk_token=words[unknown], fuse_unk=True
    )
    library = Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend(prefix)] if prefix else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken(words[i], special=True, normalized=False) for i in special])
    return library
