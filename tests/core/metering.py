"""Meters that watched simulated batches, and looks at them."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
from fleet import BACKBONE, RAMP_SET, RAMPS  # type: ignore[import-not-found]

from offramp_core.control.objects import Measured
from offramp_core.control.stable.holdback import update_measured
from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.plan import Plan, RampThreshold
from offramp_core.records import ExitCosts

PLAN = Plan(BACKBONE, RAMP_SET, (RampThreshold(RAMPS[0], Decimal("0.2")), RampThreshold(RAMPS[2], Decimal("0.3"))))
NOTHING_YET = Measured()
COSTS = ExitCosts(np.array([0.002, 0.002, 0.002, 0.004]), np.array([0.0001, 0.0001, 0.0001]))


def metered(
    n: int,
    *,
    share: float,
    take: float,
    seed: int,
    unit: float = 0.01,
    wander: float = 0.3,
    meter: HoldbackMeter | None = None,
) -> HoldbackMeter:
    """``n`` batches of 1 to 16 rows on a machine whose pace wanders with memory; exits make them take ``take`` times as
    long."""
    rng = np.random.default_rng(seed)
    meter = meter or HoldbackMeter(plan_hash=PLAN.content_hash, share=share)
    steps = rng.normal(0, wander * math.sqrt(1 - 0.99**2), n)
    pace, noise, off = 0.0, rng.lognormal(0, 0.1, n).tolist(), (rng.random(n) < share).tolist()
    for step, jitter, held_back, rows in zip(steps.tolist(), noise, off, rng.integers(1, 17, n).tolist(), strict=True):
        pace = 0.99 * pace + step
        seconds = unit * rows * jitter * math.exp(pace) * (1.0 if held_back else take)
        meter.count_batch(
            held_back=held_back, expected_seconds=0.01 * rows, answer_seconds=seconds, engine_seconds=seconds
        )
    return meter


def looked(
    *meters: HoldbackMeter, before: Measured = NOTHING_YET, now: float = 0.0, alpha: float = 0.01, **changes: Any
) -> Measured:
    reports = [(f"boot-{i}", meter.counts()) for i, meter in enumerate(meters)]
    asked: dict[str, Any] = {
        "plan": PLAN,
        "share": meters[0].share if meters else before.holdback_share,
        "ramp_ids": RAMPS,
        "costs": COSTS,
        "live_boots": frozenset(boot for boot, _ in reports),
        "alpha": alpha,
        "now": now,
        **changes,
    }
    return update_measured(before, reports, **asked)
