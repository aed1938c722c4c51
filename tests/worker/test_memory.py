"""What a worker remembers over a restart: the newest plan it took and what its breaker has seen. Files that cannot be
used hold nobody up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import bundles
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from desks import EVERYBODY_LEAVES, Service
from processes import WorkerProcess, document, eventually, plan_for, sign

from offramp_core.errors import PlanRefusedError
from offramp_core.evidence import detector
from offramp_core.plan import exits_off_plan
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.arms.breaker import Breaker
from offramp_worker.engine.arms.marker import FILE_NAME, CrashMarker
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.plans.memory import BREAKER_FILE, DOCUMENT_FILE, PlanMemory

Start = Callable[[], Service]


@pytest.fixture
def start(bundle_dir: Path, bundle: Bundle, sessions: Sessions, tmp_path: Path) -> Iterator[Start]:
    """Starts the next process of one worker: the one before is gone without a word."""
    begun: list[Service] = []

    def process() -> Service:
        begun.append(Service(bundle_dir, bundle, sessions, memory=PlanMemory(tmp_path)))
        return begun[-1]

    yield process
    for service in begun:
        service.engine.close()
        assert service.engine.join(10)


def deliver(service: Service, epoch: int, thresholds: dict[str, str] | None = None, **fields: float) -> None:
    service.run(service.plan(thresholds or {"r00-grid": "0.5"}), epoch=epoch, **fields)


# --- the newest plan -------------------------------------------------------------------------------


def test_after_a_restart_an_older_plan_is_refused_and_the_newest_is_taken(start: Start) -> None:
    first = start()
    deliver(first, 4)
    deliver(first, 7)
    second = start()
    assert second.desk.newest_epoch == 7
    with pytest.raises(PlanRefusedError, match="epoch 6 is older than 7, which this worker took before it restarted"):
        deliver(second, 6)
    assert second.desk.refused is not None and second.desk.refused.reason == "StaleEpoch"
    assert second.engine.active.epoch == 0
    deliver(second, 7)
    deliver(second, 8)
    assert (second.engine.active.epoch, start().desk.newest_epoch) == (8, 8)


def test_without_a_folder_the_first_plan_that_comes_is_taken(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions
) -> None:
    for epoch in (7, 4):
        service = Service(bundle_dir, bundle, sessions)
        deliver(service, epoch)
        assert service.engine.active.epoch == epoch
        service.engine.close()
        assert service.engine.join(10)


def forged(bundle_dir: Path, **changes: object) -> bytes:
    signed = sign(document(plan_for(bundle_dir), epoch=10**15), key=Ed25519PrivateKey.generate())
    return json.dumps({"payload": signed.payload, "signature": signed.signature, **changes}).encode()


SPOILT: dict[str, Callable[[Path, Path], object]] = {
    "empty": lambda file, _: file.write_bytes(b""),
    "half": lambda file, _: file.write_bytes(b'{"payload": "{'),
    "noise": lambda file, _: file.write_bytes(os.urandom(5_000)),
    "another type": lambda file, _: file.write_bytes(b'[1, 2, "three"]'),
    "deep": lambda file, _: file.write_bytes(b'{"x":' + b"[" * 200_000),
    "huge": lambda file, _: os.truncate(_made(file), 2**33),
    "a folder": lambda file, _: file.mkdir(),
    "a pipe": lambda file, _: os.mkfifo(file),
    "a link": lambda file, _: file.symlink_to("/dev/zero"),
    "unreadable": lambda file, _: file.write_bytes(b"{}") and file.chmod(0),
    "signed by a stranger": lambda file, bundle_dir: file.write_bytes(forged(bundle_dir)),
    "signed with nothing": lambda file, bundle_dir: file.write_bytes(forged(bundle_dir, signature="")),
    "a lone surrogate": lambda file, _: file.write_bytes(b'{"payload": "\\ud800", "signature": "AAAA"}'),
}


def _made(file: Path) -> Path:
    file.touch()
    return file


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_files_that_somebody_spoilt_keep_no_worker_from_its_plan(
    start: Start, bundle_dir: Path, tmp_path: Path, spoil: Callable[[Path, Path], object]
) -> None:
    for name in (DOCUMENT_FILE, BREAKER_FILE, FILE_NAME):
        spoil(tmp_path / name, bundle_dir)
    marker = CrashMarker(tmp_path)
    marker.enter(3)
    marker.close()
    service = start()
    assert service.desk.newest_epoch == 0
    deliver(service, 3)
    assert service.engine.active.epoch == 3 and not service.engine.arms.breaker_open
    service.serve(20)
    assert service.counts("stable", 3).requests > 0


def test_what_another_service_left_is_no_concern_of_ours(start: Start, bundle_dir: Path, tmp_path: Path) -> None:
    PlanMemory(tmp_path).remember(sign(replace(document(plan_for(bundle_dir), epoch=9), service_uid="another")))
    assert start().desk.newest_epoch == 0


def test_a_full_disk_is_told_once_and_costs_nothing_else(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "fsync", full)
    CrashMarker(tmp_path).enter(1)
    service = start()
    for epoch in (1, 2):
        deliver(service, epoch, audit_rate=1.0)
    service.serve(20)
    assert service.engine.active.epoch == 2
    told = capfd.readouterr()
    assert (told.out + told.err).count('"event":"state-file-unusable"') == 3, "one for each file"


# --- the breaker -----------------------------------------------------------------------------------

STRICT = {"audit_rate": 1.0, "accuracy_budget": 0.01, "holdback_share": 0.0}


def opened(start: Start) -> Service:
    service = start()
    deliver(service, 3, EVERYBODY_LEAVES, **STRICT)
    service.serve(60)
    assert service.engine.arms.breaker_open
    return service


def test_a_broken_plan_stays_off_after_a_restart_until_another_plan_comes(start: Start) -> None:
    opened(start)
    again = start()
    deliver(again, 3, EVERYBODY_LEAVES, **STRICT)  # as it lies in the plan file while the operator is down
    assert again.engine.arms.breaker_open
    assert {t.exits[0] for t in again.serve(20)} == {"final"}
    deliver(again, 4, EVERYBODY_LEAVES, **{**STRICT, "audit_rate": 0.5})
    assert again.engine.arms.breaker_open, "a new epoch of the same plan is no reason to forget"
    deliver(again, 5, {"r00-grid": "0.5"}, **STRICT)
    assert not again.engine.arms.breaker_open
    third = start()
    deliver(third, 6, EVERYBODY_LEAVES, **STRICT)
    assert not third.engine.arms.breaker_open, "the operator has had its say since"


def test_exits_off_by_the_operator_close_it_for_later_processes_as_well(start: Start, bundle: Bundle) -> None:
    broken = opened(start)
    manifest = bundle.manifest
    off = exits_off_plan(backbone_digest=manifest.backbone_digest, ramp_set_digest=manifest.ramp_set_digest)
    broken.run(off, epoch=4)
    again = start()
    deliver(again, 5, EVERYBODY_LEAVES, **STRICT)
    assert not again.engine.arms.breaker_open


def test_what_the_detector_has_seen_is_there_after_a_restart(start: Start) -> None:
    first = start()
    deliver(first, 3, audit_rate=1.0, accuracy_budget=0.3)
    first.serve(40)
    seen = first.engine.active.stable.breaker.statistic  # type: ignore[union-attr]
    second = start()
    deliver(second, 3, audit_rate=1.0, accuracy_budget=0.3)
    assert second.engine.active.stable.breaker.statistic == pytest.approx(seen)  # type: ignore[union-attr]
    third = start()
    deliver(third, 4, audit_rate=1.0, accuracy_budget=0.2)
    assert third.engine.active.stable.breaker.statistic == 0, "another budget is another test"  # type: ignore[union-attr]


def test_audits_of_a_plan_that_is_gone_change_nothing_of_what_is_kept(tmp_path: Path) -> None:
    memory = PlanMemory(tmp_path)
    old, new = (Breaker(accuracy_budget=0.01, run_length=1e6, plan_hash=name) for name in ("old", "new"))
    old.go_on(None, memory.keep_breaker)
    old.draw(3)
    old.let_go()
    new.go_on(None, memory.keep_breaker)
    old.update(audited=3, disagreements=3)
    kept = memory.breaker()
    assert kept is not None and (kept.plan_hash, kept.detector.n) == ("new", 0)


class TestLostAudits:
    """A process that ends takes its open audits along; the next one counts them against the plan."""

    @staticmethod
    def died(memory: PlanMemory, *, drawn: int, audited: int) -> None:
        breaker = Breaker(accuracy_budget=0.01, run_length=1e6, plan_hash="p")
        breaker.go_on(memory.breaker(), memory.keep_breaker)
        breaker.draw(drawn)
        breaker.update(audited=audited, disagreements=0)

    @staticmethod
    def restarted(memory: PlanMemory) -> Breaker:
        breaker = Breaker(accuracy_budget=0.01, run_length=1e6, plan_hash="p")
        breaker.go_on(memory.breaker(), memory.keep_breaker)
        return breaker

    def test_they_count_once(self, tmp_path: Path) -> None:
        memory = PlanMemory(tmp_path)
        self.died(memory, drawn=30, audited=29)
        self.restarted(memory)
        kept = memory.breaker()
        assert kept is not None
        assert kept.detector == detector.update(detector.update(detector.init(), 29, 0, p0=0.01), 1, 1, p0=0.01)
        assert (kept.open, kept.losses.owed) == (0, 0)
        self.restarted(memory)
        assert memory.breaker() == kept

    def test_an_input_whose_audit_ends_the_process_opens_the_breaker_within_twenty_deaths(self, tmp_path: Path) -> None:
        memory, deaths = PlanMemory(tmp_path), 0
        while not self.restarted(memory).is_open:
            self.died(memory, drawn=5, audited=4)
            deaths += 1
        assert 4 <= deaths <= 20

    def test_one_death_with_a_handful_open_is_no_alarm(self, tmp_path: Path) -> None:
        memory = PlanMemory(tmp_path)
        self.died(memory, drawn=2_000, audited=1_992)
        breaker = self.restarted(memory)
        for _ in range(1_000):
            breaker.draw(1)
            assert not breaker.update(audited=1, disagreements=0)

    def test_a_worker_that_drains_has_nothing_open(self, tmp_path: Path) -> None:
        memory = PlanMemory(tmp_path)
        self.died(memory, drawn=30, audited=30)
        kept = memory.breaker()
        assert kept is not None and kept.open == 0


@pytest.mark.parametrize(
    "lie",
    [
        {"open": 10**18},
        {"open": -5},
        {"owed": 10**15},
        {"due": 1e300},
        {"n": -1},
        {"m": [1.0] * 50},
        {"m": [1e308] * 6},
        {"m": [0.5]},
        {"budget": 2.0},
    ],
    ids=str,
)
def test_numbers_that_nobody_counted_make_no_worker_fail(start: Start, tmp_path: Path, lie: dict[str, object]) -> None:
    service = start()
    deliver(service, 3, EVERYBODY_LEAVES, **STRICT)
    plan = service.plan()
    truth = {
        "plan_hash": plan.content_hash,
        "budget": 0.01,
        "run_length": 1e6,
        "m": [1.0] * 6,
        "n": 5,
        "open": 0,
        "owed": 0,
        "due": 1.0,
        "is_open": False,
    }
    (tmp_path / BREAKER_FILE).write_text(json.dumps({**truth, **lie}))
    again = start()
    deliver(again, 3, EVERYBODY_LEAVES, **STRICT)
    assert again.engine.active.epoch == 3
    again.serve(3)


# --- the process -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_remembers_what_it_took_and_that_it_was_broken(bundle_dir: Path, tmp_path: Path) -> None:
    env = {"OFFRAMP_STATE_DIR": str(tmp_path / "state")}
    reckless = plan_for(bundle_dir, {"r00-grid": "1"})
    newest = document(reckless, epoch=6, audit_rate=1.0)
    with WorkerProcess(bundle_dir, env=env) as process:
        process.deliver(document(reckless, epoch=5, audit_rate=1.0)).raise_for_status()
        process.deliver(newest).raise_for_status()

        def opened() -> bool:
            process.infer(bundles.inputs(40, seed=40))
            return process.state().breaker_open

        eventually(opened, what="the breaker")
        process.process.kill()
        process.process.wait(10)
    with WorkerProcess(bundle_dir, env=env) as process:
        assert (process.state().epoch, process.state().newest_epoch) == (0, 6)
        refused = process.deliver(document(reckless, epoch=5, audit_rate=1.0))
        assert (refused.status_code, refused.json()["reason"]) == (409, "StaleEpoch")
        process.deliver(newest).raise_for_status()
        assert process.state().breaker_open
        said = process.infer(bundles.inputs(8, seed=41))["parameters"]
        assert set(said["exit"].split(",")) == {"final"}
