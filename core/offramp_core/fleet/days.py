"""What came in each five minutes of the last seven days: a text that a status can hold, and what follows from it.

A process remembers the windows of its last hour. What came on earlier days has to outlast it, and to be written seldom:
once an hour the highest rate of each five minutes is added, in one byte. A slot of which less than half was seen is
unknown. Slots stand relative to the end of the newest one, so each service may begin its own at another second, and not
all of a fleet are written at once.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offramp_core.fleet.forecast import DAY_SECONDS, DAYS, DEVIATIONS, HOUR_SECONDS, RISE, Window, often

SLOT_SECONDS = 300.0
SLOTS_A_DAY = int(DAY_SECONDS / SLOT_SECONDS)
MOST_SLOTS = DAYS * SLOTS_A_DAY
#: Between two polls of a service that nobody asks pass at most so many seconds: what a window speaks for.
POLL_SECONDS = 60.0
WINDOW_SECONDS = 10.0  # in which a rate was counted
LEAST_SEEN = 0.5  # of a slot, in polls
UNKNOWN, NOTHING, FIRST, LAST = 0, 1, 2, 255  # what a byte says; from FIRST on it is a rate
LEAST_RATE, RATIO = 0.01, 1.08  # of a byte, and from one byte to the next
FURTHEST = 2.0**40  # seconds since the epoch: a time beyond it is none


@dataclass(frozen=True, slots=True)
class EarlierDays:
    """The highest rate of each slot, the newest last, in base64; the newest ends at ``until_at``."""

    until_at: float = 0.0
    slots: str = ""


@dataclass(frozen=True, slots=True)
class Usual:
    """Requests per second that came at a time on three of the ``days`` of which it is known, or more; 0 where
    they are fewer."""

    rate: float = 0.0
    days: int = 0


def usual_rate(known: EarlierDays, *, now: float, lead_seconds: float) -> Usual:
    """Of the highest slot of each day that overlaps the ``lead_seconds`` after this time of the day: what was reached
    as often as has to be expected, so that two special days move nothing."""
    slots, found = _slots(known), list[float]()
    if not slots:
        return Usual()
    for day in range(1, DAYS + 1):
        begin = (now - day * DAY_SECONDS - known.until_at) / SLOT_SECONDS + len(slots)
        end = max(math.ceil(begin + lead_seconds / SLOT_SECONDS), math.floor(begin) + 1)
        there = slots[max(math.floor(begin), 0) : max(end, 0)]
        if any(there):
            found.append(_rate(max(there)))
    return Usual(often(found), len(found))


def expected_rate(recent: float, usual: Usual) -> float:
    """What to plan for where the recent past lets expect ``recent``: what usually comes counts where it is a rise, and
    not where it may be chance. The highest of many windows is always a little above the others."""
    chance = DEVIATIONS * math.sqrt(recent / WINDOW_SECONDS)
    return usual.rate if usual.rate > max(RISE * recent, recent + chance) else recent


def next_days(known: EarlierDays, windows: Sequence[Window], *, now: float, spread: int) -> EarlierDays:
    """What is remembered from now on: the same but once an hour, and where nothing new is known.

    ``spread`` is any number of the service's own: it says when within an hour its turn is. A clock that was set back
    takes with it what ends after now, as nobody knows of which time that is. What is older than seven days goes.
    """
    slots, until = _slots(known), known.until_at
    if slots and until > now + SLOT_SECONDS:
        gone = math.ceil((until - now) / SLOT_SECONDS)
        return _packed(slots[:-gone], until - gone * SLOT_SECONDS)
    if slots and now < until + HOUR_SECONDS:
        return known
    begin = until if slots else _begin(windows, now, spread)
    if begin is None:
        return known
    count = math.floor((now - begin) / SLOT_SECONDS)
    new = _seen(windows, begin, count)
    if not new:
        return known
    end = max(new) + 1
    between = bytes(new.get(slot, UNKNOWN) for slot in range(max(0, end - MOST_SLOTS), end))
    return _packed(slots + between, begin + end * SLOT_SECONDS)


def _packed(slots: bytes, until: float) -> EarlierDays:
    """The last seven days of it."""
    text = slots[-MOST_SLOTS:].lstrip(bytes([UNKNOWN]))
    return EarlierDays(until, base64.b64encode(text).decode()) if text else EarlierDays()


def _slots(known: EarlierDays) -> bytes:
    """Of what may be damaged: nothing where it is."""
    if not abs(known.until_at) < FURTHEST:
        return b""
    try:
        return base64.b64decode(known.slots, validate=True)[-MOST_SLOTS:]
    except (binascii.Error, ValueError):
        return b""


def _begin(windows: Sequence[Window], now: float, spread: int) -> float | None:
    """Of the first slot of a service, once its turn of the hour has come since it was first looked at."""
    first = min((w.ended_at - w.seconds for w in windows if w.ended_at <= now), default=now)
    phase = spread % HOUR_SECONDS
    turn = now - (now - phase) % HOUR_SECONDS
    if first > turn - SLOT_SECONDS:
        return None
    return turn - math.floor((turn - first) / SLOT_SECONDS) * SLOT_SECONDS


def _seen(windows: Iterable[Window], begin: float, count: int) -> dict[int, int]:
    """The byte of each slot from ``begin`` on that was seen."""
    highest, polls = defaultdict[int, float](float), defaultdict[int, set[int]](set)
    for w in windows:
        slot = math.ceil((w.ended_at - begin) / SLOT_SECONDS) - 1
        if 0 <= slot < count:
            highest[slot] = max(highest[slot], w.rate)
            polls[slot].add(int(w.ended_at // POLL_SECONDS))
    enough = LEAST_SEEN * SLOT_SECONDS / POLL_SECONDS
    return {slot: _byte(rate) for slot, rate in highest.items() if len(polls[slot]) >= enough}


def _byte(rate: float) -> int:
    if rate < LEAST_RATE / 2:
        return NOTHING
    return min(max(FIRST + round(math.log(rate / LEAST_RATE, RATIO)), FIRST), LAST)


def _rate(byte: int) -> float:
    return LEAST_RATE * RATIO ** (byte - FIRST) if byte >= FIRST else 0.0
