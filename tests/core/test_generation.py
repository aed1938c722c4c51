"""Decisions about generated answers: what one lost, which variants a plan asks, who has a turn, who is let in, where a
text stops."""

from __future__ import annotations

import math
import re
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.errors import InvalidArgumentError
from offramp_core.generation.admission import (
    AdmissionLimits,
    Closed,
    GenerationPace,
    Work,
    WorkerLoad,
    admit,
    side_by_side,
    until_turn,
)
from offramp_core.generation.columns import VariantStep, answer_uncertainty, steps_of, variant_columns, variant_costs
from offramp_core.generation.losses import (
    AnswerLosses,
    Output,
    answer_pattern,
    common_subsequence,
    exact_answer,
    rouge_l,
    token_f1,
)
from offramp_core.generation.stops import StopScanner
from offramp_core.generation.turns import PASSED_AT_MOST, WAITED, PromptReading, next_prompt, take_next
from offramp_core.plan import Plan
from offramp_core.records import records_from_arrays

words = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "42"]), max_size=7)


# --- losses ---------------------------------------------------------------------------------------------


@given(words, words)
def test_every_loss_lies_between_0_and_1_is_symmetric_and_0_for_the_same_answer(
    ours: list[str], theirs: list[str]
) -> None:
    a, b = " ".join(ours), " ".join(theirs)
    there, back = AnswerLosses()(a, b), AnswerLosses()(b, a)
    assert set(there) == set(Output)
    assert all(0 <= loss <= 1 for loss in there.values())
    assert there == pytest.approx(back)
    assert set(AnswerLosses()(a, a).values()) == {0.0}


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_the_common_subsequence_is_the_longest_of_all(a: list[int], b: list[int]) -> None:
    def is_in(part: tuple[int, ...], whole: list[int]) -> bool:
        rest = iter(whole)
        return all(x in rest for x in part)

    longest = max(n for n in range(len(a) + 1) for part in combinations(a, n) if is_in(part, b))
    letters = "abcd"
    assert common_subsequence([letters[i] for i in a], [letters[i] for i in b]) == longest


@pytest.mark.parametrize(
    ("served", "reference", "f1", "rouge"),
    [
        ("the cat", "cat", 0.0, 1 / 3),  # articles count for ROUGE-L alone
        ("sat cat", "cat sat", 0.0, 0.5),  # order does as well
        ("", "", 0.0, 0.0),
        ("", "cat", 1.0, 1.0),
        ("Cat!", "cat", 0.0, 0.0),
    ],
)
def test_what_an_answer_loses_by_hand(served: str, reference: str, f1: float, rouge: float) -> None:
    assert (token_f1(served, reference), rouge_l(served, reference)) == (pytest.approx(f1), pytest.approx(rouge))


def test_an_exact_answer_is_what_the_pattern_finds_last() -> None:
    number = re.compile(r"#### (\d+)")
    assert exact_answer("6*7\n#### 42", "first #### 1, then #### 42", pattern=number) == 0
    assert exact_answer("#### 41", "#### 42", pattern=number) == 1
    assert exact_answer(" no number ", "no number", pattern=number) == 0


@pytest.mark.parametrize(("text", "why"), [("(", "regular expression"), ("x*", "empty"), ("a" * 201, "at most 200")])
def test_a_pattern_that_would_judge_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        answer_pattern(text)


# --- plans ----------------------------------------------------------------------------------------------

SECONDS = {"fp32": 4.0, "int8": 1.0}


def a_plan(precision: str = "fp32", **thresholds: str) -> Plan:
    ramps = [{"id": k, "threshold": v} for k, v in thresholds.items()]
    return Plan.from_mapping({"backboneDigest": "b", "rampSetDigest": "r", "ramps": ramps, "precision": precision})


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=50))
def test_uncertainty_is_a_probability_that_grows_as_tokens_become_less_likely(logprobs: list[float]) -> None:
    one = answer_uncertainty(logprobs)
    assert 0 <= one <= 1
    assert answer_uncertainty([value - 0.1 for value in logprobs]) > one or one > 1 - 1e-9


