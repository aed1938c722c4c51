"""The engine alone, no HTTP: mean time of a plan against the fastest exact fp32 executor without exits, and without
audits.

    python -m bench.engine [NAME...] [--pairs 9] [--seconds 60] [--out build/bench/engine.json]

Names are those of :mod:`bench.subjects`, or a bundle's folder with ``--held-out FILE.npz`` (``x``, rows that
``prepare`` has not seen). The bundle's ramps are scored on held-out rows. The first half finds and certifies plans, the
other half is served. Plans are priced by what the pieces cost *now*. Reported apart:

    certified     core tuning on the first half
    uncertified   the exact optimum on the first half, at the largest budget of which the second half disagrees with at
    most 1 % exit-free     the best precision alone, where the bundle has another one

Plans are found anew for every batch size. The product serves one plan at all sizes, priced at batch size 1: at the
others, its rows are the ``certified`` ones ``, of batch 1``.

Every pair runs the same batches with and without exits in turn, so that neighbours hit both alike; the ratio of a pair
is one number, reported are the median and the range over pairs. The clock is the thread's processor time, which waiting
for a core does not lengthen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench.provenance import provenance
from bench.subjects import SUBJECTS, make_subject
from offramp_core.bundle import BatchProfile, ChainProfile, Profile, TensorSpec, column_arrays, profile_arrays
from offramp_core.columns import chain
from offramp_core.costs import CostTable
from offramp_core.evaluate import evaluate
from offramp_core.execution import Regrouping
from offramp_core.plan import Plan
from offramp_core.precision import EXACT, Precision
from offramp_core.records import Records, records_from_arrays
from offramp_core.search.placement import best_plan
from offramp_core.task import top_labels
from offramp_core.tuning import Proposed, TuningRequest, tune
from offramp_core.uncertainty import ExitTest, exit_test
from offramp_worker.bundle.lengths import by_length, pad_rows, typical_batch
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.execute import Leave, Runnable, run_exact, run_stages
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.measuring.pricing import Priced, opener
from offramp_worker.prepare.measuring.profiling import Job, clock_of, jobs_of, time_jobs

BATCHES = (1, 4, 16, 32)
BUDGET = 0.01
MAX_OVERHEAD = 0.05
# Shares of the budget that the uncertified plan may spend in the search. More than all of it, too: either half may be
# the harder one, above all for a lower precision, whose own disagreement is there before any exit.
BUDGETS_TRIED = tuple(share / 10 for share in range(16, 0, -1))
ROWS_PER_PAIR = {1: 200, 4: 240, 16: 320, 32: 384}
SECONDS_PER_PAIR = 1.0  # of the exact executor, about; a dear model has fewer rows in a pair
BATCHES_PER_PAIR = 4  # at least: one batch says how many of its rows leave
SCORE_CHUNK = 100
OF_ONE = ", of batch 1"
Array = npt.NDArray[Any]
LabelArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Served:
    """A plan as the engine runs it at one batch size."""

    stages: tuple[Runnable, ...]
    tests: Mapping[int, ExitTest]
    regrouping: Regrouping

    def run(self, x: Array) -> Iterator[Leave]:
        return run_stages(self.stages, x, tests=self.tests, may_leave=None, regroups=self.regrouping)

    def nobody_leaves(self) -> Served:
        """The same work for rows that take no exit."""
        return replace(
            self, tests={j: replace(test, leave_above=np.inf, stay_below=np.inf) for j, test in self.tests.items()}
        )


@dataclass(frozen=True, slots=True)
class Ratio:
    """A plan's time over the exact executor's, over pairs."""

    median: float
    low: float
    high: float
    pairs: int


def measured_profile(bundle: Bundle, x: Array, *, seconds: float) -> Profile:
    """What the bundle's pieces cost now, at the batch sizes of this bench; ``seconds`` are spent, about."""
    chains: dict[Precision, list[tuple[float, tuple[float, ...], tuple[float, ...], float]]] = {}
    of_columns = [c.precision for c in bundle.columns]
    for precision, model in bundle.backbones.items():
        columns = chain(of_columns, precision)
        ramps = [j for j in columns if bundle.heads[j] is not None]
        heads = [head for j in ramps if (head := bundle.heads[j]) is not None]
        entry = bundle.manifest.inputs[0].name
        tensors = list(dict.fromkeys(head.source for head in heads if head.source != entry))
        sides = {bundle.columns[j].id: side for j, side in bundle.side_models.items()}
        priced = Priced(
            model,
            heads,
            tensors,
            shapes=bundle.shapes,
            open_session=opener(threads=1, device=bundle.device),
            sides=sides,
            device=bundle.device,
        )
        share = seconds / len(BATCHES) / len(bundle.backbones)
        spec = bundle.manifest.inputs[0]
        chains[precision] = [
            _chain_seconds(priced, bundle, columns, tensors, typical_batch(x, spec, size=size), seconds=share)
            for size in BATCHES
        ]
    batches = []
    for number, size in enumerate(BATCHES):
        exact, segments, ramps_, regroup = chains[EXACT][number]
        others = {p: ChainProfile(c[number][1], c[number][2]) for p, c in chains.items() if p != EXACT}
        batches.append(BatchProfile(size, exact, segments, ramps_, regroup, others))
    return Profile(bundle.device.executor, 1, tuple(batches))


