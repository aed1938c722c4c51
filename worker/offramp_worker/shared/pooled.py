"""The models of a worker in a pool, which come and go while others serve."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from offramp_worker.logs import log_event
from offramp_worker.shared.loading import WithinTime
from offramp_worker.shared.model import Model
from offramp_worker.shared.repository import NO_ROOM_SECONDS, RELOAD_SECONDS, Repository, UnavailableError
from offramp_worker.shared.room import AUDIT_SECONDS, wanted_bytes
from offramp_worker.shared.settings import ModelSettings


class PooledRepository(Repository):
    """See the module."""

    @property
    def ready(self) -> bool:
        """Whether requests are taken: they come only for what is known to serve."""
        return self.started and not self.closing

    def add(self, given: ModelSettings, *, again: bool) -> Model:
        """One model more; it is not in memory yet. ``again``: its service has had another one here."""
        self.executor.add(given.name, given.share)
        model = self.models[given.name] = Model(given, self._doors, again=again)
        return model

    async def rest(self, model: Model) -> None:
        """Have a model of which nobody asks anything verified, and loaded only with the first request for it; raises
        as :meth:`load` does."""
        async with self.changing:
            within = WithinTime(self.settings.load_seconds, self._ended)
            try:
                await within(model, model.doors.worker.await_first_request)
            except Exception as error:  # whatever a bundle does, the others go on
                self._mark_broken(model, str(error) or repr(error))
                raise UnavailableError(model.broken, retry_after=math.ceil(RELOAD_SECONDS)) from error
            model.broken, model.at_rest = "", True

    def _mark_broken(self, model: Model, reason: str) -> None:
        """What was in memory or at rest here gets no requests meanwhile, and so is tried again without."""
        super()._mark_broken(model, reason)
        if (model.loads or model.at_rest) and not model.retried:
            self.begin(self._try_again(model))

    async def _try_again(self, model: Model) -> None:
        model.retried = True
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            if not model.broken or model.dismissed or self.closing or self.models.get(model.name) is not model:
                break
            with contextlib.suppress(UnavailableError):  # it says why itself
                await self.load(model)
        model.retried = False

    async def replace(self, given: ModelSettings) -> None:
        """Serve something else under a model's name. It is loaded beside what serves or is at rest, which leaves once
        that is done.

        Raises
        ------
        UnavailableError
            It cannot be loaded; what served before serves on.
        """
        new = Model(given, self._doors, again=True)
        async with self.changing:
            before = self.models[given.name]
            if before.ready or before.at_rest:
                await self._take_over(new, before)
            else:
                self.models[given.name] = new
                await self._end(before)
                await self._load(new)
        await self._keep_within_bound(new)

    async def _take_over(self, new: Model, before: Model) -> None:
        try:
            await self._load(new)
            self._check_bound(new)
        except UnavailableError:
            await self._end(new)
            raise
        self.models[new.name] = new
        await self._end(before)

    async def remove(self, name: str) -> None:
        """A model leaves for good, once it has answered what it was handed."""
        model = self.models.pop(name)
        model.turn_away(f"model {name!r} has left this worker; ask again", retry_after=1)
        async with self.changing:
            await self._end(model)

    async def _end(self, model: Model) -> None:
        """It leaves for good, and with it all that it has open. What hangs in its load does so once that ends."""
        await self._leave(model)
        if model.hung is None:
            await asyncio.to_thread(model.doors.worker.finish, seconds=AUDIT_SECONDS)

    async def _make_room(self, model: Model) -> None:
        """In a pool nobody leaves for another service: the operator says who is where."""
        bound, models = self.settings.memory_bytes, self.models.values()
        if bound is not None and wanted_bytes(model, models, bound=bound) > bound - self._taken(besides=model):
            model.crowded_at = time.monotonic()
            raise self._no_room(model, left=bound - self._taken(besides=model))

    def _check_bound(self, model: Model) -> None:
        """It may take more than was expected: then it does not take over."""
        bound = self.settings.memory_bytes
        if bound is not None:
            left = bound - sum(m.size_bytes for m in self.models.values() if m.ready and m.name != model.name)
            if model.size_bytes > left:
                raise self._no_room(model, left=left)

    def _too_large(self, model: Model, bound: int) -> UnavailableError:
        """The operator hears its size, and makes room somewhere."""
        model.at_rest, model.crowded_at = model.unload_after is not None, time.monotonic()
        log_event("model-unavailable", level="warning", model=model.name, reason="it takes more than was expected")
        return self._no_room(model, left=bound - self._taken(besides=model))

    def _taken(self, *, besides: Model) -> int:
        return sum(m.size_bytes for m in self.models.values() if m.state != "out" and m is not besides)

    def _no_room(self, model: Model, *, left: int) -> UnavailableError:
        return UnavailableError(
            f"no room: model {model.name!r} takes {model.size_bytes} bytes, and what is loaded leaves {left} of the "
            f"{self.settings.memory_bytes} (OFFRAMP_MODELS_BYTES)",
            retry_after=NO_ROOM_SECONDS,
            crowded=True,
        )

    def _check(self, model: Model) -> None:
        super()._check(model)
        if self.models.get(model.name) is not model:
            raise UnavailableError(f"model {model.name!r} has left this worker; ask again", retry_after=1)
