"""Bodies that came gzip-compressed (RFC 1952), unpacked within a limit."""

from __future__ import annotations

import zlib

from offramp_worker.http.tensors import BadRequestError

GZIP = 16 + zlib.MAX_WBITS  # zlib's way to ask for the gzip format alone
MOST_MEMBERS = 64


class UnpackedTooLargeError(Exception):
    """The body unpacks to more than allowed."""


def unpack(body: bytes | bytearray, *, limit: int) -> bytes:
    """What a gzip body holds; several members are one body, as the format says.

    Raises
    ------
    UnpackedTooLargeError
        Before more than ``limit`` bytes are made.
    BadRequestError
        It is no gzip, ends early, or something else follows it.
    """
    parts: list[bytes] = []
    size, rest = 0, bytes(body)
    for _ in range(MOST_MEMBERS):
        member = zlib.decompressobj(GZIP)
        try:
            part = member.decompress(rest, limit - size + 1)
        except zlib.error as error:
            raise BadRequestError(f"Content-Encoding: the body is no gzip: {error}") from error
        size += len(part)
        if size > limit:
            raise UnpackedTooLargeError
        if not member.eof:
            raise BadRequestError("Content-Encoding: the gzip body ends early")
        parts.append(part)
        rest = member.unused_data
        if not rest:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    raise BadRequestError(f"Content-Encoding: the gzip body has more than {MOST_MEMBERS} members")
