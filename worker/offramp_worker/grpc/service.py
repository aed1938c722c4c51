"""``inference.GRPCInferenceService``: what the REST port answers, with the same checks and the same names of fields in
errors."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import grpc
import numpy as np
import numpy.typing as npt
from grpc import StatusCode

from offramp_core.bundle import TOP_LABEL, OutputNames, TensorSpec
from offramp_core.errors import InvalidArgumentError
from offramp_core.reasons import RequestOutcome
from offramp_worker.bundle.load import NUMPY_TYPES
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.queue.tickets import EXPIRED, OverloadedError, Ticket, UnableError
from offramp_worker.front import Front
from offramp_worker.grpc.health import HealthService
from offramp_worker.grpc.messages import SERVICE, ModelInferResponse, message
from offramp_worker.http.tensors import (
    MAX_SHOWN,
    VERSION,
    BadRequestError,
    InferRequest,
    as_array,
    in_range,
    model_metadata,
    output_value,
    read_header,
    reply_parameters,
    server_metadata,
    shown,
    split_strings,
    string_rows,
)
from offramp_worker.preprocess.encoded import Encoded
from offramp_worker.settings import Settings
from offramp_worker.tracing import context_of
from offramp_worker.worker import InferenceWorker

Array = npt.NDArray[Any]
Context = Any  # grpc.aio.ServicerContext; the library has no types
Message = Any  # made at run time from their field numbers, see messages.py

Method = Callable[[Message, Context], Awaitable[Message]]

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
PUSHBACK = "grpc-retry-pushback-ms"  # trailing metadata that gRPC clients' retries respect
HEAD_BYTES = 64 * 1024  # of a message beside its tensor
FEWEST_READERS = 2
MOST_CALLS = 2048  # at once; each may have a window of 64 KiB in memory before it is read


class Methods(ABC):
    """The methods of the service. Each takes a request message and the call's context."""

    @abstractmethod
    async def server_live(self, _: Message, __: Context) -> Message: ...

    @abstractmethod
    async def server_ready(self, _: Message, __: Context) -> Message: ...

    @abstractmethod
    async def model_ready(self, request: Message, context: Context) -> Message: ...

    @abstractmethod
    async def model_metadata(self, request: Message, context: Context) -> Message: ...

    @abstractmethod
    async def model_infer(self, request: Message, context: Context) -> Message: ...

    @abstractmethod
    async def refuse(
        self, context: Context, code: StatusCode, error: str, *, retry_after: int | None = None, inference: bool = True
    ) -> NoReturn:
        """End a call; only those that ask for inference are counted."""

    async def server_metadata(self, _: Message, __: Context) -> Message:
        return message("ServerMetadataResponse")(**server_metadata())

    def readable(self, method: Method) -> Callable[[Message | None, Context], Awaitable[Message]]:
        """The method, for bytes that may be no message."""

        async def call(request: Message | None, context: Context) -> Message:
            if request is None:
                error = "the request is no message of the protocol"
                await self.refuse(context, StatusCode.INVALID_ARGUMENT, error, inference=method == self.model_infer)
            return await method(request, context)

        return call


