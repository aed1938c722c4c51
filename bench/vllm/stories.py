"""stories260K as a checkpoint that vLLM takes: whole, cut off after some layers, or with further ones that add nothing.

vLLM for CPUs has no attention for heads of 8. Here they are 32: the three in four rotary pairs that the model lacks
stay zero, and queries are as much larger as their product is divided by more, so every logit is the model's own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, processors

from offramp_worker.generate.llama.architecture import Architecture
from offramp_worker.prepare.generation.checkpoint import Checkpoint, FloatArray
from offramp_worker.prepare.generation.sources import read_checkpoint

HEAD_SIZE = 32


def write_stories(weights: str, folder: Path, *, layers: int | None = None) -> None:
    """The checkpoint at ``weights`` as transformers saves one, with so many ``layers``: the first alone, or
    further ones that are computed and add nothing, as if a large model wrote the same."""
    model = read_checkpoint(weights)
    kept = model.architecture.layers if layers is None else layers
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(model, kept), indent=1))
    _tokenizer(model).save(str(folder / "tokenizer.json"))
    special = {**model.tokenizer_config, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1))
    tensors = {
        "model.embed_tokens.weight": model.common["embedding"],
        "model.norm.weight": model.common["norm"],
        **{name: tensor for i in range(kept) for name, tensor in _layer(model, i).items()},
    }
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def _config(model: Checkpoint, layers: int) -> dict[str, object]:
    a = model.architecture
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": HEAD_SIZE,
        "vocab_size": a.vocabulary,
        "max_position_embeddings": a.context_length,
        "rms_norm_eps": a.norm_epsilon,
        "rope_theta": a.rotary_base,
        "hidden_act": "silu",
        "tie_word_embeddings": a.tied,
        "bos_token_id": model.begin_tokens[0],
        "eos_token_id": list(model.end_tokens),
        "torch_dtype": "float32",
    }


def _tokenizer(model: Checkpoint) -> Tokenizer:
    """The model's own, which says by itself what begins a text."""
    library, (begin,) = Tokenizer.from_str(model.tokenizer), model.begin_tokens
    word = library.id_to_token(begin)
    library.post_processor = processors.TemplateProcessing(single=f"{word} $A", special_tokens=[(word, begin)])
    return library


def _layer(model: Checkpoint, i: int) -> dict[str, FloatArray]:
    a, own = model.architecture, min(i, model.architecture.layers - 1)
    ours, theirs, adds = f"layers.{own}", f"model.layers.{i}", np.float32(own == i)
    queries, keys, values = np.split(
        model.matrices[f"{ours}.qkv"], np.cumsum([a.heads * a.head_width, a.kv_heads * a.head_width])
    )
    gate, up = np.split(model.matrices[f"{ours}.gate_up"], 2)
    return {
        f"{theirs}.self_attn.q_proj.weight": _rotary(queries, a) * math.sqrt(HEAD_SIZE / a.head_size),
        f"{theirs}.self_attn.k_proj.weight": _rotary(keys, a),
        f"{theirs}.self_attn.v_proj.weight": _wide(values, a),
        f"{theirs}.self_attn.o_proj.weight": _wide(model.matrices[f"{ours}.out"].T, a).T * adds,
        f"{theirs}.mlp.gate_proj.weight": gate,
        f"{theirs}.mlp.up_proj.weight": up,
        f"{theirs}.mlp.down_proj.weight": model.matrices[f"{ours}.down"] * adds,
        f"{theirs}.input_layernorm.weight": model.common[f"{ours}.norm1"],
        f"{theirs}.post_attention_layernorm.weight": model.common[f"{ours}.norm2"],
    }


def _rotary(rows: FloatArray, a: Architecture) -> FloatArray:
    """Each pair where the wider head turns it as fast: every fourth is the model's own."""
    halves = rows.reshape(-1, 2, a.head_width // 2, a.hidden)
    found = np.zeros((len(halves), 2, HEAD_SIZE // 2, a.hidden), np.float32)
    found[:, :, :: HEAD_SIZE // a.head_size] = halves[:, :, : a.head_size // 2]
    return found.reshape(-1, a.hidden)


def _wide(rows: FloatArray, a: Architecture) -> FloatArray:
    heads = rows.reshape(-1, a.head_width, a.hidden)
    found = np.zeros((len(heads), HEAD_SIZE, a.hidden), np.float32)
    found[:, : a.head_size] = heads[:, : a.head_size]
    return found.reshape(-1, a.hidden)
