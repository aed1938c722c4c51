"""``python -m bench.fuzz http|grpc [--requests N]``: hostile requests against real workers, as
``tests/worker/test_fuzz.py`` sends them, in any number.

Each is refused by its right status or rightly answered, once; valid requests in between get their own answers; the
workers stay ready.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

TESTS = {
    "http": "test_hostile_requests_are_refused_and_their_neighbours_get_their_own_answers",
    "grpc": "test_hostile_messages_over_grpc_harm_nobody and fp32",
}
REQUESTS = {"http": 100_000, "grpc": 20_000}


def main(arguments: Sequence[str], *, kind: str) -> int:
    """Run the test of a kind with so many requests; its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.fuzz {kind}", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS[kind], help="hostile requests (default: %(default)s)")
    options = parser.parse_args(arguments)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "--timeout=7200",
        "--durations=1",
        "tests/worker/test_fuzz.py",
    ]
    env = {**os.environ, "OFFRAMP_FUZZ_REQUESTS": str(options.requests)}
    return subprocess.run([*command, "-k", TESTS[kind]], env=env, check=False).returncode
