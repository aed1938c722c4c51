"""The Kubernetes API as few typed calls on plain dictionaries.

Only ``DynamicClient`` is used, on resources declared in :mod:`kinds` instead of discovered ones: discovery would
read and write a cache file and has no time limit. The client library is synchronous, so calls run in small
thread pools, one for each :class:`Lane`; each call has a deadline, and a write one that is shorter than what is left of
a Lease whose holder has stopped to renew it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, TypeVar, cast

import msgspec
import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.resource import Resource

from offramp_core.errors import OfframpError, UnavailableError
from offramp_operator.kube.kinds import FIELD_MANAGER, Kind, Object, made, name_of, namespace_of
from offramp_operator.kube.trim import read_event, read_page
from offramp_operator.shell.platform import ConflictError

CONNECT_SECONDS = 5.0
READ_SECONDS = 15.0
# Together less than a Lease outlasts its renewal deadline: what a leader sends last is over before another may lead.
WRITE_CONNECT_SECONDS = 1.0
WRITE_SECONDS = 3.0
THREADS = 4  # of each lane
MAX_CONNECTIONS = 64  # kept open; more are closed after each call
BUSY_ATTEMPTS = 4  # of a call that a busy server turns away
BUSY_SECONDS = 2.0  # where it asks for no longer wait than this
LIST_PAGE = 500
# Both are reported as failures of the server's own.
UNDECLARED = "field not declared in schema"
TOO_LARGE = ("etcdserver: request is too large", "trying to send message larger than max")
WATCH_SECONDS = 300  # the server ends a watch after this long; it goes on from where it was
# The server sends a bookmark about every minute, so a watch that is silent for longer is dead.
WATCH_SILENCE_SECONDS = 150.0
WATCH_CHUNK_BYTES = 1 << 16
# Without it the API server silently drops what its schema does not know: evidence would be lost, not refused.
_STRICT = ("fieldValidation", "Strict")
_IN_TIME = ("timeout", f"{WRITE_SECONDS:.0f}s")  # the API server gives up a write as well: nobody waits for it any more

T = TypeVar("T")

Events = list[tuple[str, Object]]
"""What a watch tells: type and object."""
Objects = list[Object]


class Lane(StrEnum):
    """Calls of one lane may wait for each other, and for no other lane's."""

    PLANS = "plans"
    """What workers are to run. Nothing else may keep a plan from being taken away."""
    STATUSES = "statuses"
    """What a pass has to write before the next one looks again."""
    BULK = "bulk"
    """Everything else: children, jobs, lists."""


class ApiError(OfframpError):
    """The API server refused a request for good: repeating it unchanged will not help."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class GoneError(ApiError):
    """The object does not exist (any more)."""


class InvalidObjectError(ApiError):
    """The API server calls the object invalid (422, or a malformed 400)."""


class TooLargeError(ApiError):
    """The object would be larger than the API server or its store takes: it must become smaller, repeating it will not
    help."""


class ExpiredError(ApiError):
    """A resource version is too old to watch from (410): list again."""


class ApiUnavailableError(UnavailableError):
    """The API server did not answer or asked to come back later, after ``retry_after_seconds`` where it named any."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class BusyError(ApiUnavailableError):
    """The API server turned the request away unread (429)."""


