"""The product's source, parsed once for all tests that read it: half a million nodes."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("[a-z]*/offramp_*") if path.is_dir())


@cache
def nodes() -> dict[Path, tuple[ast.AST, ...]]:
    """Every node of every file."""
    gc.disable()  # all of it stays, and the collector would walk through it again and again: two thirds of the time
    try:
        files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
        return {path: tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    finally:
        gc.freeze()
        gc.enable()


def nodes_of(package: str) -> dict[Path, tuple[ast.AST, ...]]:
    """Those of one package."""
    found = {path: each for path, each in nodes().items() if path.is_relative_to(ROOT / package)}
    assert found
    return found
