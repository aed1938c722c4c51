"""Exits of single tokens: the rules of papers on cases that can be counted by hand, and what they promise on many
draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom
from typer.testing import CliRunner

from offramp_cli.main import app
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_lab.tokens.judged import Limits, drawn, judged
from offramp_lab.tokens.records import GRID, TokenRecords, decayed, effects, token_records
from offramp_lab.tokens.rules import (
    TOKEN_POLICIES,
    bound_lies_below,
    calm,
    in_expectation,
    proven,
    token_policy,
    upper_bound,
)


def arrays(n: int = 400, *, exits: int = 3, seed: int = 1) -> dict[str, Any]:
    """Answers of 1 to 12 tokens; an exit is wrong with its uncertainty, halved."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 13, n)
    rows = int(lengths.sum())
    uncertainty = (rng.random((rows, 1)) ** 6 * np.linspace(1, 0.4, exits)).astype(np.float32)
    wrong = rng.random((rows, exits)) < uncertainty / 2
    final = rng.integers(0, 50, rows)
    return {
        "uncertainty": uncertainty,
        "prediction": np.where(wrong, final[:, None] + 1, final[:, None]),
        "final": final,
        "segment_seconds": np.full(exits + 1, 1.0),
        "ramp_seconds": np.full(exits, 0.1),
        "answer": np.repeat(np.arange(n), lengths),
    }


def recorded(**options: Any) -> TokenRecords:
    return token_records(arrays(**options))


def losses(*means: float, n: int = 100) -> np.ndarray[Any, Any]:
    """Rows of zeros and ones with these means."""
    return np.array([np.arange(n) < round(mean * n) for mean in means], dtype=np.float64)


def test_answers_go_by_their_time_where_there_is_one() -> None:
    found = arrays(n=50)
    n = len(found["answer"])
    backwards = token_records(found | {"time": -found["answer"].astype(np.float64)})
    plain = token_records(found)
    assert backwards.lengths.tolist() == plain.lengths[::-1].tolist()
    last = plain.tokens.uncertainty[plain.first[-1] :]
    assert backwards.tokens.uncertainty[: len(last)].tolist() == last.tolist()
    assert len(backwards.tokens) == n


@pytest.mark.parametrize(
    "change",
    [
        {"segment_seconds": np.full(4, 1e308)},
        {"segment_seconds": np.array([5e-324, 0, 0, 0]), "ramp_seconds": np.ones(3)},
    ],
)
def test_seconds_that_savings_cannot_be_told_of_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecordsError, match="segment_seconds"):
        token_records(arrays() | change)


# --- what a threshold does -----------------------------------------------------------------------------


def test_the_threshold_decays_from_the_first_token_on_as_calm_has_it() -> None:
    places = np.arange(5)
    by_hand = [min(1.0, 0.9 * 0.7 + 0.1 * np.exp(-4 * t / 5)) for t in range(5)]
    np.testing.assert_allclose(decayed(0.7, places, longest=5), by_hand)
    assert decayed(1.0, places, longest=5).max() == 1.0


def test_a_token_leaves_at_the_first_exit_that_is_sure_enough_and_pays_for_all_before() -> None:
    file = {
        "uncertainty": np.float32([[0.5, 0.0], [0.5, 0.5], [0.0, 0.0]]),
        "prediction": np.array([[9, 4], [9, 9], [8, 8]]),
        "final": np.array([4, 5, 6]),
        "segment_seconds": np.array([1.0, 2.0, 3.0]),
        "ramp_seconds": np.array([0.25, 0.5]),
        "answer": np.array([7, 7, 3]),
    }
    seen = effects(token_records(file), "answer", thresholds=np.array([0.9]))
    # token 0 leaves at the second exit with the model's word, token 1 nowhere, token 2 at the first with another word
    np.testing.assert_allclose(seen.seconds, [[1 + 2 + 0.75 + 6 + 0.75, 1.25]])
    np.testing.assert_array_equal(seen.loss, [[0, 1]])
    np.testing.assert_array_equal(seen.full_seconds, [12, 6])
    assert seen.early[0] == pytest.approx(2 / 3)


