"""What labels a certificate takes, by how they are spent."""

from __future__ import annotations

from bench.labels import WAYS, told
from bench.report.results import MISSING, Results, measured_line, percent, table


def section(results: Results) -> list[str]:
    """Least labels for 90 % of what can be saved, on every recorded set."""
    lines = ["## Labels for a certificate worth 90 % of what can be saved", ""]
    found = results.rows("labels")
    if found is None:
        return [*lines, f"*{MISSING}.*", ""]
    body = []
    for name in dict.fromkeys(row["set"] for row in found):
        rows = {row["way"]: row for row in found if row["set"] == name}
        best = next(iter(rows.values()))["best"]
        body.append([name, percent(best), *(told(rows[way]) if way in rows else MISSING for way in WAYS)])
    return [
        *lines,
        "Budget 1 %, confidence 95 %, exits on fp32. *Every request alike* is the product's own tuning. The two others label those more often that may disagree, which",
        "needs what the ramps say of a request before it is labelled; how many leave is taken as known. In brackets: certificates over the budget at that number.",
        "",
        *table(["set", "can be saved", *WAYS], body),
        *measured_line(results.measured("labels")),
    ]
