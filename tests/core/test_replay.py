"""`offramp replay`: policies compared on rows none of them saw, one exact JSON contract, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from scores import recorded
from typer.testing import CliRunner, Result

from offramp_cli.replay import load_records, replay
from offramp_core.evaluate import evaluate
from offramp_core.policies import POLICIES

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


class TestForPeople:
    def test_the_table_says_on_which_rows_it_judges_and_what_it_means(self, file: Path) -> None:
        result = run(file, "--budget", 0.02)
        assert result.exit_code == 0
        text = " ".join(result.stdout.split())
        for name in showable(file):
            assert name in text
        assert "used for neither search nor certificate" in text
        assert "with 95% confidence" in text

    def test_help_shows_an_example(self) -> None:
        assert "offramp replay" in run("--help").stdout


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
        ],
        ids=str,
    )
    def test_options_out_of_range_are_refused(self, file: Path, option: tuple[str, object]) -> None:
        assert_one_line_error(run(file, *option), str(option[1]))

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
