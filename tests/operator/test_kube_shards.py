"""Services divided over replicas: who owns what, and who takes over what."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import LEASE, SERVICE
from offramp_operator.kube.leader import LeaderElector, LeaseSettings
from offramp_operator.kube.shards import MAX_SHARDS, Shards, lease_names, lease_threads, shard_of
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


# --- a slow API server -----------------------------------------------------------------------------


class SlowLeases(ThreadingHTTPServer):
    """Leases in memory; each write is answered after ``delay_seconds``."""

    daemon_threads = True
    request_queue_size = 128
    delay_seconds = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _LeaseHandler)
        self.leases: dict[str, dict[str, Any]] = {}
        self.versions = itertools.count(1)
        self.lock = threading.Lock()

    def write(self, lease: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            known = self.leases.get(lease["metadata"]["name"])
            if known is not None and lease["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                return 409, {"kind": "Status", "message": "somebody was faster"}
            lease["metadata"]["resourceVersion"] = str(next(self.versions))
            self.leases[lease["metadata"]["name"]] = lease
            return 200, lease


class _LeaseHandler(BaseHTTPRequestHandler):
    server: SlowLeases
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = self.path.partition("?")[0].rpartition("/")[2]
        if self.command == "GET":
            lease = self.server.leases.get(name)
            status, value = (404, {"kind": "Status"}) if lease is None else (200, lease)
        else:
            time.sleep(self.server.delay_seconds)
            status, value = self.server.write(json.loads(body))
        answer = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815 the names http.server calls

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def slow_leases() -> Iterator[SlowLeases]:
    server = SlowLeases()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_forty_shards_are_kept_where_each_renewal_takes_a_while(slow_leases: SlowLeases, tools: Any) -> None:
    """One after the other, forty renewals of 0.3 s take four times as long as a Lease may go without one."""
    n, held = 40, 3.0

    async def story() -> None:
        with tools.client_at(slow_leases.server_address[1], threads=lease_threads(n)) as client:
            leases = [
                LeaseSettings(
                    "default", name, "first", duration_seconds=5, renew_deadline_seconds=held, retry_seconds=0.5
                )
                for name in lease_names("offramp-leader", n)
            ]
            lost: list[str] = []
            electors = [LeaderElector(client, lease, jitter=lambda: 0.0) for lease in leases]
            shards = Shards(electors, retry_seconds=0.0, on_lost=lambda: lost.append("lost"))
            for _ in range(n):
                await shards.acquire()
            slow_leases.delay_seconds = 0.3
            renewed = {name: lease["metadata"]["resourceVersion"] for name, lease in slow_leases.leases.items()}
            until = asyncio.get_running_loop().time() + 1.5 * held
            while asyncio.get_running_loop().time() < until:
                assert shards.holds() and not lost
                await asyncio.sleep(0.05)
            assert all(slow_leases.leases[name]["metadata"]["resourceVersion"] != was for name, was in renewed.items())
            slow_leases.delay_seconds = 0.0
            await shards.release()

    tools.run(story())
