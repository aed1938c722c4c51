"""The serving simulator: checked against queueing theory, against Lindley's recursion and against the worker's own
execution."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.batching import ClockworkBatching, OfframpBatching, TfServingBatching
from offramp_core.bundle import BatchProfile, Profile
from offramp_core.costs import CostTable
from offramp_core.errors import InvalidArgumentError
from offramp_lab.simulate import ANSWERED, BATCHING, DROPPED, REJECTED, batching, capacity, scaled, serve_stream, spread
from offramp_lab.simulate.arrivals import ARRIVALS, BURST_FACTOR, BURST_SHARE, bursts, fixed, poisson
from offramp_lab.simulate.stages import stages_of

ALONE = OfframpBatching(max_batch=1, queue_rows=None)
FREE = OfframpBatching(queue_rows=None)


@dataclass(frozen=True)
class InForce:
    since: int
    active: tuple[int, ...]


@dataclass(frozen=True)
class Decided:
    exit: npt.NDArray[np.intp]
    plans: tuple[InForce, ...]


def decided(exits: list[int] | npt.NDArray[np.intp], *plans: tuple[int, tuple[int, ...]]) -> Decided:
    return Decided(np.asarray(exits, dtype=np.intp), tuple(InForce(*plan) for plan in plans or ((0, (0, 2)),)))


def stays(n: int) -> Decided:
    return decided([-1] * n, (0, ()))


def affine(
    fixed_seconds: float = 1.0,
    per_row: float = 1.0,
    *,
    ramp: float = 0.25,
    regroup: float = 0.125,
    sizes: tuple[int, ...] = (1, 2, 8),
) -> Profile:
    """Three ramps; a segment of b rows takes fixed + per_row * b; ramps 0 and 1 share a place."""
    batches = []
    for size in sizes:
        piece = fixed_seconds + per_row * size
        segments = (piece, 0.0, piece, piece)
        batches.append(BatchProfile(size, sum(segments), segments, (ramp, 2 * ramp, 4 * ramp), regroup))
    return Profile("test", 1, tuple(batches))


class TestCosts:
    def test_sizes_between_and_beyond_measured_ones_follow_the_line(self) -> None:
        table = CostTable(affine(), sizes=range(33))
        for size in (1, 2, 3, 7, 8, 9, 32):
            assert table.segment[size] == pytest.approx([1 + size, 0, 1 + size, 1 + size])

    def test_times_that_fall_with_size_are_not_extrapolated_downwards(self) -> None:
        profile = affine()
        shrinking = replace(
            profile, batches=(*profile.batches[:2], replace(profile.batches[2], segment_seconds=(1.0, 0.0, 1.0, 1.0)))
        )
        assert CostTable(shrinking, sizes=range(33)).segment[32].tolist() == [1, 0, 1, 1]

    def test_one_measured_size_goes_on_in_proportion(self) -> None:
        table = CostTable(affine(sizes=(4,)), sizes=range(9))
        assert table.segment[8, 0] == pytest.approx(10)
        assert table.segment[2, 0] == pytest.approx(5)

    def test_active_ramps_at_one_place_share_a_stage(self) -> None:
        stages = stages_of(CostTable(affine(), sizes=range(9)), active=(0, 1, 2), used=())
        assert stages.position == (0, 0, 1)
        assert stages.seconds[0][1] == pytest.approx(2 + 0.25 + 0.5)
        assert len(stages.seconds) == 3

    def test_a_head_out_of_force_is_paid_by_those_who_leave_there_only(self) -> None:
        stages = stages_of(CostTable(affine(), sizes=range(9)), active=(), used=(2,))
        nobody, _ = stages.run((0, 2), carry_on=True)
        one, _ = stages.run((1, 1), carry_on=True)
        assert nobody[-1] == pytest.approx(3 * 3)
        assert one[0] == pytest.approx(2 * 3 + 1)


class TestOneBatch:
    """Two rows, ramps 0 and 2 active: stages cost 2 segments' shares and heads."""

    def served(self, exits: list[int], execution: str) -> tuple[list[float], float]:
        out = serve_stream(
            np.zeros(len(exits)),
            decided(exits),
            affine(),
            batching=FREE,
            execution=execution,  # type: ignore[arg-type]
        )
        return out.latency.tolist(), out.busy_seconds

    def test_results_only_answers_leavers_early_and_runs_the_whole_batch_to_the_end(self) -> None:
        latency, busy = self.served([0, -1], "ResultsOnly")
        first = 3 + 0.25
        assert latency == pytest.approx([first, first + 3 + 1 + 3])
        assert busy == pytest.approx(first + 3 + 1 + 3)

    def test_compute_saving_drops_leavers_pays_for_regrouping_and_goes_on_smaller(self) -> None:
        latency, busy = self.served([0, -1], "ComputeSaving")
        first = 3 + 0.25
        assert latency == pytest.approx([first, first + 0.125 + 2 + 1 + 2])
        assert busy == pytest.approx(latency[1])

    def test_compute_saving_ends_where_the_last_row_leaves(self) -> None:
        latency, busy = self.served([0, 0], "ComputeSaving")
        assert latency == pytest.approx([3.25, 3.25])
        assert busy == pytest.approx(3.25)

    def test_auto_decides_as_a_worker_does(self) -> None:
        flat = affine(10.0, 0.0)
        exits = decided([0, -1])
        auto, results_only = (
            serve_stream(np.zeros(2), exits, flat, batching=FREE, execution=execution)  # type: ignore[arg-type]
            for execution in ("Auto", "ResultsOnly")
        )
        assert auto.busy_seconds == results_only.busy_seconds

    @given(st.lists(st.sampled_from([-1, 0, 2]), min_size=1, max_size=8), st.booleans())
    def test_a_batch_takes_what_the_workers_loop_takes(self, exits: list[int], carry_on: bool) -> None:
        latency, busy = self.served(exits, "ResultsOnly" if carry_on else "ComputeSaving")
        expected, seconds = by_hand(exits, carry_on=carry_on)
        assert latency == pytest.approx(expected)
        assert busy == pytest.approx(seconds)


