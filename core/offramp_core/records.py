"""Exit records: what every ramp would have said about each request, and what the model itself said.

All arrays are indexed (n_samples, n_ramps), ramps in network order. Records are an equal-weight sample of
traffic; nothing else tunes or certifies a plan.

A bundle with other precisions records *wide* rows (:mod:`offramp_core.columns`). They are read into the records of the
fp32 chain, which hold those of the other chains beside them: :meth:`Records.at` gives any of them as records like all
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import BatchProfile, Profile
from offramp_core.columns import chain, check_columns, final_column, other_precisions
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.precision import EXACT, Precision

FloatArray = npt.NDArray[np.float32]
SecondsArray = npt.NDArray[np.float64]
LabelArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.intp]

IN_A_ROW = 3  # requests of a stream directly before another of it: sources send two or three at once, gateways more
UNKNOWN_REPEATS = 2  # of records whose worker, one of an earlier release, does not say whether they repeat a stream


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Seconds of the backbone between ramps and of the ramps.

    ``segment_seconds`` [R+1] is the backbone up to ramp 0, between ramps, and from the last ramp to the output;
    ``ramp_seconds`` [R]. Leaving at ramp j costs the segments up to j plus the active ramps up to j. ``exact_seconds``
    is the whole fp32 backbone where these are the seconds of another precision.
    """

    segment_seconds: SecondsArray
    ramp_seconds: SecondsArray
    exact_seconds: float | None = None

    @property
    def n_ramps(self) -> int:
        return len(self.ramp_seconds)

    @property
    def total_seconds(self) -> float:
        """The backbone of this chain without any ramp."""
        return float(self.segment_seconds.sum())

    @property
    def baseline_seconds(self) -> float:
        """The fp32 backbone without any ramp: what exits-off takes, and savings and overheads are shares of."""
        return self.total_seconds if self.exact_seconds is None else self.exact_seconds

    @property
    def head_start(self) -> float:
        """How much sooner than the fp32 backbone this chain's is done, as a share of the former; 0 at fp32."""
        return (self.baseline_seconds - self.total_seconds) / self.baseline_seconds

    def leave_seconds(self, active: npt.ArrayLike) -> SecondsArray:
        """Seconds to leave at each active ramp, and last to take no exit: (len(active) + 1,)."""
        ramps = np.asarray(active, dtype=np.intp)
        reached = np.cumsum(self.segment_seconds)
        paid = np.cumsum(self.ramp_seconds[ramps])
        stay = self.total_seconds + (paid[-1] if len(ramps) else 0.0)
        return np.append(reached[ramps] + paid, stay)

    def overhead(self, active: npt.ArrayLike) -> float:
        """Worst-case time beyond the fp32 backbone's, as a share of it; at fp32 what the active ramps add."""
        added = float(self.ramp_seconds[np.asarray(active, dtype=np.intp)].sum())
        return added / self.baseline_seconds - self.head_start


