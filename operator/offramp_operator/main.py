"""The operator process: see the cluster, wait for the leadership, reconcile until asked to stop. kopf runs it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import uvloop
from aiohttp import web

from offramp_core.errors import InvalidArgumentError
from offramp_operator.kube import runtime
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import WRITE_SECONDS, KubeClient, load_api_client
from offramp_operator.kube.kinds import Kind, Object
from offramp_operator.kube.lead import STOP_SECONDS, Lead
from offramp_operator.kube.leader import LeaderElector, LeaseSettings
from offramp_operator.kube.managed import Item, Managed, Registry
from offramp_operator.kube.services import services
from offramp_operator.kube.shards import Shards, lease_names, lease_threads
from offramp_operator.kube.shared.entry import worker_pools
from offramp_operator.kube.watch import LATE_SECONDS, Feed, watch
from offramp_operator.metrics import Metrics
from offramp_operator.port import serve_health
from offramp_operator.settings import Settings, parse_settings, read_signing_key
from offramp_operator.shell.log import configure_json_logging, log_event
from offramp_operator.shell.signing import SigningKey
from offramp_operator.web.board import Board
from offramp_operator.web.relay import Standby, standing_by
from offramp_operator.web.server import WebPage, serve_web

STUCK_SECONDS = 600.0
M_ARENA_MAX, ARENAS = -8, 2  # of mallopt(3)
NEW_OBJECTS = 20_000  # between two searches for garbage in cycles, of which there is hardly any
END_SECONDS = 60.0  # more than an orderly end can take: what has not ended by then never will


class Operator:
    """One operator process; :meth:`run` is its life.

    Parameters
    ----------
    more : tuple of Managed
        Kinds to reconcile besides services.
    on_lost : callable
        Called when the leadership is lost, and where an end takes too long. It must end the process at once: nothing
        may act after it.
    """

    def __init__(
        self, settings: Settings, key: SigningKey, *, on_lost: Callable[[], object], more: tuple[Managed, ...] = ()
    ) -> None:
        self._settings = settings
        self._on_lost = on_lost
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._synced = False
        self._leads = False
        self._board = Board(worker_kind="Pod", since=time.time()) if settings.web is not None else None
        self._feed: Feed | None = None
        self._listed = asyncio.Event()
        self._work: Lead | None = None
        self._broken = False
        self._stop_watching = asyncio.Event()
        self._lease_client: KubeClient | None = None
        self._client: KubeClient | None = None
        self._shards: Shards | None = None
        self._leading: asyncio.Task[None] | None = None
        self._seeing: asyncio.Task[None] | None = None
        self._pages: list[web.AppRunner] = []
        listeners = () if self._board is None else (self._board,)
        service_kind = services(
            settings.workers,
            key,
            instance=settings.identity,
            metrics=self._metrics,
            shards=self._shards_held,
            listeners=listeners,
        )
        self._registry = Registry(service_kind, worker_pools(settings.workers, key), *more)

    async def run(self) -> int:
        """Be run by kopf until asked to stop, or until a part ends by itself. Returns the exit code."""
        handlers = runtime.registry(
            start=self._start,
            on_event=self._on_event,
            failed=self._metrics.event_failed,
            listed_anew=self._listed_anew,
            end=self._end,
            kinds=self._registry.ours,
        )
        try:
            await runtime.run(handlers, namespaces=self._settings.namespaces, stop=self._stop)
        except Exception as error:
            self._part_ended("kopf", error)
        finally:
            await self._end()  # kopf does not, where it was asked to stop before it had started
        return 1 if self._broken else 0

    def stop(self) -> None:
        """Finish what is in work, release the Lease and end; in the end by force, so that whoever watches the process
        starts it again."""
        if not self._stop.is_set():
            # No timer of the loop, which may hang or have ended before its threads.
            last = threading.Timer(END_SECONDS, self._on_lost)
            last.daemon = True
            last.start()
        self._stop.set()

    async def _start(self) -> None:
        """Serve health, see the cluster, stand by or lead. Nothing is watched before the first list is complete."""
        self._take_signals()
        settings = self._settings
        self._lease_client = KubeClient(
            load_api_client(), threads=lease_threads(settings.shards), read_seconds=WRITE_SECONDS
        )
        shards = self._shards = self._new_shards(self._lease_client)
        self._pages = [
            await serve_health(port=settings.port, alive=self._alive, ready=self._ready, metrics=self._metrics)
        ]
        self._pages += await self._serve_web(shards.first)
        client = self._client = KubeClient(load_api_client(), may_write=shards.holds)
        # Of many shards each replica keeps its own; what belongs to one that it takes later is listed then.
        single = settings.shards == 1
        registry = self._registry
        cache = ObjectCache(registry.watched, admits=lambda obj: single or registry.admits(obj, shards.owns))
        feed = self._feed = Feed(cache, self._wake, whom=registry)
        self._metrics.watch(late_seconds=feed.late_seconds, queued=lambda: 0 if self._work is None else len(self._work))
        self._leading = self._part("lead", self._lead(cache, feed, client, shards))
        if await self._until_stopped(self._list(feed, client)):
            self._listed.set()
            self._seeing = self._part("watch", self._see(feed, client))

    async def _end(self) -> None:
        """End the work in hand, then what it stands on. Again is fine."""
        self.stop()
        if self._leading is not None:
            await asyncio.wait({self._leading}, timeout=2 * STOP_SECONDS)  # it ends within half of that
        self._stop_watching.set()
        if self._seeing is not None:
            await asyncio.wait({self._seeing}, timeout=STOP_SECONDS)
        for task in filter(None, (self._leading, self._seeing)):
            task.cancel()
        if self._client is not None:
            self._client.close()
        if self._shards is not None:
            await self._shards.release()
        for page in self._pages:
            await page.cleanup()
        if self._lease_client is not None:
            self._lease_client.close()
        self._leading = self._seeing = self._client = self._shards = self._lease_client = None
        self._pages = []

    def _shards_held(self) -> tuple[frozenset[int], int]:
        return frozenset() if self._shards is None else self._shards.held, self._settings.shards

    def _new_shards(self, client: KubeClient) -> Shards:
        settings = self._settings
        leases = [
            LeaseSettings(settings.lease_namespace, name, settings.identity, web_url=self._web_url())
            for name in lease_names(settings.lease_name, settings.shards)
        ]
        electors = [LeaderElector(client, lease, jitter=random.random) for lease in leases]
        return Shards(electors, retry_seconds=leases[0].retry_seconds, on_lost=self._on_lost)

    def _part(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A part that runs for as long as the process: one that ends by itself ends it."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._part_ended(name, error)
            else:
                if not self._stop.is_set():
                    self._part_ended(name, None)

        return asyncio.create_task(run(), name=name)

    def _part_ended(self, name: str, error: Exception | None) -> None:
        log_event("part-ended", f"{name} ended; the process restarts", level=logging.ERROR, error=error)
        self._broken = True
        self.stop()

    # --- seeing --------------------------------------------------------------------------------------

    def _on_event(self, kind: Kind, happened: str | None, obj: Object) -> None:
        assert self._feed is not None
        self._feed.on_event(kind, happened, obj)

    def _listed_anew(self) -> None:
        if self._feed is not None:
            self._feed.relist_soon()

    async def _see(self, feed: Feed, client: KubeClient) -> None:
        """Watch the children until asked to stop, with a regular list of every kind as the net below. Leading or not: a
        standby that takes over knows the cluster already."""
        namespaces = self._settings.namespaces
        async with asyncio.TaskGroup() as group:
            every_kind = feed.relist_forever(client, namespaces, self._registry.watched)
            relisting = group.create_task(every_kind, name="relist")
            children = self._registry.children
            await watch(feed, client, namespaces=namespaces, stop=self._stop_watching, kinds=children)
            relisting.cancel()

    async def _list(self, feed: Feed, client: KubeClient) -> None:
        await feed.begin(client, self._settings.namespaces, self._registry.watched)

    def _wake(self, item: Item) -> None:
        if self._work is not None:
            self._work.wake(item)

    # --- leading -----------------------------------------------------------------------------------

    async def _lead(self, cache: ObjectCache, feed: Feed, client: KubeClient, shards: Shards) -> None:
        """Reconcile, once this process leads and knows the cluster. Nothing is decided before the first list is
        complete."""
        if not await self._until_stopped(shards.acquire()):
            return
        self._leads = True
        self._metrics.leading(True)
        try:
            if await self._until_stopped(self._know_what_is_led(feed, client)):
                self._work = Lead(self._registry, client, cache, shards, self._metrics)
                await self._work.run(self._stop, beside=self._take_more(shards, feed, client))
        finally:
            self._leads = False
            self._metrics.leading(False)

    async def _know_what_is_led(self, feed: Feed, client: KubeClient) -> None:
        await self._listed.wait()
        if self._settings.shards > 1:
            await self._list(feed, client)
        self._synced = True

    async def _take_more(self, shards: Shards, feed: Feed, client: KubeClient) -> None:
        """Take further shards as they become free. Their objects were not kept until now, so they are listed."""
        while True:
            shard = await shards.acquire()
            await self._list(feed, client)
            log_event("shard-taken", f"shard {shard}; {len(shards.held)} of {self._settings.shards} are held here")

    async def _until_stopped(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Whether ``work`` ended before the process was asked to stop."""
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True

    # --- the web page ------------------------------------------------------------------------------

    async def _serve_web(self, elector: LeaderElector) -> list[web.AppRunner]:
        settings = self._settings.web
        if settings is None or self._board is None:
            return []
        page = WebPage(self._board, names=settings.names, standby=lambda: self._standby(elector))
        try:
            return [await serve_web(page, host=None if settings.address else "127.0.0.1", port=settings.port)]
        except OSError as error:  # a page must not keep anybody from leading
            message = f"port {settings.port} cannot be used for the web page: {error.strerror or error}"
            log_event("web-failed", message, level=logging.ERROR)
            return []

    def _web_url(self) -> str:
        settings = self._settings.web
        if settings is None or not settings.address:
            return ""
        host = f"[{settings.address}]" if ":" in settings.address else settings.address
        return f"http://{host}:{settings.port}"

    def _standby(self, elector: LeaderElector) -> Standby | None:
        """None while this process leads: only the leader sees workers."""
        if self._leads:
            return None
        name, url = elector.leader
        assert self._settings.web is not None
        leader = name if name != self._settings.identity else ""  # about to lead: the page has nothing yet
        return standing_by(leader, url, namespace=self._settings.lease_namespace, port=self._settings.web.port)

    # --- signals and health ------------------------------------------------------------------------

    def _take_signals(self) -> None:
        """kopf's own handlers would end the watches first, under work that is in hand."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def _alive(self) -> str:
        late = self._feed.late_seconds() if self._feed is not None else 0.0
        if late > LATE_SECONDS:
            return f"a watch has been {late:.0f} s behind what lists see"
        longest = self._work.longest_running_seconds() if self._work is not None else 0.0
        return f"a pass has been running for {longest:.0f} s" if longest > STUCK_SECONDS else ""

    def _ready(self) -> str:
        """A replica is ready once it knows the cluster: whoever rolls the operator must not end the last one that
        does."""
        missing = self._feed.missing() if self._feed is not None else "everything"
        if missing:
            return f"not listed to the end yet: {missing}"
        if self._leads and not self._synced:
            return "leading, but what belongs to its shards is not listed to the end yet"
        return self._alive()


def _die() -> NoReturn:
    """End at once: whatever is under way may no longer be written."""
    sys.stderr.flush()
    os._exit(1)


def _collect_rarely() -> None:
    """Thousands of services are millions of objects that stay; to search them for cycles at the usual rate takes
    a sixth of the start."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


def _share_arenas() -> None:
    """glibc gives threads that allocate at once arenas of their own, and each keeps what it once needed: at 700
    services 6 % of all memory."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such setting
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def main() -> int:
    """Entry point of ``offramp-operator``."""
    configure_json_logging()
    _collect_rarely()
    _share_arenas()
    try:
        settings = parse_settings(os.environ)
        key = read_signing_key(settings.signing_key_file)
    except InvalidArgumentError as error:
        log_event("bad-settings", str(error), level=logging.ERROR)
        return 2
    configure_json_logging(level=settings.log_level)

    async def run() -> int:
        return await Operator(settings, key, on_lost=_die).run()

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
