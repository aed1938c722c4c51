"""``offramp replay``: what would each tuning policy have done with these recorded scores?"""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError, OfframpError
from offramp_core.policies import POLICIES, Objective, Outcome, policy, replay_halves
from offramp_core.records import Records, records_from_arrays

INVALID_INPUT = 2
ARRAYS = frozenset(
    {"uncertainty", "prediction", "final", "reference", "segment_seconds", "ramp_seconds", "slice", "time", "stream"}
    | {"batch_size", "regroup_seconds"}
)


def replay(
    records: Annotated[Path, typer.Argument(metavar="FILE.npz", help="Records file (docs: public contracts).")],
    *,
    budget: Annotated[float, typer.Option(help="Allowed share of answers that differ from the full model.")] = 0.01,
    confidence: Annotated[float, typer.Option(help="How sure a certificate must be that a plan keeps it.")] = 0.95,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help=f"Policy to run; repeat for several: {', '.join(POLICIES)}. All when left out.",
        ),
    ] = None,
    max_ramps: Annotated[int, typer.Option(help="At most so many active ramps, 0 to 6.")] = 3,
    max_overhead: Annotated[float, typer.Option(help="Worst-case time all active ramps may add, as a share.")] = 0.05,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout; shares are fractions.")] = False,
) -> None:
    """Replay tuning policies on recorded scores and compare what they save.

    Rows are taken in order of `time` (of the file without it). The older half is for the policies: they search and certify on it.
    Saving and disagreement are measured on the newer half, which none of them has seen.

    Examples:

      offramp replay bundle/records.npz --budget 0.01

      offramp replay scores.npz --budget 0.02 --confidence 0.99 --policy certified --policy greedy

      offramp replay scores.npz --json | jq '.policies[] | {name, saving, disagreement}'
    """
    try:
        objective = _objective(budget=budget, confidence=confidence, max_ramps=max_ramps, max_overhead=max_overhead)
        for name in policies or ():
            policy(name)
        recorded = load_records(records)
        showable = [name for name, named in POLICIES.items() if named.refusal(recorded) is None]
        names = list(dict.fromkeys(policies or showable))
        chosen = [policy(name) for name in names]
        tune, report = replay_halves(recorded)
        outcomes: dict[str, Outcome] = {}
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
        ) as progress:
            task = progress.add_task("")
            for name, run in zip(names, chosen, strict=True):
                progress.update(task, description=f"{name} on {len(tune):,} records of {tune.n_ramps} ramps")
                outcomes[name] = run(tune, report, objective)
    except OfframpError as error:
        _fail(error)
    if json_output:
        print(json.dumps(to_mapping(records, len(recorded), objective, outcomes), indent=2, allow_nan=False))
    else:
        _show(objective, outcomes, n_tune=len(tune), n_report=len(report))


def load_records(path: Path) -> Records:
    """Read a records file; nothing in it is unpickled.

    Raises
    ------
    InvalidRecordsError
        It cannot be read, is no npz, or breaks the contract of records.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise InvalidRecordsError(f"{path} is not an .npz file")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays: dict[str, npt.NDArray[Any]] = {name: archive[name] for name in archive.files if name in ARRAYS}
    except OSError as error:
        raise InvalidRecordsError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError) as error:
        raise InvalidRecordsError(f"{path} does not hold plain arrays: {error}") from error
    return records_from_arrays(arrays)


def to_mapping(path: Path, n: int, objective: Objective, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The JSON of ``--json``, a public contract."""
    return {
        "records": str(path),
        "n": n,
        "budget": objective.budget,
        "confidence": objective.confidence,
        "policies": [_policy_mapping(name, outcome) for name, outcome in outcomes.items()],
    }


def _policy_mapping(name: str, outcome: Outcome) -> dict[str, Any]:
    certificate = outcome.certificate
    return {
        "name": name,
        "active": list(outcome.active),
        "thresholds": [float(t) for t in outcome.thresholds],
        "saving": outcome.saving,
        "disagreement": outcome.disagreement,
        "certificate": None
        if certificate is None
        else {"n": certificate.n, "k": certificate.k, "p_value": certificate.p_value, "method": certificate.method},
    }


def _objective(*, budget: float, confidence: float, max_ramps: int, max_overhead: float) -> Objective:
    for name, value in (("--budget", budget), ("--confidence", confidence)):
        if not 0 < value < 1:
            raise InvalidArgumentError(f"{name} is {value}; it must be a share between 0 and 1, such as 0.01 for 1 %")
    return Objective(budget, confidence, max_ramps, max_overhead)


def _show(objective: Objective, outcomes: dict[str, Outcome], *, n_tune: int, n_report: int) -> None:
    table = Table(
        title=f"Budget {objective.budget:.2%} disagreement, confidence {objective.confidence:.1%}",
        caption=f"Tuned on the older {n_tune:,} records; saving and disagreement on the newer {n_report:,}, used for neither search nor certificate.",
    )
    table.add_column("policy")
    for column in ("saving", "disagreement"):
        table.add_column(column, justify="right")
    table.add_column("plan (ramp < threshold)")
    table.add_column("certificate")
    for name, outcome in outcomes.items():
        over = outcome.disagreement > objective.budget
        table.add_row(
            name,
            f"{outcome.saving:.1%}",
            f"[red]{outcome.disagreement:.2%} !" if over else f"{outcome.disagreement:.2%}",
            _plan_text(name, outcome),
            _certificate_text(outcome),
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(_meaning(objective, outcomes))


def _plan_text(name: str, outcome: Outcome) -> str:
    if not outcome.active:
        return "each input its own" if name == "oracle" else "exits off"
    return "  ".join(f"{ramp}<{float(t):.4g}" for ramp, t in zip(outcome.active, outcome.thresholds, strict=True))


def _certificate_text(outcome: Outcome) -> str:
    if outcome.certificate is None:
        return "-"
    return f"{outcome.certificate.k} of {outcome.certificate.n:,} differ, p = {outcome.certificate.p_value:.3f}"


def _meaning(objective: Objective, outcomes: dict[str, Outcome]) -> str:
    """One or two sentences on what the table says."""
    lines = []
    proven = outcomes.get("certified")
    if proven is not None and proven.certificate is not None:
        lines.append(
            f"The certified plan saves {proven.saving:.1%} of the model's time, and at most {objective.budget:.2%} of answers change "
            f"with {objective.confidence:.0%} confidence."
        )
    elif proven is not None:
        lines.append(
            "Nothing could be certified on so few records (or saves nothing), so the certified answer is exits off."
        )
    over = [name for name, outcome in outcomes.items() if outcome.disagreement > objective.budget]
    if over:
        lines.append(f"Over budget on the newer half (!): {', '.join(over)}.")
    return "\n".join(lines)


_HINTS = (
    ("policy", "run `offramp replay --help` for the policies there are"),
    ("--", "shares are fractions: 0.01 is 1 %"),
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
