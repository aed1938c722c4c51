"""The page in a real Chromium: axe in every state, light and dark, wide and narrow; no JavaScript; the keyboard; live
updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from boards import seen  # type: ignore[import-not-found]
from states import STATES  # type: ignore[import-not-found]

from offramp_core.control.snapshot import Event
from offramp_operator.shell.platform import ServiceKey

pytestmark = pytest.mark.slow  # a real browser

Show = Callable[..., str]
Open = Callable[..., Any]
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "resultTypes": ["violations", "incomplete"],
}
NARROW = {"viewport": {"width": 360, "height": 740}}


def assert_accessible(page: Any, what: str) -> None:
    """No rule of axe is broken. What it cannot measure, contrast within pictures, is checked on the palette
    (test_palette.py)."""
    found = Axe().run(page, options=RULES).response
    assert len(found["passes"]) > 15
    broken = [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found["violations"]]
    assert broken == [], f"{what}: {broken}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_state_is_accessible(open_page: Open, site: Any, show: Show, scheme: str) -> None:
    paths = [show(state) for state in STATES]
    page = open_page("/", color_scheme=scheme)
    assert_accessible(page, f"overview {scheme}")
    for path in paths:
        page.goto(site.url + path)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert_accessible(page, f"{path} {scheme}")


@pytest.mark.parametrize("path", ["/", "/services/default/progressing", "/?q=nothing"])
def test_nothing_is_wider_than_a_telephone(open_page: Open, show: Show, path: str) -> None:
    show("progressing")
    page = open_page(path, **NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert_accessible(page, f"{path} narrow")


def test_without_javascript_all_facts_are_there(open_page: Open, show: Show) -> None:
    path = show("rolled_back")
    page = open_page("/", java_script_enabled=False)
    page.get_by_role("link", name="rolled-back").click()
    assert page.url.endswith(path)
    assert page.get_by_role("heading", level=1).inner_text().startswith("default/rolled-back")
    page.locator("summary", has_text="sim-2").click()
    assert "the evidence of harm passed its limit" in page.locator("#attempt-sim-2").inner_text()
    assert page.get_by_text("reload for newer").is_visible()
    page.goto(page.url.replace(path, "/"))
    page.get_by_role("searchbox").fill("nothing like it")
    page.get_by_role("button", name="Find").click()
    assert page.get_by_text("No service has").is_visible()


def test_a_page_follows_a_rollout_as_it_happens(open_page: Open, site: Any, states: Any, show: Show) -> None:
    watched = states["promoted_once"]
    began = next(i for i, (_, decision, _) in enumerate(watched.passes) if decision.new_rollout is not None)
    path = show("promoted_once", passes=began)
    page = open_page(path)
    page.get_by_text("live", exact=True).wait_for()
    assert page.get_by_text("None is under way").is_visible()
    page.get_by_role("link", name="The same as JSON").focus()

    feed(site, watched, range(began, began + 5))
    page.get_by_role("heading", name="Rollout under way: sim-1").wait_for()
    page.locator("svg.evidence").first.wait_for()
    assert page.get_by_role("status").inner_text().startswith("promoted-once is")
    page.locator("summary", has_text="The curves as a table").click()
    rows = page.locator("#curve-sim-1 tbody tr").count()

    feed(site, watched, range(began + 5, began + 9))
    page.wait_for_function("(rows) => document.querySelectorAll('#curve-sim-1 tbody tr').length > rows", arg=rows)
    assert page.locator("#curve-sim-1").get_attribute("open") is not None  # what the reader opened stays open
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"  # and the keyboard stays where it was

    feed(site, watched, range(began + 9, len(watched.passes)))
    page.get_by_text("None is under way").wait_for()
    page.locator("summary", has_text="sim-1").get_by_text("Succeeded").wait_for()


def feed(site: Any, watched: Any, passes: range) -> None:
    for number in passes:
        snapshot, decision, now = watched.passes[number]
        told = seen(snapshot, decision, now, name="promoted-once")
        site.call(lambda told=told: site.board.passed(ServiceKey("default", "promoted-once"), told))
        site.now[0] = now


def test_the_overview_is_live_and_keeps_what_is_being_typed(open_page: Open, site: Any, show: Show) -> None:
    show("starting")
    page = open_page("/")
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("searchbox").type("half a na")
    show("promoted_once")
    page.get_by_role("link", name="promoted-once").wait_for()
    assert page.get_by_role("searchbox").input_value() == "half a na"
    assert page.evaluate("document.activeElement.id") == "q"
    site.call(lambda: site.board.gone(ServiceKey("default", "promoted-once")))
    page.get_by_role("link", name="promoted-once").wait_for(state="detached")


def test_the_keyboard_reaches_everything_and_shows_where_it_is(open_page: Open, show: Show) -> None:
    path = show("rolled_back")
    page = open_page("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    names = []
    for _ in range(4):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert names[:3] == ["q", "Find", "default/rolled-back"]
    page.get_by_role("link", name="rolled-back").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{path}")
    page.get_by_text("live", exact=True).wait_for()
    summary = page.locator("summary", has_text="sim-2")
    summary.focus()
    page.keyboard.press("Space")
    page.locator("#attempt-sim-2[open]").wait_for()


def test_what_reads_as_before_is_not_put_again_while_a_key_is_down(open_page: Open, show: Show) -> None:
    page, held = open_page("/"), []
    path = show("rolled_back")
    page.route(f"**{path}/live", lambda route: held.append(route))  # noqa: PLW0108 - Playwright marks the function
    page.goto(page.url.rstrip("/") + path)
    page.locator("summary", has_text="sim-2").focus()
    page.keyboard.down("Space")
    held.pop().continue_()
    page.get_by_text("live", exact=True).wait_for()
    page.wait_for_timeout(500)  # the first event has come, with every section
    page.keyboard.up("Space")
    page.locator("#attempt-sim-2[open]").wait_for()


def test_landmarks_headings_and_pictures_are_named(open_page: Open, show: Show) -> None:
    page = open_page(show("progressing"))
    for role, name in (("banner", None), ("main", None), ("contentinfo", None), ("navigation", "Breadcrumb")):
        assert page.get_by_role(role, **({"name": name} if name else {})).count() == 1
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    for picture in page.get_by_role("img").all():
        assert len(picture.get_attribute("aria-label") or "") > 20
    assert "threshold" in (page.locator("svg.network").last.get_attribute("aria-label") or "")


def test_hostile_text_runs_nothing_in_a_browser(open_page: Open, site: Any, states: Any) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    snapshot, decision, now = states["promoted_once"].passes[-1]
    bad = replace(
        decision,
        events=(Event("Promoted", hostile),),
        status=replace(
            decision.status, conditions=tuple(replace(c, message=hostile) for c in decision.status.conditions)
        ),
    )
    site.now[0] = now
    for number in range(2):
        site.call(
            lambda number=number: site.board.passed(ServiceKey("default", "sim"), seen(snapshot, bad, now + number))
        )
    page = open_page("/services/default/sim")
    page.get_by_text("live", exact=True).wait_for()
    site.call(
        lambda: site.board.passed(ServiceKey("default", "sim"), seen(snapshot, bad, now + 5))
    )  # also through the stream
    page.get_by_text(hostile).first.wait_for()
    page.wait_for_timeout(300)
    assert "owned" not in page.title()


def test_text_that_is_being_selected_is_not_replaced(open_page: Open, site: Any, states: Any, show: Show) -> None:
    page = open_page(show("promoted_once"))
    page.get_by_text("live", exact=True).wait_for()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#state table'))")
    selected = page.evaluate("getSelection().toString()")
    feed(site, states["promoted_once"], range(3))
    page.locator("#head", has_text="serves no plan yet").or_(page.locator("#head", has_text="exits off")).wait_for()
    assert page.evaluate("getSelection().toString()") == selected
    page.evaluate("getSelection().removeAllRanges()")
    page.wait_for_function("(was) => !document.querySelector('#state').innerText.includes(was)", arg=selected)
