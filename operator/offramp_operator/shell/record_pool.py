"""The fleet's records of one ramp set: bounded, without duplicates, oldest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.protocol import LABELS, LOSSES
from offramp_core.records import UNKNOWN_REPEATS
from offramp_operator.shell.wire import UNKNOWN_DRAW, RecordRows

CAPACITY_ROWS = 20_000
MOST_ROWS = 250_000  # of a pool: the labels that a tuning waits for at most, and those that find plans
ENOUGH_ROWS = 2_000  # to certify a plan worth five points or more, nearly always (docs/benchmarks.md)
POOLS_BYTES = 128 * 2**20  # of all services of an operator; some more where that is not enough for each
MOST_EARNING = 32  # services at once whose canary earns its place and whose pool is whole, beside the above
WAITING_BYTES = 192 * 2**20  # of the pools of services whose tuning waits for more records than others keep
_MAX_BOOTS = 4_096  # processes remembered; far more than can still hold rows of ours
NAMES = ("ramp_id", "ramp_precision")
ABSENT = {
    "slice": ("<i4", 0),
    "stream": ("<i8", 0),
    "repeats": ("u1", UNKNOWN_REPEATS),
    "draw": ("<f4", UNKNOWN_DRAW),
    "audit_rate": ("<f4", 1.0),
}  # where nobody told
COLUMNS = ("time", "uncertainty", "slice", "stream", "repeats", "draw", "audit_rate")
ANSWERS = tuple(tuple(name for name, _, _ in columns) for columns in (LABELS, LOSSES))  # a pool has one kind of them


@dataclass(frozen=True, slots=True)
class RampSetKey:
    """Which model and ramps a record is about."""

    backbone_digest: str
    ramp_set_digest: str


def row_bytes(n_ramps: int) -> int:
    """What a row takes in memory."""
    return 8 * n_ramps + 37


def rows_each(services: int, *, n_ramps: int) -> int:
    """Rows that the pool of each of so many services may keep while it collects no labels for a tuning.

    Else an operator's memory would grow with the traffic of all its services, by megabytes each.
    """
    share = POOLS_BYTES // (max(1, services) * row_bytes(n_ramps))
    return min(CAPACITY_ROWS, max(ENOUGH_ROWS, share))


def shares_of_waiting(kept: Sequence[int], *, whole: Sequence[int], total: int = WAITING_BYTES) -> list[int]:
    """Bytes of records that each service whose tuning waits for some may keep, by what each has ``kept`` so far.

    The largest give way first, down to the bytes of a ``whole`` pool. Where not even these have room, those that come
    first have theirs, so that their waiting ends, and the others none.
    """
    level, left, shares = _level(sorted(kept), total), total, []
    for has, enough in zip(kept, whole, strict=True):
        fits = min(has, enough) <= left
        shares.append(max(level, enough) if fits else 0)
        left -= min(has, enough) if fits else 0
    return shares


def _level(kept: Sequence[int], total: int) -> int:
    """The most that any may keep for all to keep no more than a total, of what they have kept in rising order."""
    left = total
    for i, has in enumerate(kept):
        share = left // (len(kept) - i)
        if has > share:
            return share
        left -= has
    return total


class RecordPool:
    """Keeps the newest ``capacity`` rows. A row is known by its process and sequence number, so pulling twice adds
    nothing.

    ``names`` are the arrays that name the columns (:func:`offramp_core.bundle.column_arrays`); they are only kept with
    the rows, so that a dump can be read without the workers that filled it.
    """

    def __init__(
        self, *, n_ramps: int, names: Mapping[str, npt.NDArray[Any]] | None = None, capacity: int = CAPACITY_ROWS
    ) -> None:
        self.n_ramps, self._names = n_ramps, dict(names or {})
        self._capacity = capacity
        self._next: dict[str, int] = {}
        self._ahead: set[str] = set()
        self._chunks: list[dict[str, npt.NDArray[Any]]] = []
        self._rows = 0
        self.version = 0

    def __len__(self) -> int:
        return min(self._rows, self._capacity)

    def next_of(self, boot_id: str) -> int:
        """Sequence number of the first row of a process that is not here yet."""
        return self._next.get(boot_id, 0)

    def ahead(self) -> dict[str, int]:
        """Processes that said of a row that it came from the future, and the number of each one's next row."""
        return {boot: self._next[boot] for boot in sorted(self._ahead & self._next.keys())}

    def keep(self, capacity: int) -> None:
        """Keep so many rows from now on."""
        before, self._capacity = self._rows, capacity
        self._trim()
        self.version += self._rows != before

    def add(
        self, boot_id: str, rows: RecordRows, *, latest_time: float, not_younger: Sequence[tuple[int, float]] = ()
    ) -> int:
        """Add what is new of a block; returns how many rows were. No row is younger than ``latest_time``.

        A row cannot have been admitted after it was received, and one that claims so (a clock ahead of ours) would
        make the tuner skip everything until that time comes. Read again after a restart, such a row would seem to be
        younger than it was taken for at first, and one that a test has used would be fresh again: ``not_younger`` has
        (number, time) pairs, and rows below the number are not younger than the time. Rows that say something else of
        answers than those before them are no news.
        """
        skip = max(0, self.next_of(boot_id) - rows.first)
        self._next[boot_id] = max(rows.next, self._next.pop(boot_id, 0))  # most recently heard of comes last
        while len(self._next) > _MAX_BOOTS:
            self._next.pop(next(iter(self._next)))
        new = len(rows) - skip
        if new <= 0 or (self._chunks and not set(rows.answers) <= set(self._chunks[0])):
            return 0
        chunk = {name: getattr(rows, name)[skip:] for name in COLUMNS} | {n: c[skip:] for n, c in rows.answers.items()}
        if (chunk["time"] > latest_time).any():
            self._ahead.add(boot_id)
        chunk["time"] = np.minimum(chunk["time"], latest_time)
        number = rows.first + np.arange(skip, len(rows))
        for below, time in not_younger:
            chunk["time"] = np.where(number < below, np.minimum(chunk["time"], time), chunk["time"])
        self._append(chunk)
        return new

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All rows as one array per column, sorted by time (ties as they came). Where no row names a slice or a stream,
        or says whether it repeats one, there is no such column, so that a certificate is the same as before there were
        any."""
        self._compact()
        if not self._chunks:
            shapes = {"uncertainty": (0, self.n_ramps), "prediction": (0, self.n_ramps)}
            names = [name for name in (*COLUMNS, *ANSWERS[0]) if name not in ABSENT]
            return {name: np.zeros(shapes.get(name, (0,))) for name in names}
        chunk = self._chunks[0]
        empty = {name for name in ("slice", "stream", "repeats") if (chunk[name] == ABSENT[name][1]).all()}
        return {name: column for name, column in chunk.items() if name not in empty}

    def dump(self) -> dict[str, npt.NDArray[Any]]:
        """Everything needed to go on after a restart, as arrays for an npz file."""
        boots = sorted(self._next)
        return {
            **self.columns(),
            **self._names,
            "boot": np.array(boots, dtype=np.str_),
            "next": np.array([self._next[b] for b in boots]),
            "ahead": np.array([b in self._ahead for b in boots], dtype=np.bool_),
        }

    @classmethod
    def load(cls, arrays: dict[str, npt.NDArray[Any]], *, capacity: int = MOST_ROWS) -> RecordPool:
        """The inverse of :meth:`dump`. All rows are kept until somebody says how many are."""
        names = {name: arrays[name] for name in NAMES if name in arrays}
        pool = cls(n_ramps=arrays["uncertainty"].shape[1], names=names, capacity=capacity)
        pool._next = {str(boot): int(seq) for boot, seq in zip(arrays["boot"], arrays["next"], strict=True)}
        if "ahead" in arrays:
            pool._ahead = {str(boot) for boot in arrays["boot"][arrays["ahead"]]}
        if len(arrays["time"]):
            n = len(arrays["time"])
            absent = {name: np.full(n, value, dtype=kind) for name, (kind, value) in ABSENT.items()}
            answers = next(names for names in ANSWERS if set(names) <= set(arrays))
            pool._append({name: {**absent, **arrays}[name] for name in (*COLUMNS, *answers)})
        return pool

    def _append(self, chunk: dict[str, npt.NDArray[Any]]) -> None:
        self._chunks.append(chunk)
        self._rows += len(chunk["time"])
        self.version += 1
        self._trim()

    def _trim(self) -> None:
        """Not at every row: sorting costs more than the rows that are too many for a while."""
        if self._rows >= 1.25 * self._capacity:
            self._compact()

    def _compact(self) -> None:
        if len(self._chunks) <= 1 and self._rows <= self._capacity and self._sorted():
            return
        time = np.concatenate([chunk["time"] for chunk in self._chunks])
        newest = np.argsort(time, kind="stable")[-self._capacity :]
        merged = {name: np.concatenate([chunk[name] for chunk in self._chunks])[newest] for name in self._chunks[0]}
        self._chunks, self._rows = [merged], len(newest)

    def _sorted(self) -> bool:
        return all(bool((np.diff(chunk["time"]) >= 0).all()) for chunk in self._chunks)
