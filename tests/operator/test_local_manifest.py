"""Reading the user's file: one valid service, or one sentence that names the field."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from offramp_cli.main import app
from offramp_cli.manifest import load_intent, notes
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.local.template import WorkerTemplate, render

GOOD: dict[str, Any] = {
    "apiVersion": "earlyexit.dev/v1alpha1",
    "kind": "EarlyExitService",
    "metadata": {"name": "digits"},
    "spec": {
        "model": {"uri": "file://bundles/digits"},
        "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with the field at a dotted path replaced (None: removed)."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = path.split(".")
    target = copy
    for parent in parents:
        target = target.setdefault(parent, {})
    if value is None:
        del target[last]
    else:
        target[last] = value
    return copy


def write(folder: Path, *documents: Any) -> Path:
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump_all(documents) if documents else "")
    return path


def test_a_good_file_is_an_intent_with_its_paths_resolved(tmp_path: Path) -> None:
    intent = load_intent(write(tmp_path, GOOD))
    assert (intent.namespace, intent.name) == ("default", "digits")
    assert intent.spec["model"]["uri"] == f"file://{tmp_path}/bundles/digits"
    assert intent.spec["objective"] == GOOD["spec"]["objective"]
    assert notes(intent) == ()


def test_loading_twice_gives_the_same_intent_so_that_an_untouched_file_is_no_change(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_intent(path) == load_intent(path)
    assert load_intent(write(tmp_path, {**GOOD, "metadata": {"name": "digits", "labels": {"a": "b"}}})) == load_intent(
        path
    )


def test_what_only_a_cluster_can_do_is_noted(tmp_path: Path) -> None:
    worker = {"nodeSelector": {"a": "b"}, "image": "x", "env": [{"name": "A", "value": "1"}]}
    (note,) = notes(load_intent(write(tmp_path, changed("spec.worker", worker))))
    assert "spec.worker.image, spec.worker.nodeSelector" in note


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("apiVersion", "v1", "apiVersion"),
        ("kind", "Deployment", "kind"),
        ("metadata", None, "metadata"),
        ("metadata.name", "Digits", "metadata.name"),
        ("metadata.namespace", 5, "metadata.namespace"),
        ("extra", 1, "extra"),
        ("spec", None, "spec"),
        ("spec.model.uri", "oci://models/digits:v1", "spec.model.uri"),
        ("spec.model.uri", "http://x", "spec.model.uri"),
        ("spec.model.uri", "pvc://models/digits", "spec.model.uri"),
        ("spec.objective.accuracy.maxDisagreement", 0.02, "spec.objective.accuracy.maxDisagreement"),
        ("spec.objective.latency.threshold", "fast", "spec.objective.latency.threshold"),
        ("spec.replica", 2, "spec.replica"),
        ("spec.worker", {"env": [{"name": "OFFRAMP_UID", "value": "x"}]}, r"spec.worker.env\[0\].name"),
        ("spec.worker", {"hostPath": "/"}, "spec.worker.hostPath"),
        ("spec.protocols", ["HTTP", "GRPC"], "spec.protocols"),
        ("spec.autoscaling", {"maxReplicas": 3, "targetInFlight": 8}, "spec.autoscaling"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, path: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidSpecError, match=f"^{field}: "):
        load_intent(write(tmp_path, changed(path, value)))


@pytest.mark.parametrize(
    ("field", "value", "variable"), [("feedback", {"maxAnswers": 100}, ("OFFRAMP_FEEDBACK_ROWS", "100"))]
)
def test_an_option_makes_another_template_which_survives_its_file(
    field: str, value: Any, variable: tuple[str, str]
) -> None:
    plain = render("digits", "uid", parse_spec(GOOD["spec"]), cpus=2)
    spec = parse_spec(changed(f"spec.{field}", value)["spec"])
    other = render("digits", "uid", spec, cpus=2)
    assert other.digest != plain.digest and other.options == (variable,)
    kept = json.loads(json.dumps(asdict(other)))
    assert msgspec.convert(kept, WorkerTemplate) == other
    del kept["options"]  # as an older Offramp wrote it
    assert msgspec.convert(kept, WorkerTemplate) == plain


@pytest.mark.parametrize(
    "text",
    ["", "---\n---\n", "just text", "a: [", "a: 1\n---\nb: 2\n", "\x00"],
    ids=["empty", "blank", "text", "torn", "two", "nul"],
)
def test_what_is_not_one_document_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["up", str(path), "--state", str(tmp_path / "state")])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "service.yaml" in result.stderr


def test_up_refuses_a_wrong_field_with_exit_code_2_and_leaves_no_state(tmp_path: Path) -> None:
    path = write(tmp_path, changed("spec.model.uri", "oci://models/digits:v1"))
    result = CliRunner().invoke(app, ["up", str(path), "--state", str(tmp_path / "state")])
    assert result.exit_code == 2
    assert "spec.model.uri" in result.stderr and "Kubernetes" in result.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--core", "http://core:8080", "--uplink", "0"], "OFFRAMP_UPLINK is '0'; it must be a rate above 0"),
        (["--core", "core"], "OFFRAMP_CORE is 'core'; it must be the core's http://HOST:PORT"),
        (["--offline", "Answer"], "OFFRAMP_OFFLINE is set and OFFRAMP_CORE is not"),
    ],
)
def test_up_refuses_an_edge_that_cannot_work_before_a_worker_would(
    tmp_path: Path, options: list[str], field: str
) -> None:
    path = write(tmp_path, GOOD)
    result = CliRunner().invoke(app, ["up", str(path), "--state", str(tmp_path / "state"), *options])
    assert result.exit_code == 2
    assert field in result.stderr
    assert not (tmp_path / "state").exists()
