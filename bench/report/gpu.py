"""The page of figures of ``python -m bench.gpu``: a section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.provenance import words

Json = Mapping[str, Any]


def page(results: Json) -> str:
    """The section, Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Json) -> Iterator[str]:
    yield "## On a GPU"
    yield ""
    yield (
        f"{results['device']}, ONNX Runtime {results['runtime']}. Times are from a batch on the host to logits on the "
        "host, medians of runs that take turns. Weights are random: what is measured is time."
    )
    for name, part in results["parts"].items():
        yield ""
        subject, _, kind = name.partition(": ")
        if not isinstance(part, str) and ("failed" in part or "left out" in part):
            yield f"*{name}: {part.get('failed') or part.get('left out')}*"
            continue
        yield from SECTIONS[kind or subject](subject, part)
    yield ""
    yield f"*Measured: {words(results['provenance'])}.*"


def _agreement(subject: str, part: Json) -> Iterator[str]:
    yield (
        f"{subject}: the GPU's logits differ from the CPU's by {part['relative error']:.1e} of their norm; "
        f"{part['same answers']:.0%} of the answers are the same."
    )


def _sizes(subject: str, part: Json) -> Iterator[str]:
    sizes = list(next(iter(part.values())))
    yield f"### {subject}: milliseconds a batch"
    yield ""
    yield from _table(["arithmetic", *sizes], [[form, *(f"{part[form][s]:.2f}" for s in sizes)] for form in part])


def _alternating(subject: str, part: Json) -> Iterator[str]:
    yield (
        f"{subject}, batches of 1 to 32 that change their size every time: {part['alternating']:.1f} ms on average, "
        f"{part['constant']:.1f} ms where each size repeats, {part['plain session']:.1f} ms in one plain session."
    )


def _ramps(subject: str, part: Json) -> Iterator[str]:
    yield f"### {subject}: what ramps cost a batch that nobody leaves"
    yield ""
    rows = []
    for size, found in part.items():
        for way in ("results only", "compute saving"):
            most = max(found[way], key=int)
            cells = [f"{ms * 1e3:.0f} µs ({ms / found['exact']:.1%})" for ms in found[way].values()]
            rows.append([size, way, f"{found['exact']:.2f} ms", *cells, f"{1e3 * found[way][most] / int(most):.0f} µs"])
    counts = next(iter(part.values()))["results only"]
    ramps = ["1 ramp" if n == "1" else f"{n} ramps" for n in counts]
    yield from _table(["batch", "mode", "no exits", *ramps, "each"], rows)


def _exits(subject: str, part: Sequence[Json]) -> Iterator[str]:
    yield f"### {subject}: a share leaves at the first ramp"
    yield ""
    rows = [
        [
            str(row["size"]),
            f"{row['share']:.0%}",
            "compute saving" if row["saving"] else "results only",
            f"{row['exact']:.2f} ms",
            f"{row['measured']:.2f} ms",
            f"{row['predicted']:.2f} ms",
            f"{row['exact'] / row['measured']:.2f} x",
        ]
        for row in part
    ]
    yield from _table(["batch", "leave", "mode", "no exits", "measured", "predicted", "capacity"], rows)


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
            f"{row['answered']:.1%}",
            "?" if row["busy"] is None else f"{row['busy']:.0f} %",
        ]
        for row in part
    ]
    yield from _table(["plan", "load", "p50", "p95", "answered", "GPU busy"], rows)


def _memory(_: str, part: Json) -> Iterator[str]:
    yield (
        f"A session of a model of {part['model']:.0f} MiB takes {part['first']:.0f} MiB of the GPU, each further one "
        f"of the same weights {part['more']:.0f} MiB."
    )


def _no_room(_: str, part: str) -> Iterator[str]:
    yield f"A bundle for which the GPU has no room: {part}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


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
