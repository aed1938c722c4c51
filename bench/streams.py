"""Traffic whose requests resemble each other: ``python -m bench.streams [--runs 200] [--jobs 2] [--only PART...]
[--traffic NAME...]``.

| part | question |
|---|---|
| scenes | how often is a certificate wrong where cameras show scenes, by their length and how many take turns |
| attempts | the same of the first certificate that the tuner comes to, attempt by attempt from the first labels on |
| cycles | the same where days are busy and hard, nights quiet and easy, and audits are fewer by day |
| orders | the same in the real order of recorded sets: frames of a road, reviews as they stand in their files |
| pins | how often is a plan at twice the budget accepted by its canary's audits |
| good-pins | how often is one at half the budget not accepted |
| alarms | how often does the detector alarm within 100,000 labels of a plan at half its budget |
| minorities | how often is a certificate wrong where few requests are scenes of a named camera, some all wrong |
| conversations | the same where each scene is a stream of its own, as a conversation is |
| power | what is lost on independent requests |

A recorded set is the population; requests of a scene are copies of one of its rows, which is the worst that a scene can
be. A plan's truth is its rate over the population, weighted by requests where these come in cycles. Dependence, tuner,
gates, detector and audit rates are the product's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.control_world import BUDGET, DELTA, World
from bench.provenance import provenance
from offramp_core import tuning
from offramp_core.certify import INDEPENDENT, allowance, dependence
from offramp_core.control.objects import ArmTally, BothArms, TuningStatus
from offramp_core.control.rollouts.gates import GateInput, acceptance, accuracy
from offramp_core.control.snapshot import Load
from offramp_core.control.stable.audit import (
    eager_rate,
    measured_clustering,
    records_for_scenes,
    records_for_slight_scenes,
    worth_one,
)
from offramp_core.control.tuning.tuner import first_attempt_labels, remeasured_at
from offramp_core.evaluate import evaluate_plan
from offramp_core.evidence import detector
from offramp_core.evidence.one_arm import Counts
from offramp_core.plan import Plan
from offramp_core.records import Records
from offramp_core.tuning import NeedsLabels, Proposed, tune

Json = dict[str, Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

RECORDS, OUT = Path("build/records"), Path("build/bench/streams.json")
SET, RAMPS = "resnet56-mx4", 6
ORDERS = ("video-grid", "imdb-mean", "sst2-mean")
SCENES, SOURCES = (1, 10, 30, 100, 1000), (1, 8, 64)
FEWEST, MOST = 5_000, 60_000  # labels of a run; longer scenes need more before anything can be certified
STEP = 50  # audits between two looks of a canary's gates
UNCLEAR_PAUSE = 1.2  # times as many audits, until it is asked again what they are worth where nobody can say
CANARY_AUDITS = 20_000  # a step ends undecided after so many
ALARM_LABELS = 100_000
QUIET_RECORDS, QUIET_RATE = 2_000, 0.02  # of the time before a pin
KEPT_RECORDS = 20_000  # as the operator keeps
POWER_LABELS = 2_000
MINORITY, WRONG_SCENES = 0.05, 0.4  # share of a camera's requests, and of its scenes that ramps are surely wrong about

# A day of four hours: three quiet ones with easy requests, a busy one with hard requests. Utilization follows the rate.
NIGHT, DAY = (3 * 3600.0, 1.0, -1.0, 0.01), (3600.0, 50.0, 1.0, 0.65)  # seconds, requests per second, tilt, utilization
CYCLES = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """``sources`` take turns at random, each shows scenes of ``scene`` requests. With ``named`` their requests name
    them."""

    scene: int
    sources: int
    named: bool = False
    cycle: bool = False

    @property
    def name(self) -> str:
        if self.scene == 1:
            return "independent" + (", day and night" if self.cycle else "")
        unnamed = "" if self.named or self.sources == 1 else ", unnamed"
        return f"scenes of {self.scene}, {self.sources} source{'s' * (self.sources > 1)}{unnamed}" + (
            ", day and night" if self.cycle else ""
        )

    @property
    def labels(self) -> int:
        return min(MOST, max(FEWEST, 1_000 * self.scene))


def kinds(*, cycle: bool = False) -> tuple[Kind, ...]:
    """Scenes of every length from every number of sources, which name themselves or do not."""
    scenes = [
        Kind(s, n, named, cycle) for s in SCENES[1:] for n in SOURCES for named in (True, False) if n > 1 or named
    ]
    return (Kind(1, 1, cycle=cycle), *scenes)


# --- traffic ---------------------------------------------------------------------------------------


def scene_rows(kind: Kind, rng: np.random.Generator, weights: Floats, begins: Ints) -> tuple[Ints, Ints]:
    """Rows of the population that requests show, and the source of each: both (n,).

    ``begins`` (n,) says which of the ``weights`` (kinds, population) a scene is drawn by that begins with that request.
    """
    n = len(begins)
    source = rng.integers(0, kind.sources, n)
    rows = np.empty(n, dtype=np.int64)
    cumulated = np.cumsum(weights, axis=1)
    for s in range(kind.sources):
        mine = np.flatnonzero(source == s)
        scene = (np.arange(len(mine)) + rng.integers(0, kind.scene)) // kind.scene
        first = np.unique(scene, return_index=True)[1]
        draw = rng.random(len(first)) * (1 - 1e-12)
        of = begins[mine[first]]
        shown = np.empty(len(first), dtype=np.int64)
        for k in range(len(weights)):
            shown[of == k] = np.searchsorted(cumulated[k], draw[of == k])
        rows[mine] = shown[scene - scene[0]] if len(scene) else []
    return rows, source


def dense(world: World, kind: Kind, rng: np.random.Generator, n: int) -> Records:
    """``n`` requests in a row, each with a label."""
    rows, source = even_rows(world, kind, rng, n)
    return replace(world.records.take(rows), time=np.arange(float(n)), stream=source + 1 if kind.named else None)


def even_rows(world: World, kind: Kind, rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
    """:func:`scene_rows` where every row of the population is as likely at any time."""
    even = np.full((1, len(world.records)), 1 / len(world.records))
    return scene_rows(kind, rng, even, np.zeros(n, dtype=np.int64))


def tilted(world: World) -> Floats:
    """Weights of the population's rows by night and by day, (2, population): uncertain ones come mostly by day."""
    rank = np.argsort(np.argsort(world.records.uncertainty.mean(axis=1))) / len(world.records)
    weights = np.exp(np.multiply.outer([NIGHT[2], DAY[2]], rank))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def day_and_night(world: World, kind: Kind, rng: np.random.Generator) -> Records:
    """What is kept of some days with the audit rates that the product takes while it waits for labels."""
    parts = [
        (part, int(seconds * rate), eager_rate(Load(rate, used)))
        for _ in range(CYCLES)
        for part, (seconds, rate, _, used) in enumerate((NIGHT, DAY))
    ]
    begins = np.concatenate([np.full(n, part) for part, n, _ in parts])
    audit_rate = np.concatenate([np.full(n, rate) for _, n, rate in parts])
    length, turn = len(begins), int(rng.integers(0, len(begins)))
    begins, audit_rate = np.roll(begins, turn), np.roll(audit_rate, turn)
    rows, source = scene_rows(kind, rng, tilted(world), begins)
    draw = rng.random(length)
    kept = np.flatnonzero(draw < audit_rate)
    records = world.records.take(rows[kept])
    return replace(
        records,
        time=kept.astype(np.float64),
        stream=source[kept] + 1 if kind.named else None,
        draw=draw[kept].astype(np.float32),
        audit_rate=audit_rate[kept].astype(np.float32),
    )


