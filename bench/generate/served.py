"""A worker's desk whose requests are computed in one of several ways, which take turns; without HTTP and audits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType

from bench.generate.writing import encoded
from offramp_core.generation.drafts import Drafts
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.answers import Piece
from offramp_worker.generate.desk import GenerationDesk
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.plan_target import off_runtime
from offramp_worker.generate.requests import Asked, Wanted
from offramp_worker.generate.routes import Assigned, Dispatch, text_of
from offramp_worker.generate.seam import DecodingRoute, Loaded
from offramp_worker.generate.tickets import Ticket

AUTO = "auto"
END_SECONDS = 60.0


@dataclass(slots=True)
class Stretch:
    """What requests took: the processor's seconds of this process, tokens of answers, and answers by route."""

    seconds: float = 0.0
    tokens: int = 0
    routes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Stretch) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.routes.update(other.routes)


class _InTurns(Dispatch):
    """Hands each request to the one whose turn it is."""

    def __init__(self, ways: Mapping[str, Dispatch]) -> None:
        self.ways, self.now = dict(ways), next(iter(ways))

    def assign(
        self, *, request_class: str, greedy: bool, never_exit: bool, running: int = 0, ahead: int = 0
    ) -> Assigned:
        way = self.ways[self.now]
        return way.assign(
            request_class=request_class, greedy=greedy, never_exit=never_exit, running=running, ahead=ahead
        )

    def learn(self, assigned: Assigned, *, seconds: float, tokens: int, beside: int) -> None:
        self.ways[self.now].learn(assigned, seconds=seconds, tokens=tokens, beside=beside)

    def failed(self, assigned: Assigned) -> None:
        self.ways[self.now].failed(assigned)


class ServedInTurns:
    """Use it as a context manager. ``fixed`` are routes by name; :data:`AUTO` chooses drafts by what they save."""

    def __init__(self, bundle: Loaded, fixed: Mapping[str, DecodingRoute]) -> None:
        self._bundle = bundle
        self._accounts = Accounts(GenerationMetrics())
        off = off_runtime(bundle.bundle, self._accounts.counters, digest="", audit_rate=0.0)
        self._arms = Arms(off, uid="bench", clock=time.monotonic)
        self._ways = _InTurns({name: Dispatch(self._arms, (), reference=route) for name, route in fixed.items()})
        self._ended: SimpleQueue[tuple[Ticket, Piece]] = SimpleQueue()
        self._desk = GenerationDesk(bundle, accounts=self._accounts, dispatch=self._ways, deliver=self._delivered)

    def __enter__(self) -> ServedInTurns:
        self._desk.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._desk.close()
        self._desk.join(END_SECONDS)

    def learn_with(self, drafts: Drafts) -> None:
        """Begin anew with :data:`AUTO`."""
        self._ways.ways[AUTO] = Dispatch(self._arms, (), drafts=drafts)

    def answer(
        self, way: str, prompts: Sequence[str], *, at_once: int, tokens: int, request_class: str = ""
    ) -> Stretch:
        """Ask so many at once: the next one as soon as one has its answer."""
        self._ways.now, found, open_ = way, Stretch(), 0
        asked = [self._asked(prompt, tokens, request_class) for prompt in reversed(prompts)]
        began = time.process_time()
        while asked or open_:
            while asked and open_ < at_once:
                self._desk.submit(asked.pop())
                open_ += 1
            ticket, piece = self._ended.get()
            if piece.error:
                raise RuntimeError(piece.error)
            self._desk.taken(ticket)
            open_ -= 1
            found.tokens += len(ticket.answer.tokens)
            found.routes[text_of(ticket.assigned.reference)] += 1
        found.seconds = time.process_time() - began
        return found

    def _asked(self, prompt: str, tokens: int, request_class: str) -> Asked:
        ids = tuple(encoded(self._bundle, prompt))
        return Asked(Wanted("completion", "", (), request_class=request_class), (ids,), (tokens,))

    def _delivered(self, pieces: list[tuple[Ticket, Piece]]) -> None:
        for ticket, piece in pieces:
            if piece.last:
                self._ended.put((ticket, piece))
