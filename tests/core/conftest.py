"""Makes the simulated fleet importable from the tests beside it, and the benchmarks whose simulations they judge."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from offramp_core.search import branch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests of the core are simulations: `scripts/test` runs them without tracing every line for coverage."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("slow"):
            item.add_marker("simulation")


@pytest.fixture
def coarse_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts per ramp, so that a search of a few records has to bound cells that hold many plans, and divides them
    often."""
    monkeypatch.setattr(branch, "PARTS", dict.fromkeys(branch.PARTS, 2))


@pytest.fixture(params=["as ever", "coarse"])
def boxes(request: pytest.FixtureRequest) -> None:
    """Each test twice, the second time with coarse boxes."""
    if request.param == "coarse":
        request.getfixturevalue("coarse_boxes")
