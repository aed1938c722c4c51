"""Drafts chosen by measurement are measured at a real desk, in turns with each setting alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.generate.auto import AT_ONCE, HOSTILE, OFF, auto, mixed
from bench.generate.prepared import prompts_of
from bench.generate.served import AUTO, ServedInTurns
from bench.generate.writing import loaded
from bench.report.generation import section
from bench.report.results import Results
from story_bundles import OPENINGS, write_story_bundle

from offramp_core.generation.drafts import Drafts
from offramp_core.generation.levels import Setting
from offramp_worker.generate.seam import DecodingRoute


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stories") / "bundle"
    write_story_bundle(path)
    return path


def test_every_way_answers_what_it_is_asked(folder: Path) -> None:
    bundle = loaded(folder)
    with ServedInTurns(bundle, {OFF: DecodingRoute(), "fp32+int8:3": DecodingRoute("fp32", "int8", 3)}) as served:
        served.learn_with(Drafts((Setting("int8", 3),)))
        found = {way: served.answer(way, OPENINGS[:5], at_once=2, tokens=4) for way in (OFF, "fp32+int8:3", AUTO)}
    assert found[OFF].routes == {OFF: 5} and found["fp32+int8:3"].routes == {"fp32+int8:3": 5}
    assert found[AUTO].routes.total() == 5 and set(found[AUTO].routes) <= {OFF, "fp32+int8:3"}
    assert {of.tokens for of in found.values()} == {20}, "drafts change no answer"
    assert all(of.seconds > 0 for of in found.values())


def test_what_is_measured_stands_in_the_report(folder: Path, tmp_path: Path) -> None:
    ticks = list[int]()
    found = auto(
        folder,
        calm=OPENINGS,
        others={name: [prompt[:20] for prompt in prompts_of(name, 5)] for name in ("noise", "code")},
        n=8,
        tokens=4,
        tick=lambda: ticks.append(1),
    )
    assert [row["at_once"] for row in found["loads"]] == list(AT_ONCE)
    assert all(sum(row["routes"].values()) == row["requests"] >= 8 for row in found["loads"])
    assert all(row["low"] <= row["ratio"] <= row["high"] for load in found["loads"] for row in (load, load["again"]))
    moved = found["hostile"]
    assert moved["requests"] == HOSTILE < len(ticks)
    assert set(moved["costs"]) == {"noise", "code"} and moved["content"] == max(moved["costs"], key=moved["costs"].get)
    (tmp_path / "generate.json").write_text(json.dumps({"auto": {"stories": found}}))
    page = "\n".join(section(Results(tmp_path)))
    assert "Drafts chosen by measurement on stories" in page


def test_classes_are_compared_after_they_were_learned_about_and_learning_has_its_price(
    folder: Path, tmp_path: Path
) -> None:
    classes = {"prose": OPENINGS, "code": [prompt[:40] for prompt in prompts_of("code", 5)]}
    found = mixed(folder, classes, learn=8, n=2, repeats=2, tokens=4, tick=lambda: None)
    for row in found["classes"]:
        ways = {AUTO, OFF, *(f"fp32+{s}" for s in found["settings"])}
        assert set(row["ratios"]) == ways and sum(row["routes"].values()) == 2 * row["requests"] == 4
        assert row["best"] == min(ways - {AUTO}, key=lambda way: row["ratios"][way])
        assert len(row["learning"]) == 4 and all(part >= 1 for part in row["learning"])
        assert len(row["each"]) == 2 and row["against"]["low"] <= row["against_best"] <= row["against"]["high"]
    (tmp_path / "generate.json").write_text(json.dumps({"mixed": {"stories": found}}))
    page = "\n".join(section(Results(tmp_path)))
    assert "| 1 to 2 |" in page and "| prose |" in page
