"""Prometheus metrics, for people and dashboards; the control plane reads counters, never these.

What is shown here is counted where it happens. What follows from the engine's state is asked for when somebody scrapes
(:mod:`offramp_worker.engine.accounts.scrape`). No label has a value that a request brings with it, and none grows with
time: arms, ramps of the loaded bundle, status codes. Help texts are the reference (docs/reference/metrics.md is made of
them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

import offramp_worker
from offramp_core.reasons import Reason, RequestOutcome

# Powers of two, as objectives lie anywhere between half a millisecond and seconds; the Python client has no native
# histograms.
SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096)
ROW_OUTCOMES = tuple(
    outcome for outcome in RequestOutcome if outcome is not RequestOutcome.INVALID
)  # which has no rows
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REFUSALS = Reason.at("refusal")
MOST_CHILDREN = 256  # of a series that are kept at hand

UNITS: Mapping[str, str] = {
    "earlyexit_audit_backlog": "rows",
    "earlyexit_audited_total": "audits",
    "earlyexit_batch_duration_seconds": "seconds by batches",
    "earlyexit_batch_rows": "rows by batches",
    "earlyexit_breaker_open": "",
    "earlyexit_build_info": "",
    "earlyexit_core_reachable": "",
    "earlyexit_core_request_duration_seconds": "seconds by requests",
    "earlyexit_deadline_answers_total": "rows",
    "earlyexit_detector_limit": "audits",
    "earlyexit_detector_statistic": "audits",
    "earlyexit_disagreements_total": "audits",
    "earlyexit_epoch": "",
    "earlyexit_exits_active": "",
    "earlyexit_exits_total": "rows",
    "earlyexit_feedback_total": "rows",
    "earlyexit_inflight": "rows",
    "earlyexit_offline_answers_total": "rows",
    "earlyexit_overload": "",
    "earlyexit_overload_answers_total": "rows",
    "earlyexit_plan_info": "",
    "earlyexit_plan_refusals_total": "documents",
    "earlyexit_request_duration_seconds": "seconds by requests",
    "earlyexit_responses_total": "requests",
    "earlyexit_row_duration_seconds": "seconds by rows",
    "earlyexit_worker_ready": "",
}
"""The unit of each metric whose name does not end with it, and by what a histogram counts; empty where it is a state.
No rule divides one unit by another (tests/observe/test_units.py)."""


class WorkerSeries:
    """What every worker tells, in a registry of its own, and how it makes series."""

    def __init__(self, subsystem: str = "") -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "earlyexit"}
        ProcessCollector(registry=self.registry)
        Info("build", "Version of the worker.", **own).info({"version": offramp_worker.__version__})
        self.ready = Gauge("worker_ready", "1 while the worker takes requests.", **own)
        self._own = {**own, "subsystem": subsystem}

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """A counter by its labels. Children are cached: a label lookup costs more than an increment."""
        return lru_cache(maxsize=MOST_CHILDREN)(Counter(name, text, labels, **self._own).labels)

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS
    ) -> Callable[..., Histogram]:
        """A histogram by its labels, likewise."""
        return lru_cache(maxsize=MOST_CHILDREN)(Histogram(name, text, labels, buckets=buckets, **self._own).labels)

    def _by_outcome(self, counter: str) -> dict[str, int]:
        """A counter's values by its label ``outcome``, over all others."""
        counts: dict[str, int] = {}
        for metric in self.registry.restricted_registry([f"earlyexit_{counter}_total"]).collect():
            for sample in metric.samples:
                counts[sample.labels["outcome"]] = counts.get(sample.labels["outcome"], 0) + int(sample.value)
        return counts

    def text(self) -> bytes:
        """The exposition text of ``/metrics``."""
        return generate_latest(self.registry)


