"""Follow every link of a built site: pages, anchors, pictures, styles and scripts; nothing may be fetched from outside.

Links to other sites are read, not followed: where this runs there is no network. They must be addresses that a browser
would take as they are written, encrypted, and of a name that can exist; one to this site's own address must lead to a
page here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

OWN = "https://offramp.example/docs/"  # stands for wherever the site is put
ADDRESS = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+")  # RFC 3986, section 2
HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,63}")
LOCAL = ("localhost", "127.0.0.1")
LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src", "object": "data"}


@dataclass
class _Page(HTMLParser):
    """Anchors that a page has, links a reader may follow, and files a browser loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in LOADED and given.get(LOADED[tag]) and given.get("rel") != "canonical":
            self.loads.append(given[LOADED[tag]])


@cache
def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def problems(site: Path) -> list[str]:
    """Everything that leads nowhere, as ``page: link: why``."""
    _page.cache_clear()
    found: list[str] = []
    for path in sorted(site.rglob("*.html")):
        page = _page(path)
        name = path.relative_to(site).as_posix()
        links = [] if name == "404.html" else page.links  # its links begin at the root of wherever the site is served
        found += [f"{name}: {link}: {why}" for link in links if (why := wrong(site, path, link))]
        found += [f"{name}: {link}: {why}" for link in page.loads if (why := _wrong_load(site, path, link))]
    return found


def wrong(site: Path, path: Path, link: str) -> str:
    """Why a link leads nowhere; empty where it leads somewhere, or could outside."""
    if link.startswith(OWN):
        return wrong(site, site / "index.html", link.removeprefix(OWN) or "index.html")
    try:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return _malformed(link, parts)
    except ValueError as error:
        return f"no address: {error}"
    target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target = target / "index.html"
    if not target.is_relative_to(site.resolve()) or not target.is_file():
        return "no such page"
    fragment = unquote(parts.fragment)
    if fragment and target.suffix == ".html" and fragment not in _page(target).anchors:
        return "no such anchor"
    return ""


def _malformed(link: str, parts: SplitResult) -> str:
    """Why an address elsewhere cannot be right as it is written; empty where it can."""
    host = parts.hostname or ""
    if parts.scheme != "https" and host not in LOCAL:
        return "not https"
    if not ADDRESS.fullmatch(link) or parts.username is not None:
        return "has characters that no address has"
    _ = parts.port  # raises where it is none
    return "" if host in LOCAL or HOST.fullmatch(host) else "no such host can exist"


def _wrong_load(site: Path, path: Path, link: str) -> str:
    """Why a file cannot be loaded by a reader without a network."""
    parts = urlsplit(link)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        return "loaded from outside; readers without a network would miss it"
    return "" if path.name == "404.html" else wrong(site, path, link)
