"""The models of a worker in a pool: which there are says the operator, in a signed list that may change while others
serve.

The list is kept in the state folder: a process that starts again serves what the one before did, operator or not. A
service's model comes under the name that its bundle has. One whose bundle or options change is loaded anew beside what
serves, and takes over if it can be loaded; what cannot be is told, and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from offramp_core.errors import InvalidArgumentError, InvalidBundleError, PlanRefusedError
from offramp_core.protocol import HeldModel, HeldModels, ModelList, PlacedModel, SignedDocument
from offramp_core.reasons import Reason
from offramp_worker.devices import share_arena
from offramp_worker.documents import parse_document
from offramp_worker.logs import log_event
from offramp_worker.plans.memory import PlanMemory
from offramp_worker.plans.verification import verify
from offramp_worker.shared.loading import in_background
from offramp_worker.shared.model import NOT_LOADED, Model
from offramp_worker.shared.pooled import PooledRepository
from offramp_worker.shared.repository import RELOAD_SECONDS, UnavailableError
from offramp_worker.shared.settings import MOST_MODELS, NAME, ModelSettings, PoolSettings


@dataclass(slots=True, eq=False)
class _Place:
    """One service in this worker: the name of its model, and the mark of what lies under it, loaded or not. Empty
    before there is any. ``calls`` is what its bundle calls the model, which another service may have. ``early``: what
    failed may do once something has left."""

    name: str = ""
    calls: str = ""
    mark: str = ""
    failure: str = ""
    early: bool = False
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
        self._freed = asyncio.Event()  # another one each time that something has left
        repository.on_room = self._has_left

    async def start(self) -> None:
        """Returns once everything of the first list has been tried or has left it, or after the time of a load: from
        then on the worker is ready."""
        await asyncio.to_thread(share_arena)
        document = self._memory.newest()
        if document is not None:
            try:
                await self.deliver(document)
            except PlanRefusedError as error:
                log_event("remembered-list-refused", level="warning", reason=error.reason, message=str(error))
        await self._listed.wait()
        tried = asyncio.gather(*(self._places[uid].tried.wait() for uid in self._wanted))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(tried, self._repository.settings.load_seconds)
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
            if not self._listed.is_set():
                await asyncio.to_thread(self._forget_others, {model.service_uid for model in listed.models})
        if listed.epoch < self._epoch:
            return  # a newer one has overtaken it
        wanted = {model.service_uid: model for model in listed.models}
        changed = [uid for uid in {**wanted, **self._wanted} if wanted.get(uid) != self._wanted.get(uid)]
        self._epoch, self._wanted = listed.epoch, wanted
        for uid in sorted(changed, key=lambda uid: uid in wanted):  # those that leave make room, and leave names
            if uid not in wanted:
                self._places[uid].tried.set()  # nobody waits for it any more
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
        resting = model.at_rest and not model.dismissed and not model.broken
        needs = model.loads or not resting or model.crowded_at > -math.inf  # else it was not sized for a load yet
        return HeldModel(
            uid,
            "Serving" if model.ready else "Unloaded" if resting else "Failed" if place.tried.is_set() else "Loading",
            mark=place.mark if model.loads or resting else "",
            model=place.name,
            message=model.broken or place.failure or ("" if resting else _why_out(model)),
            bytes=model.size_bytes if needs else 0,
            busy_seconds=round(self._repository.executor.seconds[place.name], 3),
            load_seconds=round(model.load_seconds, 3),
            wanted=model.wanted(time.monotonic()),
        )

    async def _bring(self, uid: str, place: _Place) -> None:
        """Bring a service's place to what is wanted there, however long that fails."""
        while not self._repository.closing:
            async with place.lock:  # one change of a service at a time, and each to the newest list
                wanted, freed = self._wanted.get(uid), self._freed
                if wanted is None:
                    await self._clear(uid, place)
                    return
                place.failure = await self._tried(place, wanted)
                place.tried.set()
            if not place.failure:
                return
            log_event("model-refused", level="error", service=wanted.service, reason=place.failure)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for((freed if place.early else asyncio.Event()).wait(), RELOAD_SECONDS)
            if self._wanted.get(uid) != wanted:
                return  # somebody else is about that

    async def _clear(self, uid: str, place: _Place) -> None:
        name, place.name, place.mark, place.failure = place.name, "", "", ""
        place.tried.clear()
        if name:
            await self._repository.remove(name)
        folder = self._pool.state_of(uid)
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._has_left()

    def _has_left(self) -> None:
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def _forget_others(self, uids: Collection[str]) -> None:
        """State of services that left while no process was here."""
        folder = self._pool.services_dir
        for state in folder.iterdir() if folder is not None and folder.is_dir() else ():
            if state.name not in uids:
                shutil.rmtree(state, ignore_errors=True)

    async def _tried(self, place: _Place, wanted: PlacedModel) -> str:
        """Why what is wanted does not serve, empty once it does."""
        model = self._repository.models.get(place.name)
        if model is not None:
            model.leaving, model.unload_after = wanted.leaving, wanted.unload_after_seconds
        try:
            if place.mark == wanted.mark and model is not None and (model.ready or model.dismissed or model.at_rest):
                if model.at_rest and wanted.unload_after_seconds is None:
                    await self._repository.load(model)
                return ""
            given = await self._given(wanted)
            place.calls = given.name
            await self._serve(place, given, wanted)
        except (UnavailableError, InvalidArgumentError, InvalidBundleError) as error:
            place.early = isinstance(error, UnavailableError) and error.crowded
            return str(error)
        return ""

    async def _given(self, wanted: PlacedModel) -> ModelSettings:
        """Its settings, for which its bundle is read: that may hang, and is not waited for longer than a load."""
        seconds = self._repository.settings.load_seconds
        try:
            return await asyncio.wait_for(in_background(partial(self._pool.model, wanted), name="settings"), seconds)
        except TimeoutError as error:
            raise InvalidBundleError(
                f"manifest.json: was not read within {seconds:g} s (OFFRAMP_LOAD_SECONDS)"
            ) from error

    async def _serve(self, place: _Place, given: ModelSettings, wanted: PlacedModel) -> None:
        before, mark = place.name, wanted.mark
        if given.name == before:
            model = self._repository.models[before]
            same = replace(given, unload_after_seconds=model.given.unload_after_seconds) == model.given
            if place.mark == mark and same:  # it failed: what is known of its plans stays
                await (self._repository.load if model.loads or not wanted.at_rest else self._repository.rest)(model)
                return
            try:
                await self._repository.replace(given)
            finally:
                if self._repository.models[before].given is given:
                    place.mark = mark
            self._has_left()
            return
        while (holder := self._repository.models.get(given.name)) is not None:
            freed = self._freed
            if holder.given.settings.service_uid not in self._wanted:  # about to leave
                await freed.wait()
                continue
            raise UnavailableError(
                f"its bundle calls the model {given.name!r}, as another service's of this pool does; prepare one of "
                "them with another --name, or use another pool",
                retry_after=None,
                crowded=True,
            )
        model = self._repository.add(given, again=bool(before))
        try:
            if wanted.at_rest and not before:
                await self._repository.rest(model)
            else:
                await self._repository.load(model)
        except UnavailableError:
            if before:  # serves on
                await self._repository.remove(given.name)
            else:
                place.name, place.mark = given.name, mark
            raise
        place.name, place.mark = given.name, mark
        if before:
            await self._repository.remove(before)
            self._has_left()


def _why_out(model: Model) -> str:
    return "" if model.ready else "it was unloaded by hand" if model.dismissed else NOT_LOADED


def _parsed(payload: str) -> ModelList:
    try:
        listed = parse_document(payload, ModelList)
    except ValueError as error:
        raise PlanRefusedError(Reason.MALFORMED, f"the list does not parse: {error}") from error
    if len({model.service_uid for model in listed.models}) != len(listed.models) or len(listed.models) > MOST_MODELS:
        raise PlanRefusedError(Reason.MALFORMED, f"models: a service is there twice, or there are over {MOST_MODELS}")
    for model in listed.models:
        if not NAME.fullmatch(model.service_uid):  # a folder is called so
            raise PlanRefusedError(Reason.MALFORMED, f"models: {model.service_uid[:80]!r} is no uid of a service")
    return listed
