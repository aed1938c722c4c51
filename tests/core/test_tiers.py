"""Tiers: smaller budgets that a request may ask for, from the spec over plans and certificates to gates and stops."""

from __future__ import annotations

import copy
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from fleet import MANIFEST, Fleet, pool, promoted, published  # type: ignore[import-not-found]
from scipy.stats import binom
from scores import IDS, REQUEST, recorded

from offramp_core.certify import Certificate, TierBudget, allowance, verify_certificate
from offramp_core.control.objects import ArmTally, BothArms, Ledger, TierTally
from offramp_core.control.rollouts.gates import GateInput, read_gates
from offramp_core.control.rollouts.ledger import BootReport, fold, impossible, went_backwards
from offramp_core.control.spec import TierObjective, parse_spec
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.evaluate import evaluate_plan
from offramp_core.plan import Plan, RampThreshold, TierRamps
from offramp_core.protocol import ArmCounts, tier_of, tier_slice
from offramp_core.tuning import Proposed, tune

STRICT = {"name": "strict", "maxDisagreement": "0.01"}
ASKED = replace(REQUEST, max_disagreement=0.03, tiers=(TierBudget("fine", 0.02), TierBudget("strict", 0.01)))


def manifest(*tiers: dict[str, Any]) -> dict[str, Any]:
    accuracy = {"maxDisagreement": "0.03"}
    return {**MANIFEST, "objective": {"latency": {"threshold": "100ms"}, "accuracy": accuracy, "tiers": list(tiers)}}


# --- intent ----------------------------------------------------------------------------------------


def test_tiers_are_read_and_belong_to_what_a_plan_is_tuned_for() -> None:
    spec = parse_spec(manifest(STRICT, {"name": "A_b.9", "maxDisagreement": "0.03"}))
    assert spec.tiers == (TierObjective("strict", 0.01), TierObjective("A_b.9", 0.03))
    keys = {parse_spec(manifest(*t)).objective_key for t in ((), (STRICT,), ({**STRICT, "maxDisagreement": "0.02"},))}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("tiers", "complaint"),
    [
        ([STRICT, STRICT], "named twice"),
        ([{"name": "default", "maxDisagreement": "0.01"}], "tiers[0].name"),
        ([{"name": "-a", "maxDisagreement": "0.01"}], "tiers[0].name"),
        ([{"name": "a" * 64, "maxDisagreement": "0.01"}], "tiers[0].name"),
        ([{"name": "a", "maxDisagreement": "0.04"}], "above accuracy.maxDisagreement 0.03"),
        ([{"name": "a", "maxDisagreement": "0"}], "tiers[0].maxDisagreement"),
        ([{"name": f"t{i}", "maxDisagreement": "0.01"} for i in range(9)], "at most 8"),
    ],
)
def test_a_bad_tier_is_refused_by_its_path(tiers: list[Any], complaint: str) -> None:
    with pytest.raises(InvalidSpecError, match=complaint.replace("[", r"\[")):
        parse_spec(manifest(*tiers))


def test_generated_answers_have_no_tiers() -> None:
    asked = manifest(STRICT)
    asked["objective"]["accuracy"] = {"output": "ExactAnswer", "maxLoss": "0.05"}
    with pytest.raises(InvalidSpecError, match=r"objective\.tiers"):
        parse_spec(asked)


# --- plans -----------------------------------------------------------------------------------------

LEAVE = (RampThreshold("r0", Decimal("0.5")), RampThreshold("r2", Decimal("0.25")))


def test_a_plan_carries_its_tiers_and_one_without_them_is_named_as_ever() -> None:
    plain = Plan("b", "r", LEAVE)
    plan = replace(plain, tiers=(TierRamps("strict", (RampThreshold("r2", Decimal("0.1")),)),))
    assert Plan.from_mapping(plan.to_mapping()) == plan
    assert "tiers" not in plain.to_mapping() and plan.content_hash != plain.content_hash
    assert plan.menu == {"strict": Plan("b", "r", (RampThreshold("r2", Decimal("0.1")),))}


