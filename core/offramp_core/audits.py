"""What audits cost: the engine's time beside the plan, after the replies.

One pass makes the label of a request and its record: the fp32 model says what the answer should have been, and every
ramp of every precision says what it would have answered, because the tuner needs them all. The pass is the same
whatever the plan, exits off included: results-only execution compares its answers in the batch already, but a drawn row
runs once more for its record all the same. So at one audit rate the price cancels where plans of a bundle are compared.
While two ramp sets are held, an audit takes a pass for each.
"""

from __future__ import annotations

from offramp_core.errors import InvalidArgumentError
from offramp_core.records import Records


def audit_seconds(records: Records) -> float:
    """One audit alone: the backbone at every recorded precision, and each of their ramps once.

    ``records`` are those of the fp32 chain. Without names of columns nothing tells the ramps that chains share, and
    there is one chain.
    """
    seconds, shared = 0.0, set(records.ramp_ids)
    for chain in (records, *records.others.values()):
        own = [j for j in range(chain.n_ramps) if chain is records or chain.ramp_ids[j] not in shared]
        seconds += chain.costs.total_seconds + float(chain.costs.ramp_seconds[own].sum())
    return seconds


def audit_price(records: Records, *, rate: float) -> float:
    """What audits are expected to take, as a share of the fp32 model's time for all requests.

    At the batch size of the records' costs, which is the smallest measured unless another one was asked for. Audits run
    alone or a few together, so a fleet whose requests run in large batches pays more: what it measures is in
    ``status.measured``.

    Parameters
    ----------
    records : Records
        Of the fp32 chain, with the other precisions.
    rate : float
        Share of requests that are audited, in [0, 1].

    Raises
    ------
    InvalidArgumentError
        The rate is outside [0, 1].
    """
    check_audit_rate(rate)
    return rate * audit_seconds(records) / records.costs.baseline_seconds


def check_audit_rate(rate: float) -> None:
    """Raises :class:`InvalidArgumentError` unless it is a share."""
    if not 0 <= rate <= 1:  # NaN compares false, so it is caught as well
        raise InvalidArgumentError(f"audit rate is {rate}; it is a share of requests, in [0, 1]")
