"""What labels a certificate takes, by how they are spent."""

from __future__ import annotations

from bench.labels import STAGE, WAYS, told
from bench.provenance import words
from bench.report.results import MISSING, Results, measured_line, percent, table


def section(results: Results) -> list[str]:
    """Least labels for 90 % of what can be saved, on every recorded set."""
    lines = ["## Labels for a certificate worth 90 % of what can be saved", ""]
    found = dict(results.of_stage(STAGE))
    if not found:
        return [*lines, f"*{MISSING}.*", ""]
    from bench.record.catalog import all_names  # imports torch

    body = []
    for name in dict.fromkeys([*sorted(all_names()), *found]):
        rows = {row["way"]: row for row in found[name]["rows"]} if name in found else {}
        best = next(iter(rows.values()))["best"] if rows else None
        body.append([name, percent(best), *(told(rows[way]) if way in rows else MISSING for way in WAYS)])
    return [
        *lines,
        "Budget 1 %, confidence 95 %, exits on fp32. *Every request alike* is the product's own tuning. The two "
        "others label those more often that may disagree, which",
        "needs what the ramps say of a request before it is labelled; how many leave is taken as known. In brackets: "
        "certificates over the budget at that number.",
        "",
        *table(["set", "can be saved", *WAYS], body),
        *measured_line("; ".join(dict.fromkeys(words(result["measured"]) for result in found.values()))),
    ]
