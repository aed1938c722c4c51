"""What workers would answer, for pods that exist on paper: which model they serve, and how well."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offramp_core.control.snapshot import Load, Observed, Worker, WorkerEndpoint
from offramp_core.fleet import Window
from offramp_core.protocol import (
    ArmCounts,
    Observations,
    PlanDocument,
    RampInfo,
    RecordBlock,
    SignedDocument,
    WorkerState,
)
from offramp_core.sketch import bucket_index
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import POD
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey

COSTS: dict[str, list[Any]] = {"batch_size": [1], "segment_seconds": [[0.004, 0.004]], "ramp_seconds": [[0.0001]]}
RAMP_SET = "sha256:" + "a" * 64
FAST, LATE = str(bucket_index(0.005)), str(bucket_index(60.0))
ROWS = 40  # requests between two looks at a ready worker, one to a batch


def backbone_of(bundle: str) -> str:
    return f"sha256:{hashlib.sha256(bundle.encode()).hexdigest()}"


@dataclass
class PaperObserver(Observer):
    """Ready pods answer; those of a bundle whose name contains ``late`` are late with every other request."""

    cache: ObjectCache
    requests: dict[str, int] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()  # what came
    windows_of: dict[str, tuple[Window, ...]] = field(default_factory=dict)  # the same of one service, by its name
    paces: dict[str, float] = field(default_factory=dict)  # what workers measured before they were ready, by pool

    async def observe(self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], **_: Any) -> Observed:
        load = Load(utilisation=0.2, windows=self.windows_of.get(key.name, self.windows))
        return Observed(tuple(self._worker(endpoint) for endpoint in endpoints), load=load)

    async def poke(
        self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], *, token: str, signed: SignedDocument
    ) -> None:
        document = msgspec.json.decode(signed.payload, type=PlanDocument)
        for endpoint in endpoints:
            if backbone_of(self._bundle(endpoint)) == document.stable.plan["backboneDigest"]:
                self.epochs[endpoint.uid] = document.epoch

    async def look(self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], *, token: str) -> int:
        return self.revision(key) + 1  # something is always new

    def revision(self, key: ServiceKey) -> int:
        return 0

    def at_rest(self, key: ServiceKey) -> bool:
        return False

    def forget(self, key: ServiceKey) -> None:
        self.requests.clear()

    async def close(self) -> None: ...

    def _bundle(self, endpoint: WorkerEndpoint) -> str:
        pod = next((pod for pod in self.cache.all(POD) if pod["metadata"]["uid"] == endpoint.uid), {})
        volumes = (pod.get("spec") or {}).get("volumes") or ()
        return next((str(v["image"]["reference"]) for v in volumes if v.get("image")), "")

    def _worker(self, e: WorkerEndpoint) -> Worker:
        state = seen = None
        if e.ready:
            n = self.requests[e.uid] = self.requests.get(e.uid, 0) + ROWS
            late = n // 2 if "late" in self._bundle(e) else 0
            counts = ArmCounts(
                0, "stable", "", requests=n, batches=n, execution={"1": {FAST: n}}, latency={FAST: n - late, LATE: late}
            )
            state = WorkerState(
                e.uid,
                e.uid,
                "",
                "digits",
                True,
                backbone_of(self._bundle(e)),
                RAMP_SET,
                (RampInfo("r00", 0, 0.5, "grid-mlp"),),
                COSTS,
                epoch=self.epochs.get(e.uid, 0),
                pace=self.paces.get(e.pool, 0.0),
            )
            seen = Observations(e.uid, e.uid, 0.0, (counts,), RecordBlock(0, 0, RAMP_SET))
        return Worker(e, state, seen)
