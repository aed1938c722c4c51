"""Inference over REST for one of several models: handed to the model's own door, at once or when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import unquote

from offramp_core.reasons import RequestOutcome
from offramp_worker.http.bodies import Headers
from offramp_worker.http.inference import PREFIX, Inference, Pending, Reply
from offramp_worker.http.refusals import Refusals, Response
from offramp_worker.http.tensors import shown
from offramp_worker.shared.model import Model, Waiting
from offramp_worker.shared.repository import Repository, UnavailableError

MOST_NAMED = 20  # of the models that there are, in an error


@dataclass(slots=True, eq=False)
class Routed:
    """A request on its way: the door that has it, or its place in the queue for its model."""

    model: Model
    reply: Reply
    door: Inference | None = None
    pending: Pending | None = None
    waiting: Waiting | None = None
    ended: bool = False

    def end(self) -> None:
        """Its model has no more to do with it."""
        if not self.ended:
            self.ended = True
            self.model.end()


class SharedInference:
    """``POST /v2/models/{name}[/versions/{version}]/infer``, as :class:`offramp_worker.http.inference.Inference`."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.refusals = Refusals()
        self.max_body_bytes = repository.settings.process.max_body_bytes

    def answer(self, path: str, headers: Headers, body: bytes | bytearray, reply: Reply) -> Routed | None:
        """Answer one request, as of one model alone."""
        name = unquote(path.partition("?")[0])[len(PREFIX) :].partition("/")[0]
        model = self._repository.models.get(name)
        if model is None:
            reply(self.refusals.refusal(404, unknown(name, self._repository)))
            return None
        model.asked()
        self._repository.executor.read(model.name)
        routed = Routed(model, reply)
        if model.ready:
            self._hand(routed, path, headers, body)
            return None if routed.ended else routed
        try:
            waiting = Waiting(go=partial(self._hand, routed, path, headers, body), refuse=partial(self._refuse, routed))
            self._repository.wait_for(model, waiting)
        except UnavailableError as error:
            self._refuse(routed, str(error), error.retry_after)
            return None
        routed.waiting = waiting
        return routed

    def _hand(self, routed: Routed, path: str, headers: Headers, body: bytes | bytearray) -> None:
        routed.model.begin()
        routed.waiting, routed.door = None, routed.model.doors.inference
        routed.pending = routed.door.answer(path, headers, body, partial(self._replied, routed))

    @staticmethod
    def _replied(routed: Routed, response: Response) -> None:
        routed.end()
        routed.reply(replace(response, close=True) if routed.model.leaving else response)

    def _refuse(self, routed: Routed, error: str, retry_after: int | None) -> None:
        routed.ended = True
        refusals = routed.model.doors.inference.refusals
        routed.reply(refusals.refusal(503, error, outcome=RequestOutcome.REJECTED, retry_after=retry_after))

    def cancel(self, pending: Any, *, gone: Callable[[], None]) -> None:
        """The client has gone away."""
        routed: Routed = pending
        if routed.door is not None and routed.pending is not None:
            routed.door.cancel(routed.pending, gone=gone)
            routed.end()
            return
        if routed.waiting is not None:
            routed.model.leave_line(routed.waiting)
        gone()


def unknown(name: str, repository: Repository) -> str:
    """Why there is no such model."""
    names = sorted(repository.models)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"model {shown(name)} is unknown; this worker serves {', '.join(names[:MOST_NAMED])}{more}"
