"""Counts of many worker processes in few bytes: what the status of a large service, or of a rollout of it, keeps of
each is packed into one text.

Evidence of a rollout is written in every second of a step. As plain fields it is 370 bytes a worker, and the API server
notes an owner for each of them, which is as much again. Packed it has one owner, and is written and read in one piece
with the rest of the status: no second object could be ahead of it.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from offramp_core.errors import InvalidArgumentError

PACKED_FROM = 100  # worker processes; the counts of fewer stay readable
MOST_BYTES = 8 * 2**20  # unpacked: what etcd takes has a fifth of it, packed

# Parts of a status with fields by worker process, and the fields of the status itself that are packed with them.
_PARTS = {"ledger": ("live", "due"), "measured": ("live", "base")}
_BESIDE = {"ledger": ("restarts",), "measured": ()}


def packed(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status with what it has by worker process in ``ledger.packed`` (a rollout's) or ``measured.packed`` (a
    service's), where that is much; else as it is."""
    done = dict(status)
    for part, names in _PARTS.items():
        plain = done.get(part, {})
        if len(plain.get("live", {})) < PACKED_FROM:
            continue
        content = {part: _only(plain, names), "status": _only(done, _BESIDE[part])}
        text = base64.b64encode(zlib.compress(msgspec.json.encode(content, order="sorted"))).decode()
        done = _without(done, _BESIDE[part]) | {part: _without(plain, names) | {"packed": text}}
    return done


def unpacked(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status as plain fields.

    Raises
    ------
    InvalidArgumentError
        Somebody else has written to what is packed.
    """
    plain = dict(status)
    for part in _PARTS:
        found = plain.get(part)
        if isinstance(found, Mapping) and "packed" in found:
            content = _content(part, found["packed"])
            plain |= {**content["status"], part: {**_without(found, ("packed",)), **content[part]}}
    return plain


def _only(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


def _without(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _content(part: str, text: Any) -> dict[str, dict[str, dict[str, Any]]]:
    field, inflate = f"status.{part}.packed", zlib.decompressobj()
    try:
        plain = inflate.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        content = msgspec.json.decode(plain, type=dict[str, dict[str, dict[str, Any]]]) if inflate.eof else {}
    except (binascii.Error, zlib.error, msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{field} cannot be read: {error}") from error
    allowed = {part: _PARTS[part], "status": _BESIDE[part]}
    if set(content) != set(allowed) or any(not set(content[name]) <= set(names) for name, names in allowed.items()):
        raise InvalidArgumentError(f"{field} is cut off, too large, or something else than packed counts")
    return content
