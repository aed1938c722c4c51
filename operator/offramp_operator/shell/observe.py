"""Pull every worker's admin port and pool what they saw.

A worker that does not answer is never an error here: its last report stands for a while, then it counts as
silent. It costs its own deadline and nobody else's: once a pull has failed, passes do not wait for that worker any
more. Nothing in this module decides anything; what it remembers can be lost at any time, because workers keep
cumulative counters and a ring of records that a fresh observer reads from the start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from statistics import fmean
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from offramp_core.bundle import column_arrays
from offramp_core.control.objects import TuningStatus
from offramp_core.control.rollouts.ledger import impossible, went_backwards
from offramp_core.control.served import who_say
from offramp_core.control.snapshot import Load, Observed, RecordStore, Worker, WorkerEndpoint
from offramp_core.control.tuning.tuner import MOST_LABELS
from offramp_core.errors import InvalidRecordsError, UnavailableError
from offramp_core.fleet import Window
from offramp_core.protocol import (
    ArmCounts,
    Observations,
    PlanDocument,
    RecordBlock,
    SignedDocument,
    WorkerState,
)
from offramp_core.reasons import Reason
from offramp_core.records import records_from_arrays
from offramp_operator.shell import wire
from offramp_operator.shell.bounded import refuse_unbounded
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.record_pool import (
    CAPACITY_ROWS,
    MOST_EARNING,
    MOST_ROWS,
    WAITING_BYTES,
    RampSetKey,
    RecordPool,
    row_bytes,
    rows_each,
    shares_of_waiting,
)
from offramp_operator.shell.rolling_maximum import RollingMaximum

COLLECTING_STATES = (Reason.COLLECTING_LABELS, Reason.TUNING)
COLLECTING = TuningStatus(Reason.COLLECTING_LABELS)
MAX_PAGES = 8  # 40,000 rows: twice what is kept, so that one pass catches up whatever was missed
FAILURES_UNTIL_SILENT = 3
SECONDS_UNTIL_SILENT = 10.0
SUSPECT_SECONDS = 0.25  # a pass waits so long for workers whose last pull failed
LOAD_WINDOW_SECONDS = 10.0
MOST_WINDOWS = 360  # an hour of them
# Rows that one worker refuses in a second count up to this. A flood of requests of a thousand rows each goes beyond it;
# what it asks for is the most workers either way.
MOST_REFUSED = 100_000
PULLS_AT_ONCE = 128  # over all services; a deadline counts from when a pull begins
SHARE_SECONDS = 1.0  # between two looks at what the pools of all services take
MAX_MORE_SETS = 4  # twice what a worker holds
# Workers close idle connections after 5 s; one that closes while a request is on its way fails it.
KEEP_ALIVE_SECONDS = 4.0


class _Work(NamedTuple):
    """By the worker's clock: requests answered, busy seconds, and requests that came, refused ones included; since it
    was first heard."""

    at: float
    requests: float = 0.0
    busy: float = 0.0
    came: float = 0.0


@dataclass(slots=True)
class _Seen:
    """What is remembered of one worker. ``work`` is what it had done at the last pulls (a list: an empty deque takes
    0.6 kB), ``pull`` is the one under way.

    ``distrusted`` says why this process (its boot id ``liar``) is not believed any more; a restart is a new beginning.
    """

    state: WorkerState | None = None
    observations: Observations | None = None
    after: int = 0
    failures: int = 0
    answered_at: float = -math.inf
    work: list[_Work] = field(default_factory=list)
    complaints: set[str] = field(default_factory=set)
    liar: str = ""
    distrusted: str = ""
    pull: asyncio.Task[None] | None = None
    reported_silent: bool = False
    digest: int = 0  # hash of the last answer but for its time


@dataclass(slots=True)
class _ServiceMemory:
    seen: dict[str, _Seen] = field(default_factory=dict)
    pools: dict[RampSetKey, RecordPool] = field(default_factory=dict)
    stores: dict[RampSetKey, tuple[tuple[int, int], RecordStore | None]] = field(default_factory=dict)
    revision: int = 0
    peak_rate: RollingMaximum = field(default_factory=RollingMaximum)
    keeps_windows: bool = False  # of what came, where workers are planned by it
    windows: list[Window] = field(default_factory=list)
    tuning: TuningStatus = COLLECTING
    earning: bool = False  # its place, by a canary, and so a whole pool
    share: int = WAITING_BYTES  # bytes that its pools may take while its tuning waits


class Observer:
    """Pulls workers concurrently, each within ``deadline_seconds``. :meth:`close` it on the loop that used it.

    Parameters
    ----------
    clock, monotonic : callable
        Seconds since the epoch (bounds the times that records claim), and seconds that never jump.
    """

    def __init__(
        self,
        *,
        deadline_seconds: float = 3.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._at_once = asyncio.Semaphore(PULLS_AT_ONCE)
        self._bundles: dict[RampSetKey, WorkerState] = {}
        self._deadline = deadline_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._services: dict[ServiceKey, _ServiceMemory] = {}
        self._shared_at = -math.inf

    async def close(self) -> None:
        """End all pulls and close the connections."""
        for key in list(self._services):
            self.forget(key)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def observe(
        self,
        key: ServiceKey,
        endpoints: Sequence[WorkerEndpoint],
        *,
        token: str,
        tuning: TuningStatus = COLLECTING,
        renew: bool = True,
        windows: bool = False,
        earning: bool = False,
        published: PlanDocument | None = None,
        bundle: str = "",
    ) -> Observed:
        """Pull all workers of a service once and pool the answers; never raises for a worker that is dead or talks
        nonsense.

        ``renew`` says that what is decided can be carried out, as far as is known: else a canary must be left to end
        with its lease. One whose tuning waits for labels keeps as many rows as there is room for, one in whose canary
        a plan without a certificate is ``earning`` its place keeps what it takes to see scenes (``MOST_EARNING`` at
        once, first come, first served), others their share of the operator's memory. Whose records are wanted follows
        from what is ``published`` and the ``bundle`` of trained ramp sets (:func:`who_say`).
        """
        known = self._services.setdefault(key, _ServiceMemory())
        known.tuning, known.keeps_windows = tuning, windows
        known.earning = earning and (known.earning or sum(m.earning for m in self._services.values()) < MOST_EARNING)
        self._shared_at = _share(self._services.values(), now=self._monotonic(), last=self._shared_at)
        memory = await self._pull_all(key, endpoints, token, renew=renew)
        for pool in memory.pools.values():
            pool.keep(_rows_to_keep(memory, services=len(self._services), n_ramps=pool.n_ramps))
        pulled = [(endpoint, memory.seen[endpoint.uid]) for endpoint in endpoints]
        workers = tuple(_worker(endpoint, seen, silent=self._silent(seen)) for endpoint, seen in pulled)
        own, others = _records(
            memory, workers, who_say([w for w in workers if not w.endpoint.trial], published, bundle)
        )
        return Observed(workers, own, others, _load(memory, self._monotonic(), self._clock()))

    async def poll(self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], *, token: str) -> int:
        """Pull all workers once and note what came; the revision after that. What repeats itself is not parsed."""
        memory = await self._pull_all(key, endpoints, token)
        _load(memory, self._monotonic(), self._clock())
        return memory.revision

    def at_rest(self, key: ServiceKey) -> bool:
        """Whether every worker answers, or was told to be silent: none is about to be heard for the first time."""
        return all(seen.failures == 0 or seen.reported_silent for seen in self._services[key].seen.values())

    def revision(self, key: ServiceKey) -> int:
        """A number that grows whenever a worker reports, or fails to report, something new."""
        return self._services.get(key, _ServiceMemory()).revision

    async def _pull_all(
        self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], token: str, *, renew: bool = True
    ) -> _ServiceMemory:
        memory = self._services.setdefault(key, _ServiceMemory())
        for gone in set(memory.seen) - {endpoint.uid for endpoint in endpoints}:
            _cancel(memory.seen.pop(gone))
        prompt: list[asyncio.Task[None]] = []
        suspect: list[asyncio.Task[None]] = []
        for endpoint in endpoints:
            seen = memory.seen.setdefault(endpoint.uid, _Seen())
            if seen.pull is None or seen.pull.done():
                seen.pull = asyncio.create_task(self._pull(key, memory, endpoint, token, renew=renew))
            (suspect if seen.failures else prompt).append(seen.pull)
        if prompt:
            await asyncio.gather(*prompt)
        if suspect:
            await asyncio.wait(suspect, timeout=SUSPECT_SECONDS)
        return memory

    async def poke(
        self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], *, token: str, signed: SignedDocument
    ) -> None:
        """Hand a document to workers right away. A failure is harmless: workers also poll the published copy."""
        body = wire.encode(signed)
        await asyncio.gather(*(self._post(key, endpoint, token, body) for endpoint in endpoints if endpoint.admin_url))

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a service that is gone."""
        for seen in self._services.pop(key, _ServiceMemory()).seen.values():
            _cancel(seen)

    def settled(self, key: ServiceKey) -> bool:
        """Whether every audit that was drawn has been answered, as far as the last pulls say."""
        memory = self._services.get(key, _ServiceMemory())
        reports = [seen.observations for seen in memory.seen.values() if seen.observations is not None]
        return all(count.drawn == count.audited for report in reports for count in _all_counts(report))

    def pools(self, key: ServiceKey) -> Mapping[RampSetKey, RecordPool]:
        """The record pools of a service, for a shell that keeps them over its own restart."""
        return self._services.get(key, _ServiceMemory()).pools

    def room_taken(self) -> float:
        """Share of the room for records of services whose tuning waits; near 1 the largest pools give way."""
        return sum(_kept_bytes(m) for m in self._services.values() if _waits(m.tuning)) / WAITING_BYTES

    def restore(self, key: ServiceKey, pools: Mapping[RampSetKey, RecordPool]) -> None:
        """Start a service's memory from kept pools; rows that workers still hold are not added twice."""
        self._services.setdefault(key, _ServiceMemory()).pools.update(pools)

    # --- one worker --------------------------------------------------------------------------------

    async def _pull(
        self, key: ServiceKey, memory: _ServiceMemory, endpoint: WorkerEndpoint, token: str, *, renew: bool
    ) -> None:
        seen = memory.seen[endpoint.uid]
        if endpoint.admin_url is None:
            return
        try:
            async with self._at_once, asyncio.timeout(self._deadline):
                await self._pull_pages(memory, seen, endpoint, token, renew=renew)
        except (aiohttp.ClientError, ValueError, OSError, UnavailableError, TimeoutError) as error:
            self._failed(key, memory, seen, endpoint, str(error) or type(error).__name__)
            return
        memory.revision += seen.failures > 0
        if seen.failures >= FAILURES_UNTIL_SILENT and math.isfinite(seen.answered_at):
            log_event("worker-answers", f"{endpoint.name} answers again", service=str(key), worker=endpoint.name)
        seen.failures, seen.answered_at, seen.reported_silent = 0, self._monotonic(), False

    def _failed(
        self, key: ServiceKey, memory: _ServiceMemory, seen: _Seen, endpoint: WorkerEndpoint, reason: str
    ) -> None:
        seen.failures += 1
        silent = self._silent(seen)
        if seen.failures < FAILURES_UNTIL_SILENT or silent != seen.reported_silent:
            memory.revision += 1
        seen.reported_silent = silent
        if seen.failures == FAILURES_UNTIL_SILENT and seen.state is not None:
            log_event(
                "worker-silent",
                f"{endpoint.name} does not answer: {reason}",
                level=logging.WARNING,
                service=str(key),
                worker=endpoint.name,
            )

    def _silent(self, seen: _Seen) -> bool:
        return seen.failures >= FAILURES_UNTIL_SILENT and self._monotonic() - seen.answered_at > SECONDS_UNTIL_SILENT

    async def _pull_pages(
        self, memory: _ServiceMemory, seen: _Seen, endpoint: WorkerEndpoint, token: str, *, renew: bool
    ) -> None:
        for _ in range(MAX_PAGES):
            query = _query(memory, seen) | ({} if renew else {"renew": "0"})
            body = await self._get(endpoint, "/v1/observations", token, query)
            digest = hash(wire.without_time(body))
            if seen.observations is not None and digest == seen.digest:
                _rested(seen, wire.decode(body, wire.Timed).now)
                return
            pulled = wire.decode(body, Observations)
            _check_same(pulled.uid, endpoint.uid)
            state = pulled.state
            if state is None:  # a worker of an earlier release
                state, digest = wire.decode(await self._get(endpoint, "/v1/state", token, {}), WorkerState), 0
                _check_same(state.uid, endpoint.uid)
            if pulled.boot_id != state.boot_id:
                raise UnavailableError("the worker restarted between two answers")
            if seen.observations is None or seen.observations.boot_id != state.boot_id:
                seen.after = 0
                seen.work.clear()
            before = seen.observations
            changed = before is None or (seen.state, _figures(before)) != (state, _figures(pulled))
            _judge(seen, endpoint, pulled)
            if not seen.distrusted:
                _account(seen, pulled)
            seen.state, seen.observations, seen.digest = self._shared(state), replace(pulled, state=None), digest
            n_rows = self._keep_rows(memory, seen, endpoint, state)
            memory.revision += changed or n_rows > 0
            if n_rows < wire.MAX_BLOCK_ROWS:
                return

    def _shared(self, state: WorkerState) -> WorkerState:
        """The same state, with columns and costs that all workers of a bundle share: they are most of it."""
        known = self._bundles.setdefault(_set_of(state), state)
        if (known.ramps, known.costs) != (state.ramps, state.costs):
            self._bundles[_set_of(state)] = state
            return state
        return replace(state, ramps=known.ramps, costs=known.costs)

    def _keep_rows(self, memory: _ServiceMemory, seen: _Seen, endpoint: WorkerEndpoint, state: WorkerState) -> int:
        """Add the rows of the last pull to their pool; returns how many rows the block had (0 when it is unusable)."""
        assert seen.observations is not None
        block = seen.observations.records
        seen.after = max(seen.after, block.next)
        if seen.distrusted:
            return 0
        if block.ramp_set_digest != state.ramp_set_digest:
            if block.time:
                _complain(seen, endpoint, f"records of a ramp set it does not serve dropped: {block.ramp_set_digest!r}")
            return 0
        n_rows = self._add_rows(memory, seen, endpoint, state, block)
        if n_rows is None:
            return 0
        # Other ramp sets that the worker holds have the columns of its own.
        for other in seen.observations.more_records[:MAX_MORE_SETS]:
            if other.ramp_set_digest in state.ramp_sets:
                n_rows = max(n_rows, self._add_rows(memory, seen, endpoint, state, other) or 0)
            else:
                _complain(seen, endpoint, f"records of a ramp set it does not hold dropped: {other.ramp_set_digest!r}")
        return n_rows

    def _add_rows(
        self, memory: _ServiceMemory, seen: _Seen, endpoint: WorkerEndpoint, state: WorkerState, block: RecordBlock
    ) -> int | None:
        """Add the rows of a block to their pool; how many there were, or None where it is malformed."""
        try:
            rows = wire.decode_rows(block, n_ramps=len(state.ramps))
        except InvalidRecordsError as error:
            _complain(seen, endpoint, f"malformed records dropped: {error}")
            return None
        if len(rows):
            fresh = RecordPool(n_ramps=len(state.ramps), names=column_arrays(state.ramps))
            pool = memory.pools.setdefault(RampSetKey(state.backbone_digest, block.ramp_set_digest), fresh)
            pool.keep(_rows_to_keep(memory, services=len(self._services), n_ramps=len(state.ramps)))
            marks = memory.tuning.not_younger(state.boot_id, block.ramp_set_digest)
            pool.add(state.boot_id, rows, latest_time=self._clock(), not_younger=marks)
        return len(rows)

    # --- HTTP --------------------------------------------------------------------------------------

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=2 * PULLS_AT_ONCE, keepalive_timeout=KEEP_ALIVE_SECONDS)
            timeout = aiohttp.ClientTimeout(total=None)  # the deadline is a pull's, not a request's
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, headers={"Accept-Encoding": "identity"}
            )
        return self._session

    async def _get(self, endpoint: WorkerEndpoint, path: str, token: str, query: Mapping[str, str]) -> bytes:
        url = f"{endpoint.admin_url}{path}"
        async with self._http().get(url, params=query, headers=_bearer(token), allow_redirects=False) as reply:
            if reply.status != HTTPStatus.OK:
                raise UnavailableError(f"GET {path} answered {reply.status}")
            refuse_unbounded(url, reply.headers)
            return await reply.read()

    async def _post(self, key: ServiceKey, endpoint: WorkerEndpoint, token: str, body: bytes) -> None:
        headers = {**_bearer(token), "Content-Type": "application/json"}
        url = f"{endpoint.admin_url}/v1/config"
        try:
            async with (
                asyncio.timeout(self._deadline),
                self._http().post(url, data=body, headers=headers, allow_redirects=False) as reply,
            ):
                refuse_unbounded(url, reply.headers)
                status, text = reply.status, (await reply.read())[:500].decode(errors="replace")
        except (aiohttp.ClientError, ValueError, OSError, UnavailableError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            log_event(
                "poke-failed",
                f"{endpoint.name} was not reached: {reason}",
                level=logging.DEBUG,
                service=str(key),
                worker=endpoint.name,
            )
            return
        if status not in (HTTPStatus.OK, HTTPStatus.ACCEPTED):  # accepted: the worker waits for a ramp set, and says so
            log_event(
                "plan-refused",
                f"{endpoint.name} refused the plan ({status}): {text}",
                level=logging.WARNING,
                service=str(key),
                worker=endpoint.name,
            )


def _worker(endpoint: WorkerEndpoint, seen: _Seen, *, silent: bool) -> Worker:
    return Worker(
        endpoint,
        state=None if silent else seen.state,
        # The last counts stay: a process that is slow to answer has not lost the audits it reported.
        observations=seen.observations,
        distrusted=seen.distrusted,
    )


def _waits(tuning: TuningStatus) -> bool:
    """Whether a tuning waits for labels, even if it takes its budget for hopeless and audits are few."""
    return tuning.state in COLLECTING_STATES or (
        tuning.state == Reason.IDLE and 0 < tuning.labels_needed <= MOST_LABELS
    )


def _kept_bytes(memory: _ServiceMemory) -> int:
    return sum(len(pool) * row_bytes(pool.n_ramps) for pool in memory.pools.values())


def _share(services: Iterable[_ServiceMemory], *, now: float, last: float) -> float:
    """Divide what pools may take among the services whose tuning waits, now and then; returns when.

    Those that wait for the fewest labels come first, so that one whose tuning never ends keeps nobody from ending;
    hopeless ones come last.
    """
    if now < last + SHARE_SECONDS:
        return last
    waiting = [m for m in services if m.pools and _waits(m.tuning)]
    waiting.sort(key=lambda m: (m.tuning.state == Reason.IDLE, m.tuning.labels_needed))
    kept = [_kept_bytes(memory) for memory in waiting]
    whole = [CAPACITY_ROWS * sum(row_bytes(pool.n_ramps) for pool in memory.pools.values()) for memory in waiting]
    for memory, share in zip(waiting, shares_of_waiting(kept, whole=whole, total=WAITING_BYTES), strict=True):
        memory.share = share
    return now


def _rows_to_keep(memory: _ServiceMemory, *, services: int, n_ramps: int) -> int:
    least = CAPACITY_ROWS if memory.earning else rows_each(services, n_ramps=n_ramps)
    if not _waits(memory.tuning):
        return least
    return max(least, min(MOST_ROWS, memory.share // (max(1, len(memory.pools)) * row_bytes(n_ramps))))


def _query(memory: _ServiceMemory, seen: _Seen) -> dict[str, str]:
    """Records from the first one that is not known, of the process that was last heard; any other process tells all it
    has."""
    if seen.state is None:
        return {"after": "0", "state": "1"}
    state, own = seen.state, _set_of(seen.state)
    known = memory.pools.get(own)
    after = max(seen.after, known.next_of(state.boot_id) if known else 0)
    query = {"after": str(after), "boot": state.boot_id, "state": "1"}
    pools = {key: memory.pools[key] for key in _held(state) if key != own and key in memory.pools}
    also = ",".join(f"{key.ramp_set_digest}={pool.next_of(state.boot_id)}" for key, pool in pools.items())
    return {**query, "also": also} if also else query


def _cancel(seen: _Seen) -> None:
    """Of a worker that is gone nothing more is wanted."""
    if seen.pull is not None:
        seen.pull.cancel()


def _check_same(answered: str, wanted: str) -> None:
    """An address may have passed to another worker since the platform listed it."""
    if answered != wanted:
        raise UnavailableError(f"worker {answered!r} answers there")


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _set_of(state: WorkerState) -> RampSetKey:
    return RampSetKey(state.backbone_digest, state.ramp_set_digest)


def _held(state: WorkerState) -> tuple[RampSetKey, ...]:
    """The bundle's own set, whether or not it is held now, and the others that are."""
    return tuple(
        RampSetKey(state.backbone_digest, ramp_set)
        for ramp_set in dict.fromkeys((state.ramp_set_digest, *state.ramp_sets[:MAX_MORE_SETS]))
    )


def _complain(seen: _Seen, endpoint: WorkerEndpoint, message: str) -> None:
    """Log a complaint once per worker, as it would repeat with every pull."""
    if message not in seen.complaints and len(seen.complaints) < 100:
        seen.complaints.add(message)
        log_event("records-dropped", f"{endpoint.name}: {message}", level=logging.WARNING, worker=endpoint.name)


def _judge(seen: _Seen, endpoint: WorkerEndpoint, now: Observations) -> None:
    """Believe a process until it reports what cannot be, and nothing of it from then on: neither counts nor records."""
    if seen.liar not in ("", now.boot_id):
        seen.liar = seen.distrusted = ""
    if seen.distrusted:
        return
    same = seen.observations is not None and seen.observations.boot_id == now.boot_id
    before = seen.observations.counts if same and seen.observations is not None else ()
    why = impossible(_all_counts(now), newest_epoch=None, plans={}, measured=now.plans)
    if not why and went_backwards(before, now.counts):
        why = "its counts went backwards"
    if not why and same and seen.observations is not None and now.refused < seen.observations.refused:
        why = "the requests that it refused went backwards"
    if why:
        seen.liar, seen.distrusted = now.boot_id, why
        seen.work.clear()
        message = f"{endpoint.name} is not believed until it restarts: {why}"
        log_event("worker-distrusted", message, level=logging.WARNING, worker=endpoint.name)


# --- pooled figures --------------------------------------------------------------------------------


def _all_counts(seen: Observations) -> tuple[ArmCounts, ...]:
    """Of everything that ran, the held back batches included."""
    return (*seen.counts, *seen.held_back)


def _account(seen: _Seen, now: Observations) -> None:
    """Add what happened since the last pull. Counters of old epochs may have been dropped, so only growth counts."""
    earlier = seen.observations
    if earlier is not None and earlier.boot_id != now.boot_id:
        earlier = None
    before = {} if earlier is None else {(c.epoch, c.arm): c for c in _all_counts(earlier)}
    _, requests, busy, came = seen.work[-1] if seen.work else _Work(now.now)
    if seen.work:
        answered = requests
        for count in _all_counts(now):
            last = before.get((count.epoch, count.arm))
            requests += max(0, count.requests - (last.requests if last else 0))
            busy += max(0.0, count.busy_seconds - (last.busy_seconds if last else 0.0))
        busy += max(0.0, now.other_seconds - (0.0 if earlier is None else earlier.other_seconds))
        came += requests - answered + _refused(earlier, now)
    if seen.work and now.now <= seen.work[-1].at:
        seen.work[-1] = _Work(seen.work[-1].at, requests, busy, came)
    else:
        _note_work(seen, _Work(now.now, requests, busy, came))


def _refused(before: Observations | None, now: Observations) -> float:
    """Rows that one process refused since the last pull, as far as they count."""
    if before is None:
        return 0.0
    seconds = max(0.0, now.now - before.now) + 1.0  # its answer takes some time
    return min(max(0, now.refused - before.refused), MOST_REFUSED * seconds)


def _note_work(seen: _Seen, work: _Work) -> None:
    seen.work.append(work)
    while len(seen.work) > 2 and seen.work[1].at <= work.at - LOAD_WINDOW_SECONDS:
        del seen.work[0]


def _figures(observations: Observations) -> tuple[object, ...]:
    """What a decision may use, records aside."""
    return observations.counts, observations.held_back, observations.plans, observations.refused


def _rested(seen: _Seen, now: float) -> None:
    """Nothing was done since the last pull: that, too, is part of the load."""
    if seen.work and now > seen.work[-1].at:
        _note_work(seen, seen.work[-1]._replace(at=now))


def _load(memory: _ServiceMemory, now: float, clock: float) -> Load:
    """Rates over the last pulls (about ten seconds of them, so that two pulls in a row do not make noise), and their
    peak."""
    rates, coming = list[float](), list[float]()
    shares = defaultdict[bool, list[float]](list)  # of workers at the edge, and of the others
    for seen in memory.seen.values():
        if len(seen.work) >= 2:
            first, last = seen.work[0], seen.work[-1]
            seconds = last.at - first.at
            rates.append((last.requests - first.requests) / seconds)
            at_edge = seen.state is not None and seen.state.at_edge
            shares[at_edge].append(min(1.0, (last.busy - first.busy) / seconds))
            if seconds >= LOAD_WINDOW_SECONDS / 2:
                coming.append((last.came - first.came) / seconds)
    if coming:
        memory.peak_rate.note(sum(coming), now)
        if memory.keeps_windows and (
            not memory.windows or abs(clock - memory.windows[-1].ended_at) >= LOAD_WINDOW_SECONDS
        ):
            memory.windows.append(Window(ended_at=clock, seconds=LOAD_WINDOW_SECONDS, rate=sum(coming)))
            del memory.windows[:-MOST_WINDOWS]
    peak, windows = memory.peak_rate.highest(now), tuple(memory.windows)
    if not rates:
        return Load(peak_rate=peak, windows=windows)
    return Load(sum(rates), max(map(fmean, shares.values())), peak, windows)


def _records(
    memory: _ServiceMemory, workers: Sequence[Worker], leading: Sequence[Worker]
) -> tuple[RecordStore | None, Mapping[str, RecordStore]]:
    """The records of the bundle that most current workers of the ``leading`` ones serve: by its own ramp set, and by
    others that are held."""
    state = _leading_state(leading)
    if state is None:
        return None, {}
    served = {key for worker in workers if worker.state is not None for key in _held(worker.state)}
    for stale in [key for key in memory.pools if key not in served]:
        del memory.pools[stale]
        memory.stores.pop(stale, None)
    stores = {
        key.ramp_set_digest: store for key in _held(state) if (store := _store_of(memory, key, state)) is not None
    }
    own = stores.pop(state.ramp_set_digest, None)
    return own, stores


def _store_of(memory: _ServiceMemory, key: RampSetKey, state: WorkerState) -> RecordStore | None:
    """The pool of a ramp set as records, made anew only where something is new."""
    pool = memory.pools.get(key)
    if pool is None or len(pool) == 0:
        return None
    made_of = (pool.version, hash(str(state.costs)))
    known = memory.stores.get(key)
    if known is None or known[0] != made_of:
        known = memory.stores[key] = (made_of, _store(pool, state, key.ramp_set_digest))
    return known[1]


def _leading_state(workers: Sequence[Worker]) -> WorkerState | None:
    states = [w.state for w in workers if w.state is not None and w.state.ramps and w.endpoint.current]
    states = states or [w.state for w in workers if w.state is not None and w.state.ramps]
    if not states:
        return None
    leader, _ = Counter(_set_of(state) for state in states).most_common(1)[0]
    return next(state for state in states if _set_of(state) == leader)


def _store(pool: RecordPool, state: WorkerState, ramp_set: str) -> RecordStore | None:
    arrays: dict[str, Any] = {**pool.columns(), **column_arrays(state.ramps)}
    try:
        costs = {name: np.asarray(values, dtype=np.float64) for name, values in state.costs.items()}
        records = records_from_arrays({**arrays, **costs})
    except (InvalidRecordsError, ValueError) as error:
        message = f"{state.uid} reports costs that do not fit its ramps: {error}"
        log_event("records-dropped", message, level=logging.WARNING)
        return None
    return RecordStore(
        records=records,
        ramp_ids=records.ramp_ids,
        backbone_digest=state.backbone_digest,
        ramp_set_digest=ramp_set,
        ahead=pool.ahead(),
    )
