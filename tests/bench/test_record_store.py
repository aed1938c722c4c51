"""Record sets on disk: kept by content, replaced as a whole, readable as records files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from bench.record.__main__ import ensure, main
from bench.record.catalog import Recorder
from bench.record.costs import Costs, with_costs
from bench.record.store import COST_ARRAYS, Keys, RecordSet, content_key, keys_of, read_set, write_set

from offramp_lab.replay.load import load_records
from offramp_worker.prepare.progress import Reporter


def _set(name: str = "made", *, n: int = 5) -> RecordSet:
    rng = np.random.default_rng(3)
    answers = rng.integers(0, 3, n)
    arrays = {
        "uncertainty": rng.random((n, 2), dtype=np.float32),
        "one_minus_max": rng.random((n, 2), dtype=np.float32),
        "prediction": rng.integers(0, 3, (n, 2)),
        "final": answers,
        "reference": answers,
        "row": np.arange(n),
        "batch_size": np.array([1, 8]),
        "segment_seconds": np.ones((2, 3)),
        "ramp_seconds": np.full((2, 2), 0.01),
        "regroup_seconds": np.full(2, 0.001),
    }
    return RecordSet(name, arrays, {"accuracy": 0.5, "ramps": [{"id": "a", "depth": 0.5}, {"id": "b", "cost": 0.2}]})


def _key(folder: Path, code: str, *, data: bytes = b"data", **arguments: object) -> str:
    (folder / "code.py").write_text(code)
    (folder / "data.bin").write_bytes(data)
    return content_key(modules=[str(folder / "code.py")], files=[folder / "data.bin"], arguments=arguments)


KEYS = Keys(scores="s1", costs="c1")


def test_a_written_set_is_held_under_its_keys(tmp_path: Path) -> None:
    write_set(tmp_path, _set(), keys=KEYS)
    assert keys_of(tmp_path, "made") == KEYS
    assert keys_of(tmp_path, "other") == Keys()


def test_a_set_whose_arrays_were_changed_afterwards_is_not_held(tmp_path: Path) -> None:
    target = write_set(tmp_path, _set(), keys=KEYS)
    target.write_bytes(target.read_bytes()[:-1] + b"x")
    assert keys_of(tmp_path, "made") == Keys()


@pytest.mark.parametrize("text", ["", "{", "[]"], ids=["empty", "broken", "no object"])
def test_unreadable_facts_mean_recording_again(tmp_path: Path, text: str) -> None:
    write_set(tmp_path, _set(), keys=KEYS)
    (tmp_path / "made.json").write_text(text)
    assert keys_of(tmp_path, "made") == Keys()


def test_new_costs_replace_old_ones_and_leave_the_scores(tmp_path: Path) -> None:
    write_set(tmp_path, _set(), keys=KEYS)
    arrays = {
        "batch_size": np.array([4]),
        "segment_seconds": np.full((1, 3), 2.0),
        "ramp_seconds": np.full((1, 2), 0.5),
        "regroup_seconds": np.zeros(1),
    }
    shares = ({"depth": 0.3, "cost": 0.1}, {"depth": 0.6, "cost": 0.1})
    write_set(tmp_path, with_costs(read_set(tmp_path, "made"), Costs(arrays, shares, "again")), keys=Keys("s1", "c2"))
    again = read_set(tmp_path, "made")
    np.testing.assert_array_equal(again.arrays["uncertainty"], _set().arrays["uncertainty"])
    np.testing.assert_array_equal(again.arrays["ramp_seconds"], arrays["ramp_seconds"])
    assert again.facts["ramps"][1] == {"id": "b", "depth": 0.6, "cost": 0.1}
    assert again.facts["costs"] == "again"
    assert keys_of(tmp_path, "made") == Keys("s1", "c2")


def test_a_set_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    made = _set()
    write_set(tmp_path, made, keys=KEYS)
    again = read_set(tmp_path, "made")
    assert set(again.arrays) == set(made.arrays)
    for name, value in made.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], value)
    assert again.facts["accuracy"] == 0.5


def test_a_written_set_is_a_valid_records_file(tmp_path: Path) -> None:
    records = load_records(write_set(tmp_path, _set(), keys=KEYS))
    assert (len(records), records.n_ramps) == (5, 2)
    assert records.profile is not None
    assert [batch.batch_size for batch in records.profile.batches] == [1, 8]


def test_a_set_that_cannot_be_written_leaves_the_earlier_one_and_no_litter(tmp_path: Path) -> None:
    target = write_set(tmp_path, _set(), keys=KEYS)
    before = target.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_set(tmp_path, RecordSet("made", _set(n=9).arrays, {"accuracy": float("nan")}), keys=Keys("s2", "c2"))
    assert target.read_bytes() == before
    assert keys_of(tmp_path, "made") == KEYS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.json", "made.npz"]


def test_explaining_the_code_keeps_the_key_and_changing_it_does_not(tmp_path: Path) -> None:
    plain = _key(tmp_path, "def f(x):\n    return x + 1\n", seed=0)
    explained = _key(tmp_path, '"""What."""\ndef f(x):\n    """Why."""\n    return x  +  1  # really\n', seed=0)
    changed = _key(tmp_path, "def f(x):\n    return x + 2\n", seed=0)
    assert plain == explained
    assert plain != changed


def test_data_and_arguments_change_the_key(tmp_path: Path) -> None:
    code = "x = 1\n"
    keys = {_key(tmp_path, code, seed=0), _key(tmp_path, code, seed=1), _key(tmp_path, code, data=b"other", seed=0)}
    assert len(keys) == 3


def _recorder(made: list[str], *, files: list[Path], costs_from: tuple[ModuleType, ...] = ()) -> Recorder:
    costs = Costs({name: _set().arrays[name] for name in COST_ARRAYS}, ({"depth": 0.1}, {"depth": 0.2}))

    def record(_reporter: Reporter, _sets: Mapping[str, RecordSet]) -> list[RecordSet]:
        made.append("scores")
        return [_set()]

    def measure(_reporter: Reporter, _sets: Mapping[str, RecordSet]) -> dict[str, Costs]:
        made.append("costs")
        return {"made": costs}

    return Recorder(("made",), lambda: files, record, measure, scores_from=(), costs_from=costs_from)


def test_a_set_is_recorded_once_and_its_costs_again_without_its_scores(tmp_path: Path) -> None:
    made: list[str] = []
    data = tmp_path / "data.bin"
    data.write_bytes(b"1")
    quiet, out = Reporter(quiet=True), tmp_path / "out"
    ensure(_recorder(made, files=[data]), out, quiet)
    assert made == ["scores", "costs"]
    ensure(_recorder(made, files=[data]), out, quiet)
    assert made == ["scores", "costs"]
    ensure(_recorder(made, files=[data]), out, quiet, again=True)
    ensure(_recorder(made, files=[data], costs_from=(json,)), out, quiet)
    assert made == ["scores", "costs", "costs", "costs"]
    data.write_bytes(b"2")
    ensure(_recorder(made, files=[data]), out, quiet)
    assert made[4:] == ["scores", "costs"]


def test_an_unknown_set_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resnet57-mx4", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "'resnet57-mx4' is unknown" in message
    assert "resnet56-mx4" in message


def test_a_missing_data_file_is_named_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path / "nothing"))
    assert main(["all", "--out", str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert any(
        "resnet56-mx4, resnet56-gap not recorded" in line and "cifar10_test.webp is missing" in line for line in lines
    )
    assert any("sst2-mean, sst2-cls not recorded" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_facts_taken_over_from_another_set_do_not_stand_for_this_one(tmp_path: Path) -> None:
    write_set(tmp_path, _set("first"), keys=KEYS)
    first = read_set(tmp_path, "first")
    write_set(tmp_path, RecordSet("second", _set(n=7).arrays, first.facts), keys=Keys("s2", "c2"))
    assert keys_of(tmp_path, "second") == Keys("s2", "c2")
    assert read_set(tmp_path, "second").facts["name"] == "second"
