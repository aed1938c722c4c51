"""Exit records: what every ramp would have said about each request, and what the model itself said.

All arrays are indexed (n_samples, n_ramps), ramps in network order. Records are an equal-weight sample of
traffic; nothing else tunes or certifies a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import BatchProfile, Profile
from offramp_core.errors import InvalidRecordsError

FloatArray = npt.NDArray[np.float32]
SecondsArray = npt.NDArray[np.float64]
LabelArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Seconds of the backbone between ramps and of the ramps.

    ``segment_seconds`` [R+1] is the backbone up to ramp 0, between ramps, and from the last ramp to the output;
    ``ramp_seconds`` [R]. Leaving at ramp j costs the segments up to j plus the active ramps up to j.
    """

    segment_seconds: SecondsArray
    ramp_seconds: SecondsArray

    @property
    def n_ramps(self) -> int:
        return len(self.ramp_seconds)

    @property
    def total_seconds(self) -> float:
        """The backbone without any ramp."""
        return float(self.segment_seconds.sum())

    def leave_seconds(self, active: npt.ArrayLike) -> SecondsArray:
        """Seconds to leave at each active ramp, and last to take no exit: (len(active) + 1,)."""
        ramps = np.asarray(active, dtype=np.intp)
        reached = np.cumsum(self.segment_seconds)
        paid = np.cumsum(self.ramp_seconds[ramps])
        stay = self.total_seconds + (paid[-1] if len(ramps) else 0.0)
        return np.append(reached[ramps] + paid, stay)

    def overhead(self, active: npt.ArrayLike) -> float:
        """Worst-case time the active ramps add, as a share of the backbone's time."""
        return float(self.ramp_seconds[np.asarray(active, dtype=np.intp)].sum()) / self.total_seconds


@dataclass(frozen=True, slots=True)
class Records:
    """Recorded scores of all ramps.

    Attributes
    ----------
    uncertainty : (n, R) float32 in [0, 1]
    agrees : (n, R) bool
        The ramp's answer equals the reference's.
    final_agrees : (n,) bool
        What the served executor says at the end equals the reference's answer.
    costs : ExitCosts
    time : (n,) float64, optional
        Seconds; when each request was admitted.
    slice_id, stream : (n,) int64, optional
        Group that has a promise of its own; source whose requests resemble each other.
    profile : Profile, optional
        Costs by batch size, where they were measured; ``costs`` is one of its rows.
    prediction : (n, R) int, optional
        What each ramp answered; only policies that compare ramps with each other need it.
    """

    uncertainty: FloatArray
    agrees: BoolArray
    final_agrees: BoolArray
    costs: ExitCosts
    time: SecondsArray | None = None
    slice_id: LabelArray | None = None
    stream: LabelArray | None = None
    profile: Profile | None = None
    prediction: npt.NDArray[np.integer[Any]] | None = None

    def __len__(self) -> int:
        return len(self.uncertainty)

    @property
    def n_ramps(self) -> int:
        return int(self.uncertainty.shape[1])

    def take(self, rows: IndexArray | slice) -> Records:
        """The records of some rows, in the order given."""

        def pick(a: Any) -> Any:
            return None if a is None else a[rows]

        return replace(
            self, uncertainty=self.uncertainty[rows], agrees=self.agrees[rows], final_agrees=self.final_agrees[rows],
            time=pick(self.time), slice_id=pick(self.slice_id), stream=pick(self.stream), prediction=pick(self.prediction),
        )  # fmt: skip


