"""What it costs and saves that drafts are chosen by measurement (decision 105): a worker's desk that does so against
the same desk with one setting for all requests, in turns in one run.

Seconds are the processor's of this process, from the first request of a group to its last token, prompts included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.generate.served import AUTO, ServedInTurns, Stretch
from bench.generate.writing import loaded
from offramp_core.generation.drafts import Drafts
from offramp_core.generation.levels import NONE, Setting
from offramp_worker.generate.routes import draft_ratios, draft_settings, text_of
from offramp_worker.generate.seam import REFERENCE, DecodingRoute

OFF = REFERENCE
AGAIN = "fp32 again"  # the same once more: how much this machine's measurements differ from each other
AT_ONCE = (1, 2, 4, 8)
GROUP = 8  # requests at least before it is another way's turn
QUARTERS = 4  # of the requests that are learned from
HOSTILE, SOME = 60, 4  # requests; of which every so many is answered with the draft that had served, too
Tick = Callable[[], None]


def auto(
    folder: Path,
    *,
    calm: Sequence[str],
    hostile: Sequence[str],
    n: int,
    tokens: int,
    tick: Tick,
) -> dict[str, Any]:
    """``n`` requests of each kind; ``calm`` are usual prompts, ``hostile`` such that drafts foresee little of their
    answers."""
    bundle = loaded(folder)
    settings = draft_settings(bundle.bundle)

    def new() -> Drafts:
        return Drafts(settings, draft_ratios(bundle.bundle))

    with ServedInTurns(bundle, {**_fixed(settings), AGAIN: DecodingRoute()}) as served:
        return {
            "requests": n,
            "tokens": tokens,
            "settings": [str(s) for s in settings],
            "loads": [_beside(served, new(), calm, load=load, n=n, tokens=tokens, tick=tick) for load in AT_ONCE],
            "hostile": _moved(served, new(), calm, hostile, n=n, tokens=tokens, tick=tick),
        }


def mixed(
    folder: Path, classes: Mapping[str, Sequence[str]], *, learn: int, n: int, tokens: int, tick: Tick
) -> dict[str, Any]:
    """Requests of several classes by turns, one at a time: ``learn`` of each to learn from, then ``n`` prompts of each,
    which are answered by every setting too."""
    bundle = loaded(folder)
    settings = draft_settings(bundle.bundle)
    fixed = _fixed(settings)
    with ServedInTurns(bundle, fixed) as served:
        served.learn_with(Drafts(settings, draft_ratios(bundle.bundle)))
        rows = _classes(served, list(fixed), classes, learn=learn, n=n, tokens=tokens, tick=tick)
    return {"tokens": tokens, "learned": learn, "settings": [str(s) for s in settings], "classes": rows}


def _fixed(settings: Sequence[Setting]) -> dict[str, DecodingRoute]:
    return {OFF: DecodingRoute()} | {text_of(_route(s)): _route(s) for s in settings}


def _route(setting: Setting) -> DecodingRoute:
    return DecodingRoute(REFERENCE, setting.draft, setting.tokens)


def _beside(
    served: ServedInTurns, drafts: Drafts, prompts: Sequence[str], *, load: int, n: int, tokens: int, tick: Tick
) -> dict[str, Any]:
    """From the first request on, so many at once, against no draft; and no draft against itself."""
    served.learn_with(drafts)
    group = max(GROUP, 2 * load)
    ratios, total = list[float](), {AUTO: Stretch(), OFF: Stretch(), AGAIN: Stretch()}
    for k in range(-(-n // group)):
        some = _taken(prompts, k * group, group)
        each = {way: served.answer(way, some, at_once=load, tokens=tokens) for way in _turned(list(total), k)}
        for way, one in each.items():
            total[way].add(one)
        ratios.append(each[AUTO].seconds / each[OFF].seconds)
        tick()
    return {
        "at_once": load,
        "requests": len(ratios) * group,
        "ratio": 2 * total[AUTO].seconds / (total[OFF].seconds + total[AGAIN].seconds),
        "again": total[AGAIN].seconds / total[OFF].seconds,
        "groups": ratios,
        "routes": dict(total[AUTO].routes),
        "serves": _serving(drafts),
    }


def _moved(
    served: ServedInTurns,
    drafts: Drafts,
    calm: Sequence[str],
    hostile: Sequence[str],
    *,
    n: int,
    tokens: int,
    tick: Tick,
) -> dict[str, Any]:
    """Usual prompts, then others, one at a time: after how many of these no draft serves, and what all of them took."""
    served.learn_with(drafts)
    for prompt in _taken(calm, 0, n):
        served.answer(AUTO, [prompt], at_once=1, tokens=tokens)
        tick()
    before, off_after = _serving(drafts), None
    total, some = {AUTO: Stretch(), OFF: Stretch()}, {OFF: Stretch(), before: Stretch()}
    for k, prompt in enumerate(_taken(hostile, 0, HOSTILE)):
        for way in _turned([AUTO, OFF], k):
            total[way].add(served.answer(way, [prompt], at_once=1, tokens=tokens))
        if k % SOME == 0:
            for way in _turned(list(some), k // SOME):
                some[way].add(served.answer(way, [prompt], at_once=1, tokens=tokens))
        if off_after is None and before != OFF and _serving(drafts) == OFF:
            off_after = k + 1
        tick()
    return {
        "requests": HOSTILE,
        "served": before,
        "serves": _serving(drafts),
        "off_after": off_after,
        "ratio": total[AUTO].seconds / total[OFF].seconds,
        "served_ratio": some[before].seconds / some[OFF].seconds,
    }


def _classes(
    served: ServedInTurns,
    fixed: Sequence[str],
    classes: Mapping[str, Sequence[str]],
    *,
    learn: int,
    n: int,
    tokens: int,
    tick: Tick,
) -> list[dict[str, Any]]:
    learned = {name: list[str]() for name in classes}
    for i in range(learn):
        for name, prompts in classes.items():
            one = served.answer(AUTO, _taken(prompts, i, 1), at_once=1, tokens=tokens, request_class=name)
            learned[name] += one.routes
            tick()
    ways = [AUTO, *fixed]
    total = {name: {way: Stretch() for way in ways} for name in classes}
    for i in range(n):
        for name, prompts in classes.items():
            some = _taken(prompts, learn + i, 1)
            for way in _turned(ways, i):
                total[name][way].add(served.answer(way, some, at_once=1, tokens=tokens, request_class=name))
                tick()
    return [
        {"class": name, "requests": n, **_compared({way: one.seconds for way, one in of.items()}, learned[name])}
        | {"routes": dict(of[AUTO].routes)}
        for name, of in total.items()
    ]


def _compared(seconds: Mapping[str, float], learned: Sequence[str]) -> dict[str, Any]:
    """What was learned against the best setting in hindsight; and what learning took, by quarters of the requests that
    were learned from: each is counted with the time that its setting took in the comparison."""
    fixed = {way: took for way, took in seconds.items() if way != AUTO}
    best = min(fixed, key=lambda way: fixed[way])
    edges = [len(learned) * k // QUARTERS for k in range(QUARTERS + 1)]
    parts = [[fixed[route] / fixed[best] for route in learned[a:b]] for a, b in pairwise(edges)]
    return {
        "ratios": {way: took / seconds[OFF] for way, took in seconds.items()},
        "best": best,
        "against_best": seconds[AUTO] / seconds[best],
        "learning": [sum(part) / len(part) if part else None for part in parts],
    }


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