class InferenceService(Methods):
    """The methods, of a worker with one model."""

    def __init__(self, worker: InferenceWorker, front: Front) -> None:
        self._worker, self._front = worker, front
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="messages")
        self._unread = 0  # bytes of the messages that wait for it

    async def server_live(self, _: Message, __: Context) -> Message:
        return message("ServerLiveResponse")(live=self._worker.alive)

    async def server_ready(self, _: Message, __: Context) -> Message:
        return message("ServerReadyResponse")(ready=self._worker.ready)

    async def model_ready(self, request: Message, context: Context) -> Message:
        await self._engine(request.name, request.version, context, inference=False)
        return message("ModelReadyResponse")(ready=self._worker.ready)

    async def model_metadata(self, request: Message, context: Context) -> Message:
        engine = await self._engine(request.name, request.version, context, inference=False)
        return message("ModelMetadataResponse")(**model_metadata(engine.bundle.manifest))

    async def model_infer(self, request: Message, context: Context) -> Message:
        engine = await self._engine(request.model_name, request.model_version, context)
        answered: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        try:
            parsed = self._front.named(await self._read(engine, request))
            ticket = self._front.submit(engine, parsed, done=answered.set_result)
        except BadRequestError as error:
            await self.refuse(context, StatusCode.INVALID_ARGUMENT, str(error))
        except OverloadedError as error:
            code = StatusCode.UNAVAILABLE if isinstance(error, UnableError) else StatusCode.RESOURCE_EXHAUSTED
            await self.refuse(context, code, str(error), retry_after=error.retry_after_seconds)
        try:
            await answered
        except asyncio.CancelledError:  # the client has gone away, or its deadline has passed
            self._front.cancel(engine, ticket)
            raise
        if ticket.expired:
            self._count(StatusCode.DEADLINE_EXCEEDED, context, ticket)
            await context.abort(StatusCode.DEADLINE_EXCEEDED, EXPIRED)
        if ticket.unable:
            self._count(StatusCode.UNAVAILABLE, context, ticket)
            await context.abort(StatusCode.UNAVAILABLE, ticket.unable, ((PUSHBACK, "1000"),))
        if ticket.error is not None:
            self._count(StatusCode.INTERNAL, context, ticket)
            await context.abort(StatusCode.INTERNAL, ticket.error)
        self._count(StatusCode.OK, context, ticket)
        return response(ticket, parsed, model=engine.bundle.manifest.name, raw=bool(request.raw_input_contents))

    async def _read(self, engine: Engine, request: Message) -> InferRequest:
        """The request, checked. Images and texts are read in a thread, one request at a time; those that wait for it
        have as much memory as all bodies."""
        settings, bundle = self._worker.settings, engine.bundle
        read = partial(
            read_request,
            request,
            spec=bundle.asks_for,
            max_rows=engine.max_rows,
            names=engine.outputs,
            encoded=bundle.encoded,
        )
        if bundle.encoded is None:
            return read()
        size = request.ByteSize()
        if self._unread and self._unread + size > settings.max_bodies_bytes:
            raise OverloadedError("too many images and texts wait to be read")
        self._unread += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)
        finally:
            self._unread -= size

    def _count(self, code: StatusCode, context: Context, ticket: Ticket | None = None) -> None:
        """Count a reply, and leave its span."""
        self._worker.metrics.responses("grpc", code.name).inc()
        tracing, engine = self._worker.tracing, self._worker.engine
        if tracing is None:
            return
        parent = context_of(
            [(k.encode(), v.encode() if isinstance(v, str) else v) for k, v in context.invocation_metadata() or ()]
        )
        if ticket is None or engine is None:
            tracing.refused(context=parent, code=code.name)
        else:
            model, error = engine.bundle.manifest.name, code is not StatusCode.OK
            tracing.answered(ticket, context=parent, model=model, code=code.name, error=error)

    async def _engine(self, model: str, version: str, context: Context, *, inference: bool = True) -> Engine:
        engine = self._worker.engine
        if engine is None:
            await self.refuse(context, StatusCode.UNAVAILABLE, self._worker.reason, retry_after=1, inference=inference)
        if model != engine.bundle.manifest.name or version not in ("", VERSION):
            name = engine.bundle.manifest.name
            await self.refuse(
                context,
                StatusCode.NOT_FOUND,
                f"model {shown(model)}, version {shown(version)} is unknown; this worker serves {name!r}, version "
                f"{VERSION!r}",
                inference=inference,
            )
        return engine

    async def refuse(
        self, context: Context, code: StatusCode, error: str, *, retry_after: int | None = None, inference: bool = True
    ) -> NoReturn:
        shed = code in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
        if inference:
            self._worker.metrics.requests[RequestOutcome.REJECTED if shed else RequestOutcome.INVALID].inc()
            self._count(code, context)
        metadata = () if retry_after is None else ((PUSHBACK, str(1000 * retry_after)),)
        await context.abort(code, error, metadata)
        raise AssertionError("abort raises")


