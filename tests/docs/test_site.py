"""The site: what is generated is fresh, every page is reachable, every link leads somewhere, nothing is loaded from outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from website import build, generate
from website.build import DOCS, SiteError, complete, named, pages
from website.links import problems
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
        '<h1 id="top">A</h1><a href="b.html">b</a><a href="b.html#here">b</a><a href="b.html#gone">b</a><a href="c.html">c</a>'
        '<a href="#top">top</a><a href="https://example.com/">outside</a><img src="gone.png"><script src="https://example.com/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert problems(tmp_path) == [
        "a.html: b.html#gone: no such anchor",
        "a.html: c.html: no such page",
        "a.html: gone.png: no such page",
        "a.html: https://example.com/x.js: loaded from outside; readers without a network would miss it",
    ]


@pytest.mark.parametrize("crd", sorted((build.ROOT / "crds").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_field_of_the_crds_is_described(crd: Path) -> None:
    schema = yaml.safe_load(crd.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = {name: schema["properties"][name] for name in ("spec", "status")}
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
