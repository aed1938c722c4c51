"""Whether a plan carries every row to the output or drops those that left: one rule for worker and simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp_core.bundle import Profile
from offramp_core.plan import Execution

MIN_REGROUP_GAIN = 0.05


def carries_on(execution: Execution, profile: Profile) -> bool:
    """Whether a plan runs results-only on this machine. ``Auto`` does where the profile says that smaller batches are
    no cheaper.

    Compared is each measured batch with the measured one nearest to half of it: where dispatch costs more than
    arithmetic both take the same time, and dropping rows saves nothing. It is asked of the plan and not of each batch,
    because results-only compares every request with the reference: done for some sizes only, the labels would be of the
    requests that came in such batches.
    """
    if execution != "Auto":
        return execution == "ResultsOnly"
    if len(profile.batches) == 1:
        return False
    return not any(_halving_pays(profile, number) for number in range(1, len(profile.batches)))


def _halving_pays(profile: Profile, number: int) -> bool:
    whole = profile.batches[number]
    half = min(profile.batches[:number], key=lambda b: abs(b.batch_size - whole.batch_size / 2))
    return half.chain_seconds + whole.regroup_seconds <= (1 - MIN_REGROUP_GAIN) * whole.chain_seconds


@dataclass(frozen=True, slots=True)
class Regrouping:
    """When a batch that lost rows is made smaller: where the rest of the way is then cheaper by more than regrouping
    costs.
    """

    #: By stage, by rows: seconds from the end of the stage to the output, where nobody leaves any more.
    rest: Sequence[Sequence[float]]
    #: By rows carried before: seconds of dropping some.
    regroup: Sequence[float]

    @classmethod
    def of(cls, seconds: Sequence[Sequence[float]], regroup: Sequence[float]) -> Regrouping:
        """From what each stage takes, by rows; the last one runs to the output."""
        rest = np.cumsum(np.array(seconds)[::-1], axis=0)[::-1][1:]
        return cls(rest.tolist(), regroup)

    def pays(self, stage: int, *, carried: int, waiting: int) -> bool:
        """Whether to go on with the ``waiting`` rows only, after ``stage`` (from 0) had ``carried``. More rows than
        priced: yes."""
        rest = self.rest[stage]
        return carried >= len(rest) or rest[waiting] + self.regroup[carried] < rest[carried]
