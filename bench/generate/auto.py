"""What it costs and saves that drafts are chosen by measurement (decision 105): a worker's desk that does so against
the same desk with one setting for all requests, in turns in one run.

Seconds are the processor's of this process, from the first request of a group to its last token, prompts included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.generate.pairs import ratio
from bench.generate.served import AUTO, ServedInTurns
from bench.generate.writing import loaded
from offramp_core.generation.drafts import Drafts
from offramp_core.generation.levels import NONE, Setting
from offramp_worker.generate.routes import draft_ratios, draft_settings, text_of
from offramp_worker.generate.seam import REFERENCE, DecodingRoute

OFF = REFERENCE
AGAIN = "fp32 again"  # the same once more: how much this machine's measurements differ from each other
AT_ONCE = (1, 2, 4, 8)
TURNS = 2  # requests for each that is computed at once, before it is another way's turn
QUARTERS = 4  # of the requests that are learned from
HOSTILE = 60  # requests
MOST_CALM = 4  # times the requests, until a draft serves
LEAST, SEARCHED = 8, 8  # prompts of each kind that is searched for the one on which a draft costs most: of so many one
Tick = Callable[[], None]


def auto(
    folder: Path,
    *,
    calm: Sequence[str],
    others: Mapping[str, Sequence[str]],
    n: int,
    tokens: int,
    tick: Tick,
    drafts: str = "",
) -> dict[str, Any]:
    """``n`` requests of each kind; ``calm`` are usual prompts, ``others`` such that drafts may foresee little of their
    answers, by kind; ``drafts`` the only kind of drafts, if given."""
    bundle = loaded(folder)
    settings = tuple(s for s in draft_settings(bundle.bundle) if s.draft.startswith(drafts))

    def new() -> Drafts:
        return Drafts(settings, draft_ratios(bundle.bundle))

    with ServedInTurns(bundle, {**_fixed(settings), AGAIN: DecodingRoute()}) as served:
        return {
            "requests": n,
            "tokens": tokens,
            "settings": [str(s) for s in settings],
            "loads": [_beside(served, new(), calm, load=load, n=n, tokens=tokens, tick=tick) for load in AT_ONCE],
            "hostile": _moved(served, new(), calm, others, n=n, tokens=tokens, tick=tick),
        }


def mixed(
    folder: Path, classes: Mapping[str, Sequence[str]], *, learn: int, n: int, repeats: int, tokens: int, tick: Tick
) -> dict[str, Any]:
    """Requests of several classes by turns, one at a time: ``learn`` of each to learn from, then ``n`` prompts of each,
    which are answered by every setting too; all of it so often, each time from nothing and with other prompts."""
    bundle = loaded(folder)
    settings = draft_settings(bundle.bundle)
    fixed = _fixed(settings)
    runs = []
    with ServedInTurns(bundle, fixed) as served:
        for k in range(repeats):
            served.learn_with(Drafts(settings, draft_ratios(bundle.bundle)))
            asked = {name: _taken(prompts, k * (learn + n), learn + n) for name, prompts in classes.items()}
            runs.append(_classes(served, list(fixed), asked, learn=learn, tokens=tokens, tick=tick))
    rows = [{"class": name, "requests": n, **_compared([run[name] for run in runs])} for name in classes]
    return {
        "tokens": tokens,
        "learned": learn,
        "repeats": repeats,
        "settings": [str(s) for s in settings],
        "classes": rows,
    }


def _fixed(settings: Sequence[Setting]) -> dict[str, DecodingRoute]:
    return {OFF: DecodingRoute()} | {text_of(_route(s)): _route(s) for s in settings}


def _route(setting: Setting) -> DecodingRoute:
    return DecodingRoute(REFERENCE, setting.draft, setting.tokens)


def _beside(
    served: ServedInTurns, drafts: Drafts, prompts: Sequence[str], *, load: int, n: int, tokens: int, tick: Tick
) -> dict[str, Any]:
    """From the first request on, so many at once, against no draft; and no draft against itself."""
    served.learn_with(drafts)
    group, took, routes = TURNS * load, {AUTO: list[float](), OFF: list[float](), AGAIN: list[float]()}, Counter[str]()
    for k in range(-(-n // group)):
        some = _taken(prompts, k * group, group)
        for way in _turned(list(took), k):
            one = served.answer(way, some, at_once=load, tokens=tokens)
            took[way].append(one.seconds)
            if way == AUTO:
                routes.update(one.routes)
        tick()
    none = [(one + other) / 2 for one, other in zip(took[OFF], took[AGAIN], strict=True)]
    return {
        "at_once": load,
        "requests": len(none) * group,
        **ratio(took[AUTO], none).to_mapping(),
        "again": ratio(took[AGAIN], took[OFF]).to_mapping(),
        "routes": dict(routes),
        "serves": _serving(drafts),
    }


def _moved(
    served: ServedInTurns,
    drafts: Drafts,
    calm: Sequence[str],
    others: Mapping[str, Sequence[str]],
    *,
    n: int,
    tokens: int,
    tick: Tick,
) -> dict[str, Any]:
    """Usual prompts until a draft serves, then those of another kind on which it costs most, one at a time: after how
    many of these no draft serves, and what all of them took."""
    served.learn_with(drafts)
    asked = 0
    while asked < n or (_serving(drafts) == OFF and asked < MOST_CALM * n):
        served.answer(AUTO, _taken(calm, asked, 1), at_once=1, tokens=tokens)
        asked += 1
        tick()
    before, off_after = _serving(drafts), None
    costs = {
        name: _fixed_ratio(
            served, before, _taken(prompts, HOSTILE, max(LEAST, n // SEARCHED)), tokens=tokens, tick=tick
        )
        for name, prompts in others.items()
    }
    worst = max(costs, key=lambda name: costs[name])
    total = {AUTO: 0.0, OFF: 0.0}
    for k, prompt in enumerate(_taken(others[worst], 0, HOSTILE)):
        for way in _turned(list(total), k):
            total[way] += served.answer(way, [prompt], at_once=1, tokens=tokens).seconds
        if off_after is None and before != OFF and _serving(drafts) == OFF:
            off_after = k + 1
        tick()
    return {
        "calm": asked,
        "requests": HOSTILE,
        "content": worst,
        "costs": costs,
        "served": before,
        "serves": _serving(drafts),
        "off_after": off_after,
        "ratio": total[AUTO] / total[OFF],
    }


def _fixed_ratio(served: ServedInTurns, way: str, prompts: Sequence[str], *, tokens: int, tick: Tick) -> float:
    """What one setting takes of no draft's time."""
    total = {way: 0.0, OFF: 0.0}
    for k, prompt in enumerate(prompts):
        for each in _turned(list(total), k):
            total[each] += served.answer(each, [prompt], at_once=1, tokens=tokens).seconds
        tick()
    return total[way] / total[OFF]


