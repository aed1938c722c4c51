"""Open Inference Protocol v2 request and response bodies: JSON, and JSON followed by binary tensors.

A request's own ``parameters`` may say ``exit: "never"`` (the exact model answers) or ``deadline_ms`` (a number: rows
that would take longer than that from admission get the answer of the deepest ramp they have reached). The reply to the
latter says ``deadline``: true where it did.

Errors name the field by its JSON path. Unknown fields are ignored, as the protocol says.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

import offramp_worker
from offramp_core.bundle import BYTES, TOP_LABEL, Manifest, OutputNames, TensorSpec
from offramp_core.errors import OfframpError
from offramp_core.task import LABEL
from offramp_worker.bundle.load import NUMPY_TYPES
from offramp_worker.engine.queue.tickets import HIGHEST_PRIORITY, Ticket
from offramp_worker.preprocess.encoded import Encoded, String, UnreadableError

Array = npt.NDArray[Any]
VERSION = "1"  # of the one model a worker serves; content is known by digests, not by versions
JSON_TYPES: dict[str, set[type]] = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}}  # by kind of tensor
MAX_DEADLINE_MS = 86_400_000
KNOWN_HEADER_BYTES = 4096
LOWEST_PRIORITY = 2**32 - 1  # what tritonclient sends is any unsigned number
MAX_SLICE_LENGTH = 32
MAX_STREAM_LENGTH = 128
MAX_TIER_LENGTH = 63
MAX_SHOWN = 80  # characters of a value in an error
MAX_TIMEOUT_MICROS = 86_400_000_000  # a day


_briefly = reprlib.Repr()
_briefly.maxlevel, _briefly.maxstring, _briefly.maxother = 2, MAX_SHOWN, MAX_SHOWN


def shown(value: Any) -> str:
    """What a client sent, for an error: a long or deeply nested value is neither repeated nor walked through."""
    text = _briefly.repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


class BadRequestError(OfframpError):
    """A request is malformed. The message begins with the JSON path of the field at fault."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A parsed request: ``x`` (n, ...) contiguous, how urgent it is, and what the reply is to look like."""

    x: Array
    id: str | None
    never_exit: bool
    deadline_seconds: float
    outputs: tuple[tuple[str, bool], ...]  # name, binary
    priority: int = HIGHEST_PRIORITY
    timeout_seconds: float | None = None
    slice_name: str = ""
    stream: str = ""
    tier: str = ""
    max_disagreement: float | None = None
    #: Content hash of the only plan whose exits may answer; empty for whichever serves.
    plan: str = ""


def parse_request(
    body: bytes | bytearray,
    *,
    header_length: int | None,
    spec: TensorSpec,
    max_rows: int,
    names: OutputNames = TOP_LABEL,
    encoded: Encoded | None = None,
) -> InferRequest:
    """Parse an inference request.

    Parameters
    ----------
    body : bytes
        JSON; or with ``header_length`` that many bytes of JSON and binary tensors after it.
    spec : TensorSpec
        The one input, as clients send it.
    max_rows : int
        Largest first axis.
    names : OutputNames
        What the outputs are called.
    encoded : Encoded, optional
        The steps from an input of strings to the model's.

    Raises
    ------
    BadRequestError
        Names the field.
    """
    if header_length is None:
        return _with_values(_parse_header(body, spec, max_rows, names), memoryview(b""), spec, encoded)
    if not 0 < header_length <= len(body):
        raise BadRequestError(f"Inference-Header-Content-Length: is {header_length}; the body has {len(body)} bytes")
    view = memoryview(body)
    parse = _parse_known_header if header_length <= KNOWN_HEADER_BYTES else _parse_header
    header = parse(bytes(view[:header_length]), spec, max_rows, names)
    return _with_values(header, view[header_length:], spec, encoded)


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """What a request says about its input, checked. ``tensor`` is that as it was sent, ``request`` the whole once its
    values (n, ...) are there."""

    tensor: dict[str, Any]
    shape: tuple[int, ...]
    binary_size: Any
    request: Callable[[Array], InferRequest]


