"""The day-two commands on a state folder: what they print, what they write, how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from offramp_cli.main import app
from offramp_core.control.spec import parse_spec

Stored = Callable[..., Path]
COMMANDS = (
    "get",
    "status",
    "why",
    "history",
    "diff",
    "top",
    "promote",
    "abort",
    "pause",
    "resume",
    "approve",
    "tune",
    "export",
    "pin",
    "lint",
)


def offramp(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def stored_object(folder: Path, kind: str, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / "objects" / kind / f"{name}.json").read_text()))


@pytest.mark.slow
def test_every_command_has_an_example_in_its_help() -> None:
    for command in COMMANDS:
        shown = offramp(command, "--help").stdout
        assert "Example" in shown and f"offramp {command}" in shown, command


class TestReading:
    def test_get_takes_the_only_service_or_the_named_one(self, stored: Stored) -> None:
        folder = stored("progressing")
        for name in ([], ["sim"]):
            shown = offramp("get", *name, "--state", folder)
            assert shown.exit_code == 0 and "sim-1" in shown.stdout and "process" in shown.stdout

    @pytest.mark.parametrize(
        ("flags", "read"), [(["-o", "json"], json.loads), (["--json"], json.loads), (["-o", "yaml"], yaml.safe_load)]
    )
    def test_machines_get_the_stored_objects(
        self, stored: Stored, flags: list[str], read: Callable[[str], Any]
    ) -> None:
        folder = stored("progressing")
        found = read(offramp("get", *flags, "--state", folder).stdout)["services"][0]
        assert found["service"] == stored_object(folder, "EarlyExitService", "sim")
        assert found["rollouts"] == [stored_object(folder, "RampRollout", "sim-1")]
        assert [w["name"] for w in found["workers"]] == ["w0", "w1"]

    @pytest.mark.slow
    def test_nothing_is_coloured_or_wrapped_in_a_pipe(self, stored: Stored) -> None:
        shown = offramp("why", "--state", stored("rolled_back")).stdout
        assert "\x1b" not in shown and max(map(len, shown.splitlines())) > 120

    def test_a_folder_of_state_folders_has_all_their_services(self, stored: Stored, tmp_path: Path) -> None:
        stored("disabled")
        assert offramp("top", "--state", tmp_path).stdout.splitlines()[1].split()[:2] == ["sim", "Healthy"]

    def test_what_a_stopped_shell_left_is_shown_as_that(self, stored: Stored) -> None:
        folder = stored("promoted_once", running=False)
        assert "does not run on this folder" in offramp("get", "--state", folder).stdout
        assert offramp("status", "--state", folder).exit_code == 1

    def test_why_of_one_rollout_among_several(self, stored: Stored) -> None:
        folder = stored("rolled_back")
        assert "Rollout sim-2" in offramp("why", "sim", "--state", folder).stdout
        assert "Rollout sim-1" in offramp("why", "sim", "sim-1", "--state", folder).stdout

    def test_diff_of_services_and_configs_ends_as_diff_does(self, stored: Stored) -> None:
        folder = stored("progressing")
        found = json.loads(offramp("diff", "sim", "--json", "--state", folder).stdout)
        assert offramp("diff", "sim", "--state", folder).exit_code == 1
        assert offramp("diff", found["a"], found["a"], "--state", folder).exit_code == 0
        other = offramp("diff", found["b"], found["a"], "--state", folder)
        assert other.exit_code == 1 and other.stdout.splitlines()[0].split() == ["FIELD", found["b"], found["a"]]

    @pytest.mark.parametrize(
        ("state", "flags", "code"),
        [
            ("promoted_once", [], 0),
            ("promoted_once", ["--wait"], 0),
            ("starting", [], 1),
            ("starting", ["--wait", "--timeout", "10ms"], 2),
            ("pin_rejected", ["--wait", "--timeout", "1h"], 1),
        ],
    )
    def test_status_ends_by_health(self, stored: Stored, state: str, flags: list[str], code: int) -> None:
        assert offramp("status", "sim", *flags, "--state", stored(state)).exit_code == code


class TestDeciding:
    def test_promote_writes_the_decision_and_raises_the_generation(self, stored: Stored) -> None:
        folder = stored("awaiting")
        done = offramp("promote", "sim", "--state", folder)
        assert done.exit_code == 0 and "promoted to all traffic" in done.stdout
        written = stored_object(folder, "RampRollout", "sim-1")
        assert written["spec"]["decision"] == "Promote"
        assert written["metadata"]["generation"] == 2 and written["metadata"]["resourceVersion"] == "2"
        again = offramp("abort", "sim", "--state", folder)
        assert again.exit_code == 0

    def test_pause_and_resume_write_only_paused(self, stored: Stored) -> None:
        folder = stored("progressing")
        before = stored_object(folder, "RampRollout", "sim-1")["spec"]
        assert offramp("pause", "sim", "--state", folder).exit_code == 0
        assert stored_object(folder, "RampRollout", "sim-1")["spec"] == {**before, "paused": True}
        assert offramp("resume", "sim", "--rollout", "sim-1", "--state", folder).exit_code == 0
        assert stored_object(folder, "RampRollout", "sim-1")["spec"] == {**before, "paused": False}

    @pytest.mark.parametrize(
        ("command", "state", "reason"),
        [
            (["promote", "sim"], "pin_in_canary", "has not earned acceptance"),
            (["promote", "sim"], "progressing", "never overrules a gate"),
            (["abort", "sim"], "rolled_back", "sim-2 is finished"),
            (["abort", "sim", "--rollout", "sim-1"], "rolled_back", "sim-1 is finished"),
            (["pause", "sim"], "disabled", "has had no rollout yet"),
            (["approve", "sim"], "promoted_once", "only Recommend"),
            (["tune", "sim", "--now"], "disabled", "only Auto and Recommend tune"),
            (["tune", "sim"], "promoted_once", "add --now"),
            (["export", "sim"], "disabled", "nothing to pin"),
            (["pin", "sim", "--ramp", "r00-grid=0.1"], "promoted_once", "add --dry-run"),
        ],
    )
    def test_a_refusal_is_one_line_with_the_reason_and_writes_nothing(
        self, stored: Stored, command: list[str], state: str, reason: str
    ) -> None:
        folder = stored(state)
        before = {path: path.read_bytes() for path in (folder / "objects").rglob("*.json")}
        done = offramp(*command, "--state", folder)
        assert done.exit_code == 1 and done.stdout == ""
        assert reason in done.stderr and done.stderr.count("\n") == 1
        assert {path: path.read_bytes() for path in (folder / "objects").rglob("*.json")} == before

    def test_a_rollout_that_finishes_between_reading_and_writing_is_left_alone(self, stored: Stored) -> None:
        from offramp_cli.source.folder import FolderSource
        from offramp_cli.source.source import RefusedError

        folder = stored("awaiting")
        source = FolderSource(folder)
        family = source.families("sim")[0]
        finished = stored_object(folder, "RampRollout", "sim-1")
        finished["status"]["phase"] = "RolledBack"
        (folder / "objects" / "RampRollout" / "sim-1.json").write_text(json.dumps(finished))
        with pytest.raises(RefusedError, match="has changed meanwhile: RolledBack"):
            source.change_rollout(family, family.newest, {"decision": "Promote"})
        assert stored_object(folder, "RampRollout", "sim-1") == finished

    def test_requests_annotate_the_service_and_leave_its_generation_alone(self, stored: Stored) -> None:
        folder = stored("promoted_once")
        done = offramp("tune", "sim", "--now", "--state", folder, "--json")
        said = json.loads(done.stdout)
        metadata = stored_object(folder, "EarlyExitService", "sim")["metadata"]
        assert metadata["annotations"] == {"earlyexit.dev/request": said["request"]} and metadata["generation"] == 1
        assert said["request"].startswith("tune/")

    def test_an_approval_is_a_decision_on_the_rollout_that_waits_for_it(self, stored: Stored) -> None:
        folder = stored("recommended")
        assert offramp("approve", "sim", "--state", folder).exit_code == 0
        assert stored_object(folder, "RampRollout", "sim-1")["spec"]["decision"] == "Promote"


class TestPins:
    def test_an_export_is_a_patch_that_the_manifests_parser_takes(self, stored: Stored) -> None:
        folder = stored("promoted_once")
        patch = yaml.safe_load(offramp("export", "sim", "--state", folder).stdout)
        spec = stored_object(folder, "EarlyExitService", "sim")["spec"]
        assert parse_spec({**spec, **patch["spec"]}).mode == "Pinned"
        assert json.loads(offramp("export", "sim", "--state", folder, "--json").stdout)["patch"] == patch

    @pytest.mark.parametrize(
        ("ramp", "code", "said"),
        [
            ("r01-grid=0.1", 0, "0 answers would have differed (0.0%); the budget is 2%: it would go into its canary"),
            ("r00-grid=1", 1, "it would be refused; lower the thresholds"),
            ("r09-none=0.1", 1, "ramp 'r09-none' is unknown; there is r00-grid, r01-grid, r02-grid"),
        ],
    )
    def test_a_pin_is_checked_against_what_the_embedded_shell_recorded(
        self, stored: Stored, ramp: str, code: int, said: str
    ) -> None:
        done = offramp("pin", "sim", "--ramp", ramp, "--dry-run", "--state", stored("promoted_once", records=True))
        assert done.exit_code == code and said in done.stdout
        assert yaml.safe_load(done.stdout)["spec"]["ramps"]["pin"]["ramps"][0]["id"] == ramp.partition("=")[0]

    def test_without_records_it_says_that_the_operator_will_check(self, stored: Stored) -> None:
        done = offramp("pin", "sim", "--ramp", "r01-grid=0.1", "--dry-run", "--state", stored("promoted_once"))
        assert done.exit_code == 0 and "no recorded requests can be read here" in done.stdout

    def test_a_pin_of_a_rejected_plan_says_how_long_it_cools_down(self, stored: Stored) -> None:
        folder = stored("rolled_back")
        rejected = stored_object(folder, "RampRollout", "sim-2")["spec"]["to"]
        path = folder / "objects" / "RampConfig" / f"{rejected}.json"
        config = json.loads(path.read_text())
        config["status"]["rejectedUntilAt"] = "2999-01-01T00:00:00Z"
        path.write_text(json.dumps(config))
        done = offramp("pin", "sim", "--config", rejected, "--dry-run", "--state", folder)
        assert f"RampConfig {rejected} has these thresholds: Rejected, cooling down for" in done.stdout

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--ramp", "r00-grid"], "must be ID=THRESHOLD"),
            (["--ramp", "r00-grid=2"], "spec.ramps.pin.ramps[0].threshold"),
            (["--ramp", "r00-grid=0.1", "--ramp", "r00-grid=0.2"], "a ramp is named twice"),
            ([], "list between 1 and 6 ramps"),
            (["--precision", "int8/", "--ramp", "r00-grid=0.1"], "spec.ramps.pin.precision"),
            (["--config", "sim-nothing"], "has no RampConfig 'sim-nothing'"),
        ],
    )
    def test_a_pin_that_the_manifest_could_not_hold_names_the_field(
        self, stored: Stored, flags: list[str], said: str
    ) -> None:
        done = offramp("pin", "sim", *flags, "--dry-run", "--state", stored("promoted_once"))
        assert done.exit_code in (1, 3) and said in done.stderr and done.stdout == ""


class TestErrors:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (["get", "nope"], "no EarlyExitService 'nope' in"),
            (["why", "sim", "sim-9"], "sim has no rollout 'sim-9'; there is sim-1"),
            (["diff", "sim", "sim-none"], "no service and no RampConfig 'sim-none'"),
            (["get", "-n", "default"], "--state reads a folder"),
            (["status", "sim", "--timeout", "soon"], "--timeout"),
        ],
    )
    def test_what_could_not_be_asked_is_one_line_and_says_what_is_there(
        self, stored: Stored, command: list[str], said: str
    ) -> None:
        done = offramp(*command, "--state", stored("progressing"))
        assert done.exit_code == 3 and said in done.stderr and done.stderr.count("\n") == 1

    def test_a_folder_without_state_and_a_damaged_object_are_told(self, stored: Stored, tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        assert "holds no state of `offramp up`" in offramp("get", "--state", empty).stderr
        folder = stored("progressing")
        (folder / "objects" / "RampRollout" / "sim-1.json").write_text("{")
        done = offramp("get", "--state", folder)
        assert done.exit_code == 3 and "is damaged" in done.stderr and done.stderr.count("\n") == 1

    def test_without_any_source_it_says_how_to_point_to_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        monkeypatch.setenv("HOME", str(tmp_path))
        done = offramp("get")
        assert done.exit_code == 3 and "--kubeconfig FILE or KUBECONFIG" in done.stderr and "--state DIR" in done.stderr

    def test_the_state_in_this_folder_is_the_default_unless_a_cluster_is_named(
        self, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored("disabled").rename(tmp_path / "inner")
        (tmp_path / ".offramp").mkdir()
        (tmp_path / "inner").rename(tmp_path / ".offramp" / "sim")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        assert "exits off" in offramp("get").stdout
        assert offramp("get", "-n", "default").exit_code == 3


class TestCompletion:
    def test_names_of_services_are_completed(self, stored: Stored) -> None:
        folder = stored("disabled")
        done = CliRunner().invoke(
            app,
            [],
            env={
                "_OFFRAMP_COMPLETE": "complete_bash",
                "COMP_WORDS": f"offramp get --state {folder} s",
                "COMP_CWORD": "4",
            },
            prog_name="offramp",
        )
        assert done.stdout.split() == ["sim"]

    @pytest.mark.parametrize(
        ("words", "found"), [(["get", "--state", "FOLDER", "s"], ["sim", ":4"]), (["his"], ["history", ":4"])]
    )
    def test_kubectl_completes_the_plugin(
        self,
        stored: Stored,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        words: list[str],
        found: list[str],
    ) -> None:
        from offramp_cli.kubectl_complete import main

        for name in ("_OFFRAMP_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
            monkeypatch.setenv(name, "")  # put back what main sets
        folder = str(stored("disabled"))
        monkeypatch.setattr("sys.argv", ["kubectl_complete-offramp", *(folder if w == "FOLDER" else w for w in words)])
        main()
        assert capsys.readouterr().out.split() == found

    def test_a_source_that_cannot_be_read_completes_to_nothing(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(
            app,
            [],
            env={
                "_OFFRAMP_COMPLETE": "complete_bash",
                "COMP_WORDS": f"offramp get --state {tmp_path} s",
                "COMP_CWORD": "4",
            },
            prog_name="offramp",
        )
        assert done.stdout.split() == [] and done.stderr == ""
