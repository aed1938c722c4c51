"""One answer that is wanted, on its way through the desk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from offramp_core.errors import OfframpError
from offramp_core.generation.admission import Refused
from offramp_core.generation.columns import answer_uncertainty
from offramp_worker.engine.accounts.turns import Turns
from offramp_worker.generate.answers import GeneratedAnswer, Given, Piece
from offramp_worker.generate.requests import MAX_SEED, Asked, RequestError, Wanted
from offramp_worker.generate.routes import Assigned, Dispatch
from offramp_worker.generate.seam import DecodingRoute, Loaded, Sampling, TextDecoder

Deliver = Callable[["list[tuple[Ticket, Piece]]"], None]


class ClosedError(OfframpError):
    """A request comes at a bad time; ``refused`` says why and when to come again."""

    def __init__(self, refused: Refused, *, status: int = 429) -> None:
        super().__init__(refused.message)
        self.refused, self.status = refused, status


@dataclass(slots=True, eq=False)
class Ticket:
    """What is asked, what was promised, and how far it is. After admission only the engine's thread changes it.

    ``draw`` is the one uniform number of the request, ``audited`` whether it is run to the reference afterwards.
    ``admitted``, ``began``, ``first`` and ``last`` are times of the desk's clock: of admission, of the first turn, of
    the first token and of the newest (0: not yet). ``passed`` counts how often smaller ones began before it, ``waited``
    the rounds since its prompt had a turn. ``step`` is whose turn it is of the variants that are asked, ``asked`` what
    earlier ones answered, ``kept`` what may be shown once the step's answer is taken, ``taken`` the seconds of its
    turns, ``writing`` those of them behind its prompt, in ``turns`` among ``company`` answers in all, and ``busy`` what
    it took of the engine.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    assigned: Assigned
    answer: GeneratedAnswer
    cache_bytes: int
    reply_bytes: int
    draw: float
    audited: bool
    audit_rate: float
    admitted: float
    wall_time: float
    request_class: str = ""
    source: str = ""
    repeats: bool = False
    sequence: int | None = None
    prompt_left: int = 0
    passed: int = 0
    waited: int = 0
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0
    proposed: int = 0
    accepted: int = 0
    cancelled: bool = False
    ended: bool = False
    step: int = 0
    asked: dict[str, Given] = field(default_factory=dict)
    kept: list[Piece] = field(default_factory=list)
    taken: float = 0.0
    busy: float = 0.0
    writing: float = 0.0
    turns: int = 0
    company: int = 0

    @property
    def drafts(self) -> bool:
        """Whether a draft proposes tokens of it."""
        return bool(self.assigned.route(self.step).draft)

    def worked(self, seconds: float, *, among: int, mixed: bool = False, busy: float = 0.0) -> None:
        """It was computed, in a turn of so many; ``busy`` is what it took of the engine where that is less. ``mixed``
        where some of them have a draft. Those are computed alone, and keep the others apart: such a turn does not show
        what answers without one take."""
        self.taken += seconds
        self.busy += busy or seconds
        if not self.reads and (self.drafts or not mixed):
            self.writing += seconds
            self.turns += 1
            self.company += among

    @property
    def beside(self) -> int:
        """How many answers were written side by side with it, itself included, on average."""
        return round(self.company / self.turns) if self.turns else 1

    @property
    def written(self) -> int:
        """Tokens that came in its turns behind the prompt, with which the first one comes; of an answer without a draft
        in those that count (:meth:`worked`), where they are most of it."""
        behind = len(self.answer.tokens) - 1
        if self.drafts:
            return behind
        return self.turns if 2 * self.turns > behind else 0

    @property
    def size(self) -> int:
        """Tokens of prompt and answer at most."""
        return len(self.prompt) + self.max_tokens

    @property
    def is_sure(self) -> bool:
        """Whether the answer is the reply; otherwise the next variant is asked."""
        step = self.assigned.steps[self.step]
        return self.last_step or answer_uncertainty([t.logprob for t in self.answer.tokens]) < step.leave_below

    def ask_next(self, decoder: TextDecoder, *, end_tokens: Sequence[int]) -> None:
        """Begin anew with the next variant; what this one answered is kept for the audit alone."""
        answer = self.answer
        self.asked[self.assigned.steps[self.step].variant] = Given(answer.text, tuple(answer.tokens))
        self.answer = GeneratedAnswer(decoder, stops=self.stops, end_tokens=end_tokens, logprobs=answer.logprobs)
        self.step += 1
        self.sequence, self.prompt_left, self.kept = None, len(self.prompt), []

    @property
    def last_step(self) -> bool:
        """Whether nobody is asked after this one."""
        return self.step == len(self.assigned.steps) - 1

    @property
    def reads(self) -> bool:
        """Whether there is something left of its prompt."""
        return self.prompt_left > 0


