"""Where requests for generation wait, are computed in turns and are audited: one thread, which alone touches the engine.

The event loop's thread lets requests in (:meth:`GenerationDesk.submit`) or turns them away, and may cancel them. Everything about whose turn it is
decides :mod:`offramp_core.generation.turns`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from offramp_core.generation.admission import Closed, Limits, Load, Pace, Refused, admit, reply_bytes
from offramp_core.generation.columns import answer_uncertainty
from offramp_core.generation.losses import Losses
from offramp_core.generation.turns import Reading, Waiting, next_prompt, next_to_begin, piece
from offramp_core.reasons import RequestOutcome
from offramp_worker.engine.marker import CrashMarker
from offramp_worker.engine.vitals import Vitals
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.answers import Answer, Given, Piece
from offramp_worker.generate.audits import AuditDesk, owed_by
from offramp_worker.generate.requests import MAX_SEED, Asked, RequestError
from offramp_worker.generate.routes import Dispatch
from offramp_worker.generate.seam import (
    CacheMemory,
    GenerationEngine,
    Loaded,
    NoRoomError,
    Progress,
    Sampling,
)
from offramp_worker.generate.tickets import ClosedError, Deliver, Ticket
from offramp_worker.logs import log_event

SHUT = "the worker is shutting down"
ABANDON_SECONDS = 5.0  # for a step that is under way


@dataclass(frozen=True, slots=True)
class DeskOptions:
    """What a desk is told. ``audit_share`` of the engine's time may go into audits while requests are served; ``compare`` says what an answer lost;
    ``marker`` notes a canary that is being computed."""

    limits: Limits = field(default_factory=Limits)
    audit_share: float = 0.1
    compare: Losses = field(default_factory=Losses)
    marker: CrashMarker = field(default_factory=lambda: CrashMarker(None))


class GenerationDesk:
    """See the module."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        accounts: Accounts,
        dispatch: Dispatch,
        deliver: Deliver,
        options: DeskOptions | None = None,
        lost: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        draw: Callable[[], float] | None = None,
    ) -> None:
        """``deliver`` is called in the engine's thread with what can be shown; ``lost`` when only a new process may help."""
        self.bundle, self.accounts, self._dispatch = loaded.bundle, accounts, dispatch
        self._engine: GenerationEngine = loaded.engine
        self._tokenizer, self._deliver = loaded.tokenizer, deliver
        self._options = options or DeskOptions()
        self._clock, self._wall_clock = clock, wall_clock
        self._draw = draw or random.SystemRandom().random
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []  # under the condition, as all that both threads change
        self._running: list[Ticket] = []
        self._left: deque[Ticket] = deque()  # cancelled ones that run
        self._reply_bytes = 0
        self._number = 0
        self._pace = Pace()
        self._closing = False
        self._ending = self._abandoned = False
        self.vitals = Vitals(probe=lambda _: self._engine.probe(), recovered=self._recovered, lost=lost)
        self._audits = AuditDesk(
            self._engine, self._tokenizer, share=self._options.audit_share, compare=self._options.compare,
            judge=accounts.judged, lost=accounts.audit_lost, spend=accounts.audit_spent, clock=clock,
        )  # fmt: skip
        self._compares = (
            len(loaded.bundle.variants) > 1
        )  # whether an audit of the reference's own answers says anything
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)

    # --- the event loop's side --------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> Load:
        """What is taken on now."""
        with self._changed:
            return self._load()

    @property
    def memory(self) -> CacheMemory:
        """What caches take."""
        return self._engine.memory()

    @property
    def audits_owed(self) -> int:
        return len(self._audits)

    def submit(self, asked: Asked) -> list[Ticket]:
        """Let a request in: one ticket per answer.

        Raises
        ------
        ClosedError
            It comes at a bad time.
        RequestError
            It could never be served: its caches are larger than all the memory there is for them.
        """
        wanted = asked.wanted
        reply = sum(
            reply_bytes(max_tokens=n, logprobs=wanted.sampling.logprobs, top_logprobs=wanted.sampling.top_logprobs)
            for n in asked.max_tokens
        )
        if reply > self._options.limits.reply_bytes:
            most = self._options.limits.reply_bytes
            raise RequestError(
                "max_tokens",
                f"the reply may take {reply} bytes of at most {most}; ask for fewer tokens, answers or log probabilities",
            )
        with self._changed:
            self._check_open(answers=len(asked.prompts), reply=reply)
            tickets = [self._ticket(asked, i, reply // len(asked.prompts)) for i in range(len(asked.prompts))]
            for ticket in tickets:
                self._reply_bytes += ticket.reply_bytes
                if ticket.audited:
                    self._audits.promise(len(ticket.prompt) + ticket.max_tokens)
            self._waiting += tickets
            self._changed.notify()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more. Computing it stops before the next round."""
        with self._changed:
            if ticket.cancelled or ticket.ended:
                return
            ticket.cancelled = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._close_books(ticket, RequestOutcome.CANCELLED)
            else:
                self._left.append(ticket)
            self._changed.notify()

    def taken(self, ticket: Ticket) -> None:
        """The client has its reply, or has gone: its memory is free. To be called once per ticket."""
        with self._changed:
            self._reply_bytes -= ticket.reply_bytes

    def close(self) -> None:
        """Take no more requests; those that were admitted go on."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def end_answers(self) -> None:
        """Take no more requests, and end those that were admitted, each with an error; audits go on."""
        with self._changed:
            self._closing = self._ending = True
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait until everything is answered and audited; after :meth:`close`. Whether it was."""
        self._thread.join(seconds)
        done = not self._thread.is_alive()
        if not done:
            with self._changed:
                self._closing = self._ending = self._abandoned = True
                self._changed.notify()
            self._thread.join(ABANDON_SECONDS)
        self.vitals.close()
        return done

    def _check_open(self, *, answers: int, reply: int) -> None:
        if self._closing or self.vitals.trouble:
            refused = Refused(Closed.NOT_READY, self.vitals.trouble or SHUT, 1)
            raise ClosedError(refused, status=503)
        refused_now = admit(self._load(), self._options.limits, answers=answers, reply=reply)
        if refused_now is not None:
            raise ClosedError(refused_now)

    def _load(self) -> Load:
        ahead = sum(self._pace.seconds(prompt=len(t.prompt), max_tokens=t.max_tokens) for t in self._waiting)
        return Load(len(self._waiting), len(self._running), self._reply_bytes, ahead)

    def _ticket(self, asked: Asked, i: int, reply: int) -> Ticket:
        wanted, prompt, most = asked.wanted, asked.prompts[i], asked.max_tokens[i]
        sampling = wanted.sampling
        assigned = self._dispatch.assign(
            request_class=wanted.request_class, greedy=sampling.greedy, never_exit=wanted.never_exit
        )
        routes = [assigned.route(step) for step in range(len(assigned.steps))]
        needed = max(self._engine.cache_bytes(len(prompt) + most, route=route) for route in routes)
        room = self._engine.memory().limit_bytes
        if needed > room:
            raise RequestError(
                "max_tokens",
                f"is {most} behind {len(prompt)} tokens of prompt; their caches take {needed} bytes of at most {room}",
            )
        judged = sampling.greedy and assigned.counted and (self._compares or not assigned.is_reference)
        rate = assigned.runtime.audit_rate if judged and self._audits.open_to(len(prompt) + most) else 0.0
        draw = self._draw()
        seeded = _seeded(wanted.sampling, wanted.seeded, i, self._draw)
        if draw < rate or len(routes) > 1:
            seeded = replace(seeded, logprobs=True)
        self._number += 1
        answer = Answer(
            self._tokenizer.decoder(), stops=wanted.stops, end_tokens=self.bundle.end_tokens, logprobs=sampling.logprobs
        )
        return Ticket(
            self._number, prompt, most, seeded, wanted.stops, assigned, answer,
            needed, reply, draw, self._draw(), draw < rate, rate, self._clock(), self._wall_clock(), wanted.request_class, wanted.source,
            prompt_left=len(prompt),
        )  # fmt: skip

    # --- the engine's side ------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._work_on()
        except Exception as error:  # a fault of ours: nobody must wait for what does not come
            log_event("generation-stopped", level="error", error=repr(error))
            with self._changed:
                self._closing = True
                self._end_all()
        self._engine.close()

    def _work_on(self) -> None:
        while True:
            with self._changed:
                while not (self._running or self._waiting or self._left or self._audits.pending or self._closing):
                    self._changed.wait()
                self._let_go()
                if self._ending:
                    self._end_all()
                if self._abandoned:
                    self._audits.abandon()
                if self._closing and not (self._running or self._waiting or self._audits.pending):
                    return
            self._begin()
            worked = self._round()
            if self._audits.pending and (not worked or self._audits.due) and not self._audits.step() and not worked:
                self._rest()

    def _rest(self) -> None:
        """Nothing can be done now: there is no room for the audit that waits, and nobody to give room."""
        with self._changed:
            self._changed.wait(0.05)

    def _let_go(self) -> None:
        """Cancelled answers give their caches back; of those that were drawn what was served is compared."""
        while self._left:
            ticket = self._left.popleft()
            if ticket.ended:
                continue
            if ticket.sequence is not None:
                self._engine.cancel(ticket.sequence)
            self._running.remove(ticket)
            self._close_books(ticket, RequestOutcome.CANCELLED)

    def _end_all(self) -> None:
        pieces = []
        for ticket in [*self._running, *self._waiting]:
            if ticket.sequence is not None:
                self._engine.cancel(ticket.sequence)
            self._close_books(ticket, RequestOutcome.FAILED)
            pieces.append((ticket, Piece(error=SHUT)))
        self._running, self._waiting = [], []
        if pieces:
            self._deliver(pieces)

    def _begin(self) -> None:
        """Start sequences as long as there is room and somebody waits for it."""
        while True:
            with self._changed:
                if not self._waiting or len(self._running) >= self._options.limits.running:
                    return
                memory = self._engine.memory()
                free = memory.limit_bytes - memory.used_bytes
                audit = self._audits.next_bytes if self._audits.due and self._running else None
                if audit is not None and audit > free:
                    return  # its turn has come: room is kept for it
                line = [Waiting(t.number, t.cache_bytes, t.passed) for t in self._waiting]
                chosen = next_to_begin(line, free_bytes=free)
                if chosen is None:
                    return
                at = line.index(chosen)
                ticket = self._waiting.pop(at)
                self._running.append(ticket)
                for other in self._waiting[:at]:
                    other.passed += 1
            if not self._start(ticket):
                return

    def _start(self, ticket: Ticket) -> bool:
        """Begin with a ticket that was taken from the line; it goes back there where the engine has no room after all."""
        try:
            ticket.sequence = self._engine.start(
                ticket.prompt,
                max_tokens=ticket.max_tokens,
                sampling=ticket.sampling,
                route=ticket.assigned.route(ticket.step),
            )
        except NoRoomError as error:
            with self._changed:
                alone = len(self._running) == 1 and not self._audits.pending
                if not alone and not ticket.cancelled:
                    self._running.remove(ticket)
                    self._waiting.insert(0, ticket)
                    return False
            self._drop(ticket, str(error))
        except Exception as error:
            self._drop(ticket, str(error))
        else:
            ticket.began = ticket.began or self._clock()
        return True

    def _drop(self, ticket: Ticket, error: str) -> None:
        """It had its turn, and cannot begin."""
        log_event("generation-not-started", level="error", error=error)
        with self._changed:
            self._running.remove(ticket)
            self._close_books(ticket, RequestOutcome.FAILED)
        self._deliver([(ticket, Piece(error="the model could not begin with this request"))])

    def _round(self) -> bool:
        """One turn for every answer that is being written, and a piece of one prompt. Whether there was anything to do."""
        writers = [t for t in self._running if not t.reads]
        readers = [t for t in self._running if t.reads]
        pieces: list[tuple[Ticket, Piece]] = []
        writing = self._turn(writers, 1, pieces) if writers else 0.0
        number = next_prompt([Reading(t.number, t.prompt_left, t.waited) for t in readers])
        if number is not None:
            reader = next(t for t in readers if t.number == number)
            for other in readers:
                other.waited += 1
            reader.waited = 0
            self._turn([reader], piece(writing_seconds=writing, seconds_per_token=self._pace.reading), pieces)
        if pieces:
            self._deliver(pieces)
        return bool(writers or readers)

    def _turn(self, tickets: Sequence[Ticket], tokens: int, pieces: list[tuple[Ticket, Piece]]) -> float:
        """Step these; what there is to show is added to ``pieces``. The seconds it took."""
        began = self._clock()
        canary = max((t.assigned.epoch for t in tickets if t.assigned.arm == "canary"), default=0)
        numbers = [t.sequence for t in tickets if t.sequence is not None]
        left = sum(t.prompt_left for t in tickets)
        if canary:
            self._options.marker.enter(canary)
        try:
            progress = self._engine.step(numbers, prompt_tokens=tokens)
        except Exception as error:  # runtimes raise bare exceptions of their C++ side
            log_event("generation-failed", level="error", answers=len(numbers), error=str(error))
            progress = [Progress(n, ended=True, error=str(error) or type(error).__name__) for n in numbers]
            self.vitals.ended(1, failed=True)
        else:
            self.vitals.ended(1, failed=False)
        finally:
            if canary:
                self._options.marker.leave()
        seconds = self._clock() - began
        self._audits.served(seconds)
        new = sum(len(p.tokens) for p in progress)
        with self._changed:
            if new and not left:
                self._pace = self._pace.wrote(new, seconds)
            for ticket, one in zip(tickets, progress, strict=True):
                ticket.busy += seconds / len(tickets)
                self._took(ticket, one, pieces)
            if left:
                read = left - sum(t.prompt_left for t in tickets)
                self._pace = self._pace.read(max(read, 1), seconds)
        self.accounts.worked(seconds)
        return seconds

    def _took(self, ticket: Ticket, progress: Progress, pieces: list[tuple[Ticket, Piece]]) -> None:
        now = self._clock()
        ticket.prompt_left = progress.prompt_left
        ticket.proposed += progress.proposed
        ticket.accepted += progress.accepted
        if progress.error:
            if ticket.sequence is not None:
                self._engine.cancel(ticket.sequence)  # a run that failed as a whole gives nothing back by itself
            self._running.remove(ticket)
            self._close_books(ticket, RequestOutcome.FAILED)
            pieces.append((ticket, Piece(error="the model failed while it wrote this answer")))
            return
        if not progress.tokens and not progress.ended:
            return
        ticket.prompt_left = 0
        shown = ticket.answer.take(progress.tokens, ended=progress.ended)
        self.accounts.wrote(len(progress.tokens))
        ticket.last = now
        if not ticket.last_step:
            ticket.kept.append(shown)  # it may yet be another variant's turn
        if shown.last:
            if not progress.ended and ticket.sequence is not None:
                self._engine.cancel(ticket.sequence)
            self._running.remove(ticket)
            self._pace = self._pace.ended(tokens=len(ticket.answer.tokens), max_tokens=ticket.max_tokens)
            if not self._is_taken(ticket):
                self._ask_next(ticket)
                return
        if ticket.last_step or shown.last:
            self._show(ticket, [shown] if ticket.last_step else ticket.kept, pieces)
        if shown.last:
            self._close_books(ticket, RequestOutcome.OK)

    def _show(self, ticket: Ticket, shown: Sequence[Piece], pieces: list[tuple[Ticket, Piece]]) -> None:
        if not ticket.first:
            ticket.first = ticket.last
            self.accounts.began_to_show(ticket)
        pieces += [(ticket, piece) for piece in shown if piece.last or piece.text or piece.tokens]

    @staticmethod
    def _is_taken(ticket: Ticket) -> bool:
        """Whether the answer is the reply, or unsure enough to ask the next variant."""
        step = ticket.assigned.steps[ticket.step]
        return ticket.last_step or answer_uncertainty([t.logprob for t in ticket.answer.tokens]) < step.leave_below

    def _ask_next(self, ticket: Ticket) -> None:
        """The next variant begins anew, before all that wait."""
        answer = ticket.answer
        ticket.asked[ticket.assigned.steps[ticket.step].variant] = Given(answer.text, tuple(answer.tokens))
        ticket.answer = Answer(
            self._tokenizer.decoder(), stops=ticket.stops, end_tokens=self.bundle.end_tokens, logprobs=answer.logprobs
        )
        ticket.step += 1
        ticket.sequence, ticket.prompt_left, ticket.kept = None, len(ticket.prompt), []
        self._waiting.insert(0, ticket)

    def _close_books(self, ticket: Ticket, outcome: RequestOutcome) -> None:
        """Nothing more is computed for it. Under the condition."""
        ticket.ended = True
        if ticket.audited:
            owed = owed_by(ticket) if outcome is not RequestOutcome.FAILED else None
            promised = len(ticket.prompt) + ticket.max_tokens
            self._audits.withdraw(promised)
            if owed is not None:
                self._audits.promise(owed.size)
                self._audits.add(owed)
            else:
                ticket.audited = False
        self.accounts.ended(ticket, outcome)

    def _recovered(self) -> None:
        with self._changed:
            self._changed.notify()


def _seeded(sampling: Sampling, seeded: bool, i: int, draw: Callable[[], float]) -> Sampling:
    """Answers of one request differ, and where the client gave no seed each request is another draw."""
    if sampling.greedy:
        return sampling
    seed = sampling.seed if seeded else int(draw() * 2**62)
    return replace(sampling, seed=(seed + i) & MAX_SEED)
