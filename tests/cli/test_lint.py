"""``offramp lint``: mistakes with their lines, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from offramp_cli.daytwo.lint import lint_text
from offramp_cli.main import app
from offramp_cli.manifest import load_intent
from offramp_core.errors import InvalidSpecError

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
apiVersion: earlyexit.dev/v1alpha1
kind: EarlyExitService
metadata:
  name: digits
spec:
  model: {uri: "oci://offramp/digits:1"}
  objective:
    latency: {percentile: 95, threshold: 40ms}
    accuracy:
      maxDisagreement: "0.01"
  rollout:
    steps:
      - weight: 5
      - weight: 50
  replicas: 2
"""


def one(text: str) -> tuple[int, str, str]:
    """Line, field and message of the only mistake."""
    mistakes, _, _ = lint_text(text, "f.yaml")
    assert len(mistakes) == 1, mistakes
    return mistakes[0].line, mistakes[0].field, mistakes[0].message


def test_a_good_manifest_has_no_mistake() -> None:
    assert lint_text(GOOD, "f.yaml") == ([], 1, 0)


@pytest.mark.parametrize(
    ("before", "after", "line", "field", "message"),
    [
        (
            '"0.01"',
            "0.01",
            10,
            "spec.objective.accuracy.maxDisagreement",
            'must be a string; got 0.01; quote it: "0.01"',
        ),
        (
            '"0.01"',
            '"0.9"',
            10,
            "spec.objective.accuracy.maxDisagreement",
            "maxDisagreement must be a quoted decimal above 0",
        ),
        ("40ms", "soon", 8, "spec.objective.latency.threshold", "duration above 0 in us, ms and s"),
        ("weight: 50", "weight: 500", 14, "spec.rollout.steps[1].weight", "must be at most 100; got 500"),
        ("weight: 50", "weight: 5", 12, "spec.rollout.steps", "weights of rollout.steps must rise from step to step"),
        ("replicas: 2", "replica: 2", 15, "spec.replica", "unknown field; known are "),
        ("replicas: 2", "replicas: two", 15, "spec.replicas", 'must be an integer; got "two"'),
        ("replicas: 2", "execution: Fast", 15, "spec.execution", "must be one of Auto, ResultsOnly, ComputeSaving"),
        ("replicas: 2", "ramps: {mode: Pinned}", 15, "spec.ramps", "ramps.mode Pinned needs ramps.pin"),
        ("replicas: 2", "worker: {hostPath: /}", 15, "spec.worker.hostPath", "unknown field"),
        ("name: digits", "name: Digits", 4, "metadata.name", "metadata.name must start with a letter"),
        ("EarlyExitService", "EarlyExitServices", 2, "kind", "must be one of EarlyExitService"),
        ("v1alpha1", "v1", 1, "apiVersion", "must be earlyexit.dev/v1alpha1"),
        ('  model: {uri: "oci://offramp/digits:1"}\n', "", 5, "spec.model", "is missing and required"),
    ],
)
def test_a_mistake_is_told_with_its_line_its_field_and_what_to_do(
    before: str, after: str, line: int, field: str, message: str
) -> None:
    assert before in GOOD
    found = one(GOOD.replace(before, after))
    assert found[:2] == (line, field) and message in found[2], found


def test_several_mistakes_are_told_at_once() -> None:
    text = (
        GOOD.replace('"0.01"', "0.01")
        .replace("replicas: 2", "replicas: -1")
        .replace("percentile: 95", "percentile: 10")
    )
    fields = {m.field for m in lint_text(text, "f.yaml")[0]}
    assert {"spec.objective.accuracy.maxDisagreement", "spec.replicas", "spec.objective.latency.percentile"} <= fields


