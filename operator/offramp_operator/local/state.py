"""The state folder of ``offramp up``: who may use it, where things are, and how a file is replaced.

lock            held while a process uses the folder; holds its pid
signing-key     the key that signs plans (0600)
objects/        what `kubectl get -o json` would show
plans/          the signed document that workers poll
workers.json    worker processes: identity, ports, template
workers/        a small folder per worker, kept over its restarts; inputs captured for training lie there
ramp-sets/      ramp sets trained on captured inputs
training.json   how the last training ended
records/        recorded scores, so that a restart need not collect them again
logs/           output of the workers
events.jsonl    the service's events
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from offramp_core.errors import OfframpError

_TEMPORARY = ".tmp"


class StateFolderError(OfframpError):
    """The state folder is in use, damaged or of another service. The message names the file and the next step."""


class StateFolder:
    """Paths of one state folder, which is made on first use and readable by its owner only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects, self.plans, self.workers = root / "objects", root / "plans", root / "workers"
        self.records, self.ramp_sets, self.logs = root / "records", root / "ramp-sets", root / "logs"
        self.bundles = root / "bundles"  # where bundles are fetched to; made on first use
        self.workers_file, self.training_file = root / "workers.json", root / "training.json"
        self.events_file, self.key_file = root / "events.jsonl", root / "signing-key"
        for folder in (root, self.objects, self.plans, self.workers, self.records, self.ramp_sets, self.logs):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the folder for this process. The kernel lets go when the process ends, however it ends.

        Raises
        ------
        StateFolderError
            Another process holds it; the message tells its pid.
        """
        path = self.root / "lock"
        with path.open("a+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise StateFolderError(
                    f"{self.root} is in use by process {owner}; stop it or choose another folder with --state"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content so that a crash at any moment leaves either the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file for good; one that is not there is fine."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted :func:`replace_file` left behind."""
    for temporary in folder.rglob(f".*{_TEMPORARY}"):
        temporary.unlink(missing_ok=True)
