"""A simulated fleet: workers that obey plan documents and count as real ones do, without HTTP or a model.

Answers come from a pool of recorded scores: a request is a row drawn with replacement, leaves at the first
active ramp whose uncertainty is below the threshold, and is audited with the arm's probability.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from bench.control_shell import MemoryShell

from offramp_core.columns import final_id
from offramp_core.control.decide import decide
from offramp_core.control.objects import Service, ServiceStatus
from offramp_core.control.snapshot import (
    Decision,
    Gathered,
    Load,
    Observed,
    RecordStore,
    Snapshot,
    Worker,
    WorkerEndpoint,
)
from offramp_core.control.spec import parse_spec
from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.evidence.slow import BatchShape, SlowLimits, parse_limits
from offramp_core.plan import Plan
from offramp_core.precision import Precision
from offramp_core.protocol import (
    ArmCounts,
    ArmPlan,
    FetchProgress,
    Observations,
    PlanDocument,
    RampInfo,
    RecordBlock,
    Refusal,
    WorkerState,
    tier_slice,
)
from offramp_core.reasons import Reason
from offramp_core.records import ExitCosts, Records
from offramp_core.sketch import bucket_index
from offramp_core.tuning import TuningOutcome, TuningRequest, tune

RAMPS = ("r00-grid", "r01-grid", "r02-grid")
COSTS = {
    "segment_seconds": [[0.002, 0.002, 0.002, 0.004]],
    "ramp_seconds": [[0.0001, 0.0001, 0.0001]],
    "batch_size": [1],
}
BACKBONE, RAMP_SET = "sha256:" + "b" * 64, "sha256:" + "a" * 64


def pool(n: int, *, seed: int, confusion: float = 0.0) -> Records:
    """Scores of inputs with a latent difficulty, from eight sources that name themselves; ``confusion`` makes ramps
    confidently wrong (drifted inputs)."""
    rng = np.random.default_rng(seed)
    difficulty = rng.beta(1.2, 2.0, size=(n, 1)) * 1.2
    depth = np.array([[0.25, 0.5, 0.75]])
    margin = (depth - difficulty) * 6 + rng.normal(0, 0.7, size=(n, 3))
    agrees = rng.random((n, 3)) < 1 / (1 + np.exp(-(2.0 * margin + 3.5)))
    agrees &= rng.random((n, 3)) >= confusion
    uncertainty = np.round(1 / (1 + np.exp(margin + rng.normal(0, 0.4, size=(n, 3)))), 6).astype(np.float32)
    costs = ExitCosts(np.array(COSTS["segment_seconds"][0], float), np.array(COSTS["ramp_seconds"][0], float))
    return Records(uncertainty, agrees, np.ones(n, bool), costs, time=np.zeros(n), stream=np.arange(n) % 8 + 1)


@dataclass(frozen=True)
class Taken:
    """A plan document as a worker keeps it, parsed once."""

    document: PlanDocument | None
    plans: Mapping[str, Plan]  # by the name of the arm
    limits: tuple[SlowLimits, SlowLimits]  # of batches without a length, and with one
    views: dict[str, Records] = field(default_factory=dict)  # what was recorded of the arms' precisions and ramp sets

    @classmethod
    def of(cls, document: PlanDocument | None) -> Taken:
        off = Plan(BACKBONE, RAMP_SET)
        if document is None:
            return cls(None, {"stable": off, "holdback": off}, (SlowLimits(), SlowLimits()))
        arms = {"stable": document.stable, "canary": document.canary}
        plans = {name: Plan.from_mapping(arm.plan) if arm is not None else off for name, arm in arms.items()}
        limits = [parse_limits(document.slow_seconds, by) for by in ({}, document.slow_seconds_by_length)]
        return cls(document, {**plans, "holdback": off}, (limits[0], limits[1]))


@dataclass
class SimWorker:
    """One worker process: counters per (epoch, arm), a record ring, and the rules of the data plane."""

    name: str
    seed: int
    ready: bool = True
    restarts: int = 0
    slowdown: float = 1.0  # of canary batches
    failing: float = 0.0  # share of canary batches that fail
    audit_seconds: float = 0.0  # that one audit takes
    document: PlanDocument | None = None
    refused: Refusal | None = None
    breaker_open: bool = False
    counts: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    others: Mapping[Precision, Records] = field(default_factory=dict)  # other precisions that its bundle has
    backbone: str = BACKBONE
    current: bool = True
    trial: bool = False
    failure: tuple[str, str] = ("", "")  # why the platform cannot run it: reason and sentence
    no_room: bool = False
    fetching: FetchProgress | None = None
    night_wrong: float = (
        0.0  # of three requests in ten, which belong to the first slice: how often an exit disagrees besides
    )
    stopped_tiers: tuple[str, ...] = ()  # by its own detector
    overload_seconds: float | None = None
    tier_wrong: float = 0.0  # how often an exit of a request of any tier disagrees besides
    scene: int = 1  # requests in a row that show the same input
    shown: list[int] = field(default_factory=list)  # what is left of the scene
    exits_take: float = 0.8  # time of a batch with exits on, in times of one with exits off
    meters: dict[tuple[str, float], HoldbackMeter] = field(default_factory=dict)
    sets: dict[str, Records] = field(default_factory=dict)  # what the same inputs score with other ramp sets of a store
    has_store: bool = True
    captures: int = 0
    newest: int = 0  # epoch, in its state folder
    lengths: tuple[int, ...] = ()  # of texts, each as often as the others
    tells_lengths: bool = True  # a worker of before does not, nor does it know limits by length

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.coin = np.random.default_rng([self.seed, 1])
        self.boot = f"{self.name}-boot0"

    def restart(self) -> None:
        self.restarts += 1
        self.boot = f"{self.name}-boot{self.restarts}"
        self.counts, self.document, self.refused, self.breaker_open = {}, None, None, False
        self.meters = {}

    def configure(self, document: PlanDocument) -> None:
        if self.document is not None and document.epoch <= self.document.epoch:
            return
        if document.epoch < self.newest:
            self.refused = Refusal(document.epoch, "StaleEpoch", f"it took {self.newest} before it restarted")
            return
        wanted = {arm.plan["rampSetDigest"] for arm in (document.stable, document.canary) if arm} | set(
            document.ramp_sets
        )
        if missing := wanted - {RAMP_SET, *self.sets}:
            self.refused = Refusal(document.epoch, "RampSetNotHeld", f"the store has no {min(missing)}")
            return
        if not self.has_store and wanted - {RAMP_SET}:
            self.refused = Refusal(document.epoch, "DigestMismatch", "there is no ramp-set store")
            return
        if self.document is None or document.capture_since != self.document.capture_since:
            self.captures = 0
        for arm in filter(None, (document.stable, document.canary)):
            if arm.plan["backboneDigest"] != self.backbone:
                self.refused = Refusal(document.epoch, "DigestMismatch", "it is for another model")
                return
            other = self.others.get(arm.plan["precision"])
            unknown = [r["id"] for r in arm.plan["ramps"] if r["id"] not in (other.ramp_ids if other else RAMPS)]
            if unknown:
                self.refused = Refusal(document.epoch, "UnknownRamp", f"{unknown[0]} is not in the bundle")
                return
        self.document, self.refused, self.newest = document, None, document.epoch

    def serve(self, records: Records, requests: int, now: float) -> list[tuple[int, float]]:
        """Answer requests in batches of 1 to 4; returns the audited rows with their times."""
        audited: list[tuple[int, float]] = []
        taken = Taken.of(self.document)
        while requests > 0:
            size = min(int(self.rng.integers(1, 5)), requests)
            requests -= size
            audited += self._batch(records, size, now, taken)
        return audited

    def _shown(self, n: int, size: int) -> list[int]:
        """Which of ``n`` inputs the next requests show."""
        if self.scene == 1:
            return self.rng.integers(n, size=size).tolist()
        while len(self.shown) < size:
            self.shown += [int(self.rng.integers(n))] * self.scene
        rows, self.shown = self.shown[:size], self.shown[size:]
        return rows

    def _batch(self, records: Records, size: int, now: float, taken: Taken) -> list[tuple[int, float]]:
        """In lists: a batch is small, there are many, and most of what a story takes is them."""
        doc = taken.document
        canary = doc is not None and doc.canary is not None and self.rng.random() < doc.weight_percent / 100
        arm, name = (
            (doc.canary if canary else doc.stable, "canary" if canary else "stable")
            if doc is not None
            else (None, "stable")
        )
        plan = taken.plans[name]
        meter = self._meter(doc, plan) if not canary and not plan.exits_off else None
        off = meter is not None and self.coin.random() < meter.share
        if off:
            name, plan = "holdback", taken.plans["holdback"]
        rows = self._shown(len(records), size)
        if name not in taken.views:
            taken.views[name] = self.sets.get(plan.ramp_set_digest, records).at(plan.precision)
        view = taken.views[name]
        names = view.ramp_ids or RAMPS
        exit_at = exits(view, plan, rows, names)
        left = [names[e] for e in exit_at if e >= 0]
        c = self.counts.setdefault(
            (doc.epoch if doc else 0, name),
            {
                "hash": plan.content_hash,
                "exits": {},
                "exec": {},
                "lat": {},
                "by_length": {},
                "tier_n": {},
                "tier_k": {},
            },
        )
        if doc is not None and arm is not None and not off and not plan.exits_off:
            self._audit_tiers(c, arm, plan, None if canary else meter, view=view, names=names)
        rate = arm.audit_rate if arm is not None else 0.0
        drawn = [draw < rate for draw in self.rng.random(size).tolist()]
        wrong = [
            not (view.agrees.item(r, e) if e >= 0 else view.final_agrees.item(r))
            for r, e in zip(rows, exit_at, strict=True)
        ]
        audited = sum(drawn)
        seconds = float(self.rng.lognormal(-5.0, 0.2)) * (0.8 + 0.2 * size) * (self.slowdown if canary else 1.0)
        length = int(self.coin.choice(self.lengths)) if self.lengths else 0
        seconds *= length / 16 if length else 1.0
        if meter is not None:
            took, expected = seconds if off else seconds * self.exits_take, 0.008 * (0.8 + 0.2 * size)
            meter.count_audit_time(audited * self.audit_seconds)
            meter.count_audited_batch(expected_seconds=expected)
            meter.count_batch(held_back=off, expected_seconds=expected, answer_seconds=took, engine_seconds=took)
            if not off:
                meter.count_replies("final", sum(e < 0 for e in exit_at))
                for ramp in left:
                    meter.count_replies(ramp, 1)
                if doc is not None and doc.slices:
                    self._audit_night(meter, doc, np.array(drawn) & (self.coin.random(size) < 0.3), np.array(wrong))
        add(
            c,
            requests=size,
            drawn=audited,
            audited=audited,
            disagreements=sum(d and w for d, w in zip(drawn, wrong, strict=True)),
            batches=1,
        )
        if doc is not None and doc.capture_since is not None and now > doc.capture_since:
            self.captures += audited
        shape = BatchShape(size, length if self.tells_lengths else 0)
        limit = taken.limits[bool(shape.length)].of(shape)
        if limit is not None and canary and doc is not None:
            limit *= 1 + doc.max_overhead
        add(
            c,
            judged=int(limit is not None),
            slow=int(limit is not None and seconds > limit),
            failed=int(canary and self.rng.random() < self.failing),
        )
        sized = c["exec"].setdefault(str(size), {})
        key = str(bucket_index(seconds))
        sized[key] = sized.get(key, 0) + 1
        if shape.length:
            shaped = c["by_length"].setdefault(str(shape), {})
            shaped[key] = shaped.get(key, 0) + 1
        c["lat"][key] = c["lat"].get(key, 0) + size
        for ramp in left:
            c["exits"][ramp] = c["exits"].get(ramp, 0) + 1
        return [(r, now) for r, d in zip(rows, drawn, strict=True) if d]

    def _audit_tiers(
        self, c: dict[str, Any], arm: ArmPlan, plan: Plan, meter: HoldbackMeter | None, *, view: Records, names: Any
    ) -> None:
        """In every batch one request of each tier as well, answered under its own thresholds."""
        for tier, own in plan.menu.items():
            if tier not in arm.tiers or self.coin.random() >= arm.audit_rate:
                continue
            add(c, requests=1)
            row = int(self.coin.integers(len(view), size=1)[0])
            (exit_at,) = exits(view, own, [row], names)
            wrong = exit_at >= 0 and (not view.agrees[row, exit_at] or self.coin.random() < self.tier_wrong)
            add(c["tier_n"], **{tier: 1})
            add(c["tier_k"], **{tier: int(wrong)})
            if meter is not None:
                meter.count_audits(tier_slice(tier), audited=1, disagreements=int(wrong))

    def _audit_night(self, meter: HoldbackMeter, doc: PlanDocument, night: np.ndarray, wrong: np.ndarray) -> None:
        """Requests of a stopped slice, and answers that name a stopped class, are the model's own."""
        name = doc.slices[0]
        differs = (wrong | (self.coin.random(len(night)) < self.night_wrong)) & (name not in doc.stopped_slices)
        if night.any():
            meter.count_audits(name, audited=int(night.sum()), disagreements=int((night & differs).sum()))

    def _meter(self, doc: PlanDocument | None, plan: Plan) -> HoldbackMeter | None:
        if doc is None:
            return None
        key = (plan.content_hash, doc.holdback_share)
        if key not in self.meters:
            self.meters[key] = HoldbackMeter(plan_hash=key[0], share=key[1])
        return self.meters[key]

    def view(self, *, silent: bool = False) -> Worker:
        state = WorkerState(
            uid=self.name,
            boot_id=self.boot,
            service_uid="uid",
            model="sim",
            ready=True,
            backbone_digest=self.backbone,
            ramp_set_digest=RAMP_SET,
            ramps=columns(self.others),
            costs=costs(self.others),
            epoch=self.document.epoch if self.document else 0,
            refused=self.refused,
            breaker_open=self.breaker_open,
            stable_hash=Plan.from_mapping(self.document.stable.plan).content_hash if self.document else "",
            canary_hash=Plan.from_mapping(self.document.canary.plan).content_hash
            if self.document and self.document.canary
            else "",
            ramp_sets=(self.document.ramp_sets if self.document else ()) or (RAMP_SET,),
            captures=self.captures,
            capture_since=self.document.capture_since if self.document else None,
            fetching=self.fetching,
            newest_epoch=self.newest,
            stopped_tiers=self.stopped_tiers,
            overload_seconds=self.overload_seconds,
        )
        every = tuple(
            ArmCounts(
                epoch,
                arm,
                c["hash"],
                c["requests"],
                c["exits"],
                c["drawn"],
                c["audited"],
                c["disagreements"],
                c["batches"],
                c["judged"],
                c["slow"],
                c["failed"],
                0.0,
                c["exec"],
                c["lat"],
                c["by_length"],
                tier_audited=dict(c["tier_n"]),
                tier_disagreements=dict(c["tier_k"]),
            )
            for (epoch, arm), c in self.counts.items()
        )
        seen = Observations(
            self.name,
            self.boot,
            0.0,
            tuple(c for c in every if c.arm != "holdback"),
            RecordBlock(0, 0, RAMP_SET),
            held_back=tuple(c for c in every if c.arm == "holdback"),
            plans=tuple(m.counts() for m in self.meters.values()),
        )
        return worker_of(
            self.name,
            ready=self.ready,
            current=self.current,
            restarts=self.restarts,
            trial=self.trial,
            failure_reason=self.failure[0],
            failure=self.failure[1],
            no_room=self.no_room,
            state=None if silent else state,
            observations=None if silent else seen,
        )


