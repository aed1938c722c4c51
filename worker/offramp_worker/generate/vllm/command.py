"""A configuration as vLLM's command line and environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offramp_worker.generate.vllm.manifest import MODELS, Configuration, Draft, VllmManifest

SERVED_NAME = "model"  # what we call it in requests
OLDEST = (0, 32)  # that takes all of these options; what is newer says by itself what it no longer takes
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "TZ")
_PASSED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "VLLM_", "OMP_", "TORCH", "TRITON_")
_NEVER = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_OWN = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Room:
    """Where a process runs: the bundle's ``folder``, the ``socket`` that it listens at, the bytes of its caches, and
    how many answers it computes side by side."""

    folder: Path
    socket: Path
    cache_bytes: int
    running: int


def command(manifest: VllmManifest, configuration: Configuration, room: Room) -> list[str]:
    """What follows the name of the Python that has vLLM. It listens at the socket alone, reads local safetensors alone,
    and runs no code of a checkpoint."""
    options: dict[str, Any] = {
        "model": str(room.folder.resolve() / MODELS / configuration.model),
        "served-model-name": SERVED_NAME,
        "uds": str(room.socket),
        "load-format": "safetensors",
        "dtype": configuration.dtype,
        "max-model-len": manifest.context_length,
        "max-num-seqs": room.running,
        "max-num-batched-tokens": max(manifest.context_length, 2048),
        "kv-cache-memory-bytes": room.cache_bytes,
        # Of a GPU, what must be free at the start: nearly all by default, and no process after the first would start.
        # How much is taken hangs on the bytes alone.
        "gpu-memory-utilization": 0.01,
        "kv-cache-dtype": configuration.kv_cache_dtype,
        "generation-config": "vllm",
        "max-logprobs": 20,
    }
    if configuration.quantization:
        options["quantization"] = configuration.quantization
    if configuration.draft is not None:
        options["speculative-config"] = json.dumps(_speculative(configuration.draft, folder=room.folder.resolve()))
    flags = ["--disable-uvicorn-access-log", *(["--enforce-eager"] if manifest.enforce_eager else [])]
    named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *named, *flags]


def _speculative(draft: Draft, *, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {"num_speculative_tokens": draft.tokens}
    if draft.kind == "ngram":
        config |= {"method": "ngram", "prompt_lookup_max": draft.longest_match, "prompt_lookup_min": 1}
    else:
        config |= {"method": "draft_model", "model": str(folder / MODELS / draft.model)}
    if draft.by_batch_size:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in draft.by_batch_size]
    return config


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """What of the worker's environment vLLM needs; no token of ours, no key of anybody.

    Examples
    --------
    >>> sorted(environment({"PATH": "/bin", "OFFRAMP_TOKEN_SHA256": "x", "VLLM_API_KEY": "y"}).keys() - _OWN.keys())
    ['PATH']
    """
    passed = {
        name: value
        for name, value in env.items()
        if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and not any(word in name for word in _NEVER)
    }
    return passed | _OWN


def version_fault(text: str) -> str:
    """Why this version of vLLM will not do; empty where it will, or cannot be told (a build from source).

    Examples
    --------
    >>> version_fault("0.32.0+cpu"), version_fault("dev")
    ('', '')
    >>> version_fault("0.9.1")
    'vLLM is 0.9.1; at least 0.32 is needed'
    """
    parts = text.split(".")[:2]
    if not all(part.isdigit() for part in parts) or len(parts) < 2:
        return ""
    found = (int(parts[0]), int(parts[1]))
    return "" if found >= OLDEST else f"vLLM is {text[:40]}; at least {'.'.join(map(str, OLDEST))} is needed"
