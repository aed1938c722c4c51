"""``python -m bench.fuzz KIND``: hostile input in numbers. Kinds: ``files`` (:mod:`bench.fuzz_files`)."""

from __future__ import annotations

import sys
from importlib import import_module

KINDS = {"files": "bench.fuzz_files"}


def main(arguments: list[str]) -> int:
    """Hand the arguments on to the module of the kind."""
    if not arguments or arguments[0] not in KINDS:
        print(f"usage: python -m bench.fuzz {{{','.join(KINDS)}}} ...", file=sys.stderr)
        return 2
    result: int = import_module(KINDS[arguments[0]]).main(arguments[1:])
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
