"""The tree in the docstring of ``offramp_core.errors`` is the one that the code has."""

from __future__ import annotations

import ast
import re

from parsed import nodes  # type: ignore[import-not-found]

from offramp_core import errors

ENTRY = re.compile(r"^(?P<indent>[ │]*)(?:[├└]── )?(?P<name>\w+Error)\b(?: \((?P<beside>\w+)\))?")


def drawn() -> dict[str, tuple[str, ...]]:
    """Bases of every error as the tree draws them: the one above it and the one in brackets."""
    found: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        entry = ENTRY.match(line)
        if entry is not None:
            assert entry["name"] not in found, "drawn twice"
            depth = (len(entry["indent"]) - 4) // 4 + ("──" in line)
            above[depth:] = [entry["name"]]
            found[entry["name"]] = (*above[depth - 1 : depth], *([entry["beside"]] if entry["beside"] else []))
    return found


def written() -> dict[str, tuple[str, ...]]:
    """Bases of every class of the product that derives from the root, by name."""
    bases = {
        (path, node.name): tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        for path, all_of_it in nodes().items()
        for node in all_of_it
        if isinstance(node, ast.ClassDef)
    }
    found = {"OfframpError": ()}
    while more := {n: b for (_, n), b in bases.items() if n not in found and not found.keys().isdisjoint(b)}:
        found |= more
    return found


def test_every_error_of_the_product_is_drawn_below_what_it_derives_from() -> None:
    tree, code = drawn(), written()
    assert len(tree) > 20
    assert tree == code


def test_every_error_is_drawn_with_what_it_means() -> None:
    bare = [
        line for line in (errors.__doc__ or "").splitlines() if re.fullmatch(r"[ │]*[├└]── \w+(?: \(\w+\))? *", line)
    ]
    assert not bare
