"""Audits that wait for their turn. Replies never wait for them; a drawn audit is never dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_worker.engine.answers import labels
from offramp_worker.engine.arms import Runtime
from offramp_worker.engine.counters import RecordRing
from offramp_worker.engine.sessions import Scores
from offramp_worker.logs import log_event

Array = npt.NDArray[Any]
MAX_CHUNK = 32
BACKLOG_LIMIT = 256
ROWS_PER_STEP = 16


@dataclass(frozen=True, slots=True)
class Audit:
    """A reply to be run to the reference: the input, what was ``served`` and whether it ``left`` early.

    ``compare`` asks for the comparison with what was served (in results-only it is made in the batch already), ``record`` for a
    row in the ring of records.
    """

    x: Array
    wall_time: float
    served: int
    left: bool
    compare: bool
    record: bool
    runtime: Runtime


class AuditDesk:
    """The backlog, and working it off in small steps while the engine has nothing better to do.

    Beyond ``BACKLOG_LIMIT`` rows audits take precedence until half of it is done, so the backlog stays bounded
    without losing a draw.
    """

    def __init__(
        self,
        *,
        tapped: Callable[[Array], Scores],
        ring: RecordRing,
        judge: Callable[[Runtime, int, int], None],
        join: Callable[[Sequence[Array]], Array] = np.concatenate,
    ) -> None:
        """``join`` makes one batch of several rows."""
        self._tapped, self._ring, self._judge, self._join = tapped, ring, judge, join
        self._backlog: deque[Audit] = deque()
        self._pressing = False

    def __len__(self) -> int:
        return len(self._backlog)

    @property
    def pressing(self) -> bool:
        """Whether audits come before the next batch."""
        limit = BACKLOG_LIMIT // 2 if self._pressing else BACKLOG_LIMIT
        self._pressing = len(self._backlog) > limit
        return self._pressing

    def add(self, audit: Audit) -> None:
        self._backlog.append(audit)

    def step(self) -> None:
        """Work off a few rows: one while the backlog is short, since a request may arrive any moment; more as it grows."""
        n = min(len(self._backlog), MAX_CHUNK, 1 + len(self._backlog) // ROWS_PER_STEP)
        audits = [self._backlog.popleft() for _ in range(n)]
        if not audits:
            return
        try:
            self._finish(audits)
        except Exception as error:
            # One row may be at fault; the others must not pay for it.
            log_event("audit-failed", level="error", rows=n, error=repr(error))
            for audit in audits:
                self._finish_alone(audit)

    def _finish_alone(self, audit: Audit) -> None:
        try:
            self._finish([audit])
        except Exception as error:
            # What cannot be compared counts against the plan: losing it would bias the count towards agreement.
            log_event("audit-lost", level="error", error=repr(error))
            if audit.compare:
                self._judge(audit.runtime, 1, 1)

    def _finish(self, audits: list[Audit]) -> None:
        scores = self._tapped(self._join([a.x[None] for a in audits]))
        reference = labels(scores.logits)
        kept = [i for i, audit in enumerate(audits) if audit.record]
        self._ring.append(
            time=[audits[i].wall_time for i in kept],
            uncertainty=scores.uncertainty[kept],
            prediction=scores.prediction[kept],
            final=[self._final(audits[i], scores, i) for i in kept],
            reference=reference[kept],
        )
        for audit, answer in zip(audits, reference, strict=True):
            if audit.compare:
                self._judge(audit.runtime, 1, int(audit.served != answer))

    @staticmethod
    def _final(audit: Audit, scores: Scores, i: int) -> int:
        """What the executor that served the request says at the end, whether or not the request got there."""
        return int(scores.finals[audit.runtime.plan.precision][i]) if audit.left else audit.served
