"""Arms that take turns: a load that comes and goes meets them alike, and an interval says what it leaves open."""

from __future__ import annotations

import numpy as np
from bench.turns import BLOCK, FEW, compared, in_turns


def test_a_ratio_of_two_hundredths_is_told_apart_under_a_load_that_doubles_all_times_now_and_then() -> None:
    draw = np.random.default_rng(3)
    load = np.repeat(draw.choice([1.0, 1.0, 2.0], 40), 10)  # of all arms' requests, in turn
    asked = iter(range(10**9))

    def block(usual: float) -> list[float]:
        slow = load[next(asked) // 5 % len(load)]
        return list(usual * slow * draw.lognormal(0.0, 0.2, BLOCK))

    arms = {"a": lambda _: block(1.0), "b": lambda _: block(1.2), "c": lambda _: block(1.05)}
    ratio = compared(in_turns(arms, rounds=200, judged="c"), "c", ("a", "b"))
    assert 1.02 < ratio.low < 1.05 < ratio.high < 1.08


def test_an_arm_that_is_far_from_the_best_sits_out_and_is_compared_by_what_it_took() -> None:
    asked = dict.fromkeys("abc", 0)

    def block(name: str, took: float) -> list[float]:
        asked[name] += 1
        return [took] * BLOCK

    arms = {"a": lambda _: block("a", 1.0), "b": lambda _: block("b", 9.0), "c": lambda _: block("c", 2.0)}
    means = in_turns(arms, rounds=100, judged="c")
    assert asked == {"a": 100, "b": FEW + 9, "c": 100}
    assert np.nanmean(means["b"]) == 9.0
    assert compared(means, "c", ("a", "b")).of_means == 2.0