def worker_of(
    name: str,
    uid: str = "",
    ready: bool = True,
    *,
    state: WorkerState | None = None,
    observations: Observations | None = None,
    distrusted: str = "",
    **endpoint: Any,
) -> Worker:
    """A worker whose uid is its name unless it is given."""
    return Worker(WorkerEndpoint(name, uid or name, ready, **endpoint), state, observations, distrusted)


def with_endpoint(worker: Worker, **changes: Any) -> Worker:
    """The same worker, as the platform has it otherwise."""
    return replace(worker, endpoint=replace(worker.endpoint, **changes))


def changed(snapshot: Snapshot, **fields: Any) -> Snapshot:
    """The same snapshot with other facts, whether they are gathered, observed or this process's own."""
    observed = {name: fields.pop(name) for name in Observed.__dataclass_fields__ if name in fields}
    gathered = {name: fields.pop(name) for name in Gathered.__dataclass_fields__ if name in fields}
    return replace(
        snapshot,
        gathered=replace(snapshot.gathered, **gathered),
        observed=replace(snapshot.observed, **observed),
        **fields,
    )


TUNED: dict[bytes, TuningOutcome] = {}


def tuned(records: Records, request: TuningRequest) -> TuningOutcome:
    """What `tune` says, worked out once for all stories that begin alike."""
    key = hashlib.sha256(pickle.dumps((records, request))).digest()
    if key not in TUNED:
        TUNED[key] = tune(records, request)
    return TUNED[key]


