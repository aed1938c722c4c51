"""The newest records of a simulated life, handed out as often as a pass comes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.records import Records

Array = npt.NDArray[Any]
ROOM = 4  # times as many rows as are kept: so much is written before a buffer is copied


class NewestRecords:
    """Rows of a pool in the order of time, with columns of their own.

    They lie in buffers of which nothing is written twice: what was handed out stays as it is, and nothing is copied for
    a pass that only looks.
    """

    def __init__(self, pool: Records) -> None:
        held = {f.name: getattr(pool, f.name) for f in fields(pool)}
        self._pool = pool
        self._of_pool = {name: value for name, value in held.items() if isinstance(value, np.ndarray)}
        self._coming: list[dict[str, Array]] = []
        self._columns: dict[str, Array] = {}
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def append(self, rows: npt.NDArray[np.int64], *, time: Array, **columns: Array) -> None:
        """Add ``rows`` (n,) of the pool, none older than those that :meth:`settle` has seen."""
        self._coming.append({"rows": rows, "time": time, **columns})

    def settle(self, most: int) -> None:
        """Put what was added in order, and keep the ``most`` newest."""
        if self._coming:
            parts, self._coming = self._coming, []
            came = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            newest = np.argsort(came["time"], kind="stable")[-most:]
            came = {name: column[newest] for name, column in came.items()}
            rows = came.pop("rows")
            self._write({**{name: column[rows] for name, column in self._of_pool.items()}, **came}, most)
        self._begin = max(self._begin, self._end - most)

    def _write(self, came: dict[str, Array], most: int) -> None:
        n = len(came["time"])
        if not self._columns or self._end + n > len(self._columns["time"]):
            kept = slice(max(self._begin, self._end - most), self._end)
            size = kept.stop - kept.start
            before, room = self._columns, ROOM * max(most, n)
            self._columns = {name: np.empty((room, *c.shape[1:]), c.dtype) for name, c in came.items()}
            for name, column in before.items():
                self._columns[name][:size] = column[kept]
            self._begin, self._end = 0, size
        for name, column in came.items():
            self._columns[name][self._end : self._end + n] = column
        self._end += n

    def records(self) -> Records:
        """All that are kept."""
        return replace(self._pool, **{name: c[self._begin : self._end] for name, c in self._columns.items()})
