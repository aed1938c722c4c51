"""What an edge sends of rows that leave at none of its exits, and what its settings may say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.edge import (
    TRY_EVERY,
    WORTH_A_TRY,
    Place,
    Rest,
    Sent,
    Uplink,
    at_once,
    costs,
    goes_on,
    handed_on_at,
    paced,
    rate_of,
    sent,
)
from offramp_core.edge_settings import EdgeSettings, edge_settings
from offramp_core.errors import InvalidArgumentError

seconds = st.floats(1e-5, 2.0)
sizes = st.integers(1, 1_000_000)
rates = st.floats(1e3, 1e9)
WAYS: tuple[Sent, ...] = ("Nothing", "Input", "Features")


@st.composite
def uplinks(draw: st.DrawFn) -> Uplink:
    """Some ways were measured, others were not."""
    measured = draw(st.sets(st.sampled_from(["Input", "Features"])))
    return Uplink(draw(rates), draw(seconds), {way: draw(seconds) for way in WAYS if way in measured})


@st.composite
def rests(draw: st.DrawFn) -> Rest:
    features = draw(st.none() | sizes)
    return Rest(draw(sizes), features, saved_seconds=draw(seconds), here_seconds=draw(seconds))


@given(rests(), uplinks(), st.integers(0, 10_000))
def test_auto_goes_the_soonest_way_and_tries_no_other_that_is_much_slower(
    rest: Rest, uplink: Uplink, number: int
) -> None:
    ways = costs(rest, uplink)
    chosen = sent(rest, uplink, residue="Auto", number=number)
    best = min(ways.values())
    assert ways[chosen] <= (WORTH_A_TRY * best if number % TRY_EVERY == TRY_EVERY - 1 else best)
    assert rest.features_bytes is not None or chosen != "Features"


@given(rests(), uplinks(), st.integers(0, 10_000))
def test_what_was_asked_for_is_sent_and_the_input_where_features_cannot_be(
    rest: Rest, uplink: Uplink, number: int
) -> None:
    assert sent(rest, uplink, residue="Input", number=number) == "Input"
    wanted = "Input" if rest.features_bytes is None else "Features"
    assert sent(rest, uplink, residue="Features", number=number) == wanted


@given(rests(), rates, seconds, seconds)
def test_features_that_were_never_sent_go_only_where_their_bytes_take_less_than_they_save(
    rest: Rest, rate: float, round_trip: float, computing: float
) -> None:
    """bytes / uplink < compute saved, the rule of the issue; what saves the core cannot be more than it takes."""
    uplink = Uplink(rate, round_trip, {"Input": round_trip + computing})
    if sent(rest, uplink, residue="Auto", number=0) == "Features":
        assert rest.features_bytes is not None
        assert (rest.features_bytes - rest.input_bytes) / rate <= rest.saved_seconds + 1e-9


@given(rests(), uplinks(), st.floats(1.0, 1e4))
def test_a_faster_uplink_never_makes_an_answer_later_and_never_turns_from_larger_to_smaller(
    rest: Rest, uplink: Uplink, faster: float
) -> None:
    better = replace(uplink, bytes_per_second=faster * uplink.bytes_per_second)
    assert min(costs(rest, better).values()) <= min(costs(rest, uplink).values()) + 1e-12
    size = {"Nothing": 0, "Input": rest.input_bytes, "Features": rest.features_bytes or 0}
    before, after = (sent(rest, link, residue="Auto", number=0) for link in (uplink, better))
    assert size[after] >= size[before] or costs(rest, uplink)[after] == costs(rest, uplink)[before]


@given(rests(), uplinks(), seconds, st.floats(0, 1), sizes)
def test_a_batch_goes_to_the_core_at_once_only_if_it_is_answered_sooner_than_through_the_exits(
    rest: Rest, uplink: Uplink, before: float, share: float, whole_bytes: int
) -> None:
    whole = Rest(whole_bytes, None, 0.0, 1.0)
    goes = at_once(rest, whole, uplink, before_seconds=before, share=share)
    through = before + share * min(costs(rest, uplink).values())
    assert goes == (uplink.seconds("Input", size=whole_bytes) < through)
    assert not at_once(rest, whole, uplink, before_seconds=0.0, share=0.0)


@given(uplinks(), st.sampled_from(["Input", "Features"]), sizes, seconds)
def test_estimates_come_to_what_is_measured(uplink: Uplink, way: Sent, size: int, extra: float) -> None:
    took = size / uplink.bytes_per_second + extra
    for _ in range(200):
        uplink = uplink.after(way, size=size, seconds=took)
    assert uplink.seconds(way, size=size) == pytest.approx(took, rel=1e-3, abs=1e-6)
    assert way in uplink.measured(bytes_per_second=1e6, round_trip=0.01).beyond


def test_what_was_not_sent_for_two_measurements_of_the_network_is_not_known_any_more_and_is_tried_again() -> None:
    uplink = Uplink(1e6, 0.01).after("Input", size=1000, seconds=3.0)
    rest = Rest(1000, None, saved_seconds=0.0, here_seconds=0.05)
    assert sent(rest, uplink, residue="Auto", number=0) == "Nothing"
    again = uplink.measured(bytes_per_second=1e6, round_trip=0.01).measured(bytes_per_second=1e6, round_trip=0.01)
    assert sent(rest, again, residue="Auto", number=0) == "Input"


def test_an_edge_is_read_from_its_variables() -> None:
    given_all = {
        "OFFRAMP_CORE": "http://core:8080/",
        "OFFRAMP_UPLINK": "10Mbit/s",
        "OFFRAMP_RESIDUE": "Features",
        "OFFRAMP_OFFLINE": "Answer",
    }
    assert edge_settings(given_all) == EdgeSettings("http://core:8080", 1.25e6, "Features", "Answer")
    assert edge_settings({"OFFRAMP_CORE": "https://core"}) == EdgeSettings("https://core", None, "Auto", "Refuse")
    assert edge_settings({"OFFRAMP_EDGES": "true"}) is None


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"OFFRAMP_UPLINK": "0"}, "OFFRAMP_UPLINK is '0'"),
        ({"OFFRAMP_UPLINK": "0Mbit"}, "OFFRAMP_UPLINK is '0Mbit'"),
        ({"OFFRAMP_UPLINK": "-1Mbit"}, "OFFRAMP_UPLINK is '-1Mbit'"),
        ({"OFFRAMP_UPLINK": "10 MB"}, "OFFRAMP_UPLINK is '10 MB'"),
        ({"OFFRAMP_RESIDUE": "Both"}, "OFFRAMP_RESIDUE is 'Both'; choose from Auto, Input, Features"),
        ({"OFFRAMP_OFFLINE": "Guess"}, "OFFRAMP_OFFLINE is 'Guess'; choose from Refuse, Answer"),
        ({"OFFRAMP_CORE": "core:8080"}, "OFFRAMP_CORE is 'core:8080'"),
        ({"OFFRAMP_CORE": "http://core:99999"}, "OFFRAMP_CORE is"),
        ({"OFFRAMP_CORE": "http://core/v2"}, "OFFRAMP_CORE is"),
        ({"OFFRAMP_CORE": "http://me:secret@core"}, "OFFRAMP_CORE is 'core' with a user, "),
        ({"OFFRAMP_CORE": "http://me:secret@core:80"}, "OFFRAMP_CORE is 'core:80' with a user, "),
        ({"OFFRAMP_CORE": "http://me:secret@core:99999"}, "OFFRAMP_CORE is no address"),
        ({"OFFRAMP_CORE": "http://me:se/cret@core"}, "OFFRAMP_CORE is no address"),
        ({"OFFRAMP_CORE": "http://core?token=secret"}, "OFFRAMP_CORE is 'core' with a user, "),
        ({"OFFRAMP_CORE": "", "OFFRAMP_OFFLINE": "Answer"}, "OFFRAMP_OFFLINE is set and OFFRAMP_CORE is not"),
        ({"OFFRAMP_EDGES": "true"}, "OFFRAMP_EDGES is set and so is OFFRAMP_CORE"),
        ({"OFFRAMP_EDGES": "yes"}, "OFFRAMP_EDGES is 'yes'; choose from false, true"),
    ],
)
def test_what_cannot_work_is_refused_with_the_variable_and_what_it_must_be(
    variables: dict[str, str], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        edge_settings({"OFFRAMP_CORE": "http://core:8080", **variables})
    assert field in str(caught.value)
    assert "cret" not in str(caught.value)


def test_an_uplink_of_zero_is_none() -> None:
    with pytest.raises(InvalidArgumentError, match="uplink is 0 bit/s; it must be above 0"):
        Uplink(0.0)


def test_a_batch_that_was_held_up_sends_no_rows_up_a_slow_uplink() -> None:
    pace = paced(1.0, took=1.0, expected=0.0005)
    here = Rest(input_bytes=12_500, features_bytes=None, saved_seconds=0.0, here_seconds=0.002 * pace)
    assert sent(here, Uplink(125_000.0, 0.001), residue="Auto", number=0) == "Nothing"
    for _ in range(50):
        pace = paced(pace, took=0.002, expected=0.0005)
    assert pace == pytest.approx(4.0, rel=0.2), "a box that is slow is known as such"


@given(st.floats(1e4, 1e9), st.floats(0.0, 0.2), st.floats(0.0, 5.0))
def test_a_round_trip_that_was_held_up_makes_no_link_more_than_ten_times_as_fast(
    rate: float, round_trip: float, held_up: float
) -> None:
    found = rate_of(65_536, seconds=round_trip + 65_536 / rate, round_trip=round_trip + held_up)
    assert found <= 10 * rate * (1 + 1e-6)
    if not held_up and round_trip <= 9 * 65_536 / rate:
        assert found == pytest.approx(rate)


@pytest.mark.parametrize(("rate", "round_trip", "here"), [(1.25e8, 0.1, 0.4), (1.25e7, 0.06, 0.35), (6.25e6, 0.6, 2.0)])
def test_a_fast_link_to_a_core_far_away_is_tried_where_it_would_answer_sooner(
    rate: float, round_trip: float, here: float
) -> None:
    """Half of the time had counted as the bytes' own: of 600 kB requests none was ever handed on."""
    found = rate_of(65_536, seconds=round_trip + 65_536 / rate, round_trip=round_trip)
    assert round_trip + 600_000 / found < here


