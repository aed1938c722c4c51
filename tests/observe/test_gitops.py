"""What Argo CD and Flux make of services in every state that the control loop brings them to.

Argo CD's scripts run in its own Lua (gopher-lua, the same libraries open), Flux's expressions in Flux's own evaluator,
and kstatus is the module that Flux, Helm and kubectl wait by.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("core", "cli")]

from fleet import MANIFEST, Fleet, SimWorker  # noqa: E402
from states import CLEAN, DRIFTED, MANUAL, STATES, canary, objects  # noqa: E402
from test_control_versions import trying  # noqa: E402

from offramp_cli.daytwo import decisions  # noqa: E402
from offramp_cli.source.source import RefusedError  # noqa: E402
from offramp_core.control.codec import parse_time  # noqa: E402
from offramp_core.protocol import FetchProgress  # noqa: E402
from offramp_operator.explain.family import Family, family  # noqa: E402

ROOT = Path(__file__).parents[2]
GITOPS = ROOT / "gitops"
Json = dict[str, Any]
pytestmark = pytest.mark.slow


def paused() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(canary)
    name = list(fleet.rollouts)[-1]
    fleet.rollouts[name] = replace(fleet.rollouts[name], paused=True)
    fleet.step()
    return fleet


def told_to_promote() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "rollout": MANUAL})
    fleet.run(lambda f: any(r.status.phase == "AwaitingPromotion" for r in f.rollouts.values()))
    name = list(fleet.rollouts)[-1]
    fleet.rollouts[name] = replace(fleet.rollouts[name], decision="Promote")
    return fleet


def rolled_back() -> Fleet:
    """And every worker has acknowledged that."""
    fleet = STATES["rolled_back"]()
    fleet.run(lambda f: f.status.settled_generation == 2)
    return fleet


def aborted() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(canary)
    name = list(fleet.rollouts)[-1]
    fleet.rollouts[name] = replace(fleet.rollouts[name], decision="Abort")
    fleet.run(lambda f: "Aborted" in f.verdicts())
    return fleet


def scaled_to_zero() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: f.status.settled_generation == 1)
    fleet.edit(replicas=0)
    fleet.workers.clear()
    fleet.step()
    fleet.step()
    return fleet


def unseen() -> Fleet:
    """Somebody has just applied another spec."""
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: f.status.settled_generation == 1)
    fleet.edit(replicas=3)
    return fleet


def phase(fleet: Fleet) -> str:
    return str(list(fleet.rollouts.values())[-1].status.phase) if fleet.rollouts else ""


def promoting() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: phase(f) == "Promoting")
    return fleet


def rolling_back() -> Fleet:
    fleet = STATES["progressing"]()
    fleet.workers[0].breaker_open = True
    fleet.step()
    return fleet


def superseded() -> Fleet:
    fleet = STATES["progressing"]()
    fleet.edit(ramps={"mode": "Disabled"})
    fleet.run(lambda f: "Superseded" in f.verdicts() and f.status.settled_generation == 2)
    return fleet


def broken(fleet: Fleet, reason: str, sentence: str) -> Fleet:
    """No worker can run, for one and the same reason."""
    for worker in fleet.workers:
        worker.ready, worker.failure = False, (reason, sentence)
    fleet.step()
    return fleet


def crashed_after_it_served() -> Fleet:
    return broken(STATES["promoted_once"](), "CrashLoopBackOff", "the worker ends with exit code 1 again and again")


def restarting_after_it_served() -> Fleet:
    return broken(STATES["promoted_once"](), "", "")


def broken_bundle() -> Fleet:
    return broken(Fleet(CLEAN), "InvalidBundle", "manifest.json is missing; build the bundle anew")


def wrong_digest() -> Fleet:
    return broken(Fleet(CLEAN), "DigestMismatch", "the bundle has another digest than spec.model.digest")


def fetching() -> Fleet:
    fleet = Fleet(CLEAN)
    for worker in fleet.workers:
        worker.ready, worker.fetching = False, FetchProgress("downloading", 2**20, 2**22)
    fleet.step()
    return fleet


def no_room_to_surge() -> Fleet:
    """A changed image, and the first pod with it fits on no node."""
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: f.status.settled_generation == 1)
    fleet.edit(worker={"image": "offramp/worker:2"}, updatePolicy={"type": "Availability", "surgeDeadline": "1m"})
    for worker in fleet.workers:
        worker.current = False
    fleet.workers.append(
        SimWorker("w2", 2, ready=False, no_room=True, failure=("Unschedulable", "0/2 nodes are available"))
    )
    fleet.run(lambda f: any(c.reason == "NoRoomToSurge" for c in f.status.conditions))
    return fleet


def over_budget() -> Fleet:
    """Inputs changed while operators came and went: each begins its own watch anew, and the workers' detectors switch
    exits off first."""
    fleet = STATES["promoted_once"]()
    fleet.deliver = False
    fleet.drift(DRIFTED)

    def told_by_a_new_operator(f: Fleet) -> bool:
        f.watch = None
        return any(c.reason == "BudgetExceeded" for c in f.status.conditions)

    fleet.run(told_by_a_new_operator)
    for worker in fleet.workers:
        worker.breaker_open = True
    fleet.step()
    return fleet


def version_rejected() -> Fleet:
    def late(worker: Any) -> None:
        worker.late = 0.3

    fleet: Fleet = trying(make=late)
    fleet.run(lambda f: f.status.version.phase == "Rejected")
    for _ in range(3):
        fleet.step()
    return fleet


MORE = (
    paused,
    told_to_promote,
    rolled_back,
    aborted,
    scaled_to_zero,
    unseen,
    promoting,
    rolling_back,
    superseded,
    crashed_after_it_served,
    restarting_after_it_served,
    broken_bundle,
    wrong_digest,
    fetching,
    no_room_to_surge,
    over_budget,
    version_rejected,
)
ALL: Mapping[str, Callable[[], Fleet]] = {**STATES, **{f.__name__: f for f in MORE}}


@functools.cache
def recorded(state: str) -> list[Json]:
    return list(json.loads(json.dumps(objects(ALL[state]()))))


def of_kind(state: str, kind: str) -> list[Json]:
    return [o for o in recorded(state) if o["kind"] == kind]


@functools.cache
def family_in(state: str) -> Family:
    return family(
        of_kind(state, "EarlyExitService")[0],
        configs=of_kind(state, "RampConfig"),
        rollouts=of_kind(state, "RampRollout"),
    )


Ask = Callable[[list[Json]], list[Json]]


@pytest.fixture(scope="module")
def ask(evaluate: Path) -> Ask:
    """Asks all questions in one process."""

    def run(questions: list[Json]) -> list[Json]:
        done = subprocess.run([evaluate], input=json.dumps(questions).encode(), capture_output=True, check=True)
        answers: list[Json] = json.loads(done.stdout)
        assert [a["error"] for a in answers if a.get("error")] == []
        return answers

    return run


@pytest.fixture(scope="module")
def argocd() -> Json:
    """The ConfigMap's data, as Argo CD reads it."""
    data: Json = yaml.safe_load((GITOPS / "argocd" / "argocd-cm.yaml").read_text())["data"]
    return data