def test_an_answer_loses_all_or_the_share_of_its_tokens() -> None:
    records = recorded()
    whole, share = effects(records, "answer"), effects(records, "tokens")
    np.testing.assert_array_equal(whole.loss, share.loss > 0)
    np.testing.assert_array_equal(whole.seconds, share.seconds)


def test_lower_thresholds_let_more_leave() -> None:
    seen = effects(recorded(), "tokens")
    assert (np.diff(seen.early) >= 0).all()
    assert seen.thresholds.tolist() == sorted(GRID, reverse=True)


# --- rules ---------------------------------------------------------------------------------------------


def test_calm_stops_at_the_first_threshold_whose_hoeffding_p_value_fails() -> None:
    # n = 100, budget 0.2: p(0) = exp(-8), p(.05) = exp(-4.5), p(.08) = exp(-2.88), and 0.05 = exp(-2.996)
    assert calm(losses(0, 0.05, 0.08, 0.0), 0.2, 0.05) == 2
    assert calm(losses(0.2), 0.2, 0.05) == 0
    assert calm(losses(0.0, n=30), 0.2, 0.05) == 0  # exp(-2.4): too few answers even without a mistake


def test_conformal_risk_control_counts_one_more_answer_that_loses_all() -> None:
    # (k + 1) / 101 <= 0.1 holds for k = 9
    assert in_expectation(losses(0.0, 0.09, 0.10, 0.0), 0.1, 0.05) == 2


def test_the_bound_by_betting_is_where_its_wealth_is_enough() -> None:
    rng = np.random.default_rng(2)
    sample, level = rng.random(200) * 0.3, 0.1

    def wealth(mean: float) -> float:
        """As Bates et al. write it, one loss after the other."""
        capital, highest, seen = 0.0, -np.inf, list[float]()
        deviations, sigma = 0.25, 0.25
        for i, value in enumerate(sample, start=1):
            stake = min(1.0, np.sqrt(2 * np.log(1 / level) / (len(sample) * sigma)))
            capital += np.log(1 - stake * (value - mean))
            highest = max(highest, capital)
            seen.append(value)
            deviations += (value - (0.5 + sum(seen)) / (1 + i)) ** 2
            sigma = deviations / (1 + i)
        return float(highest - np.log(1 / level))

    bound = brentq(wealth, sample.mean(), 0.9)
    assert bound_lies_below(sample, bound + 1e-6, level)
    assert not bound_lies_below(sample, bound - 1e-6, level)


def test_a_bound_below_the_budget_does_not_count_behind_one_that_is_not() -> None:
    assert upper_bound(losses(0.0, 0.5, 0.0), 0.2, 0.05) == 1


def test_the_products_test_of_whole_answers_is_the_exact_binomial() -> None:
    passing = max(k for k in range(100) if binom.cdf(k, 100, 0.2) <= 0.05)
    assert proven(losses(passing / 100, (passing + 1) / 100), 0.2, 0.05) == 1


def test_what_keeps_its_promise_in_expectation_trusts_more_than_what_keeps_it_nearly_always() -> None:
    seen = effects(recorded(n=600), "tokens").loss
    hoeffding, betting, expected = (rule(seen, 0.05, 0.05) for rule in (calm, upper_bound, in_expectation))
    assert hoeffding <= betting <= expected
    assert expected > 0


# --- on answers that a rule has not seen ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["answer", "tokens"])
def test_rules_that_promise_it_break_the_budget_in_few_draws(loss: Any) -> None:
    seen, limits = effects(recorded(n=2000), loss), Limits(0.1, 0.9)
    names = ["proven", "calm", "fast-yet-safe-ucb"]
    found = drawn(seen, [token_policy(name) for name in names], limits, draws=200, n=300, seed=3)
    allowed = binom.ppf(0.999, 200, 0.1)  # of 200 draws at 10 % each
    assert all(of.broken <= allowed for of in found)
    assert all(of.saving > 0 for of in found)


