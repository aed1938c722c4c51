"""A decoder of 100,000 numbers from a seed, with a tokenizer of bytes: enough for vLLM, and small enough to be made
anew wherever its recorded answers are used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KEYS, HEAD_SIZE, LAYERS, INNER, VOCABULARY, CONTEXT = 128, 4, 2, 32, 2, 256, 288, 256
END = 256


def write_checkpoint(folder: Path, *, seed: int = 7) -> None:
    """A checkpoint as transformers saves them. Of one seed it is the same everywhere."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(), indent=1))
    _tokenizer().save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<end>", "model_max_length": CONTEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": END,
        "torch_dtype": "float32",
    }


def _tokenizer() -> Tokenizer:
    """One token for each byte, without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def _weights(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, *, scale: float = 1.0) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, scale=4.0)}
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        found |= {
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN, scale=2.0),
            f"{name}.self_attn.k_proj.weight": matrix(KEYS * HEAD_SIZE, HIDDEN, scale=2.0),
            f"{name}.self_attn.v_proj.weight": matrix(KEYS * HEAD_SIZE, HIDDEN, scale=2.0),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE, scale=2.0),
            f"{name}.mlp.gate_proj.weight": matrix(INNER, HIDDEN, scale=2.0),
            f"{name}.mlp.up_proj.weight": matrix(INNER, HIDDEN, scale=2.0),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INNER, scale=2.0),
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    return found | {"model.norm.weight": np.ones(HIDDEN, np.float32)}
