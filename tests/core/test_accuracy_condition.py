"""AccuracyWithinBudget speaks of requests, not of audits: where these are rarer, each stands for more of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet import MANIFEST, RAMPS  # type: ignore[import-not-found]
from metering import COSTS, PLAN

from offramp_core.control.conditions import Facts, conditions, observe
from offramp_core.control.objects import Condition, Config, ObservedFigures, PinStatus, Service
from offramp_core.control.spec import parse_spec
from offramp_core.control.stable.audit import Audits, at_one_rate
from offramp_core.protocol import ArmCounts
from offramp_core.reasons import ConditionType

SPEC = parse_spec(
    {**MANIFEST, "objective": {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.01"}}}
)
DAYS = 3
NIGHT, DAY = (3 * 3_600, 1.0), (50 * 3_600, 0.02)  # requests, audit rate


def counts(epoch: int, requests: int, rate: float, *, wrong: float) -> ArmCounts:
    drawn = round(requests * rate)
    return ArmCounts(
        epoch,
        "stable",
        PLAN.content_hash,
        requests=requests,
        drawn=drawn,
        audited=drawn,
        disagreements=round(drawn * wrong),
    )


def told(*seen: ArmCounts) -> tuple[ObservedFigures, Condition]:
    service = Service("default", "digits", "uid", 1, SPEC)
    facts = Facts(service, (), 0, Config("digits-1", PLAN), seen, PinStatus(), None, 0.0)
    figures, times, audits = observe(facts, RAMPS, COSTS)
    found = conditions(facts, settled_generation=1, observed=(times, audits))
    return figures, next(c for c in found if c.type == ConditionType.ACCURACY_WITHIN_BUDGET)


def cycles(*, night: float, day: float) -> list[ArmCounts]:
    return [
        counts(2 * d + i, *part, wrong=p)
        for d in range(DAYS)
        for i, (part, p) in enumerate(((NIGHT, night), (DAY, day)))
    ]


def test_the_audits_of_quiet_nights_do_not_outvote_those_of_the_days_on_which_most_requests_come() -> None:
    """Over all requests 2.4 % disagree, of all audits 0.9 %."""
    seen = cycles(night=0.003, day=0.025)
    assert sum(c.disagreements for c in seen) / sum(c.audited for c in seen) < 0.01
    figures, condition = told(*seen)
    assert (condition.status, condition.reason) == ("False", "BudgetExceeded")
    assert figures.agreement == "97.6%"
    assert figures.samples == pytest.approx(DAYS * DAY[0] * DAY[1], rel=0.1)


def test_bad_nights_of_few_requests_break_no_budget_that_all_requests_keep() -> None:
    seen = cycles(night=0.03, day=0.002)
    assert sum(c.disagreements for c in seen) / sum(c.audited for c in seen) > 0.02
    figures, condition = told(*seen)
    assert (condition.status, figures.agreement) == ("True", "99.6%")


def test_epochs_of_one_rate_are_summed_as_they_are() -> None:
    seen = [counts(epoch, 5_000, 0.1, wrong=0.02) for epoch in range(4)]
    assert at_one_rate(seen) == Audits(2_000, 40, pytest.approx(0.1))
    assert at_one_rate([]) == at_one_rate([counts(1, 40, 0.0, wrong=0.0)]) == Audits()


def test_a_few_audits_at_a_low_rate_neither_decide_nor_make_the_others_worthless() -> None:
    before = counts(1, 20_000, 1.0, wrong=0.03)
    found = at_one_rate([before, counts(2, 500, 0.02, wrong=0.0)])
    assert found.k / found.n == pytest.approx(0.03, rel=0.01)
    assert found.n > 0.4 * before.audited


@pytest.mark.slow
def test_a_plan_at_its_budget_is_hardly_ever_told_to_be_over_it_however_often_one_looks() -> None:
    rng, over = np.random.default_rng(5), 0
    for _ in range(200):
        seen, broken = list[ArmCounts](), False
        for epoch, (requests, rate) in enumerate((NIGHT, DAY) * 2):
            now = counts(epoch, 0, rate, wrong=0.0)
            for _ in range(3):
                n = round(requests * rate / 3)
                now = replace(
                    now,
                    requests=now.requests + requests // 3,
                    drawn=now.drawn + n,
                    audited=now.audited + n,
                    disagreements=now.disagreements + int(rng.binomial(n, 0.01)),
                )
                broken |= told(*seen, now)[1].status == "False"
            seen.append(now)
        over += broken
    assert over <= 0.05 * 200
