"""Whose batch runs next on an executor that several models share: the earliest due, within guaranteed shares.

Every model has a share of the executor. While it has work, the time that passes on the executor earns it credit by its
share among those that have work; what it runs itself costs it that time. So the credit is what it got less than its
share. Earliest-due-first serves most requests in time as long as nobody asks for more than the executor has, and lets
the longest queue win where somebody does. So it decides only among models whose credit lies within one quantum of
their share: who is owed more goes first, who has had more goes last, and still runs where nobody else has work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from offramp_core.errors import InvalidArgumentError

#: How far a model may be from its share before that counts for more than whose request is due, and the longest batch
#: that is begun while another model waits.
QUANTUM_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Claim:
    """A model that has work: ``due`` is when its first request should be answered, infinite for work that nobody waits
    for, and ``seconds`` what the batch is expected to take."""

    due: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Shares:
    """``weights`` by model, which need not add up to 1, and the ``credit`` of those that are not at their share:
    seconds owed to them, below 0 those that they had beyond it."""

    weights: Mapping[str, float]
    credit: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not 0 < weight < math.inf:
                raise InvalidArgumentError(f"the share of {name!r} is {weight}; it must be a number above 0")

    def after(self, ran: str, seconds: float, *, working: Collection[str]) -> Shares:
        """What is owed once ``ran`` has had ``seconds`` on the executor while the models ``working`` had work.

        Who has no work is owed nothing any more: time that was not asked for is not saved up. What it had too much is
        forgiven by its share, as time passes. Nobody owes more than a quantum and its own last batch.
        """
        active = {*working, ran}
        total = sum(self.weights[name] for name in active)
        credit = {}
        for name, before in {**dict.fromkeys(active, 0.0), **self.credit}.items():
            earned = before + seconds * self.weights[name] / total
            if name not in active:
                earned = min(0.0, earned)
            elif name == ran:
                earned = max(earned - seconds, -QUANTUM_SECONDS - seconds)
            if earned:
                credit[name] = earned
        return replace(self, credit=credit)

    def of(self, name: str) -> float:
        """Seconds that are owed to a model."""
        return self.credit.get(name, 0.0)


def next_turn(claims: Mapping[str, Claim], shares: Shares) -> str:
    """Whose batch runs next, of the models that have work; there must be one.

    Who is owed more than a quantum runs first, the most by its share before the others. Else the least slack runs: the
    earliest due, less the time that it takes; those that have had a quantum too much only if all have.

    Examples
    --------
    >>> equal = Shares({"a": 1.0, "b": 1.0})
    >>> next_turn({"a": Claim(due=3.0), "b": Claim(due=2.0)}, equal)
    'b'
    >>> next_turn({"a": Claim(due=3.0), "b": Claim(due=2.0)}, equal.after("b", 0.1, working={"a"}))
    'a'
    """
    owed = [name for name in claims if shares.of(name) > QUANTUM_SECONDS]
    if owed:
        return max(owed, key=lambda name: (shares.of(name) / shares.weights[name], name))
    entitled = [name for name in claims if shares.of(name) >= -QUANTUM_SECONDS] or list(claims)
    return min(entitled, key=lambda name: (claims[name].due - claims[name].seconds, -shares.of(name), name))