def test_a_rule_knows_nothing_of_the_answers_that_it_is_judged_on() -> None:
    records, limits = recorded(), Limits(0.1, 0.9)
    seen, half = effects(records, "tokens"), len(records) // 2
    known, asked = np.arange(half), np.arange(half, len(records))
    worse = effects(records, "tokens")
    worse.loss[:, half:] = 1.0
    for policy in TOKEN_POLICIES.values():
        first, second = (judged(of, policy, limits, known=known, asked=asked) for of in (seen, worse))
        assert first.threshold == second.threshold
        assert first.loss == pytest.approx(
            seen.loss[seen.thresholds == first.threshold][:, asked].mean() if first.threshold is not None else 0
        )


def test_without_a_threshold_that_passes_the_model_answers_by_itself() -> None:
    seen = effects(recorded(n=20), "answer")
    found = judged(seen, token_policy("calm"), Limits(0.01, 0.99), known=np.arange(10), asked=np.arange(10, 20))
    assert (found.threshold, found.saving, found.loss) == (None, 0, 0)


# --- files and the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"answer": np.arange(3)}, "answer has shape"),
        ({"answer": 0.5}, "type float64"),
        ({"answer": 0}, "answer names 1 answer"),
        ({"answer": "again"}, "stand together"),
    ],
    ids=["too few", "no whole numbers", "one answer", "an answer in two pieces"],
)
def test_a_file_whose_answers_are_not_told_apart_is_refused_by_the_array(change: dict[str, Any], why: str) -> None:
    file = arrays()
    answer = change["answer"]
    if isinstance(answer, str):
        file["answer"] = file["answer"] % 100
    else:
        file["answer"] = answer if isinstance(answer, np.ndarray) else np.full(len(file["answer"]), answer)
    with pytest.raises(InvalidRecordsError, match=why):
        token_records(file)


def test_a_policy_of_requests_is_refused_for_tokens_with_those_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match=r"apparate.*none for files of tokens.*calm"):
        token_policy("apparate")


def test_the_command_replays_files_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.npz"
    np.savez(file, **arrays(n=2000))
    options = ["--budget", "0.1", "--draws", "20", "--loss", "tokens"]
    printed = CliRunner().invoke(app, ["replay", str(file), *options])
    assert printed.exit_code == 0, printed.output
    assert all(name in printed.stdout for name in TOKEN_POLICIES)
    as_json = CliRunner().invoke(app, ["replay", str(file), *options, "--policy", "calm", "--json"])
    found = json.loads(as_json.stdout)
    (row,) = found["policies"]
    assert (found["answers"], found["loss"], row["name"], row["draws"]["count"]) == (2000, "tokens", "calm", 20)
    assert 0 < row["saving"] < 1
    assert row["loss"] <= 0.1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--policy", "certified"], "is none for files of tokens"),
        (["--loss", "words"], "--loss words is unknown; choose from answer, tokens"),
        (["--budget", "1.5"], "--budget is 1.5"),
    ],
)
def test_the_command_refuses_by_option(tmp_path: Path, options: list[str], why: str) -> None:
    file = tmp_path / "tokens.npz"
    np.savez(file, **arrays())
    result = CliRunner().invoke(app, ["replay", str(file), *options])
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())


def test_files_of_tokens_and_of_requests_are_replayed_apart(tmp_path: Path) -> None:
    tokens, requests = arrays(), {name: values for name, values in arrays().items() if name != "answer"}
    np.savez(tmp_path / "tokens.npz", **tokens)
    np.savez(tmp_path / "requests.npz", **requests)
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "tokens.npz"), str(tmp_path / "requests.npz")])
    assert result.exit_code == 2
    assert "replay files of tokens by themselves" in " ".join(result.stderr.split())