class KubeClient:
    """Calls of the API server, each with a deadline.

    One that is turned away by a busy server (429 with ``Retry-After``, as its priority and fairness do) is made again a
    few times, as client-go does: otherwise a pass of many writes would hardly ever get through, and a leader would lose
    its Lease.

    Parameters
    ----------
    api : kubernetes ApiClient
        Credentials and address; see :func:`load_api_client`.
    threads : int
        Calls that may be under way at once, in each lane.
    read_seconds : float, optional
        How long an answer to a read may take, where that is less than usual.
    fenced : bool
        Whether a write must be over before another may lead; not so for people's tools, which may be far from the API
        server.
    may_write : callable
        Asked right before every write is sent. False means that this process may no longer act (it lost the
        leadership), and the write is refused here.

    Raises
    ------
    ConflictError
        Somebody else wrote first, or the object exists already (409).
    ApiUnavailableError
        429, 5xx, timeouts, no connection.
    GoneError, InvalidObjectError, TooLargeError, ApiError
        404; 422, or a field that the cluster does not know; 413, or more than etcd takes; any other refusal.
    """

    def __init__(
        self,
        api: kubernetes_client.ApiClient,
        *,
        threads: int = THREADS,
        read_seconds: float | None = None,
        fenced: bool = True,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._dynamic = DynamicClient(api, discoverer=_NoDiscovery)
        self._pools = {lane: ThreadPoolExecutor(threads, thread_name_prefix=f"kube-{lane}") for lane in Lane}
        self._read_seconds = read_seconds
        self._fenced = fenced
        self._may_write = may_write
        self._resources: dict[Kind, Resource] = {}

    def close(self) -> None:
        """Let calls under way end; take no new ones."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def get(self, kind: Kind, namespace: str, name: str, *, lane: Lane = Lane.BULK) -> Object | None:
        """The object as the API server has it now, or None."""
        try:
            return cast(Object, await self._call("get", kind, lane=lane, name=name, namespace=namespace))
        except GoneError:
            return None

    async def list(self, kind: Kind, namespace: str | None = None) -> tuple[list[Object], int]:
        """All objects that the kind's selector admits, and the resource version at which the list was true."""
        items: list[Object] = []
        token: str | None = None
        while True:
            page = await self._call(
                "get", kind, namespace=namespace, label_selector=kind.selector or None, limit=LIST_PAGE, _continue=token
            )
            items += [made(kind) | item for item in page.get("items") or ()]
            token = page["metadata"].get("continue")
            if not token:
                return items, int(page["metadata"]["resourceVersion"])

    async def pages(self, kind: Kind, namespace: str | None = None) -> AsyncIterator[tuple[Objects, int]]:
        """Like :meth:`list`, page by page, and only what the cache keeps of the objects: the rest is not even
        parsed."""
        token: str | None = None
        while token != "":
            found, version, token = await self._call(
                "get",
                kind,
                namespace=namespace,
                label_selector=kind.selector or None,
                limit=LIST_PAGE,
                _continue=token,
                read=lambda body: read_page(kind, body),
            )
            yield found, version

    async def watch(
        self, kind: Kind, namespace: str | None, *, version: int, deliver: Callable[[Events], object]
    ) -> None:
        """Give ``deliver`` what happens after ``version``, as (type, trimmed object), until the server ends the watch.

        A bookmark is an object that has a resource version only. The stream is read by a thread of its own; a cancelled
        watch ends it.

        Raises
        ------
        ExpiredError
            What happened since ``version`` is not known any more.
        ApiUnavailableError
            The connection broke, or nothing was heard for longer than bookmarks take.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        stream = _Stream(self._resource(kind), kind, namespace, version)

        def settle(error: Exception | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        def run() -> None:
            error: Exception | None = None
            try:
                what = f"watch {kind.plural}"
                _translated(lambda: stream.read(lambda events: loop.call_soon_threadsafe(deliver, events)), what)
            except Exception as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=run, name=f"watch-{kind}", daemon=True).start()
        try:
            await ended
        finally:
            stream.close()

    async def apply(
        self,
        kind: Kind,
        body: Object,
        *,
        subresource: str | None = None,
        force: bool = True,
        manager: str = FIELD_MANAGER,
        lane: Lane = Lane.BULK,
    ) -> Object:
        """Server-side apply of everything this operator (or another ``manager``) owns in the object.

        A ``metadata.resourceVersion`` in the body makes it a compare-and-swap. An apply that changes nothing writes
        nothing.
        """
        return await self._write(
            "server_side_apply",
            kind,
            body=body,
            name=name_of(body),
            namespace=namespace_of(body),
            subresource=subresource,
            field_manager=manager,
            force_conflicts=force,
            lane=lane,
            query_params=[_STRICT],
        )

    async def create(self, kind: Kind, body: Object, *, lane: Lane = Lane.BULK) -> Object:
        """Create; ConflictError if it exists."""
        return await self._write(
            "create",
            kind,
            body=body,
            namespace=namespace_of(body),
            field_manager=FIELD_MANAGER,
            lane=lane,
            query_params=[_STRICT],
        )

    async def replace(self, kind: Kind, body: Object) -> Object:
        """Replace the object, only if it still has the body's resource version."""
        return await self._write(
            "replace", kind, body=body, name=name_of(body), namespace=namespace_of(body), field_manager=FIELD_MANAGER
        )

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Object, *, manager: str) -> Object:
        """Merge a patch into the object, as the field manager of a person's tool."""
        return await self._write(
            "patch",
            kind,
            body=patch,
            name=name,
            namespace=namespace,
            field_manager=manager,
            content_type="application/merge-patch+json",
            query_params=[_STRICT],
        )

    async def delete(self, kind: Kind, obj: Object, *, lane: Lane = Lane.BULK) -> None:
        """Delete exactly this object as it was seen, not a newer one of the same name nor what somebody has made of it;
        already gone is fine."""
        metadata = obj["metadata"]
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {name: metadata[name] for name in ("uid", "resourceVersion")},
            "propagationPolicy": "Background",
        }
        try:
            await self._write("delete", kind, body=options, name=name_of(obj), namespace=namespace_of(obj), lane=lane)
        except GoneError:
            return

    async def _write(self, verb: str, kind: Kind, **arguments: Any) -> Object:
        return cast(Object, await self._call(verb, kind, write=True, **arguments))

    async def _call(
        self,
        verb: str,
        kind: Kind,
        *,
        subresource: str | None = None,
        write: bool = False,
        lane: Lane = Lane.BULK,
        read: Callable[[bytes], Any] = msgspec.json.decode,
        **arguments: Any,
    ) -> Any:
        resource = self._resource(kind)
        target = resource.subresources[subresource] if subresource else resource

        limits = CONNECT_SECONDS, self._read_seconds or READ_SECONDS
        if write and self._fenced:
            limits = WRITE_CONNECT_SECONDS, WRITE_SECONDS
            arguments["query_params"] = [*arguments.get("query_params", ()), _IN_TIME]

        def call() -> Any:
            if write and not self._may_write():
                raise ApiUnavailableError("this process does not hold the leadership (any more); nothing was written")
            return read(getattr(target, verb)(serialize=False, _request_timeout=limits, **arguments).data)

        what = f"{verb} {kind.plural}{'/' + subresource if subresource else ''} {arguments.get('name') or ''}".rstrip()
        loop = asyncio.get_running_loop()
        attempts = 1
        while True:
            try:
                return await loop.run_in_executor(self._pools[lane], lambda: _translated(call, what))
            except BusyError as error:
                wait = error.retry_after_seconds
                if attempts == BUSY_ATTEMPTS or wait is None or wait > BUSY_SECONDS:
                    raise
            attempts += 1
            await asyncio.sleep(wait)

    def _resource(self, kind: Kind) -> Resource:
        if kind not in self._resources:
            status = {
                "status": {"kind": kind.name, "name": f"{kind.plural}/status", "namespaced": not kind.cluster_scoped}
            }
            self._resources[kind] = Resource(
                prefix="apis" if kind.group else "api",
                group=kind.group,
                api_version=kind.version,
                kind=kind.name,
                name=kind.plural,
                namespaced=not kind.cluster_scoped,
                client=self._dynamic,
                subresources=status,
            )
        return self._resources[kind]


