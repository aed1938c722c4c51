"""Prometheus metrics of a worker that generates. No label has a value that a request brings with it: routes are the
bundle's, outcomes and reasons are listed."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from offramp_core.generation.admission import Closed
from offramp_core.generation.losses import Output
from offramp_core.reasons import RequestOutcome
from offramp_worker.metrics import WorkerSeries

FIRST_SECONDS = (0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384, 32.768)
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
ACCEPTED_TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
LOSSES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

GENERATION_UNITS: Mapping[str, str] = {
    "earlyexit_generation_accepted_tokens": "tokens by proposals",
    "earlyexit_generation_answer_loss": "losses by audits",
    "earlyexit_generation_answers_total": "answers",
    "earlyexit_generation_audit_backlog": "answers",
    "earlyexit_generation_audited_total": "audits",
    "earlyexit_generation_breaker_open": "",
    "earlyexit_generation_differences_total": "audits",
    "earlyexit_generation_draft_tokens_total": "tokens",
    "earlyexit_generation_plan_epoch": "",
    "earlyexit_generation_plan_refusals_total": "plans",
    "earlyexit_generation_refused_total": "requests",
    "earlyexit_generation_responses_total": "requests",
    "earlyexit_generation_running": "answers",
    "earlyexit_generation_time_per_token_seconds": "seconds by answers",
    "earlyexit_generation_time_to_first_token_seconds": "seconds by answers",
    "earlyexit_generation_tokens_total": "tokens",
    "earlyexit_generation_waiting": "answers",
    "earlyexit_build_info": "",
    "earlyexit_worker_ready": "",
}
"""See :data:`offramp_worker.metrics.UNITS`."""


class GenerationMetrics(WorkerSeries):
    """All series of a worker that generates."""

    def __init__(self) -> None:
        super().__init__("generation")
        self._add_answers()
        self._add_times()
        self._add_audits()
        self._add_state()
        for reason in Closed:  # a series that begins with its first event hides it from every rate
            self.refused(reason)

    def _add_answers(self) -> None:
        self.answers = self._counter(
            "answers",
            f"Answers admitted, by what became of them: {'; '.join(f'{o} ({o.meaning})' for o in RequestOutcome)}.",
            "route",
            "outcome",
        )
        tokens = self._counter("tokens", "Tokens read (prompt) and written (answer).", "kind")
        self.tokens_read, self.tokens_written = tokens("prompt"), tokens("answer")
        self.drafts = self._counter(
            "draft_tokens", "Tokens that drafts proposed, by whether the model accepted them.", "route", "result"
        )
        self.responses = self._counter("responses", "Replies to requests for generation, by status of HTTP.", "code")
        self.refused = self._counter("refused", f"Requests turned away for now: {', '.join(Closed)}.", "reason")
        self.accepted = self._histogram(
            "accepted_tokens", "Tokens accepted of what a draft proposed at once.", "route", buckets=ACCEPTED_TOKENS
        )

    def _add_times(self) -> None:
        self.first = self._histogram(
            "time_to_first_token_seconds",
            "From admission to the first token of an answer.",
            "route",
            buckets=FIRST_SECONDS,
        )
        self.each = self._histogram(
            "time_per_token_seconds",
            "Of an answer of two tokens or more: the time from its first token to its last, by the tokens between.",
            "route",
            buckets=TOKEN_SECONDS,
        )
        self.busy = Counter("busy_seconds", "Seconds that the engine computed for requests, audits apart.", **self._own)

    def _add_audits(self) -> None:
        self.audited = self._counter("audited", "Answers compared with the reference's to the same prompt.", "route")
        self.losses = self._histogram(
            "answer_loss",
            f"Loss of an audited answer, 0 to 1, by what it is about: {', '.join(Output)}.",
            "route",
            "output",
            buckets=LOSSES,
        )
        self.differences = self._counter(
            "differences",
            "Audited answers whose tokens are not the reference's: after a tie of logits, or without one (beyond), or "
            "not comparable (lost).",
            "route",
            "kind",
        )
        self.audit_seconds = Counter("audit_seconds", "Seconds that audits kept the engine busy.", **self._own)

    def _add_state(self) -> None:
        own = self._own
        self.waiting = Gauge("waiting", "Answers that wait for their first turn.", **own)
        self.running = Gauge("running", "Answers that are being read for or written.", **own)
        self.audit_backlog = Gauge("audit_backlog", "Audits drawn and not finished yet.", **own)
        self.cache_bytes = Gauge("cache_bytes", "Bytes that caches of keys and values take.", **own)
        self.cache_limit = Gauge("cache_limit_bytes", "The most that they may take.", **own)
        self.epoch = Gauge("plan_epoch", "Epoch of the plan document in force; 0 for none.", **own)
        self.breaker_open = Gauge(
            "breaker_open", "1 while the worker's own detector keeps the plan's lossy parts off.", **own
        )
        self.plan_refusals = self._counter("plan_refusals", "Plan documents that were refused.", "reason")

    def outcomes(self) -> dict[str, int]:
        """Answers by what became of them."""
        return self._by_outcome("generation_answers")
