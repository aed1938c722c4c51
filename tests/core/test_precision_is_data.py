"""A form of the backbone that nothing here knows the name of: recorded, searched, certified, pinned, canaried and
promoted like int8.

What a worker does with it is in `tests/worker/test_precision_is_data.py`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet import MANIFEST, Fleet, pool  # type: ignore[import-not-found]
from scores import IDS as SIX_IDS
from scores import REQUEST as EXACT_REQUEST
from scores import recorded, wide_arrays, with_int8, with_precision

from offramp_core.certify import verify_certificate
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError, InvalidSpecError
from offramp_core.plan import Plan, exits_off_plan
from offramp_core.precision import MOST_PRECISIONS, check_precision
from offramp_core.records import records_from_arrays
from offramp_core.tuning import MOST_TESTS, Proposed, tune
from offramp_lab.policies import Objective, policy
from offramp_lab.replay.load import load_records

IDS = SIX_IDS[:3]
REQUEST = replace(EXACT_REQUEST, ramp_ids=IDS, precisions=None)
THREE = with_precision(with_int8(recorded(2000, 3, seed=5), wrong=0.2), "pruned50", wrong=0.004, speed=0.3, seed=1)
ROOT = Path(__file__).parents[2]
NO_NAMES = ["", "INT8", "int8/", "int8\n", "a" * 17, "fp_16", "ä", 8, ["int8"]]


def test_records_of_it_are_read_in_the_order_of_their_columns(tmp_path: Path) -> None:
    arrays = wide_arrays(THREE, IDS)
    read = records_from_arrays(arrays)
    assert list(read.others) == ["int8", "pruned50"]
    np.testing.assert_array_equal(read.at("pruned50").uncertainty, THREE.at("pruned50").uncertainty)
    assert read.at("pruned50").costs.head_start == pytest.approx(0.7)
    np.savez(tmp_path / "records.npz", **arrays)
    assert list(load_records(tmp_path / "records.npz").others) == ["int8", "pruned50"]  # offramp replay


def test_records_of_it_without_its_costs_are_refused() -> None:
    arrays = wide_arrays(THREE, IDS)
    del arrays["pruned50_ramp_seconds"]
    with pytest.raises(InvalidRecordsError, match="pruned50_ramp_seconds is missing"):
        records_from_arrays(arrays)


def test_a_file_with_more_forms_than_a_bundle_may_have_is_refused() -> None:
    arrays = wide_arrays(THREE, IDS)
    names = [f"form{i}" for i in range(MOST_PRECISIONS)]
    many = {"ramp_id": np.array([f"{name}/final" for name in names]), "ramp_precision": np.array(names)}
    scores = {name: np.resize(arrays[name], (len(THREE), len(names))) for name in ("uncertainty", "prediction")}
    with pytest.raises(InvalidRecordsError, match=r"columns are of 17 precisions; a bundle has at most 16"):
        records_from_arrays({**arrays, **scores, **many})


def test_the_search_finds_it_and_its_certificate_is_verified_by_anybody() -> None:
    found = tune(THREE, REQUEST)
    assert isinstance(found, Proposed) and found.plan.precision == "pruned50"
    assert verify_certificate(found.certificate, found.plan, records=THREE) is None
    without = replace(THREE, others={"int8": THREE.at("int8")})
    assert "runs at pruned50" in str(verify_certificate(found.certificate, found.plan, records=without))


@pytest.mark.slow
def test_where_plans_may_run_at_any_precision_one_tuning_runs_as_many_tests_as_it_says() -> None:
    """However many forms a bundle has: tests take from one allowance."""
    records = recorded(2000, 3, seed=5)
    for index in range(5):
        records = with_precision(records, f"form{index}", wrong=0.0, speed=0.3 + 0.1 * index, seed=index)
    first, rest = records.take(slice(0, 400)), records.take(slice(400, None))
    right = np.arange(len(rest)) % 10 > 0  # which only the newer records know
    worse = {
        name: replace(other, final_agrees=right, agrees=other.agrees & right[:, None])
        for name, other in rest.others.items()
    }
    found = tune(_joined(first, replace(rest, others=worse)), REQUEST)
    assert found.tests_run == MOST_TESTS


def test_a_plan_of_it_goes_through_its_json_and_is_never_exits_off() -> None:
    plan = replace(exits_off_plan(backbone_digest="sha256:b", ramp_set_digest="sha256:r"), precision="pruned50")
    assert Plan.from_mapping(plan.to_mapping()) == plan
    assert not plan.exits_off


def test_a_plan_of_before_has_the_name_that_it_had() -> None:
    """The hash of a plan at int8 as an earlier version wrote it."""
    content = {
        "backboneDigest": "sha256:b",
        "rampSetDigest": "sha256:r",
        "ramps": [{"id": "r00-grid", "threshold": "0.25"}],
    }
    old = {p: Plan.from_mapping({**content, "precision": p, "execution": "Auto"}).name("s") for p in ("fp32", "int8")}
    assert old == {"fp32": "s-4515698a4c", "int8": "s-0577d4553d"}
    assert Plan.from_mapping(content).name("s") == old["fp32"]


@pytest.mark.slow
def test_a_service_promotes_a_plan_of_it_and_exact_takes_it_back() -> None:
    fleet = Fleet(with_precision(pool(4000, seed=1), "pruned50", wrong=0.004, speed=0.5))
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    assert fleet.stable.precision == "pruned50"
    assert fleet.published.stable.plan["precision"] == "pruned50"  # what workers are told
    assert "certified at pruned50" in fleet.events[0].message
    fleet.edit(ramps={"precision": "Exact"})
    fleet.step()
    assert fleet.stable.exits_off


def test_it_can_be_pinned() -> None:
    pin = {"ramps": [], "precision": "pruned50"}
    assert parse_spec(_spec(pin)).pin.precision == "pruned50"  # type: ignore[union-attr]
    with pytest.raises(InvalidSpecError, match="Exact allows fp32 alone"):
        parse_spec(_spec(pin, precision="Exact"))


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_what_is_no_name_is_refused_at_every_door(name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="is no name"):
        check_precision(name)
    with pytest.raises(InvalidArgumentError, match="is no name"):
        Plan.from_mapping({"backboneDigest": "b", "rampSetDigest": "r", "precision": name})
    with pytest.raises(InvalidSpecError, match=r"spec\.ramps\.pin\.precision.*is no name"):
        parse_spec(_spec({"ramps": [{"id": "r", "threshold": "0.1"}], "precision": name}))


def test_policies_replay_it_and_exact_ones_leave_it_out() -> None:
    older, newer = THREE.take(slice(0, 1000)), THREE.take(slice(1000, None))
    assert policy("lower-precision")(older, newer, Objective(0.02)).precision == "pruned50"
    exact = policy("exact")(older, newer, Objective(0.02, precisions=("fp32",)))
    assert exact.precision == "fp32"


def test_only_who_makes_a_form_names_one() -> None:
    """Besides the name of the reference, which stands once."""
    files = [
        path for package in ("core", "operator", "cli", "lab", "worker") for path in (ROOT / package).rglob("*.py")
    ]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    named = {
        path
        for path, text in texts.items()
        if '"fp32"' in text or '"int8"' in text  # parsing all of them would take seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in ("fp32", "int8")
    }
    assert {path for path in named if "/prepare/" not in path} == {"core/offramp_core/precision.py"}


def _spec(pin: dict[str, Any], **ramps: Any) -> dict[str, Any]:
    return {**MANIFEST, "ramps": {"mode": "Pinned", "pin": pin, **ramps}}


def _joined(older: Any, newer: Any) -> Any:
    """Records one after the other, in every chain."""
    both = {name: _joined(older.others[name], newer.others[name]) for name in older.others}
    fields = ("uncertainty", "agrees", "final_agrees", "time", "final_uncertainty")
    own = {name: (getattr(older, name), getattr(newer, name)) for name in fields}
    return replace(
        older, others=both, **{name: None if a is None else np.concatenate([a, b]) for name, (a, b) in own.items()}
    )
