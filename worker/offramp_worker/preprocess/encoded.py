"""What the doors hand in, strings of bytes, and get back: rows of the model's input."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import MANIFEST_FILE, TOKENIZER_FILE, ImageSteps, Preprocess, TensorSpec
from offramp_core.errors import InvalidArgumentError, InvalidBundleError, OfframpError
from offramp_worker.preprocess.images import Budget, check_steps, decoded, row_shape
from offramp_worker.preprocess.texts import Text, TextReader, tokenizer_of

MAX_REQUEST_PIXELS = 64_000_000  # of a request's images together: about a second of decoding
MAX_TEXT_BYTES = 256 * 1024  # a text is cut to some hundred tokens, after it was divided
MAX_REQUEST_TEXT_BYTES = 2 * 1024 * 1024  # dividing takes some 70 times as much memory

String = bytes | str  # as it came in binary form, or in JSON
Array = npt.NDArray[Any]


class UnreadableError(OfframpError):
    """A string of a request is no image or text that the model takes. ``index`` says which."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class Encoded:
    """The steps before a model. Any thread may call it."""

    def __init__(self, steps: Preprocess, model: TensorSpec, dtype: npt.DTypeLike, reader: TextReader | None) -> None:
        self._steps, self._model, self._dtype, self._reader = steps, model, np.dtype(dtype), reader

    def rows(self, strings: Sequence[String], *, n: int) -> Array:
        """The ``n`` rows (n, ...) of a request's strings: images, in JSON as base64, or texts, pairs one after the
        other.

        Raises
        ------
        UnreadableError
            One of them is none.
        """
        if self._steps.image is not None:
            return _images(strings, self._steps.image)
        assert self._reader is not None
        return self._texts(_plain_texts(strings), self._reader, n=n)

    def _texts(self, texts: Sequence[str], reader: TextReader, *, n: int) -> Array:
        rows: list[Text] = list(texts) if len(texts) == n else list(zip(texts[::2], texts[1::2], strict=True))
        try:
            ids = reader.encode(rows)
        except InvalidArgumentError as error:
            raise UnreadableError(0, str(error)) from error
        width = max(1, ids.shape[1]) if self._model.varies else self._model.shape[0]
        filled = np.full((n, width), reader.pad, dtype=self._dtype)
        filled[:, : ids.shape[1]] = ids
        return filled


def load_encoded(steps: Preprocess, model: TensorSpec, dtype: npt.DTypeLike, *, tokenizer: bytes) -> Encoded:
    """The steps of a bundle; ``tokenizer`` is its file of that name, which has been verified.

    Parameters
    ----------
    model : TensorSpec
        The model's input, of type ``dtype``.

    Raises
    ------
    InvalidBundleError
        They are none, or do not end in what the model takes.
    """
    if (steps.image is None) == (steps.text is None):
        raise InvalidBundleError(f"{MANIFEST_FILE}: preprocess must have image or text")
    if steps.image is not None:
        try:
            check_steps(steps.image)
        except InvalidBundleError as error:
            raise InvalidBundleError(f"{MANIFEST_FILE}: preprocess.image: {error}") from error
        if np.dtype(dtype) != np.uint8 or row_shape(steps.image) != model.shape:
            raise InvalidBundleError(
                f"{MANIFEST_FILE}: preprocess.image makes uint8 {list(row_shape(steps.image))}; the model takes "
                f"{model.datatype} {list(model.shape)}"
            )
        _check_library()
        return Encoded(steps, model, dtype, None)
    assert steps.text is not None
    return Encoded(steps, model, dtype, _reader(steps.text.tokens, model, tokenizer))


def _reader(tokens: int, model: TensorSpec, tokenizer: bytes) -> TextReader:
    if model.pad is None or not 1 <= tokens <= model.longest:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: preprocess.text makes up to {tokens} token ids; the model takes {model.datatype} "
            f"{list(model.shape)}, at most {model.longest}"
        )
    try:
        reader = replace(tokenizer_of(tokenizer, name=TOKENIZER_FILE, most=tokens), pad=model.pad)
    except InvalidArgumentError as error:
        raise InvalidBundleError(str(error)) from error
    if reader.ids > model.values:
        raise InvalidBundleError(f"{TOKENIZER_FILE}: has ids up to {reader.ids - 1}; the model knows {model.values}")
    return reader


def _check_library() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise InvalidBundleError("this bundle takes images, which the library pillow decodes: install it") from error


def _images(strings: Sequence[String], steps: ImageSteps) -> Array:
    rows = np.empty((len(strings), *row_shape(steps)), dtype=np.uint8)
    budget = Budget(MAX_REQUEST_PIXELS)
    for index, string in enumerate(strings):
        try:
            rows[index] = decoded(_content(string), steps, budget=budget)
        except binascii.Error as error:
            raise UnreadableError(index, f"is no base64, which an image in JSON is written in: {error}") from error
        except ValueError as error:
            raise UnreadableError(index, str(error)) from error
    return rows


def _content(string: String) -> bytes:
    if isinstance(string, bytes):
        return string
    if not string.isascii():
        raise binascii.Error("other characters than ASCII")
    return base64.b64decode(string, validate=True)


def _plain_texts(strings: Sequence[String]) -> list[str]:
    total, texts = 0, []
    for index, string in enumerate(strings):
        size = len(string)
        if isinstance(string, str) and size <= MAX_TEXT_BYTES:  # in JSON these are characters
            size = len(string.encode(errors="replace"))
        if size > MAX_TEXT_BYTES:
            raise UnreadableError(index, f"has more than {MAX_TEXT_BYTES} bytes")
        total += size
        if total > MAX_REQUEST_TEXT_BYTES:
            raise UnreadableError(index, f"is beyond {MAX_REQUEST_TEXT_BYTES} bytes of a request's texts; send fewer")
        try:
            texts.append(string if isinstance(string, str) else string.decode())
        except UnicodeDecodeError as error:
            raise UnreadableError(index, f"is no UTF-8: {error.reason} at byte {error.start}") from error
    return texts
