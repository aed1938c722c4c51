"""What the tuning policies do on recorded scores: ``python -m bench.replays STAGE... | all [--draws 200] [--jobs 2]``.

| stage | question | file |
|---|---|---|
| draws | every policy: true saving and disagreement, how often the budget breaks | draws-SET.json |
| frontier | exact against greedy at equal true disagreement | frontier-SET.json |
| certificates | what a certificate costs, by labels | certificates-SET.json |
| targets | saving by accuracy budget and by ramp budget | targets-SET.json |
| serving | p50, p95, drops behind a queue, by arrivals and batching | serving-SET.json |

The records of ``python -m bench.record`` are the population: calibration sets and streams are drawn from them with
replacement, and a plan's truth is its rate on all of them. Exits are priced at batch size 16, and in ``frontier`` also
by arithmetic (MACs), as research papers do. A file is kept while records, code and arguments stay the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import offramp_core
import offramp_lab
from bench.arrivals import TRACES, MissingTraceError, load_trace
from offramp_core.records import ExitCosts, Records
from offramp_lab.policies import POLICIES, Objective
from offramp_lab.replay.arrivals import Arrivals
from offramp_lab.replay.load import load_records
from offramp_lab.replay.measure import Drawn, Queueing, Work, replay_file, run_draws, simulate_queues
from offramp_lab.replay.report import FileResult, draws_mapping, to_mapping
from offramp_lab.simulate import BATCHING

Json = dict[str, Any]
RECORDS, OUT = Path("build/records"), Path("build/bench")
BUDGET, BATCH_SIZE, MAX_OVERHEAD = 0.01, 16, 0.05
TUNE_ROWS, STREAM_ROWS = 4500, 2048
HINDSIGHT_DRAWS = 20  # ceilings that search the stream itself; slow, and no promise hangs on them
SECOND_PRICE_DRAWS = 60  # of the frontier priced by time where the one by arithmetic is what is compared
FRONTIER_BUDGETS = (0.0065, 0.008, 0.0095)
LABELS = (500, 1000, 2000, 4500)
BUDGETS = (0.005, 0.01, 0.02, 0.05)
RAMP_BUDGETS = (0.02, 0.05, 0.10)
LOADS = (0.3, 0.5, 0.7)
SERVED_POLICIES = ("exact", "certified", "greedy", "apparate", "branchynet+", "two-layer", "exits-off", "oracle")
MAC_HEAD_SHARE = {"grid-mlp": 0.012}  # what research/exit-scores charged a 4x4 head; a linear one costs next to nothing


@dataclass(frozen=True, slots=True)
class Setting:
    """One record set and how much work to spend on it."""

    name: str
    pool: Records
    facts: Json
    draws: int
    jobs: int
    advance: Callable[[int], None]


def draws(setting: Setting) -> Json:
    """Every policy on the same draws; ceilings that search the stream on fewer."""
    pool = replace(setting.pool, profile=None)
    suitable = [p for p in POLICIES.values() if p.refusal(pool) is None]
    slow = [p.name for p in suitable if p.name.endswith("-optimal")]
    quick = [p.name for p in suitable if p.name not in slow]
    objective = Objective(BUDGET, max_overhead=MAX_OVERHEAD, batch_size=BATCH_SIZE)
    found = _drawn(setting, pool, quick, objective)
    found |= _drawn(replace(setting, draws=min(setting.draws, HINDSIGHT_DRAWS)), pool, slow, objective)
    exact, greedy = (np.array(found[name].in_sample) for name in ("exact", "greedy"))
    return {
        "tune_rows": _tune_rows(pool),
        "stream_rows": STREAM_ROWS,
        "exact_below_greedy": int((exact < greedy - 1e-12).sum()),
        "policies": [
            {
                "name": name,
                "describe": POLICIES[name].describe,
                "hindsight": POLICIES[name].hindsight,
                "online": POLICIES[name].online,
                **draws_mapping(found[name], objective),
                "points": [[t.disagreement, t.saving] for t in found[name].truths],
            }
            for name in POLICIES
            if name in found
        ],
    }


def frontier(setting: Setting) -> Json:
    """Mean true saving where mean true disagreement is 1 %, by interpolation between budgets; priced by arithmetic and
    by time."""
    priced = {"time": replace(setting.pool, profile=None)}
    spent = {"time": setting}
    if all("macs_depth" in ramp for ramp in setting.facts.get("ramps", [{}])):
        priced["macs"], spent["macs"] = by_macs(setting.pool, setting.facts), setting
        spent["time"] = replace(setting, draws=min(setting.draws, SECOND_PRICE_DRAWS))
    out: Json = {"equal_disagreement": BUDGET, "budgets": FRONTIER_BUDGETS, "prices": {}}
    for price, pool in priced.items():
        curves: dict[str, list[Json]] = {"exact": [], "greedy": []}
        for budget in FRONTIER_BUDGETS:
            found = _drawn(spent[price], pool, list(curves), Objective(budget, max_overhead=MAX_OVERHEAD))
            for name, drawn in found.items():
                curves[name].append(_means(drawn))
        out["prices"][price] = {
            name: {"curve": curve, "saving": at_disagreement(curve, BUDGET)} for name, curve in curves.items()
        }
    return out


def by_macs(pool: Records, facts: Json) -> Records:
    """The same records priced by arithmetic; heads at what the research page charged."""
    edges = [0.0, *(ramp["macs_depth"] for ramp in facts["ramps"]), 1.0]
    head = MAC_HEAD_SHARE.get(facts["head"])
    ramps = [ramp["macs_cost"] if head is None else head for ramp in facts["ramps"]]
    costs = ExitCosts(np.maximum(0.0, np.diff(edges)), np.array(ramps))
    return replace(pool, costs=costs, profile=None)


def at_disagreement(curve: Sequence[Json], wanted: float) -> float:
    """Saving where the curve (rising disagreement) reaches ``wanted``; its last line goes on beyond the ends."""
    x = np.array([point["disagreement"] for point in curve])
    y = np.array([point["saving"] for point in curve])
    order = np.argsort(x)
    x, y = x[order], y[order]
    i = int(np.clip(np.searchsorted(x, wanted), 1, len(x) - 1))
    if x[i] == x[i - 1]:
        return float(y[i])
    return float(y[i - 1] + (wanted - x[i - 1]) * (y[i] - y[i - 1]) / (x[i] - x[i - 1]))


def certificates(setting: Setting) -> Json:
    """The certified policy by labels."""
    pool = replace(setting.pool, profile=None)
    objective = Objective(BUDGET, max_overhead=MAX_OVERHEAD)
    rows = []
    for labels in LABELS:
        drawn = _drawn(setting, pool, ["certified"], objective, tune_rows=labels)["certified"]
        savings = np.array([t.saving for t in drawn.truths])
        rows.append(
            {"labels": labels, **draws_mapping(drawn, objective), "worth_5_points": float((savings >= 0.05).mean())}
        )
    return {"rows": rows}


def targets(setting: Setting) -> Json:
    """Exact and certified by accuracy budget; exact and greedy by ramp budget."""
    pool = replace(setting.pool, profile=None)
    by_budget, by_ramps = [], []
    for budget in BUDGETS:
        objective = Objective(budget, max_overhead=MAX_OVERHEAD)
        found = _drawn(setting, pool, ["exact", "certified", "greedy"], objective)
        by_budget.append({"budget": budget, **{n: draws_mapping(d, objective) for n, d in found.items()}})
    for share in RAMP_BUDGETS:
        objective = Objective(BUDGET, max_overhead=share)
        found = _drawn(setting, pool, ["exact", "greedy"], objective)
        by_ramps.append({"max_overhead": share, **{n: draws_mapping(d, objective) for n, d in found.items()}})
    return {"budgets": by_budget, "ramp_budgets": by_ramps}


def serving(setting: Setting) -> Json:
    """Newer half of the records behind queues: real traces and generators, all batching policies, at the middle and
    high load."""
    names = [n for n in SERVED_POLICIES if POLICIES[n].refusal(setting.pool) is None]
    objective = Objective(BUDGET, max_overhead=MAX_OVERHEAD, batch_size=BATCH_SIZE)
    pool = replace(setting.pool, time=None)
    stream, results = replay_file(
        replace(pool, profile=None), [POLICIES[n] for n in names], objective, advance=lambda _: None
    )
    arrivals = [Arrivals(kind, kind) for kind in ("poisson", "fixed", "bursts")]
    missing = []
    for trace in TRACES:
        try:
            arrivals.append(Arrivals(trace, trace, recorded=load_trace(trace)))
        except MissingTraceError as error:
            missing.append(str(error))
    out: Json = {"missing": missing, "loads": []}
    for load in LOADS:
        for result in results:
            result.serving.clear()
        queueing = Queueing(tuple(arrivals), BATCHING, "Auto", load)
        simulate_queues(replace(stream, profile=pool.profile), results, queueing, seed=0, advance=lambda _: None)
        mapping = to_mapping(FileResult(Path(setting.name), pool, stream, results), objective)
        out["loads"].append({"load": load, "policies": mapping["policies"]})
    return out


STAGES: dict[str, Callable[[Setting], Json]] = {
    "draws": draws,
    "frontier": frontier,
    "certificates": certificates,
    "targets": targets,
    "serving": serving,
}


def _drawn(
    setting: Setting, pool: Records, names: Sequence[str], objective: Objective, *, tune_rows: int | None = None
) -> dict[str, Drawn]:
    work = Work(pool, tuple(names), objective, 0, tune_rows or _tune_rows(pool), STREAM_ROWS)
    return run_draws(work, setting.draws, jobs=setting.jobs, advance=setting.advance) if names else {}


def _tune_rows(pool: Records) -> int:
    return min(TUNE_ROWS, len(pool) // 2)


def _means(drawn: Drawn) -> Json:
    saving = np.array([t.saving for t in drawn.truths])
    disagreement = np.array([t.disagreement for t in drawn.truths])
    return {
        "n": len(saving),
        "saving": float(saving.mean()),
        "saving_sd": float(saving.std()),
        "disagreement": float(disagreement.mean()),
    }


def content_key(stage: str, records: Path, draws_wanted: int, *, code: Path) -> str:
    """Digest of what a stage's result depends on: the records, the code that decides, the bench's own file and the
    arguments."""
    digest = hashlib.sha256(f"{stage} {draws_wanted}".encode())
    packages = [Path(str(package.__file__)).parent for package in (offramp_core, offramp_lab)]
    folders = ("policies", "search", "certify", "simulate")
    decides = [
        *(path for package in packages for path in package.glob("*.py")),
        *(path for package in packages for folder in folders for path in (package / folder).glob("**/*.py")),
    ]
    for path in [records, *sorted(decides), code]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_stage(stage: str, records: Path, out: Path, *, draws_wanted: int, jobs: int, console: Console) -> bool:
    """Make one file, or keep it; False when it was kept."""
    target = out / f"{stage}-{records.stem}.json"
    key = content_key(stage, records, draws_wanted, code=Path(__file__))
    if target.is_file() and json.loads(target.read_text()).get("key") == key:
        return False
    facts_file = records.with_suffix(".json")
    facts = json.loads(facts_file.read_text()) if facts_file.is_file() else {}
    pool = load_records(records, batch_size=BATCH_SIZE)
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{stage} {records.stem}", total=None)
        setting = Setting(records.stem, pool, facts, draws_wanted, jobs, partial(progress.advance, task))
        result = STAGES[stage](setting)
    head = {
        "key": key,
        "stage": stage,
        "set": records.stem,
        "model": facts.get("model", records.stem),
        "head": facts.get("head", ""),
        "records": len(pool),
        "ramps": pool.n_ramps,
        "budget": BUDGET,
        "batch_size": BATCH_SIZE,
        "max_overhead": MAX_OVERHEAD,
        "draws": draws_wanted,
        "seconds": round(time.perf_counter() - began, 1),
    }
    out.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**head, **result}, indent=1) + "\n")
    return True


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when there are no records."""
    parser = argparse.ArgumentParser(prog="bench.replays", description="policies on recorded scores")
    parser.add_argument(
        "stages", nargs="+", choices=[*STAGES, "all"], metavar="STAGE", help=f"all, or some of: {', '.join(STAGES)}"
    )
    parser.add_argument("--sets", nargs="*", help="record sets; all that are there when left out")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    files = sorted(options.records.glob("*.npz"))
    chosen = [path for path in files if not options.sets or path.stem in options.sets]
    if not chosen:
        print(
            f"bench.replays: {options.records} holds no such records; run python -m bench.record all", file=sys.stderr
        )
        return 1
    console = Console(stderr=True)
    for stage in STAGES if "all" in options.stages else options.stages:
        for path in chosen:
            made = run_stage(stage, path, options.out, draws_wanted=options.draws, jobs=options.jobs, console=console)
            console.print(f"{stage} {path.stem}: {'done' if made else 'kept'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
