"""How a bench talks to an engine in an environment of its own: a line of JSON in, a line of JSON out.

In: ``prompts`` (lists of token ids, asked at once), ``tokens`` of an answer at most, ``end`` (ids that end one). Out:
``tokens`` by prompt, and ``times``, the seconds of the processor that each was there after: they are told apart from
what neighbours of the machine take.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answering = Callable[[list[list[int]], int, list[int]], dict[str, Any]]


def serve(load: Callable[[str], tuple[str, Answering]]) -> None:
    """Answer line after line until there is none. Whatever a library prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    version, answer = load(sys.argv[1])
    _send(out, {"version": version})
    for line in sys.stdin:
        asked = json.loads(line)
        _send(out, answer(asked["prompts"], asked["tokens"], asked["end"]))


def until_end(tokens: list[int], end: list[int]) -> list[int]:
    """An answer up to what ends it; engines that compute several at once fill up behind."""
    stops = [i for i, token in enumerate(tokens) if token in end]
    return tokens[: stops[0] + 1] if stops else tokens


def _send(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
