"""Savings as people read them: what was predicted, what traffic makes of it, and what was measured against the
holdback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text

from offramp_cli.show.status import health_lines
from offramp_cli.show.tables import top_data, top_lines
from offramp_cli.show.tree import get_lines
from offramp_cli.show.why import why_lines
from offramp_core.control.objects import Condition, Measured, Prediction, RampUse, Saving
from offramp_operator.explain.family import Family
from offramp_operator.explain.health import health_data
from offramp_operator.explain.progress import figures
from offramp_operator.explain.savings import sentences
from offramp_operator.explain.why import why_data

InState = Callable[[str], Any]


def plain(found: list[Text]) -> str:
    return "\n".join(line.plain for line in found)


def with_figures(family: Family, **figures: Any) -> Family:
    status = family.service.status
    measured = replace(status.measured, **figures)
    return replace(family, service=replace(family.service, status=replace(status, measured=measured)))


@pytest.mark.slow
def test_predicted_expected_and_measured_savings_stand_beside_each_other(in_state: InState) -> None:
    family, now = in_state("measured")
    told = sentences(family)
    seen = family.service.status.measured
    assert [line.split()[0] for line in told[:4]] == ["predicted", "expected", "measured", "measured"]
    assert f"{seen.batches:,} batches, {seen.held_back:,} of them held back" in told[2]
    assert "holds at all times with 99%" in told[2]
    assert len(told) == 4 + len(family.stable.plan.ramps)
    for shown in (
        why_lines(family, family.newest, now),
        health_lines(family, now),
        get_lines([family], now, wide=True),
    ):
        assert all(line in plain(shown) for line in told)


@pytest.mark.slow
def test_one_line_and_one_column_tell_what_was_measured(in_state: InState) -> None:
    family, now = in_state("measured")
    shown = with_figures(family, answer_time=Saving(0.22, 0.181, 0.25))
    assert "measured 22% (18.1% to 25%)" in plain(get_lines([shown], now)) or shown.service.status.phase != "Ready"
    assert "22% (18.1% to 25%)" in plain(top_lines([shown]))
    assert "MEASURED" in plain(top_lines([shown]))


def test_a_ramp_that_costs_more_than_it_saves_is_told(in_state: InState) -> None:
    family, _ = in_state("measured")
    shown = with_figures(family, ramps=(RampUse("r00-grid", 0.0012, -9.5e-5, pays=False),))
    assert sentences(shown)[-1] == "r00-grid: 0.12% leave, -95 us per request; it costs more than it saves"


def test_before_enough_was_held_back_it_says_how_much_there_is(in_state: InState) -> None:
    family, _ = in_state("measured")
    assert (
        "nothing yet: 3 batches held back so far, 20% of all"
        in sentences(with_figures(family, answer_time=None, held_back=3))[2]
    )
    assert "nothing: ramps.holdback is 0" in sentences(with_figures(family, holdback_share=0.0))[2]


def test_exits_off_saves_nothing_and_says_nothing(in_state: InState) -> None:
    family, _ = in_state("progressing")
    assert sentences(family) == []


def test_machines_get_the_figures_without_the_counters_of_workers(in_state: InState) -> None:
    family, now = in_state("measured")
    for data in (why_data(family, None, now), health_data(family), top_data([family])["services"][0]):
        assert set(data["savings"]) >= {"batches", "heldBack", "answerTime", "engineTime", "ramps"}
        assert "live" not in data["savings"]
        assert set(data["savings"]["answerTime"]) == {"share", "low", "high"}


def test_a_pin_that_costs_time_is_among_what_is_not_as_it_should_be(in_state: InState) -> None:
    family, now = in_state("measured")
    condition = Condition("ExitsCostTime", "True", "MeasuredByHoldback", "its answers come later than with exits off")
    status = replace(family.service.status, conditions=(*family.service.status.conditions, condition))
    shown = plain(why_lines(replace(family, service=replace(family.service, status=status)), None, now))
    assert "ExitsCostTime is True (MeasuredByHoldback): its answers come later" in shown


def test_no_figures_are_shown_of_a_plan_that_was_just_promoted(in_state: InState) -> None:
    family, _ = in_state("measured")
    status = replace(family.service.status, measured=Measured())
    told = sentences(replace(family, service=replace(family.service, status=status)))
    assert [line.split()[0] for line in told] == ["predicted", "expected"]


def test_what_audits_cost_is_told_beside_what_is_left_of_the_saving(in_state: InState) -> None:
    family, now = in_state("measured")
    shown = with_figures(family, audits=0.031)
    status = shown.service.status
    observed = replace(status.observed, savings="24%", audits="3%")
    stable = replace(shown.stable, status=replace(shown.stable.status, prediction=Prediction(0.3, 0.004, audits=0.036)))
    configs = {**shown.configs, stable.name: stable}
    shown = replace(shown, configs=configs, service=replace(shown.service, status=replace(status, observed=observed)))
    told = "\n".join(sentences(shown))
    assert "predicted 26.4% (30% without audits) of the model's time" in told
    assert "expected  24%, by who leaves where and the profile's seconds, less 3% for audits" in told
    assert "of the engine's time, without audits, which take 3.1%" in told
    assert "saves 24% (audits take 3%)" in figures(shown)
    assert "of requests (quiet); they took 3.1% of the model's time under this plan" in plain(
        why_lines(shown, None, now)
    )
    assert health_data(shown)["savings"]["audits"] == 0.031


def test_what_workers_of_before_do_not_tell_is_said_to_be_missing(in_state: InState) -> None:
    family, _ = in_state("measured")
    status = family.service.status
    observed = replace(status.observed, savings="24%", audits="")
    shown = with_figures(family, audits=None)
    shown = replace(shown, service=replace(shown.service, status=replace(shown.service.status, observed=observed)))
    told = "\n".join(sentences(shown))
    assert "expected  24%, by who leaves where and the profile's seconds, without audits" in told
    assert "which take" not in told and "saves 24%," in figures(shown)