def test_documents_of_other_kinds_are_counted_and_lists_are_opened() -> None:
    other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n"
    items = "apiVersion: v1\nkind: List\nitems:\n- " + GOOD.replace("\n", "\n  ").replace("replicas: 2", "replicas: x")
    mistakes, ours, others = lint_text(f"{GOOD}---\n{other}---\n{items}", "f.yaml")
    assert (ours, others) == (2, 1)
    assert [(m.field, m.line) for m in mistakes] == [("spec.replicas", 38)]


def test_a_ramp_config_and_a_rollout_are_checked_as_well() -> None:
    config = (
        "apiVersion: earlyexit.dev/v1alpha1\nkind: RampConfig\nmetadata: {name: a}\nspec: {backboneDigest: x, "
        "rampSetDigest: y, precision: fp32, execution: Auto, ramps: [{id: r, threshold: '2'}]}\n"
    )
    told = {m.field: m.message for m in lint_text(config, "f.yaml")[0]}
    assert list(told) == ["metadata.name", "spec.backboneDigest", "spec.rampSetDigest", "spec.ramps[0].threshold"]
    assert told["spec.ramps[0].threshold"].startswith("threshold must be the shortest decimal from 0 to 1")
    rollout = (
        "apiVersion: earlyexit.dev/v1alpha1\nkind: RampRollout\nmetadata: {name: a}\nspec: {serviceName: s, "
        "from: a, to: b, generation: 1, cause: Tuned, decision: Maybe}\n"
    )
    assert one(rollout) == (4, "spec.decision", 'must be one of Promote, Abort; got "Maybe"')


@pytest.mark.parametrize("replicas", ["2.0", "null", "~"])
def test_a_whole_number_with_a_point_and_a_field_that_is_null_are_taken_as_the_api_server_takes_them(
    replicas: str,
) -> None:
    assert lint_text(GOOD.replace("replicas: 2", f"replicas: {replicas}"), "f.yaml")[0] == []


@pytest.mark.parametrize("text", ["1e308", "12", "0x10", ".5", "1_0"])
def test_a_number_is_no_text_however_it_is_written(text: str) -> None:
    found = one(GOOD.replace("replicas: 2", f"worker: {{image: {text}}}"))
    assert found[1] == "spec.worker.image" and "must be a string" in found[2]


@pytest.mark.parametrize("text", ["12:30:45", "2026-01-01", "1.2.3", "1e", "0o17"])
def test_what_only_looks_like_a_number_is_a_text_as_kubectl_has_it(text: str) -> None:
    assert lint_text(GOOD.replace("replicas: 2", f"worker: {{image: {text}}}"), "f.yaml")[0] == []


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(BOMB + "kind: [*j]\n", "once its aliases are written out", id="aliases of aliases"),
        pytest.param(
            "kind: EarlyExitService\nmetadata: &m {name: a, x: *m}\n",
            "stands for something around it",
            id="an alias of itself",
        ),
        pytest.param("[" * 5000, "nested more than 100 deep", id="deep beyond Python's stack"),
        pytest.param("{a: " * 150 + "1" + "}" * 150, "nested more than 100 deep", id="deep"),
        pytest.param("spec: {a: 1}\nspec: {a: 2}\n", "the key 'spec' stands twice", id="a key twice"),
        pytest.param("spec:\n  a: {b: 1, c: 2, b: 3}\n", "the key 'b' stands twice", id="a key twice within"),
        pytest.param('{true: 1, "true": 2}', "the key 'true' stands twice", id="a key twice once it is a text"),
        pytest.param("{0x1: a, 1: b}", "the key '1' stands twice", id="a key twice once it is a number"),
        pytest.param('a: !!int ""', "not what its tag says", id="a number without digits"),
        pytest.param("a: !!bool abc", "not what its tag says", id="a truth that is none"),
        pytest.param("a: !!timestamp abc", "not what its tag says", id="a day that is none"),
        pytest.param('a: "\\UFFFFFFFF"', "cannot be read", id="a character that is none"),
        pytest.param(f"%YAML 1.{'9' * 5000}\n---\na: 1\n", "cannot be read", id="a version that nobody can print"),
        pytest.param("a: !!timestamp 2026-99-99", "month", id="a day that no calendar has"),
    ],
)
def test_a_text_that_no_manifest_can_be_is_a_mistake_for_lint_and_up_alike(
    text: str, message: str, tmp_path: Path
) -> None:
    (mistake,) = lint_text(text, "f.yaml")[0]
    assert message in mistake.message
    file = tmp_path / "service.yaml"
    file.write_text(text)
    with pytest.raises(InvalidSpecError, match="not YAML"):
        load_intent(file)


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ("{name: digits, namespace: [a]}", "metadata.namespace"),
        ("{name: digits, namespace: In fra}", "metadata.namespace"),
        ("{name: [digits]}", "metadata.name"),
        ("{name: digits, 1: 2, true: 3}", "metadata.1"),
        ("{name: digits, label: {a: b}}", "metadata.label"),
        ("{name: digits, annotations: {a: 1}}", "metadata.annotations.a"),
    ],
)
def test_what_an_object_says_of_itself_is_checked_as_well(metadata: str, field: str) -> None:
    _, found, message = one(GOOD.replace("\n  name: digits", f" {metadata}"))
    assert found == field and "null" not in message


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "just text\n", "kind: [1]\n"])
def test_what_is_no_manifest_is_a_mistake_not_a_crash(text: str) -> None:
    assert lint_text(text, "f.yaml")[0]


