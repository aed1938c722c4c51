"""Greedy answers that are run to the reference after their reply, in the background, within a share of what the engine
can do.

A request is drawn by one uniform number at its admission, before anything is known of its answer. While the backlog is
full nobody is drawn: the decision hangs on what is owed and not on the request, so those that are drawn stay a fair
sample, and each record has the rate it was drawn with. It is full where more could not be done in time within the
share, by what audits took lately; one may always be owed. What is drawn is never dropped.

An audit asks every variant the same prompt, so that one record says what each plan would have lost; what was served is
not computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from offramp_core.generation.losses import AnswerLosses, Output
from offramp_worker.generate.answers import GeneratedAnswer, Given
from offramp_worker.generate.routes import Assigned
from offramp_worker.generate.seam import (
    REFERENCE,
    AwayError,
    DecodingRoute,
    GenerationEngine,
    NoRoomError,
    Sampling,
    SequenceProgress,
    Token,
    Tokenizer,
)
from offramp_worker.generate.tickets import Ticket
from offramp_worker.logs import log_event

MAX_OWED = 256
MAX_OWED_TOKENS = 1_000_000  # of their prompts and answers
MAX_OWED_SECONDS = 60.0  # until all of it is done beside requests; half of what a canary's step waits for it
MAX_DEBT_SECONDS = 30.0  # of which audits have no share after they took idle time
NEWEST = 0.1  # weight of the newest audit in what one takes
TIE_MARGIN = 1e-3  # of logits; closer ones may change places where arithmetic is done in another order
PIECE = 64
GREEDY = Sampling(logprobs=True)  # what is compared: with log probabilities, of which an answer's uncertainty is made
Equality = Literal["equal", "tie", "different"]


@dataclass(frozen=True, slots=True)
class Owed:
    """An answer that was served, and what it takes to ask other variants the same. ``asked`` are the variants whose
    answers are there by now.

    Where the client left in between, ``max_tokens`` is what it had been served: that is all there is to compare.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stops: tuple[str, ...]
    served: Given
    asked: Mapping[str, Given]
    assigned: Assigned
    draw: float
    audit_rate: float
    wall_time: float
    request_class: str
    source: str
    repeats: bool

    @property
    def size(self) -> int:
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Audited:
    """The verdict on one answer: what it lost, what each lossy variant's would have, how unsure each was, and whether
    the tokens served are the reference's. ``losses`` and ``uncertainty`` are by variant, without those that were away;
    one that broke off counts as sure of an answer that lost everything."""

    owed: Owed
    served: dict[Output, float]
    losses: dict[str, dict[Output, float]]
    uncertainty: dict[str, float]
    equality: Equality


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What one variant's answer to an audit still needs: tokens of its ``prompt`` to read and ``tokens`` to write, in
    caches of so many bytes."""

    prompt: int
    tokens: int
    cache_bytes: int


@dataclass(slots=True)
class _Running:
    """An audit under way: the variants that are still to be asked, those that broke off, and the answer that grows."""

    owed: Owed
    left: deque[str]
    given: dict[str, Given] = field(default_factory=dict)
    broke: list[str] = field(default_factory=list)
    seconds: float = 0.0
    variant: str = ""
    sequence: int | None = None
    answer: GeneratedAnswer | None = None


def owed_by(ticket: Ticket) -> Owed | None:
    """What the audit of an answered request needs; None where nothing was served."""
    tokens = tuple(ticket.answer.tokens)
    if not tokens:
        return None
    limit = ticket.max_tokens
    asked = dict(ticket.asked)
    if ticket.answer.finish is None:
        ticket.answer.take((), ended=True)  # what was held back was part of the answer as well
        limit, asked = len(tokens), {}
    served = Given(ticket.answer.text, tokens)
    route = ticket.assigned.route(ticket.step)
    if limit == ticket.max_tokens and not route.draft:
        asked[route.variant] = served
    return Owed(
        ticket.prompt,
        limit,
        ticket.stops,
        served,
        asked,
        ticket.assigned,
        ticket.draw,
        ticket.audit_rate,
        ticket.wall_time,
        ticket.request_class,
        ticket.source,
        ticket.repeats,
    )


class AuditDesk:
    """The backlog, one audit under way, and the share of time that they may have. Used by the engine's thread alone,
    but for what is said so."""

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Tokenizer,
        *,
        share: float,
        compare: AnswerLosses,
        judge: Callable[[Audited], None],
        lost: Callable[[Owed], None],
        spend: Callable[[Owed, float, float], None],
        clock: Callable[[], float],
    ) -> None:
        """``share`` of the engine's time may go into audits while requests are served; all of it while there are none.
        ``judge`` gets every verdict, ``lost`` of what could not be compared, ``spend`` the seconds that some
        of one took, and for which it kept the engine busy."""
        self._engine, self._tokenizer, self._share, self._compare = engine, tokenizer, share, compare
        self._judge, self._lost, self._spend, self._clock = judge, lost, spend, clock
        self._variants = [v.name for v in engine.bundle.variants]
        self._backlog: deque[Owed] = deque()
        self._now: _Running | None = None
        self._promised = self._promised_tokens = 0
        self._credit = self._each = 0.0  # ``each``: seconds that an audit took lately

    def __len__(self) -> int:
        """Drawn and not compared yet, those included whose answer is still being written; from any thread."""
        return self._promised

    def open_to(self, tokens: int, drawn: int = 0) -> bool:
        """Whether one more may be drawn, beside so many of the same request; ``tokens`` are those of all of them. From
        any thread."""
        now, owed = self._now, self._promised + drawn
        each = max(self._each, now.seconds if now is not None else 0.0)
        in_time = not owed or (owed + 1) * each <= MAX_OWED_SECONDS * self._share
        return in_time and owed < MAX_OWED and self._promised_tokens + tokens <= MAX_OWED_TOKENS

    def promise(self, tokens: int) -> None:
        """A request was drawn."""
        self._promised += 1
        self._promised_tokens += tokens

    def withdraw(self, tokens: int) -> None:
        """Nothing was served of a request that had been drawn, or it is compared now."""
        self._promised -= 1
        self._promised_tokens -= tokens

    def take_over(self, ticket: Ticket, *, served: bool) -> bool:
        """A request that was drawn has ended; whether there is anything to compare."""
        self.withdraw(ticket.size)
        owed = owed_by(ticket) if served else None
        if owed is None:
            return False
        self.promise(owed.size)
        self._backlog.append(owed)
        return True

    def served(self, seconds: float) -> None:
        """The engine worked for requests."""
        self._credit += seconds * self._share / (1 - self._share)

    @property
    def next_bytes(self) -> int | None:
        """What the caches of the next audit need, if one waits and none is under way."""
        if self._now is not None or not self._backlog:
            return None
        return max(
            self._engine.cache_bytes(self._backlog[0].size, route=DecodingRoute(name)) for name in self._variants
        )

    @property
    def under_way(self) -> UnderWay | None:
        """The audit that has room in the caches, if there is one; from any thread."""
        now = self._now
        if now is None or (answer := now.answer) is None:
            return None
        needed, written = self._engine.cache_bytes(now.owed.size, route=DecodingRoute(now.variant)), len(answer.tokens)
        return UnderWay(0 if written else len(now.owed.prompt), now.owed.max_tokens - written, needed)

    @property
    def due(self) -> bool:
        """Whether it is the turn of audits although requests are served."""
        return self._credit > 0 and self.pending

    @property
    def pending(self) -> bool:
        return self._now is not None or bool(self._backlog)

    def step(self) -> bool:
        """Compute a little of one audit; False where there is no room for it now."""
        if self._now is None:
            owed = self._backlog.popleft()
            self._now = _Running(owed, deque(n for n in self._variants if n not in owed.asked), dict(owed.asked))
        now = self._now
        if now.sequence is None and not self._begin(now):
            return False
        if now.sequence is None:
            return True
        began = self._clock()
        try:
            progress = self._engine.step([now.sequence], prompt_tokens=PIECE)[0]
        except Exception as error:
            progress = SequenceProgress(now.sequence, ended=True, error=str(error) or type(error).__name__)
        seconds = self._clock() - began
        now.seconds += seconds
        self._credit = max(self._credit - seconds, -max(seconds, MAX_DEBT_SECONDS * self._share))
        self._spend(now.owed, progress.seconds or seconds, progress.busy or seconds)
        self._took(now, progress)
        return True

    def abandon(self) -> int:
        """Give up what is left, when the process ends; how many."""
        left, self._backlog = len(self._backlog) + (self._now is not None), deque()
        if self._now is not None:
            if self._now.sequence is not None:
                self._engine.cancel(self._now.sequence)
            self._now = None
        return left

    def _begin(self, now: _Running) -> bool:
        """Ask the next variant, or judge where there is none left; False where there is no room."""
        if not now.left:
            self._finish(now)
            return True
        owed, variant = now.owed, now.left[0]
        try:
            now.sequence = self._engine.start(
                owed.prompt, max_tokens=owed.max_tokens, sampling=GREEDY, route=DecodingRoute(variant)
            )
        except NoRoomError as error:
            if not isinstance(error, AwayError) or variant == REFERENCE:
                return False
            now.left.popleft()  # nobody knows for how long: the other plans' evidence does not wait for it
            return True
        except Exception as error:
            now.variant = now.left.popleft()
            self._broke_off(now, str(error))
            return True
        now.variant = now.left.popleft()
        now.answer = GeneratedAnswer(
            self._tokenizer.decoder(), stops=owed.stops, end_tokens=self._engine.bundle.end_tokens
        )
        return True

    def _took(self, now: _Running, progress: SequenceProgress) -> None:
        assert now.answer is not None
        if progress.error:
            self._engine.cancel(progress.sequence)
            self._broke_off(now, progress.error)
            return
        now.answer.take(progress.tokens, ended=progress.ended)
        if now.answer.finish is None:
            return
        if not progress.ended:
            self._engine.cancel(progress.sequence)
        now.given[now.variant] = Given(now.answer.text, tuple(now.answer.tokens))
        now.sequence = now.answer = None
        if not now.left:
            self._finish(now)

    def _broke_off(self, now: _Running, error: str) -> None:
        """Without the reference's answer there is no verdict; another variant's is as good as lost."""
        now.sequence = now.answer = None
        if now.variant == REFERENCE:
            self._give_up(now, error)
            return
        log_event("audit-broke-off", level="error", variant=now.variant, error=error)
        now.broke.append(now.variant)

    def _done(self, now: _Running) -> None:
        self._each += (now.seconds - self._each) * (NEWEST if self._each else 1.0)
        self._now = None
        self.withdraw(now.owed.size)

    def _finish(self, now: _Running) -> None:
        self._done(now)
        owed, reference = now.owed, now.given[REFERENCE]
        lossy = {name: given for name, given in now.given.items() if name != REFERENCE}
        self._judge(
            Audited(
                owed,
                self._compare(owed.served.text, reference.text),
                {name: self._compare(given.text, reference.text) for name, given in lossy.items()}
                | {name: dict.fromkeys(Output, 1.0) for name in now.broke},
                {name: given.uncertainty for name, given in lossy.items()} | dict.fromkeys(now.broke, 0.0),
                equality([token.id for token in owed.served.tokens], reference.tokens),
            )
        )

    def _give_up(self, now: _Running, error: str) -> None:
        """What cannot be compared counts against the plan: losing it would bias the count towards agreement."""
        log_event("audit-lost", level="error", error=error)
        self._done(now)
        self._lost(now.owed)


def equality(served: Sequence[int], reference: Sequence[Token]) -> Equality:
    """Whether answers have the same tokens; ``tie`` where the first difference is one between logits that are as good
    as equal.

    Behind a tie answers go different ways and no more can be compared. The shorter of a whole answer and the longer
    one differ as well.
    """
    for ours, theirs in zip(served, reference, strict=False):
        if ours != theirs.id:
            return "tie" if theirs.margin < TIE_MARGIN else "different"
    return "equal" if len(served) == len(reference) else "different"
