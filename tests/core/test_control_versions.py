"""Two versions of a model side by side: who runs what, what is held against the new one, and how a trial ends."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from fleet import BACKBONE, MANIFEST, Fleet, SimWorker, changed, pool, worker_of  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.decide import decide
from offramp_core.control.objects import ModelSource, ModelStatus, Service, ServiceStatus, VersionStatus, VersionTally
from offramp_core.control.snapshot import Gathered, Observed, Scaling, Snapshot, Trouble, Worker
from offramp_core.control.spec import parse_spec
from offramp_core.control.workers.versions import (
    VersionView,
    next_version,
    read_gates,
    request_share,
    serving_source,
    split_in_force,
    trial_workers,
)
from offramp_core.protocol import Observations
from offramp_core.sketch import bucket_index

OLD, NEW, NEWER = "oci://m:1", "oci://m:2", "oci://m:3"
BACKBONES = {OLD: BACKBONE, NEW: "sha256:" + "c" * 64, NEWER: "sha256:" + "d" * 64}
NOW = 1_000_000.0
LATE = str(bucket_index(1.0))
NO_ROOM = {
    "failure": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
    "failure_reason": "Unschedulable",
    "no_room": True,
}


def manifest(uri: str = OLD, *, replicas: int = 4, kind: str = "Auto", **side: Any) -> dict[str, Any]:
    policy = {
        "type": kind,
        "surgeDeadline": "5m",
        "sideBySide": {"weight": 25, "pause": "60s", "deadline": "10m", **side},
    }
    return {**MANIFEST, "model": {"uri": uri}, "replicas": replicas, "updatePolicy": policy}


def service(uri: str = NEW, status: VersionStatus = VersionStatus(), request: str = "", **more: Any) -> Service:  # noqa: B008
    told = ServiceStatus(version=status, models=more.pop("models", ()))
    return Service("default", "sim", "uid", 2, parse_spec(manifest(uri, **more)), told, request)


def view(*trial: Worker, main: tuple[Worker, ...] | None = None, now: float = NOW, **more: Any) -> VersionView:
    asked = service(**{k: more.pop(k) for k in list(more) if k not in ("desired", "scaled", "busy", "watched_since")})
    main = tuple(worker_of(f"w{i}") for i in range(4)) if main is None else main
    return VersionView(
        asked,
        main,
        trial,
        more.get("desired", 4),
        more.get("scaled", False),
        more.get("busy", 0.2),
        now,
        more.get("watched_since", NOW - 10_000),
    )


def on_trial(phase: Any = "Starting", **more: Any) -> VersionStatus:
    return VersionStatus(
        ModelSource(OLD),
        ModelSource(NEW),
        phase,
        more.pop("strategy", "Surge"),
        started_at=NOW,
        phase_started_at=more.pop("since", NOW),
        **more,
    )


def new(name: str = "n0", *, ready: bool = True, **more: Any) -> Worker:
    return worker_of(name, name, ready, trial=True, **more)


# --- who runs what ---------------------------------------------------------------------------------


@given(st.integers(2, 1000), st.integers(1, 50), st.booleans())
def test_the_newer_version_always_has_a_worker_and_never_more_than_half(desired: int, weight: int, took: bool) -> None:
    n = trial_workers(desired, weight, replaces=took)
    assert 1 <= n <= desired
    if took:
        assert n <= max(1, (desired + 1) // 2) and desired - n >= 1


@given(st.integers(20, 1000), st.integers(5, 50), st.booleans())
def test_the_share_of_workers_is_about_the_weight(desired: int, weight: int, took: bool) -> None:
    n = trial_workers(desired, weight, replaces=took)
    total = desired if took else desired + n
    assert abs(n / total - weight / 100) <= 0.05


@pytest.mark.parametrize(
    ("strategy", "scaled", "expected"),
    [("Surge", False, (4, 1)), ("Replace", False, (3, 1)), ("Replace", True, (4, 1))],
)
def test_workers_on_trial_come_besides_the_others_or_in_place_of_some(
    strategy: str, scaled: bool, expected: Any
) -> None:
    split = split_in_force(service(status=on_trial(strategy=strategy)), 4, scaled=scaled)
    assert (split.n_main, split.n_trial) == expected
    assert split.main.spec.model_uri == OLD


def test_the_only_worker_is_never_taken_away_for_a_trial() -> None:
    split = split_in_force(service(status=on_trial(strategy="Replace"), replicas=1), 1, scaled=False)
    assert (split.n_main, split.n_trial) == (1, 1)


def test_a_model_that_was_not_decided_upon_yet_reaches_no_worker() -> None:
    """The status is one pass behind the spec."""
    split = split_in_force(service(NEWER, on_trial("Comparing")), 4, scaled=False)
    assert (split.main.spec.model_uri, split.n_main, split.n_trial) == (OLD, 4, 0)


@pytest.mark.parametrize("phase", ["Comparing", "Rejected", "Promoting"])
def test_without_the_option_workers_are_made_as_the_spec_says(phase: str) -> None:
    asked = replace(service(status=on_trial(phase)), spec=parse_spec({**MANIFEST, "model": {"uri": NEW}}))
    assert split_in_force(asked, 2, scaled=False).main is asked
    assert split_in_force(asked, 2, scaled=False).n_trial == 0
    assert next_version(replace(view(), service=asked)).status == VersionStatus()


@given(
    st.sampled_from(["", "Starting", "Comparing", "AwaitingPromotion", "Promoting", "Rejected"]),
    st.integers(1, 50),
    st.booleans(),
    st.booleans(),
)
def test_requests_go_to_versions_that_answer_and_by_weight_from_the_comparison_on(
    phase: str, weight: int, main_ready: bool, trial_ready: bool
) -> None:
    asked = service(status=on_trial(phase), weight=weight)
    share = request_share(asked, main_ready=main_ready, trial_ready=trial_ready)
    compared = phase in ("Comparing", "AwaitingPromotion", "Promoting")
    if not (compared and trial_ready):
        assert share == 0, "not proven, gone, or nobody there"
    else:
        assert share == (weight if main_ready else 100)


def test_a_model_that_was_not_decided_upon_yet_gets_no_request() -> None:
    """Nor does anybody where the option is gone: then workers of a trial are on their way out."""
    asked = service(NEWER, on_trial("Comparing"))
    without = replace(service(status=on_trial("Comparing")), spec=parse_spec({**MANIFEST, "model": {"uri": NEW}}))
    for told in (asked, without):
        assert request_share(told, main_ready=True, trial_ready=True) == 0


def test_everything_about_a_source_comes_back_as_it_was() -> None:
    model = {
        "uri": "s3://bucket/m.tar",
        "digest": BACKBONE,
        "archiveDigest": "sha256:" + "e" * 64,
        "endpoint": "https://s3.example",
        "region": "eu-1",
        "secretRef": {"name": "s"},
    }
    spec = parse_spec({**MANIFEST, "model": model})
    assert ModelSource.of(spec).put(parse_spec(manifest())).model_secret == "s"
    assert ModelSource.of(spec).put(spec) == spec


@pytest.mark.parametrize(
    ("asked", "models", "same"),
    [
        ({"uri": OLD}, (), True),
        ({"uri": NEW}, (), False),
        ({"uri": NEW, "digest": BACKBONE}, (ModelStatus(OLD, BACKBONE),), True),
        ({"uri": NEW}, (ModelStatus(OLD, BACKBONE), ModelStatus(NEW, BACKBONE)), True),
        ({"uri": OLD, "digest": BACKBONE}, (ModelStatus(OLD, BACKBONE),), True),
        ({"uri": OLD, "digest": BACKBONES[NEW]}, (ModelStatus(OLD, BACKBONE),), False),
    ],
    ids=str,
)
def test_it_is_the_backbone_that_makes_a_version(asked: Any, models: Any, same: bool) -> None:
    status = ServiceStatus(version=VersionStatus(ModelSource(OLD)), models=models)
    given = Service("default", "sim", "uid", 2, parse_spec({**manifest(), "model": asked}), status)
    assert (serving_source(given) is None) == same


# --- how a trial goes ------------------------------------------------------------------------------


class TestATrialBegins:
    def test_only_beside_a_model_that_all_workers_have_served(self) -> None:
        starting = (worker_of("w0"), worker_of("w1", ready=False))
        assert next_version(view(main=starting, uri=OLD)).status == VersionStatus()
        assert next_version(view(uri=OLD)).status == VersionStatus(ModelSource(OLD))
        assert next_version(view()).status.phase == "", "the first model that serves is not tried"

    def test_when_the_spec_asks_for_another_one_and_what_was_asked_before_is_forgotten(self) -> None:
        first = next_version(view(status=VersionStatus(ModelSource(OLD)), request="promote/1"))
        assert (first.status.phase, first.status.strategy, first.reason) == ("Starting", "Surge", "Starting")
        assert first.status.handled_request == "promote/1"
        assert [e.reason for e in first.events] == ["VersionOnTrial"]

    def test_anew_when_the_spec_changes_its_mind(self) -> None:
        again = next_version(view(uri=NEWER, status=on_trial("Comparing")))
        assert (again.status.phase, again.status.candidate.uri, again.status.serving.uri) == ("Starting", NEWER, OLD)
        back = next_version(view(uri=OLD, status=on_trial("Comparing")))
        assert back.status == VersionStatus(ModelSource(OLD))

    def test_not_where_nobody_serves(self) -> None:
        assert next_version(view(status=on_trial(), desired=0, main=())).status == VersionStatus(ModelSource(NEW))

    @pytest.mark.parametrize(
        ("kind", "desired", "scaled", "strategy"),
        [
            ("ResourceAware", 4, False, "Replace"),
            ("ResourceAware", 1, False, "Surge"),
            ("ResourceAware", 4, True, "Surge"),
            ("Availability", 4, False, "Surge"),
        ],
    )
    def test_in_the_order_that_the_policy_asks_for(self, kind: str, desired: int, scaled: bool, strategy: str) -> None:
        begun = next_version(view(status=VersionStatus(ModelSource(OLD)), kind=kind, desired=desired, scaled=scaled))
        assert begun.status.strategy == strategy


class TestRoom:
    def refused(self, **more: Any) -> Any:
        return next_version(view(new(ready=False, **NO_ROOM), **more))

    def test_it_is_waited_for(self) -> None:
        found = self.refused(status=on_trial())
        assert (found.reason, found.status.no_room_at) == ("WaitingForRoom", NOW)
        assert "Insufficient nvidia.com/gpu" in found.message

    def test_then_workers_that_can_be_spared_give_theirs(self) -> None:
        assert self.refused(status=on_trial(no_room_at=NOW - 300)).status.strategy == "Replace"

    @pytest.mark.parametrize("why", [{"kind": "Availability"}, {"busy": 0.95}, {"desired": 1}, {"scaled": True}])
    def test_else_it_holds_and_tells_once(self, why: dict[str, Any]) -> None:
        found = self.refused(status=on_trial(no_room_at=NOW - 300), **why)
        assert (found.status.strategy, found.reason, found.held) == ("Surge", "NoRoomToSurge", True)
        assert [e.reason for e in found.events] == ["NoRoomToSurge"]

    def test_waiting_for_it_is_no_fault_of_the_model(self) -> None:
        status = on_trial(no_room_at=NOW - 5000, since=NOW - 5000)
        assert self.refused(status=status, kind="Availability").status.phase == "Starting"
        starting = next_version(view(new(ready=False), status=status, kind="Availability"))
        assert (starting.status.phase, starting.status.phase_started_at) == ("Starting", NOW)


class TestATrialEndsBadly:
    def rejected(self, found: Any, reason: str) -> None:
        assert (found.status.phase, found.status.reason) == ("Rejected", reason)
        assert [e.reason for e in found.events] == ["VersionRejected"]
        assert found.status.strategy == "" and found.status.serving.uri == OLD

    def test_a_broken_bundle_is_not_waited_for(self) -> None:
        broken = new(ready=False, failure="manifest.json: digest differs", failure_reason="InvalidBundle")
        self.rejected(next_version(view(broken, status=on_trial())), "InvalidBundle")

    def test_workers_that_are_never_ready_are_waited_for_until_the_deadline(self) -> None:
        crashing = new(ready=False, failure="exit code 1", failure_reason="CrashLoopBackOff")
        before = next_version(view(crashing, status=on_trial(since=NOW - 599)))
        assert before.status.phase == "Starting"
        late = next_version(view(crashing, status=on_trial(since=NOW - 601)))
        self.rejected(late, "StartTimeout")
        assert "n0: exit code 1" in late.status.message

    def test_a_deadline_counts_what_this_operator_has_seen(self) -> None:
        status = on_trial(since=NOW - 5000)
        assert next_version(view(new(ready=False), status=status, watched_since=NOW - 10)).status.phase == "Starting"

    def test_a_worker_that_dies_after_it_has_served(self) -> None:
        status = on_trial("Comparing", restarts={"n0": 1})
        assert next_version(view(new(restarts=1), status=status)).status.phase == "Comparing"
        self.rejected(next_version(view(new(ready=False, restarts=2), status=status)), "WorkerRestarted")

    @pytest.mark.parametrize("phase", ["Starting", "Comparing", "AwaitingPromotion", "Promoting"])
    def test_a_person_may_abort_it_at_any_time(self, phase: str) -> None:
        self.rejected(next_version(view(new(), status=on_trial(phase), request="abort/1")), "DecisionAbort")

    def test_nothing_proven_until_the_deadline_after_its_pause(self) -> None:
        self.rejected(next_version(view(new(), status=on_trial("Comparing", since=NOW - 661))), "Inconclusive")

    def test_it_stays_rejected_until_the_spec_asks_for_another(self) -> None:
        status = on_trial("Rejected")
        again = next_version(view(new(), status=status, request="promote/2"))
        assert again.status == status and not again.events and not again.on_trial
        split = split_in_force(service(status=status), 4, scaled=False)
        assert (split.main.spec.model_uri, split.n_main, split.n_trial) == (OLD, 4, 0)


def test_on_the_same_facts_it_comes_to_rest() -> None:
    seen = Observations("n0", "boot", 0.0, (), None)  # type: ignore[arg-type]
    for first in (
        VersionStatus(ModelSource(OLD)),
        on_trial(),
        on_trial("Comparing"),
        on_trial("AwaitingPromotion"),
        on_trial("Promoting"),
        on_trial("Rejected"),
    ):
        for workers in ((), (new(ready=False),), (new(observations=seen),), (new(ready=False, **NO_ROOM),)):
            status = first
            for _ in range(4):  # begin, compare and read the gates are passes of their own
                before, status = status, next_version(view(*workers, status=status)).status
            assert status == before


# --- the comparison --------------------------------------------------------------------------------


TRYING = view(status=on_trial())


def gates(new: VersionTally, old: VersionTally = VersionTally()) -> dict[str, str]:  # noqa: B008
    return {g.name: g.state for g in read_gates(TRYING, old=old, new=new)}


def tally(came: int, missed: int = 0, *, batches: int = 0, failed: int = 0, size: int = 1) -> VersionTally:
    batches = batches or came // size
    return VersionTally(came, missed, batches, failed, batches * size, batches * size**2)


class TestGates:
    def test_nothing_is_said_before_harm_would_have_shown(self) -> None:
        assert gates(VersionTally()) == {"failures": "Clear", "objective": "Undecided"}
        assert gates(tally(50)) == {"failures": "Clear", "objective": "Undecided"}
        assert gates(tally(1000, 30)) == {"failures": "Clear", "objective": "Clear"}

    def test_failing_batches_reject(self) -> None:
        assert gates(tally(100, failed=20))["failures"] == "Rejected"
        assert gates(tally(3000, failed=20))["failures"] == "Clear"

    def test_requests_that_are_late_or_refused_reject(self) -> None:
        assert gates(tally(500, 150))["objective"] == "Rejected"

    def test_a_burst_that_both_could_not_serve_is_not_held_against_the_new_one(self) -> None:
        assert gates(tally(500, 150), tally(2000, 600))["objective"] == "Clear"
        assert gates(tally(500, 300), tally(2000, 400))["objective"] == "Rejected"

    def test_requests_of_a_batch_are_late_together_and_count_as_one(self) -> None:
        assert gates(tally(320, 48, size=1))["objective"] == "Rejected"
        assert gates(tally(320, 48, size=32))["objective"] != "Rejected"

    def test_a_version_that_is_as_good_is_rejected_in_less_than_one_of_a_hundred(self) -> None:
        """Batches of up to 32 that are late as a whole, 5 % of them, looked at after each."""
        import numpy as np

        rejected = 0
        for seed in range(300):
            rng = np.random.default_rng(seed)
            sizes, late = rng.integers(1, 33, 400), rng.random(400) < 0.05
            for n in range(25, 401, 25):
                seen = VersionTally(
                    int(sizes[:n].sum()),
                    int(sizes[:n][late[:n]].sum()),
                    n,
                    0,
                    int(sizes[:n].sum()),
                    int((sizes[:n] ** 2).sum()),
                )
                if gates(seen)["objective"] == "Rejected":
                    rejected += 1
                    break
        assert rejected <= 8  # 99.9 % of the time fewer than 9 where the share is 1 %


# --- in the loop -----------------------------------------------------------------------------------


class Version(SimWorker):  # type: ignore[misc]
    """A worker whose model is late, or fails, in a share of its requests and batches."""

    late: float = 0.0
    broken: float = 0.0

    def view(self, *, silent: bool = False) -> Worker:
        worker = super().view(silent=silent)
        seen = worker.observations
        if seen is None:
            return worker
        counts = tuple(
            replace(
                c, failed_batches=int(self.broken * c.batches), latency={**c.latency, LATE: int(self.late * c.requests)}
            )
            for c in seen.counts
        )
        return replace(worker, observations=replace(seen, counts=counts))


@pytest.mark.parametrize("workers", [(), (SimWorker("w-0", 1, backbone=BACKBONE).view(),)], ids=["nobody", "served"])
def test_trouble_with_a_route_is_told_and_changes_nothing_else(workers: tuple[Worker, ...]) -> None:
    snapshot = Snapshot(Gathered(service(OLD)), Observed(workers))
    trouble = Trouble("NoGatewayAPI", "the cluster has none")
    told, quiet = (
        {c.type: (c.status, c.reason, c.message) for c in decide(s, NOW).status.conditions}
        for s in (changed(snapshot, route=trouble), snapshot)
    )
    assert told.pop("RouteAccepted") == ("False", "NoGatewayAPI", "the cluster has none")
    assert told == quiet


@dataclass
class Platform(Fleet):  # type: ignore[misc]
    """A fleet whose workers follow what :func:`split_in_force` asks for, one main worker per pass."""

    make: Callable[[Version], None] = lambda _: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[tuple[int, int]] = []
        self.shares: list[int] = []
        self.scaled: Scaling | None = None

    def reconcile(self) -> Any:
        self.follow()
        return super().reconcile()

    def follow(self) -> None:
        desired = self.service.spec.replicas
        split = split_in_force(self.service, desired, scaled=False)
        wanted = BACKBONES[split.main.spec.model_uri]
        main = [w for w in self.workers if not w.trial]
        trial = [w for w in self.workers if w.trial and w.backbone == BACKBONES[self.service.spec.model_uri]]
        stale = next((i for i, w in enumerate(main) if w.backbone != wanted), None)
        if stale is not None:
            main[stale] = self._start(f"{main[stale].name}x", wanted, trial=False)
        main = main[: split.n_main] + [
            self._start(f"m{i}", wanted, trial=False) for i in range(len(main), split.n_main)
        ]
        spec = BACKBONES[self.service.spec.model_uri]
        trial = trial[: split.n_trial] + [
            self._start(f"n{i}", spec, trial=True) for i in range(len(trial), split.n_trial)
        ]
        for worker in main:
            worker.current = worker.backbone == wanted
        self.workers = [*main, *trial]
        self.seen.append((len(main), len(trial)))
        self.shares.append(request_share(self.service, main_ready=bool(main), trial_ready=bool(trial)))

    def _start(self, name: str, backbone: str, *, trial: bool) -> Version:
        worker = Version(name, zlib.crc32(name.encode()), backbone=backbone, trial=trial)
        if backbone != BACKBONE:
            self.make(worker)
        return worker

    def told(self) -> dict[str, tuple[str, str]]:
        return {c.type: (c.status, c.reason) for c in self.status.conditions}

    def ask(self, what: str) -> None:
        self.service = replace(self.service, request=f"{what}/{self.now}")

    def reasons(self) -> list[str]:
        return [e.reason for e in self.events if e.reason.startswith("Version")]


@cache
def _serving() -> Platform:
    fleet = Platform(pool(4000, seed=1), manifest())
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    fleet.run(lambda f: f.status.phase == "Ready")
    return fleet


def trying(**side: Any) -> Platform:
    fleet = copy.deepcopy(_serving())
    make = side.pop("make", None)
    if make is not None:
        fleet.make = make
    kind = side.pop("kind", "Auto")
    policy = manifest(kind=kind, **{"pause": "5s", **side})["updatePolicy"]
    fleet.edit(model={"uri": NEW}, updatePolicy=policy)
    return fleet


@pytest.mark.slow
class TestInTheLoop:
    def test_a_good_version_is_tried_by_one_worker_and_then_followed_by_all(self) -> None:
        fleet = trying()
        stable = fleet.status.stable_config
        fleet.run(lambda f: f.status.version.phase == "Comparing")
        assert fleet.told()["VersionOnTrial"] == ("True", "Comparing")
        assert fleet.told()["Reconciling"][0] == "True" and fleet.told()["Ready"] == ("True", "Serving")
        assert fleet.status.stable_config == stable, "its plan serves on"
        fleet.run(lambda f: f.status.version.phase == "Promoting")
        assert [w.backbone for w in fleet.workers if not w.trial] == [BACKBONE] * 4
        fleet.run(lambda f: f.status.phase == "Ready")
        assert fleet.status.version == VersionStatus(ModelSource(NEW), handled_request="")
        assert {w.backbone for w in fleet.workers} == {BACKBONES[NEW]} and len(fleet.workers) == 4
        assert fleet.reasons() == ["VersionOnTrial", "VersionPromoted"]
        assert not {"VersionOnTrial", "Reconciling", "Stalled"} & set(fleet.told())
        assert min(main + trial for main, trial in fleet.seen) >= 4
        changes = [b for a, b in pairwise(fleet.shares) if a != b]
        assert changes == [25, 0], "requests come by weight from the comparison to the end of the promotion"
        assert all(share == 0 or trial for share, (_, trial) in zip(fleet.shares, fleet.seen, strict=True))

    @pytest.mark.parametrize(
        ("fault", "reason"), [({"late": 0.3}, "ObjectiveRejected"), ({"broken": 0.2}, "FailuresRejected")]
    )
    def test_a_bad_version_goes_and_nobody_else_was_touched(self, fault: dict[str, float], reason: str) -> None:
        def make(worker: Version) -> None:
            for name, share in fault.items():
                setattr(worker, name, share)

        fleet = trying(make=make)
        boots = [w.boot for w in fleet.workers]
        fleet.run(lambda f: f.status.version.phase == "Rejected")
        assert fleet.status.version.reason == reason
        for _ in range(3):
            fleet.step()
        assert [w.boot for w in fleet.workers] == boots
        assert fleet.told()["Stalled"] == ("True", "VersionRejected") and fleet.told()["Ready"] == ("True", "Serving")
        assert "Reconciling" not in fleet.told() and fleet.status.settled_generation == fleet.service.generation
        rejected = fleet.status.version
        for _ in range(5):
            fleet.step()
        assert fleet.status.version == rejected
        fleet.edit(model={"uri": OLD})
        fleet.run(lambda f: f.status.phase == "Ready")

    def test_in_place_the_total_stays_and_comes_back(self) -> None:
        fleet = trying(kind="ResourceAware")
        fleet.seen.clear()
        fleet.run(lambda f: f.status.version.phase == "Promoting")
        assert max(main + trial for main, trial in fleet.seen) == 4
        assert fleet.seen[-1] == (3, 1)
        fleet.run(lambda f: f.status.phase == "Ready")
        assert fleet.seen[-1] == (4, 0)

    def test_a_person_promotes_what_has_passed_and_not_before(self) -> None:
        fleet = trying(promotion="Manual")
        fleet.run(lambda f: f.status.version.phase == "AwaitingPromotion")
        assert "offramp promote sim" in fleet.status.message
        for _ in range(20):
            fleet.step()
        assert fleet.status.version.phase == "AwaitingPromotion"
        fleet.ask("promote")
        fleet.step()
        assert fleet.status.version.phase == "Promoting"
        assert "RequestRefused" not in [e.reason for e in fleet.events]

    def test_harm_that_comes_late_is_noticed_while_it_waits_for_a_person(self) -> None:
        fleet = trying(promotion="Manual")
        fleet.run(lambda f: f.status.version.phase == "AwaitingPromotion")
        for worker in fleet.workers:
            if worker.trial:
                worker.late = 0.5
        fleet.run(lambda f: f.status.version.phase == "Rejected")
        assert fleet.status.version.reason == "ObjectiveRejected"

    def test_an_abort_in_mid_promotion_brings_the_old_version_back(self) -> None:
        fleet = trying()
        fleet.run(lambda f: f.status.version.phase == "Promoting")
        fleet.step()
        fleet.ask("abort")
        fleet.run(lambda f: f.status.version.phase == "Rejected")
        fleet.run(lambda f: {w.backbone for w in f.workers} == {BACKBONE})
        assert fleet.told()["Stalled"] == ("True", "VersionRejected")

    def test_plans_never_cross_versions(self) -> None:
        fleet = trying(promotion="Manual")
        fleet.run(lambda f: f.status.version.phase == "AwaitingPromotion")
        mine = [w for w in fleet.workers if w.trial]
        assert mine and all(w.document is None for w in mine)
        assert fleet.published is not None and fleet.published.stable.plan["backboneDigest"] == BACKBONE

    def test_a_new_operator_goes_on_with_the_trial(self) -> None:
        """All that it needs is in the status: nothing is promoted for what was seen before the comparison began."""
        fleet = trying()
        fleet.run(lambda f: f.status.version.phase == "Comparing")
        for _ in range(5):
            fleet.step()
        snapshot = replace(fleet.snapshot(), watched_since=fleet.now)
        assert decide(snapshot, fleet.now).status.version == fleet.status.version

    def test_the_digest_of_a_model_on_trial_is_proven_by_its_own_workers(self) -> None:
        fleet = trying()
        fleet.step()
        assert [m.uri for m in fleet.status.models] == [OLD]
        fleet.run(lambda f: f.status.version.phase == "Comparing")
        fleet.step()
        assert (fleet.status.models[0].uri, fleet.status.models[0].digest) == (NEW, BACKBONES[NEW])

    def test_the_same_model_at_another_address_needs_no_proof(self) -> None:
        fleet = trying()
        snapshot = _with(fleet, BACKBONE)
        assert decide(snapshot, fleet.now).status.version.phase == "Promoting"


def _with(fleet: Platform, backbone: str) -> Snapshot:
    """The first worker on trial is there and serves this backbone."""
    fleet.run(lambda f: f.status.version.phase == "Starting")
    fleet.workers.append(Version("n0", 7, backbone=backbone, trial=True))
    return fleet.snapshot()