@pytest.mark.parametrize(
    "tiers",
    [
        (TierRamps("a", (RampThreshold("r1", Decimal("0.1")),)),),  # no ramp of the plan
        (TierRamps("b"), TierRamps("a")),
        (TierRamps("a"), TierRamps("a")),
        tuple(TierRamps(f"t{i}") for i in range(9)),
    ],
)
def test_a_plan_whose_tiers_one_batch_could_not_serve_is_none(tiers: tuple[TierRamps, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="tier"):
        Plan("b", "r", LEAVE, tiers=tiers)


# --- certificates ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proposal() -> Proposed:
    found = tune(recorded(4000, 6, seed=5), ASKED)
    assert isinstance(found, Proposed)
    return found


def test_every_tier_has_a_claim_at_its_own_budget_and_an_even_share_of_the_level(proposal: Proposed) -> None:
    certificate = proposal.certificate
    assert [(t.name, t.budget) for t in certificate.tiers] == [("fine", 0.02), ("strict", 0.01)]
    assert [certificate.level, *(t.level for t in certificate.tiers)] == pytest.approx([allowance(0.05, 1) / 3] * 3)
    assert all(t.p_value <= t.level for t in certificate.tiers)
    assert Certificate.from_mapping(certificate.to_mapping()) == certificate


def test_a_tiers_plan_is_more_cautious_and_saves_less(proposal: Proposed) -> None:
    saved = [proposal.predicted.saving, *(proposal.predicted.tiers[name] for name in ("fine", "strict"))]
    assert saved == sorted(saved, reverse=True) and saved[-1] > 0


def test_a_certificate_is_checked_again_tier_by_tier(proposal: Proposed) -> None:
    held_out = recorded(4000, 6, seed=5).take(slice(-proposal.n_b, None))
    for tier in proposal.certificate.tiers:
        seen = evaluate_plan(held_out, proposal.plan.menu[tier.name], IDS)
        assert (seen.n, seen.disagreements) == (tier.n, tier.k)
    assert verify_certificate(proposal.certificate, proposal.plan, records=held_out, ramp_ids=IDS) is None
    first, *others = proposal.certificate.tiers
    for wrong, reason in (
        (replace(first, k=first.k + 1), "tier fine: p_value"),
        (replace(first, level=0.04), "exceeds the allowance"),
        (replace(first, name="loose"), "tier loose is none of the plan's"),
    ):
        forged = replace(proposal.certificate, tiers=(wrong, *others))
        assert reason in str(verify_certificate(forged, proposal.plan, records=held_out, ramp_ids=IDS))


def test_a_tier_that_no_plan_passes_takes_the_plan_from_nobody() -> None:
    found = tune(recorded(2000, 6, seed=5), replace(ASKED, tiers=(TierBudget("fine", 0.02), TierBudget("never", 1e-4))))
    assert isinstance(found, Proposed)
    assert [t.name for t in found.plan.tiers] == [t.name for t in found.certificate.tiers] == ["fine"]


def test_a_tier_that_loosens_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="only tightens"):
        tune(recorded(500, 6, seed=5), replace(ASKED, tiers=(TierBudget("loose", 0.05),)))


def test_a_plan_without_the_menu_must_be_beaten_by_none_that_brings_it() -> None:
    records = recorded(4000, 6, seed=5)
    plain = tune(records, replace(ASKED, tiers=()))
    assert isinstance(plain, Proposed)
    asked = replace(ASKED, current=plain.plan, min_gain=0.01)
    assert not isinstance(tune(records, asked), Proposed), "it does not save more"
    found = tune(records, replace(asked, menu_is_new=True))
    assert isinstance(found, Proposed) and len(found.plan.tiers) == 2


@pytest.mark.simulation
@pytest.mark.slow
def test_the_promises_of_all_tiers_hold_together() -> None:
    """Over draws of records, a certificate is wrong about somebody in at most the share that its test may spend."""
    truth, wrong, proposed, runs = recorded(60_000, 6, seed=99), 0, 0, 200
    for seed in range(runs):
        rows = np.random.default_rng(seed).choice(len(truth), size=1500, replace=False)
        found = tune(replace(truth.take(rows), time=np.arange(1500.0)), replace(ASKED, delta=0.5))
        if isinstance(found, Proposed):
            proposed += 1
            claims = {0.03: found.plan} | {t.budget: found.plan.menu[t.name] for t in found.certificate.tiers}
            wrong += any(evaluate_plan(truth, plan, IDS).disagreement > budget for budget, plan in claims.items())
    assert proposed > runs / 2
    assert wrong <= int(binom.isf(1e-3, runs, allowance(0.5, 1)))


# --- gates -----------------------------------------------------------------------------------------

GIVEN = GateInput(
    BothArms(ArmTally(requests=9000, drawn=4000, audited=4000, batches=100), ArmTally(batches=300)),
    weight=25,
    budget=0.02,
    confidence=0.99,
    n_steps=1,
    slow_needed=0,
    certified=True,
    tiers={"fine": 0.01, "strict": 0.002},
)


