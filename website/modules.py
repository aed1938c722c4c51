"""Where everything is: every package and module with the first sentence of its own docstring, and every decision with
its title."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from website.build import DOCS, ROOT, title

MODULES = """\
<!-- Generated from the code by scripts/gen.d/docs; edit the docstrings instead. -->
# Modules

Every module of the product and the first sentence of its docstring. [Architecture](../architecture.md) describes how they work together.
"""
DECISIONS = """\
<!-- Generated from the titles by scripts/gen.d/docs; edit those instead. -->
# Decisions

A few lines each: context, choice, consequence. A later decision may replace an earlier one and says so.

| | decision |
|---:|---|
"""
DOCSTRING = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""\n')


def outputs() -> dict[str, str]:
    """Pages below ``docs`` and what they should say."""
    return {
        "reference/modules.md": MODULES + "".join(_rooms()),
        "decisions/README.md": DECISIONS + "".join(_decisions()),
    }


def packages(root: Path = ROOT) -> list[Path]:
    """Every package of the product, each before those in it."""
    return sorted(path.parent for top in root.glob("*/offramp_*/") for path in top.rglob("__init__.py"))


def modules(package: Path) -> dict[str, str]:
    """Modules of a package and what they are for: the first paragraph of their docstrings, on one line."""
    return {path.name: _first(path) for path in sorted(package.glob("*.py")) if not path.name.startswith("__")}


def _rooms() -> Iterator[str]:
    for package in packages():
        listed = modules(package)
        if not listed:
            continue
        yield f"\n## {package.relative_to(ROOT).as_posix()}\n\n{_first(package / '__init__.py')}\n\n"
        yield "| module | |\n|---|---|\n"
        for name, sentence in listed.items():
            yield f"| `{name}` | {sentence.replace('|', chr(92) + '|')} |\n"


def _decisions() -> Iterator[str]:
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        number, _, words = title(page).partition(". ")
        yield f"| {number} | [{words}]({page.name}) |\n"


@cache
def _first(path: Path) -> str:
    """The first paragraph of a module's docstring, without the markup of cross-references."""
    source = path.read_text(encoding="utf-8")
    alone = DOCSTRING.match(source)  # the rest of the module need not be parsed: it takes fifty times as long
    told = (ast.get_docstring(ast.parse(alone[0] if alone else source)) or "").split("\n\n")[0]
    for role in (":mod:", ":func:", ":class:"):
        told = told.replace(role, "")
    return " ".join(told.replace("``", "`").split()).replace("<", "&lt;")
