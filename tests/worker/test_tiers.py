"""Requests that ask for a tier: who may leave, what is counted, what is refused, and batches that mix them."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from desks import EVERYBODY_LEAVES, Service
from processes import WorkerProcess, document, eventually, plan_for, sign

from offramp_core.errors import PlanRefusedError
from offramp_core.plan import Plan, RampThreshold, TierRamps
from offramp_core.protocol import ArmPlan, SliceCounts
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.arms.tiers import tier_within, unknown_tier
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.front import Front
from offramp_worker.http.tensors import InferRequest

RAMP = "r00-grid"
BUDGETS = {"half": 0.01, "none": 0.005, "whole": 0.004}


@pytest.fixture
def service(bundle_dir: Path, bundle: Bundle, sessions: Sessions) -> Iterator[Service]:
    service = Service(bundle_dir, bundle, sessions)
    yield service
    service.engine.close()
    assert service.engine.join(30.0)


def with_tiers(plan: Plan, **thresholds: str) -> Plan:
    """A plan whose tiers leave at its first ramp, each below a threshold of its own."""
    tiers = (TierRamps(n, (RampThreshold(RAMP, Decimal(t)),)) for n, t in sorted(thresholds.items()))
    return replace(plan, tiers=tuple(tiers))


def run(service: Service, plan: Plan, *going: str, audit_rate: float = 0.0, **fields: Any) -> None:
    service.engine.renew_lease()  # the control plane has spoken to this process
    arm = ArmPlan(plan.to_mapping(), audit_rate, tiers=going)
    fields = {"tiers": BUDGETS, "accuracy_budget": 0.99, **fields}
    base = document(plan, epoch=service.engine.active.epoch + 1)
    service.desk.deliver(sign(replace(base, stable=arm, **fields)))


def left(tickets: list[Any]) -> int:
    return sum(ticket.exits[0] == RAMP for ticket in tickets)


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_each_tier_leaves_by_its_own_thresholds_and_one_without_a_plan_gets_the_models_answers(
    service: Service, sessions: Sessions, execution: str
) -> None:
    run(service, with_tiers(service.plan(execution=execution), half="0.5"), "half")
    everybody, half, none = (service.serve(40, tier=name) for name in ("", "half", "none"))
    assert left(everybody) >= 38
    assert 5 < left(half) < 35
    assert left(none) == 0
    np.testing.assert_array_equal([t.labels[0] for t in none], [sessions.exact(t.x)[0].argmax() for t in none])


def test_a_batch_that_mixes_tiers_answers_each_row_as_a_batch_of_its_own_would(service: Service) -> None:
    run(service, with_tiers(service.plan(), half="0.5"), "half")
    x, names = bundles.inputs(24, seed=3), ["", "half", "none"] * 8
    alone = [service.serve(24, seed=3, tier=name) for name in ("", "half", "none")]
    with service.engine._turn:  # one batch of all of them
        mixed = [service.engine.submit(x[i : i + 1], never_exit=False, tier=name) for i, name in enumerate(names)]
    service.serve(1)
    for i, ticket in enumerate(mixed):
        assert ticket.exits == alone[i % 3][i].exits, (i, names[i])
        assert ticket.labels == alone[i % 3][i].labels


def test_at_a_lower_precision_a_tier_without_a_plan_is_answered_by_the_exact_executor(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = bundles.write_wide_bundle(tmp_path_factory.mktemp("wide"))
    wide = load_bundle(folder)
    sessions = Sessions(wide, threads=1)
    service = Service(folder, wide, sessions)
    plan = service.plan({"int8/r00-grid": "1"}, precision="int8")
    ramp = RampThreshold("int8/r00-grid", Decimal("0.5"))
    run(service, replace(plan, tiers=(TierRamps("half", (ramp,)), TierRamps("whole"))), "half", "whole")
    none, half, whole = (service.serve(20, tier=name) for name in ("none", "half", "whole"))
    assert {t.exits[0] for t in half} == {"int8/r00-grid", "final"} and {t.exits[0] for t in whole} == {"final"}
    for ticket in none:
        np.testing.assert_array_equal(ticket.logits[0], sessions.exact(ticket.x)[0])
    assert any((t.logits != sessions.exact(t.x)).any() for t in whole), "its plan is the backbone at int8"
    service.engine.close()
    assert service.engine.join(30.0)


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_audits_of_a_tier_are_counted_for_its_budget_alone(service: Service, execution: str) -> None:
    plan, loose = with_tiers(service.plan(execution=execution), half="0.5"), {"half": 0.98, "none": 0.005}
    run(service, plan, "half", audit_rate=1.0, slices=("day",), tiers=loose)
    for name, n in (("", 20), ("half", 30), ("none", 10)):
        service.serve(n, seed=n, tier=name, slice_name="day")
    counts = service.counts("stable")
    assert (counts.requests, counts.drawn, counts.audited) == (60, 20, 20)
    eventually(lambda: service.counts("stable").tier_audited == {"half": 30}, what="its audits")
    counts = service.counts("stable")
    assert list(counts.tier_audited) == ["half"], "what the model itself answers says nothing about the plan"
    seen = service.measured.slices
    assert {name: s.audited for name, s in seen.items()} == {"day": 50, "tier/half": 30}
    assert seen["tier/half"].disagreements == counts.tier_disagreements["half"] <= 30


def test_a_workers_own_detector_stops_a_tier_and_nobody_else(service: Service) -> None:
    run(service, with_tiers(service.plan(), half="1"), "half", audit_rate=1.0, tiers={"half": 1e-5, "none": 1e-5})
    service.serve(120, tier="half")
    stable = service.engine.active.stable
    assert stable is not None
    eventually(lambda: stable.tiers["half"].stopped, what="the stop")
    assert left(service.serve(20, seed=9, tier="half")) == 0
    assert left(service.serve(20, seed=9)) >= 18 and not service.engine.arms.breaker_open
    seen = service.measured.slices["tier/half"]
    run(service, with_tiers(service.plan(), half="1"), "half", audit_rate=1.0, tiers={"half": 1e-5, "none": 1e-5})
    assert left(service.serve(20, tier="half")) == 0, "another epoch of the same plan opens nothing"
    assert service.measured.slices["tier/half"] == seen != SliceCounts()


def test_a_canary_serves_its_own_tiers_and_counts_them(service: Service) -> None:
    canary = with_tiers(service.plan({RAMP: "0.9"}), half="0.5")
    run(
        service,
        service.plan(),
        canary=ArmPlan(canary.to_mapping(), 1.0, tiers=("half",)),
        weight_percent=100,
    )
    assert 0 < left(service.serve(30, tier="half")) < 30
    eventually(lambda: service.counts("canary").tier_audited == {"half": 30}, what="its audits")
    assert service.counts("canary").audited == 0


def test_no_tier_is_answered_with_what_another_one_was_told(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions
) -> None:
    service = Service(bundle_dir, bundle, sessions, cache_bytes=1_000_000)
    run(service, with_tiers(service.plan(), half="0.5"), "half")
    service.serve(20)
    assert not any(t.cached for t in service.serve(20, tier="half"))
    assert all(t.cached for t in service.serve(20, tier="half"))
    assert not any(t.cached for t in service.serve(20, tier="none"))
    service.engine.close()
    assert service.engine.join(30.0)


def test_the_largest_budget_within_what_a_request_allows_serves_it(service: Service) -> None:
    run(service, with_tiers(service.plan(), half="0.5"), "half", accuracy_budget=0.02)
    known = service.engine.active.document
    assert [tier_within(most, known) for most in (0.5, 0.02, 0.019, 0.01, 0.007, 0.005, 0.0049, 0.0)] == [
        *("", "", "half", "half", "none", "none"),
        *("whole", None),
    ]
    assert unknown_tier("half", known) == unknown_tier("default", known) == ()
    assert unknown_tier("best", known) == ("default", "half", "none", "whole")


def test_before_a_document_the_model_itself_answers_every_tier(service: Service) -> None:
    assert unknown_tier("anything", service.engine.active.document) == ()
    assert left(service.serve(5, tier="anything")) == 0
    assert all(not c.tier_audited for c in service.engine.counters.snapshot())


@pytest.fixture
def ask(service: Service) -> Callable[..., list[Any]]:
    """Requests that come in by the front door and wait while something changes."""

    def through_the_front(change: Callable[[], None], **asked: Any) -> list[Any]:
        async def admitted() -> list[Any]:
            front = Front(asyncio.get_running_loop())
            with service.engine._turn:  # no batch begins meanwhile
                tickets = [
                    front.submit(
                        service.engine, InferRequest(x[None], None, False, math.inf, (), **asked), done=lambda _: None
                    )
                    for x in bundles.inputs(20, seed=5)
                ]
                change()
            while any(ticket.pending for ticket in tickets):
                await asyncio.sleep(0.01)
            return tickets

        return asyncio.run(asyncio.wait_for(admitted(), 60))

    return through_the_front


def test_what_a_request_allows_holds_under_the_plan_that_answers_it(service: Service, ask: Callable[..., Any]) -> None:
    """Whatever came into force while it waited: the first plan of all, a looser tier, a looser budget for everybody."""
    plan = with_tiers(service.plan(), half="1")
    assert left(ask(lambda: run(service, plan), max_disagreement=0.0001)) == 0, "no plan was known"
    run(service, plan, "half", tiers={"half": 0.004})
    assert left(ask(lambda: None, max_disagreement=0.005)) == 20
    looser = {"half": 0.9}
    assert left(ask(lambda: run(service, plan, "half", tiers=looser), max_disagreement=0.005)) == 0
    run(service, service.plan({RAMP: "0"}), accuracy_budget=0.01, tiers={})
    assert left(ask(lambda: run(service, service.plan()), max_disagreement=0.01)) == 0
    assert left(ask(lambda: None)) >= 18, "who asks for nothing has everybody's"


def test_a_stop_lasts_while_the_plan_serves_whatever_documents_say_of_the_tier(service: Service) -> None:
    plan, tight = with_tiers(service.plan(), half="1"), {"half": 1e-5}
    run(service, plan, "half", audit_rate=1.0, tiers=tight)
    service.serve(120, tier="half")
    eventually(lambda: service.engine.arms.stopped_tiers == ("half",), what="the stop")
    run(service, plan, audit_rate=1.0, tiers=tight)  # without the tier
    run(service, plan, "half", audit_rate=1.0, tiers=tight)
    assert left(service.serve(20, seed=9, tier="half")) == 0
    run(service, plan, "half", audit_rate=1.0, tiers={"half": 2e-5})
    assert left(service.serve(20, seed=9, tier="half")) == 0
    run(service, with_tiers(service.plan(), half="0.999"), "half", tiers=tight)  # another plan is another question
    assert left(service.serve(20, seed=9, tier="half")) > 0


def test_everybodys_deadline_gives_no_answer_to_a_tier_that_its_own_thresholds_would_not(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions
) -> None:
    service = Service(bundle_dir, bundle, sessions, latency_seconds=1e-9, always_in_time=True)
    run(service, with_tiers(service.plan({RAMP: "0.0001"}), half="0"), "half")
    assert left(service.serve(20)) == 20
    assert left(service.serve(20, tier="half")) == left(service.serve(20, max_disagreement=0.5)) == 0
    assert left(service.serve(20, tier="half", deadline_seconds=1e-9)) == 20, "its own deadline is its own choice"
    service.engine.close()
    assert service.engine.join(30.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"tiers": {"a": 0.5}, "accuracy_budget": 0.02},
        {"tiers": {"a": 0.0}},
        {"tiers": {f"t{i}": 0.01 for i in range(9)}},
        {"tiers": {"other": 0.01}, "going": ("half",)},
    ],
)
def test_a_document_whose_tiers_cannot_be_is_refused(service: Service, fields: dict[str, Any]) -> None:
    plan = with_tiers(service.plan(), half="0.5")
    arm = ArmPlan(plan.to_mapping(), 0.0, tiers=fields.pop("going", ()))
    with pytest.raises(PlanRefusedError, match="tiers"):
        service.desk.deliver(sign(replace(document(plan), stable=arm, **fields)))


@pytest.mark.slow
def test_a_request_names_its_tier_and_a_bad_one_is_refused_by_its_path(worker: WorkerProcess, bundle_dir: Path) -> None:
    plan = with_tiers(plan_for(bundle_dir, EVERYBODY_LEAVES), half="0")
    arm = ArmPlan(plan.to_mapping(), 0.0, tiers=("half",))
    body = sign(replace(document(plan), stable=arm, tiers=BUDGETS, accuracy_budget=0.99))
    sent = worker.admin.post("/v1/config", json={"payload": body.payload, "signature": body.signature})
    assert sent.status_code == 200, sent.text
    x = bundles.inputs(1, seed=1)
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
    for wish, status, said in (
        ({}, 200, RAMP),
        ({"tier": "default"}, 200, RAMP),
        ({"tier": "half"}, 200, "final"),
        ({"max_disagreement": 0.99}, 200, RAMP),
        ({"max_disagreement": 0.01}, 200, "final"),
        ({"max_disagreement": 0}, 200, "final"),
        ({"tier": "best"}, 400, "parameters.tier: is 'best'; this service has default, half, none, whole"),
        ({"tier": 7}, 400, "parameters.tier: is 7"),
        ({"max_disagreement": 1.5}, 400, "parameters.max_disagreement: is 1.5"),
        ({"max_disagreement": "0.1"}, 400, "parameters.max_disagreement"),
        ({"max_disagreement": 0.1, "tier": "half"}, 400, "send one of them"),
    ):
        reply = worker.public.post("/v2/models/tiny/infer", json={"inputs": [tensor], "parameters": wish})
        assert reply.status_code == status, reply.text
        assert said in (reply.json()["parameters"]["exit"] if status == 200 else reply.text), wish
    for names, wish, status, said in (
        (["half"], {}, 200, "final"),
        (["default"], {}, 200, RAMP),
        (["best"], {}, 400, "parameters.tier: is 'best'; this service has default, half, none, whole"),
        (["half"], {"tier": "default"}, 400, "parameters.tier: comes with the header Offramp-Tier"),
        (["half"], {"max_disagreement": 0.99}, 400, "parameters.max_disagreement: comes with the header Offramp-Tier"),
        (["half", "default"], {}, 400, "Offramp-Tier: is 'default'; send it once"),
        (["h" * 64], {}, 400, "Offramp-Tier: is 'hhh"),
        ([""], {}, 400, "Offramp-Tier: is ''"),
    ):
        body = json.dumps({"inputs": [tensor], "parameters": wish})
        for packed in (False, True):
            named = [("Offramp-Tier", name) for name in names] + [("Content-Encoding", "gzip")] * packed
            content = gzip.compress(body.encode()) if packed else body
            reply = worker.public.post("/v2/models/tiny/infer", content=content, headers=named)
            assert reply.status_code == status, reply.text
            assert said in (reply.json()["parameters"]["exit"] if status == 200 else reply.text), names
