"""What replies look like. Pure: from pieces of answers to the JSON of a protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from offramp_worker.generate.answers import Piece
from offramp_worker.generate.requests import RequestError, Wanted
from offramp_worker.generate.routes import text_of
from offramp_worker.generate.seam import Token, Tokenizer
from offramp_worker.generate.tickets import ClosedError, Ticket

DONE = b"data: [DONE]\n\n"
STILL_THERE = b": waiting\n\n"
SMALLEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Reply:
    """One request as its reply names it. ``created`` in seconds since the epoch."""

    id: str
    created: int
    model: str
    wanted: Wanted
    tokenizer: Tokenizer
    fingerprint: str


class FormOfReplies(Protocol):
    """One protocol's replies."""

    def event(self, reply: Reply, index: int, piece: Piece, ticket: Ticket, *, first: bool) -> bytes:
        """A piece of a stream."""
        ...

    def end(self, reply: Reply, tickets: Sequence[Ticket]) -> bytes:
        """What ends a stream."""
        ...

    def whole(self, reply: Reply, tickets: Sequence[Ticket], pieces: Sequence[Sequence[Piece]]) -> bytes:
        """A reply that is no stream; ``pieces`` by answer."""
        ...

    def error(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> bytes:
        """The body of an error."""
        ...

    def error_event(self, message: str) -> bytes:
        """An error that ends a stream."""
        ...


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def ours(tickets: Sequence[Ticket]) -> dict[str, Any]:
    """How Offramp computed a reply: by which route and plan, and whether lossy parts were off because it was
    sampled."""
    ticket = tickets[0]
    assigned = ticket.assigned
    return {
        "route": text_of(assigned.route(ticket.step)),
        "lossless": assigned.route(ticket.step).lossless,
        "config": assigned.config,
        "arm": assigned.arm,
        "epoch": assigned.epoch,
        "audited": any(t.audited for t in tickets),
        "lossy_off_for_sampling": assigned.lossy_off,
    }


def usage(tickets: Sequence[Ticket], *, n: int) -> dict[str, Any]:
    """Tokens of a request: a prompt counts once, however many answers it gets."""
    prompt = sum(len(t.prompt) for t in tickets[::n])
    written = sum(len(t.answer.tokens) for t in tickets)
    accepted, proposed = sum(t.accepted for t in tickets), sum(t.proposed for t in tickets)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
        },
    }


class OpenAI:
    """``/v1/completions`` and ``/v1/chat/completions``."""

    def event(self, reply: Reply, index: int, piece: Piece, ticket: Ticket, *, first: bool) -> bytes:
        chat = reply.wanted.form == "chat"
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(reply, [piece]),
            "finish_reason": piece.finish,
        }
        if chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | (
                {"content": piece.text} if piece.text or first else {}
            )
        else:
            choice["text"] = piece.text
        chunk = self._head(reply, "chat.completion.chunk" if chat else "text_completion", [choice])
        if reply.wanted.include_usage:
            chunk["usage"] = None
        if first or piece.finish:
            chunk["offramp"] = ours([ticket])
        return event(chunk)

    def end(self, reply: Reply, tickets: Sequence[Ticket]) -> bytes:
        if not reply.wanted.include_usage:
            return DONE
        kind = "chat.completion.chunk" if reply.wanted.form == "chat" else "text_completion"
        return event(self._head(reply, kind, []) | {"usage": usage(tickets, n=reply.wanted.n)}) + DONE

    def whole(self, reply: Reply, tickets: Sequence[Ticket], pieces: Sequence[Sequence[Piece]]) -> bytes:
        chat, choices = reply.wanted.form == "chat", []
        for i, (ticket, parts) in enumerate(zip(tickets, pieces, strict=True)):
            choice: dict[str, Any] = {
                "index": i,
                "logprobs": self._logprobs(reply, parts),
                "finish_reason": ticket.answer.finish,
            }
            if chat:
                choice["message"] = {"role": "assistant", "content": ticket.answer.text, "refusal": None}
            else:
                choice["text"] = ticket.answer.text
            choices.append(choice)
        body = self._head(reply, "chat.completion" if chat else "text_completion", choices)
        return orjson.dumps(body | {"usage": usage(tickets, n=reply.wanted.n), "offramp": ours(tickets)})

    def error(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> bytes:
        return orjson.dumps(self._error(message, status=status, param=param, code=code))

    def error_event(self, message: str) -> bytes:
        return event(self._error(message, status=500, param=None, code=None)) + DONE

    @staticmethod
    def _error(message: str, *, status: int, param: str | None, code: str | None) -> dict[str, Any]:
        kind = {429: "rate_limit_error", 503: "service_unavailable_error"}.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @staticmethod
    def _head(reply: Reply, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": reply.id,
            "object": kind,
            "created": reply.created,
            "model": reply.model,
            "system_fingerprint": reply.fingerprint,
            "choices": choices,
        }

    def _logprobs(self, reply: Reply, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not reply.wanted.sampling.logprobs:
            return None
        tokens = [t for p in pieces for t in p.tokens]
        if reply.wanted.form == "chat":
            return {"content": [_with_others(t, reply.tokenizer) for t in tokens], "refusal": None}
        text = reply.tokenizer.token_text
        return {
            "tokens": [text(t.id) for t in tokens],
            "token_logprobs": [_finite(t.logprob) for t in tokens],
            "top_logprobs": [{text(i): _finite(p) for i, p in t.top} for t in tokens],
            "text_offset": [at for p in pieces for at in p.offsets],
        }


class Triton:
    """``/v2/models/NAME/generate`` and ``generate_stream``."""

    def event(self, reply: Reply, index: int, piece: Piece, ticket: Ticket, *, first: bool) -> bytes:
        finish = {"finish_reason": piece.finish, "offramp": ours([ticket])} if piece.finish else {}
        return event(self._head(reply) | {"text_output": piece.text} | finish)

    def end(self, reply: Reply, tickets: Sequence[Ticket]) -> bytes:
        return b""

    def whole(self, reply: Reply, tickets: Sequence[Ticket], pieces: Sequence[Sequence[Piece]]) -> bytes:
        answer = tickets[0].answer
        body = {"text_output": answer.text, "finish_reason": answer.finish, "usage": usage(tickets, n=1)}
        return orjson.dumps(self._head(reply) | body | {"offramp": ours(tickets)})

    def error(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> bytes:
        return orjson.dumps({"error": message})

    def error_event(self, message: str) -> bytes:
        return event({"error": message})

    @staticmethod
    def _head(reply: Reply) -> dict[str, Any]:
        named = {"id": reply.wanted.id} if reply.wanted.id else {}
        return named | {"model_name": reply.model, "model_version": "1"}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The error of a request that gets no answer."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


def error_of(error: RequestError | ClosedError) -> ErrorReply:
    """The form of a refusal."""
    if isinstance(error, RequestError):
        return ErrorReply(error.status, str(error), error.field, error.code)
    return ErrorReply(error.status, str(error), None, error.refused.why, error.refused.retry_after_seconds)


def models(listed: Mapping[str, int]) -> dict[str, Any]:
    """``GET /v1/models``: names and when they were made."""
    return {"object": "list", "data": [model(name, created) for name, created in listed.items()]}


def model(name: str, created: int) -> dict[str, Any]:
    """``GET /v1/models/NAME``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "offramp"}


def _with_others(token: Token, tokenizer: Tokenizer) -> dict[str, Any]:
    others = [_logprob(i, p, tokenizer) for i, p in token.top]
    return _logprob(token.id, token.logprob, tokenizer) | {"top_logprobs": others}


def _logprob(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else SMALLEST_LOGPROB
