"""Parts of the control loop: specs at the door, statuses through JSON, ledgers under restarts, gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import with_endpoint, worker_of  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.codec import format_time, from_json, parse_time, to_json
from offramp_core.control.conditions import Facts, conditions
from offramp_core.control.objects import (
    ArmTally,
    BothArms,
    Condition,
    Ledger,
    PinStatus,
    RolloutStatus,
    Service,
    StepRecord,
)
from offramp_core.control.rollouts.gates import GateInput, read_gates
from offramp_core.control.rollouts.ledger import BootReport, fold
from offramp_core.control.snapshot import Load, Worker
from offramp_core.control.spec import Autoscaling, SideBySide, UpdatePolicy, parse_duration, parse_spec
from offramp_core.control.stable.audit import Audits, expected_rate, followed_rate, quiet_rate
from offramp_core.control.workers.delivery import STALLING
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.protocol import ArmCounts, WorkerState
from offramp_core.reasons import ConditionType
from offramp_core.sketch import SecondsSketch, bucket_index

GOOD: dict[str, Any] = {
    "model": {"uri": "oci://example.com/digits:1"},
    "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.01"}},
}
HASHES = {"stable": "s", "canary": "c"}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one field set, e.g. ``objective.accuracy.maxDisagreement``."""

    def put(node: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        head, *rest = keys
        return {**node, head: put(node.get(head, {}), rest) if rest else value}

    return put(GOOD, path.split("."))


# --- specs -----------------------------------------------------------------------------------------


def test_a_short_manifest_gets_the_documented_defaults() -> None:
    spec = parse_spec(GOOD)
    assert (spec.latency_seconds, spec.max_disagreement, spec.confidence) == (0.04, 0.01, 0.95)
    assert (spec.mode, spec.max_active, spec.replicas) == ("Auto", 3, 1)
    assert [s.weight for s in spec.rollout.steps] == [5, 25, 50]
    assert (spec.deadline_answers, spec.cache_bytes, spec.protocols) == ("OnRequest", 0, ("HTTP",))
    assert (spec.route, spec.deprecated, spec.class_name) == (None, (), "")


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("model.uri", "gs://bucket/x", "spec.model.uri"),
        ("model.uri", "http://models.example/x.tar", "spec.model.uri"),
        ("model.uri", "https://me@models.example/x.tar", "spec.model.uri"),
        ("model.uri", "s3://bucket", "spec.model.uri"),
        ("model.uri", "pvc://models/a/../..", "spec.model.uri"),
        ("model.secretRef", {"name": "models"}, "spec.model.secretRef"),
        ("model.archiveDigest", "sha256:" + "0" * 64, "spec.model.archiveDigest"),
        ("model.region", "eu-west-1", "spec.model.region"),
        ("model", {"uri": "s3://b-b/x", "endpoint": "http://minio:9000"}, "spec.model.endpoint"),
        ("model.digest", "sha256:12", "spec.model.digest"),
        ("objective.latency.threshold", "40", "spec.objective.latency.threshold"),
        ("objective.latency.threshold", "0ms", "spec.objective.latency.threshold"),
        *(
            ("objective.latency.percentile", wrong, "spec.objective.latency.percentile")
            for wrong in (49, 100, 99.9, "100", "99.9999", "p95", "", True, [95])
        ),
        ("objective.accuracy.maxDisagreement", "0", "spec.objective.accuracy.maxDisagreement"),
        ("objective.accuracy.maxDisagreement", "NaN", "spec.objective.accuracy.maxDisagreement"),
        ("objective.accuracy.maxDisagreement", 0.01, "spec.objective.accuracy.maxDisagreement"),
        ("objective.accuracy.confidence", "1", "spec.objective.accuracy.confidence"),
        ("objective.accuracy.output", "Top5", "spec.objective.accuracy.output"),
        ("ramps.mode", "Automatic", "spec.ramps.mode"),
        ("ramps.mode", "Pinned", "spec.ramps.pin"),
        ("ramps.pin", {"ramps": [{"id": "r", "threshold": "0.1"}]}, "spec.ramps.pin"),
        (
            "ramps",
            {"mode": "Pinned", "pin": {"ramps": [{"id": "r", "threshold": "1.1"}]}},
            "spec.ramps.pin.ramps[0].threshold",
        ),
        (
            "ramps",
            {"mode": "Pinned", "pin": {"ramps": [{"id": "r", "threshold": "0.1234567"}]}},
            "spec.ramps.pin.ramps[0].threshold",
        ),
        ("ramps", {"mode": "Pinned", "pin": {"ramps": [{"id": "r", "threshold": "0"}] * 2}}, "spec.ramps.pin.ramps"),
        ("ramps.maxActive", 7, "spec.ramps.maxActive"),
        ("rollout.steps", [], "spec.rollout.steps"),
        ("rollout.steps", [{"weight": 50}, {"weight": 25}], "spec.rollout.steps"),
        ("rollout.steps", [{"weight": 0}], "spec.rollout.steps[0].weight"),
        ("rollout.steps", [{"weight": 101}], "spec.rollout.steps[0].weight"),
        ("rollout.steps", [{"weight": 5}, {"weight": 5}], "spec.rollout.steps"),
        ("rollout.steps", [{"weight": w + 1} for w in range(13)], "spec.rollout.steps"),
        ("rollout.steps", [{"weight": 5, "pause": "0s"}], "spec.rollout.steps[0].pause"),
        ("rollout.rollbackWindow", -1, "spec.rollout.rollbackWindow"),
        ("rollout.rollbackWindow", 21, "spec.rollout.rollbackWindow"),
        ("rollout.historyLimit", 0, "spec.rollout.historyLimit"),
        ("rollout.historyLimit", 101, "spec.rollout.historyLimit"),
        ("rollout.stepDeadline", "soon", "spec.rollout.stepDeadline"),
        ("replicas", -1, "spec.replicas"),
        ("replicas", True, "spec.replicas"),
        ("suspend", "yes", "spec.suspend"),
        ("batching", {"policy": "clockwork"}, "spec.batching.policy"),
        ("batching", {"size": 8}, "spec.batching.size"),
        ("deadlineAnswers", "Never", "spec.deadlineAnswers"),
        ("predictionCache", {}, "spec.predictionCache.sizeLimit"),
        ("predictionCache", {"sizeLimit": "64MB"}, "spec.predictionCache.sizeLimit"),
        ("predictionCache", {"sizeLimit": "1025Gi"}, "spec.predictionCache.sizeLimit"),
        ("feedback", {}, "spec.feedback.maxAnswers"),
        ("feedback", {"maxAnswers": 0}, "spec.feedback.maxAnswers"),
        ("feedback", {"maxAnswers": 1_000_001}, "spec.feedback.maxAnswers"),
        ("feedback", {"maxAnswers": "100"}, "spec.feedback.maxAnswers"),
        ("feedback", {"rows": 100}, "spec.feedback.rows"),
        ("protocols", ["GRPC"], "spec.protocols"),
        ("protocols", ["HTTP", "HTTP"], "spec.protocols"),
        ("protocols", [["HTTP"]], "spec.protocols"),
        ("autoscaling", {"maxReplicas": 2}, "spec.autoscaling.targetInFlight"),
        ("autoscaling", {"targetInFlight": 8}, "spec.autoscaling.maxReplicas"),
        ("autoscaling", {"maxReplicas": 2, "targetInFlight": 8, "minReplicas": 0}, "spec.autoscaling.minReplicas"),
        ("autoscaling", {"maxReplicas": 2, "targetInFlight": 8, "minReplicas": 3}, "spec.autoscaling.maxReplicas"),
        ("autoscaling", {"maxReplicas": 2, "targetInFlight": 8, "metric": "cpu"}, "spec.autoscaling.metric"),
        ("updatePolicy", {"type": "OnDelete"}, "spec.updatePolicy.type"),
        ("updatePolicy", {"surgeDeadline": "soon"}, "spec.updatePolicy.surgeDeadline"),
        *(
            ("updatePolicy", {"maxSurge": wrong}, "spec.updatePolicy.maxSurge")
            for wrong in (0, 1001, "0%", "101%", "1.5", 2.5, True)
        ),
        ("worker", {"disruptionBudget": {"maxUnavailable": 0}}, "spec.worker.disruptionBudget.maxUnavailable"),
        ("worker", {"disruptionBudget": {"minAvailable": 1}}, "spec.worker.disruptionBudget.minAvailable"),
        ("updatePolicy", {"sideBySide": {"weight": 51}}, "spec.updatePolicy.sideBySide.weight"),
        ("updatePolicy", {"sideBySide": {"weight": 0}}, "spec.updatePolicy.sideBySide.weight"),
        ("updatePolicy", {"sideBySide": {"pause": "soon"}}, "spec.updatePolicy.sideBySide.pause"),
        ("updatePolicy", {"sideBySide": {"promotion": "Later"}}, "spec.updatePolicy.sideBySide.promotion"),
        ("updatePolicy", {"sideBySide": {"deadline": "0s"}}, "spec.updatePolicy.sideBySide.deadline"),
        ("updatePolicy", {"sideBySide": {"share": 1}}, "spec.updatePolicy.sideBySide.share"),
        *(
            (*where(wrong)[:2], f"{where(wrong)[2]}.{field}")
            for wrong, field in (
                ({}, "parentRefs"),
                ({"parentRefs": []}, "parentRefs"),
                ({"parentRefs": [{"name": "a"}] * 2}, "parentRefs"),
                ({"parentRefs": [{"namespace": "infra"}]}, "parentRefs[0].name"),
                ({"parentRefs": [{"name": "a", "port": 0}]}, "parentRefs[0].port"),
                ({"parentRefs": [{"name": "a", "kind": "-"}]}, "parentRefs[0].kind"),
                ({"parentRefs": [{"name": "a", "weight": 1}]}, "parentRefs[0].weight"),
                ({"parentRefs": [{"name": "a"}], "hostnames": ["Models.example"]}, "hostnames"),
                ({"parentRefs": [{"name": "a"}], "hostnames": ["a.example"] * 2}, "hostnames"),
                ({"parentRefs": [{"name": "a"}], "rules": []}, "rules"),
            )
            for where in (
                lambda wrong: ("route", wrong, "spec.route"),
                lambda wrong: (
                    "updatePolicy",
                    {"sideBySide": {"gateway": wrong}},
                    "spec.updatePolicy.sideBySide.gateway",
                ),
            )
        ),
    ],
)
def test_each_mistake_is_refused_by_the_name_of_its_field(path: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        parse_spec(changed(path, value))
    assert refused.value.field == field


GENERATED = {"output": "TokenF1", "maxLoss": "0.05"}


def test_an_objective_of_generated_answers_may_name_the_times_of_its_tokens_beside_or_instead_of_the_whole() -> None:
    both = {"latency": {"threshold": "30s", "timeToFirstToken": "2s", "timePerToken": "50ms"}, "accuracy": GENERATED}
    spec = parse_spec(changed("objective", both))
    assert (spec.latency_seconds, spec.first_token_seconds, spec.token_seconds) == (30.0, 2.0, 0.05)
    alone = parse_spec(changed("objective", {"latency": {"timePerToken": "50ms"}, "accuracy": GENERATED}))
    assert alone.latency_seconds is None and [g.counted_as for g in alone.time_goals] == ["per_token"]


@pytest.mark.parametrize(
    ("latency", "accuracy", "field"),
    [
        ({}, GENERATED, "threshold"),
        ({}, {"maxDisagreement": "0.01"}, "threshold"),
        ({"timePerToken": "50ms"}, {"maxDisagreement": "0.01"}, "timePerToken"),
        ({"threshold": "1s", "timeToFirstToken": "1s"}, {"maxDisagreement": "0.01"}, "timeToFirstToken"),
        ({"timeToFirstToken": "0s"}, GENERATED, "timeToFirstToken"),
        ({"timeToFirstToken": 2}, GENERATED, "timeToFirstToken"),
        ({"timePerToken": "soon"}, GENERATED, "timePerToken"),
    ],
)
def test_times_that_mean_nothing_are_refused_by_their_field(
    latency: dict[str, Any], accuracy: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        parse_spec(changed("objective", {"latency": latency, "accuracy": accuracy}))
    assert refused.value.field == f"spec.objective.latency.{field}"


def test_deadline_answers_need_a_deadline() -> None:
    manifest = changed("objective", {"latency": {"timePerToken": "50ms"}, "accuracy": GENERATED})
    with pytest.raises(InvalidSpecError) as refused:
        parse_spec({**manifest, "deadlineAnswers": "Always"})
    assert refused.value.field == "spec.deadlineAnswers"


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("64Ki", 2**16), ("256Mi", 2**28), ("1024Gi", 2**40)])
def test_the_size_of_the_cache_is_a_quantity(text: str, size: int) -> None:
    assert parse_spec(changed("predictionCache", {"sizeLimit": text})).cache_bytes == size


