"""Several models in one worker: who leaves memory, whose turn it is, and what that costs against a worker for each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from bench.eviction import OURS, WORTH
from bench.provenance import words
from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

REFUSED = "refused too often"
HOW, SHARING, FLOODS = "bench.eviction", "bench.sharing", "bench.sharing.floods"
HEAD = ["trace", "models", "requests", "memory, of all models'", *WORTH, OURS]
OBJECTIVE_MS, MOST_MEMORY, LEAST_THROUGHPUT, MOST_GROWTH, LEAST_KEPT, MOST_WORKERS = 50.0, 0.5, 0.9, 1.2, 0.95, 1.05


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of evictions, of shared workers, of packing and of floods."""
    yield _of_evictions(results.get("eviction"))
    yield from _of_sharing(results.get("sharing"))
    yield _of_floods(results.get("floods"))


def _of_sharing(found: dict[str, Any] | None) -> Iterator[Goal]:
    asked = (
        f"24 services on two shared workers: p95 <= {OBJECTIVE_MS:.0f} ms of each at 0.6 of what 24 workers can do",
        f"memory of the two <= {MOST_MEMORY} of the 24 workers'",
        f"requests a second within the objective >= {LEAST_THROUGHPUT} of the 24 workers'",
        f"a refused request that comes back after Retry-After is answered in >= {percent(LEAST_KEPT, 0)}",
        f"packing within {percent(MOST_WORKERS - 1, 0)} of the fewest workers on 500 small cases",
    )
    if found is None:
        yield from (Goal(f"sharing: {each}", MISSING, SHARING, None) for each in asked)
        return
    when = words(found["measured"])
    for each, (measured, met) in zip(asked, _answers(found), strict=True):
        yield Goal(f"sharing: {each}", measured, SHARING, met, when)


def _answers(found: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    load, cold, packing = found["load"], found["cold"], found["packing"]
    p95 = load["p95_ms"]["shared"].values()
    yield f"{_ms(_slowest(p95))} of the slowest", all(ms is not None and ms <= OBJECTIVE_MS for ms in p95)
    memory = load["memory"]["shared"] / load["memory"]["separate"]
    yield f"{memory:.2f}", memory <= MOST_MEMORY
    throughput = load["capacity"]["shared"] / load["capacity"]["separate"]
    yield f"{throughput:.2f}", throughput >= LEAST_THROUGHPUT
    yield f"{cold['kept']} of {cold['promises']}", cold["kept"] >= LEAST_KEPT * cold["promises"]
    yield f"{packing['ours']} against {packing['fewest']}", packing["ours"] <= MOST_WORKERS * packing["fewest"]


def _of_evictions(found: dict[str, Any] | None) -> Goal:
    asked = "eviction: seconds of reloads that requests wait for, below LRU's and LFU's on every trace"
    if found is None:
        return Goal(asked, MISSING, HOW, None)
    traces = sorted({row["trace"] for row in found["rows"]})
    lost = {
        policy: [sum(row[policy] for row in found["rows"] if row["trace"] == trace) for trace in traces]
        for policy in (*WORTH, OURS)
    }
    ratios = {
        policy: [ours / theirs for ours, theirs in zip(lost[OURS], lost[policy], strict=True)] for policy in WORTH
    }
    measured = "; ".join(f"{min(each):.2f} to {max(each):.2f} of {policy}'s" for policy, each in ratios.items())
    same = [
        f"{row['trace']} at {percent(row['share'], 0)} ({policy})"
        for row in found["rows"]
        for policy in WORTH
        if not row[OURS] < row[policy]
    ]
    measured += f"; not below by itself: {', '.join(same)}" if same else ""
    met = all(ratio < 1 for each in ratios.values() for ratio in each)
    return Goal(asked, measured, HOW, met, words(found["measured"]))


def _of_floods(found: dict[str, Any] | None) -> Goal:
    asked = f"sharing: one service at ten times its share: p95 of the others <= {MOST_GROWTH} times as long"
    if found is None:
        return Goal(asked, MISSING, FLOODS, None)
    met = all(flood["ratio"] is not None and flood["ratio"] <= MOST_GROWTH for flood in found["floods"])
    return Goal(asked, ", ".join(map(_growth, found["floods"])), FLOODS, met, words(found["measured"]))


def section(results: Results) -> list[str]:
    """What sharing costs and saves, and what policies lose by trace and memory."""
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
        *_shared(results.get("sharing")),
        *_floods(results.get("floods")),
        "`python -m bench.eviction`: every function of a trace is a model, with sizes and seconds to reload that are "
        "drawn (16 to 512 MB; mean of 8 draws). What a policy loses is the sum of reloads that requests wait for, "
        "first loads aside. Of the four models of one trace 20 and 40 % hold one or two, and nobody has a choice.",
        "",
        *table(HEAD, body),
        *(measured_line(words(found["measured"])) if found else []),
    ]


