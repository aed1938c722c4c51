"""What tests need of this machine: data, and programs that are built once."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]


def leave_out(why: str) -> NoReturn:
    """The test is left out and says why; where CI runs it, it fails."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@functools.cache
def built(*command: str) -> Path:
    """The folder that a build command of ``cluster/`` prints; a first build takes minutes."""
    answer = subprocess.run([ROOT / "cluster" / command[0], *command[1:]], check=False, capture_output=True, text=True)
    if answer.returncode != 0:
        leave_out(f"cluster/{' '.join(command)} failed: {answer.stderr[-2000:]}")
    return Path(answer.stdout.strip())