class TicketMaker:
    """Makes tickets of requests: draws their numbers and has them assigned. Used by the thread that admits them."""

    def __init__(
        self,
        loaded: Loaded,
        dispatch: Dispatch,
        *,
        may_audit: Callable[[int, int], bool],
        draw: Callable[[], float],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """``may_audit`` says whether one more answer may be drawn for an audit, by the tokens of all that are of its
        request and by how many others those are; ``draw`` a uniform number in [0, 1)."""
        self._engine, self._tokenizer, self._dispatch = loaded.engine, loaded.tokenizer, dispatch
        self._may_audit, self._draw, self._clock, self._wall_clock = may_audit, draw, clock, wall_clock
        self._end_tokens = loaded.bundle.end_tokens
        self._compares = (
            len(loaded.bundle.variants) > 1
        )  # whether an audit of the reference's own answers says anything
        self._number = 0
        self._turns = Turns()

    def cache_bytes(self, asked: Asked) -> int:
        """What the caches of the largest answer to a request take, by the reference alone.

        Raises
        ------
        RequestError
            It could never be served: they are larger than all the memory there is for them.
        """
        answers = zip(asked.prompts, asked.max_tokens, strict=True)
        return max(self._cache_bytes((DecodingRoute(),), prompt, most) for prompt, most in answers)

    def make(self, asked: Asked, *, reply: int, running: int, at_once: int) -> list[Ticket]:
        """One ticket per answer; ``reply`` are the bytes of all of them, ``running`` answers are computed or wait
        already, ``at_once`` are computed side by side at most.

        Raises
        ------
        RequestError
            It could never be served: its caches are larger than all the memory there is for them.
        """
        n = len(asked.prompts)
        beside = min(running + n, at_once) - 1  # all of them begin together
        repeats = self._turns.repeats(asked.wanted.source)
        tickets = list[Ticket]()
        for i in range(n):
            drawn = [ticket.size for ticket in tickets if ticket.audited]
            tickets.append(self._ticket(asked, i, reply // n, beside, running + i, repeats=repeats, drawn=drawn))
        return tickets

    def _ticket(
        self, asked: Asked, i: int, reply: int, running: int, ahead: int, *, repeats: bool, drawn: Sequence[int]
    ) -> Ticket:
        wanted, prompt, most = asked.wanted, asked.prompts[i], asked.max_tokens[i]
        sampling = wanted.sampling
        assigned = self._dispatch.assign(
            request_class=wanted.request_class,
            greedy=sampling.greedy,
            never_exit=wanted.never_exit,
            running=running,
            ahead=ahead,
        )
        routes = [assigned.route(step) for step in range(len(assigned.steps))]
        needed = self._cache_bytes(routes, prompt, most)
        judged = sampling.greedy and assigned.counted and not assigned.away
        judged = judged and (self._compares or not assigned.is_reference)
        open_to = judged and self._may_audit(sum(drawn) + len(prompt) + most, len(drawn))
        rate = assigned.runtime.audit_rate if open_to else 0.0
        draw = self._draw()
        self._number += 1
        answer = GeneratedAnswer(
            self._tokenizer.decoder(), stops=wanted.stops, end_tokens=self._end_tokens, logprobs=sampling.logprobs
        )
        seeded = self._seeded(wanted, i)
        if draw < rate or len(assigned.steps) > 1:  # an answer's uncertainty is made of its log probabilities
            seeded = replace(seeded, logprobs=True)
        return Ticket(
            self._number,
            prompt,
            most,
            seeded,
            wanted.stops,
            assigned,
            answer,
            needed,
            reply,
            draw,
            draw < rate,
            rate,
            self._clock(),
            self._wall_clock(),
            wanted.request_class,
            wanted.source,
            repeats,
            prompt_left=len(prompt),
        )

    def _cache_bytes(self, routes: Sequence[DecodingRoute], prompt: tuple[int, ...], most: int) -> int:
        needed = max(self._engine.cache_bytes(len(prompt) + most, route=route) for route in routes)
        room = self._engine.memory().limit_bytes
        if needed > room:
            raise RequestError(
                "max_tokens",
                f"is {most} behind {len(prompt)} tokens of prompt; their caches take {needed} bytes of at most {room}: "
                "ask for fewer tokens, or of who runs the worker for a larger OFFRAMP_CACHE_MIB",
            )
        return needed

    def _seeded(self, wanted: Wanted, i: int) -> Sampling:
        """Answers of one request differ, and where the client gave no seed each request is another draw."""
        sampling = wanted.sampling
        if sampling.greedy:
            return sampling
        seed = sampling.seed if wanted.seeded else int(self._draw() * 2**62)
        return replace(sampling, seed=(seed + i) & MAX_SEED)
