"""Answers to inputs seen before, kept for as long as the plan that gave them is in force; off unless asked for.

The key is a digest of the input with a secret of this process, the epoch and the plan. Nothing is kept across epochs.
Requests for an input that another request already waits for wait with it instead of running again. Why and how they are
audited: docs/decisions/0021.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.queue.tickets import Answer, Array, Ticket

DIGEST_BYTES = 16
BYTES_PER_ANSWER, BYTES_PER_ROW = 512, 256  # of Python objects around an answer, generously


@dataclass(slots=True)
class _Leader:
    """A request that runs, what ``config`` it was to run under, and those that wait for its answer."""

    key: bytes
    config: str
    #: Whether it may have the larger budget of overload.
    loose: bool
    followers: list[Ticket] = field(default_factory=list)


class PredictionCache:
    """Bounded by bytes; the least recently used answer goes first. Safe to use from any thread."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(DIGEST_BYTES)
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._bytes = 0
        self._leading: dict[tuple[bytes, bool], Ticket] = {}
        self._leaders: dict[Ticket, _Leader] = {}
        self._following: dict[Ticket, _Leader] = {}

    def key(self, x: Array, *, never_exit: bool, epoch: int, config: str) -> bytes:
        """Of an input with its shape and type, and of all else that its answer depends on."""
        digest = hashlib.blake2b(key=self._secret, digest_size=DIGEST_BYTES)
        digest.update(f"{epoch}/{config}/{never_exit}/{x.dtype.str}/{x.shape}/".encode())
        digest.update(np.ascontiguousarray(x).data)
        return digest.digest()

    def get(self, key: bytes) -> Answer | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def join(self, key: bytes, ticket: Ticket, *, config: str, loose: bool = False) -> bool:
        """Wait with a request for the same input that is on its way; False when there is none, and then this one leads.

        Nobody waits with a request of lower priority or with one that may take longer than they can wait, nor those
        that may have the larger budget of overload (``loose``) with others: one answer must do for all.
        """
        with self._lock:
            leader = self._leading.get((key, loose))
            if leader is None:
                self._leading[key, loose], self._leaders[ticket] = ticket, _Leader(key, config, loose)
                return False
            if ticket.priority < leader.priority or ticket.expires < leader.expires:
                return False
            self._following[ticket] = self._leaders[leader]
            self._leaders[leader].followers.append(ticket)
            return True

    def leave(self, ticket: Ticket) -> bool:
        """Stop waiting for another request's answer; False if it did not."""
        with self._lock:
            leader = self._following.pop(ticket, None)
            if leader is None:
                return False
            leader.followers.remove(ticket)
            return True

    def finish(self, ticket: Ticket, runtime: Runtime | None) -> list[Ticket]:
        """A request has been answered under ``runtime``, or (None) never will be. Returns the requests that wait for
        it.

        Its answer is kept if one plan gave the whole of it, the one that was in force when it came; not under
        overload.
        """
        with self._lock:
            leader = self._leaders.pop(ticket, None)
            if leader is None:
                return []
            del self._leading[leader.key, leader.loose]
            for follower in leader.followers:
                del self._following[follower]
        if runtime is not None and runtime.config == leader.config and ticket.ran_under(runtime) and not ticket.eased:
            self._keep(leader.key, ticket.answer)
        return leader.followers

    def clear(self) -> None:
        """Forget all answers; requests on their way are not concerned."""
        with self._lock:
            self._answers.clear()
            self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """What the answers take, by estimate."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._answers)

    def _keep(self, key: bytes, answer: Answer) -> None:
        size = _size(answer)
        with self._lock:
            if size > self._max_bytes or key in self._answers:
                return
            self._answers[key] = answer
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, oldest = self._answers.popitem(last=False)
                self._bytes -= _size(oldest)


def _size(answer: Answer) -> int:
    return BYTES_PER_ANSWER + answer.logits.nbytes + answer.labels.nbytes + len(answer.labels) * BYTES_PER_ROW