def test_a_plan_asks_cheap_variants_first_and_the_last_word_is_its_precisions() -> None:
    columns = variant_columns({"fp32": 4.0, "int8": 1.5, "int4": 1.0})
    assert [c.id for c in columns] == ["int4", "int8", "int8/final", "int4/final"]
    plan = a_plan(int8="0.2", int4="0.1")
    assert steps_of(plan, columns) == (
        VariantStep("int4", "int4", 0.1),
        VariantStep("int8", "int8", 0.2),
        VariantStep("fp32"),
    )
    assert steps_of(a_plan(), columns) == (VariantStep("fp32"),)
    assert steps_of(a_plan("int8"), columns) == (VariantStep("int8"),)
    assert steps_of(a_plan(int8="0"), columns) == (VariantStep("fp32"),), (
        "a threshold of 0 lets nothing leave, so nobody is asked"
    )


def test_records_price_escalation_and_whole_variants_in_times_of_the_reference() -> None:
    columns = variant_columns(SECONDS)
    arrays = {
        "uncertainty": np.array([[0.1, 0.1], [0.6, 0.6]]),
        "loss": np.array([[0.0, 0.0], [0.3, 0.3]]),
        "final_loss": np.zeros(2),
        "ramp_id": np.array([c.id for c in columns]),
        "ramp_precision": np.array([c.precision for c in columns]),
    } | {name: np.array(values) for name, values in variant_costs(SECONDS).items()}
    records = records_from_arrays(arrays)
    asked_first = records.costs.leave_seconds([0])
    assert asked_first.tolist() == [1.0, 5.0], "who leaves pays for int8 alone, who stays for both"
    whole = records.at("int8")
    assert whole.costs.total_seconds == 1.0 and whole.costs.baseline_seconds == 4.0
    assert whole.final_loss is not None and whole.final_loss.tolist() == pytest.approx([0.0, 0.3])


# --- turns and admission --------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 200)), min_size=1, max_size=10))
def test_of_several_prompts_the_one_that_has_waited_long_enough_is_read(prompts: list[tuple[int, int]]) -> None:
    reading = [PromptReading(i, left, waited) for i, (left, waited) in enumerate(prompts)]
    chosen = next_prompt(reading)
    assert chosen is not None
    assert all(reading[chosen].left - WAITED * reading[chosen].waited <= p.left - WAITED * p.waited for p in reading)


@given(st.integers(100, 5000))
def test_a_long_prompt_is_read_however_many_short_ones_come(left: int) -> None:
    waited = 0
    while next_prompt([PromptReading(1, left, waited), PromptReading(2, 16, 0)]) == 2:
        waited += 1
    assert waited <= left / WAITED + 1


def test_small_requests_pass_a_large_one_a_few_times_and_then_wait_for_it() -> None:
    large, *small = line = [Work(1.0, 900), *(Work(1.0, 100) for _ in range(PASSED_AT_MOST + 1))]
    for one in small[:-1]:
        assert take_next(line, free_bytes=500) is one
    assert take_next(line, free_bytes=500) is None
    assert take_next(line, free_bytes=900) is large and line == small[-1:]


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (WorkerLoad(waiting=4, running=2), Closed.QUEUE),
        (WorkerLoad(waiting=1, running=1, wait_seconds=99.0), Closed.WAIT),
        (WorkerLoad(running=1, wait_seconds=99.0, caches_full=True), Closed.CACHES),
        (WorkerLoad(running=1, reply_bytes=1000), Closed.REPLIES),
    ],
)
def test_who_comes_at_a_bad_time_hears_why_and_when_to_come_again(load: WorkerLoad, why: Closed) -> None:
    refused = admit(
        load, AdmissionLimits(waiting=4, running=2, reply_bytes=1000, patience_seconds=30), answers=1, reply=1
    )
    assert refused is not None and refused.why is why
    assert 1 <= refused.retry_after_seconds <= 60


def test_who_finds_nobody_before_it_is_let_in() -> None:
    assert admit(WorkerLoad(), AdmissionLimits(waiting=1, running=1, reply_bytes=1), answers=9, reply=999) is None