def truth(world: World, plan: Plan, kind: Kind) -> float:
    """A plan's disagreement over all requests."""
    wrong = world.served(plan).wrong
    if not kind.cycle:
        return float(wrong.mean())
    requests = np.array([seconds * rate for seconds, rate, *_ in (NIGHT, DAY)])
    return float(requests @ (tilted(world) @ wrong) / requests.sum())


def with_minority(world: World, rng: np.random.Generator, n: int, *, scene: int) -> Records:
    """Independent requests, and few of a camera that names itself: scenes of copies about which ramps are sure, in some
    scenes all of them wrongly."""
    camera = rng.random(n) < MINORITY
    mine = np.flatnonzero(camera)
    records = world.records.take(rng.integers(0, len(world.records), n))
    number = (np.arange(len(mine)) + rng.integers(0, scene)) // scene
    wrong = rng.random(number[-1] + 1) < WRONG_SCENES
    uncertainty, agrees = records.uncertainty.copy(), records.agrees.copy()
    uncertainty[mine] = rng.uniform(0.0005, 0.002, (number[-1] + 1, records.n_ramps)).round(6)[number]
    agrees[mine] = ~wrong[number][:, None]
    return replace(
        records,
        uncertainty=uncertainty,
        agrees=agrees,
        prediction=None,
        others={},
        time=np.arange(float(n)),
        stream=camera.astype(np.int64),
    )


