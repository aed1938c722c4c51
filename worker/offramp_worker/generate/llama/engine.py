"""The engine of the Llama family: see :class:`offramp_worker.generate.seam.GenerationEngine`.

Each sequence has one cache of keys and values, which all variants write into. A draft by another variant reads what the
verifying one computed of the text, so it reads no prompt of its own and takes no memory; what it writes behind the text
is overwritten when its proposals are verified.

Answers that are written without a draft by the same variant have their next tokens computed in one pass, where the
kernels compute each as they would alone (:mod:`offramp_worker.generate.llama.bank`). Pieces of prompts and drafts with
their verification are computed one sequence after the other: the runtime's attention takes several new tokens of one
sequence alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from offramp_core.errors import InvalidArgumentError
from offramp_worker.generate.llama import sampling as choosing
from offramp_worker.generate.llama.bank import Banks, Row
from offramp_worker.generate.llama.decoder import Cache, Decoder
from offramp_worker.generate.llama.drafts import NgramIndex
from offramp_worker.generate.llama.manifest import MOST_DRAFT_TOKENS
from offramp_worker.generate.seam import (
    CacheMemory,
    DecodingRoute,
    GenerationBundle,
    NoRoomError,
    Sampling,
    SequenceProgress,
    Token,
)


@dataclass(slots=True, eq=False)
class _Sequence:
    """One answer as it grows. The cache holds the text but for ``pending``: what is left of the prompt, or the newest
    token."""

    number: int
    route: DecodingRoute
    sampling: Sampling
    rng: np.random.Generator
    pending: list[int]
    most: int
    cache: Cache
    cache_bytes: int
    length: int = 0
    answered: int = 0
    writes: bool = False
    words: NgramIndex | None = None


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Tokens of a draft, and with which chances each was drawn; None where there was no draw."""

    tokens: list[int] = field(default_factory=list)
    chances: list[choosing.Chances | None] = field(default_factory=list)


