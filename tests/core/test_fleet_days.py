"""What is remembered of earlier days: what follows from it, what it weighs, and what a clock may do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offramp_core.control.codec import from_json, to_json
from offramp_core.control.objects import ServiceStatus
from offramp_core.fleet import DAY_SECONDS, EarlierDays, Usual, Window, expected_rate, next_days, usual_rate
from offramp_core.fleet.days import MOST_SLOTS, RATIO, SLOT_SECONDS

BEGIN = 20_000 * DAY_SECONDS
NOTHING = EarlierDays()
Rate = Callable[[float], float]  # by the second of the day


def peak_at(second: float, seconds: float, *, high: float = 100.0, low: float = 10.0) -> Rate:
    return lambda at: high if second <= at < second + seconds else low


def watched(
    known: EarlierDays, rate: Rate, *, begin: float, hours: float, every: float = 30.0, spread: int = 77
) -> tuple[EarlierDays, int]:
    """What an operator knows after so many hours of looking, and how often it was written. It remembers windows of an
    hour itself."""
    windows, writes = deque[Window](maxlen=int(3600 / every)), 0
    for i in range(int(hours * 3600 / every)):
        now = begin + i * every
        windows.append(Window(ended_at=now, seconds=10.0, rate=rate(now % DAY_SECONDS)))
        after = next_days(known, windows, now=now, spread=spread)
        known, writes = after, writes + (after != known)
    return known, writes


def test_what_came_at_this_time_on_three_days_is_expected_and_not_what_came_on_two() -> None:
    known, noon = NOTHING, BEGIN + DAY_SECONDS / 2
    second = noon % DAY_SECONDS
    for day in range(1, 5):
        known, _ = watched(known, peak_at(second, 600.0), begin=BEGIN + (day - 1) * DAY_SECONDS, hours=24)
        before = usual_rate(known, now=noon + day * DAY_SECONDS - 20.0, lead_seconds=30.0)
        assert before.days == min(day, 7)
        assert before.rate == (0.0 if day < 3 else pytest.approx(100.0, rel=RATIO - 1)), day
    quiet = usual_rate(known, now=noon + 4 * DAY_SECONDS + 3600.0, lead_seconds=30.0)
    assert quiet.rate == pytest.approx(10.0, rel=RATIO - 1)


def test_a_week_is_written_once_an_hour_and_is_small() -> None:
    known, writes = watched(NOTHING, peak_at(0.0, 60.0), begin=BEGIN, hours=9 * 24)
    assert writes <= 9 * 24 and len(known.slots) == math.ceil(MOST_SLOTS / 3) * 4 < 2700
    status = ServiceStatus(asked=known)
    assert from_json(ServiceStatus, to_json(status)) == status, "it survives the process in the status"


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 7200.0))
def test_services_of_one_fleet_take_turns_within_the_hour(spread: int, begin: float) -> None:
    known, writes = watched(NOTHING, lambda _: 5.0, begin=BEGIN + begin, hours=3, spread=spread)
    assert known != NOTHING and writes <= 4, "the first slot waits for no turn"
    since = (known.until_at - spread) % SLOT_SECONDS
    assert min(since, SLOT_SECONDS - since) < 1e-6, "slots of each begin at a second of its own"


def test_what_nobody_saw_is_unknown_and_no_silence() -> None:
    known, _ = watched(NOTHING, lambda _: 50.0, begin=BEGIN, hours=12)
    known, _ = watched(known, lambda _: 50.0, begin=BEGIN + 18 * 3600.0, hours=6)
    seen = [usual_rate(known, now=BEGIN + DAY_SECONDS + h * 3600.0, lead_seconds=30.0).days for h in (6, 15, 21)]
    assert seen == [1, 0, 1]


def test_a_clock_that_was_ahead_takes_only_what_it_wrote_with_it() -> None:
    known, _ = watched(NOTHING, lambda _: 50.0, begin=BEGIN, hours=24)
    end = BEGIN + DAY_SECONDS
    ahead, _ = watched(known, lambda _: 900.0, begin=end + 6 * 3600.0, hours=2)
    back, writes = watched(ahead, lambda _: 50.0, begin=end, hours=3)
    assert writes <= 4
    again = [usual_rate(back, now=end + h * 3600.0, lead_seconds=30.0).days for h in (4.0, 12.0, 22.0)]
    assert again == [1, 1, 1], "the day before stays"
    later = usual_rate(back, now=end + DAY_SECONDS + 7 * 3600.0, lead_seconds=30.0)
    assert later.days == 1, "nothing of the hours that never were"


@pytest.mark.parametrize("back", [8 * 3600.0, 8 * DAY_SECONDS, BEGIN + DAY_SECONDS])
def test_one_look_at_a_clock_that_is_behind_forgets_nothing(back: float) -> None:
    known, _ = watched(NOTHING, lambda _: 50.0, begin=BEGIN, hours=24)
    now = BEGIN + DAY_SECONDS - back
    assert next_days(known, [Window(ended_at=now, seconds=10.0, rate=50.0)], now=now, spread=77) == known
    assert next_days(known, [], now=now, spread=77) == known


@pytest.mark.parametrize("period", [10.0, 600.0, 1800.0])
def test_a_clock_that_jumps_to_and_fro_is_written_once_an_hour(period: float) -> None:
    known, windows, writes = NOTHING, deque[Window](maxlen=360), 0
    for i in range(6 * 360):
        ahead = 7200.0 if (10.0 * i) // period % 2 else 0.0
        now = BEGIN + 10.0 * i + ahead
        windows.append(Window(ended_at=now, seconds=10.0, rate=50.0))
        after = next_days(known, windows, now=now, spread=77)
        known, writes = after, writes + (after != known)
    assert writes <= 7


@given(st.integers(0, 3599), st.floats(15.0, 60.0))
@settings(deadline=None, max_examples=20)
def test_an_operator_that_restarts_again_and_again_learns(spread: int, minutes: float) -> None:
    known, _ = watched(NOTHING, lambda _: 50.0, begin=BEGIN, hours=minutes / 60, spread=spread)
    assert known != NOTHING


def test_a_single_window_is_no_evidence_however_high() -> None:
    known, noon = NOTHING, 12 * 3600.0
    for day in range(4):
        known, _ = watched(known, peak_at(noon, 30.0, high=1e6), begin=BEGIN + day * DAY_SECONDS, hours=24)
    usual = usual_rate(known, now=BEGIN + 4 * DAY_SECONDS + noon, lead_seconds=30.0)
    assert usual == Usual(pytest.approx(10.0, rel=RATIO - 1), 4)


@given(st.floats(-30 * DAY_SECONDS, 30 * DAY_SECONDS))
def test_whatever_the_clock_does_it_learns_again_within_hours(jump: float) -> None:
    known, _ = watched(NOTHING, lambda _: 50.0, begin=BEGIN, hours=6)
    begin = BEGIN + 6 * 3600.0 + jump
    known, _ = watched(known, lambda _: 20.0, begin=begin, hours=6)
    assert begin + 4.5 * 3600.0 <= known.until_at <= begin + 6 * 3600.0
    assert len(known.slots) <= math.ceil(MOST_SLOTS / 3) * 4
    assert usual_rate(known, now=begin + 3 * 3600.0 + DAY_SECONDS, lead_seconds=30.0).days >= 1


@pytest.mark.parametrize(
    "odd",
    [
        EarlierDays(BEGIN, "no base64!"),
        EarlierDays(BEGIN, "AAA"),
        EarlierDays(math.nan, "ZGRk"),
        EarlierDays(math.inf, "ZGRk"),
        EarlierDays(1e300, "ZGRk"),
        EarlierDays(BEGIN, "é"),
    ],
)
def test_what_is_damaged_is_nothing_and_begins_anew(odd: EarlierDays) -> None:
    assert usual_rate(odd, now=BEGIN, lead_seconds=30.0) == Usual()
    known, _ = watched(odd, lambda _: 5.0, begin=BEGIN, hours=3)
    assert usual_rate(known, now=BEGIN + DAY_SECONDS + 7200.0, lead_seconds=30.0).days == 1


@given(st.floats(0.05, 1e5), st.lists(st.floats(0.91, 1.09), min_size=3, max_size=7))
def test_days_that_differ_by_noise_of_a_tenth_add_nothing(rate: float, days: Iterable[float]) -> None:
    highest = sorted((rate * day for day in days), reverse=True)
    assert expected_rate(rate, Usual(highest[2], len(highest))) == rate


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_a_rise_counts_whole_and_never_lowers(recent: float, usual: float) -> None:
    expected = expected_rate(recent, Usual(usual, 7))
    assert expected in (recent, usual) and expected >= recent
    if usual > 2 * recent + 3.0:
        assert expected == usual


@given(st.lists(st.floats(0.9, 1.1), min_size=2), st.floats(1.0, 1e5), st.floats(1.0, 3.0))
@example([0.90625, 1.09375, 0.90625], 19.0, 1.1875)
def test_what_is_planned_for_does_not_go_to_and_fro(noise: list[float], rate: float, more: float) -> None:
    usual, begun, turns = Usual(rate * more, 3), False, 0
    for part in noise:
        expects = expected_rate(rate * part, usual, begun=begun) > rate * part
        begun, turns = expects, turns + (expects != begun)
    assert turns <= 2


def test_what_has_come_is_expected_no_longer() -> None:
    usual = Usual(111.0, 3)
    assert expected_rate(90.0, usual) == 90.0, "it is no rise"
    assert expected_rate(90.0, usual, begun=True) == 111.0, "and no reason to take workers away"
    assert expected_rate(105.0, usual, begun=True) == 105.0


@given(st.floats(0.01, 1e6))
def test_a_rate_is_told_to_within_four_percent(rate: float) -> None:
    known = NOTHING
    for day in range(3):
        known, _ = watched(known, lambda _: rate, begin=BEGIN + day * DAY_SECONDS, hours=3)
    found = usual_rate(known, now=BEGIN + 3 * DAY_SECONDS + 5400.0, lead_seconds=30.0)
    assert found == Usual(pytest.approx(rate, rel=math.sqrt(RATIO) - 1 + 1e-9), 3)
