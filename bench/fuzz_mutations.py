"""Ways to damage a file: byte by byte, and along the structure of its format. Everything is drawn from the generator
given.

Hostile values are among what is drawn: code that writes a marker, names of files outside, sizes without end. Where
something evaluates, follows or believes them, :mod:`bench.fuzz_files` sees it.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

MARKER = "executed"  # in the working directory of a case
CANARY = "canary.bin"  # a file that nobody may read
CODE = f"__import__('builtins').open('{MARKER}', 'w')"
TEXTS = (
    "",
    "0",
    "a",
    "../" + CANARY,
    CANARY,
    "/etc/passwd",
    "x" * 5_000,
    "\x00",
    "\ud7ff",
    "none",
    "FLOAT",
    CODE,
    f"exec({CODE!r})",
    f"Symbol({CODE!r})",
    "9**9**9**9",
    "torch.os.system",
    "torch.ops.aten.from_file.default",
    "_operator.attrgetter",
    "__class__",
    "(a+)+$",
    "\\g<0>",
    "[" * 200,
)
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 65_536, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63), 1e308, -0.5, 0.5)
VALUES = (*TEXTS, *NUMBERS, None, True, False, [], {}, [[]], {"a": 1})
OPERATORS = (
    "Identity",
    "Constant",
    "Reshape",
    "Gather",
    "If",
    "Loop",
    "Scan",
    "ConstantOfShape",
    "Expand",
    "Tile",
    "Range",
    "Resize",
    "TopK",
    "Slice",
    "Conv",
    "MatMul",
    "LSTM",
    "Cast",
    "Split",
    "Concat",
    "Pad",
    "NonMaxSuppression",
    "Einsum",
    "Softmax",
    "QLinearConv",
    "DequantizeLinear",
    "SequenceAt",
    "RandomNormal",
    "Nonsense",
)

Mutate = Callable[[random.Random, bytes], bytes]


def bytes_of(rng: random.Random, raw: bytes) -> bytes:
    """A few bytes, or a piece, exchanged, removed or repeated."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not data:
            break
        at, length = rng.randrange(len(data)), rng.choice((1, 2, 4, 8, 64, 1_024))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + length] = rng.randbytes(length)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length]
            case 4:
                data[at : at + length] = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * length
            case _:
                del data[at:]
    return bytes(data)


def json_of(rng: random.Random, raw: bytes) -> bytes:
    """Values of a JSON document exchanged, removed, repeated or nested without end."""
    document = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.randrange(5):
            case 0:
                holder[key] = rng.choice(VALUES)
            case 1 | 2:
                alike = [other[at] for other, at in places if type(other[at]) is type(holder[key])]
                holder[key] = json.loads(json.dumps(rng.choice(alike)))
            case 3 if isinstance(holder, dict):
                name = rng.choice(TEXTS)
                holder[name] = holder.pop(key)
            case 3:
                holder.insert(key, json.loads(json.dumps(holder[key])))
            case _:
                del holder[key]
    text = json.dumps(document).encode()
    return text if rng.random() < 0.97 else text.replace(b":", b":" + b"[" * rng.choice((1, 2_000, 200_000)), 1)


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        holder = stack.pop()
        entries = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        found += [(holder, key) for key, _ in entries]
        stack += [part for _, part in entries if isinstance(part, dict | list)]
    return found


def onnx_of(rng: random.Random, raw: bytes) -> bytes:
    """Fields of an ONNX model, wherever they are, exchanged; tensors sent to other files."""
    if rng.random() < 0.25:
        return bytes_of(rng, raw)
    model = onnx.load_model_from_string(raw)
    for _ in range(rng.choice((1, 1, 2, 3))):
        messages = list(_messages(model))
        message = rng.choice(messages)
        if isinstance(message, onnx.TensorProto) and rng.random() < 0.4:
            message.data_location = onnx.TensorProto.EXTERNAL
            message.ClearField("raw_data")
            message.external_data.add(
                key="location", value=rng.choice((CANARY, "../" + CANARY, "/etc/passwd", "*/_ORT_MEM_ADDR_/*"))
            )
        elif isinstance(message, onnx.NodeProto) and rng.random() < 0.3:
            message.op_type = rng.choice(OPERATORS)
        else:
            _exchange(rng, message, messages)
    return bytes(model.SerializeToString())


def _messages(message: Any) -> list[Any]:
    found, stack = [], [message]
    while stack:
        found.append(top := stack.pop())
        for field, value in top.ListFields():
            if field.message_type is not None:
                stack += [value] if hasattr(value, "ListFields") else list(value)
    return found


