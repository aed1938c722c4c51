"""Run a batch through a plan's stages and say who leaves where. Yields as rows leave, so that replies need not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from offramp_core.execution import Regrouping
from offramp_core.task import top_labels
from offramp_worker.engine.arms.tiers import MixedTests

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.intp]
HeadOutput = tuple[FloatArray, npt.NDArray[np.float64]]  # logits and confidence of a head


_ROWS = np.arange(1024)  # batches begin with all of their rows: a slice is at hand sooner than a new array
_ROWS.flags.writeable = False


class Runnable(Protocol):
    """What :class:`offramp_worker.engine.execution.stages.Stage` offers; on a
    GPU :class:`offramp_worker.engine.execution.device_stages.DeviceStage`.

    What a stage hands on is for the next one alone: it may lie in another memory.
    """

    @property
    def ramps(self) -> tuple[int, ...]: ...

    @property
    def reads_input(self) -> bool: ...

    @property
    def pads(self) -> bool:
        """Whether batches are filled up to :func:`offramp_worker.padded.padded_rows`."""
        ...

    def run(self, features: Any, x: Array, rows: IndexArray | None = None) -> tuple[Any, Sequence[HeadOutput]]: ...


class Leaves(Protocol):
    """What :class:`offramp_core.uncertainty.ExitTest` offers."""

    def leaves(self, logits: FloatArray, confidence: npt.NDArray[np.float64]) -> BoolArray | None: ...


class Deadlines(Protocol):
    """Which rows cannot wait any longer."""

    def due(self, stage: int, carried: IndexArray) -> BoolArray | None:
        """Those of the ``carried`` rows that would be late behind the stage after ``stage``; None for nobody."""
        ...


class Leave(NamedTuple):  # and no dataclass: one is made for every answer, and a frozen one takes several times as long
    """Rows of the batch that are answered now: ``rows`` [k] with ``logits`` [k, C], at ramp index ``ramp`` or, for
    None, at the output.

    ``due`` says that their deadlines came: the ramp was not certain of them, but the deepest that they had reached.
    ``offline`` says likewise that the core did not answer.
    ``reference`` [n, C] comes with the last one when every row of the batch was carried to the output in results-only
    execution. The arrays are to be read before the next one is asked for: they may lie in buffers that are used again.
    """

    rows: IndexArray
    ramp: int | None
    logits: FloatArray
    reference: FloatArray | None = None
    due: bool = False
    offline: bool = False


@dataclass(frozen=True, slots=True)
class Onward:
    """Rows of a batch that no exit before the last stage has answered.

    ``features`` [k, ...] is what that stage would read, to be read before the next batch runs. ``ramp`` is the last one
    that they passed (None where there was none) and ``logits`` [k, C] what it says of them, which may be an answer for
    some (``may_answer`` [k]).
    """

    rows: IndexArray
    features: Any
    ramp: int | None
    logits: FloatArray
    may_answer: BoolArray

    def take(self, at: IndexArray) -> Onward:
        """Some of them."""
        if len(at) == len(self.rows):
            return self
        features = self.features[at] if isinstance(self.features, np.ndarray) else None
        return Onward(self.rows[at], features, self.ramp, self.logits[at], self.may_answer[at])


GoOn = Callable[[Onward], bool]  # takes rows that go on elsewhere; False where they are to go on here


def whole(x: Array) -> Onward:
    """A batch that no exit is tried with."""
    n = len(x)
    return Onward(_rows(n), x, None, np.empty((n, 0), dtype=np.float32), np.zeros(n, dtype=np.bool_))


def among(sound: IndexArray, go_on: GoOn) -> GoOn:
    """For a part of a batch, whose rows are ``sound`` there."""
    return lambda onward: go_on(replace(onward, rows=sound[onward.rows]))


def run_exact(stage: Runnable, x: Array) -> Iterator[Leave]:
    """Execute a batch by the exact executor, whose only stage is given."""
    logits, _ = stage.run(x, x)
    yield Leave(_rows(len(x)), None, logits)


def run_apart(
    x: Array, usual: BoolArray, *, exact: Callable[[Array], FloatArray], run: Callable[[Array], Iterator[Leave]]
) -> Iterator[Leave]:
    """Execute a batch at a lower precision, but rows that are not ``usual`` (n,) by the exact executor.

    A lower precision may make numbers of what is none, or none of large ones; what the model itself says to such a row
    must stay visible.
    """
    odd, sound = np.flatnonzero(~usual), np.flatnonzero(usual)
    yield Leave(odd, None, exact(x[odd]))
    if len(sound):
        for leave in run(x[sound]):
            yield leave._replace(rows=sound[leave.rows])


def run_again(
    x: Array, leaves: Iterator[Leave], *, exact: Callable[[Array], FloatArray], withheld: Sequence[int]
) -> Iterator[Leave]:
    """Pass on the answers of a batch ``x`` (n, ...), but those that name one of the ``withheld`` classes or are no
    finite numbers: such rows are answered by the exact executor at last.

    For backbones of a lower precision, which may name a class wrongly at the output as well, or overflow.
    """
    again = []
    for leave in leaves:
        held = ~np.isfinite(leave.logits).all(axis=1)
        if len(withheld):
            held |= np.isin(top_labels(leave.logits), withheld)
        if held.any():
            again.append(leave.rows[held])
            leave = leave._replace(rows=leave.rows[~held], logits=leave.logits[~held])  # noqa: PLW2901
        if len(leave.rows):
            yield leave
    if again:
        rows = np.concatenate(again)
        yield Leave(rows, None, exact(x[rows]))


def run_stages(
    stages: Sequence[Runnable],
    x: Array,
    *,
    tests: Mapping[int, Leaves],
    may_leave: BoolArray | None,
    regroups: Regrouping | None,
    deadlines: Deadlines | None = None,
    withheld: Sequence[int] = (),
    mixed: MixedTests | None = None,
    go_on: GoOn | None = None,
    further: int = 0,
) -> Iterator[Leave]:
    """Execute the batch ``x`` (n, ...).

    Parameters
    ----------
    stages : sequence of Stage
        The last one runs to the output and has no ramps.
    tests : mapping
        Who leaves, by ramp index.
    may_leave : (n,) bool or None
        Rows that may exit early; None: all.
    regroups : Regrouping or None
        Whether to go on with a smaller batch, without the rows that left. None is results only: all run to the output.
    deadlines : Deadlines, optional
        Of the rows that have one.
    withheld : sequence of int
        Classes that no exit answers: a row that would leave with one goes to the output, whatever later ramps say.
    mixed, go_on, further : optional
        Tests in the place of ``tests``, where rows differ in them. Takes what the last stage would run, or not; asked
        behind the last exit as well, where so many stages lead ``further``.
    """
    batch, first = _Batch(len(x), may_leave, withheld), len(stages) - 2 - further
    features, kept = x, None  # ``kept``: the rows of ``features`` that go on; None for all
    for number, stage in enumerate(stages[:-1]):
        features, heads = stage.run(features, x, kept)
        kept = None
        for ramp, (logits, confidence) in zip(stage.ramps, heads, strict=True):
            if mixed is None:
                leaves = tests[ramp].leaves(logits, confidence)
            else:
                leaves = mixed.leaves(ramp, logits, confidence, batch.carried)
            if leaves is not None and (leave := batch.leave(leaves, ramp, np.asarray(logits))):
                yield leave
        due = deadlines.due(number, batch.carried) if deadlines is not None and stage.ramps else None
        if due is not None and (leave := batch.leave(due, stage.ramps[-1], np.asarray(heads[-1][0]))):
            yield leave._replace(due=True)
        if go_on is not None and number >= first and batch.waiting and go_on(batch.onward(features, stage, heads)):
            return
        if regroups is None or batch.answered is None:
            continue
        if not batch.waiting:
            return
        if regroups.pays(number, carried=len(batch.carried), waiting=batch.waiting):
            kept = batch.drop_answered()
            if any(later.reads_input for later in stages[number + 1 :]):
                x = x[kept]
    logits, _ = stages[-1].run(features, x, kept)
    yield batch.rest(logits, reference=logits if regroups is None else None)


class _Batch:
    """Which rows of a batch are carried, and which of these were answered."""

    __slots__ = ("_may_leave", "_n", "_withheld", "answered", "carried", "waiting")

    def __init__(self, n: int, may_leave: BoolArray | None, withheld: Sequence[int]) -> None:
        self._n, self._may_leave, self._withheld = n, may_leave, withheld
        self.carried = _rows(n)
        self.answered: BoolArray | None = None  # None: nobody
        self.waiting = n

    def leave(self, leaves: BoolArray, ramp: int, logits: FloatArray) -> Leave | None:
        """Answer those of the carried rows that may leave and have not left yet; None without any."""
        if self._may_leave is not None:
            leaves = leaves & self._may_leave[self.carried]
        if self.answered is not None:
            leaves = leaves & ~self.answered
        if len(self._withheld):
            leaves = self._without_withheld(leaves, logits)
        left = int(np.count_nonzero(leaves))
        if not left:
            return None
        self.answered = leaves if self.answered is None else self.answered | leaves
        self.waiting -= left
        if left == len(leaves):
            return Leave(self.carried, ramp, logits)
        return Leave(self.carried[leaves], ramp, logits[leaves])

    def _without_withheld(self, leaves: BoolArray, logits: FloatArray) -> BoolArray:
        """Keep rows in that would leave with a withheld class, here and at every later ramp."""
        held = leaves & np.isin(top_labels(logits), self._withheld)
        if not held.any():
            return leaves
        may_leave = np.ones(self._n, dtype=np.bool_) if self._may_leave is None else self._may_leave.copy()
        may_leave[self.carried[held]] = False
        self._may_leave = may_leave
        return leaves & ~held

    def onward(self, features: Any, stage: Runnable, heads: Sequence[HeadOutput]) -> Onward:
        """The carried rows that still wait, of what a stage hands on and its heads say."""
        at = _rows(len(self.carried)) if self.answered is None else np.flatnonzero(~self.answered)
        rows = self.carried[at]
        may_answer = np.ones(len(at), dtype=np.bool_) if self._may_leave is None else self._may_leave[rows]
        passed = features[at] if isinstance(features, np.ndarray) and len(at) < len(features) else features
        return Onward(rows.copy(), passed, stage.ramps[-1], np.asarray(heads[-1][0])[at].copy(), may_answer)

    def drop_answered(self) -> IndexArray:
        """Carry only the rows that still wait; where they are among those carried so far."""
        assert self.answered is not None
        kept = np.flatnonzero(~self.answered)
        self.carried, self.answered = self.carried[kept], None
        return kept

    def rest(self, logits: FloatArray, *, reference: FloatArray | None) -> Leave:
        """Answer all rows that still wait, at the output."""
        if self.answered is None:
            return Leave(self.carried, None, logits, reference)
        return Leave(self.carried[~self.answered], None, logits[~self.answered], reference)


def _rows(n: int) -> IndexArray:
    return _ROWS[:n] if n <= len(_ROWS) else np.arange(n)