def read_header(request: Any, *, spec: TensorSpec, max_rows: int, names: OutputNames = TOP_LABEL) -> RequestHeader:
    """Check the JSON form of a request; of the input's values only ``binary_data_size`` is read.

    Raises
    ------
    BadRequestError
        Names the field.
    """
    if not isinstance(request, dict):
        raise BadRequestError("body: must be a JSON object")
    parameters = _object(request, "parameters", "parameters")
    request_id = request.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise BadRequestError("id: must be a string")
    tensor = _inputs(request)
    shape = _check_input(tensor, spec=spec, max_rows=max_rows)
    binary_size = _object(tensor, "parameters", "inputs[0].parameters").get("binary_data_size")
    wishes = partial(
        InferRequest,
        id=request_id,
        never_exit=_never_exit(parameters),
        deadline_seconds=_deadline(parameters),
        outputs=_parse_outputs(
            request, names, all_binary=_flag(parameters, "binary_data_output", "parameters.binary_data_output")
        ),
        priority=parse_priority(parameters),
        timeout_seconds=parse_timeout(parameters),
        slice_name=_name(parameters, "slice", longest=MAX_SLICE_LENGTH),
        stream=_name(parameters, "stream", longest=MAX_STREAM_LENGTH),
        tier=_name(parameters, "tier", longest=MAX_TIER_LENGTH),
        max_disagreement=_share(parameters, "max_disagreement"),
    )
    return RequestHeader(tensor, shape, binary_size, wishes)


def _parse_header(text: bytes | bytearray, spec: TensorSpec, max_rows: int, names: OutputNames) -> RequestHeader:
    try:
        request = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"body: is no JSON: {error}") from error
    return read_header(request, spec=spec, max_rows=max_rows, names=names)


# Clients send the same few headers again and again; reading one costs more than everything else about a request.
_parse_known_header = lru_cache(maxsize=256)(_parse_header)


def _with_values(header: RequestHeader, binary: memoryview, spec: TensorSpec, encoded: Encoded | None) -> InferRequest:
    if encoded is not None:
        return header.request(_from_strings(header, binary, encoded))
    dtype = NUMPY_TYPES[spec.datatype]
    if header.binary_size is not None:
        return header.request(in_range(_from_binary(binary, header.binary_size, shape=header.shape, dtype=dtype), spec))
    if len(binary):
        raise BadRequestError("inputs[0].parameters.binary_data_size: is missing, but binary data follows the JSON")
    return header.request(in_range(_from_json(header.tensor, shape=header.shape, dtype=dtype), spec))


def _from_strings(header: RequestHeader, binary: memoryview, encoded: Encoded) -> Array:
    if header.binary_size is None and not len(binary):
        strings: list[Any] = _flat(header.tensor.get("data"), shape=header.shape, what="strings")
        odd = {type(v) for v in strings} - {str}
        if odd:
            raise BadRequestError(f"inputs[0].data: has a value of type {json_type(odd.pop())}; it holds strings")
        return string_rows(strings, encoded, shape=header.shape, field="inputs[0].data")
    if type(header.binary_size) is not int or header.binary_size != len(binary):
        raise BadRequestError(
            f"inputs[0].parameters.binary_data_size: is {shown(header.binary_size)}; {len(binary)} bytes follow the "
            "JSON"
        )
    parts = split_strings(binary, shape=header.shape, field="inputs[0]")
    return string_rows(parts, encoded, shape=header.shape, field="inputs[0]")


def split_strings(binary: memoryview | bytes, *, shape: tuple[int, ...], field: str) -> list[bytes]:
    """Strings in the protocol's binary form: each behind its length, four bytes, the lowest first."""
    count, at, parts = math.prod(shape), 0, []
    for index in range(count):
        size = int.from_bytes(binary[at : at + 4], "little")
        if len(binary) - at < 4 + size:
            raise BadRequestError(
                f"{field}: ends within string {index} of {count}; each comes behind its length in four bytes"
            )
        parts.append(bytes(binary[at + 4 : at + 4 + size]))
        at += 4 + size
    if at != len(binary):
        raise BadRequestError(f"{field}: has {len(binary) - at} bytes behind its {count} strings")
    return parts


