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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.control_world import BACKBONE, BUDGET, RAMP_SET, Ints, World
from bench.control_year import BUSY_SECONDS, DAY, KEPT_RECORDS, RAMPS, DayWorker, Life, Outcomes, Year, YearScenario
from bench.provenance import provenance
from bench.replays import OUT as OUT_FOLDER
from bench.replays import RECORDS
from offramp_core.control.snapshot import Load, RecordStore
from offramp_core.control.tuning import tuner
from offramp_core.evidence import detector
from offramp_core.protocol import PlanDocument

OUT = OUT_FOLDER / "traffic.json"
HOUR = 3600.0
COLLECTING_SECONDS = 600.0  # between passes that only wait for labels
RETUNE_SECONDS = 86_400.0  # the product tries every hour; a year of that is a day of this machine
REQUEST_RATE = 200.0  # by day, over the fleet
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
        self.shown: dict[str, tuple[Ints, Ints]] = {}  # audited rows of this step and their sources, by worker
        self.draws, self.audit_rates, self.streams = np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64)

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
        return np.zeros(0, dtype=np.bool_) if worker.open else self.world.served(self._plan(document)).wrong[rows]

    def _show(self, seconds: float, audit_rate: float) -> None:
        """What the audited requests of a stretch show, dealt to the workers in the order in which they come."""
        requests = self.rate * seconds
        audited = int(self.rng.poisson(requests * audit_rate))
        at = np.sort(self.rng.uniform(self.asked, self.asked + requests, audited))
        self.asked += requests
        source = self.rng.integers(0, self.sights.sources, audited)
        scene = (at / (self.sights.sources * self.sights.scene)).astype(np.int64)
        rows = np.empty(audited, dtype=np.int64)
        fresh = np.searchsorted(np.cumsum(self.weights()), self.rng.random(audited) * (1 - 1e-12))
        for s in np.unique(source):
            mine = np.flatnonzero(source == s)
            begins = np.flatnonzero(np.diff(scene[mine], prepend=self.scenes[s, 0]))
            shown = np.zeros(len(mine), dtype=np.intp)
            shown[begins] = begins + 1
            last = np.maximum.accumulate(shown) - 1
            rows[mine] = np.where(last >= 0, fresh[mine[last]], self.scenes[s, 1])
            self.scenes[s] = scene[mine[-1]], rows[mine[-1]]
        worker = self.rng.integers(0, len(self.workers), audited)
        self.shown = {w.uid: (rows[worker == i], source[worker == i]) for i, w in enumerate(self.workers)}

    def _watched(self, document: PlanDocument, state: detector.DetectorState, outcomes: Outcomes) -> detector.Watched:
        budget, effect = document.accuracy_budget, document.stable.design_effect
        for begin in range(0, len(outcomes), LOOK):
            block = outcomes[begin : begin + LOOK]
            state = detector.update(state, len(block), int(block.sum()), p0=budget, design_effect=effect)
            if detector.alarm(state, run_length=document.breaker_run_length):
                return detector.Watched(state, begin + len(block))
        return detector.Watched(state, None)

    # --- records -----------------------------------------------------------------------------------

    def _record(self, worker: DayWorker, seconds: float, audit_rate: float) -> None:
        rows, source = self.shown.get(worker.uid, (np.zeros(0, dtype=np.int64),) * 2)
        n = min(len(rows), round(self.rate / len(self.workers) * seconds * audit_rate))
        self.rows = np.append(self.rows, rows[:n])
        self.streams = np.append(self.streams, source[:n])
        self.times = np.append(self.times, self.now + np.sort(self.rng.uniform(0.0, seconds, n)))
        self.draws = np.append(self.draws, self.rng.random(n) * audit_rate)
        self.audit_rates = np.append(self.audit_rates, np.full(n, audit_rate))

    def _keep_newest(self) -> None:
        awaited = min(tuner.MOST_LABELS, 2 * self.service.status.tuning.labels_needed)
        newest = np.argsort(self.times, kind="stable")[-max(KEPT_RECORDS, awaited) :]
        for name in ("rows", "times", "streams", "draws", "audit_rates"):
            setattr(self, name, getattr(self, name)[newest])

    def _store(self) -> RecordStore:
        records = replace(
            self.world.records.take(self.rows),
            time=self.times,
            stream=self.streams if self.sights.sources > 1 else None,
            draw=self.draws.astype(np.float32),
            audit_rate=self.audit_rates.astype(np.float32),
        )
        return RecordStore(records, self.world.ramp_ids, BACKBONE, RAMP_SET)


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


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 where records are missing or more than one year in twenty is over its budget."""
    parser = argparse.ArgumentParser(prog="bench.control_traffic", description="a year with everything at once")
    parser.add_argument("--years", type=int, default=20, help="of each kind of traffic")
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--records", type=Path, default=RECORDS / "resnet56-mx4.npz")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if not options.records.is_file():
        print(
            f"bench.control_traffic: make the records first: python -m bench.record {options.records.stem}",
            file=sys.stderr,
        )
        return 1
    found: dict[str, Any] = {}
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(options.jobs, get_context("forkserver")) as pool,
    ):
        for name in SIGHTS:
            years: list[Year] = []
            task = progress.add_task(name, total=options.years)
            for one in pool.map(partial(_year, options.records, name, options.days), range(options.years)):
                years.append(one)
                progress.advance(task)
                found[name] = {**summary(years), "days": options.days, "years": [asdict(y) for y in years]}
                found["measured"] = provenance()
                options.out.write_text(json.dumps(found) + "\n")
    found.pop("measured", None)
    if options.json:
        print(json.dumps({name: {k: v for k, v in row.items() if k != "years"} for name, row in found.items()}))
    else:
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
    return 1 if any(row["broken"] > 0.05 * row["runs"] for row in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
