"""What an earlier page says stands where nothing was measured this time.

Every bench leaves a file of its own, the whole set takes hours, and machines come and go: measuring one thing again
must not wipe the rest off the page. A row that nothing makes any more is deleted from the page by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from bench.report.results import MEASURED, MISSING

Blocks = list[list[str]]  # of lines that no blank line divides


def kept(page: str, earlier: str) -> str:
    """``page`` with the sections, tables and rows of ``earlier`` where it has none of its own."""
    before = {blocks[0][0]: blocks for blocks in _sections(earlier)}
    sections = [_section(blocks, before.get(blocks[0][0], [])) for blocks in _sections(page)]
    return "\n\n".join("\n".join(block) for blocks in sections for block in blocks) + "\n"


def _sections(page: str) -> Iterator[Blocks]:
    """What stands before the first heading of level two, then each such heading with what follows."""
    blocks = [block.splitlines() for block in page.split("\n\n") if block.strip()]
    blocks = [[line for line in block if line] for block in blocks]
    starts = [0, *(i for i, block in enumerate(blocks) if i and block[0].startswith("## "))]
    return (blocks[a:b] for a, b in zip(starts, [*starts[1:], len(blocks)], strict=True))


def _section(blocks: Blocks, before: Blocks) -> Blocks:
    if not any(_is_table(block) for block in before):
        return blocks
    if not any(_is_table(block) for block in blocks):
        return before
    follows = {tuple(a): b for a, b in pairwise(before)}
    merged: Blocks = []
    kept_of: list[str] = []  # the earlier table from which rows stand in the one above
    for above, block in zip([[], *blocks], blocks, strict=False):
        earlier = _counterpart(block, follows.get(tuple(above), []), before)
        if _is_missing(block) and _is_table(earlier):
            merged.append(earlier)
            while _goes_with_it(earlier := follows.get(tuple(earlier), [])):
                merged.append(earlier)
        elif _is_table(block) and _is_table(earlier) and earlier[0] == block[0]:
            merged.append(_rows(block, earlier))
            kept_of = kept_of or (earlier if set(merged[-1]) - set(block) else [])
            continue
        elif kept_of and _says_when(block):
            merged.append(_both(block, before[before.index(kept_of) :]))
        else:
            merged.append(block)
        kept_of = []
    return _with_others(merged, before)


def _with_others(merged: Blocks, before: Blocks) -> Blocks:
    """Tables with a caption of their own, one for each model or set, that were measured another time: each stands
    behind what it stood behind."""
    out, heads = list(merged), {block[0] for block in merged if _is_table(block)}
    captions = [i for i, block in enumerate(out) if _is_caption(block)]
    at = captions[0] if captions else len(out)
    for caption, table, after in zip(before, before[1:], [*before[2:], []], strict=False):
        if not (_is_caption(caption) and _is_table(table)):
            continue
        group = [caption, table, *([after] if _says_when(after) else [])]
        if table[0] in heads:
            found = next(i for i, block in enumerate(out) if _is_table(block) and block[0] == table[0])
            at = found + (2 if found + 1 < len(out) and _says_when(out[found + 1]) else 1)
            continue
        out[at:at] = group
        at += len(group)
    return out


def _counterpart(block: list[str], follows: list[str], before: Blocks) -> list[str]:
    """What stood where ``block`` does: what followed on the same block above, or of tables in a row the only one with
    the same head."""
    if not _is_table(block) or (_is_table(follows) and follows[0] == block[0]):
        return follows
    alike = [table for table in before if _is_table(table) and table[0] == block[0]]
    return alike[0] if len(alike) == 1 else follows


def _both(block: list[str], earlier: Blocks) -> list[str]:
    """The line that says when, for a table (or tables in a row) in which rows of ``earlier`` stand too."""
    after = next((other for other in earlier if not _is_table(other)), [])
    now = block[0].removeprefix(f"*{MEASURED}: ").removesuffix(".*")
    if not _says_when(after) or after == block:
        return block
    return after if now in after[0] else [f"*{MEASURED}: {now}; other rows: {after[0].removeprefix(f'*{MEASURED}: ')}"]


def _rows(table: list[str], earlier: list[str]) -> list[str]:
    """Rows are known by their first cell and, where two share it, by their order. In a table that was measured in part
    only, one that is gone stays."""
    rows = dict(_named(table))
    if not any(MISSING in row for row in rows.values()):
        return table
    names, before = list(rows), None
    for name, row in _named(earlier):
        if name not in rows:
            names.insert(0 if before is None else names.index(before) + 1, name)
        if MISSING in rows.setdefault(name, row):
            rows[name] = row
        before = name
    return [rows[name] for name in names if not _stands_for_others(name, rows)]


def _stands_for_others(name: tuple[str, int], rows: Mapping[tuple[str, int], str]) -> bool:
    """Whether a row only says that nothing was measured, and rows that name what was are kept: "…" beside "resnet56:
    …"."""
    goal = name[0].removeprefix("| ")
    return MISSING in rows[name] and any(
        other != name[0] and goal in other and MISSING not in row for (other, _), row in rows.items()
    )


def _named(table: list[str]) -> Iterator[tuple[tuple[str, int], str]]:
    seen: Counter[str] = Counter()
    for row in table:
        first = row.split(" | ")[0]
        seen[first] += 1
        yield (first, seen[first]), row


def _is_table(block: list[str]) -> bool:
    return bool(block) and block[0].startswith("|")


def _goes_with_it(block: list[str]) -> bool:
    """What says when a table was measured, and its picture."""
    return _says_when(block) or (len(block) == 1 and block[0].startswith("!["))


def _says_when(block: list[str]) -> bool:
    return len(block) == 1 and block[0].startswith(f"*{MEASURED}: ")


def _is_caption(block: list[str]) -> bool:
    return bool(block) and block[0].startswith("*") and not _says_when(block) and not _is_missing(block)


def _is_missing(block: list[str]) -> bool:
    return len(block) == 1 and block[0].strip("*.").lower() == MISSING
