"""The training process of the embedded shell: begun once per attempt, told about, limited, and ended with the shell."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from offramp_core.control.snapshot import TrainingOrder, TrainingReport
from offramp_operator.local.state import StateFolder
from offramp_operator.local.training_process import Trainer

ORDER = TrainingOrder(3, "sha256:" + "a" * 64, 0.02, keep=("sha256:" + "b" * 64,))


def command(folder: Path, body: str) -> tuple[str, ...]:
    """A program in place of the trainer; ``given`` are its options."""
    program = folder / "trainer.py"
    lines = "import json, sys, time\nfrom pathlib import Path\ngiven = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    program.write_text(lines + textwrap.dedent(body))
    return (sys.executable, str(program))


RESULT = """
    Path("{out}").open("a").write(json.dumps(given) + "\\n")
    told = {{"ramp_set_digest": "sha256:" + "c" * 64, "rows": 2000, "saving_before": 0.1, "saving_after": 0.3}}
    Path(given["--result"]).write_text(json.dumps(told))
"""


async def ended(trainer: Trainer) -> TrainingReport:
    async with asyncio.timeout(60):
        while (report := trainer.report) is None or report.state == "Running":
            await asyncio.sleep(0.02)
    return report


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def test_an_attempt_is_begun_once_and_its_report_outlives_the_shell(state: StateFolder, tmp_path: Path) -> None:
    out = tmp_path / "given"

    async def story() -> None:
        trainer = Trainer(state, command=command(tmp_path, RESULT.format(out=out)))
        assert trainer.report is None
        trainer.begin(ORDER, bundle=tmp_path / "bundle")
        trainer.begin(ORDER, bundle=tmp_path / "bundle")
        report = await ended(trainer)
        assert report == TrainingReport(3, "Succeeded", "sha256:" + "c" * 64, 2000, 0.1, 0.3)
        trainer.begin(ORDER, bundle=tmp_path / "bundle")
        assert Trainer(state).report == report
        await trainer.close()

    run(story())
    lines = out.read_text().splitlines()
    assert len(lines) == 1
    for part in (str(tmp_path / "bundle"), ORDER.ramp_set_digest, ORDER.keep[0], str(state.ramp_sets), '"0.02"'):
        assert part in lines[0]
    assert [path.name for path in state.root.glob(".training*")] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("Path(given['--result']).write_text(json.dumps({'error': 'no room'})); sys.exit(1)", "no room"),
        ("sys.exit(7)", "exit code 7; see logs/training.log"),
        ("Path(given['--result']).write_text('{}')", "ended with exit code 0"),
        ("time.sleep(600)", "took too long"),
    ],
)
def test_a_training_that_fails_says_why(state: StateFolder, tmp_path: Path, body: str, said: str) -> None:
    async def story() -> None:
        limit = 0.5 if said == "took too long" else 60.0  # a busy machine takes long to start a process
        trainer = Trainer(state, command=command(tmp_path, body), limit_seconds=limit)
        trainer.begin(ORDER, bundle=tmp_path)
        report = await ended(trainer)
        assert (report.attempt, report.state) == (3, "Failed")
        assert said in report.message

    run(story())


def test_a_training_that_ends_by_itself_just_when_its_time_is_up_is_told_about(
    state: StateFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(group: int, number: int) -> None:
        kill(group, number)
        raise ProcessLookupError

    kill = os.killpg
    monkeypatch.setattr(os, "killpg", too_late)

    async def story() -> None:
        trainer = Trainer(state, command=command(tmp_path, "time.sleep(600)"), limit_seconds=0.5)
        trainer.begin(ORDER, bundle=tmp_path)
        assert "took too long" in (await ended(trainer)).message

    run(story())


def test_a_training_ends_with_the_shell_and_begins_again_with_the_next_one(state: StateFolder, tmp_path: Path) -> None:
    started = tmp_path / "started"
    body = f"Path({str(started)!r}).write_text(''); time.sleep(600)"

    async def story() -> None:
        trainer = Trainer(state, command=command(tmp_path, body))
        trainer.begin(ORDER, bundle=tmp_path)
        async with asyncio.timeout(60):
            while not started.exists():
                await asyncio.sleep(0.02)
        assert trainer.report == TrainingReport(3, "Running")
        await asyncio.wait_for(trainer.close(), 60)
        assert Trainer(state).report is None

    run(story())
