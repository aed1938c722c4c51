"""The engine: takes batches, has them run and answered, and audits when idle; one thread at a time.

That thread is the engine's own, or the caller of ``serve`` for a short batch that finds the engine idle: handing a
request over to another thread and its answer back costs a request more than all of HTTP does.

The path of a batch: taken whole from the queue (``batcher``) → an arm is drawn (``leases``) → stages run
(``executor``), rows are answered as they leave (``replies``, ``followers``) → counted (``accounts``) → audits, later
(``audits``). ``activate`` swaps one reference that each batch reads once, so a plan switch falls between two batches,
and a batch in flight ends under the plan and epoch it began with.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy.typing as npt
from prometheus_client.registry import Collector

from offramp_core.admission import Pace, QueueAdmission
from offramp_core.batching import batching, exact_seconds, rows_within
from offramp_core.plan import exits_off_plan
from offramp_core.reasons import RequestOutcome
from offramp_worker.bundle.lengths import pad_rows, rows_bucket
from offramp_worker.bundle.load import Bundle
from offramp_worker.edge.desk import EdgeDesk
from offramp_worker.edge.forwarding import Edge, Forwarding
from offramp_worker.engine.accounts.accounts import Accounts
from offramp_worker.engine.accounts.audits import AuditDesk
from offramp_worker.engine.accounts.captures import Captures
from offramp_worker.engine.accounts.counters import Counters, RecordRing
from offramp_worker.engine.accounts.scrape import EngineState, RampUtility
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.engine.execution.executor import Executor
from offramp_worker.engine.execution.pace import measured_pace
from offramp_worker.engine.execution.ramp_sets import HeldSets
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.turns import SharedTurn
from offramp_worker.engine.in_turn import InTurn
from offramp_worker.engine.options import EngineOptions
from offramp_worker.engine.queue.batcher import Batch, Batcher
from offramp_worker.engine.queue.cache import PredictionCache
from offramp_worker.engine.queue.deadlines import Deadlines
from offramp_worker.engine.queue.followers import Followers
from offramp_worker.engine.queue.relief import ease, may_have
from offramp_worker.engine.queue.replies import Progress, Replies
from offramp_worker.engine.queue.tickets import (
    HIGHEST_PRIORITY,
    Deliver,
    OverloadedError,
    Ticket,
    UnableError,
    new_ticket,
)
from offramp_worker.engine.vitals import Vitals
from offramp_worker.logs import log_event
from offramp_worker.metrics import Metrics
from offramp_worker.page_locked import batch_memory

Array = npt.NDArray[Any]

INLINE_SECONDS = 0.01  # a caller of `serve` may be kept this long: an event loop that also answers health checks


class Engine:
    """See the module. ``submit`` and ``serve`` are called by the event loop, ``activate`` by the thread that applies
    plans."""

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
        turn: SharedTurn | None = None,
        edge: Edge | None = None,
    ) -> None:
        """``captures`` keeps inputs that may train other heads. ``lost`` is called, from another thread, once the
        executor has failed for so long that only a new process may help. ``turn``: where engines share an executor.
        ``edge``: the core that answers what leaves at no exit here."""
        self.bundle, self.metrics, self.marker, self.captures = bundle, metrics, marker, captures
        self.task, self.outputs, self.max_rows = bundle.task, bundle.manifest.output_names, options.max_queue_rows
        before = options.before
        self.sets = HeldSets(
            bundle, sessions, store=options.ramp_set_store, rings=None if before is None else before.rings
        )
        self.counters = Counters() if before is None else before.counters
        self._traced, self._clock, self._wall_clock = options.traced, clock, wall_clock
        self._draw = draw or random.Random().random  # noqa: S311 - sampling, no secret
        self._batcher = _batcher(self, options)
        self.overload_seconds = self._batcher.overload_seconds
        self.arms = _arms(self, options)
        self.accounts = _accounts(self, objective=options.latency_seconds)
        self.desk = _desk(self, captures, edge)
        self._followers = _followers(self, options.cache_bytes, deliver) if options.cache_bytes else None
        self._replies = Replies(
            bundle,
            accounts=self.accounts,
            followers=self._followers,
            audit=self.desk.add,
            deliver=deliver,
            clock=clock,
        )
        self._deadlines = Deadlines(everyones=options.everyones_deadline, clock=clock)
        self._executor = Executor(self.sets, deadlines=self._deadlines)
        self.forwarding = None if edge is None else _forwarding(self, edge, options)
        self._inline_rows = rows_within(bundle.profile, seconds=INLINE_SECONDS)
        self._turn = turn or threading.Lock()  # held while a batch, an audit or a probe runs
        self._shared = None if turn is None else InTurn(self, turn, options.batching, loop_rows=self._inline_rows)
        self.in_loop = self._shared is not None and self._shared.in_loop  # then serve() only asks for a turn
        self.vitals = Vitals(probe=partial(_probe, self), recovered=self._batcher.wake, lost=lost)
        self.batches, self.pace, self._abandon_audits = 0 if before is None else before.batches, 0.0, False
        self.utility = RampUtility(self.counters) if before is None else before.utility
        self._thread, self.shown = _thread(self), _show(self)

    # --- called from other threads --------------------------------------------------------------

    def start(self, *, measure_seconds: float | None = None) -> None:
        """Warm the exact executor up, measure it for so long, then begin to serve."""
        exact = self._executor.exact_stage
        self.sessions.warm_up(self.batch_rows, [exact])
        if measure_seconds is not None:
            self.pace = measured_pace(exact, self.bundle, most=self.batch_rows, seconds=measure_seconds)
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
        tier: str = "",
        max_disagreement: float = math.inf,
        plan: str = "",
        wake: bool = True,
    ) -> Ticket:
        """Admit a request of n rows; it comes back through ``deliver`` when all are answered or its time has run out.

        One that is answered from the cache is done when this returns (``cached``), and does not come back.

        A row that would be answered later than ``deadline_seconds`` from now gets the answer of the deepest ramp it has
        reached; one that has reached none, or runs where no ramps are active, is answered when it is done. One of a
        ``tier`` that the plan in force does not serve takes no exits, nor does one where, when it runs, the budget of
        its tier is above ``max_disagreement`` or the plan not ``plan``. Without ``wake``, call :meth:`serve` soon.

        Raises
        ------
        OverloadedError
            The queue is full, or too long for the timeout or the latency objective.
        UnableError
            The worker is shutting down, its executor fails, or it takes longer for this request alone than its timeout.
        """
        if self.vitals.trouble:
            self.accounts.refused(len(x))
            raise UnableError("every run fails on this worker for now; try another one")
        ticket = new_ticket(
            x,
            never_exit=never_exit,
            task=self.task,
            now=self._clock(),
            wall_time=self._wall_clock(),
            draw=self._draw,
            deadline_seconds=deadline_seconds,
            priority=priority,
            timeout_seconds=timeout_seconds,
            slice_name=slice_name,
            stream=stream,
            tier=tier,
            max_disagreement=max_disagreement,
            plan=plan,
        )
        ticket.repeats = self.accounts.admitted(len(x), stream)
        if self._followers is not None and self._followers.answers(ticket):
            return ticket
        try:
            self._batcher.put(ticket, wake=wake)
        except OverloadedError:
            self.accounts.rejected(len(x))
            self._replies.abandon(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this request any more: rows that have not begun are not run. It may come back through
        ``deliver`` or not."""
        if rows := self._batcher.remove(ticket):
            self._replies.abandon(ticket)
        elif self._followers is not None and self._followers.leave(ticket):
            rows = len(ticket.x)
        self.accounts.unanswered(rows, RequestOutcome.CANCELLED)

    def serve(self) -> None:
        """See to what is queued: run it here if the engine is idle and the batch short, else wake the engine's
        thread. Of engines that share one processor the caller's event loop runs one at a time."""
        if self._shared is not None and self.in_loop:
            self._shared.ask()
            return
        if self._batcher.rows <= self._inline_rows and self._turn.acquire(blocking=False):
            try:
                batch = None if self.desk.pressing else self._batcher.take(wait=False)
                self._replies.give_up(self._batcher.given_up())
                if batch is not None:
                    self._run_batch(batch)
            finally:
                self._turn.release()
        if self._batcher.rows or len(self.desk):
            self._batcher.wake()

    @property
    def at_edge(self) -> bool:
        """Whether a core answers what leaves at no exit here."""
        return self.forwarding is not None

    @property
    def active(self) -> Active:
        """The document in force."""
        return self.arms.active

    def activate(self, active: Active) -> None:
        """Put a document in force from the next batch on."""
        self.arms.activate(active)
        self.metrics.contact.set(self._wall_clock())
        if self._followers is not None:
            self._followers.forget()
        self.metrics.epoch.set(active.epoch)
        self.metrics.breaker_open.set(self.arms.breaker_open)
        for runtime in (active.stable, active.canary):
            if runtime is not None:
                self.utility.know(runtime.plan, self.bundle)
        self.marker.forget_before(active.epoch)

    def wake(self) -> None:
        """There may be something to do between two batches."""
        self._batcher.wake()

    def renew_lease(self) -> None:
        """The control plane is alive and can act: it delivered a document, or pulled and confirmed it."""
        self.arms.meet()
        self.metrics.contact.set(self._wall_clock())

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
            idle = len(self.desk) == 0 or self._audits_wait
            batch = self._batcher.take(wait=idle)
            self._replies.give_up(self._batcher.given_up())
            with self._turn:
                if batch is not None:
                    self._run_batch(batch)
                elif not idle and not self._abandon_audits:
                    self.desk.step()
                elif self._batcher.finished:
                    return
                if self.desk.pressing and not self._audits_wait:
                    self.desk.step()

    @property
    def _audits_wait(self) -> bool:
        """While the executor fails, an audit would be lost, and count against its plan. An edge's core runs them."""
        return bool(self.vitals.trouble) and not self._batcher.closed and self.forwarding is None

    def _run_batch(self, batch: Batch) -> None:
        active, number = self.arms.active, self.batches
        self.batches += 1
        runtime, compared = (active.off, False) if batch.never_exit else self._drawn(batch, active, number)
        forwarding = self.forwarding
        counts = forwarding is None or forwarding.draws
        eased = ease(batch, runtime, active)
        progress = Progress(self._clock(), set(range(len(batch))), counts=counts)
        go_on = None if forwarding is None else partial(forwarding.take, batch, runtime, progress)
        if self._traced:
            for ticket, _ in batch.owners:
                ticket.began_at, ticket.batch_rows = progress.began, len(batch)
        canary = runtime.counter.arm == "canary"
        if canary:
            self.marker.enter(runtime.counter.epoch)
        try:
            for leave in self._executor.run(batch, runtime, go_on):
                self._replies.answer(batch, runtime, leave, progress)
            self.accounts.count_batch(
                batch,
                active,
                runtime,
                seconds=self._clock() - progress.began,
                failed=False,
                eased=eased,
                answer_seconds=progress.answer_seconds / len(batch) if compared else None,
            )
            self.vitals.ended(len(batch), failed=False)
        except Exception as error:
            counter = runtime.counter
            log_event(
                "batch-failed", level="error", rows=len(batch), arm=counter.arm, epoch=counter.epoch, error=repr(error)
            )
            seconds = self._clock() - progress.began
            self.accounts.count_batch(batch, active, runtime, seconds=seconds, failed=True, answer_seconds=None)
            self._replies.fail(batch, runtime, progress)
            self.vitals.ended(len(batch), failed=True)
        finally:
            self._batcher.ended(batch, eased=eased)
            if canary:
                self.marker.leave()

    def _drawn(self, batch: Batch, active: Active, number: int) -> tuple[Runtime, bool]:
        """What batch ``number`` runs under, and whether it is one of those that are compared with the holdback.

        Every batch of the stable plan could have been held back but those with a deadline to keep or under overload.
        """
        runtime = self.arms.drawn(active, number)
        if self.forwarding is not None:  # how long a batch takes there is no matter of exits alone
            free = runtime is active.stable and self._deadlines.none_in(batch)  # an exit may have to keep a deadline
            whole = free and self.forwarding.at_once(batch, runtime)
            return (active.off if whole else runtime), False
        if active.holdback is None or runtime is active.off or batch.loosened or not self._deadlines.none_in(batch):
            return runtime, False
        return self.arms.held_back(active, runtime, number)