def string_rows(strings: Sequence[String], encoded: Encoded, *, shape: tuple[int, ...], field: str) -> Array:
    """The model's rows of strings that stand in ``field``."""
    try:
        return encoded.rows(strings, n=shape[0])
    except UnreadableError as error:
        raise BadRequestError(f"{field}[{error.index}]: {error}") from error


def in_range(value: Array, spec: TensorSpec) -> Array:
    """Token ids that the model knows; one beyond the embedding table would fail the whole batch."""
    if spec.values and not (value.min() >= 0 and value.max() < spec.values):
        raise BadRequestError(
            f"inputs[0].data: holds ids from {value.min()} to {value.max()}; {spec.name!r} takes 0 to {spec.values - 1}"
        )
    return value


def server_metadata() -> dict[str, Any]:
    """What the server says of itself."""
    return {"name": "offramp", "version": offramp_worker.__version__, "extensions": ["binary_tensor_data"]}


def model_metadata(manifest: Manifest) -> dict[str, Any]:
    """What it says of its model."""
    return {
        "name": manifest.name,
        "versions": [VERSION],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": t.name, "datatype": t.datatype, "shape": [-1, *t.shape]} for t in manifest.asks_for],
        "outputs": [{"name": t.name, "datatype": t.datatype, "shape": [-1, *t.shape]} for t in manifest.replies],
    }


def parse_priority(parameters: dict[str, Any]) -> int:
    """Triton's ``priority``: 1 runs first, larger numbers later; 0 is the default level, which is 1."""
    return _whole(parameters, "priority", high=LOWEST_PRIORITY) or HIGHEST_PRIORITY


def parse_timeout(parameters: dict[str, Any]) -> float | None:
    """Triton's ``timeout``, in microseconds from admission; 0 is none. In seconds."""
    microseconds = _whole(parameters, "timeout", high=MAX_TIMEOUT_MICROS)
    return microseconds * 1e-6 if microseconds else None


def response_body(ticket: Ticket, request: InferRequest, *, model: str) -> tuple[bytes, int | None]:
    """The reply to a finished request, and the length of its JSON part when binary tensors follow it."""
    outputs, chunks = [], []
    for name, binary in request.outputs:
        value, datatype = output_value(ticket, name)
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(value.shape)}
        if binary:
            chunk = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
            output["parameters"] = {"binary_data_size": len(chunk)}
            chunks.append(chunk)
        else:
            output["data"] = value.reshape(-1)
        outputs.append(output)
    reply: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if request.id is not None:
        reply["id"] = request.id
    reply["parameters"] = reply_parameters(ticket)
    reply["outputs"] = outputs
    header = orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((header, *chunks)), len(header)) if chunks else (header, None)


def output_value(ticket: Ticket, name: str) -> tuple[Array, str]:
    """One output of a finished request, and its datatype."""
    return (ticket.labels, "INT64") if name == LABEL else (ticket.logits, "FP32")


def reply_parameters(ticket: Ticket) -> dict[str, str | int | bool]:
    """What the reply says of its rows. ``exit`` has one entry per row, comma-separated; the others too where rows
    differ."""
    cached: dict[str, str | int | bool] = {"cached": True} if ticket.cached else {}
    return cached | {
        "exit": ",".join(ticket.exits),
        "config": _joined(ticket.configs),
        "arm": _joined(ticket.arms),
        "epoch": _joined(ticket.epochs),
        "audited": _joined(ticket.audited),
        **({"deadline": _joined(ticket.due)} if ticket.deadline < math.inf or any(ticket.due) else {}),
        **({"offline": _joined(ticket.offline)} if any(ticket.offline) else {}),
        **({"overload": True} if ticket.eased else {}),
    }


def _joined(values: list[Any]) -> Any:
    if values.count(values[0]) == len(values):
        return values[0]
    return ",".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)


def _inputs(request: dict[str, Any]) -> dict[str, Any]:
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1:
        raise BadRequestError(
            "inputs: must be a list of exactly one tensor; of texts the ids, masks and token types follow from them"
        )
    if not isinstance(inputs[0], dict):
        raise BadRequestError("inputs[0]: must be an object")
    return inputs[0]


