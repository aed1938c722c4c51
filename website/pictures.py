"""The drawings of the concepts. Curves are computed by the product's own code on seeded samples, never sketched."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np

from offramp_core.certify.planner import largest_passing_count
from offramp_core.control.rollouts.gates import harmful_rates
from offramp_core.control.rollouts.rollout import RULES
from offramp_core.evidence import detector
from offramp_core.evidence.exposure import audits_needed
from offramp_core.evidence.one_arm import log_average_ratio
from website.drawing import DARK, LIGHT, Axes, Canvas

BUDGET, DELTA = 0.01, 0.05
FOLDER = "images/concepts"


def overview() -> Canvas:
    """Who writes what, and where traffic goes."""
    c = Canvas(
        860,
        330,
        "You write an EarlyExitService; the operator tunes, certifies and canaries plans inside the workers that serve",
    )
    c.box(20, 40, 190, 78, "EarlyExitService", "objective, budget, replicas", "yours, in Git")
    c.box(
        320,
        20,
        220,
        118,
        "operator",
        "tunes on labels, certifies,",
        "canaries, watches, rolls back",
        "writes status only",
        stroke="accent",
    )
    c.box(650, 22, 190, 50, "RampConfig", "a plan and its certificates")
    c.box(650, 86, 190, 50, "RampRollout", "one attempt, its evidence")
    c.line([(210, 79), (316, 79)], stroke="soft", arrow=True)
    c.line([(540, 47), (646, 47)], stroke="soft", arrow=True)
    c.line([(540, 111), (646, 111)], stroke="soft", arrow=True)
    for i in range(3):
        x = 245 + i * 130
        c.rect(x, 215, 116, 92)
        c.text(x + 58, 233, f"worker {i}", anchor="middle", bold=True)
        for j in range(12):
            canary = (i, j) in {(0, 4), (1, 1), (1, 9), (2, 7)}
            c.rect(
                x + 10 + j % 6 * 16.5,
                243 + j // 6 * 20,
                13,
                14,
                fill="canary" if canary else "stable",
                stroke="paper",
                r=2,
            )
        c.text(x + 58, 299, "batches", anchor="middle", size=11, fill="soft")
    c.line([(400, 138), (400, 211)], stroke="accent", arrow=True)
    c.text(392, 180, "signed plans", anchor="end", size=12, fill="soft")
    c.line([(462, 211), (462, 142)], stroke="accent", arrow=True)
    c.text(470, 180, "counts, labels", size=12, fill="soft")
    c.box(20, 232, 120, 56, "clients", "Open Inference", "Protocol")
    c.line([(140, 260), (241, 260)], stroke="soft", arrow=True)
    c.rect(660, 236, 14, 14, fill="stable", stroke="paper", r=2)
    c.text(682, 248, "batch under the stable plan", size=12, fill="soft")
    c.rect(660, 262, 14, 14, fill="canary", stroke="paper", r=2)
    c.text(682, 274, "batch under the canary", size=12, fill="soft")
    return c


def ramps() -> Canvas:
    """A network as a line of blocks, with two active ramps and one that is not."""
    c = Canvas(
        860,
        300,
        "A network as a line of blocks; inputs that are sure enough leave at a ramp, the others go on to the final "
        "answer",
    )
    for i in range(6):
        c.box(110 + i * 112, 40, 84, 56, f"block {i + 1}")
        if i < 5:
            c.line([(194 + i * 112, 68), (218 + i * 112, 68)], stroke="soft", arrow=True)
    c.line([(40, 68), (106, 68)], stroke="soft", arrow=True)
    c.text(40, 56, "input", size=12, fill="soft")
    c.line([(754, 68), (790, 68)], stroke="soft", arrow=True)
    c.text(794, 72, "final", bold=True)
    for i, threshold, share, active in (
        (0, "0.18", "41 % leave", True),
        (2, "0", "inactive: nobody leaves", False),
        (4, "0.35", "22 % leave", True),
    ):
        x = 110 + i * 112 + 98
        ink = "good" if active else "line"
        c.line([(x, 68), (x, 142)], stroke=ink, arrow=True, dash="" if active else "4 4")
        c.box(
            x - 56, 146, 112, 50, f"ramp r{i:02}", f"threshold {threshold}", stroke=ink, ink="ink" if active else "soft"
        )
        if active:
            c.line([(x, 196), (x, 232)], stroke=ink, arrow=True)
            c.text(x, 250, "uncertainty < threshold", anchor="middle", size=11.5, fill="soft")
            c.text(x, 267, share, anchor="middle", size=12.5, fill="good", bold=True)
        else:
            c.text(x, 250, share, anchor="middle", size=11.5, fill="soft")
    c.text(
        40,
        290,
        "Shares are an example. A cut vertex is an edge whose removal separates input from output; a ramp's head "
        "reads only what passes there.",
        size=11.5,
        fill="soft",
    )
    return c


def labels() -> Canvas:
    """400 requests: who leaves, who is audited, and the two ways to count."""
    shown, columns, many = 400, 40, 200_000
    rng = np.random.default_rng(11)
    leaves, audited = rng.random(many) < 0.6, rng.random(many) < 0.1
    wrong = leaves & (rng.random(many) < 0.02 / 0.6)
    c = Canvas(
        860,
        364,
        "Requests are drawn for audit before it is known whether they leave early; only the drawn ones are counted",
    )
    for i in range(shown):
        x, y = 32 + i % columns * 20.4, 36 + i // columns * 21
        c.dot(x, y, 6.2, fill="good" if leaves[i] else "stable", stroke="ink" if audited[i] else "none", width=2.2)
        if wrong[i]:
            _cross(c, x, y)
    y = 266
    for x, fill, stroke, text in (
        (32, "good", "none", "left early"),
        (140, "stable", "none", "went to the end"),
        (280, "fill", "ink", "drawn for audit"),
    ):
        c.dot(x, y, 6.2, fill=fill, stroke=stroke, width=2.2)
        c.text(x + 13, y + 4, text, size=12.5)
    c.dot(412, y, 6.2, fill="good")
    _cross(c, 412, y)
    c.text(425, y + 4, "would differ from the model; seen only where drawn", size=12.5)
    right, counted = (wrong & audited).sum() / audited.sum(), ~leaves | audited
    naive = (wrong & audited).sum() / counted.sum()
    c.text(32, 302, f"{many:,} such requests, of which {wrong.mean():.2%} would differ:", size=13)
    c.text(32, 324, f"counting the drawn ones alone reads {right:.2%};", size=13, bold=True)
    c.text(
        32,
        346,
        f"counting every request that went to the end as an agreement too reads {naive:.2%}: it always agrees with "
        "itself.",
        size=13,
    )
    return c


def _cross(c: Canvas, x: float, y: float) -> None:
    for d in (4, -4):
        c.line([(x - 4, y - d), (x + 4, y + d)], stroke="paper", width=1.8)


def certificate() -> Canvas:
    """A fixed sequence of tests on one held-out set."""
    rng = np.random.default_rng(5)
    n, plans = 2000, 16
    true = np.linspace(0.0004, 0.0125, plans)
    u = rng.random(n)
    counts = [int((u < rate).sum()) for rate in true]
    most = largest_passing_count(n, budget=BUDGET, level=DELTA)
    passed = next((i for i, k in enumerate(counts) if k > most), plans)
    c = Canvas(
        860,
        330,
        "Plans from cautious to bold are tested in order on held-out labels until the first fails; the last that "
        "passed is certified",
    )
    axes = Axes(70, 46, 760, 210, (0, plans + 1), (0, max(counts) + 2))
    axes.draw(
        c,
        xs=(),
        ys=[(float(v), str(v)) for v in range(0, max(counts) + 2, 4)],
        xlabel="plans of the path, from cautious to bold",
        ylabel=f"answers that differ, of {n:,} held-out labels",
    )
    _, y = axes.at(0, most + 0.5)
    c.line([(70, y), (830, y)], stroke="accent", width=1.6, dash="6 4")
    c.text(
        830,
        38,
        f"at most {most} pass for a budget of {BUDGET:.0%} at {1 - DELTA:.0%} confidence",
        size=12,
        fill="accent",
        anchor="end",
    )
    for i, k in enumerate(counts):
        x, top = axes.at(i + 1, k)
        _, bottom = axes.at(i + 1, 0)
        colour = "good" if i < passed else "bad" if i == passed else "line"
        c.rect(x - 14, top, 28, max(1.0, bottom - top), fill=colour, stroke=colour, r=2)
        c.text(x, top - 5, str(k), size=11, fill="soft", anchor="middle")
    x, _ = axes.at(passed, 0)
    c.text(x, 272, "certified", size=12, fill="good", anchor="middle", bold=True)
    x, _ = axes.at(passed + 1, 0)
    c.text(x + 4, 272, "ends", size=12, fill="bad", anchor="middle", bold=True)
    x, _ = axes.at((passed + 2 + plans) / 2, 0)
    c.text(x, 272, "never tested", size=12, fill="soft", anchor="middle")
    c.text(
        70,
        318,
        "A sample drawn with a fixed seed from plans of known disagreement; counts and limit by the product's own "
        "test.",
        size=11.5,
        fill="soft",
    )
    return c


def canary() -> Canvas:
    """Steps of a canary over the batches of three workers, each drawn by a hash."""
    c = Canvas(
        860,
        300,
        "In each worker a share of the batches runs the canary; the share rises step by step and every worker takes "
        "part",
    )
    steps, per_step = ((5, "step 1: 5 %"), (25, "step 2: 25 %"), (50, "step 3: 50 %"), (100, "promoted")), 16
    for w in range(3):
        y = 60 + w * 62
        c.text(20, y + 23, f"worker {w}", bold=True)
        for s, (weight, _) in enumerate(steps):
            for j in range(per_step):
                drawn = _uniform(f"digits-1/{s}/0/pod-{w}/{j}") < weight / 100
                c.rect(
                    100 + (s * per_step + j) * 11.7 + s * 4,
                    y,
                    9.4,
                    34,
                    fill="canary" if drawn else "stable",
                    stroke="paper",
                    r=2,
                )
    for s, (_, name) in enumerate(steps):
        x = 100 + s * (per_step * 11.7 + 4)
        c.text(x, 44, name, size=12.5, bold=True)
        c.line([(x, 250), (x + per_step * 11.7 - 4, 250)], stroke="soft", width=1)
        told = "gates look for harm" if s < 3 else "the breaker watches"
        c.text(x, 268, told, size=12, fill="soft")
    c.text(100, 290, "each bar is a batch; time goes to the right", size=11.5, fill="soft")
    return c


def _uniform(text: str) -> float:
    """The draw that workers make from (salt, pod, batch number)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64


