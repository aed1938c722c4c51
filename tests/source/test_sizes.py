"""No function of the product is longer than 60 lines, no class longer than 300."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from parsed import PACKAGES, ROOT, nodes_of  # type: ignore[import-not-found]

FUNCTION, CLASS = 60, 300


def definitions(package: str) -> Iterator[tuple[str, str, int, int]]:
    """(file, name, lines, lines it may have) of every function and class, those within others too."""
    for path, nodes in nodes_of(package).items():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
                lines = (node.end_lineno or 0) - node.lineno + 1
                yield path.relative_to(ROOT).as_posix(), node.name, lines, limit


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_and_classes_are_short_enough_to_be_read(package: str) -> None:
    found = [f"{file} {name}: {lines} lines" for file, name, lines, limit in definitions(package) if lines > limit]
    assert not found, "split what is longer by the steps it takes"
