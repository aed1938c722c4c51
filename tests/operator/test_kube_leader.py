"""Leader election against a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import LEASE, Object
from offramp_operator.kube.leader import LeaderElector, LeaseSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


class FakeTime:
    """A process's own clocks. ``monotonic`` starts anywhere, as after a boot."""

    def __init__(self, *, wall: float = 1_700_000_000.0, monotonic: float = 5.0) -> None:
        self.wall, self.monotonic = wall, monotonic

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


def _elector(client: KubeClient, namespace: str, identity: str, time: FakeTime, **settings: Any) -> LeaderElector:
    lease = LeaseSettings(namespace, "offramp-leader", identity, **settings)
    return LeaderElector(client, lease, clock=lambda: time.wall, monotonic=lambda: time.monotonic, jitter=lambda: 0.0)


async def _lease(client: KubeClient, namespace: str) -> Object:
    lease = await client.get(LEASE, namespace, "offramp-leader")
    assert lease is not None
    return dict(lease["spec"])


Story = Callable[[KubeClient], Awaitable[None]]


@pytest.fixture
def play(api: Any, tools: Any) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def with_client() -> None:
            async with tools.client_of(api.kubeconfig) as client:
                await story(client)

        tools.run(with_client())

    return run


def test_one_leads_and_the_other_takes_over_once_the_lease_has_not_moved_for_its_duration(
    play: Any, namespace: str
) -> None:
    async def story(client: KubeClient) -> None:
        # The standby's wall clock is a day ahead: only changes it sees, on its own clock, may count.
        time, skewed = FakeTime(), FakeTime(wall=1_700_086_400.0, monotonic=9_000.0)
        first = _elector(client, namespace, "first", time)
        second = _elector(client, namespace, "second", skewed)
        assert await first._try() and first.holds()
        assert not await second._try()
        for _ in range(4):
            time.advance(5)
            skewed.advance(5)
            assert await first._try(), "renewals go on"
            assert not await second._try(), "a day of skew is no reason to take over"
        skewed.advance(14.9)
        assert not await second._try()
        skewed.advance(0.2)
        assert await second._try() and second.holds()
        spec = await _lease(client, namespace)
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("second", 1)
        assert not await first._try(), "the old leader sees that it is not any more"

    play(story)


def test_a_leader_stops_holding_before_anybody_else_may(play: Any, namespace: str) -> None:
    async def story(client: KubeClient) -> None:
        time = FakeTime()
        elector = _elector(client, namespace, "first", time)
        assert not elector.holds()
        assert await elector._try()
        time.advance(9.9)
        assert elector.holds()
        time.advance(0.2)
        assert not elector.holds()
        assert elector._settings.renew_deadline_seconds < elector._settings.duration_seconds

    play(story)


def test_only_one_of_many_that_race_leads(play: Any, namespace: str) -> None:
    async def story(client: KubeClient) -> None:
        electors = [_elector(client, namespace, f"pod-{n}", FakeTime()) for n in range(6)]
        won = await asyncio.gather(*(elector._try() for elector in electors))
        assert sum(won) == 1
        spec = await _lease(client, namespace)
        assert spec["holderIdentity"] == f"pod-{won.index(True)}"

    play(story)


def test_a_released_lease_is_taken_at_once(play: Any, namespace: str) -> None:
    async def story(client: KubeClient) -> None:
        first = _elector(client, namespace, "first", FakeTime())
        second = _elector(client, namespace, "second", FakeTime())
        assert await first._try()
        assert not await second._try()
        await first.release()
        assert not first.holds()
        assert await second._try()
        await first.release()  # a second release must not take it from the other
        assert (await _lease(client, namespace))["holderIdentity"] == "second"

    play(story)


@dataclass
class RenewedMeanwhile:
    """A client through which the Lease is renewed once more between being read and being given away, as by a request
    under way."""

    client: KubeClient
    renewals: int = 1

    async def get(self, *arguments: Any) -> Any:
        lease = await self.client.get(*arguments)
        if self.renewals and lease is not None:
            self.renewals -= 1
            await self.client.replace(LEASE, lease | {"spec": lease["spec"] | {"leaseDurationSeconds": 14}})
        return lease

    async def replace(self, *arguments: Any) -> Any:
        return await self.client.replace(*arguments)


