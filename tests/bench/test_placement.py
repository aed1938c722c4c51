"""Services on GPUs of many kinds, which exist on paper: who is placed, what the others say, and that it stays so."""

from __future__ import annotations

from typing import Any

import pytest
from bench.placement.__main__ import measure, verdict, without_schedulers
from bench.placement.paper import ASKED, GPU, NODES, could_be_placed, node, scaled
from rich.console import Console

SHARE = 0.025  # 28 nodes and 51 services


def pod(name: str, *, on: str = "", n: int = 1, **selector: str) -> dict[str, Any]:
    container = {"name": "worker", "resources": {"limits": {GPU: str(n), "cpu": "1"}}}
    return {"metadata": {"name": name}, "spec": {"nodeName": on, "nodeSelector": selector, "containers": [container]}}


def test_a_thousand_gpus_are_asked_for_by_two_thousand_services() -> None:
    assert sum(kind.n * kind.gpus for kind in NODES) == 1000
    assert sum(asked.services for asked in ASKED) == 2000


def test_who_waits_for_what_is_free_is_counted_without_the_scheduler() -> None:
    kind = next(kind for kind in NODES if kind.name == "l4")
    nodes = [node(kind, 0), node(kind, 1)]
    full = [pod("a", on="l4-000", n=4), pod("b", on="l4-001", n=3)]
    assert could_be_placed(nodes, [*full, pod("one")]) == ["one"]
    assert could_be_placed(nodes, [*full, pod("two", n=2), pod("elsewhere", **{"nvidia.com/gpu.product": "T4"})]) == []


def test_what_the_scheduler_reports_again_is_no_write_of_the_operators_and_all_else_is() -> None:
    written = {"POST events": 12, "PATCH events": 40, "APPLY earlyexitservices/status": 2}
    assert without_schedulers(written, {"default-scheduler": 9, "earlyexit.dev/offramp": 3}) == 5


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All that the bench measures, at a size where times say nothing."""
    folder = tmp_path_factory.mktemp("placement")
    return measure(SHARE, seconds=10.0, rest=10.0, console=Console(quiet=True), folder=folder)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a first run builds the API server
def test_all_that_fit_are_placed_the_others_say_what_they_wait_for_and_nothing_is_written_when_that_is_done(
    measured: Any,
) -> None:
    assert all(verdict(measured).values()), measured
    placed, (_, asked) = measured["placed"], scaled(SHARE)
    assert sum(placed["placed"].values()) + sum(placed["waiting"].values()) == sum(a.services for a in asked)
    assert {"no-slice", "no-product"}.isdisjoint(placed["placed"])
    assert "reconcile-failed" not in measured["events"]
