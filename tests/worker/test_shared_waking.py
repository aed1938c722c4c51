"""A model of a pool that is at rest and whose load goes wrong: it comes back by itself, and nothing is lost."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from processes import KEY, TOKEN, document, plan_for, sign
from shared import key
from test_shared_delivered import made, placed
from test_shared_loading import serves, until

import offramp_worker.shared.pooled
import offramp_worker.shared.repository
from offramp_core.errors import PlanRefusedError
from offramp_core.protocol import HeldModel, ModelList, PlacedModel, PlanDocument, SignedDocument
from offramp_worker.engine.engine import Engine
from offramp_worker.shared.delivered import Delivered
from offramp_worker.shared.model import Model
from offramp_worker.shared.pooled import PooledRepository
from offramp_worker.shared.repository import UnavailableError
from offramp_worker.shared.settings import shared_settings

__all__ = ["made"]


class Pool:
    """A worker of the pool ``pool`` in this process."""

    def __init__(self, claim: Path, **env: str) -> None:
        common = {
            "OFFRAMP_POOL_UID": "pool",
            "OFFRAMP_BUNDLES": str(claim),
            "OFFRAMP_PUBLIC_KEY": key(),
            "OFFRAMP_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "OFFRAMP_UID": "worker-1",
        }
        settings = shared_settings({**common, **env})
        assert settings.pool is not None
        self.repository = PooledRepository(settings, on_lost=pytest.fail)
        self.delivered, self.epoch = Delivered(self.repository, settings.pool), 0

    async def tell(self, *models: PlacedModel) -> None:
        self.epoch += 1
        payload = json.dumps(asdict(ModelList("pool", "worker-1", self.epoch, models)))
        signed = SignedDocument(payload, base64.b64encode(KEY.sign(payload.encode())).decode())
        await self.delivered.deliver(signed)

    @property
    def held(self) -> dict[str, HeldModel]:
        return {model.model: model for model in self.delivered.state().models}

    async def until(self, name: str, standing: str) -> Model:
        await until(lambda: name in self.held and self.held[name].standing == standing)
        return self.repository.models[name]

    async def rests(self, model: Model) -> None:
        """As if nobody had asked for it for a while."""
        model.at_rest = True
        async with self.repository.changing:
            await self.repository.leave_all([model])


@pytest.fixture
def claim(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What fails is tried again at once."""
    for module in (offramp_worker.shared.pooled, offramp_worker.shared.repository):
        monkeypatch.setattr(module, "RELOAD_SECONDS", 0.05)
    return Path(shutil.copytree(made, tmp_path / "claim"))


def run(claim: Path, story: Callable[[Pool], Any], **env: str) -> None:
    async def begin() -> None:
        pool = Pool(claim, **env)
        try:
            await story(pool)
        finally:
            pool.repository.drain()
            await pool.repository.close(seconds=10)

    asyncio.run(begin())


RESTING = placed("a", unload_after_seconds=600.0)


def test_a_load_that_fails_once_is_tried_again_without_a_request_and_forgets_nothing(claim: Path) -> None:
    sent = document(plan_for(claim / "a", {"r00-grid": "0.5"}), epoch=4, service_uid="uid-a")

    async def story(pool: Pool) -> None:
        await pool.tell(RESTING)
        model = await pool.until("a", "Serving")
        worker = model.doors.worker
        assert worker.plans is not None
        await asyncio.to_thread(worker.plans.deliver, sign(sent))
        serves(pool.repository, times=3)
        await until(lambda: worker.observations(after=0, now=0.0).counts[-1].requests == 3)
        state, seen = worker.state(), worker.observations(after=0, now=0.0)
        await pool.rests(model)
        (claim / "a").rename(claim / "gone")
        with pytest.raises(UnavailableError, match="cannot be served"):
            await pool.repository.load(model)
        broken = worker.state()
        assert (broken.epoch, broken.newest_epoch, broken.boot_id) == (4, 4, state.boot_id)
        assert not broken.ready and "cannot be read" in broken.message
        assert pool.held["a"].standing == "Failed"
        (claim / "gone").rename(claim / "a")
        assert await pool.until("a", "Serving") is model
        assert (worker.state(), worker.observations(after=0, now=0.0)) == (state, seen)

    run(claim, story)