def by_hand(exits: list[int], *, carry_on: bool) -> tuple[list[float], float]:
    """`run_stages` with costs in place of sessions: stage, leavers, regroup."""
    now, answered = 0.0, [0.0] * len(exits)
    carried = list(range(len(exits)))
    waiting = set(carried)
    for ramp, head in ((0, 0.25), (2, 1.0)):
        now += 1 + len(carried) + head
        for row in [r for r in carried if exits[r] == ramp]:
            answered[row] = now
            waiting.discard(row)
        if not carry_on and len(waiting) < len(carried):
            if not waiting:
                return answered, now
            now += 0.125
            carried = [r for r in carried if r in waiting]
    now += 1 + len(carried)
    for row in waiting:
        answered[row] = now
    return answered, now


class TestQueue:
    def test_one_at_a_time_obeys_lindleys_recursion(self) -> None:
        rng = np.random.default_rng(3)
        arrivals = np.cumsum(rng.exponential(8.0, 500))
        exits = rng.choice([-1, 0, 2], 500)
        out = serve_stream(arrivals, decided(exits), affine(), batching=ALONE, execution="ComputeSaving")
        seconds = {0: 2.25, 2: 2.25 + 2 + 1, -1: 2.25 + 2 + 1 + 2}
        free, expected = 0.0, []
        for arrival, left in zip(arrivals, exits, strict=True):
            free = max(free, arrival) + seconds[int(left)]
            expected.append(free - arrival)
        assert out.latency == pytest.approx(expected)
        assert out.batches == 500

    def test_a_queue_of_fixed_work_waits_as_pollaczek_and_khinchine_say(self) -> None:
        n, load, service = 100_000, 0.7, 6.0
        arrivals = poisson(n, load / service, np.random.default_rng(1))
        out = serve_stream(arrivals, stays(n), affine(), batching=ALONE)
        waiting = load * service / (2 * (1 - load))
        assert out.mean_seconds == pytest.approx(service + waiting, rel=0.03)
        assert out.busy_share == pytest.approx(load, rel=0.01)

    def test_results_only_never_shortens_the_queue_and_ramps_lengthen_it(self) -> None:
        n = 5000
        arrivals = poisson(n, 0.12, np.random.default_rng(2))
        off = serve_stream(arrivals, stays(n), affine(), batching=ALONE)
        on = serve_stream(arrivals, decided([2] * n), affine(), batching=ALONE, execution="ResultsOnly")
        assert on.busy_seconds == pytest.approx(off.busy_seconds + n * (0.25 + 1))

    def test_a_batch_never_mixes_two_sets_of_ramps(self) -> None:
        plans = decided([0, 0, -1, -1], (0, (0,)), (2, ()))
        out = serve_stream(np.zeros(4), plans, affine(), batching=FREE, execution="ComputeSaving")
        assert out.batches == 2
        assert out.latency.tolist() == pytest.approx([3.25, 3.25, 3.25 + 9, 3.25 + 9])

    def test_threshold_changes_do_not_cut_batches(self) -> None:
        out = serve_stream(np.zeros(4), decided([0] * 4, (0, (0,)), (2, (0,))), affine(), batching=FREE)
        assert out.batches == 1

    def test_a_full_queue_rejects(self) -> None:
        out = serve_stream(np.array([0.0, 0.1, 0.2, 0.3]), stays(4), affine(), batching=OfframpBatching(1, 2))
        assert out.status.tolist() == [ANSWERED, ANSWERED, ANSWERED, REJECTED]
        assert np.isnan(out.latency[3])
        assert (out.answered, out.rejected) == (3, 1)

    def test_front_time_is_latency_and_engine_time_is_queue(self) -> None:
        plain, front, engine = (
            serve_stream(np.zeros(2), stays(2), affine(), batching=ALONE, **extra)
            for extra in ({}, {"front_seconds": 1.0}, {"batch_seconds": 1.0})
        )
        assert (front.latency - plain.latency).tolist() == pytest.approx([1, 1])
        assert (engine.latency - plain.latency).tolist() == pytest.approx([1, 2])


