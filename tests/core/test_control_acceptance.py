"""Acceptance: how a plan without a certificate earns one, by a test that counts among all of the service's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleet import BACKBONE, MANIFEST, RAMP_SET, RAMPS, Fleet, pool  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from offramp_core.certify import allowance
from offramp_core.control.objects import BothArms, Config, ConfigStatus, GateStatus, Rollout, RolloutStatus, StepRecord
from offramp_core.control.rollouts import attempts
from offramp_core.control.rollouts.gates import GateInput, acceptance
from offramp_core.control.rollouts.rollout import acceptance_level, begun_anew, is_certified
from offramp_core.control.stable import audit
from offramp_core.control.tuning import tuner
from offramp_core.evidence.exposure import audits_to_earn
from offramp_core.evidence.one_arm import Counts
from offramp_core.plan import Plan
from offramp_core.tuning import Undecided

CLEAN = pool(4000, seed=1)
CONFUSED = pool(4000, seed=1, confusion=0.1)
TWICE, WITHIN = (
    "0.08",
    "0.02",
)  # thresholds of the last ramp, at which it is wrong twice and half as often as the budget allows


def pin(threshold: str) -> dict[str, object]:
    return {"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[2], "threshold": threshold}]}}


def last(fleet: Fleet) -> Rollout:
    return max(fleet.rollouts.values(), key=lambda r: r.number)


def gate(fleet: Fleet) -> GateStatus:
    return next(g for g in last(fleet).status.gates if g.name == "acceptance")


def tried(threshold: str, *, fleet: Fleet | None = None) -> Fleet:
    """A fleet whose canary of a pin has just come so far that its gates are read."""
    fleet = fleet or Fleet(CLEAN, {**MANIFEST, "ramps": pin(threshold)})
    fleet.edit(ramps=pin(threshold))
    fleet.run(lambda f: bool(f.rollouts) and last(f).status.phase == "Progressing" and bool(last(f).status.gates))
    return fleet


class TestTheAllowance:
    def test_each_attempt_is_a_test_and_has_less_to_spend_than_the_one_before(self) -> None:
        fleet, limits = tried("0.02"), []
        for number, threshold in enumerate(("0.02", "0.021", "0.022"), start=1):
            tried(threshold, fleet=fleet)
            assert fleet.status.tuning.tests_run == last(fleet).status.acceptance_test == number
            limits.append(gate(fleet).log_limit)
            assert limits[-1] >= -np.log(allowance(0.05, number))
        fleet.step()
        assert fleet.status.tuning.tests_run == 3, "looking again is no further test"

    def test_an_attempt_is_one_test_also_where_the_cluster_forgets_its_number(self) -> None:
        """A schema that is older than the operator prunes what it does not know."""
        fleet = tried("0.02")
        for _ in range(5):
            name, rollout = last(fleet).name, last(fleet)
            fleet.rollouts[name] = replace(
                rollout,
                status=replace(rollout.status, acceptance_test=0, gate_level=0.0, level_spent=0.0, lapsed=Counts()),
            )
            fleet.step()
        assert fleet.status.tuning.tests_run == last(fleet).status.acceptance_test == 1

    def test_a_tuning_that_follows_counts_on_from_there(self) -> None:
        fleet = tried("0.02")
        fleet.edit(ramps={"mode": "Auto"})
        fleet.run(lambda f: bool(f.configs[last(f).to_config].status.certificates) and last(f).cause == "Tuned")
        certificate = fleet.configs[last(fleet).to_config].status.certificates[-1]
        assert certificate["testIndex"] == 2

    def test_a_certified_plan_takes_no_test(self) -> None:
        fleet = Fleet(CLEAN)
        fleet.run(lambda f: bool(f.rollouts) and bool(last(f).status.gates))
        assert (last(fleet).status.acceptance_test, gate(fleet).state) == (0, "NotApplicable")


class TestTheWholeAttempt:
    @pytest.mark.slow
    def test_what_is_written_down_is_what_the_gate_has_seen_in_all_steps(self) -> None:
        fleet = tried("0.02")
        fleet.run(lambda f: f.status.pin.verdict == "Accepted", limit=600)
        status, config = last(fleet).status, fleet.configs[last(fleet).to_config]
        (proof,) = config.status.certificates
        assert (proof["n"], proof["k"]) == status.audited == (gate(fleet).n, gate(fleet).k)
        assert proof["n"] > status.ledger.total.canary.audited
        assert proof["testIndex"] == 1 and float(proof["level"]) == pytest.approx(allowance(0.05, 1))
        assert gate(fleet).log_e_value >= -np.log(float(proof["level"]))
        assert is_certified(config, fleet.service)

    def test_audits_of_a_canary_that_began_anew_still_count(self) -> None:
        fleet = tried("0.02")
        for _ in range(3):
            fleet.step()
        n, k = last(fleet).status.audited
        assert n > 0
        fleet.now += 1
        workers = [w.view() for w in fleet.workers]
        for worker, seen in zip(fleet.workers, workers, strict=True):  # the lease has lapsed: no canary is in force
            assert seen.state is not None
            worker.view = lambda *, silent=False, seen=seen: replace(seen, state=replace(seen.state, canary_hash=""))  # type: ignore[misc]
        fleet.reconcile()
        assert last(fleet).status.renewals == 1
        assert last(fleet).status.audited == (n, k) and last(fleet).status.lapsed == Counts(n, k)

    def test_a_service_that_was_at_zero_goes_on_with_the_test(self) -> None:
        status = RolloutStatus(
            "Progressing", step=1, acceptance_test=4, history=(StepRecord(5, 300, 2, 1.0),), lapsed=Counts(10, 1)
        )
        anew = begun_anew(Rollout("r-1", "a", "b", "Pinned", 1, status=status), "no workers")
        assert (anew.audited, anew.acceptance_test, anew.history) == ((310, 3), 4, ())


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 2.0], ids=["at its budget", "at two budgets"])
def test_a_plan_over_its_budget_is_hardly_ever_accepted_however_often_it_is_tried(rate: float) -> None:
    """Forty attempts of 3,000 audits for each of 200 services, looked at with every 50; one in twenty services may be
    wrong.

    The policy is the loosest: one step asks for as little as all gates together may ask.
    """
    rng, services, attempts, wrong = np.random.default_rng(3), 200, 40, 0
    fleet = Fleet(CLEAN)
    k = rng.binomial(50, rate * 0.02, size=(services, attempts, 60)).cumsum(axis=2)
    n = 50 * np.arange(1, 61)
    for number in range(1, attempts + 1):
        level = acceptance_level(RolloutStatus(acceptance_test=number), fleet.service)
        fewest = accepted_up_to(n, level=level)
        k_of = k[:, number - 1]
        wrong_now = (k_of <= fewest).any(axis=1)
        k[wrong_now, number:] = 10_000  # once is enough
        wrong += int(wrong_now.sum())
    assert wrong <= binom.isf(1e-3, services, 0.05)


def accepted_up_to(n: np.ndarray, *, level: float) -> np.ndarray:
    """The most disagreements with which the gate clears, -1 for none, by audits."""
    out = np.full(len(n), -1)
    for i, audits in enumerate(n.tolist()):
        while clears(audits, int(out[i]) + 1, level=level):
            out[i] += 1
    return out


def clears(n: int, k: int, *, level: float) -> bool:
    given = GateInput(BothArms(), 50, 0.02, 0.9, 1, 0, certified=False, attempt=Counts(n, k), acceptance_level=level)
    return acceptance(given).state == "Clear"


def test_an_older_acceptance_is_still_one() -> None:
    """Written by an operator that did not number them."""
    plan = Plan(BACKBONE, RAMP_SET)
    proof = {
        "method": "canary-acceptance",
        "budget": "0.02",
        "delta": "0.05",
        "n": 900,
        "k": 2,
        "recordsThrough": "5.0",
    }
    assert is_certified(Config("c", plan, ConfigStatus("Pinned", certificates=(proof,))), Fleet(CLEAN).service)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threshold", "verdict", "wary"), [(WITHIN, "Accepted", {False, True}), ("0.2", "Rejected", {False})]
)
def test_every_sign_of_scenes_is_followed_before_a_plan_is_accepted_and_not_before_it_is_rejected(
    threshold: str, verdict: str, wary: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def measured(*given: Any, **rest: Any) -> float | None:
        asked.append(rest["wary"])
        return audit.measured_clustering(*given, **rest)

    monkeypatch.setattr(attempts, "measured_clustering", measured)
    monkeypatch.setattr(tuner, "check_pin", lambda *_, **__: Undecided(0, 1))  # records alone refuse a reckless one
    fleet = tried(threshold, fleet=Fleet(CONFUSED, {**MANIFEST, "ramps": pin(threshold)}))
    fleet.run(lambda f: f.status.pin.verdict == verdict, limit=150)
    assert set(asked) == wary


def test_signs_of_scenes_hold_acceptance_up_with_advice_and_make_nothing_else_count_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """168.5: what an honest day and night look like to the wary."""
    monkeypatch.setattr(
        attempts, "measured_clustering", lambda *_, known, budget, wary: max(known, 168.5 if wary else 0.5)
    )
    fleet = tried(WITHIN)
    fleet.run(lambda f: last(f).status.acceptance_clustering > 0, limit=400)
    for _ in range(3):
        fleet.step()
    status, tuning = last(fleet).status, fleet.status.tuning
    assert status.acceptance_clustering == 168.5
    assert tuning.clustering == 0.5, "detectors, certificates and rejections go by it"
    effect = audit.worth_one(replace(tuning, clustering=168.5), rate=status.audit_rate)
    told, (n, k) = gate(fleet), status.audited
    assert (told.state, fleet.status.pin.verdict) == ("Undecided", "")
    assert f"{effect:.1f} audits are worth one" in told.message
    needed = audits_to_earn(n, k, budget=0.02, log_limit=told.log_limit, design_effect=effect)
    assert needed > n and f"about {needed - n:,} more audits" in told.message
    assert "parameters.stream" in told.message and "mode: Auto" in told.message


def test_a_plan_is_accepted_once_there_are_records_in_which_scenes_of_many_sources_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of pins at twice the budget, on the first day and from 64 unnamed sources in scenes of 100, 13 of 60 were
    accepted, most after 1,000 audits; 2 of 60 where 5,000 records are looked at."""
    asked: list[bool] = []
    monkeypatch.setattr(attempts, "measured_clustering", lambda *_, known, wary, **__: asked.append(wary) or known)
    monkeypatch.setattr(audit, "MISTAKES_LOOKED_AT", 400)
    monkeypatch.setattr(audit, "NEARLY_ALL", 2.0)  # as if nobody named a stream
    fleet = tried(WITHIN)
    fleet.run(lambda f: "records of the canary" in gate(f).message, limit=400)
    told = gate(fleet)
    assert told.state == "Undecided" and told.log_e_value >= told.log_limit
    assert "takes 20,000 records" in told.message and "parameters.stream" in told.message
    assert set(asked) == {False}, "a look at few would say nothing"
    monkeypatch.setattr(audit, "MISTAKES_LOOKED_AT", 10)
    held = last(fleet).status.step
    fleet.run(lambda f: last(f).status.step > held or last(f).status.finished, limit=60)
    assert True in asked