def as_conversations(world: World, kind: Kind, rng: np.random.Generator, n: int) -> Records:
    """Scenes each of which is a stream of its own."""
    rows, source = even_rows(world, kind, rng, n)
    each = np.unique(np.stack([source, rows]), axis=1, return_inverse=True)[1].ravel()
    return replace(world.records.take(rows), time=np.arange(float(n)), stream=each.astype(np.int64) + 1)


def in_blocks(world: World, rng: np.random.Generator, n: int) -> Records:
    """Stretches of the recorded order, each a twentieth of the set: whole blocks of what resembles its neighbors."""
    size = len(world.records)
    length = size // 20
    starts = rng.integers(0, size, math.ceil(n / length))
    rows = ((starts[:, None] + np.arange(length)) % size).ravel()[:n]
    return replace(world.records.take(rows), time=np.arange(float(n)))


# --- parts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """One run: ``wrong`` is what must be rare; ``decided`` whether there was anything to be wrong about."""

    wrong: bool
    decided: bool
    value: float = 0.0


def certificate(world: World, kind: Kind, seed: int) -> Seen:
    """Whether a certificate is given and breaks the budget; ``value`` is what a label was worth (0: nobody can say)."""
    rng = np.random.default_rng([seed, kind.scene, kind.sources])
    records = day_and_night(world, kind, rng) if kind.cycle else dense(world, kind, rng, kind.labels)
    return _tuned(world, records, partial(truth, world, kind=kind))


def _tuned(world: World, records: Records, disagreement: Callable[[Plan], float]) -> Seen:
    """What a tuning on records comes to; ``disagreement`` is the true one of a plan."""
    outcome = tune(records, world.request())
    wrong = isinstance(outcome, Proposed) and disagreement(outcome.plan) > BUDGET
    return Seen(wrong, isinstance(outcome, Proposed), outcome.design_effect or 0.0)


def attempts(world: World, kind: Kind, seed: int) -> Seen:
    """Whether the first certificate that the tuner comes to breaks the budget; ``value`` is after how many labels."""
    records = dense(world, kind, np.random.default_rng([seed, kind.scene, kind.sources, 7]), MOST)
    scene_rows = records_for_scenes(records, budget=BUDGET)
    n, tests, consumed = max(first_attempt_labels(BUDGET), scene_rows), 0, None
    while n <= MOST:
        wary = n < records_for_slight_scenes(records, budget=BUDGET)
        request = replace(
            world.request(), test_index=tests + 1, consumed_through=consumed, scene_rows=scene_rows, wary=wary
        )
        outcome = tune(records.take(slice(0, n)), request)
        if not isinstance(outcome, NeedsLabels):
            wrong = isinstance(outcome, Proposed) and truth(world, outcome.plan, kind) > BUDGET
            return Seen(wrong, isinstance(outcome, Proposed), n)
        used = 0 if consumed is None else round(consumed) + 1
        tests += outcome.tests_run
        if outcome.records_through is not None:
            consumed, used = outcome.records_through, n
        n = used + (remeasured_at(outcome, labels=n - used) or outcome.needed)
    return Seen(False, False, MOST)