def test_a_tier_over_its_budget_rejects_a_canary_that_keeps_everybodys() -> None:
    tally = {"fine": TierTally(200, 1), "strict": TierTally(200, 9)}
    accuracy, tiers = read_gates(replace(GIVEN, tally=replace(GIVEN.tally, tiers=tally)))[:2]
    assert (accuracy.name, accuracy.state) == ("accuracy", "Clear")
    assert (tiers.name, tiers.state, tiers.n, tiers.k, tiers.bound) == ("tiers", "Rejected", 200, 9, 0.002)
    assert "tier strict" in tiers.message


def test_no_step_waits_for_the_audits_of_a_tier_and_without_tiers_there_is_no_gate() -> None:
    assert [(g.name, g.state) for g in read_gates(GIVEN)][1] == ("tiers", "Clear")
    assert "tiers" not in [g.name for g in read_gates(replace(GIVEN, tiers={}))]


def seen(n: int, k: int, **fields: Any) -> ArmCounts:
    """What a process counted whose hundred requests were, but for sixty, of the tier."""
    counts = ArmCounts(
        3,
        "canary",
        "hash",
        requests=100,
        drawn=60,
        audited=60,
        batches=10,
        tier_audited={"strict": n},
        tier_disagreements={"strict": k},
    )
    return replace(counts, **fields)


def folded(ledger: Ledger, live: str = "ab", tiers: tuple[str, ...] = ("strict",), **reports: Any) -> Ledger:
    """With what processes report, by boot id."""
    heard = [BootReport(boot, counts if isinstance(counts, tuple) else (counts,)) for boot, counts in reports.items()]
    return fold(ledger, heard, epoch=3, live_boots=frozenset(live), plan_hashes={"canary": "hash"}, tiers=tiers)


def test_audits_of_tiers_are_pooled() -> None:
    both = folded(Ledger(epoch=3), a=seen(5, 1), b=seen(7, 0))
    assert both.total.tiers == {"strict": TierTally(12, 1)}
    assert folded(both, live="b").total.tiers == {"strict": TierTally(12, 1)}, "what a process saw outlives it"


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(seen(4, 5), id="more disagreements than audits"),
        pytest.param(seen(-3, 0), id="fewer than none"),
        pytest.param(seen(4, -1), id="fewer disagreements than none"),
        pytest.param(seen(41, 0), id="more audits than requests beside those of everybody"),
        pytest.param(
            seen(0, 0, tier_audited={"strict": 30, "fine": 11}), id="more audits of all tiers together than requests"
        ),
        pytest.param(seen(0, 0, tier_audited={}, tier_disagreements={"strict": 5}), id="disagreements alone"),
        pytest.param(seen(0, 0, tier_audited={f"t{i}": 1 for i in range(9)}), id="more tiers than a service can have"),
    ],
)
def test_audits_of_tiers_that_cannot_be_are_not_pooled_and_their_process_is_not_believed(counts: ArmCounts) -> None:
    ledger = folded(Ledger(epoch=3), a=counts, b=seen(7, 1))
    assert (ledger.quarantined, ledger.total.tiers) == (("a",), {"strict": TierTally(7, 1)})
    assert impossible([counts], newest_epoch=3, plans={}) == "it reports more events than there can have been"


@pytest.mark.parametrize("fields", [{"drawn": 0, "audited": 0}, {"tier_audited": {}, "tier_disagreements": {}}])
def test_audits_under_a_plan_that_the_epoch_does_not_have_are_not_pooled_before_a_batch_ends(fields: Any) -> None:
    foreign = seen(40, 40, plan_hash="other", batches=0, **fields)
    assert folded(Ledger(epoch=3), a=foreign).quarantined == ("a",)
    reason = impossible([foreign], newest_epoch=3, plans={(3, "canary"): "hash"})
    assert reason == "it counts for a plan that its epoch does not have"
    assert folded(Ledger(epoch=3), a=ArmCounts(3, "canary", "other")).quarantined == (), "it counts nothing"


@pytest.mark.parametrize(("n", "k"), [(9, 5), (10, 4), (0, 0)])
def test_audits_of_a_tier_do_not_go_backwards(n: int, k: int) -> None:
    ledger = folded(Ledger(epoch=3), a=seen(10, 5), b=seen(7, 1))
    assert folded(ledger, a=seen(n, k)).quarantined == ("a",)
    assert went_backwards([seen(10, 5)], [seen(n, k)])
    assert went_backwards([seen(10, 5), seen(0, 0)], [seen(n, k), seen(0, 0)]), "entries of one plan are added"
    assert not went_backwards([seen(10, 5)], [seen(10, 6)]) and not went_backwards([seen(10, 5)], [seen(11, 5)])


