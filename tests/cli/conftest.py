"""Makes the synthetic scores and the simulated fleet of the core tests importable here, and gives services in many
states."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parent)]

from states import STATES, write_records, write_state  # noqa: E402


@functools.cache
def fleet_in(state: str) -> Any:
    return STATES[state]()


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """Makes the state folder of a service in a state by its name."""

    def make(state: str, *, running: bool = True, records: bool = False) -> Path:
        folder = write_state(fleet_in(state), tmp_path / state, running=running)
        if records:
            write_records(fleet_in(state), folder)
        return folder

    return make


@pytest.fixture
def in_state(stored: Callable[..., Path]) -> Callable[[str], Any]:
    """Makes ``(family, now)`` of a service in a state by its name, read back from files."""
    from offramp_cli.source.folder import FolderSource

    def make(state: str) -> Any:
        return FolderSource(stored(state)).families()[0], fleet_in(state).now

    return make
