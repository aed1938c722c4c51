"""What a pass hands to its listeners: references to what it saw and decided, nothing copied, nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offramp_core.control.snapshot import Decision, Gathered, Worker
from offramp_operator.shell.platform import ServiceKey


@dataclass(frozen=True, slots=True)
class CompletedPass:
    """One pass that went well: what it gathered, what workers reported, what was decided and carried out, and when
    (seconds since the epoch)."""

    gathered: Gathered
    workers: tuple[Worker, ...]
    decision: Decision
    at: float


class PassListener(Protocol):
    """Called with every pass, within it: must return at once and never raise."""

    def passed(self, key: ServiceKey, seen: CompletedPass) -> None: ...

    def failed(self, key: ServiceKey, error: Exception, at: float) -> None: ...

    def gone(self, key: ServiceKey) -> None: ...
