"""``fresh_traffic.py URL SECONDS``: inputs that never repeat, 16 to a request, one request after another, until SIGTERM
or the time is up, but at least one.

Prints rows answered, rows that left early, and failed requests, as JSON.
"""

import json
import signal
import sys
import time
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from identity_bundle import MODEL, inputs

ROWS = 16


def main(url: str, seconds: float) -> None:
    pool, rng, running = inputs(1500, seed=5), np.random.default_rng(), [True]
    signal.signal(signal.SIGTERM, lambda *_: running.clear())
    deadline, answered, left, failed = time.monotonic() + seconds, 0, 0, 0
    with httpx.Client(timeout=30.0, trust_env=False) as client:
        while running and (time.monotonic() < deadline or not answered + failed):
            rows = pool[rng.integers(len(pool), size=ROWS)]
            rows = (rows + rng.normal(0.0, 0.02, size=rows.shape)).astype(np.float32)
            tensor = {
                "name": "x",
                "shape": list(rows.shape),
                "datatype": "FP32",
                "parameters": {"binary_data_size": rows.nbytes},
            }
            source = f"client-{rng.integers(8)}"
            head = json.dumps({"inputs": [tensor], "parameters": {"stream": source}}).encode()
            sizes = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
            try:
                reply = client.post(f"{url}/v2/models/{MODEL}/infer", content=head + rows.tobytes(), headers=sizes)
                reply.raise_for_status()
            except httpx.HTTPError:
                failed += 1
                continue
            exits = reply.json()["parameters"]["exit"]
            names = exits.split(",") if isinstance(exits, str) else exits
            answered += len(rows)
            left += sum(name.strip() != "final" for name in names) * (len(rows) // len(names))
    print(json.dumps({"answered": answered, "left": left, "failed": failed}))


main(sys.argv[1], float(sys.argv[2]))
