"""What ``make test`` does about a test that fails: at most one of a whole run is run again, and the last line names
it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each runs pytest several times

ROOT = Path(__file__).parents[2]
FLAKY = """
from pathlib import Path

def test_passes_at_the_second_try():
    tries = Path(__file__).with_suffix(".tries")
    tries.write_text((tries.read_text() if tries.exists() else "") + "x")
    assert len(tries.read_text()) > 1
"""
BROKEN = "def test_never_passes(): assert False\n"
SOUND = "def test_passes(): pass\n"


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """A folder for stages: each a folder of tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(stages: Path, **tests: str) -> tuple[int, str, str]:
    """The status of the stages one after another, which test passed only by itself, and which count as failed."""
    for stage, text in tests.items():
        (stages / stage).mkdir()
        for number, part in enumerate(text.split("---\n")):
            (stages / stage / f"test_{stage}_{number}.py").write_text(part)
    script = f"""
    set -euo pipefail
    say() {{ echo "=== $*"; }}
    pytest={sys.executable.removesuffix(Path(sys.executable).name)}pytest log={stages}
    source {ROOT}/scripts/lib/rerun.sh
    end() {{ printf '\\n%s|%s\\n' "$again" "${{failed[*]}}"; }}
    trap end EXIT
    cd {stages}
    for stage in {" ".join(tests)}; do run "$stage.cache" --rootdir {stages} "$stage"; done
    """
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    again, failed = ended.stdout.splitlines()[-1].split("|")
    return ended.returncode, again, failed


def test_a_run_without_failures_names_nothing(stages: Path) -> None:
    assert run(stages, first=SOUND, second=SOUND) == (0, "", "")


def test_one_test_may_pass_by_itself_and_is_named(stages: Path) -> None:
    status, again, failed = run(stages, first=f"{SOUND}---\n{FLAKY}", second=SOUND)
    assert (status, again, failed) == (0, "first/test_first_1.py::test_passes_at_the_second_try", "")


def test_a_second_failure_of_the_same_test_fails_the_run(stages: Path) -> None:
    assert run(stages, first=BROKEN, second=SOUND) == (1, "", "first/test_first_0.py::test_never_passes")


def test_two_tests_that_fail_beside_others_are_not_run_again(stages: Path) -> None:
    status, again, failed = run(stages, first=f"{FLAKY}---\n{FLAKY}")
    assert (status, again, len(failed.split())) == (1, "", 2)


def test_only_one_test_of_all_stages_together_is_run_again(stages: Path) -> None:
    status, again, failed = run(stages, first=FLAKY, second=FLAKY)
    assert (status, again.split("::")[0], failed.split("::")[0]) == (
        1,
        "first/test_first_0.py",
        "second/test_second_0.py",
    )
