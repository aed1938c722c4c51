"""Traffic whose requests resemble each other, years of everything at once, and ten years of attempts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.report.results import MISSING, Goal, Results, measured_line, percent, table
from bench.streams import PARTS

WRONG, BROKEN_YEARS = 0.05, 0.05
POWER_POINTS = 1.0
# Part of bench.streams: what is asked, what its runs may come to, and the share of them that may.
ASKED = {
    "scenes": (
        "scenes of 1 to 1,000 requests from 1 to 64 named sources: certificates over a budget of 1 % in <= 5 % of runs",
        WRONG,
    ),
    "attempts": (
        "the tuner's first certificate, attempt by attempt from the first labels on, of the same named sources: over "
        "budget in <= 5 % of runs",
        WRONG,
    ),
    "cycles": ("the same where days are busy and hard, nights quiet and easy, and audits follow load", WRONG),
    "orders": (
        "stretches of the real order of highway video, IMDB and SST-2: certificates over budget in <= 5 % of runs",
        WRONG,
    ),
    "minorities": (
        "few requests from a named camera in scenes, some wholly wrong: over budget in <= 5 % of runs",
        WRONG,
    ),
    "conversations": (
        "scenes of 3 and 10 requests that are streams of their own: over budget in <= 5 % of runs",
        WRONG,
    ),
    "pins": ("the same scenes: pins at twice the budget accepted by their canary in <= 5 % of runs", WRONG),
    "alarms": ("the same scenes: median time to a false alarm at half the budget > 100,000 labels", 0.5),
}
UNNAMED = "unnamed"
TABLES = ("scenes", "attempts", "cycles", "orders", "minorities", "conversations", "pins", "alarms")
TRAFFIC = {part.name: tuple(row for row, *_ in part.traffic()) for part in PARTS}


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of evidence on real traffic."""
    found, when = results.get("streams") or {}, results.measured("streams")
    for part, (asked, allowed) in ASKED.items():
        ran = found.get(part, {})
        rows = {row: ran[row] for row in TRAFFIC[part] if row in ran and UNNAMED not in row}
        if len(rows) < sum(UNNAMED not in row for row in TRAFFIC[part]):
            yield Goal(asked, MISSING, f"bench.streams --only {part}", None)
            continue
        worst = max(rows, key=lambda row: rows[row]["wrong"] / rows[row]["runs"])
        most = rows[worst]
        measured = (
            f"at most {most['wrong']} of {most['runs']} ({worst})"
            if most["wrong"]
            else f"0 of {most['runs']} in each of {len(rows)} kinds of traffic"
        )
        yield Goal(asked, measured, "bench.streams", most["wrong"] <= allowed * most["runs"], when)
    asked = "power lost on independent rows by looking for scenes <= 1 point of saving at 2,000 labels"
    rows = found.get("power", {})
    if not rows:
        yield Goal(asked, MISSING, "bench.streams --only power", None)
    for figures in rows.values():
        measured = f"{figures['mean']:.2f} points; {figures['wrong']} of {figures['runs']} samples taken for scenes"
        yield Goal(asked, measured, "bench.streams", figures["mean"] <= POWER_POINTS, when)
    yield _years(results)
    yield _decades(results)


def _years(results: Results) -> Goal:
    asked = (
        "a year of days and nights, load peaks, drift and scenes through the real control loop keeps its budget "
        "in >= 95 % of runs"
    )
    found = results.get("traffic")
    if found is None:
        return Goal(asked, MISSING, "bench.control_traffic", None)
    rows = {name: row for name, row in found.items() if name != "measured"}
    broken, runs = sum(row["broken"] for row in rows.values()), sum(row["runs"] for row in rows.values())
    worst = max(row["worst"] for row in rows.values())
    days = min(row["days"] for row in rows.values())
    return Goal(
        asked,
        f"kept in {runs - broken} of {runs} runs of {days} days, the worst at {percent(worst, 2)} of a budget of 1 %",
        "bench.control_traffic",
        broken <= BROKEN_YEARS * runs,
        results.measured("traffic"),
    )


def _decades(results: Results) -> Goal:
    asked = (
        "ten years of attempts at 0.1 to 1,000 requests a second and budgets of 0.1 to 5 %: never locked, never "
        "many audits for ever"
    )
    found = results.rows("decade")
    if found is None:
        return Goal(asked, MISSING, "bench.decade", None)
    locked = [d for d in found if not d["tests"] and not d["hopeless"]]
    eager = max(d["eager"] for d in found)
    measured = (
        f"{len(locked)} of {len(found)} locked; audits beyond the quiet rate for at most {percent(eager)} of the time"
    )
    return Goal(asked, measured, "bench.decade", not locked and eager < 0.5)


