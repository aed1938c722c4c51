"""Write (or with ``--check`` compare) everything under ``docs`` that follows from code: ``python -m
website.generate``."""

from __future__ import annotations

import argparse
import sys

from website import conditions, errors, modules, numbers, pictures, reference, values
from website.build import DOCS

SOURCES = (conditions, errors, modules, numbers, pictures, reference, values)


def outputs() -> dict[str, str]:
    """Every generated file below ``docs`` and what it should say."""
    return {name: text for source in SOURCES for name, text in source.outputs().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    check = parser.parse_args().check
    code = 0
    for name, text in outputs().items():
        path = DOCS / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"docs/{name} is stale; run scripts/gen.d/docs", file=sys.stderr)
            code = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
