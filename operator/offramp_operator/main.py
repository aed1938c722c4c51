"""The operator process: wait for the leadership, then watch and reconcile until told to stop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import uvloop

from offramp_core.errors import InvalidArgumentError, UnavailableError
from offramp_operator.health import serve_health
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient, load_api_client
from offramp_operator.kube.leader import LeaderElector, LeaseSettings
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform import KubePlatform
from offramp_operator.kube.queue import WorkQueue
from offramp_operator.kube.watch import LATE_SECONDS, Feed, watch
from offramp_operator.metrics import Metrics
from offramp_operator.shell.log import configure_json_logging, log_event
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SEED_BYTES, SigningKey

WORKERS = 8
STUCK_SECONDS = 600.0
STOP_SECONDS = 15.0  # within the pod's grace period, with time left to release the Lease
FIRST_LIST_RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's environment. ``namespaces`` is empty for all of them."""

    namespaces: tuple[str, ...]
    lease_namespace: str
    lease_name: str
    worker_image: str
    signing_key_file: Path
    identity: str
    port: int = 8080


def parse_settings(environment: Mapping[str, str]) -> Settings:
    """Read the environment once.

    Raises
    ------
    InvalidArgumentError
        A variable is missing or malformed; the message names it.
    """
    port = environment.get("OFFRAMP_PORT", "8080")
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        raise InvalidArgumentError(f"OFFRAMP_PORT is {port!r}; it must be a port from 1 to 65535")
    return Settings(
        namespaces=tuple(
            name for text in environment.get("OFFRAMP_NAMESPACES", "").split(",") if (name := text.strip())
        ),
        lease_namespace=_required(environment, "OFFRAMP_LEASE_NAMESPACE", "the namespace of the operator's Lease"),
        lease_name=_required(environment, "OFFRAMP_LEASE_NAME", "the name of the operator's Lease"),
        worker_image=_required(environment, "OFFRAMP_WORKER_IMAGE", "the image that workers run"),
        signing_key_file=Path(_required(environment, "OFFRAMP_SIGNING_KEY_FILE", "a file with 32 secret bytes")),
        identity=environment.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        port=int(port),
    )