def _thread(engine: Engine) -> threading.Thread:
    run = engine._run if engine._shared is None else engine._shared.run
    return threading.Thread(target=run, name="engine", daemon=True)


def _probe(engine: Engine, rows: int) -> None:
    with engine._turn:
        engine._executor.probe(rows)


def _batcher(engine: Engine, options: EngineOptions) -> Batcher:
    bundle = engine.bundle
    spec = bundle.manifest.inputs[0]
    return Batcher(
        policy=batching(options.batching, profile=bundle.profile, slo_seconds=options.latency_seconds),
        door=QueueAdmission(options.latency_seconds, Pace(exact_seconds(bundle.profile))),
        max_rows=options.max_queue_rows,
        clock=engine._clock,
        join=partial(pad_rows, spec=spec, empty=batch_memory(bundle.device)),
        group=partial(rows_bucket, spec=spec) if spec.varies else None,
        may_ease=lambda: engine.forwarding is None and engine.arms.may_ease,
        of_use=lambda ticket: may_have(ticket, engine.active.stable, engine.active),
    )


def _show(engine: Engine) -> tuple[Collector, ...]:
    """What Prometheus asks for when it scrapes."""
    shown = (engine.utility, EngineState(engine.arms, engine._batcher))
    engine.metrics.audit_backlog.set_function(lambda: engine.desk.backlog)
    for collector in shown:
        engine.metrics.registry.register(collector)
    return shown


