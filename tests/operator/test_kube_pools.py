"""Workers in pools under Kubernetes' own controllers: what serves while pools come, change and go."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_fleet import BETTER, BROKEN, DEADLINE, GOOD, Fleet, add_node, bundle_of, ending, is_ready, path_of
from paper_observer import backbone_of

from offramp_core.control.workers import pool_plan
from offramp_core.fleet import Window
from offramp_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, EVENT, HTTP_ROUTE, NETWORK_SERVICE, SERVICE, Object

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

TWO = {"fast": 1, "slow": 2}
PUBLIC = {"parentRefs": [{"name": "public"}]}


def pools(**replicas: int) -> list[Object]:
    return [{"name": name, "replicas": n} for name, n in replicas.items()]


def placed(f: Fleet, **replicas: int) -> list[Object]:
    """The same as an edit, on the nodes that carry the pools' names."""
    return [pool | {"nodeSelector": {"of": f.namespace, "pool": pool["name"]}} for pool in pools(**replicas)]


async def ready_in(f: Fleet) -> dict[str, int]:
    """Ready pods by pool; "" for those of no pool."""
    found: dict[str, int] = {}
    for pod in await f.pods():
        if is_ready(pod):
            name = pod["metadata"]["labels"].get("earlyexit.dev/pool", "")
            found[name] = found.get(name, 0) + 1
    return found


async def until_ready(f: Fleet, **wanted: int) -> None:
    async def there() -> bool:
        return await ready_in(f) == wanted

    await f.until(there, what=f"ready workers {wanted}")


def status_of(f: Fleet) -> dict[str, Object]:
    service = f.cache.get(SERVICE, f.namespace, "digits") or {}
    return {pool["name"]: pool for pool in service["status"].get("pools", ())}


def remembered(f: Fleet) -> Object:
    """What came on earlier days."""
    return dict((f.cache.get(SERVICE, f.namespace, "digits") or {})["status"].get("asked") or {})


async def deployments(f: Fleet) -> set[str]:
    return {obj["metadata"]["name"] for obj in (await f.client.list(DEPLOYMENT, f.namespace))[0]}


def lose_nodes(f: Fleet, pool: str, pods: list[Object]) -> None:
    """The nodes of a pool vanish, and their pods with them."""
    for name in {
        pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName", "").startswith(f"{f.namespace}-{pool}")
    }:
        f.api.request("DELETE", f"/api/v1/nodes/{name}")
    for pod in pods:
        if pod["spec"].get("nodeName", "").startswith(f"{f.namespace}-{pool}"):
            f.api.request("DELETE", f"{path_of(pod)}?gracePeriodSeconds=0")


def with_gateway_api(controlled: Any, server: Any) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    routes = f"/apis/{HTTP_ROUTE.api_version}/httproutes"

    def there() -> bool:
        controlled.request("POST", path, server.gateway_api())
        return bool(controlled.request("GET", routes).status_code == 200)

    server.wait_for(there, what="Gateway API")


async def weights(f: Fleet) -> dict[str, int]:
    route = await f.client.get(HTTP_ROUTE, f.namespace, "digits")
    return {} if route is None else {r["name"]: r["weight"] for r in route["spec"]["rules"][0]["backendRefs"]}


def test_every_pool_has_workers_of_its_own_behind_the_one_service(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=TWO, pools=pools(fast=1, slow=2), answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0, "slow": 3.0}
            await until_ready(f, fast=1, slow=2)
            assert await deployments(f) == {"digits-fast", "digits-slow"}
            service = await f.client.get(NETWORK_SERVICE, f.namespace, "digits")
            chosen = service["spec"]["selector"].items()
            assert all(chosen <= pod["metadata"]["labels"].items() for pod in await f.pods())
            await f.until(lambda: status_of(f).get("slow", {}).get("workerRate"), what="what a slow worker can do")
            fast, slow = status_of(f)["fast"], status_of(f)["slow"]
            assert (fast["desired"], fast["ready"], slow["desired"], slow["ready"]) == (1, 1, 2, 2)
            assert fast["workerRate"] > 2.5 * slow["workerRate"], "each as its own workers measured it"
            await f.until(lambda: "Reconciling" not in f.told(), what="the end of the change")
            assert (await f.restart()) == (await f.versions()), "another operator has nothing to write"

    tools.run(story())


