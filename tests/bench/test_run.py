"""What makes a stage of ``make bench`` run again, and what is noted about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import run
from bench.provenance import processor, provenance, words
from bench.run import Stage, bench_files, code_key, stages

HERE = Path("bench").absolute()


def named(name: str) -> Stage:
    return next(stage for stage in stages(draws=1, jobs=1) if stage.name == name)


def test_a_stage_hangs_on_what_its_module_imports_near_and_far() -> None:
    names = {path.relative_to(HERE).as_posix() for path in bench_files("bench.served") if HERE in path.parents}
    assert {"served.py", "engine.py", "openloop.py", "load.py", "demo/pools.py"} <= names
    assert "report/page.py" not in names
    assert "serving.py" in {path.name for path in bench_files("bench.validate_simulator")}
    assert "peers/servers/lit.py" in {
        path.relative_to(HERE).as_posix() for path in bench_files("bench.peers") if HERE in path.parents
    }


@pytest.mark.parametrize("name", ["simulator", "engine", "served", "front", "peers", "verdict", "fleet"])
def test_a_changed_worker_makes_what_it_serves_run_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = code_key(named(name)), Path.read_bytes
    changed = lambda path: read(path) + (b"#" if path.name == "batcher.py" else b"")  # noqa: E731
    monkeypatch.setattr(run.Path, "read_bytes", changed)
    assert code_key(named(name)) != before


def test_a_search_does_not_hang_on_the_worker() -> None:
    assert named("search").runs == ()


def test_the_processor_is_named_with_what_int8_hangs_on() -> None:
    info = "model name\t: Fast One\nflags\t\t: fpu avx2 avx512f avx512_vnni\n"
    assert processor(info) == "Fast One (AVX-512, VNNI)"
    assert processor(info.replace(" avx512f avx512_vnni", "")) == "Fast One (AVX2, no VNNI)"
    assert processor("") == "unknown processor (no AVX2, no VNNI)"
    assert words(provenance()).count(",") >= 2
    assert words(None) == ""
