"""What a decoder of the Llama family is: its sizes, and the tensors that they call for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
MOST = {
    "hidden": 2**15,
    "intermediate": 2**17,
    "layers": 512,
    "heads": 512,
    "kv_heads": 512,
    "head_size": 512,
    "vocabulary": 2**20,
    "context_length": 2**20,
}
BLOCK = 32  # weights that share one scale and one zero point
BITS = (4, 8)
HEAD_STEP = 16  # ONNX Runtime's attention takes heads of multiples of this


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How Llama 3.1 and later stretch the rotary frequencies beyond the context that they were first trained on."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder. ``tied``: the embedding is the head as well.

    Attention is computed with heads of ``head_width``: ``head_size`` and zeros that change nothing.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context_length: int
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    tied: bool = True

    @property
    def head_width(self) -> int:
        return -(-self.head_size // HEAD_STEP) * HEAD_STEP

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def attended(self) -> int:
        """Width of what attention gives."""
        return self.heads * self.head_width

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, float32."""
        return 2 * self.layers * self.kv_heads * self.head_width * 4


def fault(a: Architecture) -> str:
    """What is wrong with these sizes, with the field's name; empty where nothing is."""
    for name, most in MOST.items():
        if not 1 <= getattr(a, name) <= most:
            return f"{name} is {getattr(a, name)}; it must lie in [1, {most}]"
    if a.heads % a.kv_heads:
        return f"heads is {a.heads}; it must be a multiple of kv_heads, {a.kv_heads}"
    if a.head_size % 2:
        return f"head_size is {a.head_size}; it must be even"
    if not 0 < a.norm_epsilon < 1 or not 1 < a.rotary_base < 1e12:
        return f"norm_epsilon {a.norm_epsilon} or rotary_base {a.rotary_base} is out of range"
    scaling = a.rotary_scaling
    if scaling is not None and not (
        1 <= scaling.factor <= 1024
        and 0 < scaling.low_frequency_factor < scaling.high_frequency_factor <= 1024
        and 1 <= scaling.original_context <= MOST["context_length"]
    ):
        values = {field.name: getattr(scaling, field.name) for field in fields(scaling)}
        return f"rotary_scaling is out of range: {values}"
    return ""


def matrices(a: Architecture) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of every matrix that exists once per variant; a tied head among them, because variants
    may round it."""
    for i in range(a.layers):
        yield f"layers.{i}.qkv", a.qkv, a.hidden
        yield f"layers.{i}.out", a.hidden, a.attended
        yield f"layers.{i}.gate_up", 2 * a.intermediate, a.hidden
        yield f"layers.{i}.down", a.hidden, a.intermediate
    yield "head", a.vocabulary, a.hidden


def common_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Tensors that all variants share: the embedding and the weights of the norms, float32."""
    norms = {f"layers.{i}.{norm}": (a.hidden,) for i in range(a.layers) for norm in ("norm1", "norm2")}
    return {"embedding": (a.vocabulary, a.hidden), "norm": (a.hidden,), **norms}


def variant_shapes(a: Architecture, bits: int, head_bits: int) -> dict[str, tuple[type[Any], tuple[int, ...]]]:
    """Type and shape of every tensor of a variant. Matrices in float32 are (inputs, outputs), a head (outputs, inputs);
    those of few bits are in blocks of :data:`BLOCK` inputs, as ``MatMulNBits`` has them. A tied head in float32 is the
    embedding, and not here."""
    shapes: dict[str, tuple[type[Any], tuple[int, ...]]] = {}
    for name, n, k in matrices(a):
        width = head_bits if name == "head" else bits
        if width == 32:
            if name == "head" and not a.tied:
                shapes[name] = np.float32, (n, k)
            elif name != "head":
                shapes[name] = np.float32, (k, n)
            continue
        blocks = -(-k // BLOCK)
        shapes[f"{name}.values"] = np.uint8, (n, blocks, BLOCK * width // 8)
        shapes[f"{name}.scales"] = np.float32, (n * blocks,)
        shapes[f"{name}.zeros"] = np.uint8, (n * -(-blocks * width // 8),)
    return shapes


def rotary_tables(a: Architecture) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines (context_length, head_width / 2); those of the zeros turn nothing. Scaling as Llama 3.1 has it:
    slow frequencies are divided, fast ones kept, those between blended."""
    frequency = a.rotary_base ** (-np.arange(0, a.head_size, 2, dtype=np.float64) / a.head_size)
    scaling = a.rotary_scaling
    if scaling is not None:
        turns = scaling.original_context * frequency / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angles = np.zeros((a.context_length, a.head_width // 2))
    angles[:, : a.head_size // 2] = np.arange(a.context_length, dtype=np.float64)[:, None] * frequency
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
