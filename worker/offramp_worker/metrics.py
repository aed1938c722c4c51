"""Prometheus metrics, for people and dashboards; the control plane reads counters, never these."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096)


class Metrics:
    """All series of one worker in a registry of its own. Children are cached: a label lookup costs more than an increment."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "earlyexit"}
        self._requests = Counter("requests", "Rows answered, by outcome.", ("config", "arm", "outcome"), **own)
        self._exits = Counter(
            "exits", "Rows answered, by the ramp they left at (final: the output).", ("ramp", "arm"), **own
        )
        self._deadline_answers = Counter(
            "deadline_answers",
            "Rows answered by the deepest ramp they had reached because their deadline came; they are no exits.",
            ("ramp", "arm"),
            **own,
        )
        self._audited = Counter("audited", "Rows compared with the reference.", ("arm",), **own)
        self._disagreements = Counter("disagreements", "Audited rows whose served answer differed.", ("arm",), **own)
        self._batch_seconds = Histogram("batch_seconds", "Execution time of a batch.", ("arm",), buckets=SECONDS, **own)
        self._request_seconds = Histogram(
            "request_seconds", "Time of a row from admission to reply.", ("arm",), buckets=SECONDS, **own
        )
        self._feedback = Counter(
            "feedback",
            "Rows whose true label a client has told, by whether the answer was right.",
            ("arm", "outcome"),
            **own,
        )
        self._cache = Counter(
            "cache_requests",
            "Requests that asked the cache: hit, shared (waited with another), miss.",
            ("result",),
            **own,
        )
        self.cache_bytes = Gauge("cache_bytes", "What cached answers take, by estimate.", **own)
        self.inflight = Gauge("inflight", "Rows admitted and not answered yet.", **own)
        self.epoch = Gauge("epoch", "Epoch of the plan document in force; 0 without one.", **own)
        self.breaker_open = Gauge("breaker_open", "1 while the worker's own detector keeps the exits off.", **own)
        self.audit_backlog = Gauge("audit_backlog", "Audits drawn and not finished yet.", **own)
        self.results_only = Gauge(
            "results_only",
            "1 where the arm's plan carries every row to the output instead of regrouping.",
            ("arm",),
            **own,
        )
        self.requests = lru_cache(maxsize=256)(self._requests.labels)
        self.feedback = lru_cache(maxsize=16)(self._feedback.labels)
        self.cache = lru_cache(maxsize=4)(self._cache.labels)
        self.exits = lru_cache(maxsize=256)(self._exits.labels)
        self.deadline_answers = lru_cache(maxsize=256)(self._deadline_answers.labels)
        self.audited = lru_cache(maxsize=16)(self._audited.labels)
        self.disagreements = lru_cache(maxsize=16)(self._disagreements.labels)
        self.batch_seconds = lru_cache(maxsize=16)(self._batch_seconds.labels)
        self.request_seconds = lru_cache(maxsize=16)(self._request_seconds.labels)

    def outcomes(self) -> dict[str, int]:
        """Rows by what became of them, over all arms, and how many were admitted and have no reply yet."""
        rows: dict[str, int] = {}
        for sample in (s for metric in self._requests.collect() for s in metric.samples):
            if sample.name.endswith("_total"):
                rows[sample.labels["outcome"]] = rows.get(sample.labels["outcome"], 0) + int(sample.value)
        return {**rows, "unanswered": int(self.registry.get_sample_value("earlyexit_inflight") or 0)}

    def text(self) -> bytes:
        """The exposition text of ``/metrics``."""
        return generate_latest(self.registry)
