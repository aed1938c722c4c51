"""Named tuning policies, for `offramp replay` to compare on equal records.

Every policy is given tuning records and a stream to serve. Those that can be deployed decide about a request without having seen the
requests after it; those that cannot are marked ``hindsight``. :data:`POLICIES` lists them by name.
"""

from __future__ import annotations

import numpy as np

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.policies.base import NO_EXIT, NamedPolicy, Objective, Outcome, PlanInForce, StreamPolicy, Trace
from offramp_core.policies.hindsight import oracle
from offramp_core.policies.planned import certified, evenly_spaced, exact, exits_off, greedy, single_threshold
from offramp_core.records import IndexArray, Records

Policy = NamedPolicy

_LISTED = (
    NamedPolicy("exact", "the plan that saves most on the tuning records within the budget (this project)", exact),
    NamedPolicy(
        "certified", "the exact plan of a quarter, tested on the rest (this project; Learn-then-Test)", certified
    ),
    NamedPolicy("greedy", "Apparate's hill-climb, given all tuning records (SOSP 2024)", greedy),
    NamedPolicy("single-threshold", "one threshold for evenly spaced ramps, tuned to the budget", single_threshold),
    NamedPolicy("exits-off", "the model as it was given", exits_off),
    NamedPolicy("oracle", "each input leaves at its first correct ramp: a ceiling (Apparate)", oracle, hindsight=True),
)
POLICIES: dict[str, NamedPolicy] = {p.name: p for p in _LISTED}


def policy(name: str) -> NamedPolicy:
    """A policy by name.

    Raises
    ------
    InvalidArgumentError
        The name is unknown; the message lists the known ones.
    """
    if name not in POLICIES:
        raise InvalidArgumentError(f"policy {name!r} is unknown; choose from {', '.join(POLICIES)}")
    return POLICIES[name]


def replay_halves(records: Records) -> tuple[Records, Records]:
    """The older half, which policies tune (and certify) on, and the newer half, which they are judged on.

    Rows are ordered by time where it was recorded, else taken to be in order already.

    Raises
    ------
    InvalidRecordsError
        Fewer than two records, or a time that is not finite.
    """
    n = len(records)
    if n < 2:
        raise InvalidRecordsError(
            f"uncertainty has {n} row; a replay needs at least 2, one half to tune on and one to report on"
        )
    if records.time is not None and not np.isfinite(records.time).all():
        row = int(np.flatnonzero(~np.isfinite(records.time))[0])
        raise InvalidRecordsError(f"time[{row}] is {records.time[row]}; seconds must be finite")
    order: IndexArray = np.arange(n) if records.time is None else np.argsort(records.time, kind="stable")
    return records.take(order[: n // 2]), records.take(order[n // 2 :])


__all__ = [
    "NO_EXIT", "POLICIES", "NamedPolicy", "Objective", "Outcome", "PlanInForce", "Policy", "StreamPolicy", "Trace",
    "certified", "evenly_spaced", "exact", "exits_off", "greedy", "oracle", "policy", "replay_halves", "single_threshold",
]  # fmt: skip
