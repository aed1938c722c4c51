"""Texts of a JSON lines file, and the tokenizer beside a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from offramp_core.bundle import TOKENIZER_FILE
from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.source.locations import local_path, model_file
from offramp_worker.preprocess.texts import Text

MAX_LINE = 16 * 1024 * 1024  # characters; a file without line breaks would be read as one


def find_tokenizer(model: str, given: str) -> Path | None:
    """The tokenizer file: the one given, else a ``tokenizer.json`` in the folder of the model's file or weights.

    Raises
    ------
    InvalidArgumentError
        The one given does not exist.
    """
    if given:
        file = local_path(given, field="tokenizer")
        if not file.is_file():
            raise InvalidArgumentError(f"tokenizer {given} does not exist or is not a file; give a tokenizer.json")
        return file
    beside = model_file(model).parent / TOKENIZER_FILE
    return beside if beside.is_file() else None


def read_texts(path: Path) -> list[Text]:
    """Texts of a JSON lines file: each line a string, or an object with a string ``text`` and, for a pair,
    ``text_pair``; no other field is read.

    Raises
    ------
    InvalidArgumentError
        Names the line at fault.
    """
    try:
        return list(_lines(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"data {path} is not a readable text file: {error}") from error


def _lines(path: Path) -> Iterator[Text]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), ""), start=1):
            if len(line) == MAX_LINE:
                raise InvalidArgumentError(f"data {path}, line {number} has more than {MAX_LINE} characters")
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidArgumentError(f"data {path}, line {number} is no JSON: {error}") from error
            text = value.get("text") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise InvalidArgumentError(
                    f'data {path}, line {number}: needs a string "text", as in {{"text": "a good film"}}'
                )
            pair = value.get("text_pair") if isinstance(value, dict) else None
            if not isinstance(pair, str | None):
                raise InvalidArgumentError(f"data {path}, line {number}: text_pair must be a string, the second text")
            yield text if pair is None else (text, pair)