@dataclass(frozen=True, slots=True)
class Records:
    """Recorded scores of all ramps."""

    #: (n, R) float32 in [0, 1].
    uncertainty: FloatArray
    #: (n, R) bool. The ramp's answer equals the reference's.
    agrees: BoolArray
    #: (n,) bool. What the served executor says at the end equals the reference's answer.
    final_agrees: BoolArray
    costs: ExitCosts
    #: (n,) float64, optional. Seconds; when each request was admitted.
    time: SecondsArray | None = None
    #: slice_id and stream: (n,) int64, optional; group that has a promise of its own; source whose requests resemble
    #: each other.
    slice_id: LabelArray | None = None
    stream: LabelArray | None = None
    #: (n,) int, optional. 1 where at its worker the :data:`IN_A_ROW` requests before it, recorded or not, named the
    #: same stream, and one drawn from hundreds before it another; 0 where not, and :data:`UNKNOWN_REPEATS`.
    repeats: npt.NDArray[np.integer[Any]] | None = None
    #: Costs by batch size, where they were measured; ``costs`` is one of its rows.
    profile: Profile | None = None
    #: (n, R) int, optional. What each ramp answered; only budgets of classes and policies that compare ramps with each
    #: other need it.
    prediction: npt.NDArray[np.integer[Any]] | None = None
    #: {"fp32", "int8"}. The backbone that answers where no ramp does. At fp32 no ramps means the exact executor, which
    #: never disagrees.
    precision: Precision = EXACT
    #: (n,) float32, optional. How uncertain that backbone is of its answer, where it is not the fp32 one.
    final_uncertainty: FloatArray | None = None
    #: Names of the columns; empty where the file does not tell.
    ramp_ids: tuple[str, ...] = ()
    #: The same rows in the chains of other precisions, see :meth:`at`.
    others: Mapping[Precision, Records] = field(default_factory=dict)
    #: (n,) int, optional. What this chain's backbone answers at the end.
    final: npt.NDArray[np.integer[Any]] | None = None
    #: draw and audit_rate: (n,) float32, optional; the number in [0, 1) that was drawn when each request was admitted,
    #: and the probability below which it was recorded: rates differ with load, so rows of different rates are no
    #: equal-weight sample (:meth:`equal_weight`).
    draw: FloatArray | None = None
    audit_rate: FloatArray | None = None
    #: loss and final_loss: (n, R) and (n,) float32 in [0, 1], optional; what the answer of each ramp, and of this
    #: chain's backbone, loses against the reference's; 0 is agreement. None: 1 wherever they do not agree.
    loss: FloatArray | None = None
    final_loss: FloatArray | None = None
    #: Whether losses may lie between 0 and 1, as their task has it.
    graded: bool = False

    def __len__(self) -> int:
        return len(self.uncertainty)

    @property
    def n_ramps(self) -> int:
        return int(self.uncertainty.shape[1])

    def at(self, precision: Precision) -> Records:
        """The records of one precision's chain: its columns, its costs, and its own backbone's answer as the final one.

        Raises
        ------
        InvalidArgumentError
            That precision was not recorded.
        """
        if precision == self.precision:
            return replace(self, others={}) if self.others else self
        if precision not in self.others:
            raise InvalidArgumentError(
                f"precision {precision!r} was not recorded; the records hold {[self.precision, *self.others]}"
            )
        return self.others[precision]

    def losses(self) -> tuple[FloatArray, FloatArray]:
        """What the answer of each ramp, and of this chain's backbone, loses: (n, R) and (n,)."""
        if self.loss is None or self.final_loss is None:
            return (~self.agrees).astype(np.float32), (~self.final_agrees).astype(np.float32)
        return self.loss, self.final_loss

    def equal_weight(self, *, since: int = 0) -> BoolArray:
        """Rows (n,) that are an equal-weight sample of the requests from row ``since`` on: those whose draw would have
        had them recorded at the smallest rate there was.

        Audit rates fall when load rises. Taken as they are, the records of quiet nights would outnumber those of busy
        days, on which most requests come.
        """
        if self.draw is None:
            return np.ones(len(self), dtype=np.bool_)
        return np.asarray(self.draw < self.sampled(since=since))

    def dense(self, rate: float) -> BoolArray:
        """Rows (n,) of requests that were recorded with a probability of at least ``rate``; all of them where nobody
        knows."""
        return np.ones(len(self), dtype=np.bool_) if self.audit_rate is None else np.asarray(self.audit_rate >= rate)

    def sampled(self, *, since: int = 0) -> float:
        """The smallest share of requests that were recorded, from row ``since`` on; 1 where nobody knows."""
        if self.audit_rate is None or since >= len(self):
            return 1.0
        return float(self.audit_rate[since:].min())

    def take(self, rows: IndexArray | slice) -> Records:
        """The records of some rows, in the order given."""

        def pick(a: Any) -> Any:
            return None if a is None else a[rows]

        return replace(
            self,
            uncertainty=self.uncertainty[rows],
            agrees=self.agrees[rows],
            final_agrees=self.final_agrees[rows],
            time=pick(self.time),
            slice_id=pick(self.slice_id),
            stream=pick(self.stream),
            repeats=pick(self.repeats),
            prediction=pick(self.prediction),
            final_uncertainty=pick(self.final_uncertainty),
            final=pick(self.final),
            draw=pick(self.draw),
            audit_rate=pick(self.audit_rate),
            loss=pick(self.loss),
            final_loss=pick(self.final_loss),
            others={precision: records.take(rows) for precision, records in self.others.items()},
        )


