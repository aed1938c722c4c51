"""Whether a plan carries every row to the output or drops those that left: one rule for worker and simulator."""

from __future__ import annotations

from offramp_core.bundle import Profile
from offramp_core.plan import Execution

MIN_REGROUP_GAIN = 0.05


def carries_on(execution: Execution, profile: Profile) -> bool:
    """Whether a plan runs results-only on this machine. ``Auto`` regroups when the profile says that a smaller batch is cheaper.

    Compared are the largest measured batch and the measured one nearest to half of it: where dispatch costs
    more than arithmetic both take the same time, and dropping rows saves nothing.
    """
    if execution != "Auto":
        return execution == "ResultsOnly"
    whole = profile.batches[-1]
    if len(profile.batches) == 1:
        return False
    half = min(profile.batches[:-1], key=lambda b: abs(b.batch_size - whole.batch_size / 2))
    return half.chain_seconds + whole.regroup_seconds > (1 - MIN_REGROUP_GAIN) * whole.chain_seconds
