"""The connection of an edge to its core: kept connections, what they were measured to take, and whether the core
answers.

Requests are sent by a few threads. One that gets no answer in time takes the link down: nothing is sent then until
the core has said again who it is. It is asked once a second, and when all is well once a minute.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy.typing as npt

from offramp_core.edge import Sent, Uplink
from offramp_core.edge_settings import EdgeSettings
from offramp_core.errors import InvalidBundleError, OfframpError
from offramp_worker.bundle.load import Bundle
from offramp_worker.edge.wire import (
    DIGEST_HEADER,
    LENGTH_HEADER,
    SECONDS_HEADER,
    UPLINK_BYTES,
    Core,
    edge_path,
    read_reply,
    request_body,
)
from offramp_worker.logs import log_event
from offramp_worker.metrics import Metrics

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Answered = Callable[[Arrays | None], None]

CONNECTIONS = 8
KEEP_ALIVE_SECONDS = 60.0  # shorter than the core keeps them
SHORTEST_WAIT = 0.001
PATIENCE_FACTOR, SHORTEST_PATIENCE, LONGEST_PATIENCE = 10.0, 1.0, 10.0  # for an answer, by what one takes
AGAIN_SECONDS, MEASURE_SECONDS = 1.0, 60.0
ASSUMED_BYTES_PER_SECOND = 1.25e6  # of a core that has not been reached yet
# Another model by now, too much to do, not ready: nothing is sent for a while. What else it says is of one request.
NOT_NOW = (httpx.codes.CONFLICT, httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
QUICK_SECONDS = 0.02  # a body that goes up sooner is too small to measure by
NEXT_STEP = "serve the same bundle on both, or name another core in OFFRAMP_CORE (--core)"


class OtherModelError(InvalidBundleError):
    """The core is there, and serves something else."""

    remedy = NEXT_STEP


class CoreAwayError(OfframpError):
    """The core did not answer; the message says how."""


class CoreRefusedError(OfframpError):
    """The core answers, and does not take this request."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Rows to be sent to a path, since when, and within how many seconds an answer is of use."""

    what: str
    body: bytes
    length: int
    sent: Sent
    began: float
    within: float


