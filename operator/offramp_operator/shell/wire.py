"""Protocol values to and from the bytes that travel between operator and workers."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidRecordsError, UnavailableError
from offramp_core.protocol import LABELS, LOSSES, Observations, PlanDocument, RecordBlock, SignedDocument, WorkerState
from offramp_core.records import UNKNOWN_REPEATS

T = TypeVar("T")

MAX_BLOCK_ROWS = 5_000
# A draw that nobody told counts where every request was recorded, and there alone: taken for a low one it would stand
# beside the few of the busy hours. Rows of before are then left out once rates are mixed, which costs labels alone.
UNKNOWN_DRAW = float(np.nextafter(np.float32(1), np.float32(0)))


@dataclass(frozen=True, slots=True)
class RecordRows:
    """A decoded :class:`RecordBlock`: n rows over R ramps, ``first`` the sequence number of row 0.

    ``time`` float64 [n], ``uncertainty`` float32 [n, R], ``answers`` are its columns about answers (:data:`LABELS`
    or :data:`LOSSES`), ``slice`` int32 [n], ``stream`` int64 [n], ``repeats`` uint8 [n], ``draw`` and ``audit_rate``
    float32 [n]. What workers of before do not report is 0, 1 for the rate, :data:`UNKNOWN_REPEATS`, and
    :data:`UNKNOWN_DRAW`.
    """

    first: int
    next: int
    time: npt.NDArray[np.float64]
    uncertainty: npt.NDArray[np.float32]
    answers: dict[str, npt.NDArray[Any]]
    slice: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int64]
    repeats: npt.NDArray[np.uint8]
    draw: npt.NDArray[np.float32]
    audit_rate: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.time)


def encode(value: PlanDocument | SignedDocument | WorkerState | Observations) -> bytes:
    """A protocol value as JSON."""
    return msgspec.json.encode(value)


def decode(body: str | bytes, kind: type[T]) -> T:
    """A protocol value of its JSON. Raises :class:`UnavailableError` where it is none of this kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnavailableError(f"not a {kind.__name__}: {error}") from error


class Timed(msgspec.Struct):
    """The worker's clock in its observations; nothing else of them is parsed."""

    now: float


def without_time(body: bytes) -> bytes:
    """What tells two answers with the same content apart from two with news: observations from their counts on."""
    return body[max(0, body.find(b'"counts"')) :]


def decode_rows(block: RecordBlock, *, n_ramps: int) -> RecordRows:
    """Decode and check the columns of a block.

    Raises
    ------
    InvalidRecordsError
        A column is not base64, has another length than the others, or holds a value that cannot be.
    """
    time = _column(block, "time", "<f8")
    n = len(time)
    rows = RecordRows(
        first=block.first,
        next=block.next,
        time=time,
        uncertainty=_column(block, "uncertainty", "<f4", (n, n_ramps)),
        answers={
            name: _column(block, name, dtype, (n, n_ramps) if by_ramp else (n,))
            for name, dtype, by_ramp in (LOSSES if block.loss else LABELS)
        },
        slice=_column(block, "slice", "<i4", (n,)) if block.slice else np.zeros(n, dtype=np.int32),
        stream=_column(block, "stream", "<i8", (n,)) if block.stream else np.zeros(n, dtype=np.int64),
        repeats=_column(block, "repeats", "u1", (n,)) if block.repeats else np.full(n, UNKNOWN_REPEATS, dtype=np.uint8),
        draw=_column(block, "draw", "<f4", (n,)) if block.draw else np.full(n, UNKNOWN_DRAW, dtype=np.float32),
        audit_rate=_column(block, "audit_rate", "<f4", (n,)) if block.audit_rate else np.ones(n, dtype=np.float32),
    )
    if n > MAX_BLOCK_ROWS or block.first < 0 or block.next < block.first + n:
        raise InvalidRecordsError(f"records {block.first}..{block.next} cannot be {n} rows")
    if not np.isfinite(rows.time).all():
        raise InvalidRecordsError("time holds a value that is not finite")
    if not ((rows.uncertainty >= 0) & (rows.uncertainty <= 1)).all():  # NaN compares false, so it is caught as well
        raise InvalidRecordsError("uncertainty holds a value outside [0, 1]")
    if block.zero_one and block.loss:
        rows.answers.update({name: _whole(name, rows.answers[name]) for name, _, _ in LOSSES})
    losses = [(name, rows.answers[name]) for name, _, _ in LOSSES if name in rows.answers]
    for name, column in (("draw", rows.draw), ("audit_rate", rows.audit_rate), *losses):
        if not ((column >= 0) & (column <= 1)).all():
            raise InvalidRecordsError(f"{name} holds a value outside [0, 1]")
    return rows


def _whole(name: str, losses: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Losses that the worker says are 0 or 1, as whole numbers: records of those are counted."""
    if not ((losses == 0) | (losses == 1)).all():
        raise InvalidRecordsError(f"{name} holds a value that is neither 0 nor 1, though zero_one says so")
    return losses.astype(np.uint8)


def _column(block: RecordBlock, name: str, dtype: str, shape: tuple[int, ...] = (-1,)) -> npt.NDArray[Any]:
    try:
        flat = np.frombuffer(base64.b64decode(getattr(block, name), validate=True), dtype=dtype)
        return flat.reshape(shape)
    except (binascii.Error, ValueError) as error:
        raise InvalidRecordsError(f"{name} is not a column of shape {shape}: {error}") from error
