"""Leader election on a ``coordination.k8s.io`` Lease: one process acts, the others stand by.

Clocks of different machines are never compared: whether the holder is alive is judged by when *this* process last
saw the Lease change, on a clock that never jumps. A leader that cannot renew stops before the others may take over,
because its deadline is shorter than the Lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from offramp_core.errors import OfframpError
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import LEASE, Object, made
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ConflictError

WEB_ANNOTATION = "earlyexit.dev/web"
RELEASE_TRIES = 3


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Which Lease, who we are, and how long things last. ``duration`` > ``renew_deadline`` > ``retry``.

    ``web_url`` is where this process shows its page to the others, empty where it does not; the Lease tells it while we
    lead.
    """

    namespace: str
    name: str
    identity: str
    duration_seconds: int = 15
    renew_deadline_seconds: float = 10.0
    retry_seconds: float = 2.0
    web_url: str = ""


class LeaderElector:
    """Holds or awaits the Lease.

    Parameters
    ----------
    client : KubeClient
        Of its own, so that renewals never wait behind other calls.
    clock, monotonic : callable
        Seconds since the epoch (only written for people); seconds that never jump.
    jitter : callable
        Random numbers in [0, 1); spreads the attempts of standbys.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: LeaseSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float],
    ) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._jitter = jitter
        self._seen: Object = {}
        self._own: Object | None = None  # the Lease as our last write left it
        self._leaders_page = ""
        self._seen_at = 0.0
        self._renewed_at: float | None = None
        self._free_since: float | None = None

    def holds(self) -> bool:
        """Whether this process may act now. False as soon as a renewal is overdue, noticed or not."""
        return (
            self._renewed_at is not None
            and self._monotonic() - self._renewed_at < self._settings.renew_deadline_seconds
        )

    @property
    def leader(self) -> tuple[str, str]:
        """Who led when the Lease was last read, and the address of its page; each may be empty."""
        return str(self._seen.get("holderIdentity") or ""), self._leaders_page

    async def acquire(self) -> None:
        """Wait until this process leads."""
        while not await self.attempt():
            await asyncio.sleep(self._settings.retry_seconds * (1.0 + 0.2 * self._jitter()))

    async def attempt(self, *, free_seconds: float = 0.0) -> bool:
        """Take the Lease if nobody holds it and nobody has for ``free_seconds``; whether this process leads now."""
        if not await self._try(free_seconds=free_seconds):
            return False
        log_event(
            "leading", f"{self._settings.identity} leads", lease=f"{self._settings.namespace}/{self._settings.name}"
        )
        return True

    async def keep(self) -> None:
        """Renew for as long as that works; returns when the leadership is lost."""
        while True:
            await asyncio.sleep(self._settings.retry_seconds)
            renewed = await self._try_before_deadline()
            if not self.holds():
                break
            if not renewed and self._seen.get("holderIdentity") != self._settings.identity:
                break  # another one holds it: the deadline need not be waited for
        self._renewed_at = self._own = None
        log_event("leadership-lost", f"{self._settings.identity} could not renew its Lease", level=logging.ERROR)

    async def release(self) -> None:
        """Let a standby take over at once. Call it when nothing acts any more."""
        held, self._renewed_at, self._own = self._renewed_at is not None, None, None
        if not held:
            return
        why = "others write it again and again"
        for _ in range(RELEASE_TRIES):
            try:
                if await self._let_go():
                    return
            except OfframpError as error:
                why = str(error)
                break
        log_event("leadership-not-released", f"standbys wait until it ends: {why}", level=logging.WARNING)

    async def _let_go(self) -> bool:
        """Whether the Lease is another's now, or nobody's. A renewal that was under way when it was called off may come
        in between."""
        lease = await self._client.get(LEASE, self._settings.namespace, self._settings.name)
        if lease is None or lease["spec"].get("holderIdentity") != self._settings.identity:
            return True
        lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._now()}
        with contextlib.suppress(ConflictError):
            await self._client.replace(LEASE, lease)
            log_event("leadership-released", f"{self._settings.identity} released its Lease")
            return True
        return False

    async def _try_before_deadline(self) -> bool:
        """A call that hangs must not outlast the leadership."""
        assert self._renewed_at is not None
        left = self._renewed_at + self._settings.renew_deadline_seconds - self._monotonic()
        try:
            async with asyncio.timeout(max(0.0, left)):
                return await self._try()
        except TimeoutError:
            return False

    async def _try(self, *, free_seconds: float = 0.0) -> bool:
        """Take or renew the Lease; False when that did not work this time."""
        started_at = self._monotonic()  # counted from before the request: the answer may have taken long
        try:
            taken = await self._take(free_seconds)
        except ConflictError:
            return False
        except OfframpError as error:
            log_event("lease-error", str(error), level=logging.WARNING)
            return False
        if taken:
            self._renewed_at = started_at
        return taken

    async def _take(self, free_seconds: float) -> bool:
        own, self._own = self._own, None
        if own is not None:
            with contextlib.suppress(ConflictError):  # somebody wrote since: read what
                await self._write(own, own["spec"])
                return True
        settings = self._settings
        lease = await self._client.get(LEASE, settings.namespace, settings.name)
        if lease is None:
            if not self._free_for(free_seconds):
                return False
            self._wrote(await self._client.create(LEASE, self._new_lease()))
            return True
        self._observe(lease)
        spec: dict[str, Any] = lease.get("spec") or {}
        mine = spec.get("holderIdentity") == settings.identity
        if not mine and not self._expired(spec):
            self._free_since = None
            return False
        if not mine and not self._free_for(free_seconds):
            return False
        if not mine:
            spec = spec | {"acquireTime": self._now(), "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        metadata = lease["metadata"] if mine else self._with_page(lease["metadata"])
        await self._write(lease | {"metadata": metadata}, spec)
        return True

    async def _write(self, lease: Object, spec: Object) -> None:
        """Hold it from now on, unless somebody wrote the Lease after ``lease``."""
        ours = {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": self._settings.duration_seconds,
            "renewTime": self._now(),
        }
        self._wrote(await self._client.replace(LEASE, lease | {"spec": spec | ours}))

    def _wrote(self, lease: Object) -> None:
        """Renewals begin from what we wrote last, as client-go's do: half of what an idle operator asks of the API
        server."""
        self._observe(lease)
        self._own = lease

    def _with_page(self, metadata: Object) -> Object:
        """Metadata that tells our page and not that of the leader before."""
        others = {name: text for name, text in (metadata.get("annotations") or {}).items() if name != WEB_ANNOTATION}
        own = {WEB_ANNOTATION: self._settings.web_url} if self._settings.web_url else {}
        return metadata | {"annotations": others | own}

    def _observe(self, lease: Object) -> None:
        """Note when the Lease was last seen to change."""
        spec = lease.get("spec") or {}
        self._leaders_page = str((lease["metadata"].get("annotations") or {}).get(WEB_ANNOTATION) or "")
        if spec != self._seen:
            self._seen, self._seen_at = spec, self._monotonic()

    def _expired(self, spec: Object) -> bool:
        if not spec.get("holderIdentity"):
            return True
        duration = float(spec.get("leaseDurationSeconds") or self._settings.duration_seconds)
        return self._monotonic() - self._seen_at >= duration

    def _free_for(self, seconds: float) -> bool:
        """Whether the Lease, free now, has been so for a while, as far as this process has looked."""
        if self._free_since is None:
            self._free_since = self._monotonic()
        return self._monotonic() - self._free_since >= seconds

    def _new_lease(self) -> Object:
        settings = self._settings
        about = self._with_page({"name": settings.name, "namespace": settings.namespace})
        spec = {
            "holderIdentity": settings.identity,
            "leaseDurationSeconds": settings.duration_seconds,
            "acquireTime": self._now(),
            "renewTime": self._now(),
            "leaseTransitions": 0,
        }
        return made(LEASE, metadata=about, spec=spec)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
