"""True labels from clients: recent answers wait for them, and what they say becomes a metric.

Disagreement with the model itself is what plans are certified on; this is the other question, whether the answers are
right, and only people look at it. Off unless asked for (``spec.feedback``, ``OFFRAMP_FEEDBACK_ROWS``), since it keeps
answers in memory.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass, replace

from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.http.tensors import BadRequestError, InferRequest
from offramp_worker.metrics import Metrics

MAX_ID_LENGTH = 256


@dataclass(frozen=True, slots=True)
class _Answer:
    labels: tuple[int, ...]
    arms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FeedbackCounts:
    """Rows of one reply by whether they were right."""

    id: str
    right: int
    wrong: int


class Feedback:
    """The answers of the last ``rows`` rows by request id. Used by the event loop only."""

    def __init__(self, *, rows: int, metrics: Metrics) -> None:
        self._rows, self._metrics = rows, metrics
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._held = 0

    def named(self, request: InferRequest) -> InferRequest:
        """The request with an id for its reply: the client's own, or a new one."""
        return request if request.id else replace(request, id=uuid.uuid4().hex)

    def remember(self, request_id: str | None, ticket: Ticket) -> None:
        """A reply has gone out. Of two with the same id the later one counts."""
        if not request_id or len(request_id) > MAX_ID_LENGTH:
            return
        self._forget(request_id)
        self._answers[request_id] = _Answer(tuple(ticket.labels.tolist()), tuple(ticket.arms))
        self._held += len(ticket.arms)
        while self._held > self._rows:
            self._forget(next(iter(self._answers)))

    def judge(self, request_id: str, labels: list[int]) -> FeedbackCounts | None:
        """Compare a reply with the true labels of its rows, once; None when there is no such reply (any more).

        Raises
        ------
        BadRequestError
            There are more or fewer labels than rows.
        """
        answer = self._answers.get(request_id)
        if answer is None:
            return None
        if len(labels) != len(answer.labels):
            raise BadRequestError(f"label: has {len(labels)} labels; the reply has {len(answer.labels)} rows")
        self._forget(request_id)
        right = 0
        for label, truth, arm in zip(answer.labels, labels, answer.arms, strict=True):
            right += label == truth
            self._metrics.feedback(arm, "right" if label == truth else "wrong").inc()
        return FeedbackCounts(request_id, right, len(labels) - right)

    def __len__(self) -> int:
        return len(self._answers)

    def _forget(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._held -= len(answer.labels)