@pytest.mark.parametrize("execution", ["Auto", "ResultsOnly", "ComputeSaving"])
def test_answers_are_kept_for_true_labels_only_where_the_spec_says_how_many(execution: str) -> None:
    assert parse_spec({**GOOD, "execution": execution}).feedback_answers == 0
    asked = {**GOOD, "execution": execution, "feedback": {"maxAnswers": 10_000}}
    assert parse_spec(asked).feedback_answers == 10_000


@pytest.mark.parametrize("option", [("predictionCache", {"sizeLimit": "1Mi"}), ("deadlineAnswers", "Always")])
def test_what_is_of_no_use_in_results_only_is_refused(option: tuple[str, Any]) -> None:
    with pytest.raises(InvalidSpecError, match=f"^spec.{option[0]}: .*ResultsOnly"):
        parse_spec({**changed(*option), "execution": "ResultsOnly"})


def test_autoscaling_and_replicas_exclude_each_other() -> None:
    scaled = {**GOOD, "autoscaling": {"maxReplicas": 4, "targetInFlight": 8, "minReplicas": 2}}
    assert parse_spec(scaled).autoscaling == Autoscaling(4, 8, 2)
    with pytest.raises(InvalidSpecError, match=r"remove spec\.replicas"):
        parse_spec({**scaled, "replicas": 2})


