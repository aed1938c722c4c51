"""stories260K in the formats that checkpoints come in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import stories
from safetensors.numpy import save_file
from story_bundles import checkpoint
from tokenizers import Tokenizer, processors

from offramp_worker.prepare.generation.checkpoint import Checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
}
THEIRS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def halves(x: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rotary pairs as transformers has them."""
    return np.ascontiguousarray(x.reshape(heads, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape))


def write_huggingface(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    w, tensors = stories.weights(), dict[str, Any]()
    tensors["model.embed_tokens.weight"] = w.tensors["embedding"]
    tensors["model.norm.weight"] = w.tensors["final_norm"]
    for i in range(w.layers):
        at = f"model.layers.{i}"
        for ours, theirs in THEIRS.items():
            x = w.tensors[ours][i]
            tensors[f"{at}.{theirs}.weight"] = halves(x, {"q": w.heads, "k": w.kv_heads}[ours]) if ours in "qk" else x
        tensors[f"{at}.input_layernorm.weight"] = w.tensors["attention_norm"][i]
        tensors[f"{at}.post_attention_layernorm.weight"] = w.tensors["ffn_norm"][i]
    save_file({name: np.array(t) for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    library = Tokenizer.from_str(checkpoint().tokenizer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "chat_template": stories.CHAT, "auto_map": "evil.py"})
    )
    return folder


def write_gguf(file: Path, **fields: Any) -> Path:
    w = stories.weights()
    writer = gguf.GGUFWriter(file, fields.pop("architecture", "llama"))
    writer.add_context_length(w.context)
    writer.add_embedding_length(w.dim)
    writer.add_block_count(w.layers)
    writer.add_feed_forward_length(172)
    writer.add_head_count(w.heads)
    writer.add_head_count_kv(w.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    model = json.loads(checkpoint().tokenizer)
    words = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    ranks = {a + b: -float(i) for i, (a, b) in enumerate(map(tuple, model["model"]["merges"]))}
    writer.add_tokenizer_model(fields.pop("tokenizer", "llama"))
    writer.add_token_list(words)
    writer.add_token_scores([ranks.get(word, 0.0) for word in words])
    writer.add_token_types([3 if i in (1, 2) else 1 for i in range(len(words))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)
    for name, value in fields.items():
        writer.add_string(name.replace("__", "."), value)
    names = {
        "attention_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    }
    writer.add_tensor("token_embd.weight", np.array(w.tensors["embedding"]))
    writer.add_tensor("output_norm.weight", np.array(w.tensors["final_norm"]))
    for i in range(w.layers):
        for ours, theirs in names.items():
            writer.add_tensor(f"blk.{i}.{theirs}.weight", np.array(w.tensors[ours][i]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def same(a: Checkpoint, b: Checkpoint) -> None:
    assert replace(a.architecture, norm_epsilon=0) == replace(b.architecture, norm_epsilon=0)
    assert a.architecture.norm_epsilon == pytest.approx(b.architecture.norm_epsilon)
    for ours, theirs in ((a.common, b.common), (a.matrices, b.matrices)):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert a.begin_tokens == b.begin_tokens == (1,)
    for text in ("Once upon a time", "Tim's  dog: ünï \n 😀"):
        assert (
            Tokenizer.from_str(a.tokenizer).encode(text, add_special_tokens=False).ids
            == Tokenizer.from_str(b.tokenizer).encode(text, add_special_tokens=False).ids
        )
