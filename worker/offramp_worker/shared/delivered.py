"""The models of a worker in a pool: which there are says the operator, in a signed list that may change while others
serve.

The list is kept in the state folder: a process that starts again serves what the one before did, operator or not. A
service's model comes under the name that its bundle has. One whose bundle or options change is loaded anew beside what
serves, and takes over if it can be loaded; what cannot be is told, and tried again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from offramp_core.errors import InvalidArgumentError, InvalidBundleError, PlanRefusedError
from offramp_core.protocol import HeldModel, HeldModels, ModelList, PlacedModel, SignedDocument
from offramp_core.reasons import Reason
from offramp_worker.devices import share_arena
from offramp_worker.documents import parse_document
from offramp_worker.logs import log_event
from offramp_worker.plans.memory import PlanMemory
from offramp_worker.plans.verification import verify
from offramp_worker.shared.pooled import PooledRepository
from offramp_worker.shared.repository import RELOAD_SECONDS, UnavailableError
from offramp_worker.shared.settings import MOST_MODELS, ModelSettings, PoolSettings


@dataclass(slots=True, eq=False)
class _Place:
    """One service in this worker: the name of its model, and the mark of what serves under it. Empty before there is
    any. ``calls`` is what its bundle calls the model, which another service may have."""

    name: str = ""
    calls: str = ""
    mark: str = ""
    failure: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tried: asyncio.Event = field(default_factory=asyncio.Event)


class Delivered:
    """See the module. It belongs to the event loop."""

    def __init__(self, repository: PooledRepository, pool: PoolSettings) -> None:
        self._repository, self._pool = repository, pool
        self._key = Ed25519PublicKey.from_public_bytes(pool.public_key)
        self._memory = PlanMemory(repository.settings.process.state_dir)
        self._boot_id = uuid.uuid4().hex
        self._epoch = 0
        self._wanted: dict[str, PlacedModel] = {}
        self._places: dict[str, _Place] = {}
        self._listed, self._writing = asyncio.Event(), asyncio.Lock()

    async def start(self) -> None:
        """Returns once everything of the first list has been tried: from then on the worker is ready."""
        await asyncio.to_thread(share_arena)
        document = self._memory.newest()
        if document is not None:
            try:
                await self.deliver(document)
            except PlanRefusedError as error:
                log_event("remembered-list-refused", level="warning", reason=error.reason, message=str(error))
        await self._listed.wait()
        await asyncio.gather(*(self._places[uid].tried.wait() for uid in self._wanted))
        self._repository.started = True
        log_event("models-loaded", loaded=[m.name for m in self._repository.models.values() if m.ready])

    async def deliver(self, document: SignedDocument) -> None:
        """Take a list; what it changes is done beside serving. The newest is taken again without effect.

        Raises
        ------
        PlanRefusedError
            It is not signed by the operator, not for this worker, or older than the one in force.
        """
        verify(document, self._key)
        listed = _parsed(document.payload)
        uid = self._repository.settings.process.uid
        if (listed.pool_uid, listed.uid) != (self._pool.uid, uid):
            raise PlanRefusedError(
                Reason.FOREIGN_SERVICE,
                f"the list is for worker {listed.uid!r} of pool {listed.pool_uid!r}; this is {uid!r} of "
                f"{self._pool.uid!r}",
            )
        if listed.epoch < self._epoch:
            raise PlanRefusedError(
                Reason.STALE_EPOCH, f"epoch {listed.epoch} is older than {self._epoch}, which is in force"
            )
        async with self._writing:
            await asyncio.to_thread(self._memory.remember, document)
        if listed.epoch < self._epoch:
            return  # a newer one has overtaken it
        wanted = {model.service_uid: model for model in listed.models}
        changed = [uid for uid in {**wanted, **self._wanted} if wanted.get(uid) != self._wanted.get(uid)]
        self._epoch, self._wanted = listed.epoch, wanted
        for uid in changed:
            self._repository.begin(self._bring(uid, self._places.setdefault(uid, _Place())))
        self._listed.set()

    def state(self) -> HeldModels:
        """How every service stands here."""
        held = [self._held(uid, place) for uid, place in self._places.items() if uid in self._wanted or place.name]
        uid = self._repository.settings.process.uid
        return HeldModels(uid, self._boot_id, self._epoch, time.monotonic(), tuple(held))

    def _held(self, uid: str, place: _Place) -> HeldModel:
        model = self._repository.models.get(place.name)
        if model is None:
            failed = place.tried.is_set() and bool(place.failure)
            return HeldModel(uid, "Failed" if failed else "Loading", model=place.calls, message=place.failure)
        return HeldModel(
            uid,
            "Serving" if place.mark and not model.broken else "Failed" if place.tried.is_set() else "Loading",
            mark=place.mark,
            model=place.name,
            message=model.broken or place.failure,
            bytes=model.size_bytes,
            busy_seconds=round(self._repository.executor.seconds[place.name], 3),
        )

    async def _bring(self, uid: str, place: _Place) -> None:
        """Bring a service's place to what is wanted there, however long that fails."""
        while not self._repository.closing:
            async with place.lock:  # one change of a service at a time, and each to the newest list
                wanted = self._wanted.get(uid)
                if wanted is None:
                    await self._clear(place)
                    return
                place.failure = await self._tried(place, wanted)
                place.tried.set()
            if not place.failure:
                return
            log_event("model-refused", level="error", service=wanted.service, reason=place.failure)
            await asyncio.sleep(RELOAD_SECONDS)
            if self._wanted.get(uid) != wanted:
                return  # somebody else is about that

    async def _clear(self, place: _Place) -> None:
        name, place.name, place.mark, place.failure = place.name, "", "", ""
        place.tried.clear()
        if name:
            await self._repository.remove(name)

    async def _tried(self, place: _Place, wanted: PlacedModel) -> str:
        """Why what is wanted does not serve, empty once it does."""
        model = self._repository.models.get(place.name)
        if model is not None:
            model.leaving = wanted.leaving
        if place.mark == wanted.mark and model is not None and not model.broken:
            return ""
        try:
            given = await asyncio.to_thread(self._pool.model, wanted)
            place.calls = given.name
            await self._serve(place, given, wanted.mark)
        except (UnavailableError, InvalidArgumentError, InvalidBundleError) as error:
            return str(error)
        return ""

    async def _serve(self, place: _Place, given: ModelSettings, mark: str) -> None:
        before = place.name
        if given.name == before:
            await self._repository.replace(given)
            place.mark = mark
            return
        if given.name in self._repository.models:
            raise InvalidArgumentError(
                f"its bundle calls the model {given.name!r}, as another service's of this pool does; prepare one of "
                "them with another --name, or use another pool"
            )
        model = self._repository.add(given)
        try:
            if self._repository.fits(model):
                await self._repository.load(model)
        except UnavailableError:
            if before:  # serves on
                await self._repository.remove(given.name)
            else:
                place.name = given.name
            raise
        place.name, place.mark = given.name, mark
        if before:
            await self._repository.remove(before)


def _parsed(payload: str) -> ModelList:
    try:
        listed = parse_document(payload, ModelList)
    except ValueError as error:
        raise PlanRefusedError(Reason.MALFORMED, f"the list does not parse: {error}") from error
    if len({model.service_uid for model in listed.models}) != len(listed.models) or len(listed.models) > MOST_MODELS:
        raise PlanRefusedError(Reason.MALFORMED, f"models: a service is there twice, or there are over {MOST_MODELS}")
    return listed
