"""The bench of shared workers, as small as it gets: whether it still runs and what it leaves. Its figures say nothing
here but those that are simulated."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bundles
import numpy as np
import pytest
from bench import front
from bench.report.goals import goals
from bench.report.results import Results
from bench.report.sharing import section
from bench.sharing import cold, floods, load, packed, policies, services
from bench.sharing.services import ROWS
from rich.console import Console

SECONDS = 0.3
FILE_BYTES = 100_000_000


@pytest.mark.slow
def test_both_arms_serve_and_the_page_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "CAPACITY_TRIALS", 2)
    monkeypatch.setattr(policies, "RUNS", 1)
    monkeypatch.setattr(services, "WORKERS", 1)
    console = Console(quiet=True)
    monkeypatch.setattr(cold, "GIVE_UP_SECONDS", 120.0)
    bundle = bundles.write_bundle(tmp_path / "bundle")
    with (bundle / "notes.bin").open("wb") as file:
        file.truncate(FILE_BYTES)  # a model takes as much memory as its files: of two there is room for one
    kind = (bundle, bundles.inputs(ROWS))
    of = services.services([kind], n=2, folder=tmp_path)
    with services.arms(of) as both:
        assert {name: len(arm.workers) for name, arm in both.items()} == {"shared": 1, "separate": 2}
        under_load = load.measured(of, both, rounds=1, seconds=SECONDS, console=console)
        flooded = floods.measured(of, both["shared"], rounds=1, seconds=SECONDS, console=console)
    away = cold.measured(of, console=console, waits=2, promises=2)
    assert away["cold_seconds"]["median"] >= away["load_seconds"]["median"] > 0
    found = {
        "measured": {"when": "today", "commit": "abc", "processor": "any"},
        "turns": policies.compared(),
        "packing": packed.compared(cases=3),
        "load": under_load,
        "cold": away,
    }
    (tmp_path / "sharing.json").write_text(json.dumps(found, allow_nan=False))
    (tmp_path / "floods.json").write_text(json.dumps({"measured": found["measured"], **flooded}, allow_nan=False))
    rows = [goal for goal in goals(Results(tmp_path)) if goal.target.startswith("sharing: ")]
    assert len(rows) == 6 and all(goal.met is not None for goal in rows)
    assert any(line.startswith("| the flood's model takes ") for line in section(Results(tmp_path)))


def test_a_trial_in_which_nobody_else_asked_can_be_written_as_json() -> None:
    nobody = [_trial([], [])]
    found = json.loads(json.dumps(floods.compared(nobody, nobody, 0), allow_nan=False))
    assert found["ratio"] is None and found["interval"] == [None, None]


def test_the_growth_under_a_flood_is_that_of_pooled_rounds_and_how_sure_it_is_says_how_they_differ() -> None:
    """One round of ten with a flood is bad: a resample has it not at all, once, twice."""
    calm = [_trial([0.01] * 20, [0.5]) for _ in range(10)]
    flooded = [_trial([0.012] * 20, [0.5])] * 9 + [_trial([0.05] * 20, [0.5, None])]
    found = floods.compared(calm, flooded, 1)
    assert found["ratio"] == pytest.approx(5.0) and found["interval"] == [pytest.approx(1.2), pytest.approx(5.0)]
    assert found["p95_ms"] == {"without": pytest.approx(10.0), "with": pytest.approx(50.0)}
    assert found["answered"] == pytest.approx(10 / 11) and found["others_refused"] == {"without": 0.0, "with": 0.0}


def _trial(others: list[float], flood: list[float | None]) -> Any:
    """Seconds of the requests of service 0, and of 1; None of one that was refused."""
    seconds = np.array([*others, *(each or 0.0 for each in flood)])
    ok = np.array([True] * len(others) + [each is not None for each in flood], dtype=bool)
    return SimpleNamespace(ok=ok, seconds=seconds, row=np.array([0] * len(others) + [ROWS] * len(flood)))


@pytest.mark.slow
def test_under_a_flood_the_others_wait_hardly_longer_by_our_turns_and_long_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "RUNS", 2)
    found = policies.compared()
    ours, rivals = found.pop("ours"), found.values()
    assert ours["p95_ms"] is not None and ours["flood_p95_ms"] is not None
    assert ours["flood_p95_ms"] <= 1.2 * ours["p95_ms"]
    for rival in rivals:
        assert rival["flood_p95_ms"] is None or rival["flood_p95_ms"] > 2 * ours["flood_p95_ms"]
