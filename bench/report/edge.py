"""Edge and core: latency over narrow uplinks, what the core computes, and an outage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.provenance import words
from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

HOW = "bench.edge"
HEADS = ["uplink", "edge's processor", "all-edge", "all-core", "by way of the box", "split", "as they came", "ratio"]
HEADS += ["95 %", "ratio by way", "95 % by way", "learning", "core computes"]
MOST_RATIO, MOST_COMPUTING = 1.02, 0.5


LATENCY = f"edge and core at 1, 10, 100 Mbit/s: mean latency at most {MOST_RATIO:g} x the smaller of all-edge's and "
DIRECT, BY_WAY = LATENCY + "all-core's", LATENCY + "all-core's by way of the box"
COMPUTING = "edge and core, highway video at 1 %: what the core computes at most halved against all-core, the same "
COMPUTING += "exits on"
OUTAGE = "an outage of the uplink: `Answer` loses nothing, `Refuse` says so"


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of edges."""
    found = results.get("edge") or {}
    asked = {
        DIRECT: ("latency", partial(_latency, "ratio")),
        BY_WAY: ("latency", partial(_latency, "by_way")),
        COMPUTING: ("computing", _computing),
        OUTAGE: ("outage", _outage),
    }
    for target, (part, told) in asked.items():
        if part in found:
            measured, met = told(found)
            yield Goal(target, measured, HOW, met, words(found["measured"][part]))
        else:
            yield Goal(target, MISSING, HOW, None)


def _latency(of: str, found: dict[str, Any]) -> tuple[str, bool]:
    ratios = [row[of]["of_means"] for row in found["latency"]]
    return f"{min(ratios):.3f} to {max(ratios):.3f}", max(ratios) <= MOST_RATIO


def _computing(found: dict[str, Any]) -> tuple[str, bool]:
    spent = {name: each["ms_by_row"] for name, each in found["computing"].items()}
    same = spent["edge plan"]
    shares = {sent: spent[sent] / same for sent in ("Input", "Features")}
    auto = [row["core_computes"] for row in found.get("latency", ())]
    measured = (
        f"{shares['Features']:.2f} (`--residue Features`), {shares['Input']:.2f} (`Input`)"
        + (f", {min(auto):.2f} to {max(auto):.2f} by uplink and box (`Auto`)" if auto else "")
        + f"; of all-core without exits {spent['Features'] / spent['exact']:.2f} and "
        f"{spent['Input'] / spent['exact']:.2f}"
    )
    return measured, min(shares.values()) <= MOST_COMPUTING


def _outage(found: dict[str, Any]) -> tuple[str, bool]:
    told = {each["offline"]: each for each in found["outage"]}
    seconds = f"{told['Answer']['seconds']:g} s: "
    measured = "; ".join(f"{name}: {_counts(each)}" for name, each in told.items())
    met = told["Answer"]["answered"] == told["Answer"]["asked"]
    met = met and all(each["answered"] + each["refused"] == each["asked"] for each in told.values())
    return seconds + measured, met


def _counts(each: dict[str, Any]) -> str:
    return (
        f"{each['answered']:,} of {each['asked']:,} answered ({each['answered_offline']:,} offline), "
        f"{each['refused']:,} refused"
    )


def section(results: Results) -> list[str]:
    """The figures by rate and speed."""
    found = results.get("edge") or {}
    measured = found.get("measured", {})
    body = [
        [
            f"{row['mbit']:g} Mbit/s",
            percent(row["share"], 0),
            *(f"{row['ms'][arm]:.2f} ms" for arm in ("edge", "core", "by way", "split")),
            percent(row["relayed"], 0),
            *(text for of in ("ratio", "by_way") for text in _ratio(row[of])),
            f"{row['learning']:.2f}",
            percent(row["core_computes"], 0),
        ]
        for row in found.get("latency", ())
    ]
    computing = [
        [name, f"{each['ms_by_row']:.2f} ms", percent(each["final"], 1)]
        for name, each in found.get("computing", {}).items()
    ]
    return [
        "## Edge and core",
        "",
        "`python -m bench.edge`: the core in a network of its own behind a token bucket in each direction, the edge as "
        "fast as the core or with a quarter of a processor, one row at a time, 2 % audited. *All-edge* computes all on "
        "the box, *all-core* sends all to the core, both with the same plan; *split* is `--residue Auto`. Arms take "
        "turns in blocks of 20 rows, each with a share of its own. The ratio is the split's mean over the smaller of "
        "these two, once it has answered 400 rows; *learning* is the same of those. *As they came* are the split's "
        "requests that the core got whole. *By way of the box* is all-core for who reaches the box alone, as clients "
        "of an edge do: through a process there, with the same share of a processor, that hands bytes on and nothing "
        "else. *Core computes* is the core's processor time by row of the split, over that of all-core.",
        "",
        *table(HEADS, body),
        *(measured_line(words(measured["latency"])) if "latency" in measured else []),
        "",
        "What the core computes (processor time by row that was asked, audits with it): of all-core without exits "
        "(*exact*), with the *plan* of one worker and with the one that a control loop finds for an edge; and of an "
        "edge with the latter that sends inputs or features.",
        "",
        *table(["what comes in", "core's processor by row", "leave at no exit"], computing),
        *(measured_line(words(measured["computing"])) if "computing" in measured else []),
    ]


def _ratio(found: dict[str, float]) -> tuple[str, str]:
    return f"{found['of_means']:.3f}", f"{found['low']:.3f} to {found['high']:.3f}"