class Link:
    """``send`` may be called by any thread; ``answered`` is called by one of the link's own."""

    def __init__(self, settings: EdgeSettings, bundle: Bundle, *, metrics: Metrics) -> None:
        manifest = bundle.manifest
        self._mine = Core(manifest.name, manifest.backbone_digest, manifest.ramp_set_digest)
        self.ramp_set_digest = manifest.ramp_set_digest
        self._declared, self._metrics = settings.uplink, metrics
        self.core, self._path = settings.core, edge_path(manifest.name)
        self.uplink = Uplink(settings.uplink or ASSUMED_BYTES_PER_SECOND)
        #: How often it was reached after it had been away; it may be another machine each time.
        self.meetings = 0
        #: Whether it has not refused any so far.
        self.takes_features = True
        #: Why the core is out of reach, in a few words; empty while it answers.
        self.away = "it has not been reached yet"
        self._measured_at = -math.inf
        self._client = httpx.Client(
            base_url=settings.core,
            headers={DIGEST_HEADER: manifest.backbone_digest},
            limits=httpx.Limits(
                max_connections=CONNECTIONS + 1,
                max_keepalive_connections=CONNECTIONS + 1,
                keepalive_expiry=KEEP_ALIVE_SECONDS,
            ),
            trust_env=False,
        )
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="core")
        self._lock, self._closed = threading.Lock(), threading.Event()
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
            self._lose(str(error))

    def watch(self, tick: Callable[[], None]) -> None:
        """Ask for the core, and call ``tick``, about once a second from now on."""
        threading.Thread(target=self._watching, args=(tick,), name="uplink", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

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
        request = _Request(what, *request_body(name, x), sent, time.monotonic(), within)
        try:
            self._threads.submit(self._send, request, answered)
        except RuntimeError:  # it is closed
            answered(None)

    def _send(self, request: _Request, answered: Answered) -> None:
        reply, left = None, request.within - (time.monotonic() - request.began)
        patience = min(self.patience, max(SHORTEST_WAIT, left))
        try:
            reply = self._exchange(request, patience)
        except CoreRefusedError as error:
            self.takes_features = self.takes_features and request.sent != "Features"
            log_event("core-refused", level="warning", core=self.core, what=request.what, reason=str(error))
        except httpx.TimeoutException as error:
            if patience < left:
                self._lose(_words(error))
        except Exception as error:  # whoever waits must hear of it, whatever it is
            self._lose(_words(error))
        finally:
            answered(reply)

    def _exchange(self, request: _Request, patience: float) -> Arrays:
        if self.away:
            raise CoreAwayError(self.away)
        headers = {LENGTH_HEADER: str(request.length), SECONDS_HEADER: f"{patience:.3f}"}
        reply = self._client.post(
            f"{self._path}/{request.what}", content=request.body, headers=headers, timeout=patience
        )
        if reply.status_code != httpx.codes.OK:
            if reply.status_code == httpx.codes.GATEWAY_TIMEOUT:
                raise httpx.ReadTimeout("the core had no time for it")
            raise (CoreAwayError if reply.status_code in NOT_NOW else CoreRefusedError)(_refusal(reply))
        arrays = read_reply(reply.content, reply.headers.get(LENGTH_HEADER))
        seconds = time.monotonic() - request.began  # with the time in which it waited for a connection
        self._metrics.core_seconds.observe(seconds)
        self._metrics.core_bytes.inc(len(request.body))
        if request.sent != "Nothing":
            with self._lock:
                self.uplink = self.uplink.after(request.sent, size=len(request.body), seconds=seconds)
        return arrays

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
        try:
            core, _ = self._ask(b"")  # opens the connection
            self._check(core)
            _, short = self._ask(b"")
            rate = self._declared or self._measured_rate(short)
        except httpx.HTTPError as error:
            raise CoreAwayError(_words(error)) from error
        with self._lock:
            self.uplink = self.uplink.measured(bytes_per_second=rate, round_trip=short)
        self._measured_at = time.monotonic()
        if self.away:
            self.meetings, self.takes_features = self.meetings + 1, True
            log_event("core-reached", core=self.core, uplink_mbit=round(rate * 8e-6, 3), round_trip=round(short, 4))
        self.away = ""

    def _measured_rate(self, short: float) -> float:
        """Bytes per second, by a body that is larger where a small one took no time."""
        for size in (UPLINK_BYTES // 8, UPLINK_BYTES):
            _, seconds = self._ask(bytes(size))
            if seconds - short > QUICK_SECONDS:
                break
        return size / max(1e-6, seconds - short)

    def _ask(self, body: bytes) -> tuple[Core, float]:
        began = time.perf_counter()
        reply = self._client.post(self._path, content=body, timeout=LONGEST_PATIENCE)
        if reply.status_code == httpx.codes.NOT_FOUND:
            raise OtherModelError(
                f"OFFRAMP_CORE is {self.core}: it takes no edges of model {self._mine.model!r}; start it with "
                "`offramp serve BUNDLE --edges`"
            )
        if reply.status_code != httpx.codes.OK:
            raise CoreAwayError(_refusal(reply))
        try:
            core = msgspec.json.decode(reply.content, type=Core)
        except (ValueError, msgspec.MsgspecError) as error:
            raise CoreAwayError(f"{self.core} does not say which model it serves: {error}") from error
        return core, time.perf_counter() - began

    def _check(self, core: Core) -> None:
        for field, theirs, mine in (
            ("backbone_digest", core.backbone_digest, self._mine.backbone_digest),
            ("ramp_set_digest", core.ramp_set_digest, self._mine.ramp_set_digest),
        ):
            if theirs != mine:
                raise OtherModelError(f"OFFRAMP_CORE is {self.core}: its {field} is {theirs[:80]}, this edge's {mine}")

    def _lose(self, why: str) -> None:
        with self._lock:
            known, self.away = self.away, why
        if why != known:
            log_event("core-away", level="warning", core=self.core, reason=why)

    def _watching(self, tick: Callable[[], None]) -> None:
        while not self._closed.wait(AGAIN_SECONDS):
            if self.away or time.monotonic() - self._measured_at > MEASURE_SECONDS:
                try:
                    self.meet()
                except OfframpError as error:
                    self._lose(str(error))
                except RuntimeError:  # the client is closed
                    return
            tick()


def _refusal(reply: httpx.Response) -> str:
    return f"it answers {reply.status_code}: {reply.text[:200]}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
