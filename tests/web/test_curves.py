"""Evidence over time in bounded memory, and what a board remembers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from boards import SINCE, seen  # type: ignore[import-not-found]
from fleet import changed  # type: ignore[import-not-found]

from offramp_core.control.objects import GateStatus, RolloutStatus
from offramp_core.control.snapshot import Event
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web.board import EVENTS, Board
from offramp_operator.web.curves import POINTS, Curve, CurveBook, CurvePoint


def point(at: float, step: int = 0) -> CurvePoint:
    return CurvePoint(at, step, 10 * (step + 1), int(at), 0, -at / 100, 3.0)


@pytest.mark.parametrize("readings", [1, 2, POINTS - 1, POINTS, POINTS + 1, 1000, 100_000])
def test_a_curve_of_any_length_is_bounded_even_and_ends_with_the_newest_reading(readings: int) -> None:
    curve = Curve()
    for at in range(readings):
        curve.add(point(float(at)))
    points = curve.points()
    assert len(points) <= POINTS + 1
    assert points[0].at == 0 and points[-1] == point(float(readings - 1))
    gaps = np.diff([p.at for p in points[:-1]])
    assert len(gaps) < 2 or gaps.min() == gaps.max()
    assert len(points) >= min(readings, POINTS // 2)


def test_the_first_reading_of_every_step_is_kept() -> None:
    curve = Curve()
    for at in range(3 * POINTS):
        curve.add(point(float(at), step=int(at >= 2 * POINTS + 1)))
    assert (2 * POINTS + 1, 1) in {(p.at, p.step) for p in curve.points()}


def test_a_reading_that_is_not_newer_is_left_out() -> None:
    curve = Curve()
    for at in (5.0, 5.0, 4.0):
        curve.add(point(at))
    assert [p.at for p in curve.points()] == [5.0]


def test_a_book_keeps_the_curves_that_were_fed_last_and_forgets_a_service() -> None:
    book = CurveBook(limit=3)
    gate = GateStatus("accuracy", "Undecided", 10, 1, 0.01, -0.5, math.log(20))
    for number in (1, 2, 3, 1, 4):
        book.note(
            f"a/x/uid/r{number}", RolloutStatus(gates=(gate, GateStatus("slowness", "NotApplicable"))), float(number)
        )
    assert len(book) == 3 and not book.of("a/x/uid/r2") and set(book.of("a/x/uid/r1")) == {"accuracy"}
    book.forget("a/x/")
    assert len(book) == 0


@pytest.mark.slow
def test_a_board_remembers_a_bounded_number_of_events_and_forgets_what_is_gone(states: Any) -> None:
    async def story() -> None:
        board, key = Board(worker_kind="Pod", since=SINCE), ServiceKey("default", "sim")
        snapshot, decision, now = states["rolled_back"].passes[-1]
        for number in range(3 * EVENTS):
            told = replace(decision, events=(Event("Promoted", str(number)),))
            board.passed(key, seen(snapshot, told, now + number))
        view = board.view(key)
        assert view is not None
        assert [e.event.message for e in view.events] == [str(n) for n in range(2 * EVENTS, 3 * EVENTS)]
        board.gone(key)
        assert board.view(key) is None and board.keys() == [] and board.version_of(key) == -1

    asyncio.run(story())


@pytest.mark.slow
def test_a_service_that_is_made_anew_does_not_show_the_curves_of_the_old_one(states: Any) -> None:
    async def story() -> None:
        board = Board(worker_kind="Pod", since=SINCE)
        key = states["progressing"].show(board)
        view = board.view(key)
        assert view is not None and view.curves["sim-1"]["accuracy"]
        snapshot, decision, now = states["progressing"].passes[-1]
        anew = changed(snapshot, service=replace(snapshot.service, uid="another"))
        board.passed(key, seen(anew, replace(decision, rollout_statuses={}), now + 1))
        view = board.view(key)
        assert view is not None and view.curves["sim-1"] == {}

    asyncio.run(story())


def test_a_failed_pass_is_told_beside_what_was_last_seen(states: Any) -> None:
    async def story() -> None:
        board = Board(worker_kind="Pod", since=SINCE)
        key = states["promoted_once"].show(board)
        before = board.version_of(key)
        board.failed(key, RuntimeError("no route to the API server"), SINCE + 999)
        view = board.view(key)
        assert view is not None and view.family is not None
        assert view.family.note == "the last pass failed: no route to the API server"
        assert view.family.stable is not None and board.version_of(key) > before

    asyncio.run(story())
