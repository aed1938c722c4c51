"""What a bundle is for, before anything else of it is read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from offramp_core.bundle import MANIFEST_FILE

GENERATE = "generate"
MAX_MANIFEST_BYTES = 16 * 2**20


def declared_task(folder: Path) -> str:
    """``generate``, or empty for a classifier's bundle and for one that cannot be read: whoever loads it says why."""
    return _declared(folder, "task")


def declared_name(folder: Path) -> str:
    """What a bundle calls its model, empty for one that cannot be read."""
    return _declared(folder, "name")


def _regular(path: str, flags: int) -> int:
    """Nothing but a regular file is opened or waited for."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    return file


def _declared(folder: Path, field: str) -> str:
    path = folder / MANIFEST_FILE
    try:
        with open(path, "rb", opener=_regular) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            return ""
        manifest = json.loads(raw)
    except (OSError, ValueError, RecursionError):
        return ""
    text = manifest.get(field) if isinstance(manifest, dict) else None
    return text if isinstance(text, str) else ""
