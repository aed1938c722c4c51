"""bench.control around its simulation: what is missing is said, what was simulated is kept, and the page shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench import control
from bench.control import Parts, judged, summary, year_summary
from bench.control_rollouts import SCENARIOS, Attempt
from bench.control_world import MissingRecordsError, World
from bench.control_year import YEARS, Year
from bench.report.goals import control_loop
from bench.report.page import make_page
from bench.report.pictures import draw_pictures
from bench.report.results import Results

GOOD = Attempt("Succeeded", "", 2800, 14, 2900, 45.0, 200, 0.005, ((0, 400, -1.5, 20, -0.5), (1, 300, -1.0, 10, -0.1)))
BAD = Attempt("RolledBack", "AccuracyRejected", 90, 7, 95, 9.0, 14, 0.05, ((0, 90, 3.2, 4, -0.1),))
LIVED = Year(0.004, 0.2, 3, 1.5, 12, 1, 9, 1, ("Succeeded",) * 8 + ("RolledBack AccuracyRejected",), (0.004,) * 365)


def test_missing_records_are_named_with_the_command_that_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert control.main(["--records", str(tmp_path / "resnet56-mx4.npz"), "--out", str(tmp_path / "control.json")]) == 1
    assert "python -m bench.record resnet56-mx4" in capsys.readouterr().err
    with pytest.raises(MissingRecordsError, match=r"bench\.record resnet56-mx4"):
        World.read(tmp_path / "resnet56-mx4.npz")


def test_single_results_are_read_back_and_those_of_other_code_are_void(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "half.jsonl", "key", Attempt)
    assert parts.read() == []
    parts.append([GOOD])
    parts.append([BAD])
    assert [a.n for a in parts.read()] == [2800, 90]
    assert Parts(parts.path, "another", Attempt).read() == []


def test_only_healthy_plans_count_where_the_promise_is_about_those() -> None:
    healthy = next(s for s in SCENARIOS if s.name == "healthy")
    row = summary(healthy, [GOOD, BAD, Attempt("NotProposed", "CollectingLabels", 0, 0, 0, 0.0, 0, 0.0)])
    assert (row["n"], row["misses"], row["over_budget"], row["not_proposed"]) == (1, 0, 1, 1)


def test_an_interval_surrounds_the_share() -> None:
    row = judged(7, 1000, allowed=0.01)
    assert row["low"] < row["rate"] == 0.007 < row["high"]


@pytest.mark.slow
def test_the_page_and_its_targets_show_every_row(tmp_path: Path) -> None:
    rollouts = {s.name: summary(s, [BAD if s.name == "harmful" else GOOD] * 20) for s in SCENARIOS}
    years = {y.name: year_summary(y, [LIVED] * 3) for y in YEARS}
    found = {"records": "resnet56-mx4", "budget": 0.01, "log_limit": 3.0, "rollouts": rollouts, "years": years}
    (tmp_path / "control.json").write_text(json.dumps(found))
    results = Results(tmp_path)
    pictures = draw_pictures(results, tmp_path / "images")
    page = make_page(results, pictures, tmp_path / "page.md")
    assert all(s.promise in page for s in SCENARIOS) and all(y.promise in page for y in YEARS)
    assert "images/control.png" in page
    goals = control_loop(results)
    assert len(goals) == len(SCENARIOS) + len(YEARS)
    assert np.sum([goal.met is False for goal in goals]) == 1  # "slow" was promoted in this made-up file


def test_an_absent_result_is_said_to_be_absent(tmp_path: Path) -> None:
    assert [goal.met for goal in control_loop(Results(tmp_path))] == [None]
