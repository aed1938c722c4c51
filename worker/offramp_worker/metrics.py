"""Prometheus metrics, for people and dashboards; the control plane reads counters, never these.

What is told here is counted where it happens. What follows from the engine's state is asked for when somebody scrapes
(:mod:`offramp_worker.engine.scrape`). No label has a value that a request brings with it, and none grows with time: arms, ramps of the
loaded bundle, status codes. Help texts are the reference (docs/reference/metrics.md is made of them).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

import offramp_worker
from offramp_core.reasons import Reason

# Powers of two, as objectives lie anywhere between half a millisecond and seconds; the Python client has no native histograms.
SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096)
FIRST_OUTCOMES = (("stable", "ok"), ("stable", "failed"), ("", "rejected"), ("", "expired"))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REFUSALS = Reason.at("refusal")


class Metrics:
    """All series of one worker in a registry of its own. Children are cached: a label lookup costs more than an increment."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "earlyexit"}
        ProcessCollector(registry=self.registry)
        Info("build", "Version of the worker.", **own).info({"version": offramp_worker.__version__})
        self._requests = Counter(
            "requests",
            "Rows by what became of them: ok, failed (its batch failed), expired (its timeout ran out in the queue), cancelled (the client went "
            "away); and requests that never became rows: rejected (shed: too much waits), invalid (malformed or unknown model). "
            "The arm is empty where none was drawn.",
            ("arm", "outcome"),
            **own,
        )
        self._responses = Counter(
            "responses",
            "Replies to inference requests by status: of HTTP for rest, the name of the status for grpc.",
            ("protocol", "code"),
            **own,
        )
        self._late = Counter(
            "late_requests",
            "Rows answered later than the latency objective; no series without an objective.",
            ("arm",),
            **own,
        )
        self._exits = Counter(
            "exits", "Rows answered, by the ramp they left at (final: the output).", ("ramp", "arm"), **own
        )
        self._deadline_answers = Counter(
            "deadline_answers",
            "Rows answered by the deepest ramp they had reached because their deadline came; they are no exits.",
            ("ramp", "arm"),
            **own,
        )
        self._audited = Counter(
            "audited",
            "Audits done: rows drawn uniformly whose served answer was compared with the reference (n).",
            ("arm",),
            **own,
        )
        self._disagreements = Counter(
            "disagreements", "Audited rows whose served answer differed from the reference (k).", ("arm",), **own
        )
        self._batch_seconds = Histogram(
            "batch_duration_seconds", "Execution time of a batch.", ("arm",), buckets=SECONDS, **own
        )
        self._batch_rows = Histogram("batch_rows", "Rows of a batch.", ("arm",), buckets=ROWS, **own)
        self._failed_batches = Counter("failed_batches", "Batches whose execution failed.", ("arm",), **own)
        self._request_seconds = Histogram(
            "request_duration_seconds", "Time of a row from admission to reply.", ("arm",), buckets=SECONDS, **own
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
        self._plan_refusals = Counter(
            "plan_refusals",
            f"Plan documents that were not taken: {', '.join(REFUSALS)}.",
            ("reason",),
            **own,
        )
        self.cache_bytes = Gauge("cache_bytes", "What cached answers take, by estimate; 0 without a cache.", **own)
        self.inflight = Gauge("inflight", "Rows admitted and not answered yet, queued ones included.", **own)
        self.ready = Gauge("worker_ready", "1 while the worker takes requests.", **own)
        self.contact = Gauge(
            "control_plane_contact_timestamp_seconds",
            "When the control plane last pulled or poked with a valid token, in seconds since the epoch; 0 if never.",
            **own,
        )
        self.epoch = Gauge("epoch", "Epoch of the plan document in force; 0 without one.", **own)
        self.breaker_open = Gauge("breaker_open", "1 while the worker's own detector keeps the exits off.", **own)
        self.audit_backlog = Gauge("audit_backlog", "Audits drawn and not finished yet.", **own)
        for arm, outcome in FIRST_OUTCOMES:  # a series that begins with its first event hides it from every rate
            self._requests.labels(arm, outcome)
        self._failed_batches.labels("stable")
        self._disagreements.labels("stable")
        for reason in REFUSALS:
            self._plan_refusals.labels(reason)
        self.requests = lru_cache(maxsize=64)(self._requests.labels)
        self.responses = lru_cache(maxsize=64)(self._responses.labels)
        self.late = lru_cache(maxsize=4)(self._late.labels)
        self.plan_refusals = self._plan_refusals.labels
        self.feedback = lru_cache(maxsize=16)(self._feedback.labels)
        self.cache = lru_cache(maxsize=4)(self._cache.labels)
        self.exits = lru_cache(maxsize=256)(self._exits.labels)
        self.deadline_answers = lru_cache(maxsize=256)(self._deadline_answers.labels)
        self.audited = lru_cache(maxsize=16)(self._audited.labels)
        self.disagreements = lru_cache(maxsize=16)(self._disagreements.labels)
        self.batch_rows = lru_cache(maxsize=4)(self._batch_rows.labels)
        self.failed_batches = self._failed_batches.labels
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
