"""One answer that is wanted, on its way through the desk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from offramp_core.errors import OfframpError
from offramp_core.generation.admission import Refused
from offramp_worker.generate.answers import Answer, Given, Piece
from offramp_worker.generate.routes import Assigned
from offramp_worker.generate.seam import Sampling

Deliver = Callable[["list[tuple[Ticket, Piece]]"], None]


class ClosedError(OfframpError):
    """A request comes at a bad time; ``refused`` says why and when to come again."""

    def __init__(self, refused: Refused, *, status: int = 429) -> None:
        super().__init__(refused.message)
        self.refused, self.status = refused, status


@dataclass(slots=True, eq=False)
class Ticket:
    """What is asked, what was promised, and how far it is. After admission only the engine's thread changes it.

    ``draw`` is the one uniform number of the request, ``audited`` whether it is run to the reference afterwards. ``admitted``, ``began``,
    ``first`` and ``last`` are times of the desk's clock: of admission, of the first turn, of the first token and of the newest (0: not yet).
    ``passed`` counts how often smaller ones began before it, ``waited`` the rounds since its prompt had a turn. ``coin`` is a second uniform
    number: a loss between 0 and 1 counts as an error where it is above it. ``step`` is whose turn it is of the variants that are asked,
    ``asked`` what earlier ones answered, ``kept`` what may be shown once the step's answer is taken, ``busy`` the engine's seconds.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    assigned: Assigned
    answer: Answer
    cache_bytes: int
    reply_bytes: int
    draw: float
    coin: float
    audited: bool
    audit_rate: float
    admitted: float
    wall_time: float
    request_class: str = ""
    source: str = ""
    sequence: int | None = None
    prompt_left: int = 0
    passed: int = 0
    waited: int = 0
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0
    proposed: int = 0
    accepted: int = 0
    cancelled: bool = False
    ended: bool = False
    step: int = 0
    asked: dict[str, Given] = field(default_factory=dict)
    kept: list[Piece] = field(default_factory=list)
    busy: float = 0.0

    @property
    def last_step(self) -> bool:
        """Whether nobody is asked after this one."""
        return self.step == len(self.assigned.steps) - 1

    @property
    def reads(self) -> bool:
        """Whether there is something left of its prompt."""
        return self.prompt_left > 0