def test_an_update_may_say_how_long_it_waits_for_room() -> None:
    assert parse_spec(GOOD).update_policy == UpdatePolicy("Auto", 300.0)
    policy = {"type": "ResourceAware", "surgeDeadline": "90s"}
    assert parse_spec({**GOOD, "updatePolicy": policy}).update_policy == UpdatePolicy("ResourceAware", 90.0)


def test_versions_serve_side_by_side_only_where_it_is_asked_for() -> None:
    policy = {"sideBySide": {}}
    assert parse_spec({**GOOD, "updatePolicy": policy}).update_policy == UpdatePolicy(side_by_side=SideBySide())
    assert SideBySide() == SideBySide(20, 600.0, "Automatic", 3600.0)


def test_a_parent_of_a_route_is_kept_as_it_was_written() -> None:
    parents = [{"name": "public", "namespace": "infra"}, {"group": "", "kind": "Service", "name": "digits", "port": 80}]
    gateway = {"parentRefs": parents, "hostnames": ["*.example.com"]}
    spec = parse_spec({**GOOD, "route": gateway})
    assert spec.route is not None and spec.deprecated == ()
    assert [dict(parent) for parent in spec.route.parents] == parents
    assert spec.route.hostnames == ("*.example.com",)
    before = parse_spec({**GOOD, "updatePolicy": {"sideBySide": {"gateway": gateway}}})
    assert before.route == spec.route
    assert before.deprecated == ("spec.updatePolicy.sideBySide.gateway is called spec.route now; move it there",)
    with pytest.raises(InvalidSpecError, match=r"spec\.route: takes the place of"):
        parse_spec({**GOOD, "route": gateway, "updatePolicy": {"sideBySide": {"gateway": gateway}}})


