"""What Prometheus reads of a worker with several models: each model's series with a label ``model``, in a pool with a
label ``service`` too, and what tells of sharing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from offramp_worker.shared.repository import Repository

OF_PROCESS = ("process_", "earlyexit_build")

SHARED_UNITS = {
    "earlyexit_model_evictions_total": "evictions",
    "earlyexit_model_loads_total": "loads",
    "earlyexit_model_loaded": "",
    "earlyexit_model_unloads_total": "unloads",
}


class SharedState(Collector):
    """Which models are loaded, what that costs, and who has had the executor."""

    def __init__(self, repository: Repository | None) -> None:
        self._repository = repository

    def describe(self) -> Iterator[Metric]:
        yield from _families()

    def collect(self) -> Iterator[Metric]:
        loaded, size, loads, seconds, evictions, unloads, cold, turns = families = _families()
        assert self._repository is not None
        for model in self._repository.models.values():
            name = (model.name,)
            loaded.add_metric(name, float(model.ready))
            size.add_metric(name, model.size_bytes if model.ready else 0)
            loads.add_metric(name, model.loads)
            seconds.add_metric(name, model.total_load_seconds)
            evictions.add_metric(name, model.evictions)
            unloads.add_metric(name, model.unloads)
            cold.add_metric((*name, "waited"), model.waited)
            cold.add_metric((*name, "refused"), model.turned_away)
            turns.add_metric(name, self._repository.executor.seconds[model.name])
        yield from families


def _families() -> tuple[Gauge, Gauge, Counter, Counter, Counter, Counter, Counter, Counter]:
    by_model = ("model",)
    return (
        Gauge("earlyexit_model_loaded", "1 while the model is in memory.", labels=by_model),
        Gauge(
            "earlyexit_model_bytes",
            "Memory that the model takes, as measured when it was loaded; 0 while it is not.",
            labels=by_model,
        ),
        Counter("earlyexit_model_loads", "Loads of the model.", labels=by_model),
        Counter("earlyexit_model_load_seconds", "Seconds of its loads.", labels=by_model),
        Counter("earlyexit_model_evictions", "Times that it left memory for another model.", labels=by_model),
        Counter("earlyexit_model_unloads", "Times that it left memory because nobody asked for it.", labels=by_model),
        Counter(
            "earlyexit_model_cold_requests",
            "Requests that came while the model was not in memory: waited until it was, or refused.",
            labels=("model", "outcome"),
        ),
        Counter("earlyexit_model_turn_seconds", "Seconds that the model has had the executor.", labels=by_model),
    )


class _Labelled(Collector):
    """The series of all models; those of the process once."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._repository.models.values():
            labels = {"model": model.name}
            if self._repository.settings.pool is not None:  # as scraping names the service of a worker with one
                labels["service"] = model.given.settings.service
            for family in model.doors.worker.metrics.registry.collect():
                common = family.name.startswith(OF_PROCESS)
                if common and family.name in families:
                    continue
                shared = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                shared.samples += (
                    family.samples if common else [s._replace(labels={**labels, **s.labels}) for s in family.samples]
                )
        yield from families.values()


def metrics_text(repository: Repository) -> bytes:
    """The exposition text of ``/metrics``."""
    registry = CollectorRegistry()
    registry.register(_Labelled(repository))
    registry.register(SharedState(repository))
    return generate_latest(registry)