def gates() -> Canvas:
    """Evidence against three plans, by the accuracy gate's own e-value."""
    limit, grid = math.log(1 / DELTA), harmful_rates(BUDGET)
    needed = audits_needed(budget=BUDGET, harmful=3 * BUDGET, alpha=DELTA, power=0.95, grid=grid)
    upto = 1000
    c = Canvas(
        860, 350, "Evidence grows with the audits of a harmful plan until it crosses its limit; a good plan's falls"
    )
    axes = Axes(70, 46, 600, 230, (0, upto), (-9.3, 6.9))
    ticks = [(math.log(10.0) * e, f"10{'⁻' if e < 0 else ''}{'⁰¹²³⁴'[abs(e)]}" if e else "1") for e in range(-4, 4)]
    axes.draw(
        c,
        xs=range(0, upto + 1, 200),
        ys=ticks,
        xlabel="audited requests of the canary since the step began",
        ylabel="e-value of the accuracy gate",
    )
    _, y = axes.at(0, limit)
    c.line([(70, y), (670, y)], stroke="bad", dash="6 4")
    c.text(678, y + 4, "limit 20: rolled back", size=12, fill="bad")
    x, _ = axes.at(needed, 0)
    c.line([(x, 46), (x, 276)], stroke="accent", dash="2 4")
    c.text(x - 6, 60, f"{needed} audits: enough to pass", size=12, fill="accent", anchor="end")
    for factor, seed, colour, text in (
        (5, 3, "bad", "at five budgets"),
        (1, 8, "canary", "exactly at the budget"),
        (0.5, 2, "good", "at half its budget"),
    ):
        happened = np.random.default_rng(seed).random(upto) < factor * BUDGET
        curve, points = np.cumsum(happened), []
        for i in range(0, upto, 5):
            value = log_average_ratio(int(curve[i]), i + 1, p0=BUDGET, grid=grid)
            points.append(axes.at(i + 1, value))
            if value >= limit:
                c.dot(*axes.at(i + 1, value), 4.5, fill="bad")
                break
        c.line(points, stroke=colour, width=2.2)
        x, y = points[-1]
        c.text(678 if x > 640 else x + 10, y + (4 if x > 640 else -8), text, size=12, fill=colour)
    c.text(
        70,
        338,
        f"Budget {BUDGET:.0%}. Audits drawn with fixed seeds; evidence, limit and exposure by the product's own code.",
        size=11.5,
        fill="soft",
    )
    return c


