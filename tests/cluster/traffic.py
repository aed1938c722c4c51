"""``traffic.py URL SECONDS``: requests to the tiny model, about 100 a second, one after another; prints each status.

At least one is sent; a refused connection is tried again, because the service may not be there yet.
"""

import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
import bundles


def main(url: str, seconds: float) -> None:
    x = bundles.inputs(64)
    deadline = time.monotonic() + seconds
    with httpx.Client(timeout=10.0, trust_env=False) as client:
        for i in range(10**9):
            row = x[i % len(x)]
            tensor = {"name": "x", "shape": [1, *row.shape], "datatype": "FP32", "data": row.ravel().tolist()}
            try:
                print(
                    client.post(f"{url}/v2/models/{bundles.MODEL}/infer", json={"inputs": [tensor]}).status_code,
                    flush=True,
                )
            except httpx.TransportError:
                time.sleep(0.5)
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)


main(sys.argv[1], float(sys.argv[2]))
