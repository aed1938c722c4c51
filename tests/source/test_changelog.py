"""Releases list their changes by kind: a list above the first kind comes back when a merge keeps the lines of both."""

from __future__ import annotations

import re

from parsed import ROOT  # type: ignore[import-not-found]

KINDS = ["Upgrade notes", "Added", "Changed", "Fixed", "Security", "Removed"]


def test_the_newest_release_lists_its_changes_by_kind() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    above, *sections = newest.split("\n### ")
    assert above.splitlines()[1:] in ([], [""]), "move these lines into the section of their kind and area"
    assert [section.splitlines()[0] for section in sections] == [k for k in KINDS if f"\n### {k}\n" in newest]
    lines = re.findall(r"^- .*", newest, re.MULTILINE)
    assert [line for line in set(lines) if lines.count(line) > 1] == []
