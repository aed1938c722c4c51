"""Pull every worker's admin port and pool what they saw.

A worker that does not answer is never an error here: its last report stands for a while, then it counts as
silent. Nothing in this module decides anything; what it remembers can be lost at any time, because workers
keep cumulative counters and a ring of records that a fresh observer reads from the start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from offramp_core.bundle import column_arrays
from offramp_core.control.snapshot import Load, RecordStore, Worker
from offramp_core.errors import InvalidRecordsError, UnavailableError
from offramp_core.protocol import Observations, SignedDocument, WorkerState
from offramp_core.records import records_from_arrays
from offramp_operator.shell import wire
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey, WorkerEndpoint
from offramp_operator.shell.record_pool import RampSetKey, RecordPool

MAX_PAGES = 8  # 40,000 rows: twice what is kept, so that one pass catches up whatever was missed
FAILURES_UNTIL_SILENT = 3
SECONDS_UNTIL_SILENT = 10.0
LOAD_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What one round of pulls gives to the snapshot."""

    workers: tuple[Worker, ...] = ()
    records: RecordStore | None = None
    load: Load = field(default_factory=Load)


@dataclass(slots=True)
class _Seen:
    """What is remembered of one worker. ``work`` holds (worker's clock, requests so far, busy seconds so far)."""

    state: WorkerState | None = None
    observations: Observations | None = None
    after: int = 0
    failures: int = 0
    answered_at: float = -math.inf
    work: deque[tuple[float, float, float]] = field(default_factory=deque)
    complaints: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _ServiceMemory:
    seen: dict[str, _Seen] = field(default_factory=dict)
    pools: dict[RampSetKey, RecordPool] = field(default_factory=dict)
    store: RecordStore | None = None
    store_of: tuple[RampSetKey, int, int] | None = None


