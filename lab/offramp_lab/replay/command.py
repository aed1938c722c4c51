"""The command and its options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from offramp_core.batching import BATCHING, check_name
from offramp_core.certify import SliceBudget
from offramp_core.certify.slices import check_slices
from offramp_core.errors import InvalidArgumentError, OfframpError
from offramp_core.plan import Execution
from offramp_core.precision import EXACT
from offramp_core.records import Records
from offramp_lab.policies import POLICIES, NamedPolicy, Objective, policy
from offramp_lab.policies.planned import GOALS, pricing_of
from offramp_lab.replay.arrivals import parse_arrivals
from offramp_lab.replay.load import load_records
from offramp_lab.replay.measure import Queueing, Work, replay_file, run_draws, simulate_queues
from offramp_lab.replay.report import FileResult, show, to_mapping
from offramp_lab.tokens.command import Draws, holds_tokens, print_tokens, replay_tokens
from offramp_lab.tokens.judged import Limits as TokenLimits
from offramp_lab.tokens.records import LOSSES, Loss
from offramp_lab.tokens.rules import TOKEN_POLICIES

INVALID_INPUT = 2
EXECUTIONS: tuple[Execution, ...] = ("Auto", "ResultsOnly", "ComputeSaving")


# The options, in the order of the help.
RecordsArgument = Annotated[
    list[Path], typer.Argument(metavar="FILE.npz…", help="Records files (docs: public contracts).")
]
BudgetOption = Annotated[float, typer.Option(help="Allowed share of answers that differ from the full model.")]
ConfidenceOption = Annotated[float, typer.Option(help="How sure a certificate must be that a plan keeps it.")]
PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help=f"Policy to run; repeat for several: {', '.join(POLICIES)}; on files of tokens: "
        f"{', '.join(TOKEN_POLICIES)}. All when left out.",
    ),
]
MaxRampsOption = Annotated[int, typer.Option(help="At most so many active ramps, 0 to 6.")]
MaxOverheadOption = Annotated[float, typer.Option(help="Worst-case time all active ramps may add, as a share.")]
PrecisionOption = Annotated[
    str, typer.Option(help="auto: any precision of the backbone that was recorded; exact: fp32 alone.")
]
BatchSizeOption = Annotated[
    int | None, typer.Option(help="Batch size that prices exits and that online policies see; default the smallest.")
]
GoalOption = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="|".join(GOALS),
        help="What `exact` minimizes: mean time to answer, its 95th percentile, or the engine's busy time (needs "
        "costs by batch size).",
    ),
]
SliceBudgetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slice-budget",
        metavar="ID=SHARE",
        help="Also allow requests of this slice (records: `slice`) only this share, as in 3=0.005; repeat for several. "
        "`exact` keeps it on its records, `certified` proves it.",
    ),
]
ArrivalsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        help="Also simulate a queue: a .csv or .npz of arrival times in seconds, or poisson:RATE, fixed:RATE, "
        "bursts:RATE; repeat for several.",
    ),
]
LoadOption = Annotated[
    float | None, typer.Option(help="Scale arrivals to this share of one worker's capacity without exits; 0.7 is 70 %.")
]
BatchingNamesOption = Annotated[
    list[str] | None,
    typer.Option("--batching", metavar="NAME", help=f"How batches form: {', '.join(BATCHING)}; repeat for several."),
]
ExecutionOption = Annotated[str, typer.Option(help=f"{', '.join(EXECUTIONS)}.")]
SloOption = Annotated[
    float | None,
    typer.Option(help="Seconds after which an answer is late; default twice a lone request, at least 0.01."),
]
MOST_COUNTED = 1_000_000
DrawsOption = Annotated[
    int,
    typer.Option(help="Also draw so many tuning sets and streams from each file, the population, with replacement."),
]
TuneRowsOption = Annotated[int | None, typer.Option(help="Rows of a drawn tuning set; default half the file.")]
SeedOption = Annotated[int, typer.Option(help="Of draws and generated arrivals.")]
JobsOption = Annotated[int, typer.Option(help="Processes that work on draws.", min=1)]
LossOption = Annotated[
    str,
    typer.Option(
        metavar="|".join(LOSSES),
        help="Files of tokens: an answer loses 1 where any of its tokens differs, or the share that does.",
    ),
]
PlotsOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Write pictures (PNG) into this folder.")]
JsonOutputOption = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, a list for several files; shares are fractions.")
]

EXAMPLES = (
    "offramp replay bundle/records.npz --budget 0.01",
    "offramp replay scores.npz --policy certified --policy greedy --arrivals poisson --load 0.7 --batching tf-serving",
    "offramp replay scores.npz --policy exact --policy certified --slice-budget 0=0.005 --slice-budget 7=0.02",
    "offramp replay scores.npz --policy exact --objective busy --batch-size 16",
    "offramp replay scores.npz --draws 200 --jobs 2 --plots pictures",
    "offramp replay scores.npz --json | jq '.policies[] | {name, saving, disagreement}'",
)


def replay(
    records: RecordsArgument,
    *,
    budget: BudgetOption = 0.01,
    confidence: ConfidenceOption = 0.95,
    policies: PoliciesOption = None,
    max_ramps: MaxRampsOption = 3,
    max_overhead: MaxOverheadOption = 0.05,
    precision: PrecisionOption = "auto",
    batch_size: BatchSizeOption = None,
    goal: GoalOption = "mean",
    slice_budgets: SliceBudgetsOption = None,
    arrivals: ArrivalsOption = None,
    load: LoadOption = None,
    batching_names: BatchingNamesOption = None,
    execution: ExecutionOption = "Auto",
    slo: SloOption = None,
    draws: DrawsOption = 0,
    tune_rows: TuneRowsOption = None,
    seed: SeedOption = 0,
    jobs: JobsOption = 1,
    loss: LossOption = "answer",
    plots: PlotsOption = None,
    json_output: JsonOutputOption = False,
) -> None:
    """Replay tuning policies on recorded scores and compare what they save.

    Rows are in the order of `time`, or of the file if it has none. Policies search and certify on the older half.
    Saving and disagreement are measured on the newer half, which no policy has seen.

    With `--arrivals` the newer half also queues for one worker, with ramps and regrouping. With `--draws` the file is
    the whole population: calibration sets and streams are drawn from it, and a plan's true rate is that on all rows.

    With `--slice-budget` a plan is certified only if it passes for all requests and for each of these slices; the tests
    share the error allowance evenly, so more slices need more records. With slices, or another objective, `exact`
    searches fp32 only. Published policies ignore slices and objectives.

    A file with an array `answer` holds tokens, one row each, and `answer` says which answer a token belongs to. For
    such files policies choose a threshold for the exits of tokens, the budget is the mean loss of answers, and of the
    other options only `--draws`, `--tune-rows` (answers) and `--seed` apply.
    """
    with _errors(plots):
        drawing = Drawing(draws, tune_rows, seed, jobs)
        _check_counts(batch_size, drawing)
        if any(of_tokens := [holds_tokens(path) for path in records]):
            token_limits, lost = _token_limits(budget, confidence, loss, alone=all(of_tokens))
            drawn = Draws(draws, tune_rows, seed)
            files = [replay_tokens(path, policies, lost, token_limits, drawn) for path in records]
            print_tokens(files, token_limits, as_json=json_output)
            return
        queueing = _queueing(arrivals or [], batching_names or ["offramp"], execution, load=load, slo=slo)
        limits = Limits(budget, confidence, max_ramps, max_overhead)
        objective = _objective(limits, batch_size or 1, precision=precision, goal=goal, slices=slice_budgets or [])
        results = _all_files(
            records, policies, objective, queueing, drawing=drawing, batch_size=batch_size, plots=plots
        )
    _print(results, objective, queueing, as_json=json_output)
    if plots is not None:
        _plot(results, objective, plots)


def _token_limits(budget: float, confidence: float, loss: str, *, alone: bool) -> tuple[TokenLimits, Loss]:
    _check_shares(budget, confidence)
    known = next((name for name in LOSSES if name == loss), None)
    if known is None:
        raise InvalidArgumentError(f"--loss {loss} is unknown; choose from {', '.join(LOSSES)}")
    if not alone:
        raise InvalidArgumentError("answer is in some of the files only; replay files of tokens by themselves")
    return TokenLimits(budget, confidence), known


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep."""

    budget: float  #: allowed share of answers that differ from the full model
    confidence: float  #: how sure a certificate must be of that
    max_ramps: int
    max_overhead: float  #: share of the model's time that all active ramps may add


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tuning sets and streams are drawn from each file."""

    draws: int
    tune_rows: int | None  #: half the file when it is left out
    seed: int
    jobs: int


@contextmanager
def _errors(plots: Path | None) -> Iterator[None]:
    """What goes wrong within ends the command with an error and a hint."""
    try:
        yield
    except OfframpError as error:
        _fail(error)
    except OSError as error:
        _fail(InvalidArgumentError(f"--plots {plots} cannot be made: {error.strerror or error}"))


def _all_files(
    paths: Sequence[Path],
    names: Sequence[str] | None,
    objective: Objective,
    queueing: Queueing,
    *,
    drawing: Drawing,
    batch_size: int | None,
    plots: Path | None,
) -> list[FileResult]:
    named = [policy(name) for name in dict.fromkeys(names or POLICIES)]
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    results = []
    for path in paths:
        pool = load_records(path, batch_size=batch_size)
        pricing_of(pool, objective)
        _check_slices(path, pool, objective.slices)
        chosen, left_out = _suitable(named, pool, insist=bool(names))
        result = _one_file(path, pool, chosen, objective, queueing, drawing=drawing)
        results.append(replace(result, left_out=tuple(left_out)))
    return results


def _print(results: Sequence[FileResult], objective: Objective, queueing: Queueing, *, as_json: bool) -> None:
    if as_json:
        mappings = [to_mapping(result, objective) for result in results]
        print(json.dumps(mappings[0] if len(mappings) == 1 else mappings, indent=2, allow_nan=False))
    else:
        for result in results:
            show(result, objective, queueing)


def _one_file(
    path: Path,
    pool: Records,
    chosen: Sequence[NamedPolicy],
    objective: Objective,
    queueing: Queueing,
    *,
    drawing: Drawing,
) -> FileResult:
    steps = len(chosen) * (1 + len(queueing.arrivals) * len(queueing.batching)) + drawing.draws
    with _progress() as progress:
        task = progress.add_task(path.name, total=steps)

        def advance(what: str) -> None:
            progress.update(task, description=f"{path.name}: {what}", advance=1)

        stream, results = replay_file(pool, chosen, objective, advance=advance)
        simulate_queues(stream, results, queueing, seed=drawing.seed, advance=advance)
        if drawing.draws:
            progress.update(task, description=f"{path.name}: {drawing.draws} draws")
            half = max(1, len(pool) // 2)
            work = Work(pool, tuple(p.name for p in chosen), objective, drawing.seed, drawing.tune_rows or half, half)
            drawn = run_draws(work, drawing.draws, jobs=drawing.jobs, advance=lambda n: progress.advance(task, n))
            for result in results:
                result.drawn = drawn[result.policy.name]
    return FileResult(path, pool, stream, results)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _suitable(named: Sequence[NamedPolicy], pool: Records, *, insist: bool) -> tuple[list[NamedPolicy], list[str]]:
    """Policies that these records can show, and why not the others. One that was asked for by name and cannot be shown
    is an error."""
    chosen, left_out = [], []
    for each in named:
        reason = each.refusal(pool)
        if reason is None:
            chosen.append(each)
        elif insist:
            raise InvalidArgumentError(f"policy {each.name!r} cannot be replayed: {reason}")
        else:
            left_out.append(f"{each.name}: {reason}")
    return chosen, left_out


def _objective(limits: Limits, batch_size: int, *, precision: str, goal: str, slices: Sequence[str]) -> Objective:
    _check_shares(limits.budget, limits.confidence)
    if precision not in ("auto", "exact"):
        raise InvalidArgumentError(f"--precision is {precision}; give auto or exact")
    allowed = None if precision == "auto" else (EXACT,)
    if goal not in GOALS:
        raise InvalidArgumentError(f"--objective {goal} is unknown; choose from {', '.join(GOALS)}")
    return Objective(
        limits.budget,
        limits.confidence,
        limits.max_ramps,
        limits.max_overhead,
        batch_size,
        allowed,
        goal,
        tuple(_slice_budget(text) for text in slices),
    )


def _check_shares(budget: float, confidence: float) -> None:
    for name, value in (("--budget", budget), ("--confidence", confidence)):
        if not 0 < value < 1:
            raise InvalidArgumentError(f"{name} is {value}; it must be a share between 0 and 1, such as 0.01 for 1 %")


def _check_slices(path: Path, pool: Records, slices: Sequence[SliceBudget]) -> None:
    check_slices(pool, slices)
    for wanted in slices:
        if not np.any(pool.slice_id == wanted.slice_id):
            raise InvalidArgumentError(
                f"--slice-budget names slice {wanted.slice_id}; no record of {path} belongs to it"
            )


def _slice_budget(text: str) -> SliceBudget:
    label, _, share = text.partition("=")
    try:
        return SliceBudget(int(label), float(share))
    except ValueError as error:
        raise InvalidArgumentError(
            f"--slice-budget {text} is none; give a slice id and a share between 0 and 1, such as 3=0.005"
        ) from error


def _queueing(
    specs: Sequence[str], names: Sequence[str], execution: str, *, load: float | None, slo: float | None
) -> Queueing:
    for name, value in (("--load", load), ("--slo", slo)):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidArgumentError(f"{name} is {value}; it must be a positive number")
    if execution not in EXECUTIONS:
        raise InvalidArgumentError(f"--execution {execution} is unknown; choose from {', '.join(EXECUTIONS)}")
    for name in names:
        check_name(name)
    parsed = tuple(parse_arrivals(spec) for spec in specs)
    for each in parsed:
        if each.recorded is None and each.rate is None and load is None:
            raise InvalidArgumentError(f"--arrivals {each.spec} has no rate; give {each.kind}:RATE or --load")
    return Queueing(parsed, tuple(dict.fromkeys(names)), execution, load, slo)


def _check_counts(batch_size: int | None, drawing: Drawing) -> None:
    counts = (
        ("--batch-size", batch_size, 1),
        ("--draws", drawing.draws, 0),
        ("--tune-rows", drawing.tune_rows, 1),
        ("--seed", drawing.seed, 0),
    )
    for name, value, low in counts:
        if value is not None and not low <= value <= MOST_COUNTED:
            raise InvalidArgumentError(f"{name} is {value}; it must be {low} to {MOST_COUNTED:,}")


def _plot(results: Sequence[FileResult], objective: Objective, folder: Path) -> None:
    try:
        from offramp_lab.replay.plots import draw_all
    except ImportError as error:
        _fail(InvalidArgumentError(f"--plots needs matplotlib ({error}); pip install 'offramp[replay]'"))
    for path in draw_all(results, objective, folder):
        print(f"plot: {path}", file=sys.stderr)


_HINTS = (
    ("policy", "run `offramp replay --help` for the policies there are"),
    ("--arrivals", "arrivals are a column of rising times in seconds, or poisson:50 for 50 requests a second"),
    ("arrivals", "arrivals are a column of rising times in seconds, or poisson:50 for 50 requests a second"),
    ("batching", "run `offramp replay --help` for the batching policies there are"),
    ("--budget", "shares are fractions: 0.01 is 1 %"),
    ("--confidence", "shares are fractions: 0.01 is 1 %"),
    ("--", "run `offramp replay --help` for the allowed range"),
    ("max_", "run `offramp replay --help` for the allowed range"),
)
_RECORDS_HINT = (
    "a records file holds uncertainty [N,R], prediction [N,R], final [N], segment_seconds [R+1], ramp_seconds [R]"
)


def _fail(error: OfframpError) -> NoReturn:
    text = " ".join(str(error).split())
    hint = next((hint for start, hint in _HINTS if text.startswith(start)), _RECORDS_HINT)
    print(f"error: {text}\nhint: {hint}", file=sys.stderr)
    raise typer.Exit(INVALID_INPUT) from error
