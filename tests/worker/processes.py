"""Real workers on loopback: a process with keys, documents to deliver, and what it says about itself."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from offramp_core.bundle import Manifest
from offramp_core.plan import Plan
from offramp_core.protocol import ArmPlan, Observations, PlanDocument, SignedDocument, WorkerState

TOKEN = "a-token-for-tests"
SERVICE_UID = "service-1"
DEADLINE_SECONDS = 90.0
START_SECONDS = 120.0  # of a process: a busy machine takes long to import
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def eventually(condition: Callable[[], Any], *, what: str, deadline: float = DEADLINE_SECONDS) -> Any:
    """Poll until the condition is true; fail with the last value seen."""
    end = time.monotonic() + deadline
    pause = 0.0005  # what an engine in this process does comes in a millisecond; what a process does takes longer
    value = condition()
    while not value:
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen within {deadline} s; last seen: {value!r}")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
        value = condition()
    return value


def sign(document: PlanDocument, *, key: Ed25519PrivateKey = KEY) -> SignedDocument:
    payload = json.dumps(asdict(document))
    return SignedDocument(payload, base64.b64encode(key.sign(payload.encode())).decode())


def manifest_of(bundle: Path) -> Manifest:
    return msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest)


def plan_for(
    bundle: Path, thresholds: dict[str, str] | None = None, *, execution: str = "ComputeSaving", precision: str = "fp32"
) -> Plan:
    manifest = manifest_of(bundle)
    ramps = [{"id": k, "threshold": v} for k, v in (thresholds or {}).items()]
    return Plan.from_mapping(
        {
            "backboneDigest": manifest.backbone_digest,
            "rampSetDigest": manifest.ramp_set_digest,
            "ramps": ramps,
            "execution": execution,
            "precision": precision,
        }
    )


def document(
    stable: Plan, *, epoch: int = 1, canary: Plan | None = None, weight: int = 0, audit_rate: float = 0.0, **fields: Any
) -> PlanDocument:
    base = PlanDocument(
        service="tiny",
        service_uid=SERVICE_UID,
        epoch=epoch,
        stable=ArmPlan(stable.to_mapping(), audit_rate),
        canary=ArmPlan(canary.to_mapping(), audit_rate) if canary else None,
        weight_percent=weight,
        salt="salt",
        accuracy_budget=0.02,
    )
    return replace(base, **fields)


@dataclass
class WorkerProcess:
    """One worker process. Use it as a context manager; it must end by itself on SIGTERM."""

    bundle: Path
    env: dict[str, str] = field(default_factory=dict)
    control_plane: bool = True
    wait_ready: bool = True
    command: Sequence[str] = (sys.executable, "-m", "offramp_worker.main")
    log: list[dict[str, Any]] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)

    def __enter__(self) -> WorkerProcess:
        public = KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        env = {k: v for k, v in os.environ.items() if not k.startswith("OFFRAMP_")}
        env |= {
            "OFFRAMP_BUNDLE": str(self.bundle),
            "OFFRAMP_HOST": "127.0.0.1",
            "OFFRAMP_PORT": "0",
            "OFFRAMP_THREADS": "1",
        }
        if self.control_plane:
            env |= {
                "OFFRAMP_ADMIN_PORT": "0",
                "OFFRAMP_SERVICE_UID": SERVICE_UID,
                "OFFRAMP_UID": "worker-1",
                "OFFRAMP_PUBLIC_KEY": base64.b64encode(public).decode(),
                "OFFRAMP_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            }
        self.process = subprocess.Popen(self.command, env=env | self.env, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.public = httpx.Client(base_url=f"http://127.0.0.1:{self.port('public')}", timeout=30)
        if self.control_plane:
            self.admin = httpx.Client(
                base_url=f"http://127.0.0.1:{self.port('admin')}",
                timeout=30,
                headers={"Authorization": f"Bearer {TOKEN}"},
            )
        if self.wait_ready:
            eventually(self.is_ready, what="readiness", deadline=START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port('public')}"

    def is_ready(self) -> bool:
        return self.public.get("/v2/health/ready").status_code == 200

    def state(self) -> WorkerState:
        return msgspec.json.decode(self.admin.get("/v1/state").raise_for_status().content, type=WorkerState)

    def observations(self, *, after: int = 0, boot: str = "") -> Observations:
        reply = self.admin.get("/v1/observations", params={"after": after, "boot": boot}).raise_for_status()
        return msgspec.json.decode(reply.content, type=Observations)

    def deliver(self, content: PlanDocument | SignedDocument) -> httpx.Response:
        signed = content if isinstance(content, SignedDocument) else sign(content)
        return self.admin.post("/v1/config", content=msgspec.json.encode(signed))

    def infer(self, x: np.ndarray[Any, Any], **extra: Any) -> dict[str, Any]:
        """One JSON request; the decoded reply with ``logits`` and ``label`` as arrays."""
        reply = self.public.post("/v2/models/tiny/infer", json=infer_json(x, **extra))
        assert reply.status_code == 200, reply.text
        return decoded(reply.json())

    def infer_binary(self, x: np.ndarray[Any, Any]) -> httpx.Response:
        """One request with the tensor as binary data."""
        content, headers = infer_bytes(x)
        return self.public.post("/v2/models/tiny/infer", content=content, headers=headers)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == name]

    def port(self, name: str) -> int:
        def listening() -> Any:
            assert self.process.poll() is None, self.noise + [str(line) for line in self.log]
            return [line["port"] for line in list(self.log) if line["event"] == "listening" and line["name"] == name]

        return int(eventually(listening, what=f"the {name} port", deadline=START_SECONDS)[0])

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.log.append(json.loads(line))
            except json.JSONDecodeError:
                self.noise.append(line)


def infer_json(x: np.ndarray[Any, Any], **extra: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.reshape(-1).tolist()}
    return {"inputs": [tensor], **extra}


def infer_bytes(x: np.ndarray[Any, Any]) -> tuple[bytes, dict[str, str]]:
    """The body of a request whose tensor is binary data, and its headers."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    header = json.dumps({"inputs": [tensor]}).encode()
    return header + x.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


def decoded(reply: dict[str, Any]) -> dict[str, Any]:
    outputs = {
        o["name"]: np.array(o["data"], dtype=np.float32 if o["name"] == "logits" else np.int64)
        for o in reply["outputs"]
    }
    shapes = {o["name"]: o["shape"] for o in reply["outputs"]}
    return {**reply, **{name: value.reshape(shapes[name]) for name, value in outputs.items()}}
