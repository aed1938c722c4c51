"""Apparate's rules on examples small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from scores import small
from seeds import seeds  # type: ignore[import-not-found]

from offramp_core.evaluate import evaluate
from offramp_core.records import ExitCosts, Records
from offramp_lab.policies import NO_EXIT, Objective, Trace, policy
from offramp_lab.policies.apparate import CLIMBING as PUBLISHED
from offramp_lab.policies.apparate_artifact import CLIMBING as ARTIFACT
from offramp_lab.policies.apparate_artifact import History
from offramp_lab.policies.climb import climb


def records(uncertainty: npt.ArrayLike, agrees: npt.ArrayLike, *, ramp_seconds: float = 0.001) -> Records:
    """Equal segments that add up to 1 second."""
    scores, right = np.asarray(uncertainty, dtype=np.float32), np.asarray(agrees, dtype=bool)
    n, r = scores.shape
    costs = ExitCosts(np.full(r + 1, 1 / (r + 1)), np.full(r, ramp_seconds))
    return Records(scores, right, np.ones(n, dtype=bool), costs)


def constant(n: int, scores: list[float], right: list[bool]) -> Records:
    return records(np.tile(scores, (n, 1)), np.tile(right, (n, 1)))


def steps(trace: Trace) -> list[tuple[int, tuple[int, ...], tuple[float, ...]]]:
    return [(p.since, p.active, tuple(float(t) for t in p.thresholds)) for p in trace.plans]


def sets(trace: Trace) -> list[tuple[int, tuple[int, ...]]]:
    """Ramps by the row they came into force."""
    out: list[tuple[int, tuple[int, ...]]] = []
    for p in trace.plans:
        if not out or out[-1][1] != p.active:
            out.append((p.since, p.active))
    return out


def plain_climb(window: Records, active: tuple[int, ...], budget: float) -> list[float]:
    """The artifact's rules once more, one whole evaluation per trial, slow and obvious."""

    def tried(thresholds: list[float]) -> tuple[int, float]:
        seen = evaluate(window, active, [min(1.0, t) for t in thresholds])
        return seen.disagreements, round(seen.mean_seconds * len(window), 9)

    now, steps = [0.0] * len(active), [0.01] * len(active)
    while True:
        errors, seconds = tried(now)
        best, best_score, idle = None, np.inf, []
        for k in range(len(active)):
            moved = [round(t + steps[k], 4) if i == k else t for i, t in enumerate(now)]
            new_errors, new_seconds = tried(moved)
            if new_errors >= budget * len(window):
                continue
            if new_seconds != seconds and abs(new_errors - errors) / abs(new_seconds - seconds) < best_score:
                best, best_score = k, abs(new_errors - errors) / abs(new_seconds - seconds)
            if new_seconds == seconds or new_errors == errors:
                idle.append(k)
        best = idle[0] if best is None and idle else best
        if best is not None and now[best] <= 1:
            now[best] = round(now[best] + steps[best], 4)
            for k in {best, *idle}:
                steps[k] *= 2
            continue
        wide = [k for k in range(len(active)) if round(steps[k], 4) > 0.001 and now[k] <= 1]
        if not wide:
            return [min(1.0, t) for t in now]
        for k in wide:
            steps[k] /= 2


