"""``python -m bench.fuzz KIND``: hostile input in numbers.

Kinds: ``files`` (:mod:`bench.fuzz_files`), ``http`` and ``grpc`` (:mod:`bench.fuzz_worker`), ``manifests``
(:mod:`bench.fuzz_manifests`).
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module

KINDS = {
    "files": "bench.fuzz_files",
    "http": "bench.fuzz_worker",
    "grpc": "bench.fuzz_worker",
    "manifests": "bench.fuzz_manifests",
}


def main(arguments: list[str]) -> int:
    """Hand the arguments on to the module of the kind."""
    if not arguments or arguments[0] not in KINDS:
        print(f"usage: python -m bench.fuzz {{{','.join(KINDS)}}} ...", file=sys.stderr)
        return 2
    run = import_module(KINDS[arguments[0]]).main
    if KINDS[arguments[0]] == "bench.fuzz_worker":
        run = partial(run, kind=arguments[0])
    result: int = run(arguments[1:]) or 0
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
