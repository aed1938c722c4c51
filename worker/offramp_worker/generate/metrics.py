"""Prometheus metrics of a worker that generates. No label has a value that a request brings with it: routes are the
bundle's, outcomes and reasons are listed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

import offramp_worker
from offramp_core.generation.admission import Closed
from offramp_core.generation.losses import Output
from offramp_core.reasons import RequestOutcome
from offramp_worker.metrics import by_outcome

SECONDS = (0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384, 32.768)
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


class GenerationMetrics:
    """All series of one worker in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "earlyexit"}
        ProcessCollector(registry=self.registry)
        Info("build", "Version of the worker.", **own).info({"version": offramp_worker.__version__})
        own["subsystem"] = "generation"
        self._add_answers(own)
        self._add_times(own)
        self._add_audits(own)
        self._add_state(own)
        self.ready = Gauge(
            "worker_ready", "1 while the worker takes requests.", registry=self.registry, namespace="earlyexit"
        )
        self._begin()

    def _add_answers(self, own: Mapping[str, Any]) -> None:
        self._answers = Counter(
            "answers",
            f"Answers admitted, by what became of them: {'; '.join(f'{o} ({o.meaning})' for o in RequestOutcome)}.",
            ("route", "outcome"),
            **own,
        )
        self._tokens = Counter("tokens", "Tokens read (prompt) and written (answer).", ("kind",), **own)
        self._drafts = Counter(
            "draft_tokens",
            "Tokens that drafts proposed, by whether the model accepted them.",
            ("route", "result"),
            **own,
        )
        self._responses = Counter(
            "responses", "Replies to requests for generation, by status of HTTP.", ("code",), **own
        )
        self._refused = Counter("refused", f"Requests turned away for now: {', '.join(Closed)}.", ("reason",), **own)
        self._accepted = Histogram(
            "accepted_tokens",
            "Tokens accepted of what a draft proposed at once.",
            ("route",),
            buckets=ACCEPTED_TOKENS,
            **own,
        )
        self.accepted = lru_cache(maxsize=64)(self._accepted.labels)
        self.answers = lru_cache(maxsize=256)(self._answers.labels)
        self.drafts = lru_cache(maxsize=64)(self._drafts.labels)
        self.tokens_read, self.tokens_written = self._tokens.labels("prompt"), self._tokens.labels("answer")
        self.responses, self.refused = self._responses.labels, self._refused.labels

    def _add_times(self, own: Mapping[str, Any]) -> None:
        self._first = Histogram(
            "time_to_first_token_seconds",
            "From admission to the first token of an answer.",
            ("route",),
            buckets=SECONDS,
            **own,
        )
        self._each = Histogram(
            "time_per_token_seconds",
            "Of an answer of two tokens or more: the time from its first token to its last, by the tokens between.",
            ("route",),
            buckets=TOKEN_SECONDS,
            **own,
        )
        self.busy = Counter("busy_seconds", "Seconds that the engine computed for requests, audits apart.", **own)
        self.first, self.each = lru_cache(maxsize=64)(self._first.labels), lru_cache(maxsize=64)(self._each.labels)

    def _add_audits(self, own: Mapping[str, Any]) -> None:
        self._audited = Counter(
            "audited", "Answers compared with the reference's to the same prompt.", ("route",), **own
        )
        self._losses = Histogram(
            "answer_loss",
            f"Loss of an audited answer, 0 to 1, by what it is about: {', '.join(Output)}.",
            ("route", "output"),
            buckets=LOSSES,
            **own,
        )
        self._differences = Counter(
            "differences",
            "Audited answers whose tokens are not the reference's: after a tie of logits, or without one (beyond), or "
            "not comparable (lost).",
            ("route", "kind"),
            **own,
        )
        self.audit_seconds = Counter("audit_seconds", "Seconds that audits kept the engine busy.", **own)
        self.audited, self.losses = self._audited.labels, lru_cache(maxsize=64)(self._losses.labels)
        self.differences = self._differences.labels

    def _add_state(self, own: Mapping[str, Any]) -> None:
        self.waiting = Gauge("waiting", "Answers that wait for their first turn.", **own)
        self.running = Gauge("running", "Answers that are being read for or written.", **own)
        self.audit_backlog = Gauge("audit_backlog", "Audits drawn and not finished yet.", **own)
        self.cache_bytes = Gauge("cache_bytes", "Bytes that caches of keys and values take.", **own)
        self.epoch = Gauge("plan_epoch", "Epoch of the plan document in force; 0 for none.", **own)
        self.breaker_open = Gauge(
            "breaker_open", "1 while the worker's own detector keeps the plan's lossy parts off.", **own
        )
        self._plan_refusals = Counter("plan_refusals", "Plan documents that were refused.", ("reason",), **own)
        self.plan_refusals = self._plan_refusals.labels
        self.cache_limit = Gauge("cache_limit_bytes", "The most that they may take.", **own)

    def _begin(self) -> None:
        """Series that begin at 0: one that begins with its first event hides it from every rate."""
        for reason in Closed:
            self._refused.labels(reason)

    def outcomes(self) -> dict[str, int]:
        """Answers by what became of them."""
        return by_outcome(self._answers)

    def text(self) -> bytes:
        """The exposition text of ``/metrics``."""
        return generate_latest(self.registry)
