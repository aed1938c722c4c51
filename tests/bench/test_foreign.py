"""Architectures nobody tuned for, in small: what is served with exits on and off, what a refusal tells, and what the
page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import prepared
import pytest
from bench import foreign
from bench.report.goals import goals
from bench.report.page import make_page
from bench.report.results import Results

from offramp_core.records import records_from_arrays
from offramp_core.search.placement import best_plan

ROWS = 40


@pytest.mark.slow
def test_a_prepared_model_is_served_with_exits_off_and_on(tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "bundle")
    found = foreign.served(folder, folder / "backbone.onnx", bundles.inputs(ROWS, seed=5))
    recorded = best_plan(records_from_arrays(dict(np.load(folder / "records.npz"))), max_disagreement=foreign.BUDGET)
    assert found["labels_differ"] == 0
    assert found["exits_on"]["requests"] == ROWS
    assert (found["exits_on"]["left"] > 0) == bool(recorded.plan.active)


@pytest.mark.slow
def test_a_refusal_comes_with_the_optimum_over_all_heads_tried(tmp_path: Path) -> None:
    stream, held_out = prepared.images(300, seed=3)[0], prepared.images(100, seed=4)[0]
    np.savez(tmp_path / "stream.npz", x=stream)
    found = foreign.refused(
        "tiny",
        tmp_path / "all-heads",
        held_out,
        reason="none would pay",
        model=prepared.save_model(tmp_path),
        data=tmp_path / "stream.npz",
    )
    assert found["error"] == "none would pay"
    assert found["heads_tried"] > 1
    assert 0.0 <= found["hindsight_saving"] < 1.0


def row(name: str, *, saving: float, disagreement: float = 0.005, certified: float | None = None) -> dict[str, Any]:
    return {
        "model": name,
        "ramps": ["r1"],
        "saving": saving,
        "disagreement": disagreement,
        "hindsight_saving": saving,
        "labels_differ": 0,
        "certified": None if certified is None else {"saving": certified, "disagreement": 0.004},
        "exits_on": {"latency_ratio": 0.8, "disagreement": 0.01},
        "measured": {"when": "2026-01-02", "commit": "abc", "processor": "One"},
    }


def refusal(hindsight: float | None) -> dict[str, Any]:
    return {"model": "transformer", "error": "none would pay", "heads_tried": 9, "hindsight_saving": hindsight}


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([row("vgg", saving=0.2), row("densenet", saving=0.1), refusal(0.029)], True),
        ([row("vgg", saving=0.2), row("densenet", saving=0.1), refusal(0.031)], False),
        ([row("vgg", saving=0.2), row("densenet", saving=0.1), refusal(None)], False),
        ([row("vgg", saving=0.2), row("densenet", saving=0.09), row("transformer", saving=0.0)], False),
        ([row("vgg", saving=0.2), row("densenet", saving=0.3, disagreement=0.011, certified=0.12)], True),
        ([row("vgg", saving=0.2), {**row("densenet", saving=0.3), "labels_differ": 1}], False),
        ([], None),
    ],
)
def test_two_of_three_have_to_save_and_a_refusal_has_to_be_fair(
    tmp_path: Path, rows: list[dict[str, Any]], met: bool | None
) -> None:
    if rows:
        (tmp_path / "foreign.json").write_text(json.dumps(rows))
    goal = next(goal for goal in goals(Results(tmp_path)) if goal.target.startswith("architectures nobody tuned for"))
    assert goal.met is met
    assert "## Architectures nobody tuned for" in make_page(Results(tmp_path), {}, Path("docs/benchmarks.md"))
