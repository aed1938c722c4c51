"""Who answers an inference request of an edge: the edge, or its core, which gets the request as it came.

Handing on is decided in the event loop before anything is read of the rows, and costs a box what any request costs. A
request that the core does not answer is answered here: nothing is lost by trying.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from random import random
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from offramp_core.edge_relay import LEARNED, UNASKED, UNUSUAL, By, Waiting, Ways
from offramp_core.plan import Plan
from offramp_core.reasons import RequestOutcome
from offramp_worker.bundle.load import row_bytes
from offramp_worker.edge.forwarding import Edge
from offramp_worker.edge.kept import Answered, KeptConnections, TooLarge
from offramp_worker.edge.link import LONGEST_PATIENCE, PATIENCE_FACTOR, SHORTEST_PATIENCE
from offramp_worker.edge.processor import ProcessorWait
from offramp_worker.edge.wire import DIGEST_HEADER, LENGTH_HEADER, PLAN_HEADER, RAMPS_HEADER
from offramp_worker.engine.engine import Engine
from offramp_worker.http.bodies import Headers
from offramp_worker.http.inference import TIER, Inference, Reply
from offramp_worker.http.refusals import Response
from offramp_worker.worker import InferenceWorker

LENGTH = LENGTH_HEADER.encode()
CONNECTIONS, MOST_OUTPUTS = 8, 2
PASSED_ON = (LENGTH, b"content-type", b"traceparent", b"tracestate")
PASSED_BACK = (LENGTH_HEADER, "content-type")
REPLY_BYTES, ROW_BYTES = 65536, 512  # of a reply and of each of its rows, beyond logits
SOON_SECONDS = 0.1  # after a request: who comes later does not wait for what it took
REST_SECONDS, MOST_FAILURES = 1.0, 7  # after one that the core did not answer; twice as long each time, so often
OK, BAD_REQUEST = 200, 400
NOBODY = Waiting()


@dataclass(slots=True, eq=False)
class _Request:
    """One request, by whom it is answered (``inner`` is the edge's own) and since when."""

    path: str
    headers: Headers
    body: bytes | bytearray
    reply: Reply
    rows: int
    began: float
    waiting: Waiting
    by: By
    inner: Any = None
    over: bool = False
    #: Answered below so many seconds it says nothing new, unless it is one in a few; 0 where each is learned from.
    usual: float = 0.0
    #: Whether it is, and stands for the others.
    drawn: bool = False
    #: The core has called it malformed.
    malformed: bool = False


class _Ended(NamedTuple):
    """What is known of a request whose time is over: when that was, what it took, and whether it was answered."""

    at: float
    took: float
    answered: bool
    by: By
    rows: int
    size: int
    waiting: Waiting
    requests: int
    share: float


@dataclass(slots=True)
class _Settled:
    """Requests like the last one go ``by`` one way without asking, so many more of them."""

    by: By
    like: tuple[int, int]  # rows and bytes
    usual: float
    left: int = UNASKED


class Relay:
    """In the place of :class:`offramp_worker.http.inference.Inference` on the public port of an edge."""

    def __init__(
        self,
        worker: InferenceWorker,
        inference: Inference,
        *,
        clock: Callable[[], float] = time.perf_counter,
        waited: Callable[[], float] | None = None,
    ) -> None:
        """``inference`` is the edge's own way. ``waited`` is as :class:`offramp_worker.edge.processor.ProcessorWait` of
        the event loop."""
        self._worker, self._inference, self._clock = worker, inference, clock
        self._waited = waited or ProcessorWait()
        self.refusals = inference.refusals
        self._ways: dict[int, Ways] = {}  # by the size of requests: rows, as a power of two
        self._settled: _Settled | None = None
        self._last: _Ended | None = None  # it is learned from once it is known how long the next one waits for it
        self._rows_here, self._bytes_out = 0, 0
        self._sent_until = 0.0  # when all of them have gone up, at the uplink's rate
        self._failures, self._failed_at, self._rests_until = 0, -math.inf, -math.inf
        self._kept: KeptConnections | None = None
        self._asked: tuple[Any, bytes, int] = (), b"", 0  # of the last request: what it came with, its words, its rows
        self._head: tuple[Any, bytes] = (), b""  # of the request that was handed on last, and what it follows from

    @property
    def max_body_bytes(self) -> int:
        return self._inference.max_body_bytes

    def answer(self, path: str, headers: Headers, body: bytes | bytearray, reply: Reply) -> Any | None:
        """As :meth:`offramp_worker.http.inference.Inference.answer`."""
        if self._last is not None:
            self._next_has_come(self._last)
        engine, edge = self._worker.engine, self._worker.edge
        if engine is None or edge is None or edge.residue != "Auto" or edge.link.away:
            return self._inference.answer(path, headers, body, reply)
        plan, rows = self._plan(engine), self._rows(engine, path, headers, body)
        if plan is None or not rows:
            return self._inference.answer(path, headers, body, reply)
        request = _Request(path, headers, body, reply, rows, self._clock(), NOBODY, "Edge")
        self._decide(request, edge)
        if request.by == "Edge":
            self._here(request)
        else:
            self._hand_on(request, engine, edge, plan)
        return None if request.over else request

    def cancel(self, pending: Any, *, gone: Callable[[], None]) -> None:
        """The client has gone away."""
        if not isinstance(pending, _Request):
            self._inference.cancel(pending, gone=gone)
            return
        pending.over = True
        self._learn(pending, answered=False)
        if pending.by == "Edge":
            self._rows_here -= pending.rows
        else:
            self._worker.metrics.requests[RequestOutcome.CANCELLED].inc()
        if pending.inner is not None:
            self._inference.cancel(pending.inner, gone=gone)
        else:
            gone()

    def _decide(self, request: _Request, edge: Edge) -> None:
        """Who answers, and whether it is learned from. One that takes unusually long always is."""
        rows, size = request.rows, len(request.body)
        settled, alone = self._settled, not self._rows_here and not self._bytes_out
        if settled is not None and settled.left and settled.like == (rows, size) and alone:
            settled.left -= 1
            request.by = settled.by
        else:
            going_up = int(max(0.0, self._sent_until - request.began) * edge.link.uplink.bytes_per_second)
            request.waiting = Waiting(self._rows_here / rows, min(self._bytes_out, going_up))
            request.by = self._by(edge, rows, size, request.waiting, request.began)
            ways = self._ways.get(rows.bit_length(), Ways())
            known = alone and not self._failures
            usual = ways.settled(request.by, size, edge.link.uplink) if known else None
            self._settled = settled = None if usual is None else _Settled(request.by, (rows, size), usual)
        if settled is not None:
            request.usual = settled.usual
            request.drawn = LEARNED * random() < 1.0  # noqa: S311 - no secret; nothing that repeats may decide it

    def _plan(self, engine: Engine) -> Plan | None:
        """The plan in force, if the core may answer in its place. Without exits every row is needed here for records,
        and a canary needs its batches; the core does not know which slices and classes were stopped here, or who gives
        feedback."""
        active, settings = engine.active, self._worker.settings
        runtime = engine.arms.without_canary(active)
        bound = runtime.exits_off or runtime.stopped or runtime.stopped_classes or active.canary is not None
        return None if bound or settings.always_in_time or settings.feedback_rows else runtime.plan

    def _rows(self, engine: Engine, path: str, headers: Headers, body: bytes | bytearray) -> int:
        """As :func:`_rows`, which need not look twice at the same words for the same model."""
        of, (before, asked, rows) = (engine.bundle.manifest, path, headers, len(body)), self._asked
        if before != of or not body.startswith(asked):
            rows = _rows(engine, path, headers, body)
            words = bytes(body[: int(dict(headers)[LENGTH])]) if rows else b""
            self._asked = of if rows else (), words, rows
        return rows

    def _by(self, edge: Edge, rows: int, size: int, waiting: Waiting, now: float) -> By:
        known = self._ways.get(rows.bit_length(), Ways())
        by = known.by(size, waiting, edge.link.uplink)
        again = self._failures and self._bytes_out  # one at a time tries whether it answers again
        if by == "Core" and (now < self._rests_until or again or not self._connections(edge).room):
            return "Edge"
        return by

    def _connections(self, edge: Edge) -> KeptConnections:
        if self._kept is None:
            self._kept = KeptConnections(edge.link.core, most=CONNECTIONS)
        return self._kept

    # --- here ---------------------------------------------------------------------------------------

    def _here(self, request: _Request) -> None:
        request.by, request.began = "Edge", self._clock()
        if self._rows_here:
            request.waiting = replace(request.waiting, at_edge=self._rows_here / request.rows)
        self._rows_here += request.rows

        def answered(response: Response) -> None:
            if request.over:
                return
            request.over = True
            self._rows_here -= request.rows
            if response.status == OK or response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self._learn(request, answered=response.status == OK)
            if request.malformed and response.status == OK:
                self._rest(request)
            request.reply(response)

        request.inner = self._inference.answer(request.path, request.headers, request.body, answered)

    def _learn(self, request: _Request, *, answered: bool) -> None:
        """From the time until the answer, or until nobody waited for one any more, and what the next one waits for
        it."""
        now, size = self._clock(), len(request.body)
        took = now - request.began
        unusual = request.usual > 0 and (took >= request.usual or not answered)
        if request.usual and not (unusual or request.drawn):
            known = request.rows.bit_length()
            self._ways[known] = self._ways[known].without_longer(request.by)
            return
        if unusual:
            self._settled = None
        if self._last is not None:
            self._learn_from(self._last, waited=0.0)
        requests, share = LEARNED if request.drawn and not unusual else 1, UNUSUAL if unusual else 1.0
        self._last = _Ended(now, took, answered, request.by, request.rows, size, request.waiting, requests, share)
        request.usual, request.drawn = 0.0, False  # if the core has not answered, the edge does
        self._waited()

    def _next_has_come(self, last: _Ended) -> None:
        waited = self._waited()
        soon = self._clock() - last.at - waited < SOON_SECONDS
        self._learn_from(last, waited=waited if soon else 0.0)

    def _learn_from(self, last: _Ended, *, waited: float) -> None:
        self._last, edge, known = None, self._worker.edge, last.rows.bit_length()
        if edge is not None:
            ways = self._ways.get(known, Ways())
            learn = partial(ways.after, requests=last.requests, share=last.share) if last.answered else ways.at_least
            seconds, uplink = last.took + waited, edge.link.uplink
            self._ways[known] = learn(last.by, seconds, size=last.size, waiting=last.waiting, uplink=uplink)

    # --- by the core --------------------------------------------------------------------------------

    def _hand_on(self, request: _Request, engine: Engine, edge: Edge, plan: Plan) -> None:
        kept, size = self._connections(edge), len(request.body)
        of = (engine.bundle.manifest, plan, size, *(header for header in request.headers if header[0] in PASSED_ON))
        if self._head[0] != of:
            self._head = of, _head(kept, engine, plan, request)
        head = self._head[1]
        most = REPLY_BYTES + request.rows * (ROW_BYTES + 64 * engine.task.width)
        self._bytes_out += size
        uplink, ways = edge.link.uplink, self._ways.get(request.rows.bit_length(), Ways())
        self._sent_until = max(self._sent_until, request.began) + size / uplink.bytes_per_second
        expected = PATIENCE_FACTOR * ways.by_core(size, request.waiting, uplink)
        patience = min(LONGEST_PATIENCE, max(SHORTEST_PATIENCE, expected))

        def done(answered: Answered | str) -> None:
            self._bytes_out -= size
            answer = self._judged(request, answered, engine, edge)
            if not request.over:
                self._came_back(request, answer)

        kept.send(head + request.body, most=most, seconds=patience, done=done)

    def _judged(self, request: _Request, answered: Answered | str, engine: Engine, edge: Edge) -> Answered | None:
        """An answer of this core that is one; whether or not anybody waits for it, requests are handed on after it."""
        if isinstance(answered, str) and not isinstance(answered, TooLarge):
            edge.link.lose(answered)
        if isinstance(answered, Answered) and answered.status == BAD_REQUEST:
            request.malformed = True  # what the client sent, unless the edge can read it
        elif isinstance(answered, str) or answered.status != OK or not _of(engine, answered):
            self._rest(request)
        else:
            self._failures = self._failures if request.began < self._failed_at else 0
            return answered
        return None

    def _rest(self, request: _Request) -> None:
        """The core does not answer: others that were on their way by then do not fare better, and count as one."""
        now, self._settled = self._clock(), None
        self._failures = max(1, min(MOST_FAILURES, self._failures + (request.began >= self._failed_at)))
        self._failed_at = now
        self._rests_until = now + REST_SECONDS * 2.0 ** (self._failures - 1)

    def _came_back(self, request: _Request, answered: Answered | None) -> None:
        self._learn(request, answered=answered is not None)
        if answered is None:
            self._here(request)
            return
        request.over = True
        took, metrics = self._clock() - request.began, self._worker.metrics
        names = [
            (name.encode(), answered.headers[name].encode("latin-1"))
            for name in PASSED_BACK
            if name in answered.headers
        ]
        request.reply(Response(OK, bytes(answered.body), names))  # what is counted keeps nobody waiting
        metrics.relayed.inc()
        metrics.core_bytes.inc(len(request.body))
        metrics.core_seconds.observe(took)
        metrics.answered(took, objective=self._worker.settings.latency_seconds)
        metrics.responses("rest", str(OK)).inc()


def _head(kept: KeptConnections, engine: Engine, plan: Plan, request: _Request) -> bytes:
    manifest = engine.bundle.manifest
    named = {
        DIGEST_HEADER: manifest.backbone_digest,
        RAMPS_HEADER: manifest.ramp_set_digest,
        PLAN_HEADER: plan.content_hash,
        **{n.decode(): value.decode("latin-1") for n, value in request.headers if n in PASSED_ON},
    }
    return kept.head(_path(engine), named, length=len(request.body))


def _of(engine: Engine, answered: Answered) -> bool:
    """Whether a core with this bundle has answered."""
    manifest = engine.bundle.manifest
    digests = answered.headers.get(DIGEST_HEADER), answered.headers.get(RAMPS_HEADER)
    return digests == (manifest.backbone_digest, manifest.ramp_set_digest)


def _path(engine: Engine) -> str:
    return f"/v2/models/{quote(engine.bundle.manifest.name, safe='')}/infer"


def _rows(engine: Engine, path: str, headers: Headers, body: bytes | bytearray) -> int:
    """Rows of a request that the core may answer as it came: binary rows of a fixed size, and nothing asked of them
    that an edge answers in its own way. 0 for any other."""
    spec = engine.bundle.asks_for
    if engine.bundle.encoded is not None or spec.varies or path != _path(engine):
        return 0
    given = dict(headers)
    length = given.get(LENGTH, b"")
    if not length.isdigit() or not 0 < len(length) <= 4 or b"content-encoding" in given or TIER in given:
        return 0
    binary = len(body) - int(length)
    rows, rest = divmod(binary, row_bytes(spec))
    if rest or not 0 < rows <= engine.max_rows:
        return 0
    try:
        asked = orjson.loads(memoryview(body)[: int(length)])
    except orjson.JSONDecodeError:
        return 0
    if not isinstance(asked, dict) or asked.get("parameters"):
        return 0
    outputs = asked.get("outputs") or ()
    return rows if isinstance(outputs, list | tuple) and len(outputs) <= MOST_OUTPUTS else 0
