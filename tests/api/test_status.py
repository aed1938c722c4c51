"""Who owns what: the operator writes status and nothing else, and nothing it writes is lost."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from bench.fleet.weight import ETCD_BYTES, managed, rollout_status, schema_of, service_status, size

from offramp_core.control.objects import ConfigStatus, RolloutStatus, ServiceStatus
from offramp_operator.shell.manifests import status_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

OPERATOR = "offramp-operator"
PLURALS = {"service": "earlyexitservices", "rollout": "ramprollouts"}
UNSEEN = {"observedGeneration": 0}  # by default, so that kstatus waits for the operator
CONDITION = {
    "type": "Ready",
    "status": "True",
    "reason": "Serving",
    "message": "2 of 2 workers serve digits-0123456789",
    "observedGeneration": 1,
    "lastTransitionTime": "2026-11-21T12:00:00Z",
}
STATUS = {
    "observedGeneration": 1,
    "phase": "Serving",
    "message": "exits are off until a plan is certified",
    "stableConfig": "digits-0123456789",
    "workers": {"desired": 2, "ready": 2, "acked": 2, "summary": "2/2"},
    "observed": {"p95": "31ms", "agreement": "99.4%", "savings": "38%", "samples": 1200},
    "rollout": {"name": "digits-1", "summary": "Step 2/3 25%"},
    "conditions": [CONDITION],
}


def _status(manifest: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    return {key: manifest[key] for key in ("apiVersion", "kind", "metadata")} | {"status": status}


def test_a_user_cannot_write_status_and_the_operator_cannot_write_spec_through_it(clean: Any, manifests: Any) -> None:
    service = manifests.service()
    assert clean.create({**service, "status": STATUS}, keep=True).status_code == 201
    assert clean.get(service)["status"] == UNSEEN
    applied = _status(service, STATUS) | {"spec": {**service["spec"], "replicas": 7}}
    assert clean.apply(applied, manager=OPERATOR, subresource="status").status_code == 200
    stored = clean.get(service)
    assert "replicas" not in stored["spec"]
    assert stored["status"]["conditions"] == [CONDITION]
    assert stored["metadata"]["generation"] == 1, "status must not count as a new generation"


def test_the_users_diff_is_empty_after_the_operator_wrote_status(clean: Any, manifests: Any) -> None:
    text = yaml.safe_dump(manifests.service())
    applied = clean.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    assert applied.returncode == 0, applied.stderr
    service = manifests.service()
    assert clean.get(service)["status"] == UNSEEN
    diff = clean.kubectl("diff", "--server-side", "-f", "-", stdin=text)
    assert (diff.returncode, diff.stdout) == (0, ""), diff.stderr
    for phase in ("Pending", "Serving", "Progressing"):
        assert (
            clean.apply(
                _status(service, {**STATUS, "phase": phase}), manager=OPERATOR, subresource="status"
            ).status_code
            == 200
        )
        diff = clean.kubectl("diff", "--server-side", "-f", "-", stdin=text)
        assert (diff.returncode, diff.stdout) == (0, ""), diff.stderr
    managed = {entry["manager"]: entry for entry in clean.get(service)["metadata"]["managedFields"]}
    assert set(managed[OPERATOR]["fieldsV1"]) == {"f:status"}
    assert managed[OPERATOR]["subresource"] == "status"
    assert "f:status" not in managed["kubectl"]["fieldsV1"]


def test_the_users_diff_shows_a_real_change(clean: Any, manifests: Any) -> None:
    clean.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(manifests.service()))
    diff = clean.kubectl("diff", "--server-side", "-f", "-", stdin=yaml.safe_dump(manifests.service(replicas=3)))
    assert diff.returncode == 1
    assert "+  replicas: 3" in diff.stdout


def test_applying_the_same_status_again_writes_nothing(clean: Any, manifests: Any) -> None:
    rollout = manifests.rollout()
    clean.create(rollout, keep=True)
    # 1.0 and 0.0 are what becomes of whole numbers in Python's floats.
    gate = {"name": "accuracy", "state": "Clear", "n": 10, "bound": 1.0, "logEValue": 0.0, "logLimit": 4.6}
    status = _status(rollout, {"phase": "Progressing", "gates": [gate], "slowSeconds": {"1": 2.0}})
    first = clean.apply(status, manager=OPERATOR, subresource="status").json()
    second = clean.apply(status, manager=OPERATOR, subresource="status").json()
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


def test_a_write_on_a_stale_version_conflicts(clean: Any, manifests: Any) -> None:
    rollout = manifests.rollout()
    version = clean.create(rollout, keep=True).json()["metadata"]["resourceVersion"]
    status = _status(rollout, {"phase": "Progressing"})
    status["metadata"] = {**status["metadata"], "resourceVersion": version}
    assert clean.apply(status, manager=OPERATOR, subresource="status").status_code == 200
    status["status"] = {"phase": "Promoting"}
    assert clean.apply(status, manager=OPERATOR, subresource="status").status_code == 409


def filled(kind: Any, name: str = "") -> Any:
    """A value of ``kind`` in which no field holds its default, so that a field the schema forgot shows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return filled(next(a for a in arguments if a is not type(None)), name)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, StrEnum)):
        return (arguments or tuple(kind))[-1]
    if origin in (tuple, dict):
        return (filled(arguments[0]),) if origin is tuple else {"a": filled(arguments[1])}
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{f.name: filled(hints[f.name], f.name) for f in dataclasses.fields(kind)})  # type: ignore[operator]
    if kind is float:
        return 1_795_262_400.5 if name.endswith("_at") else 0.25
    plain: dict[Any, Any] = {str: "Text", int: 1, bool: True, Any: {"budget": 0.02, "n": 1500}}
    return plain[kind]