def records_from_arrays(arrays: Mapping[str, npt.NDArray[Any]], *, batch_size: int | None = None) -> Records:
    """Check and convert the arrays of a records file (``offramp replay FILE.npz``).

    Parameters
    ----------
    arrays : mapping
        ``uncertainty`` float [N, R] in [0, 1]; ``prediction`` int [N, R]; ``final`` int [N], or where an answer is no
        single number ``loss`` [N, R] in [0, 1] and optional ``final_loss`` [N] (default 0) instead of these, or beside
        them: whole numbers where an answer is right or wrong, floats where a loss is graded; ``segment_seconds``
        float [R+1], >= 0 with a positive sum; ``ramp_seconds`` float [R], >= 0; optional ``reference`` int [N]
        (default ``final``), ``slice``, ``time``, ``stream``, ``repeats``, ``draw``, ``audit_rate`` [N]. With
        ``batch_size`` [B] the two cost arrays have a leading axis B. With ``ramp_id`` and ``ramp_precision``, text [C],
        the rows are wide: their C columns are laid out as :mod:`offramp_core.columns` says, the two cost arrays price
        the fp32 chain alone, and ``<precision>_segment_seconds`` and ``<precision>_ramp_seconds`` price the others.
        ``final`` is then whatever executor served the request, so what the fp32 backbone answers is taken to be
        ``reference``.
    batch_size : int, optional
        Which measured batch size prices the exits; default the smallest. Ignored without per-batch costs.

    Raises
    ------
    InvalidRecordsError
        Names the array, and the row where one is at fault.
    """
    uncertainty = _array(arrays, "uncertainty", ndim=2, kind="fiu")
    n, n_columns = uncertainty.shape
    if n == 0 or n_columns == 0:
        raise InvalidRecordsError(
            f"uncertainty has shape ({n}, {n_columns}); a records file needs at least one row and one ramp"
        )
    _check_unit_interval("uncertainty", uncertainty)
    ids, of_columns = _columns(arrays, n_columns=n_columns)
    others = other_precisions(of_columns)
    exact = chain(of_columns, EXACT) if others else range(n_columns)
    priced = _priced(arrays, EXACT, n_ramps=len(exact), batch_size=batch_size)
    if priced.costs.total_seconds <= 0:
        raise InvalidRecordsError("segment_seconds sums to 0; the backbone must take some time")
    whole = _whole(arrays, np.ascontiguousarray(uncertainty, dtype=np.float32), priced, ids)
    return _chains(arrays, whole, priced, of_columns, batch_size=batch_size) if others else whole


def _whole(
    arrays: Mapping[str, npt.NDArray[Any]], uncertainty: FloatArray, priced: _Priced, ids: tuple[str, ...]
) -> Records:
    """All columns as one chain, at the prices of the fp32 one."""
    n, n_columns = uncertainty.shape
    answered = _answered(arrays, n=n, n_columns=n_columns)
    draw, audit_rate = _probability(arrays, "draw", n), _probability(arrays, "audit_rate", n)
    if audit_rate is not None and (audit_rate == 1).all():  # a certificate is the same as before there were draws
        draw = audit_rate = None
    return Records(
        uncertainty=uncertainty,
        agrees=answered.agrees,
        final_agrees=answered.final_agrees,
        costs=priced.costs,
        time=_array(arrays, "time", shape=(n,), kind="fiu").astype(np.float64) if "time" in arrays else None,
        slice_id=_array(arrays, "slice", shape=(n,), kind="iu").astype(np.int64) if "slice" in arrays else None,
        stream=_array(arrays, "stream", shape=(n,), kind="iu").astype(np.int64) if "stream" in arrays else None,
        repeats=_array(arrays, "repeats", shape=(n,), kind="iu").astype(np.uint8) if "repeats" in arrays else None,
        draw=draw,
        audit_rate=audit_rate,
        profile=priced.profile,
        prediction=answered.prediction,
        ramp_ids=ids,
        final=answered.final,
        loss=answered.loss,
        final_loss=answered.final_loss,
        graded=answered.graded,
    )


