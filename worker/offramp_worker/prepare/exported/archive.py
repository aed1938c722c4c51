"""Reading an archive of ``torch.export`` without believing it, and writing what passed for torch to read.

Two layouts are read: ``NAME/models/model.json`` with ``NAME/data/`` (today's), and ``serialized_exported_program.json``
beside files of ``torch.save`` (torch 2.7's). Members are copied under names of ours into an archive that Python writes,
so that no two readers can differ in what they see.
"""

from __future__ import annotations

import io
import json
import math
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, Any

from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.documents import parse_document
from offramp_worker.prepare.exported.schema import PARAMETER, PAYLOADS, PROGRAM, Json, Kind, refused

ROOT = "model"
PROGRAM_FILE = "models/model.json"
PAYLOAD_FILES = (  # what is listed where, and where what is listed lies
    ("data/weights/model_weights_config.json", "data/weights"),
    ("data/constants/model_constants_config.json", "data/constants"),
)
LEGACY_PAYLOADS = ("data/weights/model.pt", "data/constants/model.pt")  # torch 2.8's
SAMPLES_FILE = "data/sample_inputs/model.pt"
MARKS = ("archive_format", "archive_version", ".data/version", "version", "byteorder")
OLD_PROGRAM_FILE = "serialized_exported_program.json"
OLD_PAYLOADS = ("serialized_state_dict.pt", "serialized_constants.pt")
OLD_SAMPLES_FILE = "serialized_example_inputs.pt"
MAX_MEMBERS = 100_000
MAX_DOCUMENT_BYTES = 256 * 1024 * 1024  # of a program's JSON; those of large networks have some megabytes
MAX_MARK_BYTES = 64
CHUNK_BYTES = 1024 * 1024
STRIDED = 7  # torch's number of the plain layout
ITEM_BYTES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 2,
    7: 4,
    8: 8,
    9: 4,
    10: 8,
    11: 16,
    12: 1,
    13: 2,
    28: 2,
    29: 1,
    30: 1,
    31: 1,
    32: 1,
    33: 1,
    34: 4,
    35: 8,
}  # of torch's serialized scalar types


def checked_archive(path: Path) -> IO[bytes]:
    """An archive for ``torch.export.load`` with the program, weights and constants of ``path``, and nothing that is
    evaluated or unpickled.

    Raises
    ------
    InvalidArgumentError
        The file is no such archive, or a field of it holds what does not belong there; the message names the field.
    ModelRefusedError
        It holds pickled objects or compiled code.
    """
    try:
        with zipfile.ZipFile(path) as source:
            members = _Members(source, path.stat().st_size)
            with ExitStack() as stack:
                target = stack.enter_context(tempfile.TemporaryFile())
                with zipfile.ZipFile(target, "w") as written:
                    _rewrite(members, written)
                stack.pop_all()  # from here on the caller's to close
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError, RecursionError) as error:
        if isinstance(error, ModelRefusedError):
            raise type(error)(f"model {path} {error}") from error
        why = ":" if isinstance(error, InvalidArgumentError) else " is not a readable torch.export program:"
        raise InvalidArgumentError(f"model {path}{why} {_line(error)}") from error
    target.seek(0)
    return target