def drift() -> Canvas:
    """The restarting detector over a quiet stretch and a jump to five budgets."""
    quiet, run_length = 3000, 1_000_000.0
    rng = np.random.default_rng(21)
    happened = np.concatenate([rng.random(quiet) < BUDGET / 2, rng.random(600) < 5 * BUDGET])
    state, points, alarm = detector.init(), [], None
    c = Canvas(
        860,
        320,
        "The detector stays low for as long as the inputs are as they were, and alarms some hundred audits after they "
        "change",
    )
    axes = Axes(70, 46, 740, 200, (0, len(happened)), (0, math.log10(run_length) + 0.6))
    axes.draw(
        c,
        xs=range(0, 3601, 600),
        ys=[(float(e), f"10{'⁰¹²³⁴⁵⁶'[e]}" if e else "1") for e in range(0, 7, 2)],
        xlabel="audited requests",
        ylabel="statistic of the detector",
    )
    _, y = axes.at(0, math.log10(run_length))
    c.line([(70, y), (810, y)], stroke="bad", dash="6 4")
    c.text(
        76,
        y - 6,
        "alarm at a million: on a plan within its budget once in a million audits, or less often",
        size=12,
        fill="bad",
    )
    for i, event in enumerate(happened, start=1):
        state = detector.update(state, 1, int(event), p0=BUDGET)
        value = math.log10(max(1.0, detector.statistic(state)))
        if i % 12 == 0 or value >= math.log10(run_length):
            points.append(axes.at(i, value))
        if value >= math.log10(run_length):
            alarm = i
            break
    c.line(points, stroke="stable", width=2)
    x, _ = axes.at(quiet, 0)
    c.line([(x, 46), (x, 246)], stroke="canary", dash="2 4")
    c.text(x - 6, 238, "the inputs change: 5 % disagree", size=12, fill="canary", anchor="end")
    assert alarm is not None
    c.dot(*points[-1], 5, fill="bad")
    c.text(
        x - 6,
        points[-1][1] + 24,
        f"exits off after {alarm - quiet} audits",
        size=12,
        fill="bad",
        anchor="end",
        bold=True,
    )
    c.text(
        70,
        310,
        f"Budget {BUDGET:.0%}, plan at half of it until the change. A sample with a fixed seed through the product's "
        "own detector.",
        size=11.5,
        fill="soft",
    )
    return c


