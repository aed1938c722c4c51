"""Where models and data lie: plain paths, and ``file://`` URIs of this machine (RFC 8089)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote_to_bytes, urlsplit

from offramp_core.errors import InvalidArgumentError

FAMILY = "family:"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(file):", re.IGNORECASE)


def local_path(uri: str, *, field: str) -> Path:
    """The path that a plain path or a ``file://`` URI means; ``field`` is named in errors.

    Only URIs have escapes: in a plain path, ``%20`` are three letters of a name.

    Raises
    ------
    InvalidArgumentError
        The URI has another scheme or host, or is none.
    """
    found = _SCHEME.match(uri)
    if found is None:
        return Path(uri)
    scheme = (found[1] or found[2]).lower()
    if scheme != "file":
        raise _refusal(uri, field, f"{field} takes no {scheme} URI")
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise _refusal(uri, field, f"it is not a valid URI ({error})") from error
    if parts.netloc.lower() not in ("", "localhost"):
        raise _refusal(uri, field, f"it names the host {parts.netloc!r}, and only files of this machine are read")
    if parts.query or parts.fragment:
        raise _refusal(uri, field, "write %3F and %23 for ? and # in a file's name")
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if not path.startswith("/"):
        raise _refusal(uri, field, "it has no absolute path")
    if "\0" in path:
        raise _refusal(uri, field, "its path holds a zero byte")
    return Path(path)


def model_file(uri: str) -> Path:
    """The file that a model's URI names: its graph or program, or a family's weights."""
    if uri.startswith(FAMILY):
        uri = dict(parse_qsl(uri.partition("?")[2])).get("weights", "")
    return local_path(uri, field="model")


def _refusal(uri: str, field: str, reason: str) -> InvalidArgumentError:
    family = " or family:NAME?weights=FILE" if field == "model" else ""
    return InvalidArgumentError(f"{field} {uri}: {reason}; give a path, file:///PATH{family}")