def test_a_missing_objective_is_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.objective: required"):
        parse_spec({"model": GOOD["model"]})


# --- codec -----------------------------------------------------------------------------------------


@given(st.floats(min_value=0, max_value=4e9))
def test_times_survive_to_the_microsecond(seconds: float) -> None:
    assert parse_time(format_time(seconds)) == pytest.approx(seconds, abs=2e-6)


tallies = st.builds(ArmTally, **{name: st.integers(0, 10**6) for name in ArmTally.__dataclass_fields__})
arms = st.builds(BothArms, canary=tallies, stable=tallies)


@given(st.dictionaries(st.text("abc-", min_size=1), arms, max_size=3), arms, st.integers(0, 9), st.integers(0, 10**6))
def test_a_rollout_status_survives_storage(live: dict[str, BothArms], retired: BothArms, step: int, n: int) -> None:
    status = RolloutStatus(
        phase="Progressing",
        step=step,
        weight=25,
        started_at=1.5,
        slow_seconds={"1": 0.25},
        ledger=Ledger(7, live, retired, ("x",)),
        history=(StepRecord(5, n, 0, 2.5),),
    )
    assert from_json(RolloutStatus, to_json(status)) == status


def test_a_status_of_the_wrong_type_names_the_field() -> None:
    with pytest.raises(InvalidArgumentError, match=r"RolloutStatus\.step is 'two'"):
        from_json(RolloutStatus, {"step": "two"})


