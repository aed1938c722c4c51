"""How many processors a process may keep busy."""

from __future__ import annotations

import pytest

from offramp_core.processors import within_quota


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("6400000 100000\n", 8), ("1000 1000", 1)],
)
def test_a_quota_pays_for_whole_processors_at_least_one_and_none_that_are_not_there(
    cpu_max: str, expected: int
) -> None:
    assert within_quota(8, cpu_max) == expected


@pytest.mark.parametrize("cpu_max", ["", "max", "a b", "1 2 3"])
def test_a_quota_that_cannot_be_read_is_no_number(cpu_max: str) -> None:
    with pytest.raises(ValueError):
        within_quota(8, cpu_max)
