"""An edge and its core as real processes, and what a test asks of them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fixed_plans import certified
from processes import WorkerProcess, decoded, infer_json
from prometheus_client.parser import text_string_to_metric_families

from offramp_core.protocol import RecordBlock

THRESHOLDS = {"r01-grid": "0.4", "r02-linear": "0.5"}
Reply = dict[str, Any]


def core_of(bundle: Path, **env: str) -> WorkerProcess:
    return WorkerProcess(bundle, control_plane=False, env={"OFFRAMP_EDGES": "true", **env})


def edge_of(
    bundle: Path, core: str, folder: Path, thresholds: dict[str, str] = THRESHOLDS, **env: str
) -> WorkerProcess:
    """An edge with a fixed plan that sends inputs, unless ``env`` says otherwise."""
    (folder / "plan.json").write_text(json.dumps(certified(bundle, thresholds)))
    env = {"OFFRAMP_RESIDUE": "Input", "OFFRAMP_CORE": core, **env}
    return WorkerProcess(bundle, control_plane=False, env={"OFFRAMP_FIXED_PLAN": str(folder / "plan.json"), **env})


def url(core: WorkerProcess) -> str:
    return str(core.public.base_url)


def ask(worker: WorkerProcess, x: np.ndarray, **parameters: Any) -> httpx.Response:
    body = infer_json(x) | ({"parameters": parameters} if parameters else {})
    return worker.public.post("/v2/models/tiny/infer", json=body)


def answer(worker: WorkerProcess, x: np.ndarray, **parameters: Any) -> Reply:
    reply = ask(worker, x, **parameters)
    assert reply.status_code == 200, reply.text
    return decoded(reply.json())


def exits(reply: Reply, n: int) -> list[str]:
    told = str(reply["parameters"]["exit"]).split(",")
    return told * n if len(told) == 1 else told


def metric(worker: WorkerProcess, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(worker.public.get("/metrics").text)
    return sum(
        s.value
        for f in families
        for s in f.samples
        if s.name == f"earlyexit_{name}" and labels.items() <= s.labels.items()
    )


def columns(records: RecordBlock) -> list[np.ndarray]:
    """What records say, in an order that does not depend on which rows were done first."""
    kinds = {"uncertainty": "<f4", "prediction": "<i4", "final": "<i4", "reference": "<i4"}
    raw = {name: np.frombuffer(base64.b64decode(getattr(records, name)), kind) for name, kind in kinds.items()}
    n = len(raw["final"])
    order = np.lexsort(raw["uncertainty"].reshape(n, -1).T)
    return [values.reshape(n, -1)[order] for values in raw.values()]