def _desk(engine: Engine, captures: Captures | None, edge: Edge | None) -> AuditDesk:
    spec = engine.bundle.manifest.inputs[0]
    make: Callable[..., AuditDesk] = AuditDesk
    if edge is not None:
        batcher = engine._batcher
        make = partial(EdgeDesk, edge.link, wake=batcher.wake, closing=lambda: batcher.closed, name=spec.name)
    return make(
        task=engine.task,
        sets=lambda: engine.sets.held,
        judge=engine.accounts.judge,
        spend=engine.accounts.spend,
        clock=engine._clock,
        join=partial(pad_rows, spec=spec),
        captures=captures,
    )


def _forwarding(engine: Engine, edge: Edge, options: EngineOptions) -> Forwarding:
    assert isinstance(engine.desk, EdgeDesk)
    return Forwarding(
        edge,
        engine.desk,
        engine.bundle,
        replies=engine._replies,
        metrics=engine.metrics,
        most_rows=options.max_queue_rows,
        everyones=options.everyones_deadline,
        clock=engine._clock,
        run=engine._executor.run,
        in_force=lambda: engine.arms.without_canary(engine.arms.active),
    )


def _off_runtime(bundle: Bundle, counters: Counters) -> Runtime:
    manifest = bundle.manifest
    plan = exits_off_plan(backbone_digest=manifest.backbone_digest, ramp_set_digest=manifest.ramp_set_digest)
    return Runtime(plan, 0.0, counters.open(epoch=0, arm="stable", plan_hash=plan.content_hash))


