"""Live training on one machine: ramps that do not fit the traffic are trained on it, canaried as a new ramp set, and
promoted."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from offramp_core.bundle import Manifest, ramp_set_digest

pytestmark = pytest.mark.slow

Up = Any
BUDGET = 0.05
ROWS_PER_REQUEST = 8


def with_spoiled_heads(bundle: Path) -> Path:
    """Heads of other inputs than those to come: every ramp's weights are far off."""
    rng = np.random.default_rng(3)
    tensors = dict(safetensors.numpy.load((bundle / "ramps.safetensors").read_bytes()))
    for name in [n for n in tensors if n.endswith("/w1")]:
        tensors[name] = (tensors[name] + rng.normal(0.0, 3.0, size=tensors[name].shape)).astype(np.float32)
    (bundle / "ramps.safetensors").write_bytes(safetensors.numpy.save(tensors))
    manifest = msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest)
    digest = hashlib.sha256((bundle / "ramps.safetensors").read_bytes()).hexdigest()
    files = {**manifest.files, "ramps.safetensors": digest}
    spoiled = replace(
        manifest, files=files, ramp_set_digest=ramp_set_digest(manifest.ramps, files, manifest.precisions)
    )
    (bundle / "manifest.json").write_bytes(msgspec.json.encode(spoiled))
    return bundle


@dataclass
class Stream:
    """Fresh inputs one request after the other, and how the answers compare with the model's own."""

    answered: int = 0
    agreed: int = 0
    left: int = 0
    failures: list[str] = field(default_factory=list)

    def send(self, service: Up, tools: Any, bundle: Path, running: threading.Event) -> None:
        rng = np.random.default_rng(99)
        pool: npt.NDArray[np.float32] = tools.inputs(1500, seed=5)
        with httpx.Client(trust_env=False) as client:
            while running.is_set():
                rows = pool[rng.integers(len(pool), size=ROWS_PER_REQUEST)]
                rows = rows + rng.normal(0.0, 0.02, size=rows.shape).astype(np.float32)  # never the same input twice
                truth = tools.answers(bundle, rows)
                try:
                    told = tools.ask(client, service.url, rows)
                except (httpx.HTTPError, AssertionError) as error:
                    self.failures.append(repr(error))
                    continue
                labels = next(o["data"] for o in told["outputs"] if o["name"] == "label")
                self.answered += len(rows)
                self.agreed += int((np.array(labels) == truth).sum())
                exits = told["parameters"]["exit"]
                names = exits.split(",") if isinstance(exits, str) else list(exits)
                self.left += sum(name.strip() != "final" for name in names)


@contextmanager
def traffic(service: Up, tools: Any, bundle: Path) -> Iterator[Stream]:
    stream, running = Stream(), threading.Event()
    running.set()
    thread = threading.Thread(target=stream.send, args=(service, tools, bundle, running), daemon=True)
    thread.start()
    try:
        yield stream
    finally:
        running.clear()
        thread.join(60)


def plan_of(service: Up, name: str) -> dict[str, Any]:
    return next((dict(o["spec"]) for o in service.objects("RampConfig") if o["metadata"]["name"] == name), {})


def told(service: Any) -> set[str]:
    """Reasons of all events so far."""
    lines = (service.state / "events.jsonl").read_text().splitlines()
    return {line["reason"] for line in map(msgspec.json.decode, lines)}


@pytest.mark.timeout(900)
def test_ramps_trained_on_live_traffic_are_canaried_promoted_and_save_more_within_the_budget(
    up: Callable[..., Up], tools: Any, tmp_path: Path
) -> None:
    bundle = with_spoiled_heads(tools.write_bundle(tmp_path / "bundle"))
    own = msgspec.json.decode((bundle / "manifest.json").read_bytes(), type=Manifest).ramp_set_digest
    spec = {
        "model": {"uri": f"file://{bundle}"},
        "objective": {"latency": {"threshold": "2s"}, "accuracy": {"maxDisagreement": str(BUDGET)}},
        "rollout": {"steps": [{"weight": 50}], "confidence": "0.9", "cooldown": "20s"},
        "replicas": 1,
    }
    service = up(**spec, ramps={"maxOverhead": "0.5", "training": "LiveTraffic"})
    service.start()
    service.await_ready(1)

    def seen() -> object:
        return service.status(), service.rollout(), service.tail()

    def promoted() -> str:
        return str(service.status().get("rampSets", {}).get("current", ""))

    with traffic(service, tools, bundle) as stream:
        new = tools.eventually(promoted, what="a trained set that serves", seconds=780, state=seen)
        assert new != own
        stable = service.status()["stableConfig"]
        assert plan_of(service, stable)["rampSetDigest"] == new
        assert plan_of(service, stable)["ramps"]
        certified = next(o for o in service.objects("RampConfig") if o["metadata"]["name"] == stable)
        assert certified["status"]["certificates"][0]["rampSetDigest"] == new
        before = (stream.answered, stream.left)
        tools.eventually(lambda: stream.answered > before[0] + 400, what="traffic", seconds=120, state=seen)
        left = (stream.left - before[1]) / (stream.answered - before[0])
        assert left > 0.3, "most inputs leave where the heads fit"
        assert left > before[1] / before[0]
        assert stream.failures == []
        assert stream.agreed / stream.answered >= 1 - BUDGET
        tools.eventually(lambda: "Promoted" in told(service), what="the end of its rollout", seconds=120, state=seen)
    assert [folder.name for folder in (service.state / "ramp-sets").iterdir()] == [new.removeprefix("sha256:")]
    assert {"TrainingStarted", "RampsTrained", "Promoted"} <= told(service)

    # A restart: no input is left on the disk meanwhile, and workers load the set from the store before they serve.
    assert service.stop() == 0
    assert not list(service.state.rglob("shard-*.npz"))
    service.start()
    service.await_ready(1)
    assert service.status()["stableConfig"] == stable
    exits = {str(service.infer(tools.inputs(1, seed=i))["parameters"]["exit"]) for i in range(30)}
    assert exits - {"final"}

    # Whoever opts out has no captured input left on the disk, and keeps the ramps.
    service.write({**spec, "ramps": {"maxOverhead": "0.5"}})
    tools.eventually(lambda: not list(service.state.rglob("shard-*.npz")), what="no captures", seconds=60, state=seen)
    assert service.status()["rampSets"]["current"] == new
    assert service.stop() == 0
