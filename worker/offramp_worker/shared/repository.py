"""Which of a worker's models are in memory: loads beside serving, one at a time, and evictions within the bound.

Which model leaves says :mod:`offramp_core.sharing.eviction`. A model leaves once it has answered what it was handed and
its audits are done; a request that comes meanwhile waits, and brings it back. Its bundle alone leaves: what was counted
and seen of its plans stays, and its control plane goes on to hear it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from offramp_core.errors import InvalidBundleError, OfframpError
from offramp_worker.bundle.task import GENERATE, declared_task
from offramp_worker.devices import share_arena
from offramp_worker.engine.execution.turns import SharedExecutor
from offramp_worker.http.budget import ByteBudget
from offramp_worker.logs import log_event
from offramp_worker.memory import return_memory
from offramp_worker.shared.expected import expected_seconds
from offramp_worker.shared.loading import WithinTime
from offramp_worker.shared.looped import LoopTurns
from offramp_worker.shared.model import NOT_LOADED, Doors, Model, Waiting
from offramp_worker.shared.room import AUDIT_SECONDS, LEAVE_SECONDS, kept_bytes, leaving_for, leaving_of, wanted_bytes
from offramp_worker.shared.settings import SharedSettings, bundle_bytes
from offramp_worker.tracing import Tracing
from offramp_worker.worker import InferenceWorker

RELOAD_SECONDS = 120.0  # between two tries of a bundle that cannot be served
PROMISE = 1.5  # times the seconds expected: what Retry-After says
NO_ROOM_SECONDS = 30  # Retry-After where what is kept loaded leaves no room


class UnavailableError(OfframpError):
    """A model cannot be loaded now; ``retry_after`` is when to ask again, None if that would not help. ``crowded``: it
    can be once another one has left."""

    def __init__(self, message: str, *, retry_after: int | None, crowded: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.crowded = retry_after, crowded


class Repository:
    """See the module. It belongs to the event loop; loading and finishing block threads."""

    def __init__(
        self, settings: SharedSettings, *, tracing: Tracing | None = None, on_lost: Callable[[str], None]
    ) -> None:
        """``on_lost`` is called when only a new process may help, with the reason."""
        self.settings, self.tracing, self._on_lost = settings, tracing, on_lost
        self._loop = asyncio.get_running_loop()
        self.executor = SharedExecutor({given.name: given.share for given in settings.models})
        self._ask = LoopTurns(self.executor).ask if settings.process.threads == 1 else None
        self.models = {given.name: Model(given, self._doors) for given in settings.models}
        self.bodies = ByteBudget(settings.process.max_bodies_bytes)
        self._ended: asyncio.Future[None] = self._loop.create_future()  # loads are not waited for any longer
        self.changing = asyncio.Lock()  # one model comes or leaves at a time
        self._line: list[Model] = []  # those that are to be loaded, in order
        self._tasks: set[asyncio.Task[None]] = set()
        self.started = self.closing = False
        self.on_room: Callable[[], None] = lambda: None  # something has left memory

    def _doors(self, model: Model) -> Doors:
        def lost() -> None:
            self._loop.call_soon_threadsafe(self._lost, model)

        settings, turn = model.given.settings, self.executor.turn(model.name, ask=self._ask)
        return Doors(settings, turn, tracing=self.tracing, on_lost=lost, again=model.again)

    @property
    def used_bytes(self) -> int:
        """What the loaded models take."""
        return sum(model.size_bytes for model in self.models.values() if model.state != "out")

    @property
    def ready(self) -> bool:
        """Whether requests are taken: of a worker whose every model is broken, none."""
        return self.started and not self.closing and any(not model.broken for model in self.models.values())

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""
        if self.closing:
            return "the worker is shutting down"
        if not self.started:
            return "models are being loaded"
        return "; ".join(model.broken for model in self.models.values() if model.broken)

    @property
    def alive(self) -> bool:
        """Whether the process is of use: of the models that are loaded, some run."""
        loaded = [model.doors.worker.alive for model in self.models.values() if model.ready]
        return any(loaded) or not loaded

    async def start(self) -> None:
        """Load what is kept loaded, then of the others what fits, in the order of the list. A broken bundle is told and
        left out."""
        await asyncio.to_thread(share_arena)
        for model in sorted(self.models.values(), key=lambda model: not model.given.keep_loaded):
            bound = self.settings.memory_bytes
            if not model.given.keep_loaded and bound is not None and self.used_bytes + model.size_bytes > bound:
                continue
            try:
                await self.load(model)
            except UnavailableError as error:
                if not model.broken and not self.closing:
                    log_event("model-unavailable", level="warning", model=model.name, reason=str(error))
        self.started = True
        log_event("models-loaded", loaded=[m.name for m in self.models.values() if m.ready], bytes=self.used_bytes)

    # --- requests ---------------------------------------------------------------------------------

    def wait_for(self, model: Model, waiting: Waiting) -> None:
        """Have a model loaded for a request that waits for it.

        Raises
        ------
        UnavailableError
            It is not to wait: the model cannot be loaded, that takes too long, or too many wait.
        """
        try:
            self._let_wait(model)
        except UnavailableError:
            model.turned_away += 1
            raise
        model.waiting.append(waiting)
        waiting.timer = self._loop.call_later(self.settings.load_wait_seconds, self._expire, model, waiting)

    def _let_wait(self, model: Model) -> None:
        """Have it loaded, and raise unless there is a place to wait."""
        self._check(model)
        expected = self.expected_seconds(model)
        self._bring(model)
        if expected > self.settings.load_wait_seconds:
            raise UnavailableError(
                f"model {model.name!r} is being loaded, which takes about {expected:.1f} s more",
                retry_after=_promised(model, expected),
            )
        if len(model.waiting) >= self.settings.load_waiting:
            reason = f"{len(model.waiting)} requests wait for model {model.name!r} to be loaded"
            raise UnavailableError(reason, retry_after=_promised(model, expected))

    def expected_seconds(self, model: Model) -> float:
        """Until a model is loaded, those before it in line included, and those that leave for them."""
        bound, models = self.settings.memory_bytes, self.models.values()
        return expected_seconds(model, self._line, models, bound=bound, now=time.monotonic())

    def _expire(self, model: Model, waiting: Waiting) -> None:
        """A request has waited as long as one may."""
        if waiting.left or waiting not in model.waiting:
            return
        model.leave_line(waiting)
        model.turned_away += 1
        reason = f"model {model.name!r} was not loaded within {self.settings.load_wait_seconds:g} s"
        waiting.refuse(reason, _promised(model, self.expected_seconds(model)))

    def _bring(self, model: Model) -> None:
        """Have it loaded, unless somebody does so already."""
        if not model.coming and model not in self._line:
            model.coming = True
            self.begin(self._load_for_requests(model))

    async def _load_for_requests(self, model: Model) -> None:
        model.coming = False  # from now on it is in line
        with contextlib.suppress(UnavailableError):  # those who wait were told
            await self.load(model)

    # --- coming and leaving -----------------------------------------------------------------------

    def _check(self, model: Model) -> None:
        """Whether it may be loaded at all."""
        if self.closing:
            raise UnavailableError("the worker is shutting down; try another one", retry_after=1)
        if model.dismissed:
            raise UnavailableError(_dismissed(model), retry_after=None)
        if model.hung is not None:
            raise UnavailableError(model.broken, retry_after=math.ceil(RELOAD_SECONDS))
        since = time.monotonic() - model.broken_at
        if model.broken and since < RELOAD_SECONDS:
            raise UnavailableError(model.broken, retry_after=math.ceil(RELOAD_SECONDS - since))

    async def load(self, model: Model, *, by_hand: bool = False) -> None:
        """Bring a model into memory, others out of it if need be. Returns once it serves.

        Raises
        ------
        UnavailableError
            Its bundle is broken, or there is no room. ``by_hand`` it is tried in spite of an earlier failure.
        """
        if by_hand:
            model.dismissed = False
            model.broken = model.broken if model.hung else ""
        self._line.append(model)
        try:
            async with self.changing:
                self._check(model)
                if not model.ready:
                    await self._load(model)
        except UnavailableError as error:
            model.turn_away(str(error), retry_after=error.retry_after)
            raise
        finally:
            self._line.remove(model)
        await self._keep_within_bound(model)

    async def unload(self, model: Model) -> None:
        """By hand: a model leaves memory, and stays out until it is loaded by hand."""
        model.dismissed = True
        async with self.changing:
            await self._leave(model)
        model.at_rest = False
        model.doors.worker.rest(_dismissed(model))
        model.turn_away(_dismissed(model), retry_after=None)

    async def _load(self, model: Model) -> None:
        worker = model.doors.worker
        within = WithinTime(self.settings.load_seconds, self._ended)
        try:
            model.files_are(await within(model, partial(bundle_bytes, worker.settings.bundle)))
            await self._make_room(model)
            model.state, model.loading_since, before = "loading", time.monotonic(), resident_bytes()
            bodies = self.bodies.used - self.bodies.taken
            worker.rest("the bundle is being loaded", until_asked=True)
            await within(model, partial(_load, worker))
        except UnavailableError:
            raise
        except Exception as error:  # whatever a bundle does, the others go on
            self._mark_broken(model, str(error) or repr(error))
            raise UnavailableError(model.broken, retry_after=math.ceil(RELOAD_SECONDS)) from error
        model.has_grown(resident_bytes() - before, bodies=bodies + self.bodies.taken)
        model.has_come(time.monotonic())
        log_event("model-loaded", model=model.name, seconds=round(model.load_seconds, 3), bytes=model.size_bytes)
        model.hand_over()

    def _mark_broken(self, model: Model, reason: str) -> None:
        model.state = "out"
        model.doors.worker.rest(reason)
        model.broken, model.broken_at = f"model {model.name!r} cannot be served: {reason}", time.monotonic()
        log_event("model-broken", level="error", model=model.name, reason=reason)

    async def _make_room(self, model: Model) -> None:
        bound, models = self.settings.memory_bytes, self.models.values()
        if bound is None:
            return
        leaving = leaving_for([model], models, bound=bound, now=time.monotonic())
        if leaving is None:
            raise UnavailableError(_needs(model, models, bound), retry_after=NO_ROOM_SECONDS)
        await self._evict(leaving, wanted=model.name)

    async def _keep_within_bound(self, model: Model) -> None:
        """A model may take more than was expected: then others leave, or where that does not do, itself."""
        bound = self.settings.memory_bytes
        async with self.changing:
            if bound is None or self.used_bytes <= bound or not model.ready:
                return
            others = [other for other in self.models.values() if other is not model]
            leaving = leaving_of(others, needed_bytes=self.used_bytes - bound, now=time.monotonic())
            if leaving is None:
                await self._leave(model)
                raise self._too_large(model, bound)
            await self._evict(leaving, wanted=model.name)

    def _too_large(self, model: Model, bound: int) -> UnavailableError:
        """It has left again, since it takes more than was expected and than there is."""
        self._mark_broken(model, f"it takes {model.size_bytes} bytes of the {bound} of OFFRAMP_MODELS_BYTES")
        model.forget_size()
        return UnavailableError(model.broken, retry_after=math.ceil(RELOAD_SECONDS))

    async def _evict(self, names: Sequence[str], *, wanted: str) -> None:
        """They leave all at once: each may have to wait for its clients and its control plane."""
        leaving = [self.models[name] for name in names]
        for model in leaving:
            log_event("model-evicted", model=model.name, bytes=model.size_bytes, wanted=wanted)
            model.evictions += 1
        await self.leave_all(leaving)

    async def leave_all(self, leaving: Sequence[Model]) -> None:
        """With :attr:`changing` held."""
        await asyncio.gather(*(self._leave(model) for model in leaving))
        for model in leaving:
            if model.waiting:
                self._bring(model)
        self.on_room()

    async def _leave(self, model: Model) -> None:
        """Answer what it was handed, finish its audits, and let its bundle go."""
        if model.state != "in" or self.closing:  # the process takes all of them along
            return
        model.state, model.leaving_since = "leaving", time.monotonic()
        await model.quiet(seconds=LEAVE_SECONDS)
        worker = model.doors.worker
        await asyncio.to_thread(worker.unload, seconds=AUDIT_SECONDS)
        worker.rest(_dismissed(model) if model.dismissed else NOT_LOADED, until_asked=not model.dismissed)
        model.state, model.leave_seconds = "out", time.monotonic() - model.leaving_since
        await asyncio.to_thread(_forget)

    def _lost(self, model: Model) -> None:
        """Every run of a model has failed for too long. If others run, that is its own; else the device may be gone for
        this process."""
        reason, others = model.doors.worker.lost, [m for m in self.models.values() if m is not model and m.ready]
        if any(not other.doors.worker.failing for other in others):
            self.begin(self._quarantine(model, reason))
        else:
            self._on_lost(reason)

    async def _quarantine(self, model: Model, reason: str) -> None:
        async with self.changing:
            await self._leave(model)
            self._mark_broken(model, reason)
        model.turn_away(model.broken, retry_after=math.ceil(RELOAD_SECONDS))

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside everything else."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, *, seconds: float) -> None:
        """After the last request: what comes or leaves ends that, and every model its audits, all within ``seconds``.
        A load that takes more than half of them is left to itself."""
        until = self._loop.time() + seconds
        for model in self.models.values():
            model.turn_away("the worker is shutting down; try another one", retry_after=1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changing.acquire(), seconds / 2)
            self.changing.release()
        if not self._ended.done():
            self._ended.set_result(None)
        seconds = max(seconds / 2, until - self._loop.time())
        workers = [model.doors.worker for model in self.models.values()]
        await asyncio.gather(*(asyncio.to_thread(worker.finish, seconds=seconds) for worker in workers))

    def drain(self) -> None:
        """Take nothing new that has to be loaded; what is loaded answers until the listener closes."""
        self.closing = True
        for model in self.models.values():
            model.doors.worker.drain()

    @property
    def owes_audits(self) -> bool:
        """Whether any model's control plane waits for audits that are done by now."""
        return any(model.doors.worker.owes_audits for model in self.models.values())


def _promised(model: Model, expected: float) -> int:
    """After how many seconds somebody is told to come back, and finds the model there."""
    again = max(1, math.ceil(PROMISE * expected))
    model.promise(again)
    return again


def _needs(model: Model, models: Collection[Model], bound: int) -> str:
    kept, size = kept_bytes(models), wanted_bytes(model, models, bound=bound)
    there = f"the {kept} of what is kept loaded leave less of the {bound}" if kept else f"there are {bound}"
    return f"model {model.name!r} needs {size} bytes; {there} (OFFRAMP_MODELS_BYTES)"


def _dismissed(model: Model) -> str:
    return f"model {model.name!r} was unloaded by hand; POST /v2/repository/models/{model.name}/load brings it back"


def _load(worker: InferenceWorker) -> None:
    if declared_task(worker.settings.bundle) == GENERATE:
        raise InvalidBundleError("manifest.json: its task is generate; serve it alone")
    worker.load()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _forget() -> None:
    """What an engine held goes with its last reference; cycles and the C library keep it longer."""
    gc.collect()
    return_memory()
