"""The prediction cache: who is answered from it, who is not, and that audits stay a uniform draw from all requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from processes import eventually
from test_engine import EVERYONE, Bench

from offramp_core.task import task_of
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.cache import BYTES_PER_ANSWER, BYTES_PER_ROW, PredictionCache
from offramp_worker.engine.queue.tickets import Ticket, new_ticket

PLAN = {"r00-grid": "0.5"}
NEVER_DRAWN, DRAWN = 0.99, 0.0


@pytest.fixture
def draws() -> list[float]:
    """What requests draw, one after the other; the last one for ever."""
    return [NEVER_DRAWN]


@pytest.fixture
def bench(bundle: Bundle, sessions: Sessions, draws: list[float]) -> Iterator[Bench]:
    def draw() -> float:
        return draws.pop(0) if len(draws) > 1 else draws[0]

    bench = Bench(bundle, sessions, cache_bytes=1_000_000, draw=draw)
    bench.engine.start()
    yield bench
    bench.engine.close()
    assert bench.engine.join(30.0)


def results(bench: Bench) -> dict[str, float]:
    return {
        name: value
        for name in ("hit", "shared", "miss")
        if (value := bench.sample("cache_requests_total", result=name))
    }


def test_an_input_seen_before_is_answered_alike_without_running(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, PLAN)
    x = bundles.inputs(20, seed=3)
    first = bench.serve(x)
    batches = bench.counts(1).batches
    again = [bench.engine.submit(x[i : i + 1], never_exit=False) for i in range(20)]
    for old, new in zip(first, again, strict=True):
        assert (new.cached, new.pending, old.cached) == (True, 0, False)
        np.testing.assert_array_equal(new.logits, old.logits)
        assert (new.exits, new.configs, new.arms, new.epochs) == (old.exits, old.configs, old.arms, old.epochs)
        assert new.audited == [False]
    assert bench.counts(1).batches == batches
    assert (bench.counts(1).requests, sum(bench.counts(1).exits.values())) == (40, 40)
    assert results(bench) == {"hit": 20, "miss": 21}  # one of the misses is the helper's fence
    eventually(lambda: bench.sample("inflight") == 0, what="the fence counted")


def test_without_the_setting_nothing_is_kept(bundle: Bundle, sessions: Sessions) -> None:
    bench = Bench(bundle, sessions)
    bench.engine.start()
    x = bundles.inputs(1)
    assert not any(ticket.cached for _ in range(3) for ticket in bench.serve(x))
    bench.engine.close()
    assert bench.engine.join(30.0)


def test_what_differs_in_value_shape_or_wish_is_another_input(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {"r00-grid": EVERYONE})
    x = bundles.inputs(4, seed=3)
    bench.serve(x[:2], one_by_one=False)
    for other in (x[1:3], x[:1], np.nextafter(x[:2], np.float32(9))):
        assert not bench.serve(other, one_by_one=False)[0].cached
    exact = bench.serve(x[:2], never_exit=True, one_by_one=False)[0]
    assert (exact.cached, exact.exits) == (False, ["final", "final"])
    assert bench.serve(x[:2], one_by_one=False)[0].cached
    assert bench.serve(x[:2], never_exit=True, one_by_one=False)[0].exits == ["final", "final"]


def test_a_new_epoch_forgets_everything_even_with_the_same_plan(bench: Bench, bundle_dir: Path) -> None:
    x = bundles.inputs(1)
    for epoch, thresholds in enumerate((PLAN, PLAN, {}, {"r02-linear": EVERYONE}), start=1):
        bench.activate(bundle_dir, thresholds, epoch=epoch)
        assert [bench.serve(x)[0].cached for _ in range(2)] == [False, True]
        assert bench.serve(x)[0].epochs == [epoch if thresholds else bench.counts(epoch).epoch]


def test_an_answer_of_the_plan_is_not_served_while_its_exits_are_off(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, {"r00-grid": EVERYONE}, stable_lease_seconds=10.0)
    x = bundles.inputs(1)
    assert bench.serve(x)[0].exits == ["r00-grid"]
    bench.now += 16  # beyond the longest staggered lease
    without = [bench.serve(x)[0] for _ in range(2)]
    assert [(t.exits, t.configs, t.cached) for t in without] == [(["final"], ["exits-off"], c) for c in (False, True)]
    bench.engine.renew_lease()
    assert bench.serve(x)[0].exits == ["r00-grid"]


def test_a_canary_gets_every_request(bench: Bench, bundle_dir: Path) -> None:
    x = bundles.inputs(1)
    bench.activate(bundle_dir, {}, canary=PLAN, weight_percent=50, canary_lease_seconds=60.0)
    bench.engine.renew_lease()
    tickets = [bench.serve(x)[0] for _ in range(20)]
    assert not any(t.cached for t in tickets)
    assert {t.arms[0] for t in tickets} == {"stable", "canary"}
    bench.now += 61  # its lease ends: the stable plan alone is in force
    assert [bench.serve(x)[0].cached for _ in range(2)] == [False, True]


def test_results_only_compares_every_request_and_caches_none(bench: Bench, bundle_dir: Path) -> None:
    bench.activate(bundle_dir, PLAN, execution="ResultsOnly", audit_rate=0.1)
    x = bundles.inputs(1)
    assert not any(bench.serve(x)[0].cached for _ in range(3))
    assert bench.counts(1).audited == bench.counts(1).requests == 3


def test_a_request_drawn_for_audit_runs_although_its_answer_is_known(
    bench: Bench, bundle_dir: Path, draws: list[float]
) -> None:
    bench.activate(bundle_dir, PLAN, audit_rate=0.1)
    x = bundles.inputs(1)
    bench.serve(x)
    draws[:] = [DRAWN, NEVER_DRAWN]
    ticket = bench.serve(x)[0]
    assert (ticket.cached, ticket.audited) == (False, [True])
    assert (bench.counts(1).drawn, bench.counts(1).audited) == (1, 1)
    assert bench.serve(x)[0].cached


def test_audits_see_the_disagreement_of_requests_not_of_inputs(
    bundle: Bundle, sessions: Sessions, bundle_dir: Path
) -> None:
    """One popular input that the plan gets wrong makes most replies wrong; the audited share must say so."""
    rng = np.random.default_rng(0)
    bench = Bench(bundle, sessions, cache_bytes=10**6, draw=rng.random)
    bench.engine.start()
    bench.activate(bundle_dir, {"r00-grid": EVERYONE}, audit_rate=0.25)
    x = bundles.inputs(60, seed=7)
    scores = sessions.tapped(x)
    wrong = scores.prediction[:, 0] != scores.logits.argmax(axis=1)
    popular = x[np.flatnonzero(wrong)[:1]]
    right = x[~wrong][:20]
    stream = np.concatenate([np.concatenate([popular] * 4 + [right[i % len(right)][None]]) for i in range(200)])
    tickets = [bench.serve(row[None])[0] for row in stream[:30]]
    tickets += bench.serve(stream[30:])
    assert sum(t.cached for t in tickets) > 500
    counts = bench.counts(1)
    assert (counts.requests, counts.drawn) == (1000, counts.audited)
    # binomial, 5 standard deviations
    assert abs(counts.audited - 250) < 5 * (1000 * 0.25 * 0.75) ** 0.5
    assert abs(counts.disagreements / counts.audited - 0.8) < 5 * (0.8 * 0.2 / counts.audited) ** 0.5
    bench.engine.close()
    assert bench.engine.join(30.0)


# --- requests in flight ----------------------------------------------------------------------------


def test_identical_requests_in_flight_run_once_and_each_counts_and_is_drawn(
    bench: Bench, bundle_dir: Path, draws: list[float]
) -> None:
    bench.activate(bundle_dir, PLAN, audit_rate=0.1)
    x = bundles.inputs(2, seed=3)
    draws[:] = [NEVER_DRAWN, DRAWN, NEVER_DRAWN, DRAWN, NEVER_DRAWN]
    with bench.engine._turn:  # nothing runs meanwhile
        same = [bench.engine.submit(x[:1], never_exit=False) for _ in range(5)]
    eventually(lambda: all(t in bench.done for t in same), what="replies")
    assert [t.audited for t in same] == [[False], [True], [False], [True], [False]]
    for ticket in same:
        np.testing.assert_array_equal(ticket.logits, same[0].logits)
    eventually(lambda: bench.settled and bench.counts(1).requests == 5, what="counts")
    assert bench.counts(1).execution.keys() == {"1"}
    assert (bench.counts(1).drawn, bench.counts(1).audited) == (2, 2)
    eventually(lambda: bench.sample("inflight") == 0, what="nothing in flight")
    assert results(bench) == {"miss": 1, "shared": 4}


def test_a_batch_that_fails_makes_the_others_run_by_themselves(bench: Bench, bundle_dir: Path) -> None:
    x = bundles.inputs(1)
    execute, calls = bench.engine._executor.run, itertools.count()

    def fail_once(*args: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("kernel exploded")
        return execute(*args)

    bench.engine._executor.run = fail_once  # type: ignore[method-assign]
    with bench.engine._turn:
        same = [bench.engine.submit(x, never_exit=False) for _ in range(3)]
    eventually(lambda: all(t in bench.done for t in same), what="replies")
    assert [t.error is None for t in same] == [False, True, True]
    assert bench.serve(x)[0].error is None


def test_a_client_that_goes_away_takes_nobody_with_it(bench: Bench, bundle_dir: Path) -> None:
    x = bundles.inputs(2)
    with bench.engine._turn:  # nothing runs meanwhile
        blocker = bench.engine.submit(x[1:], never_exit=True)
        eventually(lambda: bench.engine._batcher.rows == 0, what="the blocker's batch")
        leader, follower, other = (bench.engine.submit(x[:1], never_exit=False) for _ in range(3))
        bench.engine.cancel(leader)
        bench.engine.cancel(other)
    eventually(lambda: all(t in bench.done for t in (follower, blocker)), what="replies")
    assert leader not in bench.done and other not in bench.done
    np.testing.assert_array_equal(follower.logits, bench.engine.sessions.exact(x[:1]))
    eventually(lambda: bench.sample("inflight") == 0, what="nothing in flight")
    assert bench.sample("rows_total", arm="", outcome="cancelled") == 2


def test_nobody_waits_with_a_request_of_lower_priority_or_one_that_may_come_too_late(
    bundle: Bundle, sessions: Sessions
) -> None:
    cache = PredictionCache(max_bytes=10**6)
    low = _ticket(priority=3)
    assert not cache.join(b"key", low, config="c")
    assert not cache.join(b"key", _ticket(priority=2), config="c")
    assert not cache.join(b"key", _ticket(priority=3, timeout=1.0), config="c")
    lower = _ticket(priority=4)
    assert cache.join(b"key", lower, config="c")
    assert cache.finish(low, None) == [lower]
    assert cache.finish(low, None) == []


# --- bytes -----------------------------------------------------------------------------------------


def test_the_least_recently_used_answers_go_when_the_bytes_are_spent(bench: Bench) -> None:
    runtime = bench.engine.active.off
    size = BYTES_PER_ANSWER + 4 * 5 + 8 + BYTES_PER_ROW
    cache = PredictionCache(max_bytes=3 * size)
    for key in (b"a", b"b", b"c"):
        ticket = _ticket()
        cache.join(key, ticket, config=runtime.config)
        cache.finish(ticket, runtime)
    assert (len(cache), cache.size_bytes) == (3, 3 * size)
    assert cache.get(b"a") is not None
    ticket = _ticket()
    cache.join(b"d", ticket, config=runtime.config)
    cache.finish(ticket, runtime)
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    large = _ticket(n=100)
    cache.join(b"e", large, config=runtime.config)
    cache.finish(large, runtime)
    assert cache.get(b"e") is None and len(cache) == 3
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)


def _ticket(n: int = 1, *, priority: int = 1, timeout: float | None = None) -> Ticket:
    x = np.zeros((n, 2), dtype=np.float32)
    return new_ticket(
        x,
        never_exit=False,
        task=task_of(None, width=5),
        now=0.0,
        wall_time=0.0,
        draw=lambda: 0.5,
        priority=priority,
        timeout_seconds=timeout,
    )
