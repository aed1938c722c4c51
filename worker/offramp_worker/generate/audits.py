"""Greedy answers that are run to the reference after their reply, in the background, within a share of what the engine can do.

A request is drawn by one uniform number at its admission, before anything is known of its answer. While the backlog is full nobody is drawn: the
decision hangs on what is owed and not on the request, so those that are drawn stay a fair sample, and each record has the rate it was
drawn with. What is drawn is never dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from offramp_core.generation.losses import Output, all_losses
from offramp_worker.generate.answers import Answer
from offramp_worker.generate.routes import Assigned
from offramp_worker.generate.seam import GenerationEngine, NoRoomError, Progress, Route, Sampling, Token, Tokenizer
from offramp_worker.generate.tickets import Ticket
from offramp_worker.logs import log_event

MAX_OWED = 256
MAX_OWED_TOKENS = 1_000_000  # of their prompts and answers
TIE_MARGIN = 1e-3  # of logits; closer ones may change places where arithmetic is done in another order
PIECE = 64
Equality = Literal["equal", "tie", "different"]


@dataclass(frozen=True, slots=True)
class Owed:
    """An answer that was given, and what it takes to ask the reference the same. ``n_tokens`` were served; where the client left in between
    that is all there is to compare."""

    prompt: tuple[int, ...]
    max_tokens: int
    stops: tuple[str, ...]
    served: str
    tokens: tuple[int, ...]
    assigned: Assigned
    draw: float
    audit_rate: float
    wall_time: float
    request_class: str
    source: str

    @property
    def size(self) -> int:
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Audited:
    """The verdict on one answer: its losses, and whether its tokens are the reference's."""

    owed: Owed
    losses: dict[Output, float]
    equality: Equality


def owed_by(ticket: Ticket) -> Owed | None:
    """What the audit of an answered request needs; None where nothing was served."""
    tokens = tuple(t.id for t in ticket.answer.tokens)
    if not tokens:
        return None
    limit = ticket.max_tokens
    if ticket.answer.finish is None:
        ticket.answer.take((), ended=True)  # what was held back was part of the answer as well
        limit = len(tokens)
    return Owed(
        ticket.prompt, limit, ticket.stops, ticket.answer.text, tokens, ticket.assigned, ticket.draw, ticket.audit_rate,
        ticket.wall_time, ticket.request_class, ticket.source,
    )  # fmt: skip


class AuditDesk:
    """The backlog, one audit under way, and the share of time that they may have. Used by the engine's thread alone, but for what is said so."""

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Tokenizer,
        *,
        share: float,
        judge: Callable[[Audited], None],
        lost: Callable[[Owed], None],
        spend: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        """``share`` of the engine's time may go into audits while requests are served; all of it while there are none. ``judge`` is told every
        verdict, ``lost`` of what could not be compared, ``spend`` the seconds."""
        self._engine, self._tokenizer, self._share = engine, tokenizer, share
        self._judge, self._lost, self._spend, self._clock = judge, lost, spend, clock
        self._backlog: deque[Owed] = deque()
        self._now: tuple[Owed, int, Answer] | None = None
        self._promised = self._promised_tokens = 0
        self._credit = 0.0

    def __len__(self) -> int:
        """Drawn and not compared yet, those included whose answer is still being written; from any thread."""
        return self._promised

    def open_to(self, tokens: int) -> bool:
        """Whether one more may be drawn; from any thread."""
        return self._promised < MAX_OWED and self._promised_tokens + tokens <= MAX_OWED_TOKENS

    def promise(self, tokens: int) -> None:
        """A request was drawn."""
        self._promised += 1
        self._promised_tokens += tokens

    def withdraw(self, tokens: int) -> None:
        """Nothing was served of a request that had been drawn, or it is compared now."""
        self._promised -= 1
        self._promised_tokens -= tokens

    def add(self, owed: Owed) -> None:
        self._backlog.append(owed)

    def served(self, seconds: float) -> None:
        """The engine worked for requests."""
        self._credit += seconds * self._share / (1 - self._share)

    @property
    def next_bytes(self) -> int | None:
        """What the caches of the next audit need, if one waits and none is under way."""
        if self._now is not None or not self._backlog:
            return None
        return self._engine.cache_bytes(self._backlog[0].size, route=Route())

    @property
    def due(self) -> bool:
        """Whether it is the turn of audits although requests are served."""
        return self._credit > 0 and (self._now is not None or bool(self._backlog))

    @property
    def pending(self) -> bool:
        return self._now is not None or bool(self._backlog)

    def step(self) -> bool:
        """Compute a little of one audit; False where there is no room for it now."""
        if self._now is None and not self._begin():
            return False
        if self._now is None:
            return True
        owed, sequence, answer = self._now
        began = self._clock()
        try:
            progress = self._engine.step([sequence], prompt_tokens=PIECE)[0]
        except Exception as error:
            progress = Progress(sequence, ended=True, error=str(error) or type(error).__name__)
        seconds = self._clock() - began
        self._credit = max(self._credit - seconds, -60.0)
        self._spend(seconds)
        self._took(owed, answer, progress)
        return True

    def abandon(self) -> int:
        """Give up what is left, when the process ends; how many."""
        left, self._backlog = len(self._backlog) + (self._now is not None), deque()
        if self._now is not None:
            self._engine.cancel(self._now[1])
            self._now = None
        return left

    def _begin(self) -> bool:
        owed = self._backlog[0]
        greedy = Sampling()
        try:
            sequence = self._engine.start(owed.prompt, max_tokens=owed.max_tokens, sampling=greedy, route=Route())
        except NoRoomError:
            return False
        except Exception as error:
            self._backlog.popleft()
            self._give_up(owed, str(error))
            return True
        self._backlog.popleft()
        ends = self._engine.bundle.end_tokens
        self._now = owed, sequence, Answer(self._tokenizer.decoder(), stops=owed.stops, end_tokens=ends)
        return True

    def _took(self, owed: Owed, answer: Answer, progress: Progress) -> None:
        if progress.error:
            self._engine.cancel(progress.sequence)
            self._now = None
            self._give_up(owed, progress.error)
            return
        answer.take(progress.tokens, ended=progress.ended)
        if answer.finish is None:
            return
        if not progress.ended:
            self._engine.cancel(progress.sequence)
        self._now = None
        self.withdraw(owed.size)
        self._judge(Audited(owed, all_losses(owed.served, answer.text), equality(owed.tokens, answer.tokens)))

    def _give_up(self, owed: Owed, error: str) -> None:
        """What cannot be compared counts against the plan: losing it would bias the count towards agreement."""
        log_event("audit-lost", level="error", error=error)
        self.withdraw(owed.size)
        self._lost(owed)


def equality(served: Sequence[int], reference: Sequence[Token]) -> Equality:
    """Whether answers have the same tokens; ``tie`` where the first difference is one between logits that are as good as equal.

    Behind a tie answers go different ways and nothing more can be said. The shorter of a whole answer and the longer one differ as well.
    """
    for ours, theirs in zip(served, reference, strict=False):
        if ours != theirs.id:
            return "tie" if theirs.margin < TIE_MARGIN else "different"
    return "equal" if len(served) == len(reference) else "different"
