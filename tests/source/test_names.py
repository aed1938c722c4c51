"""Identifiers of the product are plain technical words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from parsed import PACKAGES, nodes_of  # type: ignore[import-not-found]

# Each has a term of the field that says more: reported, outputs, poll, parent_death, peak_rate, trim, listener.
AVOIDED = frozenset({"told", "said", "look", "leash", "peaks", "slim", "onlook", "onlooker", "onlookers"})
BETWEEN_WORDS = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")


def defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that code gives to something: functions, classes, parameters, variables, attributes, imports."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name


def avoided(name: str) -> bool:
    return not AVOIDED.isdisjoint(map(str.lower, BETWEEN_WORDS.split(name)))


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_the_terms_of_the_field(package: str) -> None:
    found = {file: {file.stem, *defined(nodes)} for file, nodes in nodes_of(package).items()}
    assert [f"{file}: {name}" for file, names in found.items() for name in names if avoided(name)] == []


@pytest.mark.parametrize(
    "code",
    [
        "def _told(): ...",
        "class Said: ...",
        "def f(*, look_up): ...",
        "lambda told: 0",
        "PEAKS = 1",
        "self._told_at, x = 1, 2",
        "[said for said in y]",
        "for i, told in y: ...",
        "with x as told: ...",
        "import a as leash",
        "(slim := 1)",
        "match x:\n    case [*told]: ...",
    ],
)
def test_a_name_is_seen_wherever_code_gives_one(code: str) -> None:
    assert any(map(avoided, defined(ast.walk(ast.parse(code)))))


def test_longer_words_that_hold_a_short_one_are_fine() -> None:
    assert not any(map(avoided, ("lookahead", "speaks_of", "outlooks", "withhold")))