def test_fields_of_a_newer_release_are_ignored() -> None:
    assert from_json(RolloutStatus, {"step": 1, "somethingNew": {}}).step == 1


# --- ledger ----------------------------------------------------------------------------------------


def counts(
    *, epoch: int = 3, arm: str = "canary", requests: int = 100, drawn: int = 50, audited: int = 50, wrong: int = 1
) -> ArmCounts:
    return ArmCounts(epoch, arm, HASHES[arm], requests, {}, drawn, audited, wrong, batches=requests)  # type: ignore[arg-type]


def folded(ledger: Ledger, *reports: BootReport, live: set[str] | None = None, epoch: int = 3) -> Ledger:
    boots = frozenset(live if live is not None else {r.boot_id for r in reports})
    return fold(ledger, reports, epoch=epoch, live_boots=boots, plan_hashes=HASHES)


def test_a_repeated_or_lost_pull_changes_nothing() -> None:
    report = BootReport("a", (counts(),))
    once = folded(Ledger(), report)
    assert folded(once, report) == once
    assert folded(once, live={"a"}) == once


def test_a_vanished_worker_keeps_its_counts_and_its_open_audits_count_against_the_canary() -> None:
    ledger = folded(Ledger(), BootReport("a", (counts(drawn=50, audited=40, wrong=1),)))
    gone = folded(ledger, live=set())
    assert (gone.total.canary.audited, gone.total.canary.disagreements) == (50, 11)


def test_a_restarted_worker_adds_to_what_it_did_before() -> None:
    ledger = folded(Ledger(), BootReport("a1", (counts(),)))
    ledger = folded(ledger, BootReport("a2", (counts(),)), live={"a2"})
    assert ledger.total.canary.audited == 100


@given(st.permutations(["a", "b", "c"]))
def test_the_order_of_reports_does_not_matter(order: list[str]) -> None:
    reports = {boot: BootReport(boot, (counts(requests=100 + i, wrong=i),)) for i, boot in enumerate("abc")}
    assert folded(Ledger(), *(reports[b] for b in order)) == folded(Ledger(), *reports.values())


def test_counts_of_another_epoch_are_not_pooled() -> None:
    assert folded(Ledger(), BootReport("a", (counts(epoch=2),))).total == BothArms()


@pytest.mark.parametrize(
    "impossible",
    [
        counts(wrong=51),
        counts(audited=51),
        counts(drawn=101),
        replace(counts(), plan_hash="foreign"),
        replace(counts(), slow_batches=5),
    ],
    ids=[
        "more disagreements than audits",
        "more audits than drawn",
        "more drawn than requests",
        "another plan",
        "slow batches nobody judged",
    ],
)
def test_an_impossible_report_is_quarantined_with_all_it_said(impossible: ArmCounts) -> None:
    ledger = folded(Ledger(), BootReport("a", (counts(),)))
    ledger = folded(ledger, BootReport("a", (impossible,)))
    assert ledger.quarantined == ("a",) and ledger.total == BothArms()
    assert folded(ledger, BootReport("a", (counts(),))).total == BothArms()


