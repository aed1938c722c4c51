"""The price of audits: what they are expected to take of the model's time, from the profile and the rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scores import recorded, with_int8

from offramp_core.audits import audit_price, audit_seconds
from offramp_core.errors import InvalidArgumentError
from offramp_core.records import ExitCosts, Records

RATES = st.floats(0, 1)
SECONDS = st.floats(1e-6, 1.0)


def costing(segments: list[float], ramps: list[float], records: Records) -> Records:
    return replace(records, costs=ExitCosts(np.array(segments), np.array(ramps)))


@st.composite
def profiles(draw: st.DrawFn) -> Records:
    base = recorded(10, 2, seed=1)
    segments = draw(st.lists(SECONDS, min_size=3, max_size=3))
    return costing(segments, draw(st.lists(SECONDS, min_size=2, max_size=2)), base)


@given(records=profiles())
def test_audits_cost_nothing_where_none_is_drawn(records: Records) -> None:
    assert audit_price(records, rate=0.0) == 0.0


@given(records=profiles(), one=RATES, share=RATES)
def test_the_price_is_linear_in_the_rate(records: Records, one: float, share: float) -> None:
    assert audit_price(records, rate=one * share) == pytest.approx(share * audit_price(records, rate=one))


@given(records=profiles(), rate=RATES)
def test_an_audit_takes_the_model_and_all_of_its_heads(records: Records, rate: float) -> None:
    whole = records.costs.total_seconds + records.costs.ramp_seconds.sum()
    assert audit_price(records, rate=rate) == pytest.approx(rate * whole / records.costs.total_seconds)
    assert audit_price(records, rate=rate) >= rate, "the model itself runs once more"


@given(records=profiles(), times=st.floats(0.1, 100.0), rate=RATES)
def test_a_slower_machine_has_the_same_price(records: Records, times: float, rate: float) -> None:
    costs = records.costs
    slower = costing((times * costs.segment_seconds).tolist(), (times * costs.ramp_seconds).tolist(), records)
    assert audit_price(slower, rate=rate) == pytest.approx(audit_price(records, rate=rate))


def test_every_precision_of_the_bundle_runs_and_ramps_at_the_input_once() -> None:
    exact = replace(recorded(10, 2, seed=1), ramp_ids=("input", "deep"))
    exact = costing([0.0, 4.0, 6.0], [1.0, 0.5], exact)
    costs = ExitCosts(np.array([0.0, 1.0, 3.0]), np.array([1.0, 0.25]), 10.0)
    int8 = replace(exact, precision="int8", ramp_ids=("input", "int8/deep"), costs=costs)
    wide = replace(exact, others={"int8": int8})
    assert audit_seconds(exact) == 10 + 1.5
    assert audit_seconds(wide) == 10 + 1.5 + 4 + 0.25
    assert audit_price(wide, rate=0.02) == pytest.approx(0.0315)


def test_int8_records_have_a_higher_price_than_those_without() -> None:
    exact = recorded(100, 3, seed=2)
    assert audit_price(with_int8(exact), rate=0.02) > audit_price(exact, rate=0.02)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(InvalidArgumentError, match="audit rate"):
        audit_price(recorded(10, 2, seed=1), rate=rate)
