"""Fenced blocks of the documentation, with the comment that stands before each."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "helm" / "offramp" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?:<!-- (?P<note>[^\n]*?) "
    r"-->\n(?P=indent))?```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. ``note`` is what the comment before it says, or empty."""

    page: str
    line: int
    language: str
    options: str
    note: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of one page, in order."""
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("language")) + 1,
            language=match["language"],
            options=match["options"].strip(),
            note=match["note"] or "",
            text=textwrap.dedent(match["body"]),
        )
        for match in FENCE.finditer(text)
    ]


def blocks(*languages: str) -> list[Block]:
    """All blocks of some languages, over all pages."""
    found = (
        b for path in PAGES for b in blocks_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    )
    return [b for b in found if b.language in languages]


def commands(shell: str) -> Iterator[str]:
    """The commands of a shell block: continued lines joined, prompts and comments taken off, here-documents left
    out."""
    text = re.sub(r"<<'?(\w+)'?(.*?)\n.*?\n\1$", r"\2", shell, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    prompted = any(line.startswith("$ ") for line in text.splitlines())
    for line in text.splitlines():
        if prompted and not line.startswith("$ "):
            continue  # output
        for part in re.split(r"\s(?:&&|\|\||\||;)\s", line.removeprefix("$ ")):
            command = re.split(r"\s+#\s|\s[<>]", part)[0].strip().rstrip("&").strip()
            if command and not command.startswith("#"):
                yield command