def read_request(
    request: Message,
    *,
    spec: TensorSpec,
    max_rows: int,
    names: OutputNames = TOP_LABEL,
    encoded: Encoded | None = None,
) -> InferRequest:
    """Check a ``ModelInferRequest``. Values come raw, or in the typed field of the datatype.

    Raises
    ------
    BadRequestError
        Names the field.
    """
    header = read_header(
        {
            "id": request.id or None,
            "parameters": _values(request.parameters, "parameters"),
            "inputs": [
                {
                    "name": t.name,
                    "datatype": t.datatype,
                    "shape": list(t.shape),
                    "parameters": _values(t.parameters, f"inputs[{i}].parameters"),
                }
                for i, t in enumerate(request.inputs)
            ],
            "outputs": [
                {"name": t.name, "parameters": _values(t.parameters, f"outputs[{i}].parameters")}
                for i, t in enumerate(request.outputs)
            ],
        },
        spec=spec,
        max_rows=max_rows,
        names=names,
    )
    if encoded is not None:
        return header.request(_strings(request, header.shape, encoded))
    dtype, size = NUMPY_TYPES[spec.datatype], math.prod(header.shape)
    if request.raw_input_contents:
        raw = _raw(request)
        if len(raw) != size * dtype.itemsize:
            raise BadRequestError(
                f"raw_input_contents[0]: has {len(raw)} bytes; shape and datatype need {size * dtype.itemsize}"
            )
        return header.request(in_range(as_array(raw, shape=header.shape, dtype=dtype), spec))
    return header.request(in_range(_typed(request.inputs[0].contents, spec.datatype, header.shape), spec))


def _raw(request: Message) -> bytes:
    if len(request.raw_input_contents) != 1 or request.inputs[0].HasField("contents"):
        raise BadRequestError("raw_input_contents: must have one entry, and then inputs[0].contents none")
    raw: bytes = request.raw_input_contents[0]
    return raw


def _strings(request: Message, shape: tuple[int, ...], encoded: Encoded) -> Array:
    if request.raw_input_contents:
        field = "raw_input_contents[0]"
        return string_rows(split_strings(_raw(request), shape=shape, field=field), encoded, shape=shape, field=field)
    values, field = list(request.inputs[0].contents.bytes_contents), "inputs[0].contents.bytes_contents"
    if len(values) != math.prod(shape):
        raise BadRequestError(f"{field}: has {len(values)} values; the shape needs {math.prod(shape)}")
    return string_rows(values, encoded, shape=shape, field=field)


def _typed(contents: Message, datatype: str, shape: tuple[int, ...]) -> Array:
    field = CONTENTS.get(datatype)
    if field is None:
        raise BadRequestError(f"inputs[0].contents: cannot hold {datatype}; send raw_input_contents")
    values = getattr(contents, field)
    if len(values) != math.prod(shape):
        raise BadRequestError(
            f"inputs[0].contents.{field}: has {len(values)} values; the shape needs {math.prod(shape)}"
        )
    found, dtype = np.array(values), NUMPY_TYPES[datatype]  # of the field's type, wider than some that it is used for
    if dtype.kind in "iu" and found.size:
        limits = np.iinfo(dtype)
        if not (found.min() >= limits.min and found.max() <= limits.max):
            raise BadRequestError(f"inputs[0].contents.{field}: has a value outside of {datatype}")
    return found.astype(dtype, copy=False).reshape(shape)


def response(ticket: Ticket, request: InferRequest, *, model: str, raw: bool) -> Message:
    """The reply to a finished request; outputs come as the inputs came, ``raw`` or typed."""
    reply = ModelInferResponse(model_name=model, model_version=VERSION, id=request.id or "")
    for key, value in reply_parameters(ticket).items():
        kind = {bool: "bool_param", int: "int64_param"}.get(type(value), "string_param")
        setattr(reply.parameters[key], kind, value)
    for name, _ in request.outputs:
        array, datatype = output_value(ticket, name)
        output = reply.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            reply.raw_output_contents.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        else:
            getattr(output.contents, CONTENTS[datatype]).extend(array.reshape(-1).tolist())
    return reply