def plainly(
    running: list[Work], waiting: list[Work], *, at_once: int, own_bytes: int, free_bytes: int, audit: Work | None
) -> float:
    """The wait for a turn, piece by piece of what is left, by the line's rule in the fewest words."""
    left, now = [[w.seconds, w.cache_bytes] for w in running], 0.0
    line = [[w.seconds, w.cache_bytes, w.passed] for w in waiting] + [[math.nan, own_bytes, 0]]
    while True:
        stops = (at for at, one in enumerate(line) if one[1] <= free_bytes or one[2] >= PASSED_AT_MOST)
        at = next(stops, None)
        if len(left) < at_once and at is not None and line[at][1] <= free_bytes:
            for before in line[:at]:
                before[2] += 1
            seconds, size, _ = line.pop(at)
            if math.isnan(seconds):
                return now
            left.append([seconds, size])
            free_bytes -= int(size)
        elif left:
            first = min(left)
            now += first[0] * len(left)
            left.remove(first)
            left = [[seconds - first[0], size] for seconds, size in left]
            free_bytes += int(first[1])
        else:
            assert audit is not None, "whoever fits the empty memory begins in the end"
            now, free_bytes, audit = now + audit.seconds, free_bytes + audit.cache_bytes, None


MEMORY = 600
sizes = st.integers(0, MEMORY)
works = st.builds(Work, st.integers(1, 9), sizes, st.integers(0, PASSED_AT_MOST))


@given(st.lists(works, max_size=9), st.lists(works, max_size=12), st.integers(1, 5), sizes, st.none() | works)
def test_the_wait_for_a_turn_is_that_of_answers_that_share_the_engine_and_the_memory(
    runs: list[Work], waiting: list[Work], at_once: int, own_bytes: int, audit: Work | None
) -> None:
    free, running = MEMORY - (audit.cache_bytes if audit else 0), []
    for work in runs:
        if work.cache_bytes <= free:
            running.append(work)
            free -= work.cache_bytes
    given: Any = {"at_once": at_once, "own_bytes": own_bytes, "free_bytes": free, "audit": audit}
    found = until_turn(running, waiting, **given)
    assert found.seconds == plainly(running, waiting, **given)
    assert 0 <= found.for_room <= found.seconds


def test_who_finds_no_room_for_its_caches_waits_for_those_that_end_and_passes_what_is_larger() -> None:
    running, large = [Work(6.0, 400), Work(1.0, 100)], Work(5.0, 500)
    for own, seconds in {100: 0.0, 200: 2.0, 300: 7.0}.items():
        waits = until_turn(running, [], at_once=8, own_bytes=own, free_bytes=100)
        assert waits == (pytest.approx(seconds), pytest.approx(seconds)), f"{own} bytes"
    assert until_turn(running, [large], at_once=8, own_bytes=200, free_bytes=100).seconds == pytest.approx(2.0)
    assert until_turn(running, [large], at_once=8, own_bytes=300, free_bytes=100).seconds == pytest.approx(12.0)


def test_who_comes_behind_a_large_one_waits_for_it_once_it_is_passed_no_more() -> None:
    running, small = [Work(60.0, 500)], [Work(1.0, 100)] * 40
    for waiting in ([Work(20.0, 500, PASSED_AT_MOST)], [Work(20.0, 500), *small]):
        waits = until_turn(running, waiting, at_once=8, own_bytes=100, free_bytes=100)
        assert waits.seconds > 59.0, f"behind {len(waiting)}"


def test_who_waits_for_a_place_does_not_wait_for_memory() -> None:
    """Those that wait need not have begun: the engine's thread may be in a step."""
    assert until_turn([], [Work(1.0, 100)] * 9, at_once=8, own_bytes=100, free_bytes=9000) == (8.0, 0.0)


def test_who_waits_for_the_memory_of_an_audit_waits_until_it_has_ended() -> None:
    waits = until_turn([], [Work(9.0, 100)] * 5, at_once=8, own_bytes=100, free_bytes=50, audit=Work(3.0, 550))
    assert waits == (3.0, 3.0)