def _exchange(rng: random.Random, message: Any, others: list[Any]) -> None:
    """One field of a protobuf message: another value, fewer or more of them, or what another message has there."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    if hasattr(value, "append") or hasattr(value, "add"):
        _exchange_repeated(rng, field, value)
        return
    match rng.randrange(3):
        case 0:
            message.ClearField(field.name)
        case 1:
            same = [other for other in others if type(other) is type(message)]
            message.CopyFrom(rng.choice(same))
        case _ if field.message_type is None:
            setattr(message, field.name, _scalar(rng, value))


def _exchange_repeated(rng: random.Random, field: Any, values: Any) -> None:
    at = rng.randrange(len(values))
    match rng.randrange(3):
        case 0:
            del values[at]
        case 1 if field.message_type is not None:
            values.add().CopyFrom(values[at])
        case 1:
            values.append(values[at])
        case _ if field.message_type is None:
            values[at] = _scalar(rng, values[at])


def _scalar(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((0, 1, 2, 7, 13, 255, 2**31 - 1, max(0, value - 1), value + 1))
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38))
    if isinstance(value, bytes):
        return bytes_of(rng, value)
    return rng.choice(TEXTS)


def safetensors_of(rng: random.Random, raw: bytes) -> bytes:
    """Its header, which says where each tensor lies, its header's length, or its bytes."""
    length = int.from_bytes(raw[:8], "little")
    match rng.randrange(4):
        case 0 | 1:
            header = json_of(rng, raw[8 : 8 + length])
            return len(header).to_bytes(8, "little") + header + raw[8 + length :]
        case 2:
            return rng.choice((0, 1, 7, length - 1, length + 1, 2**40, 2**63)).to_bytes(8, "little") + raw[8:]
    return bytes_of(rng, raw)


def npz_of(rng: random.Random, raw: bytes) -> bytes:
    """Its arrays' values, types, shapes and headers, or the archive around them."""
    if rng.random() < 0.3:
        return bytes_of(rng, raw)
    with zipfile.ZipFile(io.BytesIO(raw)) as source:
        content = {name: source.read(name) for name in source.namelist()}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(content))
        content[name] = _npy_of(rng, content[name])
    if rng.random() < 0.15:
        content.pop(rng.choice(list(content)))
    return zipped(content, compressed=rng.random() < 0.5)


def _npy_of(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.4:
        start = raw.index(b"{")
        end = raw.index(b"\n", start)
        header = raw[start:end]
        old, new = rng.choice(
            (
                (b"<f4", rng.choice((b"<f8", b"|O", b"<U9", b"<i4", b"<c8", b"V4", b"<f2"))),
                (b"(", rng.choice((b"(-1, ", b"(99999999999, ", b"(0, ", b"(True, ", b"((1,), ", b"(1e9, "))),
                (b"False", b"True"),
                (b"'descr'", CODE.encode()),
                (b"}", rng.choice((b"", b"}}", b", 'a': 1}"))),
            )
        )
        header = header.replace(old, new, 1).ljust(len(header))[: len(header)]
        return raw[:start] + header + raw[end:]
    try:
        value = np.load(io.BytesIO(raw), allow_pickle=False)
    except ValueError:
        return bytes_of(rng, raw)
    kind: Callable[[], Any] = rng.choice(
        (
            lambda: value.astype(rng.choice(("f8", "f2", "i8", "i4", "u1", "U3", "?", "c8")), casting="unsafe"),
            lambda: value[: len(value) // 2] if value.ndim else value[None],
            lambda: value.T,
            lambda: value[None],
            lambda: np.zeros((0, *value.shape[1:]), value.dtype),
            lambda: np.where(
                np.arange(value.size).reshape(value.shape) % 3 == 0, rng.choice((np.nan, np.inf, -1, 1e30)), value
            ),
            lambda: np.zeros(2_000_000),
            lambda: np.array([None, {}], dtype=object),
        )
    )
    buffer = io.BytesIO()
    with np.errstate(all="ignore"):
        try:
            np.save(buffer, kind())
        except (TypeError, ValueError):
            return bytes_of(rng, raw)
    return buffer.getvalue()


def program_of(rng: random.Random, raw: bytes) -> bytes:
    """An archive of ``torch.export``: its documents, its weights, or the archive around them."""
    if rng.random() < 0.2:
        return bytes_of(rng, raw)
    with zipfile.ZipFile(io.BytesIO(raw)) as source:
        content = {name: source.read(name) for name in source.namelist()}
    documents = [name for name in content if name.endswith(".json")]
    match rng.randrange(10):
        case 0:
            name = rng.choice(list(content))
            content[name] = bytes_of(rng, content[name])
        case 1:
            content.pop(rng.choice(list(content)))
        case 2:
            name = rng.choice(list(content))
            content[
                rng.choice(
                    ("m/../x", "n/x", name + "/x", "m/data/aotinductor/model/a.so", "m/data/constants/custom_obj_0")
                )
            ] = content[name]
        case 3:
            first, second = rng.choice(list(content)), rng.choice(list(content))
            content[first], content[second] = content[second], content[first]
        case _:
            name = rng.choice(documents)
            content[name] = json_of(rng, content[name])
    return zipped(content, compressed=rng.random() < 0.05)


def zipped(content: dict[str, bytes], *, compressed: bool) -> bytes:
    """An archive of these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as target:
        for name, data in content.items():
            target.writestr(name, data)
    return buffer.getvalue()