def phases() -> Canvas:
    """The phases of a rollout."""
    c = Canvas(
        860,
        270,
        "Phases of a rollout, from Pending to Succeeded, or over RollingBack to RolledBack, Aborted or Superseded",
    )
    row = (("Pending", 20), ("Progressing", 170), ("AwaitingPromotion", 340), ("Promoting", 540), ("Succeeded", 710))
    for name, x in row:
        w = 150 if name == "AwaitingPromotion" else 120
        c.box(x, 96, w, 44, name, stroke="good" if name == "Succeeded" else "line")
    for a, b in ((140, 166), (290, 336), (490, 536), (660, 706)):
        c.line([(a, 118), (b, 118)], stroke="soft", arrow=True)
    c.box(170, 20, 120, 40, "Paused")
    c.line([(210, 96), (210, 64)], stroke="soft", arrow=True)
    c.line([(250, 60), (250, 92)], stroke="soft", arrow=True)
    c.text(300, 44, "gates stay armed", size=12, fill="soft")
    c.text(340, 90, "only with promotion: Manual", size=11.5, fill="soft")
    c.box(170, 204, 140, 44, "RollingBack", stroke="bad")
    for x in (80, 230, 415, 600):
        c.line([(x, 140), (x, 172), (240, 172), (240, 200)], stroke="bad", width=1, arrow=True)
    c.line([(310, 226), (356, 226)], stroke="bad", arrow=True)
    c.box(360, 204, 330, 44, "RolledBack, Aborted or Superseded", stroke="bad")
    c.text(610, 166, "harm, a person, a newer intent", size=12, fill="bad")
    assert len(RULES) > 10  # the machine is a list of rules; this is its map
    return c


PICTURES: dict[str, Callable[[], Canvas]] = {
    "overview": overview,
    "ramps": ramps,
    "labels": labels,
    "certificate": certificate,
    "canary": canary,
    "gates": gates,
    "drift": drift,
    "phases": phases,
}

MARK = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><title>Offramp</title>\
<path d="M3 17h7c4 0 4-10 8-10h3" fill="none" stroke="#8f9df0" stroke-width="2.6" stroke-linecap="round"/>\
<path d="M3 17h18" fill="none" stroke="#c5ccf7" stroke-width="2.6" stroke-linecap="round"/></svg>
"""


def outputs() -> dict[str, str]:
    """Pictures below ``docs``, each for light and for dark pages."""
    found = {"images/favicon.svg": MARK}
    for name, draw in PICTURES.items():
        canvas = draw()
        found |= {f"{FOLDER}/{name}-light.svg": canvas.svg(LIGHT), f"{FOLDER}/{name}-dark.svg": canvas.svg(DARK)}
    return found