class Metrics(WorkerSeries):
    """All series of a worker that classifies."""

    def __init__(self) -> None:
        super().__init__()
        self._add_requests()
        self._add_answers()
        self._add_times()
        self._add_edge()
        self._add_state()
        self._begin()

    def _add_requests(self) -> None:
        requests = self._counter(
            "requests",
            f"Requests, each once, by what became of them: {'; '.join(f'{o} ({o.meaning})' for o in RequestOutcome)}.",
            "outcome",
        )
        self.requests = {outcome: requests(outcome) for outcome in RequestOutcome}
        self.rows = self._counter(
            "rows",
            "Rows of requests that could be read, by what became of them, as requests. The arm is empty where none "
            "was drawn.",
            "arm",
            "outcome",
        )
        self.responses = self._counter(
            "responses",
            "Replies to inference requests by status: of HTTP for rest, the name of the status for grpc.",
            "protocol",
            "code",
        )
        self._late = Counter(
            "late_requests",
            "Requests that were answered (ok), their last row later than the latency objective; 0 without an "
            "objective.",
            **self._own,
        )
        self.cache = self._counter(
            "cache_requests",
            "Requests that asked the cache: hit, shared (waited with another), miss.",
            "result",
        )
        self.plan_refusals = self._counter(
            "plan_refusals", f"Plan documents that were not taken: {', '.join(REFUSALS)}.", "reason"
        )

    def _add_answers(self) -> None:
        self.exits = self._counter(
            "exits", "Rows answered, by the ramp they left at (final: the output).", "ramp", "arm"
        )
        self.deadline_answers = self._counter(
            "deadline_answers",
            "Rows answered by the deepest ramp they had reached because their deadline came; they are no exits.",
            "ramp",
            "arm",
        )
        self.overload_answers = self._counter(
            "overload_answers",
            "Rows answered by the thresholds for overload (spec.objective.overload), at ramps or the output.",
            "arm",
        )
        self.audit_seconds = self._counter(
            "audit_seconds",
            "Seconds that audits kept the engine busy, after the replies and beside the plan: the model at every "
            "precision of the bundle, "
            "with all heads. Measured here, where the seconds of ramps and of exits off are the profile's; nothing of "
            "it is in ramp_overhead_seconds.",
            "arm",
        )
        self.audited = self._counter(
            "audited",
            "Audits done: rows drawn uniformly whose served answer was compared with the reference (n).",
            "arm",
        )
        self.disagreements = self._counter(
            "disagreements", "Audited rows whose served answer differed from the reference (k).", "arm"
        )
        self.feedback = self._counter(
            "feedback",
            "Rows whose true label a client has reported, by whether the answer was right.",
            "arm",
            "outcome",
        )

    def _add_times(self) -> None:
        self.batch_seconds = self._histogram("batch_duration_seconds", "Execution time of a batch.", "arm")
        self.batch_rows = self._histogram("batch_rows", "Rows of a batch.", "arm", buckets=ROWS)
        self.failed_batches = self._counter("failed_batches", "Batches whose execution failed.", "arm")
        self._request_seconds = Histogram(
            "request_duration_seconds",
            "Time of an answered request from admission to its reply.",
            buckets=SECONDS,
            **self._own,
        )
        self.row_seconds = self._histogram(
            "row_duration_seconds", "Time of an answered row from admission until its answer was there.", "arm"
        )

    def _add_edge(self) -> None:
        own = self._own
        self.forwarded = self._counter(
            "forwarded_rows",
            "Rows that left at no exit of an edge, by what was sent of them (input or features), audits aside.",
            "sent",
        )
        self.offline_answers = self._counter(
            "offline_answers",
            "Rows answered by the last exit of an edge because its core did not answer; they are no exits.",
            "ramp",
            "arm",
        )
        self.core_seconds = Histogram(
            "core_request_duration_seconds",
            "Time until an edge had an answer of its core: the network, and the core's computing.",
            buckets=SECONDS,
            **own,
        )
        self.relayed = Counter(
            "relayed_requests", "Requests that an edge handed to its core as they came, which answered them.", **own
        )
        self.core_bytes = Counter("core_request_bytes", "Bytes of answered requests of an edge to its core.", **own)
        self.core_reachable = Gauge(
            "core_reachable", "1 while the core of an edge answers; 0 of a worker that is no edge.", **own
        )

    def _add_state(self) -> None:
        own = self._own
        self.cache_bytes = Gauge("cache_bytes", "What cached answers take, by estimate; 0 without a cache.", **own)
        self.inflight = Gauge("inflight", "Rows admitted and not answered yet, queued ones included.", **own)
        self.contact = Gauge(
            "control_plane_contact_timestamp_seconds",
            "When the control plane last pulled or poked with a valid token, in seconds since the epoch; 0 if never.",
            **own,
        )
        self.epoch = Gauge("epoch", "Epoch of the plan document in force; 0 without one.", **own)
        self.breaker_open = Gauge("breaker_open", "1 while the worker's own detector keeps the exits off.", **own)
        self.audit_backlog = Gauge("audit_backlog", "Audits drawn and not finished yet.", **own)

    def _begin(self) -> None:
        """Series that begin at 0: one that begins with its first event hides it from every rate."""
        for outcome in ROW_OUTCOMES:
            self.rows("stable" if outcome in (RequestOutcome.OK, RequestOutcome.FAILED) else "", outcome)
        for counter in (self.failed_batches, self.disagreements, self.audit_seconds):
            counter("stable")
        for reason in REFUSALS:
            self.plan_refusals(reason)

    def answered(self, seconds: float, *, objective: float | None) -> None:
        """A request has its answer, ``seconds`` after it was admitted."""
        self.requests[RequestOutcome.OK].inc()
        self._request_seconds.observe(seconds)
        if objective is not None and seconds > objective:
            self._late.inc()

    def row_outcomes(self) -> dict[str, int]:
        """Rows by what became of them, over all arms, and how many were admitted and have no reply yet."""
        rows = self._by_outcome("rows")
        return {**rows, "unanswered": int(self.registry.get_sample_value("earlyexit_inflight") or 0)}

    def request_outcomes(self) -> dict[str, int]:
        """Requests by what became of them."""
        return self._by_outcome("requests")
