"""Why NVIDIA's driver runs nothing here: asked of a library that answers as the driver does, where a compiler is there
to make one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offramp_worker.cuda_driver import LIBRARY

ASK = "from offramp_worker.cuda_driver import driverless; print(driverless(13))"
DRIVER = """
#include <stdlib.h>
static int said(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
int cuDriverGetVersion(int *version) { *version = said("VERSION"); return 0; }
int cuInit(unsigned flags) { return said("INIT"); }
int cuDeviceGetCount(int *count) { *count = said("COUNT"); return 0; }
int cuGetErrorString(int error, const char **text) { *text = "so it says"; return 0; }
"""


def ask(folder: Path, **said: str) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), **said}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / LIBRARY, folder / "driver.c"], check=True)
    return folder


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param({"VERSION": "13000", "COUNT": "1"}, "", id="well"),
        pytest.param({"VERSION": "14020", "COUNT": "4"}, "", id="newer"),
        pytest.param(
            {"VERSION": "12040", "INIT": "803"},
            "the GPU's driver is too old: it is for CUDA 12.4, and the worker needs one for CUDA 13; update it to 580 "
            "or newer, or run where it is",
            id="too old",
        ),
        pytest.param(
            {"VERSION": "13000", "INIT": "100"},
            "NVIDIA's driver gives this process no GPU (so it says, error 100); in a cluster, workers must ask for "
            "one; nvidia-smi on that machine tells whether it is well",
            id="no GPU that works",
        ),
        pytest.param(
            {"VERSION": "13000", "COUNT": "0"},
            "NVIDIA's driver gives this process no GPU (no GPU, error 100); in",
            id="0",
        ),
        pytest.param(
            {"VERSION": "13000", "INIT": "805"},
            "NVIDIA's driver gives this process no GPU (so it says, error 805); see that the MPS daemon runs on that "
            "machine, and how many processes may share its GPU",
            id="shared through a daemon that does not run",
        ),
    ],
)
def test_the_driver_itself_says_why_it_runs_nothing(driver: Path, said: dict[str, str], why: str) -> None:
    found = ask(driver, **said)
    assert found.startswith(why) if why else not found


def test_a_file_that_is_no_driver_is_as_none(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_text("no driver")
    found = ask(tmp_path)
    assert found.startswith("NVIDIA's driver is not here (") and "workers must ask for a GPU" in found
