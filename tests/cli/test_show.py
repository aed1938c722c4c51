"""What people read: every state of a service, as the control loop left it, told in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text
from states import STATES  # type: ignore[import-not-found]

from offramp_cli.show import lines
from offramp_cli.show.diff import side_by_side
from offramp_cli.show.status import health_lines
from offramp_cli.show.tables import history_data, history_lines, top_data, top_lines
from offramp_cli.show.tree import get_data, get_lines
from offramp_cli.show.why import why_lines
from offramp_core.control.objects import (
    ArmTally,
    BothArms,
    Condition,
    ConfigStatus,
    GateStatus,
    ObservedFigures,
    RouteUse,
)
from offramp_core.control.rollouts.gates import GateInput, failures, slowness
from offramp_core.evidence.words import e_value
from offramp_core.reasons import ConditionType, Reason
from offramp_operator.explain import plans, words
from offramp_operator.explain.health import health, health_data
from offramp_operator.explain.why import readings, why_data
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web import pages
from offramp_operator.web.board import View
from offramp_operator.web.render import Renderer

InState = Callable[[str], Any]


def plain(found: list[Text]) -> str:
    return "\n".join(line.plain for line in found)


def why(in_state: InState, state: str) -> str:
    family, now = in_state(state)
    return plain(why_lines(family, family.newest, now))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_every_state_can_be_shown_to_people_and_to_machines(in_state: InState, state: str) -> None:
    family, now = in_state(state)
    for shown in (
        get_lines([family], now),
        get_lines([family], now, wide=True, namespaces=True),
        why_lines(family, family.newest, now),
        health_lines(family, now),
        history_lines(family, now, wide=True),
        top_lines([family], wide=True, namespaces=True),
    ):
        assert shown and all("\n" not in line.plain and line.plain == line.plain.rstrip() for line in shown)
    machine = (
        get_data([family]),
        why_data(family, family.newest, now),
        health_data(family),
        history_data(family),
        top_data([family]),
    )
    assert json.loads(json.dumps(machine, allow_nan=False))


def test_the_tree_hangs_the_canary_below_its_rollout_and_the_workers_below_their_count(in_state: InState) -> None:
    family, now = in_state("progressing")
    shown = plain(get_lines([family], now)).splitlines()
    assert shown[0].split() == ["NAME", "KIND", "STATUS", "AGE", "INFO"]
    kind = shown[0].index("KIND")
    assert [line[:kind].rstrip() for line in shown[1:]] == [
        "sim",
        f"├─ {family.stable.name}",
        "├─ sim-1",
        f"│  └─ {family.active.to_config}",
        "├─ tuning",
        "└─ workers",
        "   ├─ w0",
        "   └─ w1",
    ]
    assert "step 1/2 at 20%" in shown[3] and "audits disagreed" in shown[3]
    assert "Stable" in shown[2] and "exits off" in shown[2]
    assert "2 of 2 ready, 2 run the newest plan" in shown[6]


def test_a_tree_without_permission_to_list_pods_still_tells_how_many_are_ready(in_state: InState) -> None:
    family, now = in_state("promoted_once")
    shown = plain(get_lines([replace(family, workers=None)], now))
    assert "2 of 2 ready" in shown and "you may not list pods" in shown


def test_a_pinned_plan_that_costs_time_is_a_warning_with_its_next_step_and_degrades_nothing(in_state: InState) -> None:
    family, now = in_state("collecting")
    told = "its answers come later than with exits off; it is pinned, so it stays"
    costs = Condition(ConditionType.EXITS_COST_TIME, "True", Reason.MEASURED_BY_HOLDBACK, told, 1, now)
    status = replace(family.service.status, conditions=(*family.service.status.conditions, costs))
    family = replace(family, service=replace(family.service, status=status))
    (line,) = [line for line in health_lines(family, now) if line.plain.startswith("ExitsCostTime")]
    assert [str(span.style) for span in line.spans] == ["yellow"]
    assert f"next: {Reason.MEASURED_BY_HOLDBACK.next_step}" in plain(why_lines(family, None, now))
    assert health(family).verdict == "Healthy"
    page = pages.service(View(ServiceKey("default", "sim"), family, at=now), now, since=now)
    assert [c.tone for c in page.conditions if c.type == "ExitsCostTime"] == ["warning"]
    html = Renderer().service(page, fresh="")["state"]
    assert re.search(r'ExitsCostTime</th><td><span class="state state-warning">True</span>', html)


def generative(family: Any, **observed: Any) -> Any:
    """The family as that of a model that generates, whose first tokens are in time and whose others are not."""
    goals: dict[str, Any] = {"latency_seconds": None, "first_token_seconds": 2.0, "token_seconds": 0.05}
    spec = replace(family.service.spec, output="TokenF1", **goals)
    seen = ObservedFigures(p95="9.1s", first_token_p95="1.2s", per_token_p95="80ms", **observed)
    missed = [replace(c, status="False") for c in family.service.status.conditions if c.type == "LatencyObjectiveMet"]
    others = [c for c in family.service.status.conditions if c.type != "LatencyObjectiveMet"]
    status = replace(family.service.status, observed=seen, conditions=(*others, *missed))
    return replace(family, service=replace(family.service, spec=spec, status=status))


def test_times_of_generated_answers_are_told_beside_what_is_asked_of_each(in_state: InState) -> None:
    family, now = in_state("collecting")
    family = generative(family)
    told = plain(get_lines([family], now))
    assert "p95 9.1s, first token p95 1.2s, objective p95 2s, per token p95 80ms, objective p95 50ms" in told
    assert "2s to first token, 50ms per token" in plain(top_lines([family]))
    page = pages.service(View(ServiceKey("default", "sim"), family, at=now), now, since=now)
    goals = {time.name: time.goal for time in page.row.token_times}
    assert [goal.broken for goal in (page.row.latency, *goals.values())] == [False, False, True]
    assert goals["Time per token"].allowed == "≤ 50ms" and goals["Time per token"].used == pytest.approx(1.6)
    sections = Renderer().service(page, fresh="")
    assert "Time per token" in sections["head"] and "First token" in sections["head"]


def test_of_a_model_that_generates_people_read_of_variants_and_drafts_and_of_tokens_with_and_without(
    in_state: InState,
) -> None:
    family, now = in_state("collecting")
    assert "Leave early" in Renderer().service(_page(family, now), fresh="")["head"]
    uses = (RouteUse("fp32+int8:3", "90%", "48", "95%"), RouteUse("fp32", "10%", "31"))
    family = generative(family, tokens_per_second="46", model_tokens_per_second="31", routes=uses, exit_rate="40%")
    told = plain(get_lines([family], now))
    assert "46 tokens/s, 31 by the model alone" in told and "40% kept the first variant's answer" in told
    assert "leave early" not in told
    why = plain(why_lines(family, None, now))
    assert "sim is answered by the model itself" in why and "exits off" not in why.splitlines()[0]
    assert "  fp32+int8:3: 90% of tokens, 48 tokens/s, 95% of the draft's tokens accepted" in why
    assert "  fp32: 10% of tokens, 31 tokens/s" in why.splitlines()
    sections = Renderer().service(_page(family, now), fresh="")
    assert "31 by the model alone" in sections["head"] and "Leave early" not in sections["head"]
    assert "Variants and drafts" in sections["network"] and "fp32+int8:3" in sections["network"]
    assert "cheaper variants against the model alone" in sections["latency"]
    silent = Renderer().service(_page(generative(family), now), fresh="")
    assert "No worker has reported answers yet" in silent["network"]


def test_of_a_model_that_generates_nothing_speaks_of_exits(in_state: InState) -> None:
    family, now = in_state("promoted_once")
    classifier = plain(get_lines([family], now, wide=True)) + plain(why_lines(family, None, now))
    assert "exits off" in classifier
    family = generative(family, routes=(RouteUse("int4", "60%", "99"), RouteUse("fp32", "40%", "31")))
    alone = replace(family.stable.plan, ramps=())
    spec = family.service.spec
    assert plans.ramps(alone, spec) == spec.off == "the model alone"
    assert plans.ramps(replace(alone, precision="int8"), spec) == "int8"
    first = family.stable.plan.ramps[0]
    assert plans.ramps(replace(family.stable.plan, ramps=(first,)), spec).endswith(", then the model")
    status = replace(family.service.status, stable_config="")
    told = plain(get_lines([family], now, wide=True)) + plain(why_lines(family, None, now))
    told += plain(why_lines(replace(family, service=replace(family.service, status=status)), None, now))
    assert "exits off" not in told and "exits are off" not in told
    assert "drafts off: every token was written without one" in told
    drafted = generative(family, routes=(RouteUse("fp32+int8:3", "90%", "48", "95%"),))
    assert "drafts off" not in plain(why_lines(drafted, None, now))


def _page(family: Any, now: float) -> pages.ServicePage:
    return pages.service(View(ServiceKey("default", "sim"), family, at=now), now, since=now)


def test_wide_shows_finished_rollouts_and_every_plan(in_state: InState) -> None:
    family, now = in_state("rolled_back")
    assert "sim-2" not in plain(get_lines([family], now))
    wide = plain(get_lines([family], now, wide=True))
    assert "sim-2" in wide and all(name in wide for name in family.configs)


class TestWhy:
    def test_an_undecided_gate_says_what_it_has_seen_and_what_a_harmful_plan_would_need(
        self, in_state: InState
    ) -> None:
        family, _ = in_state("progressing")
        (gate,) = [g for g in family.newest.status.gates if g.name == "accuracy"]
        told = why(in_state, "progressing")
        assert f"{gate.k} of {gate.n} audits disagreed" in told and "budget 2%" in told
        assert f"{gate.n} of {gate.needed} audits with which a harmful plan would show itself" in told

    def test_an_undecided_gate_says_how_long_it_will_take_at_the_pace_of_its_step(self, in_state: InState) -> None:
        family, now = in_state("progressing")
        status = replace(
            family.newest.status,
            step_started_at=now - 60,
            gates=(GateStatus("accuracy", "Undecided", n=100, needed=400, message="100 of 400 audits", exposure=0.25),),
        )
        shown = plain(why_lines(family, replace(family.newest, status=status), now))
        assert "100 of 400 audits; about 3m more" in shown and " 25% " in shown

    def test_a_slowness_gate_that_was_cut_off_says_which_slowdown_is_not_excluded(self, in_state: InState) -> None:
        family, now = in_state("progressing")
        tally = BothArms(ArmTally(judged=500, slow=50), ArmTally(judged=1500, slow=150))
        gate = slowness(GateInput(tally, 25, 0.01, 0.99, 3, 2000, certified=True, slow_excluded=1.75))
        rollout = replace(
            family.newest, status=replace(family.newest.status, gates=(gate,), slow_needed=2000, slow_excluded=1.75)
        )
        told = "cap of 2,000 batches reached: 1.2 x slower is not excluded, 1.75 x is"
        assert told in " ".join(plain(why_lines(family, rollout, now)).split())
        assert told in readings(rollout, now)[0].meaning, "which the page shows as well"

    def test_a_rejected_gate_shows_evidence_past_its_limit(self, in_state: InState) -> None:
        family, _ = in_state("rolled_back")
        (gate,) = [g for g in family.newest.status.gates if g.name == "accuracy"]
        told = why(in_state, "rolled_back")
        row = next(line for line in told.splitlines() if line.strip().startswith("accuracy"))
        assert "Rejected" in row and e_value(gate.log_e_value) in row and " 20 " in row
        assert "the evidence of harm passed its limit" in row
        assert "Cooling down" in told and family.newest.to_config in told.partition("Cooling down")[2]

    def test_failures_at_weight_100_are_told_as_those_of_one_arm(self, in_state: InState) -> None:
        family, now = in_state("progressing")
        gate = failures(GateInput(BothArms(ArmTally(batches=900, failed=1)), 100, 0.01, 0.99, 1, 0, certified=True))
        shown = plain(
            why_lines(family, replace(family.newest, status=replace(family.newest.status, gates=(gate,))), now)
        )
        assert "1 of 900 batches failed" in shown and "what a model may fail, 0.1%" in shown

    def test_an_uncertified_pin_must_earn_acceptance(self, in_state: InState) -> None:
        told = why(in_state, "pin_in_canary")
        assert "uncertified: its e-value must reach the limit" in told and "Pin\n  being judged" in told

    def test_a_rejected_pin_is_told_with_its_figures(self, in_state: InState) -> None:
        told = why(in_state, "pin_rejected")
        assert "serves with exits off, because the pin is Rejected: on 300 recorded requests" in told
        assert "Stalled is True (PinRejected)" in told

    def test_without_a_certificate_it_says_how_many_labels_are_missing_and_for_how_long(
        self, in_state: InState
    ) -> None:
        told = why(in_state, "collecting")
        assert "exits off, because nothing is certified yet" in told
        assert "CollectingLabels: 200 of 500 labels; less than a minute more at today's traffic" in told

    def test_no_labels_at_all_means_no_traffic(self, in_state: InState) -> None:
        family, now = in_state("collecting")
        status = replace(family.service.status, tuning=replace(family.service.status.tuning, labels=0))
        silent = replace(family, service=replace(family.service, status=status))
        assert "no traffic, no labels" in plain(why_lines(silent, None, now))

    def test_a_served_plan_is_told_with_its_certificate_and_the_next_attempt(self, in_state: InState) -> None:
        told = why(in_state, "promoted_once")
        assert "certified for 2%:" in told and "answers differed" in told and "predicted to save" in told
        assert "next attempt in 59m; `offramp tune sim --now` does not wait for it" in told

    def test_a_recommendation_names_the_command_that_approves_it(self, in_state: InState) -> None:
        assert "waits for approval: `offramp approve sim`" in why(in_state, "recommended")

    def test_disabled_exits_are_told_as_the_users_own_choice(self, in_state: InState) -> None:
        assert "exits off, because spec.ramps.mode is Disabled" in why(in_state, "disabled")

    def test_a_request_that_is_not_answered_yet_is_told(self, in_state: InState) -> None:
        family, now = in_state("promoted_once")
        asked = replace(family, service=replace(family.service, request="tune/now"))
        assert "asked by annotation and not answered yet: tune/now" in plain(why_lines(asked, None, now))


class TestHealth:
    @pytest.mark.parametrize(
        ("state", "verdict", "final"),
        [
            ("promoted_once", "Healthy", False),
            ("progressing", "Healthy", False),
            ("disabled", "Healthy", False),
            ("starting", "Progressing", False),
            ("pin_in_canary", "Progressing", False),
            ("pin_rejected", "Degraded", True),
        ],
    )
    def test_of_a_state(self, in_state: InState, state: str, verdict: str, final: bool) -> None:
        found = health(in_state(state)[0])
        assert (found.verdict, found.final) == (verdict, final), found.message

    def test_a_generation_that_nobody_has_seen_is_not_healthy_yet(self, in_state: InState) -> None:
        family, _ = in_state("promoted_once")
        edited = replace(family, service=replace(family.service, generation=9))
        assert health(edited).verdict == "Progressing" and "does the operator run" in health(edited).message

    def test_a_broken_promise_degrades(self, in_state: InState) -> None:
        family, _ = in_state("promoted_once")
        conditions = tuple(
            replace(c, status="False", message="budget 2%") if c.type == "AccuracyWithinBudget" else c
            for c in family.service.status.conditions
        )
        status = replace(family.service.status, conditions=conditions)
        found = health(replace(family, service=replace(family.service, status=status)))
        assert found.verdict == "Degraded" and "AccuracyWithinBudget is False: budget 2%" in found.message

    def test_an_embedded_shell_that_does_not_run_degrades(self, in_state: InState) -> None:
        family, _ = in_state("promoted_once")
        assert health(replace(family, note="does not run")).verdict == "Degraded"


class TestDiff:
    def test_thresholds_stand_side_by_side_and_a_ramp_that_one_lacks_is_a_dash(self, in_state: InState) -> None:
        family, _ = in_state("progressing")
        shown = plain(side_by_side(family.stable, family.candidate)).splitlines()
        first = family.candidate.plan.ramps[0]
        assert shown[1].split() == ["≠", "ramp", first.id, "-", str(first.threshold)]

    def test_a_plan_equals_itself(self, in_state: InState) -> None:
        family, _ = in_state("promoted_once")
        assert not any(row.differs for row in plans.compare(family.stable, family.stable))

    def test_a_plan_without_ramps_at_int8_is_not_exits_off(self, in_state: InState) -> None:
        family, _ = in_state("promoted_once")
        assert plans.ramps(replace(family.stable.plan, ramps=(), precision="int8"), family.service.spec) == "int8"
        assert plans.ramps(replace(family.stable.plan, ramps=()), family.service.spec) == "exits off"

    def test_a_certificate_earned_in_the_canary_says_so(self, in_state: InState) -> None:
        family, _ = in_state("promoted_once")
        earned = ConfigStatus("Pinned", "Stable", ({"method": "canary-acceptance", "budget": 0.02, "n": 900, "k": 3},))
        assert (
            plans.certificate(replace(family.stable, status=earned))
            == "certified for 2%: 3 of 900 answers differed (earned in its canary)"
        )


def test_history_is_newest_first_and_empty_history_says_where_to_look(in_state: InState) -> None:
    family, now = in_state("rolled_back")
    shown = plain(history_lines(family, now)).splitlines()
    assert [line.split()[0] for line in shown] == ["NAME", "sim-2", "sim-1"]
    assert "RolledBack" in shown[1] and "AccuracyRejected" in shown[1] and "Succeeded" in shown[2]
    none, now = in_state("disabled")
    assert "offramp why sim" in plain(history_lines(none, now))


def test_rollouts_of_one_second_are_ordered_by_their_number(in_state: InState) -> None:
    from offramp_operator.explain.family import family as parse

    family, _ = in_state("rolled_back")
    twelve = json.loads(json.dumps(family.manifests["rollouts"][0]))
    twelve["metadata"] |= {
        "name": "sim-12",
        "creationTimestamp": family.manifests["rollouts"][1]["metadata"]["creationTimestamp"],
    }
    again = parse(family.manifests["service"], configs=[], rollouts=[twelve, *family.manifests["rollouts"]])
    assert [r.name for r in again.rollouts] == ["sim-1", "sim-2", "sim-12"]


def test_objects_of_an_earlier_service_of_that_name_do_not_count(in_state: InState) -> None:
    from offramp_operator.explain.family import family as parse

    family, _ = in_state("rolled_back")
    stranger = json.loads(json.dumps(family.manifests["configs"][0]))
    stranger["metadata"]["ownerReferences"][0]["uid"] = "older"
    again = parse(family.manifests["service"], configs=[stranger], rollouts=[])
    assert again.configs == {}


@pytest.mark.parametrize(
    ("log_value", "text"),
    [(0.0, "1"), (-3.0, "0.05"), (2.9957, "20"), (6.3969, "600"), (15.0, "10^7"), (5000.0, "10^2171"), (-900.0, "0")],
)
def test_e_values_read_well_and_never_overflow(log_value: float, text: str) -> None:
    assert e_value(log_value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (45, "45s"),
        (119, "119s"),
        (120, "2m"),
        (7140, "119m"),
        (7200, "2h"),
        (12_000, "3h20m"),
        (400_000, "4d"),
    ],
)
def test_durations_read_like_kubectls(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0, "0%"), (0.01, "1%"), (0.0037, "0.37%"), (1.0, "100%"), (0.00001, "0%")]
)
def test_shares_have_two_decimals_at_most(fraction: float, text: str) -> None:
    assert words.share(fraction) == text


def test_columns_are_as_wide_as_their_widest_cell_and_wide_characters_of_colours_do_not_count() -> None:
    shown = lines.columns([["a", lines.state("Ready"), "x"], ["longer", "No", ""]])
    assert [line.plain for line in shown] == ["a        Ready   x", "longer   No"]


def test_a_service_at_zero_is_as_asked_and_a_forecast_degrades_nothing(in_state: InState) -> None:
    family, _ = in_state("promoted_once")
    conditions = {c.type: c for c in family.service.status.conditions}

    def told(kind: str, holds: Any, reason: str) -> str:
        changed = conditions | {kind: replace(conditions[kind], status=holds, reason=reason)}
        status = replace(family.service.status, conditions=tuple(changed.values()))
        return health(replace(family, service=replace(family.service, status=status))).verdict

    assert told("NoExitCapacity", "True", "Sufficient") == "Healthy"
    assert told("NoExitCapacity", "False", "ExitsOffWouldOverload") == "Healthy"
    assert told("LatencyObjectiveMet", "False", "ObjectiveMissed") == "Degraded"
    assert told("Ready", "False", "ScaledToZero") == "Healthy"
    assert told("Ready", "False", "Starting") == "Progressing"
    assert told("Ready", "False", "ErrImagePull") == "Degraded"
