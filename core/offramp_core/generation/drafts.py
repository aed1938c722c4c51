"""Which draft proposes tokens to the reference: decided by what it has saved of late, per class of requests and load,
never by what it should save.

A verified draft changes no answer, so nothing has to be certified; it only has to pay. Whether it does differs between
code and prose, between one answer at a time and eight, and from hour to hour. So every setting, none included, goes on
being measured on a few requests: the seconds that a token took the engine. What serves is none, until a draft has been
faster by a margin beyond doubt; a draft that stops paying is dropped as soon as its recent level says so.

The level of a setting is an exponentially weighted mean of the logarithm of seconds per token, its doubt the standard
error of that. Requests are few per decision, so it is an estimate, and no test is claimed: being wrong costs time and
no accuracy, and the shares below bound how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from offramp_core.generation.classes import Classes

FIRST_TRIALS = 4  # of a setting, before it is believed to be anything
FIRST_SHARE = 0.10  # of requests, while some setting has had fewer
TRIAL_SHARE = 0.03  # of requests afterwards, over all settings that do not serve
MOST_LOST = 0.01  # of the time, by trials of a setting that is known to be slower than what serves
WEIGHT = 0.15  # of the newest request in a level
MARGIN = 0.03  # by which a draft must be faster than none to begin, as a logarithm
LARGEST_LOAD = 256  # answers at once; more are decided about like these


@dataclass(frozen=True, slots=True)
class Setting:
    """A draft and how many tokens it proposes at a time; ``draft`` empty for none."""

    draft: str = ""
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.draft}:{self.tokens}" if self.draft else "none"


NONE = Setting()


@dataclass(frozen=True, slots=True)
class Context:
    """Requests that are decided about together: their class, the power of two that bounds how many are computed side by
    side, and whether they are sampled: of what is drawn a draft foresees less."""

    request_class: str
    load: int
    sampled: bool = False

    def __str__(self) -> str:
        return f"{self.request_class or 'any class'} at {self.load}" + (" sampled" if self.sampled else "")


@dataclass(slots=True)
class Level:
    """What a setting has taken of late: mean and variance of the logarithm of seconds per token, over ``n`` requests in
    all."""

    n: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        self.n += 1
        weight = max(WEIGHT, 1 / self.n)
        before = value - self.mean
        self.mean += weight * before
        self.variance = (1 - weight) * (self.variance + weight * before * before)

    @property
    def doubt(self) -> float:
        """Standard error of the mean, with as many requests as the weights are worth."""
        worth = min(self.n, (2 - WEIGHT) / WEIGHT)
        return math.sqrt(self.variance / worth) if self.n > 1 else math.inf


@dataclass(slots=True)
class _Book:
    """One context: levels by setting, and which setting serves."""

    levels: dict[Setting, Level]
    serves: Setting = NONE
    at: int = 0  # whose trial is next


@dataclass(slots=True)
class Drafts:
    """Chooses and learns. ``settings`` are the drafts that the reference can verify; without any, none is all there is.

    Deterministic in what it is given: ``draw`` is a uniform number of the caller's. A class that is not known (see
    :mod:`offramp_core.generation.classes`) shares what requests without one have learned.
    """

    settings: Sequence[Setting]
    _books: dict[Context, _Book] = field(default_factory=dict)
    _classes: Classes = field(default_factory=Classes)

    def choose(self, context: Context, *, draw: float) -> Setting:
        """The setting for the next request of a context."""
        if not self.settings:
            return NONE
        if gone := self._classes.count(context.request_class):
            self._books = {known: book for known, book in self._books.items() if known.request_class != gone}
        book = self._book(context)
        others = [s for s in (NONE, *self.settings) if s != book.serves]
        untried = [s for s in (NONE, *self.settings) if book.levels[s].n < FIRST_TRIALS and s != book.serves]
        if draw < (FIRST_SHARE if untried else TRIAL_SHARE):
            book.at += 1
            tried = (untried or others)[book.at % len(untried or others)]
            if untried or draw < _trial_share(book.levels[tried], book.levels[book.serves]):
                return tried
        return book.serves

    def observe(self, context: Context, setting: Setting, *, seconds: float, tokens: int) -> None:
        """A request with so many tokens took the engine so many seconds to write. Ones too short to say anything are
        left out."""
        if not self.settings or tokens < 2 or seconds <= 0:
            return
        book = self._book(context)
        if setting not in book.levels:
            return
        book.levels[setting].add(math.log(seconds / tokens))
        book.serves = self._best(book)

    def drop(self, draft: str) -> None:
        """Never propose by this draft again: it has changed an answer."""
        self.settings = tuple(s for s in self.settings if s.draft != draft)
        for book in self._books.values():
            book.levels = {s: level for s, level in book.levels.items() if s.draft != draft}
            if book.serves.draft == draft:
                book.serves = NONE

    def serving(self) -> dict[Context, Setting]:
        """What serves in each context that was seen, for people."""
        return {context: book.serves for context, book in self._books.items()}

    def _best(self, book: _Book) -> Setting:
        off, serves = book.levels[NONE], book.serves
        if off.n < FIRST_TRIALS:
            return NONE
        tried = [s for s in self.settings if book.levels[s].n >= FIRST_TRIALS]
        best = min(tried, key=lambda s: book.levels[s].mean, default=NONE)
        if serves != NONE:
            # It must still pay, and gives way to another draft only where that is beyond doubt.
            if book.levels[serves].mean >= off.mean:
                return NONE
            return best if _faster(book.levels[best], book.levels[serves]) else serves
        return best if best != NONE and _faster(book.levels[best], off) else NONE

    def _book(self, context: Context) -> _Book:
        """Classes, loads and two kinds of requests are bounded, so these are."""
        name = context.request_class if context.request_class in self._classes else ""
        at = Context(name, min(context.load, LARGEST_LOAD), context.sampled)
        if at not in self._books:
            self._books[at] = _Book({s: Level() for s in (NONE, *self.settings)})
        return self._books[at]


def load_class(running: int) -> int:
    """The power of two that bounds how many answers are computed side by side.

    >>> [load_class(n) for n in (0, 1, 2, 3, 8, 9)]
    [1, 1, 2, 4, 8, 16]
    """
    return 1 << max(0, running - 1).bit_length()


def _trial_share(tried: Level, serves: Level) -> float:
    """Of requests, for one that takes so much longer than what serves: a draft whose answers cannot be computed
    together with others takes several times as long where many are."""
    slower = math.exp(min(tried.mean - serves.mean, 20.0)) - 1
    return TRIAL_SHARE if slower * TRIAL_SHARE <= MOST_LOST else MOST_LOST / slower


def _faster(one: Level, other: Level) -> bool:
    """Whether one setting is faster than another by the margin, two standard errors away from chance."""
    return one.mean + MARGIN + 2 * math.hypot(one.doubt, other.doubt) < other.mean
