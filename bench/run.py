"""``make bench``: every stage, then docs/benchmarks.md. ``python -m bench.run [--draws 200] [--jobs 2] [--again STAGE...]``.

A stage is a command that leaves JSON under build/bench; it is kept while the code it depends on is the same. One that fails or is not
there is said so and left out of the page; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

import offramp_core

OUT = Path("build/bench")
KEYS = OUT / "keys.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """``python -m MODULE ARGUMENTS``. With ``prints_json`` its output becomes ``NAME.json``; ``caches`` itself where it knows better."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    prints_json: bool = False
    caches: bool = False


def stages(draws: int, jobs: int) -> tuple[Stage, ...]:
    """In order: what others need first, timings of a worker last, when nothing else runs."""
    return (
        Stage("records", "bench.record", ("all",), caches=True),
        Stage("replays", "bench.replays", ("all", "--draws", str(draws), "--jobs", str(jobs)), caches=True),
        Stage("search", "bench.search", ("--json",), prints_json=True),
        Stage("evidence", "bench.evidence", ("--json",), prints_json=True),
        Stage("promise", "bench.promise", ("--json",), prints_json=True),
        Stage("control", "bench.control", ("--jobs", str(jobs)), caches=True),
        Stage("million", "bench.million"),
        Stage("bands", "bench.bands"),
        Stage("simulator", "bench.validate_simulator"),
        Stage("engine", "bench.engine"),
        Stage("served", "bench.served"),
        Stage("front", "bench.front"),
        Stage("peers", "bench.peers"),
        Stage("verdict", "bench.verdict"),
        Stage("fleet", "bench.fleet"),
    )


def run_stage(stage: Stage, console: Console) -> str:
    """What became of it: ``kept``, ``done`` or why not."""
    if find_spec(stage.module) is None:
        return f"{stage.module} is not there"
    key = code_key(stage)
    if not stage.caches and (OUT / f"{stage.name}.json").is_file() and _keys().get(stage.name) == key:
        return "kept"
    console.print(f"[bold]{stage.name}[/]: python -m {stage.module} {' '.join(stage.arguments)}")
    output = subprocess.PIPE if stage.prints_json else None
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", stage.module, *stage.arguments], stdout=output, check=False)
    if stage.prints_json and done.stdout:
        (OUT / f"{stage.name}.json").write_bytes(done.stdout)
    if done.returncode != 0:
        return f"exit code {done.returncode}"
    KEYS.write_text(json.dumps({**_keys(), stage.name: key}, indent=1) + "\n")
    return f"done in {time.perf_counter() - began:.0f} s"


def code_key(stage: Stage) -> str:
    """Digest of the library, of the stage's module and of its arguments."""
    digest = hashlib.sha256(" ".join(stage.arguments).encode())
    spec = find_spec(stage.module)
    own = [Path(spec.origin)] if spec is not None and spec.origin else []
    for path in [*sorted(Path(str(offramp_core.__file__)).parent.glob("**/*.py")), *own]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _keys() -> dict[str, str]:
    return dict(json.loads(KEYS.read_text())) if KEYS.is_file() else {}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench.run", description="all benchmarks and their page")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", nargs="*", default=[], metavar="STAGE", help="stages to run although they are kept")
    options = parser.parse_args(arguments)
    console = Console()
    OUT.mkdir(parents=True, exist_ok=True)
    failed = False
    for stage in stages(options.draws, options.jobs):
        if stage.name in options.again:
            (OUT / f"{stage.name}.json").unlink(missing_ok=True)
        outcome = run_stage(stage, console)
        failed |= outcome != "kept" and not outcome.startswith("done")
        console.print(f"{stage.name}: {outcome}")
    report = subprocess.run([sys.executable, "-m", "bench.report"], check=False)
    return 1 if failed or report.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
