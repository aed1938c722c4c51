"""One of several models of a worker: loaded or not, who waits for it, and its own doors."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal
from weakref import proxy

from offramp_core.sharing import Popularity
from offramp_worker.engine.execution.turns import SharedTurn
from offramp_worker.feedback import Feedback
from offramp_worker.front import Front
from offramp_worker.http.admin import admin_app
from offramp_worker.http.bodies import App
from offramp_worker.http.inference import Inference
from offramp_worker.http.public import public_app
from offramp_worker.logs import log_event
from offramp_worker.settings import Settings
from offramp_worker.shared.settings import ModelSettings, bundle_bytes
from offramp_worker.tracing import Tracing
from offramp_worker.worker import InferenceWorker

if TYPE_CHECKING:
    from offramp_worker.grpc.service import InferenceService

State = Literal["out", "loading", "in", "leaving"]
NOT_LOADED = "the model is not loaded; a request for it loads it"
SIZE_OF_FILES = 2  # memory of a model by the bytes of its bundle, before it was measured
RETURN_SECONDS = 2.0  # who was told to come back after a time may be so late
CROWDED_SECONDS = 120.0  # so long a request for which there was no room asks for more
MOST_OWED = 1000  # refusals of a model that nobody can load are without end
FEW_BODIES = 16  # bodies of less than a 16th of what the process grew by do not count


class Doors:
    """What a worker of this model alone would have. It stays while the model is out of memory, so that nothing is
    forgotten; its worker lets the bundle go. Hold it while you use one of its applications: they know the worker only
    as long as somebody else does, since FastAPI never forgets a handler."""

    def __init__(
        self,
        settings: Settings,
        turn: SharedTurn,
        *,
        tracing: Tracing | None,
        on_lost: Callable[[], None],
        again: bool = False,
    ) -> None:
        """``again``: this process has had doors with the same state folder."""
        self.front = Front(asyncio.get_running_loop())
        self.worker = InferenceWorker(settings, deliver=self.front.deliver, on_lost=on_lost, turn=turn, again=again)
        self.worker.rest(NOT_LOADED, until_asked=True)
        self.worker.tracing = tracing
        if settings.feedback_rows:
            self.front.feedback = Feedback(rows=settings.feedback_rows, metrics=self.worker.metrics)
        self.inference = Inference(self.worker, self.front)

    @cached_property
    def public(self) -> App:
        """Everything of the public port under ``/v2/models/NAME`` but inference."""
        return public_app(proxy(self.worker), proxy(self.front))

    @cached_property
    def rpc(self) -> InferenceService:
        """Its methods over gRPC, whose library (20 MiB of memory) is loaded only for who opens that port."""
        from offramp_worker.grpc.service import InferenceService

        return InferenceService(self.worker, self.front)

    @cached_property
    def admin(self) -> App:
        """Its admin port, for those who have its own token."""
        return admin_app(proxy(self.worker))


@dataclass(slots=True, eq=False)
class Waiting:
    """A request whose model is being loaded: ``go`` once it is, or ``refuse`` with a reason and when to come again.
    One of the two is called, once, unless it ``left``."""

    go: Callable[[], None]
    refuse: Callable[[str, int | None], None]
    timer: asyncio.TimerHandle | None = None
    left: bool = False

    def leave(self) -> None:
        """Nobody waits here any more."""
        self.left = True
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False)
class Model:
    """See the module. It belongs to the event loop."""

    given: ModelSettings
    make_doors: Callable[[Model], Doors]
    #: This process has had doors with the same state folder.
    again: bool = False
    state: State = "out"
    #: Somebody is about to load it.
    coming: bool = False
    #: It will leave this worker: connections end with their answers, so that clients go to where else it is.
    leaving: bool = False
    #: Seconds without a request after which it leaves memory until the next one.
    unload_after: float | None = field(init=False)
    #: It is out of memory because nobody has asked for it, or has not been loaded yet for that reason.
    at_rest: bool = False
    #: When there was no room for it, though it was asked for.
    crowded_at: float = -math.inf
    #: Unloaded by hand: only by hand it comes back.
    dismissed: bool = False
    #: Why it could not be loaded, and when that was.
    broken: str = ""
    broken_at: float = 0.0
    #: Somebody tries it again in a while, requests or not.
    retried: bool = False
    popularity: Popularity = field(default_factory=Popularity)
    #: What it took in memory when it was loaded, 0 before it was.
    measured_bytes: int = 0
    #: Nothing else came in meanwhile: it is not measured again.
    sure: bool = False
    #: How long that took, 0 before it was.
    load_seconds: float = 0.0
    loading_since: float = 0.0
    #: When it was loaded, or a request for it came or was answered the last time.
    used_at: float = 0.0
    #: How long it took to leave the last time.
    leave_seconds: float = 0.0
    leaving_since: float = 0.0
    #: A load that was given up and goes on; until it ends there is no other.
    hung: asyncio.Task[None] | None = None
    waiting: deque[Waiting] = field(default_factory=deque)
    loads: int = 0
    evictions: int = 0
    #: Times that it left because nobody asked for it.
    unloads: int = 0
    waited: int = 0
    turned_away: int = 0
    total_load_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.doors, self.unload_after = self.make_doors(self), self.given.unload_after_seconds
        self._pending, self._quiet = 0, asyncio.Event()
        self._quiet.set()
        self.file_bytes = bundle_bytes(self.given.settings.bundle)
        self._owed: deque[float] = deque(
            maxlen=MOST_OWED
        )  # until when each of those is expected who were told to come back

    @property
    def name(self) -> str:
        return self.given.name

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, or is expected to take."""
        return self.measured_bytes or SIZE_OF_FILES * self.file_bytes

    def files_are(self, size: int) -> None:
        """Bytes of its bundle's files by now. Another bundle takes other memory."""
        if size != self.file_bytes:
            self.file_bytes = size
            self.forget_size()

    def forget_size(self) -> None:
        """It is measured anew when it is loaded the next time."""
        self.measured_bytes, self.sure = 0, False

    def has_grown(self, grown: int, *, bodies: int) -> None:
        """It was loaded, and the process grew by so much while so many bytes of bodies were there or came in. What
        they took cannot be told from what the model takes, so that only says that it takes less than was expected."""
        if self.sure:
            return
        self.sure = FEW_BODIES * bodies <= grown
        most = grown if self.sure else min(grown, SIZE_OF_FILES * self.file_bytes)
        self.measured_bytes = max(self.file_bytes, most)

    @property
    def ready(self) -> bool:
        """Whether a request can be handed to it now."""
        return self.state == "in"

    def asked(self) -> None:
        """A request for it has come."""
        self.used_at = time.monotonic()
        self.popularity = self.popularity.after(self.used_at)

    def has_come(self, now: float) -> None:
        """It is in memory, and serves."""
        self.state, self.broken, self.used_at = "in", "", now
        self.at_rest, self.crowded_at = False, -math.inf
        self.load_seconds = now - self.loading_since
        self.total_load_seconds += self.load_seconds
        self.loads += 1

    def idle(self, now: float) -> bool:
        """Whether it is in memory, nobody has wanted it for as long as it may stay so, and nothing is under way."""
        after = self.unload_after
        unused = after is not None and now - self.used_at >= after
        unwanted = unused and self.ready and not self._pending and not self.waiting and not self.owed(now)
        return unwanted and self.doors.worker.may_rest

    def wanted(self, now: float) -> bool:
        """Whether it is at rest, and somebody has asked for it: it comes, or there was no room of late."""
        asked = self.state != "out" or self.coming or bool(self.waiting)
        return self.at_rest and (asked or now - self.crowded_at < CROWDED_SECONDS)

    def promise(self, seconds: float) -> None:
        """Somebody was told to come back after so many seconds."""
        self._owed.append(time.monotonic() + seconds + RETURN_SECONDS)

    def owed(self, now: float) -> bool:
        """Whether somebody is about to come back."""
        while self._owed and self._owed[0] < now:
            self._owed.popleft()
        return bool(self._owed)

    def begin(self) -> None:
        """A request is handed to it; :meth:`end` follows."""
        self._pending += 1
        self._quiet.clear()
        if self._owed:
            self._owed.popleft()

    def end(self) -> None:
        """The request has its reply, or nobody waits for one."""
        self._pending -= 1
        self.used_at = time.monotonic()
        if not self._pending:
            self._quiet.set()

    async def quiet(self, *, seconds: float) -> None:
        """Wait until it answers nothing any more, for so long at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), seconds)

    def hand_over(self) -> None:
        """It is loaded: those who waited go on."""
        for waiting in self._all_waiting():
            self.waited += 1
            self._tell(waiting.go)

    def turn_away(self, reason: str, *, retry_after: int | None) -> None:
        """It will not be loaded: tell those who wait."""
        for waiting in self._all_waiting():
            self._tell(partial(waiting.refuse, reason, retry_after))

    def _tell(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # the others wait for theirs
            log_event("reply-failed", level="error", model=self.name, error=repr(error))

    def _all_waiting(self) -> list[Waiting]:
        there = [waiting for waiting in self.waiting if not waiting.left]
        self.waiting.clear()
        for waiting in there:
            waiting.leave()
        return there

    def leave_line(self, waiting: Waiting) -> None:
        """A request that waited does not any more."""
        waiting.leave()
        if waiting in self.waiting:
            self.waiting.remove(waiting)
