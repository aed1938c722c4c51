"""What simulated workers serve: recorded scores, their prices by batch size, and bursty load that all workers share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.evidence import bursty_load
from offramp_core.costs import CostTable
from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import answers_agree, evaluate_plan, leave_position, plan_columns
from offramp_core.plan import Plan, RampThreshold, floor_threshold
from offramp_core.protocol import PlanDocument, RampInfo, WorkerState
from offramp_core.records import ExitCosts, Records
from offramp_core.tuning import Proposed, TuningOutcome, TuningRequest, tune
from offramp_lab.replay.load import load_records
from offramp_lab.simulate.stages import Stages, stages_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BACKBONE, RAMP_SET = "sha256:" + "b" * 64, "sha256:" + "a" * 64
BUDGET, DELTA = 0.01, 0.05
MAX_BATCH = 32
CALM, BURST = 1.0, 4.0  # relative request rates outside and inside bursts
HARD_STALLS, TAIL, LONGEST_STALL = 0.003, 1.5, 50.0  # share of batches, Pareto exponent, times as long at most
WORKER_SPREAD = 0.1  # of the log speed of workers: nodes are not alike
BLOCK = 4096  # batches made at a time


class MissingRecordsError(FileNotFoundError):
    """The recorded scores are not there; the message says how to make them."""


@dataclass(frozen=True, slots=True)
class Served:
    """A plan on the pool: the stage each row leaves at (the last one for the output) and whether its answer is wrong,
    both [n]."""

    plan: Plan
    hash: str
    left: Ints
    wrong: npt.NDArray[np.bool_]
    stages: Stages
    exit_names: tuple[str, ...]  # by stage

    @property
    def disagreement(self) -> float:
        return float(self.wrong.mean())


class World:
    """One record set as a population: requests are its rows, drawn with replacement."""

    def __init__(self, records: Records, ramp_ids: tuple[str, ...]) -> None:
        if records.profile is None:
            raise InvalidArgumentError("the records hold no costs by batch size; make them with python -m bench.record")
        self.records, self.ramp_ids = replace(records, time=None), ramp_ids
        self.costs = CostTable(records.profile, sizes=range(MAX_BATCH + 1))
        self._served: dict[str, Served] = {}
        self._tuned: dict[int, TuningOutcome] = {}
        self._at: dict[float, Plan] = {}
        self._narrow: dict[int, World] = {}

    @classmethod
    def read(cls, path: Path) -> World:
        """Recorded scores of ``python -m bench.record``.

        Raises
        ------
        MissingRecordsError
            They are not there.
        """
        if not path.is_file():
            raise MissingRecordsError(f"{path} is missing; make it with: python -m bench.record {path.stem}")
        records = load_records(path, batch_size=16)
        facts_file = path.with_suffix(".json")
        facts = json.loads(facts_file.read_text()) if facts_file.is_file() else {}
        ids = tuple(str(ramp.get("id", f"r{j:02d}")) for j, ramp in enumerate(facts.get("ramps", [])))
        if len(ids) != records.n_ramps:
            ids = tuple(f"r{j:02d}" for j in range(records.n_ramps))
        return cls(records, ids)

    def served(self, plan: Plan) -> Served:
        """The plan on every row of the pool."""
        key = plan.content_hash
        if key not in self._served:
            self._served[key] = self._serve(plan, key)
        return self._served[key]

    def _serve(self, plan: Plan, key: str) -> Served:
        active, thresholds = plan_columns(plan, self.ramp_ids)
        at = leave_position(self.records, active, thresholds)
        stages = stages_of(self.costs, active=active, used=active)
        last = len(stages.seconds) - 1
        place = np.array([*(stages.position[j] for j in active), last], dtype=np.int64)
        names = {stages.position[j]: self.ramp_ids[j] for j in active}
        return Served(
            plan,
            key,
            place[at],
            ~answers_agree(self.records, active, at),
            stages,
            tuple(names.get(i, "final") for i in range(last + 1)),
        )

    def narrowed(self, n: int) -> World:
        """The same pool with ``n`` of its ramps, evenly spaced."""
        if n not in self._narrow:
            kept = np.unique(np.linspace(0, len(self.ramp_ids) - 1, n + 2).round().astype(int)[1:-1])
            self._narrow[n] = World(_with_ramps(self.records, kept), tuple(self.ramp_ids[j] for j in kept))
        return self._narrow[n]

    @cached_property
    def hardness(self) -> Floats:
        """Share of a row's ramps that are wrong, as a multiple of that of the rows which the tuned plan answers
        wrongly: (n,)."""
        share = 1 - self.records.agrees.mean(axis=1)
        return np.asarray(share / share[self.served(self.tuned).wrong].mean())

    def savings(self, plan: Plan) -> Floats:
        """Share of the backbone's time that each row saves: (n,)."""
        active, thresholds = plan_columns(plan, self.ramp_ids)
        costs = self.records.costs
        seconds = costs.leave_seconds(active)[leave_position(self.records, active, thresholds)]
        return np.asarray(1 - seconds / costs.baseline_seconds)

    @property
    def exits_off(self) -> Plan:
        return Plan(BACKBONE, RAMP_SET)

    @cached_property
    def tuned(self) -> Plan:
        """The product's plan on all rows, for its ramps and the proportions of its thresholds."""
        outcome = tune(replace(self.records, time=np.arange(len(self.records), dtype=np.float64)), self.request())
        if not isinstance(outcome, Proposed):
            raise InvalidArgumentError(f"no plan can be certified on these records: {outcome}")
        return outcome.plan

    def request(self) -> TuningRequest:
        return TuningRequest(
            max_disagreement=BUDGET,
            delta=DELTA,
            test_index=1,
            ramp_ids=self.ramp_ids,
            backbone_digest=BACKBONE,
            ramp_set_digest=RAMP_SET,
            min_gain=0.01,
        )

    def plan_at(self, rate: float) -> Plan:
        """The tuned plan with its thresholds scaled until its true disagreement is nearest to ``rate``, from below
        where that is possible."""
        if rate not in self._at:
            self._at[rate] = self._search_plan_at(rate)
        return self._at[rate]

    def _search_plan_at(self, rate: float) -> Plan:
        low, high = 0.0, 1 / min(float(r.threshold) for r in self.tuned.ramps)
        for _ in range(40):
            middle = (low + high) / 2
            if evaluate_plan(self.records, self._scaled(middle), self.ramp_ids).disagreement <= rate:
                low = middle
            else:
                high = middle
        return self._scaled(low)

    def _scaled(self, factor: float) -> Plan:
        return replace(
            self.tuned,
            ramps=tuple(
                RampThreshold(r.id, floor_threshold(min(1.0, factor * float(r.threshold)))) for r in self.tuned.ramps
            ),
        )

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """Rows of the pool."""
        return rng.integers(0, len(self.records), n)

    def tune_draw(self, number: int, records: Records, request: TuningRequest) -> TuningOutcome:
        """What the tuner makes of draw ``number``; remembered, since the same records give the same outcome."""
        if number not in self._tuned:
            self._tuned[number] = tune(records, request)
        return self._tuned[number]

    @property
    def columns(self) -> tuple[RampInfo, ...]:
        n = len(self.ramp_ids)
        return tuple(RampInfo(r, j, (j + 1) / (n + 1), "grid-mlp") for j, r in enumerate(self.ramp_ids))

    @property
    def cost_lists(self) -> dict[str, list[Any]]:
        """As workers report them."""
        costs = self.records.costs
        return {
            "segment_seconds": [costs.segment_seconds.tolist()],
            "ramp_seconds": [costs.ramp_seconds.tolist()],
            "batch_size": [16],
        }

    def state(self, uid: str, document: PlanDocument | None, **serving: Any) -> WorkerState:
        """What a simulated worker says of itself; ``serving`` are the fields about its plans."""
        return WorkerState(
            uid=uid,
            boot_id=f"{uid}-1",
            service_uid="uid",
            model="sim",
            ready=True,
            backbone_digest=BACKBONE,
            ramp_set_digest=RAMP_SET,
            ramps=self.columns,
            costs=self.cost_lists,
            epoch=document.epoch if document else 0,
            **serving,
        )

    @cached_property
    def load(self) -> MeanLoad:
        """Averages of bursty load under exits off, from a long look."""
        seen = bursty_load(np.random.default_rng(99), 100_000)
        whole = np.asarray(self.served(self.exits_off).stages.seconds[-1])
        intensity = np.where(seen.in_burst, BURST, CALM)
        total = float(seen.size.sum())
        return MeanLoad(
            float((seen.size / intensity).sum()) / total, float((whole[seen.size] * seen.slowness).sum()) / total
        )


