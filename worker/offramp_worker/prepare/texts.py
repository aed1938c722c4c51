"""Texts as token ids: JSON lines read with a model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.locations import local_path, model_file
from offramp_worker.prepare.tokens import token_types

TOKENIZER_FILE = "tokenizer.json"
SEP_NAMES = ("[SEP]", "</s>", "<sep>")
PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
CHUNK = 1_000
MAX_LINE = 16 * 1024 * 1024  # characters; a file without line breaks would be read as one
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024  # those of the largest vocabularies have some 30 MiB
PANIC = "PanicException"  # of Rust code called from Python; the type itself is not to be had

Text = str | tuple[str, str]  # one, or a pair


@dataclass(frozen=True, slots=True)
class TextReader:
    """A tokenizer, and how many tokens of a text it keeps. ``pad`` is the id that fills rows up, ``sep`` the one that
    ends each text of a pair."""

    tokenizer: Any
    most: int
    pad: int
    sep: int | None = None

    def encode(self, texts: list[Text]) -> npt.NDArray[np.int64]:
        """Token ids with the tokenizer's own marks around them, (texts, longest of them), filled up with ``pad``."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), CHUNK):
            ids += [encoded.ids for encoded in _encoded(self.tokenizer, texts[start : start + CHUNK])]
        rows = np.full((len(ids), max(map(len, ids), default=0)), self.pad, dtype=np.int64)
        for row, found in zip(rows, ids, strict=True):
            row[: len(found)] = found
        return rows


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


def load_tokenizer(path: Path, *, most: int) -> TextReader:
    """Read a ``tokenizer.json`` (the tokenizers library's format; data only, nothing in it is executed).

    Raises
    ------
    InvalidArgumentError
        The file is none, has no pad token, or the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InvalidArgumentError(
            "texts are divided into tokens by the library tokenizers, which is not installed; pip install "
            "'offramp[prepare]'"
        ) from error
    if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise InvalidArgumentError(f"tokenizer {path} has {size} bytes; at most {MAX_TOKENIZER_BYTES} are read")
    with named_panics(f"tokenizer {path} is no tokenizer.json"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.enable_truncation(most)
    padding = tokenizer.padding
    known = (tokenizer.token_to_id(name) for name in PAD_NAMES)
    pad = padding["pad_id"] if padding else next((found for found in known if found is not None), None)
    if pad is None:
        raise InvalidArgumentError(f"tokenizer {path} has no pad token ({', '.join(PAD_NAMES)}); add one")
    tokenizer.no_padding()
    return TextReader(tokenizer, most, int(pad), _separator(tokenizer, pad=int(pad)))


def _separator(tokenizer: Any, *, pad: int) -> int | None:
    """The id behind which the tokenizer's second text begins; None where its token types follow another rule."""
    (pair,) = _encoded(tokenizer, [("a", "b")])
    ids = np.array([pair.ids])
    found = (tokenizer.token_to_id(name) for name in SEP_NAMES)
    return next(
        (sep for sep in found if sep in pair.ids and token_types(ids, pad=pad, sep=sep).tolist() == [pair.type_ids]),
        None,
    )


def _encoded(tokenizer: Any, texts: list[Text]) -> list[Any]:
    """The texts as the tokenizer's library divides them; it gives up on patterns that try too many ways."""
    with named_panics("the tokenizer cannot divide a text"):
        encoded: list[Any] = tokenizer.encode_batch(texts)
    return encoded


@contextmanager
def named_panics(what: str) -> Iterator[None]:
    """One error of ours for whatever the library's Rust side raises; its panics are no ``Exception``."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise InvalidArgumentError(f"{what}: {str(error)[:200]}") from error


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
