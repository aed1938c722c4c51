"""Command line of :mod:`bench.sharing`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from bench.provenance import provenance
from bench.sharing import cold, load, packed, policies
from bench.sharing.services import arms, kinds, services

OUT = Path("build/bench/sharing.json")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.sharing", description="24 services in two shared workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of every trial")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    console = Console()
    turns, packing = policies.compared(), packed.compared()
    console.print(turns, packing)
    of = services(kinds(console))
    with arms(of) as both:
        under_load = load.measured(of, both, rounds=options.rounds, seconds=options.seconds, console=console)
    console.print(under_load)
    away = cold.measured(of, console=console)
    console.print(away)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"measured": provenance(), "turns": turns, "packing": packing, "load": under_load, "cold": away}
    options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
