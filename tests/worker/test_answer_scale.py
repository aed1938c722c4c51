"""An answer means the same wherever a row left: scores of ramps are said in the scale of the model's own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as triton
from desks import Service
from processes import WorkerProcess, document, infer_json, plan_for
from scipy.special import log_softmax, softmax

from offramp_core.errors import InvalidBundleError
from offramp_core.scale import LOGITS, Scale
from offramp_worker.bundle.load import load_bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket

ROWS = 40
SOME_LEAVE = {"r00-grid": "0.3", "r02-linear": "0.5"}
SCALES = {
    "probabilities": Scale("probabilities"),
    "percentages": Scale("probabilities", 100.0),
    "log-probabilities": Scale("log-probabilities"),
}
PLANS: Mapping[str, tuple[dict[str, str], dict[str, str]]] = {
    "dropping rows that left": (SOME_LEAVE, {"execution": "ComputeSaving"}),
    "carrying all to the end": (SOME_LEAVE, {"execution": "ResultsOnly"}),
    "int8": ({f"int8/{ramp}": level for ramp, level in SOME_LEAVE.items()}, {"precision": "int8"}),
    "a model at the input": ({bundles.SMALL: "0.5"}, {}),
}


def serving(folder: Path) -> Service:
    bundle = load_bundle(folder)
    return Service(folder, bundle, Sessions(bundle, threads=1))


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    """One model behind four ends; "before" answers in probabilities, and its bundle is from before manifests said
    so."""
    folder = tmp_path_factory.mktemp("scales")
    found = {"logits": serving(bundles.write_wide_bundle(folder / "logits"))}
    for name, scale in SCALES.items():
        found[name] = serving(bundles.answering_in(bundles.write_wide_bundle(folder / name), scale))
    before = bundles.answering_in(bundles.write_wide_bundle(folder / "before"), SCALES["probabilities"])
    bundles.edit_manifest(before, scale=None)
    yield found | {"before": serving(before)}
    for service in found.values():
        service.engine.close()


def answers(service: Service, plan: str) -> list[Ticket]:
    thresholds, options = PLANS[plan]
    service.run(service.plan(thresholds, **options), holdback_share=0.0)
    return service.serve(ROWS)


def stacked(tickets: list[Ticket]) -> npt.NDArray[np.float64]:
    return np.concatenate([ticket.logits for ticket in tickets]).astype(np.float64)


def expected(scale: Scale, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    said = log_softmax(logits, axis=1) if scale.kind == "log-probabilities" else softmax(logits, axis=1)
    return np.asarray(scale.total * said)


@pytest.mark.parametrize("plan", PLANS)
def test_a_ramp_answers_in_the_scale_of_the_model_and_decides_as_before(
    services: dict[str, Service], plan: str
) -> None:
    logits = answers(services["logits"], plan)
    left = {ticket.exits[0] for ticket in logits}
    assert "final" in left and len(left) > 1
    for name, scale in SCALES.items():
        said = answers(services[name], plan)
        assert [(t.exits, t.labels.tolist()) for t in said] == [(t.exits, t.labels.tolist()) for t in logits]
        np.testing.assert_allclose(stacked(said), expected(scale, stacked(logits)), rtol=1e-4, atol=1e-6)
        assert [int(t.logits.argmax()) for t in said] == [int(t.labels[0]) for t in said]


def test_rows_of_probabilities_add_up_wherever_they_left(services: dict[str, Service]) -> None:
    for name, total in (("probabilities", 1.0), ("percentages", 100.0)):
        np.testing.assert_allclose(stacked(answers(services[name], "int8")).sum(axis=1), total, rtol=1e-5)


def test_a_bundle_from_before_there_was_a_scale_answers_as_it_did(services: dict[str, Service]) -> None:
    said, logits = (answers(services[name], "dropping rows that left") for name in ("before", "logits"))
    at_ramps = [(a.logits, b.logits) for a, b in zip(said, logits, strict=True) if a.exits != ["final"]]
    assert at_ramps
    for ours, theirs in at_ramps:
        np.testing.assert_array_equal(ours, theirs)


def test_an_answer_that_a_deadline_cut_short_is_in_the_scale_too(services: dict[str, Service]) -> None:
    service = services["probabilities"]
    service.run(service.plan({"r00-grid": "0.000001"}), holdback_share=0.0)
    (ticket,) = service.serve(1, deadline_seconds=0.0)
    assert (ticket.exits, ticket.due) == (["r00-grid"], [True])
    assert math.isclose(ticket.logits.sum(), 1, rel_tol=1e-5)


def test_exits_off_and_an_exact_request_say_what_the_model_says(services: dict[str, Service]) -> None:
    service = services["probabilities"]
    service.run(service.plan(SOME_LEAVE), holdback_share=0.0)
    for row, ticket in zip(bundles.inputs(5), service.serve(5, never_exit=True), strict=True):
        np.testing.assert_array_equal(ticket.logits, service.engine.sessions.exact(row[None]))


@pytest.mark.slow
def test_rest_and_grpc_give_the_same_probabilities(tmp_path: Path) -> None:
    folder = bundles.answering_in(bundles.write_bundle(tmp_path / "bundle"), SCALES["probabilities"])
    x = bundles.inputs(ROWS)
    with WorkerProcess(folder, env={"OFFRAMP_GRPC_PORT": "0"}) as process:
        process.deliver(document(plan_for(folder, SOME_LEAVE))).raise_for_status()
        reply = process.public.post("/v2/models/tiny/infer", content=json.dumps(infer_json(x))).json()
        rest = np.array(reply["outputs"][0]["data"]).reshape(ROWS, -1)
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        with triton.InferenceServerClient(f"127.0.0.1:{process.port('grpc')}") as client:
            grpc = client.infer("tiny", [tensor])
    assert len(set(reply["parameters"]["exit"].split(","))) > 1
    np.testing.assert_allclose(rest.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(grpc.as_numpy("logits"), rest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({"kind": "odds", "total": 1.0}, "Invalid enum value 'odds'"),
        ({"kind": "probabilities", "total": 0.0}, "scale.total is 0.0; it must be a number above 0"),
        ({"kind": "probabilities", "total": "1"}, "Expected `float`"),
    ],
)
def test_a_scale_that_is_none_is_refused_by_name(scale: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "bundle")
    bundles.edit_manifest(folder, scale=scale)
    with pytest.raises(InvalidBundleError, match=message):
        load_bundle(folder)


HOSTILE = np.array(
    [[1e38, -1e38, 0.0], [3e4, -3e4, 3e4], [0.0, 0.0, 0.0], [-np.inf, 0.0, 1.0], [1e-40, 0.0, -1e-40]], np.float32
)


@pytest.mark.parametrize("name", SCALES)
def test_numbers_of_any_size_keep_their_order_and_stay_numbers(name: str) -> None:
    said = SCALES[name].from_logits(HOSTILE)
    assert not np.isnan(said).any()
    assert (said.argmax(axis=1) == HOSTILE.argmax(axis=1)).all()
    order = np.argsort(HOSTILE, axis=1, kind="stable")
    assert (np.diff(np.take_along_axis(said, order, axis=1), axis=1) >= 0).all()


@pytest.mark.parametrize("name", SCALES)
def test_what_the_model_says_is_the_same_as_logits_and_back(name: str) -> None:
    logits = np.random.default_rng(0).normal(0, 5, (100, 7)).astype(np.float32)
    said = SCALES[name].from_logits(logits)
    np.testing.assert_allclose(softmax(SCALES[name].to_logits(said), axis=1), softmax(logits, axis=1), atol=1e-6)
    assert np.isfinite(SCALES[name].to_logits(np.eye(3, dtype=np.float32))).all()
    assert LOGITS.from_logits(logits) is logits  # no copy where nothing changes


def test_a_row_that_is_no_number_stays_none() -> None:
    broken = np.array([[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]], np.float32)
    assert np.isnan(Scale("probabilities").from_logits(broken)).any(axis=1).all()
