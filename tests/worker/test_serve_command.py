"""``offramp serve DIR``: the worker without a control plane."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from processes import START_SECONDS, eventually

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "import typer; from offramp_cli.serve import serve; typer.run(serve)"]
ENV = {k: v for k, v in os.environ.items() if not k.startswith("OFFRAMP_")}


def test_a_broken_bundle_is_one_line_that_names_the_file_and_exit_code_2(bundle_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle_dir, tmp_path / "broken"))
    (folder / "profile.json").write_text("{}")
    result = subprocess.run(
        [*COMMAND, str(folder), "--port", "0"],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: profile.json: its SHA-256 is not the one in manifest.json")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["folder", "lr=0.1/bundle", "a=b"])
def test_a_folder_that_is_no_bundle_is_refused(name: str, tmp_path: Path) -> None:
    """Also one whose path looks like NAME=DIR."""
    (tmp_path / name).mkdir(parents=True)
    result = subprocess.run(
        [*COMMAND, name], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert result.returncode == 2
    assert "error: manifest.json: cannot be read" in result.stderr


def test_a_port_in_use_is_told_without_a_traceback(bundle_dir: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, str(bundle_dir), "--port", "0"], env=ENV, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stderr is not None
        port = json.loads(first.stderr.readline())["port"]
        command = [*COMMAND, str(bundle_dir), "--port", str(port)]
        second = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=START_SECONDS, check=False)
        assert second.returncode == 2
        assert f"the public port {port} cannot be opened" in second.stderr
        assert "Traceback" not in second.stderr

        def ready() -> bool:
            return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=60).status_code == 200

        eventually(ready, what="readiness", deadline=START_SECONDS)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 0
