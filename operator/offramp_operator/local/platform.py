# ruff: noqa: ARG002 - the seam passes the service to every method
"""This machine behind the seam of the shell: manifests in a state folder, and a fleet of worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from offramp_core.control.codec import format_time
from offramp_core.control.objects import ConfigStatus, RolloutStatus, Service, ServiceStatus
from offramp_core.control.snapshot import Event, Gathered, NewConfig, NewRollout, TrainingOrder
from offramp_core.control.workers.update import brought_back, strategy_in_force
from offramp_core.errors import UnavailableError
from offramp_core.protocol import PlanDocument, SignedDocument
from offramp_operator.local.fleet import Fleet
from offramp_operator.local.state import StateFolder, StateFolderError, replace_file
from offramp_operator.local.store import Manifest, ObjectStore
from offramp_operator.local.template import bundle_path, render
from offramp_operator.local.training_process import Trainer
from offramp_operator.shell import wire
from offramp_operator.shell.manifests import (
    CONFIG_KIND,
    ROLLOUT_KIND,
    SERVICE_KIND,
    config_from_manifest,
    rollout_from_manifest,
    rollout_spec,
    service_from_manifest,
    status_json,
)
from offramp_operator.shell.platform import ConflictError, ServiceKey, WorkerIdentity
from offramp_operator.shell.signing import SigningKey

_EVENTS_LIMIT_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class Intent:
    """What the user's file says. ``spec`` is checked already, and its relative paths are resolved."""

    namespace: str
    name: str
    spec: Mapping[str, Any]

    @property
    def key(self) -> ServiceKey:
        return ServiceKey(self.namespace, self.name)


