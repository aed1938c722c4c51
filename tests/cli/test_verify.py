"""`offramp verify`: what the operator stored is checked again from files alone, and a lie is found out."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scores import IDS, REQUEST, recorded, wide_arrays, with_int8
from typer.testing import CliRunner, Result

from offramp_cli.main import app
from offramp_core.certify import p_value
from offramp_core.records import Records
from offramp_core.tuning import Proposed, tune
from offramp_operator.local.records import save_pool
from offramp_operator.shell.record_pool import RampSetKey, RecordPool

N, R = 2000, 6
Json = dict[str, Any]


@dataclass(frozen=True)
class Story:
    """A service was tuned on these records and stored this RampConfig."""

    records: Records
    manifest: Json
    n_b: int

    def save(self, folder: Path, *, rows: slice | None = None, **changes: Any) -> Path:
        """A records file as a record pool writes it: no costs, and more rows than the test had."""
        taken = self.records.take(rows or slice(None))
        arrays = {
            "uncertainty": taken.uncertainty,
            "prediction": np.where(taken.agrees, 3, 4),
            "final": np.full(len(taken), 3),
            "time": taken.time,
            **changes,
        }
        path = folder / "records.npz"
        np.savez(path, **arrays)
        return path


@pytest.fixture(scope="module")
def story() -> Story:
    records = recorded(N, R, seed=5)
    outcome = tune(records, REQUEST)
    assert isinstance(outcome, Proposed)
    manifest = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "RampConfig",
        "metadata": {"name": outcome.plan.name("digits"), "namespace": "default"},
        "spec": outcome.plan.to_mapping(),
        "status": {"state": "Stable", "certificates": [outcome.certificate.to_mapping()]},
    }
    return Story(records, manifest, outcome.n_b)


def write(folder: Path, value: object, name: str = "plan.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(value), encoding="utf-8")
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["verify", *(str(a) for a in args)])


def changed(manifest: Json, **fields: object) -> Json:
    """The manifest with its certificate changed."""
    copy = json.loads(json.dumps(manifest))
    copy["status"]["certificates"][0].update(fields)
    return copy


class TestWhatHolds:
    def test_a_stored_plan_is_verified_without_anything_else(self, story: Story, tmp_path: Path) -> None:
        result = run(write(tmp_path, story.manifest))
        assert result.exit_code == 0, result.output
        assert "holds (test 1): at most 2.00% of answers differ, with 95% confidence" in result.stdout
        assert "--records" in result.stdout

    def test_with_the_held_out_records_the_counts_are_made_again(self, story: Story, tmp_path: Path) -> None:
        result = run(write(tmp_path, story.manifest), "--records", story.save(tmp_path, rows=slice(-story.n_b, None)))
        assert result.exit_code == 0, result.output
        assert "counted again from the records" in result.stdout

    def test_a_pool_that_holds_more_than_the_test_had_will_do(self, story: Story, tmp_path: Path) -> None:
        assert run(write(tmp_path, story.manifest), "--records", story.save(tmp_path)).exit_code == 0

    def test_the_pool_that_offramp_up_keeps_in_its_state_folder_will_do(self, story: Story, tmp_path: Path) -> None:
        n = len(story.records)
        columns = {
            "time": story.records.time,
            "uncertainty": story.records.uncertainty,
            "prediction": np.where(story.records.agrees, 3, 4),
            "final": np.full(n, 3),
            "reference": np.full(n, 3),
        }
        pool = RecordPool.load({**columns, "boot": np.array(["b"]), "next": np.array([n])})  # type: ignore[dict-item]
        save_pool(tmp_path, RampSetKey("sha256:b", "sha256:r"), pool.dump())
        (records,) = tmp_path.glob("*.npz")
        result = run(write(tmp_path, story.manifest), "--records", records)
        assert result.exit_code == 0, result.output
        assert "counted again" in result.stdout

    def test_a_plan_at_another_precision_is_counted_again_in_its_own_columns(self, tmp_path: Path) -> None:
        records = with_int8(recorded(N, R, seed=5), wrong=0.003, speed=0.4)
        outcome = tune(records, replace(REQUEST, precisions=("fp32", "int8")))
        assert isinstance(outcome, Proposed) and outcome.plan.precision == "int8"
        status = {"certificates": [outcome.certificate.to_mapping()]}
        plan = write(tmp_path, {"kind": "RampConfig", "spec": outcome.plan.to_mapping(), "status": status})
        path = tmp_path / "wide.npz"
        np.savez(path, **wide_arrays(records, IDS))
        result = run(plan, "--records", path)
        assert result.exit_code == 0, result.output
        assert "at int8, " in result.stdout and "counted again" in result.stdout
        narrow = {name: value for name, value in wide_arrays(records, IDS).items() if not name.startswith("ramp_")}
        np.savez(path, **narrow)
        assert run(plan, "--records", path).exit_code == 1

    def test_a_list_of_one_as_kubectl_prints_it_will_do(self, story: Story, tmp_path: Path) -> None:
        assert run(write(tmp_path, {"kind": "List", "items": [story.manifest]})).exit_code == 0

    def test_a_certificate_and_a_plan_in_files_of_their_own_will_do(self, story: Story, tmp_path: Path) -> None:
        certificate = write(tmp_path, story.manifest["status"]["certificates"][0], "certificate.json")
        plan = write(tmp_path, story.manifest["spec"], "plan.json")
        assert run(certificate, "--plan", plan).exit_code == 0

    def test_exits_off_needs_no_certificate(self, tmp_path: Path) -> None:
        spec = {"backboneDigest": "sha256:b", "rampSetDigest": "sha256:r", "ramps": []}
        result = run(write(tmp_path, {"kind": "RampConfig", "spec": spec}))
        assert result.exit_code == 0
        assert "needs no certificate" in result.stdout

    def test_what_a_canary_earned_is_told_apart_from_certificates(self, story: Story, tmp_path: Path) -> None:
        earned = {
            "method": "canary-acceptance",
            "budget": "0.02",
            "delta": "0.05",
            "testIndex": 2,
            "level": "0.0076",
            "n": 900,
            "k": 1,
            "recordsThrough": "5.0",
        }
        proofs = story.manifest["status"]["certificates"]
        both = {**story.manifest, "status": {"certificates": [*proofs, earned]}}
        assert run(write(tmp_path, both)).exit_code == 0
        alone = run(write(tmp_path, {**story.manifest, "status": {"certificates": [earned]}}))
        assert alone.exit_code == 2 and "earned its place in a canary" in alone.output

    def test_json_says_the_same(self, story: Story, tmp_path: Path) -> None:
        result = run(write(tmp_path, story.manifest), "--records", story.save(tmp_path), "--json")
        value = json.loads(result.stdout)
        assert set(value) == {"file", "planHash", "exitsOff", "verified", "certificates"}
        assert (value["verified"], value["certificates"][0]["holds"]) == (True, True)
        assert value["certificates"][0]["records"] == "Recounted"
        assert value["certificates"][0]["certificate"] == story.manifest["status"]["certificates"][0]


class TestWhatDoesNot:
    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"k": 0}, "p_value"),
            ({"planHash": "00"}, "belongs to plan"),
            ({"testIndex": 9}, "allowance"),
            ({"level": "nan"}, "level"),
        ],
    )
    def test_a_changed_certificate_is_found_out(self, story: Story, tmp_path: Path, fields: Json, word: str) -> None:
        result = run(write(tmp_path, changed(story.manifest, **fields)))
        assert result.exit_code == 1
        assert "DOES NOT HOLD" in result.stdout
        assert word in result.stdout

    def test_a_changed_threshold_is_found_out(self, story: Story, tmp_path: Path) -> None:
        copy = json.loads(json.dumps(story.manifest))
        copy["spec"]["ramps"][0]["threshold"] = "0.9"
        assert run(write(tmp_path, copy)).exit_code == 1

    def test_a_plan_that_exits_without_a_certificate_is_not_verified(self, story: Story, tmp_path: Path) -> None:
        result = run(write(tmp_path, {**story.manifest, "status": {}}))
        assert result.exit_code == 1
        assert "it has no certificate" in result.stdout

    def test_records_of_another_day_prove_nothing(self, story: Story, tmp_path: Path) -> None:
        records = story.save(tmp_path, rows=slice(0, 900))
        result = run(write(tmp_path, story.manifest), "--records", records)
        assert result.exit_code == 1
        assert "no certificate was made from the records" in result.stdout

    def test_counts_that_the_records_do_not_give_are_found_out(self, story: Story, tmp_path: Path) -> None:
        """A forged count with its fitting p-value passes the arithmetic; only the records tell."""
        certificate = story.manifest["status"]["certificates"][0]
        k = certificate["k"] - 1
        forged = changed(story.manifest, k=k, pValue=repr(p_value(k, certificate["n"], budget=0.02)))
        file = write(tmp_path, forged)
        assert run(file).exit_code == 0
        result = run(file, "--records", story.save(tmp_path))
        assert result.exit_code == 1
        assert "the records give" in result.stdout


class TestBadInput:
    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("", "one object"),
            ("a: b: c", "neither YAML nor JSON"),
            ("ramps: []\nramps: []", "the key 'ramps' stands twice"),
            ("kind: Pod", "RampConfig"),
            ("kind: RampConfig\nspec: 3", "spec"),
            (
                "kind: RampConfig\nspec: {backboneDigest: b, rampSetDigest: r}\nstatus: {certificates: [{}]}",
                "not a certificate",
            ),
            (
                "kind: RampConfig\nspec: {backboneDigest: b, rampSetDigest: r}\nstatus: {certificates: 3}",
                "must be a list",
            ),
            ("method: rank-path", "--plan"),
        ],
    )
    def test_what_is_no_plan_is_one_line(self, tmp_path: Path, text: str, word: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(text, encoding="utf-8")
        assert_one_line_error(run(path), word)

    def test_a_missing_file_is_one_line(self, tmp_path: Path) -> None:
        assert_one_line_error(run(tmp_path / "none.yaml"), "cannot be read")

    def test_broken_records_name_array_and_row(self, story: Story, tmp_path: Path) -> None:
        uncertainty = story.records.uncertainty.copy()
        uncertainty[3, 2] = np.nan
        records = story.save(tmp_path, uncertainty=uncertainty)
        assert_one_line_error(run(write(tmp_path, story.manifest), "--records", records), "uncertainty[3, 2]", "nan")

    def test_records_that_are_no_npz_are_one_line(self, story: Story, tmp_path: Path) -> None:
        file = write(tmp_path, story.manifest)
        assert_one_line_error(run(file, "--records", file), "not an .npz")


def assert_one_line_error(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    error, hint = [line for line in result.stderr.splitlines() if line.strip()]
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    for word in words:
        assert word in error
