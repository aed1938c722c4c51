"""``offramp plan FILE``: which certified plans on which hardware, and how many workers, from figures in a file. Needs
no cluster and starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from offramp_cli.documents import documents
from offramp_cli.examples import with_examples
from offramp_cli.show.fleet import fleet_data, fleet_lines
from offramp_core.bundle import PROFILE_FILE
from offramp_core.errors import InvalidArgumentError, InvalidBundleError, InvalidSpecError, OfframpError
from offramp_core.fleet import LARGEST_BATCH, FleetDocument, parse_fleet, plan_fleet, saved_by_one_more
from offramp_core.precision import EXACT
from offramp_worker.bundle.profile import parse_profile

UNANSWERED = 1
INVALID_INPUT = 2
MOST_BYTES = 2 << 20  # a thousand services with three plans each


@with_examples("offramp plan fleet.yaml", "offramp plan fleet.yaml --json > plan.json")
def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Pools and services with their plans (YAML or JSON).")],
    *,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Say which certified plans should serve on which hardware, on how many workers, what that costs, and why.

    Exit code 0: all requests are answered in time. 1: some are not, and the table says how many. 2: the file
    is wrong; the message names the field.

    It computes from measured profiles alone: it reads no cluster and starts nothing.
    """
    try:
        document = load_fleet(file)
        planned = plan_fleet(document.services, document.pools, current=document.current)
        saved = saved_by_one_more(planned, document.services, document.pools, current=document.current)
    except OfframpError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(INVALID_INPUT) from None
    if json_output:
        print(json.dumps(fleet_data(document, planned, saved), indent=2, allow_nan=False))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for line in fleet_lines(document, planned, saved):
            console.print(line)
    raise typer.Exit(UNANSWERED if planned.unmet_rate > 0 else 0)


def load_fleet(path: Path) -> FleetDocument:
    """The document of a file; profiles that it names lie beside it.

    Raises
    ------
    InvalidSpecError
        The file cannot be read, or a field is wrong; the message begins with it.
    """
    try:
        found = [each.value for each in documents(_text(path))]
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        raise InvalidSpecError(str(path), f"is not YAML{line}: {getattr(error, 'problem', None) or error}") from error
    if len(found) != 1:
        raise InvalidSpecError(str(path), f"holds {len(found)} documents; write one with pools and services")
    return parse_fleet(found[0], profile=lambda name, precision: batch_seconds(path.parent / name, precision))


def batch_seconds(path: Path, precision: str) -> Mapping[int, float]:
    """Seconds of a whole batch by its size, of a bundle's profile; at a precision of the bundle where one is named.

    Raises
    ------
    InvalidArgumentError
        There is no such profile, or it does not price that precision.
    """
    path = path / PROFILE_FILE if path.is_dir() else path
    try:
        batches = parse_profile(_text(path).encode(), name=str(path)).batches
    except InvalidSpecError as error:
        raise InvalidArgumentError(str(error)) from error
    except InvalidBundleError as error:
        raise InvalidArgumentError(f"{error}; name what `offramp prepare` wrote") from error
    if batches[-1].batch_size > LARGEST_BATCH:
        raise InvalidArgumentError(f"{path} has batches larger than {LARGEST_BATCH}")
    if not precision or precision == EXACT:
        return {b.batch_size: b.exact_seconds for b in batches}
    known = sorted(set[str].intersection(*(set(b.precisions) for b in batches)))
    if precision not in known:
        raise InvalidArgumentError(
            f"{path} has no precision {precision!r}; it has {', '.join([EXACT, *known])}: name one of them"
        )
    return {b.batch_size: sum(b.precisions[precision].segment_seconds) for b in batches}


def _text(path: Path) -> str:
    try:
        if not path.is_file() and path.exists():
            raise InvalidSpecError(str(path), "is no file; name a file of figures")
        if path.stat().st_size > MOST_BYTES:
            raise InvalidSpecError(str(path), f"is larger than {MOST_BYTES >> 20} MiB; name a file of figures")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidSpecError(str(path), f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidSpecError(str(path), "is no text; write YAML or JSON") from error