def ordered(world: World, kind: Kind, seed: int) -> Seen:
    """The same for stretches of a set's own order."""
    records = in_blocks(world, np.random.default_rng(seed), min(FEWEST, len(world.records)))
    return _tuned(world, records, partial(truth, world, kind=kind))


def minority(world: World, kind: Kind, seed: int) -> Seen:
    """The same for a few requests from a camera in scenes."""
    rng, n = np.random.default_rng([seed, kind.scene, 5]), max(2_000, 50 * kind.scene)

    def disagreement(plan: Plan) -> float:
        all_requests = with_minority(world, np.random.default_rng(0), ALARM_LABELS, scene=1)
        return float(World(all_requests, world.ramp_ids).served(plan).wrong.mean())

    return _tuned(world, with_minority(world, rng, n, scene=kind.scene), disagreement)


def conversation(world: World, kind: Kind, seed: int) -> Seen:
    """The same for scenes that are streams of their own."""
    records = as_conversations(world, kind, np.random.default_rng([seed, kind.scene, 6]), kind.labels)
    return _tuned(world, records, partial(truth, world, kind=kind))


def pin(world: World, kind: Kind, seed: int) -> Seen:
    """Whether a plan at twice the budget earns acceptance in one step, after a day of quiet audits; ``value`` is after
    how many audits the step was decided."""
    rng = np.random.default_rng([seed, kind.scene, kind.sources, 1])
    return accepted(world, kind, world.plan_at(2 * BUDGET), rng)


def pin_power(world: World, kind: Kind, seed: int) -> Seen:
    """The same for a plan at half the budget, which should be accepted: ``wrong`` where it is not."""
    rng = np.random.default_rng([seed, kind.scene, kind.sources, 4])
    seen = accepted(world, kind, world.plan_at(BUDGET / 2), rng)
    return replace(seen, wrong=not seen.wrong)


def accepted(world: World, kind: Kind, plan: Plan, rng: np.random.Generator) -> Seen:
    """One step of a canary of which every request is audited, until its gates accept or reject the plan; ``wrong``
    where they accept it."""
    records, quiet = _quiet_and_canary(world, kind, rng)
    wrong = np.cumsum(_wrong(world, records.take(slice(quiet, None)), plan))
    known, signs, unclear = 0.0, 0.0, 0
    for n in range(STEP, CANARY_AUDITS + 1, STEP):
        given = _gate_input(n, int(wrong[n - 1]), clustering=known, signs=signs)
        rejects, accepts = accuracy(given).state == "Rejected", acceptance(given).state == "Clear"
        if not rejects and (not accepts or n < UNCLEAR_PAUSE * unclear):
            continue
        newest = records.take(slice(max(0, quiet + n - KEPT_RECORDS), quiet + n))
        seen = measured_clustering(newest, known=known, budget=BUDGET, wary=False)
        if seen is not None and seen > known:
            known = seen
            continue
        if not rejects and len(newest) < records_for_scenes(newest, budget=BUDGET):
            continue
        if not rejects and seen is not None:
            seen = measured_clustering(newest, known=max(known, signs), budget=BUDGET, wary=True)
        if seen is None and not rejects:
            unclear = n
        elif seen is None or seen <= max(known, signs):
            return Seen(not rejects, True, n)
        else:
            signs = seen
    return Seen(False, False, CANARY_AUDITS)


def _quiet_and_canary(world: World, kind: Kind, rng: np.random.Generator) -> tuple[Records, int]:
    """Records of a quiet time and of the canary after it, and how many of them are of the former."""
    parts = []
    for n, rate in ((round(QUIET_RECORDS / QUIET_RATE), QUIET_RATE), (CANARY_AUDITS, 1.0)):
        rows, source = even_rows(world, kind, rng, n)
        draw = rng.random(n)
        kept = draw < rate
        parts.append((rows[kept], source[kept], draw[kept], np.full(int(kept.sum()), rate)))
    rows, source, draw, audit_rate = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    records = replace(
        world.records.take(rows),
        time=np.arange(float(len(rows))),
        stream=source + 1 if kind.named else None,
        draw=draw.astype(np.float32),
        audit_rate=audit_rate.astype(np.float32),
    )
    return records, len(parts[0][0])