class TestTfServing:
    POLICY = TfServingBatching(
        max_batch=4, batch_timeout_micros=2_000_000, allowed_batch_sizes=(1, 4), max_enqueued_batches=1
    )

    def test_a_batch_waits_to_fill_up_to_the_timeout_of_its_first_request(self) -> None:
        out = serve_stream(np.array([0.0, 1.0]), stays(2), affine(), batching=self.POLICY)
        assert out.batches == 1
        seconds = 3 * (1 + 4)  # two rows, padded to four
        assert out.latency.tolist() == pytest.approx([2 + seconds, 1 + seconds])

    def test_a_full_batch_starts_at_once(self) -> None:
        out = serve_stream(np.array([0.0, 0.5, 0.5, 0.5]), stays(4), affine(), batching=self.POLICY)
        assert out.latency[0] == pytest.approx(0.5 + 15)

    def test_it_rejects_when_the_enqueued_batches_are_full(self) -> None:
        out = serve_stream(np.array([0.0] * 4 + [1.0] * 5), stays(9), affine(), batching=self.POLICY)
        assert out.status.tolist() == [ANSWERED] * 8 + [REJECTED]

    def test_sizes_that_do_not_end_with_the_largest_batch_are_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="allowed_batch_sizes"):
            TfServingBatching(max_batch=8, allowed_batch_sizes=(1, 4))


class TestClockwork:
    def test_it_takes_the_largest_batch_that_answers_the_oldest_in_time(self) -> None:
        out = serve_stream(np.zeros(8), stays(8), affine(), batching=ClockworkBatching(15.0), slo_seconds=15.0)
        assert out.status.tolist() == [ANSWERED] * 4 + [DROPPED] * 4  # a batch of 4 takes 15, and nothing fits after it
        assert out.slo_misses == 4

    def test_nothing_it_answers_is_late(self) -> None:
        n = 5000
        arrivals = bursts(n, 0.5, np.random.default_rng(5))
        out = serve_stream(arrivals, stays(n), affine(), batching=ClockworkBatching(40.0), slo_seconds=40.0)
        assert out.dropped > 0
        assert np.nanmax(out.latency) <= 40 + 1e-9
        assert out.slo_misses == out.dropped

    def test_its_deadline_must_be_positive(self) -> None:
        with pytest.raises(InvalidArgumentError, match="slo_seconds"):
            ClockworkBatching(0.0)


@pytest.mark.parametrize("name", BATCHING)
class TestEveryBatching:
    def served(self, name: str, rate: float, seed: int = 7) -> tuple[npt.NDArray[np.float64], object]:
        rng = np.random.default_rng(seed)
        arrivals = bursts(3000, rate, rng)
        plans = decided(rng.choice([-1, 0, 2], 3000), (0, (0, 2)))
        return arrivals, serve_stream(
            arrivals, plans, affine(), batching=batching(name, profile=affine(), slo_seconds=60.0), slo_seconds=60.0
        )

    @pytest.mark.parametrize("rate", [0.01, 0.3, 3.0], ids=["idle", "busy", "overloaded"])
    def test_every_request_has_one_fate_and_work_is_conserved(self, name: str, rate: float) -> None:
        _, out = self.served(name, rate)
        assert out.answered + out.dropped + out.rejected == 3000
        assert np.isnan(out.latency).sum() == 3000 - out.answered
        assert np.nanmin(out.latency) >= 2.25 - 1e-9  # nobody leaves before the first ramp
        assert 0 < out.busy_seconds <= out.span_seconds + 1e-6

    def test_equal_inputs_give_equal_results(self, name: str) -> None:
        assert np.array_equal(self.served(name, 0.3)[1].latency, self.served(name, 0.3)[1].latency, equal_nan=True)

    def test_a_lone_request_is_answered_by_its_own_work(self, name: str) -> None:
        policy = batching(name, profile=affine(), slo_seconds=60.0)
        out = serve_stream(np.array([5.0]), stays(1), affine(), batching=policy)
        waited = 0.002 if name == "tf-serving" else 0.0
        assert out.latency.tolist() == pytest.approx([6 + waited])


