"""How workers come to another bundle or image: what is promised whichever worker finds no room, fails, or is slow to
go."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from fleet import MANIFEST, Fleet, changed, pool, with_endpoint, worker_of  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.decide import decide
from offramp_core.control.objects import Service, ServiceStatus, UpdateStatus, WorkersStatus
from offramp_core.control.snapshot import Scaling, Snapshot, Trouble, Worker
from offramp_core.control.spec import UpdatePolicy, parse_spec
from offramp_core.control.workers.update import Update, UpdateView, next_update, resting_strategy, strategy_in_force
from offramp_core.protocol import ArmCounts, Observations, RecordBlock

DEADLINE = 300.0
NOW = 1_000_000.0
NO_ROOM = {"failure": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "failure_reason": "Unschedulable"}


def old(name: str = "old", *, ready: bool = True, **more: Any) -> Worker:
    return worker_of(name, name, ready, current=False, **more)


def new(name: str = "new", *, ready: bool = False, **more: Any) -> Worker:
    return worker_of(name, name, ready, current=True, **more)


def refused(name: str = "new") -> Worker:
    return new(name, no_room=True, **NO_ROOM)


def update(
    *workers: Worker,
    kind: Any = "Auto",
    before: UpdateStatus = UpdateStatus(),  # noqa: B008 - frozen
    desired: int = 2,
    busy: float = 0.2,
    now: float = NOW,
) -> Update:
    view = UpdateView(before, UpdatePolicy(kind, DEADLINE), workers, desired, busy, now, watched_since=NOW)
    return next_update(view)


WAITED = UpdateStatus("Surge", no_room_at=NOW - DEADLINE)


class TestRoom:
    def test_where_there_is_room_the_new_worker_starts_first(self) -> None:
        found = update(old("a"), old("b"), new())
        assert (found.status, found.reason) == (UpdateStatus("Surge"), "Surging")

    def test_nothing_is_said_once_every_worker_is_current(self) -> None:
        assert update(new(ready=True), new("b"), before=WAITED) == Update()

    def test_a_worker_on_its_way_out_is_not_waited_for(self) -> None:
        assert update(new(ready=True), old(ready=False, ending=True)) == Update()

    def test_room_for_one_more_is_waited_for_until_the_deadline(self) -> None:
        first = update(old("a"), old("b"), refused())
        assert (first.status, first.reason) == (UpdateStatus("Surge", NOW), "WaitingForRoom")
        assert "5 min" in first.message and "Insufficient nvidia.com/gpu" in first.message
        later = update(old("a"), old("b"), refused(), before=first.status, now=NOW + DEADLINE - 1)
        assert later.status == first.status

    def test_then_two_workers_or_more_are_replaced_in_place(self) -> None:
        found = update(old("a"), old("b"), refused(), before=WAITED)
        assert (found.status.strategy, found.reason) == ("Replace", "Replacing")

    def test_for_a_device_that_no_node_has_none_is_taken_away_or_asked_for(self) -> None:
        nowhere = new(no_room=True, offered_nowhere=True, **NO_ROOM)
        found = update(old("a"), old("b"), nowhere, before=WAITED)
        assert (found.status.strategy, found.reason) == ("Surge", "NoRoomToSurge")
        assert "updatePolicy" not in update(old("a"), nowhere, before=WAITED, desired=1).message

    def test_room_that_came_and_went_is_waited_for_anew(self) -> None:
        starting = update(old("a"), old("b"), new(), before=WAITED)
        assert starting.status == UpdateStatus("Surge")
        again = update(old("a"), old("b"), refused(), before=starting.status)
        assert again.status == UpdateStatus("Surge", NOW)

    def test_a_deadline_told_by_a_clock_that_is_ahead_is_counted_from_when_this_process_began_to_look(self) -> None:
        ahead = UpdateStatus("Surge", no_room_at=NOW + 3600)
        assert update(old("a"), old("b"), refused(), before=ahead, now=NOW + 1).reason == "WaitingForRoom"
        assert update(old("a"), old("b"), refused(), before=ahead, now=NOW + DEADLINE).reason == "Replacing"

    def test_once_in_place_it_stays_so_until_the_last_worker(self) -> None:
        found = update(old("a"), new(ready=True), before=UpdateStatus("Replace"))
        assert found.status == UpdateStatus("Replace")

    def test_what_another_workers_leaving_does_not_cure_takes_none_away(self) -> None:
        selector = new(failure="0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.")
        assert update(old("a"), old("b"), selector, before=WAITED).status == UpdateStatus("Surge")


class TestHold:
    @pytest.mark.parametrize(
        ("arguments", "next_step"),
        [
            pytest.param({"desired": 1}, "set updatePolicy.type to Recreate", id="the only worker"),
            pytest.param(
                {"kind": "ResourceAware", "desired": 1},
                "set updatePolicy.type to Recreate",
                id="the only worker, resource-aware",
            ),
            pytest.param({"kind": "Availability"}, "set updatePolicy.type to Auto", id="availability"),
            pytest.param({"busy": 0.8}, "set updatePolicy.type to ResourceAware", id="too busy to spare one"),
        ],
    )
    def test_it_holds_with_the_next_step_in_one_sentence(self, arguments: dict[str, Any], next_step: str) -> None:
        found = update(
            *(old(f"o{i}") for i in range(arguments.get("desired", 2))), refused(), before=WAITED, **arguments
        )
        assert (found.status.strategy, found.reason, found.held) == ("Surge", "NoRoomToSurge", True)
        assert next_step in found.message and "free room" in found.message and "\n" not in found.message

    def test_it_goes_on_by_itself_when_there_is_room(self) -> None:
        assert update(old(), new(), before=WAITED, desired=1).reason == "Surging"

    def test_load_that_sinks_lets_it_go_on_in_place(self) -> None:
        assert update(old("a"), old("b"), refused(), before=WAITED, busy=0.45).reason == "Replacing"


class TestNewWorkersThatFail:
    def told(self, worker: Worker, *, batches: int, failed: int) -> Worker:
        counts = ArmCounts(1, "stable", "hash", requests=batches, batches=batches, failed_batches=failed)
        return replace(
            worker,
            observations=Observations(worker.endpoint.uid, worker.endpoint.name, NOW, (counts,), RecordBlock(0, 0, "")),
        )

    @pytest.mark.parametrize("strategy", ["Surge", "Replace"])
    def test_the_reason_stands_in_the_condition(self, strategy: Any) -> None:
        broken = new(failure="manifest.json: digest differs", failure_reason="InvalidBundle")
        found = update(old("a"), old("b"), broken, before=UpdateStatus(strategy))
        assert (found.reason, found.status.strategy) == ("NewWorkersFail", strategy)
        assert "new: manifest.json: digest differs" in found.message

    @pytest.mark.parametrize("worker", [new(), refused(), new(failure="no node", failure_reason="Unschedulable")])
    def test_a_start_and_a_lack_of_room_are_no_failure(self, worker: Worker) -> None:
        assert update(old("a"), old("b"), worker).reason in ("Surging", "WaitingForRoom")

    @pytest.mark.parametrize(
        ("failed", "before", "reason"), [(40, 0, "NewWorkersFail"), (1, 0, "Surging"), (40, 200, "Surging")], ids=str
    )
    def test_more_failed_batches_than_before_count_beyond_doubt_only(
        self, failed: int, before: int, reason: str
    ) -> None:
        found = update(
            self.told(old("a"), batches=1000, failed=before), self.told(new(ready=True), batches=200, failed=failed)
        )
        assert found.reason == reason


class TestResourceAware:
    def test_it_never_asks_for_one_more(self) -> None:
        assert resting_strategy(UpdatePolicy("ResourceAware"), 2) == "Replace"
        assert update(old("a"), old("b"), kind="ResourceAware", busy=0.99).status.strategy == "Replace"

    def test_the_only_worker_is_not_taken_away(self) -> None:
        assert resting_strategy(UpdatePolicy("ResourceAware"), 1) == "Surge"


class TestABrokenWorkerInTheWay:
    """It holds the room that its successor needs, so one ahead of it could wait for ever."""

    @pytest.mark.parametrize("kind", ["Auto", "Availability", "ResourceAware"])
    @pytest.mark.parametrize("desired", [1, 2])
    def test_it_goes_at_once_because_nothing_is_lost_with_it(self, kind: str, desired: int) -> None:
        broken = old("broken", ready=False, failure="manifest.json: digest differs")
        serving = [old("serving")] if desired == 2 else []
        assert update(broken, *serving, refused(), kind=kind, desired=desired).status.strategy == "Replace"

    def test_one_that_is_only_starting_is_given_its_time(self) -> None:
        assert update(old("starting", ready=False), refused(), desired=1).status.strategy == "Surge"

    def test_it_stays_while_as_many_serve_as_are_wanted(self) -> None:
        broken = old("broken", ready=False, failure="x")
        assert update(old("a"), old("b"), broken, refused(), kind="Availability").status.strategy == "Surge"


# --- what holds in every situation -----------------------------------------------------------------

WORKERS = st.lists(
    st.builds(
        lambda name, ready, current, no_room, failed: worker_of(
            name,
            name,
            ready and not no_room,
            current=current,
            no_room=no_room,
            failure="failed" if failed or no_room else "",
        ),
        st.uuids().map(str),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)
BEFORE = st.builds(
    UpdateStatus, st.sampled_from(["", "Surge", "Replace"]), st.none() | st.floats(NOW - 1000, NOW + 1000)
)


@given(WORKERS, BEFORE, st.sampled_from(["Auto", "Availability", "ResourceAware"]), st.integers(0, 4), st.floats(0, 1))
def test_a_serving_worker_is_taken_first_only_where_another_serves_and_the_policy_allows_it(
    workers: list[Worker], before: UpdateStatus, kind: str, desired: int, busy: float
) -> None:
    found = update(*workers, kind=kind, before=before, desired=desired, busy=busy)
    if found.status.strategy != "Replace":
        return
    # A rolling update in place keeps desired - 1 available: at least one, or nobody who serves is touched.
    one_short = sum(w.endpoint.ready for w in workers) < desired
    assert one_short or (desired >= 2 and kind != "Availability")


@given(WORKERS, BEFORE, st.sampled_from(["Auto", "Availability", "ResourceAware"]), st.integers(0, 4))
def test_deciding_again_on_the_same_facts_changes_nothing(
    workers: list[Worker], before: UpdateStatus, kind: str, desired: int
) -> None:
    once = update(*workers, kind=kind, before=before, desired=desired)
    assert update(*workers, kind=kind, before=once.status, desired=desired) == once


@pytest.mark.parametrize(
    ("replicas", "ready", "expected"), [(2, 2, "Replace"), (1, 1, "Surge"), (1, 0, "Replace")], ids=str
)
def test_a_status_that_is_one_pass_old_never_takes_the_only_serving_worker(
    replicas: int, ready: int, expected: str
) -> None:
    status = ServiceStatus(update=UpdateStatus("Replace"), workers=WorkersStatus(2, ready))
    service = Service("default", "sim", "uid", 2, parse_spec({**MANIFEST, "replicas": replicas}), status)
    assert strategy_in_force(service, replicas) == expected


# --- in the loop -----------------------------------------------------------------------------------

CLEAN = pool(4000, seed=1)
RECKLESS = pool(4000, seed=2, confusion=0.35)
OTHER = "sha256:" + "c" * 64


@cache
def _serving() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    fleet.run(lambda f: f.status.phase == "Ready")
    return fleet


@cache
def _canarying() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: f.published is not None and f.published.canary is not None)
    return fleet


def with_new_model(snapshot: Snapshot, *names: str) -> Snapshot:
    """The named workers already serve another model, and refuse what was planned for the old one."""

    def other(worker: Worker) -> Worker:
        assert worker.state is not None
        state = replace(worker.state, backbone_digest=OTHER, epoch=0, stable_hash="", canary_hash="")
        return with_endpoint(replace(worker, state=state, observations=None), current=True)

    workers = tuple(other(w) if w.endpoint.name in names else with_endpoint(w, current=False) for w in snapshot.workers)
    return changed(snapshot, workers=workers)


def conditions_of(status: ServiceStatus) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in status.conditions}


class TestInTheLoop:
    def held(self, fleet: Fleet) -> Snapshot:
        """A new generation with one worker that finds no room."""
        fleet.edit(worker={"image": "offramp/worker:2"}, updatePolicy={"type": "Availability", "surgeDeadline": "1m"})
        snapshot = fleet.snapshot()
        workers = tuple(with_endpoint(w, current=False) for w in snapshot.workers)
        return changed(snapshot, workers=(*workers, refused()))

    @pytest.mark.slow
    def test_a_held_update_is_stalled_and_ready_and_told_once(self) -> None:
        fleet = copy.deepcopy(_serving())
        snapshot, reasons = self.held(fleet), []
        for second in range(120):
            decision = decide(changed(snapshot, service=fleet.service, published=fleet.published), fleet.now + second)
            fleet.store(decision)
            reasons += [e.reason for e in decision.events]
        told = conditions_of(fleet.status)
        assert told["Ready"] == ("True", "Serving")
        assert told["WorkersUpdating"] == ("True", "NoRoomToSurge")
        assert told["Reconciling"] == told["Stalled"] == ("True", "NoRoomToSurge")
        assert reasons == ["NoRoomToSurge"]
        assert fleet.status.phase == "Stalled" and "updatePolicy.type" in fleet.status.message

    def test_going_back_to_the_old_spec_ends_it_at_once(self) -> None:
        fleet = copy.deepcopy(_serving())
        snapshot = self.held(fleet)
        fleet.store(decide(snapshot, fleet.now))
        fleet.edit(worker={})
        fleet.step()
        fleet.step()
        assert fleet.status.update == UpdateStatus()
        assert not {"WorkersUpdating", "Reconciling", "Stalled"} & set(conditions_of(fleet.status))

    def test_an_image_that_the_administrator_changed_is_no_generation_of_the_user(self) -> None:
        fleet = copy.deepcopy(_serving())
        snapshot = fleet.snapshot()
        workers = (*(with_endpoint(w, current=False) for w in snapshot.workers), refused())
        status = decide(changed(snapshot, workers=workers), fleet.now).status
        assert conditions_of(status)["WorkersUpdating"] == ("True", "WaitingForRoom")
        assert not {"Reconciling", "Stalled"} & set(conditions_of(status))

    def test_a_service_whose_turn_has_not_come_says_so_and_is_at_rest(self) -> None:
        fleet = copy.deepcopy(_serving())
        snapshot = changed(fleet.snapshot(), turn=Trouble("WaitingForTurn", "others take it first"))
        status = decide(snapshot, fleet.now).status
        assert conditions_of(status)["WorkersUpdating"] == ("True", "WaitingForTurn")
        assert not {"Reconciling", "Stalled"} & set(conditions_of(status)) and status.phase == "Ready"

    def test_what_an_autoscaler_asks_for_is_what_is_wanted(self) -> None:
        fleet = copy.deepcopy(_serving())
        scaled = changed(fleet.snapshot(), scaling=Scaling("HorizontalPodAutoscaler mine", 5))
        status = decide(scaled, fleet.now).status
        assert (status.workers.desired, status.workers.summary) == (5, "2/5")
        assert status.workers.scaled_by == "HorizontalPodAutoscaler mine"
        none = changed(scaled, scaling=Scaling("KEDA", 0), workers=())
        assert conditions_of(decide(none, fleet.now).status)["Ready"] == ("False", "ScaledToZero")


class TestPlansNeverCrossModels:
    def test_nothing_is_published_for_the_new_model_while_as_many_workers_serve_the_old_one(self) -> None:
        fleet = copy.deepcopy(_serving())
        decision = decide(with_new_model(fleet.snapshot(), "w0"), fleet.now)
        assert decision.publish is None
        assert decision.status.stable_config == fleet.status.stable_config
        assert decision.new_configs == () and decision.new_rollout is None

    def test_the_last_old_worker_gone_exits_are_off_until_the_new_model_has_a_plan_of_its_own(self) -> None:
        fleet = copy.deepcopy(_serving())
        decision = decide(with_new_model(fleet.snapshot(), "w0", "w1"), fleet.now)
        assert decision.publish is not None and decision.publish.canary is None
        assert decision.publish.stable.plan["backboneDigest"] == OTHER
        assert decision.publish.stable.plan["ramps"] == []

    @pytest.mark.slow
    def test_a_canary_stays_watched_while_workers_of_two_models_serve(self) -> None:
        """A slow update may take an hour; a plan that does harm must not run through it unseen."""
        fleet = copy.deepcopy(_canarying())
        name = next(iter(fleet.rollouts))
        fleet.drift(RECKLESS)
        for _ in range(120):
            fleet.step()
            decision = decide(with_new_model(fleet.snapshot(), "w0"), fleet.now)
            fleet.act(decision)
            if fleet.rollouts[name].status.phase == "RollingBack":
                break
        assert fleet.rollouts[name].status.outcome == "RolledBack"
        assert fleet.published is not None and fleet.published.canary is None

    def test_a_canary_is_taken_from_the_old_workers_before_the_plans_are_for_the_new_ones(self) -> None:
        """Old workers refuse what is published for the new model, and pulls renew the lease of a canary that nobody
        watches."""
        fleet = Fleet(CLEAN, {**MANIFEST, "replicas": 3})
        fleet.run(lambda f: f.published is not None and f.published.canary is not None)
        name, last = next(iter(fleet.rollouts)), fleet.workers[2]
        for _ in range(6):
            fleet.act(decide(with_new_model(fleet.snapshot(), "w0", "w1"), fleet.now))
            assert fleet.published is not None
            if fleet.published.stable.plan["backboneDigest"] == OTHER:
                break
        assert last.document is not None and last.document.canary is None
        assert (fleet.rollouts[name].status.verdict, fleet.rollouts[name].status.reason) == ("Aborted", "ModelChanged")

    def test_a_worker_of_the_new_model_that_refuses_the_plan_says_nothing_about_the_plan(self) -> None:
        fleet = copy.deepcopy(_canarying())
        name = next(iter(fleet.rollouts))
        for _ in range(3):
            decision = decide(with_new_model(fleet.snapshot(), "w1"), fleet.now)
            fleet.act(decision)
        assert fleet.rollouts[name].status.phase == "Progressing"

    @pytest.mark.slow
    def test_records_of_the_new_model_tune_no_plan_of_the_old_one(self) -> None:
        fleet = Fleet(CLEAN)
        for _ in range(30):
            fleet.step()
        snapshot = with_new_model(fleet.snapshot(), "w0")
        assert snapshot.observed.records is not None
        decision = decide(
            changed(snapshot, records=replace(snapshot.observed.records, backbone_digest=OTHER)), fleet.now
        )
        assert decision.tune is None
