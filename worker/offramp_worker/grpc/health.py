"""``grpc.health.v1.Health``: the health protocol that gRPC's own clients, probes and proxies speak.

Its two messages have one field each, so they are on the wire what protobuf's wrappers of a text and of a number are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from grpc import StatusCode

from offramp_worker.grpc.messages import SERVICE
from offramp_worker.worker import InferenceWorker

HEALTH_SERVICE = "grpc.health.v1.Health"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
MOST_WATCHES = 64
POLL_SECONDS = 0.5
Context = Any  # grpc.aio.ServicerContext; the library has no types


class MessageSource(Protocol):
    """What reads the messages of calls, see :class:`offramp_worker.grpc.service.MessageReader`."""

    def unary(self, call: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Awaitable[None]]: ...

    async def read(self, context: Context) -> Any: ...


class HealthService:
    """``status`` says how a service is by its name: the server as a whole has none. ``draining`` ends all watches."""

    def __init__(self, status: Callable[[str], int], draining: Callable[[], bool]) -> None:
        self._status, self._draining, self._watches = status, draining, 0

    @staticmethod
    def of(worker: InferenceWorker) -> HealthService:
        """The server as a whole, the inference service and the model all serve while the worker is ready."""

        def status(service: str) -> int:
            engine = worker.engine
            model = engine.bundle.manifest.name if engine is not None else None
            if service not in ("", SERVICE, model):
                return SERVICE_UNKNOWN
            return SERVING if worker.ready else NOT_SERVING

        return HealthService(status, lambda: worker.phase == "draining")

    async def check(self, request: Any, context: Context) -> Any:
        if request is None:
            await context.abort(StatusCode.INVALID_ARGUMENT, "the request is no message of the protocol")
        status = self._status(request.value)
        if status == SERVICE_UNKNOWN:
            await context.abort(
                StatusCode.NOT_FOUND, f"service: is unknown; leave it empty, or send {SERVICE!r} or the model's name"
            )
        return Int32Value(value=status)

    async def watch(self, request: Any, context: Context) -> None:
        """The status now, and each time that it changes; a service that is unknown may become known."""
        if request is None:
            await context.abort(StatusCode.INVALID_ARGUMENT, "the request is no message of the protocol")
        if self._watches >= MOST_WATCHES:
            await context.abort(StatusCode.RESOURCE_EXHAUSTED, f"there are {MOST_WATCHES} watches already; use Check")
        self._watches += 1
        sent = None
        try:
            while True:
                draining = self._draining()
                status = self._status(request.value)
                if status != sent:
                    sent = status
                    await context.write(Int32Value(value=status))
                if draining:  # a watch must not hold up the end
                    return
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._watches -= 1

    def handler(self, door: MessageSource) -> Any:
        """For :meth:`grpc.aio.Server.add_generic_rpc_handlers`; ``door`` reads the messages."""

        async def watch(_: Any, context: Context) -> None:
            await self.watch(await door.read(context), context)

        forms = {"request_deserializer": _read, "response_serializer": lambda reply: reply.SerializeToString()}
        methods = {
            "Check": grpc.stream_stream_rpc_method_handler(door.unary(self.check), **forms),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, **forms),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)


def _read(raw: bytes) -> Any | None:
    """A request; None where the bytes are none. Names of services are short."""
    try:
        return StringValue.FromString(raw[:1024])
    except Exception:  # protobuf's own type, which has no stubs
        return None
