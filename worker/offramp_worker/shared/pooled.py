"""The models of a worker in a pool, which come and go while others serve."""

from __future__ import annotations

from offramp_worker.shared.model import Model
from offramp_worker.shared.repository import Repository, UnavailableError
from offramp_worker.shared.settings import ModelSettings


class PooledRepository(Repository):
    """See the module."""

    @property
    def ready(self) -> bool:
        """Whether requests are taken: they come only for what is known to serve."""
        return self.started and not self.closing

    def add(self, given: ModelSettings) -> Model:
        """One model more; it is not in memory yet."""
        self.executor.add(given.name, given.share)
        model = self.models[given.name] = Model(given, self._doors)
        return model

    def fits(self, model: Model) -> bool:
        """Whether it can be loaded with nobody leaving for it."""
        bound = self.settings.memory_bytes
        return bound is None or self.used_bytes + model.size_bytes <= bound

    async def replace(self, given: ModelSettings) -> None:
        """Serve something else under a model's name. It is loaded beside what serves, which leaves once that is done.

        Raises
        ------
        UnavailableError
            It cannot be loaded; what served before serves on.
        """
        new = Model(given, self._doors)
        async with self._changing:
            before = self.models[given.name]
            if not before.ready:
                self.models[given.name] = new
            if before.ready or before.broken or self.fits(new):
                await self._load(new)
            self.models[given.name] = new
            await self._leave(before)
        await self._keep_within_bound(new)

    async def remove(self, name: str) -> None:
        """A model leaves for good, once it has answered what it was handed."""
        model = self.models.pop(name)
        model.turn_away(f"model {name!r} has left this worker; ask again", retry_after=1)
        async with self._changing:
            await self._leave(model)

    def _check(self, model: Model) -> None:
        super()._check(model)
        if self.models.get(model.name) is not model:
            raise UnavailableError(f"model {model.name!r} has left this worker; ask again", retry_after=1)