def _gate_input(n: int, k: int, *, clustering: float, signs: float) -> GateInput:
    return GateInput(
        BothArms(ArmTally(audited=n, disagreements=k)),
        50,
        BUDGET,
        0.99,
        3,
        0,
        certified=False,
        attempt=Counts(n, k),
        acceptance_level=allowance(DELTA, 1),
        design_effect=worth_one(replace(TuningStatus(), clustering=clustering), rate=1.0),
        acceptance_effect=worth_one(replace(TuningStatus(), clustering=signs), rate=1.0),
    )


def alarm(world: World, kind: Kind, seed: int) -> Seen:
    """Whether the detector alarms although the plan is at half its budget; ``value`` is after how many labels."""
    rng = np.random.default_rng([seed, kind.scene, kind.sources, 2])
    seen = dependence(dense(world, kind, rng, kind.labels), budget=BUDGET)
    if seen is None:
        return Seen(False, False, ALARM_LABELS)  # nothing is certified there, so nothing serves that could fall
    plan = world.plan_at(BUDGET / 2)
    wrong = _wrong(world, dense(world, kind, rng, ALARM_LABELS), plan)
    state = detector.init()
    effect = worth_one(replace(TuningStatus(), clustering=seen.design_effect - 1), rate=1.0)
    for n in range(0, ALARM_LABELS, STEP):
        state = detector.update(state, STEP, int(wrong[n : n + STEP].sum()), p0=BUDGET, design_effect=effect)
        if detector.alarm(state, run_length=1e6):
            return Seen(True, True, n + STEP)
    return Seen(False, True, ALARM_LABELS)


def power(world: World, _: Kind, seed: int) -> Seen:
    """What looking for scenes costs where there are none: ``value`` in points of saving."""
    rng = np.random.default_rng([seed, 3])
    records = dense(world, Kind(1, 1), rng, POWER_LABELS)
    outcome = tune(records, world.request())
    with patch.object(tuning, "dependence", lambda *_, **__: INDEPENDENT):
        without = tune(records, world.request())
    saving = [
        evaluate_plan(world.records, o.plan, world.ramp_ids).saving if isinstance(o, Proposed) else 0.0
        for o in (without, outcome)
    ]
    return Seen(outcome.design_effect != 1, True, 100 * (saving[0] - saving[1]))


def _wrong(world: World, records: Records, plan: Plan) -> npt.NDArray[np.bool_]:
    return World(replace(records, time=None), world.ramp_ids).served(plan).wrong


