"""The seam between what generates and what serves it: protocols and plain values, no code.

Doors (:mod:`offramp_worker.generate.doors`) and the scheduler know an engine by :class:`GenerationEngine` and nothing
else, a text by :class:`Tokenizer`. An engine computes and never decides whose turn it is; the scheduler decides and
never computes. A loader makes both from a folder whose ``manifest.json`` says ``"task": "generate"``:
``offramp_worker.generate.load.load_generation``, a :class:`Loader`.

Every method of an engine is called from one thread, unless it says otherwise. Tokens are ids in ``[0, vocabulary)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from offramp_core.errors import OfframpError
from offramp_core.precision import EXACT

REFERENCE = EXACT  # the variant whose greedy answers are what an answer is compared with
DraftKind = Literal["variant", "ngram"]


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One precision of the model: ``fp32`` (always there, the reference), ``int8``, ``int4``, ...

    ``weight_bytes`` are those that a token reads; ``method`` says how it was made. ``token_seconds`` is the time of one
    token of one answer as the bundle measured it, 0 where it did not.
    """

    name: str
    weight_bytes: int
    method: str = ""
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What may propose tokens that the model verifies.

    ``variant``: the model at another precision, whose name is ``id``. ``ngram``: the prompt's own words, without
    weights. ``variants`` are those that can verify it; empty: each of them. ``draft_tokens`` are the numbers of tokens
    at a time that are worth a trial; empty where the bundle has not measured any.
    """

    id: str
    kind: DraftKind
    layers: int = 0
    vocabulary: int = 0
    weight_bytes: int = 0
    variants: tuple[str, ...] = ()
    draft_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationBundle:
    """What a bundle says of itself. ``context_length`` bounds prompt and answer together, in tokens.

    An answer ends with any of ``end_tokens``. ``begin_tokens`` go before a prompt that does not bring them.
    ``cache_bytes_per_token`` is what one token of one sequence takes in the caches of the variant alone. ``digest``
    names the content. ``draft_ratios`` has by draft and number of its tokens the time per token over the reference's
    alone, as the bundle measured it.
    """

    name: str
    digest: str
    context_length: int
    vocabulary: int
    end_tokens: tuple[int, ...]
    variants: tuple[VariantSpec, ...]
    drafts: tuple[DraftSpec, ...] = ()
    begin_tokens: tuple[int, ...] = ()
    cache_bytes_per_token: int = 0
    created: int = 0  # seconds since the epoch, for GET /v1/models
    draft_ratios: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def variant(self, name: str) -> VariantSpec | None:
        """The variant of this name, if there is one."""
        return next((v for v in self.variants if v.name == name), None)

    def draft(self, name: str) -> DraftSpec | None:
        """The draft of this id, if there is one."""
        return next((d for d in self.drafts if d.id == name), None)


@dataclass(frozen=True, slots=True)
class DecodingRoute:
    """How one request is computed: by which ``variant``, with which ``draft`` (empty: none) proposing ``draft_tokens``
    at a time."""

    variant: str = REFERENCE
    draft: str = ""
    draft_tokens: int = 0

    @property
    def lossless(self) -> bool:
        """Whether it answers as the reference does, ties apart."""
        return self.variant == REFERENCE

    @property
    def is_reference(self) -> bool:
        """Whether it *is* the reference: nothing to gain, nothing to lose."""
        return self.lossless and not self.draft


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy: the highest logit, of equal ones the lowest id;
    nothing else then counts.

    A draw depends on ``seed``, the prompt and the route alone, never on who else is served. ``top_logprobs`` asks for
    so many alternatives of each token, beside its own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer.

    ``logprob`` (natural, of the model at temperature 1) and ``top`` (id and logprob, best first) are there where they
    were asked for, else NaN and empty. ``margin`` is the highest logit less the second one, NaN where it is not known:
    below a stated margin a difference between two ways to compute is a tie and no error.
    """

    id: int
    logprob: float = float("nan")
    top: tuple[tuple[int, float], ...] = ()
    margin: float = float("nan")


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """What one step did for one sequence.

    ``tokens`` are new, the one that ends the answer included; empty while ``prompt_left`` tokens of the prompt are
    still to be read. ``ended``: an end token came, ``max_tokens`` are there or the context is full; nothing more will
    come. ``proposed`` tokens of a draft were verified in this step, ``accepted`` of them are among ``tokens``.
    ``summed``: they are of several steps, perhaps of other sequences of the route too, as the engine knows no better.
    ``seconds`` is its part of the step's time, an even share of what was computed for several in one pass; 0 where it
    is not known. Of an engine that batches by itself it is all the time that passed, and ``busy`` what of the engine it
    took meanwhile (:mod:`offramp_core.generation.occupancy`); 0 where that is ``seconds``. ``error`` is why this
    sequence cannot go on, empty otherwise: it has ended then, and the others have not.
    """

    sequence: int
    tokens: tuple[Token, ...] = ()
    prompt_left: int = 0
    ended: bool = False
    proposed: int = 0
    accepted: int = 0
    summed: bool = False
    error: str = ""
    seconds: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes that caches of keys and values take, and the most that they may take."""

    used_bytes: int
    limit_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


class NoRoomError(OfframpError):
    """The caches of what runs leave no room for a sequence; it fits once others have ended."""


class AwayError(NoRoomError):
    """What computes this variant is away, nobody knows for how long: requests do not wait for it, audits
    for the reference alone."""


class GenerationEngine(Protocol):
    """Computes. Sequences are independent: what one of them answers depends on no other."""

    @property
    def bundle(self) -> GenerationBundle: ...

    def cache_bytes(self, tokens: int, *, route: DecodingRoute) -> int:
        """Bytes that a sequence of ``tokens`` in all (prompt and answer) takes at most, drafts included. Pure; from any
        thread."""
        ...

    def memory(self) -> CacheMemory:
        """From any thread."""
        ...

    def fault(self) -> str:
        """Why nothing can be computed for now, in one sentence; empty where it can. From any thread."""
        ...

    def available(self, variant: str) -> bool:
        """Whether this variant can compute now; the reference can wherever there is no :meth:`fault`. From any
        thread."""
        ...

    def wake(self) -> None:
        """Somebody waits: a step that waits for another process returns. From any thread."""
        ...

    def start(self, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling, route: DecodingRoute) -> int:
        """A new sequence; computes nothing yet. The prompt has at least one token, and fits the context with one token
        of answer.

        Returns
        -------
        int
            Its number, never used before in this engine.

        Raises
        ------
        NoRoomError
            Its caches would pass the limit.
        AwayError
            The variant is not :meth:`available`.
        InvalidArgumentError
            The route names what the bundle does not have, or a token is outside the vocabulary.
        """
        ...

    def step(self, sequences: Sequence[int], *, prompt_tokens: int) -> list[SequenceProgress]:
        """One turn for each of these: at most ``prompt_tokens`` of its prompt, or the next token, with a draft perhaps
        several.

        One :class:`SequenceProgress` per sequence, in their order. Bounded in time by what it was given: no turn reads
        a whole long prompt. A sequence that ended gives its caches back at once and may be left out or cancelled
        afterwards; it is never stepped again.

        Raises
        ------
        Exception
            The executor failed as a whole: none of these sequences can go on.
        """
        ...

    def cancel(self, sequence: int) -> None:
        """Give its caches back; one that has ended, or that is not known, is no error."""
        ...

    def probe(self) -> None:
        """Compute something small whose answer is known; raises unless it comes out. For health; with no sequence
        touched."""
        ...

    def close(self) -> None:
        """Give everything back. No method may be called afterwards."""
        ...


class TextDecoder(Protocol):
    """Tokens of one answer become text as they come. What is not yet whole (half a character, half a cluster of bytes)
    is kept back."""

    def add(self, token: int) -> str:
        """Text that this token completes; may be empty. All pieces joined with :meth:`finish` are the decoded
        answer."""
        ...

    def finish(self) -> str:
        """What is left; bytes that never became a character are U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back. Safe for threads."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text, without the bundle's begin tokens. ``special``: names of special tokens within the text
        mean them, as chat templates need; otherwise they are ordinary letters, so that no client can forge a turn."""
        ...

    def decoder(self) -> TextDecoder: ...

    def token_text(self, token: int) -> str:
        """One token alone, as text; U+FFFD where it is no whole character."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """One token alone, as bytes; those of its name for a special token."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation by the model's chat template, up to where the assistant begins to speak.

        Contents are text that no template directive and no special token can hide in.

        Raises
        ------
        InvalidArgumentError
            There is no template, or it refuses these messages (its own words are in the message).
        """
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A bundle, ready to serve."""

    bundle: GenerationBundle
    engine: GenerationEngine
    tokenizer: Tokenizer


class Loader(Protocol):
    def __call__(self, folder: Path, *, threads: int, cache_bytes: int) -> Loaded:
        """Load and verify a bundle; caches of all sequences together take at most ``cache_bytes``.

        Raises
        ------
        InvalidBundleError
            Names the file and what to do.
        """
        ...