class _Stream:
    """One watch, read to its end by one thread and closed by another one."""

    def __init__(self, resource: Resource, kind: Kind, namespace: str | None, version: int) -> None:
        self._resource, self._kind, self._namespace, self._version = resource, kind, namespace, version
        self._response: Any = None
        self._closed = False

    def read(self, deliver: Callable[[Events], object]) -> None:
        """Blocks until the server ends the watch, or :meth:`close`."""
        self._response = self._resource.get(
            namespace=self._namespace,
            label_selector=self._kind.selector or None,
            resource_version=str(self._version),
            watch=True,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
            serialize=False,
            _request_timeout=(CONNECT_SECONDS, WATCH_SILENCE_SECONDS),
        )
        rest = b""
        for chunk in self._response.stream(WATCH_CHUNK_BYTES):
            if self._closed:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            events = [read_event(self._kind, line) for line in lines if line]
            for happened, obj in events:
                if happened == "ERROR":
                    raise _stream_error(self._kind, obj)
            if events:
                deliver(events)

    def close(self) -> None:
        """Make :meth:`read` return soon."""
        self._closed = True
        if self._response is not None:
            with contextlib.suppress(Exception):  # it may have ended by itself at this moment
                self._response.shutdown()


def _stream_error(kind: Kind, status: Object) -> ApiError | ApiUnavailableError:
    code, message = int(status.get("code") or 0), str(status.get("message") or "no reason given")
    if code == 410:
        return ExpiredError(code, "Expired", f"watch {kind.plural}: {message}")
    return ApiUnavailableError(f"watch {kind.plural}: {message} ({code} {status.get('reason')})")


