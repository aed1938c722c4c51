"""How many requests to audit.

Labels are what certificates are made of, and they cost spare capacity: an audited request runs to the end
after its reply has left. Rates move on a coarse ladder, because every change is a new epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.certify import all_streams_differ, dependence
from offramp_core.control.objects import TuningStatus
from offramp_core.control.snapshot import Load
from offramp_core.protocol import ArmCounts
from offramp_core.records import IN_A_ROW, UNKNOWN_REPEATS, IndexArray, Records, SecondsArray

QUIET_RATE = 0.02
LABELS_PER_SECOND = 1.0  # when traffic is low, 2 % of it would leave the detector without labels for minutes
_LADDER = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
FAR = 2  # steps of the ladder, a factor of four or five: by that much load must have changed before a rate follows
_SPARE = 0.7  # audits may fill the fleet up to this utilisation


def quiet_rate(load: Load) -> float:
    """The rate while nothing is being decided: 2 %, more when traffic is low, never beyond spare capacity."""
    if load.request_rate <= 0:
        return 1.0
    wanted = max(QUIET_RATE, min(1.0, LABELS_PER_SECOND / load.request_rate))
    return _step_at_most(max(QUIET_RATE, min(wanted, _affordable(load))))


def followed_rate(rate: float, load: Load) -> float:
    """The quiet rate that was chosen, or another where load has left it behind by two steps of the ladder.

    Downwards at once, because audits that nothing is spare for hold up requests. Upwards by the busiest moments of the
    last hour: traffic that comes in bursts must not bring an epoch with each pause.
    """
    lower = quiet_rate(load)
    if _step(lower) <= _step(rate) - FAR:
        return lower
    if min(load.peak_rate, load.request_rate) <= 0:
        return rate
    busy = load.utilisation * load.peak_rate / load.request_rate
    higher = quiet_rate(Load(request_rate=load.peak_rate, utilisation=min(1.0, busy)))
    return higher if _step(higher) >= _step(rate) + FAR else rate


def expected_rate(load: Load) -> float:
    """The quiet rate that a plan will probably be audited at once it serves: 2 %, or more where the busiest moments of
    the last hour ask for it.

    A pause between two pulls, in which any rate could be afforded, says nothing about that.
    """
    return followed_rate(QUIET_RATE, load)


def eager_rate(load: Load, *, share: float = 1.0) -> float:
    """The rate while a decision waits for labels: as high as spare capacity allows, up to every request.

    ``share`` of the traffic is audited at this rate: a canary's few batches can be audited more than everything could.
    """
    return _step_at_most(min(1.0, max(_LADDER[1], _affordable(load)) / share))


# Records with which a look for scenes of many unnamed sources shows most of them: where the budget allows so many
# mistakes among them. No more than a pool keeps.
MISTAKES_LOOKED_AT, MOST_LOOKED_AT = 50, 20_000
SLIGHT = 4  # times as many, with which scenes show clearly
NEARLY_ALL = 0.9  # share of records that name their sources
MOST_OF_ONE = 0.3  # of the records between its first and its last: a name with more may be a gateway's
# Of a name's requests, directly after three of its own: gateways take turns. Of two sources of one worker that send
# when they like no more than 0.11 are, of those that send two or three requests at once hardly any.
MOST_IN_TURNS = 0.15
FEW = 20  # records of a name, with fewer of which it is judged by what all names do more than by its own
CLUSTERING_RECORDS = 5000  # newest ones, that tell how much requests resemble each other beside a pin
DENSE = 0.5  # share of requests with a label from which on a sample shows whether their neighbors resemble them


def clustering(before: float, *, design_effect: float, sampled: float) -> float:
    """How much more than one label it takes for one's worth if every request has one, from a sample in which the share
    ``sampled`` had.

    Neighbors that resemble each other are both in a sample as often as it is dense. A thin sample that shows nothing
    says little about them: what is known of a denser one stays.
    """
    seen = (design_effect - 1) / sampled
    return round(seen if sampled >= DENSE else max(before, seen), 2)


def measured_clustering(records: Records, *, known: float, budget: float, wary: bool) -> float | None:
    """:func:`clustering` by the records where nobody tunes, never less than what is ``known``; None where they cannot
    say.

    Those of densely audited requests show what neighbors have in common. An equal-weight sample of all of them reaches
    back beyond a canary, and shows what lasts longer than it.
    """
    for sample in (records.dense(DENSE), records.equal_weight()):
        rows = records.take(np.flatnonzero(sample)[-CLUSTERING_RECORDS:])
        found = dependence(rows, budget=budget, wary=wary)
        if found is None:
            return None
        known = max(known, clustering(known, design_effect=found.design_effect, sampled=rows.sampled()))
    return known


def records_for_scenes(records: Records | None, *, budget: float) -> int:
    """How many records it takes before a look for scenes may let a plan be certified, or accepted without a
    certificate; 0 where nearly all name their sources, which tells scenes apart at once."""
    if records is not None and not all_streams_differ(records) and _named_share(records) >= NEARLY_ALL:
        return 0
    return min(MOST_LOOKED_AT, math.ceil(MISTAKES_LOOKED_AT / budget))


def _named_share(records: Records) -> float:
    """Share of the newest records whose name may be that of one source among several.

    A name that most requests have while it is there may be that of a gateway, or of one that is renamed now and then,
    with many sources behind it. So may one whose requests often follow three of its own directly, as workers report or
    among the records: gateways take turns.
    """
    if records.stream is None or not len(records):
        return 0.0
    stream = records.stream[-CLUSTERING_RECORDS:]
    names, first, row, count = np.unique(stream, return_index=True, return_inverse=True, return_counts=True)
    last = len(stream) - 1 - np.unique(stream[::-1], return_index=True)[1]
    of_all = (count - 1) / np.maximum(1, last - first)
    in_turns = _in_turns(row, None if records.time is None else records.time[-CLUSTERING_RECORDS:])
    if records.repeats is not None:
        in_turns = np.maximum(in_turns, _reported(row, records.repeats[-CLUSTERING_RECORDS:]))
    return float(((names != 0) & (of_all <= MOST_OF_ONE) & (in_turns <= MOST_IN_TURNS))[row].mean())


def _reported(name: IndexArray, repeats: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    """Share of each name's requests that repeat it as workers say; a name with few of these is judged by what all do. 0
    where no worker says it."""
    known = repeats < UNKNOWN_REPEATS
    count = np.bincount(name[known], minlength=name.max() + 1)
    repeated = np.bincount(name[known], weights=repeats[known], minlength=name.max() + 1)
    return np.asarray((repeated + FEW * repeated.sum() / max(1, count.sum())) / (count + FEW))


def _in_turns(name: IndexArray, time: SecondsArray | None) -> npt.NDArray[np.float64]:
    """Share of each name's requests that come directly after three of its own; rows of one ``time`` are one request."""
    begins = np.ones(len(name), dtype=np.bool_)
    if time is not None:
        begins[1:] = (np.diff(name) != 0) | (np.diff(time) != 0)
    of = name[begins]
    in_a_row = np.all([of[IN_A_ROW:] == of[i : i - IN_A_ROW] for i in range(IN_A_ROW)], axis=0)
    return np.bincount(of[IN_A_ROW:][in_a_row], minlength=name.max() + 1) / np.bincount(of)