@pytest.mark.parametrize(
    ("flags", "read"), [(["--json"], json.loads), (["-o", "json"], json.loads), (["-o", "yaml"], yaml.safe_load)]
)
def test_machines_get_the_mistakes_and_the_sums(
    tmp_path: Path, flags: list[str], read: Callable[[str], dict[str, Any]]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace('"0.01"', "0.01") + "---\n{apiVersion: v1, kind: Secret, metadata: {name: a}}\n")
    done = CliRunner().invoke(app, ["lint", *flags, str(bad)])
    told = read(done.stdout)
    assert (done.exit_code, told["checked"], told["skipped"]) == (1, 1, 1)
    field = "spec.objective.accuracy.maxDisagreement"
    (mistake,) = told["mistakes"]
    assert mistake | {"message": ""} == {
        "file": str(bad),
        "line": 10,
        "name": "digits",
        "field": field,
        "message": "",
        "warning": False,
    }
    good = CliRunner().invoke(app, ["lint", *flags, "-"], input=GOOD)
    assert (good.exit_code, read(good.stdout)) == (0, {"checked": 1, "skipped": 0, "mistakes": []})


@pytest.mark.slow
def test_files_and_stdin_are_summed_and_the_exit_code_tells(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace('"0.01"', "0.01"))
    runner = CliRunner()
    done = runner.invoke(app, ["lint", str(good), str(bad)])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0].startswith(
        f"{bad}:10: digits: spec.objective.accuracy.maxDisagreement: must be a string"
    )
    assert done.stdout.splitlines()[1] == "2 objects checked: 1 wrong"
    assert runner.invoke(app, ["lint", "-"], input=GOOD).exit_code == 0
    missing = runner.invoke(app, ["lint", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 3 and "cannot be read" in missing.stderr


def test_the_samples_of_this_repository_are_right() -> None:
    samples = [str(p) for p in (ROOT / "manifests").rglob("*.yaml")]
    done = CliRunner().invoke(app, ["lint", *samples])
    assert samples and done.exit_code == 0, done.stdout


def test_a_field_that_the_next_release_does_not_read_is_a_warning_and_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(GOOD + "  batching: {policy: Clockwork}\n")
    answer = CliRunner().invoke(app, ["lint", str(file)])
    assert answer.exit_code == 0
    assert "warning: spec.batching.policy: Clockwork was for experiments and changes nothing any more" in answer.stdout
    assert "1 object checked: no mistake" in answer.stdout
