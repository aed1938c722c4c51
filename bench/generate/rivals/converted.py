"""One checkpoint in the formats of other engines, kept by content: the very numbers that a bundle was made of."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench.peers.environments import NotInstalledError
from offramp_worker.generate.llama.architecture import Architecture, FloatArray
from offramp_worker.prepare.generation.checkpoint import Checkpoint
from offramp_worker.prepare.generation.huggingface import CONFIG, NORMS, PARTS, WEIGHTS

BUILD = Path("build/generate/rivals")
THREADS = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}


def huggingface_folder(checkpoint: Checkpoint) -> Path:
    """As transformers reads it, float32."""
    folder = BUILD / f"huggingface-{_content(checkpoint)}"
    if not (folder / CONFIG).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(checkpoint), folder / WEIGHTS, metadata={"format": "pt"})
        (folder / "tokenizer.json").write_text(checkpoint.tokenizer)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        (folder / CONFIG).write_text(json.dumps(_config(checkpoint), indent=1))
    return folder


def genai_folder(checkpoint: Checkpoint, python: Path, *, precision: str) -> Path:
    """As onnxruntime-genai's own builder makes it for CPUs, told to take one thread.

    Raises
    ------
    NotInstalledError
        The last line of what the builder said.
    """
    source = huggingface_folder(checkpoint)
    folder = BUILD / f"genai-{precision}-{_content(checkpoint)}"
    config = folder / "genai_config.json"
    if not config.is_file():
        builder = [str(python.absolute()), "-m", "onnxruntime_genai.models.builder", "--execution_provider", "cpu"]
        places = ["--input", str(source), "--output", str(folder), "--cache_dir", str(BUILD / "cache")]
        command = [*builder, *places, "--precision", precision, "--extra_options", "hf_token=false"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise NotInstalledError(f"onnxruntime-genai's builder: {said[-1]}")
        told = json.loads(config.read_text())
        told["model"]["decoder"]["session_options"] |= THREADS
        config.write_text(json.dumps(told, indent=1))
    return folder


def gguf_file(original: Path, *, bits: str) -> Path:
    """A GGUF file with its matrices in other bits (``F32``, ``Q8_0``); everything else is copied."""
    import gguf

    digest = hashlib.sha256(original.read_bytes()).hexdigest()[:12]
    out = BUILD / f"{original.stem}-{digest}.{bits}.gguf"
    if out.is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    reader, kind = gguf.GGUFReader(original), gguf.GGMLQuantizationType[bits]
    unfinished = out.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, arch=reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], items)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)
    return out


def _content(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256(json.dumps(asdict(checkpoint.architecture)).encode())
    for tensors in (checkpoint.common, checkpoint.matrices):
        for name in sorted(tensors):
            digest.update(np.ascontiguousarray(tensors[name]))
    return digest.hexdigest()[:12]


def _tensors(checkpoint: Checkpoint) -> dict[str, FloatArray]:
    a = checkpoint.architecture
    found = {
        "model.embed_tokens.weight": checkpoint.common["embedding"],
        "model.norm.weight": checkpoint.common["norm"],
    }
    for i in range(a.layers):
        at = f"model.layers.{i}"
        found |= {f"{at}.{theirs}.weight": checkpoint.common[f"layers.{i}.{ours}"] for ours, theirs in NORMS.items()}
        found |= {f"{at}.{PARTS[ours]}.weight": part for ours, part in _parts(checkpoint, i).items()}
    if not a.tied:
        found["lm_head.weight"] = checkpoint.matrices["head"]
    return {name: np.ascontiguousarray(tensor, dtype=np.float32) for name, tensor in found.items()}


def _parts(checkpoint: Checkpoint, layer: int) -> dict[str, FloatArray]:
    """The matrices of a layer apart again, without the zeros that filled up its heads."""
    a, of = checkpoint.architecture, checkpoint.matrices
    qkv, gate_up = of[f"layers.{layer}.qkv"], of[f"layers.{layer}.gate_up"]
    queries, keys = a.heads * a.head_width, a.kv_heads * a.head_width
    q, k, v = np.split(qkv, [queries, queries + keys])
    return {
        "q": _turned_back(q, a),
        "k": _turned_back(k, a),
        "v": _narrow(v, a.head_width, a.head_size),
        "out": _narrow(of[f"layers.{layer}.out"].T, a.head_width, a.head_size).T,
        "gate": gate_up[: a.intermediate],
        "up": gate_up[a.intermediate :],
        "down": of[f"layers.{layer}.down"],
    }


def _turned_back(x: FloatArray, a: Architecture) -> FloatArray:
    return _narrow(x, a.head_width // 2, a.head_size // 2)


def _narrow(x: FloatArray, width: int, kept: int) -> FloatArray:
    """The first ``kept`` rows of each ``width``."""
    return x.reshape(-1, width, x.shape[1])[:, :kept].reshape(-1, x.shape[1])


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    a = checkpoint.architecture
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rotary_base}
    if a.rotary_scaling is not None:
        s = a.rotary_scaling
        rotary |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_frequency_factor,
            "high_freq_factor": s.high_frequency_factor,
            "original_max_position_embeddings": s.original_context,
        }
    ends = list(checkpoint.end_tokens)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_size,
        "vocab_size": a.vocabulary,
        "max_position_embeddings": a.context_length,
        "rms_norm_eps": a.norm_epsilon,
        "rope_theta": a.rotary_base,
        "rope_parameters": rotary,
        "tie_word_embeddings": a.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": next(iter(checkpoint.begin_tokens), ends[0]),
        "eos_token_id": ends,
        "pad_token_id": ends[0],
        "torch_dtype": "float32",
    }
