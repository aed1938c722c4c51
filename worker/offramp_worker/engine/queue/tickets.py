"""One request on its way through the engine, and how the engine refuses one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.errors import OfframpError
from offramp_core.protocol import DEFAULT_TIER, OVERLOAD
from offramp_core.reasons import RequestOutcome
from offramp_core.task import Answers, Task
from offramp_worker.engine.arms.arms import EXITS_OFF, Runtime

Array = npt.NDArray[Any]
HIGHEST_PRIORITY = 1
EXPIRED = "parameters.timeout: the time ran out before the request could run"


class OverloadedError(OfframpError):
    """The request was not taken: too many others wait. ``retry_after_seconds`` is when there should be room."""

    def __init__(self, message: str, *, retry_after_seconds: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UnableError(OverloadedError):
    """The request was not taken, and sending it here again more slowly would not help: the worker shuts down or is too
    slow for it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answers to a finished request: ``logits`` [n, C] are the model's outputs, ``labels`` [n, ...] the answers in
    them, and the rest by row."""

    logits: npt.NDArray[np.float32]
    labels: Answers
    exits: list[str]
    configs: list[str]
    arms: list[str]
    epochs: list[int]


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request of n rows, and its answer as it comes in.

    Each row is batched, drawn for audit and answered on its own; the ticket is done when all are. ``x`` is (n, ...)
    contiguous. ``never_exit`` asks for the exact executor, ``deadline`` (a time like ``admitted``) for an answer by
    then, if need be the best one so far; ``due`` says which rows got that. ``error`` is set when a batch failed,
    ``expired`` when its time ran out in the queue, ``cached`` when it did not run because the answer was known.
    """

    x: Array
    never_exit: bool
    logits: npt.NDArray[np.float32]
    labels: Answers
    admitted: float
    wall_time: float
    draws: tuple[float, ...]
    pending: int
    exits: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    audited: list[bool] = field(default_factory=list)
    error: str | None = None
    deadline: float = math.inf
    due: list[bool] = field(default_factory=list)
    #: Rows that the last exit of an edge answered because its core did not.
    offline: list[bool] = field(default_factory=list)
    #: Why nobody could answer it now.
    unable: str = ""
    expired: bool = False
    cached: bool = False
    #: From 1 on; lower numbers run first.
    priority: int = HIGHEST_PRIORITY
    #: When it should be answered; of one priority, what comes first here runs first.
    run_by: float = math.inf
    #: When it is of no use any more, infinite without a timeout.
    expires: float = math.inf
    #: Whether it was admitted because it could meet the objective.
    on_time: bool = False
    #: Rows handed out in batches; the others still wait.
    begun: int = 0
    #: Order of arrival, given by the queue.
    number: int = 0
    #: Requests of one group may share a batch.
    group: int = 0
    #: began_at and batch_rows: when its last batch began (infinite: never) and how many rows that had; noted only for
    #: traces.
    began_at: float = math.inf
    batch_rows: int = 0
    #: slice_name and stream: what the request says it belongs to, declared or not, and which source it comes from.
    slice_name: str = ""
    stream: str = ""
    #: Its source may take turns with others (:class:`~offramp_worker.engine.accounts.turns.Turns`).
    repeats: bool = False
    #: The smaller budget that it asks for; empty for everybody's. The worker itself makes it that of overload.
    tier: str = ""
    #: It names everybody's budget, and takes no larger one.
    firm: bool = False
    #: The largest budget that will do, whatever tier that is when the request runs; infinite where it names none.
    max_disagreement: float = math.inf
    #: Content hash of the only plan whose exits may answer it; empty for whichever serves.
    plan: str = ""

    @property
    def has_own_budget(self) -> bool:
        """Whether it asks for more than everybody gets."""
        return bool(self.tier) or self.max_disagreement < math.inf or bool(self.plan)

    @property
    def counted(self) -> bool:
        """Whether the rows belong to the statistics of a plan.

        A deadline that was asked for comes sooner to rows that do not leave early, so answers in time would be no fair
        sample; nor would the others.
        """
        return not self.never_exit and self.deadline == math.inf

    def counted_under(self, runtime: Runtime) -> bool:
        """Whether they belong to those of the plan that answers: not where its exits may not."""
        return self.counted and self.takes(runtime)

    def takes(self, runtime: Runtime) -> bool:
        """Whether the exits of this plan may answer it, if it has any."""
        return runtime.exits_off or self.plan in ("", runtime.plan.content_hash)

    @property
    def outcome(self) -> RequestOutcome:
        """What became of it, once it is done."""
        if self.expired:
            return RequestOutcome.EXPIRED
        if self.unable:
            return RequestOutcome.REJECTED
        return RequestOutcome.OK if self.error is None else RequestOutcome.FAILED

    @property
    def waiting(self) -> int:
        """Rows that no batch has taken yet."""
        return len(self.x) - self.begun

    @property
    def answer(self) -> Answer:
        return Answer(self.logits, self.labels, self.exits, self.configs, self.arms, self.epochs)

    def give(self, answer: Answer) -> None:
        """Finish with the answer of a request for the same input."""
        self.logits, self.labels, self.exits = answer.logits, answer.labels, answer.exits
        self.configs, self.arms, self.epochs = answer.configs, answer.arms, answer.epochs
        self.pending = 0

    @property
    def eased(self) -> bool:
        """Whether it has the larger budget of overload."""
        return self.tier == OVERLOAD

    def may_be_eased(self, *, budget: float) -> bool:
        """Whether the larger ``budget`` of overload will do for it: it names none, of itself or by a deadline."""
        return self.counted and not self.tier and not self.firm and budget <= self.max_disagreement

    def may_leave_under(self, runtime: Runtime) -> bool:
        """Whether its rows may leave early at all."""
        return self.takes(runtime) and runtime.lets_go(
            slice_name=self.slice_name, tier=self.tier, max_disagreement=self.max_disagreement
        )

    def ran_under(self, runtime: Runtime) -> bool:
        """Whether this plan of this epoch answered every row, and none by a deadline."""
        same = all(name == runtime.config for name in self.configs)
        return (
            self.error is None
            and not self.unable
            and not self.expired
            and same
            and not any(self.due)
            and not any(self.offline)
            and all(epoch == runtime.counter.epoch for epoch in self.epochs)
        )