def test_counters_that_go_backwards_are_quarantined() -> None:
    ledger = folded(Ledger(), BootReport("a", (counts(),)))
    assert folded(ledger, BootReport("a", (counts(requests=99),))).quarantined == ("a",)


# --- audit rates -----------------------------------------------------------------------------------


def test_a_quiet_rate_falls_with_a_hundredfold_load_at_once_and_comes_back_only_after_an_hour_of_little() -> None:
    chosen = quiet_rate(Load(0.5, 0.01))
    fallen = followed_rate(chosen, Load(50, 0.6, 50))
    assert (chosen, fallen) == (1.0, 0.02)
    assert followed_rate(fallen, Load(0.5, 0.01, 50)) == fallen, "the peak of the last hour was no quiet one"
    assert followed_rate(fallen, Load(0.5, 0.01, 0.8)) == 1.0


@given(st.floats(0.01, 5000), st.floats(0, 1), st.floats(0.5, 2))
def test_a_quiet_rate_stays_while_load_no_more_than_doubles_or_halves(rate: float, busy: float, by: float) -> None:
    chosen = quiet_rate(Load(rate, 0.0))
    later = Load(rate * by, 0.0, rate * max(1.0, by))
    assert followed_rate(chosen, later) == chosen
    busier = followed_rate(chosen, Load(rate, busy, rate))
    assert followed_rate(busier, Load(rate, busy, rate)) == busier, "it comes to rest at once"


def test_pauses_between_bursts_move_no_rate_and_nor_does_an_unknown_peak() -> None:
    for pause in (Load(0.0, 0.0, 500), Load(0.2, 0.0, 500), Load(0.2, 0.0)):
        assert followed_rate(0.02, pause) == 0.02


def test_the_price_that_a_plan_is_told_at_is_that_of_its_traffic_and_not_of_a_pause_between_two_pulls() -> None:
    assert quiet_rate(Load(0.0, 0.0, 100.0)) == 1.0
    assert expected_rate(Load(0.0, 0.0, 100.0)) == 0.02 == expected_rate(Load())
    assert expected_rate(Load(100.0, 0.3, 120.0)) == 0.02
    assert expected_rate(Load(0.5, 0.01, 0.8)) == 1.0, "where little comes, all of it is audited"


# --- gates -----------------------------------------------------------------------------------------


def gates(canary: ArmTally, stable: ArmTally = ArmTally(), **changes: Any) -> dict[str, str]:  # noqa: B008 - frozen
    given_ = GateInput(BothArms(canary, stable), 25, 0.01, 0.99, 3, 500, certified=True)
    return {g.name: g.state for g in read_gates(replace(given_, **changes))}


def test_no_data_is_undecided_and_never_a_pass() -> None:
    read = gates(ArmTally())
    assert read["accuracy"] == read["slowness"] == "Undecided"


def test_five_percent_disagreement_against_a_budget_of_one_is_rejected_within_225_audits() -> None:
    assert gates(ArmTally(audited=225, disagreements=11))["accuracy"] == "Rejected"


@pytest.mark.parametrize(
    ("canary", "told"),
    [
        (ArmTally(audited=225, disagreements=10), "10 of 225 against 0.01: e-value 742 passes the limit 20"),
        (ArmTally(audited=400, disagreements=27), "27 of 400 against 0.01: e-value 10^12 passes the limit 20"),
    ],
)
def test_a_rejection_tells_its_evidence_as_people_read_numbers(canary: ArmTally, told: str) -> None:
    given_ = GateInput(BothArms(canary, ArmTally()), 25, 0.01, 0.99, 3, 500, certified=True)
    (accuracy,) = [g for g in read_gates(given_) if g.name == "accuracy"]
    assert accuracy.message == told


def test_enough_agreeing_audits_are_clear() -> None:
    assert gates(ArmTally(audited=5000, disagreements=40))["accuracy"] == "Clear"


