"""A year with everything at once: drift, days and nights, load peaks, and cameras that show scenes: ``python -m
bench.control_traffic``.

On top of :mod:`bench.control_year`, whose loop this is: requests come by the hour (quiet, easy nights, busy, hard days,
and a peak of four times the traffic for an hour of most days), audits follow the load as the product has them do, and
requests show scenes, each a copy of one of the pool's rows, of sources that name themselves. Records carry what the
product's carry: draw, audit rate and stream. Breakers and detectors count by the published design effect. A better plan
is looked for once a day.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.control_world import BUDGET, Floats, Ints, World
from bench.control_year import BUSY_SECONDS, DAY, KEPT_RECORDS, RAMPS, DayWorker, Life, Outcomes, Year, YearScenario
from bench.provenance import provenance
from offramp_core.control.snapshot import Load
from offramp_core.control.tuning import tuner
from offramp_core.evidence import detector
from offramp_core.evidence.one_arm import alternatives
from offramp_core.protocol import PlanDocument

RECORDS, OUT = Path("build/records"), Path("build/bench/traffic.json")
HOUR = 3600.0
COLLECTING_SECONDS = 600.0  # between passes that only wait for labels
RETUNE_SECONDS = 86_400.0  # the product tries every hour; a year of that is a day of this machine
REQUEST_RATE = 200.0  # by day, over the fleet
PARTS = 2**16  # of [0, 1), in which drawn rows are looked for
LOOK = 20  # audits between two looks of a simulated breaker


@dataclass(frozen=True, slots=True)
class Phase:
    """``rate`` and ``hardness`` are relative to the day's; ``used`` is the utilization."""

    rate: float
    hardness: float
    used: float


NIGHT, WORKDAY, PEAK = Phase(0.1, -0.5, 0.05), Phase(1.0, 0.3, 0.4), Phase(4.0, 0.6, 0.8)


@dataclass(frozen=True, slots=True)
class Sights:
    """``sources`` take turns at random; each shows scenes of ``scene`` requests."""

    scene: int
    sources: int


