"""The engine: takes batches, runs them under an arm, answers, and audits when idle; one thread at a time.

That thread is the engine's own, or the caller of ``serve`` for a short batch that finds the engine idle: handing a request over to
another thread and its answer back costs a request more than all of HTTP does.

The path of a batch: taken whole from the queue → an arm is drawn → stages run, rows are answered as they leave → counters →
audits, later. ``activate`` swaps one reference that each batch reads once, so a plan switch falls between two batches, and a
batch in flight ends under the plan and epoch it began with.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.admission import Door, Pace
from offramp_core.batching import batching, exact_seconds, rows_within
from offramp_core.columns import EXACT
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import Arm
from offramp_core.reasons import RequestOutcome
from offramp_worker.bundle.lengths import batch_shape, pad_rows, rows_bucket
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.answers import labels
from offramp_worker.engine.arms import Active, Runtime
from offramp_worker.engine.audits import Audit, AuditDesk
from offramp_worker.engine.batcher import Batch, Batcher
from offramp_worker.engine.cache import PredictionCache
from offramp_worker.engine.captures import Captures
from offramp_worker.engine.counters import Counters, RecordRing
from offramp_worker.engine.execute import Leave, run_again, run_apart, run_exact, run_stages
from offramp_worker.engine.leases import Arms
from offramp_worker.engine.marker import CrashMarker
from offramp_worker.engine.options import EngineOptions
from offramp_worker.engine.ramp_sets import HeldSets
from offramp_worker.engine.scrape import EngineState, RampUtility
from offramp_worker.engine.sessions import Sessions, reproduces
from offramp_worker.engine.tickets import HIGHEST_PRIORITY, OverloadedError, Ticket, UnableError, new_ticket
from offramp_worker.engine.usual import UsualInputs
from offramp_worker.engine.vitals import Vitals
from offramp_worker.logs import log_event
from offramp_worker.metrics import Metrics

Array = npt.NDArray[Any]
Deliver = Callable[[list[Ticket]], None]

INLINE_SECONDS = 0.01  # a caller of `serve` may be kept this long: an event loop that also answers health checks


@dataclass(slots=True)
class _Progress:
    """What one batch has answered so far. ``compared`` batches could have been held back, or were."""

    began: float
    number: int
    open_rows: set[int]
    compared: bool = False
    answer_seconds: float = 0.0  # summed over the rows answered


class Engine:
    """See the module. ``submit`` and ``serve`` are called by the event loop, ``activate`` by the thread that applies plans."""

    def __init__(
        self,
        bundle: Bundle,
        sessions: Sessions,
        options: EngineOptions,
        *,
        marker: CrashMarker,
        metrics: Metrics,
        deliver: Deliver,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        draw: Callable[[], float] | None = None,
        captures: Captures | None = None,
        lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``captures`` keeps inputs that may train other heads. ``lost`` is told, from another thread, once the executor has failed for so
        long that only a new process may help.
        """
        self.bundle, self.metrics, self.marker, self.captures = bundle, metrics, marker, captures
        self.sets = HeldSets(bundle, sessions, store=options.ramp_set_store)
        self._traced = options.traced
        self.counters = Counters()
        self._deliver = deliver
        self._clock, self._wall_clock = clock, wall_clock
        self._draw = draw or random.Random().random  # noqa: S311 - sampling, no secret
        self._exact, self._exact_seconds = sessions.exact_stage(), exact_seconds(bundle.profile)
        self._usual, self._scale = sessions.usual, bundle.manifest.scale
        spec = bundle.manifest.inputs[0]
        join = partial(pad_rows, spec=spec)
        self._batcher = Batcher(
            policy=batching(options.batching, profile=bundle.profile, slo_seconds=options.latency_seconds),
            door=Door(options.latency_seconds, Pace(self._exact_seconds)),
            max_rows=options.max_queue_rows,
            clock=clock,
            join=join,
            group=partial(rows_bucket, spec=spec) if spec.varies else None,
        )
        self._everyones_deadline = options.everyones_deadline
        self._cache = PredictionCache(max_bytes=options.cache_bytes) if options.cache_bytes else None
        self._desk = AuditDesk(
            sets=lambda: self.sets.held, judge=self._judge, spend=self._count_audit_time, clock=clock, join=join, captures=captures,
        )  # fmt: skip
        self._inline_rows = rows_within(bundle.profile, seconds=INLINE_SECONDS)
        self._turn = threading.Lock()  # held while a batch, an audit or a probe runs
        self.vitals = Vitals(probe=self._probe, recovered=self._batcher.wake, lost=lost)
        self._batches = 0
        self._abandon_audits = False
        self.arms = Arms(
            self._off_runtime(),
            uid=options.uid,
            boot_id=options.boot_id,
            clock=clock,
            crashed_epoch=marker.crashed_epoch,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.audit_backlog.set_function(lambda: len(self._desk))
        self._objective = options.latency_seconds
        self._utility = RampUtility(self.counters, bundle)
        metrics.registry.register(self._utility)
        metrics.registry.register(EngineState(self.arms, self._batcher))
        cache = self._cache
        if cache is not None:
            metrics.cache_bytes.set_function(lambda: cache.size_bytes)

    # --- called from other threads --------------------------------------------------------------

    def start(self) -> None:
        """Warm the exact executor up, then begin to serve."""
        self.sessions.warm_up(self.batch_rows, [self._exact])
        self.sessions.tapped(self.bundle.probe_x[:1])
        self._thread.start()

    @property
    def sessions(self) -> Sessions:
        """Those of the first ramp set that is held; all of them answer exactly alike where no row leaves early."""
        return self.sets.held[0].sessions

    @property
    def ring(self) -> RecordRing:
        """The records of the first ramp set that is held."""
        return self.sets.held[0].ring

    @property
    def batch_rows(self) -> int:
        """The most rows that run together now."""
        return self._batcher.batch_rows

    def submit(
        self,
        x: Array,
        *,
        never_exit: bool,
        deadline_seconds: float = math.inf,
        priority: int = HIGHEST_PRIORITY,
        timeout_seconds: float | None = None,
        slice_name: str = "",
        stream: str = "",
        wake: bool = True,
    ) -> Ticket:
        """Admit a request of n rows; it comes back through ``deliver`` when all are answered or its time has run out.

        One that is answered from the cache is done when this returns (``cached``), and does not come back.

        A row that would be answered later than ``deadline_seconds`` from now gets the answer of the deepest ramp it has reached; one that
        has reached none, or runs where no ramps are active, is answered when it is done. Without ``wake`` the caller promises to call
        :meth:`serve` soon.

        Raises
        ------
        OverloadedError
            The queue is full, or too long for the timeout or the latency objective.
        UnableError
            The worker is shutting down, its executor fails, or it takes longer for this request alone than its timeout.
        """
        if self.vitals.trouble:
            with self.counters.lock:
                self.counters.refused += len(x)
            raise UnableError("every run fails on this worker for now; try another one")
        ticket = new_ticket(
            x, never_exit=never_exit, n_classes=self.bundle.manifest.n_classes, now=self._clock(), wall_time=self._wall_clock(), draw=self._draw,
            deadline_seconds=deadline_seconds, priority=priority, timeout_seconds=timeout_seconds,
            slice_name=slice_name,
            stream=stream,
        )  # fmt: skip
        self.metrics.inflight.inc(len(x))
        if self._cache is not None and self._from_cache(self._cache, ticket):
            return ticket
        try:
            self._batcher.put(ticket, wake=wake)
        except OverloadedError:
            self.metrics.inflight.dec(len(x))
            self.metrics.rows("", RequestOutcome.REJECTED).inc(len(x))
            with self.counters.lock:
                self.counters.refused += len(x)
            self._abandon(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this request any more: rows that have not begun are not run. It may come back through ``deliver`` or not."""
        rows = self._batcher.remove(ticket)
        if rows:
            self._abandon(ticket)
        elif self._cache is not None and self._cache.leave(ticket):
            rows = len(ticket.x)
        self._count_unanswered(rows, RequestOutcome.CANCELLED)

    def serve(self) -> None:
        """See to what is queued: run it here if the engine is idle and the batch short, else wake the engine's thread."""
        if self._batcher.rows <= self._inline_rows and self._turn.acquire(blocking=False):
            try:
                batch = None if self._desk.pressing else self._batcher.take(wait=False)
                self._give_up(self._batcher.given_up())
                if batch is not None:
                    self._run_batch(batch)
            finally:
                self._turn.release()
        if self._batcher.rows or len(self._desk):
            self._batcher.wake()

    def count_reply(self, ticket: Ticket) -> None:
        """A request that was admitted has had its reply; rows were counted as they were answered."""
        if ticket.outcome is RequestOutcome.OK:
            self.metrics.answered(self._clock() - ticket.admitted, objective=self._objective)
        else:
            self.metrics.requests[ticket.outcome].inc()

    def activate(self, active: Active) -> None:
        """Put a document in force from the next batch on."""
        self.arms.activate(active)
        self.metrics.contact.set(self._wall_clock())
        if self._cache is not None:
            self._cache.clear()
        self.metrics.epoch.set(active.epoch)
        self.metrics.breaker_open.set(self.arms.breaker_open)
        for runtime in (active.stable, active.canary):
            if runtime is not None:
                self._utility.know(runtime.plan)
        self.marker.forget_before(active.epoch)

    def renew_lease(self) -> None:
        """The control plane is alive and can act: it delivered a document, or pulled and said so."""
        self.arms.meet()
        self.metrics.contact.set(self._wall_clock())

    @property
    def active(self) -> Active:
        """The document in force."""
        return self.arms.active

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs; a worker whose thread died must be restarted."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Take no new requests. The thread ends once all queued ones are answered and all audits done."""
        self.vitals.close()
        self._batcher.close()

    def join(self, timeout: float) -> bool:
        """Wait for the thread; after ``timeout`` seconds audits still waiting are given up. True if none were."""
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        self._abandon_audits = True
        if not ended:
            self._thread.join(2.0)
        return ended

    # --- whoever has the turn -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            idle = len(self._desk) == 0 or self._audits_wait
            batch = self._batcher.take(wait=idle)
            self._give_up(self._batcher.given_up())
            with self._turn:
                if batch is not None:
                    self._run_batch(batch)
                elif not idle and not self._abandon_audits:
                    self._desk.step()
                elif self._batcher.finished:
                    return
                if self._desk.pressing and not self._audits_wait:
                    self._desk.step()

    @property
    def _audits_wait(self) -> bool:
        """While the executor fails, an audit would be lost, and count against its plan."""
        return bool(self.vitals.trouble) and not self._batcher.closed

    def _probe(self, rows: int) -> None:
        """Run the exact executor on the bundle's probe, as many rows as a batch that failed had; raise unless it answers as it should."""
        bundle = self.bundle
        at = np.arange(max(rows, len(bundle.probe_x))) % len(bundle.probe_x)
        with self._turn:
            logits, _ = self._exact.run(bundle.probe_x[at], bundle.probe_x[at])
            if not reproduces(logits, bundle.probe_logits[at]):
                raise RuntimeError("its answers to the probe are not the model's")

    def _run_batch(self, batch: Batch) -> None:
        active = self.arms.active
        number = self._batches
        self._batches += 1
        runtime, compared = (active.off, False) if batch.never_exit else self._drawn(batch, active, number)
        progress = _Progress(self._clock(), number, set(range(len(batch))), compared)
        if self._traced:
            for ticket, _ in batch.owners:
                ticket.began_at, ticket.batch_rows = progress.began, len(batch)
        canary = runtime.counter.arm == "canary"
        if canary:
            self.marker.enter(runtime.counter.epoch)
        try:
            for leave in self._execute(batch, runtime):
                self._answer(batch, runtime, leave, progress)
            self._count_batch(batch, active, runtime, progress, failed=False)
            self.vitals.ended(len(batch), failed=False)
        except Exception as error:
            log_event(
                "batch-failed",
                level="error",
                rows=len(batch),
                arm=runtime.counter.arm,
                epoch=runtime.counter.epoch,
                error=repr(error),
            )
            self._count_batch(batch, active, runtime, progress, failed=True)
            self._fail(batch, runtime, progress)
            self.vitals.ended(len(batch), failed=True)
        finally:
            self._batcher.ended(batch)
            if canary:
                self.marker.leave()

    def _drawn(self, batch: Batch, active: Active, number: int) -> tuple[Runtime, bool]:
        """What batch ``number`` runs under, and whether it is one of those that are compared with the holdback.

        Every batch of the stable plan could have been held back but those with a deadline to keep.
        """
        runtime = self.arms.drawn(active, number)
        if active.holdback is None or runtime is active.off or not self._may_wait(batch):
            return runtime, False
        return self.arms.held_back(active, runtime, number)

    def _may_wait(self, batch: Batch) -> bool:
        """Whether no row of a batch has a deadline, which an exit may have to keep."""
        return self._everyones_deadline is None and all(ticket.deadline == math.inf for ticket, _ in batch.owners)

    def _execute(self, batch: Batch, runtime: Runtime) -> Any:
        if runtime.exits_off:
            return run_exact(self._exact, batch.x)
        deadlines = self._deadlines(batch, runtime)
        may_leave = _may_leave(batch, runtime, self._usual)
        if runtime.plan.precision == EXACT:
            return _run(runtime, batch.x, may_leave=may_leave, deadlines=deadlines)
        if may_leave is None:
            return self._withheld(batch.x, runtime, _run(runtime, batch.x, may_leave=None, deadlines=deadlines))
        return run_apart(
            batch.x,
            may_leave,
            exact=self.sessions.exact,
            run=lambda x: self._withheld(
                x,
                runtime,
                _run(runtime, x, may_leave=None, deadlines=None if deadlines is None else deadlines.of(may_leave)),
            ),
        )

    def _withheld(self, x: Array, runtime: Runtime, leaves: Iterator[Leave]) -> Iterator[Leave]:
        """Answers at a lower precision, none of which names a stopped class unless the exact executor says so too."""
        if not runtime.stopped_classes:
            return leaves
        return run_again(x, leaves, exact=self.sessions.exact, withheld=runtime.stopped_classes)

    def _deadlines(self, batch: Batch, runtime: Runtime) -> _Deadlines | None:
        """When the rows of a batch must be answered, if any must.

        A row drawn for audit is answered like any other, late or cut short: what is compared, after its reply, is a uniform draw of what
        is served.
        """
        everyones = math.inf if runtime.judges_itself or self._everyones_deadline is None else self._everyones_deadline
        at = [
            ticket.admitted + everyones if ticket.deadline == math.inf else ticket.deadline
            for ticket, _ in batch.owners
        ]
        if min(at) == math.inf:
            return None
        return _Deadlines(np.array(at), runtime.stage_seconds, self._clock)

    def _answer(self, batch: Batch, runtime: Runtime, leave: Leave, progress: _Progress) -> None:
        """Reply to the rows that leave; then count them and queue the audits that were drawn for them."""
        exit_name = "final" if leave.ramp is None else self.bundle.columns[leave.ramp].id
        answers, now, rows = labels(leave.logits), self._clock(), leave.rows.tolist()
        scores = leave.logits if leave.ramp is None or self._scale is None else self._scale.from_logits(leave.logits)
        done, latencies, counted, drawn, to_audit = [], [], [], [], 0
        for k, i in enumerate(rows):
            ticket, row = batch.owners[i]
            is_drawn = not batch.never_exit and ticket.draws[row] < runtime.audit_rate
            ticket.logits[row], ticket.labels[row] = scores[k], answers[k]
            ticket.exits[row], ticket.configs[row], ticket.arms[row] = exit_name, runtime.config, runtime.counter.arm
            is_audited = ticket.counted and (is_drawn or runtime.judges_itself)
            ticket.epochs[row], ticket.audited[row], ticket.due[row] = runtime.counter.epoch, is_audited, leave.due
            latencies.append(now - ticket.admitted)
            if ticket.counted:
                counted.append(latencies[-1])
                to_audit += is_audited
            if is_drawn:
                drawn.append(i)
            ticket.pending -= 1
            if ticket.pending == 0:
                done.append(ticket)
        progress.open_rows.difference_update(rows)
        progress.answer_seconds += len(rows) * (now - progress.began)
        if done:
            self._deliver(done)
        if self._cache is not None:
            self._share(self._cache, done, runtime)
        if not batch.never_exit:
            if counted:
                # The plan would have let nobody leave there; where they would have left is not known.
                self._count_replies(runtime, "final" if leave.due else exit_name, counted, drawn=to_audit)
            for i in drawn:
                compare = batch.owners[i][0].counted and not runtime.judges_itself
                self._audit(batch, runtime, i, compare=compare, record=True)
            if leave.reference is not None and runtime.judges_itself:
                self._judge_carried(batch, runtime, leave.reference)
        self._measure_replies(runtime, exit_name, latencies, due=leave.due)

    def _audit(self, batch: Batch, runtime: Runtime, i: int, *, compare: bool, record: bool) -> None:
        ticket, row = batch.owners[i]
        x = batch.x[i].copy()  # a view would keep the whole batch in memory
        self._desk.add(_audit_of(ticket, row, x, runtime, compare=compare, record=record))

    # --- answers for several requests -----------------------------------------------------------

    def _from_cache(self, cache: PredictionCache, ticket: Ticket) -> bool:
        """Whether a request is answered from the cache, or waits with another for the same input.

        Only where one runtime answers all: a canary must get its share of the requests. A request drawn for audit always runs, so that
        what is compared is drawn from all requests; results-only plans, where every row is compared, have no use for the cache, nor have requests with a deadline, which take what there is.
        """
        active = self.arms.active
        if ticket.deadline < math.inf or self.arms.canary(active) is not None:
            return False
        runtime = active.off if ticket.never_exit else self.arms.without_canary(active)
        if runtime.carry_on or ticket.slice_name in runtime.stopped:
            return False
        key = cache.key(ticket.x, never_exit=ticket.never_exit, epoch=active.epoch, config=runtime.config)
        drawn = not ticket.never_exit and any(u < runtime.audit_rate for u in ticket.draws)
        answer = None if drawn else cache.get(key)
        if answer is not None:
            self.metrics.cache("hit").inc()
            ticket.give(answer)
            ticket.cached = True
            self._count_copy(ticket, runtime)
            return True
        joined = cache.join(key, ticket, config=runtime.config)
        self.metrics.cache("shared" if joined else "miss").inc()
        return joined

    def _share(self, cache: PredictionCache, done: Sequence[Ticket], runtime: Runtime) -> None:
        """Give answers to the requests that wait with those that are done; what two plans answered is of no use to others."""
        for ticket in done:
            followers = cache.finish(ticket, runtime)
            if runtime.carry_on or not ticket.ran_under(runtime):
                self._put_back(followers)
                continue
            for follower in followers:
                follower.give(ticket.answer)
                follower.audited = [not follower.never_exit and u < runtime.audit_rate for u in follower.draws]
            if followers:
                self._deliver(followers)
            for follower in followers:
                self._count_copy(follower, runtime)

    def _count_copy(self, ticket: Ticket, runtime: Runtime) -> None:
        """An answer computed for another request counts, and is drawn for audit, like any reply of ``runtime``."""
        latency = [self._clock() - ticket.admitted]
        for row, (exit_name, drawn) in enumerate(zip(ticket.exits, ticket.audited, strict=True)):
            if not ticket.never_exit:
                self._count_replies(runtime, exit_name, latency, drawn=int(drawn))
            if drawn:
                self._desk.add(_audit_of(ticket, row, ticket.x[row].copy(), runtime, compare=True, record=True))
            self._measure_replies(runtime, exit_name, latency, due=False)

    def _abandon(self, ticket: Ticket) -> None:
        """A request will not be answered; those that wait with it go into the queue."""
        if self._cache is not None:
            self._put_back(self._cache.finish(ticket, None))

    def _put_back(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if not self._batcher.put_back(ticket):
                ticket.error, ticket.pending = "the worker has shut down", 0
                self._count_unanswered(len(ticket.x), RequestOutcome.FAILED)
                self._deliver([ticket])

    def _give_up(self, tickets: Sequence[Ticket]) -> None:
        """The time of these requests ran out before all their rows could run."""
        for ticket in tickets:
            ticket.expired, ticket.pending = True, 0
            self._count_unanswered(ticket.waiting, RequestOutcome.EXPIRED)
            self._abandon(ticket)
        if tickets:
            self._deliver(list(tickets))

    def _count_unanswered(self, rows: int, outcome: RequestOutcome) -> None:
        if rows:
            self.metrics.inflight.dec(rows)
            self.metrics.rows("", outcome).inc(rows)

    # --- counts ---------------------------------------------------------------------------------

    def _judge_carried(self, batch: Batch, runtime: Runtime, reference: npt.NDArray[np.float32]) -> None:
        """Results-only: the output of every row is there, so each is compared at once."""
        counted = np.array([ticket.counted for ticket, _ in batch.owners])
        served = [int(ticket.labels[row]) for ticket, row in batch.owners]
        differs = (labels(reference) != served) & counted
        if not runtime.slices and not runtime.classes:
            self._judge(runtime, int(counted.sum()), int(differs.sum()), ())
            return
        rows: dict[tuple[str, ...], list[int]] = {}
        for i, (ticket, _) in enumerate(batch.owners):
            rows.setdefault(runtime.slices_of(ticket.slice_name, served[i]), []).append(i)
        for slices, mine in rows.items():
            self._judge(runtime, int(counted[mine].sum()), int(differs[mine].sum()), slices)

    def _judge(self, runtime: Runtime, audited: int, disagreements: int, slices: Sequence[str]) -> None:
        """Requests of ``slices`` were compared with the reference."""
        counter = runtime.counter
        with self.counters.lock:
            counter.count_audits(audited=audited, disagreements=disagreements)
            if runtime.meter is not None:
                for name in slices:
                    runtime.meter.count_audits(name, audited=audited, disagreements=disagreements)
        self.metrics.audited(counter.arm).inc(audited)
        self.metrics.disagreements(counter.arm).inc(disagreements)
        if runtime.breaker is not None and runtime.breaker.update(audited=audited, disagreements=disagreements):
            log_event(
                "breaker-opened",
                level="warning",
                epoch=counter.epoch,
                audited=counter.audited,
                disagreements=counter.disagreements,
            )
            self.metrics.breaker_open.set(self.arms.breaker_open)

    def _count_audit_time(self, runtime: Runtime, seconds: float) -> None:
        if runtime.meter is not None:
            with self.counters.lock:
                runtime.meter.count_audit_time(seconds)
        self.metrics.audit_seconds(runtime.counter.arm).inc(seconds)

    def _count_replies(self, runtime: Runtime, exit_name: str, latencies: Sequence[float], *, drawn: int) -> None:
        with self.counters.lock:
            runtime.counter.count_replies(exit_name=exit_name, latencies=latencies, drawn=drawn)
            if runtime.meter is not None and not runtime.exits_off:
                runtime.meter.count_replies(exit_name, len(latencies))
        if runtime.breaker is not None:
            runtime.breaker.draw(drawn)

    def _measure_replies(self, runtime: Runtime, exit_name: str, latencies: Sequence[float], *, due: bool) -> None:
        n, arm = len(latencies), runtime.counter.arm
        self.metrics.rows(arm, RequestOutcome.OK).inc(n)
        (self.metrics.deadline_answers if due else self.metrics.exits)(exit_name, arm).inc(n)
        self.metrics.inflight.dec(n)
        observe = self.metrics.row_seconds(arm).observe
        for seconds in latencies:
            observe(seconds)

    def _count_batch(
        self, batch: Batch, active: Active, runtime: Runtime, progress: _Progress, *, failed: bool
    ) -> None:
        seconds = self._clock() - progress.began
        if not batch.never_exit:
            shape = batch_shape(batch.x, self.bundle.manifest.inputs[0])
            slow_above = active.slow_above(runtime, shape)
            with self.counters.lock:
                runtime.counter.count_batch(shape=shape, seconds=seconds, slow_above=slow_above, failed=failed)
                expected = self._exact_seconds[min(len(batch), len(self._exact_seconds) - 1)]
                if not failed and runtime.meter is not None:
                    runtime.meter.count_audited_batch(expected_seconds=expected)
                if progress.compared and not failed and runtime.meter is not None:
                    runtime.meter.count_batch(
                        held_back=runtime is active.holdback,
                        expected_seconds=expected,
                        answer_seconds=progress.answer_seconds / len(batch),
                        engine_seconds=seconds,
                    )
        arm = runtime.counter.arm
        self.metrics.batch_rows(arm).observe(len(batch))
        if failed:
            self.metrics.failed_batches(arm).inc()
        else:
            self.metrics.batch_seconds(arm).observe(seconds)

    def _fail(self, batch: Batch, runtime: Runtime, progress: _Progress) -> None:
        """The rows not answered yet get an error; those that left before it keep their answers, and their audits."""
        done = []
        if runtime.judges_itself:
            for i in (i for i in set(range(len(batch))) - progress.open_rows if batch.owners[i][0].counted):
                self._audit(batch, runtime, i, compare=True, record=False)
        for i in sorted(progress.open_rows):
            ticket, _ = batch.owners[i]
            ticket.error = "the batch of this request failed; the worker goes on, retry"
            ticket.pending -= 1
            if ticket.pending == 0:
                done.append(ticket)
        for ticket in done:
            self._abandon(ticket)
        failed = len(progress.open_rows)
        self.metrics.inflight.dec(failed)
        self.metrics.rows(runtime.counter.arm, RequestOutcome.FAILED).inc(failed)
        self._deliver(done)

    def _off_runtime(self) -> Runtime:
        manifest = self.bundle.manifest
        plan = exits_off_plan(backbone_digest=manifest.backbone_digest, ramp_set_digest=manifest.ramp_set_digest)
        arm: Arm = "stable"
        return Runtime(plan, 0.0, self.counters.open(epoch=0, arm=arm, plan_hash=plan.content_hash))


class _Deadlines:
    """Deadlines of a batch's rows, against what the stages are known to take."""

    def __init__(self, at: Array, stage_seconds: Sequence[Sequence[float]], clock: Callable[[], float]) -> None:
        self._at, self._seconds, self._clock = at, stage_seconds, clock

    def of(self, rows: npt.NDArray[np.bool_]) -> _Deadlines:
        return _Deadlines(self._at[rows], self._seconds, self._clock)

    def due(self, stage: int, carried: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_] | None:
        by_rows = self._seconds[stage + 1]
        found = self._at[carried] < self._clock() + by_rows[min(len(carried), len(by_rows) - 1)]
        return found if found.any() else None


def _may_leave(batch: Batch, runtime: Runtime, usual_inputs: UsualInputs) -> npt.NDArray[np.bool_] | None:
    """Rows that may leave early (n,): usual ones whose slice was not stopped; None where all may."""
    usual = usual_inputs.rows(batch.x)
    if not runtime.stopped:
        return usual
    going = np.array([ticket.slice_name not in runtime.stopped for ticket, _ in batch.owners])
    if going.all():
        return usual
    return going if usual is None else usual & going


def _run(
    runtime: Runtime, x: Array, *, may_leave: npt.NDArray[np.bool_] | None, deadlines: _Deadlines | None
) -> Iterator[Leave]:
    return run_stages(
        runtime.stages, x, tests=runtime.tests, may_leave=may_leave, regroups=runtime.regrouping, deadlines=deadlines,
        withheld=runtime.stopped_classes if runtime.plan.precision == EXACT else (),
    )  # fmt: skip


def _audit_of(ticket: Ticket, row: int, x: Array, runtime: Runtime, *, compare: bool, record: bool) -> Audit:
    left = ticket.exits[row] != "final"
    return Audit(
        x,
        ticket.wall_time,
        int(ticket.labels[row]),
        left,
        compare,
        record,
        runtime,
        ticket.slice_name,
        ticket.stream,
        ticket.draws[row],
    )
