"""``offramp replay`` on 1,000,000 records of 12 ramps: ``python -m bench.million``. Peak memory and time of the exact
policy.

The scores are synthetic (a latent difficulty seen through noise); only their number matters here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, RAMPS = 1_000_000, 12
MAX_BYTES, MAX_SECONDS = 2 * 2**30, 120.0


def write_records(path: Path, *, seed: int = 0) -> None:
    """Synthetic records: deeper ramps see an input's difficulty better."""
    rng = np.random.default_rng(seed)
    depth = np.arange(1, RAMPS + 1, dtype=np.float32) / (RAMPS + 1)
    difficulty = rng.beta(1.2, 1.8, size=(ROWS, 1)).astype(np.float32) * np.float32(1.25)
    margin = (depth - difficulty) * np.float32(6) + rng.normal(0, 0.9, (ROWS, RAMPS)).astype(np.float32)
    wrong = rng.random((ROWS, RAMPS), dtype=np.float32) > 1 / (1 + np.exp(-2 * margin - 2))
    uncertainty = np.round(1 / (1 + np.exp(margin)), 6).astype(np.float32)
    np.savez(
        path,
        uncertainty=uncertainty,
        prediction=wrong.astype(np.int64),
        final=np.zeros(ROWS, dtype=np.int64),
        segment_seconds=np.full(RAMPS + 1, 1e-3),
        ramp_seconds=np.full(RAMPS, 1e-5),
    )


def measure(path: Path, policy: str) -> dict[str, float | str | bool]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "offramp_cli", "replay", str(path), "--policy", policy, "--json"]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, used = os.wait4(process.pid, 0)  # this process alone: not the one that made the records
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if process.returncode != 0:
            raise SystemExit(f"bench.million: {' '.join(command)} ended with {process.returncode}")
        output.seek(0)
        (found,) = json.load(output)["policies"]
    peak = used.ru_maxrss * 1024
    cpu = used.ru_utime + used.ru_stime
    return {
        "rows": ROWS,
        "ramps": RAMPS,
        "policy": policy,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": peak,
        "saving": found["saving"],
        "disagreement": found["disagreement"],
        "passed": peak < MAX_BYTES and cpu < MAX_SECONDS,
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 above 2 GiB or 2 minutes of processor time."""
    parser = argparse.ArgumentParser(prog="bench.million", description="replay a million records")
    parser.add_argument("--policy", default="exact")
    parser.add_argument("--out", type=Path, default=Path("build/bench/million.json"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.npz"
        subprocess.run(
            [sys.executable, "-c", f"from bench.million import *; write_records(Path({str(path)!r}))"], check=True
        )
        result = measure(path, options.policy)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{ROWS:,} x {RAMPS}, {options.policy}: {result['seconds']:.0f} s ({result['cpu_seconds']:.0f} s of "
        "processor), "
        f"{int(result['peak_bytes']) / 2**20:,.0f} MiB"
    )
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
