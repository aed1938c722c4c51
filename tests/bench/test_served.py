"""How capacities are searched and rounds compared, without a server."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from bench.front import CAPACITY_TRIALS, CapacitySearch, find_capacities
from bench.openloop import Trial
from bench.served import Measured, as_round, summary

CAPACITY = 1.3


def trial(seconds: npt.NDArray[np.float64], status: npt.NDArray[np.int64] | None = None) -> Trial:
    n = len(seconds)
    return Trial(
        1.0,
        np.zeros(n),
        seconds,
        np.full(n, 200) if status is None else status,
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
    )


def searched(*, stalled: frozenset[int] = frozenset(), capacity: float = CAPACITY) -> float:
    search = CapacitySearch(low=0.1, high=6.0)
    for step in range(CAPACITY_TRIALS):
        search.learn(met=search.rate <= capacity and step not in stalled)
    return search.found


@pytest.mark.parametrize("capacity", [0.2, 0.77, 1.3, 4.0])
def test_a_capacity_is_found_within_three_per_cent(capacity: float) -> None:
    assert searched(capacity=capacity) == pytest.approx(capacity, rel=0.03)


@pytest.mark.parametrize("stalled", range(CAPACITY_TRIALS))
def test_no_single_stall_caps_a_capacity(stalled: int) -> None:
    assert searched(stalled=frozenset({stalled})) == pytest.approx(CAPACITY, rel=0.05)


def test_a_rate_that_is_never_met_is_no_capacity() -> None:
    assert searched(capacity=0.0) == 0.0


def test_servers_take_turns_and_another_one_begins_each_time() -> None:
    asked: list[str] = []

    def measure(name: str, rate: float, seed: int) -> Trial:
        asked.append(name)
        return trial(np.full(10, rate))

    found = find_capacities(measure, ["a", "b"], objective=1.0, low=0.1, high=6.0)
    assert asked[:4] == ["a", "b", "b", "a"]
    assert found["a"] == found["b"] == pytest.approx(1.0, rel=0.03)


def test_a_refused_request_does_not_spoil_the_mean_and_is_told_apart() -> None:
    seconds, status = np.full(100, 0.002), np.full(100, 200)
    seconds[0], status[0] = np.inf, 429
    off, arm = Measured(capacity=1.0), Measured(capacity=2.0)
    off.rounds[0.9] = [as_round(trial(np.full(100, 0.004)))] * 3
    arm.rounds[0.9] = [as_round(trial(seconds, status))] * 3
    figures = summary({"off": off, "any": arm})["any"]["loads"]["0.9"]
    assert figures["mean"]["ratio"] == pytest.approx(0.5)
    assert figures["p95"]["ratio"] == pytest.approx(0.5)
    assert figures["refused"] == pytest.approx(0.01)


def test_where_every_twentieth_is_refused_there_is_no_ratio_of_p95() -> None:
    seconds, status = np.full(100, 0.002), np.full(100, 200)
    seconds[:10], status[:10] = np.inf, 429
    off = Measured(capacity=1.0)
    off.rounds[0.9] = [as_round(trial(seconds, status))]
    figures = summary({"off": off, "any": off})["any"]["loads"]["0.9"]
    assert figures["p95"] == {"ms": None, "ratio": None, "low": None, "high": None}
    assert figures["mean"]["ratio"] == 1.0
