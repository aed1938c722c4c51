"""The operator process: wait for the leadership, then watch and reconcile until told to stop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ctypes
import gc
import ipaddress
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import uvloop
from aiohttp import web

from offramp_core.control.spec import parse_duration, parse_size
from offramp_core.errors import InvalidArgumentError, InvalidSpecError, UnavailableError
from offramp_operator.health import serve_health
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import WRITE_SECONDS, KubeClient, load_api_client
from offramp_operator.kube.kinds import SERVICE
from offramp_operator.kube.leader import LeaderElector, LeaseSettings
from offramp_operator.kube.manifests import DeliverySettings, OperatorPods, WorkerSettings
from offramp_operator.kube.platform import KubePlatform
from offramp_operator.kube.queue import WorkQueue
from offramp_operator.kube.shards import MAX_SHARDS, Shards, lease_names, lease_threads
from offramp_operator.kube.watch import LATE_SECONDS, Feed, service_key, watch
from offramp_operator.metrics import Metrics
from offramp_operator.shell.log import configure_json_logging, log_event
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.onlook import Onlookers
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SEED_BYTES, SigningKey
from offramp_operator.web.board import Board
from offramp_operator.web.relay import Standby, standing_by
from offramp_operator.web.server import WebPage, serve_web

WORKERS = 64  # passes under way; most of one is waiting for workers, which may hang
NETWORK_POLICIES = ("None", "Ingress", "IngressAndEgress")
LOG_LEVELS = ("debug", "info", "warning", "error")
STUCK_SECONDS = 600.0
TURN_SECONDS = 2.0  # between two looks whose turn it is
M_ARENA_MAX, ARENAS = -8, 2  # of mallopt(3)
NEW_OBJECTS = 20_000  # between two looks for garbage in cycles, of which there is hardly any
STOP_SECONDS = 15.0  # within the pod's grace period, with time left to release the Lease


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The web page: its port, and the names it answers to besides addresses.

    It listens on the pod's loopback only, for those who may forward ports, unless ``address`` says under which address of the pod
    others reach it.
    """

    port: int
    address: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's environment. ``namespaces`` is empty for all of them."""

    namespaces: tuple[str, ...]
    lease_namespace: str
    lease_name: str
    workers: WorkerSettings
    signing_key_file: Path
    identity: str
    port: int = 8080
    web: WebSettings | None = None
    shards: int = 1
    log_level: int = logging.INFO


def parse_settings(environment: Mapping[str, str]) -> Settings:
    """Read the environment once.

    Raises
    ------
    InvalidArgumentError
        A variable is missing or malformed; the message names it.
    """
    return Settings(
        namespaces=_listed(environment, "OFFRAMP_NAMESPACES"),
        lease_namespace=_required(environment, "OFFRAMP_LEASE_NAMESPACE", "the namespace of the operator's Lease"),
        lease_name=_required(environment, "OFFRAMP_LEASE_NAME", "the name of the operator's Lease"),
        workers=_worker_settings(environment),
        signing_key_file=Path(_required(environment, "OFFRAMP_SIGNING_KEY_FILE", "a file with 32 secret bytes")),
        identity=environment.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        port=_port(environment, "OFFRAMP_PORT", "8080"),
        web=_web(environment),
        shards=_shards(environment),
        log_level=_log_level(environment),
    )


def _web(environment: Mapping[str, str]) -> WebSettings | None:
    if not environment.get("OFFRAMP_WEB_PORT", ""):
        return None
    address = environment.get("OFFRAMP_WEB_ADDRESS", "")
    try:
        literal = str(ipaddress.ip_address(address)) if address else ""
    except ValueError as error:
        raise InvalidArgumentError(f"OFFRAMP_WEB_ADDRESS is {address!r}; it must be the pod's IP address") from error
    port = _port(environment, "OFFRAMP_WEB_PORT", "")
    return WebSettings(port, address=literal, names=_listed(environment, "OFFRAMP_WEB_HOSTS"))


