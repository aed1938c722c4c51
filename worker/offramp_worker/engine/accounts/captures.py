"""Inputs kept for training ramps: a uniform sample of bounded size in a folder, and only while somebody asks for it.

What is offered is what audits recorded, an equal-weight sample of all requests; of these every one is kept with the
same probability (algorithm R of Vitter 1985, "Random sampling with a reservoir"). Rows live in memory and are written
as shards by a thread of their own, so that no batch waits for a disk. A shard is replaced as a whole, readable by its
owner alone; a worker begins with an empty folder. Where workers share the folder above it, they also remove what
workers left there that ended without a chance to do so.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.lengths import pad_rows
from offramp_worker.bundle.load import row_bytes
from offramp_worker.logs import log_event

SHARD_ROWS = 128
MAX_ROWS = 50_000
FLUSH_SECONDS = 5.0
ABANDONED_SECONDS = 3600.0  # a folder that its worker has not touched for so long


@dataclass(frozen=True, slots=True)
class Capture:
    """One input without batch axis, when it was admitted, and its digest."""

    x: npt.NDArray[Any]
    at: float
    digest: int


class Captures:
    """The sample. The engine offers, the thread that applies plans asks, and a thread writes."""

    def __init__(
        self,
        folder: Path,
        spec: TensorSpec,
        *,
        max_bytes: int,
        seed: int | None = None,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self._folder, self._spec = folder, spec
        self._capacity = min(MAX_ROWS, max(1, max_bytes // row_bytes(spec)))
        self._random = random.Random(seed)  # noqa: S311 - sampling, no secret
        self._lock = threading.Lock()
        self._rows: list[Capture] = []
        self._written: dict[int, int] = {}  # rows of each file
        self._offered = 0
        self._dirty: set[int] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._flush_seconds = flush_seconds
        self._complaint = ""
        self.since: float | None = None
        self._clear_folder()

    @property
    def wanted(self) -> bool:
        """Whether inputs are kept now."""
        return self.since is not None

    @property
    def count(self) -> int:
        """Rows of the sample that stand in files: whoever hears of them can read them."""
        with self._lock:
            return sum(self._written.values())

    def ask(self, since: float | None) -> None:
        """Keep inputs admitted after ``since``; a later one begins the sample anew, None ends it. What was kept before
        is deleted."""
        if since == self.since:
            return
        with self._lock:
            self.since = since
            self._rows, self._offered, self._dirty, self._written = [], 0, set(), {}
            self._clear_folder()
        log_event("captures-begun" if since is not None else "captures-ended", since=since)
        if since is not None:
            self._clear_abandoned()
        if since is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="captures", daemon=True)
            self._thread.start()

    def offer(self, x: npt.NDArray[Any], *, at: float, digest: int) -> None:
        """One more input of the stream."""
        if self.since is None or at <= self.since:
            return
        with self._lock:
            slot = self._offered if self._offered < self._capacity else self._random.randrange(self._offered + 1)
            self._offered += 1
            if slot >= self._capacity:
                return
            row = Capture(x, at, digest)
            if slot < len(self._rows):
                self._rows[slot] = row
            else:
                slot = len(self._rows)
                self._rows.append(row)
            self._dirty.add(slot // SHARD_ROWS)

    def flush(self) -> None:
        """Write what changed. A disk that is full or gone costs the captures and nothing else."""
        with self._lock:
            dirty, self._dirty = sorted(self._dirty), set()
            shards = {i: self._rows[i * SHARD_ROWS : (i + 1) * SHARD_ROWS] for i in dirty}
            since = self.since
        try:
            for number, rows in shards.items():
                self._write(number, rows, since)
            self._complaint = ""
        except OSError as error:
            if str(error) != self._complaint:
                log_event("captures-unwritable", level="warning", folder=str(self._folder), error=str(error))
            self._complaint = str(error)
            with self._lock:
                if since == self.since:
                    self._dirty |= set(shards)

    def close(self) -> None:
        """End, and leave nothing behind: the next process begins its own sample."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
        self.ask(None)

    def _run(self) -> None:
        while not self._stop.wait(self._flush_seconds):
            self.flush()
            with contextlib.suppress(OSError):
                os.utime(self._folder)

    def _write(self, number: int, rows: list[Capture], since: float | None) -> None:
        if not rows:
            return
        arrays: dict[str, Any] = {
            "x": pad_rows([row.x[None] for row in rows], self._spec),
            "time": np.array([row.at for row in rows]),
            "digest": np.array([row.digest for row in rows], dtype=np.uint64),
        }
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._folder / f".shard-{number:05}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        with self._lock:
            if since == self.since:  # else the sample began anew meanwhile
                temporary.replace(self._folder / f"shard-{number:05}.npz")
                self._written[number] = len(rows)
            else:
                temporary.unlink(missing_ok=True)

    def _clear_abandoned(self) -> None:
        """Whatever the clocks of two machines say to each other, the file system has one."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.utime(self._folder)
            now = self._folder.stat().st_mtime
            for folder in self._folder.parent.iterdir():
                if folder.is_dir() and now - folder.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)

    def _clear_folder(self) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)
