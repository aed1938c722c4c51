"""``python -m bench.record NAME... | all [--out build/records]``: record the scores of every ramp, or keep what is
there.

A set is kept while the code, the data files and the arguments it was made from are the same. Its costs have a key of
their own, so that a change there, or ``--costs`` on a quieter machine, trains nothing. Data come from the folder
OFFRAMP_DATA (default ``../shared/data``). Exit codes: 0 everything asked for is there, 1 something could not be
recorded, 2 unknown name.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin on shared cores

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.record.catalog import RECORDERS, Recorder, all_names, recorder_of
from bench.record.costs import with_costs
from bench.record.store import RecordSet, keys_of, read_set, write_set
from offramp_core.errors import OfframpError
from offramp_worker.prepare.progress import Reporter

DEFAULT_FOLDER = Path("build/records")


class RecordingError(Exception):
    """A set cannot be recorded; says which and why in one line."""


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.record", description="record real scores of every ramp")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, or some of: {', '.join(all_names())}")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder of the sets")
    parser.add_argument("--costs", action="store_true", help="measure costs again, on a quieter machine; scores stay")
    options = parser.parse_args(arguments)
    names = all_names() if "all" in options.names else tuple(dict.fromkeys(options.names))
    unknown = [name for name in names if recorder_of(name) is None]
    if unknown:
        print(
            f"bench.record: set {unknown[0]!r} is unknown; choose all or from {', '.join(all_names())}", file=sys.stderr
        )
        return 2
    recorders = [recorder for recorder in RECORDERS if not set(names).isdisjoint(recorder.names)]
    return _record_all(recorders, options.out, again=options.costs)


def ensure(recorder: Recorder, folder: Path, reporter: Reporter, *, again: bool = False) -> list[RecordSet]:
    """The recorder's sets in ``folder``, recorded now unless they are there; with ``again`` their costs are measured
    anew.

    Raises
    ------
    RecordingError
        A data file is missing, or the recording failed.
    """
    names = ", ".join(recorder.names)
    missing = [path for path in recorder.files() if not path.is_file()]
    if missing:
        raise RecordingError(
            f"{names} not recorded: {missing[0]} is missing; OFFRAMP_DATA names the folder of data sets"
        )
    for need in recorder.needs:
        ensure(_known(need), folder, reporter)
    try:
        _bring_up_to_date(recorder, folder, reporter, again=again)
    except OfframpError as error:
        raise RecordingError(f"{names} not recorded: {error}") from error
    return [read_set(folder, name) for name in recorder.names]


def _record_all(recorders: list[Recorder], folder: Path, *, again: bool) -> int:
    failed = 0
    recorded: list[RecordSet] = []
    for recorder in recorders:
        try:
            recorded += ensure(recorder, folder, Reporter(), again=again)
        except RecordingError as error:
            print(f"bench.record: {error}", file=sys.stderr)
            failed += 1
    if recorded:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(recorded))
    return 1 if failed else 0


def _bring_up_to_date(recorder: Recorder, folder: Path, reporter: Reporter, *, again: bool) -> None:
    """Record what is missing or was made from other code or data; costs alone where the scores are at hand."""
    keys = recorder.keys(folder)
    held = [keys_of(folder, name) for name in recorder.names]
    if all(one == keys for one in held) and not again:
        return
    if not reporter.quiet:
        Console(stderr=True).print(f"[bold]{', '.join(recorder.names)}", highlight=False)
    needed = recorder.needed(folder)
    if all(one.scores == keys.scores for one in held):
        sets: Sequence[RecordSet] = [read_set(folder, name) for name in recorder.names]
    else:
        sets = recorder.record(reporter, needed)
    costs = recorder.measure(reporter, needed)
    for recorded in sets:
        write_set(folder, with_costs(recorded, costs[recorded.name]), keys=keys)


def _known(name: str) -> Recorder:
    recorder = recorder_of(name)
    assert recorder is not None
    return recorder


def _table(sets: list[RecordSet]) -> Table:
    table = Table(
        caption="exits: the largest share of the pool that can leave at one ramp with 1 % of all answers changed"
    )
    table.add_column("set")
    for column in ("records", "ramps", "accuracy"):
        table.add_column(column, justify="right")
    table.add_column("exits at 1 %, ramp by ramp")
    for one in sets:
        exits = " ".join(f"{100 * ramp['exits']['0.01']:.0f}" for ramp in one.facts["ramps"])
        n, r = one.arrays["uncertainty"].shape
        table.add_row(one.name, f"{n:,}", str(r), f"{one.facts['accuracy']:.1%}", exits)
    return table


if __name__ == "__main__":
    sys.exit(main())
