"""Several models in one worker: whose batch runs next, which models are in memory, which worker holds which.

turns.py     whose batch runs next
eviction.py  which models leave memory for another one
packing.py   which workers of a pool hold which models
"""

from offramp_core.sharing.eviction import Held, Popularity, evicted
from offramp_core.sharing.packing import Demand, Packing, Size, pack
from offramp_core.sharing.turns import QUANTUM_SECONDS, SURPLUS_SECONDS, WINDOW_SECONDS, Claim, Shares, next_turn

__all__ = [
    "QUANTUM_SECONDS",
    "SURPLUS_SECONDS",
    "WINDOW_SECONDS",
    "Claim",
    "Demand",
    "Held",
    "Packing",
    "Popularity",
    "Shares",
    "Size",
    "evicted",
    "next_turn",
    "pack",
]
