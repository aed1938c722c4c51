"""What the operator tells Prometheus of a service, over a whole life that the real decision core leads on a simulated
fleet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parents[1] / "cli")]

from fleet import MANIFEST, Fleet  # noqa: E402
from states import BUDGET, CLEAN, DRIFTED, canary, promoted  # noqa: E402

from offramp_core.control.objects import ArmTally, BothArms  # noqa: E402
from offramp_core.control.rollouts.gates import GateInput, read_gates  # noqa: E402
from offramp_core.control.snapshot import Decision, Gathered  # noqa: E402
from offramp_operator.metrics import SERVICE_COUNTERS, SERVICE_GAUGES, Metrics  # noqa: E402
from offramp_operator.shell.listeners import CompletedPass  # noqa: E402
from offramp_operator.shell.platform import ServiceKey  # noqa: E402

KEY = ServiceKey("default", "sim")


@dataclass
class Watched:
    """A fleet whose every pass is shown to metrics, as a reconciler would."""

    fleet: Fleet
    now: float = 0.0
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(monotonic=lambda: self.fleet.now)

    def run(self, until: Callable[[Fleet], bool], *, limit: int = 400) -> None:
        for _ in range(limit):
            self.step()
            if until(self.fleet):
                return
        raise AssertionError(f"not within {limit} passes: {self.fleet.status}")

    def step(self) -> None:
        fleet = self.fleet
        gathered = Gathered(
            fleet.service, dict(fleet.configs), tuple(fleet.rollouts.values()), published=fleet.published
        )
        workers = tuple(w.view() for w in fleet.workers)
        self.metrics.passed(KEY, CompletedPass(gathered, workers, fleet.step(), fleet.now))

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """By the values of a metric's own labels."""
        return {
            tuple(v for k, v in sorted(s.labels.items()) if k not in ("namespace", "service")): s.value
            for family in text_string_to_metric_families(self.metrics.text().decode())
            for s in family.samples
            if s.name == name
        }

    def value(self, name: str) -> float:
        (value,) = self.values(name).values()
        return value


@pytest.fixture(scope="module")
def life() -> dict[str, Any]:
    """What metrics said in the canary, after the promotion, and after the rollback of a later canary on other
    inputs."""
    slices = [{"name": "night", "maxDisagreement": "0.02"}]
    objective = {**MANIFEST["objective"], "accuracy": {**MANIFEST["objective"]["accuracy"], "slices": slices}}
    watched = Watched(Fleet(CLEAN, {**MANIFEST, "objective": objective, "ramps": {"holdback": "0.2"}}))
    told: dict[str, Any] = {}

    def keep(moment: str) -> None:
        told[moment] = {
            name: watched.values(name) for name in (*SERVICE_GAUGES, *(f"{n}_total" for n in SERVICE_COUNTERS))
        }

    watched.run(canary)
    keep("canary")
    watched.run(promoted)
    watched.run(lambda f: f.status.phase == "Ready" and f.status.measured.answer_time is not None)
    watched.step()
    keep("promoted")
    told["measured"] = watched.fleet.status.measured
    watched.fleet.edit(objective=BUDGET)
    watched.run(lambda f: f.published is not None and f.published.canary is not None)
    watched.fleet.drift(DRIFTED)
    watched.run(lambda f: "RolledBack" in f.verdicts(), limit=60)
    watched.step()
    keep("rolled back")
    latency = {"threshold": "30s", "timeToFirstToken": "2s", "timePerToken": "50ms"}
    watched.fleet.edit(objective={"latency": latency, "accuracy": {"output": "TokenF1", "maxLoss": "0.05"}})
    watched.step()
    keep("generating")
    told["watched"] = watched
    return told


@pytest.mark.slow
def test_a_canary_shows_its_weight_its_gates_and_no_savings_yet(life: dict[str, Any]) -> None:
    told = life["canary"]
    assert told["earlyexit_rollout_phase"] == {("Progressing",): 1.0}
    assert told["earlyexit_rollout_weight_ratio"] == {(): 0.2}
    assert told["earlyexit_service_exits_active"] == {(): 0.0}
    assert told["earlyexit_service_predicted_saving_ratio"] == {(): 0.0}
    evidence = told["earlyexit_rollout_gate_evidence_ratio"]
    assert {("accuracy",), ("slowness",), ("failures",)} <= set(evidence) and max(evidence.values()) < 1
    assert told["earlyexit_rollout_gate_exposure_ratio"][("accuracy",)] > 0
    assert told["earlyexit_rollout_phase_transitions_total"][("Progressing",)] >= 1
    assert set(told["earlyexit_rollouts_total"].values()) == {0.0}, (
        "counters begin at 0, so that the first one shows as an increase"
    )


@pytest.mark.slow
def test_a_promoted_plan_shows_its_certificate_and_its_promise(life: dict[str, Any]) -> None:
    told = life["promoted"]
    assert told["earlyexit_service_exits_active"] == {(): 1.0}
    assert 0 < told["earlyexit_service_predicted_saving_ratio"][()] < 1
    assert 1_000_000 < told["earlyexit_service_certificate_timestamp_seconds"][()] < life["watched"].fleet.now
    assert told["earlyexit_rollouts_total"][("Succeeded",)] == 1
    assert told["earlyexit_rollout_phase_start_timestamp_seconds"] == {}, "no rollout is under way"
    assert told["earlyexit_rollout_weight_ratio"] == {(): 0.0}
    assert told["earlyexit_service_workers"][("acknowledged",)] == told["earlyexit_service_workers"][("desired",)] == 2
    assert told["earlyexit_service_condition"][("True", "Ready")] == 1
    assert told["earlyexit_service_accuracy_budget_ratio"] == {(): 0.02}