def test_so_many_records_are_looked_at_as_hold_some_mistakes_and_none_are_waited_for_where_streams_are_named() -> None:
    needed = audit.records_for_scenes
    assert [needed(None, budget=b) for b in (0.05, 0.01, 0.001)] == [1_000, 5_000, 20_000]
    stream = np.arange(len(CLEAN)) % 64 + 1
    assert needed(replace(CLEAN, stream=stream), budget=0.01) == 0
    assert needed(replace(CLEAN, stream=np.where(stream <= 10, 0, stream)), budget=0.01) == 5_000
    assert needed(replace(CLEAN, stream=np.arange(len(CLEAN)) + 1), budget=0.01) == 5_000, "all of them differ"


@given(n=st.integers(1, 5000), share=st.floats(0, 0.01), effect=st.floats(1, 200))
def test_so_many_audits_like_those_seen_earn_a_plan_its_place(n: int, share: float, effect: float) -> None:
    k, level = int(n * share), allowance(0.05, 1)
    needed = audits_to_earn(n, k, budget=0.02, log_limit=-np.log(level), design_effect=effect)
    seen = Counts(needed, math.ceil(needed * k / n))
    gate = GateInput(
        BothArms(),
        50,
        0.02,
        0.9,
        1,
        0,
        certified=False,
        attempt=seen,
        acceptance_level=level,
        level=level,
        acceptance_effect=effect,
    )
    assert acceptance(gate).state == "Clear"


class TestScenes:
    """Nobody has tuned where a plan is pinned from the first day, so nobody has measured what its audits are worth."""

    @pytest.mark.slow
    def test_a_pin_at_twice_its_budget_is_not_accepted_for_a_few_lucky_scenes(self) -> None:
        """Two of these were accepted while each audit counted as one."""
        assert "Accepted" not in [self.verdict(seed, scene=200) for seed in (5, 6, 7)]

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [2, 3])
    def test_a_pin_within_its_budget_is_not_rejected_for_one_bad_scene(self, seed: int) -> None:
        assert self.verdict(seed, scene=20, threshold=WITHIN) != "Rejected"

    def verdict(self, seed: int, *, scene: int, threshold: str = TWICE) -> str:
        fleet = Fleet(CONFUSED, {**MANIFEST, "ramps": pin(threshold)})
        for worker in fleet.workers:
            worker.scene, worker.rng = scene, np.random.default_rng([seed, worker.seed])
        for _ in range(150):
            fleet.step()
            if fleet.status.pin.verdict:
                break
        return fleet.status.pin.verdict
