"""A seeded run of ``bench.fuzz_manifests``: manifests that nobody would write, through lint, a real API server, the
operator and `offramp up`."""

from __future__ import annotations

from typing import Any

import pytest
from bench import fuzz_manifests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


def test_every_door_takes_a_manifest_or_says_why_not_and_they_agree(clean: Any) -> None:
    report = fuzz_manifests.run(72, api=clean)
    assert report.findings == []
    assert report.counts["EarlyExitService: taken"] >= 5 and report.counts["EarlyExitService: refused"] >= 5
    assert report.counts["passes"] >= 5 and report.counts["read by up"] >= 5
