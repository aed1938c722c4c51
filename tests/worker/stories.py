"""A small real engine behind the seam: stories260K in numpy, with caches of keys and values, drafts and a lossy
variant.

Every token is computed. ``fp32`` is the model; ``int4`` the same with weights rounded to 4 bits, so answers differ at
times. The one draft, ``ngram``, proposes what followed the last two tokens when they came before.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.needed import leave_out
from tokenizers import Tokenizer, decoders, models, normalizers

from offramp_core.errors import InvalidArgumentError
from offramp_worker.generate.seam import (
    REFERENCE,
    CacheMemory,
    DecodingRoute,
    DraftSpec,
    GenerationBundle,
    Loaded,
    NoRoomError,
    Sampling,
    SequenceProgress,
    Token,
    VariantSpec,
)
from offramp_worker.generate.tokenizer import BundleTokenizer

FOLDER = Path(os.environ.get("OFFRAMP_DATA", "../shared/data")) / "ckpt_stories260k"
BEGIN, END = 1, 2
CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def data_file(name: str) -> Path:
    """A file of the checkpoint."""
    path = FOLDER / name
    if not path.is_file():
        leave_out(f"{path} is missing; set OFFRAMP_DATA to the folder that holds {FOLDER.name}")
    return path


@lru_cache(maxsize=1)
def tokenizer() -> BundleTokenizer:
    """``tok512.bin`` as a tokenizer of the library, with the chat marks that the template needs."""
    raw = data_file("tok512.bin").read_bytes()
    at, pieces = 4, list[tuple[str, float]]()
    while at < len(raw):
        score, size = struct.unpack_from("<fi", raw, at)
        pieces.append((raw[at + 8 : at + 8 + size].decode(), score))
        at += 8 + size
    words = [text.strip("\n") if i in (BEGIN, END) else text.replace(" ", "▁") for i, (text, _) in enumerate(pieces)]
    ids = {word: i for i, word in enumerate(words)}
    merges = [
        (pieces[ids[w]][1], w[:i], w[i:])
        for w in words
        for i in range(1, len(w))
        if w[:i] in ids and w[i:] in ids and ids[w] > 258
    ]
    merges.sort(key=lambda m: -m[0])
    model = models.BPE(
        vocab=ids, merges=[(a, b) for _, a, b in merges], byte_fallback=True, unk_token=words[0], fuse_unk=True
    )
    library = Tokenizer(model)
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([words[BEGIN], words[END]])
    return BundleTokenizer(library, template=CHAT, special={"bos_token": words[BEGIN], "eos_token": words[END]})


@dataclass(frozen=True)
class Weights:
    """Weights by name; matrices are (layers, out, in)."""

    dim: int
    heads: int
    kv_heads: int
    layers: int
    context: int
    vocabulary: int
    tensors: dict[str, np.ndarray[Any, Any]]

    @property
    def head(self) -> int:
        return self.dim // self.heads


@lru_cache(maxsize=2)
def weights(bits: int = 32) -> Weights:
    raw = data_file("stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("<7i", raw)
    kv = dim // heads * kv_heads
    shapes = {
        "embedding": (abs(vocabulary), dim),
        "attention_norm": (layers, dim),
        "q": (layers, dim, dim),
        "k": (layers, kv, dim),
        "v": (layers, kv, dim),
        "o": (layers, dim, dim),
        "ffn_norm": (layers, dim),
        "gate": (layers, hidden, dim),
        "down": (layers, dim, hidden),
        "up": (layers, hidden, dim),
        "final_norm": (dim,),
    }
    at, tensors = 28, {}
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        tensors[name] = np.frombuffer(raw, "<f4", n, at).reshape(shape)
        at += 4 * n
        if bits < 32 and name in ("q", "k", "v", "o", "gate", "down", "up"):
            scale = np.abs(tensors[name]).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
            tensors[name] = np.round(tensors[name] / scale) * scale
    return Weights(dim, heads, kv_heads, layers, context, abs(vocabulary), tensors)


def _norm(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight


@dataclass
class Growing:
    """One answer as it grows. ``cache`` is (2, layers, tokens, kv)."""

    w: Weights
    route: DecodingRoute
    sampling: Sampling
    pending: list[int]
    prompt: list[int]
    most: int
    cache: np.ndarray[Any, Any]
    length: int = 0
    answer: list[int] = field(default_factory=list)

    def forward(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Logits (n, vocabulary) behind each of n new tokens."""
        w, t, n, start = self.w, self.w.tensors, len(tokens), self.length
        x = t["embedding"][list(tokens)]
        angles = np.arange(start, start + n)[:, None] / 10000 ** (np.arange(0, w.head, 2) / w.head)
        turn = np.exp(1j * angles)[:, None, :]

        def rotated(y: Any, heads: int) -> Any:
            pairs = y.reshape(n, heads, w.head // 2, 2)
            z = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
            return np.stack([z.real, z.imag], axis=-1).reshape(n, heads, w.head)

        end = start + n
        visible = np.arange(end)[None, :] <= np.arange(start, end)[:, None]
        for i in range(w.layers):
            h = _norm(x, t["attention_norm"][i])
            q = rotated(h @ t["q"][i].T, w.heads)
            self.cache[0, i, start:end] = rotated(h @ t["k"][i].T, w.kv_heads).reshape(n, -1)
            self.cache[1, i, start:end] = h @ t["v"][i].T
            k = self.cache[0, i, :end].reshape(end, w.kv_heads, w.head).repeat(w.heads // w.kv_heads, axis=1)
            v = self.cache[1, i, :end].reshape(end, w.kv_heads, w.head).repeat(w.heads // w.kv_heads, axis=1)
            s = np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(w.head)
            s = np.where(visible[None], s, -np.inf)
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hnm,mhd->nhd", p, v).reshape(n, -1) @ t["o"][i].T
            h = _norm(x, t["ffn_norm"][i])
            gate = h @ t["gate"][i].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ t["up"][i].T)) @ t["down"][i].T
        self.length = end
        return _norm(x, t["final_norm"]) @ t["embedding"].T


class StoriesEngine:
    """See the module. ``before_step`` is called before each step; tests hold the engine or break it there."""

    def __init__(
        self, *, cache_bytes: int = 64 * 2**20, before_step: Callable[[], None] = lambda: None, name: str = "stories"
    ) -> None:
        w = weights()
        per_token = 2 * w.layers * w.kv_heads * w.head * 4
        self.bundle = GenerationBundle(
            name=name,
            digest="sha256:" + "5" * 64,
            context_length=w.context,
            vocabulary=w.vocabulary,
            end_tokens=(BEGIN, END),
            variants=(VariantSpec(REFERENCE, 1_056_540), VariantSpec("int4", 200_000)),
            drafts=(DraftSpec("ngram", "ngram"),),
            begin_tokens=(BEGIN,),
            cache_bytes_per_token=per_token,
            created=1_700_000_000,
        )
        self.before_step, self._limit = before_step, cache_bytes
        self._sequences: dict[int, Growing] = {}
        self.positions, self._number, self._lock = 0, 0, threading.Lock()
        self.threads: set[int] = set()
        self.broken = ""  # what every run fails with
        self.step_seconds = 0.0

    def cache_bytes(self, tokens: int, *, route: DecodingRoute) -> int:
        return tokens * self.bundle.cache_bytes_per_token

    def memory(self) -> CacheMemory:
        with self._lock:
            used = sum(s.cache.nbytes for s in self._sequences.values())
        return CacheMemory(used, self._limit)

    def fault(self) -> str:
        return ""

    def available(self, variant: str) -> bool:
        return self.bundle.variant(variant) is not None

    def wake(self) -> None:
        """No step waits."""

    def start(self, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling, route: DecodingRoute) -> int:
        self.threads.add(threading.get_ident())
        if self.bundle.variant(route.variant) is None or (route.draft and self.bundle.draft(route.draft) is None):
            raise InvalidArgumentError(f"{route!r}: there is no such variant or draft")
        assert 0 < len(prompt) < self.bundle.context_length and max_tokens > 0
        w = weights(32 if route.variant == REFERENCE else 4)
        total = min(w.context, len(prompt) + max_tokens)
        if self.memory().used_bytes + self.cache_bytes(total, route=route) > self._limit:
            raise NoRoomError(f"{total} tokens do not fit")
        cache = np.zeros((2, w.layers, total, w.kv_heads * w.head), dtype=np.float32)
        sequence = Growing(w, route, sampling, list(prompt), list(prompt), total - len(prompt), cache)
        with self._lock:
            self._number += 1
            self._sequences[self._number] = sequence
        return self._number

    def step(self, sequences: Sequence[int], *, prompt_tokens: int) -> list[SequenceProgress]:
        self.threads.add(threading.get_ident())
        self.before_step()
        if self.broken:
            raise RuntimeError(self.broken)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return [self._step(number, prompt_tokens) for number in sequences]

    def _step(self, number: int, prompt_tokens: int) -> SequenceProgress:
        s = self._sequences[number]
        if len(s.pending) > 1:
            piece, s.pending = (
                s.pending[: min(prompt_tokens, len(s.pending) - 1)],
                s.pending[len(s.pending[: min(prompt_tokens, len(s.pending) - 1)]) :],
            )
            s.forward(piece)
            self.positions += len(piece)
            return SequenceProgress(number, prompt_left=len(s.pending))
        proposed = self._proposed(s)
        start = s.length
        logits = s.forward([*s.pending, *proposed])
        self.positions += 1 + len(proposed)
        tokens: list[Token] = []
        for i, row in enumerate(logits):
            token = self._choose(s, row)
            tokens.append(token)
            s.answer.append(token.id)
            if i == len(proposed) or token.id != proposed[i] or token.id in self.bundle.end_tokens:
                break
            if len(s.answer) == s.most:
                break
        s.length, s.pending = start + len(tokens), [tokens[-1].id]
        ended = tokens[-1].id in self.bundle.end_tokens or len(s.answer) >= s.most
        accepted = sum(a.id == b for a, b in zip(tokens, proposed, strict=False))
        if ended:
            with self._lock:
                del self._sequences[number]
        return SequenceProgress(number, tuple(tokens), 0, ended, len(proposed), accepted)

    @staticmethod
    def _proposed(s: Growing) -> list[int]:
        if not s.route.draft or not s.sampling.greedy:
            return []
        text, room = s.prompt + s.answer, min(s.route.draft_tokens, s.most - len(s.answer) - 1)
        for i in range(len(text) - 3, 0, -1):
            if text[i - 1 : i + 1] == text[-2:]:
                return text[i + 1 : i + 1 + room] if room > 0 else []
        return []

    @staticmethod
    def _choose(s: Growing, row: Any) -> Token:
        logp = row - row.max()
        logp = logp - np.log(np.exp(logp).sum())
        order = np.argsort(-row, kind="stable")
        margin = float(row[order[0]] - row[order[1]])
        chosen = int(order[0])
        if not s.sampling.greedy:
            scaled = np.exp((row - row.max()) / s.sampling.temperature)
            p = (scaled / scaled.sum())[order]
            kept = np.cumsum(p) - p < s.sampling.top_p
            p = np.where(kept, p, 0.0)
            draw = np.random.default_rng([s.sampling.seed, len(s.answer)]).random() * p.sum()
            chosen = int(order[min(int(np.searchsorted(np.cumsum(p), draw, side="right")), int(kept.sum()) - 1)])
        if not s.sampling.logprobs:
            return Token(chosen, margin=margin)
        top = tuple((int(i), float(logp[i])) for i in order[: s.sampling.top_logprobs])
        return Token(chosen, float(logp[chosen]), top, margin)

    def cancel(self, sequence: int) -> None:
        self.threads.add(threading.get_ident())
        with self._lock:
            self._sequences.pop(sequence, None)

    def probe(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def close(self) -> None:
        self._sequences.clear()


def load(folder: Path, *, threads: int, cache_bytes: int) -> Loaded:
    """A :class:`offramp_worker.generate.seam.Loader`."""
    engine = StoriesEngine(cache_bytes=cache_bytes)
    return Loaded(engine.bundle, engine, tokenizer())


def _empty(w: Weights) -> np.ndarray[Any, Any]:
    return np.zeros((2, w.layers, w.context, w.kv_heads * w.head), dtype=np.float32)


def greedy(prompt: str, *, n: int, variant: str = REFERENCE) -> tuple[list[int], str]:
    """Tokens and text of a greedy answer: one after the other, then the whole text at once, as if there were no cache,
    which must say the same behind each of its tokens."""
    w, ids = weights(32 if variant == REFERENCE else 4), [BEGIN, *tokenizer().encode(prompt)]
    growing, whole = (Growing(w, DecodingRoute(), Sampling(), [], [], 0, _empty(w)) for _ in range(2))
    answer, new = list[int](), ids
    while len(answer) < n and len(ids) + len(answer) < w.context:
        new = [int(np.argmax(growing.forward(new)[-1]))]
        answer += new
        if new[0] in (BEGIN, END):
            break
    assert np.argmax(whole.forward([*ids, *answer[:-1]])[len(ids) - 1 :], axis=-1).tolist() == answer
    decoder = tokenizer().decoder()
    return answer, "".join(map(decoder.add, answer)) + decoder.finish()