def add(counter: dict[str, Any], **amounts: int) -> None:
    for name, amount in amounts.items():
        counter[name] = counter.get(name, 0) + amount


def columns(others: Mapping[Precision, Records]) -> tuple[RampInfo, ...]:
    """What a worker's records hold: the ramps, and for each other precision its own and what its backbone says."""
    if not others:
        return tuple(RampInfo(r, i, 0.25 * (i + 1), "grid-mlp") for i, r in enumerate(RAMPS))
    out = [RampInfo(r, i, 0.25 * (i + 1), "grid-mlp", "fp32") for i, r in enumerate(RAMPS)]
    for precision, records in others.items():
        out += [RampInfo(r, i, 0.5, "grid-mlp", precision) for i, r in enumerate(records.ramp_ids)]
        out.append(RampInfo(final_id(precision), 9, 1.0, "final", precision))
    return tuple(out)


def costs(others: Mapping[Precision, Records]) -> dict[str, Any]:
    own = {
        f"{precision}_{name}": [getattr(records.costs, name).tolist()]
        for precision, records in others.items()
        for name in ("segment_seconds", "ramp_seconds")
    }
    return {**COSTS, **own}


def exits(records: Records, plan: Plan, rows: Sequence[int], names: Sequence[str]) -> list[int]:
    """Index of the ramp each row leaves at, -1 for none."""
    ramps = [(names.index(ramp.id), float(np.float32(float(ramp.threshold)))) for ramp in plan.ramps]
    uncertainty = records.uncertainty.item
    return [next((j for j, threshold in ramps if uncertainty(row, j) < threshold), -1) for row in rows]


