"""Thousands of broken and hostile requests against a real worker: refused or rightly answered, and nobody else
notices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bundles
import fuzz
import numpy as np
import pytest
from processes import WorkerProcess, document, eventually, plan_for

from offramp_worker.bundle.load import load_bundle
from offramp_worker.engine.execution.sessions import Sessions

pytestmark = pytest.mark.slow

OBJECTIVE = {"OFFRAMP_LATENCY_SECONDS": "0.5", "OFFRAMP_GRPC_PORT": "0"}
ASKED = int(os.environ.get("OFFRAMP_FUZZ_REQUESTS", "0"))  # by `python -m bench.fuzz`
# Of the valid requests: the load is far below what the worker can do, but a busy machine may stall for a while.
MAX_REFUSED = 0.05
PLANS = {
    "fp32": {"r00-grid": "0.2", "r02-linear": "0.5"},
    "int8": {bundles.SMALL: "0.1", "int8/r00-grid": "0.2", "int8/r02-linear": "0.5"},
}
CLEAR = 0.002  # of a threshold, so that a row leaves at the same ramp in any batch


@pytest.mark.timeout(7200 if ASKED else 1800)
def test_hostile_requests_are_refused_and_their_neighbours_get_their_own_answers(
    bundle_dir: Path, sessions: Sessions
) -> None:
    with WorkerProcess(bundle_dir, control_plane=False) as process:
        pool = fuzz.Pool(bundles.inputs(64, seed=11), lambda x: (sessions.exact(x), "final"))
        attacked(process, pool, requests=ASKED or 5_000)
    assert process.process.returncode == 0


@pytest.mark.parametrize(("precision", "requests"), [("fp32", 4_000), ("int8", 1_000)], ids=PLANS)
@pytest.mark.timeout(1800)
def test_the_same_under_a_plan_with_exits_and_an_objective(tmp_path: Path, precision: str, requests: int) -> None:
    with under_a_plan(tmp_path, precision) as (process, pool):
        tally = attacked(process, pool, requests=requests)
        assert tally.early > 0.2 * tally.sent["valid"]
        assert tally.early < 0.98 * (tally.sent["valid"] - tally.refused)
        assert tally.refused <= MAX_REFUSED * tally.sent["valid"]


@pytest.mark.parametrize("precision", PLANS)
def test_hostile_messages_over_grpc_harm_nobody(tmp_path: Path, precision: str) -> None:
    with under_a_plan(tmp_path, precision) as (process, pool):
        tally = fuzz.attack_grpc(f"127.0.0.1:{process.port('grpc')}", pool, requests=ASKED or 300, seed=7)
        assert tally.wrong == []
        assert tally.refused <= MAX_REFUSED * tally.sent["valid"]
        assert tally.early > 0
        assert_unharmed(process)


def attacked(process: WorkerProcess, pool: fuzz.Pool, *, requests: int) -> fuzz.Tally:
    host, _, port = process.address.partition(":")
    tally = fuzz.attack((host, int(port)), pool, requests=requests, seed=requests)
    assert tally.wrong == []
    assert sum(tally.sent.values()) - tally.sent["valid"] == requests
    assert len(tally.sent) == len(fuzz.CASES) + 2
    assert_unharmed(process)
    return tally


def assert_unharmed(process: WorkerProcess) -> None:
    assert process.is_ready()
    assert not process.events("batch-failed") and not process.events("reply-failed")


@contextmanager
def under_a_plan(folder: Path, precision: str) -> Iterator[tuple[WorkerProcess, fuzz.Pool]]:
    """A worker with an objective whose plan lets some rows leave, and inputs with what it answers while it is left
    alone."""
    bundle = bundles.write_wide_bundle(folder / "bundle")
    thresholds = PLANS[precision]
    with WorkerProcess(bundle, env=OBJECTIVE) as process:
        plan = plan_for(bundle, thresholds, precision=precision)
        process.deliver(document(plan, audit_rate=0.02, accuracy_budget=0.9)).raise_for_status()
        eventually(lambda: process.state().epoch == 1, what="the plan")
        yield process, fuzz.Pool(clear_rows(bundle, thresholds), alone(process))


def clear_rows(bundle: Path, thresholds: dict[str, str]) -> np.ndarray[Any, Any]:
    """Inputs of which no uncertainty is close to its ramp's threshold."""
    loaded, x = load_bundle(bundle), bundles.inputs(200, seed=11)
    uncertainty = Sessions(loaded, threads=1).tapped(x).uncertainty
    index = {column.id: j for j, column in enumerate(loaded.columns)}
    far = [np.abs(uncertainty[:, index[ramp]] - float(threshold)) > CLEAR for ramp, threshold in thresholds.items()]
    return x[np.logical_and.reduce(far)][:64]


def alone(process: WorkerProcess) -> Callable[[Any], tuple[Any, str]]:
    def answer(x: Any) -> tuple[Any, str]:
        reply = process.infer(x)
        return reply["logits"], reply["parameters"]["exit"]

    return answer
