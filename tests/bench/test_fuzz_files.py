"""``bench.fuzz files``: damaged files are refused by name or answered rightly, and what must not happen would be
seen."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import fuzz_files
from bench.fuzz_files import Kind, finished, start
from bench.fuzz_mutations import CANARY, MARKER

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_damaged_files_of_every_kind_are_refused_by_name_or_answered_rightly(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "bench.fuzz", "files", "--count", "40", "--seed", "7", "--out", str(out)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # it forks, which takes a process without threads
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    told = json.loads(out.read_text())
    assert told["wrong"] == []
    assert told["cases"] == 40
    outcomes = {outcome for counts in told["kinds"].values() for outcome in counts}
    assert {"refused", "served"} <= outcomes


def executes(case: Path) -> str:
    exec(f"open({str(case / MARKER)!r}, 'w').close()")
    return "read"


def follows(case: Path) -> str:
    (case / CANARY).read_bytes()
    return "read"


def writes_elsewhere(case: Path) -> str:
    (case.parents[1] / "elsewhere").write_text("x")
    return "read"


def starts(_case: Path) -> str:
    os.system("true")
    return "read"


def connects(_case: Path) -> str:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 9))
    return "read"


def dies(_case: Path) -> str:
    faulthandler.disable()  # of pytest's: nobody needs the traceback of what is meant to happen
    ctypes.string_at(0)
    return "read"


def never_ends(_case: Path) -> str:
    while True:
        time.monotonic()


def has_no_name(_case: Path) -> str:
    raise KeyError("x")


def takes_all_memory(_case: Path) -> str:
    return str(len(bytearray(1 << 40)))


WRONG: dict[str, tuple[Callable[[Path], str], str]] = {
    "executes": (executes, "wrote|did open"),
    "follows a name": (follows, "did open"),
    "writes elsewhere": (writes_elsewhere, "did open"),
    "starts a program": (starts, r"did os\.system"),
    "connects": (connects, r"did socket\.connect"),
    "dies": (dies, "the process died .SIGSEGV."),
    "never ends": (never_ends, "computed for 1 s"),
    "an error without a name": (has_no_name, "KeyError"),
    "takes all memory": (takes_all_memory, "MemoryError"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_file_must_not_do_is_seen(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, detail = WRONG[case]
    monkeypatch.setattr(fuzz_files, "KINDS", {"one": Kind(lambda _rng, _seeds, _case: None, read)})
    monkeypatch.setattr(fuzz_files, "CPU_SECONDS", 1)
    monkeypatch.setattr(fuzz_files.tempfile, "gettempdir", lambda: "/nowhere")  # in which this test's folder lies
    (tmp_path / "work").mkdir()
    child = start(0, 0, tmp_path / "seeds", tmp_path / "work")
    while (told := finished(child)) is None:
        time.sleep(0.01)
    assert told["outcome"] == "wrong"
    assert re.search(detail, told["detail"]), told