def _check_input(tensor: dict[str, Any], *, spec: TensorSpec, max_rows: int) -> tuple[int, ...]:
    if tensor.get("name") != spec.name:
        raise BadRequestError(f"inputs[0].name: is {shown(tensor.get('name'))}; the model's input is {spec.name!r}")
    if tensor.get("datatype") != spec.datatype:
        raise BadRequestError(
            f"inputs[0].datatype: is {shown(tensor.get('datatype'))}; {spec.name!r} takes {spec.datatype}"
        )
    return _parse_shape(tensor.get("shape"), spec=spec, max_rows=max_rows)


def _parse_shape(shape: Any, *, spec: TensorSpec, max_rows: int) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(d) is not int for d in shape):
        raise BadRequestError("inputs[0].shape: must be a list of whole numbers")
    if not shape or not spec.fits(tuple(shape[1:])):
        if spec.datatype == BYTES:
            pairs = ", or [n, 2] of pairs" if spec.longest > 1 else ""
            raise BadRequestError(f"inputs[0].shape: is {shape[:8]}; {spec.name!r} takes [n], [n, 1]{pairs}")
        sizes = ", ".join(f"1 to {spec.longest}" if size < 0 else str(size) for size in spec.shape)
        raise BadRequestError(f"inputs[0].shape: is {shape[:8]}; {spec.name!r} takes [n, {sizes}]")
    if not 1 <= shape[0] <= max_rows:
        raise BadRequestError(f"inputs[0].shape: has {shape[0]} rows; a request may have 1 to {max_rows}")
    return tuple(shape)


