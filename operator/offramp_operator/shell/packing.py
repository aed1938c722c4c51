"""Counts of many worker processes in few bytes: what a rollout of a large service keeps of each is packed into one
text.

Evidence is written in every second of a step. As plain fields it is 370 bytes a worker, and the API server notes an
owner for each of them, which is as much again. Packed it has one owner, and is written and read in one piece with the
rest of the status: no second object could be ahead of it.
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
MOST_BYTES = 64 * 2**20  # unpacked: far more than what etcd takes could hold
_OF_LEDGER = ("live", "due")
_OF_STATUS = ("restarts",)


def packed(status: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout's status with what it has by worker process in ``ledger.packed``, where that is much; else as it is."""
    ledger = status.get("ledger", {})
    if len(ledger.get("live", {})) < PACKED_FROM:
        return dict(status)
    content = {
        "ledger": {name: ledger[name] for name in _OF_LEDGER if name in ledger},
        "status": {name: status[name] for name in _OF_STATUS if name in status},
    }
    text = base64.b64encode(zlib.compress(msgspec.json.encode(content, order="sorted"))).decode()
    rest = {name: value for name, value in ledger.items() if name not in _OF_LEDGER}
    return {name: value for name, value in status.items() if name not in _OF_STATUS} | {
        "ledger": rest | {"packed": text}
    }


def unpacked(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status as plain fields.

    Raises
    ------
    InvalidArgumentError
        Somebody else has written to what is packed.
    """
    ledger = status.get("ledger")
    if not isinstance(ledger, Mapping) or "packed" not in ledger:
        return dict(status)
    rest = {name: value for name, value in ledger.items() if name != "packed"}
    content = _content(ledger["packed"])
    return {**status, **content["status"], "ledger": {**rest, **content["ledger"]}}


def _content(text: Any) -> dict[str, dict[str, Any]]:
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        content = msgspec.json.decode(plain, type=dict[str, dict[str, Any]]) if inflate.eof else {}
    except (binascii.Error, zlib.error, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"status.ledger.packed cannot be read: {error}") from error
    if set(content) != {"ledger", "status"}:
        raise InvalidArgumentError("status.ledger.packed is cut off, too large, or something else than packed counts")
    return content
