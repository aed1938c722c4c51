"""Run a batch through a plan's stages and say who leaves where. Yields as rows leave, so that replies need not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_worker.engine.scores import ScoreTables
from offramp_worker.engine.sessions import Stage

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Leave:
    """Rows of the batch that are answered now: ``rows`` [k] with ``logits`` [k, C], at ramp index ``ramp`` or, for None, at the output.

    ``reference`` [n, C] comes with the last one when every row of the batch was carried to the output.
    """

    rows: IndexArray
    ramp: int | None
    logits: FloatArray
    reference: FloatArray | None = None


def run_apart(
    x: Array,
    finite: npt.NDArray[np.bool_],
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
    stages: tuple[Stage, ...],
    x: Array,
    *,
    thresholds: Mapping[int, float],
    tables: ScoreTables,
    may_leave: npt.NDArray[np.bool_],
    carry_on: bool,
) -> Iterator[Leave]:
    """Execute a batch.

    Parameters
    ----------
    stages : tuple of Stage
        The last one runs to the output and has no ramps.
    x : (n, ...)
        The batch.
    thresholds : mapping
        float32 threshold by ramp index; a row leaves when its uncertainty is strictly below.
    tables : ScoreTables
        Of all ramps of the bundle.
    may_leave : (n,) bool
        Rows that may exit early.
    carry_on : bool
        Results only: every row runs to the output, whether or not it was answered. Else leavers are dropped and the batch is regrouped.
    """
    carried = np.arange(len(x))  # rows of the batch that ``features`` holds
    waiting = np.ones(len(x), dtype=np.bool_)  # which of them are not answered yet
    features = x
    for stage in stages[:-1]:
        features, heads = stage.run(features)
        scores = tables.uncertainty(stage.ramps, heads)
        for k, (ramp, logits) in enumerate(zip(stage.ramps, heads, strict=True)):
            leaves = (scores[:, k] < np.float32(thresholds[ramp])) & waiting & may_leave[carried]
            if leaves.any():
                yield Leave(carried[leaves], ramp, logits[leaves])
                waiting &= ~leaves
        if not carry_on and not waiting.all():
            if not waiting.any():
                return
            features, carried, waiting = features[waiting], carried[waiting], waiting[waiting]
    logits, _ = stages[-1].run(features)
    yield Leave(carried[waiting], None, logits[waiting], reference=logits if carry_on else None)
