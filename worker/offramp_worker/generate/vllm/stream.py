"""One answer that vLLM writes: asked for over its socket, read on a thread of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offramp_worker.generate.seam import Sampling, Token
from offramp_worker.generate.vllm.command import SERVED_NAME
from offramp_worker.generate.vllm.process import UnixConnection

FIRST_SILENCE_SECONDS = 120.0  # the longest wait for the first piece of an answer
SILENCE_SECONDS = 300.0  # and between two
BROKE_OFF = "vLLM broke off"
MARGIN_OF = 2  # log probabilities of the two best tokens tell the margin between them
_NAMED = "token_id:"  # what vLLM calls a token by, before its number


def body_of(prompt: Sequence[int], *, max_tokens: int, sampling: Sampling, end_tokens: Sequence[int]) -> dict[str, Any]:
    """The request. Tokens go in and out as numbers; only the bundle's end tokens end it."""
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stop_token_ids": list(end_tokens),
        "ignore_eos": True,
    }
    if not sampling.greedy:
        body |= {"top_p": sampling.top_p, "seed": sampling.seed}
    if sampling.logprobs:
        body["logprobs"] = max(MARGIN_OF, sampling.top_logprobs)
    return body


class AnswerStream:
    """``take`` gives what has come; ``arrived`` is called, on the reading thread, whenever something has."""

    def __init__(self, at: Path, body: dict[str, Any], *, top: int, arrived: Callable[[], None]) -> None:
        """``top`` alternatives of each token are asked for."""
        self._connection = UnixConnection(at, seconds=FIRST_SILENCE_SECONDS)
        self._body, self._top, self._arrived = json.dumps(body), top, arrived
        self._lock = threading.Lock()
        self._tokens: list[Token] = []
        self._ended, self._error, self._cancelled = False, "", False
        threading.Thread(target=self._read, name="vllm-answer", daemon=True).start()

    @property
    def has_news(self) -> bool:
        with self._lock:
            return bool(self._tokens or self._ended)

    @property
    def ended(self) -> bool:
        with self._lock:
            return self._ended

    def take(self) -> tuple[tuple[Token, ...], bool, str]:
        """New tokens, whether it has ended, and why it could not go on."""
        with self._lock:
            tokens, self._tokens = tuple(self._tokens), []
            return tokens, self._ended, self._error

    def cancel(self) -> None:
        """vLLM stops computing an answer whose connection ends."""
        self._cancelled = True
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        error = BROKE_OFF  # unless it is read to its proper end
        try:
            self._connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            reply = self._connection.getresponse()
            if reply.status == http.client.OK:
                error = self._read_pieces(reply)
            else:
                error = f"vLLM answered {reply.status}: {reply.read(500).decode(errors='replace')}"
        except Exception as cause:  # whatever a reply is made of: it is no whole answer
            error = f"{BROKE_OFF}: {str(cause) or type(cause).__name__}"
        finally:
            self._connection.close()
            with self._lock:
                self._ended, self._error = True, error
            self._arrived()

    def _read_pieces(self, reply: http.client.HTTPResponse) -> str:
        """Read to the end; why it is no whole answer."""
        finished = False
        for raw in reply:
            if self._cancelled:
                return "it was cancelled"
            line = raw.strip()
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                return "" if finished else "vLLM ended without a reason"
            piece = json.loads(text)
            if "error" in piece:
                return f"vLLM: {str(piece['error'])[:300]}"
            self._began()
            for choice in piece["choices"]:
                finished = finished or choice.get("finish_reason") in ("stop", "length")
                self._keep(tokens_of(choice, top=self._top))
        return BROKE_OFF

    def _began(self) -> None:
        """From its first piece on an answer may pause for longer."""
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.settimeout(SILENCE_SECONDS)

    def _keep(self, tokens: list[Token]) -> None:
        if not tokens:
            return
        with self._lock:
            self._tokens += tokens
        self._arrived()


def tokens_of(choice: dict[str, Any], *, top: int) -> list[Token]:
    """The tokens of one piece of a stream, with what is known of them."""
    ids = choice.get("token_ids") or []
    if not all(type(number) is int for number in ids):
        raise ValueError("a token is no number")
    logprobs = choice.get("logprobs")
    if not logprobs:
        return [Token(number) for number in ids]
    found = []
    for number, own, alternatives in zip(ids, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        best = sorted(((_number(name), float(value)) for name, value in alternatives.items()), key=lambda one: -one[1])
        margin = best[0][1] - best[1][1] if len(best) > 1 else math.nan
        found.append(Token(number, logprob=float(own), top=tuple(best[:top]), margin=margin))
    return found


def _number(name: str) -> int:
    return int(name.removeprefix(_NAMED))
