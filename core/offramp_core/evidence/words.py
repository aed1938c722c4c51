"""E-values as people read them: one way for what a verdict says, ``offramp why`` and the page."""

from __future__ import annotations

import math

_LARGE = 1e4  # told by the power of ten above


def e_value(log_value: float) -> str:
    """An e-value from its natural logarithm: ``0.031``, ``20``, ``10^12``; never an overflow."""
    if log_value > math.log(_LARGE):
        return f"10^{log_value / math.log(10):.0f}"
    return f"{math.exp(log_value):.2g}" if log_value < math.log(100) else f"{math.exp(log_value):.0f}"
