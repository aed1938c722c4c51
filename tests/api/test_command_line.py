"""The day-two commands on a real API server, with the rights that a user of them has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "core"), str(ROOT / "tests" / "cli")]

from states import STATES, objects, write_state  # type: ignore[import-not-found]  # noqa: E402

from offramp_cli.main import app  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

VIEWER, MANAGER, STRANGER = "vera", "mona", "stella"
OURS = ["earlyexitservices", "rampconfigs", "ramprollouts"]
SERVICES = "/apis/earlyexit.dev/v1alpha1/namespaces/default/earlyexitservices"
RULES = {
    VIEWER: [{"apiGroups": ["earlyexit.dev"], "resources": OURS, "verbs": ["get", "list"]}],
    MANAGER: [
        {"apiGroups": ["earlyexit.dev"], "resources": OURS, "verbs": ["get", "list"]},
        {"apiGroups": ["earlyexit.dev"], "resources": ["earlyexitservices", "ramprollouts"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ],
}
Offramp = Callable[..., Result]
Place = Callable[[str], None]


@pytest.fixture(scope="module")
def users(api: Any, eventually: Any) -> Any:
    """The API server with two roles: one that looks, one that decides."""
    rbac = "rbac.authorization.k8s.io/v1"
    for user, rules in RULES.items():
        role = {"apiVersion": rbac, "kind": "Role", "metadata": {"name": user, "namespace": "default"}, "rules": rules}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
        binding = {
            "apiVersion": rbac,
            "kind": "RoleBinding",
            "metadata": role["metadata"],
            "roleRef": reference,
            "subjects": [subject],
        }
        for manifest in (role, binding):
            answer = api.create(manifest, keep=True)
            assert answer.status_code == 201, answer.text
    for user in RULES:  # the authorizer learns of roles and bindings by watching them, a moment after they are made
        eventually(
            lambda user=user: api.request("GET", SERVICES, user=user).status_code == 200, what="the roles in force"
        )
    return api


@pytest.fixture
def place(users: Any, clean: Any) -> Place:
    """Puts a service in a state of that name on the API server, as the operator would have."""

    def put(state: str) -> None:
        service, *children = objects(STATES[state]())
        uid = _put(users, service)
        for child in children:
            owner = {
                "apiVersion": service["apiVersion"],
                "kind": "EarlyExitService",
                "name": "sim",
                "uid": uid,
                "controller": True,
            }
            child["metadata"] |= {"ownerReferences": [owner], "labels": {"earlyexit.dev/service": "sim"}}
            _put(users, child)

    return put


def _put(api: Any, manifest: dict[str, Any]) -> str:
    wanted = {
        key: manifest["metadata"][key]
        for key in ("name", "namespace", "ownerReferences", "labels")
        if key in manifest["metadata"]
    }
    created = api.create({**manifest, "metadata": wanted}, keep=True)
    assert created.status_code == 201, created.text
    status = {**manifest, "metadata": {"name": wanted["name"], "namespace": "default"}}
    status.pop("spec")
    answer = api.apply(status, manager="offramp-operator", subresource="status")
    assert answer.status_code == 200, answer.text
    return str(created.json()["metadata"]["uid"])


@pytest.fixture
def offramp(users: Any) -> Iterator[Offramp]:
    """Runs a command against the API server as a user."""

    def run(user: str, *arguments: str) -> Result:
        flags = ["--kubeconfig", str(users.kubeconfig), "--as", user]
        return CliRunner().invoke(app, [*arguments, *flags], catch_exceptions=False)

    yield run


def spec_of(api: Any, rollout: str = "sim-1") -> dict[str, Any]:
    path = f"/apis/earlyexit.dev/v1alpha1/namespaces/default/ramprollouts/{rollout}"
    return dict(api.request("GET", path).json()["spec"])


def test_a_viewer_sees_the_tree_though_not_the_pods(place: Place, offramp: Offramp, users: Any) -> None:
    place("progressing")
    shown = offramp(VIEWER, "get", "sim")
    assert shown.exit_code == 0, shown.stderr
    assert "└─ workers" in shown.stdout and "you may not list pods" in shown.stdout
    assert "step 1/2 at 20%" in shown.stdout
    assert "you may not list pods" not in offramp(MANAGER, "get", "sim").stdout
    stored = json.loads(offramp(VIEWER, "get", "-o", "json").stdout)["services"][0]
    assert stored["service"]["metadata"]["name"] == "sim" and len(stored["rollouts"]) == 1


def test_why_history_diff_top_and_export_read_what_the_operator_wrote(place: Place, offramp: Offramp) -> None:
    place("promoted_once")
    assert "certified for 2%" in offramp(VIEWER, "why").stdout
    assert "Succeeded" in offramp(VIEWER, "history", "sim").stdout
    assert offramp(VIEWER, "top").stdout.splitlines()[1].startswith("sim")
    patch = yaml.safe_load(offramp(VIEWER, "export", "sim").stdout)
    assert patch["spec"]["ramps"]["mode"] == "Pinned"
    assert offramp(VIEWER, "diff", "sim", "sim").exit_code == 0


def test_an_exported_pin_is_taken_by_the_api_server(place: Place, offramp: Offramp, users: Any, manifests: Any) -> None:
    place("promoted_once")
    patch = yaml.safe_load(offramp(VIEWER, "export", "sim").stdout)
    assert users.merge(manifests.service("sim"), patch).status_code == 200


def test_a_manager_promotes_what_waits_may_take_it_back_and_then_nothing_changes_it(
    place: Place, offramp: Offramp, users: Any
) -> None:
    place("awaiting")
    denied = offramp(VIEWER, "promote", "sim")
    assert denied.exit_code == 3 and "you may not patch ramprollouts in namespace default" in denied.stderr
    assert "decision" not in spec_of(users)
    done = offramp(MANAGER, "promote", "sim")
    assert done.exit_code == 0 and spec_of(users)["decision"] == "Promote"
    taken_back = offramp(MANAGER, "abort", "sim")
    assert taken_back.exit_code == 0 and spec_of(users)["decision"] == "Abort"
    late = offramp(MANAGER, "promote", "sim")
    assert late.exit_code == 1 and "set to abort, and that is final" in late.stderr


def test_a_manager_pauses_resumes_and_aborts(place: Place, offramp: Offramp, users: Any) -> None:
    place("progressing")
    assert offramp(MANAGER, "pause", "sim").exit_code == 0 and spec_of(users)["paused"] is True
    assert offramp(MANAGER, "resume", "sim").exit_code == 0 and spec_of(users)["paused"] is False
    assert offramp(MANAGER, "abort", "sim").exit_code == 0 and spec_of(users)["decision"] == "Abort"


def test_a_finished_rollout_and_a_plan_that_has_not_earned_it_are_refused(place: Place, offramp: Offramp) -> None:
    place("rolled_back")
    done = offramp(MANAGER, "promote", "sim")
    assert done.exit_code == 1 and "sim-2 is finished (RolledBack, AccuracyRejected)" in done.stderr


def test_an_uncertified_pin_is_not_promoted_before_it_earned_acceptance(
    place: Place, offramp: Offramp, users: Any
) -> None:
    place("pin_in_canary")
    done = offramp(MANAGER, "promote", "sim")
    assert done.exit_code == 1 and "has not earned acceptance yet" in done.stderr
    assert "decision" not in spec_of(users)


def test_the_api_server_itself_refuses_a_decision_that_comes_too_late(
    place: Place, offramp: Offramp, users: Any
) -> None:
    from offramp_cli.source.cluster import ClusterSource
    from offramp_cli.source.source import Choice, RefusedError

    place("awaiting")
    source = ClusterSource(Choice(kubeconfig=users.kubeconfig, user=MANAGER))
    family = source.families("sim")[0]
    assert family.newest is not None
    over = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "RampRollout",
        "metadata": {"name": "sim-1", "namespace": "default"},
        "status": {"phase": "RolledBack"},
    }
    assert users.merge(over, {"status": {"phase": "RolledBack"}}, subresource="status").status_code == 200
    with pytest.raises(RefusedError, match="this rollout is finished"):
        source.change_rollout(family, family.newest, {"decision": "Promote"})


def test_approving_decides_on_the_rollout_and_tuning_annotates_the_service(
    place: Place, offramp: Offramp, users: Any, manifests: Any
) -> None:
    place("recommended")
    before = users.get(manifests.service("sim"))
    done = offramp(MANAGER, "approve", "sim", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["changed"] == {"decision": "Promote"}
    asked = offramp(MANAGER, "tune", "sim", "--now", "--json")
    assert asked.exit_code == 0, asked.stderr
    after = users.get(manifests.service("sim"))
    assert after["metadata"]["annotations"]["earlyexit.dev/request"] == json.loads(asked.stdout)["request"]
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], before["metadata"]["generation"])
    denied = offramp(VIEWER, "tune", "sim", "--now")
    assert denied.exit_code == 3 and "you may not patch earlyexitservices" in denied.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["get", "nope"], "no EarlyExitService 'nope' in namespace default; there is sim"),
        (["why", "nope"], "no EarlyExitService 'nope'"),
        (["promote", "sim", "--rollout", "sim-9"], "sim has no rollout 'sim-9'; there is sim-1"),
        (["get", "--context", "elsewhere"], "elsewhere"),
    ],
)
def test_unknown_names_say_what_there_is(place: Place, offramp: Offramp, arguments: list[str], said: str) -> None:
    place("progressing")
    done = offramp(MANAGER, *arguments)
    assert done.exit_code == 3 and said in done.stderr and done.stderr.count("\n") == 1


def test_who_may_not_even_look_is_told_what_to_ask_for(place: Place, offramp: Offramp) -> None:
    place("disabled")
    done = offramp(STRANGER, "get")
    assert (
        done.exit_code == 3
        and "ask its administrator for the verb list on earlyexitservices.earlyexit.dev" in done.stderr
    )
    assert "you may not list earlyexitservices in all namespaces" in offramp(MANAGER, "get", "-A").stderr


def test_an_api_server_that_does_not_answer_is_told_in_one_line(users: Any, tmp_path: Path) -> None:
    config = yaml.safe_load(users.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["get", "--kubeconfig", str(tmp_path / "config")])
    assert done.exit_code == 3 and "context test does not answer" in done.stderr and done.stderr.count("\n") == 1


def test_kubectl_finds_the_plugin_and_it_reads_the_cluster_even_beside_a_state_folder(
    place: Place, users: Any, program: Callable[[str], str], tmp_path: Path
) -> None:
    place("progressing")
    plugin = tmp_path / "kubectl-offramp"
    plugin.write_text(f"#!{sys.executable}\nfrom offramp_cli.main import main\nmain()\n")
    plugin.chmod(0o755)
    write_state(STATES["disabled"](), tmp_path / ".offramp" / "other")
    source = ":".join(str(ROOT / folder) for folder in ("core", "operator", "worker", "cli"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": source, "KUBECONFIG": str(users.kubeconfig)}
    done = subprocess.run(
        [program("kubectl"), "offramp", "get", "sim"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "RampRollout" in done.stdout and "step 1/2 at 20%" in done.stdout
