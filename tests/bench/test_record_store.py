"""Record sets on disk: kept by content, replaced as a whole, readable as records files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.record.__main__ import main
from bench.record.store import RecordSet, content_key, is_current, read_set, write_set

from offramp_cli.replay import load_records


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
    return RecordSet(name, arrays, {"accuracy": 0.5, "ramps": []})


def _key(folder: Path, code: str, *, data: bytes = b"data", **arguments: object) -> str:
    (folder / "code.py").write_text(code)
    (folder / "data.bin").write_bytes(data)
    return content_key(modules=[str(folder / "code.py")], files=[folder / "data.bin"], arguments=arguments)


def test_a_set_that_was_written_is_current_under_its_key_only(tmp_path: Path) -> None:
    write_set(tmp_path, _set(), key="k1")
    assert is_current(tmp_path, "made", "k1")
    assert not is_current(tmp_path, "made", "k2")
    assert not is_current(tmp_path, "other", "k1")


def test_a_set_whose_arrays_were_changed_afterwards_is_not_current(tmp_path: Path) -> None:
    target = write_set(tmp_path, _set(), key="k1")
    target.write_bytes(target.read_bytes()[:-1] + b"x")
    assert not is_current(tmp_path, "made", "k1")


@pytest.mark.parametrize("text", ["", "{", "[]"], ids=["empty", "broken", "no object"])
def test_unreadable_facts_mean_recording_again(tmp_path: Path, text: str) -> None:
    write_set(tmp_path, _set(), key="k1")
    (tmp_path / "made.json").write_text(text)
    assert not is_current(tmp_path, "made", "k1")


def test_a_set_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    made = _set()
    write_set(tmp_path, made, key="k1")
    again = read_set(tmp_path, "made")
    assert set(again.arrays) == set(made.arrays)
    for name, value in made.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], value)
    assert again.facts["accuracy"] == 0.5
    assert again.facts["key"] == "k1"


def test_a_written_set_is_a_valid_records_file(tmp_path: Path) -> None:
    records = load_records(write_set(tmp_path, _set(), key="k1"))
    assert (len(records), records.n_ramps) == (5, 2)
    assert records.profile is not None
    assert [batch.batch_size for batch in records.profile.batches] == [1, 8]


def test_a_set_that_cannot_be_written_leaves_the_earlier_one_and_no_litter(tmp_path: Path) -> None:
    target = write_set(tmp_path, _set(), key="k1")
    before = target.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_set(tmp_path, RecordSet("made", _set(n=9).arrays, {"accuracy": float("nan")}), key="k2")
    assert target.read_bytes() == before
    assert is_current(tmp_path, "made", "k1")
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
    assert any("resnet56-mx4 is not recorded" in line and "cifar10_test.webp is missing" in line for line in lines)
    assert any("sst2-mean is not recorded" in line for line in lines)
    assert not (tmp_path / "out").exists()
