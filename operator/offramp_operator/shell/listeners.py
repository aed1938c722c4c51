"""What a pass hands to its listeners: references to what it saw and decided, nothing copied, nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offramp_core.control.snapshot import Decision, Gathered, Worker
from offramp_operator.shell.platform import ServiceKey


@dataclass(frozen=True, slots=True)
class Seen:
    """One pass that went well: what it gathered, what workers reported, what was decided and carried out, and when
    (seconds since the epoch)."""

    gathered: Gathered
    workers: tuple[Worker, ...]
    decision: Decision
    at: float


class PassListener(Protocol):
    """Called with every pass, within it: must return at once and never raise."""

    def passed(self, key: ServiceKey, seen: Seen) -> None: ...

    def failed(self, key: ServiceKey, error: Exception, at: float) -> None: ...

    def gone(self, key: ServiceKey) -> None: ...


class PassListeners:
    """Several listeners as one."""

    def __init__(self, *those: PassListener) -> None:
        self._those = those

    def passed(self, key: ServiceKey, seen: Seen) -> None:
        for one in self._those:
            one.passed(key, seen)

    def failed(self, key: ServiceKey, error: Exception, at: float) -> None:
        for one in self._those:
            one.failed(key, error, at)

    def gone(self, key: ServiceKey) -> None:
        for one in self._those:
            one.gone(key)


class Nobody:
    """Listens where nobody does."""

    def passed(self, key: ServiceKey, seen: Seen) -> None: ...

    def failed(self, key: ServiceKey, error: Exception, at: float) -> None: ...

    def gone(self, key: ServiceKey) -> None: ...