class TestArrivals:
    @pytest.mark.parametrize("name", sorted(ARRIVALS))
    def test_generators_keep_their_rate_and_rise(self, name: str) -> None:
        times = ARRIVALS[name](60_000, 50.0, np.random.default_rng(1))
        assert len(times) == 60_000
        assert times[0] >= 0
        assert (np.diff(times) >= 0).all()
        assert len(times) / times[-1] == pytest.approx(50.0, rel=0.1)

    @pytest.mark.parametrize("name", sorted(ARRIVALS))
    def test_a_seed_repeats_them(self, name: str) -> None:
        first, second = (ARRIVALS[name](100, 3.0, np.random.default_rng(4)) for _ in range(2))
        assert np.array_equal(first, second)

    def test_poisson_gaps_vary_as_much_as_they_last_and_bursts_more(self) -> None:
        gaps = [np.diff(make(50_000, 20.0, np.random.default_rng(2))) for make in (fixed, poisson, bursts)]
        variation = [float(g.std() / g.mean()) for g in gaps]
        assert variation[0] == pytest.approx(0, abs=1e-6)
        assert variation[1] == pytest.approx(1, abs=0.03)
        assert variation[2] > 1.2

    def test_bursts_have_their_share_of_requests(self) -> None:
        times = bursts(200_000, 100.0, np.random.default_rng(3))
        counts = np.bincount((times / 0.1).astype(int))
        calm = 10.0 / (1 + BURST_SHARE * (BURST_FACTOR - 1))
        share = float(counts[counts > 3 * calm].sum()) / len(times)
        assert share == pytest.approx(BURST_SHARE * BURST_FACTOR / (1 + BURST_SHARE * (BURST_FACTOR - 1)), abs=0.05)

    def test_counts_are_spread_within_their_interval(self) -> None:
        times = spread([3, 0, 2], interval_seconds=60.0, rng=np.random.default_rng(0))
        assert np.bincount((times // 60).astype(int)).tolist() == [3, 0, 2]
        assert (np.diff(times) >= 0).all()

    def test_scaling_keeps_the_shape(self) -> None:
        times = np.array([5.0, 6.0, 9.0])
        out = scaled(times, rate=4.0)
        assert out.tolist() == pytest.approx([0, 0.125, 0.5])

    @pytest.mark.parametrize("times", [[1.0], [2.0, 2.0]], ids=["one", "same-moment"])
    def test_a_trace_without_extent_has_no_rate(self, times: list[float]) -> None:
        with pytest.raises(InvalidArgumentError, match="two moments"):
            scaled(np.array(times), rate=1.0)

    def test_capacity_is_that_of_the_best_batch(self) -> None:
        assert capacity(affine(), max_batch=32) == pytest.approx(8 / 27)
        assert capacity(affine(), max_batch=2) == pytest.approx(2 / 9)


@pytest.mark.parametrize(
    ("arrivals", "words"),
    [
        (np.array([0.0, np.nan]), r"arrivals\[1\] is nan"),
        (np.array([1.0, 0.5]), r"arrivals\[1\] is 0.5"),
        (np.array([1.0]), r"each of 2 requests"),
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
    ],
    ids=["nan", "falling", "too-few", "two-axes"],
)
def test_arrivals_that_cannot_be_are_refused(arrivals: npt.NDArray[np.float64], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        serve_stream(arrivals, stays(2), affine(), batching=FREE)


def test_an_unknown_batching_is_told_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="clockwork"):
        batching("magic", profile=affine(), slo_seconds=1.0)


def test_all_orders_of_policies_and_executions_accept_the_same_stream() -> None:
    rng = np.random.default_rng(9)
    arrivals = poisson(400, 0.2, rng)
    plans = decided(rng.choice([-1, 0, 1, 2], 400), (0, (0, 2)), (200, (0, 1, 2)))
    for name, execution in itertools.product(BATCHING, ("ResultsOnly", "ComputeSaving", "Auto")):
        out = serve_stream(
            arrivals, plans, affine(), batching=batching(name, profile=affine(), slo_seconds=100.0), execution=execution
        )  # type: ignore[arg-type]
        assert out.answered > 0
