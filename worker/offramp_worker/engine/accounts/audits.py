"""Audits that wait for their turn. Replies never wait for them; a drawn audit is never dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.evidence.graded import counted_errors
from offramp_core.protocol import slice_number, stream_number
from offramp_core.task import Answers, Task
from offramp_worker.bundle.ramp_sets import input_digest
from offramp_worker.engine.accounts.captures import Captures
from offramp_worker.engine.accounts.counters import Origin
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.execution.ramp_sets import HeldSet
from offramp_worker.engine.execution.sessions import Scores
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.logs import log_event

Array = npt.NDArray[Any]
Scored = Sequence[tuple[HeldSet, Scores]]  # what the model and every column say of rows, by ramp set
MAX_CHUNK = 32
BACKLOG_LIMIT = 256
ROWS_PER_STEP = 16


@dataclass(frozen=True, slots=True)
class Audit:
    """A reply to be run to the reference: the input, the answer that was ``served`` and whether it ``left`` early.

    ``compare`` asks for the comparison with what was served (in results-only it is made in the batch already),
    ``record`` for a row in the ring of records. ``draw`` is the number that was drawn for it. ``missed``: it left at no
    exit of an edge, and the core did not answer, so ``served`` is what the model says of it, once that is known.
    """

    x: Array
    wall_time: float
    served: Any
    left: bool
    compare: bool
    record: bool
    runtime: Runtime
    slice_name: str = ""
    stream: str = ""
    repeats: bool = False
    draw: float = 0.0
    tier: str = ""
    missed: bool = False

    @property
    def slices(self) -> tuple[str, ...]:
        """Which slices it counts for."""
        return self.runtime.slices_of(self.slice_name, self.served, tier=self.tier)


def audit_of(ticket: Ticket, row: int, x: Array, runtime: Runtime, *, compare: bool, record: bool) -> Audit:
    """The audit of one answered row of a request, whose input is ``x``."""
    left = ticket.exits[row] != "final"
    return Audit(
        x,
        ticket.wall_time,
        ticket.labels[row].copy(),
        left,
        compare,
        record,
        runtime,
        ticket.slice_name,
        ticket.stream,
        ticket.repeats,
        ticket.draws[row],
        ticket.tier,
    )


class AuditDesk:
    """The backlog, and working it off in small steps while the engine has nothing better to do.

    Beyond ``BACKLOG_LIMIT`` rows audits take precedence until half of it is done, so the backlog stays bounded
    without losing a draw.
    """

    def __init__(
        self,
        *,
        task: Task,
        sets: Callable[[], Sequence[HeldSet]],
        judge: Callable[[Runtime, int, int, Sequence[str]], None],
        spend: Callable[[Runtime, float], None],
        clock: Callable[[], float],
        join: Callable[[Sequence[Array]], Array] = np.concatenate,
        captures: Captures | None = None,
    ) -> None:
        """``sets`` tells the ramp sets that records are made for, ``captures`` gets every row that became one;
        ``join`` makes one batch of several rows. ``spend`` gets the seconds, by ``clock``, that each audit took,
        also one that failed."""
        self._task, self._sets, self._judge, self._join, self._captures = task, sets, judge, join, captures
        self._spend, self._clock = spend, clock
        self._backlog: deque[Audit] = deque()
        self._pressing, self._running = False, 0

    def __len__(self) -> int:
        """What there is to do."""
        return len(self._backlog)

    @property
    def backlog(self) -> int:
        """Audits that are not done."""
        return len(self._backlog)

    @property
    def open(self) -> int:
        """Audits that are not done, with those that run just now."""
        return self._running + len(self._backlog)

    @property
    def pressing(self) -> bool:
        """Whether audits come before the next batch."""
        limit = BACKLOG_LIMIT // 2 if self._pressing else BACKLOG_LIMIT
        self._pressing = len(self._backlog) > limit
        return self._pressing

    def add(self, audit: Audit) -> None:
        self._backlog.append(audit)

    def step(self) -> None:
        """Work off a few rows: one while the backlog is short, since a request may arrive any moment; more as it
        grows."""
        n = min(len(self._backlog), MAX_CHUNK, 1 + len(self._backlog) // ROWS_PER_STEP)
        self._running = n
        audits = [self._backlog.popleft() for _ in range(n)]
        try:
            if audits:
                self._try(audits)
        finally:
            self._running = 0

    def _try(self, audits: list[Audit], scored: Scored | None = None) -> None:
        """Finish them all, by what was ``scored`` elsewhere or by running them here."""
        try:
            self._finish(audits, scored)
        except Exception as error:
            # One row may be at fault; the others must not pay for it.
            log_event("audit-failed", level="error", rows=len(audits), error=repr(error))
            for audit in audits:
                self._finish_alone(audit)

    def _finish_alone(self, audit: Audit) -> None:
        before = {held.digest: held.ring.next for held in self._sets()}
        try:
            self._finish([audit])
        except Exception as error:
            # What cannot be compared counts against the plan: losing it would bias the count towards agreement.
            log_event("audit-lost", level="error", error=repr(error))
            if audit.record:
                self._record_lost(audit, [held for held in self._sets() if held.ring.next == before.get(held.digest)])
            if audit.compare:
                self._judge(audit.runtime, 1, 1, audit.slices)

    def _record_lost(self, audit: Audit, sets: Sequence[HeldSet]) -> None:
        """A row that leaves at the first ramp of every plan with what was served, which is not what the reference says.
        Without it nobody who tunes or certifies would hear of such inputs."""
        for held in sets:
            columns = len(held.bundle.columns)
            held.ring.append(
                time=[audit.wall_time],
                uncertainty=np.zeros((1, columns), dtype=np.float32),
                answers=self._task.lost(audit.served, n_ramps=columns),
                origins=[_origin(audit)],
            )

    def _finish(self, audits: list[Audit], scored: Scored | None = None) -> None:
        began = self._clock()
        try:
            audits, reference = self._reference(audits, scored)
        finally:
            each = (self._clock() - began) / len(audits)  # of one pass, in which every row takes as long
            for audit in audits:
                self._spend(audit.runtime, each)
        losses = self._task.losses(np.stack([audit.served for audit in audits]), reference)
        errors = counted_errors(losses, [audit.draw for audit in audits])
        for audit, error in zip(audits, errors.tolist(), strict=True):
            if audit.compare:
                self._judge(audit.runtime, 1, int(error), audit.slices)

    def _reference(self, audits: list[Audit], scored: Scored | None) -> tuple[list[Audit], Answers]:
        """The audits, and what the model says of each, in one pass that makes the records as well."""
        scored = scored or self._scored(self._join([audit.x[None] for audit in audits]))
        reference = self._task.answers(scored[0][1].logits)
        audits = [
            replace(audit, served=says) if audit.missed else audit
            for audit, says in zip(audits, reference, strict=True)
        ]
        kept = np.array([i for i, audit in enumerate(audits) if audit.record], dtype=np.intp)
        if len(kept):
            self._record(audits, kept, scored, reference)
        return audits, reference

    def _scored(self, x: Array) -> Scored:
        """What the model and every column say of rows, by ramp set; the model says the same each time."""
        return [(held, held.sessions.tapped(x)) for held in self._sets()]

    def _record(
        self,
        audits: list[Audit],
        kept: npt.NDArray[np.intp],
        scored: Scored,
        reference: Answers,
    ) -> None:
        """A row in the ring of every ramp set, but for sets that an equal input has trained."""
        spec = scored[0][0].bundle.manifest.inputs[0]
        seen_by = any(len(held.ramp_set.trained_on) for held, _ in scored)
        digests = np.zeros(len(kept), dtype=np.uint64)
        if seen_by or (self._captures is not None and self._captures.wanted):
            digests = np.array([input_digest(audits[i].x, spec) for i in kept], dtype=np.uint64)
        for held, scores in scored:
            rows = kept[~held.ramp_set.has_seen(digests)]
            held.ring.append(
                time=[audits[i].wall_time for i in rows],
                uncertainty=scores.uncertainty[rows],
                answers=self._recorded([audits[i] for i in rows], scores, rows, reference),
                origins=[_origin(audits[i]) for i in rows],
            )
        if self._captures is not None:
            for i, digest in zip(kept, digests, strict=True):
                self._captures.offer(audits[i].x, at=audits[i].wall_time, digest=int(digest))

    def _recorded(
        self, audits: Sequence[Audit], scores: Scores, rows: npt.NDArray[np.intp], reference: Answers
    ) -> dict[str, Array]:
        """What records say of the answers to some rows. The final one is what the executor that served the request says
        at the end, whether or not the request got there."""
        final = self._task.blank(len(rows))
        for at, (audit, row) in enumerate(zip(audits, rows, strict=True)):
            final[at] = scores.finals[audit.runtime.plan.precision][row] if audit.left else audit.served
        return self._task.recorded(scores.prediction[rows], final=final, reference=reference[rows])


def _origin(audit: Audit) -> Origin:
    slice_id, stream = slice_number(audit.slice_name), stream_number(audit.stream)
    return Origin(slice_id, stream, audit.repeats, audit.draw, audit.runtime.audit_rate)
