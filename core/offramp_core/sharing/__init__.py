"""Several models in one worker: whose batch runs next, and which models are in memory. The worker acts.

turns.py     whose batch runs next
eviction.py  which models leave memory for another one
"""

from offramp_core.sharing.eviction import Held, Popularity, evicted
from offramp_core.sharing.turns import QUANTUM_SECONDS, Claim, Shares, next_turn

__all__ = ["QUANTUM_SECONDS", "Claim", "Held", "Popularity", "Shares", "evicted", "next_turn"]
