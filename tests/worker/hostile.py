"""Archives of ``torch.export`` for tests, and members of them exchanged for hostile ones."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

PROGRAM = "m/models/model.json"
WEIGHTS = "m/data/weights/model_weights_config.json"
CONSTANTS = "m/data/constants/model_constants_config.json"
SAMPLES = "m/data/sample_inputs/model.pt"
ROWS = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)

Json = dict[str, Any]


@cache
def classifier() -> nn.Module:
    """A small classifier of rows [batch, 4]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def state() -> dict[str, torch.Tensor]:
    """Its weights."""
    return dict(classifier().named_parameters())


@cache
def program_archive() -> bytes:
    """The classifier as ``torch.export.save`` writes it."""
    batch = torch.export.Dim("batch")
    program = torch.export.export(classifier(), (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return renamed(buffer.getvalue(), root="m")


def renamed(archive: bytes, *, root: str) -> bytes:
    """The archive with another first folder."""
    return zipped({f"{root}/{name.partition('/')[2]}": content for name, content in members(archive).items()})


def members(archive: bytes) -> dict[str, bytes]:
    """Every member's content, by name."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        return {name: source.read(name) for name in source.namelist()}


def zipped(content: dict[str, bytes]) -> bytes:
    """An archive of members that are not compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for name, data in content.items():
            target.writestr(name, data)
    return buffer.getvalue()


def edited(archive: bytes, member: str, edit: Callable[[Json], object]) -> bytes:
    """The archive after ``edit`` changed the JSON of a member in place."""
    content = members(archive)
    document = json.loads(content[member])
    edit(document)
    return zipped({**content, member: json.dumps(document).encode()})


def with_member(archive: bytes, name: str, content: bytes) -> bytes:
    """The archive with one member more, or exchanged."""
    return zipped({**members(archive), name: content})


def saved(folder: Path, archive: bytes) -> str:
    """Written to a file, whose name is returned."""
    path = folder / "m.pt2"
    path.write_bytes(archive)
    return str(path)