def _chain_seconds(
    priced: Priced, bundle: Bundle, columns: Sequence[int], tensors: Sequence[str], x: Array, *, seconds: float
) -> tuple[float, tuple[float, ...], tuple[float, ...], float]:
    runs = priced.at(x)
    took = time_jobs(jobs_of(runs), threads=1, seconds=seconds, device=bundle.device)
    raw = np.array([took[f"segment {k}"] for k in range(len(runs.segments))])
    cut = max(0.0, float(raw.sum()) - took["exact"]) / max(1, len(tensors))
    reached = np.append(0.0, np.cumsum(raw)[:-1] * took["exact"] / raw.sum())
    at, ramps = [], []
    for j in columns:
        head = bundle.heads[j]
        behind = head is not None and head.source in tensors
        at.append(reached[1 + tensors.index(head.source)] if behind and head is not None else 0.0)
        ramps.append(took[f"head {bundle.columns[j].id}"] + (cut if behind else 0.0))
    segments = np.diff([0.0, *at, took["exact"]])
    regroups = [took[f"regroup {k}"] for k in range(len(runs.regroups))]
    return took["exact"], tuple(segments), tuple(ramps), float(np.median(regroups)) if regroups else 0.0


def scored(sessions: Sessions, bundle: Bundle, x: Array, profile: Profile) -> dict[str, Array]:
    """The arrays of a records file of rows."""
    spec = bundle.manifest.inputs[0]
    chunks = list(by_length(x, spec, size=SCORE_CHUNK))
    parts = [sessions.tapped(pad_rows([x[rows]], spec)) for rows in chunks]
    back = np.argsort(np.concatenate(chunks))
    reference = top_labels(np.concatenate([part.logits for part in parts])[back])
    arrays: dict[str, Array] = {
        "uncertainty": np.concatenate([part.uncertainty for part in parts])[back],
        "prediction": np.concatenate([part.prediction for part in parts])[back],
        "final": reference,
        "reference": reference,
        **profile_arrays(profile),
    }
    return arrays | (column_arrays(bundle.columns) if len(bundle.backbones) > 1 else {})


def serve_plan(sessions: Sessions, bundle: Bundle, plan: Plan, profile: Profile) -> Served:
    """The plan as a worker prepares it."""
    columns = chain([c.precision for c in bundle.columns], plan.precision)
    index = {bundle.columns[j].id: j for j in columns}
    active = {index[ramp.id]: float(ramp.threshold) for ramp in plan.ramps if ramp.threshold > 0}
    stages = sessions.stages(sorted(active), plan.precision) or (sessions.exact_stage(),)
    groups = [[columns.index(j) for j in stage.ramps] for stage in stages[:-1]]
    table = CostTable(profile.of(plan.precision), sizes=range(max(BATCHES) + 1))
    regrouping = Regrouping.of(table.stage_seconds(groups), table.regroup.tolist())
    tests = {j: exit_test(threshold, bundle.quantiles[j]) for j, threshold in active.items()}
    return Served(stages, tests, regrouping)


class Runs(Protocol):
    """What answers batches."""

    def run(self, x: Array) -> Iterator[Leave]: ...