MANIFEST: dict[str, Any] = {
    "model": {"uri": "file:///model"},
    "objective": {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.02"}},
    "rollout": {"steps": [{"weight": 20}, {"weight": 50}], "cooldown": "10m"},
    "replicas": 2,
}


@dataclass
class Fleet(MemoryShell):
    """A service with its stored objects and workers, driven pass by pass as a shell would."""

    records: Records
    manifest: dict[str, Any] = field(default_factory=lambda: dict(MANIFEST))
    requests_per_second: int = 200
    now: float = 1_000_000.0

    def __post_init__(self) -> None:
        spec = parse_spec(self.manifest)
        super().__init__(Service("default", "sim", "uid", 1, spec), now=self.now)
        self.workers = [SimWorker(f"w{i}", i, others=self.records.others) for i in range(spec.replicas)]
        self.labels: list[Records] = []
        self.outcome: Any = None
        self.conditions_seen: list[dict[str, str]] = []
        self.deliver = True

    def edit(self, **changes: Any) -> None:
        """The user applies a changed manifest."""
        self.manifest = {**self.manifest, **changes}
        self.service = replace(self.service, generation=self.service.generation + 1, spec=parse_spec(self.manifest))

    def drift(self, records: Records) -> None:
        self.records = records

    def step(self, seconds: float = 1.0) -> Decision:
        """One second of traffic, then one pass."""
        self.now += seconds
        for worker in self.workers:
            share = int(self.requests_per_second * seconds / len(self.workers))
            rows = np.array([row for row, _ in worker.serve(self.records, share, self.now)], dtype=np.intp)
            if len(rows):
                times = self.now + 1e-6 * (np.arange(len(rows)) + worker.seed)
                self.labels.append(replace(self.records.take(rows), time=times))
        return self.reconcile()

    def snapshot(self) -> Snapshot:
        outcome, self.outcome = self.outcome, None
        workers = tuple(w.view() for w in self.workers)
        endpoints = tuple(w.endpoint for w in workers)
        load = Load(self.requests_per_second, 0.2, self.requests_per_second)
        return Snapshot(
            Gathered(self.service, dict(self.configs), tuple(self.rollouts.values()), endpoints, self.published),
            Observed(workers, self._store(), load=load),
            outcome,
            watch=self.watch,
        )

    def reconcile(self) -> Decision:
        snapshot = self.snapshot()
        decision = decide(snapshot, self.now)
        said_as_registered(decision)
        self.looked_on(snapshot, decision)
        self.act(decision)
        return decision

    def looked_on(self, snapshot: Snapshot, decision: Decision) -> None:
        """For those who want to see every pass."""

    def act(self, decision: Decision) -> None:
        self.store(decision)
        if self.published is not None and self.deliver:
            for worker in self.workers:
                worker.configure(self.published)
        store = self._store()
        if decision.tune is not None and store is not None:
            self.outcome = tuned(store.records, decision.tune)
        self.conditions_seen.append({c.type: c.status for c in decision.status.conditions})

    def run(self, until: Any, *, limit: int = 400) -> None:
        """Step until ``until(self)`` holds; says what it last saw when it never does."""
        for _ in range(limit):
            self.step()
            if until(self):
                return
        raise AssertionError(
            f"not within {limit} s; status {self.service.status}; rollouts {[r.status for r in self.rollouts.values()]}"
        )

    def _store(self) -> RecordStore | None:
        if not self.labels:
            return None
        parts = self.labels[-200:]
        time = np.concatenate([p.time for p in parts if p.time is not None])
        records = pooled(parts, time)
        others = {p: pooled([part.at(p) for part in parts], time) for p in self.records.others}
        return RecordStore(replace(records, others=others), RAMPS, BACKBONE, RAMP_SET)

    @property
    def stable(self) -> Plan:
        return self.configs[self.service.status.stable_config].plan

    @property
    def status(self) -> ServiceStatus:
        return self.service.status

    def verdicts(self) -> list[str]:
        return [r.status.verdict for r in self.rollouts.values()]


def published(fleet: Fleet) -> PlanDocument:
    """What its workers run under."""
    assert fleet.published is not None
    return fleet.published


def promoted(manifest: Any) -> Fleet:
    """A fleet whose first plan serves."""
    fleet = Fleet(pool(4000, seed=1), manifest)
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    return fleet


def pooled(parts: Sequence[Records], time: np.ndarray) -> Records:
    """Rows of one chain, one part after the other."""
    return replace(
        parts[0],
        time=time,
        uncertainty=np.concatenate([p.uncertainty for p in parts]),
        agrees=np.concatenate([p.agrees for p in parts]),
        final_agrees=np.concatenate([p.final_agrees for p in parts]),
        final_uncertainty=None,
        stream=np.arange(len(time)) % 8 + 1,
    )


__all__ = ["BACKBONE", "RAMPS", "RAMP_SET", "Fleet", "SimWorker", "pool"]


def said_as_registered(decision: Decision) -> None:
    """Every reason stands in the registry for the very place where it is said; workers pass on what keeps them from
    running."""
    for condition in decision.status.conditions:
        place = f"{condition.type}={condition.status}"
        known = Reason(condition.reason)
        assert known.places & {place, "worker"}, f"{known} is not registered for {place}"
    assert all("event" in Reason(event.reason).places for event in decision.events)
    ends = [status.reason for status in decision.rollout_statuses.values() if status.reason]
    assert all(Reason(reason).places & {"rollout", "refusal"} for reason in ends)
    assert not decision.status.tuning.state or "tuning" in Reason(decision.status.tuning.state).places
