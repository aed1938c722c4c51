"""The connection of an edge to its core: kept connections, what they were measured to take, and whether the core
answers.

Requests are sent by one event loop, a few at a time, so that no reply, however slow, holds anybody beyond its time.
Rows that get no answer in time take the link down: nothing is sent then until the core has said again who it is. It is
asked once a second, and when all is well once a minute. Audits and features have a queue of their own at the core,
which others may fill: where they get no answer, that path rests for a second.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import numpy.typing as npt

from offramp_core.edge import Sent, Uplink, rate_of
from offramp_core.edge_settings import EdgeSettings
from offramp_core.errors import InvalidBundleError, OfframpError
from offramp_worker.bundle.load import Bundle
from offramp_worker.edge.kept import Answered as Answer
from offramp_worker.edge.kept import KeptConnections
from offramp_worker.edge.wire import (
    BOOT_HEADER,
    DIGEST_HEADER,
    LENGTH_HEADER,
    RAMPS_HEADER,
    SECONDS_HEADER,
    UPLINK_BYTES,
    Core,
    Reply,
    edge_path,
    read_reply,
    request_body,
)
from offramp_worker.logs import log_event
from offramp_worker.metrics import Metrics

Array = npt.NDArray[Any]
Answered = Callable[[Reply | None], None]

CONNECTIONS = 8
SHORTEST_WAIT = 0.001
PATIENCE_FACTOR, SHORTEST_PATIENCE, LONGEST_PATIENCE = 10.0, 1.0, 10.0  # for an answer, by what one takes
AGAIN_SECONDS, MEASURE_SECONDS = 1.0, 60.0
ASSUMED_BYTES_PER_SECOND = 1.25e6  # of a core that has not been reached yet
HEADER_BYTES, MEETING_BYTES = 65536, 65536  # of replies: JSON before the tensors, and who the core is
ASKED, SLOW_SECONDS = 3, 0.1  # times, to measure; once where that takes longer than any hold-up
QUICK_SECONDS = 0.02  # a body that goes up sooner is too small to measure by
NEXT_STEP = "serve the same bundle on both, or name another core in OFFRAMP_CORE (--core)"


class OtherModelError(InvalidBundleError):
    """The core is there, and serves something else."""

    remedy = NEXT_STEP


class CoreAwayError(OfframpError):
    """The core did not answer; the message says how."""


class CoreRefusedError(OfframpError):
    """The core answers, and does not take this request."""


class CoreBusyError(OfframpError):
    """The core answers, and has no room or no time for this request."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Rows to be sent to a path, since when, and within how many seconds an answer is of use; ``most`` is the largest
    reply in bytes."""

    what: str
    body: bytes
    length: int
    sent: Sent
    began: float
    within: float
    most: int

    @property
    def kind(self) -> str:
        return self.what.partition("/")[0]

    @property
    def left(self) -> float:
        return self.within - (time.monotonic() - self.began)


class Link:
    """``send`` may be called by any thread; ``answered`` is called once, by the link's own."""

    def __init__(self, settings: EdgeSettings, bundle: Bundle, *, metrics: Metrics) -> None:
        manifest = bundle.manifest
        self._mine = Core(manifest.name, manifest.backbone_digest, manifest.ramp_set_digest, "")
        self.ramp_set_digest = manifest.ramp_set_digest
        self._declared, self._metrics = settings.uplink, metrics
        self.core, self._path = settings.core, edge_path(manifest.name)
        self.uplink = Uplink(settings.uplink or ASSUMED_BYTES_PER_SECOND)
        #: Which process answered last; another one may run on another machine.
        self.boot = ""
        #: Whether it has not refused any so far.
        self.takes_features = True
        #: Why the core is out of reach, in a few words; empty while it answers.
        self.away = "it has not been reached yet"
        #: Whether it is there and serves something else, as while a new bundle is rolled out.
        self.serves_other = False
        self._measured_at = -math.inf
        self._rest_until: dict[str, float] = {}  # by path
        self._row_bytes = 8 * bundle.task.width * (2 * len(bundle.columns) + 4)  # more than any reply has
        self._kept = KeptConnections(settings.core, most=CONNECTIONS + 1)
        self._named = {DIGEST_HEADER: manifest.backbone_digest, RAMPS_HEADER: manifest.ramp_set_digest}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._free, self._tasks = asyncio.Semaphore(CONNECTIONS), set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._running, name="core", daemon=True)
        self._thread.start()
        metrics.core_reachable.set_function(lambda: float(not self.away))

    def open(self) -> None:
        """Meet the core. An edge starts without it as well.

        Raises
        ------
        OtherModelError
            The core serves another model or other weights, or takes no edges.
        """
        try:
            self.meet()
        except CoreAwayError as error:
            self.lose(str(error))

    def watch(self, tick: Callable[[], None]) -> None:
        """Ask for the core, and call ``tick``, about once a second from now on."""
        threading.Thread(target=self._watching, args=(tick,), name="uplink", daemon=True).start()

    def close(self) -> None:
        """Whoever waits for an answer hears that there is none."""
        if not self._closed.is_set():
            self._closed.set()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SHORTEST_PATIENCE)

    def rests(self, what: str) -> bool:
        """Whether nothing is sent to a path, ``scores`` or ``features``, for now: the core had no room for it."""
        return time.monotonic() < self._rest_until.get(what, -math.inf)

    @property
    def patience(self) -> float:
        """How long an answer may take before the core counts as out of reach. One that was never measured has long."""
        if not self.uplink.beyond:
            return LONGEST_PATIENCE
        longest = max(self.uplink.beyond.values(), default=0.0) + UPLINK_BYTES / self.uplink.bytes_per_second
        return min(LONGEST_PATIENCE, max(SHORTEST_PATIENCE, PATIENCE_FACTOR * longest))

    # --- requests -----------------------------------------------------------------------------------

    def send(self, what: str, name: str, x: Array, *, sent: Sent, within: float, answered: Answered) -> None:
        """Send rows to a path under the model's; ``answered`` gets what came back, or None where nothing did within so
        many seconds. An infinite time is the link's own patience, beyond which it is down."""
        most = HEADER_BYTES + len(x) * self._row_bytes
        request = _Request(what, *request_body(name, x), sent, time.monotonic(), within, most)
        try:
            self._loop.call_soon_threadsafe(self._begin, request, answered)
        except RuntimeError:  # it is closed
            answered(None)

    def _running(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        self._kept.close()
        self._loop.run_until_complete(asyncio.sleep(0))  # in which they end
        self._loop.close()

    def _begin(self, request: _Request, answered: Answered) -> None:
        task = self._loop.create_task(self._send(request, answered))
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request: _Request, answered: Answered) -> None:
        reply = None
        try:
            async with asyncio.timeout(None if request.within == math.inf else request.left):
                async with self._free:
                    reply = await self._patiently(request)
        except TimeoutError:
            pass  # an answer is of no use any more
        except CoreRefusedError as error:
            self.takes_features = self.takes_features and request.sent != "Features"
            log_event("core-refused", level="warning", core=self.core, what=request.what, reason=str(error))
        except (OSError, CoreAwayError, OtherModelError) as error:
            self.lose(_words(error), serves_other=isinstance(error, OtherModelError))
        except Exception as error:  # whoever waits must hear of it, whatever it is
            self._failed(request, error)
        finally:
            answered(reply)

    def _failed(self, request: _Request, error: Exception) -> None:
        """The core answers, but not this. A full queue of rows is no sign that it is gone; of the others, others than
        edges may have filled it."""
        if request.kind != "rows":
            if not self.rests(request.kind):
                log_event("core-busy", level="warning", core=self.core, what=request.what, reason=_words(error))
            self._rest_until[request.kind] = time.monotonic() + AGAIN_SECONDS
        elif not isinstance(error, CoreBusyError):
            self.lose(_words(error))

    async def _patiently(self, request: _Request) -> Reply | None:
        """The answer, within the link's patience."""
        if self.away:
            return None
        patience = self.patience
        try:
            async with asyncio.timeout(patience):
                return await self._exchange(request, min(patience, max(SHORTEST_WAIT, request.left)))
        except TimeoutError as error:
            late = f"no answer within {patience:.1f} s"
            raise (CoreAwayError if request.kind == "rows" else CoreBusyError)(late) from error

    async def _exchange(self, request: _Request, seconds: float) -> Reply:
        headers = {LENGTH_HEADER: str(request.length), SECONDS_HEADER: f"{seconds:.3f}"}
        reply = await self._post(f"{self._path}/{request.what}", request.body, headers, most=request.most)
        if reply.status != HTTPStatus.OK:
            raise _refused(request, reply)
        answer = self._read(reply)
        took = time.monotonic() - request.began  # with the time in which it waited for a connection
        self._metrics.core_seconds.observe(took)
        self._metrics.core_bytes.inc(len(request.body))
        if request.sent != "Nothing":
            with self._lock:
                self.uplink = self.uplink.after(request.sent, size=len(request.body), seconds=took)
        return answer

    def _read(self, reply: Answer) -> Reply:
        """An answer of this very model and its ramps."""
        headers = reply.headers
        boot = headers.get(BOOT_HEADER, "")
        self._check(Core(self._mine.model, headers.get(DIGEST_HEADER, ""), headers.get(RAMPS_HEADER, ""), boot))
        if not boot:
            raise CoreAwayError(f"{self.core} does not say which process it is")
        self.boot = boot
        return Reply(read_reply(bytes(reply.body), headers.get(LENGTH_HEADER)), boot)

    async def _post(self, path: str, body: bytes, headers: Mapping[str, str], *, most: int) -> Answer:
        """A reply, of which at most so many bytes are read."""
        head = self._kept.head(path, {**self._named, **headers}, length=len(body))
        return await self._kept.post(head + body, most=most)

    # --- whether the core is there ------------------------------------------------------------------------

    def meet(self) -> None:
        """Ask the core who it is, and measure the uplink.

        Raises
        ------
        CoreAwayError
            It does not answer, or not now.
        OtherModelError
            It serves something else.
        """
        if self._closed.is_set():
            raise CoreAwayError("the link is closed")
        rate, short = asyncio.run_coroutine_threadsafe(self._meet(), self._loop).result()
        with self._lock:
            self.uplink = self.uplink.measured(bytes_per_second=rate, round_trip=short)
        self._measured_at = time.monotonic()
        if self.away:
            self.takes_features = True
            log_event("core-reached", core=self.core, uplink_mbit=round(rate * 8e-6, 3), round_trip=round(short, 4))
        self.away, self.serves_other = "", False

    async def _meet(self) -> tuple[float, float]:
        """Bytes per second, and the seconds of an empty request; all of it within the longest patience."""
        try:
            async with asyncio.timeout(LONGEST_PATIENCE):
                core, _ = await self._ask(b"")  # opens the connection
                self._check(core)
                self.boot = core.boot
                short = await self._shortest(b"")
                return self._declared or await self._measured_rate(short), short
        except TimeoutError as error:
            raise CoreAwayError(f"it does not say who it is within {LONGEST_PATIENCE:g} s") from error
        except OSError as error:
            raise CoreAwayError(_words(error)) from error

    async def _measured_rate(self, short: float) -> float:
        """Bytes per second, by a body that is larger where a small one took no time."""
        for size in (UPLINK_BYTES // 8, UPLINK_BYTES):
            seconds = await self._shortest(bytes(size))
            if seconds - short > QUICK_SECONDS:
                break
        return rate_of(size, seconds=seconds, round_trip=short)

    async def _shortest(self, body: bytes) -> float:
        """Seconds of a request that nothing held up: the box has just loaded a model, or has a share of a processor."""
        least = math.inf
        for _ in range(ASKED):
            least = min(least, (await self._ask(body))[1])
            if least > SLOW_SECONDS:
                break
        return least

    async def _ask(self, body: bytes) -> tuple[Core, float]:
        began = time.perf_counter()
        reply = await self._post(self._path, body, {}, most=MEETING_BYTES)
        if reply.status == HTTPStatus.NOT_FOUND:
            raise OtherModelError(
                f"OFFRAMP_CORE is {self.core}: it takes no edges of model {self._mine.model!r}; start it with "
                "`offramp serve BUNDLE --edges`"
            )
        if reply.status != HTTPStatus.OK:
            raise CoreAwayError(_refusal(reply))
        try:
            core = msgspec.json.decode(reply.body, type=Core)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise CoreAwayError(f"{self.core} does not say which model it serves: {error}") from error
        return core, time.perf_counter() - began

    def _check(self, core: Core) -> None:
        for field, theirs, mine in (
            ("backbone_digest", core.backbone_digest, self._mine.backbone_digest),
            ("ramp_set_digest", core.ramp_set_digest, self._mine.ramp_set_digest),
        ):
            if theirs != mine:
                raise OtherModelError(f"OFFRAMP_CORE is {self.core}: its {field} is {theirs[:80]}, this edge's {mine}")

    def lose(self, why: str, *, serves_other: bool = False) -> None:
        """The core is out of reach, until it has said again who it is."""
        with self._lock:
            known, self.away, self.serves_other = self.away, why, serves_other
        if why != known:
            log_event("core-away", level="warning", core=self.core, reason=why)

    def _watching(self, tick: Callable[[], None]) -> None:
        while not self._closed.wait(AGAIN_SECONDS):
            if self.away or time.monotonic() - self._measured_at > MEASURE_SECONDS:
                try:
                    self.meet()
                except Exception as error:  # a thread that ended would never find the core again
                    if self._closed.is_set():
                        return
                    self.lose(_words(error), serves_other=isinstance(error, OtherModelError))
            tick()


def _refused(request: _Request, reply: Answer) -> OfframpError:
    """What a reply other than 200 says of the core: another model by now, not able to answer rows, no room or no time
    for this. What else it says is of one request."""
    status, words = reply.status, _refusal(reply)
    if status == HTTPStatus.CONFLICT:
        return OtherModelError(words)
    if status == HTTPStatus.TOO_MANY_REQUESTS or (status == HTTPStatus.GATEWAY_TIMEOUT and request.within < math.inf):
        return CoreBusyError(words)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return CoreAwayError(words) if request.kind == "rows" else CoreBusyError(words)
    return CoreRefusedError(words)


def _refusal(reply: Answer) -> str:
    return f"it answers {reply.status}: {reply.body[:200].decode(errors='replace')}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
