"""Large JSON requests, read in pieces.

orjson turns a number of two bytes into an object of thirty, and does not let go of the interpreter before it is done:
tens of megabytes stop the event loop for a second, and take a gigabyte. So the values of a large request are cut out,
and read a few thousand at a time into the array that they become, in a thread; between two pieces the loop has its
turn.

The numbers of a tensor have no quotation marks and no braces, so that the end of ``data`` is found without reading it.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from offramp_core.bundle import TOP_LABEL, OutputNames, TensorSpec
from offramp_worker.bundle.load import NUMPY_TYPES
from offramp_worker.http.tensors import (
    Array,
    BadRequestError,
    InferRequest,
    check_json,
    in_range,
    json_array,
    parse_request,
    read_header,
)
from offramp_worker.preprocess.encoded import Encoded

LARGE_BYTES = 256 * 1024  # of JSON; below it one call reads all in a few milliseconds
PIECE_BYTES = 32 * 1024
MAX_COMMAS = 20_000  # of a large request of strings: each may end a number, which becomes an object of thirty bytes
_KEY = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*(?=\[)')
_OF_NUMBERS = b"0123456789.eE+- \t\r\n"
_FLAT = bytes.maketrans(b"[]", b"  ")  # not left out: what stands on both sides of a bracket is no number


def is_large(body: bytes | bytearray, *, header_length: int | None) -> bool:
    """Whether a request is to be read beside the loop."""
    return (len(body) if header_length is None else header_length) > LARGE_BYTES


def parse_large(
    body: bytes | bytearray,
    *,
    header_length: int | None,
    spec: TensorSpec,
    max_rows: int,
    names: OutputNames = TOP_LABEL,
    encoded: Encoded | None = None,
) -> InferRequest:
    """As :func:`offramp_worker.http.tensors.parse_request`, for bodies that are too large for one call.

    Raises
    ------
    BadRequestError
        Names the field.
    """
    if encoded is not None:
        size = len(body) if header_length is None else header_length
        if size > LARGE_BYTES and body.count(b",", 0, size) > MAX_COMMAS:
            raise BadRequestError(f"body: has {size} bytes of JSON in more than {MAX_COMMAS} pieces; send binary data")
        return parse_request(
            body, header_length=header_length, spec=spec, max_rows=max_rows, names=names, encoded=encoded
        )
    keys = list(_KEY.finditer(body)) if header_length is None else []
    if len(keys) != 1:
        return _without_cutting(body, header_length=header_length, spec=spec, max_rows=max_rows, names=names)
    start = keys[0].end()
    ends = [at for at in (body.find(b'"', start), body.find(b"}", start)) if at >= 0]
    end = body.rfind(b"]", start, min(ends, default=len(body))) + 1
    quote = body.find(b'"', start)
    if end <= start and 0 <= quote == min(ends):
        raise BadRequestError(
            f"inputs[0].data: has a value of type string; the tensor holds {NUMPY_TYPES[spec.datatype].name}"
        )
    if end <= start:
        return _without_cutting(body, header_length=header_length, spec=spec, max_rows=max_rows, names=names)
    around = b"".join((body[:start], b"[]", body[end:]))
    if len(around) > LARGE_BYTES:
        raise BadRequestError(f"body: has more than {LARGE_BYTES} bytes beside inputs[0].data")
    try:
        request = orjson.loads(around)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"body: is no JSON: {error}") from error
    header = read_header(request, spec=spec, max_rows=max_rows, names=names)
    if header.tensor.get("data") != [] or header.binary_size is not None:
        raise BadRequestError("inputs[0].data: must be the only field of this name, and then there is no binary data")
    dtype = NUMPY_TYPES[spec.datatype]
    check_json(dtype)
    return header.request(in_range(_values(body, start, end, shape=header.shape, dtype=dtype), spec))


def _without_cutting(
    body: bytes | bytearray, *, header_length: int | None, spec: TensorSpec, max_rows: int, names: OutputNames
) -> InferRequest:
    """Where ``data`` is not plain, the whole is read at once: then it must be small, as it may be all brackets."""
    size = len(body) if header_length is None else header_length
    if LARGE_BYTES < size <= len(body):
        raise BadRequestError(
            f"body: has {size} bytes of JSON, in which inputs[0].data is ambiguous; name it once, or send binary data"
        )
    return parse_request(body, header_length=header_length, spec=spec, max_rows=max_rows, names=names)


def most_values(spec: TensorSpec) -> int:
    """Values of the largest row that the model takes."""
    return math.prod(spec.longest if size < 0 else size for size in spec.shape)


def _values(body: bytes | bytearray, start: int, end: int, *, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The numbers of ``body[start:end]``, a flat list or one nested as ``shape``."""
    wanted = math.prod(shape)
    mismatch = BadRequestError(
        f"inputs[0].data: does not match inputs[0].shape {list(shape)}; give {wanted} numbers, flat or nested"
    )
    if body.count(b",", start, end) != wanted - 1:
        raise mismatch
    out = np.empty(wanted, dtype=dtype)
    skeleton, filled = bytearray(), 0
    cuts = [start]
    while cuts[-1] < end:
        cut = body.find(b",", min(cuts[-1] + PIECE_BYTES, end), end)
        cuts.append(end if cut < 0 else cut + 1)
    for first, last in pairwise(cuts):
        piece = bytes(body[first:last])
        skeleton += piece.translate(None, _OF_NUMBERS)
        numbers = _numbers(piece.translate(_FLAT).strip().removesuffix(b","), dtype)
        if filled + len(numbers) > wanted:
            raise mismatch
        out[filled : filled + len(numbers)] = numbers
        filled += len(numbers)
    if filled != wanted or bytes(skeleton) not in (_skeleton((wanted,)), _skeleton(shape)):
        raise mismatch
    return out.reshape(shape)


def _numbers(piece: bytes, dtype: np.dtype[Any]) -> Array:
    try:
        values = orjson.loads(b"[%b]" % piece)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"inputs[0].data: is no list of numbers: {error}") from error
    return json_array(values, dtype)


def _skeleton(shape: tuple[int, ...]) -> bytes:
    """The brackets and commas of numbers nested as ``shape``."""
    inner = b""
    for size in reversed(shape):
        inner = b"[" + b",".join([inner] * size) + b"]"
    return inner
