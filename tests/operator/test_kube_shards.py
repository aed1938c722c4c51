"""Services divided over replicas: who owns what, and who takes over what."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import LEASE, SERVICE
from offramp_operator.kube.leader import LeaderElector, LeaseSettings
from offramp_operator.kube.shards import MAX_SHARDS, Shards, lease_names, shard_of
from offramp_operator.shell.platform import ServiceKey

KEYS = st.builds(ServiceKey, st.text("abc-", min_size=1), st.text("abc-0123456789", min_size=1))


# --- which shard -----------------------------------------------------------------------------------


@given(KEYS, st.integers(1, MAX_SHARDS))
def test_a_service_has_one_shard_among_those_there_are(key: ServiceKey, n: int) -> None:
    assert 0 <= shard_of(key, n) < n


@given(KEYS, st.integers(1, MAX_SHARDS - 1))
def test_one_more_shard_takes_services_from_the_others_and_moves_none_among_them(key: ServiceKey, n: int) -> None:
    assert shard_of(key, n + 1) in (shard_of(key, n), n)


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_shards_are_about_equally_large(n: int) -> None:
    sizes = Counter(shard_of(ServiceKey("team", f"service-{i}"), n) for i in range(2_000 * n))
    assert set(sizes) == set(range(n))
    assert max(abs(size - 2_000) for size in sizes.values()) < 6 * 2_000**0.5, "six standard deviations"


def test_the_assignment_is_the_same_in_every_release() -> None:
    """Replicas of two releases run side by side during an upgrade; they must agree."""
    found = [shard_of(ServiceKey("default", f"digits-{i}"), 16) for i in range(8)]
    assert found == [3, 10, 13, 4, 6, 4, 10, 13]


def test_a_single_shard_keeps_the_name_of_the_leaders_lease() -> None:
    assert lease_names("offramp-leader", 1) == ["offramp-leader"]
    assert lease_names("offramp-leader", 2) == ["offramp-leader-0", "offramp-leader-1"]


def test_objects_of_other_shards_are_not_kept() -> None:
    cache = ObjectCache(admits=lambda obj: obj["metadata"]["name"] == "ours")
    for i, name in enumerate(("ours", "theirs")):
        cache.put(
            SERVICE, {"metadata": {"uid": name, "name": name, "namespace": "default", "resourceVersion": str(i + 1)}}
        )
    assert [obj["metadata"]["name"] for obj in cache.all(SERVICE)] == ["ours"]


# --- who holds it ----------------------------------------------------------------------------------

N = 4


class Replica:
    """One process's shards; ``lost`` counts how often it was told to end."""

    def __init__(self, client: KubeClient, namespace: str, name: str) -> None:
        leases = [
            LeaseSettings(namespace, lease, name, duration_seconds=15, renew_deadline_seconds=10.0, retry_seconds=0.5)
            for lease in lease_names("offramp-leader", N)
        ]
        electors = [LeaderElector(client, lease, jitter=lambda: 0.0) for lease in leases]
        self.lost = 0
        self.shards = Shards(electors, retry_seconds=1.0, on_lost=self._lose)
        self.task = asyncio.create_task(self._take())

    def _lose(self) -> None:
        self.lost += 1

    async def _take(self) -> None:
        while True:
            await self.shards.acquire()

    async def close(self) -> None:
        self.task.cancel()
        await self.shards.release()


def _names(client: Any, namespace: str) -> Any:
    async def holders() -> list[str]:
        leases = [await client.get(LEASE, namespace, name) for name in lease_names("offramp-leader", N)]
        return [lease["spec"]["holderIdentity"] if lease is not None else "" for lease in leases]

    return holders


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_share_the_shards_and_a_lost_ones_are_taken_over(api: Any, namespace: str, tools: Any) -> None:
    async def story() -> None:
        async with tools.client_of(api.kubeconfig) as client, tools.client_of(api.kubeconfig) as cut_off:
            holders = _names(client, namespace)
            a, b = Replica(client, namespace, "a"), Replica(cut_off, namespace, "b")
            await tools.eventually(
                lambda: len(a.shards.held) + len(b.shards.held) == N, what="every shard being held", seconds=120
            )
            assert a.shards.held and b.shards.held, "whoever holds fewer gets the next one"
            assert not a.shards.held & b.shards.held
            owned = [ServiceKey("default", f"service-{i}") for i in range(100)]
            assert all(a.shards.owns(key) != b.shards.owns(key) for key in owned)

            cut_off.close()  # b's calls fail from now on, as behind a partition
            await tools.eventually(lambda: not b.shards.holds(), what="b giving up", seconds=120)
            await tools.eventually(lambda: len(a.shards.held) == N, what="a taking over", seconds=120)
            assert set(await holders()) == {"a"} and a.shards.holds() and a.lost == 0
            await tools.eventually(lambda: b.lost > 0, what="b being told to end", seconds=120)
            b.task.cancel()

            await a.close()
            assert set(await holders()) == {""}, "released at once"

    tools.run(story())
