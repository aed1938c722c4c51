"""Values to SVG: the network with its ramps, the evidence of gates, latency distributions, and the small bars of the
overview. Pure.

Colours are classes of the stylesheet, so that light and dark are its business and no style is inline. Every graphic has
a sentence for those who do not see it, and the page has its numbers as a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup, escape

from offramp_core.control.rollouts.gates import proves
from offramp_core.evidence.words import e_value
from offramp_operator.explain.latency import Distribution, LatencyFacts
from offramp_operator.explain.network import NetworkFacts, RampFacts
from offramp_operator.explain.words import duration, share
from offramp_operator.web.curves import CurvePoint
from offramp_operator.web.pages import Goal

Point = tuple[float, float]
Scale = Callable[[float], float]


def element(name: str, *children: Markup | str, **attributes: object) -> Markup:
    """One element, everything escaped. ``class_`` is class, ``stroke_width`` stroke-width, None leaves an attribute
    out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup(written), Markup("").join(children))  # noqa: S704 - escaped above


def svg(width: float, height: float, *children: Markup, label: str, class_: str) -> Markup:
    """A graphic that scales with its box and is read as one sentence."""
    return element(
        "svg", *children, viewBox=f"0 0 {_text(width)} {_text(height)}", role="img", aria_label=label, class_=class_
    )


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def _label(x: float, y: float, text: str, class_: str = "tick", anchor: str = "start") -> Markup:
    return element("text", text, x=x, y=y, class_=class_, text_anchor=anchor)


def _path(points: Iterable[Point], class_: str) -> Markup:
    points_text = "L".join(f"{_text(float(x))} {_text(float(y))}" for x, y in points)
    return element("path", d=f"M{points_text}", class_=class_)


# --- overview --------------------------------------------------------------------------------------

_BAR_WIDTH, _BAR_HEIGHT, _BAR_FULL = 120.0, 8.0, 96.0


def goal_bar(goal: Goal, *, name: str) -> Markup:
    """How much of what is allowed is used: the tick is the limit, a bar beyond it is broken."""
    if goal.used is None:
        return Markup("")
    filled = min(_BAR_WIDTH, _BAR_FULL * goal.used)
    label = f"{name}: {goal.measured}, {goal.used:.0%} of what {goal.allowed} allows"
    return svg(
        _BAR_WIDTH,
        _BAR_HEIGHT,
        element("rect", x=0, y=2, width=_BAR_FULL, height=4, rx=2, class_="bar-track"),
        element(
            "rect", x=0, y=2, width=max(2.0, filled), height=4, rx=2, class_="bar-bad" if goal.broken else "bar-fill"
        ),
        _line(_BAR_FULL, 0, _BAR_FULL, _BAR_HEIGHT, "bar-limit"),
        label=label,
        class_="bar",
    )


# --- network ---------------------------------------------------------------------------------------

_NET_WIDTH, _NET_LEFT, _NET_RIGHT = 920.0, 64.0, 72.0
_LINE_Y, _BLOCK_HEIGHT, _GAP = 40.0, 28.0, 3.0
_CARD_WIDTH, _CARD_HEIGHT, _CARD_SPACE, _CARD_TOP = 150.0, 84.0, 10.0, 96.0
_ASIDE = 13.0  # how far the ring of a place moves where a ramp in use leaves the line


def network_chart(facts: NetworkFacts) -> Markup:
    """Blocks as wide as the time they take; active ramps leave the line downwards to a card, others are open rings on
    it."""
    left, width = _NET_LEFT, _NET_WIDTH - _NET_LEFT - _NET_RIGHT
    active = [ramp for ramp in facts.ramps if ramp.active]
    height = _CARD_TOP + _CARD_HEIGHT + 4 if active else _LINE_Y + 44
    parts = [_label(left - 12, _LINE_Y + 4, "input", "end-label", "end"), *_blocks(facts.blocks, left, width)]
    taken = {round(ramp.place, 4) for ramp in active}
    parts += [
        _ring(left + width * place + (_ASIDE if place in taken else 0.0), number)
        for place, number in _idle_places(facts.ramps)
    ]
    for ramp, x in zip(active, _spread([left + width * r.place for r in active]), strict=True):
        parts += _exit(ramp, at=left + width * ramp.place, x=x)
    stay = f"{percent(facts.stay_share)} stay" if facts.stay_share is not None and active else ""
    parts += [
        _label(left + width + 12, _LINE_Y + 4, "final", "end-label"),
        _label(left + width + 12, _LINE_Y + 20, stay),
    ]
    return svg(_NET_WIDTH, height, *parts, label=_network_label(facts, active), class_="network")


