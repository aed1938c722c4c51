"""``python -m bench.record NAME... | all [--out build/records]``: record the scores of every ramp, or keep what is there.

A set is kept while the code, the data files and the arguments it was made from are the same. Data come from the folder
OFFRAMP_DATA (default ``../shared/data``). Exit codes: 0 everything asked for is there, 1 something could not be
recorded, 2 unknown name.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin on shared cores

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.record.catalog import Recorder, all_names, recorder_of
from bench.record.store import RecordSet, is_current, read_set, write_set
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
    options = parser.parse_args(arguments)
    names = all_names() if "all" in options.names else tuple(dict.fromkeys(options.names))
    unknown = [name for name in names if recorder_of(name) is None]
    if unknown:
        print(
            f"bench.record: set {unknown[0]!r} is unknown; choose all or from {', '.join(all_names())}", file=sys.stderr
        )
        return 2
    return _record_all(names, options.out)


def _record_all(names: tuple[str, ...], folder: Path) -> int:
    failed = 0
    recorded = []
    for name in names:
        try:
            recorded.append(ensure(name, folder, Reporter()))
        except RecordingError as error:
            print(f"bench.record: {error}", file=sys.stderr)
            failed += 1
    if recorded:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(recorded))
    return 1 if failed else 0


def ensure(name: str, folder: Path, reporter: Reporter) -> RecordSet:
    """The set ``name`` in ``folder``, recorded now unless it is there already.

    Raises
    ------
    RecordingError
        A data file is missing, or the recording failed.
    """
    recorder = recorder_of(name)
    if recorder is None:
        raise RecordingError(f"set {name!r} is unknown; choose from {', '.join(all_names())}")
    missing = [path for path in recorder.files() if not path.is_file()]
    if missing:
        raise RecordingError(
            f"{name} is not recorded: {missing[0]} is missing; OFFRAMP_DATA names the folder of data sets"
        )
    for need in recorder.needs:
        ensure(need, folder, reporter)
    key = recorder.key(folder)
    if not is_current(folder, name, key):
        _record(recorder, folder, reporter, key=key)
    return read_set(folder, name)


def _record(recorder: Recorder, folder: Path, reporter: Reporter, *, key: str) -> None:
    reporter.console.print(f"[bold]{', '.join(recorder.names)}", highlight=False)
    try:
        for recorded in recorder.run(reporter, folder):
            write_set(folder, recorded, key=key)
    except OfframpError as error:
        raise RecordingError(f"{', '.join(recorder.names)} not recorded: {error}") from error


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