def test_a_service_goes_over_to_pools_and_back_and_never_has_fewer_workers(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes={"": 2, "fast": 1, "slow": 2}, replicas=2) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(replicas=None, pools=placed(f, fast=1, slow=1))
            await until_ready(f, fast=1, slow=1)
            await f.edit(pools=None, replicas=2)
            await f.serve(GOOD, GOOD)
            await f.until(lambda: f.told().get("WorkersUpdating") is None, what="the end of the change")
            assert await deployments(f) == {"digits"}
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_a_changed_bundle_goes_from_pool_to_pool(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 2, "slow": 2}, pools=pools(fast=1, slow=1)) as f:
            await until_ready(f, fast=1, slow=1)
            f.since()
            at_once = []

            async def watch(pods: list[Object]) -> None:
                at_once.append(len({p["metadata"]["labels"]["earlyexit.dev/pool"] for p in pods if not is_ready(p)}))

            f.onlooker = watch
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            assert max(at_once) == 1 and min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_a_pool_with_a_bundle_of_its_own_waits_until_the_model_of_the_others_is_known(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        own = {"name": "gpu", "replicas": 1, "model": {"uri": BETTER}}
        asked = {"model": {"uri": GOOD}, "pools": [own, *pools(cpu=1)]}
        async with fleet(nodes={"cpu": 1, "gpu": 2}, answering=True, **asked) as f:
            known = []  # before a pod of the pool was made

            async def watch(pods: list[Object]) -> None:
                if any(p["metadata"]["labels"]["earlyexit.dev/pool"] == "gpu" for p in pods) and not known:
                    known.append(await f.client.get(CONFIG_MAP, f.namespace, "digits-model"))

            f.onlooker = watch
            await until_ready(f, cpu=1, gpu=1)
            assert known[0] is not None and list(known[0]["data"].values()) == [
                backbone_of(GOOD.removeprefix("oci://"))
            ]
            # On paper it serves another model, as it would if it had started before.
            await f.until(lambda: "spec.pools[0].model.uri" in f.message("WorkersQuarantined"), what="the complaint")

            await f.edit(
                pools=[own | {"model": {"uri": BROKEN}, "nodeSelector": {"of": f.namespace}}, *placed(f, cpu=1)]
            )
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            assert await ready_in(f) == {"cpu": 1, "gpu": 1}

    tools.run(story())


def test_a_broken_bundle_is_tried_in_one_pool_alone(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 2, "slow": 2}, pools=pools(fast=1, slow=1)) as f:
            await until_ready(f, fast=1, slow=1)
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.rest()
            broken = [pod for pod in await f.pods() if "broken" in bundle_of(pod)]
            assert len(broken) == 1 and await ready_in(f) == {"fast": 1, "slow": 1}

    tools.run(story())


def test_the_nodes_of_a_pool_vanish_and_come_back(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=TWO, pools=pools(fast=1, slow=1), answering=True) as f:
            await until_ready(f, fast=1, slow=1)
            lose_nodes(f, "fast", await f.pods())
            await f.until(lambda: f.told().get("PoolsAvailable") == ("False", "PoolWithoutPlace"), what="the complaint")
            told = f.message("PoolsAvailable")
            assert told.startswith("spec.pools[0] (fast): 0 of 1 workers ready; ")
            assert "spec.pools[0].nodeSelector" in told and "spec.worker.nodeSelector" not in told
            assert await ready_in(f) == {"slow": 1} and f.told()["Ready"][0] == "True"
            await f.edit(model={"uri": BETTER})
            await until_ready(f, slow=1)
            await f.until(lambda: "Reconciling" not in f.told(), what="the end of a change that no lost pool holds up")
            add_node(f.api, f"{f.namespace}-fast9", f.namespace, pool="fast")
            await until_ready(f, fast=1, slow=1)
            await f.until(lambda: "PoolsAvailable" not in f.told(), what="the end of the complaint")

    tools.run(story())


