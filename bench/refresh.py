"""Refreshed heads on the surveillance video: ``python -m bench.refresh [--tiles 12] [--json]``.

A bundle is prepared on the frames that the probe of the full model was fitted on. Its heads are then refreshed on the
frames after them, with the full model's answers as labels, and both sets of heads are judged on the same later frames,
which neither has seen: exits at 1 % by ramp, and the best plan's saving in hindsight.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from bench.record.video import FIRST, HEADS_END, LAST, PROBE_END, TILES, Tiles, exported, load_tiles, probed_model
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.refresh import refresh_bundle
from offramp_worker.prepare.report import PrepareReport, print_report

HEAD_SHARE = 0.8  # of the probe's frames; the bundle's own records are not used here


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="prepare on old frames, refresh on newer ones, judge both on the newest"
    )
    parser.add_argument("--tiles", type=int, default=TILES, help="tiles of each frame; fewer are quicker")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        report = refreshed(Path(folder), tiles=options.tiles)
    if options.json:
        print(json.dumps({**facts(report), "seconds": round(time.perf_counter() - began, 1)}, indent=1))
    else:
        print_report(report, Console())
    return 0


def refreshed(folder: Path, *, tiles: int) -> PrepareReport:
    """Prepare and refresh in ``folder``; the report of the refresh."""
    video = load_tiles()
    probed, recent = video.between(FIRST, PROBE_END), video.between(PROBE_END, LAST + 1)
    np.savez(folder / "old.npz", x=_some(probed, tiles))
    np.savez(folder / "recent.npz", x=_some(recent, tiles))
    model = exported(probed_model(probed), probed.x, folder / "probed-resnet56.pt2")
    reporter = Reporter()
    old = PrepareRequest(
        model=model,
        data=str(folder / "old.npz"),
        out=folder / "old",
        name="video",
        head_share=HEAD_SHARE,
        compile_limit=0,
    )
    prepare_bundle(old, reporter)
    share = (HEADS_END - PROBE_END) / (LAST + 1 - PROBE_END)
    again = PrepareRequest(
        model=str(folder / "old"), data=str(folder / "recent.npz"), out=folder / "recent", head_share=share
    )
    return refresh_bundle(again, reporter)


def facts(report: PrepareReport) -> dict[str, Any]:
    """Exits at 1 % by ramp and the outlook, before and after."""
    value = report.to_mapping()
    return {
        "rows": value["data"],
        "exits_at_1_percent": {
            ramp["id"]: {"before": ramp["exit_share_before"]["0.01"], "after": ramp["exit_share"]["0.01"]}
            for ramp in value["ramps"]
        },
        "before": value["outlook_before"],
        "after": value["outlook"],
    }


def _some(tiles: Tiles, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The first tiles of every frame: those with most movement."""
    return tiles.x[tiles.tile < count]


if __name__ == "__main__":
    sys.exit(main())
