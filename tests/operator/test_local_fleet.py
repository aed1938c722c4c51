"""Worker processes: started with the right settings, restarted, replaced, and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from offramp_core.control.snapshot import WorkerEndpoint
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.local.fleet import Fleet
from offramp_operator.local.process import process_started
from offramp_operator.local.state import StateFolder, StateFolderError
from offramp_operator.local.template import WorkerTemplate, available_cpus, bundle_path, render
from offramp_operator.shell.signing import SigningKey

STUB = (sys.executable, str(Path(__file__).with_name("stub_worker.py")))
KEY = SigningKey(bytes(range(32)))
SPEC = {
    "model": {"uri": "file:///bundle"},
    "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
}


@dataclass
class RecordingFront:
    """Stands for the proxy process: remembers what it was told."""

    history: list[set[str]] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    before_drain: Callable[[str], None] = lambda name: None

    async def serve(self, backends: Mapping[str, tuple[str, int]]) -> None:
        self.history.append(set(backends))

    async def drain(self, name: str) -> None:
        self.before_drain(name)
        self.drained.append(name)


class Bench:
    def __init__(self, tmp_path: Path, client: httpx.AsyncClient) -> None:
        self.state = StateFolder(tmp_path / "state")
        self.front = RecordingFront()
        self._client = client
        self.fleet = self.make()

    def make(self, *, grace_seconds: float = 10.0, edge: Mapping[str, str] | None = None) -> Fleet:
        return Fleet(
            self.state,
            self.front,
            self._client,
            service="digits",
            command=STUB,
            grace_seconds=grace_seconds,  # type: ignore[arg-type]
            edge=edge,
        )

    async def want(self, bundle: Path, replicas: int = 1, *, surge: bool = True, **changes: Any) -> None:
        template = replace(WorkerTemplate("digits", "service-1", str(bundle), 1, 0.04), **changes)
        identity, token = KEY.identity("service-1"), KEY.admin_token("service-1")
        await self.fleet.want(template, replicas, identity, token=token, surge=surge)

    @property
    def live(self) -> list[WorkerEndpoint]:
        return list(self.fleet.endpoints())

    async def ready(self, n: int, *, current: bool = True) -> list[WorkerEndpoint]:
        def there() -> bool:
            return len(self.live) == n and all(e.ready and e.current is current for e in self.live)

        await until(there, what=f"{n} ready workers", state=self.fleet.endpoints)
        return self.live

    def pid(self, endpoint: WorkerEndpoint) -> int:
        entries = json.loads(self.state.workers_file.read_text())["workers"]
        return int(next(e["pid"] for e in entries if e["name"] == endpoint.name))


async def until(condition: Callable[[], bool], *, what: str, state: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen; last seen: {state()}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with httpx.AsyncClient(trust_env=False) as client:
        made = Bench(tmp_path, client)
        try:
            yield made
        finally:
            await made.fleet.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 600))


def folder(tmp_path: Path, name: str, *files: str) -> Path:
    bundle = tmp_path / name
    bundle.mkdir(exist_ok=True)
    for file in files:
        (bundle / file).touch()
    return bundle


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_workers_of_an_edge_box_are_told_of_their_core(tmp_path: Path) -> None:
    edge = {"OFFRAMP_CORE": "http://core:8080", "OFFRAMP_OFFLINE": "Answer"}

    async def story() -> None:
        async with bench(tmp_path) as made:
            made.fleet = made.make(edge=edge)
            await made.want(folder(tmp_path, "bundle"))
            (worker,) = await made.ready(1)
            env = json.loads((made.state.workers / worker.name / "environment.json").read_text())
            assert edge.items() <= env.items()

    run(story())


@pytest.mark.slow
def test_workers_get_the_settings_of_the_contract_and_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFRAMP_MODEL_DIGEST", "from the shell that ran `offramp up`")
    of_the_machine = {"OFFRAMP_CACHE_MIB": "64", "OFFRAMP_RUNNING": "2", "OFFRAMP_AUDIT_SHARE": "0.5"}
    for name, value in of_the_machine.items():
        monkeypatch.setenv(name, value)

    async def story() -> None:
        bundle = folder(tmp_path, "bundle")
        async with bench(tmp_path) as made:
            await made.want(bundle, 2, env=(("GREETING", "hello"),), threads=3)
            workers = await made.ready(2)
            for worker in workers:
                env = json.loads((made.state.workers / worker.name / "environment.json").read_text())
                assert of_the_machine.items() <= env.items()
                assert env["OFFRAMP_UID"] == worker.uid
                assert env["OFFRAMP_BUNDLE"] == str(bundle)
                assert env["OFFRAMP_SERVICE_UID"] == "service-1"
                assert env["OFFRAMP_PUBLIC_KEY"] == KEY.public_key
                assert env["OFFRAMP_TOKEN_SHA256"] == KEY.identity("service-1").token_sha256
                assert env["OFFRAMP_PLAN_FILE"] == str(made.state.plans / "digits.json")
                assert (env["OFFRAMP_THREADS"], env["OFFRAMP_LATENCY_SECONDS"], env["OFFRAMP_HOST"]) == (
                    "3",
                    "0.04",
                    "127.0.0.1",
                )
                assert env["GREETING"] == "hello"
                assert "OFFRAMP_MODEL_DIGEST" not in env
                assert worker.admin_url == f"http://127.0.0.1:{env['OFFRAMP_ADMIN_PORT']}"
            assert len({w.uid for w in workers}) == 2
            names = {w.name for w in workers}
            await until(
                lambda: made.front.history[-1] == names, what="both in the front", state=lambda: made.front.history
            )

    run(story())


@pytest.mark.slow
def test_a_worker_that_dies_comes_back_under_the_same_uid_and_address(tmp_path: Path) -> None:
    async def story() -> None:
        bundle = folder(tmp_path, "bundle")
        async with bench(tmp_path) as made:
            await made.want(bundle)
            (before,) = await made.ready(1)
            (bundle / "die").touch()
            await until(
                lambda: made.live[0].restarts == 1 and made.live[0].ready,
                what="the restart",
                state=made.fleet.endpoints,
            )
            after = made.live[0]
            assert (after.uid, after.name, after.admin_url) == (before.uid, before.name, before.admin_url)
            assert after.failure == ""

    run(story())


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_told_with_its_last_words_and_tried_more_and_more_slowly(tmp_path: Path) -> None:
    async def story() -> None:
        async with bench(tmp_path) as made:
            await made.want(folder(tmp_path, "bundle", "exit"))
            await until(
                lambda: any(e.restarts >= 2 for e in made.live), what="two attempts", state=made.fleet.endpoints
            )
            worker = made.live[0]
            assert (worker.ready, worker.failure_reason) == (False, "Crashed")
            assert "exit code 3" in worker.failure and "told to exit" in worker.failure

    run(story())


@pytest.mark.slow
def test_a_worker_that_says_it_cannot_go_on_is_restarted(tmp_path: Path) -> None:
    async def story() -> None:
        bundle = folder(tmp_path, "bundle")
        async with bench(tmp_path) as made:
            await made.want(bundle)
            await made.ready(1)
            (bundle / "hung").touch()
            await until(lambda: made.live[0].restarts >= 1, what="the restart", state=made.fleet.endpoints)
            (bundle / "hung").unlink()
            await made.ready(1)

    run(story())


@pytest.mark.slow
def test_a_changed_template_replaces_workers_one_by_one_without_losing_capacity(tmp_path: Path) -> None:
    async def story() -> None:
        old, new = folder(tmp_path, "old"), folder(tmp_path, "new")
        async with bench(tmp_path) as made:
            await made.want(old, 2)
            before = await made.ready(2)
            told = len(made.front.history)

            def check(name: str) -> None:
                assert sum(e.ready for e in made.fleet.endpoints()) >= 2, (
                    "an old worker goes only when a new one serves"
                )

            made.front.before_drain = check
            await made.want(new, 2)
            after = await made.ready(2)
            assert {w.uid for w in after}.isdisjoint({w.uid for w in before})
            assert sorted(made.front.drained) == sorted(w.name for w in before)
            assert all(not (made.state.workers / w.name).exists() for w in before)
            assert all(len(names) >= 2 for names in made.front.history[told:])

    run(story())


@pytest.mark.slow
def test_without_surge_an_old_worker_has_ended_before_its_successor_starts(tmp_path: Path) -> None:
    async def story() -> None:
        old, new = folder(tmp_path, "old"), folder(tmp_path, "new")
        async with bench(tmp_path) as made:
            await made.want(old, 2)
            before = await made.ready(2)
            processes: list[int] = []
            made.front.before_drain = lambda name: processes.append(sum(e.ready for e in made.live))
            most = 0

            async def count() -> None:
                nonlocal most
                while True:
                    most = max(most, len(made.live))
                    await asyncio.sleep(0.005)

            counting = asyncio.create_task(count())
            await made.want(new, 2, surge=False)
            after = await made.ready(2)
            counting.cancel()
            assert {w.uid for w in after}.isdisjoint({w.uid for w in before})
            assert processes == [1, 1], "the second goes only when the first successor serves"
            assert most == 2

    run(story())


@pytest.mark.slow
def test_a_broken_bundle_leaves_the_old_workers_serving_and_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        old, broken = folder(tmp_path, "old"), folder(tmp_path, "broken-bundle", "broken")
        async with bench(tmp_path) as made:
            await made.want(old, 2)
            before = await made.ready(2)
            await made.want(broken, 2)
            await until(lambda: any(e.failure for e in made.live), what="the reason", state=made.fleet.endpoints)
            failed = [e for e in made.live if e.failure]
            assert [(e.failure_reason, e.failure, e.current, e.ready) for e in failed] == [
                ("InvalidBundle", "manifest.json: file is missing", True, False)
            ]
            serving = [e for e in made.live if e.ready]
            assert {e.uid for e in serving} == {e.uid for e in before}
            assert made.front.drained == []
            await made.want(old, 2)  # the user takes it back
            assert {e.uid for e in await made.ready(2)} == {e.uid for e in before}

    run(story())


@pytest.mark.slow
def test_a_worker_whose_every_run_fails_gets_no_traffic_says_why_and_comes_back(tmp_path: Path) -> None:
    async def story() -> None:
        bundle = folder(tmp_path, "bundle")
        async with bench(tmp_path) as made:
            await made.want(bundle, 2)
            sick, well = await made.ready(2)
            (bundle / f"failing-{sick.uid}").touch()
            await until(lambda: any(e.failure for e in made.live), what="the reason", state=made.fleet.endpoints)
            assert [(e.uid, e.failure_reason, e.failure) for e in made.live if e.failure] == [
                (sick.uid, "ExecutorFailing", "every run fails")
            ]
            await until(
                lambda: made.front.history[-1] == {well.name}, what="one in the front", state=lambda: made.front.history
            )
            (bundle / f"failing-{sick.uid}").unlink()
            await made.ready(2)
            assert [(e.restarts, e.failure, e.failure_reason) for e in made.live] == [(0, "", "")] * 2

    run(story())


@pytest.mark.slow
def test_scaling_starts_and_stops_only_the_difference(tmp_path: Path) -> None:
    async def story() -> None:
        bundle = folder(tmp_path, "bundle")
        async with bench(tmp_path) as made:
            await made.want(bundle, 1)
            (first,) = await made.ready(1)
            await made.want(bundle, 3)
            assert first.uid in {e.uid for e in await made.ready(3)}
            await made.want(bundle, 1)
            assert [e.uid for e in await made.ready(1)] == [first.uid]
            await made.want(bundle, 0)
            await until(lambda: not made.live, what="the last worker's end")

    run(story())


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    async def story() -> None:
        async with bench(tmp_path) as made:
            made.fleet = made.make(grace_seconds=0.5)
            await made.want(folder(tmp_path, "bundle", "ignore-sigterm"))
            (worker,) = await made.ready(1)
            pid = made.pid(worker)
            await made.fleet.close()
            assert not alive(pid)

    run(story())


@pytest.mark.slow
def test_after_a_clean_restart_the_same_workers_come_back(tmp_path: Path) -> None:
    async def story() -> None:
        bundle = folder(tmp_path, "bundle")
        async with bench(tmp_path) as made:
            await made.want(bundle, 2)
            before = {(e.name, e.uid, e.admin_url) for e in await made.ready(2)}
            await made.fleet.close()
            made.fleet = made.make()
            await made.want(bundle, 2)
            assert {(e.name, e.uid, e.admin_url) for e in await made.ready(2)} == before

    run(story())


@pytest.mark.slow
def test_a_template_changed_while_nothing_ran_is_rolled_out_from_the_old_one(tmp_path: Path) -> None:
    async def story() -> None:
        old, broken = folder(tmp_path, "old"), folder(tmp_path, "broken-bundle", "broken")
        async with bench(tmp_path) as made:
            await made.want(old)
            (before,) = await made.ready(1)
            await made.fleet.close()
            made.fleet = made.make()
            await made.want(broken)
            await until(lambda: any(e.failure for e in made.live), what="the reason", state=made.fleet.endpoints)
            await until(
                lambda: any(e.ready and e.uid == before.uid for e in made.live),
                what="the old one",
                state=made.fleet.endpoints,
            )

    run(story())


@pytest.mark.slow
def test_workers_die_with_a_parent_that_was_killed_and_a_hung_one_is_ended_at_the_next_start(tmp_path: Path) -> None:
    """The parent is a process of its own, killed with SIGKILL; one of its two services ignores SIGTERM."""
    tame, stubborn = folder(tmp_path, "tame"), folder(tmp_path, "stubborn", "ignore-sigterm")
    script = textwrap.dedent("""
        import asyncio, sys, httpx
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        import test_local_fleet as t
        async def main():
            async with httpx.AsyncClient(trust_env=False) as client:
                for name in ("tame", "stubborn"):
                    made = t.Bench(Path(sys.argv[2]) / f"of-{name}", client)
                    await made.want(Path(sys.argv[2]) / name)
                    (worker,) = await made.ready(1)
                    print(made.pid(worker), flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    async def story() -> None:
        await until(lambda: not alive(pids[0]), what="the end of the orphan")
        assert alive(pids[1]), "it ignores the signal"
        async with httpx.AsyncClient(trust_env=False) as client:
            made = Bench(tmp_path / "of-stubborn", client)
            made.fleet = made.make(grace_seconds=0.5)
            (stubborn / "ignore-sigterm").unlink()
            await made.want(stubborn)
            await made.ready(1)
            assert not alive(pids[1])
            await made.fleet.close()

    assert tame.exists()
    run(story())


@pytest.mark.slow
def test_a_process_number_that_now_belongs_to_somebody_else_is_left_alone(tmp_path: Path) -> None:
    async def story() -> None:
        bundle = folder(tmp_path, "bundle")
        bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            async with bench(tmp_path) as made:
                await made.want(bundle)
                await made.ready(1)
                await made.fleet.close()
                saved = json.loads(made.state.workers_file.read_text())
                started = process_started(bystander.pid)
                assert started is not None
                saved["workers"][0] |= {"pid": bystander.pid, "pid_started": started - 1}
                made.state.workers_file.write_text(json.dumps(saved))
                made.fleet = made.make()
                await made.want(bundle)
                await made.ready(1)
                assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()

    run(story())


def test_a_damaged_list_of_workers_is_named_with_the_next_step(tmp_path: Path) -> None:
    async def story() -> None:
        async with bench(tmp_path) as made:
            made.state.workers_file.write_text('{"workers": [{}], "next": 1}')
            with pytest.raises(StateFolderError, match=r"workers\.json.*delete it"):
                made.make()

    run(story())


# --- the template ----------------------------------------------------------------------------------


def test_cpus_are_shared_by_the_workers() -> None:
    def threads(replicas: int) -> int:
        return render("digits", "u", parse_spec({**SPEC, "replicas": replicas}), cpus=8).threads

    assert [threads(n) for n in (0, 1, 2, 3, 20)] == [8, 8, 4, 2, 1]


def test_a_quota_of_this_machines_container_counts(tmp_path: Path) -> None:
    for_all = available_cpus(tmp_path)  # no cgroup there
    assert for_all >= 1
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert available_cpus(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cpus(tmp_path) == for_all


def test_templates_differ_exactly_when_a_worker_would() -> None:
    base = render("digits", "u", parse_spec(SPEC), cpus=2)
    budget = {**SPEC, "objective": {**SPEC["objective"], "accuracy": {"maxDisagreement": "0.05"}}}
    assert render("digits", "u", parse_spec(budget), cpus=2).digest == base.digest
    env = {**SPEC, "worker": {"env": [{"name": "A", "value": "b"}], "nodeSelector": {"x": "y"}}}
    other = render("digits", "u", parse_spec(env), cpus=2)
    assert other.digest != base.digest
    assert msgspec.convert(json.loads(json.dumps(asdict(other))), WorkerTemplate) == other


def test_relative_bundles_count_from_the_manifests_folder(tmp_path: Path) -> None:
    assert bundle_path("file://bundles/a", base=tmp_path) == tmp_path / "bundles/a"
    assert bundle_path("file:///srv/a", base=tmp_path) == Path("/srv/a")
    with pytest.raises(InvalidSpecError, match="needs Kubernetes"):
        bundle_path("oci://images/a", base=tmp_path)


@pytest.mark.parametrize(
    ("worker", "path"),
    [
        ({"env": {}}, "spec.worker.env"),
        ({"env": [{"name": "A"}]}, r"spec.worker.env\[0\]"),
        ({"env": [{"name": "A", "value": 1}]}, r"spec.worker.env\[0\].value"),
        ({"env": [{"name": "1A", "value": ""}]}, r"spec.worker.env\[0\].name"),
        (
            {"env": [{"name": "A", "value": ""}, {"name": "OFFRAMP_TOKEN_SHA256", "value": ""}]},
            r"spec.worker.env\[1\].name",
        ),
        ({"serviceAccountName": "root"}, "spec.worker.serviceAccountName"),
    ],
)
def test_a_worker_template_outside_the_rules_is_refused_by_field(worker: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidSpecError, match=path):
        render("digits", "u", parse_spec({**SPEC, "worker": worker}), cpus=2)


def test_this_process_has_a_start_time_and_a_free_number_has_none() -> None:
    assert process_started(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_started(child.pid) is None
