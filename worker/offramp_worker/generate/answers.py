"""One answer as it grows: tokens become text, stop strings end it, and what may be shown comes out in pieces. Without
threads and clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offramp_core.generation.columns import answer_uncertainty
from offramp_core.generation.stops import StopScanner
from offramp_worker.generate.seam import TextDecoder, Token

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What can be shown now: text, and the tokens it is made of where their log probabilities were asked for, with
    where in the answer each begins. ``finish`` ends the answer, ``error`` ends it without one."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()
    finish: Finish | None = None
    error: str = ""

    @property
    def last(self) -> bool:
        return self.finish is not None or bool(self.error)


@dataclass(frozen=True, slots=True)
class Given:
    """A whole answer."""

    text: str
    tokens: tuple[Token, ...]

    @property
    def uncertainty(self) -> float:
        return answer_uncertainty([token.logprob for token in self.tokens])


class GeneratedAnswer:
    """The answer to one prompt.

    Attributes
    ----------
    tokens : list of Token
        All that count: to the end token, or to the one that completed a stop string.
    text : str
        All that was shown so far.
    finish : str or None
        ``stop`` (an end token or a stop string), ``length``, or None while it grows.
    """

    def __init__(
        self, decoder: TextDecoder, *, stops: tuple[str, ...], end_tokens: Sequence[int], logprobs: bool = False
    ) -> None:
        self._decoder, self._scanner = decoder, StopScanner(stops)
        self._end_tokens, self.logprobs = frozenset(end_tokens), logprobs
        self._decoded = self._shown = 0
        self._unshown: deque[tuple[int, Token]] = deque()  # and where the text of each begins
        self._texts: list[str] = []
        self.tokens: list[Token] = []
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, tokens: Sequence[Token], *, ended: bool) -> Piece:
        """New tokens; with ``ended`` none will follow. What comes after a stop is left out."""
        texts = []
        for token in tokens:
            self.tokens.append(token)
            if token.id in self._end_tokens:
                self.finish = "stop"
                break
            if self.logprobs:
                self._unshown.append((self._decoded, token))
            texts.append(self._add(self._decoder.add(token.id)))
            if self._scanner.stopped:
                self.finish = "stop"
                break
        if ended and self.finish is None:
            self.finish = "length"
        if self.finish is not None:
            texts.append(self._add(self._decoder.finish()) + self._scanner.finish())
        return self._piece("".join(texts))

    def _add(self, text: str) -> str:
        self._decoded += len(text)
        return self._scanner.add(text)

    def _piece(self, text: str) -> Piece:
        self._shown += len(text)
        if text:
            self._texts.append(text)
        whole = self.finish is not None and not self._scanner.stopped
        shown = []
        while self._unshown and (whole or self._unshown[0][0] < self._shown):
            shown.append(self._unshown.popleft())
        return Piece(text, tuple(t for _, t in shown), tuple(at for at, _ in shown), self.finish)
