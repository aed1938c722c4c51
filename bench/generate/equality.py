"""Greedy answers with drafts against those without: the same tokens, unless two logits were as good as equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.generate.writing import encoded, loaded, write
from offramp_worker.generate.audits import equality
from offramp_worker.generate.routes import draft_settings, text_of
from offramp_worker.generate.seam import REFERENCE, DecodingRoute


def equal_answers(folder: Path, prompts: Sequence[str], *, tokens: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Each prompt with no draft and with one of the bundle's settings in turn; counts of equal, tied and different
    answers."""
    bundle = loaded(folder)
    routes = [DecodingRoute(REFERENCE, s.draft, s.tokens) for s in draft_settings(bundle.bundle)]
    counts: dict[str, Counter[str]] = {text_of(route): Counter() for route in routes}
    proposed = accepted = 0
    for i, prompt in enumerate(prompts):
        ids, route = encoded(bundle, prompt), routes[i % len(routes)]
        (plain,), _ = write(bundle, [ids], DecodingRoute(), tokens=tokens)
        (drafted,), _ = write(bundle, [ids], route, tokens=tokens)
        counts[text_of(route)][equality([t.id for t in drafted.tokens], plain.tokens)] += 1
        proposed, accepted = proposed + drafted.proposed, accepted + drafted.accepted
        tick()
    bundle.engine.close()
    total = Counter[str]()
    for of_route in counts.values():
        total.update(of_route)
    return {
        "requests": len(prompts),
        "tokens": tokens,
        "equal": total["equal"],
        "ties": total["tie"],
        "different": total["different"],
        "proposed": proposed,
        "accepted": accepted,
        "by_route": {route: dict(c) for route, c in counts.items()},
    }
