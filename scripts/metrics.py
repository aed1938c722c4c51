"""Write (or with --check compare) docs/reference/metrics.md and alerts.md: from the code that makes metrics, and from
the chart's rules."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from offramp_operator.metrics import UNITS as OPERATOR_UNITS
from offramp_operator.metrics import Metrics as OperatorMetrics
from offramp_worker.engine.accounts.scrape import EngineState, RampUtility
from offramp_worker.generate.metrics import GENERATION_UNITS, GenerationMetrics
from offramp_worker.metrics import UNITS as WORKER_UNITS
from offramp_worker.metrics import Metrics as WorkerMetrics
from offramp_worker.shared.metrics import SHARED_UNITS, SharedState

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
RULES = ROOT / "helm" / "offramp" / "files" / "rules"
HEAD = """\
# Metrics

What operator and workers tell Prometheus. Base units throughout: seconds, bytes, ratios (0 to 1). Histograms are classic ones with fixed buckets.
No label takes a value from a request, and none grows with time: there are as many series as arms, ramps of the loaded bundle, status codes and
services. This page is generated from the code: `make gen`.

A *row* is one input of a request. Metrics of requests count a request once; those of rows count one of 8 rows 8 times. The *unit* says what a metric is told in,
for histograms also by what they count; only ratios of equal units mean anything, and a test holds the chart's rules and dashboards to that. The *arm* is `stable` or `canary`. Every process also has the usual `process_*` metrics.

| where | address | labels that the scrape has to add |
|---|---|---|
| worker | `/metrics` on the port that serves (8080) | `namespace`, `service`, `pod`: of the pod, `service` from its label `earlyexit.dev/service` |
| operator | `/metrics` on the health port (8080) | none that replace `namespace` and `service` of its series: `honorLabels: true` |
| `offramp up --metrics-port PORT` | `/metrics` of the control loop; `/targets` lists the workers for `http_sd_configs`, labels included | as the operator |

Handy: the **utility of a ramp** in seconds saved per second is
`rate(earlyexit_ramp_saved_seconds_total[5m]) - rate(earlyexit_ramp_overhead_seconds_total[5m])`; the **share of time saved** is their sum over all ramps,
less `rate(earlyexit_audit_seconds_total[5m])` for what audits cost, by `rate(earlyexit_exact_seconds_total[5m])`; **disagreement** is `earlyexit_disagreements_total` by `earlyexit_audited_total`, the only unbiased sample there is. The
recording rules of the chart (`earlyexit:*`) have all of these.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric, as the exposition names it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def rows(registry: CollectorRegistry, *more: Any) -> Iterator[Row]:
    """Every metric of a registry and of further collectors, by name; process metrics aside."""
    found = {}
    for collector in {*registry._collector_to_names, *more}:
        for family in getattr(collector, "describe", list)():
            if not family.name.startswith("process_"):
                labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
                name = f"{family.name}{_SUFFIX.get(family.type, '')}"
                found[name] = Row(name, family.type, tuple(labels), family.documentation)
    yield from (found[name] for name in sorted(found))


_SUFFIX = {"counter": "_total", "info": "_info"}
UNITS = {**GENERATION_UNITS, **WORKER_UNITS, **SHARED_UNITS, **OPERATOR_UNITS}
IN_NAMES = ("batches", "bytes", "ratio", "requests", "rows", "seconds")


def unit_of(name: str) -> str:
    """The unit that the code says, else the one that the metric's name ends with."""
    last = name.removesuffix("_total").rsplit("_", 1)[-1]
    return UNITS[name] if name in UNITS or last not in IN_NAMES else last


def table(metrics: Iterator[Row]) -> str:
    head = "| metric | type | labels | unit | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {unit_of(row.name)} | "
        f"{row.meaning} |\n"
        for row in metrics
    )


def worker_rows() -> list[Row]:
    nothing: Any = None
    return list(rows(WorkerMetrics().registry, RampUtility(nothing), EngineState(nothing, nothing)))


def shared_rows() -> list[Row]:
    return list(rows(CollectorRegistry(), SharedState(None)))


def generation_rows() -> list[Row]:
    return list(rows(GenerationMetrics().registry))


def operator_rows() -> list[Row]:
    return list(rows(OperatorMetrics().registry))


def page() -> str:
    parts = {
        "Workers": worker_rows(),
        "Workers with several models, besides": shared_rows(),
        "Workers of models that generate": generation_rows(),
        "Operator": operator_rows(),
    }
    return "\n".join([HEAD, *(f"## {title}\n\n{table(iter(found))}" for title, found in parts.items())])


ALERTS_HEAD = """\
# Alerts

The chart's alerts (`monitoring.rules.enabled`), each with what is known when it fires and what to do. Severities: *critical* wants somebody now, *warning*
today, *info* is worth knowing. Reasons that an entry names are explained in [Troubleshooting](../troubleshooting.md). Every alert is tested with promtool: it fires
on what it is for, and not before. This page is generated from the rules: `make gen`.
"""


def alerts_page() -> str:
    """Every alert of the chart as an entry that its ``runbook_url`` points at."""
    parts = [ALERTS_HEAD]
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]:
        parts.append(f"## {group['name'].removeprefix('earlyexit-').capitalize()}\n")
        for rule in group["rules"]:
            told = {k: _plain(v) for k, v in rule["annotations"].items()}
            lasting = f", after {rule['for']}" if "for" in rule else ""
            parts.append(
                f"### {rule['alert']}\n\n*{rule['labels']['severity']}{lasting}.* "
                f"{told['summary']}.\n\n{told['description']}\n\n"
                f"**What to do:** {told['action']}\n\n```promql\n{rule['expr'].strip()}\n```\n"
            )
    return "\n".join(parts)


def _plain(text: str) -> str:
    """A template as people read it: the service is NAMESPACE/SERVICE, figures are N."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: m[1].upper(), text)
    return re.sub(r"\{\{ \$value[^}]*\}\}", "N", text)


def main() -> None:
    """Write the pages, or fail where one has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name, text in (("metrics.md", page()), ("alerts.md", alerts_page())):
        path = FOLDER / name
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"docs/reference/{name} has drifted from its source; run 'make gen'")


if __name__ == "__main__":
    main()
