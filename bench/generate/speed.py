"""Time per token by variant and draft, as ratios of the reference's in one run: every prompt is answered by each route,
one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.generate.writing import encoded, loaded, write
from offramp_worker.generate.routes import draft_settings, text_of
from offramp_worker.generate.seam import REFERENCE, DecodingRoute


def paces(
    folder: Path,
    prompts: Sequence[str],
    *,
    tokens: int,
    side_by_side: int,
    tick: Callable[[], None],
    drafts: bool = True,
) -> dict[str, Any]:
    """The processor's seconds per token of each route over groups of ``side_by_side`` prompts; the median over
    groups of its ratio to the reference's."""
    bundle = loaded(folder)
    routes = [DecodingRoute(v.name) for v in bundle.bundle.variants]
    if drafts:
        routes += [DecodingRoute(REFERENCE, s.draft, s.tokens) for s in draft_settings(bundle.bundle)]
    groups = [prompts[i : i + side_by_side] for i in range(0, len(prompts) - side_by_side + 1, side_by_side)]
    ratios: dict[str, list[float]] = {text_of(route): [] for route in routes}
    taken = {name: [0, 0] for name in ratios}
    seconds = []
    for k, group in enumerate(groups):
        ids = [encoded(bundle, prompt) for prompt in group]
        each: dict[str, float] = {}
        for route in routes[k % len(routes) :] + routes[: k % len(routes)]:  # nobody is always first
            answers, took = write(bundle, ids, route, tokens=tokens)
            written = sum(len(a.tokens) - 1 for a in answers)
            if written > 0:
                each[text_of(route)] = took / written
            taken[text_of(route)][0] += sum(a.proposed for a in answers)
            taken[text_of(route)][1] += sum(a.accepted for a in answers)
            tick()
        if len(each) == len(routes):
            seconds.append(each[REFERENCE])
            for name, pace in each.items():
                ratios[name].append(pace / each[REFERENCE])
    bundle.engine.close()
    return {
        "prompts": len(prompts),
        "side_by_side": side_by_side,
        "tokens": tokens,
        "reference_seconds": float(np.median(seconds)),
        "routes": {
            name: {
                "ratio": float(np.median(found)),
                "acceptance": taken[name][1] / taken[name][0] if taken[name][0] else None,
            }
            for name, found in ratios.items()
        },
    }
