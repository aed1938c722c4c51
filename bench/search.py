"""How long the exact search takes: ``python -m bench.search [FILE.npz]... [--json]``.

Besides the files, records are synthetic (one latent difficulty per input, ramps see it through noise). Every figure
is the least of several repetitions, wall and processor time of one thread; on a busy machine the wall time says more
about the machine, and processor time too is inflated by shared caches. Everything is searched with numpy alone first,
then with the compiled loops, which a process loads once (``offramp[fast]``); the plans are the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from offramp_core.records import ExitCosts, Records
from offramp_core.search.pace import PACE
from offramp_core.search.placement import best_plan
from offramp_core.search.thresholds import SearchResult, best_thresholds
from offramp_lab.replay.load import load_records

Found = TypeVar("Found")
BUDGETS = (0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class Timing:
    """One search. Shares are fractions; ``gap`` is the saving that may have been missed; ``loops`` is numpy or
    compiled."""

    records: str
    loops: str
    task: str
    budget: float
    wall_seconds: float
    processor_seconds: float
    active: tuple[int, ...]
    saving: float
    gap: float
    nodes: int


def synthetic(n: int, n_ramps: int, *, seed: int = 0, ramp_share: float = 0.008) -> Records:
    """Records of inputs with a latent difficulty, which deeper ramps see better; scores are on the six-decimal grid."""
    rng = np.random.default_rng(seed)
    difficulty = rng.beta(1.2, 1.8, size=n) * 1.25
    depth = np.arange(1, n_ramps + 1) / (n_ramps + 1)
    margin = (depth - difficulty[:, None]) * 6 + rng.normal(0, 0.9, (n, n_ramps)) + 0.35 * rng.normal(size=(n, 1))
    agrees = rng.random((n, n_ramps)) < 1 / (1 + np.exp(-(margin * 1.1 + 2.2)))
    score = 1 / (1 + np.exp(margin + 2 + rng.normal(0, 0.8, (n, n_ramps))))
    costs = ExitCosts(np.full(n_ramps + 1, 1 / (n_ramps + 1)), np.full(n_ramps, ramp_share))
    return Records((np.rint(score * 1e6) / 1e6).astype(np.float32), agrees, np.ones(n, dtype=bool), costs)


def thresholds(name: str, records: Records, *, repeat: int) -> list[Timing]:
    """Thresholds of the three ramps that a placement chose."""
    out = []
    for budget in BUDGETS:
        chosen = best_plan(records, max_disagreement=budget, max_gap=0.005).plan.active
        active = chosen if len(chosen) == 3 else tuple(int(records.n_ramps * q) for q in (0.25, 0.5, 0.75))
        wall, processor, plan = _timed(partial(best_thresholds, records, active, max_disagreement=budget), repeat)
        out.append(
            Timing(name, _loops(), "3 given ramps", budget, wall, processor, plan.active, plan.saving, gap=0.0, nodes=0)
        )
    return out


def placement(name: str, records: Records, *, max_ramps: int = 3, repeat: int, **options: Any) -> list[Timing]:
    """Placement of at most ``max_ramps`` ramps: to a gap of half a point, and to the end."""
    out = []
    for budget in (0.01, 0.02):
        for task, gap in (("gap 0.5 points", 0.005), ("optimal", 0.0)):
            search = partial(best_plan, records, max_disagreement=budget, max_ramps=max_ramps, max_gap=gap, **options)
            wall, processor, found = _timed(search, repeat)
            title = f"<= {max_ramps} of {records.n_ramps}, {task}"
            out.append(_placed(name, title, budget, wall, processor, found))
    return out


def anytime(name: str, records: Records, *, deadlines: tuple[float, ...] = (0.1, 0.3, 1.0)) -> list[Timing]:
    """What a deadline leaves: the best plan by then and its proven gap."""
    out = []
    for deadline in deadlines:
        over = partial(_over, time.perf_counter() + deadline)
        wall, processor, found = _timed(partial(best_plan, records, max_disagreement=0.01, should_stop=over), 1)
        title = f"<= 3 of {records.n_ramps}, stopped at {deadline} s"
        out.append(_placed(name, title, 0.01, wall, processor, found))
    return out


def _placed(name: str, task: str, budget: float, wall: float, processor: float, found: SearchResult) -> Timing:  # noqa: PLR0917
    plan = found.plan
    return Timing(name, _loops(), task, budget, wall, processor, plan.active, plan.saving, found.gap, found.nodes)


def _over(deadline: float) -> bool:
    return time.perf_counter() > deadline


def _loops() -> str:
    return "compiled" if PACE.compiled(0) else "numpy"


def run(files: list[Path], *, repeat: int, large: bool) -> list[Timing]:
    installed, PACE.installed = PACE.installed, False
    out = _all(files, repeat=repeat, large=False)
    PACE.installed = installed
    if installed:
        PACE.hurry()
        best_plan(synthetic(100, 4), max_disagreement=0.1)  # loads them
        out += _all(files, repeat=repeat, large=large)
    return out


def _all(files: list[Path], *, repeat: int, large: bool) -> list[Timing]:
    recorded = {file.stem: replace(load_records(file), profile=None) for file in files}
    recorded["synthetic 10,000 x 27"] = synthetic(10_000, 27)
    out = []
    for name, records in recorded.items():
        out += thresholds(name, records, repeat=5 * repeat)
        out += placement(name, records, repeat=repeat)
        out += anytime(name, records)
    if large:
        out += placement(
            "synthetic 10,000 x 40", synthetic(10_000, 40, ramp_share=0.004), max_ramps=6, repeat=1, node_limit=20_000
        )
        out += placement("synthetic 1,000,000 x 12", synthetic(1_000_000, 12), repeat=1)
    return out


def _timed(search: Callable[[], Found], repeat: int) -> tuple[float, float, Found]:
    """Least wall and processor seconds, and what was found."""
    walls, processors = [], []
    for _ in range(repeat):
        wall, processor = time.perf_counter(), time.process_time()
        found = search()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return min(walls), min(processors), found


def show(timings: list[Timing]) -> str:
    header = (
        f"{'records':<26}{'loops':<10}{'search':<34}{'budget':>7}{'wall ms':>10}{'cpu ms':>9}"
        f"{'saving %':>10}{'gap':>7}{'nodes':>9}  ramps"
    )
    lines = [header]
    for t in timings:
        lines.append(
            f"{t.records:<26}{t.loops:<10}{t.task:<34}{t.budget:>7.1%}"
            f"{1e3 * t.wall_seconds:>10.1f}{1e3 * t.processor_seconds:>9.1f}"
            f"{100 * t.saving:>10.2f}{100 * t.gap:>7.2f}{t.nodes:>9}  {list(t.active)}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.npz")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also 6 of 40 ramps, and a million records")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    timings = run(arguments.files, repeat=arguments.repeat, large=arguments.large)
    print(json.dumps([asdict(t) for t in timings], indent=2) if arguments.json else show(timings))


if __name__ == "__main__":
    main()
