"""What a bundle is for, before anything else of it is read."""

from __future__ import annotations

import json
from pathlib import Path

from offramp_core.bundle import MANIFEST_FILE

GENERATE = "generate"
MAX_MANIFEST_BYTES = 16 * 2**20


def declared_task(folder: Path) -> str:
    """``generate``, or empty for a classifier's bundle and for one that cannot be read: whoever loads it says why."""
    return _declared(folder, "task")


def declared_name(folder: Path) -> str:
    """What a bundle calls its model, empty for one that cannot be read."""
    if not (folder / MANIFEST_FILE).is_file():
        return ""  # who opens a pipe waits
    return _declared(folder, "name")


def declared_engine(folder: Path) -> str:
    """What computes a bundle's model, empty where this worker does itself."""
    return _declared(folder, "engine")


def _declared(folder: Path, field: str) -> str:
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            return ""
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    text = manifest.get(field) if isinstance(manifest, dict) else None
    return text if isinstance(text, str) else ""
