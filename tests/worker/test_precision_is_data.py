"""A worker serves a form of its backbone that nobody has heard of: the bundle has its graph, its ramps, its costs and
its name."""

from __future__ import annotations

from pathlib import Path

import bundles
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from desks import Service
from processes import manifest_of

from offramp_core.errors import InvalidBundleError, PlanRefusedError
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.sessions import Sessions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference, int8, and the same network with half of its weights."""
    folder = bundles.write_wide_bundle(tmp_path_factory.mktemp("three"))
    bundles.add_precision(folder, "pruned50", bundles.pruned(onnx.load(str(folder / "backbone.onnx"))), share=0.3)
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return load_bundle(folder)


@pytest.fixture(scope="module")
def sessions(bundle: Bundle) -> Sessions:
    return Sessions(bundle, threads=1)


@pytest.fixture
def service(folder: Path, bundle: Bundle, sessions: Sessions):  # type: ignore[no-untyped-def]
    service = Service(folder, bundle, sessions)
    yield service
    service.engine.close()
    assert service.engine.join(30.0)


def test_the_bundle_says_which_forms_it_has_how_they_were_made_and_which_is_the_reference(folder: Path) -> None:
    backbones = manifest_of(folder).backbones
    assert [(spec.name, spec.file, spec.is_reference) for spec in backbones] == [
        ("fp32", "backbone.onnx", True),
        ("int8", "backbone.int8.onnx", False),
        ("pruned50", "backbone.pruned50.onnx", False),
    ]
    assert backbones[-1].method == "by a test"


def test_a_plan_of_it_is_answered_by_its_graph(service: Service, folder: Path) -> None:
    service.run(service.plan({}, precision="pruned50"), holdback_share=0.0)
    x = bundles.inputs(40)
    alone = ort.InferenceSession(str(folder / "backbone.pruned50.onnx"), providers=["CPUExecutionProvider"])
    expected = alone.run(None, {"x": x})[0]
    served = np.concatenate([ticket.logits for ticket in service.serve(40)])
    np.testing.assert_allclose(served, expected, rtol=1e-4, atol=1e-4)


def test_requests_leave_at_its_ramps(service: Service) -> None:
    service.run(service.plan({"pruned50/r02-linear": "1"}, precision="pruned50"), holdback_share=0.0)
    assert {leaver for ticket in service.serve(20) for leaver in ticket.exits} == {"pruned50/r02-linear"}


def test_every_row_records_what_it_would_have_said(service: Service, bundle: Bundle) -> None:
    assert [column.id for column in bundle.columns[-2:]] == ["pruned50/r02-linear", "pruned50/final"]
    assert [column.precision for column in bundle.columns[-2:]] == ["pruned50"] * 2


@pytest.mark.parametrize("plan", [{"precision": "int4"}, {"thresholds": {"pruned50/r02-linear": "0.5"}}], ids=str)
def test_a_plan_of_what_the_bundle_does_not_have_is_refused(service: Service, plan: dict[str, object]) -> None:
    with pytest.raises(PlanRefusedError, match=r"precision int4 is not in the loaded bundle|is none of the loaded"):
        service.run(service.plan(**{"thresholds": {}, **plan}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "fp32", "int8", "INT4", "int4/x", "a" * 17])
def test_a_bundle_whose_forms_have_no_names_of_their_own_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    specs = [{"name": spec.name, "file": spec.file} for spec in manifest_of(folder).precisions]
    bundles.edit_manifest(tmp_path, precisions=[specs[0], {**specs[1], "name": name}])
    with pytest.raises(InvalidBundleError, match=r"precisions.* (is no name|must differ)"):
        load_bundle(tmp_path)