def compare(
    exact: Runnable, served: Runs, x: Array, spec: TensorSpec, *, batch: int, pairs: int, clock: Callable[[], float]
) -> tuple[Ratio, LabelArray]:
    """Time the plan against the exact executor batch by batch in turn; also what it answers to each row of ``x``."""
    answers = np.full(len(x), -1, dtype=np.int64)
    ratios = []
    start = clock()
    answer(run_exact(exact, pad_rows([np.ascontiguousarray(x[:batch])], spec)), batch)
    size = min(ROWS_PER_PAIR[batch], batch * max(BATCHES_PER_PAIR, round(SECONDS_PER_PAIR / (clock() - start))))
    for pair in range(-1, pairs):  # the first one warms up
        rows = np.arange(max(pair, 0) * size, (max(pair, 0) + 1) * size) % len(x)
        spent = np.zeros(2)
        for begin in range(0, size - batch + 1, batch):
            some = rows[begin : begin + batch]
            batch_x = pad_rows([np.ascontiguousarray(x[some])], spec)
            for which in (0, 1) if (begin // batch + pair) % 2 else (1, 0):
                start = clock()
                said = answer(served.run(batch_x) if which else run_exact(exact, batch_x), batch)
                spent[which] += clock() - start
                if which:
                    answers[some] = said
        if pair >= 0:
            ratios.append(spent[1] / spent[0])
    return Ratio(float(np.median(ratios)), min(ratios), max(ratios), pairs), answers


def answer(leaves: Iterator[Leave], n: int) -> LabelArray:
    """What a batch of n rows is answered."""
    said = np.empty(n, dtype=np.int64)
    for leave in leaves:
        said[leave.rows] = top_labels(leave.logits)
    return said


def answers_of(served: Served, x: Array, spec: TensorSpec, *, batch: int) -> LabelArray:
    """What the plan answers to every row."""
    said = np.empty(len(x), dtype=np.int64)
    for begin in range(0, len(x), batch):
        some = pad_rows([np.ascontiguousarray(x[begin : begin + batch])], spec)
        said[begin : begin + batch] = answer(served.run(some), len(some))
    return said


def plans(first: Records, second: Records, bundle: Bundle) -> dict[str, Plan | str]:
    """The plans of one batch size by what they may do, or why there is none."""
    found: dict[str, Plan | str] = {}
    precisions: tuple[Precision, ...] = tuple(bundle.backbones)
    for name, allowed in (("fp32", (EXACT,)), ("any", precisions)):
        if name == "any" and len(precisions) == 1:
            continue
        found[f"{name} certified"] = _certified(first, bundle, allowed)
        found[f"{name} uncertified"] = _uncertified(first, second, bundle, allowed)
    digests = bundle.manifest.backbone_digest, bundle.manifest.ramp_set_digest
    for precision in precisions[1:]:
        view = second.at(precision)
        rate = 1 - float(view.final_agrees.mean())
        plan = Plan(*digests, (), precision, "ComputeSaving")
        found[f"{precision} exit-free"] = plan if rate <= BUDGET else f"disagrees with {rate:.2%} of the rows"
    return found


def _unlike(own: Mapping[str, Plan | str], for_all: Mapping[str, Plan | str]) -> dict[str, Plan | str]:
    """Plans for all batch sizes that are other ones than this size's own."""
    return {
        name: plan
        for name, plan in for_all.items()
        if isinstance(plan, Plan) and plan != own[name.removesuffix(OF_ONE)]
    }


def request_of(bundle: Bundle, precisions: tuple[Precision, ...]) -> TuningRequest:
    """What is asked of a plan for one worker."""
    ids = tuple(bundle.columns[j].id for j in chain([c.precision for c in bundle.columns], EXACT))
    manifest = bundle.manifest
    return TuningRequest(
        max_disagreement=BUDGET,
        delta=0.05,
        test_index=1,
        ramp_ids=ids,
        backbone_digest=manifest.backbone_digest,
        ramp_set_digest=manifest.ramp_set_digest,
        max_overhead=MAX_OVERHEAD,
        execution="ComputeSaving",
        precisions=precisions,
    )


def _certified(first: Records, bundle: Bundle, precisions: tuple[Precision, ...]) -> Plan | str:
    outcome = tune(first, request_of(bundle, precisions))
    return outcome.plan if isinstance(outcome, Proposed) else str(outcome)


def _uncertified(first: Records, second: Records, bundle: Bundle, precisions: tuple[Precision, ...]) -> Plan | str:
    """The best plan on the first half whose disagreement on the second one is within the budget."""
    request = request_of(bundle, precisions)
    best: tuple[float, Plan] | None = None
    for precision in precisions:
        a, b = first.at(precision), second.at(precision)
        for share in BUDGETS_TRIED:
            plan = best_plan(a, max_disagreement=BUDGET * share, max_overhead=MAX_OVERHEAD).plan
            seen = evaluate(b, plan.active, plan.thresholds)
            if seen.disagreement <= BUDGET:
                if best is None or seen.saving > best[0]:
                    best = seen.saving, request.subject(a).plan(plan.active, plan.thresholds)
                break
    return best[1] if best else "nothing saves within the budget"


def breakdown(
    sessions: Sessions, bundle: Bundle, plan: Plan, profile: Profile, x: Array, *, rounds: int
) -> dict[str, float]:
    """Microseconds of a single request that takes no exit: the exact executor, the plan's sessions, its decisions and
    all of it."""
    served = serve_plan(sessions, bundle, plan, profile).nobody_leaves()
    exact = sessions.exact_stage()

    def sessions_only() -> None:
        features = x
        for stage in served.stages:
            features, _ = stage.run(features, x)

    _, heads = served.stages[0].run(x, x)
    test = next(iter(served.tests.values()))
    jobs = {
        "exact": Job(lambda: exact.run(x, x)),
        "exact, answered": Job(lambda: answer(run_exact(exact, x), 1)),
        "sessions": Job(sessions_only),
        "decision": Job(lambda: test.leaves(*heads[0])),
        "all, answered": Job(lambda: answer(served.run(x), 1)),
    }
    for job in jobs.values():
        job.run()
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.thread_time()
            job.run()
            taken[name].append(1e6 * (time.thread_time() - start))
    return {name: round(float(np.median(values)), 1) for name, values in taken.items()}


def bench(bundle: Bundle, x: Array, *, pairs: int, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one bundle."""
    sessions = Sessions(bundle, threads=1)
    profile = measured_profile(bundle, x, seconds=seconds)
    tell(f"exact: {[round(1e3 * b.exact_seconds, 2) for b in profile.batches]} ms at {BATCHES}")
    half, spec, clock = len(x) // 2, bundle.manifest.inputs[0], clock_of(bundle.device, threads=1)
    rows: list[dict[str, Any]] = []
    answers: dict[str, LabelArray] = {}
    for_all: dict[str, Plan | str] = {}
    arrays = scored(sessions, bundle, x, profile)
    reference = arrays["reference"][half:]
    for batch in BATCHES:
        everything = records_from_arrays(arrays, batch_size=batch)
        first, second = everything.take(slice(0, half)), everything.take(slice(half, None))
        own = plans(first, second, bundle)
        for_all = for_all or {f"{name}{OF_ONE}": plan for name, plan in own.items() if name.endswith(" certified")}
        for name, plan in {**own, **_unlike(own, for_all)}.items():
            row: dict[str, Any] = {"batch": batch, "plan": name}
            if isinstance(plan, str):
                rows.append({**row, "none": plan})
                tell(f"batch {batch:2d} {name}: {plan}")
                continue
            served, exact = serve_plan(sessions, bundle, plan, profile), sessions.exact_stage()
            ratio, _ = compare(exact, served, x[half:], spec, batch=batch, pairs=pairs, clock=clock)
            worst, _ = compare(exact, served.nobody_leaves(), x[half:], spec, batch=batch, pairs=pairs, clock=clock)
            key = json.dumps([plan.to_mapping(), batch])
            if key not in answers:
                answers[key] = answers_of(served, x[half:], spec, batch=batch)
            wrong = float((answers[key] != reference).mean())
            row |= {
                "ramps": [{"id": r.id, "threshold": str(r.threshold)} for r in plan.ramps],
                "precision": plan.precision,
                "ratio": asdict(ratio),
                "worst": asdict(worst),
                "disagreement": wrong,
                "rows": len(reference),
            }
            if batch == 1 and served.tests:
                row["microseconds"] = breakdown(
                    sessions, bundle, plan, profile, typical_batch(x[half:], spec, size=1), rounds=300
                )
            rows.append(row)
            tell(
                f"batch {batch:2d} {name}: {ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f}), worst "
                f"{worst.median:.3f}, disagreement {wrong:.2%}, "
                f"{plan.precision} {[r.id for r in plan.ramps]} {row.get('microseconds', '')}"
            )
    return {"profile": {name: a.tolist() for name, a in profile_arrays(profile).items()}, "plans": rows}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench.engine", description="the engine alone, exits on against exact")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SUBJECTS)} (default: all), or a folder")
    parser.add_argument("--held-out", type=Path, metavar="NPZ", help="x: rows that prepare has not seen, for a folder")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rows", type=int, default=6000, help="held-out rows to use, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure what the pieces cost, about")
    parser.add_argument("--out", type=Path, default=Path("build/bench/engine.json"))
    options = parser.parse_args(arguments)
    for name in options.names or SUBJECTS:
        if name in SUBJECTS:
            subject = make_subject(name, Console(stderr=True))
            bundle, held_out = load_bundle(subject.bundle), subject.x
        elif options.held_out is None:
            parser.error(f"{name} is none of {', '.join(SUBJECTS)}; a bundle's folder needs --held-out")
        else:
            bundle, held_out = load_bundle(Path(name)), np.load(options.held_out)["x"]
        print(f"{name}: {len(held_out)} rows", flush=True)
        x = _some(held_out, options.rows)
        keep(
            options.out,
            bundle.manifest.name,
            bench(bundle, x, pairs=options.pairs, seconds=options.seconds, tell=lambda line: print(line, flush=True)),
        )
    return 0


def _some(x: Array, rows: int) -> Array:
    """At most so many, from both halves alike."""
    half = len(x) // 2
    return np.ascontiguousarray(np.concatenate([x[:half][: rows // 2], x[half:][: rows // 2]]))


def keep(path: Path, name: str, result: Mapping[str, Any]) -> None:
    """Put a result into a JSON file, beside those of other names, with when and on what it was measured."""
    kept = json.loads(path.read_text()) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**kept, name: {**result, "measured": provenance()}}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
