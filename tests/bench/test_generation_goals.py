"""Targets of models that generate say what was measured and whether that is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.report.generation import goals
from bench.report.results import Results

LOADS = [{"at_once": n, "ratio": 1.0, "again": {"ratio": 1.0}} for n in (1, 2, 4, 8)]
CALM = {
    "off_after": 12,
    "served": "fp32+int8:2",
    "serves": "fp32",
    "ratio": 1.1,
    "content": "noise",
    "costs": {"noise": 1.4},
}


def _marks(tmp_path: Path, found: dict[str, Any]) -> dict[str, tuple[str, bool | None]]:
    (tmp_path / "generate.json").write_text(json.dumps(found))
    return {goal.target: (goal.measured, goal.met) for goal in goals(Results(tmp_path))}


def _one(tmp_path: Path, found: dict[str, Any], words: str) -> tuple[str, bool | None]:
    (row,) = [row for target, row in _marks(tmp_path, found).items() if words in target]
    return row


def test_what_was_not_measured_is_neither_met_nor_missed(tmp_path: Path) -> None:
    assert {met for _, met in _marks(tmp_path, {}).values()} == {None}


@pytest.mark.parametrize(("different", "requests", "met"), [(0, 500, True), (1, 500, False), (0, 499, False)])
def test_one_answer_that_differs_or_too_few_answers_miss_equality(
    tmp_path: Path, different: int, requests: int, met: bool
) -> None:
    run = {"requests": requests, "different": different, "ties": 2}
    assert _one(tmp_path, {"equality": {"smollm2/gsm8k": run}}, "smollm2/gsm8k")[1] is met


def test_the_best_draft_counts_and_a_variant_that_loses_answers_does_not(tmp_path: Path) -> None:
    routes = {"fp32": 1.0, "int4": 0.3, "fp32+int8:4": 0.7, "fp32+ngram:2": 0.9}
    run = {"routes": {name: {"ratio": ratio} for name, ratio in routes.items()}}
    assert _one(tmp_path, {"speed": {"smollm2/gsm8k/1": run}}, "lossless") == ("fp32+int8:4: 0.70", True)
    run["routes"]["fp32+int8:4"]["ratio"] = 0.73
    assert _one(tmp_path, {"speed": {"smollm2/gsm8k/1": run}}, "lossless")[1] is False


def test_one_load_at_which_choosing_costs_more_is_enough_to_miss(tmp_path: Path) -> None:
    run = {"loads": LOADS, "hostile": CALM}
    assert _one(tmp_path, {"auto": {"smollm2": run}}, "SmolLM2, drafts chosen")[1] is True
    worse = run | {"loads": [*LOADS[:3], {"at_once": 8, "ratio": 1.021, "again": {"ratio": 1.0}}]}
    assert _one(tmp_path, {"auto": {"smollm2": worse}}, "SmolLM2, drafts chosen")[1] is False


@pytest.mark.parametrize(
    ("low", "high", "met"), [(0.98, 1.01, True), (1.021, 1.06, False), (0.99, 1.03, None)], ids=str
)
def test_a_ratio_whose_interval_has_the_bound_inside_is_neither_met_nor_missed(
    tmp_path: Path, low: float, high: float, met: bool | None
) -> None:
    load = {"at_once": 1, "ratio": 1.0, "low": low, "high": high, "again": {"ratio": 1.0, "low": 0.99, "high": 1.03}}
    run = {"loads": [load], "hostile": CALM}
    measured, found = _one(tmp_path, {"auto": {"stories": run}}, "stories260K, drafts chosen")
    assert found is met and "no draft against itself is known to within 0.020" in measured
    behind = {"ratio": 1.03, "low": low + 0.03, "high": high + 0.03}
    row = {"class": "prose", "against": behind, "each": [0.99, 1.01, 1.04]}
    run = {"classes": [row], "learned": 600}
    measured, found = _one(tmp_path, {"mixed": {"stories": run}}, "stories260K, prose and code")
    assert found is met and "median 1.010, worst 1.040 of 3" in measured


@pytest.mark.parametrize(
    ("off_after", "ratio", "met"), [(50, 1.2, True), (51, 1.2, False), (None, 0.6, True), (None, 1.03, False)]
)
def test_a_draft_that_stays_must_pay(tmp_path: Path, off_after: int | None, ratio: float, met: bool) -> None:
    run = {"loads": LOADS, "hostile": CALM | {"off_after": off_after, "ratio": ratio}}
    assert _one(tmp_path, {"auto": {"smollm2": run}}, "SmolLM2: no draft that costs")[1] is met


def test_where_no_draft_ever_served_nothing_is_said_of_how_soon_it_ends(tmp_path: Path) -> None:
    run = {"loads": LOADS, "hostile": CALM | {"served": "fp32", "off_after": None, "ratio": 0.9, "calm": 128}}
    assert _one(tmp_path, {"auto": {"smollm2": run}}, "SmolLM2: no draft that costs")[1] is None


def test_eleven_broken_budgets_of_two_hundred_are_too_many(tmp_path: Path) -> None:
    row = {"output": "TokenF1", "draws": 200, "certified": 150, "time": 0.4, "answer_time": 0.8, "usual_plan": "int8"}
    for broken, met in ((10, True), (11, False)):
        run = {"rows": [row | {"budget": 0.05, "broken": 1}, row | {"budget": 0.1, "broken": broken}]}
        found = {"lossy": {"smollm2/sst2": run}}
        assert _one(tmp_path, found, "break their budget") == (f"at most {broken} of 200", met)
        none = [r | {"certified": 0, "broken": 0, "labels": 120} for r in run["rows"]]
        assert _one(tmp_path, {"lossy": {"smollm2/sst2": {"rows": none}}}, "break their budget")[1] is None
        told, sold = _one(tmp_path, found, "a plan certified at a loss of 5 %")
        assert sold is True and "whole answers, prompts included: 0.80" in told
