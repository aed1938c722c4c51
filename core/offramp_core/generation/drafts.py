"""Which draft proposes tokens to the reference: decided by what it has saved of late, per class of requests and load,
never by what it should save.

A verified draft changes no answer, so nothing has to be certified; it only has to pay. Whether it does differs between
code and prose, between one answer at a time and eight, and from hour to hour. So every setting, none included, goes on
being measured on a few requests: the seconds that a token took the engine. What serves is none, until the trials of a
draft have together saved the time of a request; a draft that has lost again what it had saved of late is dropped, and
what was known of the others is forgotten with it.

Trials cost what they cost: a draft whose answers cannot be computed together with others may take several times as long
where many are. Requests without a trial earn an allowance, a share of what they take; trials spend it, at first by what
is expected of the setting (its level here, or in another context, or what the bundle's maker measured), then by what
they took (:mod:`offramp_core.generation.levels`). So trials come often where they cost nothing, and hardly ever where
they cost much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offramp_core.generation.classes import Classes
from offramp_core.generation.levels import (
    FIRST_TRIALS,
    NONE,
    STAKE,
    WEIGHT,
    Book,
    Level,
    Setting,
    likely_faster,
)

FIRST_SHARE = 0.50  # of requests are trials at most, while some setting has had fewer than the first ones
MAKERS = 0.5  # requests, that the maker's figure of a setting is worth beside its level
TRIAL_SHARE = 0.03  # of requests, over all settings that do not serve
MOST_FAILURES = 2  # of a draft in a row; with more it is off for good
FORGIVEN = 0.1  # of a failure, by each answer that did not fail
LARGEST_LOAD = 256  # answers at once; more are decided about like these
SHORTEST, LONGEST = 1e-9, 1e9  # seconds per token; others are no measurement


class Context(NamedTuple):
    """Requests that are decided about together: their class, the power of two that bounds how many are computed side by
    side, and whether they are sampled: of what is drawn a draft foresees less."""

    request_class: str
    load: int
    sampled: bool = False

    def __str__(self) -> str:
        return f"{self.request_class or 'any class'} at {self.load}" + (" sampled" if self.sampled else "")


@dataclass(slots=True)
class Drafts:
    """Chooses and learns. ``settings`` are the drafts that the reference can verify; without any, none is all there is.
    ``ratios`` are times per token over those of none, as somebody measured them for one answer at a time: what is tried
    first, and no more.

    Deterministic in what it is given: ``draw`` is a uniform number of the caller's. A class that is not known (see
    :mod:`offramp_core.generation.classes`) shares what requests without one have learned.
    """

    settings: Sequence[Setting]
    ratios: Mapping[Setting, float] = field(default_factory=dict)
    _books: dict[Context, Book] = field(default_factory=dict)
    _classes: Classes = field(default_factory=Classes)
    #: Answers written side by side of late, by load at admission.
    _beside: dict[int, float] = field(default_factory=dict)
    _failures: dict[str, float] = field(default_factory=dict)  # of late, by draft

    def choose(self, context: Context, *, draw: float, ahead: int = 0) -> Setting:
        """The setting for the next request of a context; ``ahead`` of it are computed or wait, of which nothing is
        known yet."""
        if not self.settings:
            return NONE
        if gone := self._classes.count(context.request_class):
            self._books = {known: book for known, book in self._books.items() if known.request_class != gone}
        at = self._at(context)
        book = self._book(at)
        book.earn()
        if book.plain:
            book.plain -= 1
            return NONE
        open_for = max(2 * (at.load - 1), ahead)
        if book.by_prior:
            return book.serve_first(none=draw < FIRST_SHARE, open_for=open_for)
        tried = self._candidate(at, book, draw)
        if tried is None:
            return book.serves
        # What none takes shows only where all beside have none as well.
        many = 2 * at.load if tried == NONE and at.load > 1 else 1
        expected, waiting = self._expected(at, tried), ahead + 1 - at.load
        if not book.spend(tried, expected, open_for=open_for, waiting=waiting, many=many):
            return book.serves
        book.plain = many - 1
        return tried

    def observe(self, context: Context, setting: Setting, *, seconds: float, tokens: int, beside: int) -> None:
        """A request with so many tokens took the engine so many seconds to write, as one of ``beside`` answers side by
        side: they may be others than those of its context, when it was admitted. It may have been cancelled before it
        was whole: clients that give up must not hide what is slow."""
        if not self.settings or tokens < 1 or not SHORTEST < seconds / tokens < LONGEST:
            return
        if setting.draft in self._failures:
            self._failures[setting.draft] = max(0.0, self._failures[setting.draft] - FORGIVEN)
        mean = self._beside.get(context.load, beside)
        self._beside[context.load] = mean + WEIGHT * (beside - mean)
        at = self._known(context, load_class(beside))
        book = self._book(at)
        if setting not in book.levels:
            return
        expected = 0.0 if setting == book.serves else self._expected(at, setting)
        book.add(setting, math.log(seconds / tokens), tokens, expected=expected)
        # None alone says nothing new of drafts: a machine that has become slower must not look like one that pays.
        if setting != NONE or book.serves != NONE or book.levels[NONE].n <= FIRST_TRIALS:
            self._judge(book)

    def fail(self, context: Context, setting: Setting) -> bool:
        """Computing an answer with this setting failed. Whether its draft is off for good with that."""
        if setting not in self.settings:
            return False
        at = self._at(context)
        book = self._book(at)
        if book.levels[NONE].n:
            book.fail(setting, expected=self._expected(at, setting))
            self._judge(book)
        self._failures[setting.draft] = self._failures.get(setting.draft, 0.0) + 1
        if self._failures[setting.draft] <= MOST_FAILURES:
            return False
        self.drop(setting.draft)
        return True

    def _judge(self, book: Book) -> None:
        best = self._best(book)
        if best == NONE != book.serves:
            book.forget_all_but(NONE, book.serves)  # they were measured on what it had foreseen
            book.saved[book.serves] = 0.0
        elif best != NONE != book.serves:  # what the new one saved before counts no more than what is left
            book.saved[best] = book.saved.get(book.serves, 0.0)
        book.serves = best

    def drop(self, draft: str) -> None:
        """Never propose by this draft again: it has changed an answer, or failed."""
        self.settings = tuple(s for s in self.settings if s.draft != draft)
        for book in self._books.values():
            book.levels = {s: level for s, level in book.levels.items() if s.draft != draft}
            if book.serves.draft == draft:
                book.serves = NONE

    def serving(self) -> dict[Context, Setting]:
        """What serves in each context that was seen, for people; from any thread."""
        return {context: book.serves for context, book in list(self._books.items())}

    def serves(self, context: Context) -> Setting:
        """What serves a context now, for requests of which nothing is learned."""
        book = self._books.get(self._at(context))
        return book.serves if book is not None else NONE

    def _candidate(self, at: Context, book: Book, draw: float) -> Setting | None:
        """Whose trial it would be, once what serves has been measured: a fair turn at times. Beside those, while none
        serves, drafts that may be tried further: who had few trials and has begun to pay, then who is expected to cost
        least."""
        if not book.levels[book.serves].n or draw >= FIRST_SHARE or book.allowance < 0:
            return None
        if book.serves == NONE and not book.may_begin:
            return None
        if draw < TRIAL_SHARE:
            return book.next_turn()
        if book.serves != NONE:
            return self._rival(at, book)
        open_ = [s for s in self.settings if book.is_open(s)]
        promising = [s for s in open_ if book.promises(s) and book.levels[s].n < FIRST_TRIALS]
        return min(promising or open_, key=lambda s: self._expected(at, s), default=None)

    def _rival(self, at: Context, book: Book) -> Setting | None:
        """Who may be faster than the draft that serves, or was never tried."""
        level, others = book.levels[book.serves].mean, [s for s in self.settings if s != book.serves]
        hoped = {s: self._hoped(at, s) for s in others}
        rivals = [s for s in others if hoped[s] < level or not book.levels[s].n]
        return min(rivals, key=lambda s: hoped[s], default=None)

    def _hoped(self, at: Context, setting: Setting) -> float:
        """As :meth:`_expected`, and what the bundle's maker measured, for one answer at a time, counts a little."""
        levels = self._books[at].levels
        own = levels[setting]
        if at.load > 1 or not own.n or not levels[NONE].n or setting not in self.ratios:
            return self._expected(at, setting)
        maker = levels[NONE].mean + math.log(self.ratios[setting])
        return (own.n * own.mean + MAKERS * maker) / (own.n + MAKERS)

    def _expected(self, at: Context, setting: Setting) -> float:
        """Logarithm of the seconds that a token should take: a draft's answers are computed alone, so what is known of
        one load is the best guess for the others."""
        own = self._books[at].levels[setting]
        if own.n:
            return own.mean
        elsewhere = self._best_known(setting, self._books)
        if elsewhere is not None:
            return elsewhere.mean
        alone = self._best_known(NONE, (context for context in self._books if context.load == 1))
        none = alone.mean if alone is not None else self._books[at].levels[NONE].mean + math.log(at.load)
        return none + math.log(self.ratios.get(setting, 1.0))

    def _best_known(self, setting: Setting, contexts: Iterable[Context]) -> Level | None:
        """The level that most requests in one of these contexts stand for."""
        levels = (self._books[context].levels[setting] for context in contexts)
        return max((level for level in levels if level.n), key=lambda level: level.n, default=None)

    def _best(self, book: Book) -> Setting:
        serves, tried = book.serves, [s for s in self.settings if book.levels[s].n >= FIRST_TRIALS]
        if book.levels[NONE].n < FIRST_TRIALS:
            return NONE
        if serves == NONE:
            paying = [s for s in tried if book.pays(s)] if book.may_begin else []
            return min(paying, key=lambda s: book.levels[s].mean, default=NONE)
        if not book.pays(serves):
            return NONE
        # Among drafts that pay it costs little to be wrong, and much to wait until there is no doubt.
        best = min(tried, key=lambda s: book.levels[s].mean, default=serves)
        return best if likely_faster(book.levels[best], book.levels[serves]) else serves

    def _at(self, context: Context) -> Context:
        """Whose book decides: some of those that are computed may read their prompts, or end soon."""
        return self._known(context, load_class(round(self._beside.get(context.load, context.load))))

    def _known(self, context: Context, load: int) -> Context:
        """Classes, loads and two kinds of requests are bounded, so books are."""
        name = context.request_class
        return Context(name if name and name in self._classes else "", load, context.sampled)

    def _book(self, at: Context) -> Book:
        book = self._books.get(at)
        if book is None:
            stake = STAKE if at.load == 1 else 0.0
            shared = self._books.get(at._replace(request_class=""))
            if shared is not None:
                book = shared.prior()
            else:
                book = Book({s: Level() for s in (NONE, *self.settings)}, allowance=stake, stake=stake)
            self._books[at] = book
        return book


def load_class(running: int) -> int:
    """The power of two that bounds how many answers are computed side by side, 256 at most.

    >>> [load_class(n) for n in (0, 1, 2, 3, 8, 9, 900)]
    [1, 1, 2, 4, 8, 16, 256]
    """
    return min(1 << max(0, running - 1).bit_length(), LARGEST_LOAD)