def test_a_list_that_changes_meanwhile_loads_the_same_model(claim: Path) -> None:
    async def story(pool: Pool) -> None:
        await pool.tell(placed("a"))
        model = await pool.until("a", "Serving")
        boot = model.doors.worker.boot_id
        (claim / "a").rename(claim / "gone")
        async with pool.repository.changing:
            await pool.repository._leave(model)
            pool.repository._mark_broken(model, "every run has failed")
        await pool.tell(replace(placed("a"), leaving=True))
        (claim / "gone").rename(claim / "a")
        assert await pool.until("a", "Serving") is model
        assert model.doors.worker.boot_id == boot

    run(claim, story)


def test_what_takes_more_than_was_expected_rests_and_asks_for_room_with_its_size(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sum(file.stat().st_size for file in (claim / "a").iterdir())

    def grows(model: Model, grown: int, *, bodies: int) -> None:
        model.measured_bytes, model.sure = 10 * files, True

    async def story(pool: Pool) -> None:
        await pool.tell(replace(RESTING, at_rest=True))
        model = await pool.until("a", "Unloaded")
        assert pool.held["a"].bytes == 0
        monkeypatch.setattr(Model, "has_grown", grows)
        with pytest.raises(UnavailableError, match="no room"):
            await pool.repository.load(model)
        for _ in range(2):
            held = pool.held["a"]
            assert (held.standing, held.bytes, held.wanted) == ("Unloaded", 10 * files, True)
            with pytest.raises(UnavailableError, match="no room"):
                await pool.repository.load(model)
        assert model.loads == 1, "its size is known"

    run(claim, story, OFFRAMP_MODELS_BYTES=str(5 * files))


def test_what_was_never_loaded_and_finds_no_room_tells_what_it_needs(claim: Path) -> None:
    files = sum(file.stat().st_size for file in (claim / "a").iterdir())

    async def story(pool: Pool) -> None:
        await pool.tell(replace(RESTING, at_rest=True))
        model = await pool.until("a", "Unloaded")
        with pytest.raises(UnavailableError, match="no room"):
            await pool.repository.load(model)
        held = pool.held["a"]
        assert (held.standing, held.bytes, held.wanted) == ("Unloaded", 2 * files, True)

    run(claim, story, OFFRAMP_MODELS_BYTES=str(files // 2))


def test_what_found_no_room_is_tried_again_when_another_has_been_unloaded(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offramp_worker.shared.delivered.RELOAD_SECONDS", 3600.0)
    sizes = [sum(file.stat().st_size for file in (claim / name).iterdir()) for name in "ab"]
    monkeypatch.setattr(Model, "has_grown", lambda model, grown, *, bodies: setattr(model, "measured_bytes", 0))

    async def story(pool: Pool) -> None:
        await pool.tell(RESTING)
        model = await pool.until("a", "Serving")
        await pool.tell(RESTING, placed("b"))
        await until(lambda: "no room" in pool.held.get("b", pool.held["a"]).message)
        await pool.rests(model)
        await pool.until("b", "Serving")

    run(claim, story, OFFRAMP_MODELS_BYTES=str(3 * min(sizes)))


async def opened(pool: Pool, sent: PlanDocument) -> Model:
    """Model ``a`` at rest, whose breaker has opened under a document."""
    await pool.tell(RESTING)
    model = await pool.until("a", "Serving")
    worker = model.doors.worker
    assert worker.plans is not None and worker.engine is not None
    await asyncio.to_thread(worker.plans.deliver, sign(sent))
    stable = worker.engine.active.stable
    assert stable is not None and stable.breaker is not None
    stable.breaker.update(audited=400, disagreements=400)
    await pool.rests(model)
    assert worker.state().breaker_open
    return model


def test_an_open_breaker_outlasts_a_document_that_is_refused_at_the_load(claim: Path, tmp_path: Path) -> None:
    """Its ramp set is in no store that can be read then."""
    store = tmp_path / "store"
    exits = plan_for(claim / "a", {"r00-grid": "0.5"})
    sent = document(exits, epoch=5, service_uid="uid-a", audit_rate=1.0)
    other = replace(exits, ramp_set_digest="sha256:" + "0" * 64)

    async def story(pool: Pool) -> None:
        model = await opened(pool, sent)
        worker = model.doors.worker
        assert worker.plans is not None
        await asyncio.to_thread(
            worker.plans.deliver, sign(document(other, epoch=6, service_uid="uid-a", audit_rate=1.0))
        )
        for _ in range(2):
            await pool.repository.load(model)
            state = worker.state()
            assert (state.epoch, state.stable_hash, state.breaker_open) == (0, "", False)
            assert worker.engine is not None and worker.engine.arms.exits_off
            await pool.rests(model)
        await pool.repository.load(model)
        await asyncio.to_thread(worker.plans.deliver, sign(replace(sent, epoch=7)))
        assert worker.state().epoch == 7 and worker.state().breaker_open

    run(claim, story, OFFRAMP_RAMP_SETS=str(store))


def test_what_the_bundle_cannot_run_is_refused_at_rest_and_the_breaker_stays_with_its_plan(claim: Path) -> None:
    exits = plan_for(claim / "a", {"r00-grid": "0.5"})
    sent = document(exits, epoch=5, service_uid="uid-a", audit_rate=1.0)

    async def story(pool: Pool) -> None:
        model = await opened(pool, sent)
        worker = model.doors.worker
        assert worker.plans is not None
        for wrong in ({"ramp_set_digest": "sha256:" + "0" * 64}, {"precision": "int4"}):
            with pytest.raises(PlanRefusedError):
                worker.plans.deliver(sign(document(replace(exits, **wrong), epoch=6, service_uid="uid-a")))
        worker.plans.deliver(sign(document(plan_for(claim / "a"), epoch=6, service_uid="uid-a")))
        assert not worker.state().breaker_open
        worker.plans.deliver(sign(replace(sent, epoch=7)))
        assert worker.state().breaker_open
        await pool.repository.load(model)
        assert worker.state().epoch == 7 and worker.state().breaker_open

    run(claim, story)


def test_what_comes_while_a_load_fails_late_is_told_and_in_force_with_the_next(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = document(plan_for(claim / "a", {"r00-grid": "0.5"}), epoch=5, service_uid="uid-a", audit_rate=1.0)

    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for a moment")

    async def story(pool: Pool) -> None:
        model = await opened(pool, sent)
        worker = model.doors.worker
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "start", no_memory)
            with pytest.raises(UnavailableError, match="no memory"):
                await pool.repository.load(model)
            assert worker.plans is not None and worker.state().breaker_open
            await asyncio.to_thread(worker.plans.deliver, sign(replace(sent, epoch=6)))
            assert worker.state().epoch == 6
        await pool.until("a", "Serving")
        assert worker.state().epoch == 6 and worker.state().breaker_open

    run(claim, story)


def test_audits_that_are_abandoned_when_a_model_leaves_count_as_disagreements(
    claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offramp_worker.shared.repository, "AUDIT_SECONDS", 0.05)
    plan = plan_for(claim / "a", {"r00-grid": "0.5"})
    sent = document(plan, epoch=5, service_uid="uid-a", audit_rate=1.0, accuracy_budget=0.01)

    async def story(pool: Pool) -> None:
        await pool.tell(RESTING)
        model = await pool.until("a", "Serving")
        worker = model.doors.worker
        assert worker.plans is not None and worker.engine is not None
        await asyncio.to_thread(worker.plans.deliver, sign(sent))
        monkeypatch.setattr(worker.engine.desk, "step", lambda: time.sleep(0.01))
        serves(pool.repository, times=30)
        await until(lambda: worker.observations(after=0, now=0.0).counts[-1].drawn == 30)
        await pool.rests(model)
        await pool.repository.load(model)
        stable = worker.engine.active.stable
        assert stable is not None and stable.breaker is not None
        assert stable.breaker._state.open == 0 and stable.breaker.statistic > 1.0

    run(claim, story)


def test_a_canary_whose_lease_ended_at_rest_stays_out_and_a_newer_one_is_told(claim: Path) -> None:
    off, exits = plan_for(claim / "a"), plan_for(claim / "a", {"r00-grid": "0.5"})

    def canary(epoch: int) -> PlanDocument:
        fields: dict[str, Any] = {"canary": exits, "weight": 50, "canary_lease_seconds": 0.5}
        return document(off, epoch=epoch, service_uid="uid-a", **fields)

    async def story(pool: Pool) -> None:
        await pool.tell(RESTING)
        model = await pool.until("a", "Serving")
        worker = model.doors.worker
        assert worker.plans is not None
        for before in (document(off, epoch=4, service_uid="uid-a"), canary(6)):
            await asyncio.to_thread(worker.plans.deliver, sign(before))
            worker.renew_lease()
            await pool.rests(model)
            epoch = before.epoch + 1
            await asyncio.to_thread(worker.plans.deliver, sign(canary(epoch)))
            worker.renew_lease()
            assert worker.state().canary_hash == exits.content_hash
            await until(lambda: not worker.state().canary_hash)
            worker.renew_lease()
            assert not worker.state().canary_hash, "a lease that has run out is not renewed"
            await pool.repository.load(model)
            assert worker.engine is not None and worker.engine.active.epoch == epoch
            assert worker.engine.arms.canary(worker.engine.active) is None and not worker.state().canary_hash

    run(claim, story)