class _Members:
    """The files of an archive, under their names without the folder that holds them all."""

    def __init__(self, source: zipfile.ZipFile, size: int) -> None:
        self._source = source
        entries = source.infolist()
        _check_entries(entries, size)
        folders = {entry.filename.partition("/")[0] for entry in entries if "/" in entry.filename}
        files = {entry.filename for entry in entries}
        root = "" if OLD_PROGRAM_FILE in files or len(folders) != 1 else f"{folders.pop()}/"
        self._entries = {
            entry.filename.removeprefix(root): entry for entry in entries if entry.filename.startswith(root)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def size(self, name: str) -> int:
        return self._entry(name).file_size

    def read(self, name: str, *, limit: int) -> bytes:
        if self.size(name) > limit:
            raise refused(name, f"has {self.size(name)} bytes; at most {limit} are read")
        return self._source.read(self._entry(name))

    def copy(self, name: str, target: zipfile.ZipFile, as_name: str) -> None:
        """Write a member again, without holding it in memory."""
        info = zipfile.ZipInfo(as_name)
        info.file_size = self.size(name)
        with self._source.open(self._entry(name)) as source, target.open(info, "w", force_zip64=True) as written:
            while chunk := source.read(CHUNK_BYTES):
                written.write(chunk)

    def _entry(self, name: str) -> zipfile.ZipInfo:
        if name not in self._entries:
            raise InvalidArgumentError(f"is no archive of torch.export: it has no {name}")
        return self._entries[name]


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse archives that different readers may take for different things, or that unpack to more than they are."""
    if len(entries) > MAX_MEMBERS:
        raise InvalidArgumentError(f"has {len(entries)} members; at most {MAX_MEMBERS} are read")
    folders: set[str] = set()
    for entry in entries:
        name = entry.filename
        if not name or name.startswith("/") or "\\" in name or ".." in name.split("/") or name.endswith("/"):
            raise InvalidArgumentError(f"names {name[:80]!r} as a member, which is no plain file inside of it")
        folders.update(name.split("/")[:1] if "/" in name else ())
        if len(folders) > 1:
            raise InvalidArgumentError(f"names {name[:80]!r} as a member, beside its folder; torch writes one folder")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise InvalidArgumentError(
                f"has a member {name[:80]!r} that is compressed or encrypted; torch stores them plainly"
            )
        _refuse_code(name)
    twice = [name for name, count in Counter(entry.filename for entry in entries).items() if count > 1]
    if twice:
        raise InvalidArgumentError(f"has the member {twice[0][:80]!r} twice")
    if (total := sum(entry.file_size for entry in entries)) > size:
        raise InvalidArgumentError(f"has {size} bytes, and members of {total}")


def _refuse_code(name: str) -> None:
    file = PurePosixPath(name).name
    if file.startswith(("custom_obj", "opaque_obj")):
        raise ModelRefusedError(f"holds a pickled object ({file[:80]}), which is never loaded")
    if "/data/aotinductor/" in f"/{name}" or file.endswith((".so", ".dylib", ".dll", ".cubin")):
        raise ModelRefusedError(
            f"holds compiled code ({file[:80]}), which is never loaded; save the program with torch.export.save"
        )


def _rewrite(members: _Members, target: zipfile.ZipFile) -> None:
    order = members.read("byteorder", limit=MAX_MARK_BYTES) if "byteorder" in members else b"little"
    if order != b"little":
        raise refused("byteorder", "is not little; export it on another machine")
    if OLD_PROGRAM_FILE in members:
        target.writestr("version", _mark(members, "version"))
        target.writestr(OLD_PROGRAM_FILE, _document(members, OLD_PROGRAM_FILE, PROGRAM))
        for name in OLD_PAYLOADS:
            target.writestr(name, _plain_tensors(members, name))
        target.writestr(OLD_SAMPLES_FILE, b"")
        return
    for name in MARKS:
        if name in members:
            target.writestr(f"{ROOT}/{name}", _mark(members, name))
    target.writestr(f"{ROOT}/{PROGRAM_FILE}", _document(members, PROGRAM_FILE, PROGRAM))
    for (listed, folder), legacy in zip(PAYLOAD_FILES, LEGACY_PAYLOADS, strict=True):
        if legacy in members:
            target.writestr(f"{ROOT}/{legacy}", _plain_tensors(members, legacy))
        else:
            _copy_payloads(members, target, listed=listed, folder=folder)
    target.writestr(f"{ROOT}/{SAMPLES_FILE}", b"")  # never needed, and pickled


def _mark(members: _Members, name: str) -> bytes:
    text = members.read(name, limit=MAX_MARK_BYTES)
    if not text.decode("ascii").strip().replace(".", "").isalnum():
        raise refused(name, "is no version")
    return text


def _document(members: _Members, name: str, kind: Kind) -> bytes:
    """A JSON member as its grammar lets it be."""
    return json.dumps(_read_document(members, name, kind)).encode()


def _read_document(members: _Members, name: str, kind: Kind) -> Json:
    try:
        value = parse_document(members.read(name, limit=MAX_DOCUMENT_BYTES), dict)
    except InvalidArgumentError:
        raise
    except ValueError as error:
        raise refused(name, f"is no JSON object ({error})") from error
    read: Json = kind(value, PurePosixPath(name).stem)
    return read


def _copy_payloads(members: _Members, target: zipfile.ZipFile, *, listed: str, folder: str) -> None:
    """The tensors that a list names, each with as many bytes as its shape needs."""
    document = _read_document(members, listed, PAYLOADS)
    files: set[str] = set()
    for name, payload in document["config"].items():
        file = f"{folder}/{payload['path_name']}"
        if payload["use_pickle"] or payload["tensor_meta"] is None:
            raise ModelRefusedError(f"holds a pickled object ({name}), which is never loaded")
        _check_tensor(name, payload["tensor_meta"], size=members.size(file))
        files.add(file)
    target.writestr(f"{ROOT}/{listed}", json.dumps(document))
    for file in sorted(files):
        members.copy(file, target, f"{ROOT}/{file}")


def _check_tensor(name: str, meta: Mapping[str, Any], *, size: int) -> None:
    """Refuse a tensor that is not plain, or reaches beyond the ``size`` bytes that it is stored in."""
    sizes, strides, offset = (_plain(meta[field], name) for field in ("sizes", "strides", "storage_offset"))
    if meta["layout"] != STRIDED or meta["dtype"] not in ITEM_BYTES or len(sizes) != len(strides):
        raise refused(name, "is no plain tensor")
    last = sum((length - 1) * stride for length, stride in zip(sizes, strides, strict=True)) + offset[0] + 1
    needed = last * ITEM_BYTES[meta["dtype"]] if math.prod(sizes) else 0
    if needed > size:
        raise refused(name, f"needs {needed} bytes, and {size} are stored")


def _plain(value: Any, name: str) -> list[int]:
    numbers = [part.get("as_int", -1) for part in (value if isinstance(value, list) else [value])]
    if any(number < 0 for number in numbers):
        raise refused(name, "has a size, stride or offset that is no number from 0")
    return numbers


def _plain_tensors(members: _Members, name: str) -> bytes:
    """A file of ``torch.save`` with named tensors, read by torch's unpickler of plain data and saved anew."""
    import torch

    raw = members.read(name, limit=members.size(name))
    with zipfile.ZipFile(io.BytesIO(raw)) as inner:
        _check_entries(inner.infolist(), len(raw))
    try:
        tensors = torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises whatever the pickled bytes make it raise
        raise refused(name, f"is no file of plain tensors: {_line(error)}") from error
    if not isinstance(tensors, dict) or not all(
        type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        for value in tensors.values()
    ):
        raise refused(name, "is no file of plain tensors")
    for key in tensors:
        PARAMETER(key, name)
    buffer = io.BytesIO()
    torch.save(dict(tensors), buffer)
    return buffer.getvalue()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