HEALTH = {  # Argo CD, kstatus, Flux
    "starting": ("Progressing", "InProgress", "InProgress"),
    "collecting": ("Healthy", "Current", "Current"),
    "progressing": ("Healthy", "Current", "Current"),
    "promoted_once": ("Healthy", "Current", "Current"),
    "measured": ("Healthy", "Current", "Current"),
    "rolled_back": ("Healthy", "Current", "Current"),
    "awaiting": ("Healthy", "Current", "Current"),
    "recommended": ("Healthy", "Current", "Current"),
    "disabled": ("Healthy", "Current", "Current"),
    "pin_in_canary": ("Progressing", "InProgress", "InProgress"),
    "pin_rejected": ("Degraded", "Failed", "Failed"),
    "paused": ("Healthy", "Current", "Current"),
    "told_to_promote": ("Healthy", "Current", "Current"),
    "aborted": ("Healthy", "Current", "Current"),
    "scaled_to_zero": ("Suspended", "InProgress", "Current"),
    "unseen": ("Progressing", "InProgress", "InProgress"),
    "promoting": ("Healthy", "Current", "Current"),
    "rolling_back": ("Healthy", "Current", "Current"),
    "superseded": ("Healthy", "Current", "Current"),
    "crashed_after_it_served": ("Degraded", "InProgress", "InProgress"),
    "restarting_after_it_served": ("Progressing", "InProgress", "InProgress"),
    # kstatus looks at Reconciling first and so waits; the expressions of Flux know better.
    "broken_bundle": ("Degraded", "InProgress", "Failed"),
    "wrong_digest": ("Degraded", "InProgress", "Failed"),
    "fetching": ("Progressing", "InProgress", "InProgress"),
    "no_room_to_surge": ("Degraded", "InProgress", "Failed"),
    "over_budget": ("Healthy", "Current", "Current"),
    "version_rejected": ("Degraded", "Failed", "Failed"),
}