def _from_binary(binary: memoryview, size: Any, *, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    expected = math.prod(shape) * dtype.itemsize
    if type(size) is not int or size != expected:
        raise BadRequestError(
            f"inputs[0].parameters.binary_data_size: is {shown(size)}; shape and datatype need {expected} bytes"
        )
    if len(binary) != expected:
        raise BadRequestError(f"inputs[0]: {len(binary)} bytes follow the JSON; binary_data_size says {expected}")
    return as_array(binary, shape=shape, dtype=dtype)


def check_json(dtype: np.dtype[Any]) -> None:
    """Refuse values in JSON where the protocol has none."""
    if dtype == np.float16:
        raise BadRequestError(
            "inputs[0].data: the protocol has no JSON form of FP16; send binary data "
            "(inputs[0].parameters.binary_data_size)"
        )


def as_array(binary: memoryview | bytes, *, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Little-endian numbers as an array, without a copy where they are aligned (what is before them has any length)."""
    value = np.frombuffer(binary, dtype=dtype).reshape(shape)
    return value if value.flags.aligned else value.copy()


def _from_json(tensor: dict[str, Any], *, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    check_json(dtype)
    return json_array(_flat(tensor.get("data"), shape=shape), dtype).reshape(shape)


def json_array(values: list[Any], dtype: np.dtype[Any]) -> Array:
    """Values of JSON as numbers of the tensor's type, (n,)."""
    odd = {type(v) for v in values} - JSON_TYPES[dtype.kind]
    if odd:
        # Checked before NumPy sees them: one long string would make every element of an array as large.
        raise BadRequestError(
            f"inputs[0].data: has a value of type {json_type(odd.pop())}; the tensor holds {dtype.name}"
        )
    try:
        # Too large for float32 becomes infinity, which is allowed and never exits early.
        with np.errstate(over="ignore"):
            return np.array(values, dtype=dtype)
    except OverflowError as error:
        raise BadRequestError(f"inputs[0].data: has a value outside of {dtype.name}") from error


def _flat(data: Any, *, shape: tuple[int, ...], what: str = "numbers") -> list[Any]:
    """The values of a flat list, or of lists nested as ``shape`` says."""
    if not isinstance(data, list):
        raise BadRequestError(f"inputs[0].data: must be a list of {what} (flat or nested), or send binary data")
    if len(data) == math.prod(shape) and not isinstance(data[0], list):
        return data
    values = [data]
    for depth, size in enumerate(shape):
        if not all(type(v) is list and len(v) == size for v in values):
            raise BadRequestError(
                f"inputs[0].data: does not match inputs[0].shape {list(shape)} at depth {depth}; give "
                f"{math.prod(shape)} {what}, flat or nested"
            )
        values = list(chain.from_iterable(values))
    return values


def json_type(kind: type) -> str:
    """What JSON calls a value of this type."""
    return {str: "string", bool: "boolean", list: "list", dict: "object", float: "fraction", int: "whole number"}.get(
        kind, "null"
    )


def _parse_outputs(request: dict[str, Any], names: OutputNames, *, all_binary: bool) -> tuple[tuple[str, bool], ...]:
    outputs = request.get("outputs")
    if outputs is None or outputs == []:
        return tuple((name, all_binary) for name in names.usual)
    if not isinstance(outputs, list):
        raise BadRequestError("outputs: must be a list")
    return tuple(
        _parse_output(output, f"outputs[{i}]", names, all_binary=all_binary) for i, output in enumerate(outputs)
    )


def _parse_output(output: Any, path: str, names: OutputNames, *, all_binary: bool) -> tuple[str, bool]:
    if not isinstance(output, dict):
        raise BadRequestError(f"{path}: must be an object")
    if output.get("name") not in (*names.usual, names.own):
        raise BadRequestError(
            f"{path}.name: is {shown(output.get('name'))}; the model's outputs are {', '.join(names.usual)}"
        )
    parameters = _object(output, "parameters", f"{path}.parameters")
    if parameters.get("classification") is not None:
        raise BadRequestError(f"{path}.parameters.classification: is not supported; ask for {' or '.join(names.usual)}")
    return output["name"], _flag(parameters, "binary_data", f"{path}.parameters.binary_data", default=all_binary)


def _never_exit(parameters: dict[str, Any]) -> bool:
    wish = parameters.get("exit")
    if wish not in (None, "never"):
        raise BadRequestError(f'parameters.exit: is {shown(wish)}; leave it out, or send "never" for the exact model')
    return wish == "never"


def _name(parameters: dict[str, Any], key: str, *, longest: int) -> str:
    """``slice``: the group of requests this one belongs to; one that the service does not declare is as good as none.
    ``stream``: the source that it comes from, whose requests may resemble each other. ``tier``: the budget that it
    asks for, one that the service has."""
    wish = parameters.get(key, "")
    if not isinstance(wish, str) or len(wish) > longest:
        raise BadRequestError(f"parameters.{key}: is {shown(wish)}; it must be a text of at most {longest} characters")
    return wish


def _share(parameters: dict[str, Any], key: str) -> float | None:
    """``max_disagreement``: the largest budget that will do for this request."""
    wish = parameters.get(key)
    if wish is None:
        return None
    if isinstance(wish, bool) or not isinstance(wish, int | float) or not 0 <= wish <= 1:
        raise BadRequestError(f"parameters.{key}: is {shown(wish)}; it must be a number from 0 to 1")
    if parameters.get("tier"):
        raise BadRequestError(f"parameters.{key}: comes with parameters.tier; send one of them")
    return float(wish)


def _deadline(parameters: dict[str, Any]) -> float:
    """``deadline_ms``: milliseconds from admission after which the best answer so far will do. In seconds."""
    wish = parameters.get("deadline_ms")
    if wish is None:
        return math.inf
    if isinstance(wish, bool) or not isinstance(wish, int | float) or not 0 < wish <= MAX_DEADLINE_MS:
        raise BadRequestError(
            f"parameters.deadline_ms: is {shown(wish)}; it must be a number above 0, at most {MAX_DEADLINE_MS}"
        )
    return wish / 1000


def _whole(parameters: dict[str, Any], key: str, *, high: int) -> int:
    value = parameters.get(key, 0)
    if type(value) is not int or not 0 <= value <= high:
        raise BadRequestError(f"parameters.{key}: is {shown(value)}; it must be a whole number from 0 to {high}")
    return value


def _object(holder: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError(f"{path}: must be an object")
    return value


def _flag(parameters: dict[str, Any], key: str, path: str, *, default: bool = False) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise BadRequestError(f"{path}: must be true or false")
    return value