def records_from_arrays(arrays: Mapping[str, npt.NDArray[Any]], *, batch_size: int | None = None) -> Records:
    """Check and convert the arrays of a records file (``offramp replay FILE.npz``).

    Parameters
    ----------
    arrays : mapping
        ``uncertainty`` float [N, R] in [0, 1]; ``prediction`` int [N, R]; ``final`` int [N]; ``segment_seconds``
        float [R+1], >= 0 with a positive sum; ``ramp_seconds`` float [R], >= 0; optional ``reference`` int [N]
        (default ``final``), ``slice``, ``time``, ``stream`` [N]. With ``batch_size`` [B] the two cost arrays have a
        leading axis B.
    batch_size : int, optional
        Which measured batch size prices the exits; default the smallest. Ignored without per-batch costs.

    Raises
    ------
    InvalidRecordsError
        Names the array, and the row where one is at fault.
    """
    uncertainty = _array(arrays, "uncertainty", ndim=2, kind="fiu")
    n, r = uncertainty.shape
    if n == 0 or r == 0:
        raise InvalidRecordsError(
            f"uncertainty has shape ({n}, {r}); a records file needs at least one row and one ramp"
        )
    _check_unit_interval(uncertainty)
    prediction = _array(arrays, "prediction", shape=(n, r), kind="iu")
    final = _array(arrays, "final", shape=(n,), kind="iu")
    reference = _array(arrays, "reference", shape=(n,), kind="iu") if "reference" in arrays else final
    costs = _costs(arrays, n_ramps=r, batch_size=batch_size)
    if costs.total_seconds <= 0:
        raise InvalidRecordsError("segment_seconds sums to 0; the backbone must take some time")
    return Records(
        uncertainty=np.ascontiguousarray(uncertainty, dtype=np.float32),
        agrees=prediction == reference[:, None],
        final_agrees=final == reference,
        costs=costs,
        time=_array(arrays, "time", shape=(n,), kind="fiu").astype(np.float64) if "time" in arrays else None,
        slice_id=_array(arrays, "slice", shape=(n,), kind="iu").astype(np.int64) if "slice" in arrays else None,
        stream=_array(arrays, "stream", shape=(n,), kind="iu").astype(np.int64) if "stream" in arrays else None,
        profile=_profile(arrays, n_ramps=r) if "batch_size" in arrays else None,
        prediction=prediction,
    )


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
            f"{name} is missing; a records file needs uncertainty, prediction, final, segment_seconds, ramp_seconds"
        )
    value = arrays[name]
    if ndim is not None and value.ndim != ndim:
        raise InvalidRecordsError(f"{name} has {value.ndim} axes; it needs {ndim}")
    if shape is not None and value.shape != shape:
        raise InvalidRecordsError(f"{name} has shape {value.shape}; it needs {shape}")
    if value.dtype.kind not in kind:
        raise InvalidRecordsError(
            f"{name} has dtype {value.dtype}; it needs {'an integer' if kind == 'iu' else 'a number'} type"
        )
    return value


def _check_unit_interval(value: npt.NDArray[Any]) -> None:
    good = (value >= 0) & (value <= 1)  # NaN compares false, so it is caught here as well
    if not good.all():
        row, column = (int(i) for i in np.argwhere(~good)[0])
        raise InvalidRecordsError(
            f"uncertainty[{row}, {column}] is {value[row, column]}; every value must lie in [0, 1]"
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
    if sizes[0] < 1 or (sizes != np.floor(sizes)).any() or (np.diff(sizes) == 0).any():
        raise InvalidRecordsError(f"batch_size is {sizes.tolist()}; sizes must be different whole numbers from 1 on")
    segment = _seconds(arrays, "segment_seconds", (len(sizes), n_ramps + 1))[order]
    ramp = _seconds(arrays, "ramp_seconds", (len(sizes), n_ramps))[order]
    regroup = _seconds(arrays, "regroup_seconds", (len(sizes),))[order] if "regroup_seconds" in arrays else 0 * sizes
    batches = (
        BatchProfile(int(size), float(s.sum()), tuple(s.tolist()), tuple(r.tolist()), float(g))
        for size, s, r, g in zip(sizes, segment, ramp, regroup, strict=True)
    )
    return Profile("recorded", 1, tuple(batches))


def _seconds(arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...]) -> SecondsArray:
    value = _array(arrays, name, shape=shape, kind="fiu").astype(np.float64)
    bad = np.argwhere(~(np.isfinite(value) & (value >= 0)))
    if len(bad):
        row = tuple(int(i) for i in bad[0])
        raise InvalidRecordsError(
            f"{name}[{', '.join(map(str, row))}] is {value[row]}; seconds must be finite and >= 0"
        )
    return value
