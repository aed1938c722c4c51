"""GGUF files of the architecture ``llama``, weights of whatever bits made float32 again, with the tokenizer that they
carry.

What the fields mean stands in ggml's docs/gguf.md; how texts are divided for each ``tokenizer.ggml.pre`` in llama.cpp's
llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.generate.llama.architecture import Architecture, fault
from offramp_worker.prepare.generation.checkpoint import (
    Checkpoint,
    FloatArray,
    Projections,
    checked,
    sentence_piece,
    slug,
)

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "</s>")  # where they are control tokens
PARTS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIVIDERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def read_gguf(file: Path) -> Checkpoint:
    """A checkpoint with its tokenizer.

    Raises
    ------
    ModelRefusedError
        It is truncated, of another architecture, or holds what is not understood; names the field.
    """
    g = _File(file)
    kind = g.field("general.architecture")
    if kind != "llama":
        raise ModelRefusedError(
            f"{file.name}: general.architecture is {kind!r}; a decoder of the Llama family is taken, 'llama'"
        )
    a = _architecture(g)
    if wrong := fault(a):
        raise ModelRefusedError(f"{file.name}: {wrong}")
    common = {"embedding": g.take("token_embd.weight"), "norm": g.take("output_norm.weight")}
    matrices: dict[str, FloatArray] = {}
    for i in range(a.layers):
        common |= {
            f"layers.{i}.norm1": g.take(f"blk.{i}.attn_norm.weight"),
            f"layers.{i}.norm2": g.take(f"blk.{i}.ffn_norm.weight"),
        }
        parts = {ours: g.take(f"blk.{i}.{theirs}.weight") for ours, theirs in PARTS.items()}
        try:
            matrices |= Projections(**parts, side_by_side=True).of(a, i)
        except ValueError as error:
            raise ModelRefusedError(
                f"{file.name}: the matrices of blk.{i} do not have the sizes that its fields say: {error}"
            ) from error
    matrices["head"] = common["embedding"] if a.tied else g.take("output.weight")
    if g.tensors:
        raise ModelRefusedError(f"{file.name}: {min(g.tensors)} is not part of a decoder of the Llama family")
    tokenizer = _tokenizer(g)
    return checked(
        Checkpoint(
            name=slug(file.stem),
            source=file.name,
            architecture=a,
            common=common,
            matrices=matrices,
            tokenizer=tokenizer.to_str(),
            begin_tokens=_begins(g),
            end_tokens=_ends(g),
            tokenizer_config=_config(g),
        )
    )


class _File:
    """Fields and tensors of a file; each tensor is taken once."""

    def __init__(self, file: Path) -> None:
        from gguf import GGUFReader

        self.name, self._known = file.name, dict[str, Any]()
        try:
            reader = GGUFReader(file)
            self.fields = reader.fields
            self.tensors = {t.name: t for t in reader.tensors}
        except Exception as error:  # the library checks little, and fails in many ways
            raise ModelRefusedError(f"{file.name}: is no GGUF file, or a truncated one: {str(error)[:200]}") from error

    def field(self, name: str, default: Any = None) -> Any:
        """A field's value; without a default it must be there."""
        if name not in self._known:
            found = self.fields.get(name)
            try:
                self._known[name] = found.contents() if found is not None else None
            except Exception as error:
                raise ModelRefusedError(f"{self.name}: {name} cannot be read: {str(error)[:200]}") from error
        value = default if self._known[name] is None else self._known[name]
        if value is None:
            raise ModelRefusedError(f"{self.name}: {name} is missing")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.field(name, default)
        if not isinstance(value, int):
            raise ModelRefusedError(f"{self.name}: {name} is {str(value)[:80]}; it must be a whole number")
        return value

    def take(self, name: str) -> FloatArray:
        """A tensor as float32, rows first."""
        from gguf.quants import dequantize

        found = self.tensors.pop(name, None)
        if found is None:
            raise ModelRefusedError(f"{self.name}: {name} is missing")
        try:
            return np.ascontiguousarray(dequantize(found.data, found.tensor_type), dtype=np.float32)
        except Exception as error:
            raise ModelRefusedError(
                f"{self.name}: {name} ({found.tensor_type.name}) cannot be read: {str(error)[:200]}"
            ) from error


