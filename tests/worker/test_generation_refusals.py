"""Requests for answers that cannot be taken: a 400 that names the field, at every door, and nothing is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from generation import ONCE, GenerationServer

COMPLETIONS, CHAT, TRITON = "/v1/completions", "/v1/chat/completions", "/v2/models/stories/generate"
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "stories", "prompt": ONCE},
    CHAT: {"model": "stories", "messages": [{"role": "user", "content": ONCE}]},
    TRITON: {"text_input": ONCE},
}
LONG = "Once upon a time there was a big dog. " * 200  # more tokens than the context of 512


@pytest.fixture(scope="module")
def server() -> Iterator[GenerationServer]:
    with GenerationServer() as running:
        yield running


def refused(server: GenerationServer, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    """What a client is told; the worker goes on as if nothing had come."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    server.until_idle()
    assert server.complete(max_tokens=2).status_code == 200
    told: Any = reply.json()["error"]
    return told if isinstance(told, dict) else {"message": told}


# field: (what is changed in a request, the field that is named, what is said of it)
FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens", "is -1; it must be a whole number from 1"),
    "no max_tokens": ({"max_tokens": 0}, "max_tokens", "is 0; it must be a whole number from 1"),
    "max_tokens in words": ({"max_tokens": "many"}, "max_tokens", "must be a whole number"),
    "max_tokens beyond the context": ({"max_tokens": 4096}, "max_tokens", "of the context of 512"),
    "an unknown field": ({"max_new_tokens": 8}, "max_new_tokens", "is no field that is known here"),
    "a temperature below 0": ({"temperature": -0.5}, "temperature", "must be a number from 0"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, TRITON])
@pytest.mark.parametrize(("change", "field", "why"), FIELDS.values(), ids=FIELDS)
def test_a_field_that_cannot_be_is_refused_by_its_name(
    server: GenerationServer, path: str, change: dict[str, Any], field: str, why: str
) -> None:
    body = ASKED[path] | ({"parameters": change} if path == TRITON else change)
    told = refused(server, path, body)
    assert field in told["message"] and why in told["message"]
    if path != TRITON:
        assert told["param"] == field and told["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [ONCE, LONG]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [5] * 512}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (TRITON, {"text_input": LONG}, "text_input"),
    ],
    ids=["text", "one of two", "tokens", "chat", "triton"],
)
def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(
    server: GenerationServer, path: str, change: dict[str, Any], field: str, stream: bool
) -> None:
    if path == TRITON:
        path = f"{TRITON}_stream" if stream else TRITON
        told = refused(server, path, ASKED[TRITON] | change)
    else:
        told = refused(server, path, ASKED[path] | change | {"stream": stream})
        assert told["param"] == field and told["code"] == "context_length_exceeded"
    assert field in told["message"] and "the model's context of 512 holds prompt and answer together" in told["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, TRITON])
@pytest.mark.parametrize(
    "raw",
    [b"\xff\xfe", b"Once \xc3( upon", b"cut \xe2\x82", b"half \xed\xa0\x80 a pair"],
    ids=["no text", "a wrong byte", "a character cut off", "a surrogate"],
)
def test_text_that_is_no_utf_8_is_refused(server: GenerationServer, path: str, raw: bytes) -> None:
    body = json.dumps(ASKED[path]).encode().replace(ONCE.encode(), raw)
    told = refused(server, path, body)
    assert "body: is no JSON" in told["message"]


def test_an_escaped_half_of_a_pair_is_refused_too(server: GenerationServer) -> None:
    body = json.dumps(ASKED[COMPLETIONS]).encode().replace(ONCE.encode(), rb"half \ud800 a pair")
    assert "body: is no JSON" in refused(server, COMPLETIONS, body)["message"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"text": ONCE}}, "prompt"),
        ({"stop": [""] * 3}, "stop"),
        ({"parameters": {"exit": "sometimes"}}, "parameters.exit"),
        ({"parameters": {"class": "code\n{"}}, "parameters.class"),
        ({"parameters": {"klass": "code"}}, "parameters.klass"),
    ],
    ids=[
        "a token beyond",
        "a token below",
        "an object",
        "empty stops",
        "an exit",
        "a class of two lines",
        "a parameter",
    ],
)
def test_what_a_completion_cannot_have_is_refused_by_its_place(
    server: GenerationServer, change: dict[str, Any], field: str
) -> None:
    assert field in refused(server, COMPLETIONS, ASKED[COMPLETIONS] | change)["message"]
