"""What the operator tells Prometheus. For people only: nothing here is ever read back by a decision.

Two kinds of series: what this process does (counters and histograms where it happens), and how each service stands,
remembered from its last pass and shown when somebody scrapes. The second kind carries ``namespace`` and ``service``, so
a scrape has to honour labels; it goes with the service, or when another process takes the lead. Help texts are the
reference (docs/reference/metrics.md is made of them).
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from offramp_core.control.objects import FINISHED, Config, Measured, Rollout, RolloutStatus, ServiceStatus
from offramp_core.control.rollouts.gates import proves
from offramp_core.control.snapshot import Decision, Worker
from offramp_core.control.spec import ServiceSpec
from offramp_core.control.workers.capacity import headroom
from offramp_core.control.workers.pace import Standing
from offramp_operator.shell.listeners import CompletedPass
from offramp_operator.shell.platform import ServiceKey

PASS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ACKNOWLEDGE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
Sample = tuple[str, tuple[str, ...], float]
"""A family of :data:`SERVICE_GAUGES`, the values of its own labels, and the value."""


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric of every service; ``labels`` come after namespace and service."""

    help: str
    labels: tuple[str, ...] = ()


SERVICE_GAUGES: Mapping[str, MetricFamily] = {
    "earlyexit_service_phase": MetricFamily("1 for the phase of the service.", ("phase",)),
    "earlyexit_service_condition": MetricFamily("1 for the present status of each condition.", ("type", "status")),
    "earlyexit_service_info": MetricFamily("1, with spec.ramps.mode and the stable RampConfig.", ("mode", "config")),
    "earlyexit_service_accuracy_budget_ratio": MetricFamily(
        "Share of all requests whose answer may differ (spec.objective.accuracy.maxDisagreement)."
    ),
    "earlyexit_service_latency_objective_seconds": MetricFamily("Latency that the objective's percentile must keep."),
    "earlyexit_service_first_token_objective_seconds": MetricFamily(
        "Time to the first token of generated answers that the objective's percentile must keep."
    ),
    "earlyexit_service_per_token_objective_seconds": MetricFamily(
        "Time per token of generated answers that the objective's percentile must keep."
    ),
    "earlyexit_service_latency_objective_ratio": MetricFamily(
        "Share of requests that must keep the latency, such as 0.95."
    ),
    "earlyexit_service_workers": MetricFamily(
        "Workers by state: desired, ready, answering (the last pulls reached them), acknowledged (ready and on the "
        "newest epoch), failed "
        "(cannot run), quarantined (impossible counts, not pooled), breaker_open (its own detector keeps the exits "
        "off). A worker is in several.",
        ("state",),
    ),
    "earlyexit_service_no_exit_headroom_ratio": MetricFamily(
        "Rows per second that the ready workers answer with exits off, over the most that came in the last hour: "
        "below 1 a rollback overloads the service. No series while "
        "either is not known. floor is spec.autoscaling.noExitFloor, Fixed without autoscaling.",
        ("floor",),
    ),
    "earlyexit_service_no_exit_workers": MetricFamily(
        "Workers that the peak of the last hour needs with exits off (needed), and the fewest that the autoscaler of "
        "the spec may leave (floor).",
        ("of",),
    ),
    "earlyexit_service_epoch": MetricFamily("Epoch of the published plan document."),
    "earlyexit_service_exits_active": MetricFamily("1 while the stable plan lets requests leave early."),
    "earlyexit_service_predicted_saving_ratio": MetricFamily(
        "Share of the model's time that the stable plan's certificate promises to save once audits are paid for; 0 "
        "with exits off."
    ),
    "earlyexit_service_measured_saving_ratio": MetricFamily(
        "Share of answer_time or engine_time that the stable plan saves, by comparison with the batches held back "
        "from it: the estimate, and the low and high end "
        "of an interval that holds at all times; no series before enough were held back.",
        ("of", "bound"),
    ),
    "earlyexit_service_audit_time_ratio": MetricFamily(
        "Time that audits of the stable plan and its holdback kept engines busy, as a share of what their batches "
        "would have taken with exits off. It is in neither measured saving: "
        "engine_time less this is what the plan saves of the model's own time. No series before enough requests, and "
        "with exits off."
    ),
    "earlyexit_service_ramp_utility_seconds": MetricFamily(
        "Per request: what inputs that leave at an active ramp save less what it costs those that pass it.", ("ramp",)
    ),
    "earlyexit_service_slice_stopped": MetricFamily(
        "1 for a slice that takes no exits because its audits are over its budget, else 0; class/3 is of the answers "
        "that name class 3.",
        ("slice",),
    ),
    "earlyexit_service_certificate_timestamp_seconds": MetricFamily(
        "Time of the newest record behind the stable plan's certificate, in seconds since the epoch; no series "
        "without one."
    ),
    "earlyexit_service_tuning": MetricFamily("1 for the state of the tuner.", ("state",)),
    "earlyexit_service_tuning_labels": MetricFamily("Labelled records that the tuner has."),
    "earlyexit_service_tuning_labels_needed": MetricFamily(
        "Labelled records that the next tuning needs; 0 when it needs none."
    ),
    "earlyexit_rollout_phase": MetricFamily("1 for the phase of the service's newest rollout.", ("phase",)),
    "earlyexit_rollout_phase_start_timestamp_seconds": MetricFamily(
        "Since when the rollout under way is in its phase; no series without one."
    ),
    "earlyexit_rollout_weight_ratio": MetricFamily("Share of batches that run the canary; 0 without one."),
    "earlyexit_rollout_gate_evidence_ratio": MetricFamily(
        "Evidence of harm that a gate of the newest rollout has seen, as a share of what rejects (logarithms of the "
        "e-value and its limit): 1 rolls back. Stays as the rollout ended with it until the next begins.",
        ("gate",),
    ),
    "earlyexit_rollout_gate_exposure_ratio": MetricFamily(
        "How much a gate of the newest rollout has seen, as a share of that with which a harmful plan would have "
        "shown itself (acceptance: of the evidence that it wants): at 1 the step may pass. No series for a gate that "
        "asks for none.",
        ("gate",),
    ),
}
SERVICE_COUNTERS: Mapping[str, MetricFamily] = {
    "earlyexit_rollouts": MetricFamily("Rollouts that ended while this process watched.", ("verdict",)),
    "earlyexit_rollout_phase_transitions": MetricFamily(
        "Phases that rollouts entered while this process watched.", ("phase",)
    ),
}

