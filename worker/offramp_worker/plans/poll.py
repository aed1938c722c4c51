"""Watch the plan file: a mounted ConfigMap, or a file that the embedded shell writes. Polled by content, not by time
stamps."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from offramp_core.errors import PlanRefusedError
from offramp_core.protocol import SignedDocument
from offramp_worker.documents import parse_document
from offramp_worker.logs import log_event
from offramp_worker.plans.apply import PlanDesk


class PlanFile:
    """Delivers each new content of a file once, from a thread of its own."""

    def __init__(self, file: Path, desk: PlanDesk, *, poll_seconds: float) -> None:
        self._file, self._desk, self._poll_seconds = file, desk, poll_seconds
        self._seen = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plan-file", daemon=True)

    def poll(self) -> None:
        """Deliver the file's document if its content is new. A missing file is no news; a bad one is reported once.

        Without news, what the desk has postponed is tried again, wherever it came from.
        """
        try:
            content = self._file.read_bytes()
        except OSError:
            content = self._seen
        if content == self._seen:
            self._desk.try_again()
            return
        self._seen = content
        try:
            document = parse_document(content, SignedDocument)
        except ValueError as error:
            log_event("plan-file-unreadable", level="warning", file=self._file.name, error=str(error))
            return
        # The desk logs a refusal, and keeps it or, where it may yet be taken, the document.
        with suppress(PlanRefusedError):
            self._desk.deliver(document)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            self.poll()
