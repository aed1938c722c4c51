"""What the statuses of a large service weigh in etcd: ``python -m bench.fleet.weight``.

Statuses as the operator writes them, of so many worker processes, each with counts of realistic length; and what the
API server keeps beside them: ``managedFields`` has an entry for every field of a map that is not atomic, so nearly as
many bytes again. docs/scale.md has the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from offramp_core.control.objects import ArmTally, BothArms, Ledger, Measured, RolloutStatus, ServiceStatus
from offramp_core.protocol import PlanCounts, SliceCounts, TimeSums
from offramp_operator.shell.manifests import status_json

WORKERS, SLICES = (100, 300, 1000), (0, 10, 32)  # 32: everyClass at its most
ETCD_BYTES = 1_572_864  # of a request, by etcd's default
CRDS = Path(__file__).resolve().parents[2] / "crds"

Json = dict[str, Any]


def service_status(workers: int, slices: int) -> Json:
    """A day into a plan's window: every process has counts now and had some when the window began."""
    rng = np.random.default_rng(0)
    boots = [hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in range(workers)]
    live, base = ({boot: _counts(rng, slices) for boot in boots} for _ in range(2))
    return status_json(ServiceStatus(measured=Measured(live=live, base=base)))


def rollout_status(workers: int) -> Json:
    """In the middle of a step."""
    rng = np.random.default_rng(0)
    boots = [hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in range(workers)]
    uids = [f"{boot[:8]}-{boot[8:12]}-{boot[12:16]}-{boot[16:20]}-{boot[20:]}" for boot in boots]
    ledger = Ledger(epoch=17, live={boot: BothArms(_tally(rng), _tally(rng)) for boot in boots})
    return status_json(RolloutStatus(ledger=ledger, restarts=dict.fromkeys(uids, 0)))


def managed(value: Any, schema: Mapping[str, Any]) -> Json:
    """The ``fieldsV1`` of whoever applied ``value``. Lists are left out: none grows with the workers."""
    if not isinstance(value, dict) or schema.get("x-kubernetes-map-type") == "atomic":
        return {}
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    return {f"f:{name}": managed(item, known.get(name, others)) for name, item in value.items()}


def schema_of(plural: str) -> Json:
    """The schema of a kind's status."""
    crd = yaml.safe_load((CRDS / f"{plural}.yaml").read_text())
    return dict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"])


def size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _counts(rng: np.random.Generator, slices: int) -> PlanCounts:
    def count() -> int:
        return int(rng.integers(10**5, 10**6))

    def sums() -> TimeSums:
        return TimeSums(*(float(f"{x:.9g}") for x in rng.random(4) * 1e5))

    return PlanCounts(
        requests=10 * count(),
        exits={f"r{j:02d}-linear": count() for j in range(3)},
        batches=count(),
        held_back=count() // 50,
        answer_time=sums(),
        engine_time=sums(),
        slices={f"class:{c}": SliceCounts(count() // 100, count() // 10_000) for c in range(slices)},
    )


def _tally(rng: np.random.Generator) -> ArmTally:
    return ArmTally(*(int(x) for x in rng.integers(10**3, 10**6, size=8)))


def main() -> None:
    table = Table("status", "workers", "slices and classes", "bytes", "managedFields", "of what etcd takes")
    service, rollout = schema_of("earlyexitservices"), schema_of("ramprollouts")
    cases = [("EarlyExitService", n, k, service_status(n, k), service) for n in WORKERS for k in SLICES]
    cases += [("RampRollout", n, 0, rollout_status(n), rollout) for n in WORKERS]
    for kind, n, k, status, schema in cases:
        own, beside = size(status), size(managed(status, schema))
        table.add_row(kind, f"{n:,}", str(k), f"{own:,}", f"{beside:,}", f"{(own + beside) / ETCD_BYTES:.0%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
