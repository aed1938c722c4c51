"""The bench around the simulator: traces from files, ratios judged, and a page that knows what is missing."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import arrivals, run
from bench.replays import at_disagreement
from bench.report.goals import goals
from bench.report.page import make_page
from bench.report.papers import rows
from bench.report.results import MISSING, Results
from rich.console import Console

from offramp_lab.simulate import ARRIVALS


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out as OFFRAMP_DATA is, with a few requests each."""
    functions, llm, twitter = (tmp_path / f"trace_{n}" for n in ("azure_functions", "azure_llm", "twitter"))
    for folder in (functions, llm, twitter):
        folder.mkdir()
    (functions / "iluvatar_trace_300s.csv").write_text("func_name,invoke_time_ms\na,106\nb,6\na,1006\n")
    minutes = ",".join(str(i) for i in range(1, 5))
    (functions / "azure2019_invocations_per_min_sample.csv").write_text(
        f"HashOwner,HashApp,HashFunction,Trigger,{minutes}\no,a,f,http,0,2,0,1\no,a,g,http,1,0,0,0\n"
    )
    for name in ("code", "conv"):
        (llm / f"AzureLLMInferenceTrace_{name}.csv").write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 "
            "18:17:04.0319600,3180,8\n"
        )
    counts = b" ".join([b"0"] * arrivals.TWITTER_BEGIN + [b"3", b"0", b"2"])
    with tarfile.open(twitter / "workload.tbz2", "w:bz2") as archive:
        member = tarfile.TarInfo("workload.txt")
        member.size = len(counts)
        archive.addfile(member, io.BytesIO(counts))
    monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path))
    return tmp_path


class TestTraces:
    @pytest.mark.parametrize(
        ("name", "times"),
        [("azure-functions", [0, 0.1, 1.0]), ("azure-llm-code", [0, 0.052]), ("azure-llm-conv", [0, 0.052])],
    )
    def test_recorded_moments_are_kept_in_order_from_zero(self, traces: Path, name: str, times: list[float]) -> None:
        assert arrivals.load_trace(name).tolist() == pytest.approx(times, abs=1e-6)

    @pytest.mark.parametrize(("name", "n"), [("azure-functions-minutes", 4), ("twitter", 5)])
    def test_counts_become_as_many_moments_the_same_for_a_seed(self, traces: Path, name: str, n: int) -> None:
        first, again, other = (arrivals.load_trace(name, seed=seed) for seed in (1, 1, 2))
        assert len(first) == n
        assert (np.diff(first) >= 0).all()
        assert first.tolist() == again.tolist() != other.tolist()

    def test_a_written_trace_plays_at_the_rate_asked_for(self, traces: Path, tmp_path: Path) -> None:
        path = arrivals.write_trace("azure-functions", tmp_path / "out", rate=10.0)
        with np.load(path) as archive:
            assert archive["time"].tolist() == pytest.approx([0, 0.02, 0.2])

    def test_a_trace_that_is_not_there_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path / "none"))
        assert arrivals.main(["twitter", "--out", str(tmp_path)]) == 1
        assert "trace_twitter/workload.tbz2" in capsys.readouterr().err

    def test_names_of_traces_and_generators_do_not_clash(self) -> None:
        assert not set(arrivals.TRACES) & set(ARRIVALS)


CURVE = [
    {"disagreement": 0.008, "saving": 0.20},
    {"disagreement": 0.012, "saving": 0.24},
    {"disagreement": 0.02, "saving": 0.28},
]


class TestFrontier:
    @pytest.mark.parametrize(("wanted", "saving"), [(0.010, 0.22), (0.012, 0.24), (0.016, 0.26), (0.004, 0.16)])
    def test_savings_are_read_off_the_line_between_budgets(self, wanted: float, saving: float) -> None:
        assert at_disagreement(CURVE, wanted) == pytest.approx(saving)

    def test_a_flat_curve_has_one_answer(self) -> None:
        assert at_disagreement([{"disagreement": 0.0, "saving": 0.0}] * 3, 0.01) == 0.0


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


