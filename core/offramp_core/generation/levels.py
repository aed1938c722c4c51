"""What settings of drafts have taken of late in one context, what they have saved, and what trials of those that do not
serve may cost.

The level of a setting is an exponentially weighted mean of the logarithm of seconds per token, its doubt the standard
error of that. It follows the machine and the content, and forgets too soon to tell a draft that saves a tenth. What a
draft has *saved* does: the sum over its answers of what they took less than none's level of that time, within bounds.
It is Page's cumulative sum (Biometrika 41, 1954), counted in requests: to be wrong costs about as many as the bounds
say, whatever a draft saves or loses with each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

FIRST_TRIALS = 4  # of a setting, before it is believed to be anything
PRIOR_TRIALS = 2  # that what another context knows of a setting is worth
STAKE = 0.5  # requests: what trials may cost before anything is earned, where one answer is written at a time
MOST_LOST = 0.01  # of what requests take, by trials of settings that are slower than what serves
SPENT = 0.25  # of what the draft that serves saves, on trials of others, while less than the stake is left
MOST_CHARGED = 8.0  # requests, for one trial: one that the machine slept through says little
WEIGHT = 0.15  # of the newest request in a level
MOST_SURPRISE = 1.0  # of one request, as a logarithm, once a level is believed: the process may have been stopped
LOST = 4.0  # requests of none: with more lost by drafts, no draft begins
BANKED = 8.0  # requests of none: what drafts may have gained, and lose again
MARGIN = 0.03  # of an answer without a draft: what one with a draft must save
BEGINS = 1.0  # requests: a draft that has saved so much begins to serve
MOST_SAVED, LEAST_SAVED = 3.0, -1.0  # requests, that are remembered


class Setting(NamedTuple):
    """A draft and how many tokens it proposes at a time; ``draft`` empty for none."""

    draft: str = ""
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.draft}:{self.tokens}" if self.draft else "none"


NONE = Setting()


@dataclass(slots=True)
class Level:
    """What a setting has taken of late, over ``n`` requests in all: mean of the logarithm of seconds per token, in
    which an answer counts as much as it has tokens, and the variance from request to request."""

    n: int = 0
    mean: float = 0.0
    variance: float = 0.0
    tokens: float = 0.0  # of a request, on average
    own: int = 0  # of the requests, those of this context

    def add(self, value: float, tokens: float) -> None:
        """A request of so many tokens took so much for each. The first ones of a context count more than what others
        know, and may surprise."""
        if self.own >= FIRST_TRIALS:
            value = min(max(value, self.mean - MOST_SURPRISE), self.mean + MOST_SURPRISE)
        self.n += 1
        self.own += 1
        weight = max(WEIGHT, 1 / (self.n if self.n == self.own else max(self.own, 2)))
        before = value - self.mean
        self.tokens += weight * (tokens - self.tokens)
        self.mean += weight * before * tokens / self.tokens
        self.variance = (1 - weight) * (self.variance + weight * before * before)

    def prior(self, most: int) -> Level:
        """As another context begins with it: worth so many of its own requests at most."""
        return replace(self, n=min(self.n, most), own=0)

    def slower(self, value: float) -> float:
        """How much longer a request took than it takes on average. Means of logarithms lie below those of seconds, by
        half the variance where noise is log-normal."""
        return math.expm1(min(value - self.mean - self.variance / 2, 20.0))

    @property
    def doubt(self) -> float:
        """Standard error of the mean, with as many requests as the weights are worth."""
        worth = min(self.n, (2 - WEIGHT) / WEIGHT)
        return math.sqrt(self.variance / worth) if self.n > 1 else math.inf


@dataclass(slots=True)
class Book:
    """One context: levels by setting, and which setting serves.

    ``allowance`` is what trials may still cost, in requests of what serves; below zero they have cost more. It begins
    with the ``stake``, and a draft that pays fills it up that far.
    """

    levels: dict[Setting, Level]
    serves: Setting = NONE
    allowance: float = 0.0
    stake: float = 0.0
    lost: float = 0.0  # tokens of none: by all answers with drafts; below zero they have gained
    saved: dict[Setting, float] = field(default_factory=dict)  # requests, beyond the margin: by each draft
    turn: int = 0  # whose fair turn is next
    plain: int = 0  # requests in a row that are still computed without a draft, as a trial of none
    quiet: int = 0  # requests until something unknown may be tried again: the trial before it may not have ended

    def prior(self) -> Book:
        """What a context begins with that is like this one: what serves here serves there, until it shows that it
        should not, and the others need fewer trials."""
        first = {NONE, self.serves}
        levels = {s: level.prior(FIRST_TRIALS if s in first else PRIOR_TRIALS) for s, level in self.levels.items()}
        return Book(levels, self.serves, self.stake, self.stake, saved={self.serves: BEGINS / 2})

    def earn(self) -> None:
        """A request comes."""
        if self.allowance < MOST_CHARGED:
            self.allowance += MOST_LOST
        if self.stake and self.serves != NONE and self.allowance < self.stake:
            saved = math.expm1(min(self.levels[NONE].mean - self.levels[self.serves].mean, MOST_SURPRISE))
            self.allowance = min(self.stake, self.allowance + SPENT * max(0.0, saved))
        if self.quiet:
            self.quiet -= 1

    def next_turn(self) -> Setting:
        """Whose fair turn it is. Every other one is none's, which whatever else serves is compared with."""
        self.turn += 1
        drafts = [s for s in self.levels if s not in (NONE, self.serves)]
        if self.serves != NONE and (self.turn % 2 or not drafts):
            return NONE
        return drafts[self.turn // (1 if self.serves == NONE else 2) % len(drafts)] if drafts else NONE

    @property
    def by_prior(self) -> bool:
        """Whether a draft serves by what others know: it, or none, was hardly measured here."""
        own = min(self.levels[setting].own for setting in (NONE, self.serves))
        return self.serves != NONE and own < FIRST_TRIALS

    def serve_first(self, *, none: bool, open_for: int) -> Setting:
        """While a draft serves by what others know: the draft, unless it is ``none``'s turn, which is measured as well,
        or requests are ahead that may say what the draft is worth here."""
        if self.quiet or (none and self.levels[NONE].own < FIRST_TRIALS):
            return NONE
        self.quiet = open_for
        return self.serves

    @property
    def may_begin(self) -> bool:
        """Whether drafts have not lost so much that it must be earned back first."""
        return self.lost <= LOST * self.levels[NONE].tokens

    def promises(self, setting: Setting) -> bool:
        """Whether it has been faster than what serves, as far as it was tried."""
        level = self.levels[setting]
        return level.n > 0 and level.mean < self.levels[self.serves].mean

    def is_open(self, setting: Setting) -> bool:
        """Whether it is tried beside its fair turns: where one answer is written at a time the allowance is what bounds
        that. Beside other answers a trial also slows these, so only what has saved something goes on."""
        return bool(self.stake) or self.levels[setting].n < FIRST_TRIALS or self.saved.get(setting, 0.0) > 0

    def pays(self, setting: Setting) -> bool:
        """Whether it has saved enough to begin; of the draft that serves, whether it may go on: with less than that, as
        long as its level is below none's and something is left."""
        level, saved = self.levels[setting], self.saved.get(setting, 0.0)
        if saved >= BEGINS:
            return level.n >= FIRST_TRIALS
        return setting == self.serves and saved > 0 and level.mean < self.levels[NONE].mean

    def spend(self, tried: Setting, expected: float, *, open_for: int, waiting: int = 0, many: int = 1) -> bool:
        """Whether so many trials in a row can be afforded, which are paid for then; one may be open for so many further
        requests, and no other begins before if it was not measured here, or less than half as often as there are
        requests waiting. What costs more than can be saved up begins with all of that, and leaves a debt."""
        cost, own = many * self._cost(expected), self.levels[tried].own
        unknown = not own or waiting >= 2 * own
        if self.allowance < min(cost, MOST_CHARGED) or (unknown and self.quiet):
            if tried == NONE:
                self.turn -= 1  # it waits until it can be paid: the others' turns would spend what it needs
            return False
        self.allowance -= cost
        if unknown:
            self.quiet = open_for
        return True

    def add(self, setting: Setting, value: float, tokens: float, *, expected: float) -> None:
        """A request took so much for each of its tokens; of a trial the difference to what was paid is settled.
        Surprises together leave no more debt than one trial may."""
        if setting != self.serves and self.levels[self.serves].n:
            took = min(math.expm1(min(value - self.levels[self.serves].mean, 20.0)), MOST_CHARGED)
            settled = min(MOST_CHARGED, self.allowance - took + self._cost(expected))
            self.allowance = max(settled, min(self.allowance, -MOST_CHARGED))
        self.levels[setting].add(value, tokens)
        self._account(setting, value, tokens)

    def fail(self, setting: Setting, *, expected: float) -> None:
        """Its answer failed, which is as bad as the most that a trial is charged."""
        none = self.levels[NONE]
        self.add(setting, none.mean + math.log1p(MOST_CHARGED), none.tokens, expected=expected)

    def _account(self, setting: Setting, value: float, tokens: float) -> None:
        """Charge what an answer with a draft took beyond what it would have taken without, in tokens: short answers may
        gain while long ones lose. Each answer without one earns a share of itself back."""
        none = self.levels[NONE]
        if setting == NONE:
            self.lost = max(self.lost - MOST_LOST * tokens, min(self.lost, 0.0))
        elif none.n:
            doubt = none.doubt if none.n > 1 else 0.0  # drafts begin where none happens to look slow
            lost = tokens * min(none.slower(value + doubt), MOST_CHARGED)
            self.lost = max(self.lost + lost, -BANKED * none.tokens)
            if not self.by_prior:  # none is hardly measured here
                slower = (min(none.slower(value), 1.0) + MARGIN) * tokens / self.levels[setting].tokens
                saved = self.saved.get(setting, 0.0) - slower
                self.saved[setting] = min(max(saved, LEAST_SAVED), MOST_SAVED)

    def forget_all_but(self, *kept: Setting) -> None:
        """What is known of the other settings was measured under circumstances that have passed, and what was saved up
        was saved under them, as most of a debt was made."""
        self.allowance = max(-MOST_CHARGED, min(self.allowance, 0.0))
        for setting in self.levels.keys() - set(kept):
            self.levels[setting] = Level()
            self.saved.pop(setting, None)

    def _cost(self, expected: float) -> float:
        """Of a trial, in requests of what serves; nothing where it should be faster."""
        return min(max(0.0, math.expm1(min(expected - self.levels[self.serves].mean, 20.0))), MOST_CHARGED)


def likely_faster(one: Level, other: Level) -> bool:
    """Whether one setting is faster than another, one standard error away from chance."""
    return one.mean + math.hypot(one.doubt, other.doubt) < other.mean
