"""What a worker works out when it is scraped: the utility of ramps, plans in force and the detector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import plan_for

from offramp_core.protocol import ArmPlan, PlanDocument
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.accounts.counters import Counters
from offramp_worker.engine.accounts.scrape import EngineState, RampUtility
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.arms.breaker import Breaker


@pytest.fixture(scope="module")
def bundle(bundle_dir: Path) -> Bundle:
    return load_bundle(bundle_dir)


def totals(utility: RampUtility) -> dict[str, dict[str, float]]:
    return {f.name: {s.labels.get("ramp", ""): s.value for s in f.samples} for f in utility.collect()}


def test_the_utility_of_ramps_is_what_leavers_save_less_what_passers_pay(bundle: Bundle, bundle_dir: Path) -> None:
    counters = Counters()
    utility = RampUtility(counters)
    plan = plan_for(bundle_dir, {"r00-grid": "0.5", "r02-linear": "0.5"})
    utility.know(plan, bundle)
    counter = counters.open(epoch=3, arm="stable", plan_hash=plan.content_hash)
    counter.count_replies(exit_name="r00-grid", latencies=[0.1] * 4, drawn=0)
    counter.count_replies(exit_name="final", latencies=[0.1] * 5, drawn=0)
    utility_once = totals(utility)
    counter.count_replies(exit_name="r02-linear", latencies=[0.1], drawn=0)
    told = totals(utility)
    batch = bundle.profile.batches[0]
    segments, ramps = np.array(batch.segment_seconds), np.array(batch.ramp_seconds)
    index = {ramp.id: i for i, ramp in enumerate(bundle.columns)}
    first, second = index["r00-grid"], index["r02-linear"]
    assert told["earlyexit_ramp_saved_seconds"] == pytest.approx(
        {"r00-grid": 4 * segments[first + 1 :].sum(), "r02-linear": segments[second + 1 :].sum()}
    )
    assert told["earlyexit_ramp_overhead_seconds"] == pytest.approx(
        {"r00-grid": 10 * ramps[first], "r02-linear": 6 * ramps[second]}
    )
    assert told["earlyexit_exact_seconds"] == pytest.approx({"": 10 * segments.sum()})
    assert utility_once["earlyexit_exact_seconds"][""] == pytest.approx(9 * segments.sum())
    assert totals(utility) == told, "nothing new happened"


def test_utility_never_goes_backwards_when_old_epochs_are_dropped(bundle: Bundle, bundle_dir: Path) -> None:
    counters = Counters()
    utility = RampUtility(counters)
    plan = plan_for(bundle_dir, {"r00-grid": "0.5"})
    utility.know(plan, bundle)
    seen = []
    for epoch in range(1, 20):
        counter = counters.open(epoch=epoch, arm="canary", plan_hash=plan.content_hash)
        counter.count_replies(exit_name="r00-grid", latencies=[0.1], drawn=0)
        seen.append(totals(utility)["earlyexit_ramp_saved_seconds"]["r00-grid"])
    assert seen == pytest.approx([seen[0] * k for k in range(1, 20)])


def test_the_detector_has_series_only_while_it_watches(bundle_dir: Path) -> None:
    plan, off = plan_for(bundle_dir, {"r00-grid": "0.5"}), plan_for(bundle_dir, {})
    counters = Counters()

    class Idle:
        rows, batch_rows, exits_off, overload_seconds = 3, 16, False, staticmethod(lambda: None)
        active = Active(Runtime(off, 0.0, counters.open(epoch=0, arm="stable", plan_hash=off.content_hash)))

    def told(engine: Any) -> dict[str, Any]:
        return {s.name: s.value for f in EngineState(engine, engine).collect() for s in f.samples}

    assert "earlyexit_detector_statistic" not in told(Idle) and told(Idle)["earlyexit_queue_rows"] == 3
    breaker = Breaker(accuracy_budget=0.02, run_length=1000.0)
    counter = counters.open(epoch=1, arm="stable", plan_hash=plan.content_hash)
    document = PlanDocument("tiny", "s", 1, ArmPlan({}, 0.1), None, 0, "salt", 0.02)
    Idle.active = Active(Idle.active.off, document, Runtime(plan, 0.1, counter, breaker=breaker))
    quiet = told(Idle)["earlyexit_detector_statistic"]
    breaker.update(audited=20, disagreements=6)
    now = told(Idle)
    assert now["earlyexit_detector_limit"] == 1000.0 and now["earlyexit_detector_statistic"] > max(quiet, 1.0)
    assert now["earlyexit_plan_info"] == 1.0