def test_a_rollback_is_counted_once_and_its_phase_replaces_the_one_before(life: dict[str, Any]) -> None:
    told = life["rolled back"]
    assert told["earlyexit_rollouts_total"][("RolledBack",)] == 1
    assert told["earlyexit_rollout_phase"] == {("RolledBack",): 1.0}
    assert told["earlyexit_rollout_gate_evidence_ratio"][("accuracy",)] >= 1, (
        "the curve shows why, also between two scrapes"
    )
    assert told["earlyexit_service_accuracy_budget_ratio"] == {(): 0.05}


def test_the_objective_of_generated_answers_has_a_series_for_each_of_its_times(life: dict[str, Any]) -> None:
    names = [f"earlyexit_service_{of}_objective_seconds" for of in ("latency", "first_token", "per_token")]
    assert [life["generating"][name] for name in names] == [{(): 30.0}, {(): 2.0}, {(): 0.05}]
    assert [life["promoted"][name] for name in names] == [{(): 0.1}, {}, {}]


def test_every_metric_of_a_service_is_told_at_some_time_and_none_outlives_it(life: dict[str, Any]) -> None:
    moments = [life[name] for name in ("canary", "promoted", "rolled back", "generating")]
    assert [name for name in moments[0] if not any(told[name] for told in moments)] == []
    watched = life["watched"]
    watched.metrics.gone(KEY)
    assert [name for name in moments[0] if watched.values(name)] == []


def test_the_exposure_of_a_gate_is_of_what_it_must_have_seen_and_not_of_its_events() -> None:
    """47 slow batches are the evidence; 1237 batches that could have been slow, of 1415, are the exposure."""
    canary, stable = ArmTally(batches=310, judged=310, slow=21), ArmTally(batches=927, judged=927, slow=26)
    given = GateInput(BothArms(canary, stable), 25, 0.02, 0.99, 3, 1415, certified=False)
    watched = Watched(Fleet(CLEAN))
    watched.run(lambda f: f.published is not None and f.published.canary is not None)
    rollout = next(iter(watched.fleet.rollouts.values()))
    status = replace(rollout.status, gates=read_gates(given))
    gathered = Gathered(watched.fleet.service, {}, (replace(rollout, status=status),))
    watched.metrics.passed(KEY, CompletedPass(gathered, (), Decision(watched.fleet.status), watched.fleet.now))
    told = watched.values("earlyexit_rollout_gate_exposure_ratio")
    assert round(told["slowness",], 2) == 0.87
    assert told["accuracy",] == 0 and told["acceptance",] == 0
    assert ("failures",) not in told and ("drift",) not in told, "they ask for no exposure"
    assert ("acceptance",) not in watched.values("earlyexit_rollout_gate_evidence_ratio"), "its evidence is not of harm"


def test_the_time_until_workers_run_a_document_is_measured() -> None:
    watched = Watched(Fleet(CLEAN))
    watched.run(lambda f: f.published is not None)
    watched.fleet.deliver = False
    watched.run(lambda f: f.published is not None and f.published.canary is not None)
    before = sum(watched.values("earlyexit_operator_acknowledgement_duration_seconds_count").values())
    for _ in range(5):
        watched.step()
    assert sum(watched.values("earlyexit_operator_acknowledgement_duration_seconds_count").values()) == before
    watched.fleet.deliver = True
    for _ in range(2):
        watched.step()
    counts = watched.values("earlyexit_operator_acknowledgement_duration_seconds_count")
    assert counts[("true",)] == 1
    assert 5 <= watched.values("earlyexit_operator_acknowledgement_duration_seconds_sum")[("true",)] <= 7


def test_a_restarted_operator_counts_nothing_that_had_ended_before() -> None:
    first = Watched(Fleet(CLEAN, {**MANIFEST}))
    first.run(promoted)
    second = Watched(first.fleet)
    second.step()
    assert set(second.values("earlyexit_rollouts_total").values()) == {0.0}


def test_a_process_that_no_longer_leads_tells_of_no_service() -> None:
    watched = Watched(Fleet(CLEAN))
    watched.metrics.leading(True)
    watched.step()
    assert watched.value("earlyexit_operator_leader") == 1 and watched.values("earlyexit_service_phase")
    watched.metrics.leading(False)
    assert watched.value("earlyexit_operator_leader") == 0 and not watched.values("earlyexit_service_phase")


def test_what_a_plan_saves_beside_its_holdback_is_shown_with_its_interval_until_it_serves_no_more(
    life: dict[str, Any],
) -> None:
    told, seen = life["promoted"], life["measured"]
    shown = told["earlyexit_service_measured_saving_ratio"]
    assert set(shown) == {(bound, of) for of in ("answer_time", "engine_time") for bound in ("low", "estimate", "high")}
    interval = tuple(shown[bound, "answer_time"] for bound in ("low", "estimate", "high"))
    assert interval == (seen.answer_time.low, seen.answer_time.share, seen.answer_time.high) == tuple(sorted(interval))
    ramps = told["earlyexit_service_ramp_utility_seconds"]
    assert ramps == {(use.id,): use.utility_seconds for use in seen.ramps} and ramps
    assert told["earlyexit_service_slice_stopped"] == {("night",): 0.0}
    assert life["canary"]["earlyexit_service_measured_saving_ratio"] == {}
