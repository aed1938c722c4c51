"""Build the site: ``python -m website.build`` writes ``build/site``.

Pages that ``mkdocs.yml`` does not name in ``nav`` join the section of their folder, so none is ever left out; an entry
without a page is an error. Afterwards every link of what was built is followed (:mod:`website.links`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from website.links import problems

ROOT = Path(__file__).resolve().parent.parent
DOCS, SITE, CONFIG = ROOT / "docs", ROOT / "build" / "site", ROOT / "mkdocs.yml"
SECTIONS = {
    "": "Operate",
    "concepts": "Concepts",
    "how-to": "How to",
    "reference": "Reference",
    "decisions": "Decisions",
}

Nav = list[Any]


class SiteError(Exception):
    """The site cannot be built as it is; the message names the page."""


def pages(docs: Path = DOCS) -> list[str]:
    """Every page, relative to the folder of documents."""
    return sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def title(page: Path) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SiteError(f"{page}: has no heading of the first level; begin with '# Title'")
    return found[1].strip()


def named(nav: Nav) -> list[str]:
    """The pages that a navigation names."""
    found: list[str] = []
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else (entry,):
            found += named(target) if isinstance(target, list) else [target]
    return found


def complete(nav: Nav, docs: Path = DOCS) -> Nav:
    """The navigation with every page in it.

    Raises
    ------
    SiteError
        An entry has no page, or a page's folder has no section.
    """
    there, said = pages(docs), named(nav)
    missing = sorted(set(said) - set(there))
    if missing:
        raise SiteError(f"mkdocs.yml: nav names {', '.join(missing)}, which docs/ does not have")
    sections = {name: target for entry in nav if isinstance(entry, dict) for name, target in entry.items()}
    for page in (page for page in there if page not in said):
        folder = page.rpartition("/")[0]
        if folder not in SECTIONS:
            raise SiteError(f"docs/{page}: its folder has no section in website/build.py")
        sections[SECTIONS[folder]].append({title(docs / page): page})
    return nav


def configuration() -> Path:
    """``mkdocs.yml`` with its navigation completed, beside the original, since paths in it are relative."""
    text = CONFIG.read_text(encoding="utf-8")
    head, rest = text.split("\nnav:\n", 1)
    body = re.match(r"(?:[ ].*\n|\n)*", rest)
    assert body is not None
    nav = complete(yaml.safe_load(body[0]))
    written = yaml.safe_dump({"nav": nav}, sort_keys=False, allow_unicode=True)
    path = ROOT / ".mkdocs.build.yml"
    path.write_text(f"{head}\n{written}{rest[body.end() :]}", encoding="utf-8")
    return path


def build() -> None:
    """Build into ``build/site``; strict, from nothing.

    Raises
    ------
    SiteError
        The builder or a link complains.
    """
    shutil.rmtree(SITE, ignore_errors=True)
    config = configuration()
    try:
        command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean", "-f", config.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        config.unlink()
    if done.returncode != 0:
        raise SiteError((done.stdout + done.stderr).strip())
    wrong = problems(SITE)
    if wrong:
        raise SiteError("\n".join(wrong))


def main() -> int:
    try:
        build()
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    n = sum(1 for _ in SITE.rglob("*.html"))
    print(
        f"{SITE.relative_to(ROOT)}/index.html: {n} pages, every link and anchor within followed, those to other sites "
        "well formed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