def _required(environment: Mapping[str, str], name: str, meaning: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise InvalidArgumentError(f"{name} is not set; it must be {meaning}")
    return value


def read_signing_key(path: Path) -> SigningKey:
    """The key in a file of 32 secret bytes, raw (a mounted Secret) or as base64.

    Raises
    ------
    InvalidArgumentError
        The file cannot be read or holds something else.
    """
    try:
        content = path.read_bytes()
        seed = content if len(content) == SEED_BYTES else base64.b64decode(content.strip(), validate=True)
        return SigningKey.from_seed(seed)
    except (OSError, binascii.Error, InvalidArgumentError) as error:
        raise InvalidArgumentError(f"{path} holds no signing key of {SEED_BYTES} bytes: {error}") from error


class Operator:
    """One operator process; :meth:`run` is its life.

    Parameters
    ----------
    on_lost : callable
        Called when the leadership is lost. It must end the process at once: nothing may act after it.
    """

    def __init__(self, settings: Settings, key: SigningKey, *, on_lost: Callable[[], object]) -> None:
        self._settings = settings
        self._key = key
        self._on_lost = on_lost
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._synced = False
        self._leads = False
        self._feed: Feed | None = None
        self._queue: WorkQueue[ServiceKey] | None = None

    async def run(self) -> int:
        """Serve health, stand by, lead, stop. Returns the exit code."""
        self._take_signals()
        lease = LeaseSettings(self._settings.lease_namespace, self._settings.lease_name, self._settings.identity)
        lease_client = KubeClient(load_api_client(), threads=1)
        elector = LeaderElector(lease_client, lease, jitter=random.random)
        health = await serve_health(
            port=self._settings.port, alive=self._alive, ready=self._ready, metrics=self._metrics
        )
        try:
            if not await self._until_stopped(elector.acquire()):
                return 0
            return await self._lead(elector)
        finally:
            await elector.release()
            lease_client.close()
            await health.cleanup()

    def stop(self) -> None:
        """Finish what is in work, release the Lease and end."""
        self._stop.set()

    # --- leading -----------------------------------------------------------------------------------

    async def _lead(self, elector: LeaderElector) -> int:
        self._leads = True
        self._metrics.leading(True)
        keeping = asyncio.create_task(self._keep(elector), name="lease")
        client = KubeClient(load_api_client(), may_write=elector.holds)
        try:
            async with httpx.AsyncClient() as http:
                return await self._work(client, http)
        finally:
            client.close()
            keeping.cancel()
            self._leads = False
            self._metrics.leading(False)

    async def _keep(self, elector: LeaderElector) -> None:
        await elector.keep()
        self._on_lost()

    async def _work(self, client: KubeClient, http: httpx.AsyncClient) -> int:
        """Fill the cache, then watch and reconcile. Nothing is decided before the first list is complete."""
        cache = ObjectCache()
        platform = KubePlatform(client, cache, workers=WorkerSettings(self._settings.worker_image),
                                instance=self._settings.identity, observer=self._metrics)  # fmt: skip
        reconciler = Reconciler(platform, Observer(http), self._key)
        queue = self._queue = WorkQueue(
            self._timed(reconciler),
            on_failure=_log_failure,
            workers=WORKERS,
            clock=time.monotonic,
            jitter=random.random,
        )
        feed = self._feed = Feed(cache, queue.add)
        self._metrics.watch(late_seconds=feed.late_seconds, queued=lambda: len(queue))
        if not await self._until_stopped(self._first_list(feed, client)):
            return 0
        self._synced = True
        stop_watching = asyncio.Event()
        working = asyncio.create_task(queue.run(), name="queue")
        relisting = asyncio.create_task(feed.relist_forever(client, self._settings.namespaces), name="relist")
        watching = asyncio.create_task(
            watch(feed, namespaces=self._settings.namespaces, stop=stop_watching, after_start=self._take_signals),
            name="watch",
        )
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        ended, _ = await asyncio.wait({working, relisting, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        queue.stop()
        await asyncio.wait({working}, timeout=STOP_SECONDS)
        stop_watching.set()
        await asyncio.wait({watching}, timeout=STOP_SECONDS)
        for task in (working, relisting, watching, stopping):
            task.cancel()
        return _exit_code(task for task in ended if task is not stopping)

    async def _first_list(self, feed: Feed, client: KubeClient) -> None:
        while True:
            try:
                return await feed.relist(client, self._settings.namespaces)
            except UnavailableError as error:
                log_event("first-list-failed", str(error), level=logging.WARNING)
                await asyncio.sleep(FIRST_LIST_RETRY_SECONDS)

    def _timed(self, reconciler: Reconciler) -> Callable[[ServiceKey], Awaitable[float | None]]:
        async def reconcile(key: ServiceKey) -> float | None:
            started, failed = time.monotonic(), True
            try:
                again = await reconciler.reconcile(key)
                failed = False
                return again
            finally:
                self._metrics.reconciled(time.monotonic() - started, failed=failed)

        return reconcile

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether ``work`` ended before the process was told to stop."""
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True

    # --- signals and health ------------------------------------------------------------------------

    def _take_signals(self) -> None:
        """kopf installs handlers of its own, which would stop the watch before the work in hand."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def _alive(self) -> str:
        late = self._feed.late_seconds() if self._feed is not None else 0.0
        if late > LATE_SECONDS:
            return f"a watch has been {late:.0f} s behind what lists see"
        longest = self._queue.longest_running_seconds() if self._queue is not None else 0.0
        return f"a pass has been running for {longest:.0f} s" if longest > STUCK_SECONDS else ""

    def _ready(self) -> str:
        if self._leads and not self._synced:
            return "leading, but the first list is not complete"
        return self._alive()


def _log_failure(key: ServiceKey, error: Exception, wait: float) -> None:
    level = logging.WARNING if isinstance(error, UnavailableError) else logging.ERROR
    traceback = None if isinstance(error, UnavailableError) else error
    log_event(
        "reconcile-failed",
        f"{key}: {error}; next attempt in {wait:.1f} s",
        level=level,
        error=traceback,
        service=str(key),
    )


def _exit_code(ended: Iterable[asyncio.Task[Any]]) -> int:
    """0 when we were asked to stop; 1 when a part that must run for ever ended by itself."""
    tasks = list(ended)
    for task in tasks:
        error = task.exception() if not task.cancelled() else None
        log_event("part-ended", f"{task.get_name()} ended; the process restarts", level=logging.ERROR, error=error)
    return 1 if tasks else 0


def _die() -> NoReturn:
    """End at once: whatever is under way may no longer be written."""
    sys.stderr.flush()
    os._exit(1)


def main() -> int:
    """Entry point of ``offramp-operator``."""
    configure_json_logging()
    try:
        settings = parse_settings(os.environ)
        key = read_signing_key(settings.signing_key_file)
    except InvalidArgumentError as error:
        log_event("bad-settings", str(error), level=logging.ERROR)
        return 2

    async def run() -> int:
        return await Operator(settings, key, on_lost=_die).run()

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
