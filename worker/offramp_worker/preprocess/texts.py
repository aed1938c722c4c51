"""Texts as token ids, by a model's own ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError

SEP_NAMES = ("[SEP]", "</s>", "<sep>")
PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
CHUNK = 1_000
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

    @property
    def ids(self) -> int:
        """One more than the largest id."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def load_tokenizer(path: Path, *, most: int) -> TextReader:
    """Read a ``tokenizer.json`` (the tokenizers library's format; data only, nothing in it is executed).

    Raises
    ------
    InvalidArgumentError
        The file is none, has no pad token, or the library is not installed.
    """
    if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise InvalidArgumentError(f"tokenizer {path} has {size} bytes; at most {MAX_TOKENIZER_BYTES} are read")
    return tokenizer_of(path.read_bytes(), name=f"tokenizer {path}", most=most)


def tokenizer_of(content: bytes, *, name: str, most: int) -> TextReader:
    """The tokenizer in the ``content`` of a file, which errors call ``name``.

    Raises
    ------
    InvalidArgumentError
        As :func:`load_tokenizer`.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InvalidArgumentError(
            "texts are divided into tokens by the library tokenizers, which is not installed; pip install "
            "'offramp[prepare]'"
        ) from error
    with named_panics(f"{name} is no tokenizer.json"):
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.enable_truncation(most)
    padding = tokenizer.padding
    known = (tokenizer.token_to_id(name) for name in PAD_NAMES)
    pad = padding["pad_id"] if padding else next((found for found in known if found is not None), None)
    if pad is None:
        raise InvalidArgumentError(f"{name} has no pad token ({', '.join(PAD_NAMES)}); add one")
    tokenizer.no_padding()
    return TextReader(tokenizer, most, int(pad), _separator(tokenizer, pad=int(pad)))


def token_types(ids: npt.NDArray[Any], *, pad: int, sep: int | None) -> npt.NDArray[Any]:
    """Which text of a pair each token belongs to, as BERT has it: 1 from behind the first separator on, 0 at padding.

    >>> token_types(np.array([[101, 7, 102, 8, 102, 0]]), pad=0, sep=102).tolist()
    [[0, 0, 0, 1, 1, 0]]
    """
    if sep is None:
        return np.zeros_like(ids)
    ends = ids == sep
    types: npt.NDArray[Any] = ((np.cumsum(ends, axis=1) - ends > 0) & (ids != pad)).astype(ids.dtype)
    return types


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
