"""Drafts are chosen by what they save: they begin where they pay, stop where they do not, and cost next to nothing
while they are tried."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.generation.drafts import FIRST_TRIALS, KEPT_CONTEXTS, NONE, Context, Drafts, Setting, load_class

GOOD, BAD = Setting("exit-8", 4), Setting("ngram", 8)
ALONE = Context("", 1)


class Traffic:
    """Requests whose seconds per token are known by setting, with noise of a tenth."""

    def __init__(self, drafts: Drafts, *, seed: int = 0) -> None:
        self.drafts, self.random = drafts, np.random.default_rng(seed)
        self.chosen: list[Setting] = []
        self.seconds = 0.0

    def serve(self, n: int, paces: dict[Setting, float], *, context: Context = ALONE) -> None:
        for _ in range(n):
            setting = self.drafts.choose(context, draw=float(self.random.random()))
            pace = paces[setting] * math.exp(0.1 * self.random.standard_normal())
            self.drafts.observe(context, setting, seconds=30 * pace, tokens=30)
            self.chosen.append(setting)
            self.seconds += pace

    def share(self, setting: Setting, *, last: int) -> float:
        return self.chosen[-last:].count(setting) / last


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_that_pays_serves_most_requests_before_long(seed: int) -> None:
    traffic = Traffic(Drafts((GOOD, BAD)), seed=seed)
    traffic.serve(400, {NONE: 1.0, GOOD: 0.6, BAD: 1.3})
    assert traffic.share(GOOD, last=200) > 0.9


@pytest.mark.parametrize("seed", range(20))
def test_drafts_that_never_pay_cost_less_than_two_percent(seed: int) -> None:
    traffic = Traffic(Drafts((GOOD, BAD)), seed=seed)
    traffic.serve(2000, {NONE: 1.0, GOOD: 1.15, BAD: 1.5})
    assert traffic.share(NONE, last=1000) > 0.9
    assert traffic.seconds / 2000 < 1.02 * math.exp(0.1**2 / 2)  # the mean of the noise


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_off_within_fifty_requests_of_content_that_it_cannot_foresee(seed: int) -> None:
    traffic = Traffic(Drafts((GOOD,)), seed=seed)
    traffic.serve(400, {NONE: 1.0, GOOD: 0.6})
    assert traffic.share(GOOD, last=100) > 0.9
    traffic.serve(50, {NONE: 1.0, GOOD: 1.4})
    traffic.serve(100, {NONE: 1.0, GOOD: 1.4})
    assert traffic.share(GOOD, last=100) < 0.1


@pytest.mark.parametrize("seed", range(10))
def test_code_and_prose_have_each_what_serves_them_best(seed: int) -> None:
    traffic = Traffic(Drafts((GOOD, BAD)), seed=seed)
    code, prose = Context("code", 1), Context("prose", 1)
    for _ in range(400):
        traffic.serve(1, {NONE: 1.0, GOOD: 0.9, BAD: 0.5}, context=code)
        traffic.serve(1, {NONE: 1.0, GOOD: 1.2, BAD: 1.3}, context=prose)
    assert traffic.drafts.serving() == {code: BAD, prose: NONE}


@pytest.mark.parametrize("seed", range(10))
def test_a_better_draft_takes_over_from_a_good_one(seed: int) -> None:
    traffic = Traffic(Drafts((GOOD, BAD)), seed=seed)
    traffic.serve(300, {NONE: 1.0, GOOD: 0.8, BAD: 1.3})
    traffic.serve(1500, {NONE: 1.0, GOOD: 0.8, BAD: 0.5})
    assert traffic.share(BAD, last=100) > 0.85


def test_nothing_is_believed_of_a_few_requests() -> None:
    drafts = Drafts((GOOD,))
    for _ in range(FIRST_TRIALS - 1):
        drafts.observe(ALONE, GOOD, seconds=0.1, tokens=10)
        drafts.observe(ALONE, NONE, seconds=10.0, tokens=10)
        assert drafts.choose(ALONE, draw=0.99) == NONE


def test_without_drafts_there_is_nothing_to_choose_or_to_try() -> None:
    drafts = Drafts(())
    drafts.observe(ALONE, NONE, seconds=1.0, tokens=10)
    assert drafts.choose(ALONE, draw=0.0) == NONE and drafts.serving() == {}


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 500), st.floats(1e-6, 1e6), st.integers(0, 100))
def test_whatever_is_observed_a_known_setting_is_chosen(draw: float, tokens: int, seconds: float, n: int) -> None:
    drafts = Drafts((GOOD, BAD))
    for i in range(n % 20):
        drafts.observe(ALONE, (NONE, GOOD, BAD, Setting("gone", 1))[i % 4], seconds=seconds, tokens=tokens)
    assert drafts.choose(ALONE, draw=draw) in (NONE, GOOD, BAD)


def test_what_is_remembered_is_bounded_however_many_classes_requests_name() -> None:
    drafts = Drafts((GOOD,))
    for i in range(10 * KEPT_CONTEXTS):
        drafts.observe(Context(f"class-{i}", 1), NONE, seconds=1.0, tokens=10)
    assert len(drafts.serving()) == KEPT_CONTEXTS


def test_loads_are_told_apart_by_powers_of_two() -> None:
    assert [load_class(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
