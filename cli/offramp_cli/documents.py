"""YAML as users write it, read with bounds: an alias may stand for anything, and nine of them for more than any memory
holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from offramp_core.errors import OfframpError

MOST_NODES = 200_000  # of one document, each as often as aliases repeat it
DEEPEST = 100
LONGEST_INTEGER = 10**400  # JSON's widest number is shorter; Python refuses to print one of 4,300 digits


class TooMuchError(OfframpError, yaml.YAMLError):
    """A text that is YAML and cannot be a manifest. ``problem_mark`` is where."""

    def __init__(self, problem: str, mark: yaml.Mark | None = None) -> None:
        super().__init__(problem)
        self.problem, self.problem_mark = problem, mark


class Loader(yaml.SafeLoader):
    """Plain scalars as kubectl takes them, and so JSON in its whole width: ``1e3`` is a number, a date and ``12:30:45``
    are texts. Reading ends where a text is nested too deep: the time that it takes grows with the square of that."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == DEEPEST:
            here = self.peek_event()  # type: ignore[no-untyped-call]
            raise TooMuchError(f"nested more than {DEEPEST} deep", here.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_OTHERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in _OTHERS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    _OTHERS[0], re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"), list("-+0123456789")
)
Loader.add_implicit_resolver(
    _OTHERS[1],
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One document or list item, and the YAML nodes it was read from, which know their lines."""

    value: Any
    node: yaml.Node


def documents(text: str) -> Iterator[Document]:
    """The documents of a text that say anything.

    Raises
    ------
    yaml.YAMLError
        The text is no YAML, or more than a manifest can be.
    """
    for node in _composed(text):
        if node is not None:
            _check(node)
            value = constructed(node)
            if value is not None:
                yield Document(value, node)


def _composed(text: str) -> list[yaml.Node | None]:
    try:
        return list(yaml.compose_all(text, Loader=Loader))
    except (ValueError, OverflowError) as error:  # characters and versions that are none
        raise TooMuchError(f"cannot be read: {error}") from error


def constructed(node: yaml.Node) -> Any:
    """The value of a node, as JSON could have said it."""
    loader = Loader("")
    try:
        return _plain(loader.construct_document(node))
    except (ValueError, OverflowError, LookupError, AttributeError, TypeError) as error:
        # What a tag forces into another type; the library lets whatever comes of it out.
        raise TooMuchError(f"a value is not what its tag says: {error}", node.start_mark) from error
    finally:
        loader.dispose()


def _plain(value: Any) -> Any:
    """Keys are texts, as kubectl makes them, and what only YAML knows is a text as well."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else json.dumps(key, default=str): _plain(each) for key, each in value.items()
        }
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if isinstance(value, int) and abs(value) > LONGEST_INTEGER:
        raise OverflowError("a whole number of more than 400 digits")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _check(node: yaml.Node) -> None:
    """Refuse what is too deep, holds itself, says a key twice, or grows beyond measure by its aliases."""
    sizes: dict[int, int] = {}
    if _size(node, sizes, 1) > MOST_NODES:
        raise TooMuchError(f"more than {MOST_NODES:,} values once its aliases are written out", node.start_mark)


def _size(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    if depth > DEEPEST:
        raise TooMuchError(f"nested more than {DEEPEST} deep", node.start_mark)
    known = sizes.get(id(node))
    if known is not None:
        if known < 0:
            raise TooMuchError("an alias stands for something around it", node.start_mark)
        return known
    sizes[id(node)] = -1
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node)
        inner = [each for pair in node.value for each in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    sizes[id(node)] = 1 + sum(_size(each, sizes, depth + 1) for each in inner)
    return sizes[id(node)]


def _refuse_twice(node: yaml.MappingNode) -> None:
    """Make keys the texts that kubectl makes of them, and refuse one that stands twice, as kubectl does: only the last
    one would count."""
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.tag not in (_TEXT, _MERGE):
            value = constructed(key)
            key.tag, key.value = _TEXT, value if isinstance(value, str) else json.dumps(value, default=str)
        if key.value in seen:
            raise TooMuchError(f"the key {key.value!r} stands twice; only one of them can count", key.start_mark)
        seen.add(key.value)
