"""The pictures in the docs: which there are, that a run comes to each, and that no text in a drawing lies on
another."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import screens
from boards import seen  # type: ignore[import-not-found]
from PIL import Image
from states import STATES  # type: ignore[import-not-found]

from offramp_operator.explain.latency import Distribution, LatencyFacts
from offramp_operator.explain.network import NetworkFacts, RampFacts
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web.charts import latency_chart, network_chart
from offramp_operator.web.render import static_files

DOCS = Path(__file__).parents[2] / "docs"
DIGITS = ServiceKey("default", "digits")
Open = Callable[..., Any]
# Texts of one drawing whose boxes share more than a pixel in both directions.
OVERLAPS = """() => [...document.querySelectorAll("main svg")].flatMap((drawing) => {
  const texts = [...drawing.querySelectorAll("text")].filter((t) => t.textContent)
    .map((t) => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, p], i) => texts.slice(i + 1)
    .filter(([, q]) => Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 &&
      Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3)
    .map(([b]) => `${a} | ${b}`));
})"""


def test_the_docs_have_every_picture_that_the_command_makes_and_show_it() -> None:
    made = {picture.name for moment in screens.MOMENTS for picture in moment.pictures}
    assert {path.stem for path in (DOCS / "images").glob("web-*.png")} == made
    text = (DOCS / "web.md").read_text()
    assert [name for name in sorted(made) if f"(images/{name}.png)" not in text] == []


@pytest.mark.slow  # a real browser
def test_a_run_comes_to_every_moment_and_its_pictures_are_taken(
    browser: Any, site: Any, states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "POLL_SECONDS", 0.0)
    passes: Iterator[Any] = iter(states["rolled_back"].passes)

    def runs() -> bool:
        """Plays one pass of a fleet that promotes a plan and rolls the next one back."""
        played = next(passes, None)
        if played is not None:
            snapshot, decision, now = played
            told = seen(snapshot, decision, now, name=DIGITS.name)
            site.call(lambda: site.board.passed(DIGITS, told))
            site.now[0] = now
        return played is not None

    missed = screens.take(browser, site.url, runs, tmp_path)
    assert [moment.name for moment in missed] == []
    for picture in (p for moment in screens.MOMENTS for p in moment.pictures):
        taken = Image.open(io.BytesIO((tmp_path / f"{picture.name}.png").read_bytes()))
        assert taken.width == round(1.5 * picture.width) and 150 < taken.height <= screens.TALLEST * taken.width
        colours = taken.convert("RGB").getcolors(screens.COLOURS)
        assert colours is not None and len(colours) > 20  # not a blank page
        paper = max(colours)[1]
        assert (sum(paper) < 3 * 60) == (picture.scheme == "dark")


@pytest.mark.slow  # a real browser
def test_no_text_of_a_drawing_lies_on_another(open_page: Open, site: Any, show: Callable[..., str]) -> None:
    paths = [show(state) for state in STATES]
    page = open_page("/")
    for path in ("/", *paths):
        page.goto(site.url + path)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert page.evaluate(OVERLAPS) == [], path


@pytest.mark.slow  # a real browser
def test_figures_of_any_length_fit_their_drawing(open_page: Open) -> None:
    ramps = tuple(
        RampFacts(f"r{i:02}-attention-mlp-128", "conv", place, 1e-6, "0.913644", 1, exit_share, utility)
        for i, (place, exit_share, utility) in enumerate(
            [(0.0, 0.003, 3.68e-8), (0.31, 1.0, -0.000498), (0.32, None, None), (1.0, 0.0004, -123.4)]
        )
    )
    idle = RampFacts("idle", "conv", 0.31, 1e-6)
    net = NetworkFacts(
        "n", "stable", "fp32", (0.31, 0.01, 0.68), 0.01, (*ramps, idle), requests=10**9, stay_share=0.0004
    )
    drawings = [network_chart(net)]
    for on, off in ((0.001, 0.01), (0.01, 0.01), (0.02, 0.001)):  # the first curve at either side, or one on the other
        drawings.append(latency_chart(LatencyFacts(0.1, 99, _around("exits on", on), _around("exits off", off), "")))
    assert ">99%<" in drawings[1] and ">95%<" not in drawings[1]  # the line that is named is the objective's percentile
    page = open_page("/", bypass_csp=True)
    style = static_files()["page.css"].decode()
    page.set_content(f"<style>{style}</style><main>{''.join(drawings)}</main>")
    assert page.evaluate(OVERLAPS) == []
    outside = """() => [...document.querySelectorAll("main svg")].flatMap((drawing) => {
      const box = drawing.getBoundingClientRect();
      return [...drawing.querySelectorAll("text")].filter((t) => t.textContent && (
        t.getBoundingClientRect().left < box.left - 1 ||
        t.getBoundingClientRect().right > box.right + 1)).map((t) => t.textContent); })"""
    assert page.evaluate(outside) == []


def _around(label: str, seconds: float) -> Distribution:
    points = tuple((seconds * (0.5 + i / 20), i / 20) for i in range(1, 21))
    return Distribution(label, 1000, points, tuple((q, seconds * (0.5 + q)) for q in (0.5, 0.9, 0.95, 0.99)))