def _shared(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return [f"`python -m {SHARING}`: {MISSING}.", ""]
    load = found["load"]
    return [
        f"`python -m {SHARING}`: 24 services, two of three the digits' network and every third ResNet-56, asked for by "
        "Zipf's popularity; two shared workers that hold twelve each against a worker for each, all on one core, the "
        "client on another one, exits off. Whoever is not measured sleeps. p95 is over all requests, refused ones "
        "count as infinitely late. Memory counts a page that several processes use in parts (PSS).",
        "",
        *table(
            ["", "memory", "requests/s within 50 ms", f"slowest p95 at {load['rate']:,.0f}/s", "median p95", "refused"],
            [_arm(name, load) for name in ("shared", "separate")],
        ),
        *_cold(found["cold"]),
        "Whose batch is next, simulated: twelve models at 0.6 of an executor, and one of them that asks for ten times "
        "its share besides; p95 of the others.",
        "",
        *table(
            ["policy", "without the flood", "with it", "in time with it"],
            [
                [name, *(_ms(row[key]) for key in ("p95_ms", "flood_p95_ms")), percent(row["flood_in_time"])]
                for name, row in found["turns"].items()
            ],
        ),
        "Workers that 500 small cases need: "
        + ", ".join(f"{name} {count:,}" for name, count in found["packing"].items())
        + ".",
        "",
        *measured_line(words(found["measured"])),
    ]


def _ms(value: float | None) -> str:
    return REFUSED if value is None else f"{value:.1f} ms"


def _slowest(p95: Collection[float | None]) -> float | None:
    known = [ms for ms in p95 if ms is not None]
    return max(known) if len(known) == len(p95) else None


def _arm(name: str, load: dict[str, Any]) -> list[str]:
    p95 = list(load["p95_ms"][name].values())
    return [
        name,
        f"{load['memory'][name] / 2**20:,.0f} MiB",
        f"{load['capacity'][name]:,.0f}",
        _ms(_slowest(p95)),
        _ms(sorted(p95, key=lambda ms: math.inf if ms is None else ms)[len(p95) // 2]),
        percent(load["refused"][name]),
    ]


def _floods(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return [f"`python -m {FLOODS}`: {MISSING}.", ""]
    return [
        f"`python -m {FLOODS}`: one service asks for ten times its share; p95 of the others in its worker, which "
        "has the core to itself and gets 0.6 of what it can do. Trials without and with each flood take turns: "
        f"{found['rounds']} rounds of {found['seconds']:g} s, pooled; in brackets 95 % of a bootstrap over the rounds.",
        "",
        *table(
            ["the flood's model takes", "requests/s of it", "answered", "p95 without", "with it", "times"],
            [_flood(flood) for flood in found["floods"]],
        ),
        *measured_line(words(found["measured"])),
    ]


def _flood(flood: dict[str, Any]) -> list[str]:
    return [
        f"{flood['model_ms']:.1f} ms",
        f"{flood['rate']:,.0f}",
        percent(flood["answered"], 0),
        *(_ms(flood["p95_ms"][name]) for name in ("without", "with")),
        _growth(flood),
    ]


def _growth(flood: dict[str, Any]) -> str:
    return f"{_ratio(flood['ratio'])} ({' to '.join(map(_ratio, flood['interval']))})"


def _ratio(value: float | None) -> str:
    return REFUSED if value is None else f"{value:.2f}"


def _cold(cold: dict[str, Any]) -> list[str]:
    steps = (
        ("cold_seconds", "a request that finds its model away"),
        ("load_seconds", "of that the load"),
        ("leave_seconds", "what had to leave before, and the answer"),
        ("warm_seconds", "a request that finds it there"),
    )
    return [
        f"One worker with memory for {percent(cold['room'], 0)} of the services. Of {cold['promises']} requests that "
        f"were refused with Retry-After and came back after that time (median "
        f"{cold['promised_seconds']['median']:.0f} s), {cold['kept']} were answered.",
        "",
        *table(
            ["seconds", "median", "p95"],
            [[words_, f"{cold[key]['median']:.3f}", f"{cold[key]['p95']:.3f}"] for key, words_ in steps],
        ),
    ]
