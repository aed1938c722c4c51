"""``make bench``: every stage, then docs/benchmarks.md. ``python -m bench.run [--draws 200] [--jobs 2] [--again
STAGE...]``.

A stage is a command that leaves JSON under build/bench; it is kept while the code it depends on is the same: the
library, what of ``bench`` its module imports, and the packages that it runs. When and on what it was measured is noted
in ``measured.json``. One that fails or is not there is said so and left out of the page; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.provenance import provenance

OUT = Path("build/bench")
KEYS = OUT / "keys.json"
MEASURED_FILE = "measured.json"
LIBRARY = "offramp_core"
LABORATORY = "offramp_lab"
WORKER = ("offramp_worker",)
PLANE = ("offramp_worker", "offramp_operator", "offramp_cli")


@dataclass(frozen=True, slots=True)
class Stage:
    """``python -m MODULE ARGUMENTS``. With ``prints_json`` its output becomes ``NAME.json``; ``caches`` itself where it
    knows better; ``runs`` are packages beside the library whose code it measures."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    prints_json: bool = False
    caches: bool = False
    runs: tuple[str, ...] = ()


def stages(draws: int, jobs: int) -> tuple[Stage, ...]:
    """In order: what others need first, timings of a worker last, when nothing else runs."""
    return (
        Stage("records", "bench.record", ("all",), caches=True),
        Stage("replays", "bench.replays", ("all", "--draws", str(draws), "--jobs", str(jobs)), caches=True),
        Stage("search", "bench.search", ("--json",), prints_json=True),
        Stage("evidence", "bench.evidence", ("--json",), prints_json=True),
        Stage("labels", "bench.labels", caches=True),
        Stage("slowness", "bench.slowness", ("--json",), prints_json=True),
        Stage("promise", "bench.promise", ("--json",), prints_json=True),
        Stage("tiers", "bench.tiers", runs=WORKER),
        Stage("control", "bench.control", ("--jobs", str(jobs)), caches=True),
        Stage("streams", "bench.streams", ("--jobs", str(jobs))),
        Stage("traffic", "bench.control_traffic", ("--jobs", str(jobs))),
        Stage("decade", "bench.decade"),
        Stage("fleetplan", "bench.fleetplan"),
        Stage("million", "bench.million"),
        Stage("simulator", "bench.validate_simulator", runs=WORKER),
        Stage("engine", "bench.engine", runs=WORKER),
        Stage("served", "bench.served", runs=WORKER),
        Stage("front", "bench.front", runs=WORKER),
        Stage("peers", "bench.peers", runs=WORKER),
        Stage("foreign", "bench.foreign", prints_json=True, runs=(*WORKER, "offramp_cli")),
        Stage("verdict", "bench.verdict", runs=PLANE),
        Stage("fleet", "bench.fleet", runs=PLANE),
        Stage("placement", "bench.placement", runs=PLANE),
    )


def run_stage(stage: Stage, console: Console) -> str:
    """What became of it: ``kept``, ``done`` or why not."""
    if find_spec(stage.module) is None:
        return f"{stage.module} is not there"
    key = code_key(stage)
    if not stage.caches and (OUT / f"{stage.name}.json").is_file() and _noted(KEYS).get(stage.name) == key:
        return "kept"
    console.print(f"[bold]{stage.name}[/]: python -m {stage.module} {' '.join(stage.arguments)}")
    output = subprocess.PIPE if stage.prints_json else None
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", stage.module, *stage.arguments], stdout=output, check=False)
    if stage.prints_json and done.stdout:
        (OUT / f"{stage.name}.json").write_bytes(done.stdout)
    if done.returncode != 0:
        return f"exit code {done.returncode}"
    _note(KEYS, stage.name, key)
    if not stage.caches:  # such a stage may have measured only a part again
        _note(OUT / MEASURED_FILE, stage.name, provenance())
    return f"done in {time.perf_counter() - began:.0f} s"


def code_key(stage: Stage) -> str:
    """Digest of the stage's arguments and of all code that can change what it measures."""
    digest = hashlib.sha256(" ".join(stage.arguments).encode())
    files = {path for package in (LIBRARY, *stage.runs) for path in _files(package)} | bench_files(stage.module)
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def bench_files(module: str) -> set[Path]:
    """The files of a module of ``bench``, of those of ``bench`` and of the laboratory that it imports, and so on; all
    of a package's where it is one."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        for path in _files(waiting.pop()) - found:
            found.add(path)
            waiting += [
                name for name in _imported(path.read_bytes()) if name.partition(".")[0] in ("bench", LABORATORY)
            ]
    return found


def _files(module: str) -> set[Path]:
    spec = find_spec(module)
    if spec is None or not spec.origin:
        return set()
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None or module == "bench":
        return {origin}
    return set(origin.parent.glob("**/*.py"))


@cache
def _imported(source: bytes) -> tuple[str, ...]:
    """Modules, also those that functions import; a name that is no module stands for the one that it comes from."""
    return tuple(_imports(ast.parse(source)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "bench":
                yield from (f"bench.{alias.name}" for alias in node.names)


def _noted(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _note(path: Path, name: str, value: Any) -> None:
    path.write_text(json.dumps({**_noted(path), name: value}, indent=1) + "\n")


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
