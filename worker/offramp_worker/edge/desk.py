"""What an edge's engine does between two batches: it hands in what came back from the core, and sends audits there.

Audits may take a share of the uplink, and wait for their turn; none is dropped. Where too many wait, or the core is out
of reach, nothing new is drawn until that is over: when that is depends on load and network, never on an input.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.precision import EXACT
from offramp_core.task import NO_ANSWER, Task
from offramp_worker.edge.link import Link
from offramp_worker.edge.wire import Arrays, Reply
from offramp_worker.engine.accounts.audits import Audit, AuditDesk
from offramp_worker.engine.execution.ramp_sets import HeldSet
from offramp_worker.engine.execution.sessions import Scores
from offramp_worker.engine.execution.usual import UsualInputs
from offramp_worker.logs import log_event

Array = npt.NDArray[Any]

AUDIT_SHARE = 0.05  # of the uplink's bytes
MOST_WAITING = 1024  # audits; half of them must be done before more are drawn
ROWS_AT_ONCE, SECONDS_AT_ONCE = 16, 0.02  # on the uplink, where rows wait behind them
DRAIN_POLL_SECONDS = 0.02
FINAL = "final."


class EdgeDesk(AuditDesk):
    """See the module. Results may come from any thread; everything else belongs to whoever has the engine's turn."""

    def __init__(
        self, link: Link, *, wake: Callable[[], None], closing: Callable[[], bool], name: str, **rest: Any
    ) -> None:
        """``wake`` has :meth:`step` called, ``closing`` says that the engine takes no requests any more; ``name`` is
        that of the model's input, and the ``rest`` as of :class:`AuditDesk`."""
        super().__init__(**rest)
        self._link, self._wake, self._closing, self._name = link, wake, closing, name
        self._returned: deque[Callable[[], None]] = deque()
        self._came = threading.Event()
        self._out = 0  # requests that have not come back
        self._audits_out = 0
        self._not_before = 0.0
        self._full = False
        self._like: dict[str, Scores] = {}  # of the probe, by ramp set

    # --- rows and audits that are on their way ------------------------------------------------------------

    def left(self) -> None:
        """A request goes to the core."""
        self._out += 1

    def back(self, hand_in: Callable[[], None]) -> None:
        """It has come back; ``hand_in`` is called in the engine's turn. From any thread."""
        self._returned.append(hand_in)
        self._came.set()
        self._wake()

    @property
    def draws(self) -> bool:
        """Whether batches that begin now are counted and drawn for audit."""
        self._full = self.backlog > (MOST_WAITING // 2 if self._full else MOST_WAITING)
        return not self._link.away and not self._full

    @property
    def room(self) -> int:
        """How many more audits may be drawn now."""
        return max(0, MOST_WAITING - self.backlog) if self.draws else 0

    # --- what the engine asks -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """What can be done now; of an engine that ends, all that is on its way."""
        waiting = len(self._returned) + self._may_send
        return waiting + self._out + (0 if self._link.away else self.backlog) if self._closing() else waiting

    @property
    def backlog(self) -> int:
        return super().backlog + self._audits_out

    @property
    def pressing(self) -> bool:
        """Answers come before the next batch, audits behind it."""
        return bool(self._returned)

    def step(self) -> None:
        if self._closing() and not self._returned and not self._may_send:
            self._came.wait(DRAIN_POLL_SECONDS)
        self._came.clear()
        while self._returned:
            self._out -= 1
            self._hand_in(self._returned.popleft())
        if self._may_send:
            self._send()

    def _hand_in(self, hand_in: Callable[[], None]) -> None:
        """Whoever handed it in has answered those who wait; the engine goes on, whatever a reply says."""
        try:
            hand_in()
        except Exception as error:
            log_event("reply-failed", level="error", core=self._link.core, error=repr(error))

    # --- audits -------------------------------------------------------------------------------------------

    @property
    def _may_send(self) -> bool:
        away = self._link.away or self._link.rests("scores")
        return bool(self._backlog) and not away and time.monotonic() >= self._not_before

    def _send(self) -> None:
        sets = self._sets()
        fit = int(SECONDS_AT_ONCE * self._link.uplink.bytes_per_second / max(1, self._backlog[0].x.nbytes))
        rows = min(len(self._backlog), ROWS_AT_ONCE, max(1, fit))
        audits = [self._backlog.popleft() for _ in range(rows)]
        if [held.digest for held in sets] != [self._link.ramp_set_digest]:  # the core has no others
            self._try(audits)
            return
        x = self._join([audit.x[None] for audit in audits])
        self._not_before = time.monotonic() + x.nbytes / (AUDIT_SHARE * self._link.uplink.bytes_per_second)
        self._audits_out += len(audits)
        self.left()
        self._link.send(
            "scores",
            self._name,
            x,
            sent="Nothing",
            within=math.inf,
            answered=lambda reply: self.back(lambda: self._came_back(audits, x, sets, reply)),
        )

    def _came_back(self, audits: list[Audit], x: Array, sets: Sequence[HeldSet], reply: Reply | None) -> None:
        self._audits_out -= len(audits)
        if reply is None and (self._link.away or self._link.rests("scores")):
            self._backlog.extendleft(reversed(audits))
            return
        try:
            scored = None if reply is None else [(sets[0], self._checked(reply.arrays, x, sets[0]))]
        except Exception as error:  # whatever it says, no audit is lost
            log_event("core-refused", level="warning", what="scores", reason=repr(error))
            scored = None  # they are made here
        self._try(audits, scored)

    def _checked(self, arrays: Arrays, x: Array, held: HeldSet) -> Scores:
        """Scores of rows x, if they are any.

        Raises
        ------
        ValueError
            They are none of this model and its heads.
        """
        if held.digest not in self._like:
            self._like = {held.digest: held.sessions.tapped(held.bundle.probe_x[:1])}
        scores = as_scores(arrays, rows=len(x), like=self._like[held.digest], task=self._task)
        if not plausible(scores.logits, x, held.sessions.usual):
            raise ValueError("logits: not all are finite numbers")
        return scores


def as_arrays(scores: Scores) -> dict[str, Any]:
    """Scores as tensors of a reply."""
    finals = {FINAL + precision: answers for precision, answers in scores.finals.items()}
    return {"logits": scores.logits, "uncertainty": scores.uncertainty, "prediction": scores.prediction, **finals}


def plausible(logits: Array, x: Array, usual: UsualInputs) -> bool:
    """Whether rows that are like what the model was made for have answers that are finite numbers."""
    odd, like = ~np.isfinite(logits).reshape(len(x), -1).all(axis=1), usual.rows(x)
    return not (odd if like is None else odd & like).any()


def as_scores(arrays: Arrays, *, rows: int, like: Scores, task: Task) -> Scores:
    """The other way round.

    Raises
    ------
    ValueError
        They are not those of so many rows, or not of the kind of those ``like`` which they should be.
    """
    expected = as_arrays(like)
    if arrays.keys() != expected.keys():
        raise ValueError(f"scores have {sorted(arrays)}; they should have {sorted(expected)}")
    for name, array in arrays.items():
        kind, shape = expected[name].dtype, (rows, *expected[name].shape[1:])
        if (array.dtype, array.shape) != (kind, shape):
            raise ValueError(f"{name}: is {array.dtype} {array.shape}; it should be {kind} {shape}")
        if kind.kind in "iu" and array.size and not NO_ANSWER <= array.min() <= array.max() < max(2, task.width):
            raise ValueError(f"{name}: names answers that there are not")
    uncertainty = arrays["uncertainty"]
    if not ((uncertainty >= 0) & (uncertainty <= 1)).all():
        raise ValueError("uncertainty: not all lie between 0 and 1")
    if not np.array_equal(arrays[FINAL + EXACT], task.answers(arrays["logits"]), equal_nan=True):
        raise ValueError(f"{FINAL + EXACT}: is not what the logits say")
    finals = {name.removeprefix(FINAL): value for name, value in arrays.items() if name.startswith(FINAL)}
    return Scores(arrays["logits"], arrays["uncertainty"], arrays["prediction"], finals)
