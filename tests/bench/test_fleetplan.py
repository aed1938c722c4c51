"""The bench of the fleet planner: what is judged, and that its page says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.fleetplan.forecasts import remembered
from bench.fleetplan.judged import ahead, verdicts
from bench.fleetplan.narrow import one_for_each_pool
from bench.fleetplan.replays import shown_by_certificate
from bench.fleetplan.runs import BEST_SINGLE, INFAAS, LARGEST, OURS, PROTEUS, policies, with_certificates
from bench.fleetplan.scenes import BOLD, BUDGET, MINILM, RESNET, Scene, menu, minutes_task, pools
from bench.report.fleetplan import goals, section
from bench.report.results import MISSING, Results

from offramp_core.fleet import Service, usual_rate
from offramp_lab.fleet import Counts, Task, simulate


def row(policy: str, cost: float, missed: float) -> dict[str, Any]:
    series = {part: [1.0, 2.0] for part in ("cost", "missed", "disagreement", "rate")}
    return {
        "policy": policy,
        "said": policy,
        "cost": cost,
        "missed": missed,
        "disagreement": 0.004,
        "kept": True,
        "workers": 3.0,
        "series": series,
    }


def test_a_policy_is_beaten_in_both_in_one_or_in_nothing() -> None:
    ours = row(OURS, 1.0, 0.004)
    assert ahead(ours, row(INFAAS, 1.5, 0.02)) == "both"
    assert ahead(ours, row(INFAAS, 0.9, 0.02)) == "misses only"
    assert ahead(ours, row(INFAAS, 1.5, 0.001)) == "cost only"
    assert ahead(ours, row(INFAAS, 0.9, 0.001)) == "neither"


def test_a_single_variant_that_misses_too_much_is_no_rival_in_cost() -> None:
    rows = [row(OURS, 1.0, 0.004), row(LARGEST, 2.0, 0.004), row(BEST_SINGLE, 0.8, 0.05)]
    assert all(verdicts(rows).values())
    assert not all(verdicts([*rows[:2], row(BEST_SINGLE, 0.8, 0.005)]).values())
    assert not all(verdicts([row(OURS, 1.5, 0.004), rows[1]]).values())


def minilm(*, counts: Counts, past: Counts) -> Task:
    """A service whose requests of each second are given."""
    return Task(
        name="one",
        latency_seconds=MINILM.latency_seconds,
        max_disagreement=BUDGET,
        menu=menu(MINILM),
        counts=counts,
        past=past,
    )


def test_a_certificate_is_a_test_at_its_part_of_the_allowance_and_no_share() -> None:
    assert shown_by_certificate(10, 4000, 4) == 10 / 4000
    assert shown_by_certificate(38, 4000, 4) == 1.0


def test_what_was_recorded_by_the_minute_is_asked_in_its_minutes_alone() -> None:
    times = np.array([3.0, 30.0, 130.0])  # two in the first minute, none in the second, one in the third
    counts = minutes_task(RESNET, "one", times, rate=300.0, seconds=240, seed=0).counts.reshape(4, 60)
    assert counts[:2].mean(axis=1) == pytest.approx([400.0, 0.0], rel=0.02)
    assert counts[2:].mean(axis=1) == pytest.approx([200.0, 0.0], rel=0.02)


def test_of_single_variants_those_that_pay_least_for_an_answer_are_played_first() -> None:
    scene = with_certificates(Scene((minilm(counts=np.full(60, 300), past=np.full(150, 300)),), pools(1.0)))
    single = [policy.name for name, policy in policies(scene) if name == BEST_SINGLE]
    assert single[:3] == ["int8-exits on core", "int8 on core", "exits on core"]


@pytest.mark.slow
def test_every_plan_of_the_menu_is_faster_in_larger_batches_and_the_bold_one_is_never_certified() -> None:
    task = minilm(counts=np.full(60, 300), past=np.full(150, 300))
    for plan in MINILM.plans:
        for pool in ("core", "quad", "gpu"):
            rates = [m.column.worker_rate for m in task.menu if (m.column.key.plan, m.column.key.pool) == (plan, pool)]
            assert rates[0] < rates[-1]
    scene = with_certificates(Scene((task,), pools(1.0)))
    assert {m.column.key.plan for m in scene.tasks[0].menu if m.column.certified_disagreement > BUDGET} == {BOLD}
    for name, policy in policies(scene):
        if name in (OURS, INFAAS, PROTEUS):
            assert simulate(scene.tasks, scene.pools, policy).keeps_budgets(scene.tasks)


def test_the_page_has_each_scene_and_says_what_is_missing(tmp_path: Path) -> None:
    measured = {"when": "today", "commit": "abc", "processor": "one"}
    rows = [row(OURS, 1.0, 0.004), row(LARGEST, 2.0, 0.004), row(INFAAS, 0.9, 0.02)]
    found = {"scenes": {"twitter": {"rows": rows, "hours": 1.0, "measured": measured}}}
    (tmp_path / "fleetplan.json").write_text(json.dumps(found))
    results = Results(tmp_path)
    page = "\n".join(section(results, {"fleetplan-twitter": "images/bench/fleetplan-twitter.png"}))
    assert "| INFaaS | 0.45 | 2.00 % | 0.40 % | kept | 3.0 | misses only |" in page
    assert "images/bench/fleetplan-twitter.png" in page
    marks = {goal.target.rpartition(": ")[2]: goal for goal in goals(results)}
    assert marks["twitter"].met is True
    assert marks["fleet"].measured == MISSING


def test_noise_is_told_fleet_by_fleet(tmp_path: Path) -> None:
    measured = {"when": "today", "commit": "abc", "processor": "one"}
    found = {"noise": {"services": 200, "changed": [0, 2, 0, 0], "measured": measured}}
    (tmp_path / "fleetplan.json").write_text(json.dumps(found))
    goal = next(goal for goal in goals(Results(tmp_path)) if "noise" in goal.target)
    assert (goal.met, goal.measured) == (False, "of 200 services none in 3 of 4 fleets, 2 at most; 0.250 % of all")


def test_the_operators_rule_has_one_batch_size_for_each_pool_and_less_of_its_rate() -> None:
    scene = with_certificates(Scene((minilm(counts=np.full(60, 300), past=np.full(150, 300)),), pools(1.0)))
    task, rates = scene.tasks[0], {m.column.key: m.column.worker_rate for m in scene.tasks[0].menu}
    service = Service(
        name="one",
        rate=1.0,
        predicted_rate=1.0,
        arrival_variation=1.0,
        latency_seconds=task.latency_seconds,
        max_disagreement=BUDGET,
        columns=tuple(m.column for m in task.menu),
    )
    columns = list(one_for_each_pool(service, "int8-exits"))
    assert [(c.key.pool, c.key.batch_size) for c in columns] == [("core", 1), ("quad", 4), ("gpu", 16)]
    assert all(0.1 * rates[c.key] <= c.worker_rate <= 0.8 * rates[c.key] + 1e-9 for c in columns)


def test_without_results_all_of_it_is_missing(tmp_path: Path) -> None:
    assert all(goal.met is None for goal in goals(Results(tmp_path)))


def test_what_an_operator_remembers_of_a_trace_is_what_came_at_that_time() -> None:
    past = np.full(3 * 86_400, 20)
    past.reshape(3, 86_400)[:, :60] = 900  # a minute of each day, in which the trace begins as well
    task = minilm(counts=np.full(60, 20), past=past)
    usual = [usual_rate(remembered(task), now=now, lead_seconds=30.0) for now in (0.0, 43_200.0)]
    assert usual[0].rate > 500.0 and usual[1].rate < 25.0
