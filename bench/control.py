"""Statistics of the whole control loop: ``python -m bench.control [--rollouts 5000] [--years 100] [--jobs 2]
[--json]``.

Simulated fleets of four workers serve recorded scores under bursty load that all share, and the real decision core
drives them pull by pull: thousands of rollouts of each kind, and years of drift with daily re-tuning. A promise is
*refuted* when a one-sided binomial test at 0.1 % says so, else it *holds*. What workers and load do is assumed in
``control_fleet.py`` and ``control_world.py``; costs by batch size and scores are recorded. Results are kept in
``build/bench/control.json``, scenario by scenario, while records and code stay the same; a run that was stopped goes on
where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy import stats

import offramp_core
from bench.control_rollouts import SCENARIOS, Attempt, Scenario, attempt
from bench.control_world import BUDGET, DELTA, World
from bench.control_year import YEARS, Year, YearScenario, year
from offramp_core import binomial
from offramp_worker.engine.accounts import counters

Json = dict[str, Any]
RECORDS, OUT = Path("build/records/resnet56-mx4.npz"), Path("build/bench/control.json")
REFUTED = 0.001
BROKEN_YEARS = 0.05  # of years may break the promise
CHUNK = 10  # rollouts handed to a process at a time


# --- running ---------------------------------------------------------------------------------------

_world: list[World] = []  # of a process; read once


def _read(path: Path) -> None:
    _world[:] = [World.read(path)]


def _attempts(name: str, seeds: range) -> list[Attempt]:
    return [attempt(_world[0], _scenario(name), seed) for seed in seeds]


def _years(name: str, seeds: range) -> list[Year]:
    return [year(_world[0], _year_scenario(name), seed) for seed in seeds]


def _scenario(name: str) -> Scenario:
    return next(s for s in SCENARIOS if s.name == name)


def _year_scenario(name: str) -> YearScenario:
    return next(s for s in YEARS if s.name == name)


def _in_chunks(kind: str, name: str, seeds: range, *, pool: ProcessPoolExecutor) -> Iterator[list[Any]]:
    """Results by rising seed, whatever the number of processes."""
    work, chunk = (_attempts, CHUNK) if kind == "rollouts" else (_years, 1)
    yield from pool.map(partial(work, name), [seeds[i : i + chunk] for i in range(0, len(seeds), chunk)])


# --- judging ---------------------------------------------------------------------------------------


def judged(misses: int, n: int, *, allowed: float) -> Json:
    """Whether so many misses refute that at most a share ``allowed`` misses, and a 95 % interval (Clopper and Pearson)
    of the share."""
    if n == 0:
        return {"n": 0, "misses": 0, "allowed": allowed, "holds": None}
    interval = stats.binomtest(misses, n).proportion_ci(0.95)
    p = float(binomial.sf(misses - 1, n, allowed)) if misses else 1.0
    return {
        "n": n,
        "misses": misses,
        "rate": misses / n,
        "low": float(interval.low),
        "high": float(interval.high),
        "allowed": allowed,
        "p": p,
        "holds": p >= REFUTED,
    }


def summary(scenario: Scenario, attempts: Sequence[Attempt]) -> Json:
    """One row of the table, and what the picture needs."""
    proposed = [a for a in attempts if a.verdict != "NotProposed"]
    counted = [a for a in proposed if a.truth <= BUDGET or not scenario.only_healthy]
    missed = [a for a in counted if scenario.misses(a)]
    return {
        "name": scenario.name,
        "promise": scenario.promise,
        "request_rate": scenario.request_rate,
        **judged(len(missed), len(counted), allowed=scenario.allowed),
        "not_proposed": len(attempts) - len(proposed),
        "over_budget": len(proposed) - len(counted),
        "truth": _quantiles([a.truth for a in counted]),
        "verdicts": _verdicts(counted),
        "missed_by": _verdicts(missed),
        "audits": _quantiles([a.n for a in counted]),
        "audits_until_off": _quantiles([a.n_until_off for a in counted]),
        "seconds": _quantiles([a.seconds for a in counted]),
        "canary_batches": _quantiles([a.batches for a in counted]),
        "histogram": sorted(a.n for a in counted) if scenario.name.startswith("harmful") else [],
        "curves": [a.curve for a in attempts if a.curve],
    }


def _verdicts(attempts: Sequence[Attempt]) -> Json:
    return dict(Counter(f"{a.verdict} {a.reason}".strip() for a in attempts))


def _quantiles(values: Sequence[float]) -> Json:
    if not values:
        return {}
    return {f"p{round(100 * q)}": float(np.quantile(values, q)) for q in (0.05, 0.5, 0.9, 0.95, 0.99)}


def year_summary(scenario: YearScenario, years: Sequence[Year]) -> Json:
    """Whether the promise was kept, and what it cost."""
    broken = sum(y.disagreement > BUDGET for y in years)
    columns = ("disagreement", "saving", "days_above", "days_off", "tests", "alarms", "rollouts", "rolled_back")
    return {
        "name": scenario.name,
        "promise": scenario.promise,
        **judged(broken, len(years), allowed=BROKEN_YEARS),
        **{
            c: {**_quantiles([getattr(y, c) for y in years]), "max": float(max(getattr(y, c) for y in years))}
            for c in columns
        },
        "verdicts": dict(sum((Counter(y.verdicts) for y in years), Counter())),
        "example": asdict(years[0]),
    }


# --- the report ------------------------------------------------------------------------------------


def content_keys(records: Path) -> tuple[str, str]:
    """Digests of what a rollout's and a year's result depends on: records, decision core, the worker's rules, and this
    simulation."""
    here, core = Path(__file__).parent, Path(str(offramp_core.__file__)).parent
    engine = Path(str(counters.__file__)).parent
    digest = hashlib.sha256()
    shared = [*core.glob("**/*.py"), *(engine / name for name in ("arms.py", "breaker.py", "counters.py"))]
    own = [here / f"control_{name}.py" for name in ("fleet", "rollouts", "shell", "world")]
    for path in [records, *sorted(shared), *own, here / "evidence.py"]:
        digest.update(path.read_bytes())
    rollouts = digest.hexdigest()
    for name in ("control_year.py", "promise.py"):
        digest.update((here / name).read_bytes())
    return rollouts, digest.hexdigest()


def run(options: argparse.Namespace, console: Console) -> Json:
    """Every scenario that is not kept, one after the other. What was simulated is written down as it comes, so a run
    that is stopped goes on later."""
    found: Json = json.loads(options.out.read_text()) if options.out.is_file() else {}
    head = {
        "records": options.records.stem,
        "budget": BUDGET,
        "refuted_below": REFUTED,
        "log_limit": math.log(1 / DELTA),
    }
    found = {"rollouts": {}, "years": {}, **found, **head}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    stop_at = time.monotonic() + 60 * options.minutes
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = ProcessPoolExecutor(options.jobs, get_context("forkserver"), initializer=_read, initargs=(options.records,))
    with Progress(*columns, console=console) as progress:
        for kind, name, key in _wanted(options):
            n = options.rollouts if kind == "rollouts" else options.years
            kept = found[kind].get(name, {})
            if kept.get("key") == key and kept["runs"] >= n:
                continue
            parts = Parts(options.out.with_suffix(f".{name}.jsonl"), key, Attempt if kind == "rollouts" else Year)
            results, task = parts.read(), progress.add_task(name, total=n)
            for chunk in _in_chunks(kind, name, range(len(results), n), pool=pool):
                parts.append(chunk)
                results += chunk
                progress.update(task, completed=len(results))
                if time.monotonic() > stop_at:
                    break
            row = (
                summary(_scenario(name), results) if kind == "rollouts" else year_summary(_year_scenario(name), results)
            )
            found[kind][name] = {"key": key, "runs": len(results), **row}
            options.out.write_text(json.dumps(found) + "\n")
            console.print(f"{name}: {len(results):,} of {n:,}, {verdict(row)}")
            if time.monotonic() > stop_at:
                break
    pool.shutdown(cancel_futures=True)
    return found


@dataclass(frozen=True, slots=True)
class Parts:
    """Single results on disk, one a line after a line with their key; those of another key are void."""

    path: Path
    key: str
    kind: type[Any]

    def read(self) -> list[Any]:
        """All results so far, by rising seed."""
        if self.path.is_file():
            key, *lines = self.path.read_text().splitlines()
            if key == self.key:
                return [self.kind(**json.loads(line)) for line in lines]
        self.path.write_text(self.key + "\n")
        return []

    def append(self, results: Sequence[Any]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(asdict(each)) + "\n" for each in results)


def _wanted(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Kind, name and key of what was asked for."""
    keys = content_keys(options.records)
    named = [("rollouts", s.name, keys[0]) for s in SCENARIOS] + [("years", y.name, keys[1]) for y in YEARS]
    return (each for each in named if not options.only or each[1] in options.only)


