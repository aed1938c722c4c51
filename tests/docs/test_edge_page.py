"""The manifest of docs/how-to/edge.md is one, and the Service that the page names is the edge's."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from offramp_core.control.spec import Edge
from offramp_operator.kube.manifests import edges_service
from offramp_operator.kube.pools import in_pools
from offramp_operator.shell.manifests import service_from_manifest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "edge.md"


def test_the_manifest_of_the_page_makes_one_pool_the_edge() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    manifest = yaml.safe_load(text)
    manifest["metadata"]["uid"] = "uid"
    service = service_from_manifest(manifest)
    assert service.spec.edge == Edge("shop", offline="Answer")
    edge = in_pools(service)[-1]
    assert edge.spec.is_edge and edge.spec.worker["nodeSelector"] == {"node.example.com/site": "shop"}
    assert f"`{edges_service(service)['metadata']['name']}`" in PAGE.read_text()
