"""Entry point of the worker process: two ports, one event loop, one engine thread.

Exit codes: 0 after a clean drain (or a fetch), 1 for a bundle that could not be fetched, 2 for settings (or, from
``offramp serve``, a bundle) that cannot work, 3 when every run has failed for a minute, so that whoever supervises
starts another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
import uvloop
from fastapi import FastAPI

import offramp_worker
from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.task import GENERATE, declared_task
from offramp_worker.edge.door import EdgeDoor
from offramp_worker.edge.relay import Relay
from offramp_worker.feedback import Feedback
from offramp_worker.front import Front
from offramp_worker.http.admin import admin_app
from offramp_worker.http.bodies import App
from offramp_worker.http.budget import ByteBudget
from offramp_worker.http.connection import Connection
from offramp_worker.http.inference import Answering, Inference
from offramp_worker.http.public import public_app
from offramp_worker.http.refusals import Refusals
from offramp_worker.logs import log_event, route_library_logs
from offramp_worker.settings import Settings, settings_from_env
from offramp_worker.tracing import Tracing
from offramp_worker.worker import ExecutorLostError, InferenceWorker

if TYPE_CHECKING:
    from offramp_worker.shared.settings import SharedSettings

# The event loop and the engine share one interpreter; at the default of 5 ms a reply could wait that long for the
# other's turn.
SWITCH_INTERVAL_SECONDS = 0.0005
STARTED_POLL_SECONDS = 0.005
SWEEP_SECONDS = 1.0
RELOAD_SECONDS = 120.0  # between two tries of a bundle that cannot be served
EXECUTOR_LOST = 3  # the exit code
REPLY_SECONDS = 12  # of a drain; what is left of it belongs to audits
PULL_SECONDS = 5.0  # for a last pull; one comes each second, and at once where the platform tells that a worker leaves
PULL_POLL_SECONDS = 0.05
# Longer than clients keep idle connections, so that they close them and no request meets a closing one.
KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: two servers run in one process, and :func:`serve` decides when they end.
    ``serving`` ends with it."""

    serving: asyncio.Task[None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def bound_port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more connections; returns when the requests under way have ended."""
        self.should_exit = True
        await self.serving


def main() -> None:
    """``offramp-worker``: serve what the environment says. A broken bundle leaves it up, unready, with the reason to be
    read.

    ``offramp-worker fetch URI --to DIR`` fetches a bundle instead.
    """
    if sys.argv[1:2] == ["fetch"]:
        from offramp_worker.fetch import command  # which needs this module

        sys.exit(command.main(sys.argv[2:]))
    route_library_logs()
    try:
        if os.environ.get("OFFRAMP_MODELS") or os.environ.get("OFFRAMP_POOL_UID"):
            from offramp_worker.shared.settings import shared_settings

            run_models(shared_settings(os.environ), stay_up_broken=True)
        else:
            run(settings_from_env(os.environ), stay_up_broken=True)
    except InvalidArgumentError as error:
        log_event("settings-refused", level="error", reason=str(error))
        sys.exit(2)
    except ExecutorLostError as error:
        # Last of all: a pod's last lines are what its condition says.
        log_event("given-up", level="error", reason=str(error))
        sys.exit(EXECUTOR_LOST)


def run(settings: Settings, *, stay_up_broken: bool) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises
    ------
    InvalidBundleError
        The bundle is broken, unless ``stay_up_broken``.
    InvalidArgumentError
        A port is taken, or the state folder is not writable.
    ExecutorLostError
        Every run failed for too long; it has drained.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    if declared_task(settings.bundle) == GENERATE:
        from offramp_worker.generate.serve import serve_generation  # which needs this module

        uvloop.run(serve_generation(settings, stay_up_broken=stay_up_broken))
        return
    uvloop.run(serve(settings, stay_up_broken=stay_up_broken))


def run_models(settings: SharedSettings, *, stay_up_broken: bool) -> None:
    """As :func:`run`, of a worker that holds several models."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    from offramp_worker.shared.serve import serve_models  # which needs this module

    uvloop.run(serve_models(settings, stay_up_broken=stay_up_broken))


async def serve(settings: Settings, *, stay_up_broken: bool) -> None:
    """See :func:`run`."""
    loop = asyncio.get_running_loop()
    front = Front(loop)
    stop = asyncio.Event()
    worker = InferenceWorker(settings, deliver=front.deliver, on_lost=partial(stop_from_thread, loop, stop))
    worker.tracing = tracing_of(settings)
    on_signals(loop, stop)
    if settings.feedback_rows:
        front.feedback = Feedback(rows=settings.feedback_rows, metrics=worker.metrics)
    inference, budget = Inference(worker, front), ByteBudget(settings.max_bodies_bytes)
    app = public_app(worker, front)
    public = await listen(
        "public",
        EdgeDoor(worker, front, app) if settings.takes_edges else app,
        settings.host,
        settings.port,
        protocol=connections(
            settings, budget=budget, inference=inference if settings.edge is None else Relay(worker, inference)
        ),
    )
    rpc = await _listen_grpc(worker, front)
    admin = await listen_admin(admin_app(worker), settings, budget) if settings.has_control_plane else None
    try:
        await load_and_wait(worker, stop, stay_up_broken=stay_up_broken)
    finally:
        worker.drain()
        log_event("draining")
        deadline = loop.time() + settings.drain_seconds
        public.should_exit = True
        if rpc is not None:
            await rpc.stop(REPLY_SECONDS)
        await public.close()
        # The admin port outlives the public one, so that the last audits can still be pulled.
        await asyncio.to_thread(worker.finish, seconds=max(1.0, deadline - loop.time()))
        await until_pulled(worker, until=min(deadline, loop.time() + PULL_SECONDS))
        if admin is not None:
            await admin.close()
        if worker.tracing is not None:
            await asyncio.to_thread(worker.tracing.close)
        log_event("stopped", requests=worker.metrics.request_outcomes(), rows=worker.metrics.row_outcomes())
    if worker.lost:
        raise ExecutorLostError(worker.lost)


def tracing_of(settings: Settings) -> Tracing | None:
    """What makes spans, if that is asked for."""
    if settings.tracing != "otlp":
        return None
    name = settings.service or "offramp-worker"
    return Tracing(service=name, instance=settings.uid, version=offramp_worker.__version__)


def on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set ``stop``."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(number, stop.set)


def stop_from_thread(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set ``stop``, from another thread."""
    loop.call_soon_threadsafe(stop.set)


class Owing(Protocol):
    """What has in the end audits to report."""

    @property
    def owes_audits(self) -> bool: ...


class Loading(Owing, Protocol):
    """A worker, whatever it serves, as its process knows it: it has a bundle to load."""

    def load(self) -> None: ...


async def load_and_wait(worker: Loading, stop: asyncio.Event, *, stay_up_broken: bool) -> None:
    """What keeps a bundle from being served may pass: a device, after the process that lost it has ended. So a broken
    one is tried again."""
    while not stop.is_set():
        try:
            await asyncio.to_thread(worker.load)
            break
        except InvalidBundleError:
            if not stay_up_broken:
                raise
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), RELOAD_SECONDS)
    await stop.wait()


async def until_pulled(worker: Owing, *, until: float) -> None:
    """Give the control plane time for a last pull, where it waits for audits that are done by now."""
    loop = asyncio.get_running_loop()
    while worker.owes_audits and loop.time() < until:
        await asyncio.sleep(PULL_POLL_SECONDS)


def connections(
    settings: Settings, *, budget: ByteBudget, inference: Answering | None = None
) -> Callable[..., Connection]:
    """What handles the connections of a port, with its limits; ``inference`` is answered on the public one."""
    return partial(
        Connection,
        inference=inference,
        refusals=Refusals() if inference is None else inference.refusals,
        budget=budget,
        idle_seconds=KEEP_ALIVE_SECONDS,
        receive_seconds=settings.receive_seconds,
    )


async def _sweep(server: Server) -> None:
    """Let every connection see to its own timeouts once a second: no timer per request."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + SWEEP_SECONDS
        await asyncio.sleep(SWEEP_SECONDS)
        now = loop.time()
        stood_still = now > due + SWEEP_SECONDS  # what arrived meanwhile is still to be read: timers run first
        for connection in tuple(server.server_state.connections):
            if isinstance(connection, Connection):
                connection.expire(now, stood_still=stood_still)


async def listen_admin(app: App | FastAPI, settings: Settings, budget: ByteBudget) -> Server:
    """Open the admin port."""
    protocol = connections(settings, budget=budget)
    return await listen("admin", app, settings.host, settings.admin_port, protocol=protocol)


async def listen(name: str, app: App | FastAPI, host: str, port: int, *, protocol: Any) -> Server:
    """Open a port and serve ``app`` there. ``protocol`` makes what handles a connection."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=protocol,
        ws="none",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=REPLY_SECONDS,
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    server = Server(config)
    server.serving = asyncio.create_task(_serve_port(server, name, port))
    while not server.started and not server.serving.done():
        await asyncio.sleep(STARTED_POLL_SECONDS)
    if server.serving.done():
        await server.serving  # raises what went wrong
    sweeper = asyncio.create_task(_sweep(server))
    server.serving.add_done_callback(lambda _: sweeper.cancel())
    log_event("listening", name=name, host=host, port=server.bound_port)
    return server


async def _listen_grpc(worker: InferenceWorker, front: Front) -> Any:
    """Open the gRPC port if there is to be one. The library (20 MiB of memory) is loaded only then."""
    settings = worker.settings
    if settings.grpc_port is None:
        return None
    from offramp_worker.grpc.health import HealthService
    from offramp_worker.grpc.service import InferenceService, start_server

    server, port = await start_server(InferenceService(worker, front), HealthService.of(worker), settings=settings)
    log_event("listening", name="grpc", host=settings.host, port=port)
    return server


async def _serve_port(server: Server, name: str, port: int) -> None:
    try:
        await server.serve()
    except SystemExit as error:  # uvicorn's way to say that it could not bind
        raise InvalidArgumentError(f"the {name} port {port} cannot be opened; is it in use?") from error


if __name__ == "__main__":
    main()
