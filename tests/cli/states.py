"""Services in many states, as the control loop itself leaves them: a simulated fleet is driven there, and its objects
are stored as the embedded shell stores them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fleet import MANIFEST, Fleet, pool  # type: ignore[import-not-found]

from offramp_core.control.codec import format_time
from offramp_core.control.objects import Service
from offramp_operator.local.records import save_pool
from offramp_operator.shell.manifests import API_VERSION, CONFIG_KIND, ROLLOUT_KIND, SERVICE_KIND, status_json
from offramp_operator.shell.record_pool import RampSetKey

CLEAN = pool(4000, seed=1)
DRIFTED = pool(4000, seed=2, confusion=0.35)
BUDGET = {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.05"}}
MANUAL = {**MANIFEST["rollout"], "promotion": "Manual"}
PIN = {"ramps": [{"id": "r01-grid", "threshold": "0.1"}]}
RECKLESS = {"ramps": [{"id": "r00-grid", "threshold": "1"}]}


def canary(fleet: Fleet) -> bool:
    rollout = list(fleet.rollouts.values())[-1] if fleet.rollouts else None
    return rollout is not None and rollout.status.phase == "Progressing" and rollout.status.audited[0] > 20


def promoted(fleet: Fleet) -> bool:
    return "Succeeded" in fleet.verdicts()


def starting() -> Fleet:
    fleet = Fleet(CLEAN)
    for worker in fleet.workers:
        worker.ready = False
    fleet.step()
    return fleet


def collecting() -> Fleet:
    fleet = Fleet(CLEAN, requests_per_second=60)
    fleet.run(lambda f: f.status.tuning.labels >= 200)
    return fleet


def progressing() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(canary)
    return fleet


def promoted_once() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(promoted)
    fleet.run(lambda f: f.status.phase == "Ready" and f.status.observed.samples > 0)
    return fleet


def measured() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "ramps": {"holdback": "0.2"}})
    fleet.run(lambda f: f.status.measured.batches > 2000)
    return fleet


def rolled_back() -> Fleet:
    fleet = promoted_once()
    fleet.edit(objective=BUDGET)
    fleet.run(lambda f: f.published is not None and f.published.canary is not None)
    fleet.drift(DRIFTED)
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=60)
    return fleet


def awaiting() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "rollout": MANUAL})
    fleet.run(lambda f: any(r.status.phase == "AwaitingPromotion" for r in f.rollouts.values()))
    return fleet


def recommended() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "ramps": {"mode": "Recommend"}})
    fleet.run(lambda f: f.status.tuning.state == "Recommended")
    fleet.step()
    return fleet


def disabled() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "ramps": {"mode": "Disabled"}})
    fleet.run(lambda f: f.status.settled_generation == 1)
    return fleet


def pin_in_canary() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "ramps": {"mode": "Pinned", "pin": PIN}})
    fleet.run(canary)
    return fleet


def pin_rejected() -> Fleet:
    fleet = collecting()
    fleet.edit(ramps={"mode": "Pinned", "pin": RECKLESS})
    fleet.run(lambda f: f.status.pin.verdict == "Rejected")
    return fleet


STATES: Mapping[str, Callable[[], Fleet]] = {
    f.__name__: f
    for f in (
        starting,
        collecting,
        progressing,
        promoted_once,
        measured,
        rolled_back,
        awaiting,
        recommended,
        disabled,
        pin_in_canary,
        pin_rejected,
    )
}


# --- as files --------------------------------------------------------------------------------------


def objects(fleet: Fleet) -> list[dict[str, Any]]:
    """Everything that belongs to the service, as an API server would show it."""
    service: Service = fleet.service
    status = status_json(replace(service.status, url=""))
    request = {"annotations": {"earlyexit.dev/request": service.request}} if service.request else {}
    owner = [{"kind": SERVICE_KIND, "name": service.name, "uid": service.uid, "controller": True}]
    children = [
        *(
            _object(
                CONFIG_KIND, c.name, c.created_at, c.plan.to_mapping(), status_json(c.status), ownerReferences=owner
            )
            for c in fleet.configs.values()
        ),
        *(
            _object(ROLLOUT_KIND, r.name, r.created_at, _rollout_spec(r), status_json(r.status), ownerReferences=owner)
            for r in fleet.rollouts.values()
        ),
    ]
    own = _object(
        SERVICE_KIND,
        service.name,
        1_000_000.0,
        fleet.manifest,
        status,
        uid=service.uid,
        generation=service.generation,
        **request,
    )
    return [own, *children]


def _rollout_spec(rollout: Any) -> dict[str, Any]:
    spec = {
        "serviceName": "sim",
        "from": rollout.from_config,
        "to": rollout.to_config,
        "generation": rollout.generation,
        "cause": rollout.cause,
    }
    return {
        **spec,
        **({"paused": True} if rollout.paused else {}),
        **({"decision": rollout.decision} if rollout.decision else {}),
    }


def _object(kind: str, name: str, created: float, spec: Any, status: Any, **metadata: Any) -> dict[str, Any]:
    meta = {
        "namespace": "default",
        "name": name,
        "uid": f"{name}-uid",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": format_time(created),
        **metadata,
    }
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": meta, "spec": spec, "status": status}


def write_state(fleet: Fleet, folder: Path, *, running: bool = True) -> Path:
    """The state folder that ``offramp up`` would have left."""
    for manifest in objects(fleet):
        path = folder / "objects" / manifest["kind"] / f"{manifest['metadata']['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest))
    (folder / "lock").write_text(f"{os.getpid() if running else 2**22 + 1}\n")
    workers = [
        {
            "name": w.name,
            "uid": w.name,
            "port": 9000 + i,
            "admin_port": 9100 + i,
            "restarts": w.restarts,
            "pid": 100 + i,
        }
        for i, w in enumerate(fleet.workers)
    ]
    (folder / "workers.json").write_text(json.dumps({"workers": workers, "next": len(workers)}))
    return folder


def write_records(fleet: Fleet, folder: Path) -> None:
    """What the embedded shell keeps of the fleet's audits."""
    store = fleet._store()
    assert store is not None
    records = store.records
    prediction = np.where(records.agrees, 0, 1).astype(np.int32)
    final = np.zeros(len(records), dtype=np.int32)
    arrays = {
        "time": records.time,
        "uncertainty": records.uncertainty,
        "prediction": prediction,
        "final": final,
        "reference": final,
        "ramp_id": np.array(store.ramp_ids),
        "ramp_precision": np.array(["fp32"] * len(store.ramp_ids)),
        "boot": np.array(["a"]),
        "next": np.array([len(records)]),
    }
    (folder / "records").mkdir(exist_ok=True)
    save_pool(folder / "records", RampSetKey(store.backbone_digest, store.ramp_set_digest), arrays)
