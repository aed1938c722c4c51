"""A changed bundle or image under Kubernetes' own controllers: what serves meanwhile, and what it says."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_fleet import BETTER, BROKEN, DEADLINE, GOOD, WELL_AGO, Fleet, add_node, is_ready

from offramp_operator.kube.kinds import (
    DEPLOYMENT,
    EVENT,
    HTTP_ROUTE,
    NETWORK_SERVICE,
    Object,
)
from offramp_operator.kube.platform import gateway as gateway_room
from offramp_operator.kube.platform import memory as memory_room

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

# --- stories ---------------------------------------------------------------------------------------


def test_with_room_for_one_more_no_worker_goes_before_its_successor_serves(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            seen = f.since()
            assert min(ready for ready, _ in seen) == 2 and max(pods for _, pods in seen) == 3

    tools.run(story())


def test_a_broken_bundle_with_room_costs_nothing_and_going_back_recovers_at_once(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.rest()
            await f.edit(model={"uri": GOOD})
            await f.serve(GOOD, GOOD)
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_a_worker_that_has_just_become_ready_outlives_two_broken_edits(fleet: Any, tools: Any) -> None:
    """To the Deployment controller it is not available yet, and it takes away what is not when one update gives way to
    another."""

    async def story() -> None:
        async with fleet(nodes=3, replicas=1) as f:
            f.ready_since = lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            await f.until(lambda: f.seen[-1][0] == 1, what="a worker that is ready")
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.rest(ticks=5)
            await f.edit(model={"uri": BROKEN + "-again"})
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.rest()
            assert min(ready for ready, _ in f.since()) == 1
            assert await f.bundles() == [GOOD.removeprefix("oci://")]

    tools.run(story())


def test_without_room_workers_are_replaced_in_place_and_a_broken_bundle_costs_one(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=2, replicas=2, updatePolicy=DEADLINE) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "WaitingForRoom"), what="the wait")
            assert f.seen[-1][0] == 2
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "Replacing"), what="the replacement")
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.rest()
            assert await f.bundles() == [GOOD.removeprefix("oci://")], (
                "the second is not touched before the first serves"
            )
            await f.edit(model={"uri": GOOD})
            await f.serve(GOOD, GOOD)
            assert min(ready for ready, _ in f.since()) == 1
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            assert min(ready for ready, _ in f.since()) == 1
            live = await f.client.get(DEPLOYMENT, f.namespace, "digits")
            assert live is not None
            assert live["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0, "for this update only"

    tools.run(story())


def test_availability_holds_with_the_reason_and_goes_on_by_itself_when_there_is_room(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=2, replicas=2, updatePolicy={**DEADLINE, "type": "Availability"}) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "NoRoomToSurge"), what="the hold")
            assert f.told()["Reconciling"] == f.told()["Stalled"] == ("True", "NoRoomToSurge")
            assert "no node has a free nvidia.com/gpu" in f.message("Stalled") and "updatePolicy.type" in f.message(
                "Stalled"
            )
            await f.rest()
            add_node(f.api, f"{f.namespace}-more", f.namespace)
            await f.serve(BETTER, BETTER)
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_resource_aware_never_asks_for_a_pod_more(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2, updatePolicy={"type": "ResourceAware"}) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            seen = f.since()
            assert max(pods for _, pods in seen) == 2 and min(ready for ready, _ in seen) == 1

    tools.run(story())


def test_a_broken_first_bundle_on_the_only_gpu_gives_way_to_its_correction(fleet: Any, tools: Any) -> None:
    """One ahead would wait for ever for the GPU that the broken one holds."""

    async def story() -> None:
        async with fleet(nodes=1, replicas=1, model={"uri": BROKEN}) as f:
            await f.until(lambda: "digest differs" in f.message("Ready"), what="the reason")
            await f.edit(model={"uri": GOOD})
            await f.serve(GOOD)

    tools.run(story())


def test_the_only_worker_is_never_taken_away_for_one_that_finds_no_room(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=1, replicas=1, updatePolicy={**DEADLINE, "type": "ResourceAware"}) as f:
            await f.serve(GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "NoRoomToSurge"), what="the hold")
            await f.rest()
            assert min(ready for ready, _ in f.since()) == 1
            assert "set updatePolicy.type to Recreate" in f.message("WorkersUpdating")
            await f.edit(updatePolicy={"type": "Recreate"})
            await f.serve(BETTER, recreated=True)
            assert f.told()["WorkersUpdating"] == ("False", "Recreated")
            assert "no request was answered for about" in f.message("WorkersUpdating")
            assert max(pods for _, pods in f.since()) == 2, "the one that waits for room, and none besides"

    tools.run(story())


def test_with_recreate_a_broken_bundle_on_the_only_gpu_gives_way_to_what_served_before(fleet: Any, tools: Any) -> None:
    """Pods, image and bundle, as they were; and a restarted operator leaves it at that."""

    async def story() -> None:
        policy = {"type": "Recreate", "recreateDeadline": "5s"}
        async with fleet(nodes=1, replicas=1, updatePolicy=policy) as f:
            await f.serve(GOOD)
            before = (await f.pods())[0]["spec"]
            await f.edit(model={"uri": BROKEN}, worker={"env": [{"name": "CHANGED", "value": "too"}]})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "Recreating"), what="the interruption")
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "RecreateFailed"), what="the verdict")
            assert f.told()["Reconciling"] == f.told()["Stalled"] == ("True", "RecreateFailed")

            async def back() -> bool:
                return await f.bundles() == [GOOD.removeprefix("oci://")] and "for about" in f.message("Stalled")

            await f.until(back, what="the return")
            after = (await f.pods())[0]["spec"]
            assert [after[part] for part in ("containers", "volumes")] == [
                before[part] for part in ("containers", "volumes")
            ]
            assert {"Recreating", "RecreateFailed"} <= {e["reason"] for e in await events_of(f)}
            versions = await f.restart()
            await f.rest(ticks=10)
            assert await f.versions() == versions, "nothing is written anew"
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, recreated=True)

    tools.run(story())


def test_a_quota_for_exactly_the_running_pods_does_not_stop_an_update(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2, updatePolicy=DEADLINE) as f:
            quota = {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "two", "namespace": f.namespace},
                "spec": {"hard": {"pods": "2"}},
            }
            path = f"/api/v1/namespaces/{f.namespace}/resourcequotas"
            assert f.api.request("POST", path, quota).status_code == 201
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: "quota two is used up" in f.message("WorkersUpdating"), what="the reason")
            await f.serve(BETTER, BETTER)
            assert min(ready for ready, _ in f.since()) == 1

    tools.run(story())


# --- two versions side by side ---------------------------------------------------------------------

LATE = "oci://offramp/digits:late"
SIDE = {"weight": 25, "pause": "1s", "deadline": "10m"}


def beside(kind: str = "Availability", **side: Any) -> dict[str, Any]:
    policy = {**DEADLINE, "type": kind, "sideBySide": {**SIDE, **side}}
    plain = {"model": {"uri": GOOD}, "ramps": {"mode": "Disabled"}}  # without a digest: it is the workers that prove it
    return {**plain, "replicas": 2, "updatePolicy": policy, "answering": True}


async def settled(f: Fleet) -> None:
    await f.until(lambda: "Reconciling" not in f.told() and "VersionOnTrial" not in f.told(), what="the end")


def test_a_model_is_tried_beside_the_others_in_the_same_service_and_followed_when_a_person_says_so(
    fleet: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes=4, **beside(promotion="Manual")) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("VersionOnTrial") == ("True", "AwaitingPromotion"), what="the question")
            assert await f.bundles() == sorted(uri.removeprefix("oci://") for uri in (GOOD, GOOD, BETTER))
            service = await f.client.get(NETWORK_SERVICE, f.namespace, "digits")
            assert service is not None
            chosen = [
                p for p in await f.pods() if service["spec"]["selector"].items() <= p["metadata"]["labels"].items()
            ]
            assert len(chosen) == 3, "requests reach both versions by their numbers"
            await f.ask("promote")
            await f.serve(BETTER, BETTER)
            await settled(f)
            assert await f.client.get(DEPLOYMENT, f.namespace, "digits-next") is None
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_a_model_that_answers_late_goes_and_the_others_were_never_touched(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=4, **beside()) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            before = {p["metadata"]["uid"] for p in await f.pods()}
            await f.edit(model={"uri": LATE})
            await f.until(lambda: f.told().get("Stalled") == ("True", "VersionRejected"), what="the verdict")
            assert "requests were refused or late" in f.message("Stalled")

            async def alone() -> bool:
                return {p["metadata"]["uid"] for p in await f.pods()} == before

            await f.until(alone, what="the end of the trial")
            assert f.told()["Ready"] == ("True", "Serving")
            await f.edit(model={"uri": GOOD})
            await settled(f)
            assert "Stalled" not in f.told() and {p["metadata"]["uid"] for p in await f.pods()} == before

    tools.run(story())


def test_on_exactly_two_gpus_a_trial_takes_the_place_of_one_worker(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=2, **beside("ResourceAware")) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            await settled(f)
            seen = f.since()
            assert min(ready for ready, _ in seen) == 1
            assert "VersionPromoted" in [e["reason"] for e in await events_of(f)]

    tools.run(story())


def test_a_broken_model_on_trial_is_given_up_and_costs_nothing(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, **beside(deadline="1s")) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: f.told().get("Stalled") == ("True", "VersionRejected"), what="the verdict")
            assert "not ready within 1 s" in f.message("Stalled")
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


async def events_of(f: Fleet) -> list[Object]:
    return (await f.client.list(EVENT, f.namespace))[0]


# --- requests through a Gateway, by weight ---------------------------------------------------------

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ROUTES = f"/apis/{HTTP_ROUTE.api_version}/httproutes"
PUBLIC = {"parentRefs": [{"name": "public"}], "hostnames": ["digits.example.com"]}


@dataclass
class PaperGateway:
    """Takes a route in only at every ``every``-th look, and says then which generation it has seen.

    ``wrong`` are looks at which it would have sent requests to a version that nobody answers for.
    """

    fleet: Fleet
    every: int
    looks: int = 0
    weights: dict[str, int] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def look(self, pods: list[Object]) -> None:
        self.looks += 1
        if self.every and self.looks % self.every == 0:
            await self.take_in()
        for name, weight in self.weights.items():
            chosen = await self._chosen(name)
            if weight and not any(is_ready(p) and chosen.items() <= p["metadata"]["labels"].items() for p in pods):
                self.wrong.append(f"look {self.looks}: {weight} % to {name}, where nobody is ready")

    async def take_in(self) -> None:
        route = await self.fleet.client.get(HTTP_ROUTE, self.fleet.namespace, "digits")
        if route is None:
            self.weights = {}
            return
        (rule,) = route["spec"]["rules"]
        self.weights = {ref["name"]: ref["weight"] for ref in rule["backendRefs"]}
        if self.passed[-1:] != [self.weights["digits-next"]]:
            self.passed.append(self.weights["digits-next"])
        self.say("True", generation=route["metadata"]["generation"], parents=route["spec"]["parentRefs"])

    def say(self, accepted: str, *, generation: int, parents: list[Object]) -> None:
        now = {"lastTransitionTime": WELL_AGO, "observedGeneration": generation, "message": "no listener admits it"}
        told = [
            {"type": "Accepted", "status": accepted, "reason": "NotAllowedByListeners", **now},
            {"type": "ResolvedRefs", "status": "True", "reason": "ResolvedRefs", **now},
        ]
        status = [{"parentRef": p, "controllerName": "example.dev/paper", "conditions": told} for p in parents]
        answer = self.fleet.api.merge(route_of(self.fleet), {"status": {"parents": status}}, subresource="status")
        assert answer.status_code == 200, answer.text

    async def _chosen(self, name: str) -> dict[str, str]:
        service = await self.fleet.client.get(NETWORK_SERVICE, self.fleet.namespace, name)
        assert service is not None, f"a route names {name}, which is not there"
        return dict(service["spec"]["selector"])


def route_of(f: Fleet) -> Object:
    metadata = {"name": "digits", "namespace": f.namespace}
    return {"apiVersion": HTTP_ROUTE.api_version, "kind": "HTTPRoute", "metadata": metadata}


def path_of_route(f: Fleet) -> str:
    return f"/apis/{HTTP_ROUTE.api_version}/namespaces/{f.namespace}/httproutes/digits"


async def weights_of(f: Fleet) -> list[int]:
    route = await f.client.get(HTTP_ROUTE, f.namespace, "digits")
    return [] if route is None else [ref["weight"] for ref in route["spec"]["rules"][0]["backendRefs"]]


def watched_by_a_gateway(f: Fleet, *, every: int = 7) -> PaperGateway:
    gateway = PaperGateway(f, every)
    f.onlooker = gateway.look
    return gateway


@dataclass(frozen=True)
class GatewayApi:
    """Gateway API in the cluster, or not."""

    api: Any
    server: Any

    def install(self) -> None:
        def there() -> bool:
            self.api.request("POST", CRD, self.server.gateway_api())
            return bool(self.api.request("GET", ROUTES).status_code == 200)

        self.server.wait_for(there, what="Gateway API")

    def remove(self) -> None:
        definition = f"{CRD}/httproutes.gateway.networking.k8s.io"

        def gone() -> bool:
            self.api.request("DELETE", definition)
            return {self.api.request("GET", path).status_code for path in (ROUTES, definition)} == {404}

        self.server.wait_for(gone, what="the end of Gateway API")


@pytest.fixture
def gateway_api(controlled: Any, server: Any) -> GatewayApi:
    return GatewayApi(controlled, server)


@pytest.mark.parametrize("every", [1, 7], ids=["prompt", "slow"])
def test_with_a_gateway_exactly_the_weight_is_sent_to_the_model_on_trial_and_no_request_to_nobody(
    every: int, fleet: Any, gateway_api: GatewayApi, tools: Any
) -> None:
    gateway_api.install()

    async def story() -> None:
        async with fleet(nodes=4, **beside(promotion="Manual", weight=10), route=PUBLIC) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            gateway = watched_by_a_gateway(f, every=every)
            before = {p["metadata"]["uid"] for p in await f.pods()}
            await f.until(lambda: gateway.weights == {"digits-main": 100, "digits-next": 0}, what="the route at rest")
            await f.until(lambda: "RouteAccepted" not in f.told(), what="the end of the complaint")
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("VersionOnTrial") == ("True", "AwaitingPromotion"), what="the question")
            await f.until(lambda: gateway.weights == {"digits-main": 90, "digits-next": 10}, what="the shares")
            assert before < {p["metadata"]["uid"] for p in await f.pods()}, "no worker is replaced for it"
            await f.ask("promote")
            await f.serve(BETTER, BETTER)
            await settled(f)
            assert await f.client.get(DEPLOYMENT, f.namespace, "digits-next") is None
            await f.until(lambda: gateway.weights == {"digits-main": 100, "digits-next": 0}, what="the route at rest")
            assert gateway.passed == [0, 10, 0] and gateway.wrong == []

    tools.run(story())


@pytest.mark.parametrize("answers", [True, False], ids=["a Gateway that answers", "one that does not"])
def test_workers_that_were_on_trial_stay_until_the_gateway_sends_them_nothing(
    answers: bool, fleet: Any, gateway_api: GatewayApi, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_api.install()
    monkeypatch.setattr(gateway_room, "LET_GO_SECONDS", 600.0)

    async def story() -> None:
        async with fleet(nodes=3, **beside(promotion="Manual"), route=PUBLIC) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            gateway = watched_by_a_gateway(f)
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: gateway.weights.get("digits-next") == 25, what="the shares")
            gateway.every = 0
            await f.ask("abort")
            await f.until(lambda: f.told().get("Stalled") == ("True", "VersionRejected"), what="the verdict")
            await f.rest(ticks=5)
            assert await weights_of(f) == [100, 0], "at once"
            assert len(await f.bundles()) == 3 and gateway.wrong == []
            if answers:
                await gateway.take_in()
            else:
                monkeypatch.setattr(gateway_room, "LET_GO_SECONDS", 0.0)

            async def alone() -> bool:
                return await f.client.get(DEPLOYMENT, f.namespace, "digits-next") is None

            await f.until(alone, what="the end of the trial")
            assert f.told()["Ready"] == ("True", "Serving")

    tools.run(story())


def test_without_gateway_api_a_trial_goes_on_by_the_numbers_of_pods_until_it_is_installed(
    fleet: Any, gateway_api: GatewayApi, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_api.remove()
    monkeypatch.setattr(memory_room, "REFUSED_RETRY_SECONDS", 1.0)

    async def story() -> None:
        async with fleet(nodes=3, **beside(promotion="Manual"), route=PUBLIC) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            assert f.told()["RouteAccepted"] == ("False", "NoGatewayAPI")
            assert "install Gateway API, or remove spec.route" in f.message("RouteAccepted")
            assert f.told()["Ready"] == ("True", "Serving")
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("VersionOnTrial") == ("True", "AwaitingPromotion"), what="the question")
            service = await f.client.get(NETWORK_SERVICE, f.namespace, "digits")
            assert service is not None
            chosen = service["spec"]["selector"].items()
            assert sum(chosen <= p["metadata"]["labels"].items() for p in await f.pods()) == 3
            gateway_api.install()
            gateway = watched_by_a_gateway(f)
            await f.until(lambda: gateway.weights == {"digits-main": 75, "digits-next": 25}, what="the shares")
            await f.until(lambda: "RouteAccepted" not in f.told(), what="the end of the complaint")

    tools.run(story())


def test_a_route_of_somebody_else_is_left_alone_and_our_own_goes_with_the_option(
    fleet: Any, gateway_api: GatewayApi, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_api.install()
    monkeypatch.setattr(memory_room, "REFUSED_RETRY_SECONDS", 1.0)

    async def story() -> None:
        async with fleet(nodes=3, **beside(), route=PUBLIC) as f:
            theirs = route_of(f) | {"spec": {"parentRefs": [{"name": "theirs"}]}}
            assert f.api.create(theirs, keep=True).status_code == 201
            await f.serve(GOOD, GOOD)
            assert f.told()["RouteAccepted"] == ("False", "RouteNameTaken")
            assert f.api.get(theirs)["spec"]["parentRefs"][0]["name"] == "theirs"
            assert f.api.request("DELETE", path_of_route(f)).status_code == 200

            async def made() -> bool:
                return await weights_of(f) == [100, 0]

            await f.until(made, what="a route of our own")
            await f.until(lambda: "no Gateway has taken it" in f.message("RouteAccepted"), what="the next step")
            PaperGateway(f, every=0).say("False", generation=1, parents=PUBLIC["parentRefs"])
            told = "Gateway public: NotAllowedByListeners: no listener admits it"
            await f.until(lambda: told in f.message("RouteAccepted"), what="the Gateway's words")
            assert f.told()["RouteAccepted"] == ("False", "RouteNotAccepted")
            assert f.api.request("DELETE", path_of_route(f)).status_code == 200
            await f.until(made, what="its return")
            await f.edit(route=None)
            await f.until(lambda: "RouteAccepted" not in f.told(), what="silence")
            left = [await f.client.get(NETWORK_SERVICE, f.namespace, f"digits-{which}") for which in ("main", "next")]
            assert await weights_of(f) == [] and left == [None, None]

    tools.run(story())