@dataclass(slots=True)
class _Class:
    """One class in one repeat: routes that it was learned about, then seconds by way and prompt, and routes."""

    learned: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    routes: Counter[str] = field(default_factory=Counter)


def _classes(
    served: ServedInTurns,
    fixed: Sequence[str],
    classes: Mapping[str, Sequence[str]],
    *,
    learn: int,
    tokens: int,
    tick: Tick,
) -> dict[str, _Class]:
    ways = [AUTO, *fixed]
    found = {name: _Class(seconds={way: [] for way in ways}) for name in classes}
    for i, several in enumerate(zip(*classes.values(), strict=True)):
        for name, prompt in zip(classes, several, strict=True):
            for way in [AUTO] if i < learn else _turned(ways, i):
                one = served.answer(way, [prompt], at_once=1, tokens=tokens, request_class=name)
                tick()
                if i < learn:
                    found[name].learned += one.routes
                    continue
                found[name].seconds[way].append(one.seconds)
                if way == AUTO:
                    found[name].routes.update(one.routes)
    return found


def _compared(runs: Sequence[_Class]) -> dict[str, Any]:
    """What was learned against the best setting in hindsight, over all repeats; and what learning took, by quarters of
    the requests that were learned from: each is counted with the time that its setting took in the comparison.

    Pairs are repeats where there are several, for each has learned by itself; else prompts."""
    totals = {way: [sum(run.seconds[way]) for run in runs] for way in runs[0].seconds}
    seconds = {way: sum(took) for way, took in totals.items()}
    best = min((way for way in seconds if way != AUTO), key=lambda way: seconds[way])
    pairs = totals if len(runs) > 1 else runs[0].seconds
    each = [auto / fixed for auto, fixed in zip(totals[AUTO], totals[best], strict=True)]
    return {
        "ratios": {way: took / seconds[OFF] for way, took in seconds.items()},
        "best": best,
        "against_best": seconds[AUTO] / seconds[best],
        "against": ratio(pairs[AUTO], pairs[best]).to_mapping(),
        "each": each,
        "learning": [_mean([seconds[r] / seconds[best] for r in part]) for part in _quarters(runs)],
        "routes": dict(sum((run.routes for run in runs), Counter())),
    }


def _quarters(runs: Sequence[_Class]) -> list[list[str]]:
    """Routes of the requests that were learned from, by quarters of each repeat."""
    edges = [len(runs[0].learned) * k // QUARTERS for k in range(QUARTERS + 1)]
    return [[route for run in runs for route in run.learned[a:b]] for a, b in pairwise(edges)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _taken(prompts: Sequence[str], first: int, n: int) -> list[str]:
    """So many from one on; prompts that are used up begin again."""
    return [prompts[(first + i) % len(prompts)] for i in range(n)]


def _turned(ways: Sequence[str], k: int) -> list[str]:
    """Nobody is always first."""
    return [*ways[k % len(ways) :], *ways[: k % len(ways)]]


def _serving(drafts: Drafts) -> str:
    """What serves most contexts of a learner that knows one."""
    setting = next(iter(drafts.serving().values()), NONE)
    return text_of(_route(setting)) if setting != NONE else OFF
