"""What a worker remembers of its plans over a restart, in its state folder: the newest document it took, and what its
breaker has seen.

Without a folder, or with one that cannot be read or written, nothing is remembered: a worker that restarts then takes
whatever signed plan of its service comes first, and watches it anew. Nothing in these files can make a worker fail or
keep it from newer plans: the document counts only with its signature, and what a breaker has seen can at most switch
exits off until another plan comes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.detector import DetectorState
from offramp_core.evidence.losses import LostAudits
from offramp_core.protocol import SignedDocument
from offramp_worker.engine.arms.breaker import BreakerState
from offramp_worker.logs import log_event
from offramp_worker.private import open_private

DOCUMENT_FILE, BREAKER_FILE = "newest-plan.json", "breaker.json"
MAX_BYTES = 2 * 1024 * 1024  # twice the largest document
BREAKER_BYTES = 1024  # one write within a page, which no end of a process cuts in two
MOST = 1_000_000  # audits that can be open; a backlog is a few hundred
T = TypeVar("T")


class _KeptBreaker(msgspec.Struct, forbid_unknown_fields=True):
    plan_hash: str
    budget: float
    run_length: float
    m: tuple[float, ...]
    n: int
    open: int
    owed: int
    due: float
    is_open: bool


class PlanMemory:
    """The two files. Every failure is logged once and otherwise ignored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._complained: set[str] = set()
        self._breaker: int | None = None

    def newest(self) -> SignedDocument | None:
        """The document that was remembered last; its signature is not checked here."""
        return self._read(DOCUMENT_FILE, SignedDocument)

    def remember(self, document: SignedDocument) -> None:
        """Remember a document that was taken, whole or not at all."""
        if self._folder is None:
            return
        path = self._folder / DOCUMENT_FILE
        aside = path.with_suffix(".new")
        try:
            with open(aside, "wb", opener=open_private) as file:
                file.write(msgspec.json.encode(document))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError as error:
            self._complain(DOCUMENT_FILE, error)

    def breaker(self) -> BreakerState | None:
        """What the breaker of the process before had seen."""
        kept = self._read(BREAKER_FILE, _KeptBreaker)
        if kept is None:
            return None
        try:
            return _checked(kept)
        except InvalidArgumentError as error:
            self._complain(BREAKER_FILE, error)
            return None

    def keep_breaker(self, state: BreakerState) -> None:
        """Called with every audit: some microseconds, no fsync, since the kernel keeps written pages when a process
        dies."""
        if self._folder is None:
            return
        kept = _KeptBreaker(
            state.plan_hash,
            state.budget,
            state.run_length,
            state.detector.m,
            state.detector.n,
            state.open,
            state.losses.owed,
            state.losses.due,
            state.is_open,
        )
        try:
            if self._breaker is None:
                self._breaker = open_private(str(self._folder / BREAKER_FILE), os.O_RDWR | os.O_CREAT)
                os.ftruncate(self._breaker, BREAKER_BYTES)
            os.pwrite(self._breaker, msgspec.json.encode(kept).ljust(BREAKER_BYTES), 0)
        except OSError as error:
            self._complain(BREAKER_FILE, error)

    def forget_breaker(self) -> None:
        """No plan with exits is in force any more."""
        self.close()
        if self._folder is not None:
            try:
                (self._folder / BREAKER_FILE).unlink(missing_ok=True)
            except OSError as error:
                self._complain(BREAKER_FILE, error)

    def close(self) -> None:
        if self._breaker is not None:
            os.close(self._breaker)
            self._breaker = None

    def _read(self, name: str, kind: type[T]) -> T | None:
        if self._folder is None:
            return None
        try:
            with open(self._folder / name, "rb", opener=open_private) as file:
                content = file.read(MAX_BYTES + 1)
            return msgspec.json.decode(content[:MAX_BYTES], type=kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # what msgspec raises is a ValueError
            self._complain(name, error)
            return None

    def _complain(self, name: str, error: Exception) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log_event("state-file-unusable", level="warning", file=name, error=str(error))


def _checked(kept: _KeptBreaker) -> BreakerState:
    """Refuses what no breaker can have counted."""
    detector = DetectorState.from_mapping({"m": kept.m, "n": kept.n})
    if not (0 <= kept.open <= MOST and 0 <= kept.owed <= MOST and 0 <= kept.due <= MOST):
        raise InvalidArgumentError(
            f"open={kept.open}, owed={kept.owed}, due={kept.due}; none may be below 0 or above {MOST}"
        )
    losses = LostAudits(kept.owed, kept.due)
    return BreakerState(kept.plan_hash, kept.budget, kept.run_length, detector, losses, kept.open, kept.is_open)
