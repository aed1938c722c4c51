"""``python -m bench.vllm.record``: what the real vLLM says to a worker, for the tests. Minutes.

Prepares a bundle of the checkpoint in :mod:`bench.vllm.tiny` and asks it what the tests ask, through
:mod:`bench.vllm.replay`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.vllm.environment import vllm_python
from bench.vllm.tiny import write_checkpoint
from offramp_worker.generate.seam import DecodingRoute, Loaded, Sampling
from offramp_worker.generate.vllm.load import VllmSettings, load_vllm
from offramp_worker.prepare.generation.vllm import VllmRequest, prepare_vllm
from offramp_worker.prepare.progress import Reporter

RECORDING = Path(__file__).with_name("recording.json.gz")
TOKENS = 12
PROMPTS = tuple(
    f"{who} {did}" for who in ("One", "Two", "Three", "Four", "Five") for did in ("is", "was", "sees", "runs")
)
CONFIGURATIONS: dict[str, Any] = {
    "context_length": 128,
    "enforce_eager": True,
    "configurations": [
        {"name": "fp32", "dtype": "float32"},
        {
            "name": "ngram",
            "dtype": "float32",
            "draft": {"kind": "ngram", "tokens": 3, "by_batch_size": [[1, 4, 3], [5, 64, 0]]},
        },
        {"name": "bf16", "dtype": "bfloat16"},
    ],
}
SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=5)


def python_that(folder: Path, *arguments: str) -> str:
    """A program that takes the place of a Python that has vLLM: :mod:`bench.vllm.replay` with these arguments."""
    script = folder / "python"
    replay = Path(__file__).with_name("replay.py").resolve()
    quoted = " ".join(f"'{argument}'" for argument in (sys.executable, str(replay), *arguments))
    script.write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
    script.chmod(0o755)
    return str(script)


def request(folder: Path) -> VllmRequest:
    """A bundle of the tiny checkpoint, below ``folder``."""
    if not (folder / "tiny").is_dir():
        write_checkpoint(folder / "tiny")
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return VllmRequest(
        CONFIGURATIONS,
        folder,
        str(data),
        folder / "bundle",
        model=str(folder / "tiny"),
        name="tiny",
        answer_tokens=TOKENS,
    )


def ask(loaded: Loaded) -> None:
    """What tests ask for beside what :func:`offramp_worker.prepare.generation.vllm.prepare_vllm` does: answers as they
    are served, without log probabilities, and a sampled one."""
    for variant in loaded.bundle.variants:
        for prompt in PROMPTS:
            tokens = loaded.tokenizer.encode(prompt)
            for sampling in (Sampling(), Sampling(logprobs=True), SAMPLED):
                _whole(loaded, tokens, sampling, variant.name)


def _whole(loaded: Loaded, tokens: list[int], sampling: Sampling, variant: str) -> None:
    engine = loaded.engine
    number = engine.start(tokens, max_tokens=TOKENS, sampling=sampling, route=DecodingRoute(variant))
    while not (progress := engine.step([number], prompt_tokens=64)[0]).ended:
        pass
    if progress.error:
        raise SystemExit(progress.error)


def main() -> int:
    RECORDING.unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="offramp-record-"))
    python = python_that(work, "record", str(RECORDING.resolve()), str(vllm_python()))
    settings = VllmSettings(python=python)
    print(prepare_vllm(request(work), Reporter(), settings=settings))
    loaded = load_vllm(work / "bundle", threads=1, cache_bytes=2**28, settings=settings)
    ask(loaded)
    loaded.engine.close()
    shutil.rmtree(work)
    print(f"{RECORDING}: {RECORDING.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
