"""What a person may decide in which state, and the reasons against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offramp_cli.daytwo import decisions
from offramp_cli.daytwo.pins import pin_patch
from offramp_cli.source.source import RefusedError
from offramp_core.control.codec import parse_time
from offramp_core.control.objects import GateStatus, ModelSource, VersionStatus
from offramp_core.control.spec import SideBySide, parse_spec
from offramp_core.control.workers.versions import on_trial
from offramp_operator.explain.family import Family
from offramp_operator.explain.version import version_data, version_facts

InState = Callable[[str], Any]
NOON = parse_time("2026-11-21T12:00:00Z")


def refused(decide: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(RefusedError) as error:
        decide(*arguments)
    return str(error.value)


def of(in_state: InState, state: str) -> tuple[Any, Any]:
    family, _ = in_state(state)
    return family, family.newest


def test_a_canary_that_waits_for_promotion_can_be_promoted(in_state: InState) -> None:
    assert decisions.promote(*of(in_state, "awaiting")).spec == {"decision": "Promote"}


def test_an_uncertified_plan_that_has_not_earned_acceptance_is_not_promoted(in_state: InState) -> None:
    told = refused(decisions.promote, *of(in_state, "pin_in_canary"))
    assert "not certified and has not earned acceptance" in told and "audits disagreed" in told


def test_a_promotion_before_every_step_passed_is_refused_as_it_would_take_abort_away(in_state: InState) -> None:
    told = refused(decisions.promote, *of(in_state, "progressing"))
    assert "step 1 of 2 at 20%" in told and "promotion is Automatic" in told


@pytest.mark.parametrize("decide", [decisions.promote, decisions.abort, decisions.pause, decisions.resume])
@pytest.mark.parametrize("state", ["rolled_back", "promoted_once"])
def test_a_finished_rollout_takes_no_decision(in_state: InState, state: str, decide: Callable[..., Any]) -> None:
    told = refused(decide, *of(in_state, state))
    assert "is finished" in told and f"nothing left to {decide.__name__}" in told


@pytest.mark.parametrize("decide", [decisions.promote, decisions.pause, decisions.resume])
def test_abort_is_final(in_state: InState, decide: Callable[..., Any]) -> None:
    family, rollout = of(in_state, "awaiting")
    assert "set to abort, and that is final" in refused(decide, family, replace(rollout, decision="Abort"))


def test_a_promotion_may_still_be_aborted(in_state: InState) -> None:
    family, rollout = of(in_state, "awaiting")
    promoting = replace(rollout, decision="Promote", status=replace(rollout.status, phase="Promoting"))
    assert decisions.abort(family, promoting).spec == {"decision": "Abort"}
    ending = replace(promoting, status=replace(rollout.status, phase="RollingBack"))
    assert "too late to abort" in refused(decisions.abort, family, ending)


@pytest.mark.parametrize(("decide", "decision"), [(decisions.promote, "Promote"), (decisions.abort, "Abort")])
def test_deciding_the_same_twice_changes_nothing(in_state: InState, decide: Callable[..., Any], decision: str) -> None:
    family, rollout = of(in_state, "awaiting")
    assert decide(family, replace(rollout, decision=decision)).spec == {}


def test_pausing_and_resuming_are_idempotent(in_state: InState) -> None:
    family, rollout = of(in_state, "progressing")
    paused = replace(rollout, paused=True)
    assert decisions.pause(family, rollout).spec == {"paused": True}
    assert decisions.pause(family, paused).spec == {}
    assert decisions.resume(family, paused).spec == {"paused": False}
    assert decisions.resume(family, rollout).spec == {}


def test_a_rollout_held_by_the_spec_is_not_resumed_here(in_state: InState) -> None:
    family, rollout = of(in_state, "progressing")
    held = replace(family, service=replace(family.service, spec=replace(family.service.spec, suspend=True)))
    assert "spec.suspend" in refused(decisions.resume, held, rollout)


class TestApprove:
    def test_approving_is_to_promote_the_rollout_that_waits_for_it(self, in_state: InState) -> None:
        family, rollout = of(in_state, "recommended")
        change = decisions.approve(family, rollout)
        assert change.spec == {"decision": "Promote"} and f"{rollout.to_config} is approved" in change.message
        assert decisions.approve(family, replace(rollout, decision="Promote")).spec == {}

    @pytest.mark.parametrize("state", ["promoted_once", "progressing", "pin_in_canary"])
    def test_no_other_mode_waits_for_approval(self, in_state: InState, state: str) -> None:
        assert "only Recommend waits for approval" in refused(decisions.approve, *of(in_state, state))

    def test_without_a_recommendation_it_says_what_the_tuner_does(self, in_state: InState) -> None:
        family, rollout = of(in_state, "recommended")
        over = replace(rollout, status=replace(rollout.status, phase="Superseded"))
        assert "has no recommendation yet: Recommended" in refused(decisions.approve, family, over)

    def test_a_canary_that_runs_already_does_not_wait(self, in_state: InState) -> None:
        family, rollout = of(in_state, "recommended")
        begun = replace(rollout, status=replace(rollout.status, phase="Progressing", weight=20))
        assert "does not wait for approval" in refused(decisions.approve, family, begun)


class TestTune:
    def test_a_request_carries_its_time_so_that_the_next_is_another(self, in_state: InState) -> None:
        family, now = in_state("promoted_once")
        first, told = decisions.tune(family, now)
        assert first.startswith("tune/1970-") and decisions.tune(family, now + 1)[0] != first
        assert told == "sim looks for a better plan now"

    def test_too_few_labels_are_told_and_a_rollout_under_way_comes_first(self, in_state: InState) -> None:
        assert "200 of 500 labels" in decisions.tune(*in_state("collecting"))[1]
        assert "as soon as sim-1 is over" in decisions.tune(*in_state("progressing"))[1]

    @pytest.mark.parametrize("state", ["disabled", "pin_rejected"])
    def test_modes_that_do_not_tune_refuse(self, in_state: InState, state: str) -> None:
        assert "only Auto and Recommend tune" in refused(decisions.tune, *in_state(state))


def test_an_exported_plan_is_a_pin_that_the_parser_reads_as_the_same_plan(in_state: InState) -> None:
    family, _ = in_state("promoted_once")
    spec = family.manifests["service"]["spec"]
    read = parse_spec({**spec, **pin_patch(family.stable.plan)["spec"]}).pin
    plan = family.stable.plan
    assert read is not None
    assert (read.ramps, read.ramp_set_digest, read.precision) == (plan.ramps, plan.ramp_set_digest, plan.precision)


# --- a version on trial ----------------------------------------------------------------------------


def trying(family: Family, phase: Any) -> Family:
    """The same service while it tries a model beside the one that serves."""
    service = family.service
    policy = replace(service.spec.update_policy, side_by_side=SideBySide(promotion="Manual"))
    gate = GateStatus(
        "objective", "Clear" if phase == "AwaitingPromotion" else "Undecided", 3, 0, message="0 of 3 late"
    )
    version = VersionStatus(ModelSource("oci://m:1"), ModelSource("oci://m:2"), phase, "Surge", gates=(gate,))
    spec = replace(service.spec, model_uri="oci://m:2", update_policy=policy)
    return replace(family, service=replace(service, spec=spec, status=replace(service.status, version=version)))


def test_a_version_that_has_passed_is_promoted_by_a_request(in_state: InState) -> None:
    family = trying(in_state("awaiting")[0], "AwaitingPromotion")
    assert on_trial(family.service)
    request, told = decisions.promote_version(family, NOON)
    assert request == "promote/2026-11-21T12:00:00.000000Z" and "oci://m:2 is promoted" in told


def test_a_version_that_has_not_passed_is_not_promoted(in_state: InState) -> None:
    family = trying(in_state("awaiting")[0], "Comparing")
    with pytest.raises(RefusedError, match=r"0 of 3 late.*never overrules a gate"):
        decisions.promote_version(family, NOON)
    with pytest.raises(RefusedError, match="being promoted already"):
        decisions.promote_version(trying(family, "Promoting"), NOON)


@pytest.mark.parametrize("phase", ["Starting", "Comparing", "AwaitingPromotion", "Promoting"])
def test_a_version_may_be_aborted_until_all_have_followed(in_state: InState, phase: str) -> None:
    request, told = decisions.abort_version(trying(in_state("awaiting")[0], phase), NOON)
    assert request.startswith("abort/") and "oci://m:1 goes on serving" in told


def test_a_rejected_version_leaves_decisions_to_rollouts(in_state: InState) -> None:
    assert not on_trial(trying(in_state("awaiting")[0], "Rejected").service)
    assert not on_trial(in_state("awaiting")[0].service)


def test_why_says_what_is_held_against_a_version(in_state: InState) -> None:
    family = trying(in_state("awaiting")[0], "Comparing")
    assert version_facts(family, NOON)[0] == "oci://m:2 beside oci://m:1: Comparing"
    assert "0 of 3 late" in version_facts(family, NOON)[-1]
    assert (version_data(family) or {})["gates"][0]["name"] == "objective"
    assert version_facts(in_state("awaiting")[0], NOON) == [] and version_data(in_state("awaiting")[0]) is None