class TestClimb:
    WINDOW = records([[0.05], [0.15], [0.35], [0.55]], [[True], [True], [True], [False]])

    def test_published_steps_double_and_halve_from_a_tenth(self) -> None:
        # 0 -> 0.1 (step 0.2) -> 0.3 (0.4); 0.7 errs (0.2) -> 0.5 (0.4); 0.9, 0.7, 0.6 err; 0.55 reaches no score: end.
        climbed = climb(self.WINDOW, (0,), 0.01, PUBLISHED)
        assert climbed.thresholds == pytest.approx((0.5,))
        assert climbed.disagreement == 0
        assert climbed.saving == pytest.approx(1 - (3 * 0.501 + 1.001) / 4)

    def test_the_artifact_also_moves_where_no_score_lies(self) -> None:
        # 0.01, 0.03, 0.07, 0.15, 0.31; 0.63 errs; 0.47; 0.79, 0.63 err; 0.55 changes nothing and is taken; 0.71 ...
        # 0.5506 err.
        assert climb(self.WINDOW, (0,), 0.01, ARTIFACT).thresholds == pytest.approx((0.55,))

    def test_the_budget_may_be_used_up_as_published_and_not_in_the_artifact(self) -> None:
        assert climb(self.WINDOW, (0,), 0.25, PUBLISHED).disagreement == 0.25
        assert climb(self.WINDOW, (0,), 0.25, ARTIFACT).disagreement == 0

    def test_the_move_that_loses_least_agreement_per_second_comes_first(self) -> None:
        # Only one error is allowed. Ramp 0 would free three inputs for one error; ramp 1 frees one input for the same
        # error, later.
        window = records(
            [[0.05, 0.9], [0.05, 0.9], [0.05, 0.9], [0.9, 0.05]],
            [[True, True], [True, True], [False, True], [True, False]],
            ramp_seconds=0.0,
        )
        climbed = climb(window, (0, 1), 0.25, PUBLISHED)
        assert climbed.disagreement == 0.25
        assert climbed.saving >= 1 - (3 / 3 + 1) / 4
        assert climbed.thresholds[0] > 0.05

    def test_a_ramp_whose_first_step_reaches_no_score_looks_further(self) -> None:
        window = constant(16, [0.45], [True])  # 0.1, 0.2, 0.4 reach nothing, 0.8 does
        assert climb(window, (0,), 0.01, PUBLISHED).thresholds == pytest.approx((0.8,))

    @pytest.mark.parametrize("seed", seeds(60, quick=10))
    def test_it_climbs_as_whole_evaluations_would(self, seed: int) -> None:
        window = small(seed, max_rows=30, n_ramps=3)
        window = replace(window, final_agrees=np.ones(len(window), dtype=bool))
        for budget in (0.0001, 0.1, 0.3):
            expected = plain_climb(window, (0, 1, 2), budget)
            assert climb(window, (0, 1, 2), budget, ARTIFACT).thresholds == pytest.approx(expected, abs=1e-9)

    def test_frozen_ramps_keep_their_threshold(self) -> None:
        window = constant(4, [0.3, 0.3], [True, True])
        climbed = climb(window, (0, 1), 0.01, ARTIFACT, start=[0.2, 0.0], frozen=np.array([True, False]))
        assert climbed.thresholds[0] == 0.2
        assert climbed.thresholds[1] > 0.3


class TestAsPublished:
    ONE = Objective(0.01, max_ramps=1, max_overhead=1.0)

    def test_thresholds_come_after_the_first_window_and_probes_after_128(self) -> None:
        stream = constant(300, [0.2, 0.2, 0.2], [True, True, True])
        trace = policy("apparate").run(stream, stream, self.ONE)
        # Steps of 0.1 and 0.2 reach nothing, 0.4 does. The only ramp pays, so it moves one place forward until it is
        # the first.
        assert steps(trace) == [(0, (1,), (0.0,)), (16, (1,), (0.4,)), (128, (0,), (0.0,)), (144, (0,), (0.4,))]

    @pytest.mark.parametrize(("batch_size", "row"), [(1, 51), (8, 56)])
    def test_a_wrong_answer_tunes_anew_on_the_last_16(self, batch_size: int, row: int) -> None:
        right = np.ones((100, 3), dtype=bool)
        right[50, 1] = False
        stream = records(np.full((100, 3), 0.2), right)
        objective = Objective(0.01, max_ramps=1, max_overhead=1.0, batch_size=batch_size)
        trace = policy("apparate").run(stream, stream, objective)
        # The wrong request cannot be told from the others, so nothing may leave any more.
        assert steps(trace) == [(0, (1,), (0.0,)), (16, (1,), (0.4,)), (row, (1,), (0.0,))]
        assert np.count_nonzero(~trace.agrees) == 1

    def test_ramps_that_do_not_pay_go_and_the_place_that_promises_most_comes(self) -> None:
        # Seven ramps, 1, 3 and 5 active. 1 and 5 are always wrong; 3 takes every other request.
        scores = np.tile([0.9, 0.9, 0.9, 0.95, 0.9, 0.9, 0.3], (200, 1))
        right = np.tile([False, False, False, False, False, False, True], (200, 1))
        scores[::2, 3], right[::2, 3] = 0.05, True
        stream = records(scores, right)
        trace = policy("apparate").run(stream, stream, Objective(0.01, max_ramps=3, max_overhead=1.0))
        # Nothing left at 5, so nothing more can leave at 4; behind 5 half of the requests still may: 6 it is.
        assert steps(trace)[:3] == [
            (0, (1, 3, 5), (0.0, 0.0, 0.0)),
            (16, (1, 3, 5), (0.0, 0.1, 0.0)),
            (128, (3, 6), (0.1, 0.0)),
        ]

    def test_a_ramp_within_the_budget_is_added_before_the_best_when_all_pay(self) -> None:
        # Ramp 1 takes every other request, ramp 3 the rest: both pay, and there is room for a third.
        scores = np.tile([0.9, 0.95, 0.9, 0.05, 0.9], (200, 1))
        right = np.tile([False, False, False, True, False], (200, 1))
        scores[::2, 1], right[::2, 1] = 0.05, True
        stream = records(scores, right)
        objective = Objective(0.01, max_ramps=3, max_overhead=0.0025)
        trace = policy("apparate").run(stream, stream, objective)
        assert trace.plans[0].active == (1, 3)  # a third would break the overhead bound
        assert sets(trace) == [(0, (1, 3))]
        roomier = records(scores, right, ramp_seconds=0.0)
        assert sets(policy("apparate").run(roomier, roomier, Objective(0.01, max_ramps=2, max_overhead=1.0)))[1] == (
            128,
            (1, 2),  # ramp 3 saves least, so it moves one place forward
        )


