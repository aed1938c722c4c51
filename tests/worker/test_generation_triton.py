"""Triton's generate extension against a real server, with a real small model: answers whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import stories
from generation import ONCE, GenerationServer

PATH = "/v2/models/stories/generate"


def events(server: GenerationServer, **parameters: Any) -> list[dict[str, Any]]:
    """The events of a stream, to its end; a long answer breaks as it begins."""
    body = {"text_input": ONCE, "id": "mine", "parameters": parameters}
    with server.http.stream("POST", f"{PATH}_stream", json=body) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        found = []
        for line in reply.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                server.engine.broken = "the device is gone" if parameters["max_tokens"] > 100 else ""
    return found


def test_an_answer_is_the_same_text_whole_and_in_events_and_a_broken_one_ends_with_an_error() -> None:
    with GenerationServer() as server:
        whole = server.post(PATH, {"text_input": ONCE, "id": "mine", "parameters": {"max_tokens": 12}}).json()
        assert whole["text_output"] == stories.greedy(ONCE, n=12)[1]
        assert (whole["id"], whole["model_name"], whole["finish_reason"]) == ("mine", "stories", "length")
        assert whole["usage"]["completion_tokens"] == 12
        pieces = events(server, max_tokens=12)
        assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"] and len(pieces) > 1
        assert [piece.get("finish_reason") for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert all(piece["id"] == "mine" for piece in pieces)
        *began, last = events(server, max_tokens=400)
        assert began and all("text_output" in piece for piece in began)
        assert last == {"error": "the model failed while it wrote this answer"}
        server.engine.broken = ""
        server.until_idle()
        assert server.post(PATH, {"text_input": ONCE}).status_code == 200