def _blocks(widths: Sequence[float], left: float, width: float) -> list[Markup]:
    out, x = [], left
    for part in widths:
        shown = max(1.0, width * part - _GAP)
        out.append(
            element(
                "rect",
                x=x + _GAP / 2,
                y=_LINE_Y - _BLOCK_HEIGHT / 2,
                width=shown,
                height=_BLOCK_HEIGHT,
                rx=4,
                class_="block",
            )
        )
        if width * part >= 46:
            out.append(_label(x + width * part / 2, _LINE_Y + 4, f"{part:.0%}", "block-label", "middle"))
        x += width * part
    return out


def _idle_places(ramps: Iterable[RampFacts]) -> list[tuple[float, int]]:
    """Places of ramps that the plan does not use, each once, and how many sit there."""
    counted: dict[float, int] = {}
    for ramp in ramps:
        if not ramp.active:
            place = round(ramp.place, 4)
            counted[place] = counted.get(place, 0) + 1
    return sorted(counted.items())


def _ring(x: float, number: int) -> Markup:
    title = f"{number} candidate ramp{'s' if number > 1 else ''} not in use"
    return element("circle", element("title", title), cx=x, cy=_LINE_Y + _BLOCK_HEIGHT / 2 + 9, r=3.5, class_="ring")


def _spread(places: Sequence[float]) -> list[float]:
    """Centres of cards near their places, without overlap and within the picture."""
    step, out = _CARD_WIDTH + _CARD_SPACE, list(places)
    for i, x in enumerate(places):
        lowest = _CARD_WIDTH / 2 + 2 if i == 0 else out[i - 1] + step
        out[i] = max(x, lowest)
    highest = _NET_WIDTH - _CARD_WIDTH / 2 - 2
    for i in range(len(out) - 1, -1, -1):
        out[i] = min(out[i], highest)
        highest = out[i] - step
    return out


def _exit(ramp: RampFacts, *, at: float, x: float) -> list[Markup]:
    """A ramp in use: a dot on the line, a curve as thick as its share of requests, and a card."""
    top, y = _LINE_Y + _BLOCK_HEIGHT / 2, _CARD_TOP
    thick = 1.5 + 8 * (ramp.exit_share or 0.0)
    left = x - _CARD_WIDTH / 2
    curve = f"M{_text(at)} {_text(top)}C{_text(at)} {_text(y - 6)} {_text(x)} {_text(top + 14)} {_text(x)} {_text(y)}"
    worth = ramp.utility_seconds
    return [
        element("path", d=curve, class_="leave", stroke_width=thick),
        element("circle", cx=at, cy=top, r=5, class_="ramp"),
        element("rect", x=left, y=y, width=_CARD_WIDTH, height=_CARD_HEIGHT, rx=6, class_="card"),
        _label(left + 10, y + 20, _clip(ramp.id, 16), "card-title"),
        _label(
            left + 10,
            y + 40,
            f"{percent(ramp.exit_share)} leave" if ramp.exit_share is not None else "no requests",
            "card-figure",
        ),
        _label(left + 10, y + 57, f"below {ramp.threshold}", "card-text"),
        _label(
            left + 10,
            y + 73,
            f"{signed_seconds(worth)} a request" if worth is not None else "",
            "card-bad" if (worth or 0) < 0 else "card-good",
        ),
    ]


def _network_label(facts: NetworkFacts, active: Sequence[RampFacts]) -> str:
    if not active:
        return f"The network under {facts.config}: exits off, {len(facts.ramps)} candidate ramps not in use"
    leaving = "; ".join(
        f"{r.id} after {r.place:.0%} of the network, threshold {r.threshold}"
        + (f", {share(r.exit_share)} of requests leave" if r.exit_share is not None else "")
        for r in active
    )
    return f"The network under {facts.config}: {leaving}"


def signed_seconds(seconds: float) -> str:
    """``+1.2 ms``, ``−30 µs``: what a ramp is worth per request."""
    sign = "−" if seconds < 0 else "+"
    size = abs(seconds)
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if size >= s), (1e-9, "ns"))
    return f"{sign}{size / scale:.3g} {unit}"


def percent(fraction: float) -> str:
    """A share as a figure in a drawing: ``35%``, ``0.8%``; the tables beside it are exact."""
    return f"{fraction:.0%}" if fraction >= 0.0995 or fraction == 0 else f"{fraction:.1%}"


