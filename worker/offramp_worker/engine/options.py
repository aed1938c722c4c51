"""The options of an engine: one object, fixed for the life of the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offramp_worker.engine.remains import Remains


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of one engine; what it works with (clocks, metrics, whom it delivers to) is given beside them."""

    #: Of this worker; draws of arms and lengths of leases differ by it.
    uid: str
    #: Of this process.
    boot_id: str = ""
    #: Of the engine before, of the same bundle in the same process.
    before: Remains | None = None
    #: The latency objective, if there is one.
    latency_seconds: float | None = None
    #: Rows that may wait.
    max_queue_rows: int
    #: Name of the policy that cuts batches.
    batching: str = "offramp"
    #: What cached answers may take; 0 for no cache.
    cache_bytes: int = 0
    #: Requests that ask for no deadline have the latency objective as one, whether or not they are drawn for audit.
    always_in_time: bool = False
    #: Where other heads for the bundle's model lie.
    ramp_set_store: Path | None = None
    #: Tickets note when their batch began.
    traced: bool = False

    @property
    def everyones_deadline(self) -> float | None:
        """Seconds from admission within which a request that asks for no deadline is answered; None: it takes what it
        takes."""
        return self.latency_seconds if self.always_in_time else None
