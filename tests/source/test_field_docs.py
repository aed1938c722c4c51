"""What a field of a dataclass means stands at the field (``#:``), not in a list that the class has besides."""

from __future__ import annotations

import ast
from pathlib import Path

from parsed import nodes  # type: ignore[import-not-found]


def dataclasses() -> list[tuple[Path, ast.ClassDef]]:
    return [
        (path, node)
        for path, found in nodes().items()
        for node in found
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    ]


def test_no_dataclass_lists_its_fields_in_its_docstring() -> None:
    found = dataclasses()
    assert len(found) > 200
    assert [
        f"{path}: {node.name}" for path, node in found if "Attributes\n---" in (ast.get_docstring(node) or "")
    ] == []
