"""Batches that are held back from a plan: who they are, what they answer, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desks import SHARE, Service
from processes import document, eventually, sign

from offramp_core.control.objects import Measured
from offramp_core.control.stable.holdback import update_measured
from offramp_core.errors import PlanRefusedError
from offramp_core.evidence.meter import CALIBRATION_BATCHES
from offramp_core.plan import Plan
from offramp_core.protocol import PlanCounts
from offramp_core.records import ExitCosts
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.arms.arms import canary_drawn, held_back
from offramp_worker.engine.execution.sessions import Sessions


@pytest.fixture
def service(bundle_dir: Path, bundle: Bundle, sessions: Sessions) -> Iterator[Service]:
    service = Service(bundle_dir, bundle, sessions)
    yield service
    service.engine.close()
    assert service.engine.join(30.0)


def coins(n: int, *, epoch: int = 1, first: int = 0) -> list[bool]:
    return [held_back(uid="w", boot_id="boot", epoch=epoch, batch_number=first + i, share=SHARE) for i in range(n)]


def test_the_drawn_share_of_batches_runs_with_exits_off_and_says_so(service: Service, sessions: Sessions) -> None:
    service.run(service.plan())
    tickets = service.serve(80)
    drawn = coins(80)
    assert 8 < sum(drawn) < 34, "the coin is fair, or the test would tell nothing"
    assert [t.arms[0] == "holdback" for t in tickets] == drawn
    for ticket, held in zip(tickets, drawn, strict=True):
        assert (ticket.configs[0] == "exits-off") == held
        if held:
            assert ticket.exits == ["final"]
            np.testing.assert_array_equal(ticket.logits, sessions.exact(ticket.x))


def test_held_back_batches_are_counted_apart_and_audited_alike(service: Service) -> None:
    service.run(service.plan(), audit_rate=1.0)
    service.serve(80)
    held, stable, n_held = service.counts("holdback"), service.counts("stable"), sum(coins(80))
    assert (held.requests, stable.requests) == (n_held, 80 - n_held)
    assert (held.audited, held.disagreements) == (n_held, 0)
    assert stable.audited == 80 - n_held
    assert "holdback" not in {c.arm for c in service.engine.counters.snapshot()}, "operators of before know two arms"
    eventually(lambda: service.engine.ring.read(0).next == 80, what="a record of every request")


def test_a_plan_is_compared_with_what_was_held_back_from_it(service: Service) -> None:
    service.run(service.plan())
    service.serve(120)
    drawn = coins(120)
    calibrated = [i for i, held in enumerate(drawn) if held][CALIBRATION_BATCHES - 1] + 1
    seen = service.measured
    assert (seen.plan_hash, seen.holdback_share) == (service.plan().content_hash, SHARE)
    assert (seen.batches, seen.held_back) == (120 - calibrated, sum(drawn[calibrated:]))
    assert (seen.requests, seen.exits) == (120 - sum(drawn), {"r00-grid": 120 - sum(drawn)})
    assert seen.engine_time.spent > 0


def test_the_canary_keeps_its_weight_and_its_batches_are_not_compared(service: Service) -> None:
    service.run(service.plan(), canary=service.plan({"r01-grid": "1"}), weight=40)
    tickets = service.serve(120)
    drawn = coins(120)
    wanted = [
        "holdback"
        if held
        else "canary"
        if canary_drawn(salt="salt", uid="w", batch_number=i, weight_percent=40)
        else "stable"
        for i, held in enumerate(drawn)
    ]
    assert [t.arms[0] for t in tickets] == wanted
    of_stable = [
        held
        for i, held in enumerate(drawn)
        if not canary_drawn(salt="salt", uid="w", batch_number=i, weight_percent=40)
    ]
    calibrated = [i for i, held in enumerate(of_stable) if held][CALIBRATION_BATCHES - 1] + 1
    assert (service.measured.batches, service.measured.held_back) == (
        len(of_stable) - calibrated,
        sum(of_stable[calibrated:]),
    )
    assert service.measured.requests == wanted.count("stable")


@pytest.mark.parametrize(
    "asked", [{"deadline_seconds": 1e6}, {"never_exit": True}], ids=lambda asked: next(iter(asked))
)
def test_requests_with_a_deadline_or_without_exits_are_neither_held_back_nor_compared(
    service: Service, asked: dict[str, Any]
) -> None:
    service.run(service.plan())
    assert {t.arms[0] for t in service.serve(60, **asked)} == {"stable"}
    assert service.measured.batches == 0 and service.counts("holdback").batches == 0


def test_where_every_request_has_a_deadline_nothing_is_held_back(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions
) -> None:
    service = Service(bundle_dir, bundle, sessions, latency_seconds=1e6, always_in_time=True)
    service.run(service.plan())
    assert {t.arms[0] for t in service.serve(40)} == {"stable"}
    service.engine.close()
    assert service.engine.join(30.0)


def test_nothing_is_held_back_from_exits_off_or_at_share_0(service: Service) -> None:
    service.run(Plan.from_mapping({**service.plan().to_mapping(), "ramps": []}))
    assert {t.arms[0] for t in service.serve(30)} == {"stable"}
    assert service.engine.counters.plans() == ()
    service.run(service.plan(), holdback_share=0.0)
    assert {t.arms[0] for t in service.serve(30)} == {"stable"}
    assert (service.measured.batches, service.measured.exits) == (0, {"r00-grid": 30})


def test_figures_of_a_plan_go_on_over_epochs_and_begin_anew_with_another_share(service: Service) -> None:
    service.run(service.plan())
    service.serve(40)
    before = service.measured.requests
    service.run(service.plan(), audit_rate=0.5)
    service.serve(40)
    assert service.measured.requests == before + 40 - sum(coins(40, epoch=2, first=41))  # the fence was batch 40
    service.run(service.plan(), holdback_share=0.1)
    assert service.measured == PlanCounts(service.plan().content_hash, 0.1)
    assert len(service.engine.counters.plans()) == 2


def test_the_exits_of_a_breaker_that_opened_are_not_compared(service: Service) -> None:
    service.run(service.plan(), audit_rate=1.0, accuracy_budget=1e-6, breaker_run_length=1.5)
    service.serve(60)
    assert service.engine.arms.breaker_open
    before = service.measured
    assert {t.arms[0] for t in service.serve(40, seed=2)} == {"stable"}
    assert service.measured == before


def test_a_held_back_answer_is_not_kept_for_others(bundle_dir: Path, bundle: Bundle, sessions: Sessions) -> None:
    service = Service(bundle_dir, bundle, sessions, cache_bytes=1_000_000)
    service.run(service.plan())
    first, again = service.serve(60), service.serve(60)
    for one, other in zip(first, again, strict=True):
        assert other.cached == (one.arms[0] != "holdback")
    service.engine.close()
    assert service.engine.join(30.0)


@pytest.mark.parametrize("share", [-0.1, 0.6])
def test_a_share_out_of_range_is_refused(service: Service, share: float) -> None:
    with pytest.raises(PlanRefusedError, match="holdback_share"):
        service.desk.deliver(sign(replace(document(service.plan()), holdback_share=share)))


def seconds_of_audits(service: Service) -> dict[str, float]:
    families = service.engine.metrics.registry.collect()
    samples = [
        s for f in families if f.name == "earlyexit_audit_seconds" for s in f.samples if s.name.endswith("_total")
    ]
    return {s.labels["arm"]: s.value for s in samples}


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_the_seconds_of_audits_are_counted_beside_what_the_batches_would_take(service: Service, execution: str) -> None:
    """Results-only execution compares every row in its batch; those that are drawn run once more for their records."""
    service.run(service.plan(execution=execution), audit_rate=0.0)
    service.serve(60)
    unaudited = service.measured
    assert unaudited.audit_seconds == 0 < unaudited.exact_seconds and seconds_of_audits(service) == {"stable": 0.0}
    service.run(service.plan(execution=execution), audit_rate=1.0)
    service.serve(60)
    audited, told = service.measured, seconds_of_audits(service)
    assert audited.exact_seconds > unaudited.exact_seconds
    assert audited.audit_seconds == pytest.approx(told["stable"] + told["holdback"])
    assert told["stable"] >= 1e-3 * service.counts("stable", epoch=2).drawn / 2, "each pass takes a tick of this clock"


def test_the_status_tells_the_seconds_of_audits_as_a_share_of_the_time_without_exits(service: Service) -> None:
    service.run(service.plan(), audit_rate=1.0)
    service.serve(160)
    seen, plan = service.measured, service.plan()
    told = update_measured(
        Measured(),
        [("boot", seen)],
        plan=plan,
        share=SHARE,
        live_boots=frozenset({"boot"}),
        ramp_ids=(),
        costs=ExitCosts(np.ones(1), np.empty(0)),
        alpha=0.01,
        now=0.0,
    )
    assert told.audits == pytest.approx(seen.audit_seconds / seen.exact_seconds, abs=1e-3)
    assert told.audits > 0


def test_audits_that_fail_take_their_time_as_well(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.run(service.plan(), audit_rate=1.0)
    monkeypatch.setattr(Sessions, "tapped", lambda *_: 1 / 0)
    service.serve(20)
    assert service.measured.audit_seconds > 0
    assert sum(seconds_of_audits(service).values()) == pytest.approx(service.measured.audit_seconds)
