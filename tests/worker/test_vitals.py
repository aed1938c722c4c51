"""When a worker whose batches fail stops taking requests, takes them again, or is given up."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundles
import httpx
import numpy as np
import pytest
from processes import KEY, SERVICE_UID, WorkerProcess, document, eventually, infer_json, plan_for, sign
from sick import ILLEGAL
from stages import broken
from test_engine import EVERYONE, Bench, held_up

from offramp_worker.bundle.load import Bundle
from offramp_worker.engine import vitals
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.ramp_sets import PlanPostponedError
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket, UnableError
from offramp_worker.engine.vitals import FAILED_IN_A_ROW, GIVE_UP_SECONDS, LONGEST_PAUSE_SECONDS, SOUND_SECONDS, Vitals
from offramp_worker.main import EXECUTOR_LOST
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.plans.classifier import ClassifierPlans

PUBLIC_KEY = KEY.public_key().public_bytes_raw()


class Patient:
    """An executor that can be made sick, and time that passes only in pauses between probes."""

    def __init__(self) -> None:
        self.now, self.sick = 1000.0, False
        self.pauses: list[float] = []
        self.probed: list[int] = []
        self.lost: list[str] = []
        self.recover_after = -1  # pauses
        self.vitals = Vitals(probe=self._probe, lost=self.lost.append, clock=lambda: self.now)
        self.vitals._closed.wait = self._wait  # type: ignore[method-assign, assignment]

    def fail(self, times: int = FAILED_IN_A_ROW) -> None:
        """So many batches fail; then whatever is asked about it has been asked."""
        for _ in range(times):
            self.vitals.ended(5, failed=True)
        eventually(lambda: not self.vitals._asking, what="the end of the questions")

    def _probe(self, rows: int) -> None:
        self.probed.append(rows)
        if self.sick:
            raise RuntimeError(ILLEGAL + "\nat a line of C++")

    def _wait(self, seconds: float | None = None) -> bool:
        assert seconds is not None
        self.pauses.append(seconds)
        self.now += seconds
        if len(self.pauses) == self.recover_after:
            self.sick = False
        return False


def test_a_few_failures_in_a_row_are_looked_into_and_fewer_are_not() -> None:
    patient = Patient()
    for _ in range(10):
        patient.fail(FAILED_IN_A_ROW - 1)
        patient.vitals.ended(1, failed=False)
    assert not patient.probed
    patient.fail()
    assert (patient.probed, patient.vitals.trouble, patient.lost) == ([5], "", [])


def test_requests_that_fail_by_themselves_never_take_a_worker_out_and_cost_a_probe_a_second_at_most() -> None:
    patient = Patient()
    for _ in range(100):
        patient.fail()
        patient.now += 0.1
    assert not patient.vitals.trouble and not patient.lost
    assert 8 <= len(patient.probed) <= 11


def test_a_sick_executor_is_asked_ever_more_seldom_and_given_up_after_a_minute() -> None:
    patient = Patient()
    patient.sick = True
    patient.fail()
    assert patient.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    assert max(patient.pauses) == LONGEST_PAUSE_SECONDS and sum(patient.pauses) >= GIVE_UP_SECONDS
    assert len(patient.lost) == 1 and ILLEGAL in patient.lost[0] and "C++" not in patient.lost[0]
    assert ILLEGAL in patient.vitals.trouble  # it takes no requests until it has ended


def test_an_executor_that_recovers_serves_again_and_one_that_flaps_goes_on_being_asked_seldom() -> None:
    patient = Patient()
    patient.sick, patient.recover_after = True, 3
    patient.fail()
    assert (patient.vitals.trouble, patient.pauses) == ("", [1.0, 2.0, 4.0])
    patient.now += SOUND_SECONDS / 2
    patient.sick, patient.recover_after = True, 4
    patient.fail()
    assert (patient.vitals.trouble, patient.pauses[3:]) == ("", [4.0])
    patient.now += 2 * SOUND_SECONDS
    patient.sick, patient.recover_after = True, 5
    patient.fail()
    assert (patient.vitals.trouble, patient.pauses[4:], patient.lost) == ("", [1.0], [])


# --- the engine, with a real session -----------------------------------------------------------------


@pytest.fixture
def running(bundle: Bundle, sessions: Sessions) -> Iterator[Bench]:
    bench = Bench(bundle, sessions)
    bench.engine.start()
    yield bench
    bench.engine.close()
    assert bench.engine.join(30)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(vitals, "QUIET_SECONDS", 0.0)


class Nonsense:
    """A stage of a device that fails on single rows and computes garbage from more."""

    def __init__(self, stage: Runnable) -> None:
        self._stage, self.ramps, self.reads_input = stage, stage.ramps, stage.reads_input
        self.pads = stage.pads

    def run(self, features: Any, x: Any, rows: Any = None) -> Any:
        if len(x) == 1:
            raise RuntimeError(ILLEGAL)
        logits, heads = self._stage.run(features, x, rows)
        return -logits, heads


@pytest.mark.parametrize(
    "sick", [lambda stage: broken(stage, why=ILLEGAL), Nonsense], ids=["raises", "computes garbage"]
)
def test_an_executor_whose_every_run_fails_takes_no_requests_until_its_probe_passes(
    running: Bench, bundle_dir: Path, quick: None, sick: Callable[[Runnable], Runnable]
) -> None:
    bench = running
    sound = bench.engine._executor.exact_stage
    bench.engine._executor.exact_stage = sick(sound)
    failed: list[Ticket] = []
    with pytest.raises(UnableError, match="every run fails on this worker for now; try another one"):
        while True:
            failed.append(bench.engine.submit(bundles.inputs(1), never_exit=False))
            eventually(lambda: failed[-1] in bench.done, what="the error")
    assert len(failed) >= FAILED_IN_A_ROW and all(ticket.error for ticket in failed)
    assert bench.engine.counters.refused == 1
    bench.engine._executor.exact_stage = sound
    eventually(lambda: not bench.engine.vitals.trouble, what="recovery")
    assert bench.serve(bundles.inputs(1))[0].error is None


def test_requests_that_fail_every_batch_they_are_in_never_take_the_worker_out(
    running: Bench, bundle: Bundle, quick: None
) -> None:
    bench, exact = running, running.engine._executor.exact_stage
    probed = 0

    class Choosy(Nonsense):
        def run(self, features: Any, x: Any, rows: Any = None) -> Any:
            nonlocal probed
            if (x == 13.0).all(axis=(1, 2, 3)).any():
                raise RuntimeError("Gather: index out of range")
            probed += np.array_equal(x, bundle.probe_x)
            return exact.run(features, x, rows)

    bench.engine._executor.exact_stage = Choosy(exact)
    for _ in range(5 * FAILED_IN_A_ROW):
        poison = bench.engine.submit(np.full_like(bundles.inputs(1), 13.0), never_exit=True)
        eventually(lambda ticket=poison: ticket in bench.done, what="the error")  # type: ignore[misc]
        assert poison.error is not None
    eventually(lambda: probed, what="a probe")
    assert bench.serve(bundles.inputs(1))[0].error is None
    assert not bench.engine.vitals.trouble


def test_audits_wait_while_the_executor_fails_instead_of_counting_against_the_plan(
    running: Bench, bundle_dir: Path
) -> None:
    bench, hold = running, threading.Event()
    bench.activate(bundle_dir, {"r02-linear": EVERYONE}, audit_rate=1.0)
    exact = bench.engine._executor.exact_stage
    held_up(bench, bundles.inputs(1), hold)
    tickets = [bench.engine.submit(bundles.inputs(1, seed=i), never_exit=False) for i in range(4)]
    bench.engine._executor.exact_stage = exact
    bench.engine.vitals.trouble = "every run fails"
    hold.set()
    eventually(lambda: all(t in bench.done for t in tickets), what="replies of what was queued")
    eventually(lambda: len(bench.engine.desk) == 4, what="the draws")
    assert bench.counts(1).audited == 0
    bench.engine.vitals.trouble = ""
    bench.engine._batcher.wake()
    eventually(lambda: bench.counts(1).audited == 4, what="the audits")


def test_a_plan_that_comes_while_the_executor_fails_waits_and_is_not_refused(running: Bench, bundle_dir: Path) -> None:
    engine = running.engine
    desk = PlanDesk(ClassifierPlans(engine), public_key=PUBLIC_KEY, service_uid=SERVICE_UID)
    engine.vitals.trouble = "every run fails"
    with pytest.raises(PlanPostponedError, match="every run fails"):
        desk.deliver(sign(document(plan_for(bundle_dir, {"r00-grid": "0.5"}))))
    assert desk.refused is None and engine.active.epoch == 0
    engine.vitals.trouble = ""
    desk.try_again()
    assert engine.active.epoch == 1


# --- a process ---------------------------------------------------------------------------------------


def sick_worker(bundle_dir: Path, sick: Path, *, wait_ready: bool = True) -> WorkerProcess:
    return WorkerProcess(
        bundle_dir,
        env={"SICK_WHILE": str(sick), "OFFRAMP_GRPC_PORT": "0"},
        wait_ready=wait_ready,
        command=[sys.executable, str(Path(__file__).with_name("sick.py"))],
    )


@pytest.mark.slow
def test_a_worker_that_begins_on_a_sick_device_says_so_and_serves_once_the_device_is_well(
    bundle_dir: Path, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    sick.touch()
    with sick_worker(bundle_dir, sick, wait_ready=False) as worker:
        eventually(lambda: len(worker.events("bundle-refused")) >= 2, what="another try")
        assert ILLEGAL in worker.state().message and worker.public.get("/v2/health/live").status_code == 200
        sick.unlink()
        eventually(worker.is_ready, what="recovery")
        assert worker.infer(bundles.inputs(1))["outputs"]


@pytest.mark.slow
def test_a_sick_worker_leaves_says_why_recovers_and_ends_with_a_code_of_its_own_when_it_does_not(
    bundle_dir: Path, tmp_path: Path
) -> None:
    sick, x = tmp_path / "sick", bundles.inputs(1)
    with sick_worker(bundle_dir, sick) as worker:
        before = worker.infer(x)
        assert worker.state().failing == ""

        sick.touch()
        statuses = []
        while 503 not in statuses:
            statuses.append(worker.public.post("/v2/models/tiny/infer", json=infer_json(x)).status_code)
        assert statuses.count(500) >= FAILED_IN_A_ROW and set(statuses) == {500, 503}
        ready = worker.public.get("/v2/health/ready")
        assert ready.status_code == 503 and ILLEGAL in ready.text
        assert worker.public.get("/v2/health/live").status_code == 200
        state = worker.state()
        assert (state.ready, state.message) == (False, "") and ILLEGAL in state.failing

        sick.unlink()
        eventually(worker.is_ready, what="recovery")
        assert worker.infer(x)["outputs"] == before["outputs"] and worker.state().failing == ""

        sick.touch()
        while worker.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                worker.public.post("/v2/models/tiny/infer", json=infer_json(x))
            time.sleep(0.02)
        assert worker.process.returncode == EXECUTOR_LOST
    names = [entry["event"] for entry in worker.log]
    assert names.count("executor-recovered") == 1 and names[-1] == "given-up"
    assert "Traceback" not in "".join(worker.noise)