def _clip(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


# --- evidence --------------------------------------------------------------------------------------

_EV_WIDTH, _EV_HEIGHT = 430.0, 165.0
_EV_LEFT, _EV_RIGHT, _EV_TOP, _EV_BOTTOM = 44.0, 12.0, 18.0, 24.0
_LOWEST = -2.0  # decades; below an e-value of 0.01 nobody needs to tell how far


def evidence_chart(gate: str, curve: Sequence[CurvePoint], *, started_at: float | None) -> Markup:
    """The e-value of a gate over time on a logarithmic scale, the limit as a line; beyond it the gate has spoken."""
    if not curve:
        return Markup("")
    start = min(started_at or curve[0].at, curve[0].at)
    span = max(curve[-1].at - start, 1.0)
    limit = curve[-1].log_limit / math.log(10)
    highest = max([limit * 1.25, *(p.log_e_value / math.log(10) for p in curve)]) + 0.2
    inner_width, inner_height = _EV_WIDTH - _EV_LEFT - _EV_RIGHT, _EV_HEIGHT - _EV_TOP - _EV_BOTTOM

    def x(at: float) -> float:
        return _EV_LEFT + inner_width * (at - start) / span

    def y(decades: float) -> float:
        return _EV_TOP + inner_height * (highest - max(decades, _LOWEST)) / (highest - _LOWEST)

    def height(log_e: float) -> float:
        return y(log_e / math.log(10))

    earned = proves(gate)
    parts = [
        element(
            "rect",
            x=_EV_LEFT,
            y=_EV_TOP,
            width=inner_width,
            height=max(0.0, y(limit) - _EV_TOP),
            class_="zone-good" if earned else "zone-bad",
        ),
        *_decades(highest, y),
        *_step_marks(curve, x),
        _line(_EV_LEFT, y(limit), _EV_WIDTH - _EV_RIGHT, y(limit), "limit"),
        # At the left, where evidence begins: a curve that passes its limit does so at the right.
        _label(
            _EV_LEFT + 4,
            y(limit) - 4,
            f"{'enough at' if earned else 'harm at'} {e_value(curve[-1].log_limit)}",
            "limit-label",
        ),
        *(_path([(x(p.at), height(p.log_e_value)) for p in part], "curve") for part in _by_step(curve)),
        element("circle", cx=x(curve[-1].at), cy=height(curve[-1].log_e_value), r=3.5, class_="curve-end"),
        _label(_EV_LEFT, _EV_HEIGHT - 6, "start"),
        _label(_EV_WIDTH - _EV_RIGHT, _EV_HEIGHT - 6, duration(span), "tick", "end"),
    ]
    last = curve[-1]
    label = (
        f"E-value of gate {gate} over {duration(span)}: {e_value(last.log_e_value)} now, against a limit of "
        f"{e_value(last.log_limit)}"
    )
    return svg(_EV_WIDTH, _EV_HEIGHT, *parts, label=label, class_="evidence")


def _decades(highest: float, y: Scale) -> list[Markup]:
    every = max(1, round((highest - _LOWEST) / 4))
    shown = [d for d in range(int(_LOWEST), math.floor(highest) + 1) if d % every == 0]
    out = [_line(_EV_LEFT, y(d), _EV_WIDTH - _EV_RIGHT, y(d), "unit" if d == 0 else "grid") for d in shown]
    return out + [_label(_EV_LEFT - 6, y(d) + 3, _power(d), "tick", "end") for d in shown]


def _power(decade: int) -> str:
    return f"{10**decade:g}" if -3 < decade < 4 else f"10^{decade}"


def _by_step(curve: Sequence[CurvePoint]) -> list[list[CurvePoint]]:
    """Evidence begins anew with every step, so no line is drawn between two of them."""
    out: list[list[CurvePoint]] = []
    for point in curve:
        if not out or out[-1][-1].step != point.step:
            out.append([])
        out[-1].append(point)
    return out


def _step_marks(curve: Sequence[CurvePoint], x: Scale) -> list[Markup]:
    out: list[Markup] = []
    labelled = -math.inf
    for part in _by_step(curve):
        at = x(part[0].at)
        if out:
            out.append(_line(at, _EV_TOP, at, _EV_HEIGHT - _EV_BOTTOM, "step"))
        weight = max(p.weight for p in part)  # the last readings of a canary that is taken back are at 0
        if weight and at - labelled > 34:  # steps that follow each other closely share one label
            near_end = at > _EV_WIDTH - _EV_RIGHT - 30
            out.append(
                _label(
                    at - 2 if near_end else at + 2, _EV_TOP - 6, f"{weight} %", "tick", "end" if near_end else "start"
                )
            )
            labelled = at
    return out


# --- latency ---------------------------------------------------------------------------------------

_CDF_WIDTH, _CDF_HEIGHT = 640.0, 240.0
_CDF_LEFT, _CDF_RIGHT, _CDF_TOP, _CDF_BOTTOM = 44.0, 20.0, 14.0, 30.0
_NAMED_AT, _NAME_WIDTH = 0.3, 76.0  # where on its curve a name stands, and the room that it takes


def latency_chart(facts: LatencyFacts) -> Markup:
    """Share of requests answered within a time (logarithmic), exits on and off, with the objective as a line."""
    shown = [(d, c) for d, c in ((facts.off, "cdf-off"), (facts.on, "cdf-on")) if d is not None]
    if not shown:
        return Markup("")
    seconds = [s for d, _ in shown for s, _ in d.points] + [s for s in (facts.slo_seconds,) if s]
    low, high = math.log10(min(seconds)) - 0.05, math.log10(max(seconds)) + 0.1
    width, height = _CDF_WIDTH - _CDF_LEFT - _CDF_RIGHT, _CDF_HEIGHT - _CDF_TOP - _CDF_BOTTOM

    def x(s: float) -> float:
        return _CDF_LEFT + width * (math.log10(s) - low) / (high - low)

    def y(part: float) -> float:
        return _CDF_TOP + height * (1 - part)

    parts = [_line(_CDF_LEFT, y(q), _CDF_WIDTH - _CDF_RIGHT, y(q), "grid") for q in (0.0, 0.5, 1.0)]
    parts += [_label(x(s), _CDF_HEIGHT - 10, _seconds(s), "tick", "middle") for s in _ticks(low, high)]
    target = facts.percentile / 100
    parts += [_label(_CDF_LEFT - 6, y(q) + 3, f"{100 * q:g}%", "tick", "end") for q in (0.0, 0.5, target)]
    if facts.slo_seconds:
        at = x(facts.slo_seconds)
        parts.append(_line(at, _CDF_TOP, at, y(0), "limit"))
        parts.append(_label(at - 5, y(0) - 6, f"objective {_seconds(facts.slo_seconds)}", "limit-label", "end"))
    parts.append(_line(_CDF_LEFT, y(target), _CDF_WIDTH - _CDF_RIGHT, y(target), "unit"))
    for distribution, class_ in shown:
        parts.append(_path(_staircase(distribution, x, y), class_))
    parts += _names([(d.label, x(_reached(d, _NAMED_AT)), f"{class_}-label") for d, class_ in shown], y(_NAMED_AT) + 4)
    label = "; ".join(
        f"{d.label}: p50 {_seconds(d.at(0.5))}, p95 {_seconds(d.at(0.95))} of {d.n:,} requests" for d, _ in shown
    )
    return svg(_CDF_WIDTH, _CDF_HEIGHT, *parts, label=f"Latency distribution. {label}", class_="cdf")


def _names(curves: Sequence[tuple[str, float, str]], y: float) -> list[Markup]:
    """The names of curves beside them: of two, the left one's at its left if there is room; else at the right of
    both."""
    first, *others = sorted(curves, key=lambda curve: curve[1])
    (name, x, class_), out = first, []
    if x - _CDF_LEFT > _NAME_WIDTH:
        out.append(_label(x - 9, y, name, class_, "end"))
    else:
        others = [*others, first]
    right = max(x for _, x, _ in curves) + 9
    return out + [_label(right, y + 18 * i, name, class_) for i, (name, _, class_) in enumerate(others)]


def _reached(distribution: Distribution, part: float) -> float:
    return next(seconds for seconds, reached in distribution.points if reached >= part)


def _staircase(distribution: Distribution, x: Scale, y: Scale) -> list[Point]:
    out, reached = [], 0.0
    for seconds, part in distribution.points:
        out += [(x(seconds), y(reached)), (x(seconds), y(part))]
        reached = part
    return out


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the scale; without 2 and 5 where it is wide."""
    steps = (1.0, 2.0, 5.0) if high - low < 2.2 else (1.0,)
    every = [m * 10.0**d for d in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    return [s for s in every if low <= math.log10(s) <= high]


def _seconds(seconds: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s * 0.9995), (1e-6, "µs"))
    return f"{seconds / scale:.3g} {unit}"
