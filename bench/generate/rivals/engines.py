"""Which engines are compared, where they are installed, and how they are asked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.generate.rivals.converted import genai_folder, gguf_file, huggingface_folder
from bench.peers.environments import NotInstalledError, Peer
from offramp_worker.prepare.generation.checkpoint import Checkpoint

CHILDREN = Path(__file__).parent / "children"
TORCH = ("torch==2.15.0", "transformers==5.24.0")
TRANSFORMERS = Peer("generate-transformers", TORCH, "with_transformers.py")
GENAI = Peer("generate-genai", ("onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0", *TORCH), "with_genai.py")
LLAMA = Peer("generate-llama", ("xllamacpp==2026.10.11549",), "with_llama.py")


@dataclass(frozen=True, slots=True)
class Answers:
    """Of prompts that were asked at once: each one's tokens without what ends an answer, and the processor's seconds
    after which each was there."""

    tokens: list[list[int]]
    times: list[list[float]]


Answering = Callable[[Sequence[Sequence[int]], int], Answers]


@dataclass(frozen=True, slots=True)
class Model:
    """What is answered with: a checkpoint, and the file that it was read from."""

    checkpoint: Checkpoint
    file: Path


@dataclass(frozen=True, slots=True)
class Rival:
    """An engine with a model in one precision. ``model`` makes what it reads."""

    name: str
    peer: Peer
    model: Callable[[Model], Path]


def _gguf(bits: str) -> Callable[[Model], Path]:
    def made(model: Model) -> Path:
        if model.file.suffix != ".gguf":
            raise NotInstalledError(f"reads GGUF, and the model is {model.file.name}")
        return gguf_file(model.file, bits=bits) if bits else model.file

    return made


RIVALS = (
    Rival("transformers fp32", TRANSFORMERS, lambda m: huggingface_folder(m.checkpoint)),
    Rival("onnxruntime-genai fp32", GENAI, lambda m: genai_folder(m.checkpoint, GENAI.python, precision="fp32")),
    Rival("onnxruntime-genai int4", GENAI, lambda m: genai_folder(m.checkpoint, GENAI.python, precision="int4")),
    Rival("llama.cpp F32", LLAMA, _gguf("F32")),
    Rival("llama.cpp Q8_0", LLAMA, _gguf("Q8_0")),
    Rival("llama.cpp Q4_1", LLAMA, _gguf("")),  # as it was published,
)


class EngineFailedError(Exception):
    """An engine does not answer; says what it wrote last."""


class Child:
    """An engine in a process and an environment of its own, see ``children/lines.py``."""

    def __init__(self, command: Sequence[str], *, end: Sequence[int], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._end = log, list(end)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self.version: str = self._read()["version"]
        except EngineFailedError:
            self.close()
            raise

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answers:
        """Greedy answers of at most so many tokens.

        Raises
        ------
        EngineFailedError
            The process has ended.
        """
        assert self._process.stdin is not None
        line = json.dumps({"prompts": [list(p) for p in prompts], "tokens": tokens, "end": self._end})
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineFailedError(self._last_words()) from error
        found = self._read()
        return Answers([[t for t in tokens if t not in self._end] for tokens in found["tokens"]], found["times"])

    def close(self) -> None:
        """End the process and wait for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailedError(self._last_words())
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return said[-1].strip()[:300] if said else "ended without a word"


def child_of(rival: Rival, model: Model, *, end: Sequence[int], logs: Path) -> Child:
    """A rival that is ready to answer.

    Raises
    ------
    NotInstalledError, EngineFailedError
        It cannot be had here.
    """
    read = rival.model(model)
    command = [str(rival.peer.python.absolute()), str(CHILDREN / rival.peer.module), str(read.absolute())]
    return Child(command, end=end, log=logs / f"{rival.name.replace(' ', '-')}.log")
