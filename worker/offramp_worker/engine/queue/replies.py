"""Replies: rows that leave a batch are answered at once; then they are counted, and queued for the audits that were
drawn for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp_core.reasons import RequestOutcome
from offramp_core.task import NO_ANSWER
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.accounts.accounts import Accounts
from offramp_worker.engine.accounts.audits import Audit, audit_of
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.execution.execute import Leave
from offramp_worker.engine.queue.batcher import Batch
from offramp_worker.engine.queue.followers import Followers
from offramp_worker.engine.queue.tickets import Deliver, Ticket


@dataclass(slots=True)
class Progress:
    """What one batch has answered so far."""

    began: float
    open_rows: set[int]
    #: Whether its rows count for the plan and are drawn for audit; never while an edge's core is out of reach.
    counts: bool = True
    answer_seconds: float = 0.0  # summed over the rows answered


class Replies:
    """Each row gets one answer or one error, and its request is delivered with the last of them, before anything is
    counted."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        accounts: Accounts,
        followers: Followers | None,
        audit: Callable[[Audit], None],
        deliver: Deliver,
        clock: Callable[[], float],
    ) -> None:
        """``followers`` is None without a cache; ``audit`` takes what is to be compared later."""
        self._columns, self._task = bundle.columns, bundle.task
        self._accounts, self._followers = accounts, followers
        self._queue_audit, self._deliver, self._clock = audit, deliver, clock

    def answer(self, batch: Batch, runtime: Runtime, leave: Leave, progress: Progress) -> None:
        """Reply to the rows that leave; then count them and queue the audits that were drawn for them."""
        exit_name = "final" if leave.ramp is None else self._columns[leave.ramp].id
        now, rows, task = self._clock(), leave.rows.tolist(), self._task
        if leave.ramp is None:
            scores, answers = leave.logits, task.answers(leave.logits)
        else:
            scores, answers = task.exit_outputs(leave.logits), task.exit_answers(leave.logits)
        done, latencies, counted, drawn, to_audit, eased = [], [], [], [], 0, 0
        counts = progress.counts and not leave.offline
        for k, i in enumerate(rows):
            ticket, row = batch.owners[i]
            is_drawn = counts and not batch.never_exit and ticket.draws[row] < runtime.audit_rate
            ticket.logits[row], ticket.labels[row] = scores[k], answers[k]
            ticket.exits[row], ticket.configs[row], ticket.arms[row] = exit_name, runtime.config, runtime.counter.arm
            is_audited = ticket.counted_under(runtime) and (is_drawn or runtime.judges_itself)
            ticket.epochs[row], ticket.audited[row], ticket.due[row] = runtime.counter.epoch, is_audited, leave.due
            ticket.offline[row] = leave.offline
            latencies.append(now - ticket.admitted)
            if ticket.counted_under(runtime) and counts:
                counted.append(latencies[-1])
                to_audit += is_audited and not ticket.tier  # audits of tiers are counted apart
                eased += ticket.eased
            if is_drawn:
                drawn.append(i)
            ticket.pending -= 1
            if ticket.pending == 0:
                done.append(ticket)
        progress.open_rows.difference_update(rows)
        progress.answer_seconds += len(rows) * (now - progress.began)
        if done:
            self._deliver(done)
        if self._followers is not None:
            self._followers.share(done, runtime, counts=counts)
        if not batch.never_exit:
            if counted:
                # The plan would have let nobody leave there; where they would have left is not known.
                left_at = "final" if leave.due else exit_name
                self._accounts.count_replies(runtime, left_at, counted, drawn=to_audit, eased=eased)
            for i in drawn:
                compare = batch.owners[i][0].counted_under(runtime) and not runtime.judges_itself
                self._audit(batch, runtime, i, compare=compare, record=True)
            if leave.reference is not None and runtime.judges_itself:
                self._accounts.judge_carried(batch, runtime, leave.reference)
        self._accounts.measure_replies(runtime, exit_name, latencies, due=leave.due, offline=leave.offline)

    def fail(self, batch: Batch, runtime: Runtime, progress: Progress) -> None:
        """The rows not answered yet get an error; those that left before it keep their answers, and their audits."""
        if runtime.judges_itself:
            for i in (
                i for i in set(range(len(batch))) - progress.open_rows if batch.owners[i][0].counted_under(runtime)
            ):
                self._audit(batch, runtime, i, compare=True, record=False)
        rows = sorted(progress.open_rows)
        for i in rows:
            batch.owners[i][0].error = "the batch of this request failed; the worker goes on, retry"
        self._unanswered(batch, runtime, rows, RequestOutcome.FAILED)

    def refuse(self, batch: Batch, runtime: Runtime, rows: Sequence[int], *, reason: str, expired: bool) -> None:
        """The core does not answer these rows of a batch: their requests get a reason, or ran out of time."""
        for i in rows:
            ticket, _ = batch.owners[i]
            ticket.unable, ticket.expired = ticket.unable or ("" if expired else reason), ticket.expired or expired
        self._unanswered(batch, runtime, rows, RequestOutcome.EXPIRED if expired else RequestOutcome.REJECTED)

    def missed(self, batch: Batch, runtime: Runtime, rows: Sequence[int], progress: Progress) -> None:
        """The core has not answered these rows, which left at no exit. They count, and are audited, as ones that the
        model itself answered: were they left out, only rows that leave early would count, and tune."""
        owners = [batch.owners[i] for i in rows]
        if not progress.counts or batch.never_exit:
            return
        now, to_audit = self._clock(), 0
        for i, (ticket, row) in zip(rows, owners, strict=True):
            if ticket.draws[row] < runtime.audit_rate:
                to_audit += ticket.counted_under(runtime) and not ticket.tier
                compare = ticket.counted_under(runtime) and not runtime.judges_itself
                audit = audit_of(ticket, row, batch.x[i].copy(), runtime, compare=compare, record=True)
                unknown = np.full_like(audit.served, NO_ANSWER)
                self._queue_audit(replace(audit, served=unknown, left=False, missed=True))
        latencies = [now - ticket.admitted for ticket, _ in owners if ticket.counted_under(runtime)]
        if latencies:
            self._accounts.count_replies(runtime, "final", latencies, drawn=to_audit)

    def give_up(self, tickets: Sequence[Ticket]) -> None:
        """The time of these requests ran out before all their rows could run."""
        for ticket in tickets:
            ticket.expired, ticket.pending = True, 0
            self._accounts.unanswered(ticket.waiting, RequestOutcome.EXPIRED)
            self.abandon(ticket)
        if tickets:
            self._deliver(list(tickets))

    def abandon(self, ticket: Ticket) -> None:
        """A request will not be answered; others may wait with it."""
        if self._followers is not None:
            self._followers.abandon(ticket)

    def _unanswered(self, batch: Batch, runtime: Runtime, rows: Sequence[int], outcome: RequestOutcome) -> None:
        """These rows get no answer; requests that wait for no other row are over."""
        done = []
        for i in rows:
            ticket, _ = batch.owners[i]
            ticket.pending -= 1
            if ticket.pending == 0:
                done.append(ticket)
        for ticket in done:
            self.abandon(ticket)
        self._accounts.unanswered(len(rows), outcome, arm=runtime.counter.arm)
        self._deliver(done)

    def _audit(self, batch: Batch, runtime: Runtime, i: int, *, compare: bool, record: bool) -> None:
        ticket, row = batch.owners[i]
        x = batch.x[i].copy()  # a view would keep the whole batch in memory
        self._queue_audit(audit_of(ticket, row, x, runtime, compare=compare, record=record))