class _NoDiscovery:
    """Stands where ``DynamicClient`` wants a discoverer; every resource is declared."""

    def __init__(self, client: DynamicClient, cache_file: str | None) -> None:
        del client, cache_file


def load_api_client() -> kubernetes_client.ApiClient:
    """Credentials of the pod, else of the kubeconfig (``KUBECONFIG`` or the home folder's)."""
    configuration = kubernetes_client.Configuration()
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    except kubernetes_config.ConfigException:
        kubernetes_config.load_kube_config(client_configuration=configuration)
    # Retries are the work queue's, which knows about backoff and leadership.
    configuration.retries = False
    configuration.connection_pool_maxsize = MAX_CONNECTIONS
    return kubernetes_client.ApiClient(configuration)


def _translated(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except ApiException as error:
        raise _error(error, what) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ApiUnavailableError(f"{what}: the API server did not answer: {error!r}") from error
    except msgspec.DecodeError as error:
        raise ApiUnavailableError(f"{what}: the API server's answer was cut short") from error


def _error(error: ApiException, what: str) -> Exception:
    status = int(error.status or 0)
    reason, message = _reason_and_message(error)
    message = f"{what}: {message}"
    if status == 409:
        return ConflictError(message)
    refusal = _refusal(status, reason, message)
    if refusal is None and (status in (0, 408, 429) or status >= 500):
        kind = BusyError if status == 429 else ApiUnavailableError
        return kind(f"{message} ({status} {reason})", _retry_after(error.headers or {}))
    return refusal or ApiError(status, reason, message)


def _refusal(status: int, reason: str, message: str) -> ApiError | None:
    """A refusal that callers tell from others; some come as failures of the server's own."""
    if status in (404, 410):
        return (GoneError if status == 404 else ExpiredError)(status, reason, message)
    if UNDECLARED in message:
        text = f"{message}; the cluster's definitions are older than this operator: install those of its release"
        return InvalidObjectError(status, "Invalid", text)
    if status == 413 or any(words in message for words in TOO_LARGE):
        text = f"{message}; the whole object must stay below what etcd takes, 1.5 MiB where nobody has set it"
        return TooLargeError(status, "TooLarge", text)
    if status == 422 or (status == 400 and reason == "Invalid"):
        return InvalidObjectError(status, reason, message)
    return None


def _reason_and_message(error: ApiException) -> tuple[str, str]:
    """From the ``Status`` object in the body, where there is one."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        value = json.loads(body)
        return str(value.get("reason") or error.reason), str(value.get("message") or error.reason)
    except (ValueError, AttributeError):
        return str(error.reason), body[:200] or str(error.reason)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = next((value for name, value in headers.items() if name.lower() == "retry-after"), None)
    return float(text) if text is not None and text.isdigit() else None
