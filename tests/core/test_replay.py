"""`offramp replay`: policies compared on rows none of them saw, one exact JSON contract, and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from scores import recorded, wide_arrays, with_int8
from typer.testing import CliRunner, Result

from offramp_core.evaluate import evaluate
from offramp_lab.policies import POLICIES, Objective, PlanInForce, Trace, policy
from offramp_lab.policies.base import serve
from offramp_lab.replay.command import replay
from offramp_lab.replay.load import load_records
from offramp_lab.simulate.draws import draw_rng, draw_sample, run_draw, truth

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(replay)
N, R = 3000, 5


def arrays(seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    records = recorded(N, R, seed=seed)
    return {
        "uncertainty": records.uncertainty,
        "prediction": np.where(records.agrees, 3, 4),
        "final": np.full(N, 3),
        "segment_seconds": records.costs.segment_seconds,
        "ramp_seconds": records.costs.ramp_seconds,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "records.npz"
    np.savez(path, **arrays())
    return path


def showable(file: Path) -> list[str]:
    """Policies that these records can show: all but a smaller model, which they do not hold."""
    records = load_records(file)
    return [name for name, named in POLICIES.items() if named.refusal(records) is None]


def run(*args: object) -> Result:
    return CliRunner().invoke(APP, [str(a) for a in args])


class TestJson:
    @pytest.mark.slow
    def test_it_has_exactly_the_fields_of_the_contract(self, file: Path) -> None:
        result = run(file, "--budget", 0.02, "--json")
        assert result.exit_code == 0
        value = json.loads(result.stdout)
        assert set(value) == {"records", "n", "budget", "confidence", "policies"}
        assert (value["n"], value["budget"], value["confidence"]) == (N, 0.02, 0.95)
        assert [p["name"] for p in value["policies"]] == showable(file)
        for entry in value["policies"]:
            assert set(entry) == {"name", "active", "thresholds", "saving", "disagreement", "certificate"}
            assert len(entry["active"]) == len(entry["thresholds"])
            assert entry["certificate"] is None or set(entry["certificate"]) == {"n", "k", "p_value", "method"}

    def test_a_wide_file_is_replayed_at_every_precision_unless_exact_is_asked_for(self, tmp_path: Path) -> None:
        path = tmp_path / "wide.npz"
        records = with_int8(recorded(2000, 4, seed=5), wrong=0.003, speed=0.4)
        np.savez(path, **wide_arrays(records, [f"r{i}" for i in range(4)]))
        asked = (
            "--budget",
            0.02,
            "--policy",
            "exact",
            "--policy",
            "lower-precision",
            "--arrivals",
            "poisson",
            "--load",
            0.5,
        )
        result = run(path, *asked, "--json")
        exact, alone = json.loads(result.stdout)["policies"]
        assert (exact["precision"], alone["precision"], alone["active"]) == ("int8", "int8", [])
        assert exact["saving"] > alone["saving"] == pytest.approx(0.6)
        newer = load_records(path).take(slice(1000, None)).at("int8")
        seen = evaluate(newer, exact["active"], exact["thresholds"])
        assert (exact["saving"], exact["disagreement"]) == pytest.approx((seen.saving, seen.disagreement))
        assert alone["serving"][0]["busy_ratio"] == pytest.approx(0.4, rel=1e-6)
        text = " ".join(run(path, *asked).stdout.split())
        assert "int8: " in text and "int8: no exits" in text
        narrow = json.loads(run(path, *asked, "--json", "--precision", "exact").stdout)["policies"]
        assert [p.get("precision") for p in narrow] == [None, None]
        assert run(path, "--precision", "int4").exit_code == 2

    def test_savings_are_those_on_the_newer_half(self, file: Path) -> None:
        value = json.loads(run(file, "--budget", 0.02, "--json", "--policy", "certified", "--policy", "greedy").stdout)
        newer = load_records(file).take(slice(N // 2, None))
        for entry in value["policies"]:
            seen = evaluate(newer, entry["active"], entry["thresholds"])
            assert (entry["saving"], entry["disagreement"]) == pytest.approx((seen.saving, seen.disagreement))

    def test_certified_holds_a_certificate_within_the_confidence(self, file: Path) -> None:
        (entry,) = json.loads(run(file, "--budget", 0.02, "--json", "--policy", "certified").stdout)["policies"]
        assert entry["certificate"]["p_value"] <= 0.05
        assert entry["certificate"]["k"] / entry["certificate"]["n"] < 0.02
        assert entry["saving"] > 0.05

    def test_nothing_certifiable_is_exits_off_and_not_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "few.npz"
        np.savez(path, **{k: v if k.endswith("seconds") else v[:40] for k, v in arrays().items()})
        (entry,) = json.loads(run(path, "--json", "--policy", "certified").stdout)["policies"]
        assert (entry["active"], entry["saving"], entry["certificate"]) == ([], 0.0, None)


class TestSlicesAndObjectives:
    @pytest.fixture
    def profiled(self, tmp_path: Path) -> Path:
        """Two slices, and costs at batches of 1 and 8, where a row more costs little."""
        path = tmp_path / "profiled.npz"
        made = arrays()
        batch = {
            f"{name}_seconds": np.stack([made[f"{name}_seconds"], made[f"{name}_seconds"] * 2])
            for name in ("segment", "ramp")
        }
        np.savez(path, **made | batch, batch_size=[1, 8], slice=np.arange(N) % 2)
        return path

    def test_certificates_tell_how_each_slice_did(self, profiled: Path) -> None:
        options = ("--budget", 0.03, "--slice-budget", "0=0.03", "--slice-budget", "1=0.04", "--policy", "certified")
        (entry,) = json.loads(run(profiled, *options, "--json").stdout)["policies"]
        assert [(s["slice"], s["budget"]) for s in entry["certificate"]["slices"]] == [(0, 0.03), (1, 0.04)]
        assert all(s["p_value"] <= 0.05 / 3 and s["k"] <= s["budget"] * s["n"] for s in entry["certificate"]["slices"])
        assert "slice 1:" in " ".join(run(profiled, *options).stdout.split())

    def test_the_exact_search_keeps_slice_budgets_on_its_records(self, profiled: Path) -> None:
        options = ("--budget", 0.03, "--slice-budget", "1=0.002", "--policy", "exact", "--json")
        (entry,) = json.loads(run(profiled, *options).stdout)["policies"]
        older = load_records(profiled).take(slice(0, N // 2))
        mine = older.take(np.flatnonzero(older.slice_id == 1))
        assert entry["active"]
        assert evaluate(mine, entry["active"], entry["thresholds"]).disagreement <= 0.002

    def test_busy_time_counts_less_where_rows_are_cheap(self, profiled: Path) -> None:
        options = ("--budget", 0.03, "--policy", "exact", "--objective", "busy", "--batch-size", 8)
        (entry,) = json.loads(run(profiled, *options, "--json").stdout)["policies"]
        assert entry["objective"]["name"] == "busy"
        assert 0 < entry["objective"]["saving"] < entry["saving"]
        assert "least busy time" in run(profiled, *options).stdout

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--objective", "fastest"), "choose from mean, p95, busy"),
            (("--objective", "busy"), "busy time needs costs by batch size"),
            (("--slice-budget", "0"), "such as 3=0.005"),
            (("--slice-budget", "0=2"), "such as 3=0.005"),
            (("--slice-budget", "0=0.1"), "slice is missing"),
        ],
    )
    def test_what_the_records_or_the_search_do_not_have_is_told(
        self, file: Path, options: tuple[str, ...], message: str
    ) -> None:
        result = run(file, *options)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())

    def test_a_slice_without_records_is_told(self, profiled: Path) -> None:
        result = run(profiled, "--slice-budget", "7=0.1", "--policy", "certified")
        assert result.exit_code == 2
        assert "names slice 7" in result.stderr


class TestForPeople:
    def test_the_table_says_on_which_rows_it_judges_and_what_it_means(self, file: Path) -> None:
        result = run(file, "--budget", 0.02)
        assert result.exit_code == 0
        text = " ".join(result.stdout.split())
        for name in showable(file):
            assert name in text
        assert "used for neither search nor certificate" in text
        assert "with 95% confidence" in text


def arrivals_file(tmp_path: Path, name: str = "arrivals.csv", text: str = "seconds\n0\n0.5\n0.75\n") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


class TestQueues:
    def replayed(self, file: Path, *args: object) -> list[dict[str, Any]]:
        result = run(file, "--budget", 0.02, "--json", "--policy", "exits-off", "--policy", "exact", *args)
        assert result.exit_code == 0, result.stderr
        entries: list[dict[str, Any]] = json.loads(result.stdout)["policies"]
        return entries

    def test_every_policy_meets_every_arrival_trace_and_batching(self, file: Path, tmp_path: Path) -> None:
        specs = ["poisson:100", "fixed:100", "bursts:100", arrivals_file(tmp_path)]
        args = [x for spec in specs for x in ("--arrivals", spec)] + ["--batching", "none", "--batching", "clockwork"]
        for entry in self.replayed(file, *args):
            seen = [(s["arrivals"], s["batching"]) for s in entry["serving"]]
            assert seen == [(str(spec), name) for spec in specs for name in ("none", "clockwork")]
            for serving in entry["serving"]:
                assert serving["answered"] + serving["dropped"] + serving["rejected"] == serving["requests"]

    def test_times_of_a_file_are_those_that_are_served(self, file: Path, tmp_path: Path) -> None:
        (off, _) = self.replayed(file, "--arrivals", arrivals_file(tmp_path))
        (serving,) = off["serving"]
        total = load_records(file).costs.total_seconds
        assert serving["requests"] == 3
        assert serving["rate"] == pytest.approx(2 / 0.75)
        assert serving["busy_seconds"] == pytest.approx(3 * total)
        assert (serving["p50_ratio"], serving["p95_ratio"]) == (1.0, 1.0)

    def test_npz_times_are_the_same_as_csv_times(self, file: Path, tmp_path: Path) -> None:
        np.savez(tmp_path / "t.npz", time=np.array([3.0, 3.5, 3.75]))
        entries = [self.replayed(file, "--arrivals", p)[0] for p in (tmp_path / "t.npz", arrivals_file(tmp_path))]
        one, other = ({**e["serving"][0], "arrivals": ""} for e in entries)
        assert one == other

    def test_load_scales_arrivals_to_what_one_worker_can_do(self, file: Path) -> None:
        (off, exact) = self.replayed(file, "--arrivals", "fixed", "--load", 0.5)
        assert off["serving"][0]["load"] == pytest.approx(0.5)
        assert off["serving"][0]["busy_share"] == pytest.approx(0.5, rel=0.01)
        assert exact["serving"][0]["busy_ratio"] < 1

    def test_results_only_keeps_the_worker_busy_and_still_answers_sooner(self, file: Path) -> None:
        def exact(execution: str) -> dict[str, Any]:
            args = ("--arrivals", "fixed", "--load", 0.2, "--execution", execution)
            serving: dict[str, Any] = self.replayed(file, *args)[1]["serving"][0]
            return serving

        neutral, saving = exact("ResultsOnly"), exact("ComputeSaving")
        assert neutral["busy_ratio"] > 1 > saving["busy_ratio"]
        assert neutral["p50_seconds"] == pytest.approx(saving["p50_seconds"])

    def test_the_same_seed_gives_the_same_arrivals(self, file: Path) -> None:
        first, again, other = (
            self.replayed(file, "--arrivals", "poisson:300", "--seed", seed)[0]["serving"][0]["mean_seconds"]
            for seed in (1, 1, 2)
        )
        assert first == again != other


class TestDraws:
    def drawn(self, file: Path, *args: object) -> dict[str, Any]:
        chosen = [x for name in ("exact", "certified", "exits-off", "oracle") for x in ("--policy", name)]
        result = run(file, "--budget", 0.02, "--json", "--draws", 6, *chosen, *args)
        assert result.exit_code == 0, result.stderr
        return {p["name"]: p["draws"] for p in json.loads(result.stdout)["policies"]}

    @pytest.mark.slow
    def test_medians_and_spread_of_the_truth_on_the_whole_pool_are_reported(self, file: Path) -> None:
        seen = self.drawn(file)
        for draws in seen.values():
            assert draws["n"] == 6
            for share in ("saving", "disagreement"):
                assert draws[share]["p5"] <= draws[share]["median"] <= draws[share]["p95"]
        assert seen["exits-off"]["disagreement"]["p95"] == 0
        assert (seen["exits-off"]["with_exits"], seen["certified"]["certified"]) == (0, 6)
        assert (seen["exact"]["of_the_pool"], seen["oracle"]["of_the_pool"]) == (True, False)
        assert seen["exact"]["saving"]["median"] > seen["certified"]["saving"]["median"] > 0

    @pytest.mark.slow
    def test_processes_change_nothing(self, file: Path) -> None:
        assert self.drawn(file, "--jobs", 2) == self.drawn(file)

    @pytest.mark.slow
    def test_more_rows_to_tune_on_bring_truth_nearer_to_the_budget(self, file: Path) -> None:
        few, many = (self.drawn(file, "--tune-rows", rows)["exact"]["disagreement"] for rows in (150, 3000))
        assert many["p95"] - many["p5"] < few["p95"] - few["p5"]

    def test_a_plan_is_judged_on_everything_that_was_recorded(self) -> None:
        pool = recorded(2000, R, seed=4)
        sample = draw_sample(pool, tune_rows=700, stream_rows=50, rng=draw_rng(0, 0))
        trace, truth = run_draw(sample, pool, [policy("exact")], Objective(0.02))["exact"]
        (plan,) = trace.plans
        seen = evaluate(pool, plan.active, plan.thresholds)
        assert (truth.saving, truth.disagreement) == pytest.approx((seen.saving, seen.disagreement))

    def test_plans_in_turn_count_by_the_requests_they_served(self) -> None:
        pool = recorded(2000, R, seed=4)
        plans = (PlanInForce(0, (), ()), PlanInForce(30, (1, 3), (0.1, 0.2)))
        stream = pool.take(np.arange(40))
        left = np.concatenate(
            [
                serve(stream.take(slice(p.since, end)), p.active, p.thresholds)[0]
                for p, end in zip(plans, (30, 40), strict=True)
            ]
        )
        seen = evaluate(pool, (1, 3), (0.1, 0.2))
        out = truth(Trace(left, plans, np.ones(40, dtype=bool)), stream, pool)
        assert (out.saving, out.disagreement, out.exact) == pytest.approx(
            (seen.saving / 4, seen.disagreement / 4, True)
        )

    def test_decisions_that_thresholds_do_not_explain_are_judged_on_the_stream(self) -> None:
        pool = recorded(300, R, seed=4)
        left = np.zeros(300, dtype=np.intp)
        patient = Trace(left, (PlanInForce(0, (0,), (0.0,)),), pool.agrees[:, 0])
        out = truth(patient, pool, pool)
        assert (out.exact, out.disagreement) == (False, patient.disagreement)


class TestFilesAndPictures:
    def test_several_files_are_a_list_in_their_order(self, file: Path, tmp_path: Path) -> None:
        second = tmp_path / "second.npz"
        np.savez(second, **arrays(seed=2))
        value = json.loads(run(file, second, "--json", "--policy", "exact").stdout)
        assert [entry["records"] for entry in value] == [str(file), str(second)]

    @pytest.mark.slow
    def test_pictures_are_written_where_they_have_something_to_show(self, file: Path, tmp_path: Path) -> None:
        folder = tmp_path / "pictures"
        bare = run(file, "--policy", "exact", "--policy", "exits-off", "--plots", folder)
        assert bare.exit_code == 0
        kinds = {path.stem.removeprefix("records-") for path in folder.glob("*.png")}
        assert kinds == {"saving-agreement", "agreement-over-time", "thresholds", "utilities"}
        run(file, "--policy", "exact", "--plots", folder, "--arrivals", "poisson", "--load", 0.5, "--draws", 3)
        assert (folder / "records-latency.png").is_file()

    @pytest.mark.slow
    def test_nothing_is_drawn_without_being_asked(self, file: Path) -> None:
        code = "import sys; from offramp_lab.replay.command import replay; sys.exit('matplotlib' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
        assert file.is_file()


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "bad.npz"
    np.savez(path, **{k: v for k, v in {**arrays(), **changes}.items() if v is not None})
    return path


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"uncertainty": np.where(np.arange(N * R).reshape(N, R) == 17, np.nan, 0.5)},
                ["uncertainty[3, 2]", "nan"],
            ),
            ({"uncertainty": np.full((N, R), 1.5)}, ["uncertainty[0, 0]", "[0, 1]"]),
            ({"final": np.zeros(7, dtype=int)}, ["final", "(7,)"]),
            ({"prediction": None}, ["prediction is missing"]),
            ({"ramp_seconds": np.full(R, -1.0)}, ["ramp_seconds[0]", ">= 0"]),
            ({"segment_seconds": np.zeros(R + 1)}, ["segment_seconds", "sums to 0"]),
            ({"uncertainty": np.zeros((0, R), dtype=np.float32)}, ["at least one row"]),
            ({"time": np.full(N, np.nan)}, ["time[0]", "finite"]),
            ({"final": np.array([None] * N, dtype=object)}, ["plain arrays"]),
        ],
        ids=["nan", "out-of-range", "wrong-shape", "missing", "negative-cost", "no-cost", "empty", "time", "pickled"],
    )
    def test_broken_records_are_one_line_that_names_array_and_row(
        self, tmp_path: Path, changes: dict[str, Any], words: list[str]
    ) -> None:
        assert_one_line_error(run(saved(tmp_path, **changes)), *words)

    @pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut off"], ids=["empty", "text", "half-a-zip"])
    def test_what_is_no_npz_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "x.npz"
        path.write_bytes(content)
        assert_one_line_error(run(path), "not an .npz")

    def test_a_corrupted_npz_is_refused(self, file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 0xFF
        file.write_bytes(bytes(content))
        assert_one_line_error(run(file), "does not hold plain arrays")

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        assert_one_line_error(run(tmp_path / "none.npz"), "cannot be read")

    @pytest.mark.parametrize(
        "option",
        [
            ("--budget", 0),
            ("--budget", 1),
            ("--confidence", 95),
            ("--policy", "magic"),
            ("--max-ramps", 9),
            ("--max-overhead", -1),
            ("--batch-size", 0),
            ("--draws", -1),
            ("--tune-rows", 0),
            ("--load", -0.5),
            ("--slo", 0),
            ("--execution", "Fast"),
            ("--batching", "magic"),
            ("--arrivals", "magic"),
            ("--arrivals", "poisson"),
            ("--arrivals", "poisson:fast"),
            ("--arrivals", "fixed:-1"),
            ("--arrivals", "none.csv"),
            ("--arrivals", "none.npz"),
        ],
        ids=str,
    )
    def test_options_out_of_range_are_refused(self, file: Path, option: tuple[str, object]) -> None:
        assert_one_line_error(run(file, *option), str(option[1]))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", ["no times"]),
            ("seconds\n", ["no times"]),
            ("0\nsoon\n", ["line 2", "soon"]),
            ("0\n2\n1\n", ["arrivals[2] is 1.0"]),
            ("0\nnan\n", ["arrivals[1] is nan"]),
        ],
        ids=["empty", "heading-only", "text", "falling", "nan"],
    )
    def test_arrivals_that_are_no_rising_times_are_refused(
        self, file: Path, tmp_path: Path, text: str, words: list[str]
    ) -> None:
        path = arrivals_file(tmp_path, text=text)
        assert_one_line_error(run(file, "--arrivals", path), str(path), *words)

    def test_an_npz_of_arrivals_needs_one_row_of_numbers(self, file: Path, tmp_path: Path) -> None:
        path = tmp_path / "t.npz"
        np.savez(path, time=np.zeros((2, 2)))
        assert_one_line_error(run(file, "--arrivals", path), "(2, 2)")
        np.savez(path, a=np.zeros(2), b=np.zeros(2))
        assert_one_line_error(run(file, "--arrivals", path), "`time`")
        path.write_bytes(b"hello")
        assert_one_line_error(run(file, "--arrivals", path), "not an .npz")

    def test_one_broken_file_of_several_prints_nothing_of_the_others(self, file: Path, tmp_path: Path) -> None:
        assert_one_line_error(run(file, tmp_path / "none.npz", "--policy", "exits-off"), "none.npz")

    def test_a_single_row_cannot_be_replayed(self, tmp_path: Path) -> None:
        path = tmp_path / "one.npz"
        np.savez(path, **{k: v if k.endswith("seconds") else v[:1] for k, v in arrays().items()})
        assert_one_line_error(run(path), "at least 2")


def assert_one_line_error(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    error, hint = [line for line in result.stderr.splitlines() if line.strip()]
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    for word in words:
        assert word in error