def _values(parameters: Message, path: str) -> dict[str, Any]:
    """Parameters as plain values."""
    values = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise BadRequestError(f"{path}.{key[:MAX_SHOWN]}: has no value")
        values[key] = getattr(parameter, kind)
    return values


class MessageReader:
    """Reads the messages of calls, a few at a time.

    gRPC puts a message together before anybody sees how large it is. So only so many are being read at once as their
    largest sizes fit into the memory for bodies; the others wait in their connections. A small message is there at once
    and holds its place for no time.
    """

    def __init__(self, *, max_body_bytes: int, max_bodies_bytes: int, receive_seconds: float) -> None:
        self.places = max(FEWEST_READERS, max_bodies_bytes // max_body_bytes)
        self._reading = asyncio.Semaphore(self.places)
        self._seconds = receive_seconds

    def unary(self, call: Callable[[Message | None, Context], Awaitable[Message]]) -> Callable[..., Awaitable[None]]:
        """A method of one message and one reply, as a handler of streams: these say when they read."""

        async def handle(_: Any, context: Context) -> None:
            await context.write(await call(await self.read(context), context))

        return handle

    async def read(self, context: Context) -> Message | None:
        """The message of a call, once there is a place."""
        try:
            async with asyncio.timeout(self._seconds), self._reading:
                request = await context.read()
        except TimeoutError:
            await context.abort(StatusCode.DEADLINE_EXCEEDED, f"the request did not arrive within {self._seconds:g} s")
        if request is grpc.aio.EOF:
            await context.abort(StatusCode.INVALID_ARGUMENT, "the call has no request")
        return request


async def start_server(
    service: Methods, health: HealthService, *, settings: Settings, connection_seconds: float | None = None
) -> tuple[Any, int]:
    """Listen for gRPC; the server and its port. Clients are asked to connect anew after ``connection_seconds``; calls
    in flight are answered before.

    Raises
    ------
    InvalidArgumentError
        The port is taken.
    """
    host, port = settings.host, settings.grpc_port
    door = MessageReader(
        max_body_bytes=settings.max_body_bytes,
        max_bodies_bytes=settings.max_bodies_bytes,
        receive_seconds=settings.receive_seconds,
    )
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", settings.max_body_bytes + HEAD_BYTES),
            ("grpc.http2.bdp_probe", 0),  # else each call may have megabytes in memory before it is read
            ("grpc.http2.lookahead_bytes", 64 * 1024),
            ("grpc.so_reuseport", 0),  # else two workers would share a port without knowing
            *([("grpc.max_connection_age_ms", round(1000 * connection_seconds))] if connection_seconds else []),
        ),
        maximum_concurrent_rpcs=MOST_CALLS,
    )
    methods = {
        name: grpc.stream_stream_rpc_method_handler(
            door.unary(service.readable(call)),
            request_deserializer=_reader(f"{name}Request"),
            response_serializer=lambda reply: reply.SerializeToString(),
        )
        for name, call in _methods(service).items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods), health.handler(door)))
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise InvalidArgumentError(f"the grpc port {port} cannot be opened; is it in use?") from error
    await server.start()
    return server, bound


def _reader(name: str) -> Callable[[bytes], Message | None]:
    """Reads a message; None where there is none in the bytes, which gRPC would report as a fault of the server."""
    parse = message(name).FromString

    def read(raw: bytes) -> Message | None:
        try:
            return parse(raw)
        except Exception:  # protobuf's own type, which has no stubs
            return None

    return read


def _methods(service: Methods) -> dict[str, Method]:
    return {
        "ServerLive": service.server_live,
        "ServerReady": service.server_ready,
        "ModelReady": service.model_ready,
        "ServerMetadata": service.server_metadata,
        "ModelMetadata": service.model_metadata,
        "ModelInfer": service.model_infer,
    }