def records_for_slight_scenes(records: Records | None, *, budget: float) -> int:
    """With fewer records than that, any sign of scenes counts."""
    return min(MOST_LOOKED_AT, SLIGHT * records_for_scenes(records, budget=budget))


@dataclass(frozen=True, slots=True)
class Audits:
    """``k`` of ``n`` audits disagreed, as if the share ``rate`` of all requests had been audited."""

    n: int = 0
    k: int = 0
    rate: float = 1.0


def at_one_rate(counts: Iterable[ArmCounts]) -> Audits:
    """The audits of all epochs, each by the requests it stands for.

    Rates fall when load rises: summed as they are, the audits of quiet nights would outnumber those of the days on
    which most requests come. The rate is the harmonic mean of those of the epochs, by requests. Audits of an epoch with
    a higher one count as many as would have been drawn at it; those of one with a lower one are no more than they are,
    so that a few of them never decide alone. Evidence from whole numbers is convex in them, so counting the mean of
    what might have been drawn overstates none.
    """
    epochs: dict[int, tuple[int, int, int, int]] = {}
    for c in counts:
        requests, drawn, n, k = epochs.get(c.epoch, (0, 0, 0, 0))
        epochs[c.epoch] = requests + c.requests, drawn + c.drawn, n + c.audited, k + c.disagreements
    known = [(drawn / requests, n, k) for requests, drawn, n, k in epochs.values() if n and 0 < drawn <= requests]
    if not known:
        return Audits()
    rate = sum(n / r for r, n, _ in known) / sum(n / r**2 for r, n, _ in known)
    weights = [min(1.0, rate / r) for r, _, _ in known]
    n, k = (round(sum(w * of[i] for w, of in zip(weights, known, strict=True))) for i in (1, 2))
    return Audits(n, k, rate)


def worth_one(tuning: TuningStatus, *, rate: float) -> float:
    """The design effect of audits where the share ``rate`` of requests is audited."""
    return round(1 + tuning.clustering * min(1.0, rate), 2)


def _affordable(load: Load) -> float:
    """An audit costs about one request without exits, so serving at utilisation u leaves room for (spare - u) / u."""
    return 1.0 if load.utilisation <= 0 else max(0.0, min(1.0, (_SPARE - load.utilisation) / load.utilisation))


def _step_at_most(rate: float) -> float:
    return _LADDER[_step(rate)]


def _step(rate: float) -> int:
    """The highest step that is not above a rate."""
    return max(i for i, step in enumerate(_LADDER) if step <= max(rate, _LADDER[0]) + 1e-9)