class TestPage:
    def test_without_any_result_everything_is_missing_and_nothing_is_met(self, tmp_path: Path) -> None:
        results = Results(tmp_path)
        assert {goal.met for goal in goals(results)} == {None}
        assert {goal.measured for goal in goals(results)} == {MISSING}
        page = make_page(results, {}, tmp_path / "page.md")
        assert page.count(MISSING) > len(rows()) - 2

    def test_a_goal_is_judged_by_its_figures(self, tmp_path: Path) -> None:
        million = {"peak_bytes": 2**30, "cpu_seconds": 10.0, "seconds": 30.0}
        for passed in (True, False):
            write(tmp_path, "million", {**million, "passed": passed})
            (goal,) = [g for g in goals(Results(tmp_path)) if "1,000,000 x 12" in g.target]
            assert (goal.met, goal.mark) == (passed, "met" if passed else "**not met**")
            assert "1,024 MiB" in goal.measured

    @pytest.mark.parametrize(("over", "met"), [(0, True), (10, True), (25, False)])
    def test_draws_with_exits_alone_say_whether_a_certificate_holds(self, tmp_path: Path, over: int, met: bool) -> None:
        row = {"name": "certified", "over_budget": over, "with_exits": 100, "n": 200}
        write(tmp_path, "draws-any", {"policies": [row], "model": "m", "head": "h"})
        (goal,) = [g for g in goals(Results(tmp_path)) if "certified plans break" in g.target]
        assert goal.met is met
        assert f"{over} of 100" in goal.measured

    @pytest.mark.parametrize(
        ("error", "passed", "load_average", "met"),
        [(0.05, True, 6.0, True), (0.3, True, 1.0, True), (0.3, True, 6.0, None), (0.3, False, 6.0, False)],
        ids=["within-10%", "within-quiet-range", "within-busy-range", "outside"],
    )
    def test_a_range_that_neighbours_made_decides_nothing(
        self, tmp_path: Path, error: float, passed: bool, load_average: float, met: bool | None
    ) -> None:
        verdict = {
            "measured": 0.8,
            "measured_low": 0.5,
            "measured_high": 1.2,
            "simulated": 0.9,
            "error": error,
            "passed": passed,
        }
        simulator = {
            "loads": [{"load": 0.5, "verdict": {"p50": verdict}}],
            "tolerance": 0.1,
            "load_average": load_average,
        }
        write(tmp_path, "simulator", {**simulator, "pairs": 5, "seconds": 4.0, "passed": passed})
        (goal,) = [g for g in goals(Results(tmp_path)) if g.target.startswith("simulator")]
        assert goal.met is met

    def test_the_slowest_budget_decides_about_the_search(self, tmp_path: Path) -> None:
        timing = {"records": "synthetic 10,000 x 27", "wall_seconds": 1.0, "saving": 0.1, "gap": 0.0}
        tasks = {
            "3 given ramps": (0.004, 0.012),
            "<= 3 of 27, gap 0.5 points": (0.3, 0.4),
            "<= 3 of 27, optimal": (2.0, 9.0),
        }
        timings = [
            {**timing, "loops": loops, "task": task, "budget": budget, "processor_seconds": factor * seconds}
            for loops, factor in (("numpy", 2.0), ("compiled", 1.0))
            for task, both in tasks.items()
            for budget, seconds in zip((0.01, 0.02), both, strict=True)
        ]
        (tmp_path / "search.json").write_text(json.dumps(timings))
        three, joint = (g for g in goals(Results(tmp_path)) if g.how.startswith("bench.search"))
        assert (three.met, joint.met) == (False, True)
        assert "12 ms at 2.0 % (numpy alone: 8 ms at 1.0 %, 24 ms at 2.0 %)" in three.measured
        assert "9,000.0 ms" in make_page(Results(tmp_path), {}, tmp_path / "page.md")


class TestStages:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where stages come from and their results go."""
        monkeypatch.setattr(run, "OUT", tmp_path)
        monkeypatch.setattr(run, "KEYS", tmp_path / "keys.json")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return tmp_path

    def outcome(self, module: str, **options: bool) -> str:
        return run.run_stage(run.Stage("any", module, **options), Console(file=io.StringIO()))

    def test_what_a_stage_prints_is_kept_until_its_code_changes(self, folder: Path) -> None:
        module = folder / "stage_one.py"
        module.write_text("print('{\"figure\": 1}')")
        assert self.outcome("stage_one", prints_json=True).startswith("done")
        assert Results(folder).get("any") == {"figure": 1}
        assert self.outcome("stage_one", prints_json=True) == "kept"
        # Of another length: Python knows a changed module by its second and its size.
        module.write_text("print('{\"figure\": 20}')")
        assert self.outcome("stage_one", prints_json=True).startswith("done")
        assert Results(folder).get("any") == {"figure": 20}

    def test_a_stage_that_fails_is_said_and_runs_again(self, folder: Path) -> None:
        (folder / "stage_two.py").write_text("raise SystemExit(3)")
        assert self.outcome("stage_two") == "exit code 3"
        assert self.outcome("stage_two") == "exit code 3"

    def test_a_stage_that_is_not_there_is_said(self, folder: Path) -> None:
        assert "not there" in self.outcome("stage_three")