def _port(environment: Mapping[str, str], name: str, default: str) -> int:
    port = environment.get(name, default)
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        raise InvalidArgumentError(f"{name} is {port!r}; it must be a port from 1 to 65535")
    return int(port)


def _shards(environment: Mapping[str, str]) -> int:
    text = environment.get("OFFRAMP_SHARDS", "1")
    if not text.isdigit() or not 1 <= int(text) <= MAX_SHARDS:
        raise InvalidArgumentError(f"OFFRAMP_SHARDS is {text!r}; it must be a number from 1 to {MAX_SHARDS}")
    return int(text)


def _log_level(environment: Mapping[str, str]) -> int:
    text = environment.get("OFFRAMP_LOG_LEVEL", "") or "info"
    if text not in LOG_LEVELS:
        raise InvalidArgumentError(f"OFFRAMP_LOG_LEVEL is {text!r}; choose from {', '.join(LOG_LEVELS)}")
    return logging.getLevelNamesMapping()[text.upper()]


def _listed(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(text.strip() for text in environment.get(name, "").split(",") if text.strip())


def _worker_settings(environment: Mapping[str, str]) -> WorkerSettings:
    image = _required(environment, "OFFRAMP_WORKER_IMAGE", "the image that workers run")
    policy = environment.get("OFFRAMP_WORKER_NETWORK_POLICY", "").strip() or "None"
    if policy not in NETWORK_POLICIES:
        choices = ", ".join(NETWORK_POLICIES)
        raise InvalidArgumentError(f"OFFRAMP_WORKER_NETWORK_POLICY is {policy!r}; choose from {choices}")
    plain = WorkerSettings(image, delivery=_delivery_settings(environment), pull_secrets=_listed(environment, "OFFRAMP_WORKER_PULL_SECRETS"))  # fmt: skip
    if policy == "None":
        return plain
    labels = {
        "app.kubernetes.io/name": "offramp",
        "app.kubernetes.io/instance": _required(environment, "OFFRAMP_OPERATOR_INSTANCE", "the release's name"),
        "app.kubernetes.io/component": "operator",
    }
    namespace = _required(environment, "OFFRAMP_LEASE_NAMESPACE", "the namespace of the operator's Lease")
    operator = OperatorPods(namespace, labels)
    return replace(plain, admin_from=operator, allow_egress=policy == "Ingress")


def _delivery_settings(environment: Mapping[str, str]) -> DeliverySettings:
    """What bundles may be fetched, and from where."""
    private = environment.get("OFFRAMP_DELIVERY_ALLOW_PRIVATE_NETWORKS", "") or "false"
    if private not in ("true", "false"):
        raise InvalidArgumentError(f"OFFRAMP_DELIVERY_ALLOW_PRIVATE_NETWORKS is {private!r}; it must be true or false")
    size, timeout = (f"OFFRAMP_DELIVERY_{name}" for name in ("SIZE_LIMIT", "TIMEOUT"))
    try:
        size_bytes = parse_size(environment.get(size, "") or "16Gi", size)
        seconds = parse_duration(environment.get(timeout, "") or "1h", timeout)
    except InvalidSpecError as error:
        raise InvalidArgumentError(str(error)) from error
    if seconds < 1:
        raise InvalidArgumentError(f"{timeout} is {environment[timeout]!r}; it must be at least 1s")
    return DeliverySettings(private == "true", size_bytes, seconds)


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
        self._board = Board(worker_kind="Pod", since=time.time()) if settings.web is not None else None
        self._catching_up: set[ServiceKey] = set()
        self._feed: Feed | None = None
        self._listed = asyncio.Event()
        self._queue: WorkQueue[ServiceKey] | None = None

    async def run(self) -> int:
        """Serve health, see the cluster, stand by, lead, stop. Returns the exit code."""
        self._take_signals()
        lease_client = KubeClient(
            load_api_client(), threads=lease_threads(self._settings.shards), read_seconds=WRITE_SECONDS
        )
        shards = self._shards(lease_client)
        health = await serve_health(
            port=self._settings.port, alive=self._alive, ready=self._ready, metrics=self._metrics
        )
        page = await self._serve_web(shards.first)
        client = KubeClient(load_api_client(), may_write=shards.holds)
        try:
            return await self._live(client, shards)
        finally:
            client.close()
            await shards.release()
            if page is not None:
                await page.cleanup()
            lease_client.close()
            await health.cleanup()

    def _shards(self, client: KubeClient) -> Shards:
        settings = self._settings
        leases = [
            LeaseSettings(settings.lease_namespace, name, settings.identity, web_url=self._web_url())
            for name in lease_names(settings.lease_name, settings.shards)
        ]
        electors = [LeaderElector(client, lease, jitter=random.random) for lease in leases]
        return Shards(electors, retry_seconds=leases[0].retry_seconds, on_lost=self._on_lost)

    def stop(self) -> None:
        """Finish what is in work, release the Lease and end."""
        self._stop.set()

    # --- seeing --------------------------------------------------------------------------------------

    async def _live(self, client: KubeClient, shards: Shards) -> int:
        """See and lead until told to stop, or until one of the two ends by itself."""
        # Of many shards each replica keeps its own; what belongs to one that it takes later is listed then.
        single = self._settings.shards == 1
        cache = ObjectCache(admits=lambda obj: single or (key := service_key(obj)) is None or shards.owns(key))
        feed = self._feed = Feed(cache, lambda key: self._wake(shards, key))
        self._metrics.watch(
            late_seconds=feed.late_seconds, queued=lambda: 0 if self._queue is None else len(self._queue)
        )
        stop_watching = asyncio.Event()
        seeing = asyncio.create_task(self._see(feed, client, stop_watching), name="watch")
        leading = asyncio.create_task(self._lead(cache, feed, client, shards), name="lead")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        ended, _ = await asyncio.wait({seeing, leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        told = self._stop.is_set()
        self._stop.set()
        await asyncio.wait({leading}, timeout=2 * STOP_SECONDS)  # it ends the work in hand within half of that
        stop_watching.set()
        await asyncio.wait({seeing}, timeout=STOP_SECONDS)
        for task in (seeing, leading, stopping):
            task.cancel()
        return 0 if told else _exit_code(ended)

    async def _see(self, feed: Feed, client: KubeClient, stop: asyncio.Event) -> None:
        """List everything, then watch it until told to stop, with a regular list as the net below. Leading or not: a standby that takes over
        knows the cluster already."""
        namespaces = self._settings.namespaces
        if not await self._until_stopped(feed.begin(client, namespaces)):
            return
        self._listed.set()
        async with asyncio.TaskGroup() as group:
            relisting = group.create_task(feed.relist_forever(client, namespaces), name="relist")
            await watch(feed, client, namespaces=namespaces, stop=stop)
            relisting.cancel()

    def _wake(self, shards: Shards, key: ServiceKey) -> None:
        if self._queue is not None and shards.owns(key):
            self._queue.add(key)

    # --- leading -----------------------------------------------------------------------------------

    async def _lead(self, cache: ObjectCache, feed: Feed, client: KubeClient, shards: Shards) -> None:
        """Reconcile, once this process leads and knows the cluster. Nothing is decided before the first list is complete."""
        if not await self._until_stopped(shards.acquire()):
            return
        self._leads = True
        self._metrics.leading(True)
        observer = Observer()
        try:
            await self._work(cache, feed, client, observer, shards)
        finally:
            await observer.close()
            self._leads = False
            self._metrics.leading(False)

    async def _work(
        self, cache: ObjectCache, feed: Feed, client: KubeClient, observer: Observer, shards: Shards
    ) -> None:
        platform = KubePlatform(client, cache, workers=self._settings.workers, instance=self._settings.identity)
        onlooker = Onlookers(self._metrics, *([self._board] if self._board is not None else []))
        reconciler = Reconciler(platform, observer, self._key, onlooker=onlooker)
        if not await self._until_stopped(self._know_what_is_led(feed, client)):
            return
        queue = self._queue = WorkQueue(
            self._timed(reconciler),
            on_failure=_log_failure,
            workers=WORKERS,
            clock=time.monotonic,
            jitter=random.random,
        )
        self._metrics.pace(platform.standing)
        self._catching_up = {ServiceKey(*name) for name in cache.names(SERVICE)}
        log_event("listed", f"{len(self._catching_up)} services", seconds=_process_seconds())
        for key in self._catching_up:
            queue.add(key)
        working = asyncio.create_task(queue.run(), name="queue")
        growing = asyncio.create_task(self._take_more(shards, feed, client), name="shards")
        turning = asyncio.create_task(_take_turns(platform, queue), name="turns")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        parts = {working, growing, turning, stopping}
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in (working, growing, turning) if task.done()]
        queue.stop()
        await asyncio.wait({working}, timeout=STOP_SECONDS)
        for task in parts:
            task.cancel()
        for task in ended:
            task.result()

    async def _know_what_is_led(self, feed: Feed, client: KubeClient) -> None:
        await self._listed.wait()
        if self._settings.shards > 1:
            await feed.begin(client, self._settings.namespaces)
        self._synced = True

    async def _take_more(self, shards: Shards, feed: Feed, client: KubeClient) -> None:
        """Take further shards as they become free. Their objects were not kept until now, so they are listed."""
        while True:
            shard = await shards.acquire()
            await feed.begin(client, self._settings.namespaces)
            log_event("shard-taken", f"shard {shard}; {len(shards.held)} of {self._settings.shards} are held here")

    def _timed(self, reconciler: Reconciler) -> Callable[[ServiceKey], Awaitable[float | None]]:
        async def reconcile(key: ServiceKey) -> float | None:
            started, failed = time.monotonic(), True
            try:
                again = await reconciler.reconcile(key)
                failed = False
                self._caught_up(key)
                return again
            finally:
                self._metrics.reconciled(time.monotonic() - started, failed=failed)

        return reconcile

    def _caught_up(self, key: ServiceKey) -> None:
        """Tell when every service of the first list has had its first pass: from then on this process knows how all of them stand."""
        if key in self._catching_up:
            self._catching_up.discard(key)
            if not self._catching_up:
                log_event("caught-up", "every service has had a pass", seconds=_process_seconds())

    async def _until_stopped(self, work: Coroutine[Any, Any, Any]) -> bool:
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

    # --- the web page ------------------------------------------------------------------------------

    async def _serve_web(self, elector: LeaderElector) -> web.AppRunner | None:
        settings = self._settings.web
        if settings is None or self._board is None:
            return None
        page = WebPage(self._board, names=settings.names, standby=lambda: self._standby(elector))
        try:
            return await serve_web(page, host=None if settings.address else "127.0.0.1", port=settings.port)
        except OSError as error:  # a page must not keep anybody from leading
            told = f"port {settings.port} cannot be used for the web page: {error.strerror or error}"
            log_event("web-failed", told, level=logging.ERROR)
            return None

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
        """A replica is ready once it knows the cluster: whoever rolls the operator must not end the last one that does."""
        missing = self._feed.missing() if self._feed is not None else "everything"
        if missing:
            return f"not listed to the end yet: {missing}"
        if self._leads and not self._synced:
            return "leading, but what belongs to its shards is not listed to the end yet"
        return self._alive()


async def _take_turns(platform: KubePlatform, queue: WorkQueue[ServiceKey]) -> None:
    """Wake services whose turn has come to take what the administrator asks for."""
    while True:
        for key in platform.take_turns():
            queue.add(key)
        await asyncio.sleep(TURN_SECONDS)


def _process_seconds() -> float:
    """Seconds since this process was started, imports included. Linux."""
    since_boot = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return round(since_boot - started / os.sysconf("SC_CLK_TCK"), 2)


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


def _collect_rarely() -> None:
    """Thousands of services are millions of objects that stay; to look through them for cycles at the usual rate takes a sixth of the start."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


def _share_arenas() -> None:
    """glibc gives threads that allocate at once arenas of their own, and each keeps what it once needed: at 700 services 6 % of all memory."""
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
