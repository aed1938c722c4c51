"""The manifests of docs/how-to/pools.md are some."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from offramp_core.control.spec import parse_spec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "pools.md"


def test_the_manifests_of_the_page_are_what_the_page_says() -> None:
    fixed, both, priced, counted, shared = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    spot, fast = parse_spec(yaml.safe_load(priced)["spec"]).pools
    assert (spot.cost_per_hour, spot.max_workers, spot.fixed) == (0.04, 8, False)
    assert (fast.cost_per_hour, fast.min_workers, fast.max_workers) == (0.17, 1, 4)
    assert (
        parse_spec(yaml.safe_load(counted)["spec"]).counts_exits
        and not parse_spec(yaml.safe_load(priced)["spec"]).counts_exits
    )
    fast, spot = parse_spec(yaml.safe_load(fixed)["spec"]).pools
    assert (fast.name, fast.replicas, spot.name, spot.replicas) == ("fast", 2, "spot", 3)
    assert fast.worker["nodeSelector"] != spot.worker["nodeSelector"]
    assert "topologySpreadConstraints" in fast.worker and "topologySpreadConstraints" in spot.worker
    cpu, gpu = parse_spec(yaml.safe_load(both)["spec"]).pools
    assert not cpu.bundle and gpu.bundle["model_uri"].endswith("-cuda:1") and "cuda" in gpu.worker["image"]
    limited, service = yaml.safe_load_all(shared)
    (pool,) = parse_spec(service["spec"]).pools
    assert limited["kind"] == "WorkerClass" and pool.class_name == limited["metadata"]["name"]
    assert (pool.most, limited["spec"]["maxWorkers"]) == (12, 20)