def test_old_workers_stay_while_nobody_answers_in_their_place_even_if_they_are_not_ready(
    fleet: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes={"": 1}, replicas=1) as f:
            await f.serve(GOOD)
            lost = next(pod["spec"]["nodeName"] for pod in await f.pods())
            await f.edit(replicas=None, pools=placed(f, fast=1))  # no such node yet
            await f.rest()
            f.api.request("DELETE", f"/api/v1/nodes/{lost}")
            f.api.request("DELETE", f"{path_of((await f.pods())[0])}?gracePeriodSeconds=0")
            await f.rest()
            assert await ready_in(f) == {} and await deployments(f) == {"digits", "digits-fast"}
            add_node(f.api, f"{f.namespace}-9", f.namespace)
            await until_ready(f, **{"": 1})

    tools.run(story())


def test_a_name_that_somebody_else_has_keeps_no_other_pool_from_being_changed(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 1, "slow": 2}, pools=pools(fast=1, slow=1)) as f:
            await until_ready(f, fast=1, slow=1)
            foreign = {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "digits-other", "namespace": f.namespace},
                "spec": {
                    "replicas": 0,
                    "selector": {"matchLabels": {"of": "others"}},
                    "template": {
                        "metadata": {"labels": {"of": "others"}},
                        "spec": {"containers": [{"name": "c", "image": "x"}]},
                    },
                },
            }
            assert f.api.create(foreign, keep=True).status_code == 201
            await f.edit(pools=placed(f, other=1, fast=1, slow=2))
            await until_ready(f, fast=1, slow=2)
            assert "pool other: Deployment" in f.message("Reconciling")

    tools.run(story())


def test_a_broken_bundle_stays_in_one_pool_when_the_order_of_pools_changes(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 2, "slow": 2}, pools=pools(fast=1, slow=1)) as f:
            await until_ready(f, fast=1, slow=1)
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.edit(pools=placed(f, slow=1, fast=1))
            await f.rest()
            assert len([pod for pod in await f.pods() if "broken" in bundle_of(pod)]) == 1

    tools.run(story())


def test_a_pool_with_a_place_for_some_of_its_workers_holds_up_no_other(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=TWO, pools=pools(fast=2, slow=1), updatePolicy=DEADLINE) as f:
            await until_ready(f, fast=1, slow=1)
            await f.edit(model={"uri": BETTER})

            async def changed() -> bool:
                slow = [p for p in await f.pods() if p["metadata"]["labels"]["earlyexit.dev/pool"] == "slow"]
                return all("digits:2" in bundle_of(p) and is_ready(p) for p in slow)

            await f.until(changed, what="the new bundle in the pool that has a place")
            assert (await ready_in(f)) == {"fast": 1, "slow": 1}

    tools.run(story())


def test_through_a_gateway_old_workers_get_their_part_until_all_of_the_new_ones_answer(
    fleet: Any, controlled: Any, server: Any, tools: Any
) -> None:
    with_gateway_api(controlled, server)

    async def story() -> None:
        async with fleet(nodes={"": 4, "fast": 1}, replicas=4, route=PUBLIC, answering=True) as f:
            await until_ready(f, **{"": 4})
            await f.until(lambda: f.told()["Ready"][0] == "True", what="a service that serves")
            await f.edit(replicas=None, pools=placed(f, fast=1, slow=1))

            async def shared() -> bool:
                return await weights(f) == {"digits-main": 1000, "digits-fast": 250, "digits-slow": 0}

            await f.until(shared, what="a part by numbers of workers")
            await f.rest()
            assert await shared() and await ready_in(f) == {"": 4, "fast": 1}
            add_node(f.api, f"{f.namespace}-slow0", f.namespace, pool="slow")
            await until_ready(f, fast=1, slow=1)
            assert (await weights(f)).keys() == {"digits-fast", "digits-slow"}

    tools.run(story())


