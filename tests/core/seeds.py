"""Seeds of tests that draw what they judge: ``make test-fast`` tries the first few, ``make test`` all."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(n: int, *, quick: int = 4) -> list[Any]:
    return [seed if seed < quick else pytest.param(seed, marks=pytest.mark.slow) for seed in range(n)]
