"""``python -m bench.screens``: the pictures of the web page in ``docs/images``, taken of a real run.

Runs the demo (``make demo``), looks at its page in Chromium, and takes each picture when the service has come to what
it shows: a canary in its second step, the plan that it promoted, the next canary beside it, and its end. Pictures are
reduced to 96 colours.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "images"
LOG = ROOT / "build" / "demo" / "run" / "up.jsonl"
PATIENCE_SECONDS = 1800.0
POLL_SECONDS = 0.5
COLOURS = 96
TALLEST = 2.2  # times the width: a picture of a telephone shows what a reader sees before much scrolling
Json = dict[str, Any]
_BOXES = (
    "(ids) => ids.map((id) => { const b = document.getElementById(id).getBoundingClientRect(); return [b.y + "
    "scrollY, b.height]; })"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One file: which sections of the service's page it shows (none: the overview), and how."""

    name: str
    sections: tuple[str, ...] = ()
    scheme: str = "light"
    width: int = 1100


@dataclass(frozen=True, slots=True)
class Moment:
    """When to take which pictures, by the JSON of the service's page."""

    name: str
    come: Callable[[Json], bool]
    pictures: tuple[Picture, ...]


def second_step(page: Json) -> bool:
    """A canary that has been in its second step for a while."""
    rollout = page["rollout"]
    if not rollout or sum(step["state"] == "done" for step in rollout["steps"]) < 1 or not rollout["gates"]:
        return False
    curve = rollout["gates"][0]["curve"]
    return bool(curve) and sum(point["step"] == curve[-1]["step"] for point in curve) >= 4


def promoted(page: Json) -> bool:
    """A plan with exits serves, with both distributions known."""
    facts, networks = page["latency"], page["networks"]
    serves = bool(networks) and networks[0]["requests"] > 500 and any(r["threshold"] for r in networks[0]["ramps"])
    return serves and not page["rollout"] and bool(facts and facts["on"] and facts["off"])


def beside_a_promoted_plan(page: Json) -> bool:
    """A canary serves while exits already save something."""
    return bool(page["rollout"] and page["rollout"]["gates"] and page["row"]["saves"].strip("0.%"))


def rolled_back(page: Json) -> bool:
    return any(r["headline"]["verdict"] == "RolledBack" for r in page["history"])


MOMENTS = (
    Moment(
        "a canary in its second step",
        second_step,
        (
            Picture("web-rollout", ("head", "rollout")),
            Picture("web-narrow", ("head", "rollout"), width=390, scheme="dark"),
        ),
    ),
    Moment(
        "the promoted plan",
        promoted,
        (
            Picture("web-network", ("network", "latency")),
            Picture("web-network-dark", ("network", "latency"), scheme="dark"),
        ),
    ),
    Moment("a canary beside a promoted plan", beside_a_promoted_plan, (Picture("web-overview"),)),
    Moment("a plan rolled back", rolled_back, (Picture("web-history", ("history",)),)),
)


def main() -> int:
    """Run the demo and take every picture; the exit code."""
    LOG.unlink(missing_ok=True)
    chromium = subprocess.run([ROOT / "scripts" / "browser"], check=True, capture_output=True, text=True).stdout.strip()
    demo = subprocess.Popen([sys.executable, "-m", "bench.demo.embedded"], cwd=ROOT)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            missed = take(browser, page_url(demo), lambda: demo.poll() is None, OUT)
            browser.close()
        code = demo.wait(PATIENCE_SECONDS)
    finally:
        if demo.poll() is None:  # as Ctrl-C, so that it ends what it has started
            demo.send_signal(signal.SIGINT)
            demo.wait(60)
    for moment in missed:
        print(f"failed: the demo never came to {moment.name}; its pictures are the old ones", file=sys.stderr)
    return code or int(bool(missed))


def page_url(demo: subprocess.Popen[bytes]) -> str:
    """Where the page is, once ``offramp up`` tells."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and demo.poll() is None:
        for line in LOG.read_text().splitlines() if LOG.exists() else ():
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "web":
                return str(event["url"])
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"failed: `offramp up` told of no web page in {LOG}")


def take(browser: Browser, url: str, runs: Callable[[], bool], out: Path) -> list[Moment]:
    """Take each moment's pictures when it comes, as long as the demo runs; returns the moments that never came."""
    waiting = list(MOMENTS)
    with httpx.Client(base_url=url, trust_env=False, timeout=10) as client:
        while waiting and runs():
            time.sleep(POLL_SECONDS)
            try:
                page = client.get("/api/v1/services/default/digits")
            except httpx.HTTPError:
                continue
            if page.status_code == httpx.codes.OK and waiting[0].come(page.json()):
                for picture in waiting.pop(0).pictures:
                    save(shot(browser, url, picture), out / f"{picture.name}.png")
    return waiting


def shot(browser: Browser, url: str, picture: Picture) -> bytes:
    """The picture as PNG."""
    context = browser.new_context(
        color_scheme=picture.scheme, viewport={"width": picture.width, "height": 900}, device_scale_factor=1.5
    )  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url + ("/services/default/digits" if picture.sections else "/"))
    page.get_by_text("live", exact=True).wait_for()
    if "history" in picture.sections:  # the newest attempt, opened as a reader would
        page.locator("#history summary").first.click()
    taken = page.screenshot(full_page=True, clip=_around(page, picture))
    context.close()
    return taken


def _around(page: Page, picture: Picture) -> Any:
    """The box of some sections and a margin, as wide as the page; of the whole page without any."""
    told = page.evaluate(_BOXES, list(picture.sections))
    found = [{"y": y, "height": height} for y, height in told]
    if not found:
        height = page.evaluate("document.body.getBoundingClientRect().height")
        return {"x": 0, "y": 0, "width": picture.width, "height": height}
    top = 0 if "head" in picture.sections else min(b["y"] for b in found) - 20
    bottom = max(b["y"] + b["height"] for b in found) + 20
    return {"x": 0, "y": top, "width": picture.width, "height": min(bottom - top, TALLEST * picture.width)}


def save(png: bytes, path: Path) -> None:
    """Write a picture with few colours, which is a third of its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = (
        Image.open(io.BytesIO(png))
        .convert("RGB")
        .quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    )
    image.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())
