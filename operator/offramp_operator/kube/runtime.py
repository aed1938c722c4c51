"""kopf as the runtime of the operator's process, and as the watcher of its own kinds.

kopf supervises the process: startup, credentials, cleanup, and an end where a watch cannot go on. It watches
EarlyExitService, RampConfig and RampRollout with handlers that do nothing but feed the cache; informers of ours watch
the children, which are many more (docs/decisions/0080). Nothing of kopf writes to an object: only ``on.event`` handlers
are registered, which need no finalizer and no annotation, its stores are empty, and it posts no events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
from kubernetes import client as kubernetes_client

from offramp_operator.kube.client import load_api_client
from offramp_operator.kube.kinds import OWN, Kind, Object
from offramp_operator.kube.session import Backoff, ListWatchMiddleware, kopf_session
from offramp_operator.shell.log import log_event

LIST_PAGE = 500
WORKER_IDLE_SECONDS = 0.05  # kopf has a task for each object with news; it may end as soon as they are delivered
# Between attempts while the API server is away. kopf's own pauses grow to 21 s, which is how late the first change
# after an outage would be seen.
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, *(5.0,) * 60)
LOGIN_RETRY_SECONDS = 5.0  # after one that failed; kopf's own is a minute
WATCHER_TASK = "watcher for "  # how kopf's names of the tasks that watch begin

OnEvent = Callable[[Kind, str | None, Object], object]
"""Takes an event of a watch: kind, type (None: the object was found by a list), object."""


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf compares an object with its last state for handlers of changes, of which there are none."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):
    """Handlers of events are not repeated, so there is no progress to keep."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def settings() -> kopf.OperatorSettings:
    """kopf as a watcher that writes nothing."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.peering.standalone = True  # the Lease decides who acts
    chosen.scanning.disabled = True  # no right to read namespaces and definitions is needed
    chosen.watching.chunk_size = LIST_PAGE
    chosen.queueing.idle_timeout = WORKER_IDLE_SECONDS
    chosen.networking.error_backoffs = RETRY_SECONDS
    chosen.persistence.diffbase_storage = _NoDiffs()
    chosen.persistence.progress_storage = _NoProgress()
    return chosen


def registry(
    *,
    start: Callable[[], Awaitable[None]],
    on_event: OnEvent,
    failed: Callable[[], object],
    listed_anew: Callable[[], object],
    end: Callable[[], Awaitable[None]],
    login: Callable[[], kubernetes_client.ApiClient] = load_api_client,
    kinds: tuple[Kind, ...] = OWN,
) -> kopf.OperatorRegistry:
    """What kopf calls.

    Parameters
    ----------
    start : callable
        Called before anything is watched; an error ends the process.
    on_event : callable
        Called with each event of an own kind.
    failed : callable
        Called where ``on_event`` raised. kopf would log that and go on, so that nobody noticed.
    listed_anew : callable
        Called where what is deleted may have gone untold; see :class:`ListWatchMiddleware`.
    end : callable
        Called when nothing is watched any more.
    login : callable
        Reads credentials; called again where the API server takes them no longer.
    kinds : tuple of Kind
        What is watched.
    """
    handlers = kopf.OperatorRegistry()
    middleware, logins = ListWatchMiddleware(listed_anew, kinds=kinds), Backoff()

    @kopf.on.startup(registry=handlers, errors=kopf.ErrorsMode.PERMANENT)
    async def _start(**_: Any) -> None:
        await start()

    @kopf.on.login(registry=handlers, backoff=LOGIN_RETRY_SECONDS)
    async def _login(**_: Any) -> kopf.AiohttpSession:
        await logins.rest()  # kopf asks again at once where the API server does not take what it has just got
        logins.begin()
        # In a thread: reads files, and may run a plugin.
        connection = await asyncio.to_thread(lambda: _connection(login().configuration))
        return kopf_session(connection, middleware)

    @kopf.on.cleanup(registry=handlers, errors=kopf.ErrorsMode.PERMANENT)
    async def _end(**_: Any) -> None:
        _end_watchers()
        await end()

    for kind in kinds:
        _feed(handlers, kind, on_event=on_event, failed=failed)
    return handlers


def _end_watchers() -> None:
    """End every watch of kopf.

    With the first that cannot go on, kopf ends everything but the others. They would ask for credentials that nobody
    hands out any more, and take what kopf cancels then for a pause: the process would neither watch nor end (kopf 1.45,
    ``clients.api.stream``).
    """
    for task in asyncio.all_tasks():
        if task.get_name().startswith(WATCHER_TASK):
            task.cancel()


def _connection(configuration: kubernetes_client.Configuration) -> kopf.ConnectionInfo:
    """The same credentials as our own client's."""
    key = configuration.get_api_key_with_prefix
    scheme, _, token = (key("BearerToken") or key("authorization") or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


def _feed(handlers: kopf.OperatorRegistry, kind: Kind, *, on_event: OnEvent, failed: Callable[[], object]) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=handlers)
    async def _on_event(event: kopf.RawEvent, **_: Any) -> None:
        try:
            on_event(kind, event["type"], dict(event["object"]))
        except Exception as error:
            failed()
            log_event("event-failed", f"{kind}: {error!r}", level=logging.ERROR, error=error)


async def run(handlers: kopf.OperatorRegistry, *, namespaces: tuple[str, ...], stop: asyncio.Event) -> None:
    """Run kopf until ``stop``, or until one of its parts ends by itself: raises what it ended with."""
    await kopf.operator(
        registry=handlers, settings=settings(), namespaces=namespaces, clusterwide=not namespaces, stop_flag=stop
    )
