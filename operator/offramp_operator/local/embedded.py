"""``offramp up``: everything of one service on this machine, from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from aiohttp import web

from offramp_core.errors import InvalidArgumentError, OfframpError
from offramp_operator.local.fleet import Fleet
from offramp_operator.local.front import FrontProcess
from offramp_operator.local.platform import Intent, LocalPlatform
from offramp_operator.local.process import HOST
from offramp_operator.local.records import keep_only, load_pools, save_pool
from offramp_operator.local.state import StateFolder, StateFolderError, remove_leftovers
from offramp_operator.local.training_process import Trainer
from offramp_operator.metrics import Metrics
from offramp_operator.port import serve_health
from offramp_operator.shell.log import log_event
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.record_pool import RampSetKey
from offramp_operator.shell.signing import SigningKey
from offramp_operator.web.board import Board
from offramp_operator.web.server import WebPage, serve_web

USUAL_WEB_PORT = 8082
WATCH_SECONDS = 1.0
RECORDS_SECONDS = 30.0
SETTLE_SECONDS = 5.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.5, 30.0


class EmbeddedShell:
    """The control loop, the workers and the front of one service.

    Parameters
    ----------
    read_intent : callable
        Reads the user's file; raises :class:`OfframpError` or ``OSError`` where it cannot be used.
    port : int
        Of the front on loopback; 0 for any free one.
    web_port : int, optional
        Of the web page on loopback; 0 for any free one, and without one the usual port if it is free.
    metrics_port : int, optional
        Where the control loop's metrics are shown on loopback, and ``/targets`` tells Prometheus of the workers; None
        opens nothing.
    edge : mapping, optional
        What workers are told, as variables, that are edges of a core.
    """

    def __init__(
        self,
        read_intent: Callable[[], Intent],
        state: StateFolder,
        *,
        port: int,
        web_port: int | None = None,
        metrics_port: int | None = None,
        edge: Mapping[str, str] | None = None,
    ) -> None:
        self._read_intent = read_intent
        self._state = state
        self._intent = read_intent()
        self._key = SigningKey.load_or_create(state.key_file)
        remove_leftovers(state.root)
        self._front = FrontProcess(port)
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=64))
        self._woken = asyncio.Event()
        self._fleet = Fleet(
            state,
            self._front,
            self._client,
            service=self._intent.name,
            on_change=self._woken.set,
            edge=edge,
        )
        self._observer = Observer()
        self._trainer = Trainer(state, changed=self._woken.set)
        self._platform = LocalPlatform(state, self._fleet, self._key, url=self._front.url, trainer=self._trainer)
        self._board = Board(worker_kind="process", since=time.time())
        self._metrics, self._metrics_port = Metrics(), metrics_port
        self._metrics.records(self._observer.room_taken)
        self._reconciler = Reconciler(self._platform, self._observer, self._key, listeners=(self._board, self._metrics))
        self._web_port = web_port
        self._complaint = ""
        self._saved: dict[RampSetKey, int] = {}

    @property
    def url(self) -> str:
        """The one address for clients."""
        return self._front.url

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then drain and end every process."""
        key = self._intent.key
        self._platform.apply(self._intent)
        self._observer.restore(key, load_pools(self._state.records))
        page = await self._start_web(key)
        self._front.start()
        metrics = await self._show_metrics()
        log_event("listening", f"{key.name} at {self.url}", service=str(key), url=self.url, state=str(self._state.root))
        tasks = [
            asyncio.create_task(self._control(key), name="control"),
            asyncio.create_task(self._watch_file(), name="watch"),
            asyncio.create_task(self._keep_records(key), name="records"),
        ]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopped, *tasks):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await page.cleanup()
            await self._shut_down(key)
            if metrics is not None:
                await metrics.cleanup()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _start_web(self, key: ServiceKey) -> web.AppRunner:
        """The web page on loopback. The usual port may be another service's; one that was asked for must be free."""
        wanted = (USUAL_WEB_PORT, 0) if self._web_port is None else (self._web_port,)
        for port in wanted:
            try:
                # Another page each time: one that could not listen has been shut down, and would never be live.
                runner = await serve_web(WebPage(self._board), host=HOST, port=port)
            except OSError as error:
                if port != wanted[-1]:
                    continue
                reason = error.strerror or str(error)
                raise InvalidArgumentError(
                    f"port {port} cannot be used for the web page ({reason}); choose another with --web-port, 0 for any"
                ) from error
            url = f"http://{HOST}:{runner.addresses[0][1]}"
            log_event("web", f"watch it at {url}/services/{key.namespace}/{key.name}", service=str(key), url=url)
            return runner
        raise AssertionError("the last port either serves or raises")

    async def _show_metrics(self) -> Any:
        """Open the metrics port, if there is to be one."""
        if self._metrics_port is None:
            return None
        self._metrics.leading(True)
        return await serve_health(
            port=self._metrics_port, host=HOST, alive=str, ready=str, metrics=self._metrics, targets=self._targets
        )

    def _targets(self) -> list[dict[str, Any]]:
        key = self._intent.key
        return [
            {"targets": [address], "labels": {"namespace": key.namespace, "service": key.name, "pod": name}}
            for name, address in self._fleet.scrape_targets()
        ]

    # --- loops -------------------------------------------------------------------------------------

    async def _control(self, key: ServiceKey) -> None:
        """Pass after pass; an error is logged; the next try comes later each time while everything serves on."""
        retry = FIRST_RETRY_SECONDS
        while True:
            self._woken.clear()
            began, failed = time.monotonic(), True
            try:
                wait = await self._reconciler.reconcile(key)
                failed = False
                retry = FIRST_RETRY_SECONDS
            except Exception as error:
                log_event(
                    "pass-failed",
                    f"{error or type(error).__name__}; next try in {retry:g} s",
                    level=logging.ERROR,
                    error=error,
                )
                wait, retry = retry, min(LONGEST_RETRY_SECONDS, 2 * retry)
            self._metrics.reconciled(time.monotonic() - began, failed=failed)
            if wait is None:
                raise StateFolderError(f"{key} has vanished from {self._state.objects}; start again to create it anew")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), wait)

    async def _watch_file(self) -> None:
        """Apply the user's file whenever what it says changes; an edit that is wrong is logged once and changes
        nothing."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                intent = await asyncio.to_thread(self._read_intent)
                self._check_same_service(intent)
            except (OfframpError, OSError) as error:
                self._complain(str(error))
                continue
            self._complaint = ""
            if intent != self._intent and await asyncio.to_thread(self._platform.apply, intent):
                log_event("applied", "the manifest changed", service=str(intent.key))
                self._woken.set()
            self._intent = intent

    def _check_same_service(self, intent: Intent) -> None:
        if intent.key != self._intent.key:
            raise StateFolderError(
                f"metadata names {intent.key} now, and {self._intent.key} is running; stop it before starting another"
            )

    def _complain(self, message: str) -> None:
        if message != self._complaint:
            self._complaint = message
            log_event("manifest-refused", f"{message}; the old one stays in force", level=logging.WARNING)

    # --- the end -----------------------------------------------------------------------------------

    async def _shut_down(self, key: ServiceKey) -> None:
        """Clients first, then what is known, then the workers: a clean restart loses neither a request nor an audit."""
        log_event("stopping", "finishing the requests under way", service=str(key))
        await self._front.close()
        deadline = time.monotonic() + SETTLE_SECONDS
        with contextlib.suppress(Exception):  # whatever fails now must not keep workers alive
            while await self._reconciler.reconcile(key) is not None:
                if self._observer.settled(key) or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.2)
        await self._trainer.close()
        await self._fleet.close()
        await self._save_records(key)
        await self._observer.close()
        await self._client.aclose()
        log_event("stopped", "all workers have ended", service=str(key))

    # --- records -----------------------------------------------------------------------------------

    async def _keep_records(self, key: ServiceKey) -> None:
        while True:
            await asyncio.sleep(RECORDS_SECONDS)
            await self._save_records(key)

    async def _save_records(self, key: ServiceKey) -> None:
        """Write pools that changed, and remove those of ramp sets that nobody serves any more."""
        pools = self._observer.pools(key)
        changed = {ramp_set: pool for ramp_set, pool in pools.items() if self._saved.get(ramp_set) != pool.version}
        for ramp_set, pool in changed.items():
            self._saved[ramp_set] = pool.version
            arrays = pool.dump()  # here and not in the thread: pulls change the pool meanwhile
            await asyncio.to_thread(save_pool, self._state.records, ramp_set, arrays)
        if pools:
            await asyncio.to_thread(keep_only, self._state.records, set(pools))