def _arms(engine: Engine, options: EngineOptions) -> Arms:
    arms = Arms(
        _off_runtime(engine.bundle, engine.counters),
        uid=options.uid,
        boot_id=options.boot_id,
        clock=engine._clock,
        crashed_epoch=engine.marker.crashed_epoch,
    )
    if options.before is not None:
        arms.active = options.before.watched(arms.active.off)
    return arms


def _accounts(engine: Engine, *, objective: float | None) -> Accounts:
    return Accounts(
        engine.counters,
        engine.metrics,
        spec=engine.bundle.manifest.inputs[0],
        task=engine.task,
        exact_seconds=exact_seconds(engine.bundle.profile),
        objective=objective,
        breaker_open=lambda: engine.arms.breaker_open,
        clock=engine._clock,
    )


def _followers(engine: Engine, max_bytes: int, deliver: Deliver) -> Followers:
    def room() -> int:
        return sys.maxsize if engine.forwarding is None else engine.forwarding.room

    def put_back(ticket: Ticket) -> bool:
        queued = engine._batcher.put_back(ticket)
        if queued and engine._shared is not None and engine._shared.in_loop:
            engine._shared.ask()  # its thread may be waiting for a turn for audits
        return queued

    return Followers(
        PredictionCache(max_bytes=max_bytes),
        arms=engine.arms,
        accounts=engine.accounts,
        metrics=engine.metrics,
        audit=engine.desk.add,
        put_back=put_back,
        deliver=deliver,
        clock=engine._clock,
        room=room,
    )
