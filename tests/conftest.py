"""For all tests."""

from __future__ import annotations

import functools
import gc
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx._transports import default as httpx_transports
from hypothesis import HealthCheck, settings
from tests.needed import leave_out
from xdist.scheduler import LoadScopeScheduling

# A machine may be busy: how long an example takes says nothing. How long a test may take is pytest's timeout.
# In CI the examples are the same each time.
settings.register_profile(
    "offramp", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
# The inner loop tries fewer; `make test` tries all.
settings.register_profile("fast", settings.get_profile("offramp"), max_examples=25)
settings.load_profile("offramp")
# A client of httpx reads whom it trusts from a file, which takes 30 ms of computing. Nearly all of these speak plain
# HTTP to a process of this machine: it is read once.
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)  # type: ignore[attr-defined]

HERE = Path(__file__).parent
# Files whose tests share what is dear to make (an API server, a browser, services in many states, the parsed product)
# run in one process of pytest-xdist; all others file by file, so that a file's fixtures are made once.
TOGETHER = ("operator/test_kube_", "api/", "web/", "source/")
# Files whose tests run programs that `scripts/programs` makes: Kubernetes' and other tools, a browser. On a cold
# machine they come last.
PROGRAMS = (
    "operator/test_kube_",
    "api/",
    "bench/test_placement.py",
    "chart/",
    "observe/",
    "web/",
    "docs/test_blocks.py",
    "e2e/test_embedded_dashboards.py",
    "e2e/test_embedded_generation.py",
    "worker/test_fetch_s3.py",
)
# Tests that only compute: no process of theirs has a deadline that load could break, and none times anything that a
# neighbor could slow down. They and simulations take what others leave, at the lowest priority.
COMPUTES = (
    "bench/test_foreign.py",
    "bench/test_fuzz_files.py",
    "bench/test_labels.py",
    "bench/test_record_",
    "chart/",
    "cli/test_d",
    "cli/test_lint.py",
    "cli/test_plan.py",
    "cli/test_replay_command.py",
    "cli/test_savings.py",
    "cli/test_show.py",
    "cli/test_verify.py",
    "core/",
    "docs/test_blocks.py",
    "docs/test_site.py",
    "docs/test_tutorial.py::test_the_first_block",
    "images/",
    "observe/test_example_repository.py",
    "observe/test_gitops.py",
    "observe/test_rules.py",
    "observe/test_units.py",
    "scripts/",
    "source/",
    "worker/test_answer_scale.py",
    "worker/test_generation_drafts.py",
    "worker/test_generation_engine.py",
    "worker/test_hostile_",
    "worker/test_prepare_",
    "worker/test_tasks.py",
    "worker/test_weights.py",
)
# What takes longest begins first, and what mostly waits lies beside what computes: nothing long is left for the end. At
# the end are the cluster's tests that want the release alone.
LONGEST_FIRST = (
    "cluster/test_bad_luck_on_cluster.py",
    "cluster/test_cluster_lifecycle.py",
    "cluster/test_delivery_on_cluster.py",
    "cluster/test_sharing_on_cluster.py",
    "cluster/test_training_on_cluster.py",
    "operator/test_kube_",
    "core/test_control_statistics.py",
    "core/test_tiers.py",
    "worker/test_prepare_precision.py",
    "bench/test_fleet.py",
    "bench/test_placement.py",
    "api/",
    "e2e/test_embedded_precision.py",
    "e2e/test_embedded_commands.py",
    "worker/test_prepare_bundle.py",
    "e2e/test_embedded_story.py",
    "bench/test_soak.py",
    "docs/test_tutorial.py",
    "e2e/test_embedded_training.py",
    "e2e/test_embedded_up.py",
    "e2e/test_embedded_dashboards.py",
    "web/",
    "worker/test_fuzz.py",
    "worker/test_admin_port.py",
    "operator/test_local_fleet.py",
    "observe/test_rules.py",
    "worker/",
    "operator/",
    "chart/",
    "images/",
    "docs/",
)
LAST = "cluster/test_removal_on_cluster.py"


# Marks that a whole file has, and those that some test of it has.
MARKED = re.compile(r"^pytestmark = .*$", re.MULTILINE)
MARK = re.compile(r"pytest\.mark\.(\w+)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all left out (`-m "not slow"`, or `-m "simulation or computes"`) is not imported: that
    takes half of a collection's time."""
    expression = config.option.markexpr
    if not expression or not collection_path.match("test_*.py"):
        return None
    file, text = _file(collection_path), collection_path.read_text(encoding="utf-8")
    every = set(MARK.findall(marked[0])) if (marked := MARKED.search(text)) else set()
    some = set(MARK.findall(text))
    if file.startswith("core/"):
        some.add("simulation")  # which core/conftest.py makes of what is slow
    if file.startswith(COMPUTES):
        every.add("computes")
    if any(name.startswith(file) for name in COMPUTES):
        some.add("computes")
    left_out = {part.removeprefix("not ") for part in expression.split(" and ") if part.startswith("not ")}
    if every & left_out:
        return True
    asked = set(expression.split(" or "))
    return True if asked <= {"simulation", "computes"} and not asked & (every | some) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of the files; with ``pytest -n 4 --dist loadfile --no-loadscope-reorder`` also that of what each
    process takes."""
    items.sort(key=lambda item: _turn(_file(item.path)))
    for item in items:
        file = _file(item.path)
        if file.startswith(PROGRAMS):
            item.add_marker("programs")
        if f"{file}::{item.name}".startswith(COMPUTES):
            item.add_marker("computes")
        if settings.get_current_profile_name() == "fast":
            _try_fewer(getattr(item, "function", None))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: the garbage collector need not walk through it, now or later. It takes a fifth of a
    collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _try_fewer(test: Any) -> None:
    """No more examples than the profile has, where a test sets their number itself: a profile alone leaves that as it
    is."""
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > settings.default.max_examples:
        test._hypothesis_internal_use_settings = settings(own, max_examples=settings.default.max_examples)


@functools.cache
def _file(path: Path) -> str:
    return path.relative_to(HERE).as_posix()


@functools.cache
def _turn(file: str) -> int:
    if file.startswith(LAST):
        return len(LONGEST_FIRST) + 1
    return next((i for i, first in enumerate(LONGEST_FIRST) if file.startswith(first)), len(LONGEST_FIRST))


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """By file, and some files together. (Marks would say it as well, but pytest-xdist 3.8 loses them under pytest
    9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((group for group in TOGETHER if file.startswith(f"tests/{group}")), file)


@pytest.hookimpl(optionalhook=True)  # `-p no:xdist` knows no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together | None:
    return Together(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's program; without one the tests fail where CI runs them, and are left out elsewhere."""
    found = subprocess.run([HERE.parent / "scripts" / "browser"], check=False, capture_output=True, text=True)
    if found.returncode != 0:
        leave_out(f"scripts/browser found no Chromium: {found.stderr[-500:]}")
    return found.stdout.strip()


@pytest.fixture(scope="module")  # not longer: while it lives a loop counts as running here, and `asyncio.run` refuses
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium refuses its own sandbox to root, who runs the tests; it only sees this server.
        launched = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=180_000
        )
        yield launched
        launched.close()