def test_through_a_gateway_each_pool_gets_what_its_workers_can_do(
    fleet: Any, controlled: Any, server: Any, tools: Any
) -> None:
    with_gateway_api(controlled, server)

    async def story() -> None:
        async with fleet(nodes={"": 1, **TWO}, replicas=1, route=PUBLIC, answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0, "slow": 2.0}

            lost = []

            async def watch(pods: list[Object]) -> None:
                for name, weight in (await weights(f)).items():
                    service = await f.client.get(NETWORK_SERVICE, f.namespace, name)
                    chosen = service["spec"]["selector"].items() if service is not None else {("nobody", "")}
                    ready = (p for p in pods if is_ready(p) and not ending(p))
                    if weight and not any(chosen <= p["metadata"]["labels"].items() for p in ready):
                        lost.append(f"{weight} to {name}, where nobody is ready")

            await until_ready(f, **{"": 1})
            await f.until(lambda: f.told()["Ready"][0] == "True", what="a service that serves")
            f.onlooker = watch
            await f.edit(replicas=None, pools=placed(f, fast=1, slow=1))
            await until_ready(f, fast=1, slow=1)

            async def shared() -> bool:
                rates = [status_of(f).get(name, {}).get("workerRate", 0.0) for name in ("fast", "slow")]
                return all(rates) and await weights(f) == {
                    "digits-fast": 1000,
                    "digits-slow": round(1000 * rates[1] / rates[0]),
                }

            await f.until(shared, what="shares by what was measured")
            await f.edit(pools=None, replicas=1)
            await until_ready(f, **{"": 1})

            async def back() -> bool:
                names = {obj["metadata"]["name"] for obj in (await f.client.list(NETWORK_SERVICE, f.namespace))[0]}
                return names == {"digits", "digits-main", "digits-next"} and (await weights(f))["digits-main"] == 100

            await f.until(back, what="the Services of versions")
            assert lost == []

    tools.run(story())


# --- numbers that the operator decides on ------------------------------------------------------------


def priced(**costs: str) -> list[Object]:
    return [{"name": name, "costPerHour": cost, "minWorkers": 0, "maxWorkers": 3} for name, cost in costs.items()]


async def planned_is(f: Fleet, **wanted: int) -> None:
    """Until so many workers of each pool are ready, and no more are asked for."""
    found = {name: n for name, n in wanted.items() if n}

    async def there() -> bool:
        told = {name: (pool.get("planned", 0), pool.get("desired", 0)) for name, pool in status_of(f).items()}
        return await ready_in(f) == found and told == {name: (n, n) for name, n in wanted.items()}

    await f.until(there, what=f"planned workers {wanted}")


async def told_of_plans(f: Fleet) -> list[str]:
    events = (await f.client.list(EVENT, f.namespace))[0]
    return [e["note"] for e in events if e["reason"] in ("PoolsPlanned", "PoolsRecommended")]


def asked(f: Fleet, rate: float) -> None:
    """So many requests a second come, and an operator has seen that for long enough."""
    now = time.time()
    f.reconciler._observer.windows = tuple(Window(ended_at=now - 10 * i, seconds=10.0, rate=rate) for i in range(30))


@pytest.fixture
def seen_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "WATCHED_SECONDS", 0.0)


def test_each_pool_is_measured_the_cheapest_is_kept_and_a_price_that_changes_moves_workers(
    fleet: Any, tools: Any, seen_enough: None
) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 3, "slow": 3}, pools=priced(fast="1", slow="1.5"), answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0, "slow": 1.3}
            asked(f, 90.0)
            await planned_is(f, fast=2, slow=0)
            rates = {name: pool["workerRate"] for name, pool in status_of(f).items()}
            assert rates["fast"] > rates["slow"] > 0, "both were measured, and the one that is not used is remembered"
            assert any("fast 2" in note and "90 requests/s" in note for note in await told_of_plans(f))
            f.since()
            where = {name: {"of": f.namespace, "pool": name} for name in ("fast", "slow")}
            await f.edit(pools=[p | {"nodeSelector": where[p["name"]]} for p in priced(fast="1", slow="0.05")])
            await planned_is(f, fast=0, slow=2)
            assert min(ready for ready, _ in f.since()) == 2, "old workers go when the new ones answer"
            assert any("slow 2 (was 0)" in note for note in await told_of_plans(f))

    tools.run(story())