def _with_ramps(records: Records, kept: Ints) -> Records:
    """Some of the ramps; the backbone between them is summed up."""
    costs = _fewer(records.costs.segment_seconds, records.costs.ramp_seconds, kept)
    profile = records.profile
    if profile is not None:
        batches = tuple(
            replace(b, segment_seconds=tuple(c.segment_seconds.tolist()), ramp_seconds=tuple(c.ramp_seconds.tolist()))
            for b in profile.batches
            for c in [_fewer(np.asarray(b.segment_seconds), np.asarray(b.ramp_seconds), kept)]
        )
        profile = replace(profile, batches=batches)
    return replace(
        records,
        uncertainty=records.uncertainty[:, kept],
        agrees=records.agrees[:, kept],
        costs=costs,
        profile=profile,
        prediction=None,
        ramp_ids=(),
    )


def _fewer(segments: Floats, ramps: Floats, kept: Ints) -> ExitCosts:
    begins = np.concatenate([[0], kept + 1])
    return ExitCosts(np.add.reduceat(segments, begins), ramps[kept])


@dataclass(frozen=True, slots=True)
class MeanLoad:
    """Per request: time between requests at relative rate 1, and seconds of execution."""

    gap: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Batches of the whole fleet in the order in which they end; all [n]. ``slowness`` multiplies the profile's
    seconds."""

    end: Floats
    size: Ints
    slowness: Floats
    worker: Ints


class Traffic:
    """Batches that come in bursts, dealt to workers at random.

    Bursts, wander and stalls belong to the fleet: whatever makes batches slow strikes all workers and both arms at
    once, which is the hardest case for a test that compares arms. On top of :func:`bench.evidence.bursty_load` come
    rare stalls with a Pareto tail (exponent 1.5: no variance), and workers of different speed.
    """

    def __init__(
        self, world: World, rng: np.random.Generator, *, rate: float, utilisation: float, workers: int, now: float
    ) -> None:
        self._rng, self._workers, self._now = rng, workers, now
        self._calm = rate * world.load.gap  # requests per second outside bursts
        self._scale = utilisation * workers / (rate * world.load.seconds)
        self._speed = np.exp(rng.normal(0.0, WORKER_SPREAD, workers))
        self._ahead: list[Stretch] = []

    def until(self, now: float) -> Stretch:
        """The batches that end up to ``now``, from where the last call stopped."""
        parts: list[Stretch] = []
        while True:
            if not self._ahead:
                self._ahead.append(self._block())
            block = self._ahead.pop(0)
            cut = int(np.searchsorted(block.end, now, side="right"))
            parts.append(_part(block, slice(None, cut)))
            if cut < len(block.end):
                self._ahead.insert(0, _part(block, slice(cut, None)))
                return _joined(parts)

    def _block(self) -> Stretch:
        rng = self._rng
        load = bursty_load(rng, BLOCK)
        hard = rng.random(BLOCK) < HARD_STALLS
        stalls = np.where(hard, np.minimum(LONGEST_STALL, 1 + rng.pareto(TAIL, BLOCK)), 1.0)
        worker = rng.integers(0, self._workers, BLOCK)
        rate = self._calm * np.where(load.in_burst, BURST, CALM)
        end = self._now + np.cumsum(load.size / rate * rng.exponential(1.0, BLOCK))
        self._now = float(end[-1])
        return Stretch(end, load.size, load.slowness * stalls * self._speed[worker] * self._scale, worker)


def _part(block: Stretch, rows: slice) -> Stretch:
    return Stretch(block.end[rows], block.size[rows], block.slowness[rows], block.worker[rows])


def _joined(parts: Sequence[Stretch]) -> Stretch:
    if len(parts) == 1:
        return parts[0]
    return Stretch(*(np.concatenate([getattr(p, name) for p in parts]) for name in Stretch.__slots__))  # type: ignore[attr-defined]
