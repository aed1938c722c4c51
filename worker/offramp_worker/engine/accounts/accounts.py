"""Accounts: what happens to rows, batches and audits is counted once for the control plane and once for Prometheus.

The counters of :mod:`offramp_worker.engine.accounts.counters` are the control plane's and change under their lock;
series need none of ours. Nothing here decides anything, but that an arm's breaker hears of its audits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import TensorSpec
from offramp_core.evidence.graded import counted_errors
from offramp_core.protocol import OVERLOAD, tier_of, tier_slice
from offramp_core.reasons import RequestOutcome
from offramp_core.task import Task
from offramp_worker.bundle.lengths import batch_shape
from offramp_worker.engine.accounts.counters import Counters
from offramp_worker.engine.accounts.turns import Turns
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.queue.batcher import Batch
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.logs import log_event
from offramp_worker.metrics import Metrics


class Accounts:
    """Counts each thing once, whatever thread reports it."""

    def __init__(
        self,
        counters: Counters,
        metrics: Metrics,
        *,
        spec: TensorSpec,
        task: Task,
        exact_seconds: Sequence[float],
        objective: float | None,
        breaker_open: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """``exact_seconds`` is what a batch takes with exits off, by rows less one; ``breaker_open`` tells of the
        document in force."""
        self._counters, self._metrics, self._spec, self._exact_seconds = counters, metrics, spec, exact_seconds
        self._task, self._objective, self._breaker_open, self._clock = task, objective, breaker_open, clock
        self.turns = Turns()

    # --- requests -----------------------------------------------------------------------------------

    def admitted(self, rows: int, stream: str = "") -> bool:
        """A request of so many rows is on its way through the engine. Returns what :class:`Turns` says of it."""
        self._metrics.inflight.inc(rows)
        return self.turns.repeats(stream)

    def refused(self, rows: int) -> None:
        """A request was turned away before it was looked at."""
        with self._counters.lock:
            self._counters.refused += rows

    def rejected(self, rows: int) -> None:
        """A request that was admitted already does not fit."""
        self.unanswered(rows, RequestOutcome.REJECTED)
        self.refused(rows)

    def unanswered(self, rows: int, outcome: RequestOutcome, *, arm: str = "") -> None:
        """Rows leave the engine without an answer."""
        self._metrics.inflight.dec(rows)
        self._metrics.rows(arm, outcome).inc(rows)

    def replied(self, ticket: Ticket) -> None:
        """A request that was admitted has had its reply; rows were counted as they were answered."""
        if ticket.outcome is RequestOutcome.OK:
            self._metrics.answered(self._clock() - ticket.admitted, objective=self._objective)
        else:
            self._metrics.requests[ticket.outcome].inc()

    # --- rows ---------------------------------------------------------------------------------------

    def count_replies(
        self, runtime: Runtime, exit_name: str, latencies: Sequence[float], *, drawn: int, eased: int = 0
    ) -> None:
        """Rows that belong to a plan's statistics were answered at one exit; ``drawn`` of them are to be audited.
        ``eased`` ones left by the thresholds for overload: what exits of everybody's plan save is not theirs to say."""
        with self._counters.lock:
            runtime.counter.count_replies(exit_name=exit_name, latencies=latencies, drawn=drawn)
            if runtime.meter is not None and not runtime.exits_off:
                runtime.meter.count_replies(exit_name, len(latencies) - eased)
                if eased:
                    runtime.meter.count_requests(tier_slice(OVERLOAD), eased)
        if eased:
            self._metrics.overload_answers(runtime.counter.arm).inc(eased)
        if runtime.breaker is not None:
            runtime.breaker.draw(drawn)

    def measure_replies(
        self, runtime: Runtime, exit_name: str, latencies: Sequence[float], *, due: bool, offline: bool = False
    ) -> None:
        """Any rows were answered at one exit: for their deadline (``due``), because an edge's core did not answer
        (``offline``), or because they left there."""
        n, arm = len(latencies), runtime.counter.arm
        self._metrics.rows(arm, RequestOutcome.OK).inc(n)
        answers = self._metrics.offline_answers if offline else self._metrics.exits
        (self._metrics.deadline_answers if due else answers)(exit_name, arm).inc(n)
        self._metrics.inflight.dec(n)
        observe = self._metrics.row_seconds(arm).observe
        for seconds in latencies:
            observe(seconds)

    # --- batches ------------------------------------------------------------------------------------

    def count_batch(
        self,
        batch: Batch,
        active: Active,
        runtime: Runtime,
        *,
        seconds: float,
        failed: bool,
        answer_seconds: float | None,
        eased: bool = False,
    ) -> None:
        """A batch has ended after ``seconds``; ``answer_seconds`` is what its rows waited on average, None unless it is
        compared with the holdback. How long an ``eased`` one took says nothing of everybody's plan."""
        if batch.never_exit:
            self.count_other(seconds)
        else:
            shape = batch_shape(batch.x, self._spec)
            slow_above = active.slow_above(runtime, shape)
            expected = self._exact_seconds[min(len(batch), len(self._exact_seconds) - 1)]
            with self._counters.lock:
                runtime.counter.count_batch(
                    shape=shape, seconds=seconds, slow_above=slow_above, failed=failed, timed=not eased
                )
                if not failed and runtime.meter is not None:
                    runtime.meter.count_audited_batch(expected_seconds=expected)
                    if answer_seconds is not None:
                        runtime.meter.count_batch(
                            held_back=runtime is active.holdback,
                            expected_seconds=expected,
                            answer_seconds=answer_seconds,
                            engine_seconds=seconds,
                        )
        arm = runtime.counter.arm
        self._metrics.batch_rows(arm).observe(len(batch))
        if failed:
            self._metrics.failed_batches(arm).inc()
        else:
            self._metrics.batch_seconds(arm).observe(seconds)

    def count_other(self, seconds: float) -> None:
        """So long was spent on answers that count for no plan."""
        with self._counters.lock:
            self._counters.other_seconds += seconds

    # --- audits -------------------------------------------------------------------------------------

    def judge(self, runtime: Runtime, audited: int, disagreements: int, slices: Sequence[str]) -> None:
        """Requests of ``slices`` were compared with the reference; those of a tier count for its budget alone."""
        tier = tier_of(slices[0]) if slices else ""
        if tier:
            self._judge_tier(runtime, tier, audited, disagreements, slices)
            return
        counter = runtime.counter
        with self._counters.lock:
            counter.count_audits(audited=audited, disagreements=disagreements)
            if runtime.meter is not None:
                for name in slices:
                    runtime.meter.count_audits(name, audited=audited, disagreements=disagreements)
        self._metrics.audited(counter.arm).inc(audited)
        self._metrics.disagreements(counter.arm).inc(disagreements)
        if runtime.breaker is not None and runtime.breaker.update(audited=audited, disagreements=disagreements):
            log_event(
                "breaker-opened",
                level="warning",
                epoch=counter.epoch,
                audited=counter.audited,
                disagreements=counter.disagreements,
            )
            self._metrics.breaker_open.set(self._breaker_open())

    def _judge_tier(self, runtime: Runtime, tier: str, audited: int, disagreements: int, slices: Sequence[str]) -> None:
        exits = runtime.tiers.get(tier)
        if exits is None or exits.stopped:  # the model itself answers: that says nothing about the plan
            return
        with self._counters.lock:
            runtime.counter.count_tier(tier, audited=audited, disagreements=disagreements)
            if runtime.meter is not None:
                for name in slices:
                    runtime.meter.count_audits(name, audited=audited, disagreements=disagreements)
        if exits.breaker is not None and exits.breaker.update(audited=audited, disagreements=disagreements):
            log_event("tier-stopped", level="warning", epoch=runtime.counter.epoch, tier=tier)

    def judge_carried(self, batch: Batch, runtime: Runtime, reference: npt.NDArray[np.float32]) -> None:
        """Results-only: the output of every row is there, so each is compared at once."""
        counted = np.array([ticket.counted_under(runtime) for ticket, _ in batch.owners])
        served = np.stack([ticket.labels[row] for ticket, row in batch.owners])
        draws = [ticket.draws[row] for ticket, row in batch.owners]
        differs = counted_errors(self._task.losses(served, self._task.answers(reference)), draws) & counted
        if not runtime.slices and not runtime.classes and not any(ticket.tier for ticket, _ in batch.owners):
            self.judge(runtime, int(counted.sum()), int(differs.sum()), ())
            return
        rows: dict[tuple[str, ...], list[int]] = {}
        for i, (ticket, _) in enumerate(batch.owners):
            rows.setdefault(runtime.slices_of(ticket.slice_name, served[i], tier=ticket.tier), []).append(i)
        for slices, mine in rows.items():
            self.judge(runtime, int(counted[mine].sum()), int(differs[mine].sum()), slices)

    def spend(self, runtime: Runtime, seconds: float) -> None:
        """The audit of one request has taken so long."""
        if runtime.meter is not None:
            with self._counters.lock:
                runtime.meter.count_audit_time(seconds)
        self._metrics.audit_seconds(runtime.counter.arm).inc(seconds)
