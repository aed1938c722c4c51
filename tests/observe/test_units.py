"""Every query of rules and dashboards keeps to units: sums and ratios of equal ones, and shares that have none.

The unit of each metric stands where it is made. The queries are read by the real grammar (promql-parser), and worked
out from the leaves up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from scripts.metrics import IN_NAMES, UNITS, generation_rows, operator_rows, shared_rows, unit_of, worker_rows

ROOT = Path(__file__).parents[2]
FILES = ROOT / "helm" / "offramp" / "files"
ANY = "any"  # a constant
SHARE = "ratio"
OF_PROCESSES = {"process_cpu_seconds_total": "seconds", "process_resident_memory_bytes": "bytes"}
STATE = "state"  # 0 or 1
# The only quotients of two units that are meant; a loss lies between 0 and 1.
MEANS = {("rows/s", "batches/s"): "rows", ("losses", "audits"): SHARE}
PANELS = {
    "percentunit": {SHARE},
    "reqps": {"requests/s"},
    "suffix: rows/s": {"rows/s"},
    "suffix: tokens/s": {"tokens/s"},
    "suffix: answers/s": {"answers/s"},
    "s": {"seconds", SHARE},
    "bytes": {"bytes"},
}


class UnitError(Exception):
    """Two units that do not go together."""


def unit(query: str, recorded: Mapping[str, str] | None = None) -> str:
    """What a query is told in."""
    return _Units(recorded or {}).of(promql.parse(query))


class _Units:
    def __init__(self, recorded: Mapping[str, str]) -> None:
        self._recorded = recorded

    def of(self, e: Any) -> str:
        match type(e).__name__:
            case "NumberLiteral":
                told = ANY
            case "ParenExpr" | "UnaryExpr":
                told = self.of(e.expr)
            case "VectorSelector":
                told = self._metric(e.name)
            case "MatrixSelector":
                told = self._metric(e.vector_selector.name)
            case "AggregateExpr":
                told = "series" if str(e.op) in ("count", "group") else self.of(e.expr)
            case "Call":
                told = self._call(e.func.name, e.args)
            case "BinaryExpr":
                told = self._binary(str(e.op), self.of(e.lhs), self.of(e.rhs), e)
            case _:
                raise UnitError(f"{e}: not known to this test")
        return told

    def _metric(self, name: str) -> str:
        if name in self._recorded:
            return self._recorded[name]
        for suffix, part in (("_bucket", 1), ("_count", 1), ("_sum", 0)):
            told = UNITS.get(name.removesuffix(suffix), "")
            if name.endswith(suffix) and " by " in told:
                return told.split(" by ")[part]
        return OF_PROCESSES.get(name) or unit_of(name) or STATE

    def _call(self, name: str, arguments: list[Any]) -> str:
        if name in ("rate", "irate"):
            told = self.of(arguments[0])
            return SHARE if told == "seconds" else f"{told}/s"
        if name == "histogram_quantile":
            bucket = re.search(r"(\w+)_bucket", str(arguments[1]))
            assert bucket is not None
            return UNITS[bucket[1]].split(" by ")[0]
        if name in ("ln", "absent"):
            return SHARE
        if name == "time":
            return "seconds"
        if name == "vector":
            return ANY
        if name in ("increase", "round", "clamp_max", "clamp_min"):
            return self.of(arguments[0])
        raise UnitError(f"{name}(): not known to this test")

    def _binary(self, op: str, left: str, right: str, e: Any) -> str:
        constant = left if right in (ANY, left) else right if left == ANY else ""
        if op in ("and", "unless"):
            return left
        if op == "/":
            return SHARE if left == right != ANY else MEANS.get((left, right)) or self._scaled(left, right, e)
        if op == "*":
            return constant or self._scaled(left, right, e)
        if not constant:
            raise UnitError(f"{left} {op} {right}: {e}")
        return constant

    def _scaled(self, left: str, right: str, e: Any) -> str:
        """By a constant, a share, or a number of series."""
        if right in (ANY, SHARE, "series"):
            return left
        raise UnitError(f"{left} by {right}: {e}")


def recording() -> dict[str, str]:
    """Every recorded rule and its unit, in order."""
    found: dict[str, str] = {}
    for group in yaml.safe_load((FILES / "rules" / "recording.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            found[rule["record"]] = unit(rule["expr"], found)
    return found


def panels() -> Iterator[tuple[str, str, str]]:
    """(where, unit of the panel, query) of all dashboards."""
    for path in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "5m")
                yield f"{path.stem}: {panel['title']}", panel["fieldConfig"]["defaults"]["unit"], query


def test_every_metric_says_what_it_is_told_in() -> None:
    rows = [*worker_rows(), *shared_rows(), *generation_rows(), *operator_rows()]
    assert set(UNITS) <= {row.name for row in rows}
    for row in rows:
        told = unit_of(row.name)
        assert (" by " in told) == (row.kind == "histogram"), row.name
        for word in IN_NAMES:  # a name may not say something else
            last = row.name.removesuffix("_total").rsplit("_", 1)[-1]
            assert last != word or told.split(" by ")[0] == word, f"{row.name} is told in {told}"


def test_recorded_shares_have_no_unit_and_rates_have_one() -> None:
    for name, told in recording().items():
        assert (told == SHARE) == (":ratio" in name or name == "earlyexit:ramp_utility:rate5m"), f"{name}: {told}"
    assert recording()["earlyexit:requests:rate5m"] == "requests/s"


def test_no_alert_compares_one_unit_with_another() -> None:
    recorded = recording()
    for group in yaml.safe_load((FILES / "rules" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            unit(rule["expr"], recorded)


@pytest.mark.parametrize(("where", "shown", "query"), [pytest.param(*p, id=p[0]) for p in panels()])
def test_a_panel_shows_what_its_axis_says(where: str, shown: str, query: str) -> None:
    told = unit(query)
    assert told in PANELS.get(shown, {told}), f"{where} shows {told} as {shown}"


@pytest.mark.parametrize(
    "wrong",
    [
        'rate(earlyexit_requests_total{outcome="rejected"}[5m]) / rate(earlyexit_rows_total[5m])',
        "rate(earlyexit_requests_total[5m]) - sum(rate(earlyexit_rows_total[5m]))",
        "sum(rate(earlyexit_row_duration_seconds_count[5m])) > sum(rate(earlyexit_requests_total[5m]))",
        "increase(earlyexit_disagreements_total[6h]) / increase(earlyexit_exits_total[6h])",
        "earlyexit_inflight / earlyexit_service_workers",
    ],
)
def test_rows_by_requests_and_their_like_are_found(wrong: str) -> None:
    with pytest.raises(UnitError):
        unit(wrong)
