"""Who waits and who is computed, and what that means for those who come. Without threads: the desk holds its lock
around every call."""

from __future__ import annotations

import math

from offramp_core.generation.admission import (
    AdmissionLimits,
    GenerationPace,
    Work,
    WorkerLoad,
    admit,
    reply_bytes,
    side_by_side,
    until_turn,
)
from offramp_core.generation.turns import PROMPT_SHARE, take_next
from offramp_worker.generate.audits import UnderWay
from offramp_worker.generate.requests import Asked, RequestError
from offramp_worker.generate.tickets import ClosedError, Ticket


class Line:
    """Tickets that wait for their first turn, in their order, and those that have turns.

    Attributes
    ----------
    pace : GenerationPace
        What computing takes of late.
    reply_bytes : int
        Promised to replies that their clients have not taken.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.reply_bytes = 0
        self.pace = GenerationPace()

    def __len__(self) -> int:
        """How many wait or are computed."""
        return len(self.waiting) + len(self.running)

    @property
    def at_once(self) -> int:
        """How many are computed side by side at most."""
        return side_by_side(self._limits, self.pace)

    def load(
        self, prompt: int = 0, *, own_bytes: int = 0, free_bytes: float = math.inf, audit: UnderWay | None = None
    ) -> WorkerLoad:
        """What is taken on now, and what a request with so many tokens of prompt and bytes of caches may expect, where
        ``free_bytes`` are left for caches beside those of an ``audit``."""
        at_once = self.at_once
        running, waiting = ([self._left(t) for t in tickets] for tickets in (self.running, self.waiting))
        held = None
        if audit is not None:
            held = Work(self.pace.seconds(prompt=audit.prompt, max_tokens=audit.tokens), audit.cache_bytes)
        wait, for_room = until_turn(
            running, waiting, at_once=at_once, own_bytes=own_bytes, free_bytes=free_bytes, audit=held
        )
        caches_full = for_room > wait / 2
        # Prompts are read one at a time, the one with least left first, and share the engine with who writes.
        share = PROMPT_SHARE if len(self) and at_once > 1 else 1.0
        if not wait:  # else those that run have read theirs by then
            read = (self.pace.prompt_seconds(t.prompt_left) for t in self.running if t.prompt_left <= prompt)
            wait = sum(read) / share
        own = self.pace.prompt_seconds(prompt) / share
        return WorkerLoad(len(waiting), len(running), self.reply_bytes, wait, own, caches_full)

    def _left(self, ticket: Ticket) -> Work:
        """What it still needs, by expectation."""
        left = ticket.max_tokens - len(ticket.answer.tokens)
        return Work(self.pace.seconds(prompt=ticket.prompt_left, max_tokens=left), ticket.cache_bytes, ticket.passed)

    def reply_size(self, asked: Asked) -> int:
        """Bytes that the reply to a request may take.

        Raises
        ------
        RequestError
            It could never be kept.
        """
        sampling = asked.wanted.sampling
        reply = sum(
            reply_bytes(max_tokens=n, logprobs=sampling.logprobs, top_logprobs=sampling.top_logprobs)
            for n in asked.max_tokens
        )
        most = self._limits.reply_bytes
        if reply > most:
            raise RequestError(
                "max_tokens",
                f"the reply may take {reply} bytes of at most {most}; ask for fewer tokens, answers or log "
                "probabilities",
            )
        return reply

    def check(self, asked: Asked, *, reply: int, own_bytes: int, free_bytes: int, audit: UnderWay | None) -> None:
        """Raises :class:`ClosedError` where a request with a reply of so many bytes, and so many for the caches of its
        largest answer, comes at a bad time."""
        load = self.load(max(map(len, asked.prompts)), own_bytes=own_bytes, free_bytes=free_bytes, audit=audit)
        refused = admit(load, self._limits, answers=len(asked.prompts), reply=reply)
        if refused is not None:
            raise ClosedError(refused)

    def begin(self, *, free_bytes: int) -> Ticket | None:
        """Take the next ticket that may begin with so much room for caches; it runs from now on."""
        if not self.waiting or len(self.running) >= self.at_once:
            return None
        ticket = take_next(self.waiting, free_bytes=free_bytes)
        if ticket is not None:
            self.running.append(ticket)
        return ticket

    def put_back(self, ticket: Ticket) -> None:
        """It had its turn and goes before all that wait."""
        self.running.remove(ticket)
        self.waiting.insert(0, ticket)
