"""The gRPC port of a worker with several models: each call goes to its model's own service."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from grpc import StatusCode

from offramp_worker.grpc.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING
from offramp_worker.grpc.messages import SERVICE, message
from offramp_worker.grpc.service import Context, Message, Methods
from offramp_worker.shared.inference import unknown
from offramp_worker.shared.model import Model, Waiting
from offramp_worker.shared.repository import Repository, UnavailableError


class SharedInferenceService(Methods):
    """The methods of :class:`offramp_worker.grpc.service.InferenceService`, for whichever model a request names."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def server_live(self, _: Message, __: Context) -> Message:
        return message("ServerLiveResponse")(live=self._repository.alive)

    async def server_ready(self, _: Message, __: Context) -> Message:
        return message("ServerReadyResponse")(ready=self._repository.ready)

    async def model_ready(self, request: Message, context: Context) -> Message:
        model = await self._model(request.name, context)
        return await model.doors.rpc.model_ready(request, context)

    async def model_metadata(self, request: Message, context: Context) -> Message:
        model = await self._model(request.name, context)
        return await model.doors.rpc.model_metadata(request, context)

    async def model_infer(self, request: Message, context: Context) -> Message:
        model = await self._model(request.model_name, context)
        model.asked()
        self._repository.executor.read(model.name)
        self._repository.bodies.take(size := request.ByteSize())  # counted as come in; gRPC bounds its messages itself
        self._repository.bodies.give(size)
        while not model.ready:  # it may leave again before this call goes on
            await self._loaded(model, context)
        model.begin()
        try:
            return await model.doors.rpc.model_infer(request, context)
        finally:
            model.end()

    async def _loaded(self, model: Model, context: Context) -> None:
        """Wait until a model is loaded, as long as one may."""
        done: asyncio.Future[UnavailableError | None] = asyncio.get_running_loop().create_future()

        def end(refusal: UnavailableError | None) -> None:
            if not done.done():  # the client may have gone in this very turn of the loop
                done.set_result(refusal)

        waiting = Waiting(
            go=lambda: end(None), refuse=lambda error, again: end(UnavailableError(error, retry_after=again))
        )
        try:
            self._repository.wait_for(model, waiting)
            if refusal := await done:
                raise refusal
        except UnavailableError as error:
            await model.doors.rpc.refuse(context, StatusCode.UNAVAILABLE, str(error), retry_after=error.retry_after)
        finally:
            model.leave_line(waiting)

    async def _model(self, name: str, context: Context) -> Model:
        model = self._repository.models.get(name)
        if model is None:
            await self.refuse(context, StatusCode.NOT_FOUND, unknown(name, self._repository))
        return model

    async def refuse(
        self,
        context: Context,
        code: StatusCode,
        error: str,
        *,
        retry_after: int | None = None,  # noqa: ARG002
        inference: bool = True,  # noqa: ARG002
    ) -> NoReturn:
        """A call that belongs to no model is counted for none."""
        await context.abort(code, error)
        raise AssertionError("abort raises")


def health(repository: Repository, service: str) -> int:
    """The server as a whole, the inference service, and each model by its name."""
    if service in ("", SERVICE):
        return SERVING if repository.ready else NOT_SERVING
    model = repository.models.get(service)
    if model is None:
        return SERVICE_UNKNOWN
    return SERVING if model.ready and model.doors.worker.ready else NOT_SERVING
