"""What workers saw of whole answers: counts per epoch, arm and class, and a ring of records, as the control plane will pull them."""

from __future__ import annotations

import base64
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from offramp_core.generation.losses import Output
from offramp_core.protocol import slice_number, stream_number
from offramp_worker.generate.audits import Audited, Owed

ROWS = 20_000
ROWS_PER_ANSWER = 5_000
_COLUMNS = {
    "time": "<f8", "draw": "<f4", "audit_rate": "<f4", "slice": "<i4", "stream": "<i8", "epoch": "<i8", "route": "<i4", "tokens": "<i4",
    "exact_answer": "<f4", "token_f1": "<f4", "rouge_l": "<f4", "equality": "<i1",
}  # fmt: skip
_EQUALITY = {"equal": 0, "tie": 1, "different": 2}
LOST = -1  # an audit that could not be compared: it lost everything


@dataclass(frozen=True, slots=True)
class LossBlock:
    """Records of audited answers, columns as base64 little-endian arrays, rows in order of completion.

    ``time`` float64 [n] (worker's clock at admission), ``draw`` and ``audit_rate`` float32 (the number drawn for the request and the probability
    it was compared with), ``slice`` int32 and ``stream`` int64 (:func:`offramp_core.protocol.slice_number` of its class and the number of its
    stream), ``epoch`` int64, ``route`` int32 (place in ``routes``), ``tokens`` int32 served; ``exact_answer``, ``token_f1`` and ``rouge_l``
    float32 in [0, 1]; ``equality`` int8: 0 the reference's tokens, 1 other ones after a tie, 2 other ones, -1 not comparable.
    ``first`` is the sequence number of row 0, ``next`` the one to ask for next.
    """

    first: int
    next: int
    routes: tuple[str, ...]
    columns: dict[str, str]


class LossRing:
    """The last ``rows`` records; safe for threads."""

    def __init__(self, *, rows: int = ROWS) -> None:
        self._lock, self._rows, self._next = threading.Lock(), rows, 0
        self._columns = {name: np.zeros(rows, dtype=kind) for name, kind in _COLUMNS.items()}
        self._routes: dict[str, int] = {}

    @property
    def next(self) -> int:
        """Sequence number of the record to come."""
        return self._next

    def add(self, audited: Audited, *, route: str) -> None:
        losses = {_name(output): loss for output, loss in audited.losses.items()}
        self._append(audited.owed, route, losses, _EQUALITY[audited.equality])

    def add_lost(self, owed: Owed, *, route: str) -> None:
        """An audit that failed."""
        self._append(owed, route, {_name(output): 1.0 for output in Output}, LOST)

    def _append(self, owed: Owed, route: str, losses: dict[str, float], equal: int) -> None:
        values: dict[str, Any] = {
            "time": owed.wall_time, "draw": owed.draw, "audit_rate": owed.audit_rate, "slice": slice_number(owed.request_class),
            "stream": stream_number(owed.source), "epoch": owed.assigned.epoch, "tokens": len(owed.tokens), "equality": equal, **losses,
        }  # fmt: skip
        with self._lock:
            values["route"] = self._routes.setdefault(route, len(self._routes))
            for name, value in values.items():
                self._columns[name][self._next % self._rows] = value
            self._next += 1

    def read(self, after: int, *, limit: int = ROWS_PER_ANSWER) -> LossBlock:
        """Up to ``limit`` records from sequence number ``after`` on, or from the oldest one still held."""
        with self._lock:
            first = min(max(after, self._next - self._rows, 0), self._next)
            stop = min(self._next, first + limit)
            at = np.arange(first, stop) % self._rows
            columns = {k: base64.b64encode(c[at].tobytes()).decode() for k, c in self._columns.items()}
            return LossBlock(first, stop, tuple(self._routes), columns)


def decoded(block: LossBlock) -> dict[str, Any]:
    """The columns as arrays."""
    return {name: np.frombuffer(base64.b64decode(text), _COLUMNS[name]) for name, text in block.columns.items()}


@dataclass(slots=True)
class GenerationCounts:
    """Cumulative since the process started, of one epoch, arm and route. ``loss_sums`` are over ``audited`` answers, by output."""

    epoch: int
    arm: str
    config: str
    route: str
    answers: int = 0
    cancelled: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    drawn: int = 0
    audited: int = 0
    lost: int = 0
    ties: int = 0
    different: int = 0
    loss_sums: dict[str, float] = field(default_factory=dict)
    first_token_seconds: float = 0.0
    writing_seconds: float = 0.0

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def _name(output: Output) -> str:
    return output.name.lower()
