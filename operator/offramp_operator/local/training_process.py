"""Training of ramps on this machine: one process at a time, which ends with the shell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from offramp_core.control.snapshot import TrainingOrder, TrainingReport
from offramp_operator.local.process import start_logged
from offramp_operator.local.state import StateFolder, replace_file
from offramp_operator.shell.log import log_event

TRAIN_COMMAND = (sys.executable, "-m", "offramp_worker.prepare.captured")
LIMIT_SECONDS = 3600.0


class Trainer:
    """Runs the training of one service.

    A training that a killed shell had begun is begun again: nothing of it is in the store unless it was complete.
    """

    def __init__(
        self,
        state: StateFolder,
        *,
        command: Sequence[str] = TRAIN_COMMAND,
        changed: Callable[[], None] = lambda: None,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._state, self._command, self._changed, self._limit = state, command, changed, limit_seconds
        self._order: TrainingOrder | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def report(self) -> TrainingReport | None:
        """What became of the last training, also of one before a restart."""
        if self._order is not None and self._task is not None and not self._task.done():
            return TrainingReport(self._order.attempt, "Running", since=self._order.since)
        try:
            fields = json.loads(self._state.training_file.read_text(encoding="utf-8"))
            return TrainingReport(**fields)
        except (OSError, ValueError, TypeError):
            return None

    def begin(self, order: TrainingOrder, *, bundle: Path) -> None:
        """Start a training; one that runs, or has ended, is left alone."""
        report, wanted = self.report, (order.attempt, order.since)
        if report is not None and (report.state == "Running" or (report.attempt, report.since) == wanted):
            return
        self._order = order
        self._task = asyncio.create_task(self._run(order, bundle), name=f"train-{order.attempt}")

    async def close(self) -> None:
        """End a training that is under way; it begins again with the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, order: TrainingOrder, bundle: Path) -> None:
        result = self._state.root / f".training-{order.attempt}.json"
        result.unlink(missing_ok=True)
        log_event("training-started", f"attempt {order.attempt}", attempt=order.attempt)
        code = await self._process(order, bundle, result)
        report = replace(_report(order.attempt, result, code), since=order.since)
        result.unlink(missing_ok=True)
        text = json.dumps(asdict(report)).encode()
        await asyncio.to_thread(replace_file, self._state.training_file, text + b"\n")
        level = logging.WARNING if report.state == "Failed" else logging.INFO
        log_event("training-ended", report.message or report.state, level=level, attempt=order.attempt)
        self._changed()

    async def _process(self, order: TrainingOrder, bundle: Path, result: Path) -> int | None:
        """The exit code, or None where it took too long and was killed."""
        options = {
            "bundle": bundle,
            "captures": self._state.workers,
            "store": self._state.ramp_sets,
            "result": result,
            "from": order.ramp_set_digest,
            "budget": repr(order.max_disagreement),
            "keep": ",".join(order.keep),
            "seed": order.attempt,
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        log = os.open(self._state.logs / "training.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        process = await start_logged([*self._command, *arguments], log=log)
        try:
            async with asyncio.timeout(self._limit):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended, and asyncio has yet to say so
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def _report(attempt: int, result: Path, code: int | None) -> TrainingReport:
    """What the process wrote, or how it ended without a word."""
    try:
        parsed = json.loads(result.read_text(encoding="utf-8"))
        if "error" in parsed:
            return TrainingReport(attempt, "Failed", message=str(parsed["error"])[:500])
        return TrainingReport(
            attempt,
            "Succeeded",
            ramp_set_digest=str(parsed["ramp_set_digest"]),
            rows=int(parsed["rows"]),
            saving_before=float(parsed["saving_before"]),
            saving_after=float(parsed["saving_after"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        how = "took too long and was ended" if code is None else f"ended with exit code {code}; see logs/training.log"
        return TrainingReport(attempt, "Failed", message=f"the training {how}")
