"""What the pools of a service are planned for: the recent past, and the same time of earlier days."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Load
from offramp_core.fleet import OFTEN, EarlierDays, Usual, expected_rate, next_days, predicted_rate, usual_rate

RECENT_SECONDS = 60.0


def asked_days(service: Service, load: Load, now: float) -> EarlierDays:
    """What is remembered of earlier days, where workers are planned. Pools that are not planned now learn nothing and
    forget nothing."""
    pools = service.spec.pools
    if not pools:
        return EarlierDays()
    if pools[0].max_workers is None:
        return service.status.asked
    return next_days(service.status.asked, load.windows, now=now, spread=crc32(service.uid.encode()))


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Requests per second: what the recent past lets expect, what usually comes, and what to plan for."""

    recent: float
    usual: Usual
    rate: float

    @property
    def expected(self) -> bool:
        """Whether more is planned for than the recent past asks."""
        return self.rate > self.recent

    @property
    def reason(self) -> str:
        """Why, for people; empty where it is not."""
        if not self.expected:
            return ""
        days = f"{OFTEN} of {self.usual.days} earlier days"
        return f"{self.usual.rate:.3g} requests/s are expected, as came at this time on {days}"


def foreseen(service: Service, load: Load, *, now: float, lead_seconds: float) -> Foreseen:
    """What a service is planned for; what its plan expected before counts as :func:`expected_rate` says."""
    recent = demand_of(load, now, lead_seconds=lead_seconds)
    usual = usual_rate(service.status.asked, now=now, lead_seconds=lead_seconds)
    begun = service.status.pool_plan.expected > 0
    return Foreseen(recent, usual, expected_rate(recent, usual, begun=begun))


def demand_of(load: Load, now: float, *, lead_seconds: float) -> float:
    """Requests per second that the recent past lets expect: by the time that a new worker answers, or the most that
    came in ten seconds of the last minute."""
    newest = (w.rate for w in load.windows if abs(now - w.ended_at) < RECENT_SECONDS)  # a clock may be set back
    return max(predicted_rate(load.windows, now=now, lead_seconds=lead_seconds), max(newest, default=0.0))
