"""Boards of services in many states: the simulated fleet of the core tests, with a board that looks on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fleet import Fleet  # type: ignore[import-not-found]
from states import STATES  # type: ignore[import-not-found]

from offramp_core.control.decide import decide
from offramp_core.control.snapshot import Decision, Snapshot
from offramp_operator.shell.listeners import Seen
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web.board import Board

SINCE = 1_000_000.0


def seen(snapshot: Snapshot, decision: Decision, now: float, *, name: str | None = None) -> Seen:
    """A pass of the simulated fleet as a shell tells it."""
    service = snapshot.service if name is None else replace(snapshot.service, name=name)
    return Seen(replace(snapshot.gathered, service=service), snapshot.workers, decision, now)


class Watched:
    """What a fleet went through, pass by pass, so that it can be shown again."""

    def __init__(self, make: Callable[[], Fleet]) -> None:
        self.passes: list[tuple[Snapshot, Decision, float]] = []
        original = Fleet.looked_on

        def look(fleet: Any, snapshot: Snapshot, decision: Decision) -> None:
            self.passes.append((snapshot, decision, fleet.now))

        Fleet.looked_on = look
        try:
            self.fleet = make()
        finally:
            Fleet.looked_on = original

    @property
    def now(self) -> float:
        return float(self.fleet.now)

    def show(self, board: Board, *, name: str = "sim", passes: int | None = None) -> ServiceKey:
        """Tell a board all passes, or the first ones only."""
        key = ServiceKey("default", name)
        for snapshot, decision, now in self.passes[:passes]:
            board.passed(key, seen(snapshot, decision, now, name=name))
        return key

    def settle(self, board: Board, *, name: str = "sim") -> ServiceKey:
        """Tell a board one more pass on the state as it is now, in which nothing may change."""
        snapshot = self.fleet.snapshot()
        key = ServiceKey("default", name)
        board.passed(key, seen(snapshot, decide(snapshot, self.now), self.now, name=name))
        return key


def all_states() -> dict[str, Watched]:
    """Every state of the commands' tests."""
    return {name: Watched(make) for name, make in STATES.items()}
