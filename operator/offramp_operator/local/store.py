"""Objects as JSON manifests, one file each, in the shape the Kubernetes API gives them.

Every change goes through a file that replaces the old one at once, under a lock that other processes (the
command line) take as well. ``metadata.resourceVersion`` counts the changes of an object, so that a writer who
read an older one is reported instead of overwriting.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offramp_core.control.codec import format_time
from offramp_operator.local.state import StateFolderError, remove_file, remove_leftovers, replace_file
from offramp_operator.shell.manifests import API_VERSION
from offramp_operator.shell.platform import ConflictError

Manifest = dict[str, Any]


class ObjectStore:
    """A folder of manifests: ``<kind>/<name>.json``. Methods block for as long as the disk does."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked():  # nobody is replacing a file then
            remove_leftovers(folder)

    def get(self, kind: str, name: str) -> Manifest | None:
        """The manifest, or None."""
        try:
            text = self._path(kind, name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            value = json.loads(text)
        except ValueError as error:
            raise StateFolderError(
                f"{self._path(kind, name)} is damaged ({error}); mend it, or delete the state folder to start anew"
            ) from error
        return _checked(value, self._path(kind, name))

    def list(self, kind: str) -> list[Manifest]:
        """All manifests of a kind, by name."""
        names = sorted(path.stem for path in (self._folder / kind).glob("*.json"))
        return [manifest for name in names if (manifest := self.get(kind, name)) is not None]

    def create(
        self,
        kind: str,
        name: str,
        *,
        spec: Mapping[str, Any],
        status: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Store a new object; one of the same name is left alone and returned."""
        with self._locked():
            existing = self.get(kind, name)
            if existing is not None:
                return existing
            manifest = {
                "apiVersion": API_VERSION,
                "kind": kind,
                "metadata": {
                    **(metadata or {}),
                    "name": name,
                    "uid": str(uuid.uuid4()),
                    "generation": 1,
                    "resourceVersion": "1",
                    "creationTimestamp": format_time(self._clock()),
                },
                "spec": dict(spec),
                **({"status": dict(status)} if status else {}),
            }
            self._write(kind, name, manifest)
            return manifest

    def write_spec(self, kind: str, name: str, spec: Mapping[str, Any]) -> Manifest:
        """Replace the spec; the generation rises only when it differs.

        Raises
        ------
        ConflictError
            There is no such object (any more).
        """
        return self.update(kind, name, lambda manifest: manifest.update(spec=dict(spec)))

    def update(self, kind: str, name: str, change: Callable[[Manifest], None]) -> Manifest:
        """Let ``change`` edit the object in place; nobody else writes meanwhile. What it raises leaves the object as it
        was.

        Raises
        ------
        ConflictError
            There is no such object (any more).
        """
        with self._locked():
            manifest = self._existing(kind, name)
            before = copy.deepcopy(manifest)
            change(manifest)
            if manifest["spec"] != before["spec"]:
                manifest["metadata"]["generation"] += 1
            if manifest != before:
                self._write(kind, name, _next_version(manifest))
            return manifest

    def write_status(self, kind: str, name: str, status: Mapping[str, Any], *, version: str | None) -> Manifest:
        """Replace the status if the object is still the one read as ``version`` (None: whatever it is).

        Raises
        ------
        ConflictError
            Somebody changed or removed it in the meantime.
        """
        with self._locked():
            manifest = self._existing(kind, name)
            found = manifest["metadata"]["resourceVersion"]
            if version is not None and found != version:
                raise ConflictError(f"{kind} {name} is at version {found}, not {version}")
            if manifest.get("status") != status:
                manifest["status"] = dict(status)
                self._write(kind, name, _next_version(manifest))
            return manifest

    def delete(self, kind: str, name: str) -> None:
        """Remove an object; one that is gone is fine."""
        with self._locked():
            remove_file(self._path(kind, name))

    def _existing(self, kind: str, name: str) -> Manifest:
        manifest = self.get(kind, name)
        if manifest is None:
            raise ConflictError(f"{kind} {name} is gone")
        return manifest

    def _write(self, kind: str, name: str, manifest: Manifest) -> None:
        path = self._path(kind, name)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def _path(self, kind: str, name: str) -> Path:
        return self._folder / kind / f"{name}.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _next_version(manifest: Manifest) -> Manifest:
    manifest["metadata"]["resourceVersion"] = str(int(manifest["metadata"]["resourceVersion"]) + 1)
    return manifest


def _checked(value: Any, path: Path) -> Manifest:
    if not isinstance(value, dict) or not isinstance(value.get("metadata"), dict) or "spec" not in value:
        raise StateFolderError(f"{path} is not an object with metadata and spec; delete the state folder to start anew")
    return value
