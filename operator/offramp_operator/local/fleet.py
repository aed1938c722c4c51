"""The worker processes of one service: brought to what is wanted one careful move at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import httpx
import msgspec

from offramp_core.control.snapshot import WorkerEndpoint
from offramp_operator.local.front import FrontProcess
from offramp_operator.local.process import (
    HOST,
    TERMINATION_SECONDS,
    WORKER_COMMAND,
    WorkerProcess,
    WorkerRecord,
    WorkerSurroundings,
    end_leftover,
)
from offramp_operator.local.roll import WorkerView, next_move
from offramp_operator.local.state import StateFolder, StateFolderError, replace_file
from offramp_operator.local.template import WorkerTemplate
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import WorkerIdentity

TEMPLATES_KEPT = 8  # so many edits may fail one after the other, and what served before the first still comes back


class Fleet:
    """Owns the workers. ``want`` says what there should be; a task of its own gets there."""

    def __init__(
        self,
        state: StateFolder,
        front: FrontProcess,
        client: httpx.AsyncClient,
        *,
        service: str,
        command: Sequence[str] = WORKER_COMMAND,
        on_change: Callable[[], None] = lambda: None,
        grace_seconds: float = TERMINATION_SECONDS,
        edge: Mapping[str, str] | None = None,
    ) -> None:
        """``edge``: what workers are told, as variables, that are edges of a core."""
        self._state, self._front, self._client = state, front, client
        self._service, self._command, self._on_change = service, command, on_change
        self._grace, self._edge = grace_seconds, edge or {}
        self._kept, self._next_number, self._templates = _load(state)
        self._workers: list[WorkerProcess] = []
        self._wanted: WorkerTemplate | None = None
        self._replicas = 0
        self._surge = True
        self._around: WorkerSurroundings | None = None
        self._woken = asyncio.Event()
        self._manager: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    async def want(
        self, template: WorkerTemplate, replicas: int, identity: WorkerIdentity, *, token: str, surge: bool = True
    ) -> None:
        """Ask for ``replicas`` workers of a template; asking for what is already asked for does nothing.

        Without ``surge`` there are never more processes than replicas: an old worker ends before its successor starts.
        """
        if (template, replicas, surge) == (self._wanted, self._replicas, self._surge):
            return
        self._wanted, self._replicas, self._surge = template, replicas, surge
        self._templates = [*(t for t in self._templates if t != template), template][-TEMPLATES_KEPT:]
        if self._around is None:
            self._around = self._surroundings(identity, token)
            await self._take_over()
            self._manager = asyncio.create_task(self._manage(), name="fleet")
        self._woken.set()

    def earlier(self, digest: str) -> WorkerTemplate | None:
        """A template that was asked for before, also by the shell before this one."""
        return next((template for template in self._templates if template.digest == digest), None)

    def endpoints(self, wanted: WorkerTemplate | None = None) -> tuple[WorkerEndpoint, ...]:
        """All workers; current are those of the ``wanted`` template (default: what was last asked for).

        One on its way out is neither ready nor current, but its last counts still matter.
        """
        template = self._wanted if wanted is None else wanted
        return tuple(
            WorkerEndpoint(
                name=worker.record.name,
                uid=worker.record.uid,
                ready=worker.ready and not worker.stopping,
                current=worker.record.template == template and not worker.stopping,
                restarts=worker.record.restarts,
                failure=worker.failure,
                failure_reason=worker.failure_reason,
                ending=worker.stopping,
                template=worker.record.template.digest,
                admin_url=worker.admin_url,
            )
            for worker in self._workers
        )

    def scrape_targets(self) -> list[tuple[str, str]]:
        """(name, host and port of ``/metrics``) of every worker that lives."""
        return [(w.record.name, w.url.removeprefix("http://")) for w in self._workers if w.alive]

    async def close(self) -> None:
        """End all workers; their records stay, so that the next start finds the same ones."""
        if self._manager is not None:
            self._manager.cancel()
            await asyncio.gather(self._manager, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers), *self._stopping)
        for worker in self._workers:
            worker.record.pid = 0
        self._save()

    # --- getting there -----------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Start the workers of the last run again, under the template they had, after ending what a killed shell
        left."""
        assert self._around is not None
        await asyncio.gather(*(end_leftover(record, grace_seconds=self._grace) for record in self._kept))
        for record in self._kept:
            self._begin(record)

    async def _manage(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                self._save()
                self._move()
                await self._front.serve(self._backends())
            except OSError as error:
                log_event("fleet-error", f"{error}; trying again", level=logging.ERROR, error=error)
                await asyncio.sleep(1.0)
                self._woken.set()
            self._on_change()

    def _move(self) -> None:
        assert self._wanted is not None
        active = [worker for worker in self._workers if not worker.stopping]
        views = [WorkerView(w.record.name, w.record.template == self._wanted, w.ready, bool(w.failure)) for w in active]
        leaving = len(self._workers) - len(active)
        move = next_move(views, self._replicas, surge=self._surge, leaving=leaving)
        for _ in range(move.start):
            self._begin(self._new_record(self._wanted))
        for worker in active:
            if worker.record.name in move.stop:
                worker.retire()
                task = asyncio.create_task(self._end(worker), name=f"end-{worker.record.name}")
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)

    def _begin(self, record: WorkerRecord) -> None:
        assert self._around is not None
        worker = WorkerProcess(record, self._around)
        self._workers.append(worker)
        worker.start()

    async def _end(self, worker: WorkerProcess) -> None:
        """Take a worker out of the front, wait until nobody uses it, and end it."""
        log_event("worker-stopping", worker.record.name, worker=worker.record.name)
        await self._front.drain(worker.record.name)
        await worker.stop()
        self._workers.remove(worker)
        shutil.rmtree(self._state.workers / worker.record.name, ignore_errors=True)
        self._woken.set()

    def _backends(self) -> dict[str, tuple[str, int]]:
        """Ready workers; without any, those that were: a machine too busy to answer probes should not lose them all."""
        active = [worker for worker in self._workers if not worker.stopping]
        chosen = [worker for worker in active if worker.ready] or [worker for worker in active if worker.served]
        return {worker.record.name: (HOST, worker.record.port) for worker in chosen}

    # --- records -----------------------------------------------------------------------------------

    def _surroundings(self, identity: WorkerIdentity, token: str) -> WorkerSurroundings:
        return WorkerSurroundings(
            identity=identity,
            token=token,
            plan_file=self._state.plans / f"{self._service}.json",
            state_dir=self._state.workers,
            ramp_sets=self._state.ramp_sets,
            log_dir=self._state.logs,
            command=self._command,
            client=self._client,
            changed=self._woken.set,
            grace_seconds=self._grace,
            edge=self._edge,
        )

    def _new_record(self, template: WorkerTemplate) -> WorkerRecord:
        name = f"{self._service}-{self._next_number}"
        self._next_number += 1
        return WorkerRecord(name=name, uid=str(uuid.uuid4()), template=template)

    def _save(self) -> None:
        value = {
            "next": self._next_number,
            "workers": [asdict(worker.record) for worker in self._workers],
            "templates": [asdict(template) for template in self._templates],
        }
        replace_file(self._state.workers_file, json.dumps(value, indent=2).encode() + b"\n")


def _load(state: StateFolder) -> tuple[list[WorkerRecord], int, list[WorkerTemplate]]:
    try:
        value: dict[str, Any] = json.loads(state.workers_file.read_text(encoding="utf-8"))
        workers = msgspec.convert(value["workers"], list[WorkerRecord])
        return workers, int(value["next"]), msgspec.convert(value.get("templates", []), list[WorkerTemplate])
    except FileNotFoundError:
        return [], 0, []
    except (ValueError, KeyError, TypeError) as error:
        raise StateFolderError(
            f"{state.workers_file} is damaged ({error!r}); delete it: workers then start anew"
        ) from error
