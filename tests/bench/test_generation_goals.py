"""Targets of models that generate say what was measured and whether that is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.report.generation import goals
from bench.report.results import Results

LOADS = [{"at_once": n, "ratio": 1.0} for n in (1, 2, 4, 8)]
CALM = {"off_after": 12, "serves": "fp32", "ratio": 1.1}


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
    worse = run | {"loads": [*LOADS[:3], {"at_once": 8, "ratio": 1.021}]}
    assert _one(tmp_path, {"auto": {"smollm2": worse}}, "SmolLM2, drafts chosen")[1] is False


@pytest.mark.parametrize(
    ("off_after", "ratio", "met"), [(50, 1.2, True), (51, 1.2, False), (None, 0.6, True), (None, 1.03, False)]
)
def test_a_draft_that_stays_must_pay(tmp_path: Path, off_after: int | None, ratio: float, met: bool) -> None:
    run = {"loads": LOADS, "hostile": {"off_after": off_after, "serves": "fp32+int8:2", "ratio": ratio}}
    assert _one(tmp_path, {"auto": {"smollm2": run}}, "SmolLM2: no draft that costs")[1] is met


def test_eleven_broken_budgets_of_two_hundred_are_too_many(tmp_path: Path) -> None:
    row = {"output": "TokenF1", "draws": 200, "certified": 150, "time": 0.4, "usual_plan": "int8"}
    for broken, met in ((10, True), (11, False)):
        run = {"rows": [row | {"budget": 0.05, "broken": 1}, row | {"budget": 0.1, "broken": broken}]}
        found = {"lossy": {"smollm2/sst2": run}}
        assert _one(tmp_path, found, "break their budget") == (f"at most {broken} of 200", met)
        assert _one(tmp_path, found, "a plan certified at a loss of 5 %")[1] is True
