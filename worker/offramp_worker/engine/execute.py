"""Run a batch through a plan's stages and say who leaves where. Yields as rows leave, so that replies need not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.intp]
Said = tuple[FloatArray, npt.NDArray[np.float64]]


class Runnable(Protocol):
    """What :class:`offramp_worker.engine.stages.Stage` offers."""

    @property
    def ramps(self) -> tuple[int, ...]: ...

    @property
    def reads_input(self) -> bool: ...

    def run(self, features: Array, x: Array, rows: IndexArray | None = None) -> tuple[Array, Sequence[Said]]: ...


class Leaves(Protocol):
    """What :class:`offramp_core.uncertainty.ExitTest` offers."""

    def leaves(self, logits: FloatArray, confidence: npt.NDArray[np.float64]) -> BoolArray | None: ...


class Regroups(Protocol):
    """What :class:`offramp_core.execution.Regrouping` offers."""

    def pays(self, stage: int, *, carried: int, waiting: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Leave:
    """Rows of the batch that are answered now: ``rows`` [k] with ``logits`` [k, C], at ramp index ``ramp`` or, for None, at the output.

    ``reference`` [n, C] comes with the last one when every row of the batch was carried to the output in results-only execution.
    """

    rows: IndexArray
    ramp: int | None
    logits: FloatArray
    reference: FloatArray | None = None


def run_apart(
    x: Array,
    finite: BoolArray,
    *,
    exact: Callable[[Array], FloatArray],
    run: Callable[[Array], Iterator[Leave]],
) -> Iterator[Leave]:
    """Execute a batch at a lower precision, but rows that are not ``finite`` (n,) by the exact executor.

    A lower precision may make numbers of what is none; what the model itself says to such a row must stay visible.
    """
    odd, sound = np.flatnonzero(~finite), np.flatnonzero(finite)
    yield Leave(odd, None, exact(x[odd]))
    if len(sound):
        for leave in run(x[sound]):
            yield replace(leave, rows=sound[leave.rows])


def run_stages(
    stages: Sequence[Runnable],
    x: Array,
    *,
    tests: Mapping[int, Leaves],
    may_leave: BoolArray | None,
    regroups: Regroups | None,
) -> Iterator[Leave]:
    """Execute a batch.

    Parameters
    ----------
    stages : sequence of Stage
        The last one runs to the output and has no ramps.
    x : (n, ...)
        The batch.
    tests : mapping
        Who leaves, by ramp index.
    may_leave : (n,) bool or None
        Rows that may exit early; None: all.
    regroups : Regrouping or None
        Whether to drop the rows that left and go on with a smaller batch. A batch that all rows left ends. None is results only: every row
        runs to the output, whether or not it was answered.
    """
    carried = np.arange(len(x))  # rows of the batch that ``features`` holds
    answered: BoolArray | None = None  # which of them left already; None: nobody
    waiting = len(x)  # how many did not
    features, kept = x, None  # ``kept``: the rows of ``features`` that go on; None for all
    for number, stage in enumerate(stages[:-1]):
        features, heads = stage.run(features, x, kept)
        kept = None
        for ramp, (logits, confidence) in zip(stage.ramps, heads, strict=True):
            leaves = tests[ramp].leaves(logits, confidence)
            if leaves is None:
                continue
            if may_leave is not None:
                leaves &= may_leave[carried]
            if answered is not None:
                leaves &= ~answered
            left = int(np.count_nonzero(leaves))
            if left:
                yield _leave(carried, leaves if left < len(carried) else None, ramp, logits)
                answered = leaves if answered is None else answered | leaves
                waiting -= left
        if answered is None or regroups is None:
            continue
        if not waiting:
            return
        if regroups.pays(number, carried=len(carried), waiting=waiting):
            kept = np.flatnonzero(~answered)
            carried, answered = carried[kept], None
            if any(later.reads_input for later in stages[number + 1 :]):
                x = x[kept]
    logits, _ = stages[-1].run(features, x, kept)
    reference = logits.copy() if regroups is None else None
    yield _leave(carried, None if answered is None else ~answered, None, logits, reference)


def _leave(
    carried: IndexArray,
    leaves: BoolArray | None,
    ramp: int | None,
    logits: FloatArray,
    reference: FloatArray | None = None,
) -> Leave:
    """The answer of the carried rows that leave (None: all), out of the buffers that the next batch overwrites."""
    if leaves is None:
        return Leave(carried, ramp, logits.copy(), reference)
    return Leave(carried[leaves], ramp, logits[leaves], reference)
