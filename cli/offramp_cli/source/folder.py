"""The state folder of ``offramp up``: read as the shell wrote it, written under the lock that the shell takes as
well."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offramp_cli.source.source import RefusedError, SourceError
from offramp_core.control.objects import Rollout
from offramp_operator.explain.family import Family, Manifest, WorkerSeen, family
from offramp_operator.local.state import StateFolderError
from offramp_operator.local.store import ObjectStore
from offramp_operator.shell.manifests import (
    CONFIG_KIND,
    REQUEST_ANNOTATION,
    ROLLOUT_KIND,
    SERVICE_KIND,
    rollout_from_manifest,
)
from offramp_operator.shell.platform import ConflictError

NOT_RUNNING = "`offramp up` does not run on this folder: this is what it left, and changes wait until it is started"


class FolderSource:
    """One state folder, or a folder of them (``.offramp``).

    Raises
    ------
    SourceError
        There is no state in it.
    """

    def __init__(self, root: Path) -> None:
        self._root, self.where = root, str(root)
        self._folders = _state_folders(root)
        if not self._folders:
            raise SourceError(f"{root} holds no state of `offramp up`; give the folder that its --state names")

    @staticmethod
    def has_services(root: Path) -> bool:
        """Whether ``offramp up`` has left something here."""
        return any(_service_names(folder) for folder in _state_folders(root))

    def folder_of(self, name: str) -> Path:
        """The state folder of one service."""
        return next(folder for folder in self._folders if _service_file(folder, name).is_file())

    def names(self) -> list[str]:
        return sorted(name for folder in self._folders for name in _service_names(folder))

    def families(self, name: str | None = None) -> list[Family]:
        return [_read(self.folder_of(each), each) for each in self.names() if name in (None, each)]

    def change_rollout(self, family: Family, rollout: Rollout, spec: Mapping[str, Any]) -> None:
        def change(manifest: Manifest) -> None:
            now = rollout_from_manifest(manifest)
            if now.status.finished or (
                now.decision and spec.get("decision", now.decision) not in (now.decision, "Abort")
            ):
                raise RefusedError(f"{rollout.name} has changed meanwhile: {now.status.phase} {now.decision}".rstrip())
            manifest["spec"].update(spec)

        self._update(family, ROLLOUT_KIND, rollout.name, change)

    def request(self, family: Family, text: str) -> None:
        def change(manifest: Manifest) -> None:
            manifest["metadata"].setdefault("annotations", {})[REQUEST_ANNOTATION] = text

        self._update(family, SERVICE_KIND, family.name, change)

    def _update(self, family: Family, kind: str, name: str, change: Any) -> None:
        try:
            ObjectStore(self.folder_of(family.name) / "objects").update(kind, name, change)
        except ConflictError as error:
            raise RefusedError(str(error)) from error
        except OSError as error:
            raise SourceError(f"{self._root} cannot be written: {error.strerror or error}") from error


def _state_folders(root: Path) -> list[Path]:
    """Those with objects in them: the folder itself, or the folders in it."""
    if (root / "objects").is_dir():
        return [root]
    return sorted(folder.parent for folder in root.glob("*/objects"))


def _service_names(folder: Path) -> list[str]:
    return [path.stem for path in (folder / "objects" / SERVICE_KIND).glob("*.json")]


def _service_file(folder: Path, name: str) -> Path:
    return folder / "objects" / SERVICE_KIND / f"{name}.json"


def _read(folder: Path, name: str) -> Family:
    try:
        store = ObjectStore(folder / "objects")
        service = store.get(SERVICE_KIND, name)
        if service is None:
            raise SourceError(f"{_service_file(folder, name)} has just vanished; try again")
        running = _running(folder)
        return family(
            service,
            configs=store.list(CONFIG_KIND),
            rollouts=store.list(ROLLOUT_KIND),
            workers=_workers(folder) if running else (),
            note="" if running else NOT_RUNNING,
        )
    except StateFolderError as error:
        raise SourceError(str(error)) from error
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror or error}") from error


def _running(folder: Path) -> bool:
    """Whether the process that held the folder last is still there. Its lock is not tried: that could keep a new one
    from starting."""
    try:
        os.kill(int((folder / "lock").read_text(encoding="ascii")), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _workers(folder: Path) -> tuple[WorkerSeen, ...]:
    try:
        entries = json.loads((folder / "workers.json").read_text(encoding="utf-8"))["workers"]
        return tuple(_worker(entry) for entry in entries)
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{folder / 'workers.json'} is damaged ({error!r}); delete it: workers then start anew"
        ) from error


def _worker(entry: Mapping[str, Any]) -> WorkerSeen:
    pid, restarts = int(entry["pid"]), int(entry["restarts"])
    detail = f"port {entry['port']}" + (f", {restarts} restarts" if restarts else "")
    return WorkerSeen(str(entry["name"]), "process", f"pid {pid}" if pid else "starting", detail)
