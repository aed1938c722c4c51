"""A small fleet on a real API server: it settles, a restarted operator finds nothing to do, and nothing is written
while nothing happens."""

from __future__ import annotations

from typing import Any

import pytest
from bench.fleet.__main__ import measure, verdict
from rich.console import Console

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

SERVICES, REPLICAS = 12, 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All that the bench measures, at a size where times say nothing."""
    folder = tmp_path_factory.mktemp("fleet")
    return measure(SERVICES, replicas=REPLICAS, seconds=20.0, rest=15.0, console=Console(quiet=True), folder=folder)


def test_every_service_settles_with_all_of_its_workers(measured: Any) -> None:
    assert measured["workers"] == SERVICES * REPLICAS
    assert measured["cold"]["writes"] > 10 * SERVICES, "children, plan and statuses of every service"


def test_a_restarted_operator_writes_nothing_where_everything_is_as_it_should_be(measured: Any) -> None:
    assert measured["restart"]["writes"] == 0
    assert measured["events"]["caught-up"] == 1
    assert "reconcile-failed" not in measured["events"]


def test_in_steady_state_workers_are_pulled_and_nothing_is_written(measured: Any) -> None:
    assert measured["steady"]["pulls"] >= SERVICES * REPLICAS / 2
    assert measured["steady"]["passes"] > 0
    assert measured["steady"]["writes"] == 0
    assert verdict(measured)["no writes in steady state"]
