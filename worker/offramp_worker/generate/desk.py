"""Where requests for generation wait, are computed in turns and are audited: one thread, which alone touches the
engine.

The event loop's thread lets requests in (:meth:`GenerationDesk.submit`) or turns them away, and may cancel them.
Everything about whose turn it is decides :mod:`offramp_core.generation.turns`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offramp_core.generation.admission import AdmissionLimits, Closed, Refused, WorkerLoad
from offramp_core.generation.losses import AnswerLosses
from offramp_core.generation.turns import PromptReading, next_prompt, piece
from offramp_core.reasons import RequestOutcome
from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.engine.vitals import Vitals
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.answers import Piece
from offramp_worker.generate.audits import AuditDesk
from offramp_worker.generate.computing import Computing
from offramp_worker.generate.line import Line
from offramp_worker.generate.requests import Asked
from offramp_worker.generate.routes import Dispatch
from offramp_worker.generate.seam import AwayError, CacheMemory, Loaded, NoRoomError, SequenceProgress
from offramp_worker.generate.tickets import ClosedError, Deliver, Ticket, TicketMaker
from offramp_worker.logs import log_event

SHUT = "the worker is shutting down"
ABANDON_SECONDS = 5.0  # for a step that is under way


@dataclass(frozen=True, slots=True)
class DeskOptions:
    """Settings of a desk. ``audit_share`` of the engine's time may go into audits while requests are served;
    ``compare`` says what an answer lost; ``marker`` notes a canary that is being computed."""

    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    audit_share: float = 0.1
    compare: AnswerLosses = field(default_factory=AnswerLosses)
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
        draw: Callable[[], float] | None = None,
    ) -> None:
        """``deliver`` is called in the engine's thread with what can be shown; ``lost`` when only a new process may
        help."""
        self.bundle, self.accounts = loaded.bundle, accounts
        engine = self._engine = loaded.engine
        self._tokenizer, self._deliver = loaded.tokenizer, deliver
        self._options = options or DeskOptions()
        self._clock, self._dispatch = clock, dispatch
        self._changed = threading.Condition()
        self._line = Line(self._options.limits)  # under the condition, as all that both threads change
        self._left: deque[Ticket] = deque()  # cancelled ones that run
        self._closing = self._ending = self._abandoned = False
        self.vitals = Vitals(probe=lambda _: engine.probe(), recovered=self._wake, lost=lost, fault=engine.fault)
        self._computing = Computing(self._engine, vitals=self.vitals, marker=self._options.marker, clock=clock)
        self._audits = _audit_desk(loaded, accounts, self._options, clock)
        draw, may_audit = draw or random.SystemRandom().random, self._audits.open_to
        self._maker = TicketMaker(loaded, dispatch, may_audit=may_audit, draw=draw, clock=clock, wall_clock=time.time)
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)

    # --- the event loop's side --------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> WorkerLoad:
        """What is taken on now."""
        with self._changed:
            return self._line.load()

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
        reply = self._line.reply_size(asked)
        with self._changed:
            if self._closing or self.vitals.refuses:
                raise ClosedError(Refused(Closed.NOT_READY, self.vitals.refuses or SHUT, 1), status=503)
            own = self._maker.cache_bytes(asked)
            free, audit = self._engine.memory().free_bytes, self._audits.under_way
            self._line.check(asked, reply=reply, own_bytes=own, free_bytes=free, audit=audit)
            tickets = self._maker.make(asked, reply=reply, running=len(self._line), at_once=self._line.at_once)
            for ticket in tickets:
                self._line.reply_bytes += ticket.reply_bytes
                if ticket.audited:
                    self._audits.promise(ticket.size)
            self._line.waiting += tickets
            self._wake()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more. Computing it stops before the next round."""
        with self._changed:
            if ticket.cancelled or ticket.ended:
                return
            ticket.cancelled = True
            if ticket in self._line.waiting:
                self._line.waiting.remove(ticket)
                self._close_books(ticket, RequestOutcome.CANCELLED)
            else:
                self._left.append(ticket)
            self._wake()

    def taken(self, ticket: Ticket) -> None:
        """The client has its reply, or has gone: its memory is free. To be called once per ticket."""
        with self._changed:
            self._line.reply_bytes -= ticket.reply_bytes

    def close(self) -> None:
        """Take no more requests; those that were admitted go on."""
        self._closing = True
        self._wake()

    def end_answers(self) -> None:
        """Take no more requests, and end those that were admitted, each with an error; audits go on."""
        with self._changed:
            self._closing = self._ending = True
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait until everything is answered and audited; after :meth:`close`. Whether it was."""
        self._thread.join(seconds)
        if not (done := not self._thread.is_alive()):
            with self._changed:
                self._closing = self._ending = self._abandoned = True
                self._changed.notify()
            self._thread.join(ABANDON_SECONDS)
        self.vitals.close()
        return done

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
                while not (self._line or self._left or self._audits.pending or self._closing):
                    self._changed.wait()
                self._let_go()
                if self._ending:
                    self._end_all()
                if self._abandoned:
                    self._audits.abandon()
                if self._closing and not (self._line or self._audits.pending):
                    return
            self._begin()
            worked = self._round()
            if self._audits.pending and (not worked or self._audits.due) and not self._audits.step() and not worked:
                with self._changed:
                    self._changed.wait(0.05)  # there is no room for the audit that waits, and nobody to give room

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()
        self._engine.wake()

    def _let_go(self) -> None:
        """Cancelled answers give their caches back; of those that were drawn what was served is compared."""
        while self._left:
            ticket = self._left.popleft()
            if ticket.ended:
                continue
            self._computing.stop(ticket)
            self._line.running.remove(ticket)
            self._close_books(ticket, RequestOutcome.CANCELLED)

    def _end_all(self) -> None:
        pieces = []
        for ticket in [*self._line.running, *self._line.waiting]:
            self._computing.stop(ticket)
            self._close_books(ticket, RequestOutcome.FAILED)
            pieces.append((ticket, Piece(error=SHUT)))
        self._line.running, self._line.waiting = [], []
        if pieces:
            self._deliver(pieces)

    def _begin(self) -> None:
        """Start sequences as long as there is room and somebody waits for it."""
        while True:
            with self._changed:
                free = self._engine.memory().free_bytes
                audit = self._audits.next_bytes if self._audits.due and self._line.running else None
                if audit is not None and audit > free:
                    return  # its turn has come: room is kept for it
                ticket = self._line.begin(free_bytes=free)
            if ticket is None or not self._start(ticket):
                return

    def _start(self, ticket: Ticket) -> bool:
        """Begin with a ticket that was taken from the line; it goes back there where the engine has no room after
        all."""
        try:
            self._computing.start(ticket)
        except NoRoomError as error:
            with self._changed:
                alone = len(self._line.running) == 1 and not self._audits.pending
                if not (alone or ticket.cancelled or isinstance(error, AwayError)):
                    self._line.put_back(ticket)
                    return False
            self._drop(ticket, str(error))
        except Exception as error:
            self._drop(ticket, str(error))
        return True

    def _drop(self, ticket: Ticket, error: str) -> None:
        """It had its turn, and cannot begin."""
        log_event("generation-not-started", level="error", error=error)
        with self._changed:
            self._line.running.remove(ticket)
            self._close_books(ticket, RequestOutcome.FAILED)
        self._deliver([(ticket, Piece(error="the model could not begin with this request"))])

    def _round(self) -> bool:
        """One turn for every answer that is being written, and a piece of one prompt. Whether there was anything to
        do."""
        writers = [t for t in self._line.running if not t.reads]
        readers = [t for t in self._line.running if t.reads]
        pieces: list[tuple[Ticket, Piece]] = []
        writing = self._turn(writers, 1, pieces) if writers else 0.0
        number = next_prompt([PromptReading(t.number, t.prompt_left, t.waited) for t in readers])
        if number is not None:
            for other in readers:
                other.waited += 1
            reader = next(t for t in readers if t.number == number)
            reader.waited = 0
            self._turn([reader], piece(writing_seconds=writing, seconds_per_token=self._line.pace.reading), pieces)
        if pieces:
            self._deliver(pieces)
        return bool(writers or readers)

    def _turn(self, tickets: Sequence[Ticket], tokens: int, pieces: list[tuple[Ticket, Piece]]) -> float:
        """Step these; what there is to show is added to ``pieces``. The seconds it took."""
        left, mixed = sum(t.prompt_left for t in tickets), any(t.drafts for t in tickets)
        progress, seconds = self._computing.step(tickets, tokens)
        self._audits.served(seconds)
        new = sum(len(p.tokens) for p in progress)
        with self._changed:
            self._dispatch.failed([t.assigned for t, one in zip(tickets, progress, strict=True) if one.error])
            if new and not left:
                self._line.pace = self._line.pace.wrote(new, seconds)
            for ticket, one in zip(tickets, progress, strict=True):
                ticket.worked(one.seconds or seconds / len(tickets), among=len(tickets), mixed=mixed, busy=one.busy)
                self._took(ticket, one, pieces)
            if left:
                read = left - sum(t.prompt_left for t in tickets)
                self._line.pace = self._line.pace.read(max(read, 1), seconds)
        self.accounts.worked(seconds)
        return seconds

    def _took(self, ticket: Ticket, progress: SequenceProgress, pieces: list[tuple[Ticket, Piece]]) -> None:
        now = self._clock()
        ticket.prompt_left = progress.prompt_left
        ticket.proposed += progress.proposed
        ticket.accepted += progress.accepted
        if progress.proposed and not progress.summed:
            self.accounts.verified(ticket, progress.accepted)
        if progress.error:
            self._computing.stop(ticket)  # a run that failed as a whole gives nothing back by itself
            self._line.running.remove(ticket)
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
            if not progress.ended:
                self._computing.stop(ticket)
            self._line.pace = self._line.pace.ended(tokens=len(ticket.answer.tokens), max_tokens=ticket.max_tokens)
            if not ticket.is_sure and not ticket.cancelled:
                ticket.ask_next(self._tokenizer.decoder(), end_tokens=self.bundle.end_tokens)
                self._line.put_back(ticket)
                return
            self._line.running.remove(ticket)
        if ticket.last_step or shown.last:
            self._show(ticket, [shown] if ticket.last_step else ticket.kept, pieces)
        if shown.last:
            self._close_books(ticket, RequestOutcome.OK)

    def _show(self, ticket: Ticket, shown: Sequence[Piece], pieces: list[tuple[Ticket, Piece]]) -> None:
        if not ticket.first:
            ticket.first = ticket.last
            self.accounts.began_to_show(ticket)
        pieces += [(ticket, piece) for piece in shown if piece.last or piece.text or piece.tokens]

    def _close_books(self, ticket: Ticket, outcome: RequestOutcome) -> None:
        """Nothing more is computed for it. Under the condition."""
        ticket.ended = True
        if ticket.audited:
            ticket.audited = self._audits.take_over(ticket, served=outcome is not RequestOutcome.FAILED)
        self.accounts.ended(ticket, outcome)
        if outcome is not RequestOutcome.FAILED:
            self._dispatch.learn(ticket.assigned, seconds=ticket.writing, tokens=ticket.written, beside=ticket.beside)


def _audit_desk(loaded: Loaded, accounts: Accounts, options: DeskOptions, clock: Callable[[], float]) -> AuditDesk:
    return AuditDesk(
        loaded.engine,
        loaded.tokenizer,
        share=options.audit_share,
        compare=options.compare,
        judge=accounts.judged,
        lost=accounts.audit_lost,
        spend=accounts.audit_spent,
        clock=clock,
    )
