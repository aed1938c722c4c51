#!/usr/bin/env python3
"""Keep the chart's copy of the CRDs in step with this folder, which is the only source.

A chart can only read files inside itself, so ``helm/offramp/files/crds`` holds byte-identical copies.

Usage: ``crds/sync.py`` copies; ``crds/sync.py --check`` changes nothing and exits 1 when a copy differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
COPY = SOURCE.parent / "helm" / "offramp" / "files" / "crds"


def differing() -> list[str]:
    """Names of the files whose copy is missing, different, or has no source any more."""
    wanted = {path.name: path.read_bytes() for path in SOURCE.glob("*.yaml")}
    found = {path.name: path.read_bytes() for path in COPY.glob("*.yaml")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def copy(name: str) -> None:
    """Bring one copy in step, or remove it when its source is gone."""
    source, target = SOURCE / name, COPY / name
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    else:
        target.unlink()


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = differing()
    if arguments:
        for name in stale:
            print(
                f"{COPY.relative_to(SOURCE.parent)}/{name} differs from crds/{name}; run crds/sync.py", file=sys.stderr
            )
        return 1 if stale else 0
    for name in stale:
        copy(name)
        print(f"copied {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
