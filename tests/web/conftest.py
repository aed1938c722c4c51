"""Boards in every state, the page's server on a loop of its own, and pages in a real Chromium."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "core"), str(ROOT / "tests" / "cli"), str(Path(__file__).parent)]

from boards import Watched, all_states  # type: ignore[import-not-found]  # noqa: E402
from served import Site, serving  # type: ignore[import-not-found]  # noqa: E402


@functools.cache
def _states() -> dict[str, Watched]:
    return all_states()


@pytest.fixture
def states() -> dict[str, Watched]:
    """What a fleet went through until it reached a state, by the state's name."""
    return _states()


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as served:
        yield served


@pytest.fixture
def show(site: Site, states: dict[str, Watched]) -> Callable[..., str]:
    """Puts a service in a state on the board; returns the path of its page."""

    def put(state: str, *, name: str = "", passes: int | None = None) -> str:
        watched = states[state]
        key = site.call(lambda: watched.show(site.board, name=name or state.replace("_", "-"), passes=passes))
        site.now[0] = max(site.now[0], watched.now + 1)
        return f"/services/{key.namespace}/{key.name}"

    return put


@pytest.fixture
def open_page(browser: Any, site: Site) -> Iterator[Callable[..., Any]]:
    """Opens a path in a fresh context; complaints of the console, such as a violated policy, fail the test."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_(path: str, **options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": {"width": 1100, "height": 900}, "reduced_motion": "reduce", **options}
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(90_000)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(site.url + path)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
