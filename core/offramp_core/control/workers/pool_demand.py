"""What the pools of a service are planned for: the recent past, and the same time of earlier days."""

from __future__ import annotations

from zlib import crc32

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Load
from offramp_core.fleet import OFTEN, EarlierDays, Usual, expected_rate, next_days, predicted_rate

RECENT_SECONDS = 60.0


def asked_days(service: Service, load: Load, now: float) -> EarlierDays:
    """What is remembered of earlier days, where workers are planned."""
    pools = service.spec.pools
    if not pools or pools[0].max_workers is None:
        return EarlierDays()
    return next_days(service.status.asked, load.windows, now=now, spread=crc32(service.uid.encode()))


def demand_of(load: Load, now: float, *, lead_seconds: float) -> float:
    """Requests per second that the recent past lets expect: by the time that a new worker answers, or the most that
    came in ten seconds of the last minute."""
    newest = (w.rate for w in load.windows if abs(now - w.ended_at) < RECENT_SECONDS)  # a clock may be set back
    return max(predicted_rate(load.windows, now=now, lead_seconds=lead_seconds), max(newest, default=0.0))


def as_usual(usual: Usual, recent: float) -> str:
    """Why more is planned for than the recent past asks, for people; empty where it is not."""
    if expected_rate(recent, usual) == recent:
        return ""
    return f"{usual.rate:.3g} requests/s are expected, as came at this time on {OFTEN} of {usual.days} earlier days"
