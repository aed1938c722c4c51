"""Record sets on disk: ``NAME.npz`` in the records-file contract, ``NAME.json`` with the facts, kept by content.

Both are written beside their target and renamed; the facts come last and carry the content keys, one of the scores and
one of the costs, which can be measured again without any training. Besides the contract's arrays a file holds
``one_minus_max`` float32 [N, R], the score before any quantile table (published tuners search thresholds on that
scale), and ``row`` int64 [N], each record's place in its data set. Readers of records files ignore both.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]

COST_ARRAYS = ("batch_size", "segment_seconds", "ramp_seconds", "regroup_seconds")


@dataclass(frozen=True, slots=True)
class RecordSet:
    """One recorded set: its arrays, and what one must know to judge them."""

    name: str
    arrays: Arrays
    facts: Mapping[str, Any]


def content_key(*, modules: Iterable[str], files: Iterable[Path], arguments: Mapping[str, Any]) -> str:
    """Digest of everything a record set depends on.

    Parameters
    ----------
    modules : iterable of str
        Source files. Comments, docstrings and layout do not count, so that explaining the code costs no recording.
    files : iterable of Path
        Data files; their bytes count, their folder does not.
    arguments : mapping
        Whatever else steers the recording.
    """
    digest = hashlib.sha256(json.dumps(dict(arguments), sort_keys=True).encode())
    for module in modules:
        digest.update(ast.dump(_without_docstrings(ast.parse(Path(module).read_text(encoding="utf-8")))).encode())
    for path in files:
        digest.update(path.name.encode() + file_digest(path).encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Keys:
    """Content keys of a set's scores and of its costs; empty where there are none."""

    scores: str = ""
    costs: str = ""


def keys_of(folder: Path, name: str) -> Keys:
    """Under which keys ``folder`` holds the set; empty ones unless it is complete and unchanged."""
    facts, arrays = folder / f"{name}.json", folder / f"{name}.npz"
    if not facts.is_file() or not arrays.is_file():
        return Keys()
    try:
        earlier = json.loads(facts.read_text(encoding="utf-8"))
    except ValueError:
        return Keys()
    if not isinstance(earlier, dict) or earlier.get("sha256") != file_digest(arrays):
        return Keys()
    return Keys(str(earlier.get("key", "")), str(earlier.get("costs_key", "")))


def write_set(folder: Path, recorded: RecordSet, *, keys: Keys) -> Path:
    """Write both files, or none when the set cannot be expressed; returns the path of the arrays."""
    buffer = io.BytesIO()
    named: dict[str, Any] = dict(recorded.arrays)
    np.savez(buffer, **named)
    arrays = buffer.getvalue()
    stamp = {
        "name": recorded.name,
        "key": keys.scores,
        "costs_key": keys.costs,
        "sha256": hashlib.sha256(arrays).hexdigest(),
    }
    facts = {**stamp, **{name: value for name, value in recorded.facts.items() if name not in stamp}}
    text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{recorded.name}.npz"
    _replace(target, arrays)
    _replace(target.with_suffix(".json"), text.encode())
    return target


def read_set(folder: Path, name: str) -> RecordSet:
    """A set as :func:`write_set` left it."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    return RecordSet(name, arrays, json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


def _replace(target: Path, content: bytes) -> None:
    """Put a file in the place of ``target``; who reads it meanwhile sees the old one or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    work = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        work.chmod(0o644)  # mkstemp's 0600 would keep other users out
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return tree