def _architecture(g: _File) -> Architecture:
    if g.field("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in g.tensors:
        raise ModelRefusedError(
            f"{g.name}: its rotary frequencies are stretched; give the checkpoint with config.json instead"
        )
    if experts := g.whole("llama.expert_count", 0):
        raise ModelRefusedError(f"{g.name}: llama.expert_count is {experts}; a model without experts is taken")
    hidden, heads = g.whole("llama.embedding_length"), g.whole("llama.attention.head_count")
    base, epsilon = g.field("llama.rope.freq_base", 10000.0), g.field("llama.attention.layer_norm_rms_epsilon")
    size = g.whole("llama.attention.key_length", g.whole("llama.rope.dimension_count", hidden // max(heads, 1)))
    return Architecture(
        hidden=hidden,
        intermediate=g.whole("llama.feed_forward_length"),
        layers=g.whole("llama.block_count"),
        heads=heads,
        kv_heads=g.whole("llama.attention.head_count_kv", heads),
        head_size=size,
        vocabulary=len(g.field("tokenizer.ggml.tokens")),
        context_length=g.whole("llama.context_length"),
        norm_epsilon=round(float(epsilon), 12),
        rotary_base=float(base),
        tied="output.weight" not in g.tensors,
    )


def _tokenizer(g: _File) -> Tokenizer:
    kind, words, types = (
        g.field("tokenizer.ggml.model"),
        g.field("tokenizer.ggml.tokens"),
        g.field("tokenizer.ggml.token_type"),
    )
    if len(types) != len(words) or not all(isinstance(w, str) for w in words) or len(set(words)) != len(words):
        raise ModelRefusedError(f"{g.name}: tokenizer.ggml.tokens must be different texts, each with a type")
    special = [i for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)]
    if kind == "llama":
        prefix = "▁" if g.field("tokenizer.ggml.add_space_prefix", True) else ""
        try:
            return sentence_piece(
                words,
                [float(s) for s in g.field("tokenizer.ggml.scores")],
                special=special,
                unknown=g.whole("tokenizer.ggml.unknown_token_id", 0),
                prefix=prefix,
            )
        except (InvalidArgumentError, LookupError, ValueError) as error:
            raise ModelRefusedError(f"{g.name}: its tokenizer cannot be built: {error}") from error
    if kind != "gpt2":
        raise ModelRefusedError(f"{g.name}: tokenizer.ggml.model is {kind!r}; llama and gpt2 are taken")
    pre = g.field("tokenizer.ggml.pre", "gpt-2")
    if pre not in DIVIDERS:
        raise ModelRefusedError(f"{g.name}: tokenizer.ggml.pre is {pre!r}; {', '.join(DIVIDERS)} are taken")
    merges = [tuple(m.split(" ")) for m in g.field("tokenizer.ggml.merges")]
    ids = {word: i for i, word in enumerate(words)}
    try:
        library = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare ones
        raise ModelRefusedError(f"{g.name}: tokenizer.ggml.merges do not fit its tokens: {error}") from error
    library.pre_tokenizer, library.decoder = DIVIDERS[pre](), decoders.ByteLevel()
    library.add_special_tokens([AddedToken(words[i], special=True, normalized=False) for i in special])
    return library


def _begins(g: _File) -> tuple[int, ...]:
    usual = g.field("tokenizer.ggml.model") == "llama"
    return (g.whole("tokenizer.ggml.bos_token_id"),) if g.field("tokenizer.ggml.add_bos_token", usual) else ()


def _ends(g: _File) -> tuple[int, ...]:
    words, types = g.field("tokenizer.ggml.tokens"), g.field("tokenizer.ggml.token_type")
    known = [words.index(w) for w in ENDS if w in words]
    ids = [g.whole("tokenizer.ggml.eos_token_id"), *(i for i in known if types[i] == CONTROL)]
    return tuple(dict.fromkeys(ids))


def _config(g: _File) -> dict[str, str]:
    words, found = g.field("tokenizer.ggml.tokens"), dict[str, str]()
    for name, field in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = g.field(f"tokenizer.ggml.{field}_token_id", -1)
        if isinstance(token, int) and 0 <= token < len(words):
            found[name] = words[token]
    template = g.field("tokenizer.chat_template", "")
    return found | ({"chat_template": template} if isinstance(template, str) and template else {})