def test_slow_batches_are_judged_by_the_canary_s_share_of_them() -> None:
    fair = gates(ArmTally(judged=1000, slow=100), ArmTally(judged=3000, slow=300))
    slow = gates(ArmTally(judged=1000, slow=400), ArmTally(judged=3000, slow=300))
    assert (fair["slowness"], slow["slowness"]) == ("Clear", "Rejected")


def test_at_full_weight_there_is_nothing_to_compare_with() -> None:
    assert gates(ArmTally(audited=5000), weight=100)["slowness"] == "NotApplicable"


def test_a_failed_batch_at_full_weight_is_the_models_own_and_many_are_the_plans() -> None:
    own = gates(ArmTally(batches=20_000, failed=20), weight=100)
    first = gates(ArmTally(batches=30, failed=1), weight=100)
    many = gates(ArmTally(batches=30, failed=6), weight=100)
    steady = gates(ArmTally(batches=1_000, failed=10), weight=100)
    assert [read["failures"] for read in (own, first, many, steady)] == ["Clear", "Clear", "Rejected", "Rejected"]


def test_an_uncertified_plan_must_earn_acceptance() -> None:
    few = gates(ArmTally(audited=1500, disagreements=14), certified=False)
    many = gates(ArmTally(audited=9000, disagreements=18), certified=False)
    assert (few["acceptance"], many["acceptance"]) == ("Undecided", "Clear")


def test_a_worker_whose_every_run_fails_is_in_trouble_of_its_own_and_not_its_bundles() -> None:
    told = WorkerState("u", "b", "s", "digits", False, "", "", (), {}, failing="every run fails: CUDA failure 700")
    worker = worker_of("digits-0", "u", ready=False, state=told)
    assert worker.trouble == ("ExecutorFailing", "every run fails: CUDA failure 700")
    assert worker.trouble[0] not in STALLING  # waiting helps, and no version is rejected for it
    assert (
        with_endpoint(worker, failure="the worker ended with exit code 3", failure_reason="Error").trouble[0] == "Error"
    )
    assert with_endpoint(worker, ready=True).trouble == ("", "")


@pytest.mark.parametrize(
    ("devices", "missing", "told"),
    [
        ((), "cuda", True),
        (("nvidia.com/gpu",), "cuda", False),
        (("claim gpu",), "cuda", False),
        (None, "cuda", False),
        ((), "", False),
    ],
    ids=["none", "a GPU", "a claim", "no cluster", "another fault"],
)
def test_a_bundle_for_a_device_that_workers_do_not_ask_for_is_told_as_that(
    devices: tuple[str, ...] | None, missing: str, told: bool
) -> None:
    cause = "profile.json: measured with onnxruntime-cuda, but there is none"
    state = WorkerState("u", "b", "s", "", False, "", "", (), {}, message=cause, missing_device=missing)
    reason, message = worker_of("digits-0", ready=False, state=state, devices=devices).trouble
    asked_for_none = "the bundle was prepared for cuda, and workers ask for no device"
    assert reason == "InvalidBundle" and message.endswith(cause)
    assert message.startswith(asked_for_none) is told and ("or in a WorkerClass" in message) is told


def test_a_node_that_gives_no_device_of_use_is_named() -> None:
    cause = "profile.json: measured with onnxruntime-cuda, but the GPU's driver is too old"
    state = WorkerState("u", "b", "s", "", False, "", "", (), {}, message=cause, missing_device="cuda")
    found = worker_of("digits-0", ready=False, state=state, devices=("nvidia.com/gpu",), node="n1").trouble
    assert found == ("InvalidBundle", f"on node n1: {cause}")