class LocalPlatform:
    """One service on this machine. Disk work runs in threads: a slow disk must not hold up the loop."""

    def __init__(
        self,
        state: StateFolder,
        fleet: Fleet,
        key: SigningKey,
        *,
        url: str,
        trainer: Trainer,
    ) -> None:
        self._state, self._fleet, self._key, self._url, self._trainer = state, fleet, key, url, trainer
        self._store = ObjectStore(state.objects)
        self._versions: dict[tuple[str, str], str] = {}
        self._polls = 0

    def apply(self, intent: Intent) -> bool:
        """What `kubectl apply` does: create the service, or raise its generation when the spec differs. Returns whether
        it did either."""
        existing = self._store.get(SERVICE_KIND, intent.name)
        if existing is None:
            created = self._store.create(
                SERVICE_KIND, intent.name, spec=intent.spec, metadata={"namespace": intent.namespace}
            )
            self._collect_orphans(created)
            return True
        written = self._store.write_spec(SERVICE_KIND, intent.name, intent.spec)
        return bool(written["metadata"]["generation"] != existing["metadata"]["generation"])

    def _collect_orphans(self, service: Manifest) -> None:
        """Remove children of an earlier service: what an API server's garbage collector does."""
        owner = service_from_manifest(service)
        for kind in (CONFIG_KIND, ROLLOUT_KIND):
            for child in self._store.list(kind):
                if not _owned(child, owner):
                    self._store.delete(kind, child["metadata"]["name"])

    # --- the seam ----------------------------------------------------------------------------------

    async def gather(self, key: ServiceKey) -> Gathered | None:
        return await asyncio.to_thread(self._gather, key)

    def changes(self, key: ServiceKey) -> int:
        """Nobody tells of a changed file, so it is looked at every time: there is one service, and its files are
        small."""
        self._polls += 1
        return self._polls

    async def ensure_workers(self, service: Service, identity: WorkerIdentity) -> None:
        template = render(service.name, service.uid, service.spec)
        token = self._key.admin_token(service.uid)
        replicas = service.spec.replicas
        surge = strategy_in_force(service, replicas) == "Surge"
        template = self._fleet.earlier(brought_back(service, template.digest)) or template
        await self._fleet.want(template, replicas, identity, token=token, surge=surge)

    async def create_config(self, service: Service, config: NewConfig) -> None:
        spec, status = config.plan.to_mapping(), status_json(config.status)
        await self._create(CONFIG_KIND, service, config.name, spec=spec, status=status)

    async def write_config_status(self, service: Service, name: str, status: ConfigStatus) -> None:
        await self._write_status(CONFIG_KIND, name, status)

    async def create_rollout(self, service: Service, rollout: NewRollout) -> None:
        await self._create(ROLLOUT_KIND, service, rollout.name, spec=rollout_spec(service.name, rollout))

    async def write_rollout_status(self, service: Service, name: str, status: RolloutStatus) -> None:
        await self._write_status(ROLLOUT_KIND, name, status)

    async def write_service_status(self, service: Service, status: ServiceStatus) -> None:
        await self._write_status(SERVICE_KIND, service.name, status)

    async def delete_config(self, service: Service, name: str) -> None:
        await asyncio.to_thread(self._store.delete, CONFIG_KIND, name)

    async def delete_rollout(self, service: Service, name: str) -> None:
        await asyncio.to_thread(self._store.delete, ROLLOUT_KIND, name)

    async def publish(
        self, service: Service, document: PlanDocument, signed: SignedDocument, *, previous_epoch: int
    ) -> None:
        await asyncio.to_thread(self._publish, service.name, signed, previous_epoch)

    async def train(self, service: Service, order: TrainingOrder) -> None:
        self._trainer.begin(order, bundle=bundle_path(service.spec.model_uri))

    async def emit(self, service: Service, event: Event) -> None:
        line = {
            "time": format_time(time.time()),
            "service": f"{service.namespace}/{service.name}",
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "message": event.message,
        }
        await asyncio.to_thread(self._append_event, json.dumps(line, ensure_ascii=False))

    # --- disk --------------------------------------------------------------------------------------

    def _gather(self, key: ServiceKey) -> Gathered | None:
        manifest = self._store.get(SERVICE_KIND, key.name)
        if manifest is None:
            return None
        configs, rollouts = self._store.list(CONFIG_KIND), self._store.list(ROLLOUT_KIND)
        self._versions = {
            (m["kind"], m["metadata"]["name"]): m["metadata"]["resourceVersion"]
            for m in (manifest, *configs, *rollouts)
        }
        service = service_from_manifest(manifest)
        # Against the spec just read: an edit that the fleet has not heard of yet must not look as if it were served.
        template = render(service.name, service.uid, service.spec)
        return Gathered(
            service=service,
            configs={m["metadata"]["name"]: config_from_manifest(m) for m in configs if _owned(m, service)},
            rollouts=tuple(rollout_from_manifest(m) for m in rollouts if _owned(m, service)),
            workers=self._fleet.endpoints(template),
            published=self._published(key.name, service.uid),
            url=self._url,
            can_train=True,
            training=self._trainer.report,
            template=template.digest,
        )

    async def _create(
        self,
        kind: str,
        service: Service,
        name: str,
        *,
        spec: Mapping[str, Any],
        status: Mapping[str, Any] | None = None,
    ) -> None:
        owner = {"kind": SERVICE_KIND, "name": service.name, "uid": service.uid}
        metadata = {"namespace": service.namespace, "ownerReferences": [owner]}

        def create() -> Manifest:
            return self._store.create(kind, name, spec=spec, status=status, metadata=metadata)

        self._remember(await asyncio.to_thread(create))

    async def _write_status(self, kind: str, name: str, status: ServiceStatus | ConfigStatus | RolloutStatus) -> None:
        version = self._versions.get((kind, name))

        def write() -> Manifest:
            return self._store.write_status(kind, name, status_json(status), version=version)

        self._remember(await asyncio.to_thread(write))

    def _remember(self, manifest: Manifest) -> None:
        self._versions[manifest["kind"], manifest["metadata"]["name"]] = manifest["metadata"]["resourceVersion"]

    def _published(self, name: str, uid: str) -> PlanDocument | None:
        """The document in force; one of an earlier service of the same name does not count."""
        try:
            signed = wire.decode((self._state.plans / f"{name}.json").read_bytes(), SignedDocument)
            document = wire.decode(signed.payload, PlanDocument)
        except FileNotFoundError:
            return None
        except UnavailableError as error:
            # Going on from epoch 0 would be refused by every worker, so this is for a person to solve; what serves
            # keeps serving.
            path = self._state.plans / f"{name}.json"
            raise StateFolderError(
                f"{path} is damaged ({error}); restore it, or delete the state folder to start anew"
            ) from error
        return document if document.service_uid == uid else None

    def _publish(self, name: str, signed: SignedDocument, previous_epoch: int) -> None:
        with self._plans_locked():
            document = wire.decode(signed.payload, PlanDocument)
            published = self._published(name, document.service_uid)
            epoch = published.epoch if published is not None else 0
            if epoch != previous_epoch:
                raise ConflictError(f"epoch {epoch} is published, not {previous_epoch}")
            replace_file(self._state.plans / f"{name}.json", msgspec.json.encode(signed) + b"\n")

    @contextlib.contextmanager
    def _plans_locked(self) -> Iterator[None]:
        with (self._state.plans / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _append_event(self, line: str) -> None:
        path = self._state.events_file
        if path.exists() and path.stat().st_size > _EVENTS_LIMIT_BYTES:
            path.replace(path.with_suffix(".jsonl.1"))
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _owned(manifest: Manifest, service: Service) -> bool:
    """Children count by owner reference, never by name: those of an earlier service of the same name are not ours."""
    return any(owner.get("uid") == service.uid for owner in manifest["metadata"].get("ownerReferences", []))
