"""The manifest of docs/how-to/pools.md is one."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from offramp_core.control.spec import parse_spec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "pools.md"


def test_the_manifest_of_the_page_is_what_the_page_says() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    fast, spot = parse_spec(yaml.safe_load(text)["spec"]).pools
    assert (fast.name, fast.replicas, spot.name, spot.replicas) == ("fast", 2, "spot", 3)
    assert fast.worker["nodeSelector"] != spot.worker["nodeSelector"]
    assert "topologySpreadConstraints" in fast.worker and "topologySpreadConstraints" in spot.worker
