"""A rollout's evidence over time: what the objects in etcd do not keep, because only people look at it.

A curve has at most ``POINTS`` points. When it is full, every second one goes and from then on every second reading is
left out, so a rollout of a week takes what one of a minute takes, evenly thinned. The newest reading is always there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from offramp_core.control.objects import GateStatus, RolloutStatus

POINTS = 128
CURVES = 256  # over all services; the one that was not fed for the longest time goes first


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One reading of a gate: seconds since the epoch, the step (from 0) and its weight, k of n, and natural logs of
    e-value and limit."""

    at: float
    step: int
    weight: int
    n: int
    k: int
    log_e_value: float
    log_limit: float


_WIDTH = len(CurvePoint.__dataclass_fields__)


class Curve:
    """The readings of one gate of one rollout."""

    __slots__ = ("_latest", "_skip", "_stride", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._latest: CurvePoint | None = None
        self._stride, self._skip = 1, 0

    def __len__(self) -> int:
        return len(self._values) // _WIDTH

    def add(self, point: CurvePoint) -> None:
        """Note a reading; one of the same moment or before is left out. A new step's first reading is always kept."""
        before = self._latest
        if before is not None and point.at <= before.at:
            return
        self._latest = point
        if self._skip > 0 and before is not None and before.step == point.step:
            self._skip -= 1
            return
        self._skip = self._stride - 1
        self._values.extend((point.at, point.step, point.weight, point.n, point.k, point.log_e_value, point.log_limit))
        if len(self) >= POINTS:
            self._halve()

    def points(self) -> tuple[CurvePoint, ...]:
        """All that is kept, oldest first, the newest reading at the end."""
        kept = tuple(self._point(i) for i in range(len(self)))
        latest = self._latest
        return kept if latest is None or (kept and kept[-1] == latest) else (*kept, latest)

    def _point(self, i: int) -> CurvePoint:
        at, step, weight, n, k, log_e, limit = self._values[i * _WIDTH : (i + 1) * _WIDTH]
        return CurvePoint(at, int(step), int(weight), int(n), int(k), log_e, limit)

    def _halve(self) -> None:
        self._values = array(
            "d", (v for i in range(0, len(self), 2) for v in self._values[i * _WIDTH : (i + 1) * _WIDTH])
        )
        self._stride *= 2


class CurveBook:
    """The curves of all rollouts; by rollout uid or any key that does not repeat, then by gate."""

    def __init__(self, *, limit: int = CURVES) -> None:
        self._limit = limit
        self._curves: OrderedDict[str, dict[str, Curve]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._curves)

    def note(self, key: str, status: RolloutStatus, at: float) -> None:
        """Add the gates of one pass."""
        if not status.gates:
            return
        gates = self._curves.setdefault(key, {})
        self._curves.move_to_end(key)
        for gate in status.gates:
            if gate.state != "NotApplicable":
                gates.setdefault(gate.name, Curve()).add(_point(gate, status, at))
        while len(self._curves) > self._limit:
            self._curves.popitem(last=False)

    def of(self, key: str) -> dict[str, tuple[CurvePoint, ...]]:
        """The curves of one rollout by gate; empty where nothing was seen of it since the operator started."""
        return {name: curve.points() for name, curve in self._curves.get(key, {}).items()}

    def forget(self, prefix: str) -> None:
        """Drop the curves of a service that is gone."""
        for key in [key for key in self._curves if key.startswith(prefix)]:
            del self._curves[key]


def _point(gate: GateStatus, status: RolloutStatus, at: float) -> CurvePoint:
    return CurvePoint(at, status.step, status.weight, gate.n, gate.k, gate.log_e_value, gate.log_limit)