def test_the_other_pool_takes_over_when_all_nodes_of_the_one_that_serves_vanish_and_gives_back(
    fleet: Any, tools: Any, seen_enough: None
) -> None:
    async def story() -> None:
        async with fleet(nodes={"cheap": 2, "dear": 2}, pools=priced(cheap="0.1", dear="1"), answering=True) as f:
            f.reconciler._observer.paces = {"cheap": 1.0, "dear": 1.0}
            asked(f, 100.0)
            await planned_is(f, cheap=2, dear=0)
            lose_nodes(f, "cheap", await f.pods())
            await until_ready(f, dear=2)
            await f.until(lambda: f.told().get("PoolsAvailable") == ("False", "PoolWithoutPlace"), what="the complaint")
            assert status_of(f)["cheap"]["desired"] == 1, "one waits, and tells when there is a place again"
            for number in range(2):
                add_node(f.api, f"{f.namespace}-cheap{number}", f.namespace, pool="cheap")
            await planned_is(f, cheap=2, dear=0)
            assert "PoolsAvailable" not in f.told()

    tools.run(story())


@pytest.mark.parametrize("change", ["removed", "lowered"])
def test_what_serves_goes_only_when_the_pools_that_stay_answer_in_its_place(
    fleet: Any, tools: Any, seen_enough: None, change: str
) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 3, "slow": 3}, pools=priced(fast="0.1", slow="1"), answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0, "slow": 1.0}
            asked(f, 90.0)
            await planned_is(f, fast=2, slow=0)
            f.since()
            left = [p | {"nodeSelector": {"of": f.namespace, "pool": p["name"]}} for p in priced(fast="0.1", slow="1")]
            await f.edit(pools=left[1:] if change == "removed" else [left[0] | {"maxWorkers": 1}, left[1]])
            await planned_is(f, **({"slow": 2} if change == "removed" else {"fast": 1, "slow": 1}))
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_where_the_spec_says_how_many_workers_there_are_a_plan_is_only_told(
    fleet: Any, tools: Any, seen_enough: None
) -> None:
    async def story() -> None:
        recommended = [pool | {"replicas": 1} for pool in priced(fast="0.1", slow="1")]
        async with fleet(nodes={"fast": 3, "slow": 3}, pools=recommended, answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0, "slow": 2.0}
            asked(f, 100.0)
            await f.until(lambda: status_of(f).get("fast", {}).get("planned") == 2, what="the recommendation")
            await f.rest()
            assert await ready_in(f) == {"fast": 1, "slow": 1}
            assert [note for note in await told_of_plans(f) if note.startswith("workers recommended: fast 2 (was 1)")]

    tools.run(story())


def test_what_was_asked_outlasts_the_operator_and_rests_in_between(fleet: Any, tools: Any, seen_enough: None) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 3}, pools=priced(fast="1"), answering=True) as f:
            now = time.time()
            hours = tuple(Window(ended_at=now - 20 * i, seconds=10.0, rate=90.0) for i in reversed(range(360)))
            f.reconciler._observer.windows = hours
            await f.until(lambda: bool(remembered(f)), what="what was asked in the last hours")
            told = remembered(f)
            f.reconciler._observer.windows = (*hours, Window(ended_at=now + 1.0, seconds=10.0, rate=95.0))
            await f.rest()
            assert remembered(f) == told, "it is written once an hour"

    tools.run(story())


def test_a_restarted_operator_takes_no_worker_away_before_it_has_seen_enough(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 3}, pools=priced(fast="1"), answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0}
            asked(f, 200.0)
            await planned_is(f, fast=3)
            f.reconciler._observer.windows = ()
            await f.rest()
            assert await ready_in(f) == {"fast": 3}

    tools.run(story())
