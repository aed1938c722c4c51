"""``traffic.py URL SECONDS [MODEL]``: requests to the tiny model, or to one of its shape, about 100 a second, one after
another; prints each status.

What had been sent and was not answered is printed as ``broken``; a connection refused after one was taken as
``refused``.

At least one is sent; a refused connection is tried again, for a minute until one was taken, because the service may not
be there yet.
"""

import json
import sys
import time
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
import bundles

CONNECT_SECONDS = 60.0


def body(row: np.ndarray, source: int) -> bytes:
    tensor = {"name": "x", "shape": [1, *row.shape], "datatype": "FP32", "data": row.ravel().tolist()}
    return json.dumps({"inputs": [tensor], "parameters": {"stream": f"client-{source}"}}).encode()


def main(url: str, seconds: float, model: str = bundles.MODEL) -> None:
    bodies = [body(row, (i + turn) % 8) for turn in range(8) for i, row in enumerate(bundles.inputs(64))]
    began, connected = time.monotonic(), False
    with httpx.Client(timeout=10.0, trust_env=False, headers={"Content-Type": "application/json"}) as client:
        for i in range(10**9):
            try:
                reply = client.post(f"{url}/v2/models/{model}/infer", content=bodies[i % len(bodies)])
                print(reply.status_code, flush=True)
                connected = True
            except httpx.TransportError as error:
                refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if connected or not refused:
                    print("refused" if refused else "broken", flush=True)
                connected |= not refused
                time.sleep(0.5)
            if time.monotonic() >= began + (seconds if connected else max(seconds, CONNECT_SECONDS)):
                return
            time.sleep(0.005)


main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
