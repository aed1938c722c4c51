"""The page of figures of ``python -m bench.gpu``: a section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.provenance import words
from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

Json = Mapping[str, Any]
HEADING, HOW = "## On a GPU", "bench.gpu"
SUBJECT = "vit-b fp32"
BEYOND = ("32", "128")  # batches beyond the knee of the goals' model
MOST_OVERHEAD, LEAST_CAPACITY, MOST_MICROSECONDS = 0.02, 1.5, 50.0


def section(results: Results) -> list[str]:
    """Everything that was measured on a GPU."""
    found = results.get("gpu")
    return [HEADING, "", MISSING] if found is None else page(found).splitlines()


def page(results: Json) -> str:
    """The section, Markdown."""
    return "\n".join(_lines(results)) + "\n"


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of ViT-B/16 at fp32 on a real GPU."""
    found = results.get("gpu") or {}
    parts, when = found.get("parts", {}), ""
    if found:
        when = f"{found['device']}; {words(found['provenance'])}"
    ramps, exits, kernels = (parts.get(f"{SUBJECT}: {kind}") for kind in ("ramps", "exits", "kernels"))
    asked = "GPU, ViT-B/16 beyond the knee, all rows run to the output: overhead <= 2 % of the time without exits"
    if ramps is None or exits is None or kernels is None:
        yield Goal(asked, MISSING, HOW, None)
        return
    more = {(size, n): ms / ramps[size]["exact"] for size in BEYOND for n, ms in ramps[size]["results only"].items()}
    said = ", ".join(f"{n} ramp{'s' * (n != '1')} at {size}: {percent(share)}" for (size, n), share in more.items())
    yield Goal(asked, said, HOW, max(more.values()) <= MOST_OVERHEAD, when)
    asked = "the same, rows that left are dropped: capacity >= 1.5 x where 60 % leave at the first ramp"
    best = {str(row["size"]): row["exact"] / row["measured"] for row in exits if row["saving"] and row["share"] == 0.6}
    said = ", ".join(f"{best[size]:.2f} x at {size}" for size in BEYOND)
    yield Goal(asked, said, HOW, min(best[size] for size in BEYOND) >= LEAST_CAPACITY, when)
    asked = "the same: a ramp takes <= 50 µs beside its kernels"
    beside = {size: 1e3 * _each(ramps[size]["compute saving"]) - kernels[size] for size in ramps}
    said = ", ".join(f"{micros:.0f} µs at {size}" for size, micros in beside.items())
    yield Goal(asked, said, HOW, max(beside.values()) <= MOST_MICROSECONDS, when)


def _each(more: Mapping[str, float]) -> float:
    """Of the most ramps that were in force, what each takes."""
    most = max(more, key=int)
    return more[most] / int(most)


def _lines(results: Json) -> Iterator[str]:
    yield HEADING
    yield ""
    yield (
        f"{results['device']}, ONNX Runtime {results['runtime']}, made by `make bench-gpu`. Times are from a batch on "
        "the host to logits on the host, medians of runs that take turns. Weights are random: what is measured is time."
    )
    for name, part in results["parts"].items():
        yield ""
        subject, _, kind = name.partition(": ")
        if not isinstance(part, str) and ("failed" in part or "left out" in part):
            yield f"*{name}: {part.get('failed') or part.get('left out')}*"
            continue
        yield from SECTIONS[kind or subject](subject, part)
    yield ""
    yield from measured_line(words(results["provenance"]))


def _agreement(subject: str, part: Json) -> Iterator[str]:
    yield (
        f"{subject}: the GPU's logits differ from the CPU's by {part['relative error']:.1e} of their norm; "
        f"{percent(part['same answers'], 0)} of the answers are the same."
    )


def _sizes(subject: str, part: Json) -> Iterator[str]:
    sizes = list(next(iter(part.values())))
    yield f"### {subject}: milliseconds a batch"
    yield ""
    yield from table(["arithmetic", *sizes], [[form, *(f"{part[form][s]:.2f}" for s in sizes)] for form in part])


def _alternating(subject: str, part: Json) -> Iterator[str]:
    yield (
        f"{subject}, batches of 1 to {part.get('largest', 32)} that change their size every time: "
        f"{part['alternating']:.1f} ms on average, {part['constant']:.1f} ms where each size repeats, "
        f"{part['plain session']:.1f} ms in one plain session."
    )


def _ramps(subject: str, part: Json) -> Iterator[str]:
    yield f"### {subject}: what ramps cost a batch that nobody leaves"
    yield ""
    rows = []
    for size, found in part.items():
        for way in ("results only", "compute saving"):
            cells = [f"{ms * 1e3:.0f} µs ({percent(ms / found['exact'])})" for ms in found[way].values()]
            rows.append([size, way, f"{found['exact']:.2f} ms", *cells, f"{1e3 * _each(found[way]):.0f} µs"])
    counts = next(iter(part.values()))["results only"]
    ramps = ["1 ramp" if n == "1" else f"{n} ramps" for n in counts]
    yield from table(["batch", "mode", "no exits", *ramps, "each"], rows)


def _exits(subject: str, part: Sequence[Json]) -> Iterator[str]:
    yield f"### {subject}: a share leaves at the first ramp"
    yield ""
    rows = [
        [
            str(row["size"]),
            percent(row["share"], 0),
            "compute saving" if row["saving"] else "results only",
            f"{row['exact']:.2f} ms",
            f"{row['measured']:.2f} ms",
            f"{row['predicted']:.2f} ms" if row["predicted"] is not None else "–",
            f"{row['exact'] / row['measured']:.2f} x",
        ]
        for row in part
    ]
    yield from table(["batch", "leave", "mode", "no exits", "measured", "predicted", "capacity"], rows)


def _kernels(subject: str, part: Json) -> Iterator[str]:
    cells = ", ".join(f"{micros:.0f} µs at {size}" for size, micros in part.items())
    yield f"{subject}: the kernels of one head take {cells} rows."


def _serve(subject: str, part: Sequence[Json]) -> Iterator[str]:
    yield f"### {subject}: through HTTP, one row a request"
    yield ""
    rows = [
        [
            row["plan"],
            f"{row['load']:.1f}",
            f"{row['p50']:.1f} ms",
            f"{row['p95']:.1f} ms",
            percent(row["answered"]),
            "?" if row["busy"] is None else f"{row['busy']:.0f} %",
        ]
        for row in part
    ]
    yield from table(["plan", "load", "p50", "p95", "answered", "GPU busy"], rows)


def _memory(_: str, part: Json) -> Iterator[str]:
    yield (
        f"A session of a model of {part['model']:.0f} MiB takes {part['first']:.0f} MiB of the GPU, each further one "
        f"of the same weights {part['more']:.0f} MiB."
    )


def _no_room(_: str, part: str) -> Iterator[str]:
    yield f"A bundle for which the GPU has no room: {part}"


SECTIONS = {
    "agreement": _agreement,
    "sizes": _sizes,
    "alternating": _alternating,
    "ramps": _ramps,
    "exits": _exits,
    "kernels": _kernels,
    "serve": _serve,
    "memory": _memory,
    "no room": _no_room,
}
