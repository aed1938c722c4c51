"""The page of benchmarks keeps what is not measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.labels import WAYS
from bench.report.goals import goals
from bench.report.kept import kept
from bench.report.page import make_page
from bench.report.results import Goal, Results

PAGE = Path("docs/benchmarks.md")

EARLIER = """# Benchmarks

## Targets

| target | measured |  |
| --- | --- | --- |
| fast | 3 ms | met |
| fast | 5 ms | **not met** |
| small | 2 MiB | met |
| per set | 1 | met |

## Queues

Load 0.5.

### one

| a |
| --- |
| 1 |
"""


def test_rows_that_were_not_measured_again_stay_and_those_that_were_are_new() -> None:
    page = """# Benchmarks

## Targets

| target | measured |  |
| --- | --- | --- |
| fast | not measured on this machine | – |
| fast | 4 ms | met |
| small | not measured on this machine | – |
| new | not measured on this machine | – |
"""
    assert kept(page, EARLIER).splitlines()[6:] == [
        "| fast | 3 ms | met |",
        "| fast | 4 ms | met |",
        "| small | 2 MiB | met |",
        "| per set | 1 | met |",
        "| new | not measured on this machine | – |",
    ]


def test_a_goal_that_was_measured_by_name_is_not_told_as_missing() -> None:
    table = "# Benchmarks\n\n## Targets\n\n| target | measured |\n| --- | --- |\n"
    kept_rows = "| digits: holds | 1 of 200 |\n| video: holds | 0 of 200 |\n"
    page = table + "| holds | not measured on this machine |\n"
    assert kept(page, table + kept_rows) == table + kept_rows
    assert kept(page, "# Benchmarks\n") == page


def test_a_section_without_a_table_of_its_own_stays_as_it_was() -> None:
    assert kept("# Benchmarks\n\n## Queues\n\nLoad 0.5.\n", EARLIER).endswith(EARLIER[EARLIER.index("## Queues") :])


def test_a_table_in_a_section_that_was_measured_in_part_stays() -> None:
    earlier = "## Scale\n\nVerdicts.\n\n| s |\n| --- |\n| 1 |\n\nFleets.\n\n| n |\n| --- |\n| 2 |\n"
    page = "## Scale\n\nVerdicts.\n\n*Not measured on this machine.*\n\nFleets.\n\n| n |\n| --- |\n| 3 |\n"
    assert kept(page, earlier) == earlier.replace("| 2 |", "| 3 |")


def test_with_nothing_measured_at_all_everything_stays_on_the_page(tmp_path: Path) -> None:
    earlier = PAGE.read_text()
    again = kept(make_page(Results(tmp_path), {}, PAGE), earlier)
    assert set(_content(earlier)) <= set(_content(again))


def test_tables_of_other_models_that_were_measured_another_time_stay_with_their_captions_in_their_order() -> None:
    def part(name: str, figure: int, when: str) -> str:
        return f"*Speed of {name}*: {figure} prompts.\n\n| {name} |\n| --- |\n| {figure} |\n\n*Measured: {when}.*\n\n"

    def page(*parts: str) -> str:
        return "".join(("## Models\n\nWords.\n\n", *parts)).rstrip() + "\n"

    a, b, c = (part(name, i, "long ago") for i, name in enumerate("abc"))
    now = part("b", 9, "now")
    assert kept(page(now), page(a, b, c)) == page(a, now, c)
    new = part("d", 7, "now")
    assert kept(page(new), page(a, b)) == page(a, b, new)


def _content(page: str) -> list[str]:
    return [line for line in page[page.index("## ") :].splitlines() if line]


def test_when_a_kept_table_was_measured_stays_with_it() -> None:
    earlier = (
        "## Engine\n\nWords.\n\n### one\n\n| s |\n| --- |\n| 1 |\n\n*Measured: long "
        "ago.*\n\n![one](one.png)\n\n### two\n\n| s |\n| --- |\n| 2 |\n"
    )
    page = (
        "## Engine\n\nWords.\n\n### one\n\n*Not measured on this machine.*\n\n### two\n\n| s |\n| --- |\n| 3 "
        "|\n\n*Measured: now.*\n"
    )
    assert kept(page, earlier) == earlier.replace("| 2 |", "| 3 |\n\n*Measured: now.*")


def test_a_row_tells_when_and_on_what_it_was_measured(tmp_path: Path) -> None:
    ran = {"when": "2026-01-02", "commit": "abc1234", "processor": "Fast One (AVX-512, VNNI)"}
    (tmp_path / "million.json").write_text(
        json.dumps({"passed": True, "peak_bytes": 1, "cpu_seconds": 2, "seconds": 3})
    )
    (tmp_path / "measured.json").write_text(json.dumps({"million": ran}))
    (tmp_path / "engine.json").write_text(json.dumps({"video": {"plans": [row("any uncertified")], "measured": ran}}))
    page = make_page(Results(tmp_path), {}, PAGE)
    assert "| bench.million; 2026-01-02, abc1234, Fast One (AVX-512, VNNI) |" in page
    assert "interleaved pairs; 2026-01-02, abc1234, Fast One (AVX-512, VNNI) |" in page
    assert "*Measured: 2026-01-02, abc1234, Fast One (AVX-512, VNNI).*" in page


def row(plan: str, *, batch: int = 1, ratio: float = 0.3, worst: float = 1.0) -> dict[str, Any]:
    return {
        "batch": batch,
        "plan": plan,
        "ratio": {"median": ratio, "low": ratio, "high": ratio},
        "worst": {"median": worst},
        "disagreement": 0.005,
        "precision": "fp32",
        "ramps": [],
    }


def goal(results: Results, beginning: str) -> Goal:
    return next(goal for goal in goals(results) if goal.target.startswith(beginning))


def test_what_is_met_with_the_tolerance_only_is_told_apart(tmp_path: Path) -> None:
    marks = []
    for worst in (1.05, 1.09, 1.11):
        (tmp_path / "engine.json").write_text(json.dumps({"video": {"plans": [row("any uncertified", worst=worst)]}}))
        marks.append(goal(Results(tmp_path), "engine alone, surveillance video: an input that takes no exit").mark)
    assert marks == ["met", "met with the 5 % tolerance only", "**not met**"]


def test_disagreement_has_no_tolerance(tmp_path: Path) -> None:
    beyond = {**row("any uncertified"), "disagreement": 0.0101}
    (tmp_path / "engine.json").write_text(json.dumps({"video": {"plans": [beyond]}}))
    found = goal(Results(tmp_path), "engine alone, surveillance video, any uncertified")
    assert found.met is False
    assert "disagreement at most 1.01 %" in found.measured


@pytest.mark.parametrize(("mib", "met"), [(199.0, True), (201.0, False)])
def test_resident_memory_has_a_mark_of_its_own_and_a_short_run_says_so(tmp_path: Path, mib: float, met: bool) -> None:
    server = {
        "capacity_ratio": 1.0,
        "idle_over_model_ms": 0.5,
        "p95_at_0.6_ratio": None,
        "resident_mib": mib,
        "goodput_at_twice": 1.0,
    }
    side = {"servers": {"offramp": server}, "objective_ms": 50.0}
    (tmp_path / "front.json").write_text(json.dumps({"loose": side, "tight": side, "rounds": 2, "seconds": 1.5}))
    found = goal(Results(tmp_path), "resident memory of a worker")
    assert found.met is met
    assert found.how == "bench.front, 2 rounds of 1.5 s"
    assert goal(Results(tmp_path), "beside a bare FastAPI handler").met is False  # nothing came back at 0.6 load
    assert "2 rounds of 1.5 s" in make_page(Results(tmp_path), {}, PAGE)


def test_of_tables_in_a_row_one_that_was_measured_in_part_keeps_the_others_and_says_when_each_was() -> None:
    earlier = (
        "## Traffic\n\nWords.\n\n| t | wrong |\n| --- | --- |\n| a | 1 |\n| b | 2 |\n\n| t | early |\n| --- | "
        "--- |\n| a | 3 |\n\n*Measured: long ago.*\n"
    )
    missing = "not measured on this machine"
    page = (
        f"## Traffic\n\nWords.\n\n| t | wrong |\n| --- | --- |\n| a | {missing} |\n| b | 9 |\n\n| t | early |\n| "
        f"--- | --- |\n| a | {missing} |\n\n*Measured: now, only b.*\n"
    )
    told = earlier.replace("| 2 |", "| 9 |").replace("long ago", "now, only b; other rows: long ago")
    assert kept(page, earlier) == told
    assert kept(page, told) == told


def test_of_traffic_that_was_run_in_part_the_rest_stays_on_the_page(tmp_path: Path) -> None:
    row = "scenes of 1000, 64 sources, unnamed"
    figures = {"runs": 200, "wrong": 7, "decided": 9, "median": 123.0, "mean": 1.0}
    ran = {"when": "2026-01-02", "commit": "abc1234", "processor": "Fast One (AVX-512, VNNI)"}
    (tmp_path / "streams.json").write_text(json.dumps({"scenes": {row: figures}, "measured": ran}))
    earlier = PAGE.read_text()
    again = kept(make_page(Results(tmp_path), {}, PAGE), earlier)
    assert f"| {row} | 7 of 200 | 9 of 200 | 123.0 |" in again
    assert f"abc1234, Fast One (AVX-512, VNNI), only scenes: {row}; other rows: " in again
    lost = set(_content(earlier)) - set(_content(again))
    assert all(line.startswith((f"| {row} ", "*Measured: ")) for line in lost) and len(lost) == 2


def test_of_sets_whose_labels_were_not_counted_earlier_figures_stay(tmp_path: Path) -> None:
    ran = {"when": "2026-01-02", "commit": "abc1234", "processor": "Fast One"}
    found = {"labels": 850, "saving": 0.3, "best": 0.32, "wrong": 1, "draws": 20}
    for name, labels in (("video-grid", 850), ("sst2-mean", 1200)):
        rows = [{"set": name, "way": way, **found, "labels": labels} for way in WAYS]
        (tmp_path / f"labels-{name}.json").write_text(json.dumps({"rows": rows, "measured": ran}))
    page = kept(make_page(Results(tmp_path), {}, PAGE), PAGE.read_text())
    (tmp_path / "labels-sst2-mean.json").unlink()
    again = kept(make_page(Results(tmp_path), {}, PAGE), page)
    assert "| sst2-mean | 32.0 % | 1,200 (1 of 20 over budget) |" in again
    assert "| video-grid | 32.0 % | 850 (1 of 20 over budget) |" in again
