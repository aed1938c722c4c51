"""The crash marker: an earlier process of this worker died while executing a canary batch, and of which epoch.

A crash leaves no chance to say anything, so the epoch is written before a canary batch and cleared after it, into a
file that stays open: two ``pwrite`` calls of a few microseconds. The kernel keeps written pages when a process dies, so
no fsync.
"""

from __future__ import annotations

import os
from pathlib import Path

from offramp_core.errors import InvalidArgumentError
from offramp_worker.logs import log_event
from offramp_worker.private import open_private

FIELD = 20
RUNNING, CRASHED = 0, FIELD + 1  # file offsets: the epoch in execution, and the one that an earlier process died in
FILE_NAME = "crash-marker"


class CrashMarker:
    """Two epochs in one small file, as text; 0 is none. Without a folder, or where something else lies than our file,
    nothing is kept."""

    def __init__(self, folder: Path | None, *, again: bool = False) -> None:
        """``again``: this process has opened it before. What executes by the file then executes in this process."""
        self._file: int | None = None
        self._complained = False
        self.crashed_epoch: int | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_private(str(folder / FILE_NAME), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if os.access(folder, os.W_OK | os.X_OK):
                self._complain(error)
                return
            raise InvalidArgumentError(
                f"OFFRAMP_STATE_DIR {str(folder)!r} is not writable: {error.strerror}"
            ) from error
        interrupted = self._read(RUNNING)
        if interrupted and not again:
            self._write(CRASHED, interrupted)
            self._write(RUNNING, 0)
        self.crashed_epoch = self._read(CRASHED) or None

    def enter(self, epoch: int) -> None:
        """A canary batch of ``epoch`` is about to execute."""
        self._write(RUNNING, epoch)

    def leave(self) -> None:
        """It has ended, in whatever way Python could see."""
        self._write(RUNNING, 0)

    def forget_before(self, epoch: int) -> None:
        """A document of ``epoch`` is in force: later processes need not report crashes of earlier ones. This one still
        does."""
        if self.crashed_epoch is not None and self.crashed_epoch < epoch:
            self._write(CRASHED, 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, offset: int) -> int:
        assert self._file is not None
        text = os.pread(self._file, FIELD, offset)
        return int(text) if text.strip().isdigit() else 0

    def _write(self, offset: int, epoch: int) -> None:
        if self._file is not None:
            try:
                os.pwrite(self._file, b"%020d\n" % epoch, offset)
            except OSError as error:  # a full disk must not end the thread that serves
                self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            log_event("state-file-unusable", level="warning", file=FILE_NAME, error=str(error))
