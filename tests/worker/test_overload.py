"""Overload in a worker: which requests get the larger budget, what is counted for whom, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from desks import Service
from processes import document, eventually, sign
from test_tiers import RAMP, left, run, with_tiers

from offramp_core.errors import PlanRefusedError
from offramp_core.protocol import OVERLOAD, ArmPlan
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.arms.tiers import tier_within, unknown_tier
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.http.tensors import reply_parameters

NOBODY = {RAMP: "0.000001"}  # the ramp is there, and hardly anybody leaves
BUDGETS = {OVERLOAD: 0.5, "half": 0.005}
FULL = 100  # requests of a millisecond, by the profile: many more than the objective has room for


@pytest.fixture
def service(bundle_dir: Path, bundle: Bundle, sessions: Sessions) -> Iterator[Service]:
    service = Service(bundle_dir, bundle, sessions, latency_seconds=0.1)
    yield service
    service.engine.close()
    assert service.engine.join(30.0)


def offer(service: Service, *, threshold: str = "1", execution: str = "ComputeSaving", **fields: Any) -> None:
    """A plan that lets hardly anybody leave, and nearly everybody under overload."""
    plan = with_tiers(service.plan(NOBODY, execution=execution), half="0", overload=threshold)
    run(service, plan, OVERLOAD, "half", **{"tiers": BUDGETS, "accuracy_budget": 0.01, **fields})


def crowd(service: Service, asked: Sequence[dict[str, Any]], *, seed: int = 3, others: int = FULL) -> list[Ticket]:
    """All of them wait before a batch runs that any of them is in, behind enough others for overload."""
    x = bundles.inputs(others + len(asked), seed=seed)
    with service.engine._turn:
        ahead = [service.engine.submit(row[None], never_exit=False, tier="half") for row in x[:others]]
        tickets = [
            service.engine.submit(row[None], **{"never_exit": False, **each})
            for row, each in zip(x[others:], asked, strict=True)
        ]
    eventually(lambda: not any(t.pending for t in (*ahead, *tickets)), what="replies")
    service.serve(1, tier="half")  # and the batch of the last reply has been counted
    assert not any(t.eased for t in ahead)
    return tickets


PLAIN: dict[str, Any] = {}
FIRM = (
    {"tier": "half"},
    {"tier": "default"},
    {"max_disagreement": 0.02},  # more than everybody's, and less than that of overload
    {"never_exit": True},
    {"slice_name": "vip"},
    {"deadline_seconds": 100.0},
)


def test_under_overload_requests_that_name_no_budget_leave_by_its_thresholds_and_say_so(service: Service) -> None:
    offer(service, slices=("vip",))
    assert left(service.serve(20)) <= 1 and service.engine.overload_seconds() is None
    loose, named, will_do = crowd(service, [PLAIN, {"slice_name": "day"}, {"max_disagreement": 0.5}])
    for ticket in (loose, named, will_do):
        assert ticket.eased and ticket.exits == [RAMP]
        assert reply_parameters(ticket)["overload"] is True
    assert service.engine.overload_seconds() is not None


@pytest.mark.parametrize("asked", FIRM, ids=lambda asked: next(iter(asked)))
def test_a_request_that_names_a_budget_of_its_own_never_gets_it(service: Service, asked: dict[str, Any]) -> None:
    offer(service, slices=("vip",))
    plain, *tickets = crowd(service, [PLAIN, *[asked] * 5])
    assert plain.eased
    assert not any(t.eased or "overload" in reply_parameters(t) for t in tickets)
    assert left(tickets) == 0


@pytest.mark.parametrize("objective", [0.1, None], ids=["not offered", "no objective"])
def test_without_thresholds_for_it_or_an_objective_nothing_changes(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions, objective: float | None
) -> None:
    service = Service(bundle_dir, bundle, sessions, latency_seconds=objective)
    if objective is None:
        offer(service)
    else:
        run(service, with_tiers(service.plan(NOBODY), half="0.000001"), "half", tiers={"half": 0.005})
    assert not any(t.eased for t in crowd(service, [PLAIN] * 10))
    assert service.engine.overload_seconds() is None
    service.engine.close()
    assert service.engine.join(30.0)


def test_results_only_execution_has_none_as_it_would_spare_nothing(service: Service) -> None:
    offer(service, execution="ResultsOnly")
    assert not any(t.eased for t in crowd(service, [PLAIN] * 10))


def test_audits_under_overload_count_for_its_budget_alone_and_its_errors_for_nobody_else(
    service: Service, sessions: Sessions
) -> None:
    """Fails where they are mixed: everybody's plan answers all as the model does, and overload's many otherwise."""
    offer(service, audit_rate=1.0, slices=("class/0", "class/1", "class/2", "vip"))
    usual = service.serve(30)
    tickets = crowd(service, [PLAIN] * 40)
    eased = [t for t in tickets if t.eased]
    wrong = sum(int(t.labels[0]) != int(sessions.exact(t.x)[0].argmax()) for t in eased)
    assert len(eased) == 40 and wrong > 0
    eventually(lambda: service.counts("stable").tier_audited.get(OVERLOAD) == 40, what="its audits")
    counts = service.counts("stable")
    assert (counts.drawn, counts.audited, counts.disagreements) == (30, 30, 0), "of everybody's plan"
    assert (counts.tier_audited[OVERLOAD], counts.tier_disagreements[OVERLOAD]) == (40, wrong)
    assert counts.requests == 30 + FULL + 40 + 1, "what is asked of the worker is all of it"
    seen = service.measured.slices
    assert (seen["tier/overload"].audited, seen["tier/overload"].requests) == (40, 40)
    assert seen["tier/overload"].disagreements == wrong
    assert sum(s.disagreements for name, s in seen.items() if name != "tier/overload") == 0
    assert service.measured.requests == counts.requests - 40, "nor do its exits speak for everybody's"
    metric = service.engine.metrics.registry.get_sample_value("earlyexit_overload_answers_total", {"arm": "stable"})
    assert metric == 40
    assert not service.engine.arms.breaker_open and len(usual) == 30


def test_batches_under_overload_are_neither_held_back_nor_timed_for_anybody(service: Service) -> None:
    offer(service, holdback_share=0.5)
    service.serve(20)
    before, held = service.counts("stable"), service.counts("holdback").batches
    crowd(service, [PLAIN] * 100)
    after = service.counts("stable")
    timed = sum(sum(buckets.values()) for buckets in after.execution.values())
    assert after.batches > before.batches and timed < after.batches
    assert service.counts("holdback").batches - held <= 12, "those of before the overload"


def test_its_own_detector_stops_it_and_requests_have_everybodys_budget(service: Service) -> None:
    tight = {OVERLOAD: 0.011, "half": 0.005}
    offer(service, audit_rate=1.0, tiers=tight, breaker_run_length=1000.0)
    crowd(service, [PLAIN] * 100)
    eventually(lambda: OVERLOAD in service.engine.arms.stopped_tiers, what="the stop")
    assert not any(t.eased for t in crowd(service, [PLAIN] * 10, seed=4, others=20))
    assert service.engine.arms.stopped_tiers == (OVERLOAD,) and not service.engine.arms.breaker_open
    assert service.engine.overload_seconds() is None and not service.engine.arms.may_ease
    assert left(service.serve(20, seed=9)) <= 1


def test_a_request_of_many_rows_has_one_budget_in_all_its_batches(service: Service) -> None:
    offer(service)
    x = bundles.inputs(FULL + 100, seed=3)
    with service.engine._turn:
        ahead = [service.engine.submit(row[None], never_exit=False, tier="half") for row in x[:FULL]]
        many = service.engine.submit(x[FULL:], never_exit=False)
    eventually(lambda: not many.pending and not any(t.pending for t in ahead), what="replies")
    assert many.eased and many.exits.count(RAMP) == 100
    assert service.measured.slices["tier/overload"].requests == 100


def test_an_answer_under_overload_is_given_to_those_that_may_have_it_and_kept_for_nobody(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions
) -> None:
    """Fails where those that wait with another request are put back past the door: more rows than the queue has room
    for."""
    most = FULL + 20
    service = Service(
        bundle_dir, bundle, sessions, latency_seconds=0.1, cache_bytes=1_000_000, max_queue_rows=most, draw=lambda: 0.5
    )
    offer(service, audit_rate=0.6)
    x, batcher = bundles.inputs(FULL + 1, seed=3), service.engine._batcher
    with service.engine._turn:
        ahead = [service.engine.submit(row[None], never_exit=False, tier="half") for row in x[:FULL]]
        hot = [service.engine.submit(x[FULL:], never_exit=False) for _ in range(200)]
        firm = [service.engine.submit(x[FULL:], never_exit=False, tier="default") for _ in range(5)]
        assert batcher.rows <= FULL + 2
    eventually(lambda: not any(t.pending for t in (*ahead, *hot, *firm)), what="replies")
    assert [sum(t.number > 0 for t in some) for some in (hot, firm)] == [1, 1], "one of each was ever queued"
    assert all(t.eased and t.exits == [RAMP] and reply_parameters(t)["overload"] for t in hot)
    for ticket in firm:
        assert not ticket.eased and ticket.exits == ["final"]
        np.testing.assert_array_equal(ticket.logits, sessions.exact(x[FULL:]))
    eventually(lambda: service.counts("stable").tier_audited.get(OVERLOAD) == 200, what="audits of its budget")
    assert service.measured.slices["tier/overload"].requests == 200
    again = service.engine.submit(x[FULL:], never_exit=False)
    eventually(lambda: not again.pending, what="a reply")
    np.testing.assert_array_equal(again.logits, hot[0].logits if again.eased else firm[0].logits)
    service.engine.close()
    assert service.engine.join(30.0)


def test_a_canary_without_it_answers_for_everybodys_budget(service: Service) -> None:
    canary = ArmPlan(service.plan({RAMP: "0.000002"}).to_mapping(), 0.0)
    offer(service, canary=canary, weight_percent=100)
    tickets = crowd(service, [PLAIN] * 10)
    assert {t.arms[0] for t in tickets} == {"canary"} and not any(t.eased for t in tickets)


def test_nobody_asks_for_it(service: Service) -> None:
    assert unknown_tier(OVERLOAD, None) == ("default",)
    offer(service)
    known = service.engine.active.document
    assert unknown_tier(OVERLOAD, known) == ("default", "half")
    assert [tier_within(most, known) for most in (0.9, 0.5, 0.01, 0.006)] == ["", "", "", "half"]


@pytest.mark.parametrize("budget", [0.01, 0.005, 0.0, 1.5, float("nan")])
def test_a_document_whose_budget_for_it_is_no_larger_than_everybodys_is_refused(
    service: Service, budget: float
) -> None:
    plan = with_tiers(service.plan(NOBODY), overload="1")
    content = replace(document(plan), tiers={OVERLOAD: budget}, accuracy_budget=0.01)
    with pytest.raises(PlanRefusedError, match=r"tiers|parse"):
        service.desk.deliver(sign(content))