class Observer:
    """Pulls workers concurrently, each within ``deadline_seconds``.

    Parameters
    ----------
    client : httpx.AsyncClient
        Shared by all services; closed by whoever made it.
    clock, monotonic : callable
        Seconds since the epoch (bounds the times that records claim), and seconds that never jump.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        deadline_seconds: float = 3.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._deadline = deadline_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._services: dict[ServiceKey, _ServiceMemory] = {}

    async def observe(self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], *, token: str) -> Observed:
        """Pull all workers of a service once and pool the answers; never raises for a worker that is dead or talks nonsense."""
        memory = self._services.setdefault(key, _ServiceMemory())
        for gone in set(memory.seen) - {endpoint.uid for endpoint in endpoints}:
            del memory.seen[gone]
        await asyncio.gather(*(self._pull(key, memory, endpoint, token) for endpoint in endpoints))
        workers = tuple(self._worker(endpoint, memory.seen[endpoint.uid]) for endpoint in endpoints)
        return Observed(workers, _records(memory, workers), _load(memory))

    async def poke(
        self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], *, token: str, signed: SignedDocument
    ) -> None:
        """Hand a document to workers right away. A failure is harmless: workers also poll the published copy."""
        body = wire.encode(signed)
        await asyncio.gather(*(self._post(key, endpoint, token, body) for endpoint in endpoints if endpoint.admin_url))

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a service that is gone."""
        self._services.pop(key, None)

    def settled(self, key: ServiceKey) -> bool:
        """Whether every audit that was drawn has been answered, as far as the last pulls say."""
        memory = self._services.get(key, _ServiceMemory())
        reports = [seen.observations for seen in memory.seen.values() if seen.observations is not None]
        return all(count.drawn == count.audited for report in reports for count in report.counts)

    def pools(self, key: ServiceKey) -> Mapping[RampSetKey, RecordPool]:
        """The record pools of a service, for a shell that keeps them over its own restart."""
        return self._services.get(key, _ServiceMemory()).pools

    def restore(self, key: ServiceKey, pools: Mapping[RampSetKey, RecordPool]) -> None:
        """Start a service's memory from kept pools; rows that workers still hold are not added twice."""
        self._services.setdefault(key, _ServiceMemory()).pools.update(pools)

    # --- one worker --------------------------------------------------------------------------------

    async def _pull(self, key: ServiceKey, memory: _ServiceMemory, endpoint: WorkerEndpoint, token: str) -> None:
        seen = memory.seen.setdefault(endpoint.uid, _Seen())
        if endpoint.admin_url is None:
            return
        try:
            async with asyncio.timeout(self._deadline):
                state = wire.decode_state(await self._get(endpoint, "/v1/state", token, {}))
                _check_same(state.uid, endpoint.uid)
                await self._pull_pages(memory, seen, endpoint, state, token)
        except (httpx.HTTPError, httpx.InvalidURL, UnavailableError, TimeoutError) as error:
            seen.failures += 1
            if seen.failures == FAILURES_UNTIL_SILENT and seen.state is not None:
                reason = str(error) or type(error).__name__
                log_event("worker-silent", f"{endpoint.name} does not answer: {reason}",
                          level=logging.WARNING, service=str(key), worker=endpoint.name)  # fmt: skip
            return
        if seen.failures >= FAILURES_UNTIL_SILENT and math.isfinite(seen.answered_at):
            log_event("worker-answers", f"{endpoint.name} answers again", service=str(key), worker=endpoint.name)
        seen.failures, seen.answered_at = 0, self._monotonic()

    async def _pull_pages(
        self, memory: _ServiceMemory, seen: _Seen, endpoint: WorkerEndpoint, state: WorkerState, token: str
    ) -> None:
        if seen.observations is None or seen.observations.boot_id != state.boot_id:
            seen.after = 0
            seen.work.clear()
        for _ in range(MAX_PAGES):
            known = memory.pools.get(_set_of(state))
            after = max(seen.after, known.next_of(state.boot_id) if known else 0)
            query = {"after": str(after), "boot": state.boot_id}
            pulled = wire.decode_observations(await self._get(endpoint, "/v1/observations", token, query))
            _check_same(pulled.uid, endpoint.uid)
            if pulled.boot_id != state.boot_id:
                raise UnavailableError("the worker restarted between two answers")
            _account(seen, pulled)
            seen.state, seen.observations = state, pulled
            n_rows = self._keep_rows(memory, seen, endpoint, state)
            if n_rows < wire.MAX_BLOCK_ROWS:
                return

    def _keep_rows(self, memory: _ServiceMemory, seen: _Seen, endpoint: WorkerEndpoint, state: WorkerState) -> int:
        """Add the rows of the last pull to their pool; returns how many rows the block had (0 when it is unusable)."""
        assert seen.observations is not None
        block = seen.observations.records
        seen.after = max(seen.after, block.next)
        if block.ramp_set_digest != state.ramp_set_digest:
            if block.time:
                _complain(seen, endpoint, f"records of a ramp set it does not serve dropped: {block.ramp_set_digest!r}")
            return 0
        try:
            rows = wire.decode_rows(block, n_ramps=len(state.ramps))
        except InvalidRecordsError as error:
            _complain(seen, endpoint, f"malformed records dropped: {error}")
            return 0
        if len(rows):
            fresh = RecordPool(n_ramps=len(state.ramps), names=column_arrays(state.ramps))
            pool = memory.pools.setdefault(_set_of(state), fresh)
            pool.add(state.boot_id, rows, latest_time=self._clock())
        return len(rows)

    def _worker(self, endpoint: WorkerEndpoint, seen: _Seen) -> Worker:
        silent = seen.failures >= FAILURES_UNTIL_SILENT and self._monotonic() - seen.answered_at > SECONDS_UNTIL_SILENT
        return Worker(
            name=endpoint.name,
            uid=endpoint.uid,
            ready=endpoint.ready,
            current=endpoint.current,
            restarts=endpoint.restarts,
            failure=endpoint.failure,
            failure_reason=endpoint.failure_reason,
            state=None if silent else seen.state,
            # The last counts stay: a process that is slow to answer has not lost the audits it reported.
            observations=seen.observations,
        )

    # --- HTTP --------------------------------------------------------------------------------------

    async def _get(self, endpoint: WorkerEndpoint, path: str, token: str, query: Mapping[str, str]) -> bytes:
        reply = await self._client.get(f"{endpoint.admin_url}{path}", params=query, headers=_bearer(token))
        if reply.status_code != httpx.codes.OK:
            raise UnavailableError(f"GET {path} answered {reply.status_code}")
        return reply.content

    async def _post(self, key: ServiceKey, endpoint: WorkerEndpoint, token: str, body: bytes) -> None:
        headers = {**_bearer(token), "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self._deadline):
                reply = await self._client.post(f"{endpoint.admin_url}/v1/config", content=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            log_event("poke-failed", f"{endpoint.name} was not reached: {reason}", level=logging.DEBUG,
                      service=str(key), worker=endpoint.name)  # fmt: skip
            return
        if reply.status_code != httpx.codes.OK:
            log_event("plan-refused", f"{endpoint.name} refused the plan ({reply.status_code}): {reply.text[:500]}",
                      level=logging.WARNING, service=str(key), worker=endpoint.name)  # fmt: skip


def _check_same(answered: str, wanted: str) -> None:
    """An address may have passed to another worker since the platform told it."""
    if answered != wanted:
        raise UnavailableError(f"worker {answered!r} answers there")


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _set_of(state: WorkerState) -> RampSetKey:
    return RampSetKey(state.backbone_digest, state.ramp_set_digest)


def _complain(seen: _Seen, endpoint: WorkerEndpoint, message: str) -> None:
    """Log a complaint once per worker, as it would repeat with every pull."""
    if message not in seen.complaints and len(seen.complaints) < 100:
        seen.complaints.add(message)
        log_event("records-dropped", f"{endpoint.name}: {message}", level=logging.WARNING, worker=endpoint.name)


# --- pooled figures --------------------------------------------------------------------------------


def _account(seen: _Seen, now: Observations) -> None:
    """Add what happened since the last pull. Counters of old epochs may have been dropped, so only growth counts."""
    before = {} if seen.observations is None or seen.observations.boot_id != now.boot_id else {
        (c.epoch, c.arm): c for c in seen.observations.counts
    }  # fmt: skip
    requests, busy = (seen.work[-1][1], seen.work[-1][2]) if seen.work else (0.0, 0.0)
    if seen.work:
        for count in now.counts:
            last = before.get((count.epoch, count.arm))
            requests += max(0, count.requests - (last.requests if last else 0))
            busy += max(0.0, count.busy_seconds - (last.busy_seconds if last else 0.0))
    if seen.work and now.now <= seen.work[-1][0]:
        seen.work[-1] = (seen.work[-1][0], requests, busy)
    else:
        seen.work.append((now.now, requests, busy))
    while len(seen.work) > 2 and seen.work[1][0] <= now.now - LOAD_WINDOW_SECONDS:
        seen.work.popleft()


def _load(memory: _ServiceMemory) -> Load:
    """Rates over the last pulls (about ten seconds of them, so that two pulls in a row do not make noise)."""
    rates, shares = [], []
    for seen in memory.seen.values():
        if len(seen.work) >= 2:
            (t0, requests0, busy0), (t1, requests1, busy1) = seen.work[0], seen.work[-1]
            rates.append((requests1 - requests0) / (t1 - t0))
            shares.append(min(1.0, (busy1 - busy0) / (t1 - t0)))
    return Load(request_rate=sum(rates), utilisation=sum(shares) / len(shares)) if rates else Load()


def _records(memory: _ServiceMemory, workers: Sequence[Worker]) -> RecordStore | None:
    """The records of the ramp set that most current workers serve."""
    state = _leading_state(workers)
    if state is None:
        return None
    wanted = _set_of(state)
    served = {_set_of(worker.state) for worker in workers if worker.state is not None}
    for stale in [key for key in memory.pools if key not in served]:
        del memory.pools[stale]
    pool = memory.pools.get(wanted)
    if pool is None or len(pool) == 0:
        return None
    made_of = (wanted, pool.version, hash(str(state.costs)))
    if memory.store_of != made_of:
        memory.store, memory.store_of = _store(pool, state), made_of
    return memory.store


def _leading_state(workers: Sequence[Worker]) -> WorkerState | None:
    states = [w.state for w in workers if w.state is not None and w.state.ramps and w.current]
    states = states or [w.state for w in workers if w.state is not None and w.state.ramps]
    if not states:
        return None
    leader, _ = Counter(_set_of(state) for state in states).most_common(1)[0]
    return next(state for state in states if _set_of(state) == leader)


def _store(pool: RecordPool, state: WorkerState) -> RecordStore | None:
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
        ramp_set_digest=state.ramp_set_digest,
    )
