"""The chart's values, from the comments in ``values.yaml`` by the reader that also writes the chart's README."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
<!-- Generated from helm/offramp/values.yaml by scripts/gen.d/docs; edit that instead. -->
# Helm values

`helm install offramp helm/offramp --namespace offramp-system --create-namespace -f values.yaml` takes these. A value that is not listed, or
has the wrong type, is refused with its name: `values.schema.json` is closed.

"""


def _chart() -> ModuleType:
    """``helm/docs.py``, which lives beside the chart and in no package."""
    spec = importlib.util.spec_from_file_location("helm_docs", ROOT / "helm" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["helm_docs"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def outputs() -> dict[str, str]:
    """Pages below ``docs`` and what they should say."""
    chart = _chart()
    values = chart.documented_values((ROOT / "helm" / "offramp" / "values.yaml").read_text(encoding="utf-8"))
    return {"reference/helm-values.md": HEAD + chart.values_table(values) + "\n"}