def _chains(
    arrays: Mapping[str, npt.NDArray[Any]],
    whole: Records,
    exact: _Priced,
    of_columns: tuple[str, ...],
    *,
    batch_size: int | None,
) -> Records:
    """Wide records as those of the fp32 chain, with the chains of the other precisions beside them."""
    others, priced = other_precisions(of_columns), {EXACT: exact}
    for precision in others:
        n_ramps = len(chain(of_columns, precision))
        priced[precision] = _priced(arrays, precision, n_ramps=n_ramps, batch_size=batch_size, exact=priced[EXACT])
    n = len(whole)
    views = {p: _view(whole, chain(of_columns, p), p, priced[p]) for p in priced}
    for p in others:
        at = final_column(of_columns, p)
        views[p] = replace(
            views[p],
            final_agrees=whole.agrees[:, at].copy(),
            final_uncertainty=whole.uncertainty[:, at].copy(),
            final=None if whole.prediction is None else whole.prediction[:, at].copy(),
            final_loss=None if whole.loss is None else whole.loss[:, at].copy(),
        )
    return replace(
        views[EXACT],
        final_agrees=np.ones(n, dtype=np.bool_),
        final=None if whole.final is None else arrays.get("reference", whole.final),
        final_loss=None if whole.loss is None else np.zeros(n, dtype=np.float32),
        others={p: views[p] for p in others},
    )


@dataclass(frozen=True, slots=True)
class _Answered:
    """What a records file says of answers: the labels that were given, or what was lost."""

    agrees: BoolArray
    final_agrees: BoolArray
    prediction: npt.NDArray[np.integer[Any]] | None = None
    final: npt.NDArray[np.integer[Any]] | None = None
    reference: npt.NDArray[np.integer[Any]] | None = None
    loss: FloatArray | None = None
    final_loss: FloatArray | None = None
    graded: bool = False


def _answered(arrays: Mapping[str, npt.NDArray[Any]], *, n: int, n_columns: int) -> _Answered:
    lost = "loss" in arrays
    if lost and "prediction" not in arrays:
        labels = _Answered(np.empty((n, 0), np.bool_), np.empty(0, np.bool_))
    else:
        prediction = _array(arrays, "prediction", shape=(n, n_columns), kind="iu")
        final = _array(arrays, "final", shape=(n,), kind="iu")
        reference = _array(arrays, "reference", shape=(n,), kind="iu") if "reference" in arrays else final
        labels = _Answered(prediction == reference[:, None], final == reference, prediction, final, reference)
    if not lost:
        return labels
    loss = _array(arrays, "loss", shape=(n, n_columns), kind="fiu").astype(np.float32)
    graded = arrays["loss"].dtype.kind == "f"
    _check_unit_interval("loss", loss)
    at_end = _probability(arrays, "final_loss", n)
    final_loss = np.zeros(n, dtype=np.float32) if at_end is None else at_end
    between = np.flatnonzero((final_loss > 0) & (final_loss < 1))
    if len(between) and not graded:
        row = int(between[0])
        raise InvalidRecordsError(
            f"final_loss[{row}] is {final_loss[row]}; beside a loss of whole numbers it must be 0 or 1"
        )
    return replace(
        labels, agrees=loss == 0, final_agrees=final_loss == 0, loss=loss, final_loss=final_loss, graded=graded
    )


