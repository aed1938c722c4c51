"""Which models to evict: ours against LRU and LFU, on who asked for what in real traces. ``python -m bench.eviction``.

Every function of a trace is a model, with 8 draws of sizes (16 to 512 MB, evenly by their logarithm) and of seconds to
reload (a part that is the same for all, and a part by size, at 50 to 500 MB/s). Memory holds a share of all models'
bytes. A request for a model that is not there loads it, and costs its seconds; what a policy loses is their sum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.arrivals import BY_NAME, MissingTraceError, asked_by_name
from bench.provenance import provenance
from offramp_core.sharing import Held, Popularity, evicted

OUT = Path("build/bench/eviction.json")
SHARES = (0.2, 0.4, 0.6)
DRAWS = 8
MB = 1e6


@dataclass(frozen=True, slots=True)
class Kind:
    """A model: what it takes and what its absence costs."""

    size_bytes: int
    reload_seconds: float


@dataclass
class Seen:
    """What a policy may know of a model that is in memory."""

    kind: Kind
    last: float = 0.0
    count: int = 0
    popularity: Popularity = field(default_factory=Popularity)


#: What a model is worth keeping; the least goes first.
Worth = Callable[[Seen], float]
WORTH: Mapping[str, Worth] = {"LRU": lambda seen: seen.last, "LFU": lambda seen: float(seen.count)}
OURS = "ours"


def kinds(n: int, rng: np.random.Generator) -> list[Kind]:
    """Models as the module says."""
    sizes = 16 * MB * 32 ** rng.uniform(size=n)
    seconds = 0.2 + sizes / (MB * 50 * 10 ** rng.uniform(size=n))
    return [Kind(int(size), float(s)) for size, s in zip(sizes, seconds, strict=True)]


def lost(requests: Sequence[tuple[float, str]], models: Mapping[str, Kind], *, room: int, policy: str) -> float:
    """Seconds of reloads that a policy lets requests wait; the first load of a model is everybody's."""
    held: dict[str, Seen] = {}
    known: dict[str, Seen] = {}
    seconds = 0.0
    for now, name in requests:
        seen = known.setdefault(name, Seen(models[name]))
        if name not in held:
            seconds += seen.kind.reload_seconds if seen.count else 0.0
            _make_room(held, seen, now, room=room, policy=policy)
            held[name] = seen
        seen.last, seen.count, seen.popularity = now, seen.count + 1, seen.popularity.after(now)
    return seconds


def _make_room(held: dict[str, Seen], wanted: Seen, now: float, *, room: int, policy: str) -> None:
    needed = sum(seen.kind.size_bytes for seen in held.values()) + wanted.kind.size_bytes - room
    if policy == OURS:
        chosen = evicted(
            [
                Held(name, seen.kind.size_bytes, seen.kind.reload_seconds, seen.popularity.rate(now))
                for name, seen in held.items()
            ],
            needed_bytes=needed,
        )
        for name in chosen or ():
            del held[name]
        return
    while needed > 0 and held:
        name = min(held, key=lambda name: (WORTH[policy](held[name]), name))
        needed -= held.pop(name).kind.size_bytes


def figures(trace: str) -> Iterator[dict[str, Any]]:
    """By share of memory: what each policy loses, on average over the draws."""
    requests = asked_by_name(trace)
    names = sorted({name for _, name in requests})
    for share in SHARES:
        seconds: dict[str, list[float]] = {}
        for draw in range(DRAWS):
            models = dict(zip(names, kinds(len(names), np.random.default_rng(draw)), strict=True))
            sizes = [kind.size_bytes for kind in models.values()]
            room = max(int(share * sum(sizes)), *sizes)
            for policy in (*WORTH, OURS):
                seconds.setdefault(policy, []).append(lost(requests, models, room=room, policy=policy))
        yield {"trace": trace, "models": len(names), "requests": len(requests), "share": share} | {
            policy: float(np.mean(found)) for policy, found in seconds.items()
        }


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when a trace is missing."""
    parser = argparse.ArgumentParser(prog="bench.eviction", description="models to evict, on real traces")
    parser.parse_args(arguments)
    try:
        rows = [row for trace in BY_NAME for row in figures(trace)]
    except MissingTraceError as error:
        print(f"bench.eviction: {error}", file=sys.stderr)
        return 1
    shown = Table("trace", "models", "memory", "LRU", "LFU", "ours", "ours by LRU's", "ours by LFU's")
    for row in rows:
        shown.add_row(
            row["trace"],
            str(row["models"]),
            f"{row['share']:.0%}",
            *(f"{row[policy]:,.0f} s" for policy in (*WORTH, OURS)),
            *(f"{row[OURS] / row[policy]:.2f}" for policy in WORTH),
        )
    Console().print(shown)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"measured": provenance(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