def test_two_entries_of_one_epoch_are_added() -> None:
    ledger = folded(Ledger(epoch=3), a=(seen(30, 20), seen(1, 0)))
    assert (ledger.quarantined, ledger.total.tiers) == ((), {"strict": TierTally(31, 20)})


def test_only_tiers_that_the_service_has_are_kept_and_no_worker_is_blamed_for_one_that_it_no_longer_has() -> None:
    counts = seen(5, 1, tier_audited={"strict": 5, "fine": 3})
    both = folded(Ledger(epoch=3), tiers=("fine", "strict"), a=counts)
    assert both.total.tiers == {"fine": TierTally(3), "strict": TierTally(5, 1)}
    assert folded(both).total.tiers == {"strict": TierTally(5, 1)}, "of a process that was not heard too"
    fewer = folded(both, a=counts)
    assert (fewer.quarantined, fewer.total.tiers) == ((), {"strict": TierTally(5, 1)})
    again = folded(fewer, tiers=("fine", "strict"), a=counts)
    assert (again.quarantined, again.total.tiers) == ((), both.total.tiers)


def test_what_audits_of_a_tier_are_counted_under_is_told_from_slices() -> None:
    assert tier_of(tier_slice("strict")) == "strict"
    assert tier_of("strict") == tier_of("class/3") == ""


# --- the loop --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Fleet:
    return promoted(manifest(STRICT))


@pytest.fixture
def fleet(served: Fleet) -> Fleet:
    return copy.deepcopy(served)


def test_one_rollout_brings_the_plan_and_that_of_its_tier(fleet: Fleet) -> None:
    assert [t.name for t in fleet.stable.tiers] == ["strict"]
    assert fleet.stable.menu["strict"].ramps != fleet.stable.ramps
    document = published(fleet)
    assert (document.tiers, document.stable.tiers) == ({"strict": 0.01}, ("strict",))
    for _ in range(30):
        fleet.step()
    tier = fleet.status.tiers[0]
    assert (tier.name, tier.state, tier.budget) == ("strict", "Exits", 0.01)
    assert tier.saving > 0 and tier.certified_k <= 0.01 * tier.certified_n and tier.audited > 0
    gates = {gate.name: gate for gate in [r.status.gates for r in fleet.rollouts.values()][-1]}
    assert gates["tiers"].n > 0, "audits of the tier reach its gate"


def test_a_tier_over_its_budget_is_stopped_while_everybody_else_goes_on(fleet: Fleet) -> None:
    name = fleet.status.stable_config
    for worker in fleet.workers:
        worker.tier_wrong = 0.3
    fleet.run(lambda f: published(f).stable.tiers == (), limit=400)
    epoch = published(fleet).epoch
    for _ in range(20):
        fleet.step()
    assert fleet.status.stable_config == name and not fleet.stable.exits_off
    assert published(fleet).epoch == epoch, "one stop is one epoch"
    assert fleet.status.tiers[0].state == "Stopped"
    events = [e for e in fleet.events if e.reason == "SliceStopped"]
    assert len(events) == 1 and "audits of tier strict disagreed; its budget is 1.00%" in events[0].message
    assert "its requests take no exits" in events[0].message


def test_a_tier_that_a_workers_own_detector_stopped_is_stopped_everywhere(fleet: Fleet) -> None:
    fleet.workers[0].stopped_tiers = ("strict",)
    fleet.step()
    assert (published(fleet).stable.tiers, fleet.status.tiers[0].state) == ((), "Stopped")
    fleet.workers[0].stopped_tiers = ()
    for _ in range(5):
        fleet.step()
    assert fleet.status.tiers[0].state == "Stopped", "it lasts while the plan serves"


def test_a_tightened_tier_takes_no_exits_that_were_proven_for_more(fleet: Fleet) -> None:
    objective = manifest({**STRICT, "maxDisagreement": "0.001"})["objective"]
    fleet.edit(objective=objective)
    fleet.step()
    document = published(fleet)
    assert (document.tiers, document.stable.tiers) == ({"strict": 0.001}, ())
    assert not fleet.stable.exits_off, "what everybody was promised has not changed"
    assert fleet.status.tiers[0].state == "NoPlan"


def test_a_tier_that_is_added_is_looked_for_at_once_and_comes_with_the_next_plan() -> None:
    fleet = Fleet(pool(4000, seed=1), manifest())
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    plain = fleet.status.stable_config
    fleet.edit(objective=manifest(STRICT)["objective"])
    fleet.step()
    assert published(fleet).tiers == {"strict": 0.01} and fleet.status.tiers[0].state == "NoPlan"
    fleet.run(lambda f: published(f).stable.tiers == ("strict",), limit=1500)
    assert fleet.status.stable_config != plain