Deliver = Callable[[list[Ticket]], None]


def new_ticket(
    x: Array,
    *,
    never_exit: bool,
    task: Task,
    now: float,
    wall_time: float,
    draw: Callable[[], float],
    deadline_seconds: float = math.inf,
    priority: int = HIGHEST_PRIORITY,
    timeout_seconds: float | None = None,
    slice_name: str = "",
    stream: str = "",
    tier: str = "",
    max_disagreement: float = math.inf,
    plan: str = "",
) -> Ticket:
    """Admit ``x`` (n, ...): the one uniform number of each row is drawn here, before anything is known of its fate."""
    n = len(x)
    return Ticket(
        x=x,
        never_exit=never_exit,
        logits=np.empty((n, task.width), dtype=np.float32),
        labels=task.blank(n),
        admitted=now,
        wall_time=wall_time,
        draws=tuple(draw() for _ in range(n)),
        pending=n,
        exits=["final"] * n,
        configs=[EXITS_OFF] * n,
        arms=["stable"] * n,
        epochs=[0] * n,
        audited=[False] * n,
        deadline=now + deadline_seconds,
        due=[False] * n,
        offline=[False] * n,
        priority=priority,
        expires=math.inf if timeout_seconds is None else now + timeout_seconds,
        slice_name=slice_name,
        stream=stream,
        tier="" if tier == DEFAULT_TIER else tier,
        firm=tier == DEFAULT_TIER,
        max_disagreement=max_disagreement,
        plan=plan,
    )
