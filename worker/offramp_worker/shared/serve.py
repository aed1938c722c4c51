"""The process of a worker with several models: two or three ports, one event loop, one executor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from offramp_core.errors import InvalidBundleError
from offramp_worker.logs import log_event
from offramp_worker.main import (
    PULL_SECONDS,
    REPLY_SECONDS,
    connections,
    listen,
    listen_admin,
    on_signals,
    tracing_of,
    until_pulled,
)
from offramp_worker.shared.delivered import Delivered
from offramp_worker.shared.http import admin_port, public_port
from offramp_worker.shared.idle import unload_idle
from offramp_worker.shared.inference import SharedInference
from offramp_worker.shared.pooled import PooledRepository
from offramp_worker.shared.repository import Repository
from offramp_worker.shared.settings import SharedSettings
from offramp_worker.worker import ExecutorLostError

# Of a connection over gRPC in a pool: shorter than a model that leaves still answers after it has gone elsewhere.
CONNECTION_SECONDS = 5.0


async def serve_models(settings: SharedSettings, *, stay_up_broken: bool) -> None:
    """Serve until a signal, then drain; errors as :func:`offramp_worker.main.run` has them, of a worker whose every
    bundle is broken."""
    loop, stop, process = asyncio.get_running_loop(), asyncio.Event(), settings.process
    lost: list[str] = []

    def give_up(reason: str) -> None:
        lost.append(reason)
        stop.set()

    repository, delivered = _repository(settings, give_up)
    repository.begin(unload_idle(repository))
    on_signals(loop, stop)
    inference, budget = SharedInference(repository), repository.bodies
    public = await listen(
        "public",
        public_port(repository),
        process.host,
        process.port,
        protocol=connections(process, budget=budget, inference=inference),
    )
    rpc = await _listen_grpc(repository)
    admin = None
    if settings.has_admin_port:
        admin = await listen_admin(admin_port(repository, delivered), process, budget)
    try:
        start = repository.start() if delivered is None else delivered.start()
        await _load_and_wait(repository, start, stop, stay_up_broken=stay_up_broken)
    finally:
        repository.drain()
        log_event("draining")
        deadline = loop.time() + process.drain_seconds
        public.should_exit = True
        if rpc is not None:
            await rpc.stop(REPLY_SECONDS)
        await public.close()
        await repository.close(seconds=max(1.0, deadline - loop.time()))
        await until_pulled(repository, until=min(deadline, loop.time() + PULL_SECONDS))
        if admin is not None:
            await admin.close()
        if repository.tracing is not None:
            await asyncio.to_thread(repository.tracing.close)
        log_event("stopped", models={m.name: m.doors.worker.metrics.row_outcomes() for m in repository.models.values()})
    if lost:
        raise ExecutorLostError(lost[0])


def _repository(settings: SharedSettings, give_up: Callable[[str], None]) -> tuple[Repository, Delivered | None]:
    """The models, and in a pool what brings their list."""
    tracing = tracing_of(settings.process)
    if settings.pool is None:
        return Repository(settings, tracing=tracing, on_lost=give_up), None
    pooled = PooledRepository(settings, tracing=tracing, on_lost=give_up)
    return pooled, Delivered(pooled, settings.pool)


async def _load_and_wait(
    repository: Repository, start: Coroutine[Any, Any, None], stop: asyncio.Event, *, stay_up_broken: bool
) -> None:
    loading = asyncio.create_task(start)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        repository.closing = True  # what loads ends its load, if it does in time
        return
    await loading
    if not repository.ready and not stop.is_set() and not stay_up_broken:
        stopping.cancel()
        raise InvalidBundleError(repository.reason)
    await stopping


async def _listen_grpc(repository: Repository) -> Any:
    """Open the gRPC port if there is to be one. The library (20 MiB of memory) is loaded only then."""
    process = repository.settings.process
    if process.grpc_port is None:
        return None
    from offramp_worker.grpc.health import HealthService
    from offramp_worker.grpc.service import start_server
    from offramp_worker.shared.grpc import SharedInferenceService, health

    service = HealthService(partial(health, repository), lambda: repository.closing)
    server, port = await start_server(
        SharedInferenceService(repository),
        service,
        settings=process,
        connection_seconds=None if repository.settings.pool is None else CONNECTION_SECONDS,
    )
    log_event("listening", name="grpc", host=process.host, port=port)
    return server
