"""Run the tutorial: its shell blocks in order, in one shell, and compare what they print with what the page shows.

A block is marked by a comment before it: ``tutorial: WHO [wait]``. WHO is ``both``, ``machine``, ``cluster`` or a part
with a name of its own; ``wait`` repeats the block until its output is as shown, as a reader would. Shown output is
compared loosely: lines in order, any number for a number, any hash for a hash, and anything for an ellipsis.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from blocks import ROOT, Block, blocks_of

HASH, NUMBER = re.compile(r"\b[0-9a-f]{10}\b"), re.compile(r"\d[\d,.]*")


@dataclass(frozen=True, slots=True)
class Step:
    """One block to run, and the lines it should print."""

    block: Block
    who: str
    wait: bool
    expected: tuple[str, ...] = ()


def steps(page: Path = ROOT / "docs" / "tutorial.md") -> list[Step]:
    """The marked blocks of the tutorial, each with the output block that follows it."""
    found: list[Step] = []
    for block in blocks_of(page.read_text(encoding="utf-8"), page.name):
        words = block.note.split()
        if words[:1] == ["tutorial:"]:
            found.append(Step(block, words[1], "wait" in words))
        elif words == ["output"]:
            last = found[-1]
            found[-1] = Step(
                last.block, last.who, last.wait, tuple(line for line in block.text.splitlines() if line.strip())
            )
    return found


def missing(expected: Iterable[str], output: str) -> str:
    """The first expected line that is not printed, in order; empty when all are."""
    lines = iter([_loose(line) for line in output.splitlines()])
    for wanted in expected:
        pattern = ".*".join(re.escape(part.strip()) for part in _loose(wanted).split("…"))
        if not any(re.search(pattern, line) for line in lines):
            return wanted
    return ""


def _loose(line: str) -> str:
    return " ".join(NUMBER.sub("0", HASH.sub("HASH", line)).split())


@dataclass
class Shell:
    """One bash for the whole page, so that variables and background jobs live on."""

    folder: Path
    replaced: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.run("set -m", seconds=60)

    def run(self, text: str, *, seconds: float) -> tuple[int, str]:
        """Exit status and output of a piece of shell.

        Raises
        ------
        AssertionError
            It did not end in time.
        """
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        mark, script, out = uuid.uuid4().hex, self.folder / ".block.sh", self.folder / ".block.out"
        script.write_text(text)
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f"source {script} > {out} 2>&1; echo {mark} $?\n")
        self._bash.stdin.flush()
        timer = _Timer(self._bash, seconds)
        line = self._bash.stdout.readline()
        timer.stop()
        output = out.read_text() if out.exists() else ""
        assert line.startswith(mark), f"did not end within {seconds:.0f} s:\n{text}\n{output[-3000:]}"
        self.log.append(f"$ {text}{output}")
        return int(line.split()[1]), output

    def step(self, step: Step, *, seconds: float) -> None:
        """Run a block; it must succeed and print what the page shows."""
        deadline = time.monotonic() + seconds
        while True:
            code, output = self.run(step.block.text, seconds=seconds)
            absent = missing(step.expected, output)
            if code == 0 and not absent:
                return
            assert step.wait and time.monotonic() < deadline, (
                f"{step.block.where} ended with {code}"
                + (f"; the page shows {absent!r}" if absent else "")
                + f":\n{output[-6000:]}"
            )
            time.sleep(0.5)

    def close(self) -> None:
        """End the shell and what it left in the background."""
        if self._bash.poll() is None:
            self.run("kill $(jobs -p) 2> /dev/null; wait; true", seconds=180)
            self._bash.kill()
        self._bash.wait(60)


class _Timer:
    """Kills a process after a while, so that a read from it ends."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self._timer = threading.Timer(seconds, process.kill)
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