def health(ask: Ask, argocd: Json, service: Json) -> tuple[str, str, str]:
    """What Argo CD, kstatus and Flux call a service."""
    expressions = yaml.safe_load((GITOPS / "flux" / "kustomization.yaml").read_text())["spec"]["healthCheckExprs"][0]
    script = argocd["resource.customizations.health.earlyexit.dev_EarlyExitService"]
    lua, kstatus, flux = ask(
        [
            {"ask": "argo", "object": service, "script": script},
            {"ask": "kstatus", "object": service},
            {
                "ask": "flux",
                "object": service,
                "expressions": {k: v for k, v in expressions.items() if k not in ("apiVersion", "kind")},
            },
        ]
    )
    assert lua["value"]["message"], "people must see why"
    return lua["value"]["status"], kstatus["status"], flux["status"]


def test_health_of_a_service_in_every_state(ask: Ask, argocd: Json) -> None:
    assert set(HEALTH) == set(ALL)
    assert {state: health(ask, argocd, of_kind(state, "EarlyExitService")[0]) for state in HEALTH} == HEALTH


def test_a_service_that_no_operator_has_seen_is_progressing(ask: Ask, argocd: Json) -> None:
    """The API server gives it the status that the schema has by default."""
    (version,) = yaml.safe_load((ROOT / "crds" / "earlyexitservices.yaml").read_text())["spec"]["versions"]
    default = version["schema"]["openAPIV3Schema"]["properties"]["status"]["default"]
    service = {**of_kind("collecting", "EarlyExitService")[0], "status": default}
    assert health(ask, argocd, service) == ("Progressing", "InProgress", "InProgress")


def test_a_service_without_conditions_is_no_error_to_flux(ask: Ask, argocd: Json) -> None:
    service = {**of_kind("collecting", "EarlyExitService")[0], "status": {"observedGeneration": 1}}
    assert health(ask, argocd, service)[::2] == ("Progressing", "InProgress")


