"""Whether sources take turns: gateways do, and independent sources seldom."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

REMEMBERED = 500  # requests; longer turns show among the records as well, even if 2 % of the requests have one


class Turns:
    """By all requests of a worker, as records of few of them show no turns."""

    def __init__(self, *, draw: Callable[[], float] = random.random) -> None:
        self._draw, self._streams = draw, deque([""], maxlen=REMEMBERED)

    def repeats(self, stream: str) -> bool:
        """Whether the request before this one named the same stream, and one drawn from hundreds before it another.

        A client whose connection stays with this worker follows itself all the time, and takes no turns.
        """
        before = self._streams
        found = before[-1] == stream != before[int(len(before) * self._draw())]
        before.append(stream)
        return found
