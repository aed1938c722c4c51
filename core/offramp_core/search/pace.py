"""When a process goes over to compiled loops.

Both ways find the same plans to the last bit, so it may happen in the middle of a search. Loading numba and the machine
code takes as long as dozens of small searches: a process earns it by what it has searched with numpy, and so spends at
most about twice what the better of the two would have taken (the ski-rental rule).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

LOADING = 60e6  # rows and cells that numpy gets through while the loops load: two to three seconds


@dataclass(slots=True)
class SearchPace:
    """What a process has searched; ``installed`` is whether it has numba (``pip install offramp[fast]``)."""

    installed: bool
    handled: float = 0.0

    def compiled(self, work: int) -> bool:
        """Whether to handle so many rows and cells with compiled loops."""
        self.handled += work
        return self.installed and self.handled > LOADING

    def hurry(self) -> None:
        """From now on: for a process that is going to search a lot."""
        self.handled = math.inf


PACE = SearchPace(installed=find_spec("numba") is not None)
