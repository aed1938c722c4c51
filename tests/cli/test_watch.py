"""``--watch`` of get, top and why, as processes: they show what has changed, in place on a terminal, and end on
Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Stored = Callable[..., Path]
DEADLINE_SECONDS = 120.0
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What each says of a service that collects labels, and what of the same one when its plan has been promoted.
BEFORE_AND_AFTER = [
    ("get", "exits off", "99.1% agree"),
    ("top", "200/500", "99.1%"),
    ("why", "Rollout: none so far", "Rollout sim-1: "),
]


class Watching:
    """A command that watches, and everything it has written."""

    def __init__(self, process: subprocess.Popen[bytes], out: int) -> None:
        self.process, self.written = process, ""
        self._out = out
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str) -> None:
        """Until ``text`` stands in what was written, control sequences aside."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text not in CONTROL.sub("", self.written):
            assert self.process.poll() is None and time.monotonic() < deadline, f"no {text!r} in {self.written!r}"
            time.sleep(0.05)

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        return code

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._out, 65536)
            except OSError:  # what a terminal answers when the last writer is gone
                return
            if not read:
                return
            self.written += read.decode()


def ends_on_interrupt() -> None:
    """Whatever this process inherited: a shell starts what runs in the background deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def watching(*arguments: str | Path, terminal: bool) -> Iterator[Watching]:
    out, into = pty.openpty() if terminal else os.pipe()
    env = {**os.environ, "COLUMNS": "250", "LINES": "60", "TERM": "xterm"}
    command = [sys.executable, "-m", "offramp_cli", *map(str, arguments), "--watch"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=into,
        stderr=subprocess.PIPE,
        env=env,
        preexec_fn=ends_on_interrupt,  # noqa: PLW1509 - one call to the kernel
    )
    os.close(into)
    try:
        yield Watching(process, out)
    finally:
        process.kill()
        process.communicate()
        os.close(out)


def becomes(folder: Path, later: Path) -> None:
    """The state of ``folder`` is from now on that of ``later``, as a shell would write it: each file at once, the
    service last."""
    for file in sorted(later.rglob("*.json"), reverse=True):
        target = folder / file.relative_to(later)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)


@pytest.mark.parametrize(("command", "before", "after"), BEFORE_AND_AFTER)
def test_on_a_terminal_it_is_drawn_anew_in_place_when_something_changes(
    stored: Stored, command: str, before: str, after: str
) -> None:
    folder, later = stored("collecting"), stored("promoted_once")
    with watching(command, "--state", folder, terminal=True) as shown:
        shown.wait_for(before)
        assert after not in CONTROL.sub("", shown.written)
        becomes(folder, later)
        shown.wait_for(after)
        assert "\x1b[2K" in shown.written, "the lines of before are erased"
        assert shown.interrupt() == 130
        assert "Traceback" not in shown.written


@pytest.mark.parametrize(("command", "before", "after"), BEFORE_AND_AFTER)
def test_into_a_pipe_only_what_changes_is_written(stored: Stored, command: str, before: str, after: str) -> None:
    folder, later = stored("collecting"), stored("promoted_once")
    with watching(command, "--state", folder, terminal=False) as shown:
        shown.wait_for(before)
        becomes(folder, later)
        shown.wait_for(after)
        assert shown.interrupt() == 130
        assert shown.written.count(before) == 1, "what stays as it is is not repeated"
        assert "\x1b" not in shown.written
        assert shown.process.stderr is not None and shown.process.stderr.read() == b""


def test_machines_get_a_document_for_every_change(stored: Stored) -> None:
    folder, later = stored("collecting"), stored("promoted_once")
    with watching("top", "-o", "json", "--state", folder, terminal=False) as shown:
        shown.wait_for("labelsNeeded")
        becomes(folder, later)
        shown.wait_for("99.1%")
        assert shown.interrupt() == 130
    decoder, rest, documents = json.JSONDecoder(), shown.written, []
    while rest.strip():
        document, end = decoder.raw_decode(rest.lstrip())
        documents.append(document)
        rest = rest.lstrip()[end:]
    assert len(documents) >= 2 and documents[0] != documents[-1]
