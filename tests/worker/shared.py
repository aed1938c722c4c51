"""A real worker process that holds several models."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from processes import KEY, TOKEN, WorkerProcess, decoded, infer_json, sign

from offramp_core.protocol import PlanDocument, WorkerState

SERIES = re.compile(r"(\w+)\{([^}]*)\} (\S+)")


class SharedProcess(WorkerProcess):
    """Use it as a context manager. ``admin`` has the worker's token."""

    def state_of(self, model: str) -> WorkerState:
        reply = self.admin.get(f"/models/{model}/v1/state").raise_for_status()
        return msgspec.json.decode(reply.content, type=WorkerState)

    def deliver_to(self, model: str, document: PlanDocument) -> httpx.Response:
        return self.admin.post(f"/models/{model}/v1/config", content=msgspec.json.encode(sign(document)))

    def ask(self, model: str, x: np.ndarray[Any, Any], **extra: Any) -> httpx.Response:
        return self.public.post(f"/v2/models/{model}/infer", json=infer_json(x, **extra))

    def answer(self, model: str, x: np.ndarray[Any, Any], **extra: Any) -> dict[str, Any]:
        reply = self.ask(model, x, **extra)
        assert reply.status_code == 200, reply.text
        return decoded(reply.json())

    def index(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self.admin.post("/v2/repository/index").raise_for_status().json()}

    def load(self, model: str) -> httpx.Response:
        return self.admin.post(f"/v2/repository/models/{model}/load")

    def unload(self, model: str) -> httpx.Response:
        return self.admin.post(f"/v2/repository/models/{model}/unload")

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series, which must be there."""
        value = self.series(name, **labels)
        assert value is not None, f"{name} with {labels} is not there"
        return value

    def series(self, name: str, **labels: str) -> float | None:
        """The value of one series; some begin with their first event."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for found, told, value in SERIES.findall(self.public.get("/metrics").text):
            if found == name and set(told.split(",")) == wanted:
                return float(value)
        return None


def write_models(folder: Path, models: list[dict[str, Any]]) -> Path:
    """The file that OFFRAMP_MODELS names."""
    path = folder / "models.json"
    path.write_text(json.dumps({"models": models}))
    return path


def shared(file: Path, *, env: Mapping[str, str] | None = None, **fields: Any) -> SharedProcess:
    """A worker with the models of a file."""
    several = {"OFFRAMP_BUNDLE": "", "OFFRAMP_SERVICE_UID": "", "OFFRAMP_MODELS": str(file)}
    return SharedProcess(file, env={**several, **(env or {})}, **fields)


def key() -> str:
    """The public key of the tests, as a file of models has it."""
    return base64.b64encode(KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


__all__ = ["TOKEN", "SharedProcess", "key", "shared", "write_models"]
