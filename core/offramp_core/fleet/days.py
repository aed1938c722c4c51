"""What came in each five minutes of the last seven days: a text that a status can hold, and what follows from it.

A process remembers the windows of its last hour. What came on earlier days has to outlast it, and to be written seldom:
once an hour the second highest rate of each five minutes is added, in one byte: a single window is no evidence. A slot
of which less than half was seen is unknown. Slots stand relative to the end of the newest one, so each service may
begin its own at another second, and not all of a fleet are written at once.
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
#: What a window speaks for: between two polls of a service, of one that nobody asks as well, pass fewer seconds.
POLL_SECONDS = 60.0
WINDOW_SECONDS = 10.0  # in which a rate was counted
LEAST_SEEN = 0.5  # of a slot, in polls
ROUNDING = 1e-6  # of a slot
LONGEST_GAP = 1800.0  # seconds between windows of one clock; it was set where there are more
REACHED = 1.06  # what was expected has come; noise of a tenth does not lead from here to a rise
UNKNOWN, NOTHING, FIRST, LAST = 0, 1, 2, 255  # what a byte says; from FIRST on it is a rate
LEAST_RATE, RATIO = 0.01, 1.08  # of a byte, and from one byte to the next
FURTHEST = 2.0**40  # seconds since the epoch: a time beyond it is none


@dataclass(frozen=True, slots=True)
class EarlierDays:
    """The second highest rate of each slot, the newest last, in base64; the newest ends at ``until_at``."""

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


def expected_rate(recent: float, usual: Usual, *, begun: bool = False) -> float:
    """What to plan for where the recent past lets expect ``recent``: what usually comes counts where it is a rise, and
    not where it may be chance. The highest of many windows is always a little above the others.

    Once it is planned for (``begun``), it counts until it came or does not usually come any more: a rise that has begun
    takes no workers away, and noise does not change a plan again and again.
    """
    if begun:
        return usual.rate if usual.rate > REACHED * recent else recent
    chance = DEVIATIONS * math.sqrt(recent / WINDOW_SECONDS)
    return usual.rate if usual.rate > max(RISE * recent, recent + chance) else recent


def next_days(known: EarlierDays, windows: Sequence[Window], *, now: float, spread: int) -> EarlierDays:
    """What is remembered from now on: the same but once an hour, and where nothing new is known.

    ``windows`` stand in the order in which they were seen. ``spread`` is any number of the service's own: it says when
    within an hour its turn is; the first slot that was seen whole waits for none. A clock that is behind what is
    remembered changes nothing until it has gone on for an hour; then what it saw takes the place of all that would end
    later, as nobody knows of which time that is. What is older than seven days goes.
    """
    slots, until = _slots(known), known.until_at
    behind, turn = until > now + SLOT_SECONDS, now - (now - spread) % HOUR_SECONDS
    if slots and not behind and until > turn - SLOT_SECONDS / 2:
        return known  # its turn of this hour is over
    seen = _of_one_clock(windows, now)
    if not seen:
        return known
    first = seen[0].ended_at - seen[0].seconds
    if slots and behind:
        if first > now - HOUR_SECONDS + SLOT_SECONDS:
            return known
        gone = math.ceil((until - first) / SLOT_SECONDS)
        slots, until = slots[:-gone], until - gone * SLOT_SECONDS
    begin = until if slots else first + (spread - first) % SLOT_SECONDS
    end = math.floor((now - begin) / SLOT_SECONDS + ROUNDING)
    new = _seen(seen, begin, end)
    if not new:
        return known
    between = bytes(new.get(slot, UNKNOWN) for slot in range(max(0, end - MOST_SLOTS), end))
    return _packed(slots + between, begin + end * SLOT_SECONDS)


def _of_one_clock(windows: Sequence[Window], now: float) -> Sequence[Window]:
    """The newest windows, back to where the clock was set."""
    begin, later = len(windows), now
    for w in reversed(windows):
        if not later - LONGEST_GAP <= w.ended_at <= later:
            break
        begin, later = begin - 1, w.ended_at
    return list(windows)[begin:]


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


def _seen(windows: Iterable[Window], begin: float, count: int) -> dict[int, int]:
    """The byte of each slot from ``begin`` on that was seen."""
    rates, polls = defaultdict[int, list[float]](list), defaultdict[int, set[int]](set)
    for w in windows:
        slot = math.ceil((w.ended_at - begin) / SLOT_SECONDS) - 1
        if 0 <= slot < count:
            rates[slot].append(w.rate)
            polls[slot].add(int(w.ended_at // POLL_SECONDS))
    enough = LEAST_SEEN * SLOT_SECONDS / POLL_SECONDS
    return {slot: _byte(sorted(each)[-2:][0]) for slot, each in rates.items() if len(polls[slot]) >= enough}


def _byte(rate: float) -> int:
    if rate < LEAST_RATE / 2:
        return NOTHING
    return min(max(FIRST + round(math.log(rate / LEAST_RATE, RATIO)), FIRST), LAST)


def _rate(byte: int) -> float:
    return LEAST_RATE * RATIO ** (byte - FIRST) if byte >= FIRST else 0.0
