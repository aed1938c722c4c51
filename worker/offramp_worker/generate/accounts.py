"""What happened, counted in one place: series for people, counts and records for the control plane.

What a classifier's engine calls a batch is one request here: an arm is drawn for it, and its time is that of its
turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from offramp_core.evidence.graded import counted_errors
from offramp_core.evidence.slow import BatchShape, length_class
from offramp_core.generation.losses import Output
from offramp_core.precision import EXACT
from offramp_core.protocol import RampInfo, RouteCounts, slice_number, stream_number
from offramp_core.reasons import RequestOutcome
from offramp_worker.engine.accounts.counters import Counters, Origin, RecordRing
from offramp_worker.generate.audits import Audited, Owed
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.routes import routes_of
from offramp_worker.generate.tickets import Ticket
from offramp_worker.logs import log_event


class Accounts:
    """Safe for threads."""

    def __init__(
        self,
        metrics: GenerationMetrics,
        *,
        output: Output = Output.EXACT_ANSWER,
        columns: Sequence[RampInfo] = (),
        digest: str = "",
        token_seconds: float = 1.0,
    ) -> None:
        """``output`` is what of an answer the budget is about, ``columns`` are those of records, made under ``digest``;
        ``token_seconds`` is the reference's time per token."""
        self.metrics, self.output, self.counters = metrics, output, Counters()
        self._columns, self._token_seconds = tuple(columns), token_seconds
        self._routes: dict[str, RouteCounts] = {}  # the bundle's; under the lock of the counters
        self.distrust: Callable[[str], None] = lambda _: None  # hears of a draft that changed an answer
        graded = output is not Output.EXACT_ANSWER
        self.ring = RecordRing(n_ramps=len(self._columns), ramp_set_digest=digest, losses=True, graded=graded)

    # --- requests -----------------------------------------------------------------------------------

    def refused(self, answers: int = 1) -> None:
        """A request was turned away at once."""
        with self.counters.lock:
            self.counters.refused += answers

    def wrote(self, tokens: int) -> None:
        """New tokens of an answer."""
        self.metrics.tokens_written.inc(tokens)

    def began_to_show(self, ticket: Ticket) -> None:
        """The client sees the first of an answer."""
        seconds = ticket.first - ticket.admitted
        self.metrics.first(routes_of(ticket.assigned)).observe(seconds)
        if ticket.assigned.counted and not ticket.assigned.away:
            with self.counters.lock:
                ticket.assigned.runtime.counter.count_first_token(seconds)

    def verified(self, ticket: Ticket, accepted: int) -> None:
        """The model has looked at what a draft proposed at once, and accepted so many tokens of it."""
        self.metrics.accepted(routes_of(ticket.assigned)).observe(accepted)

    def worked(self, seconds: float) -> None:
        """The engine computed for requests."""
        self.metrics.busy.inc(seconds)

    def ended(self, ticket: Ticket, outcome: RequestOutcome) -> None:
        """Nothing more will be computed for an answer."""
        route, metrics = routes_of(ticket.assigned), self.metrics
        metrics.answers(route, outcome).inc()
        if ticket.proposed:
            metrics.drafts(route, "accepted").inc(ticket.accepted)
            metrics.drafts(route, "refused").inc(ticket.proposed - ticket.accepted)
        if ticket.last:
            metrics.tokens_read.inc(len(ticket.prompt))
        if outcome is RequestOutcome.OK:
            self._count_route(ticket, route)
        if outcome is RequestOutcome.OK and (seconds := per_token(ticket)) is not None:
            metrics.each(route).observe(seconds)
        if ticket.assigned.counted:
            self._count(ticket, outcome)

    def routes(self) -> tuple[RouteCounts, ...]:
        """What was written by which route."""
        with self.counters.lock:
            return tuple(self._routes.values())

    def _count_route(self, ticket: Ticket, route: str) -> None:
        before = self._routes.get(route, RouteCounts(route))
        after = RouteCounts(
            route,
            before.tokens + max(0, len(ticket.answer.tokens) - 1),
            before.seconds + ticket.writing,
            before.proposed + ticket.proposed,
            before.accepted + ticket.accepted,
        )
        with self.counters.lock:
            self._routes[route] = after

    def _count(self, ticket: Ticket, outcome: RequestOutcome) -> None:
        assigned, runtime = ticket.assigned, ticket.assigned.runtime
        if runtime.breaker is not None and ticket.audited:
            runtime.breaker.draw(1)
        if outcome is RequestOutcome.CANCELLED:
            with self.counters.lock:  # what it was sent is audited all the same; no more are drawn than were asked
                runtime.counter.requests += int(ticket.audited)
                runtime.counter.drawn += int(ticket.audited)
            return
        failed = outcome is RequestOutcome.FAILED or assigned.away
        seconds, busy = (0.0, 0.0) if assigned.away else (ticket.taken, ticket.busy)  # else another variant's
        written = max(1, len(ticket.answer.tokens))
        shape = BatchShape(1, length_class(len(ticket.prompt) + written))
        slow_above = assigned.active.slow_above(runtime, shape)
        expected = self._token_seconds * written
        exit_name = assigned.steps[ticket.step].exit
        with self.counters.lock:
            runtime.counter.count_batch(shape=shape, seconds=seconds, slow_above=slow_above, failed=failed, busy=busy)
            if failed:
                return
            latency = ticket.last - ticket.admitted
            if (pace := per_token(ticket)) is not None:
                runtime.counter.count_per_token(pace)
            runtime.counter.count_replies(exit_name=exit_name, latencies=[latency], drawn=int(ticket.audited))
            if runtime.meter is not None:
                if not runtime.exits_off:
                    runtime.meter.count_replies(exit_name, 1)
                runtime.meter.count_audited_batch(expected_seconds=expected)
                if assigned.compared:
                    runtime.meter.count_batch(
                        held_back=assigned.held_back,
                        expected_seconds=expected,
                        answer_seconds=ticket.last - ticket.began,
                        engine_seconds=ticket.taken,  # what it takes of the engine is estimated for each arm apart
                    )

    # --- audits -------------------------------------------------------------------------------------

    def judged(self, audited: Audited) -> None:
        """An answer was compared with the reference's.

        A loss between 0 and 1 counts as an error with that probability, so that errors have the mean of losses and
        every test of counts is one of the mean. Where only verified drafts were used, any difference beyond a tie is a
        fault and counts whole. There is no record while a variant is away.
        """
        owed, assigned = audited.owed, audited.owed.assigned
        route = routes_of(assigned)
        for output, loss in audited.served.items():
            self.metrics.losses(route, output).observe(loss)
        if audited.equality != "equal":
            self.metrics.differences(route, "tie" if audited.equality == "tie" else "beyond").inc()
        broken = assigned.lossless and audited.equality == "different"
        if broken:
            log_event("draft-changed-an-answer", level="error", route=route, epoch=assigned.epoch)
            self.distrust(assigned.reference.draft)
        loss = 1.0 if broken else (0.0 if assigned.lossless else audited.served[self.output])
        if all((column.precision or column.id) in audited.losses for column in self._columns):
            self._append(owed, uncertainty=audited.uncertainty, losses=audited.losses, final=self._final(audited))
        error = bool(counted_errors(np.array([loss]), [owed.draw])[0])
        self._judge(owed, error=error)

    def audit_lost(self, owed: Owed) -> None:
        """It could not be compared, and counts as if it had lost everything; its record says that every plan would
        have."""
        self.metrics.differences(routes_of(owed.assigned), "lost").inc()
        lossy = [column.id for column in self._columns if not column.precision]
        everything = {name: dict.fromkeys(Output, 1.0) for name in lossy}
        self._append(owed, uncertainty=dict.fromkeys(lossy, 0.0), losses=everything, final=1.0)
        self._judge(owed, error=True)

    def audit_spent(self, owed: Owed, seconds: float, busy: float) -> None:
        """Some of an audit took ``seconds``, and ``busy`` of the engine."""
        runtime = owed.assigned.runtime
        self.metrics.audit_seconds.inc(busy)
        if runtime.meter is not None:
            with self.counters.lock:
                runtime.meter.count_audit_time(seconds)

    def _judge(self, owed: Owed, *, error: bool) -> None:
        runtime = owed.assigned.runtime
        self.metrics.audited(routes_of(owed.assigned)).inc()
        if not owed.assigned.counted:
            return
        with self.counters.lock:
            runtime.counter.count_audits(audited=1, disagreements=int(error))
            if runtime.meter is not None:
                for name in runtime.slices_of(owed.request_class, 0):
                    runtime.meter.count_audits(name, audited=1, disagreements=int(error))
        if runtime.breaker is not None and runtime.breaker.update(audited=1, disagreements=int(error)):
            counter = runtime.counter
            self.metrics.breaker_open.set(1)
            log_event(
                "breaker-opened",
                level="warning",
                epoch=counter.epoch,
                audited=counter.audited,
                disagreements=counter.disagreements,
            )

    def _final(self, audited: Audited) -> float:
        """What the served arm's last variant loses."""
        last = audited.owed.assigned.steps[-1].variant
        return 0.0 if last == EXACT else audited.losses[last][self.output]

    def _append(
        self,
        owed: Owed,
        *,
        uncertainty: Mapping[str, float],
        losses: Mapping[str, Mapping[Output, float]],
        final: float,
    ) -> None:
        variants = [column.precision or column.id for column in self._columns]
        if not variants:
            return  # a bundle of the reference alone: there is no plan to find
        self.ring.append(
            time=[owed.wall_time],
            uncertainty=np.array([[uncertainty[name] for name in variants]], dtype=np.float32),
            answers={
                "loss": np.array([[losses[name][self.output] for name in variants]], dtype=np.float32),
                "final_loss": np.array([final], dtype=np.float32),
            },
            origins=[_origin(owed)],
        )


def _origin(owed: Owed) -> Origin:
    slice_id, stream = slice_number(owed.request_class), stream_number(owed.source)
    return Origin(slice_id, stream, owed.repeats, owed.draw, owed.audit_rate)


def per_token(ticket: Ticket) -> float | None:
    """Seconds between the tokens of an answer on average; None where fewer than two were shown as they came: one that a
    cheaper variant gave is held back until it is sure, and then shown at once."""
    written = len(ticket.answer.tokens)
    return (ticket.last - ticket.first) / (written - 1) if written > 1 and ticket.last_step else None
