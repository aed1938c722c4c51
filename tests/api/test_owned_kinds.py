"""RampConfig and RampRollout on a real API server: what may be said, and what never changes once it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


class Rule(NamedTuple):
    """A value at ``path`` that is taken, one that is refused, and part of the sentence; ``...`` stands for absence."""

    path: str
    good: Any
    bad: Any
    sentence: str


DIGEST = "sha256:" + "0123456789abcdef" * 4
SEVEN_RAMPS = [{"id": f"r0{i}-grid", "threshold": "0.1"} for i in range(7)]
DIGEST_SENTENCE = "a digest must be sha256: followed by 64 lower-case hexadecimal digits"
SHORTEST = "threshold must be the shortest decimal from 0 to 1 with at most 6 decimals"
FINISHED = ("Succeeded", "RolledBack", "Aborted", "Superseded")

CONFIG_RULES: list[Rule] = [
    Rule(
        "metadata.name",
        "digits-00ff00ff00",
        "digits-1",
        "metadata.name must be the service's name, '-' and 10 hexadecimal digits",
    ),
    Rule("spec.backboneDigest", DIGEST, "sha256:1", DIGEST_SENTENCE),
    Rule("spec.backboneDigest", DIGEST, ..., "spec.backboneDigest: Required value"),
    Rule("spec.rampSetDigest", DIGEST, "md5:1", DIGEST_SENTENCE),
    Rule("spec.rampSetDigest", DIGEST, ..., "spec.rampSetDigest: Required value"),
    Rule("spec.precision", "pruned50", "int8/", "precision must be 1 to 16 lower-case letters and digits"),
    Rule("spec.precision", "int8", "a" * 17, "may not be more than 16"),
    Rule("spec.precision", "fp32", ..., "spec.precision: Required value"),
    Rule("spec.execution", "ComputeSaving", "Both", 'Unsupported value: "Both"'),
    Rule("spec.execution", "ResultsOnly", ..., "spec.execution: Required value"),
    Rule("spec.ramps", [], ..., "spec.ramps: Required value"),
    Rule("spec.ramps", SEVEN_RAMPS[:6], SEVEN_RAMPS, "must have at most 6 items"),
    Rule("spec.ramps", SEVEN_RAMPS[:2], [SEVEN_RAMPS[0], SEVEN_RAMPS[0]], "Duplicate value"),
    Rule("spec.ramps.0.id", "r11-linear", "../etc", "id must be a ramp id such as r04-grid"),
    Rule("spec.ramps.0.threshold", "0.25", "0.250", SHORTEST),
    Rule("spec.ramps.0.threshold", "1", "1.0", SHORTEST),
    Rule("spec.ramps.0.threshold", "0", "-0", SHORTEST),
    Rule("spec.ramps.0.threshold", "0.000001", "0.0000001", "threshold"),
    Rule("spec.source", ..., "Tuned", 'unknown field "spec.source"'),
]

ROLLOUT_RULES: list[Rule] = [
    Rule("spec.serviceName", "d" * 40, "d" * 41, "Too long: may not be more than 40"),
    Rule("spec.serviceName", "digits", ..., "spec.serviceName: Required value"),
    Rule("spec.from", "digits-aaaaaaaaaa", ..., "spec.from: Required value"),
    Rule("spec.to", "digits-aaaaaaaaaa", "digits-0123456789", "from and to must be different RampConfigs"),
    Rule("spec.generation", 0, -1, "should be greater than or equal to 0"),
    Rule("spec.generation", 7, ..., "spec.generation: Required value"),
    Rule("spec.cause", "Pinned", "Boredom", 'Unsupported value: "Boredom"'),
    Rule("spec.paused", True, "yes", "must be of type boolean"),
    Rule("spec.decision", "Promote", "Hurry", 'Unsupported value: "Hurry"'),
    Rule("spec.force", ..., True, 'unknown field "spec.force"'),
]


def _ids(rules: list[Rule]) -> list[str]:
    return [f"{rule.path}={str(rule.bad)[:40]}" for rule in rules]


@pytest.mark.parametrize("rule", CONFIG_RULES, ids=_ids(CONFIG_RULES))
def test_a_rule_of_configs(api: Any, manifests: Any, rule: Rule) -> None:
    _check(api, manifests, manifests.config(), rule)


@pytest.mark.parametrize("rule", ROLLOUT_RULES, ids=_ids(ROLLOUT_RULES))
def test_a_rule_of_rollouts(api: Any, manifests: Any, rule: Rule) -> None:
    _check(api, manifests, manifests.rollout(), rule)


def _check(api: Any, manifests: Any, base: dict[str, Any], rule: Rule) -> None:
    answer = api.create(base if rule.good is ... else manifests.changed(base, rule.path, rule.good))
    assert answer.status_code == 201, answer.json()["message"]
    answer = api.create(manifests.changed(base, rule.path, rule.bad))
    assert answer.status_code in (400, 422), answer.text
    assert rule.sentence in answer.json()["message"]


@pytest.mark.parametrize(
    "patch",
    [
        {"execution": "ResultsOnly"},
        {"ramps": []},
        {"ramps": [{"id": "r04-grid", "threshold": "0.3"}]},
        {"backboneDigest": DIGEST},
    ],
    ids=lambda patch: next(iter(patch)),
)
def test_the_spec_of_a_config_never_changes(clean: Any, manifests: Any, patch: dict[str, Any]) -> None:
    config = manifests.config()
    assert clean.create(config, keep=True).status_code == 201
    answer = clean.merge(config, {"spec": patch})
    assert answer.status_code == 422
    assert "a RampConfig's spec is immutable; another plan is another RampConfig" in answer.json()["message"]


def test_the_status_of_a_config_changes_while_its_spec_stays(clean: Any, manifests: Any) -> None:
    config = manifests.config()
    clean.create(config, keep=True)
    for state in ("Proposed", "Certified", "Canary", "Stable"):
        assert clean.merge(config, {"status": {"state": state}}, subresource="status").status_code == 200
    assert clean.get(config)["status"]["state"] == "Stable"


@pytest.mark.parametrize(
    "patch", [{"serviceName": "other"}, {"from": "x"}, {"to": "x"}, {"generation": 2}, {"cause": "Pinned"}], ids=str
)
def test_a_rollout_cannot_be_retargeted(clean: Any, manifests: Any, patch: dict[str, Any]) -> None:
    rollout = manifests.rollout()
    assert clean.create(rollout, keep=True).status_code == 201
    answer = clean.merge(rollout, {"spec": patch})
    assert answer.status_code == 422
    assert "only spec.paused and spec.decision of a RampRollout may change" in answer.json()["message"]


def test_a_rollout_is_paused_and_resumed_as_often_as_people_like(clean: Any, manifests: Any) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    for paused in (True, False, True, None):
        assert clean.merge(rollout, {"spec": {"paused": paused}}).status_code == 200


@pytest.mark.parametrize(("first", "second"), [("Promote", None), ("Abort", None), ("Abort", "Promote")])
def test_a_decision_is_final(clean: Any, manifests: Any, first: str, second: str | None) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    assert clean.merge(rollout, {"spec": {"decision": first}}).status_code == 200
    answer = clean.merge(rollout, {"spec": {"decision": second}})
    assert answer.status_code == 422
    assert "spec.decision is final once set" in answer.json()["message"]


def test_a_promotion_may_still_be_called_off(clean: Any, manifests: Any) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    assert clean.merge(rollout, {"spec": {"decision": "Promote"}}).status_code == 200
    assert clean.merge(rollout, {"spec": {"decision": "Abort"}}).status_code == 200
    assert clean.merge(rollout, {"spec": {"decision": "Promote"}}).status_code == 422


@pytest.mark.parametrize("phase", FINISHED)
def test_a_decision_on_a_finished_rollout_is_not_changed_either(clean: Any, manifests: Any, phase: str) -> None:
    rollout = manifests.rollout(decision="Promote")
    clean.create(rollout, keep=True)
    assert clean.merge(rollout, {"status": {"phase": phase}}, subresource="status").status_code == 200
    answer = clean.merge(rollout, {"spec": {"decision": "Abort"}})
    assert answer.status_code == 422
    assert "this rollout is finished; a decision can no longer change it" in answer.json()["message"]


@pytest.mark.parametrize("phase", FINISHED)
def test_a_decision_on_a_finished_rollout_is_refused(clean: Any, manifests: Any, phase: str) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    assert clean.merge(rollout, {"status": {"phase": phase}}, subresource="status").status_code == 200
    answer = clean.merge(rollout, {"spec": {"decision": "Promote"}})
    assert answer.status_code == 422
    assert "this rollout is finished; a decision can no longer change it" in answer.json()["message"]


def test_a_decision_on_a_running_rollout_is_taken(clean: Any, manifests: Any) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    clean.merge(rollout, {"status": {"phase": "AwaitingPromotion"}}, subresource="status")
    assert clean.merge(rollout, {"spec": {"decision": "Abort"}}).status_code == 200
    assert clean.merge(rollout, {"status": {"phase": "Aborted"}}, subresource="status").status_code == 200


@pytest.mark.parametrize("phase", FINISHED)
def test_a_finished_rollout_never_starts_again(clean: Any, manifests: Any, phase: str) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    clean.merge(rollout, {"status": {"phase": phase}}, subresource="status")
    answer = clean.merge(rollout, {"status": {"phase": "Progressing"}}, subresource="status")
    assert answer.status_code == 422
    assert "this rollout is finished; its phase never changes again" in answer.json()["message"]
    assert clean.merge(rollout, {"status": {"message": "for the record"}}, subresource="status").status_code == 200


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ({"phase": "Dancing"}, 'Unsupported value: "Dancing"'),
        ({"weight": 101}, "should be less than or equal to 100"),
        ({"gates": [{"name": "accuracy", "state": "Maybe"}]}, 'Unsupported value: "Maybe"'),
        ({"gates": [{"state": "Clear"}]}, "name: Required value"),
        ({"startedAt": "yesterday"}, "must be of type date-time"),
    ],
    ids=str,
)
def test_a_rollouts_status_is_checked(clean: Any, manifests: Any, patch: dict[str, Any], sentence: str) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    answer = clean.merge(rollout, {"status": patch}, subresource="status")
    assert answer.status_code == 422
    assert sentence in answer.json()["message"]
