"""JSON documents from elsewhere as values of our own types."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")
MAX_CAUSE = 500  # characters of what the parser says; values of the document stand in it


def parse_document(raw: bytes | str, kind: type[Kind]) -> Kind:
    """The document as ``kind``.

    Raises
    ------
    ValueError
        It is no JSON, no UTF-8, nested too deeply, or of another kind.

    Examples
    --------
    >>> parse_document(b"[1]", list[int])
    [1]
    >>> parse_document(b'["\\xff"]', list[str])
    Traceback (most recent call last):
    ...
    ValueError: it is no UTF-8 text
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)[:MAX_CAUSE]) from error
    except UnicodeError as error:
        raise ValueError("it is no UTF-8 text") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
