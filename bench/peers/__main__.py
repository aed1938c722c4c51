"""``python -m bench.peers [--only NAME…]``: every server beside the bare handler, a pair at a time; JSON to
build/bench/peers.json.

A server that cannot be installed or started is left out with the reason.
"""

from __future__ import annotations

import base64
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime

from bench.front import Contender, Data, Rows, bare, offramp, parser, run
from bench.openloop import Target, post
from bench.peers.environments import PEERS, NotInstalledError, Peer, install

OUT = Path("build/bench/peers.json")
JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}


def _raw(row: Rows) -> bytes:
    return post("/infer", row.tobytes(), headers=BYTES)


def _lit(row: Rows) -> bytes:
    return post("/infer", json.dumps({"x": base64.b64encode(row.tobytes()).decode()}).encode(), headers=JSON)


def _ml(row: Rows) -> bytes:
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(row.tobytes()).decode()]}
    return post("/v2/models/resnet/infer", json.dumps({"inputs": [tensor]}).encode(), headers=JSON)


REQUESTS = {"litserve": _lit, "mlserver": _ml, "bentoml": _lit, "ray": _raw}


def contender(peer: Peer, data: Data) -> Contender:
    """A peer with the same model, talked to in the cheapest form that it takes."""

    def label(body: bytes) -> int:
        reply = json.loads(body)
        return int(reply["label"] if "label" in reply else reply["outputs"][0]["data"][0])

    request = REQUESTS[peer.name]
    return Contender(
        peer.name,
        command=lambda port: peer.command(data.model, port),
        environment=lambda _, __: {},
        target=lambda port: Target(peer.name, port, [request(row) for row in data.x], label),
        ready="/v2/health/ready" if peer.name == "mlserver" else "/",
    )


def pair(name: str, data: Data) -> tuple[Contender, Contender]:
    """The yardstick and the server of that name."""
    return bare(data), contender(PEERS[name], data) if name in PEERS else offramp(data)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    made = parser("bench.peers", "Offramp and other servers beside a bare handler")
    made.add_argument("--only", nargs="*", choices=["offramp", *REQUESTS], default=["offramp", *REQUESTS])
    options = made.parse_args(arguments)
    results: dict[str, Any] = {}
    for name in options.only:
        try:
            if name in PEERS:
                install(PEERS[name], onnxruntime=onnxruntime.__version__)
            results[name] = run(partial(pair, name), options)
        except (NotInstalledError, SystemExit) as error:
            results[name] = {"skipped": str(error)}
        print(json.dumps({name: results[name]}), file=sys.stderr)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
