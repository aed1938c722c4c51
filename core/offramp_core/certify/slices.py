"""Groups with a promise of their own: of requests, or of answers that name a class.

A slice has a budget and must be certified by itself: a plan that is right for everybody on average may fail the few. A
slice that does not pass does not take the plan from the others; its requests must not leave early (a *slice stop*).
Stopping a slice can only lower the disagreement over all requests, because the exact executor answers it, so the
certificate of the plan stands.

A request is in its slice before anything is known of its fate. In which class an answer falls depends on the plan: so
the rows of a class are found anew for every plan, from what each ramp said (docs/decisions/0050).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evidence.one_arm import check_rate
from offramp_core.records import BoolArray, LabelArray, Records

SliceOf = Literal["Request", "Answer"]
_WORDS: dict[SliceOf, str] = {"Request": "slice", "Answer": "class"}


@dataclass(frozen=True, slots=True)
class SliceBudget:
    """Allowed disagreement, in (0, 1), among the requests whose records have ``slice_id``; ``of`` answers, among those
    that name this class."""

    slice_id: int
    budget: float
    of: SliceOf = "Request"

    def __post_init__(self) -> None:
        check_rate(f"budget of {self.title}", self.budget)

    @property
    def title(self) -> str:
        """What people call it: ``slice 7``, ``class 3``."""
        return f"{_WORDS[self.of]} {self.slice_id}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """One slice on the held-out records: ``k`` of ``n`` disagreed, tested against ``budget`` at ``level``. ``of`` as
    in :class:`SliceBudget`.

    Uncertified slices must be stopped. ``needed_more`` labels of the slice would probably change that; None when more
    of the same would not, or when nothing is missing. ``design_effect`` labels of the slice are worth one. ``lost`` is
    the sum of graded losses, None where each disagreement loses all.
    """

    slice_id: int
    budget: float
    level: float
    n: int
    k: int
    p_value: float
    certified: bool
    needed_more: int | None = None
    of: SliceOf = "Request"
    design_effect: float = 1.0
    lost: float | None = None

    @property
    def title(self) -> str:
        """What people call it: ``slice 7``, ``class 3``."""
        return f"{_WORDS[self.of]} {self.slice_id}"

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; rates are decimal strings that read back to the same number."""
        value = {
            _WORDS[self.of]: self.slice_id,
            "budget": repr(self.budget),
            "level": repr(self.level),
            "n": self.n,
            "k": self.k,
            "pValue": repr(self.p_value),
            "certified": self.certified,
        }
        effect = {} if self.design_effect == 1 else {"designEffect": repr(self.design_effect)}
        return {**value, **effect, **({} if self.lost is None else {"lost": repr(self.lost)})}

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> SliceResult:
        of: SliceOf = "Answer" if "class" in value else "Request"
        return cls(
            int(value[_WORDS[of]]),
            float(value["budget"]),
            float(value["level"]),
            int(value["n"]),
            int(value["k"]),
            float(value["pValue"]),
            bool(value["certified"]),
            of=of,
            design_effect=float(value.get("designEffect", 1.0)),
            lost=float(value["lost"]) if "lost" in value else None,
        )


def check_slices(records: Records, slices: Sequence[SliceBudget]) -> None:
    """Refuse slices that these records cannot judge.

    Raises
    ------
    InvalidRecordsError
        The records name no slices, or do not say what was answered.
    InvalidArgumentError
        A slice is named twice.
    """
    if any(s.of == "Request" for s in slices) and records.slice_id is None:
        raise InvalidRecordsError("slice is missing; without it a slice cannot be certified by itself")
    if any(s.of == "Answer" for s in slices) and (records.prediction is None or records.final is None):
        raise InvalidRecordsError("prediction or final is missing; without them a class cannot be certified by itself")
    names = [s.title for s in slices]
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"slices are {names}; name each once")


def in_slice(wanted: SliceBudget | SliceResult, records: Records, answered: LabelArray) -> BoolArray:
    """Rows of a slice, (n,), where ``answered`` (n,) is what a plan answers; only classes depend on it."""
    return np.asarray((records.slice_id if wanted.of == "Request" else answered) == wanted.slice_id)
