"""Work that stops and resumes: finished steps lie in a folder beside the target until the bundle is whole."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offramp_core.errors import InvalidArgumentError
from offramp_core.plan import canonical_json
from offramp_worker.prepare.writing import check_target, swap

STEPS = "steps.json"


class Workbench:
    """A folder ``.NAME.unfinished`` with files of the bundle, and what was found out so far as JSON."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self._key = folder, key
        self._done: dict[str, Any] = self._known()

    def step(self, name: str, compute: Callable[[], Any]) -> Any:
        """The JSON value that ``compute`` gives, or gave when this step was last finished."""
        if name not in self._done:
            self._done[name] = json.loads(json.dumps(compute()))
            text = json.dumps({"key": self._key, "done": self._done})
            part = self.folder / f"{STEPS}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(self.folder / STEPS)
        return self._done[name]

    @property
    def resumed(self) -> bool:
        """Whether something was done before."""
        return bool(self._done)

    def _known(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / STEPS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found["done"] if isinstance(found, dict) and found.get("key") == self._key else {}


@contextmanager
def workbench(out: Path, asked: Any) -> Iterator[Workbench]:
    """A place to work that becomes ``out`` at the end. What is interrupted stays, for whoever asks for the same again.

    ``asked`` is everything that the result depends on, as JSON.

    Raises
    ------
    InvalidArgumentError
        The target is taken, or cannot be made.
    """
    out = out.absolute()
    check_target(out)
    key = hashlib.sha256(canonical_json(asked)).hexdigest()
    folder = out.parent / f".{out.name}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"out {out} cannot be made: {error.strerror}") from error
    work = Workbench(folder, key)
    if not work.resumed:
        shutil.rmtree(folder)
        folder.mkdir()
    yield work
    (folder / STEPS).unlink(missing_ok=True)
    swap(folder, out)
