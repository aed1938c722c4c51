"""Several models in one worker: whose batch runs next, which models are in memory, which worker holds which.

turns.py     whose batch runs next
eviction.py  which models leave memory for another one
packing.py   which workers of a pool hold which models
placing.py   what workers are told on the way there

Workers import this package, and their images have no SciPy: what needs that is imported from its module.
"""

from offramp_core.sharing.eviction import Held, Popularity, evicted
from offramp_core.sharing.turns import (
    LEAST_SHARE,
    MOST_SHARE,
    QUANTUM_SECONDS,
    WINDOW_SECONDS,
    Claim,
    Shares,
    Turn,
    next_turn,
)

__all__ = [
    "LEAST_SHARE",
    "MOST_SHARE",
    "QUANTUM_SECONDS",
    "WINDOW_SECONDS",
    "Claim",
    "Held",
    "Popularity",
    "Shares",
    "Turn",
    "evicted",
    "next_turn",
]