class LlamaEngine:
    """See the module."""

    def __init__(
        self,
        bundle: GenerationBundle,
        decoders: Mapping[str, Decoder],
        *,
        cache_bytes: int,
        check: Callable[[], None] = lambda: None,
        together: Collection[str] = (),
    ) -> None:
        """``decoders`` by variant. ``check`` is the probe. ``together`` are variants whose answers may be computed in
        one pass; see :func:`offramp_worker.generate.llama.bank.computes_alike`."""
        self.bundle = bundle
        self._decoders, self._limit, self._check = dict(decoders), cache_bytes, check
        self._sequences: dict[int, _Sequence] = {}
        longest = min(bundle.context_length, cache_bytes // max(1, bundle.cache_bytes_per_token))
        self._banks = {variant: Banks(decoders[variant], longest) for variant in together}
        self._number, self._lock = 0, threading.Lock()

    # --- from any thread ------------------------------------------------------------------------------

    def cache_bytes(self, tokens: int, *, route: DecodingRoute) -> int:  # noqa: ARG002  # drafts share the cache of what they draft for
        return min(tokens, self.bundle.context_length) * self.bundle.cache_bytes_per_token

    def memory(self) -> CacheMemory:
        with self._lock:
            used = sum(s.cache_bytes for s in self._sequences.values())
        return CacheMemory(used, self._limit)

    def probe(self) -> None:
        self._check()

    # --- the engine's thread --------------------------------------------------------------------------

    def fault(self) -> str:
        return ""

    def available(self, variant: str) -> bool:
        return variant in self._decoders

    def wake(self) -> None:
        """No step waits."""

    def start(self, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling, route: DecodingRoute) -> int:
        self._check_request(prompt, max_tokens, route)
        total = min(self.bundle.context_length, len(prompt) + max_tokens)
        needed, memory = self.cache_bytes(total, route=route), self.memory()
        if memory.used_bytes + needed > self._limit:
            raise NoRoomError(
                f"the caches of {total} tokens take {needed} bytes; {self._limit - memory.used_bytes} are free"
            )
        self._number += 1
        words = NgramIndex() if route.draft and self._kind(route.draft) == "ngram" else None
        if words is not None:
            words.add(prompt)
        cache = Cache.of(self._decoders[route.variant].architecture, total)
        rng = np.random.default_rng(sampling.seed)
        most = total - len(prompt)
        sequence = _Sequence(self._number, route, sampling, rng, list(prompt), most, cache, needed, words=words)
        with self._lock:
            self._sequences[self._number] = sequence
        return self._number

    def step(self, sequences: Sequence[int], *, prompt_tokens: int) -> list[SequenceProgress]:
        progress, failures = [], list[Exception]()
        rows = self._computed_together(sequences) if len(sequences) > 1 else {}
        for number in sequences:
            began = time.perf_counter()
            row = rows.pop(number, None)
            try:
                done = self._step(self._sequences[number], max(1, prompt_tokens), row)
                taken = time.perf_counter() - began + (row.seconds if row is not None else 0.0)
                progress.append(replace(done, seconds=taken))
            except Exception as error:  # a runtime raises bare exceptions of its C++ side
                failures.append(error)
                self._drop(number)
                progress.append(SequenceProgress(number, ended=True, error=str(error) or type(error).__name__))
        if failures and len(failures) == len(sequences):
            raise failures[0]
        return progress

    def cancel(self, sequence: int) -> None:
        self._drop(sequence)

    def close(self) -> None:
        with self._lock:
            self._sequences.clear()
        self._decoders.clear()
        self._banks.clear()

    # --- one step -------------------------------------------------------------------------------------

    def _computed_together(self, numbers: Sequence[int]) -> dict[int, Row]:
        """What is behind the newest token of each sequence that is computed with others in one pass."""
        rows: dict[int, Row] = {}
        known = [self._sequences[number] for number in dict.fromkeys(numbers) if number in self._sequences]
        for variant, banks in self._banks.items():
            writers = [s for s in known if s.writes and not s.route.draft and s.route.variant == variant]
            if len(writers) > 1:
                rows |= banks.run(writers)
        return rows

    def _step(self, s: _Sequence, prompt_tokens: int, row: Row | None) -> SequenceProgress:
        if row is not None:
            return self._accepted(s, _Proposal(), row.logits[np.newaxis])
        if s.writes:
            proposal = self._proposal(s)
            tokens = [s.pending[0], *proposal.tokens]
            logits = self._decoders[s.route.variant].run(s.cache, tokens, start=s.length, rows=range(len(tokens)))
            return self._accepted(s, proposal, logits)
        piece, s.pending = s.pending[:prompt_tokens], s.pending[prompt_tokens:]
        rows = [] if s.pending else [len(piece) - 1]
        logits = self._decoders[s.route.variant].run(s.cache, piece, start=s.length, rows=rows)
        s.length += len(piece)
        if s.pending:
            return SequenceProgress(s.number, prompt_left=len(s.pending))
        s.writes = True
        return self._wrote(s, [self._chosen(s, logits[0])], 0, 0)

    def _accepted(self, s: _Sequence, proposal: _Proposal, logits: choosing.FloatArray) -> SequenceProgress:
        """The next token, with a draft perhaps several; ``logits`` are those behind the newest token and each that was
        proposed."""
        new: list[Token] = []
        accepted = 0
        for i, row in enumerate(logits):
            if i == len(proposal.tokens):
                new.append(self._chosen(s, row))
                break
            token, agreed = self._verified(s, row, proposal.tokens[i], proposal.chances[i])
            new.append(token)
            accepted += agreed
            if not agreed or token.id in self.bundle.end_tokens:
                break
        s.length += len(new)
        return self._wrote(s, new, len(proposal.tokens), accepted)

    def _wrote(self, s: _Sequence, tokens: list[Token], proposed: int, accepted: int) -> SequenceProgress:
        s.answered += len(tokens)
        s.pending = [tokens[-1].id]
        if s.words is not None:
            s.words.add([t.id for t in tokens])
        ended = tokens[-1].id in self.bundle.end_tokens or s.answered >= s.most
        if ended:
            self._drop(s.number)
        return SequenceProgress(s.number, tuple(tokens), 0, ended, proposed, accepted)

    def _proposal(self, s: _Sequence) -> _Proposal:
        """Never more than what fits behind the text with the token that follows it."""
        most = min(s.route.draft_tokens, MOST_DRAFT_TOKENS, s.most - s.answered - 1)
        if not s.route.draft or most <= 0:
            return _Proposal()
        if s.words is not None:
            tokens = s.words.proposed(most)
            return _Proposal(tokens, [None] * len(tokens))
        decoder, proposal, token = self._decoders[s.route.draft], _Proposal(), s.pending[0]
        for i in range(most):
            row = decoder.run(s.cache, [token], start=s.length + i, rows=[0])[0]
            if s.sampling.greedy:
                token, chances = choosing.greedy(row)[0], None
            else:
                chances = choosing.chances(row, s.sampling)
                token = choosing.drawn(chances, s.rng)
            proposal.tokens.append(token)
            proposal.chances.append(chances)
            if token in self.bundle.end_tokens:
                break
        return proposal

    @staticmethod
    def _chosen(s: _Sequence, row: choosing.FloatArray) -> Token:
        token, margin = choosing.greedy(row)
        if not s.sampling.greedy:
            token = choosing.drawn(choosing.chances(row, s.sampling), s.rng)
        return choosing.with_logprobs(row, token, margin, s.sampling)

    @staticmethod
    def _verified(
        s: _Sequence, row: choosing.FloatArray, proposed: int, q: choosing.Chances | None
    ) -> tuple[Token, bool]:
        token, margin = choosing.greedy(row)
        agreed = token == proposed
        if not s.sampling.greedy:
            token, agreed = choosing.verified(choosing.chances(row, s.sampling), proposed, q, s.rng)
        return choosing.with_logprobs(row, token, margin, s.sampling), agreed

    # --- bookkeeping ----------------------------------------------------------------------------------

    def _check_request(self, prompt: Sequence[int], max_tokens: int, route: DecodingRoute) -> None:
        bundle = self.bundle
        if route.variant not in self._decoders:
            raise InvalidArgumentError(
                f"the route names variant {route.variant!r}; there are {', '.join(self._decoders)}"
            )
        draft = bundle.draft(route.draft)
        if route.draft and (draft is None or (draft.variants and route.variant not in draft.variants)):
            raise InvalidArgumentError(
                f"the route names draft {route.draft!r}, which does not propose to {route.variant!r}"
            )
        if not 1 <= len(prompt) < bundle.context_length or max_tokens < 1:
            raise InvalidArgumentError(
                f"a prompt of {len(prompt)} tokens and max_tokens {max_tokens} do not fit a context of "
                f"{bundle.context_length}"
            )
        outside = next((t for t in prompt if not 0 <= t < bundle.vocabulary), None)
        if outside is not None:
            raise InvalidArgumentError(f"token {outside} of the prompt is outside of [0, {bundle.vocabulary})")

    def _kind(self, draft: str) -> str:
        spec = self.bundle.draft(draft)
        return spec.kind if spec is not None else ""

    def _drop(self, number: int) -> None:
        with self._lock:
            gone = self._sequences.pop(number, None)
        if gone is not None and gone.route.variant in self._banks:
            self._banks[gone.route.variant].leave(gone)
