"""The process of a worker that generates: two ports, one event loop, one engine thread, as :mod:`offramp_worker.main`
has them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from offramp_core.errors import InvalidArgumentError
from offramp_worker.bundle.task import declared_engine
from offramp_worker.generate.doors.app import generation_app
from offramp_worker.generate.doors.streams import Door, Hub
from offramp_worker.generate.load import load_generation
from offramp_worker.generate.seam import Loader
from offramp_worker.generate.settings import generation_settings, vllm_settings
from offramp_worker.generate.vllm.load import StoppedError, load_vllm
from offramp_worker.generate.worker import GenerationWorker
from offramp_worker.http.admin import admin_app
from offramp_worker.http.budget import ByteBudget
from offramp_worker.logs import log_event
from offramp_worker.main import (
    PULL_SECONDS,
    REPLY_SECONDS,
    connections,
    listen,
    listen_admin,
    load_and_wait,
    on_signals,
    stop_from_thread,
    until_pulled,
)
from offramp_worker.settings import Settings
from offramp_worker.worker import ExecutorLostError

WORDS_SECONDS = 3.0  # of the time for replies: in it streams that do not end are told why
MAX_BODY_BYTES = 4 * 2**20


def loader_of(folder: Path, *, stopped: Callable[[], bool]) -> Loader:
    """What loads the bundle of a model that generates; what takes minutes ends once it is ``stopped``."""
    if not declared_engine(folder):
        return load_generation
    return partial(load_vllm, settings=vllm_settings(os.environ), stopped=stopped)


async def serve_generation(settings: Settings, *, stay_up_broken: bool) -> None:
    """Serve until a signal, then drain; errors as :func:`offramp_worker.main.run` has them."""
    if settings.grpc_port is not None:
        raise InvalidArgumentError("OFFRAMP_GRPC_PORT is set; generation is served over HTTP alone, leave it out")
    if settings.fixed_plan is not None or settings.model_name:
        name = "OFFRAMP_FIXED_PLAN" if settings.fixed_plan is not None else "OFFRAMP_MODEL_NAME"
        raise InvalidArgumentError(f"{name} is set; it is for models that classify, leave it out")
    if settings.edge is not None or settings.takes_edges:
        name = "OFFRAMP_CORE" if settings.edge is not None else "OFFRAMP_EDGES"
        raise InvalidArgumentError(f"{name} is set; it is for models that classify, leave it out")
    loop, stop, hub = asyncio.get_running_loop(), asyncio.Event(), Hub(asyncio.get_running_loop())
    own, load = generation_settings(os.environ), loader_of(settings.bundle, stopped=stop.is_set)
    worker = GenerationWorker(
        settings, own, load=load, deliver=hub.deliver, on_lost=partial(stop_from_thread, loop, stop)
    )
    on_signals(loop, stop)
    budget = ByteBudget(settings.max_bodies_bytes)
    door = Door(worker, hub, budget, min(settings.max_body_bytes, MAX_BODY_BYTES))
    protocol = connections(settings, budget=budget)
    public = await listen("public", generation_app(worker, door), settings.host, settings.port, protocol=protocol)
    admin = await listen_admin(admin_app(worker), settings, budget) if settings.has_control_plane else None
    try:
        with contextlib.suppress(StoppedError):
            await load_and_wait(worker, stop, stay_up_broken=stay_up_broken)
    finally:
        worker.drain()
        log_event("draining")
        deadline = loop.time() + settings.drain_seconds
        public.should_exit = True
        loop.call_later(REPLY_SECONDS - WORDS_SECONDS, worker.end_answers)
        await public.close()
        await asyncio.to_thread(worker.finish, seconds=max(1.0, deadline - loop.time()))
        await until_pulled(worker, until=min(deadline, loop.time() + PULL_SECONDS))
        if admin is not None:
            await admin.close()
        log_event("stopped", answers=worker.metrics.outcomes())
    if worker.lost:
        raise ExecutorLostError(worker.lost)
