"""The state folder: objects, crashes in the middle of a write, two owners."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from offramp_operator.local.state import StateFolder, StateFolderError, remove_leftovers, replace_file
from offramp_operator.local.store import ObjectStore
from offramp_operator.shell.platform import ConflictError

KIND = "RampConfig"


def test_objects_look_like_those_of_the_api_server(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, clock=lambda: 1_700_000_000.25)
    store.create(KIND, "digits-1", spec={"a": 1}, status={"state": "Proposed"}, metadata={"namespace": "default"})
    written = json.loads((tmp_path / KIND / "digits-1.json").read_text())
    assert written["apiVersion"] == "earlyexit.dev/v1alpha1"
    assert written["kind"] == KIND
    assert written["metadata"]["creationTimestamp"] == "2023-11-14T22:13:20.250000Z"
    assert (written["metadata"]["generation"], written["metadata"]["name"]) == (1, "digits-1")
    assert (written["spec"], written["status"]) == ({"a": 1}, {"state": "Proposed"})
    assert ObjectStore(tmp_path).get(KIND, "digits-1") == written


def test_creating_twice_keeps_the_first(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    first = store.create(KIND, "x", spec={"a": 1})
    assert store.create(KIND, "x", spec={"a": 2}) == first


def test_a_generation_rises_only_when_the_spec_differs(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    created = store.create(KIND, "x", spec={"a": 1})
    assert store.write_spec(KIND, "x", {"a": 1}) == created
    changed = store.write_spec(KIND, "x", {"a": 2})
    assert changed["metadata"]["generation"] == 2
    assert changed["metadata"]["uid"] == created["metadata"]["uid"]
    status = store.write_status(KIND, "x", {"ok": True}, version=changed["metadata"]["resourceVersion"])
    assert status["metadata"]["generation"] == 2


def test_a_writer_that_read_an_older_version_is_told(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    read = store.create(KIND, "x", spec={"paused": False})["metadata"]["resourceVersion"]
    store.write_spec(KIND, "x", {"paused": True})  # a person, in the meantime
    with pytest.raises(ConflictError, match="version 2, not 1"):
        store.write_status(KIND, "x", {"phase": "Paused"}, version=read)
    kept = store.get(KIND, "x")
    assert kept is not None and "status" not in kept and kept["spec"] == {"paused": True}


def test_writing_to_what_is_gone_is_a_conflict_and_deleting_it_is_not(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    with pytest.raises(ConflictError, match="gone"):
        store.write_status(KIND, "x", {}, version=None)
    store.create(KIND, "x", spec={})
    store.delete(KIND, "x")
    store.delete(KIND, "x")
    assert store.list(KIND) == []


def test_an_update_edits_what_is_there_and_raises_the_generation_only_for_the_spec(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    store.create(KIND, "x", spec={"paused": False})
    annotated = store.update(KIND, "x", lambda m: m["metadata"].update(annotations={"a": "b"}))
    assert (annotated["metadata"]["generation"], annotated["metadata"]["resourceVersion"]) == (1, "2")
    paused = store.update(KIND, "x", lambda m: m["spec"].update(paused=True))
    assert (paused["metadata"]["generation"], paused["metadata"]["resourceVersion"]) == (2, "3")
    assert store.update(KIND, "x", lambda m: None) == paused == store.get(KIND, "x")


def test_an_update_that_is_refused_leaves_the_object_as_it_was(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    before = store.create(KIND, "x", spec={"paused": False})

    def refuse(manifest: dict[str, Any]) -> None:
        manifest["spec"]["paused"] = True
        raise ValueError("finished")

    with pytest.raises(ValueError, match="finished"):
        store.update(KIND, "x", refuse)
    assert store.get(KIND, "x") == before
    with pytest.raises(ConflictError, match="gone"):
        store.update(KIND, "y", refuse)


def test_objects_are_listed_by_name(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    for name in ("b", "a", "c"):
        store.create(KIND, name, spec={})
    assert [m["metadata"]["name"] for m in store.list(KIND)] == ["a", "b", "c"]
    assert store.list("RampRollout") == []


@pytest.mark.parametrize("content", ["", '{"metadata": {', "[]", '{"spec": {}}'])
def test_a_damaged_object_is_named_with_the_next_step(tmp_path: Path, content: str) -> None:
    store = ObjectStore(tmp_path)
    store.create(KIND, "x", spec={})
    (tmp_path / KIND / "x.json").write_text(content)
    with pytest.raises(StateFolderError, match=r"x\.json.*delete the state folder"):
        store.get(KIND, "x")


def test_what_a_crash_left_behind_is_never_read_and_is_swept_away(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    written = store.create(KIND, "x", spec={"a": 1})
    torn = tmp_path / KIND / ".x.json.4242.tmp"
    torn.write_text('{"metadata": {"na')
    assert store.list(KIND) == [written]
    assert ObjectStore(tmp_path).list(KIND) == [written]
    assert not torn.exists()


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_a_whole_object(tmp_path: Path) -> None:
    """Kill -9 at arbitrary moments of a tight loop of writes: what is read afterwards is always one whole state."""
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from offramp_operator.local.store import ObjectStore
        store = ObjectStore(Path(sys.argv[1]))
        store.create("RampConfig", "x", spec={})
        print("ready", flush=True)
        n = 0
        while True:
            n += 1
            store.write_status("RampConfig", "x", {"n": n, "copies": [n] * 2000}, version=None)
    """)
    for round_number in range(4):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.02 + 0.013 * round_number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        kept = ObjectStore(tmp_path).get(KIND, "x")
        assert kept is not None
        if "status" in kept:
            assert kept["status"]["copies"] == [kept["status"]["n"]] * 2000


def test_a_replaced_file_is_private_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "f"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    (tmp_path / ".g.1.tmp").write_bytes(b"")
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_second_owner_of_the_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    with (
        folder.exclusive(),
        pytest.raises(StateFolderError, match=rf"process {os.getpid()}.*--state"),
        folder.exclusive(),
    ):
        pass
    with folder.exclusive():
        pass  # given back


def test_the_folder_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from offramp_operator.local.state import StateFolder\n"
        "with StateFolder(Path(sys.argv[1])).exclusive(): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    with pytest.raises(StateFolderError, match=str(process.pid)), StateFolder(tmp_path).exclusive():
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with StateFolder(tmp_path).exclusive():
        pass


def test_the_folder_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    for path in (folder.root, folder.objects, folder.plans, folder.records):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
