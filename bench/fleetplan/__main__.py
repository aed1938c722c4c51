"""``python -m bench.fleetplan [--scene NAME...] [--replays 200] [--forecasts 8] [--services 200] [--noise 20]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.arrivals import MissingTraceError
from bench.fleetplan.forecasts import RECENT, forecasts, relative_costs
from bench.fleetplan.judged import ahead, verdicts
from bench.fleetplan.pictures import draw
from bench.fleetplan.planning import noise, planning
from bench.fleetplan.replays import replays
from bench.fleetplan.runs import LARGEST, OURS, run
from bench.fleetplan.scenes import BUDGET, SCENES
from bench.provenance import provenance
from bench.replays import OUT as OUT_FOLDER

OUT = OUT_FOLDER / "fleetplan.json"
FLEET = 200  # services


def table(says: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A scene for people."""
    heads = ("policy", "cost", "of the largest", "missed", "disagreement", "budgets", "workers", "ahead of it in")
    shown = Table(*heads, title=says)
    by_name = {row["policy"]: row for row in rows}
    for row in rows:
        shown.add_row(
            row["policy"] + (f" ({row['said']})" if row["said"] != row["policy"] else ""),
            f"{row['cost']:.2f}",
            f"{row['cost'] / by_name[LARGEST]['cost']:.2f}",
            f"{row['missed']:.2%}",
            f"{row['disagreement']:.2%}",
            "kept" if row["kept"] else "broken",
            f"{row['workers']:.1f}",
            "" if row["policy"] == OURS else ahead(by_name[OURS], row),
        )
    return shown


def replay_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The replays for people."""
    shown = Table("policy", "budget kept", "cost", "missed", "disagreement", "worst", title="replays with certificates")
    for row in rows:
        shown.add_row(
            row["policy"],
            f"{row['kept']} of {row['runs']}",
            f"{row['cost']:.4f}",
            f"{row['missed']:.2%}",
            f"{row['disagreement']:.2%}",
            f"{row['worst']:.2%}",
        )
    return shown


def forecast_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What was known of the past, for people."""
    shown = Table("planned from", f"cost, of the {RECENT}'s", "missed", "worst stretch", title="earlier days")
    costs = relative_costs(rows)
    for row in rows:
        shown.add_row(row["policy"], f"{costs[row['policy']]:.2f}", f"{row['missed']:.2%}", f"{row['worst']:.2%}")
    return shown


def _played(name: str, console: Console) -> dict[str, Any]:
    says, build = SCENES[name]
    scene = build()
    rows = [asdict(row) for row in run(scene)]
    console.print(table(says, rows))
    hours = len(scene.tasks[0].counts) / 3600
    picture = draw(rows, hours, OUT.with_name(f"fleetplan-{name}.png"), budget=BUDGET)
    console.print(f"{picture}")
    for what, met in verdicts(rows).items():
        console.print(f"{what}: {'met' if met else 'not met'}")
    return {"hours": hours, "rows": rows, "verdicts": verdicts(rows), "measured": provenance()}


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 where data are missing."""
    parser = argparse.ArgumentParser(prog="bench.fleetplan", description="the fleet planner beside named policies")
    parser.add_argument("--scene", nargs="*", choices=list(SCENES), default=list(SCENES), help="all when left out")
    parser.add_argument("--replays", type=int, default=200, help="how many, 0 for none")
    parser.add_argument("--forecasts", type=int, default=8, help="stretches of Twitter, 0 for none")
    parser.add_argument("--services", type=int, default=FLEET, help="how many are planned at once, 0 for none")
    parser.add_argument("--noise", type=int, default=20, help="how many fleets of 200 services see noise, 0 for none")
    parser.add_argument("--json", action="store_true", help="print the result instead of tables")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json)
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.is_file() else {"scenes": {}}
    try:
        for name in options.scene:
            found["scenes"][name] = _played(name, console)
            _write(OUT, found)
        for name, count, play, shown in (
            ("replays", options.replays, replays, replay_table),
            ("forecasts", options.forecasts, forecasts, forecast_table),
        ):
            if count:
                rows = [asdict(row) for row in play(count)]
                console.print(shown(rows))
                found[name] = {"rows": rows, "measured": provenance()}
                _write(OUT, found)
        if options.services:
            found["planning"] = asdict(planning(options.services)) | {"measured": provenance()}
            console.print(found["planning"])
            _write(OUT, found)
        if options.noise:
            found["noise"] = {"services": FLEET, "changed": noise(FLEET, options.noise), "measured": provenance()}
            console.print(found["noise"])
            _write(OUT, found)
    except MissingTraceError as error:
        print(f"bench.fleetplan: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found))
    return 0


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
