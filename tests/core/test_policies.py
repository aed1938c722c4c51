"""What every named policy keeps, and how the rivals rank where their order is a theorem."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom
from scores import recorded, small, with_predictions, with_small_model

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evaluate import evaluate
from offramp_core.records import Records
from offramp_core.search.grid import STEPS, threshold_of
from offramp_core.search.thresholds import best_thresholds
from offramp_lab.policies import NO_EXIT, POLICIES, NamedPolicy, Objective, PlanInForce, Trace, policy, replay_halves
from offramp_lab.policies.common_threshold import common_thresholds

pytestmark = pytest.mark.slow  # every policy meets every clause

R = 6
OBJECTIVE = Objective(0.02)
# The records here are of one precision; what serves another has tests of its own in test_precision.py.
HERE = {name: p for name, p in POLICIES.items() if name != "lower-precision"}
ALL = [pytest.param(p, id=p.name) for p in HERE.values()]
BY_THRESHOLDS = [
    pytest.param(p, id=p.name) for p in HERE.values() if p.name not in {"oracle", "patience", "static-small"}
]
DEPLOYABLE = [pytest.param(p, id=p.name) for p in HERE.values() if not p.hindsight]
FIXED = [pytest.param(p, id=p.name) for p in HERE.values() if not p.hindsight and not p.online]
# Keep a ramp everywhere, or a whole model: their papers know no bound on ramps.
UNBOUNDED = {"patience", "static-small", "two-layer"} | {n for n in HERE if n.startswith(("branchynet", "deebert"))}


def halves(n: int = 2400, *, seed: int = 1, harder: float = 0.0) -> tuple[Records, Records]:
    records = recorded(n, R - 1, seed=seed, harder=harder)
    return replay_halves(with_small_model(with_predictions(records, seed=seed), seed=seed))


def scrambled_after(records: Records, row: int) -> Records:
    """The same rows up to one, then rows that look quite different."""
    rng = np.random.default_rng(5)
    changed = rng.permutation(records.uncertainty[row:]) ** 2
    return replace(
        records,
        uncertainty=np.concatenate([records.uncertainty[:row], changed]),
        agrees=np.concatenate([records.agrees[:row], ~records.agrees[row:]]),
        prediction=np.concatenate([records.prediction[:row], records.prediction[row:, ::-1]]),
    )


class TestEveryPolicy:
    @pytest.mark.parametrize("named", ALL)
    def test_the_same_records_give_the_same_trace(self, named: NamedPolicy) -> None:
        tune, stream = halves()
        first, second = (named.run(tune, stream, OBJECTIVE) for _ in range(2))
        assert first.plans == second.plans
        assert first.certificate == second.certificate
        np.testing.assert_array_equal(first.exit, second.exit)
        np.testing.assert_array_equal(first.agrees, second.agrees)

    @pytest.mark.parametrize("named", ALL)
    def test_records_are_left_as_they_were(self, named: NamedPolicy) -> None:
        tune, stream = halves(800)
        before = [a.copy() for r in (tune, stream) for a in (r.uncertainty, r.agrees, r.final_agrees, r.prediction)]
        named.run(tune, stream, OBJECTIVE)
        after = [a for r in (tune, stream) for a in (r.uncertainty, r.agrees, r.final_agrees, r.prediction)]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old, new)

    @pytest.mark.parametrize("named", ALL)
    def test_a_trace_is_what_its_plans_and_exits_say(self, named: NamedPolicy) -> None:
        tune, stream = halves()
        trace = named.run(tune, stream, OBJECTIVE)
        assert trace.exit.shape == trace.agrees.shape == (len(stream),)
        told = np.where(
            trace.exit == NO_EXIT, stream.final_agrees, stream.agrees[np.arange(len(stream)), trace.exit.clip(0)]
        )
        np.testing.assert_array_equal(trace.agrees, told)
        for plan, following in zip(trace.plans, [*trace.plans[1:], None], strict=True):
            rows = slice(plan.since, following.since if following else None)
            assert len(plan.active) == len(plan.thresholds)
            assert named.name == "oracle" or set(np.unique(trace.exit[rows])) <= {NO_EXIT, *plan.active}

    @pytest.mark.parametrize("named", BY_THRESHOLDS)
    def test_its_time_is_that_of_evaluating_each_plan_on_the_rows_it_served(self, named: NamedPolicy) -> None:
        tune, stream = halves()
        trace = named.run(tune, stream, OBJECTIVE)
        ends = [*(p.since for p in trace.plans[1:]), len(stream)]
        parts = [
            (evaluate(stream.take(slice(p.since, end)), p.active, p.thresholds), end - p.since)
            for p, end in zip(trace.plans, ends, strict=True)
        ]
        assert trace.saving(stream) == pytest.approx(sum(e.saving * n for e, n in parts) / len(stream))
        assert np.count_nonzero(~trace.agrees) == sum(e.disagreements for e, _ in parts)

    @pytest.mark.parametrize("named", [p for p in ALL if p.id not in UNBOUNDED])
    def test_every_plan_keeps_to_the_ramps_and_the_overhead_allowed(self, named: NamedPolicy) -> None:
        records = recorded(2400, R, seed=1, ramp_seconds=0.02)
        tune, stream = replay_halves(records)
        for plan in named.run(tune, stream, Objective(0.02, max_overhead=0.045)).plans:
            assert len(plan.active) <= 2
            assert tune.costs.overhead(plan.active) <= 0.045

    @pytest.mark.parametrize("named", [p for p in ALL if p.id not in UNBOUNDED | {"oracle"}])
    def test_without_ramps_allowed_exits_are_off(self, named: NamedPolicy) -> None:
        tune, stream = halves(400)
        outcome = named(tune, stream, Objective(0.02, max_ramps=0))
        assert (outcome.active, outcome.saving, outcome.disagreement) == ((), 0.0, 0.0)

    @pytest.mark.parametrize("named", ALL)
    @pytest.mark.parametrize("n", [1, 2, 3, 17])
    def test_a_handful_of_rows_is_enough_to_run(self, named: NamedPolicy, n: int) -> None:
        tune, stream = (r.take(slice(n)) for r in halves(400))
        trace = named.run(tune, stream, Objective(0.02, batch_size=4))
        assert len(trace.exit) == n

    @pytest.mark.parametrize("named", ALL)
    def test_it_says_what_it_is_in_one_line(self, named: NamedPolicy) -> None:
        assert 10 < len(named.describe) <= 110
        assert "\n" not in named.describe
        assert named.run.__doc__ or named.name.startswith(("branchynet", "deebert"))


class TestNoPeeking:
    @pytest.mark.parametrize("named", DEPLOYABLE)
    @pytest.mark.parametrize("batch_size", [1, 8])
    def test_what_comes_later_changes_nothing_before(self, named: NamedPolicy, batch_size: int) -> None:
        tune, stream = halves(1600)
        objective = replace(OBJECTIVE, batch_size=batch_size)
        first = named.run(tune, stream, objective)
        for row in (17, 128, 501):
            second = named.run(tune, scrambled_after(stream, row), objective)
            np.testing.assert_array_equal(first.exit[:row], second.exit[:row])
            np.testing.assert_array_equal(first.agrees[:row], second.agrees[:row])
            seen = row - row % batch_size  # the plan of a row is decided on whole batches before it
            assert [p for p in first.plans if p.since <= seen] == [p for p in second.plans if p.since <= seen]

    @pytest.mark.parametrize("named", FIXED)
    def test_a_plan_that_is_kept_does_not_depend_on_the_stream(self, named: NamedPolicy) -> None:
        tune, stream = halves()
        _, other = halves(seed=9, harder=2.0)
        first, second = (named.run(tune, s, OBJECTIVE) for s in (stream, other))
        assert first.plans == second.plans
        assert len(first.plans) == 1
        assert first.certificate == second.certificate

    @pytest.mark.parametrize("name", ["offline-optimal", "online-optimal", "branchynet-opt", "deebert-opt", "oracle"])
    def test_policies_of_hindsight_are_marked_as_such(self, name: str) -> None:
        tune, stream = halves()
        other, _ = halves(seed=9, harder=2.0)
        assert policy(name).hindsight
        first, second = (policy(name).run(t, stream, OBJECTIVE) for t in (tune, other))
        np.testing.assert_array_equal(first.exit, second.exit)

    def test_exactly_the_policies_that_change_their_plan_are_online(self) -> None:
        tune, stream = halves(3000)
        many = {n for n, p in HERE.items() if len(p.run(tune, stream, OBJECTIVE).plans) > 1}
        assert many == {n for n, p in HERE.items() if p.online}


class TestOrder:
    @pytest.mark.parametrize("seed", range(30))
    def test_exact_thresholds_never_lose_to_the_climb_on_the_same_ramps_and_records(self, seed: int) -> None:
        records = recorded(300, 6, seed=seed) if seed % 2 else small(seed, max_rows=60, n_ramps=3)
        objective = Objective(0.03, max_overhead=1.0)
        climbed = policy("greedy")(records, records, objective)
        if climbed.disagreement <= 0.03:
            best = best_thresholds(records, climbed.active, max_disagreement=0.03)
            assert best.saving >= climbed.saving - 1e-12

    @pytest.mark.parametrize("seed", range(10))
    def test_hindsight_is_worth_something(self, seed: int) -> None:
        tune, stream = halves(seed=seed)
        saving = {n: policy(n)(stream, stream, OBJECTIVE).saving for n in ("exact", "offline-optimal", "oracle")}
        assert saving["oracle"] >= saving["offline-optimal"] == saving["exact"]
        kept = policy("exact")(tune, stream, OBJECTIVE)
        if kept.disagreement <= OBJECTIVE.budget:
            assert saving["offline-optimal"] >= kept.saving - 1e-12

    @pytest.mark.parametrize("seed", range(60))
    def test_no_plan_without_errors_beats_the_oracle(self, seed: int) -> None:
        records = replace(small(seed, max_rows=30), final_agrees=np.ones(len(small(seed, max_rows=30)), dtype=bool))
        objective = Objective(0.0, max_overhead=np.inf)
        assert policy("oracle")(records, records, objective).disagreement == 0
        for name in ("offline-optimal", "online-optimal", "two-layer", "branchynet-opt", "single-threshold"):
            found = policy(name)(records, records, objective)
            assert found.disagreement == 0
            assert policy("oracle")(records, records, objective).saving >= found.saving - 1e-12

    @pytest.mark.parametrize("name", ["offline-optimal", "online-optimal", "branchynet-opt", "deebert-opt"])
    def test_hindsight_keeps_the_budget_on_its_stream(self, name: str) -> None:
        for seed in range(5):
            tune, stream = halves(seed=seed)
            assert policy(name)(tune, stream, OBJECTIVE).disagreement <= OBJECTIVE.budget

    @pytest.mark.parametrize(
        "name",
        ["exact", "greedy", "single-threshold", "fast-yet-safe", "two-layer", "branchynet", "branchynet+", "patience"],
    )
    def test_what_is_tuned_to_the_budget_keeps_it_on_the_rows_it_tuned_on(self, name: str) -> None:
        for seed in range(5):
            tune, _ = halves(seed=seed)
            outcome = policy(name)(tune, tune, OBJECTIVE)
            assert outcome.disagreement <= OBJECTIVE.budget
            assert outcome.saving > 0

    def test_a_threshold_each_is_worth_at_least_a_common_one_in_hindsight(self) -> None:
        for seed in range(5):
            tune, stream = halves(seed=seed)
            assert (
                policy("branchynet-opt")(tune, stream, OBJECTIVE).saving
                >= policy("branchynet")(stream, stream, OBJECTIVE).saving
            )


class TestCommonThreshold:
    @pytest.mark.parametrize("seed", range(40))
    def test_the_curve_is_that_of_evaluating_every_threshold(self, seed: int) -> None:
        records = small(seed, max_rows=40)
        ramps = tuple(range(records.n_ramps))
        curve = common_thresholds(records, ramps)
        keys = np.unique(np.concatenate([curve.keys, curve.keys[1:] - 1, np.arange(0, STEPS + 1, STEPS // 50)]))
        for key, errors in zip(keys.tolist(), curve.at(keys).tolist(), strict=True):
            seen = evaluate(records, ramps, (threshold_of(key),) * len(ramps))
            assert seen.disagreements == errors
            at = np.searchsorted(curve.keys, key, side="right") - 1
            assert curve.saving[at] == pytest.approx(seen.saving, abs=1e-9)

    @pytest.mark.parametrize("seed", range(40))
    def test_the_best_is_that_of_all_thresholds(self, seed: int) -> None:
        records = small(seed, max_rows=40)
        ramps = tuple(range(records.n_ramps))
        found, saving = common_thresholds(records, ramps).best(3)
        keys = common_thresholds(records, ramps).keys
        seen = [evaluate(records, ramps, (threshold_of(int(k)),) * len(ramps)) for k in keys]
        allowed = [e.saving for e in seen if e.disagreements <= 3]
        if allowed:
            assert saving == pytest.approx(max(allowed))
            assert evaluate(records, ramps, (found,) * len(ramps)).saving == pytest.approx(saving)
        else:
            assert found == 0


class TestRefusals:
    def test_records_without_a_model_at_the_input_show_no_smaller_model(self) -> None:
        records = with_predictions(recorded(200, 4, seed=1))
        assert "segment_seconds[0]" in (policy("static-small").refusal(records) or "")
        with pytest.raises(InvalidRecordsError, match="at the input"):
            policy("static-small")(records, records, OBJECTIVE)

    def test_records_without_predictions_show_no_patience(self) -> None:
        records = recorded(200, 4, seed=1)
        assert "prediction" in (policy("patience").refusal(records) or "")
        with pytest.raises(InvalidRecordsError, match="prediction is missing"):
            policy("patience")(records, records, OBJECTIVE)

    def test_complete_records_are_refused_by_none(self) -> None:
        tune, _ = halves(200)
        assert [n for n, p in HERE.items() if p.refusal(tune)] == []

    def test_an_unknown_policy_is_told_the_known_ones(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"apparate.*single-threshold"):
            policy("magic")

    def test_a_policy_sees_at_least_one_request_at_a_time(self) -> None:
        with pytest.raises(InvalidArgumentError, match="batch_size is 0"):
            Objective(0.01, batch_size=0)


class TestTrace:
    def test_a_request_pays_for_the_ramps_in_force_that_it_reaches(self) -> None:
        records = recorded(4, 3, seed=1, ramp_seconds=0.1)  # four segments of 0.25 each
        plans = (PlanInForce(0, (0, 2), (0.5, 0.5)), PlanInForce(2, (1,), (0.5,)), PlanInForce(3, (), ()))
        trace = Trace(np.array([2, NO_EXIT, 1, 0]), plans, np.ones(4, dtype=bool))
        # through ramps 0 and 2 | both and to the end | ramp 1 alone | a ramp nobody had in force is paid as well
        np.testing.assert_allclose(trace.seconds(records), [0.75 + 0.2, 1 + 0.2, 0.5 + 0.1, 0.25 + 0.1])
        assert trace.saving(records) == pytest.approx(1 - (0.95 + 1.2 + 0.6 + 0.35) / 4)

    @pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 5, 3)])
    def test_plans_begin_at_the_beginning_and_rise(self, starts: tuple[int, ...]) -> None:
        with pytest.raises(InvalidArgumentError, match="must begin at 0"):
            Trace(np.array([NO_EXIT]), tuple(PlanInForce(s, (), ()) for s in starts), np.ones(1, dtype=bool))

    def test_it_is_not_priced_on_other_records(self) -> None:
        trace = policy("exits-off").run(*halves(40), OBJECTIVE)
        with pytest.raises(InvalidRecordsError, match="has 7 rows"):
            trace.seconds(recorded(7, 3, seed=1))


class TestHalves:
    def test_rows_are_ordered_by_time_where_it_is_known(self) -> None:
        records = recorded(100, 3, seed=1)
        older, newer = replay_halves(records.take(np.random.default_rng(0).permutation(100)))
        assert older.time is not None
        assert newer.time is not None
        assert older.time.max() < newer.time.min()


class TestRivals:
    def test_deebert_takes_the_costliest_head_of_every_place(self) -> None:
        records = recorded(600, 4, seed=1)
        segments = np.array([0.3, 0.0, 0.3, 0.0, 0.4])  # ramps 0 and 1 share a place, and so do 2 and 3
        heads = np.array([0.01, 0.02, 0.03, 0.001])
        records = replace(records, costs=replace(records.costs, segment_seconds=segments, ramp_seconds=heads))
        assert policy("deebert").run(records, records, Objective(0.1)).plans[0].active == (1, 2)
        assert policy("branchynet").run(records, records, Objective(0.1)).plans[0].active == (0, 1, 2, 3)

    @pytest.mark.parametrize("name", ["branchynet", "branchynet+", "deebert", "patience"])
    def test_a_ramp_everywhere_is_paid_for_even_where_it_costs_more_than_it_saves(self, name: str) -> None:
        records = with_predictions(recorded(600, 8, seed=1, ramp_seconds=0.2))
        outcome = policy(name)(records, records, OBJECTIVE)
        assert len(outcome.active) == 8
        assert outcome.saving < 0

    def test_patience_counts_ramps_that_repeat_the_one_before(self) -> None:
        #                     ramp: 0  1  2  3  4
        prediction = np.array(
            [
                [1, 1, 1, 1, 1],  # twice repeated at ramp 2
                [1, 2, 2, 2, 1],  # at ramp 3
                [1, 1, 2, 2, 1],  # never twice in a row
                [2, 2, 2, 1, 1],  # at ramp 2, wrongly
            ]
        )
        records = replace(
            recorded(4, 5, seed=1, ramp_seconds=0.0),
            prediction=prediction,
            agrees=prediction == np.array([[1], [2], [2], [1]]),
        )
        # Patience 1 errs on the last two, 2 on the last, 3 on none.
        for budget, exits in [(0.5, [1, 2, 1, 1]), (0.25, [2, 3, NO_EXIT, 2]), (0.0, [3, NO_EXIT, NO_EXIT, NO_EXIT])]:
            assert policy("patience").run(records, records, Objective(budget)).exit.tolist() == exits

    def test_the_smaller_model_always_answers(self) -> None:
        tune, stream = halves()
        trace = policy("static-small").run(tune, stream, OBJECTIVE)
        assert (trace.exit == 0).all()
        assert trace.saving(stream) == pytest.approx(0.9)
        assert trace.disagreement == pytest.approx(0.1, abs=0.03)

    def test_two_layers_are_one_ramp_and_the_model(self) -> None:
        tune, stream = halves()
        (plan,) = policy("two-layer").run(tune, stream, OBJECTIVE).plans
        assert len(plan.active) == 1

    def test_online_hindsight_spends_what_earlier_windows_left(self) -> None:
        calm, rough = recorded(1024, 5, seed=1, harder=-9.0), recorded(1024, 5, seed=2, harder=1.5)
        both = replace(
            calm,
            uncertainty=np.concatenate([calm.uncertainty, rough.uncertainty]),
            agrees=np.concatenate([calm.agrees, rough.agrees]),
            final_agrees=np.ones(2048, dtype=bool),
            time=None,
        )
        trace = policy("online-optimal").run(both, both, OBJECTIVE)
        assert np.count_nonzero(~trace.agrees[:1024]) < 20 < np.count_nonzero(~trace.agrees[1024:])
        assert trace.disagreement <= 0.02


@pytest.mark.slow
class TestPromises:
    @pytest.mark.parametrize("name", ["fast-yet-safe", "certified"])
    def test_what_proves_its_budget_breaks_it_no_more_often_than_promised(self, name: str) -> None:
        """The pool is the population: draws with replacement, truth is the plan's rate on the whole pool."""
        pool = recorded(20_000, 5, seed=11)
        rng = np.random.default_rng(3)
        broken = useful = 0
        draws = 200
        for _ in range(draws):
            outcome = policy(name)(pool.take(rng.integers(0, len(pool), 1500)), pool, OBJECTIVE)
            broken += outcome.disagreement > OBJECTIVE.budget
            useful += outcome.saving > 0.05
        assert binom.sf(broken - 1, draws, 0.05) >= 0.001
        assert useful >= 0.9 * draws
