"""The bench of shared workers, as small as it gets: whether it still runs and what it leaves. Its figures say nothing
here but those that are simulated."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
    assert any(line.startswith("| alone on the core ") for line in section(Results(tmp_path)))


def test_a_trial_in_which_nobody_else_asked_can_be_written_as_json() -> None:
    class Nobody:
        ok, seconds, row = np.ones(3, dtype=bool), np.full(3, 0.01), np.arange(3)

    class Alone:
        def awake(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def run(self, **_: Any) -> Nobody:
            return Nobody()

    first, second = (SimpleNamespace(name=name, seconds=0.01) for name in ("first", "second"))
    traffic = floods.Traffic(cast(Any, Alone()), np.array([0.5, 0.5]), 10.0)
    both = cast(Any, [first, second])
    found = floods.under(cast(Any, first), both, both, traffic, rounds=1, seconds=0.1)
    assert json.loads(json.dumps(found, allow_nan=False))["ratio"] is None


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