UNITS: Mapping[str, str] = {
    "earlyexit_operator_acknowledgement_duration_seconds": "seconds by documents",
    "earlyexit_operator_leader": "",
    "earlyexit_operator_queue_keys": "keys",
    "earlyexit_operator_fleet_services": "services",
    "earlyexit_operator_reconcile_duration_seconds": "seconds by passes",
    "earlyexit_operator_reconcile_errors_total": "passes",
    "earlyexit_operator_event_errors_total": "events",
    "earlyexit_operator_reconcile_total": "passes",
    "earlyexit_rollout_phase": "",
    "earlyexit_rollout_phase_transitions_total": "rollouts",
    "earlyexit_rollouts_total": "rollouts",
    "earlyexit_service_condition": "",
    "earlyexit_service_epoch": "",
    "earlyexit_service_exits_active": "",
    "earlyexit_service_info": "",
    "earlyexit_service_no_exit_workers": "workers",
    "earlyexit_service_phase": "",
    "earlyexit_service_slice_stopped": "",
    "earlyexit_service_tuning": "",
    "earlyexit_service_tuning_labels": "labels",
    "earlyexit_service_tuning_labels_needed": "labels",
    "earlyexit_service_workers": "workers",
}
"""The unit of each metric whose name does not end with it, and by what a histogram counts; empty where it is a state.
No rule divides one unit by another (tests/observe/test_units.py)."""


@dataclass(slots=True)
class _Service:
    """What is shown of one service, and what is remembered to notice changes. ``gauges`` are samples, packed: as tuples
    those of thousands of services are a tenth of the operator's memory."""

    gauges: bytes = b""
    verdicts: Tally[str] = field(default_factory=lambda: Tally(dict.fromkeys(sorted(FINISHED), 0)))
    transitions: Tally[str] = field(default_factory=Tally)
    phases: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    published_at: float | None = None