Run = Callable[[World, Kind, int], Seen]


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of each kind on a record set; ``wrong`` names what may happen in a share ``allowed`` of them."""

    name: str
    run: Run
    kinds: tuple[Kind, ...]
    wrong: str
    allowed: float
    sets: tuple[str, ...] = (SET,)

    def traffic(self) -> tuple[tuple[str, str, Kind], ...]:
        """Name of the row, record set and kind of each."""
        return tuple(
            (kind.name if self.sets == (SET,) else name, name, kind) for name in self.sets for kind in self.kinds
        )


PARTS = (
    Part("scenes", certificate, kinds(), "certificates over budget", 0.05),
    Part("attempts", attempts, kinds(), "first certificates over budget", 0.05),
    Part("cycles", certificate, kinds(cycle=True), "certificates over budget", 0.05),
    Part("orders", ordered, (Kind(1, 1),), "certificates over budget", 0.05, ORDERS),
    Part("pins", pin, kinds(), "pins at twice the budget accepted", 0.05),
    Part("good-pins", pin_power, (Kind(1, 1),), "pins at half the budget not accepted", 0.05),
    Part("alarms", alarm, kinds(), "false alarms within 100,000 labels at half the budget", 0.5),
    Part("minorities", minority, tuple(Kind(s, 1, True) for s in (30, 100, 200)), "certificates over budget", 0.05),
    Part("conversations", conversation, tuple(Kind(s, 64, True) for s in (3, 10)), "certificates over budget", 0.05),
    Part("power", power, (Kind(1, 1),), "taken for scenes", 0.05),
)


# --- the command -----------------------------------------------------------------------------------

_WORLDS: dict[str, World] = {}


def _world(name: str, records: Path) -> World:
    if name not in _WORLDS:
        _WORLDS[name] = World.read(records / f"{name}.npz").narrowed(RAMPS)
    return _WORLDS[name]


def _run(run: Run, name: str, records: Path, kind: Kind, seed: int) -> Seen:
    return run(_world(name, records), kind, seed)


def summary(seen: Sequence[Seen]) -> Json:
    """One row of a table."""
    values = [s.value for s in seen]
    return {
        "runs": len(seen),
        "wrong": sum(s.wrong for s in seen),
        "decided": sum(s.decided for s in seen),
        "median": float(np.median(values)),
        "mean": float(np.mean(values)),
    }


def rows(options: argparse.Namespace, progress: Progress) -> Iterator[tuple[str, str, Json]]:
    """Part, row and figures, as they come."""
    with ProcessPoolExecutor(options.jobs, get_context("forkserver")) as pool:
        for part in (p for p in PARTS if not options.only or p.name in options.only):
            wanted = [t for t in part.traffic() if not options.traffic or t[0] in options.traffic]
            task = progress.add_task(part.name, total=len(wanted) * options.runs)
            for row, name, kind in wanted:
                seen = []
                work = partial(_run, part.run, name, options.records, kind)
                for one in pool.map(work, range(options.runs), chunksize=max(1, options.runs // 20)):
                    seen.append(one)
                    progress.advance(task)
                yield part.name, row, {**summary(seen), "measured": provenance()}


def print_tables(found: Json, console: Console) -> None:
    """A table for each part."""
    for part in PARTS:
        if part.name not in found:
            continue
        table = Table("traffic", part.wrong, "decided", "median", title=part.name)
        for row, figures in found[part.name].items():
            told = (f"{figures['wrong']} of {figures['runs']}", str(figures["decided"]), f"{figures['median']:.4g}")
            table.add_row(row, *told, style="" if figures["wrong"] <= part.allowed * figures["runs"] else "bold red")
        console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 where records are missing or something happens more often than it may."""
    parser = argparse.ArgumentParser(prog="bench.streams", description="traffic whose requests resemble each other")
    parser.add_argument("--runs", type=int, default=200, help="of each row")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="*", default=[], choices=[p.name for p in PARTS], metavar="PART")
    parser.add_argument("--traffic", nargs="*", default=[], metavar="NAME", help="rows of a part; all when left out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    if unknown := set(options.traffic) - {row for p in PARTS for row, *_ in p.traffic()}:
        parser.error(
            f"--traffic: {unknown.pop()!r} is no row; rows are {', '.join(row for row, *_ in PARTS[0].traffic())}, "
            "and so on"
        )
    needed = {n for p in PARTS if not options.only or p.name in options.only for n in p.sets}
    missing = sorted(n for n in needed if not (options.records / f"{n}.npz").is_file())
    if missing:
        print(f"bench.streams: make the records first: python -m bench.record {' '.join(missing)}", file=sys.stderr)
        return 1
    found: Json = json.loads(options.out.read_text()) if options.out.is_file() else {}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    fresh: set[str] = set()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with Progress(*columns, console=console) as progress:
        for part, row, figures in rows(options, progress):
            before = found.get(part, {}) if part in fresh or options.traffic else {}
            found[part] = {**before, row: figures}
            fresh.add(part)
            found["measured"] = provenance()
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_tables(found, Console())
    held = all(f["wrong"] <= p.allowed * f["runs"] for p in PARTS if p.name in fresh for f in found[p.name].values())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