def test_a_lease_is_released_although_a_renewal_was_under_way(play: Any, namespace: str) -> None:
    async def story(client: KubeClient) -> None:
        elector = _elector(client, namespace, "first", FakeTime())
        assert await elector._try()
        elector._client = RenewedMeanwhile(client)  # type: ignore[assignment]
        await elector.release()
        assert (await _lease(client, namespace))["holderIdentity"] == ""

    play(story)


def test_keeping_ends_when_somebody_else_holds_the_lease(play: Any, namespace: str) -> None:
    async def story(client: KubeClient) -> None:
        elector = _elector(client, namespace, "first", FakeTime(), retry_seconds=0.02)
        await elector.acquire()
        keeping = asyncio.create_task(elector.keep())
        # Its own renewals may come in between, so try until the theft succeeds.
        for _ in range(50):
            lease = await client.get(LEASE, namespace, "offramp-leader")
            assert lease is not None
            lease["spec"]["holderIdentity"] = "thief"
            try:
                await client.replace(LEASE, lease)
                break
            except Exception:
                continue
        await asyncio.wait_for(keeping, 30)
        assert not elector.holds()

    play(story)


def test_keeping_ends_at_the_deadline_when_the_api_server_hangs(
    play: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(client: KubeClient) -> None:
        lease = LeaseSettings(namespace, "offramp-leader", "first", renew_deadline_seconds=0.5, retry_seconds=0.05)
        elector = LeaderElector(client, lease, jitter=lambda: 0.0)
        await elector.acquire()

        async def hang(*_: Any) -> Object | None:
            await asyncio.Event().wait()
            return None

        monkeypatch.setattr(client, "get", hang)
        monkeypatch.setattr(client, "replace", hang)
        await asyncio.wait_for(elector.keep(), 30)
        assert not elector.holds()

    play(story)


def test_a_leader_reads_its_lease_again_only_where_somebody_wrote_it(
    play: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(client: KubeClient) -> None:
        elector, read, reads = _elector(client, namespace, "first", FakeTime()), client.get, []

        async def get(*what: Any) -> Object | None:
            reads.append(what)
            return await read(*what)

        monkeypatch.setattr(client, "get", get)
        assert await elector._try()
        reads.clear()
        assert await elector._try() and await elector._try()
        assert not reads
        lease = await read(LEASE, namespace, "offramp-leader")
        assert lease is not None
        await client.replace(LEASE, lease | {"metadata": lease["metadata"] | {"annotations": {"a": "person"}}})
        assert await elector._try(), "an annotation takes nobody's leadership"
        assert len(reads) == 1
        assert await elector._try() and len(reads) == 1
        lease = await read(LEASE, namespace, "offramp-leader")
        assert lease is not None and lease["metadata"]["annotations"] == {"a": "person"}

    play(story)


def test_a_standby_waits_until_it_may(play: Any, namespace: str) -> None:
    async def story(client: KubeClient) -> None:
        first = _elector(client, namespace, "first", FakeTime(), retry_seconds=0.02)
        second = _elector(client, namespace, "second", FakeTime(), retry_seconds=0.02)
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        await first.release()
        await asyncio.wait_for(waiting, 30)
        assert second.holds()

    play(story)


def test_the_lease_tells_the_page_of_who_leads_now(play: Any, namespace: str) -> None:
    async def story(client: KubeClient) -> None:
        time = FakeTime()
        first = _elector(client, namespace, "first", time, web_url="http://10.0.0.1:8082")
        second = _elector(client, namespace, "second", time, web_url="http://10.0.0.2:8082")
        hidden = _elector(client, namespace, "hidden", time)
        assert await first._try() and not await second._try()
        assert second.leader == ("first", "http://10.0.0.1:8082")
        await first.release()
        assert await second._try() and not await hidden._try()
        assert hidden.leader == ("second", "http://10.0.0.2:8082")
        await second.release()
        assert await hidden._try() and not await first._try()
        assert first.leader == ("hidden", "")

    play(story)
