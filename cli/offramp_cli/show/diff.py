"""``diff``: two plans side by side."""

from __future__ import annotations

from rich.text import Text

from offramp_cli.show.lines import Cell, columns, heading
from offramp_core.control.objects import Config
from offramp_operator.explain.plans import compare


def side_by_side(a: Config, b: Config) -> list[Text]:
    """Both plans, a line per field; what differs is marked."""
    rows: list[list[Cell]] = [[heading(""), heading("FIELD"), heading(a.name), heading(b.name)]]
    for row in compare(a, b):
        style = "yellow" if row.differs else ""
        rows.append(
            [
                Text("≠" if row.differs else " ", style=style),
                row.field,
                Text(_short(row.a), style=style),
                Text(_short(row.b), style=style),
            ]
        )
    return columns(rows)


def _short(text: str) -> str:
    """A digest as people tell it apart."""
    return f"{text[:19]}…" if text.startswith("sha256:") else text
