"""Named tuning policies, for `offramp replay` to compare on equal records.

Every policy is given tuning records and a stream to serve. Those that can be deployed decide about a request without
having seen the requests after it; those that cannot are marked ``hindsight``. :data:`POLICIES` lists them by name.

apparate.py           Apparate as published
apparate_artifact.py  Apparate as its public artifact runs it
base.py               what a policy is: a function of tuning records and of a stream
climb.py              the threshold hill-climb of Apparate, on any window of records
common_threshold.py   one threshold for several ramps
every_ramp.py         policies with a ramp at every place, which choose only when an input may leave
hindsight.py          ceilings: what could have been saved by one who knew the stream in advance
online.py             what all policies that learn while they serve have in common
planned.py            policies that choose one plan from the tuning records and keep it
"""

from __future__ import annotations

import numpy as np

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.records import IndexArray, Records
from offramp_lab.policies.apparate import published
from offramp_lab.policies.apparate_artifact import text_loop, vision_loop
from offramp_lab.policies.base import NO_EXIT, NamedPolicy, Objective, Outcome, PlanInForce, StreamPolicy, Trace
from offramp_lab.policies.every_ramp import (
    all_ramps,
    costliest_heads,
    patience,
    tuned_in_hindsight,
    with_a_threshold_each,
    with_one_threshold,
    without_predictions,
)
from offramp_lab.policies.hindsight import offline_optimal, online_optimal, oracle
from offramp_lab.policies.planned import (
    certified,
    evenly_spaced,
    exact,
    exits_off,
    fast_yet_safe,
    greedy,
    lower_precision,
    single_threshold,
    static_small,
    two_layer,
    without_other_precisions,
    without_small_model,
)

Policy = NamedPolicy


def always_shown(_records: Records) -> None:
    """For policies that have something to say without a single ramp."""


_LISTED = (
    NamedPolicy(
        "exact",
        "saves most on the tuning records within the budget, all ramps to choose from (this project)",
        exact,
        refusal=always_shown,
    ),
    NamedPolicy(
        "certified",
        "plans of the oldest records from cautious to bold, tested on the rest (this project; Learn-then-Test)",
        certified,
        refusal=always_shown,
    ),
    NamedPolicy("greedy", "Apparate's hill-climb with all tuning records for its window (arXiv:2312.05385)", greedy),
    NamedPolicy(
        "apparate",
        "climbs on the last 16 requests, adjusts ramps every 128 (SOSP 2024, arXiv:2312.05385)",
        published,
        online=True,
    ),
    NamedPolicy(
        "apparate-artifact",
        "the vision loop of Apparate's public artifact: 4 batches, zero errors (dywsjtu/apparate)",
        vision_loop,
        online=True,
    ),
    NamedPolicy(
        "apparate-artifact-nlp",
        "the text loop of Apparate's public artifact: only erring ramps retuned (dywsjtu/apparate)",
        text_loop,
        online=True,
    ),
    NamedPolicy("single-threshold", "one threshold for evenly spaced ramps, tuned to the budget", single_threshold),
    NamedPolicy(
        "fast-yet-safe",
        "one threshold for evenly spaced ramps, proven by Learn-then-Test (arXiv:2405.20915)",
        fast_yet_safe,
    ),
    NamedPolicy("branchynet", "every ramp, one threshold tuned once (arXiv:1709.01686)", with_one_threshold(all_ramps)),
    NamedPolicy(
        "branchynet+", "every ramp, a threshold each, tuned once (arXiv:2312.05385)", with_a_threshold_each(all_ramps)
    ),
    NamedPolicy(
        "branchynet-opt",
        "every ramp, tuned on the stream itself: hindsight (arXiv:2312.05385)",
        tuned_in_hindsight(all_ramps),
        hindsight=True,
    ),
    NamedPolicy(
        "deebert",
        "the costliest head of every place, one threshold (arXiv:2004.12993)",
        with_one_threshold(costliest_heads),
    ),
    NamedPolicy(
        "deebert+",
        "the costliest head of every place, a threshold each (arXiv:2312.05385)",
        with_a_threshold_each(costliest_heads),
    ),
    NamedPolicy(
        "deebert-opt",
        "the costliest head of every place, tuned on the stream itself: hindsight (arXiv:2312.05385)",
        tuned_in_hindsight(costliest_heads),
        hindsight=True,
    ),
    NamedPolicy(
        "patience",
        "leaves when t ramps in a row repeat the one before (PABEE, arXiv:2006.04152)",
        patience,
        refusal=without_predictions,
    ),
    NamedPolicy("two-layer", "one early answerer before the full model, one threshold (arXiv:2312.05385)", two_layer),
    NamedPolicy("static-small", "a smaller model instead, for every input", static_small, refusal=without_small_model),
    NamedPolicy(
        "lower-precision",
        "the backbone at a lower precision, without exits",
        lower_precision,
        refusal=without_other_precisions,
    ),
    NamedPolicy("exits-off", "the model as it was given", exits_off, refusal=always_shown),
    NamedPolicy(
        "offline-optimal",
        "the best plan for the whole stream: hindsight (arXiv:2312.05385)",
        offline_optimal,
        hindsight=True,
        refusal=always_shown,
    ),
    NamedPolicy(
        "online-optimal",
        "the best plan for every 1,024 requests: hindsight (arXiv:2312.05385)",
        online_optimal,
        online=True,
        hindsight=True,
    ),
    NamedPolicy(
        "oracle",
        "each input leaves at its cheapest correct ramp: hindsight, no plan does it (arXiv:2312.05385)",
        oracle,
        hindsight=True,
    ),
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
    "NO_EXIT",
    "POLICIES",
    "NamedPolicy",
    "Objective",
    "Outcome",
    "PlanInForce",
    "Policy",
    "StreamPolicy",
    "Trace",
    "evenly_spaced",
    "policy",
    "replay_halves",
]