@dataclass(frozen=True, slots=True)
class _Priced:
    """Costs of one chain, at one batch size and at all."""

    costs: ExitCosts
    profile: Profile | None


def _view(whole: Records, columns: tuple[int, ...], precision: Precision, priced: _Priced) -> Records:
    """Some columns of wide records as the records of a chain."""
    at = list(columns)
    return replace(
        whole,
        uncertainty=np.ascontiguousarray(whole.uncertainty[:, at]),
        agrees=np.ascontiguousarray(whole.agrees[:, at]),
        prediction=None if whole.prediction is None else whole.prediction[:, at],
        loss=None if whole.loss is None else whole.loss[:, at],
        costs=priced.costs,
        profile=priced.profile,
        precision=precision,
        ramp_ids=tuple(whole.ramp_ids[j] for j in at),
    )


def _columns(arrays: Mapping[str, npt.NDArray[Any]], *, n_columns: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and precisions of the columns; empty names and precisions where the file does not tell."""
    ids, of_columns = (
        tuple(str(v) for v in _array(arrays, name, shape=(n_columns,), kind="U")) if name in arrays else ()
        for name in ("ramp_id", "ramp_precision")
    )
    if of_columns:
        try:
            check_columns(ids, of_columns)
        except InvalidArgumentError as error:
            raise InvalidRecordsError(f"ramp_id and ramp_precision: {error}") from error
    return ids, of_columns


_KINDS = {"iu": "an integer", "fiu": "a number", "U": "a text"}


def _array(
    arrays: Mapping[str, npt.NDArray[Any]],
    name: str,
    *,
    kind: str,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> npt.NDArray[Any]:
    if name not in arrays:
        raise InvalidRecordsError(
            f"{name} is missing; a records file needs uncertainty, prediction and final (or loss), segment_seconds, "
            "ramp_seconds"
        )
    value = arrays[name]
    if ndim is not None and value.ndim != ndim:
        raise InvalidRecordsError(f"{name} has {value.ndim} axes; it needs {ndim}")
    if shape is not None and value.shape != shape:
        raise InvalidRecordsError(f"{name} has shape {value.shape}; it needs {shape}")
    if value.dtype.kind not in kind:
        raise InvalidRecordsError(f"{name} has dtype {value.dtype}; it needs {_KINDS[kind]} type")
    return value


def _check_unit_interval(name: str, value: npt.NDArray[Any]) -> None:
    good = (value >= 0) & (value <= 1)  # NaN compares false, so it is caught here as well
    if not good.all():
        row, column = (int(i) for i in np.argwhere(~good)[0])
        raise InvalidRecordsError(f"{name}[{row}, {column}] is {value[row, column]}; every value must lie in [0, 1]")


def _priced(
    arrays: Mapping[str, npt.NDArray[Any]],
    precision: Precision,
    *,
    n_ramps: int,
    batch_size: int | None,
    exact: _Priced | None = None,
) -> _Priced:
    """Costs of a chain with ``n_ramps``; ``exact`` are those of the fp32 chain, for another one."""
    if exact is None:
        costs = _costs(arrays, n_ramps=n_ramps, batch_size=batch_size)
        return _Priced(costs, _profile(arrays, n_ramps=n_ramps) if "batch_size" in arrays else None)
    own = {name: arrays[name] for name in ("batch_size", "regroup_seconds") if name in arrays}
    for name in ("segment_seconds", "ramp_seconds"):
        if f"{precision}_{name}" not in arrays:
            raise InvalidRecordsError(
                f"{precision}_{name} is missing; ramp_precision names {precision} columns, so that its chain must be "
                "priced"
            )
        own[name] = arrays[f"{precision}_{name}"]
    try:
        priced = _priced(own, EXACT, n_ramps=n_ramps, batch_size=batch_size)
    except InvalidRecordsError as error:
        raise InvalidRecordsError(f"{precision}_{error}") from error
    return _against(priced, exact)


def _against(priced: _Priced, exact: _Priced) -> _Priced:
    """The costs of a chain as compared with the fp32 backbone."""
    costs = replace(priced.costs, exact_seconds=exact.costs.total_seconds)
    if priced.profile is None or exact.profile is None:
        return _Priced(costs, None)
    batches = zip(priced.profile.batches, exact.profile.batches, strict=True)
    return _Priced(
        costs, replace(priced.profile, batches=tuple(replace(b, exact_seconds=e.exact_seconds) for b, e in batches))
    )


def _costs(arrays: Mapping[str, npt.NDArray[Any]], *, n_ramps: int, batch_size: int | None) -> ExitCosts:
    if "batch_size" not in arrays:
        return ExitCosts(
            _seconds(arrays, "segment_seconds", (n_ramps + 1,)), _seconds(arrays, "ramp_seconds", (n_ramps,))
        )
    sizes = _array(arrays, "batch_size", ndim=1, kind="fiu")
    if len(sizes) == 0:
        raise InvalidRecordsError("batch_size is empty; leave it out or give at least one size")
    segment = _seconds(arrays, "segment_seconds", (len(sizes), n_ramps + 1))
    ramp = _seconds(arrays, "ramp_seconds", (len(sizes), n_ramps))
    if batch_size is not None and batch_size not in sizes:
        raise InvalidRecordsError(f"batch_size {batch_size} was not measured; choose one of {[int(s) for s in sizes]}")
    row = int(np.argmin(sizes)) if batch_size is None else int(np.argmax(sizes == batch_size))
    return ExitCosts(segment[row], ramp[row])


def _profile(arrays: Mapping[str, npt.NDArray[Any]], *, n_ramps: int) -> Profile:
    sizes = _array(arrays, "batch_size", ndim=1, kind="fiu")
    order = np.argsort(sizes, kind="stable")
    sizes = sizes[order]
    if (
        not len(sizes)
        or not np.isfinite(sizes).all()
        or sizes[0] < 1
        or (sizes != np.floor(sizes)).any()
        or (np.diff(sizes) == 0).any()
    ):
        raise InvalidRecordsError(f"batch_size is {sizes.tolist()}; sizes must be different whole numbers from 1 on")
    segment = _seconds(arrays, "segment_seconds", (len(sizes), n_ramps + 1))[order]
    ramp = _seconds(arrays, "ramp_seconds", (len(sizes), n_ramps))[order]
    regroup = _seconds(arrays, "regroup_seconds", (len(sizes),))[order] if "regroup_seconds" in arrays else 0 * sizes
    batches = (
        BatchProfile(int(size), float(s.sum()), tuple(s.tolist()), tuple(r.tolist()), float(g))
        for size, s, r, g in zip(sizes, segment, ramp, regroup, strict=True)
    )
    return Profile("recorded", 1, tuple(batches))


def _probability(arrays: Mapping[str, npt.NDArray[Any]], name: str, n: int) -> FloatArray | None:
    """An optional column of numbers in [0, 1]."""
    if name not in arrays:
        return None
    value = _array(arrays, name, shape=(n,), kind="fiu").astype(np.float32)
    bad = np.flatnonzero(~((value >= 0) & (value <= 1)))
    if len(bad):
        raise InvalidRecordsError(f"{name}[{bad[0]}] is {value[bad[0]]}; every value must lie in [0, 1]")
    return value


def _seconds(arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...]) -> SecondsArray:
    value = _array(arrays, name, shape=shape, kind="fiu").astype(np.float64)
    bad = np.argwhere(~(np.isfinite(value) & (value >= 0)))
    if len(bad):
        row = tuple(int(i) for i in bad[0])
        raise InvalidRecordsError(
            f"{name}[{', '.join(map(str, row))}] is {value[row]}; seconds must be finite and >= 0"
        )
    return value
