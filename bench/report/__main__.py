"""``python -m bench.report [--results build/bench] [--out docs/benchmarks.md]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.report.kept import kept
from bench.report.page import make_page
from bench.report.pictures import draw_pictures
from bench.report.results import Results


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="bench.report", description="make docs/benchmarks.md from the bench's results"
    )
    parser.add_argument("--results", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks.md"))
    options = parser.parse_args(arguments)
    results = Results(options.results)
    pictures = draw_pictures(results, options.out.parent / "images" / "bench")
    page = make_page(results, pictures, options.out)
    options.out.write_text(kept(page, options.out.read_text()) if options.out.is_file() else page)
    print(f"{options.out}: {len(results.sets())} record sets, {len(pictures)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