def section(results: Results) -> list[str]:
    """All of it in full."""
    found = results.get("streams") or {}
    lines = [
        "## Requests that resemble each other",
        "",
        "A source shows scenes, copies of one recorded row each, which is the worst that a scene can be; sources take "
        "turns at random. *Decided* are the runs with a certificate, an",
        "accepted or rejected pin, or a plan that the detector watches; in the others more labels are awaited. *Worth "
        "one* is how many labels count as one (median; 0: nobody can say).",
        "Sources that do not name themselves are told as what naming is for: very many of them with scenes as long as "
        "the sample cannot be told from independent requests. *First certificates* are those that the tuner comes to,",
        "attempt by attempt from the first labels on (decisions 149 and 150), within 60,000 labels.",
        "",
    ]
    for part, head in (
        ("scenes", "certificates over budget"),
        ("cycles", "over budget, day and night"),
        ("orders", "over budget, own order"),
        ("minorities", "over budget, 5 % of requests from a named camera"),
        ("conversations", "over budget, a name for each scene"),
    ):
        body = _rows(found, part, "{:.1f}")
        lines += table(["traffic", head, "decided", "worth one"], body)
    for part, head, last in (
        ("attempts", "first certificates over budget", "labels"),
        ("pins", "pins at twice the budget accepted", "audits"),
        ("alarms", "false alarms within 100,000 labels", "labels"),
    ):
        body = _rows(found, part, "{:,.0f}")
        lines += table(["traffic", head, "decided", f"{last}, median"], body)
    lines += measured_line(results.measured("streams"), _only(found)) if found else []
    return [*lines, *_traffic(results), *_decade(results)]


def _rows(found: dict[str, Any], part: str, median: str) -> list[list[str]]:
    """Every kind of traffic of a part, those that were not run too; none where nothing was."""
    rows = found.get(part, {})
    return (
        [
            [row, _of(f, "wrong"), _of(f, "decided"), median.format(f["median"])]
            if (f := rows.get(row))
            else [row, *[MISSING] * 3]
            for row in TRAFFIC[part]
        ]
        if found
        else []
    )


def _only(found: dict[str, Any]) -> str:
    """Which rows were measured, where not all of them were."""
    ran = {part: [row for row in rows if row in found.get(part, {})] for part, rows in TRAFFIC.items()}
    if all(ran[part] == list(TRAFFIC[part]) for part in TABLES):
        return ""
    return "only " + "; ".join(f"{part}: {', '.join(rows)}" for part, rows in ran.items() if rows and part in TABLES)


def _of(figures: dict[str, Any], name: str) -> str:
    return f"{figures[name]} of {figures['runs']}"


def _traffic(results: Results) -> list[str]:
    found = results.get("traffic") or {}
    body = [
        [
            name,
            f"{row['broken']} of {row['runs']}",
            str(row["days"]),
            f"{percent(row['disagreement'], 2)} / {percent(row['worst'], 2)}",
            percent(row["saving"]),
            f"{row['days_above']:.0f}",
            f"{row['days_off']:.1f}",
            f"{row['tests']:.0f}, {row['rollouts']:.0f}, {row['alarms']:.0f}",
        ]
        for name, row in found.items()
        if name != "measured"
    ]
    return [
        "*A year with everything*: `bench.control_traffic` adds hours, load peaks, audits that follow the load and "
        "scenes of named sources to the simulated years below.",
        "",
        *table(
            [
                "years of",
                "over budget",
                "days",
                "disagreement p50 / worst",
                "saving",
                "days above budget",
                "days off",
                "tests, rollouts, alarms",
            ],
            body,
        ),
        *(measured_line(results.measured("traffic")) if found else []),
    ]


def _decade(results: Results) -> list[str]:
    found = results.rows("decade") or []
    body = [
        [
            f"{d['rate']:g}",
            percent(d["budget"]),
            f"{d['tests']:,}",
            span(d["first"]),
            span(d["last"]),
            percent(d["eager"]),
        ]
        if not d["hopeless"]
        else [f"{d['rate']:g}", percent(d["budget"]), "0", d["hopeless"], "", ""]
        for d in found
    ]
    return [
        "*Ten years of attempts*: a tuner that tries in every hour that it may, at the end of which each test is the "
        "strictest.",
        "",
        *table(
            [
                "requests a second",
                "budget",
                "tests",
                "labels for the first certificate",
                "for the next, after ten years",
                "audits beyond the quiet rate",
            ],
            body,
        ),
    ]


def span(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
