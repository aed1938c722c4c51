"""Thousands of broken and hostile requests against a real worker: refused or rightly answered, and nobody else notices."""

from __future__ import annotations

from pathlib import Path

import fuzz
import pytest
from processes import WorkerProcess

from offramp_worker.engine.sessions import Sessions


@pytest.mark.slow
@pytest.mark.parametrize(
    "requests", [pytest.param(1_000, id="1000"), pytest.param(20_000, id="20000", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_hostile_requests_are_refused_and_their_neighbours_get_their_own_answers(
    bundle_dir: Path, sessions: Sessions, requests: int
) -> None:
    with WorkerProcess(bundle_dir, control_plane=False) as process:
        host, _, port = process.address.partition(":")
        pool = fuzz.Pool(sessions.exact)
        tally = fuzz.attack((host, int(port)), pool, requests=requests, seed=requests)
        assert tally.wrong == []
        assert sum(tally.sent.values()) - tally.sent["valid"] == requests
        assert len(tally.sent) == len(fuzz.CASES) + 2
        assert process.is_ready()
        assert not process.events("batch-failed") and not process.events("reply-failed")
    assert process.process.returncode == 0
