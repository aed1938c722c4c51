"""Helpers of other folders' tests."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "core"), str(TESTS / "worker")]