def test_an_unhealthy_device_is_told_while_its_worker_serves_and_no_longer_than_that() -> None:
    service = Service("default", "digits", "uid", 1, parse_spec(GOOD))
    sick, well = "device gpu-0 of nvidia.com/gpu on node n1", worker_of("digits-1")

    def told(*workers: Worker) -> dict[str, Condition]:
        facts = Facts(service, workers, 0, None, (), PinStatus(), None, 0.0)
        return {c.type: c for c in conditions(facts, settled_generation=1, observed=({}, Audits()))}

    found = told(worker_of("digits-0", unhealthy=sick), well)[ConditionType.DEVICES_HEALTHY]
    assert (found.status, found.reason) == ("False", "DeviceUnhealthy")
    assert found.message.startswith(f"digits-0 serves with {sick}; ")
    failed = told(worker_of("digits-0", ready=False, unhealthy=sick))[ConditionType.DEVICES_HEALTHY]
    assert failed.message.startswith(f"digits-0 does not serve with {sick}; ")
    assert ConditionType.DEVICES_HEALTHY not in told(worker_of("digits-0"), well)


@pytest.mark.parametrize(
    ("given", "percentile"), [(95, 95.0), (95.0, 95.0), ("50", 50.0), ("99.9", 99.9), ("99.999", 99.999)]
)
def test_a_percentile_is_a_whole_number_or_a_quoted_decimal(given: Any, percentile: float) -> None:
    assert parse_spec(changed("objective.latency.percentile", given)).latency_percentile == percentile


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("40ms", 0.04),
        ("1.5s", 1.5),
        ("1h30m", 5400.0),
        ("1m30.5s", 90.5),
        ("30m1h", 5400.0),
        ("1s500ms", 1.5),
        ("0s", 0.0),
    ],
)
def test_a_duration_is_the_sum_of_its_parts(text: str, seconds: float) -> None:
    assert parse_duration(text, "pause") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1h30", "30", "1 h", "h", "1h-30m", "1d", "1e3s", None, 90])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(InvalidSpecError, match="is not a duration"):
        parse_duration(text, "pause")


@pytest.mark.parametrize(
    ("percentile", "n", "late", "status"),
    [
        ("95", 99, 0, "Unknown"),
        ("95", 100, 5, "True"),
        ("95", 100, 6, "False"),
        ("99.9", 999, 0, "Unknown"),
        ("99.9", 1000, 1, "True"),
        ("99.9", 1000, 2, "False"),
    ],
)
def test_a_percentile_is_judged_once_a_request_may_lie_beyond_it(
    percentile: str, n: int, late: int, status: str
) -> None:
    spec = parse_spec(changed("objective.latency.percentile", percentile))
    facts = Facts(Service("default", "digits", "uid", 1, spec), (), 0, None, (), PinStatus(), None, 0.0)
    seen = SecondsSketch({bucket_index(0.01): n - late, bucket_index(1.0): late})
    told = {c.type: c for c in conditions(facts, settled_generation=1, observed=({"latency": seen}, Audits()))}
    assert told[ConditionType.LATENCY_OBJECTIVE_MET].status == status


@pytest.mark.parametrize(
    ("first_late", "each", "status", "words"),
    [
        (5, (0.04, 100), "True", ("time to first token p95", "time per token p95")),
        (6, (0.04, 100), "False", ("time to first token p95 against an objective of 2s; the other times are kept",)),
        (0, (0.09, 100), "False", ("time per token p95 against an objective of 50ms; the other times are kept",)),
        (6, (0.04, 9), "False", ("time to first token p95",)),
        (0, (0.04, 9), "Unknown", ("100 requests are needed for a statement on time per token",)),
    ],
)
def test_every_time_of_the_objective_must_be_kept_and_the_one_that_is_not_is_named(
    first_late: int, each: tuple[float, int], status: str, words: tuple[str, ...]
) -> None:
    latency = {"timeToFirstToken": "2s", "timePerToken": "50ms"}
    spec = parse_spec(changed("objective", {"latency": latency, "accuracy": GENERATED}))
    facts = Facts(Service("default", "chat", "uid", 1, spec), (), 0, None, (), PinStatus(), None, 0.0)
    first = SecondsSketch({bucket_index(0.5): 100 - first_late, bucket_index(9.0): first_late})
    times = {"first_token": first, "per_token": SecondsSketch({bucket_index(each[0]): each[1]})}
    told = {c.type: c for c in conditions(facts, settled_generation=1, observed=(times, Audits()))}
    found = told[ConditionType.LATENCY_OBJECTIVE_MET]
    assert found.status == status
    assert all(word in found.message for word in words), found.message
