"""What happened, counted in one place: metrics for people, counts and records for the control plane."""

from __future__ import annotations

import threading
from typing import Any

from offramp_core.generation.losses import Output
from offramp_core.reasons import RequestOutcome
from offramp_worker.generate.audits import Audited, Owed
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.records import GenerationCounts, LossRing
from offramp_worker.generate.routes import Assigned, text_of
from offramp_worker.generate.tickets import Ticket

MAX_COUNTS = 64  # kept: of the newest epochs, routes and arms


class Accounts:
    """Safe for threads."""

    def __init__(self, metrics: GenerationMetrics) -> None:
        self.metrics, self.ring = metrics, LossRing()
        self.refused = 0  # answers of requests that were turned away at once; the event loop counts
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, str, str], GenerationCounts] = {}

    def counts(self) -> tuple[GenerationCounts, ...]:
        """Frozen copies, oldest epoch first."""
        with self._lock:
            return tuple(GenerationCounts(**self._counts[key].to_mapping()) for key in sorted(self._counts))

    def wrote(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        """New tokens of an answer; before the times of the ticket are brought up to date."""
        self.metrics.tokens_written.inc(tokens)
        if not ticket.first:
            self.metrics.tokens_read.inc(len(ticket.prompt))
            self.metrics.first(text_of(ticket.assigned.route)).observe(now - ticket.admitted)

    def worked(self, seconds: float) -> None:
        """The engine computed for requests."""
        self.metrics.busy.inc(seconds)

    def ended(self, ticket: Ticket, outcome: RequestOutcome) -> None:
        """Nothing more will be computed for an answer."""
        route, metrics = text_of(ticket.assigned.route), self.metrics
        metrics.answers(route, outcome).inc()
        if ticket.proposed:
            metrics.drafts(route, "accepted").inc(ticket.accepted)
            metrics.drafts(route, "refused").inc(ticket.proposed - ticket.accepted)
        written = len(ticket.answer.tokens)
        if outcome is RequestOutcome.OK and written > 1:
            metrics.each(route).observe((ticket.last - ticket.first) / (written - 1))
        with self._lock:
            counts = self._of(ticket.assigned)
            counts.answers += outcome is RequestOutcome.OK
            counts.cancelled += outcome is RequestOutcome.CANCELLED
            counts.failed += outcome is RequestOutcome.FAILED
            counts.tokens += written
            counts.prompt_tokens += len(ticket.prompt) if ticket.first else 0
            counts.proposed += ticket.proposed
            counts.accepted += ticket.accepted
            counts.drawn += ticket.audited
            counts.first_token_seconds += ticket.first - ticket.admitted if ticket.first else 0.0
            counts.writing_seconds += ticket.last - ticket.first

    def judged(self, audited: Audited) -> None:
        """An answer was compared with the reference's."""
        route, metrics = text_of(audited.owed.assigned.route), self.metrics
        metrics.audited(route).inc()
        for output, loss in audited.losses.items():
            metrics.losses(route, output).observe(loss)
        if audited.equality != "equal":
            metrics.differences(route, "tie" if audited.equality == "tie" else "beyond").inc()
        self.ring.add(audited, route=route)
        with self._lock:
            counts = self._of(audited.owed.assigned)
            counts.audited += 1
            counts.ties += audited.equality == "tie"
            counts.different += audited.equality == "different"
            _add(counts, audited.losses)

    def audit_lost(self, owed: Owed) -> None:
        """It could not be compared, and counts as if it had lost everything."""
        route = text_of(owed.assigned.route)
        self.metrics.audited(route).inc()
        self.metrics.differences(route, "lost").inc()
        self.ring.add_lost(owed, route=route)
        with self._lock:
            counts = self._of(owed.assigned)
            counts.audited += 1
            counts.lost += 1
            _add(counts, dict.fromkeys(Output, 1.0))

    def audit_spent(self, seconds: float) -> None:
        self.metrics.audit_seconds.inc(seconds)

    def _of(self, assigned: Assigned) -> GenerationCounts:
        route = text_of(assigned.route)
        key = (assigned.epoch, assigned.arm, route)
        if key not in self._counts:
            self._counts[key] = GenerationCounts(assigned.epoch, assigned.arm, assigned.config, route)
            while len(self._counts) > MAX_COUNTS:
                del self._counts[min(self._counts)]
        return self._counts[key]


def _add(counts: GenerationCounts, losses: dict[Output, Any]) -> None:
    for output, loss in losses.items():
        counts.loss_sums[output] = counts.loss_sums.get(output, 0.0) + loss
