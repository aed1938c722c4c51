"""What the operator tells Prometheus. For people only: nothing here is ever read back by a decision."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from offramp_core.control.objects import Rollout
from offramp_operator.shell.platform import ServiceKey


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reconciles = Counter(
            "earlyexit_operator_reconcile_total", "Passes over a service.", registry=self.registry
        )
        self._seconds = Histogram(
            "earlyexit_operator_reconcile_duration_seconds", "Duration of a pass.", registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        )  # fmt: skip
        self._errors = Counter(
            "earlyexit_operator_reconcile_errors_total", "Passes that failed.", registry=self.registry
        )
        self._phase = Gauge(
            "earlyexit_rollout_phase", "1 for the phase of a service's newest rollout.", ["namespace", "service", "phase"],
            registry=self.registry,
        )  # fmt: skip
        self._quarantined = Gauge(
            "earlyexit_workers_quarantined", "Workers whose impossible counts are not pooled; absent where there are none.",
            ["namespace", "service"], registry=self.registry,
        )  # fmt: skip
        self._finished = Counter("earlyexit_rollouts_total", "Finished rollouts.", ["verdict"], registry=self.registry)
        self._leader = Gauge("earlyexit_leader", "1 while this process leads.", registry=self.registry)
        self._late = Gauge(
            "earlyexit_operator_watch_late_seconds",
            "For how long a watch has missed what a list saw.",
            registry=self.registry,
        )
        self._queued = Gauge("earlyexit_operator_queue_keys", "Services that wait for a pass.", registry=self.registry)
        self._phases: dict[ServiceKey, str] = {}
        self._quarantined_of: set[ServiceKey] = set()

    def reconciled(self, seconds: float, *, failed: bool) -> None:
        """One pass has ended."""
        self._reconciles.inc()
        self._seconds.observe(seconds)
        if failed:
            self._errors.inc()

    def leading(self, leads: bool) -> None:
        self._leader.set(1 if leads else 0)

    def watch(self, *, late_seconds: Callable[[], float], queued: Callable[[], int]) -> None:
        """Where the present lateness and queue length are asked from."""
        self._late.set_function(late_seconds)
        self._queued.set_function(queued)

    def rollouts_seen(self, key: ServiceKey, rollouts: tuple[Rollout, ...]) -> None:
        """Show the phase of the newest rollout."""
        newest = max(
            rollouts, key=lambda rollout: (not rollout.status.finished, rollout.created_at, rollout.name), default=None
        )
        self._show(key, newest.status.phase if newest is not None else None)

    def quarantined_seen(self, key: ServiceKey, workers: int) -> None:
        """Show how many workers are not pooled."""
        if workers:
            self._quarantined.labels(key.namespace, key.name).set(workers)
            self._quarantined_of.add(key)
        elif key in self._quarantined_of:
            self._quarantined_of.discard(key)
            self._quarantined.remove(key.namespace, key.name)

    def rollout_finished(self, key: ServiceKey, verdict: str) -> None:
        del key  # a verdict's label must not grow with the number of services
        self._finished.labels(verdict).inc()

    def service_gone(self, key: ServiceKey) -> None:
        self._show(key, None)
        self.quarantined_seen(key, 0)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _show(self, key: ServiceKey, phase: str | None) -> None:
        shown = self._phases.pop(key, None)
        if shown is not None and shown != phase:
            self._phase.remove(key.namespace, key.name, shown)
        if phase is not None:
            self._phase.labels(key.namespace, key.name, phase).set(1)
            self._phases[key] = phase