def print_table(found: Json, console: Console) -> None:
    """The table for people."""
    table = Table(title=f"The control loop on {found['records']}, budget {found['budget']:.0%}")
    for column in ("promise", "runs", "missed (95 %)", "allowed", "", "audits p50/p90", "seconds p50/p90"):
        table.add_column(column)
    for row in rows(found):
        spread = [f"{row[c]['p50']:,.0f} / {row[c]['p90']:,.0f}" if row.get(c) else "" for c in ("audits", "seconds")]
        table.add_row(row["promise"], f"{row['n']:,}", shown_rate(row), f"{row['allowed']:.0%}", verdict(row), *spread)
    console.print(table)
    for row in found["years"].values():
        console.print(
            f"{row['name']}: disagreement median {row['disagreement']['p50']:.2%}, worst "
            f"{row['disagreement']['max']:.2%}; days above the budget median "
            f"{row['days_above']['p50']:.1f}, most {row['days_above']['max']:.1f}; saving {row['saving']['p50']:.1%}; "
            f"{row['tests']['p50']:.0f} tests, "
            f"{row['alarms']['p50']:.0f} alarms, {row['rollouts']['p50']:.0f} rollouts, exits off "
            f"{row['days_off']['p50']:.1f} days"
        )


def rows(found: Json) -> list[Json]:
    """All rows of the table."""
    return [*found["rollouts"].values(), *found["years"].values()]


def shown_rate(row: Json) -> str:
    """Misses with their interval."""
    if not row["n"]:
        return "–"
    return f"{row['rate']:.2%} ({row['low']:.2%} to {row['high']:.2%})"


def verdict(row: Json) -> str:
    return {True: "holds", False: "refuted", None: "–"}[row["holds"]]


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when records are missing or a promise is refuted."""
    parser = argparse.ArgumentParser(prog="bench.control", description="statistics of the whole control loop")
    parser.add_argument("--rollouts", type=int, default=5000, help="of each kind")
    parser.add_argument("--years", type=int, default=100, help="simulated years of each kind")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after so long; the next run goes on from there"
    )
    names = [*(s.name for s in SCENARIOS), *(y.name for y in YEARS)]
    parser.add_argument(
        "--only", nargs="*", default=[], choices=names, metavar="NAME", help=f"some of: {', '.join(names)}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if not options.records.is_file():
        print(
            f"bench.control: {options.records} is missing; make it with: python -m bench.record {options.records.stem}",
            file=sys.stderr,
        )
        return 1
    found = run(options, Console(stderr=True))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_table(found, Console())
    return 1 if any(row["holds"] is False for row in rows(found)) else 0


if __name__ == "__main__":
    sys.exit(main())
