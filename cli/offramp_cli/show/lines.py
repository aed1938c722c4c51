"""Building blocks of what people read. A line is a ``rich.text.Text``: its ``plain`` is what a pipe gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from offramp_core.reasons import Tone
from offramp_operator.explain.tones import state_tone

Cell = str | Text
GAP = 3
STYLES: Mapping[Tone, str] = {Tone.GOOD: "green", Tone.NEUTRAL: "", Tone.WARNING: "yellow", Tone.BAD: "red"}


@dataclass(frozen=True, slots=True)
class Node:
    """A row of a tree, and what hangs below it."""

    cells: Sequence[Cell]
    children: Sequence[Node] = field(default_factory=tuple)


def state(word: str) -> Text:
    """A state in its colour, which never says more than the word."""
    return Text(word, style=STYLES[state_tone(word)])


def heading(text: str) -> Text:
    return Text(text, style="bold")


def columns(rows: Iterable[Sequence[Cell]]) -> list[Text]:
    """Rows as aligned columns, like kubectl's; the last one runs as far as it needs."""
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells), default=0))]
    lines = []
    for row in cells:
        line = Text()
        for cell, width in zip(row, widths, strict=False):
            line.append_text(cell).append(" " * (width - len(cell) + GAP))
        line.rstrip()
        lines.append(line)
    return lines


def table(titles: Iterable[str], rows: Iterable[Sequence[Cell]]) -> list[Text]:
    """Columns below their titles."""
    return columns([[heading(title) for title in titles], *rows])


def tree(header: Sequence[str], roots: Sequence[Node]) -> list[Text]:
    """Trees below one header; branches are drawn in the first column."""
    return table(header, (row for root in roots for row in _branch(root, "", "")))


def _branch(node: Node, before: str, below: str) -> list[Sequence[Cell]]:
    first, *rest = node.cells
    rows: list[Sequence[Cell]] = [[Text(before) + (first if isinstance(first, Text) else Text(first)), *rest]]
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        rows += _branch(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
    return rows


def filled(rows: Iterable[tuple[str, Cell]]) -> list[Text]:
    """``name  value`` lines of what is not empty."""
    return columns([[Text(name, style="dim"), value] for name, value in rows if str(value)])
