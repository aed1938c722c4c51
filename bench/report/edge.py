"""Edge and core: latency over narrow uplinks, what the core computes, and an outage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.provenance import words
from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

HOW = "bench.edge"
HEADS = ["uplink", "edge's processor", "all-edge", "all-core", "by way of the box", "split", "as they came", "ratio"]
HEADS += ["by round", "ratio by way", "core computes"]
MOST_RATIO, MOST_COMPUTING = 1.02, 0.5


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of edges."""
    found = results.get("edge")
    latency = (
        f"edge and core at 1, 10, 100 Mbit/s: mean latency at most {MOST_RATIO:g} x the smaller of all-edge's and "
        "all-core's"
    )
    computing = (
        "edge and core, highway video at 1 %: what the core computes at most halved against all-core, the same exits on"
    )
    outage = "an outage of the uplink: `Answer` loses nothing, `Refuse` says so"
    if found is None:
        for asked in (latency, computing, outage):
            yield Goal(asked, MISSING, HOW, None)
        return
    when = words(found["measured"])
    ratios = [row["ratio"]["of_means"] for row in found["latency"]]
    by_way = max(row["ratio"]["by_way"] for row in found["latency"])
    measured = f"{min(ratios):.3f} to {max(ratios):.3f}; at most {by_way:.3f} of all-core by way of the box"
    yield Goal(latency, measured, HOW, max(ratios) <= MOST_RATIO, when)
    spent = {name: each["ms_by_row"] for name, each in found["computing"].items()}
    same = spent["edge plan"]
    shares = {sent: spent[sent] / same for sent in ("Input", "Features")}
    auto = [row["core_computes"] for row in found["latency"] if "core_computes" in row]
    measured = (
        f"{shares['Features']:.2f} (`--residue Features`), {shares['Input']:.2f} (`Input`)"
        + (f", {min(auto):.2f} to {max(auto):.2f} by uplink and box (`Auto`)" if auto else "")
        + f"; of all-core without exits {spent['Features'] / spent['exact']:.2f} and "
        f"{spent['Input'] / spent['exact']:.2f}"
    )
    yield Goal(computing, measured, HOW, min(shares.values()) <= MOST_COMPUTING, when)
    told = {each["offline"]: each for each in found["outage"]}
    seconds = f"{told['Answer']['seconds']:g} s: "
    measured = "; ".join(f"{name}: {_counts(each)}" for name, each in told.items())
    met = told["Answer"]["answered"] == told["Answer"]["asked"]
    met = met and all(each["answered"] + each["refused"] == each["asked"] for each in told.values())
    yield Goal(outage, seconds + measured, HOW, met, when)


def _counts(each: dict[str, Any]) -> str:
    return (
        f"{each['answered']:,} of {each['asked']:,} answered ({each['answered_offline']:,} offline), "
        f"{each['refused']:,} refused"
    )


def section(results: Results) -> list[str]:
    """The figures by rate and speed."""
    found = results.get("edge")
    rows = (found or {"latency": []})["latency"]
    body = [
        [
            f"{row['mbit']:g} Mbit/s",
            percent(row["share"], 0),
            *(f"{row['ms'][arm]:.2f} ms" for arm in ("edge", "core", "by way", "split")),
            percent(row.get("relayed"), 0),
            f"{row['ratio']['of_means']:.3f}",
            f"{row['ratio']['low']:.3f} to {row['ratio']['high']:.3f}",
            f"{row['ratio']['by_way']:.3f}",
            percent(row.get("core_computes"), 0),
        ]
        for row in rows
    ]
    computing = [
        [name, f"{each['ms_by_row']:.2f} ms", percent(each["final"], 1)]
        for name, each in (found or {"computing": {}})["computing"].items()
    ]
    return [
        "## Edge and core",
        "",
        "`python -m bench.edge`: the core in a network of its own behind a token bucket in each direction, the edge as "
        "fast as the core or with a quarter of a processor, one row at a time, 2 % audited. *All-edge* computes all on "
        "the box, *all-core* sends all to the core, both with the same plan; *split* is `--residue Auto`. The ratio is "
        "the split's mean over the smaller of these two; *as they came* are the split's requests that the core got "
        "whole. *By way of the box* is all-core for who reaches the box alone, as clients of an edge do: through a "
        "process there, with the same share of a processor, that hands bytes on and nothing else. *Core computes* is "
        "the core's processor time by row of the split, over that of all-core.",
        "",
        *table(HEADS, body),
        "",
        "What the core computes (processor time by row that was asked, audits with it): of all-core without exits "
        "(*exact*), with the *plan* of one worker and with the one that a control loop finds for an edge; and of an "
        "edge with the latter that sends inputs or features.",
        "",
        *table(["what comes in", "core's processor by row", "leave at no exit"], computing),
        *(measured_line(words(found["measured"])) if found else []),
    ]
