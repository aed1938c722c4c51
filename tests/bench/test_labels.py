"""Ways to spend labels are compared on equal terms: as many labels, one level, and truth from the whole population."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench import labels
from rich.console import Console
from tests.core.scores import recorded

from offramp_core.tuning import TuningRequest, tune

POOL = recorded(2_500, 3, seed=5)


@pytest.mark.parametrize("way", labels.WAYS)
def test_every_way_finds_a_plan_whose_truth_is_that_of_all_requests(way: str) -> None:
    found = labels.WAYS[way](labels.Draws(POOL, np.random.default_rng(3)), 2_000)
    assert found is not None
    assert found.n == len(POOL)
    assert found.saving > 0


@pytest.mark.parametrize("way", labels.WAYS)
def test_few_labels_certify_nothing(way: str) -> None:
    found = labels.WAYS[way](labels.Draws(POOL, np.random.default_rng(3)), 60)
    assert found is None or found.saving <= 0


@pytest.mark.parametrize("way", labels.WAYS)
def test_every_way_tests_at_the_budget_of_all_requests_also_where_few_of_them_leave(way: str) -> None:
    hard = recorded(2_500, 3, seed=5, harder=2.5)
    found = [labels.WAYS[way](labels.Draws(hard, np.random.default_rng(seed)), 2_000) for seed in range(8)]
    assert sum(seen is not None for seen in found) >= 4
    assert sum(seen is not None and seen.disagreement > labels.BUDGET for seen in found) <= 1


def test_the_least_number_that_is_worth_it_is_told_with_those_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "GRID", (100, 2_000))
    steps: list[int] = []
    row = labels.labels_needed(POOL, "every request alike", draws=3, advance=lambda: steps.append(1))
    assert row["draws"] == 3 and 0 <= row["wrong"] <= 3
    assert len(steps) == 2
    assert row["labels"] in (2_000, None)
    assert "over budget" in labels.told(row)


def test_without_records_it_says_how_to_get_them(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert labels.main(["--records", str(tmp_path)]) == 1
    assert "bench.record" in capsys.readouterr().err


def test_a_set_is_counted_once_as_long_as_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "GRID", (100,))
    records = tmp_path / "digits.npz"
    costs = {"segment_seconds": POOL.costs.segment_seconds, "ramp_seconds": POOL.costs.ramp_seconds}
    said = np.where(POOL.agrees, 0, 1)
    np.savez(records, uncertainty=POOL.uncertainty, prediction=said, final=np.zeros(len(POOL), dtype=int), **costs)
    console = Console(quiet=True)
    first = labels.measure(records, tmp_path / "out", draws=2, console=console)
    assert [row["way"] for row in first] == list(labels.WAYS)
    monkeypatch.setattr(labels, "labels_needed", lambda *_, **__: pytest.fail("counted again"))
    assert labels.measure(records, tmp_path / "out", draws=2, console=console) == first
    with pytest.raises(pytest.fail.Exception):
        labels.measure(records, tmp_path / "out", draws=3, console=console)


def test_where_no_number_is_enough_it_says_what_the_most_are_worth() -> None:
    row = {"labels": None, "saving": 0.6, "best": 0.8, "wrong": 1, "draws": 40}
    assert labels.told(row) == "more than 13,600, which are worth 75% (1 of 40 over budget)"


def test_copies_of_a_row_are_no_scene_although_they_bear_one_time() -> None:
    """On recorded video ten labels counted as one, since draws were put in the order of their times."""
    drawn = labels.Draws(replace(POOL.take(slice(400)), time=np.arange(400.0)), np.random.default_rng(1)).take(4_000)
    outcome = tune(drawn, TuningRequest(0.01, 0.05, 1, ("r0", "r1", "r2"), "", ""))
    assert outcome.design_effect == 1
