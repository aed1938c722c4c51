"""The last pass of every service, for pages to be made of.

Passes only leave references here, in constant time; whatever costs something is done when somebody looks, from values
that nobody changes any more. Everything belongs to one event loop; a page is rendered in a thread from
what :meth:`Board.views` returned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from offramp_core.control.outcome import Objects, carried_out
from offramp_core.control.snapshot import Event, Worker
from offramp_core.protocol import PlanDocument
from offramp_operator.explain.family import Family, WorkerSeen
from offramp_operator.shell.listeners import CompletedPass
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web.curves import CurveBook, CurvePoint

EVENTS = 50
STALE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event and when it was told."""

    at: float
    event: Event


@dataclass(frozen=True, slots=True)
class View:
    """Everything a page may show of one service; ``family`` is None where not one pass went well. ``curves`` are by
    rollout and gate."""

    key: ServiceKey
    family: Family | None
    workers: tuple[Worker, ...] = ()
    published: PlanDocument | None = None
    at: float = 0.0
    problem: str = ""
    events: tuple[TimedEvent, ...] = ()
    curves: Mapping[str, Mapping[str, tuple[CurvePoint, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    seen: CompletedPass | None = None
    problem: str = ""
    at: float = 0.0
    version: int = 0
    events: deque[TimedEvent] = field(default_factory=lambda: deque(maxlen=EVENTS))
    family: Family | None = None


class Board:
    """Implements :class:`offramp_operator.shell.listeners.PassListener`.

    Parameters
    ----------
    worker_kind : str
        What a worker is here: ``Pod`` or ``process``.
    since : float
        When this process began to look on.
    """

    def __init__(self, *, worker_kind: str, since: float) -> None:
        self.since = since
        self.version = 0
        self._worker_kind = worker_kind
        self._entries: dict[ServiceKey, _Entry] = {}
        self._curves = CurveBook()
        self._changed = asyncio.Event()

    # --- passes ------------------------------------------------------------------------------------

    def passed(self, key: ServiceKey, seen: CompletedPass) -> None:
        entry = self._entries.setdefault(key, _Entry())
        entry.seen, entry.problem, entry.at, entry.family = seen, "", seen.at, None
        entry.events.extend(TimedEvent(seen.at, event) for event in seen.decision.events)
        for name, status in seen.decision.rollout_statuses.items():
            self._curves.note(_curve_key(key, seen, name), status, seen.at)
        self._wake(entry)

    def failed(self, key: ServiceKey, error: Exception, at: float) -> None:
        entry = self._entries.setdefault(key, _Entry())
        entry.problem, entry.at, entry.family = f"the last pass failed: {error}", at, None
        self._wake(entry)

    def gone(self, key: ServiceKey) -> None:
        if self._entries.pop(key, None) is not None:
            self._curves.forget(f"{key}/")
            self._wake()

    def _wake(self, entry: _Entry | None = None) -> None:
        self.version += 1
        if entry is not None:
            entry.version = self.version
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- looking -----------------------------------------------------------------------------------

    async def changed(self) -> None:
        """Wait for the next pass of any service."""
        await self._changed.wait()

    def version_of(self, key: ServiceKey) -> int:
        """Rises with every pass of one service, and when it goes."""
        entry = self._entries.get(key)
        return entry.version if entry is not None else -1

    def keys(self) -> list[ServiceKey]:
        return sorted(self._entries)

    def view(self, key: ServiceKey) -> View | None:
        """All of one service, or None where it is not known."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        found = self._family(entry)
        curves = {r.name: self._curves.of(_curve_key(key, entry.seen, r.name)) for r in found.rollouts} if found else {}
        workers, published = (
            (entry.seen.workers, entry.seen.gathered.published) if entry.seen is not None else ((), None)
        )
        return View(key, found, workers, published, entry.at, entry.problem, tuple(entry.events), curves)

    def views(self) -> list[View]:
        """All services, without their curves."""
        return [
            View(key, self._family(entry), at=entry.at, problem=entry.problem)
            for key, entry in sorted(self._entries.items())
        ]

    def _family(self, entry: _Entry) -> Family | None:
        """Parsed once per pass and only when somebody looks."""
        if entry.family is None and entry.seen is not None:
            entry.family = self._as_family(entry.seen, entry.problem)
        return entry.family

    def _as_family(self, seen: CompletedPass, problem: str) -> Family:
        g = seen.gathered
        after = carried_out(Objects(g.service, g.configs, g.rollouts), seen.decision, seen.at)
        return Family(
            service=after.service,
            configs=after.configs,
            rollouts=tuple(sorted(after.rollouts, key=lambda r: (r.created_at, r.number))),
            workers=tuple(_worker(w, self._worker_kind, after.service.spec.off) for w in seen.workers),
            note=problem,
        )


def _curve_key(key: ServiceKey, seen: CompletedPass | None, rollout: str) -> str:
    """With the service's uid: a service that was deleted and made anew counts its rollouts from 1 again."""
    uid = seen.gathered.service.uid if seen is not None else ""
    return f"{key}/{uid}/{rollout}"


def _worker(worker: Worker, kind: str, off: str) -> WorkerSeen:
    state = "Ready" if worker.endpoint.ready else worker.endpoint.failure_reason or "NotReady"
    reported = worker.state
    details = (
        worker.endpoint.failure,
        f"{worker.endpoint.restarts} restarts" if worker.endpoint.restarts else "",
        "" if worker.endpoint.current else "of an older template",
        "does not answer" if worker.endpoint.ready and reported is None else "",
        f"its breaker is open: {off}" if reported is not None and reported.breaker_open else "",
        f"refused epoch {reported.refused.epoch}: {reported.refused.message}"
        if reported is not None and reported.refused
        else "",
        f"runs epoch {reported.epoch}" if reported is not None and reported.epoch else "",
        reported.message if reported is not None else "",
    )
    return WorkerSeen(worker.endpoint.name, kind, state, "; ".join(filter(None, details)))
