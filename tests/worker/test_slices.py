"""Requests that name a slice: who may leave, what is counted, and what is recorded of them."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from desks import EVERYBODY_LEAVES, Service
from processes import WorkerProcess, document, plan_for, sign

from offramp_core.errors import PlanRefusedError
from offramp_core.protocol import SliceCounts, slice_number
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.accounts.turns import Turns
from offramp_worker.engine.execution.sessions import Sessions

BOTH = {"slices": ("day", "night"), "holdback_share": 0.0}


@pytest.fixture
def service(bundle_dir: Path, bundle: Bundle, sessions: Sessions) -> Iterator[Service]:
    service = Service(bundle_dir, bundle, sessions)
    yield service
    service.engine.close()
    assert service.engine.join(30.0)


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_a_stopped_slice_takes_no_exits_and_gets_the_models_own_answers(
    service: Service, sessions: Sessions, execution: str
) -> None:
    service.run(service.plan(execution=execution), **BOTH, stopped_slices=("night",))
    night, day, none = (service.serve(20, slice_name=name) for name in ("night", "day", ""))
    assert {t.exits[0] for t in night} == {"final"}
    np.testing.assert_array_equal([t.labels[0] for t in night], [sessions.exact(t.x)[0].argmax() for t in night])
    for others in (day, none):
        assert sum(t.exits[0] == "r00-grid" for t in others) >= 19
    assert {t.arms[0] for t in night} == {"stable"}


def test_rows_of_a_stopped_slice_stay_in_a_batch_whose_others_leave(service: Service) -> None:
    service.run(service.plan(), **BOTH, stopped_slices=("night",))
    x, held = bundles.inputs(16, seed=3), service.engine._turn
    with held:  # one batch of all of them
        tickets = [
            service.engine.submit(x[i : i + 1], never_exit=False, slice_name="night" if i % 2 else "")
            for i in range(16)
        ]
    service.serve(1)
    assert all(t.exits[0] == "final" for t in tickets[1::2])
    assert sum(t.exits[0] == "r00-grid" for t in tickets[::2]) >= 7


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_audits_of_declared_slices_are_counted_apart_and_add_up(service: Service, execution: str) -> None:
    service.run(service.plan(execution=execution), **BOTH, audit_rate=1.0)
    for name, n in (("night", 30), ("day", 20), ("stranger", 10), ("", 5)):
        service.serve(n, seed=n, slice_name=name)
    counts, seen = service.counts("stable"), service.measured.slices
    assert {name: s.audited for name, s in seen.items()} == {"night": 30, "day": 20}, "what is not declared is nobody's"
    assert counts.audited == 65
    assert sum(s.disagreements for s in seen.values()) <= counts.disagreements


def test_what_a_stopped_slice_is_told_never_disagrees(service: Service) -> None:
    service.run(service.plan(), **BOTH, stopped_slices=("night",), audit_rate=1.0)
    service.serve(60, slice_name="night")
    assert service.measured.slices == {"night": SliceCounts(60, 0)}


def test_records_say_which_slice_they_are_of(service: Service) -> None:
    service.run(service.plan(), **BOTH, audit_rate=1.0)
    for name, n in (("night", 3), ("stranger", 2), ("", 1)):
        service.serve(n, slice_name=name)
    column = np.frombuffer(base64.b64decode(service.engine.ring.read(0).slice), "<i4")
    assert column.tolist() == [slice_number("night")] * 3 + [slice_number("stranger")] * 2 + [0]


@pytest.mark.parametrize(
    ("streams", "share"),
    [
        ([f"gateway-{i // 50 % 4}" for i in range(5000)], (0.65, 0.85)),
        ([f"client-{u}" for u in np.random.default_rng(1).integers(0, 4, 5000)], (0.005, 0.02)),
        ([f"camera-{u}" for u in np.random.default_rng(1).integers(0, 64, 2000) for _ in range(3)], (0.0, 0.03)),
        (["client"] * 5000, (0.0, 0.01)),
        ([f"client-{u}" for u in np.random.default_rng(1).integers(0, 2, 5000)], (0.04, 0.09)),
    ],
    ids=["four in turns", "four at random", "three requests at a time", "the only one of its worker", "two at random"],
)
def test_sources_that_take_turns_are_told_from_those_that_have_a_worker_to_themselves(
    streams: list[str], share: tuple[float, float]
) -> None:
    turns = Turns(draw=random.Random(1).random)
    assert share[0] <= np.mean([turns.repeats(stream) for stream in streams]) <= share[1]


def test_records_say_whether_requests_before_named_the_same_stream_though_one_has_no_record(service: Service) -> None:
    service.run(service.plan(), **BOTH, audit_rate=1.0)
    service.engine.accounts.turns = Turns(draw=lambda: 0.0)
    x = bundles.inputs(1)
    for i, stream in enumerate("aaaabbbbb"):
        service.engine.submit(x, never_exit=i in (2, 7), stream=stream)
    service.serve(1)
    column = np.frombuffer(base64.b64decode(service.engine.ring.read(0).repeats), "u1")
    assert column.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_a_stopped_slice_is_answered_by_no_cache(bundle_dir: Path, bundle: Bundle, sessions: Sessions) -> None:
    service = Service(bundle_dir, bundle, sessions, cache_bytes=1_000_000)
    service.run(service.plan(), **BOTH, stopped_slices=("night",))
    service.serve(20)
    assert not any(t.cached for t in service.serve(20, slice_name="night"))
    assert all(t.cached for t in service.serve(20, slice_name="day"))
    service.engine.close()
    assert service.engine.join(30.0)


@pytest.mark.parametrize("fields", [{"stopped_slices": ("x",)}, {"slices": tuple(f"s{i}" for i in range(65))}])
def test_a_document_whose_slices_cannot_be_is_refused(service: Service, fields: dict[str, Any]) -> None:
    with pytest.raises(PlanRefusedError, match="slices"):
        service.desk.deliver(sign(document(service.plan(), **fields)))


@pytest.mark.slow
def test_a_request_names_its_slice_and_a_bad_name_is_refused_by_its_path(
    worker: WorkerProcess, bundle_dir: Path
) -> None:
    plan = plan_for(bundle_dir, EVERYBODY_LEAVES)
    body = sign(document(plan, slices=("night",), stopped_slices=("night",), accuracy_budget=0.99))
    assert (
        worker.admin.post("/v1/config", json={"payload": body.payload, "signature": body.signature}).status_code == 200
    )
    x = bundles.inputs(1, seed=1)
    for wish, status, exit_name in (
        ("night", 200, "final"),
        ("day", 200, "r00-grid"),
        (7, 400, ""),
        ("n" * 33, 400, ""),
    ):
        request = {
            "inputs": [{"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}],
            "parameters": {"slice": wish},
        }
        reply = worker.public.post("/v2/models/tiny/infer", json=request)
        assert reply.status_code == status, reply.text
        if status == 200:
            assert reply.json()["parameters"]["exit"] == exit_name
        else:
            assert "parameters.slice" in reply.text
