"""Who answers a request of an edge: it is learned from what both ways took, whatever that is, and costs little."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.edge import Uplink
from offramp_core.edge_relay import (
    EXPLORING,
    FAR,
    FIRST,
    FIRST_HERE,
    LEARNED,
    START_TRIES,
    UNASKED,
    UNUSUAL,
    By,
    Mean,
    Waiting,
    Ways,
)

SIZE = 14_000
seconds = st.floats(1e-5, 2.0)
rates = st.floats(1e4, 1e9)
NOBODY = Waiting()


def run(
    took: Callable[[By, int], float], *, uplink: Uplink, requests: int, waiting: Waiting = NOBODY
) -> tuple[float, list[By]]:
    """Seconds of all requests, and who answered each."""
    ways, total, chosen = Ways(), 0.0, list[By]()
    for number in range(requests):
        by = ways.by(SIZE, waiting, uplink)
        spent = took(by, number)
        ways = ways.after(by, spent, size=SIZE, waiting=waiting, uplink=uplink)
        total += spent
        chosen.append(by)
    return total, chosen


@given(seconds, seconds, rates, st.floats(0.0, 0.1))
def test_the_sooner_way_is_taken_and_the_other_one_costs_no_more_than_its_share_of_the_time(
    edge: float, answering: float, rate: float, round_trip: float
) -> None:
    """Against who knows both times: beyond the first measurements and a few tries at most a share of the time."""
    uplink, n = Uplink(rate, round_trip), 2000
    core = round_trip + answering + SIZE / rate
    total, chosen = run(lambda by, _: edge if by == "Edge" else core, uplink=uplink, requests=n)
    lost = abs(edge - core)
    assert total <= (1 + EXPLORING) * n * min(edge, core) + (FIRST_HERE + START_TRIES + 1) * lost + 1e-9
    if round_trip + SIZE / rate >= edge:
        assert "Core" not in chosen, "an uplink that alone takes longer is not even tried"


def run_unasked(took: Callable[[By, int], float], *, uplink: Uplink, requests: int) -> tuple[float, list[By], int]:
    """As :func:`run`, and how often it was asked: while a way is settled, it is gone without asking, and one request in
    a few is learned from, or one that takes longer than usual, which has as much less weight."""
    ways, total, chosen, asked = Ways(), 0.0, list[By](), 0
    draw, left, usual = random.Random(3), 0, 0.0
    for number in range(requests):
        if left:
            left -= 1
        else:
            by, asked = ways.by(SIZE, NOBODY, uplink), asked + 1
            usual = ways.settled(by, SIZE, uplink) or 0.0
            left = UNASKED if usual else 0
        spent = took(by, number)
        drawn = usual > 0 and draw.random() < 1 / LEARNED
        unusual = usual > 0 and spent >= usual
        if unusual:
            left = 0
        if drawn or unusual or not usual:
            n, share = LEARNED if drawn and not unusual else 1, UNUSUAL if unusual else 1.0
            ways = ways.after(by, spent, size=SIZE, waiting=NOBODY, uplink=uplink, requests=n, share=share)
        total += spent
        chosen.append(by)
    return total, chosen, asked


@given(seconds, seconds, rates, st.floats(0.0, 0.1))
def test_who_goes_on_without_asking_where_one_way_is_the_sooner_one_by_far_takes_no_longer(
    edge: float, answering: float, rate: float, round_trip: float
) -> None:
    uplink, n = Uplink(rate, round_trip), 2000
    core = round_trip + answering + SIZE / rate
    total, _, asked = run_unasked(lambda by, _: edge if by == "Edge" else core, uplink=uplink, requests=n)
    lost = abs(edge - core)
    earned = (1 + EXPLORING) * (n + LEARNED) * min(edge, core)
    assert total <= earned + (FIRST_HERE + START_TRIES + 1) * lost + 1e-9
    if max(edge, core) > FAR * FAR * min(edge, core):
        assert asked <= n / 8, "a slow box is spared that"


def test_who_goes_on_without_asking_leaves_a_way_that_gets_slow_at_once_and_takes_up_one_that_gets_fast() -> None:
    slow = range(2000, 4000)

    def took(by: By, number: int) -> float:
        return 0.005 if by == "Core" else 0.05 if number in slow else 0.002

    _, chosen, _ = run_unasked(took, uplink=Uplink(1e7, 0.001), requests=10_000)
    assert chosen[500:2000].count("Core") <= FIRST
    assert chosen[2100:4000].count("Edge") < 30
    assert chosen[-1000:].count("Core") < 30


@pytest.mark.parametrize("mbit", [1, 10, 100])
@pytest.mark.parametrize("edge_ms", [2.0, 8.0, 11.0, 40.0, 200.0])
def test_over_a_day_of_noise_the_mean_is_that_of_the_sooner_way(mbit: float, edge_ms: float) -> None:
    """One row in five leaves at no exit and takes four times as long; one in two hundred is held up by something
    else."""
    draw = random.Random(7)  # fixed: the bound is that of this stream
    uplink = Uplink(mbit * 1e6 / 8, 0.0005)

    def took(by: By, _: int) -> float:
        noise = draw.lognormvariate(0.0, 0.2) + (20.0 if draw.random() < 0.005 else 0.0)
        if by == "Core":
            return SIZE / uplink.bytes_per_second + 0.001 * noise
        return 1e-3 * edge_ms * noise * (2.5 if draw.random() < 0.2 else 0.625)

    n = 20_000
    means = {by: sum(took(by, 0) for _ in range(n)) / n for by in ("Edge", "Core")}
    total, _ = run(took, uplink=uplink, requests=n)
    tries = START_TRIES * max(means.values())  # of a box that may have been held up from its start
    assert total <= 1.02 * n * min(means.values()) + tries


class Limited:
    """A process with a share of a processor: what it has run beyond its quota of a period, which is noticed at a tick
    of the kernel, it pays in the next periods, in which it is stopped."""

    TICK = 0.004

    def __init__(self, share: float, period: float) -> None:
        self.now, self._quota, self._period, self._left, self._periods = 0.0, share * period, period, 0.0, 0

    def run(self, seconds: float) -> None:
        while seconds > 1e-12:
            periods = int(self.now / self._period + 1e-9)
            self._left = min(self._quota, self._left + (periods - self._periods) * self._quota)
            self._periods = periods
            if self._left <= 0:
                self.now = (periods + 1) * self._period
                continue
            tick = (int(self.now / self.TICK + 1e-9) + 1) * self.TICK - self.now
            spent = min(seconds, tick)
            self.now, self._left, seconds = self.now + spent, self._left - spent, seconds - spent


@pytest.mark.parametrize("period", [0.004, 0.1])
def test_a_box_that_its_limit_stops_hands_on_what_its_core_answers_sooner(period: float) -> None:
    """Whoever comes while the box is stopped is read after that, and it counts for the request before. Exits take 2 ms
    of a processor, and the box has a quarter of one."""
    draw = random.Random(5)  # fixed: the bound is that of this stream
    box, uplink, n, warm_up = Limited(0.25, period), Uplink(12.5e6, 0.0005), 1500, 60
    ways, last, took, total = Ways(), "Edge", 0.0, 0.0
    for number in range(n):
        box.now += 0.0002
        came = box.now
        box.run(1e-5)
        read = box.now
        if number:
            ways = ways.after(last, took + read - came, size=SIZE, waiting=NOBODY, uplink=uplink)
        last = ways.by(SIZE, NOBODY, uplink)
        if last == "Edge":
            box.run(0.0045 if draw.random() < 0.2 else 0.0014)
        else:
            box.run(0.0002)
            box.now += SIZE / uplink.bytes_per_second + 0.001
            box.run(0.0002)
        took = box.now - read
        total += box.now - came if number >= warm_up else 0.0
    assert total <= 1.02 * (n - warm_up) * (SIZE / uplink.bytes_per_second + 0.00141)


def test_a_box_that_gets_slow_hands_on_and_takes_back_when_it_is_fast_again() -> None:
    uplink = Uplink(1e7, 0.001)
    slow = range(1000, 3000)

    def took(by: By, number: int) -> float:
        return 0.005 if by == "Core" else 0.02 if number in slow else 0.002

    _, chosen = run(took, uplink=uplink, requests=8000)
    assert chosen[:1000].count("Core") <= 2 * FIRST
    assert chosen[1100:3000].count("Edge") < 20
    assert chosen[-1000:].count("Core") < 20


@given(seconds, seconds, rates)
def test_who_waits_at_the_edge_goes_to_the_core_sooner_and_bytes_on_the_uplink_keep_requests_here(
    edge: float, core: float, rate: float
) -> None:
    uplink, ways = Uplink(rate), Ways()
    for _ in range(FIRST_HERE):
        ways = ways.after("Edge", edge, size=SIZE, waiting=NOBODY, uplink=uplink)
        ways = ways.after("Core", core + SIZE / rate, size=SIZE, waiting=NOBODY, uplink=uplink)
    ways = ways.after(ways.by(SIZE, NOBODY, uplink), min(edge, core), size=SIZE, waiting=NOBODY, uplink=uplink)
    here, there = edge, core + SIZE / rate
    many = 2 * there / here + 1
    assert ways.by(SIZE, Waiting(at_edge=4 * many), uplink) == "Core"
    assert ways.by(SIZE, Waiting(on_uplink=int(8 * (here + there) * rate) + 1), uplink) == "Edge"


KNOWN = Ways(edge=Mean(0.02, 50), core=Mean(0.002, 500))


@pytest.mark.parametrize("core", [0.0, 0.002])
@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("seconds", [0.1, 0.9])
def test_a_core_that_gets_slow_is_left_within_a_few_requests_whether_or_not_clients_wait_for_it(
    core: float, answered: bool, seconds: float
) -> None:
    """A mean of nothing, where bytes were taken to need longer than they did, rises as well."""
    ways, uplink = Ways(edge=Mean(0.02, 50), core=Mean(core, 500)), Uplink(1e7, 0.001)
    for _ in range(12 if core else 20):
        if ways.by(SIZE, NOBODY, uplink) == "Edge":
            return
        learn = ways.after if answered else ways.at_least
        ways = learn("Core", seconds, size=SIZE, waiting=NOBODY, uplink=uplink)
    raise AssertionError(ways)


def test_what_nobody_waited_for_says_nothing_below_what_was_expected_and_makes_a_way_known_above_it() -> None:
    uplink = Uplink(1e7, 0.001)
    assert KNOWN.at_least("Core", 0.001, size=SIZE, waiting=NOBODY, uplink=uplink) == KNOWN
    assert KNOWN.at_least("Edge", 0.019, size=SIZE, waiting=NOBODY, uplink=uplink) == KNOWN
    ways = Ways()
    for _ in range(FIRST_HERE):
        ways = ways.at_least("Edge", 0.0001, size=SIZE, waiting=NOBODY, uplink=uplink)
        ways = ways.at_least("Edge", 0.2, size=SIZE, waiting=NOBODY, uplink=uplink)
    assert ways.by(SIZE, NOBODY, uplink) == "Core"


def test_a_core_that_recovers_is_used_again_at_the_first_tries_that_show_it() -> None:
    ways, uplink, edge = Ways(edge=Mean(0.02, 50), core=Mean(0.9, 500)), Uplink(1e9, 0.001), 0
    while not ways.core.value < ways.edge.value:
        by = ways.by(SIZE, NOBODY, uplink)
        edge += by == "Edge"
        ways = ways.after(by, 0.002 if by == "Core" else 0.02, size=SIZE, waiting=NOBODY, uplink=uplink)
    assert edge * 0.02 * EXPLORING <= 0.9, "as long as one try has to wait, not all that the mean needs"
    slow = Ways(edge=Mean(0.02, 50), core=Mean(1000.0, 500), avoided=801.0)
    assert slow.by(SIZE, NOBODY, uplink) == "Core", "however slow it was"


@pytest.mark.parametrize("core", [Mean(), Mean(0.002, 50)])
def test_an_uplink_that_was_taken_for_a_fast_one_is_left_after_a_few_requests(core: Mean) -> None:
    """1 Mbit/s, for which sending takes 107 ms, taken for 10 Gbit/s."""
    ways, uplink, sent = Ways(edge=Mean(0.005, 50), core=core), Uplink(1.25e9, 0.0005), 0
    for _ in range(1000):
        by = ways.by(SIZE, NOBODY, uplink)
        sent += by == "Core"
        ways = ways.after(by, 0.107 if by == "Core" else 0.005, size=SIZE, waiting=NOBODY, uplink=uplink)
    assert 0 < sent <= 3


@pytest.mark.parametrize("core", [Mean(), Mean(0.001, 50)])
def test_a_box_that_neighbors_held_up_takes_back_what_it_handed_on_as_soon_as_they_are_gone(core: Mean) -> None:
    """For 2 s each of its requests takes 0.2 s; then 2 ms, and the core 12 ms."""
    uplink, ways, now, late = Uplink(1.25e6, 0.0005), Ways(edge=Mean(0.002, 500), core=core), 0.0, 0.0
    while now < 10.0:
        by = ways.by(SIZE, NOBODY, uplink)
        took = 0.0125 if by == "Core" else 0.2 if now < 2.0 else 0.002
        late += took if by == "Core" and now >= 2.0 else 0.0
        ways, now = ways.after(by, took, size=SIZE, waiting=NOBODY, uplink=uplink), now + took
    assert late < 2.0, "no longer than it was held up"
    assert ways.edge.value < 0.004


def test_what_a_try_has_lost_is_earned_in_time_however_slow_the_box_is_by_then() -> None:
    """A try hung for a second, which 200 s earn. Then the box takes 3 ms in the place of 0.6, and the core 1 in the
    place of 4."""
    uplink, edge, core = Uplink(12.5e6, 0.0005), 0.0006, 0.004
    ways = Ways(edge=Mean(edge, 500), core=Mean(core, 500)).after("Core", 1.0, size=600, waiting=NOBODY, uplink=uplink)
    spent, edge, core = 0.0, 0.003, 0.001
    while ways.by(600, NOBODY, uplink) == "Edge":
        ways, spent = ways.after("Edge", edge, size=600, waiting=NOBODY, uplink=uplink), spent + edge
    assert 199 < spent < 202


@pytest.mark.parametrize("in_line", [1, 4, 8, 32])
def test_a_box_that_was_held_up_with_requests_in_line_is_tried_soon_after_they_are_answered(in_line: int) -> None:
    """What was in line when it was left is no try: it was held up with the others."""
    uplink, ways, edge, core = Uplink(12.5e6, 0.0005), Ways(edge=Mean(0.004, 500), core=Mean(0.011, 50)), 0.004, 0.012
    while ways.by(SIZE, NOBODY, uplink) == "Edge":
        for line in range(in_line):
            took = 0.6 + edge * (line + 1)
            ways = ways.after("Edge", took, size=SIZE, waiting=Waiting(at_edge=line), uplink=uplink)
    chosen: list[By] = []
    while chosen[-5:].count("Edge") < 5:
        chosen.append(ways.by(SIZE, NOBODY, uplink))
        took = edge if chosen[-1] == "Edge" else core
        ways = ways.after(chosen[-1], took, size=SIZE, waiting=NOBODY, uplink=uplink)
    assert chosen.count("Core") <= 12


def test_a_box_whose_first_requests_were_held_up_is_not_taken_for_a_slow_one() -> None:
    """Eight of them, with the bundle's pages still on disk: hundreds were handed to a core that takes twice as long."""
    uplink = Uplink(12.5e6, 0.0005)
    held_up = (0.3, 0.1, 0.03, *[0.02] * 4, 0.01)

    def took(by: By, number: int) -> float:
        return 0.0046 if by == "Core" else 0.0022 + (held_up[number] if number < len(held_up) else 0.0)

    _, chosen = run(took, uplink=uplink, requests=400)
    assert chosen.count("Core") <= 2 * FIRST


@pytest.mark.parametrize("held_up", [0.02, 0.1, 0.5, 2.0])
def test_a_box_that_was_held_up_from_its_start_is_used_once_that_has_ended(held_up: float) -> None:
    """For 3 s, or five requests of it; then it takes 2 ms, and its core 5."""
    now, late, requests = 0.0, 0, 20_000
    ways, uplink = Ways(), Uplink(12.5e6, 0.0005)
    for _ in range(requests):
        by = ways.by(SIZE, NOBODY, uplink)
        held = now < max(3.0, 5 * held_up)
        took = 0.005 if by == "Core" else held_up if held else 0.002
        late += by == "Core" and not held
        ways, now = ways.after(by, took, size=SIZE, waiting=NOBODY, uplink=uplink), now + took
    assert late * 0.005 < 3 * max(3.0, 5 * held_up), "no longer than about three times what held it up"


def test_a_box_that_takes_seconds_hands_on_after_few_of_its_own() -> None:
    _, chosen = run(lambda by, _: 0.05 if by == "Core" else 5.0, uplink=Uplink(12.5e6, 0.0005), requests=200)
    assert chosen.count("Edge") <= FIRST + 1