PLACES = [Place(65_536, 0.003), Place(16_384, 0.0015), Place(16_384, 0.0003)]


@pytest.mark.parametrize(
    ("rate", "pace", "place"),
    [(1.25e6, 1.0, 2), (1.25e8, 1.0, 2), (1.25e6, 4.0, 1), (1.25e8, 4.0, 0), (1.25e6, 100.0, 0)],
    ids=["as fast as the core", "and a fast uplink", "a slow box", "and a fast uplink", "a very slow box"],
)
def test_features_are_handed_on_where_the_answer_is_soonest(rate: float, pace: float, place: int) -> None:
    assert handed_on_at(PLACES, bytes_per_second=rate, pace=pace) == place


@pytest.mark.parametrize(
    ("rate", "pace", "goes"),
    [(1.25e6, 1.0, True), (1.25e8, 1.0, True), (1.25e6, 20.0, True), (1.25e7, 20.0, False), (1.25e8, 2.5, False)],
    ids=["a narrow uplink", "a fast one", "a slow box, a narrow uplink", "a slow box", "a box that is not very slow"],
)
def test_rows_go_on_to_a_later_place_only_where_that_is_no_later_than_sending_their_input(
    rate: float, pace: float, goes: bool
) -> None:
    later, between = PLACES[2], pace * (PLACES[0].behind_seconds - PLACES[2].behind_seconds)
    assert goes_on(Place(120_000, 0.004), later, between_seconds=between, bytes_per_second=rate) is goes