@pytest.mark.parametrize(
    ("builder", "kind"), [("service", ServiceStatus), ("config", ConfigStatus), ("rollout", RolloutStatus)]
)
def test_every_field_that_the_control_plane_writes_is_kept(clean: Any, manifests: Any, builder: str, kind: Any) -> None:
    manifest = getattr(manifests, builder)()
    clean.create(manifest, keep=True)
    written = status_json(filled(kind))
    answer = clean.apply(_status(manifest, written), manager=OPERATOR, subresource="status")
    assert answer.status_code == 200, answer.json()["message"]
    assert clean.get(manifest)["status"] == written


@pytest.mark.parametrize(
    ("builder", "written"),
    [
        ("service", partial(service_status, 300, 10)),
        ("service", partial(service_status, 300, 32)),
        ("service", partial(service_status, 1000, 0)),
        ("rollout", partial(rollout_status, 1000)),
    ],
    ids=[
        "service-300-workers-10-classes",
        "service-300-workers-32-classes",
        "service-1000-workers",
        "rollout-1000-workers",
    ],
)
def test_the_status_of_so_many_workers_fits(
    clean: Any, manifests: Any, builder: str, written: Callable[[], dict[str, Any]]
) -> None:
    """The table of docs/scale.md, and that it reckons what the API server keeps beside a status as the API server
    does."""
    manifest, status = getattr(manifests, builder)(), written()
    clean.create(manifest, keep=True)
    answer = clean.apply(_status(manifest, status), manager=OPERATOR, subresource="status")
    assert answer.status_code == 200, answer.json()["message"]
    stored = clean.get(manifest)
    assert stored["status"].items() >= status.items()
    beside = size(managed(status, schema_of(PLURALS[builder])))
    assert size(stored["metadata"]["managedFields"]) == pytest.approx(beside, abs=30_000)
    assert size(stored) < 0.75 * ETCD_BYTES


def test_a_rollout_that_waits_and_a_config_that_is_new_show_it_in_their_columns(clean: Any, manifests: Any) -> None:
    for manifest, status in ((manifests.rollout(), RolloutStatus()), (manifests.config(), ConfigStatus())):
        clean.create(manifest, keep=True)
        clean.apply(_status(manifest, status_json(status)), manager=OPERATOR, subresource="status")
    assert "Pending" in clean.kubectl("get", "rro", "digits-1").stdout
    assert "Proposed" in clean.kubectl("get", "rcfg", "digits-0123456789").stdout


@pytest.mark.parametrize(("builder", "kind"), [("config", ConfigStatus), ("rollout", RolloutStatus)])
def test_what_the_control_plane_leaves_out_reads_as_its_default(
    clean: Any, manifests: Any, builder: str, kind: Any
) -> None:
    manifest = getattr(manifests, builder)()
    clean.create(manifest, keep=True)
    clean.apply(_status(manifest, {"message": "just made"}), manager=OPERATOR, subresource="status")
    for name, value in clean.get(manifest)["status"].items():
        assert name == "message" or getattr(kind(), name) == value


@pytest.mark.parametrize(
    ("resource", "headings"),
    [
        ("ees", "NAME READY CONFIG ROLLOUT WORKERS P95 SLO AGREE SAVED AGE"),
        ("rcfg", "NAME SERVICE SOURCE STATE RAMPS PRECISION SAVING AGE"),
        ("rro", "NAME SERVICE FROM TO PHASE WEIGHT VERDICT AGE"),
    ],
)
def test_kubectl_get_prints_the_columns_people_need(clean: Any, manifests: Any, resource: str, headings: str) -> None:
    for manifest in (manifests.service(), manifests.config(), manifests.rollout()):
        clean.create(manifest, keep=True)
    clean.apply(_status(manifests.service(), STATUS), manager=OPERATOR, subresource="status")
    printed = clean.kubectl("get", resource)
    assert printed.stdout.splitlines()[0].split() == headings.split(), printed.stderr
    assert clean.kubectl("get", "earlyexit", "-o", "name").stdout.count("earlyexit.dev/") == 3


def test_a_services_row_tells_its_state(clean: Any, manifests: Any) -> None:
    clean.create(manifests.service(), keep=True)
    clean.apply(_status(manifests.service(), STATUS), manager=OPERATOR, subresource="status")
    row = clean.kubectl("get", "ees", "digits", "--no-headers").stdout
    for part in ("True", "digits-0123456789", "Step 2/3 25%", "2/2", "31ms", "40ms", "99.4%", "38%"):
        assert part in row
