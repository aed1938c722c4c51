"""How many labels a certificate takes that is worth 90 % of what can be saved: ``python -m bench.labels [--draws 100]
[--sets NAME...]``.

The records of ``python -m bench.record`` are the population: labels are drawn from them with replacement, and a plan's
truth is its rate on all of them. What can be saved is the most that any plan of fp32 exits saves on all records within
the budget. The answer is the least number of labels of a grid at which the median draw saves 90 % of that, and how
often a certificate is over the budget there. Every set leaves a file, ``labels-SET.json``, that is kept while its
records, the code and the number of draws stay the same.

Three ways to spend the same number of labels, all with an eighth of them for finding the path of plans:

- *every request alike*: the product's own tuning, an exact binomial test.
- *leavers only*: of the requests held out for the test, only those are labelled that leave early under some plan of the
  path; the others cannot disagree. How many leave is taken as known, which flatters this way a little. It needs the
  uncertainties of requests before they are labelled.
- *doubtful more often*: leavers near their thresholds are labelled with probability 1, other leavers with 0.5 and the
  rest with 0.25, tested by bets that are weighted by inclusion (:mod:`offramp_core.certify.betting`). It needs the
  same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.provenance import provenance
from bench.replays import content_key
from offramp_core import tuning
from offramp_core.certify import certificate, p_value
from offramp_core.certify.betting import betting_p_value
from offramp_core.certify.expected import PathStep, expected_path
from offramp_core.evaluate import Evaluation, answers_agree, evaluate, leave_position, plan_columns
from offramp_core.records import BoolArray, Records
from offramp_lab.policies import Objective
from offramp_lab.policies.planned import searched
from offramp_lab.replay.load import load_records

RECORDS, OUT = Path("build/records"), Path("build/bench")
STAGE = "labels"
BUDGET, DELTA, MAX_OVERHEAD, MAX_RAMPS, BATCH_SIZE = 0.01, 0.05, 0.05, 3, 16
WORTH = 0.9
GRID = (300, 425, 600, 850, 1200, 1700, 2400, 3400, 4800, 6800, 9600, 13600)
SEARCHED = 1 / 8
SURE, OTHER, REST = 1.0, 0.5, 0.25  # inclusion probabilities
NEAR = 0.5  # of its threshold: an uncertainty above this share is doubtful

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Draws:
    """Requests of a population, as they come: in the order in which they are drawn. In that of their recorded times
    copies of a row would be neighbors, as frames of a scene are, and be worth one label."""

    pool: Records
    rng: np.random.Generator

    def take(self, n: int) -> Records:
        return replace(self.pool.take(self.rng.integers(0, len(self.pool), size=n)), time=None, stream=None)


def alike(draws: Draws, n: int) -> Evaluation | None:
    """The plan that the product certifies with ``n`` labels, on the whole population; None for none."""
    names = tuple(f"r{i:02d}" for i in range(draws.pool.n_ramps))
    request = tuning.TuningRequest(BUDGET, DELTA, 1, names, "", "", max_overhead=MAX_OVERHEAD, max_ramps=MAX_RAMPS)
    found = tuning.tune(draws.take(n), request)
    if not isinstance(found, tuning.Proposed):
        return None
    return evaluate(draws.pool, *plan_columns(found.plan, found.certificate.ramp_ids))


def leavers(draws: Draws, n: int) -> Evaluation | None:
    """Labels of those alone that leave under some plan of the path."""
    path, left_to_spend = _path(draws, n)
    if not path:
        return None
    leaves = np.any([_leaves(draws.pool, step) for step in path], axis=0)
    share = float(leaves.mean())
    if share == 0:
        return None
    labelled = Draws(draws.pool.take(np.flatnonzero(leaves)), draws.rng).take(left_to_spend)
    level = certificate.allowance(DELTA, 1)

    def passes(step: PathStep) -> bool:
        k = int((~_agrees(labelled, step)).sum())
        return p_value(k, len(labelled), budget=min(BUDGET / share, 1 - 1e-9)) <= level

    return _boldest(draws.pool, path, passes)


def doubtful(draws: Draws, n: int) -> Evaluation | None:
    """Labels of the doubtful more often, tested by weighted bets."""
    path, left_to_spend = _path(draws, n)
    if not path:
        return None
    requests = draws.take(int(left_to_spend / REST))
    inclusion = _inclusion(requests, path[-1])
    kept = np.flatnonzero(draws.rng.random(len(requests)) < inclusion)[:left_to_spend]
    labelled, weights, level = requests.take(kept), inclusion[kept], certificate.allowance(DELTA, 1)

    def passes(step: PathStep) -> bool:
        excess = (~_agrees(labelled, step) - BUDGET) / weights
        return betting_p_value(excess, most=(1 - BUDGET) / REST) <= level

    return _boldest(draws.pool, path, passes)


WAYS: Mapping[str, Callable[[Draws, int], Evaluation | None]] = {
    "every request alike": alike,
    "leavers only": leavers,
    "doubtful more often": doubtful,
}


def _path(draws: Draws, n: int) -> tuple[list[PathStep], int]:
    """Plans from cautious to bold, and the labels that are left to test them."""
    searched = max(50, round(SEARCHED * n))
    path = expected_path(draws.take(searched), max_disagreement=BUDGET, max_ramps=MAX_RAMPS, max_overhead=MAX_OVERHEAD)
    return list(path), n - searched


def _leaves(records: Records, step: PathStep) -> BoolArray:
    return np.asarray(leave_position(records, step.active, step.thresholds) < len(step.active))


def _agrees(records: Records, step: PathStep) -> BoolArray:
    return answers_agree(records, step.active, leave_position(records, step.active, step.thresholds))


def _inclusion(records: Records, step: PathStep) -> np.ndarray[Any, np.dtype[np.float64]]:
    thresholds = np.array([max(float(t), 1e-9) for t in step.thresholds])
    near = (records.uncertainty[:, list(step.active)] / thresholds).min(axis=1) >= NEAR
    return np.where(_leaves(records, step), np.where(near, SURE, OTHER), REST)


def _boldest(pool: Records, path: list[PathStep], passes: Callable[[PathStep], bool]) -> Evaluation | None:
    """The plan that saves most among those that pass before the first that does not."""
    passed: list[Evaluation] = []
    for step in path:
        if not passes(step):
            break
        passed.append(evaluate(pool, step.active, step.thresholds))
    return max(passed, key=lambda seen: seen.saving, default=None)


def labels_needed(pool: Records, way: str, *, draws: int, advance: Callable[[], object]) -> Json:
    """The least of the grid that is worth 90 %, and what its draws came to; ``labels`` is None where none is."""
    best = searched(pool, Objective(BUDGET, max_overhead=MAX_OVERHEAD))
    for n in GRID:
        found = [WAYS[way](Draws(pool, np.random.default_rng([n, seed])), n) for seed in range(draws)]
        advance()
        savings = [0.0 if seen is None else max(0.0, seen.saving) for seen in found]
        wrong = sum(seen is not None and seen.disagreement > BUDGET for seen in found)
        if np.median(savings) >= WORTH * best.saving:
            return {
                "labels": n,
                "saving": float(np.median(savings)),
                "best": best.saving,
                "wrong": wrong,
                "draws": draws,
            }
    return {"labels": None, "saving": float(np.median(savings)), "best": best.saving, "wrong": wrong, "draws": draws}


def measure(records: Path, out: Path, *, draws: int, console: Console) -> list[Json]:
    """A row for each way on one set, from its file where that is still right."""
    target, key = out / f"{STAGE}-{records.stem}.json", content_key(STAGE, records, draws, code=Path(__file__))
    if target.is_file() and (kept := json.loads(target.read_text())).get("key") == key:
        return list(kept["rows"])
    pool, rows = load_records(records, batch_size=BATCH_SIZE), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for way in WAYS:
            task = progress.add_task(f"{records.stem}, {way}", total=len(GRID))
            found = labels_needed(pool, way, draws=draws, advance=partial(progress.advance, task))
            progress.remove_task(task)
            rows.append({"set": records.stem, "way": way, **found})
            console.print(f"{records.stem}, {way}: {told(rows[-1])}")
    out.mkdir(parents=True, exist_ok=True)
    target.write_text(
        json.dumps({"key": key, "set": records.stem, "rows": rows, "measured": provenance()}, indent=1) + "\n"
    )
    return rows


def print_table(rows: list[Json], console: Console) -> None:
    """A line for each set, a column for each way."""
    table = Table("set", *WAYS, title=f"labels for {WORTH:.0%} of what can be saved at a budget of {BUDGET:.0%}")
    for name in dict.fromkeys(row["set"] for row in rows):
        found = {row["way"]: row for row in rows if row["set"] == name}
        table.add_row(name, *(told(found[way]) if way in found else "" for way in WAYS))
    console.print(table)


def told(row: Json) -> str:
    """Labels, and certificates over the budget; where no number of them is worth it, what the most are worth."""
    if row["labels"]:
        labels = f"{row['labels']:,}"
    else:
        labels = f"more than {GRID[-1]:,}, which are worth {row['saving'] / row['best']:.0%}"
    return f"{labels} ({row['wrong']} of {row['draws']} over budget)"


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 where there are no records."""
    parser = argparse.ArgumentParser(prog="bench.labels", description="labels for a certificate worth 90 %")
    parser.add_argument("--sets", nargs="*", help="record sets; all that are there when left out")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args(arguments)
    files = [f for f in sorted(options.records.glob("*.npz")) if not options.sets or f.stem in options.sets]
    if not files:
        print(f"bench.labels: {options.records} holds no such records; run python -m bench.record all", file=sys.stderr)
        return 1
    console = Console(stderr=True)
    rows = [row for file in files for row in measure(file, options.out, draws=options.draws, console=console)]
    print_table(rows, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