def test_rollouts_and_configs_show_what_they_wait_for(ask: Ask, argocd: Json) -> None:
    wanted = {
        "progressing": "Progressing",
        "paused": "Suspended",
        "awaiting": "Suspended",
        "recommended": "Suspended",
        "promoted_once": "Healthy",
        "rolled_back": "Degraded",
        "aborted": "Healthy",
        "promoting": "Progressing",
        "rolling_back": "Progressing",
        "superseded": "Healthy",
    }
    script = argocd["resource.customizations.health.earlyexit.dev_RampRollout"]
    told = {}
    for state in wanted:
        newest = of_kind(state, "RampRollout")[-1]
        told[state] = ask([{"ask": "argo", "object": newest, "script": script}])[0]["value"]["status"]
    assert told == wanted
    configs = [
        {"ask": "argo", "object": c, "script": argocd["resource.customizations.health.earlyexit.dev_RampConfig"]}
        for c in of_kind("promoted_once", "RampConfig")
    ]
    assert {a["value"]["status"] for a in ask(configs)} == {"Healthy"}


def actions_of(argocd: Json, kind: str) -> tuple[str, dict[str, str]]:
    actions = yaml.safe_load(argocd[f"resource.customizations.actions.earlyexit.dev_{kind}"])
    return actions["discovery.lua"], {one["name"]: one["action.lua"] for one in actions["definitions"]}


@pytest.mark.parametrize("state", sorted(ALL))
def test_argo_cd_offers_the_decisions_that_the_command_line_would_take(ask: Ask, argocd: Json, state: str) -> None:
    discovery, scripts = actions_of(argocd, "RampRollout")
    seen = family_in(state)
    assert set(scripts) == {"promote", "approve", "abort", "pause", "resume"}
    for manifest, rollout in zip(seen.manifests["rollouts"], seen.rollouts, strict=True):
        questions = [{"ask": "argo", "object": manifest, "script": text} for text in (discovery, *scripts.values())]
        offered, *results = (answer["value"] for answer in ask(questions))
        for name, result in zip(scripts, results, strict=True):
            try:
                change = dict(getattr(decisions, name)(seen, rollout).spec)
            except RefusedError:
                change = {}
            assert offered[name]["disabled"] == (not change), (name, rollout.status.phase)
            if change:
                written = {k: v for k, v in result["spec"].items() if v != manifest["spec"].get(k)}
                assert written == change
                assert {k: v for k, v in result.items() if k not in ("spec", "status")} == {
                    k: v for k, v in manifest.items() if k not in ("spec", "status")
                }


def test_argo_cd_asks_for_a_tuning_as_the_command_line_does(ask: Ask, argocd: Json) -> None:
    discovery, scripts = actions_of(argocd, "EarlyExitService")
    service, off = (of_kind(state, "EarlyExitService")[0] for state in ("promoted_once", "disabled"))
    offered, refused, result = (
        answer["value"]
        for answer in ask(
            [
                {"ask": "argo", "object": service, "script": discovery},
                {"ask": "argo", "object": off, "script": discovery},
                {"ask": "argo", "object": service, "script": scripts["tune"]},
            ]
        )
    )
    assert (offered["tune"]["disabled"], refused["tune"]["disabled"]) == (False, True)
    request = result["metadata"]["annotations"]["earlyexit.dev/request"]
    like_ours, _ = decisions.tune(family_in("promoted_once"), parse_time(request.removeprefix("tune/")))
    assert like_ours.replace(".000000Z", "Z") == request
    assert result["spec"] == service["spec"]


def test_kustomize_builds_the_overlays(tmp_path: Path) -> None:
    built = subprocess.run([ROOT / "cluster" / "build", "kubectl"], capture_output=True, text=True, check=True)

    def build(folder: str) -> Json:
        done = subprocess.run(
            [Path(built.stdout.strip()) / "kubectl", "kustomize", str(GITOPS / folder)],
            capture_output=True,
            text=True,
            check=True,
        )
        made: Json = yaml.safe_load(done.stdout)
        return made

    staging, production = build("kustomize/overlays/staging"), build("kustomize/overlays/production")
    assert (staging["metadata"]["namespace"], staging["spec"]["rollout"]["steps"]) == ("staging", [{"weight": 50}])
    assert (production["spec"]["rollout"]["promotion"], production["spec"]["replicas"]) == ("Manual", 4)
