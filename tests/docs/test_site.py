"""The site: what is generated is fresh, every page is reachable, every link leads somewhere, nothing is loaded from
outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from website import build, generate
from website.build import DOCS, SiteError, complete, named, pages
from website.links import OWN, problems, wrong
from website.reference import fields


@pytest.mark.slow
def test_generated_pages_pictures_and_tables_are_fresh() -> None:
    stale = [
        name
        for name, text in generate.outputs().items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text() != text
    ]
    assert stale == [], "run scripts/gen.d/docs"


@pytest.mark.slow
def test_the_site_builds_strictly_and_every_link_leads_somewhere() -> None:
    build.build()
    site = build.SITE
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    missing = [page for page in pages() if page.removesuffix(".md").replace("README", "index") not in built]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    text = build.CONFIG.read_text().split("\nnav:\n", 1)[1].split("\ntheme:", 1)[0]
    assert set(named(complete(yaml.safe_load(text)))) == set(pages())


def test_an_entry_without_a_page_is_an_error() -> None:
    with pytest.raises(SiteError, match=r"nowhere\.md"):
        complete([{"Start": ["nowhere.md"]}])


def test_links_to_missing_pages_and_anchors_and_files_from_outside_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html">b</a><a href="b.html#here">b</a><a href="b.html#gone">b</a><a '
        'href="c.html">c</a>'
        '<a href="#top">top</a><a href="https://example.com/">outside</a><img src="gone.png"><script '
        'src="https://example.com/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert problems(tmp_path) == [
        "a.html: b.html#gone: no such anchor",
        "a.html: c.html: no such page",
        "a.html: gone.png: no such page",
        "a.html: https://example.com/x.js: loaded from outside; readers without a network would miss it",
    ]


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("https://docs.example.com/a/b?c=d#e", ""),
        ("https://xn--bcher-kva.example:8443/%C3%A4", ""),
        ("http://127.0.0.1:8080", ""),
        ("https://offramp.example/docs/a.html#here", ""),
        ("https://offramp.example/docs/", ""),
        ("https://offramp.example/docs/a.html#gone", "no such anchor"),
        ("https://offramp.example/docs/gone.html", "no such page"),
        ("http://docs.example.com", "not https"),
        ("ftp://docs.example.com", "not https"),
        ("//docs.example.com/a", "not https"),
        ("https://docs.example.com/a b", "has characters that no address has"),
        ("https://docs.example.com/a`", "has characters that no address has"),
        ("https://me:secret@docs.example.com", "has characters that no address has"),
        ("https://docs_example.com", "no such host can exist"),
        ("https://docs", "no such host can exist"),
        ("https://docs.example.com:99999", "no address: Port out of range 0-65535"),
        ("https://[docs.example.com", "no address: Invalid IPv6 URL"),
    ],
)
def test_links_to_other_sites_are_well_formed_and_those_to_our_own_address_lead_somewhere(
    tmp_path: Path, link: str, why: str
) -> None:
    (tmp_path / "a.html").write_text('<p id="here"></p>')
    (tmp_path / "index.html").write_text(f'<a href="{link}">there</a>')
    assert problems(tmp_path) == ([f"index.html: {link}: {why}"] if why else [])


@pytest.mark.slow
def test_runbooks_of_alerts_lead_to_their_entry() -> None:
    if not (build.SITE / "index.html").is_file():
        build.build()
    rules = "".join(path.read_text() for path in (build.ROOT / "helm/offramp/files/rules").glob("*.yaml"))
    runbooks = re.findall(r"runbook_url: (\S+)", rules)
    assert len(runbooks) > 20
    assert [
        link for link in runbooks if not link.startswith(OWN) or wrong(build.SITE, build.SITE / "index.html", link)
    ] == []


@pytest.mark.parametrize("crd", sorted((build.ROOT / "crds").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_field_of_the_crds_is_described(crd: Path) -> None:
    schema = yaml.safe_load(crd.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = {name: schema["properties"][name] for name in ("spec", "status") if name in schema["properties"]}
    assert [f.path for f in fields({"properties": parts}) if not f.schema.get("description")] == []


def test_links_of_the_readme_lead_to_files() -> None:
    text = (build.ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert [t for t in targets if not (build.ROOT / t).exists()] == []


def test_every_field_of_a_kind_is_in_its_reference() -> None:
    schema = {
        "properties": {
            "a": {
                "type": "object",
                "properties": {"b": {"type": "array", "items": {"properties": {"c": {"type": "string"}}}}},
            }
        }
    }
    assert [f.path for f in fields(schema)] == ["a", "a.b", "a.b[].c"]
    text = (DOCS / "reference" / "earlyexitservice.md").read_text()
    for told in (
        "rollout.steps must rise",
        'default `"0.95"`',
        "one of `Auto`, `ResultsOnly`, `ComputeSaving`",
        "50 to 99",
        "{ #spec.objective.latency.threshold }",
    ):
        assert told in text, told