def test_who_would_see_the_first_token_too_late_is_turned_away_until_the_line_is_short_enough() -> None:
    limits = AdmissionLimits(first_token_seconds=2.0)
    full = WorkerLoad(waiting=1, running=8, wait_seconds=5.0, reading_seconds=0.6)
    refused = admit(full, limits, answers=1, reply=1)
    assert refused is not None and refused.why is Closed.FIRST_TOKEN
    assert refused.retry_after_seconds == 4  # what is left of 5 s must fit into 0.8 x 2 s, less 0.6 s of reading
    assert (
        admit(WorkerLoad(waiting=1, running=8, wait_seconds=0.9, reading_seconds=0.6), limits, answers=1, reply=1)
        is None
    )
    assert admit(full, AdmissionLimits(), answers=1, reply=1) is None, "without an objective nobody is in a hurry"


def test_a_prompt_too_long_for_the_objective_is_not_refused_for_its_length() -> None:
    limits = AdmissionLimits(first_token_seconds=2.0)
    assert admit(WorkerLoad(running=1, wait_seconds=1.5, reading_seconds=60.0), limits, answers=1, reply=1) is None
    refused = admit(WorkerLoad(running=8, wait_seconds=1.7, reading_seconds=60.0), limits, answers=1, reply=1)
    assert refused is not None and refused.why is Closed.FIRST_TOKEN


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.integers(1, 64))
def test_no_more_answers_are_written_at_once_than_keep_the_time_per_token(
    objective: float, writing: float, running: int
) -> None:
    limits, pace = AdmissionLimits(running=running, token_seconds=objective), GenerationPace(writing=writing)
    n = side_by_side(limits, pace)
    assert 1 <= n <= running
    assert n == 1 or n * writing <= objective * (1 + 1e-9)
    assert n == running or (n + 1) * writing > objective * (1 - 1e-9), "and no fewer"
    assert side_by_side(limits, GenerationPace()) == running, "before anything was measured nobody waits for it"


@given(st.floats(0.001, 0.1), st.floats(1e-5, 0.01), st.lists(st.integers(1, 400), min_size=30, max_size=60))
def test_what_a_token_takes_is_told_from_what_a_step_takes(step: float, token: float, pieces: list[int]) -> None:
    """Prompts of one token, or whose beginning was computed for another one, take a step all the same."""
    pace = GenerationPace()
    for tokens in [*pieces, 1, 400]:
        pace = pace.read(tokens, step + token * tokens)
    for tokens in (1, 40, 400):
        assert pace.prompt_seconds(tokens) == pytest.approx(step + token * tokens, rel=0.02)
    assert pace.prompt_seconds(0) == 0


def test_one_who_asks_for_single_tokens_does_not_make_prompts_look_long() -> None:
    pace = GenerationPace()
    for i in range(400):
        tokens = 40 if i % 10 == 0 else 1
        pace = pace.read(tokens, 0.02 + 0.0002 * tokens)
    assert pace.prompt_seconds(40) == pytest.approx(0.028, rel=0.02), "it was 40 times a step"


def test_the_expected_time_follows_what_answers_use_of_what_they_may() -> None:
    pace = GenerationPace().read(10, 1.0).wrote(10, 2.0)
    assert pace.seconds(prompt=10, max_tokens=100) == pytest.approx(1.0 + 20.0)
    for _ in range(400):
        pace = pace.ended(tokens=10, max_tokens=100)
    assert pace.seconds(prompt=10, max_tokens=100) == pytest.approx(1.0 + 2.0, rel=0.01)


# --- stop strings ---------------------------------------------------------------------------------------


@given(st.text("ab.", max_size=30), st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3), st.data())
def test_a_text_ends_before_the_stop_string_that_is_whole_first_however_it_was_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    expected = text[: min(ends)[1]] if ends else text
    scanner, shown, at = StopScanner(tuple(stops)), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text) - at))
        shown += scanner.add(text[at : at + size])
        at += size
    assert shown + scanner.finish() == expected
    assert scanner.stopped == bool(ends)


def test_no_tokens_are_no_confidence() -> None:
    assert answer_uncertainty([]) == 1.0 and answer_uncertainty([-math.inf]) == 1.0