class TestTheArtifact:
    """Nine ramps, of which 2, 4 and 6 begin. Only ramp 4 is ever right."""

    OBJECTIVE = Objective(0.01, max_ramps=3, max_overhead=1.0)

    def stream(self, n: int, *, wrong: int | None = None) -> Records:
        scores, right = [0.5] * 9, [False] * 9
        scores[4], right[4] = 0.1, True
        out = constant(n, scores, right)
        if wrong is not None:
            out.agrees[wrong, 4] = False
        return out

    def test_vision_tunes_on_the_first_batch_and_moves_ramps_every_30(self) -> None:
        stream = self.stream(130)
        trace = policy("apparate-artifact").run(stream, stream, self.OBJECTIVE)
        assert trace.exit[0] == NO_EXIT
        assert (trace.exit[1:] == 4).all()
        # 2 and 6 never pay and go; with quota left a ramp half-way before the first is probed, and goes again.
        assert sets(trace) == [(0, (2, 4, 6)), (30, (4,)), (60, (1, 4)), (90, (4,)), (120, (1, 4))]

    def test_vision_switches_an_erring_ramp_off_while_the_running_agreement_is_low(self) -> None:
        stream = self.stream(60, wrong=20)
        trace = policy("apparate-artifact").run(stream, stream, self.OBJECTIVE)
        assert (trace.exit[1:21] == 4).all()
        assert (trace.exit[21:30] == NO_EXIT).all()  # 1 of 21 is above 1 %
        assert (trace.exit[30:] == 4).all()  # at the adjustment new thresholds save more than 2 points
        assert np.count_nonzero(~trace.agrees) == 1

    def test_text_waits_for_its_first_adjustment(self) -> None:
        stream = self.stream(310)
        trace = policy("apparate-artifact-nlp").run(stream, stream, self.OBJECTIVE)
        # On the first batch nothing erred, so nothing is tuned; batch 100 finds thresholds that save more than 5
        # points.
        assert (trace.exit[:100] == NO_EXIT).all()
        assert (trace.exit[100:] == 4).all()
        # A ramp that nobody reaches any more loses nothing, so 6 stays.
        assert sets(trace) == [(0, (2, 4, 6)), (200, (4, 6)), (300, (1, 4, 6))]
        assert trace.plans[-1].thresholds[0] == 0.01

    def test_text_retunes_only_the_ramp_that_erred(self) -> None:
        stream = self.stream(220, wrong=150)
        trace = policy("apparate-artifact-nlp").run(stream, stream, self.OBJECTIVE)
        before, after = (next(p.thresholds for p in reversed(trace.plans) if p.since <= row) for row in (150, 151))
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] <= 0.1 < before[1]
        assert (trace.exit[151:200] == NO_EXIT).all()
        assert (trace.exit[200:] == 4).all()

    def test_it_remembers_four_batches_and_after_ramps_changed_only_one(self) -> None:
        history, seen = History(), []
        for batch in range(9):
            history.push(2)
            seen.append((history.first, history.end))
            if batch == 4:
                history.forget()
        assert seen[:5] == [(0, 2), (0, 4), (0, 6), (0, 8), (2, 10)]
        assert seen[5:] == [(10, 12), (12, 14), (14, 16), (16, 18)]
