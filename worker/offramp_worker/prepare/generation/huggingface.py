"""Checkpoints in a folder as transformers saves them: config.json, safetensors, tokenizer.json. Nothing is
unpickled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from offramp_core.errors import ModelRefusedError
from offramp_worker.generate.llama.architecture import Architecture, RotaryScaling, fault
from offramp_worker.prepare.generation.checkpoint import (
    Checkpoint,
    FloatArray,
    Projections,
    begin_tokens_of,
    checked,
    slug,
)

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
MAX_JSON = 16 * 2**20
KINDS = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
KEPT = ("chat_template", "bos_token", "eos_token", "unk_token", "pad_token")
PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}


def read_huggingface(folder: Path) -> Checkpoint:
    """A checkpoint with its tokenizer.

    Raises
    ------
    ModelRefusedError
        It is no decoder of the Llama family, or its files do not fit each other; names the field.
    """
    config = _json(folder / CONFIG)
    a = architecture_of(config)
    content = _Content(folder, _files(folder))
    common: dict[str, FloatArray] = {
        "embedding": content.take("model.embed_tokens.weight", (a.vocabulary, a.hidden)),
        "norm": content.take("model.norm.weight", (a.hidden,)),
    }
    matrices: dict[str, FloatArray] = {}
    for i in range(a.layers):
        at = f"model.layers.{i}"
        common |= {
            f"layers.{i}.{ours}": content.take(f"{at}.{theirs}.weight", (a.hidden,)) for ours, theirs in NORMS.items()
        }
        shapes = _shapes(a)
        parts = {ours: content.take(f"{at}.{theirs}.weight", shapes[ours]) for ours, theirs in PARTS.items()}
        matrices |= Projections(**parts, side_by_side=False).of(a, i)
    head = "lm_head.weight"
    matrices["head"] = common["embedding"] if a.tied else content.take(head, (a.vocabulary, a.hidden))
    content.check_rest(ignored=(head,) if a.tied else ())
    tokenizer = _text(folder / "tokenizer.json", 256 * 2**20)
    return checked(
        Checkpoint(
            name=slug(folder.name),
            source=folder.name,
            architecture=a,
            common=common,
            matrices=matrices,
            tokenizer=tokenizer,
            begin_tokens=begin_tokens_of(tokenizer),
            end_tokens=_ends(folder, config),
            tokenizer_config=_tokenizer_config(folder),
        )
    )


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Sizes by a config.json.

    Raises
    ------
    ModelRefusedError
        Names the field, and what would be taken.
    """
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if kind not in KINDS or classes not in ([], [KINDS[str(kind)]]):
        both = "an encoder with a decoder; " if config.get("is_encoder_decoder") is True else ""
        raise ModelRefusedError(
            f"{CONFIG}: model_type is {kind!r}, architectures {classes!r}: {both}a decoder alone is taken: "
            f"{', '.join(KINDS.values())}"
        )
    for field, taken in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("sliding_window", None),
        ("quantization_config", None),
    ):
        if config.get(field, taken) not in (taken, None):
            raise ModelRefusedError(f"{CONFIG}: {field} is {str(config[field])[:80]}; {taken!r} is taken")
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    a = Architecture(
        hidden=hidden,
        intermediate=_whole(config, "intermediate_size"),
        layers=_whole(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        head_size=_whole(config, "head_dim", hidden // max(heads, 1)),
        vocabulary=_whole(config, "vocab_size"),
        context_length=_whole(config, "max_position_embeddings"),
        norm_epsilon=_number(config, "rms_norm_eps", 1e-6),
        rotary_base=_number({**config, **rotary}, "rope_theta", 10000.0),
        rotary_scaling=_scaling(rotary),
        tied=config.get("tie_word_embeddings", False) is True,
    )
    if wrong := fault(a):
        raise ModelRefusedError(f"{CONFIG}: {wrong}")
    return a


def _scaling(rotary: Any) -> RotaryScaling | None:
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelRefusedError(f"{CONFIG}: the rotary type is {kind!r}; default and llama3 are taken")
    return RotaryScaling(
        _number(rotary, "factor"),
        _number(rotary, "low_freq_factor"),
        _number(rotary, "high_freq_factor"),
        _whole(rotary, "original_max_position_embeddings"),
    )


def _shapes(a: Architecture) -> dict[str, tuple[int, int]]:
    q, kv = a.heads * a.head_size, a.kv_heads * a.head_size
    wide, narrow = (a.intermediate, a.hidden), (a.hidden, a.intermediate)
    return {
        "q": (q, a.hidden),
        "k": (kv, a.hidden),
        "v": (kv, a.hidden),
        "out": (a.hidden, q),
        "gate": wide,
        "up": wide,
        "down": narrow,
    }


@dataclass(slots=True)
class _Content:
    """Tensors of one or more safetensors files; each is taken once."""

    folder: Path
    files: dict[str, str]

    def take(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """A tensor as float32; its shape is compared before memory is taken."""
        file = self.files.pop(name, None)
        if file is None:
            raise ModelRefusedError(f"{self.folder.name}: {name} is missing; {CONFIG} calls for it")
        try:
            # torch reads bfloat16, which numpy does not know
            with safe_open(self.folder / file, framework="pt") as content:
                found = tuple(content.get_slice(name).get_shape())
                if found != shape:
                    raise ModelRefusedError(f"{file}: {name} is {list(found)}; {CONFIG} calls for {list(shape)}")
                return np.ascontiguousarray(content.get_tensor(name).float().numpy())
        except (OSError, SafetensorError) as error:
            raise ModelRefusedError(f"{file}: cannot be read ({str(error)[:200]}); is it whole?") from error

    def check_rest(self, *, ignored: tuple[str, ...]) -> None:
        """What is left would change what the model says."""
        left = sorted(n for n in self.files if n not in ignored and not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise ModelRefusedError(
                f"{self.files[left[0]]}: {left[0][:100]} is not part of a decoder of the Llama family"
            )


def _files(folder: Path) -> dict[str, str]:
    """Which file has which tensor."""
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(
            isinstance(f, str) and re.fullmatch(r"[\w.-]+\.safetensors", f) for f in index.values()
        ):
            raise ModelRefusedError(f"{INDEX}: weight_map must name safetensors files of this folder")
        return dict(index)
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelRefusedError(
            f"{folder.name}: has no {WEIGHTS}; save the model with safetensors (pickles are not read)"
        )
    try:
        with safe_open(file, framework="np") as content:
            return dict.fromkeys(content.keys(), WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelRefusedError(f"{WEIGHTS}: cannot be read ({str(error)[:200]}); is it whole?") from error


def _ends(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    more = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    found = list[int]()
    for value in (config.get("eos_token_id"), more.get("eos_token_id")):
        found += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, int)]
    if not found:
        raise ModelRefusedError(f"{CONFIG}: eos_token_id is missing; no answer would ever end")
    return tuple(dict.fromkeys(found))


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    config = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    kept = {name: config[name] for name in KEPT if config.get(name) is not None}
    if (folder / "chat_template.jinja").is_file():
        kept["chat_template"] = _text(folder / "chat_template.jinja", 2**20)
    return kept


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path, MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise ModelRefusedError(f"{path.name}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelRefusedError(f"{path.name}: must be an object")
    return value


def _text(path: Path, most: int) -> str:
    try:
        if path.stat().st_size > most:
            raise ModelRefusedError(f"{path.name}: has {path.stat().st_size} bytes; at most {most} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelRefusedError(f"{path.parent.name}: {path.name} cannot be read ({error})") from error


def _whole(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = default if config.get(field) is None else config[field]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelRefusedError(f"{CONFIG}: {field} is {value!r}; it must be a whole number")
    return value


def _number(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = default if config.get(field) is None else config[field]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelRefusedError(f"{CONFIG}: {field} is {value!r}; it must be a number")
    return float(value)
