"""Pulling workers: what is pooled, what is survived, what is remembered."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offramp_cli.verify import load_held_out
from offramp_core.control.objects import TuningStatus, ring
from offramp_core.control.snapshot import Observed, WorkerEndpoint
from offramp_core.protocol import ArmCounts, ArmPlan, PlanDocument, RampInfo, Refusal
from offramp_core.reasons import Reason

sys.path.insert(0, str(Path(__file__).parent))
from stub_worker import COSTS, DIGEST_A, DIGEST_B, StubWorker, block, state

from offramp_operator.local.records import load_pools, save_pool
from offramp_operator.shell import observe, wire
from offramp_operator.shell.observe import MOST_REFUSED, SECONDS_UNTIL_SILENT, Observer
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.record_pool import RampSetKey, row_bytes
from offramp_operator.shell.signing import SigningKey

KEY = ServiceKey("default", "digits")
TOKEN = "secret"
DOCUMENT = PlanDocument("digits", "service-1", 4, ArmPlan({}, 0.02), None, 0, "s", 0.02)
NOWHERE = WorkerEndpoint(name="digits-9", uid="w9", ready=True, admin_url="http://127.0.0.1:9")


@pytest.fixture
def spawn() -> Iterator[Callable[[str], StubWorker]]:
    workers: list[StubWorker] = []

    def make(uid: str) -> StubWorker:
        workers.append(StubWorker(uid, token=TOKEN))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


class Bench:
    """An observer on clocks that only a test moves."""

    def __init__(self, now: float, deadline_seconds: float) -> None:
        self.now, self.monotonic = now, 0.0
        self.observer = Observer(
            deadline_seconds=deadline_seconds, clock=lambda: self.now, monotonic=lambda: self.monotonic
        )

    async def pull(self, *workers: StubWorker, extra: tuple[WorkerEndpoint, ...] = ()) -> Observed:
        return await self.observer.observe(KEY, (*map(endpoint, workers), *extra), token=TOKEN)


def endpoint(worker: StubWorker, **changes: object) -> WorkerEndpoint:
    uid = worker.state.uid
    return WorkerEndpoint(name=f"digits-{uid}", uid=uid, ready=True, admin_url=worker.url, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def bench(*, deadline_seconds: float = 30.0, now: float = 1e9) -> AsyncIterator[Bench]:
    made = Bench(now, deadline_seconds)
    try:
        yield made
    finally:
        await made.observer.close()


def times(observed: Observed) -> list[float]:
    assert observed.records is not None and observed.records.records.time is not None
    return [float(t) for t in observed.records.records.time]


def test_records_of_all_workers_are_pooled_by_time_and_never_twice(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        a.rows, b.rows = 3, 2
        async with bench() as made:
            first = await made.pull(a, b)
            assert times(first) == [1000.0, 1000.0, 1001.0, 1001.0, 1002.0]
            assert times(await made.pull(a, b)) == times(first)
            a.rows = 5
            assert times(await made.pull(a, b)) == [1000.0, 1000.0, 1001.0, 1001.0, 1002.0, 1003.0, 1004.0]
        assert first.records is not None
        assert first.records.ramp_ids == ("r00-linear", "r01-linear")
        assert (first.records.backbone_digest, first.records.ramp_set_digest) == (DIGEST_A, DIGEST_B)
        assert first.records.records.costs.segment_seconds.tolist() == [0.001, 0.001, 0.001]

    asyncio.run(story())


def test_columns_survive_the_way_through_wire_and_pool(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.broken_block = block(0, 50, seed=42)
        async with bench() as made:
            observed = await made.pull(a)
        sent = wire.decode_rows(a.broken_block, n_ramps=2)
        assert observed.records is not None
        records = observed.records.records
        np.testing.assert_array_equal(records.uncertainty, sent.uncertainty)
        np.testing.assert_array_equal(records.agrees, sent.answers["prediction"] == sent.answers["reference"][:, None])
        np.testing.assert_array_equal(records.final_agrees, sent.answers["final"] == sent.answers["reference"])

    asyncio.run(story())


def test_wide_records_of_a_worker_are_pooled_and_read_in_every_chain(
    spawn: Callable[[str], StubWorker], tmp_path: Path
) -> None:
    columns = (
        RampInfo("in.small", 0, 0.0, "model"),
        RampInfo("r00-linear", 1, 0.5, "pooled-linear", "fp32"),
        RampInfo("int8/r00-linear", 1, 0.5, "pooled-linear", "int8"),
        RampInfo("int8/final", 2, 1.0, "final", "int8"),
    )
    own = {"int8_segment_seconds": [[0.0, 0.0005, 0.0005]], "int8_ramp_seconds": [[0.0001, 0.0001]]}

    async def story() -> None:
        a = spawn("a")
        a.state = replace(a.state, ramps=columns, costs={**COSTS, **own})
        a.broken_block = block(0, 50, seed=42, n_ramps=4)
        async with bench() as made:
            observed = await made.pull(a)
            (pool,) = made.observer.pools(KEY).values()
        sent = wire.decode_rows(a.broken_block, n_ramps=4)
        assert observed.records is not None
        records = observed.records.records
        assert observed.records.ramp_ids == records.ramp_ids == ("in.small", "r00-linear")
        int8 = records.at("int8")
        assert int8.ramp_ids == ("in.small", "int8/r00-linear")
        np.testing.assert_array_equal(int8.uncertainty, sent.uncertainty[:, [0, 2]])
        np.testing.assert_array_equal(int8.final_agrees, sent.answers["prediction"][:, 3] == sent.answers["reference"])
        assert int8.costs.baseline_seconds == pytest.approx(0.003)
        save_pool(tmp_path, RampSetKey(DIGEST_A, DIGEST_B), pool.dump())
        (file,) = tmp_path.glob("*.npz")
        kept = load_held_out(file)  # the file alone says which columns are whose
        np.testing.assert_array_equal(kept.at("int8").uncertainty, int8.uncertainty)
        ((_, again),) = load_pools(tmp_path).items()
        assert again.dump().keys() == pool.dump().keys()

    asyncio.run(story())


def test_a_backlog_larger_than_one_answer_is_caught_up_in_one_pass(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.rows = 12_345
        async with bench() as made:
            assert len(times(await made.pull(a))) == 12_345

    asyncio.run(story())


def test_while_a_tuning_waits_its_pool_grows_beyond_a_whole_one_also_before_its_status_is_known(
    spawn: Callable[[str], StubWorker], tmp_path: Path
) -> None:
    """Where load follows the day few of many rows count as labels. A restart of the local operator left 20,000."""

    async def story() -> None:
        a, idle = spawn("a"), TuningStatus(Reason.IDLE)
        a.rows = 32_000
        async with bench() as made:
            assert len(times(await made.observer.observe(KEY, (endpoint(a),), token=TOKEN))) == 32_000
            ((key, pool),) = made.observer.pools(KEY).items()
            save_pool(tmp_path, key, pool.dump())
        async with bench() as made:
            made.observer.restore(KEY, load_pools(tmp_path))
            assert len(times(await made.observer.observe(KEY, (endpoint(a),), token=TOKEN))) == 32_000
            found = await made.observer.observe(KEY, (endpoint(a),), token=TOKEN, tuning=idle)
            assert len(times(found)) == 20_000, "without a new row too"

    asyncio.run(story())


def test_services_whose_tuning_waits_share_a_bound_and_the_largest_gives_way(
    spawn: Callable[[str], StubWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "CAPACITY_ROWS", 100)
    monkeypatch.setattr(observe, "rows_each", lambda *_, **__: 50)
    monkeypatch.setattr(observe, "WAITING_BYTES", 500 * row_bytes(2))
    one, other = (ServiceKey("default", name) for name in ("one", "other"))

    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        a.rows, b.rows = 450, 150
        async with bench() as made:

            async def kept(key: ServiceKey, worker: StubWorker) -> int:
                made.monotonic += 2.0
                return len(times(await made.observer.observe(key, (endpoint(worker),), token=TOKEN)))

            assert [await kept(one, a), await kept(other, b)] == [450, 150]
            assert made.observer.room_taken() == pytest.approx(1.2)
            assert [await kept(one, a), await kept(other, b)] == [350, 150]
            assert made.observer.room_taken() == pytest.approx(1.0)

    asyncio.run(story())


def test_of_services_whose_tuning_waits_those_that_need_the_fewest_labels_have_room_first(
    spawn: Callable[[str], StubWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """76 tunings that never ended kept 1,168 of 2,000 waiting services from the records of a first attempt."""
    monkeypatch.setattr(observe, "CAPACITY_ROWS", 100)
    monkeypatch.setattr(observe, "rows_each", lambda *_, **__: 50)
    monkeypatch.setattr(observe, "WAITING_BYTES", 250 * row_bytes(2))
    needs = {"never-ends": 40_000, "nor-does-this": 20_000, "new": 5_000}

    async def story() -> None:
        a = spawn("a")
        a.rows = 100
        async with bench() as made:

            async def kept(name: str) -> int:
                made.monotonic += 2.0
                waits = TuningStatus(Reason.COLLECTING_LABELS, labels_needed=needs[name])
                key = ServiceKey("default", name)
                return len(times(await made.observer.observe(key, (endpoint(a),), token=TOKEN, tuning=waits)))

            for name in needs:
                await kept(name)
            assert [await kept(name) for name in needs] == [50, 100, 100]

    asyncio.run(story())


def test_while_a_canary_earns_its_place_its_service_keeps_what_scenes_are_seen_in_and_so_do_only_so_many_at_once(
    spawn: Callable[[str], StubWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "rows_each", lambda *_, **__: 100)
    monkeypatch.setattr(observe, "MOST_EARNING", 2)
    keys = [ServiceKey("default", name) for name in ("one", "two", "three")]

    async def story() -> None:
        a, idle = spawn("a"), TuningStatus(Reason.IDLE)

        async def kept(made: Bench, key: ServiceKey, *, earning: bool) -> int:
            found = await made.observer.observe(key, (endpoint(a),), token=TOKEN, tuning=idle, earning=earning)
            return len(times(found))

        a.rows = 400
        async with bench() as made:
            assert [await kept(made, key, earning=True) for key in keys] == [400, 400, 100]
            a.rows = 500
            assert [await kept(made, key, earning=key == keys[1]) for key in keys] == [100, 500, 100]
            a.rows = 600
            assert [await kept(made, key, earning=key != keys[0]) for key in keys] == [100, 600, 200]

    asyncio.run(story())


def test_a_fresh_observer_reads_everything_again_and_ends_with_the_same_records(
    spawn: Callable[[str], StubWorker],
) -> None:
    async def story() -> None:
        a = spawn("a")
        a.rows = 40
        async with bench() as made:
            before = times(await made.pull(a))
        async with bench() as made:
            assert times(await made.pull(a)) == before

    asyncio.run(story())


def test_a_fresh_observer_takes_no_used_record_for_a_new_one_where_a_workers_clock_is_ahead(
    spawn: Callable[[str], StubWorker],
) -> None:
    """What the worker says of its rows, 1,000 seconds and more, lies ahead of both operators."""

    async def story() -> None:
        a = spawn("a")
        a.rows = 3
        async with bench(now=500.0) as made:
            first = await made.pull(a)
            assert first.records is not None
            assert (times(first), first.records.ahead) == ([500.0] * 3, {a.state.boot_id: 3})
        used = {ring(boot, DIGEST_B): seq for boot, seq in first.records.ahead.items()}
        a.rows = 5
        for known, seen in (
            (TuningStatus(), [600.0] * 5),
            (TuningStatus(consumed_through_at=500.0, used=used), [500.0] * 3 + [600.0] * 2),
            (TuningStatus(records_since_at=550.0, stale=used), [pytest.approx(550.0)] * 3 + [600.0] * 2),
        ):
            async with bench(now=600.0) as made:
                again = await made.observer.observe(KEY, (endpoint(a),), token=TOKEN, tuning=known)
                assert times(again) == seen
                assert known.records_since_at is None or times(again)[2] < known.records_since_at

    asyncio.run(story())


def test_a_restarted_worker_adds_its_new_records_to_those_of_its_earlier_life(
    spawn: Callable[[str], StubWorker],
) -> None:
    async def story() -> None:
        a = spawn("a")
        a.rows = 4
        async with bench() as made:
            await made.pull(a)
            a.restart("boot-2")
            a.rows = 2
            observed = await made.pull(a)
            assert times(observed) == [1000.0, 1000.0, 1001.0, 1001.0, 1002.0, 1003.0]
            assert observed.workers[0].observations is not None
            assert observed.workers[0].observations.boot_id == "boot-2"

    asyncio.run(story())


def test_rows_that_fell_out_of_the_ring_are_simply_missing(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.rows = 2
        async with bench() as made:
            await made.pull(a)
            a.rows, a.ring_from = 10, 8
            assert times(await made.pull(a)) == [1000.0, 1001.0, 1008.0, 1009.0]

    asyncio.run(story())


@pytest.mark.parametrize(
    "bad",
    [
        block(0, 3, ramp_set="sha256:" + "e" * 64),
        replace(block(0, 3), final="***"),
        replace(block(0, 3), prediction=""),
    ],
    ids=["another-ramp-set", "not-base64", "missing-column"],
)
def test_unusable_records_are_dropped_and_told_once_while_counts_go_on(
    spawn: Callable[[str], StubWorker], caplog: pytest.LogCaptureFixture, bad: wire.RecordBlock
) -> None:
    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        a.broken_block, b.rows = bad, 2
        a.counts = (ArmCounts(1, "stable", "h", requests=7),)
        async with bench() as made:
            for _ in range(3):
                observed = await made.pull(a, b)
        assert times(observed) == [1000.0, 1001.0]
        assert observed.workers[0].observations is not None
        assert observed.workers[0].observations.counts == a.counts

    with caplog.at_level(logging.WARNING, logger="offramp"):
        asyncio.run(story())
    assert len([r for r in caplog.records if getattr(r, "event", "") == "records-dropped"]) == 1


@pytest.mark.parametrize(
    "lie",
    [
        (ArmCounts(1, "stable", "h", requests=60, drawn=5, audited=5, disagreements=6),),
        (ArmCounts(1, "stable", "h", requests=40, drawn=5, audited=5),),
    ],
    ids=["more disagreements than audits", "backwards"],
)
def test_a_process_that_reports_what_cannot_be_is_not_believed_until_it_restarts(
    spawn: Callable[[str], StubWorker], lie: tuple[ArmCounts, ...]
) -> None:
    honest = (ArmCounts(1, "stable", "h", requests=50, drawn=5, audited=5),)

    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        a.counts, b.counts, a.rows, b.rows = honest, honest, 2, 1
        async with bench() as made:
            before = await made.pull(a, b)
            assert [w.distrusted for w in before.workers] == ["", ""] and len(times(before)) == 3
            a.counts, a.rows = lie, 9
            lying = await made.pull(a, b)
            assert lying.workers[0].distrusted and not lying.workers[1].distrusted
            a.counts = (ArmCounts(1, "stable", "h", requests=90, drawn=5, audited=5),)
            assert (await made.pull(a, b)).workers[0].distrusted, "one true word does not make the others true"
            assert len(times(lying)) == 3, "records of a liar are not pooled"
            a.restart("again")
            a.counts, a.rows = honest, 4
            after = await made.pull(a, b)
            assert after.workers[0].distrusted == "" and len(times(after)) == 7

    asyncio.run(story())


def test_a_dead_worker_never_raises_and_counts_as_silent_only_after_a_while(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        a.counts = (ArmCounts(1, "stable", "h", requests=7),)
        async with bench(deadline_seconds=20.0) as made:
            await made.pull(a, b)
            gone = endpoint(a)
            a.close()
            for _ in range(5):
                observed = await made.observer.observe(KEY, (gone, endpoint(b)), token=TOKEN)
            assert observed.workers[0].state is not None, "five failures within no time are a hiccup"
            made.monotonic = SECONDS_UNTIL_SILENT + 1
            observed = await made.observer.observe(KEY, (gone, endpoint(b)), token=TOKEN)
            assert observed.workers[0].state is None
            assert observed.workers[0].observations is not None, "what it reported has happened"
            assert observed.workers[1].state is not None

    asyncio.run(story())


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"uid": 5}', b"\xff\xfe"])
def test_a_worker_that_talks_nonsense_is_like_one_that_does_not_answer(
    spawn: Callable[[str], StubWorker], body: bytes
) -> None:
    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            a.garbage = body
            observed = await made.pull(a)
            assert (observed.workers[0].state, observed.workers[0].observations, observed.records) == (None, None, None)
            a.garbage = None
            assert (await made.pull(a)).workers[0].state is not None

    asyncio.run(story())


def test_an_address_that_passed_to_another_worker_is_not_believed(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.rows = 3
        stale = replace(endpoint(a), uid="somebody-else")
        async with bench() as made:
            observed = await made.observer.observe(KEY, (stale,), token=TOKEN)
        assert observed.workers[0].state is None
        assert observed.records is None

    asyncio.run(story())


def test_a_wrong_token_opens_nothing(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            observed = await made.observer.observe(KEY, (endpoint(a),), token="guessed")
        assert observed.workers[0].state is None

    asyncio.run(story())


@pytest.mark.slow
def test_a_slow_worker_does_not_hold_up_the_others(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        a.delay_seconds = 30.0
        async with bench(deadline_seconds=8.0) as made:
            observed = await asyncio.wait_for(
                made.pull(a, b, extra=(NOWHERE, replace(NOWHERE, uid="w8", admin_url=None))), 25
            )
        assert [worker.state is not None for worker in observed.workers] == [False, True, False, False]

    asyncio.run(story())


@pytest.mark.slow
def test_a_worker_that_hangs_costs_its_deadline_once(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        a.delay_seconds = 30.0
        async with bench(deadline_seconds=10.0) as made:
            first = await made.pull(a, b)
            assert first.workers[0].state is None
            hung = made.observer._services[KEY].seen["a"]
            for _ in range(3):
                b.counts = (ArmCounts(1, "stable", "h", requests=len(b.counts) + 7),)
                again = await made.pull(a, b)
                assert hung.failures == 1 and hung.pull is not None and not hung.pull.done(), (
                    "nobody waits for its deadline"
                )
                assert again.workers[1].observations is not None and again.workers[1].observations.counts == b.counts
            await made.pull(b)
            assert "a" not in made.observer._services[KEY].seen

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("tells_state", [True, False], ids=["this release", "an earlier one"])
def test_an_answer_that_repeats_itself_is_no_news_and_the_rest_is_part_of_the_load(
    spawn: Callable[[str], StubWorker], tells_state: bool
) -> None:
    async def story() -> None:
        a = spawn("a")
        a.tells_state = tells_state
        a.now, a.counts = 100.0, (ArmCounts(1, "stable", "h", requests=10),)
        async with bench() as made:

            async def news() -> bool:
                before = made.observer.revision(KEY)
                return await made.observer.poll(KEY, [endpoint(a)], token=TOKEN) != before

            await made.pull(a)
            a.now, a.counts = 110.0, (ArmCounts(1, "stable", "h", requests=60),)
            assert await news()
            assert (await made.pull(a)).load.request_rate == 5.0
            for now in (120.0, 130.0, 140.0):
                a.now = now
                assert not await news()
            assert (await made.pull(a)).load.request_rate == 0.0
            a.state = replace(a.state, breaker_open=True)
            assert await news()
            a.rows += 3
            assert await news()
            assert made.observer.at_rest(KEY)
            a.close()
            assert await news() and not made.observer.at_rest(KEY), "that it fails is news as well"

    asyncio.run(story())


def test_records_are_those_of_the_ramp_set_that_current_workers_serve(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        old, new = spawn("old"), spawn("new")
        other = "sha256:" + "c" * 64
        old.rows, new.rows = 3, 2
        new.state = replace(new.state, ramp_set_digest=other)
        async with bench() as made:
            workers = (endpoint(old, current=False), endpoint(new))
            observed = await made.observer.observe(KEY, workers, token=TOKEN)
            assert observed.records is not None and observed.records.ramp_set_digest == other
            assert len(times(observed)) == 2
            observed = await made.observer.observe(KEY, (workers[0],), token=TOKEN)
            assert observed.records is not None and observed.records.ramp_set_digest == DIGEST_B
            assert len(made.observer.pools(KEY)) == 1, "records that nobody serves any more are let go"

    asyncio.run(story())


def test_records_outlive_a_while_in_which_only_a_pool_with_other_exits_of_its_own_answers(
    spawn: Callable[[str], StubWorker],
) -> None:
    async def story() -> None:
        main, own = spawn("main"), spawn("own")
        main.rows, own.rows = 3, 2
        own.state = replace(own.state, ramp_set_digest="sha256:" + "c" * 64)
        plan = ArmPlan({"backboneDigest": DIGEST_A, "rampSetDigest": DIGEST_B}, 0.0)
        document = PlanDocument("digits", "uid", 3, plan, None, 0, "", 0.02)
        async with bench() as made:
            both = (endpoint(main), endpoint(own, own_bundle=True))
            assert len(times(await made.observer.observe(KEY, both, token=TOKEN, published=document))) == 3
            alone = await made.observer.observe(KEY, both[1:], token=TOKEN, published=document)
            assert alone.records is None and len(made.observer.pools(KEY)) == 2

    asyncio.run(story())


def test_the_peak_of_the_demand_counts_refused_requests_and_is_forgotten_after_an_hour(
    spawn: Callable[[str], StubWorker],
) -> None:
    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            made.monotonic = 1000.0
            a.counts, a.refused = (ArmCounts(1, "stable", "h", requests=1000),), 500
            assert (await made.pull(a)).load.peak_rate == 0.0, "what was before the first pull has no time"
            a.counts, a.refused, a.now = (ArmCounts(1, "stable", "h", requests=1100),), 600, a.now + 10.0
            seen = (await made.pull(a)).load
            assert (seen.request_rate, seen.peak_rate) == (10.0, 20.0)
            for _ in range(12):
                made.monotonic += 300.0
                a.now += 300.0
                seen = (await made.pull(a)).load
                assert (seen.request_rate, seen.peak_rate) == (0.0, 20.0)
            made.monotonic += 300.0
            a.now += 300.0
            assert (await made.pull(a)).load.peak_rate == 0.0

    asyncio.run(story())


def test_what_came_in_ten_seconds_each_is_kept_where_workers_are_planned_by_it(
    spawn: Callable[[str], StubWorker],
) -> None:
    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            for windows in (False, True):
                for _ in range(2):
                    await made.observer.observe(KEY, (endpoint(a),), token=TOKEN, windows=windows)
                    a.refused, a.now = a.refused + 50, a.now + 10.0
                seen = (await made.observer.observe(KEY, (endpoint(a),), token=TOKEN, windows=windows)).load
                assert [window.rate for window in seen.windows] == ([5.0] if windows else [])

    asyncio.run(story())


def test_windows_of_a_service_that_rests_are_kept_as_well(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            await made.observer.observe(KEY, (endpoint(a),), token=TOKEN, windows=True)
            for _ in range(2):
                a.now, made.now = a.now + 30.0, made.now + 30.0
                await made.observer.poll(KEY, (endpoint(a),), token=TOKEN)
            seen = (await made.observer.observe(KEY, (endpoint(a),), token=TOKEN, windows=True)).load
            assert [window.ended_at - made.now for window in seen.windows] == [-30.0, 0.0]

    asyncio.run(story())


def test_a_pool_keeps_the_rows_that_a_tuner_waits_for_whatever_it_says(spawn: Callable[[str], StubWorker]) -> None:
    """A tuner that took its budget for hopeless waited for 5,000 rows, of which a large fleet kept 2,000."""
    keeps = observe._rows_to_keep
    for tuning_state, awaited, services, rows in (
        ("Idle", 24_000, 1, 250_000),
        ("Idle", 5_000, 2_000, 250_000),
        ("CollectingLabels", 0, 2_000, 250_000),
        ("Idle", 600_000, 1, 20_000),
        ("Suspended", 150_000, 1, 20_000),
    ):
        memory = observe._ServiceMemory(tuning=TuningStatus(tuning_state, labels_needed=awaited))
        assert keeps(memory, services=services, n_ramps=6) == rows


def test_a_worker_whose_refusals_go_backwards_is_not_believed(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            a.refused = 500
            await made.pull(a)
            a.refused, a.now = 3, a.now + 10.0
            seen = await made.pull(a)
            assert "refused" in seen.workers[0].distrusted and seen.load.peak_rate == 0.0

    asyncio.run(story())


@pytest.mark.parametrize("rows", [2_600_000, 10**12], ids=["a flood of large requests", "no such flood"])
def test_a_flood_of_refused_rows_counts_up_to_a_bound_and_costs_no_trust(
    spawn: Callable[[str], StubWorker], rows: int
) -> None:
    """A worker that is flooded with requests of a thousand rows refused 260,000 rows in a second, and was not believed:
    its plan fell in the moment of the greatest load."""

    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            await made.pull(a)
            a.refused, a.now = rows, a.now + 10.0
            seen = await made.pull(a)
            assert not seen.workers[0].distrusted
            assert seen.load.peak_rate == pytest.approx(MOST_REFUSED * 11 / 10)

    asyncio.run(story())


def test_a_restarted_workers_refusals_begin_anew(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        async with bench() as made:
            a.refused = 500
            await made.pull(a)
            a.state, a.refused, a.now = replace(a.state, boot_id="another"), 3, a.now + 10.0
            await made.pull(a)
            a.refused, a.now = 53, a.now + 10.0
            assert (await made.pull(a)).load.peak_rate == 5.0

    asyncio.run(story())


def test_load_is_requests_and_busy_time_between_pulls_over_all_workers(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        async with bench() as made:
            a.counts = (ArmCounts(1, "stable", "h", requests=1000, busy_seconds=50.0),)
            first = await made.pull(a, b)
            assert (first.load.request_rate, first.load.utilisation) == (0.0, 0.0)
            # In two seconds a served 40 and 20 requests in two epochs, b served none.
            a.counts = (
                ArmCounts(1, "stable", "h", requests=1040, busy_seconds=50.6),
                ArmCounts(2, "canary", "g", requests=20, busy_seconds=0.4),
            )
            a.now = b.now = 102.0
            second = await made.pull(a, b)
            assert second.load.request_rate == pytest.approx(30.0)
            assert second.load.utilisation == pytest.approx((0.5 + 0.0) / 2)
            # Epoch 1 is no longer reported; that is no negative work.
            a.counts, a.now, b.now = (ArmCounts(2, "canary", "g", requests=30, busy_seconds=0.4),), 104.0, 104.0
            assert (await made.pull(a, b)).load.request_rate == pytest.approx(70 / 4)

    asyncio.run(story())


def test_a_core_that_answers_its_edges_alone_is_busy_and_idle_edges_do_not_hide_it(
    spawn: Callable[[str], StubWorker],
) -> None:
    async def story() -> None:
        core, edges = spawn("core"), [spawn(name) for name in ("a", "b", "c")]
        for edge in edges:
            edge.state = replace(edge.state, at_edge=True)
        core.other_seconds = 50.0
        async with bench() as made:
            await made.pull(core, *edges)
            core.other_seconds = 51.6
            for worker in (core, *edges):
                worker.now = 102.0
            seen = await made.pull(core, *edges)
            assert (seen.load.request_rate, seen.load.utilisation) == (0.0, pytest.approx(0.8))

    asyncio.run(story())


def test_a_poke_reaches_every_worker_and_refusals_are_told(
    spawn: Callable[[str], StubWorker], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        a, b = spawn("a"), spawn("b")
        b.refuse = Refusal(0, "UnknownRamp", "ramp r77 is unknown")
        signed = SigningKey(bytes(32)).sign(DOCUMENT)
        async with bench(deadline_seconds=20.0) as made:
            await made.observer.poke(KEY, (endpoint(a), endpoint(b), NOWHERE), token=TOKEN, signed=signed)
        assert a.taken == [DOCUMENT]
        assert b.taken == []

    with caplog.at_level(logging.WARNING, logger="offramp"):
        asyncio.run(story())
    assert [r.getMessage() for r in caplog.records if "UnknownRamp" in r.getMessage()]


def test_settled_means_that_every_drawn_audit_was_answered(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.counts = (ArmCounts(1, "stable", "h", requests=9, drawn=5, audited=4),)
        async with bench() as made:
            await made.pull(a)
            assert not made.observer.settled(KEY)
            a.counts = (replace(a.counts[0], audited=5),)
            await made.pull(a)
            assert made.observer.settled(KEY)

    asyncio.run(story())


def test_a_forgotten_service_leaves_nothing_behind(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.rows = 3
        async with bench() as made:
            await made.pull(a)
            made.observer.forget(KEY)
            assert made.observer.pools(KEY) == {}

    asyncio.run(story())


def test_costs_that_do_not_fit_the_ramps_cost_the_records_and_nothing_else(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.rows = 3
        a.state = replace(state("a"), costs={"segment_seconds": [[0.1]], "ramp_seconds": [["x"]], "batch_size": [1.0]})
        async with bench() as made:
            observed = await made.pull(a)
        assert observed.records is None
        assert observed.workers[0].state is not None

    asyncio.run(story())


def test_records_of_a_set_held_beside_the_bundle_s_own_are_pooled_apart_and_asked_for_from_where_they_end(
    spawn: Callable[[str], StubWorker],
) -> None:
    other = "sha256:" + "c" * 64

    async def story() -> None:
        a = spawn("a")
        a.rows = 3
        a.state = replace(a.state, ramp_sets=(DIGEST_B, other))
        a.more_rows = {other: 4}
        async with bench() as made:
            first = await made.pull(a)
            assert len(times(first)) == 3
            assert [len(store.records) for store in first.more_records.values()] == [4]
            assert first.more_records[other].ramp_set_digest == other
            a.more_rows = {other: 6}
            again = await made.pull(a)
            assert len(again.more_records[other].records) == 6
            assert a.also == f"{other}=4", "what is known is not sent again"
            a.state = replace(a.state, ramp_sets=(DIGEST_B,))
            a.more_rows = {}
            a.rows = 4
            assert (await made.pull(a)).more_records == {}
            assert list(made.observer.pools(KEY)) == [RampSetKey(DIGEST_A, DIGEST_B)]

    asyncio.run(story())


def test_records_of_a_set_that_a_worker_does_not_hold_are_dropped(spawn: Callable[[str], StubWorker]) -> None:
    async def story() -> None:
        a = spawn("a")
        a.more_rows = {"sha256:" + "d" * 64: 4}
        async with bench() as made:
            assert (await made.pull(a)).more_records == {}

    asyncio.run(story())