class Metrics:
    """The operator's metrics, in a registry of their own. An :class:`offramp_operator.shell.listeners.PassListener`."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reconciles = Counter(
            "earlyexit_operator_reconcile_total", "Passes over a service.", registry=self.registry
        )
        self._seconds = Histogram(
            "earlyexit_operator_reconcile_duration_seconds",
            "Duration of a pass, pulls included.",
            registry=self.registry,
            buckets=PASS_SECONDS,
        )
        self._errors = Counter(
            "earlyexit_operator_reconcile_errors_total", "Passes that failed.", registry=self.registry
        )
        self._leader = Gauge("earlyexit_operator_leader", "1 while this process leads.", registry=self.registry)
        self._late = Gauge(
            "earlyexit_operator_watch_late_seconds",
            "For how long a watch has missed what a list saw; 0 while all keep up.",
            registry=self.registry,
        )
        self._event_errors = Counter(
            "earlyexit_operator_event_errors_total",
            "Events of a watch that could not be taken: a fault of the operator; see its log.",
            registry=self.registry,
        )
        self._queued = Gauge("earlyexit_operator_queue_keys", "Services that wait for a pass.", registry=self.registry)
        self._paced = Gauge(
            "earlyexit_operator_fleet_services",
            "Services of this process by how they stand with what the administrator wants workers to run: Waiting for "
            "their turn, UnderWay, Proven, Failed (which stops those that wait), "
            "Apart (the user's own change is under way, or there are no workers).",
            ["standing"],
            registry=self.registry,
        )
        self._room = Gauge(
            "earlyexit_operator_waiting_records_ratio",
            "Records of services whose tuning waits for more, as a share of the room that this process has for them; "
            "near 1 those with the most lose their oldest. More shards give more room.",
            registry=self.registry,
        )
        self._acknowledged = Histogram(
            "earlyexit_operator_acknowledgement_duration_seconds",
            "From a plan document's publication to the pass that found it in force in every ready worker; canary "
            "tells whether the document "
            "has one (a rollback has none).",
            ["canary"],
            registry=self.registry,
            buckets=ACKNOWLEDGE_SECONDS,
        )
        self._services: dict[ServiceKey, _Service] = {}
        self.registry.register(_Services(self._services))

    # --- the process ---------------------------------------------------------------------------------

    def pace(self, standing: Callable[[Standing], int]) -> None:
        """Show how many services stand in each way, counted when somebody scrapes."""
        for how in get_args(Standing):
            self._paced.labels(how).set_function(partial(standing, how))

    def records(self, room_taken: Callable[[], float]) -> None:
        """Show how much of the room for records is taken, computed when somebody scrapes."""
        self._room.set_function(room_taken)

    def reconciled(self, seconds: float, *, failed: bool) -> None:
        """One pass has ended."""
        self._reconciles.inc()
        self._seconds.observe(seconds)
        if failed:
            self._errors.inc()

    def event_failed(self) -> None:
        """An event of a watch could not be taken."""
        self._event_errors.inc()

    def leading(self, leads: bool) -> None:
        """Whether this process leads; one that does not knows of no service."""
        self._leader.set(1 if leads else 0)
        if not leads:
            self._services.clear()

    def watch(self, *, late_seconds: Callable[[], float], queued: Callable[[], int]) -> None:
        """Where the present lateness and queue length are asked from."""
        self._late.set_function(late_seconds)
        self._queued.set_function(queued)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    # --- services ------------------------------------------------------------------------------------

    def passed(self, key: ServiceKey, seen: CompletedPass) -> None:
        """A pass has been carried out."""
        gathered, decision = seen.gathered, seen.decision
        service = self._services.setdefault(key, _Service())
        statuses = {r.name: r.status for r in gathered.rollouts} | dict(decision.rollout_statuses)
        self._follow_rollouts(service, statuses, known={r.name: r.status.phase for r in gathered.rollouts})
        self._follow_epoch(service, seen)
        service.gauges = _packed(service_samples(seen))

    def failed(self, key: ServiceKey, error: Exception, at: float) -> None:
        """Counted by :meth:`reconciled`; what was last reported of the service stays."""

    def gone(self, key: ServiceKey) -> None:
        """All series of a service go with it."""
        self._services.pop(key, None)

    def _follow_rollouts(
        self, service: _Service, now: Mapping[str, RolloutStatus], *, known: Mapping[str, str]
    ) -> None:
        """Count the phases entered since the last pass; what an earlier process saw was counted there."""
        for name, status in now.items():
            before = service.phases.get(name, known.get(name, ""))
            if status.phase != before:
                service.transitions[status.phase] += 1
                if status.finished:
                    service.verdicts[status.verdict or status.phase] += 1
        service.phases = {name: status.phase for name, status in now.items()}

    def _follow_epoch(self, service: _Service, seen: CompletedPass) -> None:
        document = seen.decision.publish or seen.gathered.published
        if document is None:
            return
        if seen.decision.publish is not None and document.epoch > service.epoch:
            service.published_at = self._monotonic()
        elif service.published_at is not None and _acknowledged(seen.workers, document.epoch):
            canary = "true" if document.canary is not None else "false"
            self._acknowledged.labels(canary).observe(self._monotonic() - service.published_at)
            service.published_at = None
        service.epoch = document.epoch


class _Services(Collector):
    """Shows what is remembered of each service."""

    def __init__(self, services: Mapping[ServiceKey, _Service]) -> None:
        self._services = services

    def describe(self) -> Iterator[Metric]:
        for name, family in SERVICE_GAUGES.items():
            yield GaugeMetricFamily(name, family.help, labels=("namespace", "service", *family.labels))
        for name, family in SERVICE_COUNTERS.items():
            yield CounterMetricFamily(name, family.help, labels=("namespace", "service", *family.labels))

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self.describe()}
        for key, service in self._services.items():
            own = (key.namespace, key.name)
            counts = (
                ("earlyexit_rollouts", service.verdicts),
                ("earlyexit_rollout_phase_transitions", service.transitions),
            )
            counted = ((name, (label,), float(n)) for name, tally in counts for label, n in tally.items())
            for name, labels, value in (*_unpacked(service.gauges), *counted):
                family = families[name]
                assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
                family.add_metric((*own, *labels), value)
        yield from families.values()


_NAMES = tuple(SERVICE_GAUGES)
_NUMBERS = {name: i for i, name in enumerate(_NAMES)}
_PACKED_SAMPLES = msgspec.msgpack.Decoder(list[tuple[int, tuple[str, ...], float]])


def _packed(samples: Iterator[Sample]) -> bytes:
    return msgspec.msgpack.encode([(_NUMBERS[name], labels, float(value)) for name, labels, value in samples])


def _unpacked(gauges: bytes) -> Iterator[Sample]:
    for number, labels, value in _PACKED_SAMPLES.decode(gauges) if gauges else ():
        yield _NAMES[number], labels, value


# --- samples ---------------------------------------------------------------------------------------


def service_samples(seen: CompletedPass) -> Iterator[Sample]:
    """The gauges of one service after a pass."""
    gathered, decision = seen.gathered, seen.decision
    status, spec = decision.status, gathered.service.spec
    stable = gathered.configs.get(status.stable_config)
    document = decision.publish or gathered.published
    yield "earlyexit_service_phase", (status.phase,), 1.0
    for condition in status.conditions:
        yield "earlyexit_service_condition", (condition.type, condition.status), 1.0
    yield "earlyexit_service_info", (spec.mode, status.stable_config), 1.0
    yield "earlyexit_service_accuracy_budget_ratio", (), spec.max_disagreement
    for goal in spec.time_goals:
        yield f"earlyexit_service_{goal.counted_as}_objective_seconds", (), goal.seconds
    yield "earlyexit_service_latency_objective_ratio", (), spec.latency_share
    if document is not None:
        yield "earlyexit_service_epoch", (), document.epoch
    yield from _worker_samples(seen.workers, status)
    yield from _capacity_samples(spec, status)
    yield from _plan_samples(stable)
    yield from _measured_samples(status.measured)
    yield from _tuning_samples(status)
    yield from _rollout_samples(gathered.rollouts, decision)


def _worker_samples(workers: Sequence[Worker], status: ServiceStatus) -> Iterator[Sample]:
    fleet = status.workers
    states = {
        "desired": fleet.desired,
        "ready": fleet.ready,
        "acknowledged": fleet.acked,
        "quarantined": len(fleet.quarantined),
        "answering": sum(w.state is not None for w in workers),
        "failed": sum(bool(w.endpoint.failure) for w in workers),
        "breaker_open": sum(w.state is not None and w.state.breaker_open for w in workers),
    }
    for state, count in states.items():
        yield "earlyexit_service_workers", (state,), count


def _capacity_samples(spec: ServiceSpec, status: ServiceStatus) -> Iterator[Sample]:
    capacity = status.capacity
    floor = "Fixed" if spec.autoscaling is None else spec.autoscaling.no_exit_floor
    if (ratio := headroom(spec, status)) is not None:
        yield "earlyexit_service_no_exit_headroom_ratio", (floor,), ratio
    yield "earlyexit_service_no_exit_workers", ("needed",), capacity.needed
    yield "earlyexit_service_no_exit_workers", ("floor",), capacity.floor


def _plan_samples(stable: Config | None) -> Iterator[Sample]:
    if stable is None:
        return
    yield "earlyexit_service_exits_active", (), float(not stable.plan.exits_off)
    prediction = stable.status.prediction
    saving = prediction.net if prediction is not None and not stable.plan.exits_off else 0.0
    yield "earlyexit_service_predicted_saving_ratio", (), saving
    through = [float(c["recordsThrough"]) for c in stable.status.certificates if c.get("recordsThrough")]
    if through:
        yield "earlyexit_service_certificate_timestamp_seconds", (), max(through)


def _measured_samples(measured: Measured) -> Iterator[Sample]:
    for of, saving in (("answer_time", measured.answer_time), ("engine_time", measured.engine_time)):
        if saving is not None:
            for bound, share in (("low", saving.low), ("estimate", saving.share), ("high", saving.high)):
                yield "earlyexit_service_measured_saving_ratio", (of, bound), share
    if measured.audits is not None:
        yield "earlyexit_service_audit_time_ratio", (), measured.audits
    for ramp in measured.ramps:
        yield "earlyexit_service_ramp_utility_seconds", (ramp.id,), ramp.utility_seconds
    for use in measured.slices:
        yield "earlyexit_service_slice_stopped", (use.name,), float(use.stopped)


def _tuning_samples(status: ServiceStatus) -> Iterator[Sample]:
    if status.tuning.state:
        yield "earlyexit_service_tuning", (status.tuning.state,), 1.0
    yield "earlyexit_service_tuning_labels", (), status.tuning.labels
    yield "earlyexit_service_tuning_labels_needed", (), status.tuning.labels_needed


def _rollout_samples(rollouts: tuple[Rollout, ...], decision: Decision) -> Iterator[Sample]:
    statuses = [(decision.rollout_statuses.get(r.name, r.status), r) for r in rollouts]
    newest = max(statuses, key=lambda pair: (not pair[0].finished, pair[1].created_at, pair[1].number), default=None)
    if newest is None:
        yield "earlyexit_rollout_weight_ratio", (), 0.0
        return
    status = newest[0]
    yield "earlyexit_rollout_phase", (status.phase,), 1.0
    yield "earlyexit_rollout_weight_ratio", (), 0.0 if status.finished else status.weight / 100
    if status.phase_started_at is not None and not status.finished:
        yield "earlyexit_rollout_phase_start_timestamp_seconds", (), status.phase_started_at
    for gate in status.gates:
        if gate.log_limit > 0 and not proves(gate.name):  # whose evidence is of the good
            yield "earlyexit_rollout_gate_evidence_ratio", (gate.name,), gate.log_e_value / gate.log_limit
        if gate.exposure is not None:
            yield "earlyexit_rollout_gate_exposure_ratio", (gate.name,), gate.exposure


def _acknowledged(workers: Sequence[Worker], epoch: int) -> bool:
    ready = [worker for worker in workers if worker.endpoint.ready]
    return bool(ready) and all(w.state is not None and w.state.epoch >= epoch for w in ready)