class Everything(Life):
    """The service, its fleet and its users over a year."""

    def __init__(self, world: World, scenario: YearScenario, sights: Sights, seed: int) -> None:
        super().__init__(world, scenario, seed)
        self.sights = sights
        self.peaks = self.rng.integers(8, 22, scenario.days + 1) * (self.rng.random(scenario.days + 1) < 0.7)
        self.asked = 0.0  # requests so far
        self.scenes = np.full(
            (sights.sources, 2), -1, dtype=np.int64
        )  # by source: number and row of the scene it shows
        self._begins: tuple[tuple[int, ...], Floats, Ints] = ((), np.zeros(0), np.zeros(0, dtype=np.int64))
        self.shown: dict[str, tuple[Ints, Ints]] = {}  # audited rows of this step and their sources, by worker

    # --- what comes, and when ----------------------------------------------------------------------

    @property
    def hour(self) -> int:
        return int(self.now % DAY // HOUR)

    @property
    def phase(self) -> Phase:
        if self.hour == self.peaks[self.day] > 0:
            return PEAK
        return WORKDAY if 7 <= self.hour < 23 else NIGHT

    @property
    def moment(self) -> tuple[int, ...]:
        return (self.day, (NIGHT, WORKDAY, PEAK).index(self.phase))

    @property
    def next_change(self) -> float:
        return (self.now // HOUR + 1) * HOUR

    @property
    def rate(self) -> float:
        return super().rate * self.phase.rate

    @property
    def load(self) -> Load:
        return Load(self.rate, self.phase.used, super().rate * PEAK.rate)

    @property
    def difficulty(self) -> float:
        return super().difficulty + self.phase.hardness

    # --- scenes ------------------------------------------------------------------------------------

    def step(self) -> None:
        self.shown = {}
        super().step()

    def _pause(self) -> float:
        asked = super()._pause()
        live = any(not r.status.finished for r in self.rollouts.values())
        return COLLECTING_SECONDS if asked == BUSY_SECONDS and not live else asked

    def _outcomes(self, worker: DayWorker, seconds: float) -> Outcomes:
        document = worker.document
        if document is None:
            return np.zeros(0, dtype=np.bool_)
        if not self.shown:
            self._show(seconds, document.stable.audit_rate)
        rows = self.shown[worker.uid][0]
        return (
            np.zeros(0, dtype=np.bool_) if worker.open else self.world.served(self._plan(document.stable)).wrong[rows]
        )

    def _show(self, seconds: float, audit_rate: float) -> None:
        """What the audited requests of a stretch show, dealt to the workers in the order in which they come."""
        requests = self.rate * seconds
        audited = int(self.rng.poisson(requests * audit_rate))
        at = np.sort(self.rng.uniform(self.asked, self.asked + requests, audited))
        self.asked += requests
        source = self.rng.integers(0, self.sights.sources, audited)
        scene = (at / (self.sights.sources * self.sights.scene)).astype(np.int64)
        drawn = self.rng.random(audited) * (1 - 1e-12)
        rows = self._seen(source, scene, drawn) if audited else np.zeros(0, dtype=np.int64)
        worker = self.rng.integers(0, len(self.workers), audited)
        self.shown = {w.uid: (rows[worker == i], source[worker == i]) for i, w in enumerate(self.workers)}

    def _seen(self, source: Ints, scene: Ints, drawn: Floats) -> Ints:
        """Rows that requests in order show, (n,): of each new scene of a source one that is ``drawn``."""
        order = np.argsort(source.astype(np.uint8), kind="stable")  # few sources are sorted by counting
        source, scene, drawn = source[order], scene[order], drawn[order]
        firsts = np.flatnonzero(np.diff(source, prepend=-1))
        known = self.scenes[source[firsts]]
        begins = np.concatenate([[True], np.diff(scene) != 0])
        begins[firsts] = scene[firsts] != known[:, 0]
        goes_on = firsts[~begins[firsts]]  # scenes of the stretch before
        at = np.flatnonzero(begins)
        shown = np.empty(len(source), dtype=np.int64)
        shown[at] = self._pool_rows(drawn[at])
        shown[goes_on] = known[~begins[firsts], 1]
        begins[goes_on] = True
        rows = shown[np.maximum.accumulate(np.where(begins, np.arange(len(source)), 0))]
        lasts = np.append(firsts[1:], len(source)) - 1
        self.scenes[source[firsts]] = np.stack([scene[lasts], rows[lasts]], axis=1)
        found = np.empty_like(rows)
        found[order] = rows
        return found

    def _pool_rows(self, drawn: Floats) -> Ints:
        """Rows of the pool by their weights now, from numbers in [0, 1): the first whose cumulated weight is not below
        one. Looked for from a table of where each part of [0, 1) begins."""
        if self._begins[0] != self.moment:
            cumulated = np.cumsum(self.weights())
            self._begins = self.moment, cumulated, np.searchsorted(cumulated, np.arange(PARTS) / PARTS)
        _, cumulated, begins = self._begins
        rows = begins[(drawn * PARTS).astype(np.int64)]
        while (below := cumulated[rows] < drawn).any():
            rows += below
        return rows

    def _watched(self, document: PlanDocument, state: detector.DetectorState, outcomes: Outcomes) -> detector.Watched:
        return looked_at(
            state,
            outcomes,
            p0=document.accuracy_budget,
            run_length=document.breaker_run_length,
            design_effect=document.stable.design_effect,
        )

    # --- records -----------------------------------------------------------------------------------

    def _record(self, worker: DayWorker, seconds: float, audit_rate: float) -> None:
        rows, source = self.shown.get(worker.uid, (np.zeros(0, dtype=np.int64),) * 2)
        n = min(len(rows), round(self.rate / len(self.workers) * seconds * audit_rate))
        time = self.now + np.sort(self.rng.uniform(0.0, seconds, n))
        named = {"stream": source[:n]} if self.sights.sources > 1 else {}
        self.kept.append(
            rows[:n],
            time=time,
            draw=(self.rng.random(n) * audit_rate).astype(np.float32),
            audit_rate=np.full(n, audit_rate, dtype=np.float32),
            **named,
        )

    @property
    def most_kept(self) -> int:
        return max(KEPT_RECORDS, min(tuner.MOST_LABELS, 2 * self.service.status.tuning.labels_needed))


def looked_at(
    state: detector.DetectorState, outcomes: Outcomes, *, p0: float, run_length: float, design_effect: float
) -> detector.Watched:
    """The breaker with a look after every ``LOOK`` audits: bit by bit what :func:`detector.update` and
    :func:`detector.alarm` make of them, in a sixth of the time. A year has ten million looks."""
    m = state.m or (0.0,) * len(alternatives(p0))
    evidence: dict[tuple[int, int], tuple[float, ...]] = {}
    begins = np.arange(0, len(outcomes), LOOK)
    counts = np.add.reduceat(outcomes, begins, dtype=np.int64).tolist() if len(outcomes) else []
    for begin, k in zip(begins.tolist(), counts, strict=True):
        n = min(LOOK, len(outcomes) - begin)
        if (n, k) not in evidence:
            evidence[n, k] = detector.evidence(n, k, p0=p0, design_effect=design_effect)
        m = detector.moved(m, n, evidence[n, k])
        if sum(m) / len(m) >= run_length:
            return detector.Watched(detector.DetectorState(m, state.n + begin + n), begin + n)
    return detector.Watched(detector.DetectorState(m, state.n + len(outcomes)) if len(outcomes) else state, None)


SIGHTS = {
    "scenes of 30 from 8 sources": Sights(30, 8),
    "independent requests": Sights(1, 1),
    "scenes of 100 from 1 source": Sights(100, 1),
}
_WORLDS: dict[Path, World] = {}


def _year(records: Path, name: str, days: int, seed: int) -> Year:
    if records not in _WORLDS:
        _WORLDS[records] = World.read(records).narrowed(RAMPS)
    tuner.RETUNE_SECONDS = RETUNE_SECONDS
    scenario = YearScenario(name, "a year with everything keeps the promise", request_rate=REQUEST_RATE, days=days)
    life = Everything(_WORLDS[records], scenario, SIGHTS[name], seed)
    life.reconcile()
    while life.day < days:
        life.step()
    return life.year()


def summary(years: Sequence[Year]) -> dict[str, Any]:
    """What the years came to."""
    columns = ("disagreement", "saving", "days_above", "days_off", "tests", "alarms", "rollouts", "rolled_back")
    medians = {name: float(np.median([getattr(y, name) for y in years])) for name in columns}
    worst = max(y.disagreement for y in years)
    return {"runs": len(years), "broken": sum(y.disagreement > BUDGET for y in years), "worst": worst, **medians}


Key = tuple[str, int]  # kind of traffic, seed


def _lived(records: Path, days: int, key: Key) -> tuple[Key, Year]:
    return key, _year(records, key[0], days, key[1])


def read(files: Sequence[Path], days: int) -> dict[Key, Year]:
    """Years of so many days that files of before hold."""
    found: dict[Key, Year] = {}
    for file in files:
        rows = json.loads(file.read_text()) if file.is_file() else {}
        for name in SIGHTS.keys() & rows.keys():
            row = rows[name]
            if row["days"] == days:
                years = zip(row.get("seeds", range(len(row["years"]))), row["years"], strict=True)
                found |= {(name, seed): Year(**year) for seed, year in years}
    return found


def rows(lived: Mapping[Key, Year], days: int) -> dict[str, Any]:
    """What the years of each kind of traffic came to, and each by itself."""
    found = {}
    for name in SIGHTS:
        seeds = sorted(seed for of, seed in lived if of == name)
        if years := [lived[name, seed] for seed in seeds]:
            found[name] = {**summary(years), "days": days, "seeds": seeds, "years": [asdict(y) for y in years]}
    return found


def _write(out: Path, found: dict[str, Any]) -> None:
    """Whole or not at all: a run may be cut at any time."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(json.dumps({**found, "measured": provenance()}) + "\n")
    part.replace(out)


def live(keys: Sequence[Key], lived: dict[Key, Year], options: argparse.Namespace) -> None:
    """Live through the years that are missing, all kinds side by side, and write down each as it ends."""
    missing = [key for key in keys if key not in lived]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(options.jobs, get_context("forkserver")) as pool,
    ):
        task = progress.add_task("years", total=len(missing))
        for done in as_completed([pool.submit(_lived, options.records, options.days, key) for key in missing]):
            key, year = done.result()
            lived[key] = year
            _write(options.out, rows(lived, options.days))
            progress.advance(task)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="bench.control_traffic", description="a year with everything at once")
    parser.add_argument("--years", type=int, default=20, help="of each kind of traffic")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--records", type=Path, default=RECORDS / "resnet56-mx4.npz")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--continue",
        dest="before",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="keep the years of earlier results (that of --out where no file is named) and live only the others",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 where records are missing or more than one year in twenty is over its budget."""
    options = parsed(arguments)
    if not options.records.is_file():
        print(
            f"bench.control_traffic: make the records first: python -m bench.record {options.records.stem}",
            file=sys.stderr,
        )
        return 1
    before = [] if options.before is None else options.before or [options.out]
    lived = read(before, options.days)
    live([(name, options.first + i) for i in range(options.years) for name in SIGHTS], lived, options)
    found = rows(lived, options.days)
    _write(options.out, found)
    if options.json:
        print(json.dumps({name: {k: v for k, v in row.items() if k != "years"} for name, row in found.items()}))
    else:
        _print(found)
    return 1 if any(row["broken"] > 0.05 * row["runs"] for row in found.values()) else 0


def _print(found: dict[str, Any]) -> None:
    table = Table("traffic", "over budget", "worst", "disagreement", "saving", "tests", "alarms", "days off")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['broken']} of {row['runs']}",
            f"{row['worst']:.2%}",
            f"{row['disagreement']:.2%}",
            f"{row['saving']:.1%}",
            f"{row['tests']:.0f}",
            f"{row['alarms']:.0f}",
            f"{row['days_off']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
