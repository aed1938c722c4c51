"""Several models in one worker: who leaves memory."""

from __future__ import annotations

from collections.abc import Iterator

from bench.eviction import OURS, WORTH
from bench.provenance import words
from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

HOW = "bench.eviction"
HEAD = ["trace", "models", "requests", "memory, of all models'", *WORTH, OURS]


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of evictions."""
    asked = "eviction: seconds of reloads that requests wait for, below LRU's and LFU's on every trace"
    found = results.get("eviction")
    if found is None:
        yield Goal(asked, MISSING, HOW, None)
        return
    traces = sorted({row["trace"] for row in found["rows"]})
    lost = {
        policy: [sum(row[policy] for row in found["rows"] if row["trace"] == trace) for trace in traces]
        for policy in (*WORTH, OURS)
    }
    ratios = {
        policy: [ours / theirs for ours, theirs in zip(lost[OURS], lost[policy], strict=True)] for policy in WORTH
    }
    measured = "; ".join(f"{min(each):.2f} to {max(each):.2f} of {policy}'s" for policy, each in ratios.items())
    met = all(ratio < 1 for each in ratios.values() for ratio in each)
    yield Goal(asked, measured, HOW, met, words(found["measured"]))


def section(results: Results) -> list[str]:
    """What policies lose by trace and memory."""
    found = results.get("eviction")
    body = [
        [
            row["trace"],
            str(row["models"]),
            f"{row['requests']:,}",
            percent(row["share"], 0),
            *(f"{row[policy]:,.1f} s" for policy in (*WORTH, OURS)),
        ]
        for row in (found or {"rows": []})["rows"]
    ]
    return [
        "## Several models in one worker",
        "",
        "`python -m bench.eviction`: every function of a trace is a model, with sizes and seconds to reload that are "
        "drawn (16 to 512 MB; mean of 8 draws). What a policy loses is the sum of reloads that requests wait for, "
        "first loads aside. Of the four models of one trace 20 and 40 % hold one or two, and nobody has a choice.",
        "",
        *table(HEAD, body),
        *(measured_line(words(found["measured"])) if found else []),
    ]
