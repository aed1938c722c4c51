"""The operator's HTTP client towards workers: an answer is as long as it says, and never longer than memory allows.

Workers hold the model of somebody else and listen to the network, so one that was taken over must not be able to bring
the operator down.
"""

from __future__ import annotations

from collections.abc import Mapping

from offramp_core.errors import UnavailableError

MAX_ANSWER_BYTES = 32 * 1024 * 1024  # ten times a full page of records


class AnswerRefusedError(UnavailableError):
    """A worker's answer was not read. It counts like no answer at all."""


def refuse_unbounded(url: str, headers: Mapping[str, str]) -> None:
    """Refuse, before any of it is read, what has no length, too much of it, or grows when it is unpacked.

    Raises
    ------
    AnswerRefusedError
        The message names the address and what is wrong.
    """
    length = headers.get("Content-Length", "")
    if not length.isdecimal() or int(length) > MAX_ANSWER_BYTES:
        size = f"{length} bytes" if length else "a body of unknown length"
        raise AnswerRefusedError(f"{url} answers with {size}; at most {MAX_ANSWER_BYTES} are read")
    if "Content-Encoding" in headers:
        raise AnswerRefusedError(f"{url} answers compressed, which nobody asked for")
