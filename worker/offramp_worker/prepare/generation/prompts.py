"""Prompts from JSON lines: a string, or an object with ``prompt``, ``text`` or ``messages``; no other field is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from offramp_core.errors import InvalidArgumentError
from offramp_worker.generate.tokenizer import BundleTokenizer
from offramp_worker.prepare.source.locations import local_path
from offramp_worker.preprocess.texts import named_panics

MAX_LINE = 2**20  # characters
MAX_PROMPTS = 100_000
MIN_PROMPTS = 8


def read_prompts(
    uri: str, tokenizer: BundleTokenizer, *, begin: Sequence[int], longest: int, vocabulary: int
) -> list[list[int]]:
    """The prompts as tokens, in their order and each once; longer ones are cut to ``longest``.

    Raises
    ------
    InvalidArgumentError
        Names the line at fault.
    """
    path = local_path(uri, field="data")
    found: dict[tuple[int, ...], None] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if len(line) > MAX_LINE:
                    raise InvalidArgumentError(f"data {path}: line {number} has more than {MAX_LINE} characters")
                with named_panics(f"data {path}: line {number} cannot be divided into tokens"):
                    tokens = _tokens(_parsed(line, f"data {path}: line {number}"), tokenizer, begin)[:longest]
                if not tokens or max(tokens) >= vocabulary:
                    raise InvalidArgumentError(
                        f"data {path}: line {number} has no tokens, or some that the model does not know"
                    )
                found[tuple(tokens)] = None
                if len(found) == MAX_PROMPTS:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"data {path} is not a readable text file: {error}") from error
    if len(found) < MIN_PROMPTS:
        raise InvalidArgumentError(f"data {path} has {len(found)} different prompts; at least {MIN_PROMPTS} are needed")
    return [list(tokens) for tokens in found]


def _parsed(line: str, where: str) -> str | list[Mapping[str, Any]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{where} is no JSON: {str(error)[:200]}") from error
    if isinstance(value, dict):
        value = next((value[name] for name in ("messages", "prompt", "text") if name in value), None)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(m) for m in value):
        return value
    raise InvalidArgumentError(
        f'{where} must be a text, or an object with prompt, text, or messages such as [{{"role": "user", "content": '
        f'"…"}}]'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _tokens(prompt: str | list[Mapping[str, Any]], tokenizer: BundleTokenizer, begin: Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        return [*begin, *tokenizer.encode(prompt)]
    tokens = tokenizer.chat(prompt)
    return tokens if tokens[: len(begin)] == list(begin) else [*begin, *tokens]
